"""Aggregation: clients' weights become the new global weights.

`FedAvg` trusts every well-formed update. `robust.py` has rules for federations where a client may
lie.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from fedx_pl.errors import short
from fedx_pl.federation.options import MAX_IMAGES
from fedx_pl.methods.base import State

STATISTICS = ("running_mean", "running_var")  # They may grow a lot in the first round.
# Larger BatchNorm statistics would take hundreds of steps to be forgotten, and 3e38 is never
# forgotten. Those of 16-bit images that are not normalized stay well below.
MAX_STATISTICS = {"running_mean": 1e6, "running_var": 1e12}
MAX_COUNT = 2**31  # by which a counter may change in a round
# The smallest share of the global weights that an update's weights still contain. Training keeps
# most of them (docs/robustness.md has what we measured), and only weight decay makes the share
# small, to exp(-lr decay steps / (1 - momentum)). Weights that were shrunk, reversed or replaced
# contain less, or a negative share.
LEAST_KEPT = 0.01
# A layer that is a smaller part of the weights' length may turn round: it may have begun at zero.
LARGE_LAYER = 0.01
STRAIGHT = 0.5  # cosine to the way back to zero from which on a layer's move counts as such
BACKBONE = "backbone."  # prefix of the names of the encoder's tensors


class BadUpdate(Exception):
    """A client's update that must not be averaged; the message says why."""


