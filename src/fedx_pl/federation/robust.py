"""Rules for rounds in which well-formed updates may be wrong or malicious.

docs/robustness.md compares them. All keep the updates of a round until its end, since outliers are
known only then: memory is clients per round times the size of the model. They work on a chunk of
values at a time, without a second copy.

Clipping and Krum go by distances, and BatchNorm's statistics move tens of times more than the
weights (measured in docs/robustness.md): the norm of both together would hide an attack on the
weights. So each kind of tensor is treated by itself: weights, statistics, and what a regularizer
sends.
"""

import inspect
import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fedx_pl.federation.aggregate import Aggregator, FedAvg, narrow
from fedx_pl.federation.options import MAX_IMAGES, RULES, AggregateOptions
from fedx_pl.federation.round import GlobalState
from fedx_pl.methods.base import State
from fedx_pl.options import OptionError

MEDIAN = 0.5  # share to trim: all but the middle one or two
_CHUNK = 2**18  # values of all clients together that are processed at once
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class _Held(NamedTuple):
    client: int
    num_images: int
    state: State


class _Holding(Aggregator):
    """Keeps all updates until a subclass combines them."""

    @cached_property
    def _held(self) -> list[_Held]:
        return []

    def _take(self, state: Mapping[str, Tensor], num_images: int, client: int) -> None:
        self._held.append(
            _Held(client, num_images, {name: state[name].detach() for name in self._reference})
        )

    def _updates(self) -> list[_Held]:
        """The updates by client, since the order of arrival must not matter."""
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
        # The remark about image counts is the same for each kind.
        self.remarks[client] = before if text in before else f"{before}; {text}"

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
    """Averages each value over clients, without the k largest and the k smallest.

    k is the share `trim` of the clients, rounded up: a tenth of five clients is one. At least one
    value is left. All clients have the same weight, whatever number of images they claim to own.

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
        super().__init__(reference, max_images, changes=changes)
        self.trim = trim

    def _combine(self) -> State:
        updates = self._updates()
        count = self.num_clients
        share = math.ceil(self.trim * count - 1e-9)  # 0.07 * 100 is a little more than 7.
        cut = min(share, (count - 1) // 2)
        result = {name: torch.empty_like(reference) for name, reference in self._reference.items()}
        for name, target in result.items():
            for rows, values in _chunks([held.state[name] for held in updates]):
                kept = values.sort(dim=0).values[cut : count - cut]
                torch.atleast_1d(target)[rows] = narrow(
                    kept.mean(dim=0, dtype=torch.float64), target
                )
        return result


class Median(TrimmedMean):
    """Takes the median of each value over clients."""

    def __init__(
        self,
        reference: Mapping[str, Tensor],
        max_images: int = MAX_IMAGES,
        *,
        changes: Collection[str] = (),
    ) -> None:
        super().__init__(reference, MEDIAN, max_images, changes=changes)


class NormClipping(_Holding):
    """FedAvg of updates whose changes are clipped to `clip` times the round's median norm.

    ``d``, the change of an update from the global state, becomes ``d min(1, bound / |d|)``. Half of
    the clients would have to lie to move the bound. What a regularizer sends is a change already.

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
        super().__init__(reference, max_images, changes=changes)
        self.clip = clip

    def _combine(self) -> State:
        updates = self._updates()
        result: State = {}
        for kind, names in self._kinds().items():
            norms = [self._norm(held.state, names) for held in updates]
            # With two clients, the smaller norm counts, since one may be the attacker.
            bound = self.clip * statistics.median_low(norms)
            clipped = []
            for held, norm in zip(updates, norms, strict=True):
                if norm > bound:
                    held = held._replace(state=self._shortened(held.state, names, bound / norm))
                    self._remark(
                        held.client,
                        f"the change of its {kind} was clipped from norm {norm:.3g} to {bound:.3g}",
                    )
                clipped.append(held)
            result |= self._mean(names, clipped)
        return {name: result[name] for name in self._reference}

    def _norm(self, state: State, names: Sequence[str]) -> float:
        floating = (name for name in names if self._reference[name].is_floating_point())
        return math.sqrt(float(sum(self._change(state, name).square().sum() for name in floating)))

    def _shortened(self, state: State, names: Sequence[str], scale: float) -> State:
        ends = {name: self._start(name) + scale * self._change(state, name) for name in names}
        return {name: narrow(end, self._reference[name]) for name, end in ends.items()}

    def _change(self, state: State, name: str) -> Tensor:
        return state[name].double() - self._start(name)

    def _start(self, name: str) -> Tensor:
        start = self._reference[name].double()
        return torch.zeros_like(start) if name in self._changes else start


class MultiKrum(_Holding):
    """FedAvg of the n - f updates with the closest neighbors (Blanchard et al., NeurIPS 2017).

    The score of an update is the sum of its n - f - 2 smallest squared distances to others; the f
    updates with the largest scores are left out, where f is `byzantine`. Distances do not depend on
    image counts, the mean of the selected updates does.
    """

    def __init__(
        self,
        reference: Mapping[str, Tensor],
        byzantine: int,
        max_images: int = MAX_IMAGES,
        *,
        changes: Collection[str] = (),
    ) -> None:
        super().__init__(reference, max_images, changes=changes)
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
        updates = self._updates()
        count = self.num_clients
        squared = torch.zeros(
            count, count, dtype=torch.float64, device=self._reference[names[0]].device
        )
        for name in names:
            if not self._reference[name].is_floating_point():
                continue
            for _, values in _chunks([held.state[name] for held in updates]):
                flat = values.flatten(1).double()
                # Matrix products would be faster, but lose small differences of large weights.
                exact = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")
                squared += exact.square()
        # The smallest is the distance to itself.
        return squared.sort(dim=1).values[:, 1 : count - self.byzantine - 1].sum(dim=1)


def _chunks(tensors: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Yields some rows of one tensor at a time: which rows, and the clients' values.

    The values have the shape (clients, rows, ...).
    """
    rows = [torch.atleast_1d(tensor) for tensor in tensors]
    count = rows[0].shape[0]
    step = max(1, _CHUNK * count // max(1, rows[0].numel() * len(rows)))
    for start in range(0, count, step):
        part = slice(start, start + step)
        yield part, torch.stack([tensor[part] for tensor in rows])


def make_rule(
    options: AggregateOptions, reference: GlobalState, rule: type[Aggregator] | None = None
) -> Aggregator:
    """Makes the rule of one round.

    Args:
        options: its settings, and its name if ``rule`` is not given.
        reference: the state that the round starts from.
        rule: a user's class, made with those options that its ``__init__`` has by name.
    """
    if rule is None and options.rule not in RULES:
        raise OptionError(
            "rule", options.rule, "is not known", " or ".join(RULES), AggregateOptions
        )
    kind = rule or RULES[options.rule]
    common = ("reference", "max_images", "changes")
    names = [name for name in inspect.signature(kind).parameters if name not in common]
    settings = {name: getattr(options, name) for name in names if hasattr(options, name)}
    made = kind(
        reference.tensors(),
        max_images=options.max_images,
        changes=reference.server_names(),
        **settings,
    )
    made.max_growth = options.max_growth
    made.max_share = options.max_share
    return made
