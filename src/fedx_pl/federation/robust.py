"""Rules for rounds in which some well formed updates may be wrong or malicious; docs/robustness.md compares them.

All keep the updates of a round until its end, so memory is clients per round times the size of the model: what is far
off can only be told when all are there. A chunk of values at a time is worked on, no second copy of them is made.

Clipping and Krum go by distances, and BatchNorm's statistics move by tens of times more than the weights (measured in
docs/robustness.md): an attack on the weights would not show in the norm of the two together. So they treat each kind of
tensor by itself: weights, statistics, and what a regularizer's clients send to its server.
"""

import inspect
import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedx_pl.federation.aggregate import Aggregator, FedAvg, narrow
from fedx_pl.federation.options import MAX_IMAGES, RULES, AggregateOptions
from fedx_pl.federation.round import GlobalState
from fedx_pl.methods.base import State
from fedx_pl.options import OptionError

MEDIAN = 0.5  # As a share to trim: all but the middle one or two.
_CHUNK = 2**18  # Values, of all clients together, that are looked at in one go.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class _Held(NamedTuple):
    client: int
    num_images: int
    state: State


class _Holding(Aggregator):
    """Keeps all updates; a subclass combines them."""

    def __init__(
        self, reference: Mapping[str, Tensor], max_images: int, changes: Collection[str]
    ) -> None:
        super().__init__(reference, max_images, changes=changes)
        self._held: list[_Held] = []

    def _take(self, state: Mapping[str, Tensor], num_images: int, client: int) -> None:
        self._held.append(
            _Held(client, num_images, {name: state[name].detach() for name in self._reference})
        )

    def _updates(self) -> list[_Held]:
        """By client: the order in which they came must not show."""
        return sorted(self._held, key=lambda held: held.client)

    def _kinds(self) -> dict[str, list[str]]:
        """The names of the tensors of each kind that occurs."""
        kinds: dict[str, list[str]] = {}
        for name in self._reference:
            kinds.setdefault(self._kind(name), []).append(name)
        return kinds

    def _kind(self, name: str) -> str:
        if name in self._changes:
            return "regularizer's tensors"
        return "statistics" if name.rpartition(".")[2] in _STATISTICS else "weights"

    def _remark(self, client: int, text: str) -> None:
        before = self.remarks.get(client, text)
        self.remarks[client] = (
            before if text in before else f"{before}; {text}"
        )  # Of counts, each kind says the same.

    def _mean(self, names: Sequence[str], updates: Sequence[_Held]) -> State:
        """FedAvg of some tensors of some updates."""
        average = FedAvg({name: self._reference[name] for name in names}, self._max_images)
        average.max_share = self.max_share
        for held in updates:
            average.add({name: held.state[name] for name in names}, held.num_images, held.client)
        result = average.result()
        for client, text in average.remarks.items():
            self._remark(client, text)
        return result


class TrimmedMean(_Holding):
    """For each value the mean of the clients' without the k largest and the k smallest; at the most, the median.

    k is the share of the clients, rounded up: a tenth of five clients is one, not none. At least one value is left.
    Clients count alike, however many images they claim to own.

    Example:
        >>> rule = TrimmedMean({"w": torch.zeros(1)}, trim=0.2)
        >>> for value in (1.0, 2.0, 3.0, 7.0, 1000.0):
        ...     rule.add({"w": torch.tensor([value])}, num_images=1)
        >>> rule.result()["w"].item()
        4.0
    """

    def __init__(
        self,
        reference: Mapping[str, Tensor],
        trim: float,
        max_images: int = MAX_IMAGES,
        *,
        changes: Collection[str] = (),
    ) -> None:
        """Starts without updates.

        Args:
            reference: the current global state.
            trim: share of the clients left out at either end; `MEDIAN` leaves one, or the mean of the middle two.
            max_images: more than any client can own.
            changes: see `Aggregator`.
        """
        super().__init__(reference, max_images, changes)
        self.trim = trim

    def _combine(self) -> State:
        updates, count = self._updates(), self.num_clients
        cut = min(
            math.ceil(self.trim * count - 1e-9), (count - 1) // 2
        )  # 0.07 * 100 is a little more than 7.
        result = {name: torch.empty_like(reference) for name, reference in self._reference.items()}
        for name, target in result.items():
            for rows, values in _chunks([held.state[name] for held in updates]):
                kept = values.sort(dim=0).values[cut : count - cut]
                torch.atleast_1d(target)[rows] = narrow(
                    kept.mean(dim=0, dtype=torch.float64), target
                )
        return result


class Median(TrimmedMean):
    """For each value the middle one of the clients', or the mean of the middle two."""

    def __init__(
        self,
        reference: Mapping[str, Tensor],
        max_images: int = MAX_IMAGES,
        *,
        changes: Collection[str] = (),
    ) -> None:
        """Starts without updates; the arguments are those of `Aggregator`."""
        super().__init__(reference, MEDIAN, max_images, changes=changes)