class Aggregator:
    """The base of all rules: checks the updates of a round and combines them into one state."""

    def __init__(
        self,
        reference: Mapping[str, Tensor],
        max_images: int = MAX_IMAGES,
        *,
        changes: Collection[str] = (),
    ) -> None:
        """Starts without updates.

        Args:
            reference: the current global state; every update must match its names, shapes and
                dtypes.
            max_images: a client that claims more images is refused.
            changes: names of tensors that clients send as changes, such as SCAFFOLD's control
                variates.
        """
        self._changes = frozenset(changes)
        self._reference = {name: tensor.detach() for name, tensor in reference.items()}
        self._max_images = max_images
        self.max_growth = 0.0  # An update whose weights grew by this factor is refused; 0: none.
        self.max_share = 1.0  # the largest share of the images that one client may count for
        self.num_images = 0
        self.num_clients = 0
        # By client, set by `result`: how the rule changed an update.
        self.remarks: dict[int, str] = {}

    def add(self, state: Mapping[str, Tensor], num_images: int, client: int = 0) -> None:
        """Adds the update of one client.

        Args:
            state: its shared state after local training.
            num_images: how many images it owns, which is its weight.
            client: its number.

        Raises:
            BadUpdate: names, shapes or dtypes differ, a value is NaN or infinite, a statistic is
                impossible, the weights are far from the reference, or ``num_images`` is not a
                number of images. The update is not added.
        """
        norms = self._check(state, num_images)
        if self.max_growth:
            self._check_growth(state, norms)
        self._take(state, num_images, client)
        self.num_images += num_images
        self.num_clients += 1

    def result(self) -> State:
        """The new state in the dtypes of the reference; integers are rounded."""
        if not self.num_clients:
            raise ValueError("no update was added")
        self.remarks = {}
        return self._combine()

    @cached_property
    def _reference_length(self) -> float:
        return max(_length(_norms(self._floating(self._reference))), 1e-12)

    def _check_growth(self, state: Mapping[str, Tensor], norms: Mapping[str, float]) -> None:
        """Raises `BadUpdate` if the weights are far from the reference.

        The first two checks together bound the distance: with max_growth=3, to 3.2 reference
        lengths.
        """
        if (growth := _length(norms) / self._reference_length) > self.max_growth:
            raise BadUpdate(
                f"its weights are {growth:.3g} times as long, "
                f"aggregate.max_growth={self.max_growth:g}"
            )
        if not (names := list(self._squares)):
            return
        products = torch.stack(
            [(state[name] * self._reference[name]).sum().double() for name in names]
        ).tolist()
        along = dict(zip(names, products, strict=True))
        for start, what in (("", "weights"), (BACKBONE, "backbone")):
            group = [name for name in names if name.startswith(start)]
            self._require_kept(what, group, along)
        for name in self._large_layers:
            # A mean of layers of which one went straight back can be zero, and such a network sees
            # nothing. Training and noise move a layer mostly sideways, and may take it far.
            squared = self._squares[name]
            moved = math.sqrt(max(squared - 2 * along[name] + norms[name] ** 2, 0.0))
            if squared - along[name] > STRAIGHT * math.sqrt(squared) * moved:
                self._require_kept(name, [name], along)

    def _require_kept(self, what: str, names: Sequence[str], along: Mapping[str, float]) -> None:
        squared = math.fsum(self._squares[name] for name in names)
        if squared <= 1e-24:
            return
        if (kept := math.fsum(along[name] for name in names) / squared) < LEAST_KEPT:
            raise BadUpdate(
                f"its {what} kept {kept:.3g} of the global ones, possible is {LEAST_KEPT} or more"
            )

    @cached_property
    def _large_layers(self) -> list[str]:
        least = LARGE_LAYER**2 * math.fsum(self._squares.values())
        return [
            name
            for name, squared in self._squares.items()
            if self._reference[name].dim() > 1 and squared >= least
        ]

    @cached_property
    def _squares(self) -> dict[str, float]:
        """The squared length of each of the reference's weights, by name."""
        weights = {
            name: tensor
            for name, tensor in self._floating(self._reference).items()
            if name not in self._changes and not name.endswith(STATISTICS)
        }
        return {name: norm**2 for name, norm in _norms(weights).items()}

    def _floating(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: state[name]
            for name, tensor in self._reference.items()
            if tensor.is_floating_point()
        }

    def _take(self, state: Mapping[str, Tensor], num_images: int, client: int) -> None:
        raise NotImplementedError

    def _combine(self) -> State:
        raise NotImplementedError

    def _check(self, state: Mapping[str, Tensor], num_images: int) -> dict[str, float]:
        """Raises `BadUpdate`, or returns the norm of each floating tensor."""
        if type(num_images) is not int or not 0 < num_images <= self._max_images:
            raise BadUpdate(
                f"it claims {num_images!r} images, possible are 1 to {self._max_images}"
            )
        if missing := self._reference.keys() - state.keys():
            raise BadUpdate(f"{len(missing)} tensors are missing, e.g. {min(missing)}")
        if extra := state.keys() - self._reference.keys():
            # Such a name is the client's own: it may be long, or hold what a terminal obeys.
            name = short(min(extra)).encode("unicode_escape").decode()
            raise BadUpdate(f"{len(extra)} tensors are unknown, e.g. {name}")
        for name, reference in self._reference.items():
            tensor = state[name]
            if tensor.shape != reference.shape:
                raise BadUpdate(
                    f"{name} has shape {tuple(tensor.shape)}, expected {tuple(reference.shape)}"
                )
            if tensor.dtype != reference.dtype:
                raise BadUpdate(f"{name} is {tensor.dtype}, expected {reference.dtype}")
        floating = self._floating(state)
        for name in self._reference.keys() - floating.keys():
            moved = (state[name].double() - self._reference[name].double()).abs()
            if (moved > MAX_COUNT).any():
                raise BadUpdate(f"{name} moved by more than {MAX_COUNT}")
        norms = _norms(floating)
        statistics = [name for name in floating if name.endswith(STATISTICS)]
        # A norm bounds each value. BatchNorm takes roots of variances, so a negative one makes
        # every output NaN. From updates without one, no rule makes one.
        variances = [floating[name] for name in statistics if name.endswith("running_var")]
        negative = bool(variances) and bool((torch.cat(variances) < 0).any())
        large = any(norms[name] > _max_statistic(name) for name in statistics)
        if negative or large or not all(map(math.isfinite, norms.values())):
            for name, tensor in floating.items():
                if not torch.isfinite(tensor).all():
                    raise BadUpdate(f"{name} holds NaN or infinity")
                if name.endswith("running_var") and (tensor < 0).any():
                    raise BadUpdate(f"{name} holds negative variances")
                if name in statistics and (tensor.abs() > _max_statistic(name)).any():
                    largest = tensor.abs().max().item()
                    raise BadUpdate(
                        f"{name} holds {largest:.3g}, possible is {_max_statistic(name):g}"
                    )
        return norms


class FedAvg(Aggregator):
    """The mean of the clients' states, weighted by their number of images, updated as they arrive.

    Only the running sum is kept, so memory does not grow with the number of clients. The sum is in
    float64: a float32 weight times an image count is exact then, and the order of arrival does not
    change the result.

    Example:
        >>> average = FedAvg({"w": torch.zeros(1)})
        >>> average.add({"w": torch.tensor([1.0])}, num_images=1)
        >>> average.add({"w": torch.tensor([4.0])}, num_images=3)
        >>> average.result()["w"].item()
        3.25
    """

    @cached_property
    def _sums(self) -> list[Tensor]:
        return self._zeros()

    @cached_property
    def _held(self) -> list[tuple[int, int, list[Tensor]]]:
        """Client, images and tensors of each update, if shares are bounded."""
        return []

    def _take(self, state: Mapping[str, Tensor], num_images: int, client: int) -> None:
        tensors = [state[name].detach() for name in self._reference]
        if self.max_share < 1:  # The images that count are known when all updates are there.
            self._held.append((client, num_images, tensors))
        else:
            _add_to(self._sums, tensors, num_images)

    def _combine(self) -> State:
        sums = self._sums
        images = self.num_images
        if self._held:
            sums = self._zeros()
            images = 0
            claims = dict(enumerate(claimed for _, claimed, _ in self._held))
            counts = counted(claims, self.max_share)
            for (client, claimed, tensors), count in zip(self._held, counts.values(), strict=True):
                _add_to(sums, tensors, count)
                images += count
                if count < claimed:
                    bound = f"aggregate.max_share={self.max_share:g}"
                    self.remarks[client] = f"its {claimed:,} images count as {count:,}, {bound}"
        pairs = zip(self._reference.items(), sums, strict=True)
        return {name: narrow(total / images, reference) for (name, reference), total in pairs}

    def _zeros(self) -> list[Tensor]:
        return [
            torch.zeros_like(tensor, dtype=torch.float64) for tensor in self._reference.values()
        ]


def _add_to(sums: Sequence[Tensor], tensors: Sequence[Tensor], weight: int) -> None:
    """Adds weighted tensors; they are widened to float64 one at a time."""
    for total, tensor in zip(sums, tensors, strict=True):
        total.add_(tensor, alpha=weight)


def counted(images: Mapping[int, int], max_share: float) -> dict[int, int]:
    """The number of images that each client counts for, if its share is limited.

    Clients that claim too many count for one number, the largest that obeys. If there are so few
    clients that each has more than its share, all count alike.

    Args:
        images: the images that each client claims to own, by client.
        max_share: the largest share of one client.

    Example:
        >>> counted({0: 300, 1: 100, 2: 10_000_000}, max_share=0.5)
        {0: 300, 1: 100, 2: 400}
    """
    descending = sorted(images.values(), reverse=True)
    rest = sum(descending)
    bound = float(descending[-1])
    for above, largest in enumerate(descending):
        # If `above` clients count for c each, then c = max_share (above c + rest).
        possible = max_share * rest / (1 - max_share * above)
        if largest <= possible or max_share * (above + 1) >= 1:
            bound = max(possible, bound)
            break
        rest -= largest
    return {client: min(count, math.floor(bound + 1e-6)) for client, count in images.items()}


def _norms(floating: Mapping[str, Tensor]) -> dict[str, float]:
    """The norm of each tensor.

    A norm shows NaN and infinity at a lower cost than a check of each value, and all norms are
    copied from the device at once. Huge but finite values may overflow, so a bad norm is only a
    reason to look closer.
    """
    if not floating:
        return {}
    norms = torch.stack([torch.linalg.vector_norm(tensor) for tensor in floating.values()])
    return dict(zip(floating, norms.tolist(), strict=True))


def _max_statistic(name: str) -> float:
    return MAX_STATISTICS[name.rpartition(".")[2]]


def _length(norms: Mapping[str, float]) -> float:
    """The norm of all weights together, without BatchNorm's statistics."""
    return math.hypot(*(norm for name, norm in norms.items() if not name.endswith(STATISTICS)))


def narrow(values: Tensor, reference: Tensor) -> Tensor:
    """float64 values in the dtype of a tensor of the state; integers are rounded."""
    return (values if reference.is_floating_point() else values.round()).to(reference.dtype)