class NormClipping(_Holding):
    """FedAvg of updates none of which moves by more than a multiple of the round's median norm.

    ``d``, the way of an update from the global state, becomes ``d min(1, bound / |d|)``. Half of the clients would have
    to lie to move the bound. What a regularizer's clients send is a change already, so its way starts at zero.

    Example:
        >>> rule = NormClipping({"w": torch.zeros(1)}, clip=2)
        >>> for value in (1.0, 1.0, 1000.0):
        ...     rule.add({"w": torch.tensor([value])}, num_images=1)
        >>> rule.result()["w"].item()  # (1 + 1 + 2) / 3
        1.3333333730697632
    """

    def __init__(
        self,
        reference: Mapping[str, Tensor],
        clip: float,
        max_images: int = MAX_IMAGES,
        *,
        changes: Collection[str] = (),
    ) -> None:
        """Starts without updates.

        Args:
            reference: the current global state, where the updates started from.
            clip: the bound, in median norms.
            max_images: more than any client can own.
            changes: see `Aggregator`.
        """
        super().__init__(reference, max_images, changes)
        self.clip = clip

    def _combine(self) -> State:
        updates = self._updates()
        result: State = {}
        for kind, names in self._kinds().items():
            norms = [self._norm(held.state, names) for held in updates]
            bound = self.clip * statistics.median_low(
                norms
            )  # Of two clients the smaller: one may be the attacker.
            fitted = []
            for held, norm in zip(updates, norms, strict=True):
                if norm > bound:
                    held = held._replace(state=self._shortened(held.state, names, bound / norm))
                    self._remark(
                        held.client,
                        f"the change of its {kind} was clipped from norm {norm:.3g} to {bound:.3g}",
                    )
                fitted.append(held)
            result |= self._mean(names, fitted)
        return {name: result[name] for name in self._reference}

    def _norm(self, state: State, names: Sequence[str]) -> float:
        ways = (
            self._way(state, name) for name in names if self._reference[name].is_floating_point()
        )
        return math.sqrt(float(sum(way.square().sum() for way in ways)))

    def _shortened(self, state: State, names: Sequence[str], scale: float) -> State:
        ends = {name: self._start(name) + scale * self._way(state, name) for name in names}
        return {name: narrow(end, self._reference[name]) for name, end in ends.items()}

    def _way(self, state: State, name: str) -> Tensor:
        return state[name].double() - self._start(name)

    def _start(self, name: str) -> Tensor:
        start = self._reference[name].double()
        return torch.zeros_like(start) if name in self._changes else start


class MultiKrum(_Holding):
    """FedAvg of the n - f updates that have the closest neighbours (Blanchard et al., NeurIPS 2017).

    The score of an update is the sum of its n - f - 2 smallest squared distances to others; the f with the largest are
    left out. The distances do not depend on image counts, the mean of the selected does.
    """

    def __init__(
        self,
        reference: Mapping[str, Tensor],
        byzantine: int,
        max_images: int = MAX_IMAGES,
        *,
        changes: Collection[str] = (),
    ) -> None:
        """Starts without updates.

        Args:
            reference: the current global state.
            byzantine: f, how many clients may be bad; a round needs 2 f + 3 updates.
            max_images: more than any client can own.
            changes: see `Aggregator`.
        """
        super().__init__(reference, max_images, changes)
        self.byzantine = byzantine

    def _combine(self) -> State:
        updates = self._updates()
        result: State = {}
        if self.num_clients < 2 * self.byzantine + 3:
            problem = (
                f"with {{rule}}=krum needs {2 * self.byzantine + 3} good updates, "
                f"and there are {self.num_clients}"
            )
            advice = "a smaller {byzantine}, or {rule}=median"
            raise OptionError("byzantine", self.byzantine, problem, advice, AggregateOptions)
        for kind, names in self._kinds().items():
            order = self._scores(names).argsort(stable=True).tolist()
            kept = self.num_clients - self.byzantine
            result |= self._mean(names, [updates[i] for i in order[:kept]])
            for i in order[kept:]:
                self._remark(updates[i].client, f"krum left out its {kind}")
        return {name: result[name] for name in self._reference}

    def _scores(self, names: Sequence[str]) -> Tensor:
        updates, count = self._updates(), self.num_clients
        squared = torch.zeros(
            count, count, dtype=torch.float64, device=self._reference[names[0]].device
        )
        for name in names:
            if not self._reference[name].is_floating_point():
                continue
            for _, values in _chunks([held.state[name] for held in updates]):
                flat = values.flatten(1).double()
                # The faster way by products would lose the small differences of large weights.
                exact = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")
                squared += exact.square()
        # The first is the distance to itself.
        return squared.sort(dim=1).values[:, 1 : count - self.byzantine - 1].sum(dim=1)


def _chunks(tensors: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """The clients' values of one tensor, some rows at a time: which rows, and their values (clients, rows, ...)."""
    rows = [torch.atleast_1d(tensor) for tensor in tensors]
    count = rows[0].shape[0]
    step = max(1, _CHUNK * count // max(1, rows[0].numel() * len(rows)))
    for start in range(0, count, step):
        part = slice(start, start + step)
        yield part, torch.stack([tensor[part] for tensor in rows])


def make_rule(
    options: AggregateOptions, reference: GlobalState, rule: type[Aggregator] | None = None
) -> Aggregator:
    """A rule for one round.

    Args:
        options: its settings, and its name unless it is given.
        reference: the state that the round starts from.
        rule: a class of one's own, made with those of the options that its ``__init__`` asks for by name.
    """
    if rule is None and options.rule not in RULES:
        raise OptionError(
            "rule", options.rule, "is not known", " or ".join(RULES), AggregateOptions
        )
    kind = rule or RULES[options.rule]
    asked = [
        name
        for name in inspect.signature(kind).parameters
        if name not in ("reference", "max_images", "changes")
    ]
    settings = {name: getattr(options, name) for name in asked if hasattr(options, name)}
    made = kind(
        reference.tensors(),
        max_images=options.max_images,
        changes=reference.server_names(),
        **settings,
    )
    made.max_growth, made.max_share = options.max_growth, options.max_share
    return made
