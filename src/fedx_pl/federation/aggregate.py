"""How clients' weights become the new global weights.

`FedAvg` trusts every update that is well formed. `robust.py` has the rules for federations where one may lie.
"""

import math
from collections.abc import Collection, Mapping
from functools import cached_property

import torch
from torch import Tensor

from fedx_pl.federation.options import MAX_IMAGES
from fedx_pl.methods.base import State

STATISTICS = ("running_mean", "running_var")  # They may grow a lot in the first round.
# Of BatchNorm: what lies beyond would take hundreds of steps to be forgotten, and 3e38 is never forgotten. Images that
# are not normalized, with 16 bits per value, stay well below.
MAX_STATISTICS = {"running_mean": 1e6, "running_var": 1e12}
MAX_COUNT = 2**31  # by which a counter may move in a round
# The part of an update's weights that lies along the global ones, at least. Training leaves in weights what they were:
# it was 0.94 or more in all runs we measured, and only weight decay makes it small, to exp(-lr decay steps / (1 -
# momentum)). Weights that were shrunk, turned round or replaced have none of it, or less.
LEAST_KEPT = 0.01
BACKBONE = "backbone."  # where the names of the encoder's tensors begin


class BadUpdate(Exception):
    """A client's update that must not be averaged; the message says why."""


class Aggregator:
    """Takes the updates of a round and makes one state of them; what is common to all rules."""

    def __init__(
        self,
        reference: Mapping[str, Tensor],
        max_images: int = MAX_IMAGES,
        *,
        changes: Collection[str] = (),
    ) -> None:
        """Starts without updates.

        Args:
            reference: the state every update must match in names, shapes and dtypes: the current global state.
            max_images: more than any client can own.
            changes: names of tensors that clients send as a change already, such as SCAFFOLD's control variates.
        """
        self._changes = frozenset(changes)
        self._reference = {name: tensor.detach() for name, tensor in reference.items()}
        self._max_images = max_images
        self.max_growth = (
            0.0  # An update whose weights are longer by this factor is refused; 0: any are taken.
        )
        self.max_share = 1.0  # of the images that one client may count for
        self.num_images = 0
        self.num_clients = 0
        self.remarks: dict[
            int, str
        ] = {}  # After `result`: whose update the rule did not take as it was, and how.

    def add(self, state: Mapping[str, Tensor], num_images: int, client: int = 0) -> None:
        """Takes one client in.

        Args:
            state: its shared state after local training.
            num_images: how many images it owns: its weight.
            client: who it is.

        Raises:
            BadUpdate: names, shapes or dtypes differ, a value is NaN or infinite, a statistic impossible, the weights
                are not near the reference's, or ``num_images`` is no number of images. All is as before.
        """
        norms = self._check(state, num_images)
        if self.max_growth:
            self._check_growth(state, _length(norms))
        self._take(state, num_images, client)
        self.num_images += num_images
        self.num_clients += 1

    def result(self) -> State:
        """The new state in the dtypes of the reference; integer buffers (BatchNorm's step counter) are rounded."""
        if not self.num_clients:
            raise ValueError("no update was added")
        self.remarks = {}
        return self._combine()

    @cached_property
    def _reference_length(self) -> float:
        return max(_length(_norms(self._floating(self._reference))), 1e-12)

    def _check_growth(self, state: Mapping[str, Tensor], length: float) -> None:
        """Raises `BadUpdate` if the weights are far from the reference.

        Together the two bound the distance: of weights that are three times as long, to 3.2 lengths.
        """
        if (growth := length / self._reference_length) > self.max_growth:
            raise BadUpdate(
                f"its weights are {growth:.3g} times as long, aggregate.max_growth={self.max_growth:g}"
            )
        if not (names := list(self._squares)):
            return
        along = torch.stack(
            [(state[name] * self._reference[name]).sum().double() for name in names]
        ).tolist()
        for start, what in (("", "weights"), (BACKBONE, "backbone")):
            pairs = [
                (new, self._squares[name])
                for name, new in zip(names, along, strict=True)
                if name.startswith(start)
            ]
            squared = math.fsum(old for _, old in pairs)
            if (
                squared > 1e-24
                and (kept := math.fsum(new for new, _ in pairs) / squared) < LEAST_KEPT
            ):
                raise BadUpdate(
                    f"its {what} kept {kept:.3g} of the global ones, possible is {LEAST_KEPT} or more"
                )

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
            raise BadUpdate(f"{len(extra)} tensors are unknown, e.g. {min(extra)}")
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
        # A norm bounds each value. BatchNorm takes roots of variances: one below zero makes NaN of every image. None
        # below zero, no rule makes one.
        variances = [floating[name] for name in statistics if name.endswith("running_var")]
        negative = bool(variances) and bool((torch.cat(variances) < 0).any())
        large = any(norms[name] > _most(name) for name in statistics)
        if negative or large or not all(map(math.isfinite, norms.values())):
            for name, tensor in floating.items():
                if not torch.isfinite(tensor).all():
                    raise BadUpdate(f"{name} holds NaN or infinity")
                if name.endswith("running_var") and (tensor < 0).any():
                    raise BadUpdate(f"{name} holds negative variances")
                if name in statistics and (tensor.abs() > _most(name)).any():
                    raise BadUpdate(
                        f"{name} holds {tensor.abs().max().item():.3g}, possible is {_most(name):g}"
                    )
        return norms


class FedAvg(Aggregator):
    """The mean of the clients' states, weighted by their number of images, folded in as they arrive.

    Only the running sum is kept, so memory does not grow with the number of clients. It is kept in float64: a float32
    weight times an image count is then exact, so that the order of arrival does not show in the result.

    Example:
        >>> average = FedAvg({"w": torch.zeros(1)})
        >>> average.add({"w": torch.tensor([1.0])}, num_images=1)
        >>> average.add({"w": torch.tensor([4.0])}, num_images=3)
        >>> average.result()["w"].item()
        3.25
    """

    def __init__(
        self,
        reference: Mapping[str, Tensor],
        max_images: int = MAX_IMAGES,
        *,
        changes: Collection[str] = (),
    ) -> None:
        """Starts an empty average; the arguments are those of `Aggregator`."""
        super().__init__(reference, max_images, changes=changes)
        self._sums = self._zeros()
        self._held: list[
            tuple[int, int, list[Tensor]]
        ] = []  # client, images, tensors, if shares are bounded

    def _take(self, state: Mapping[str, Tensor], num_images: int, client: int) -> None:
        tensors = [state[name].detach() for name in self._reference]
        if self.max_share < 1:  # For how many images a client counts is known when all are there.
            self._held.append((client, num_images, tensors))
        else:
            # A list of another dtype is widened tensor by tensor as it is added: no second copy of the weights is made.
            torch._foreach_add_(self._sums, tensors, alpha=num_images)

    def _combine(self) -> State:
        sums, images = self._sums, self.num_images
        if self._held:
            sums, images = self._zeros(), 0
            counts = counted(
                dict(enumerate(claimed for _, claimed, _ in self._held)), self.max_share
            )
            for (client, claimed, tensors), count in zip(self._held, counts.values(), strict=True):
                torch._foreach_add_(sums, tensors, alpha=count)
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


def counted(images: Mapping[int, int], max_share: float) -> dict[int, int]:
    """How many of their images clients count for, if none may have more than a share of all that count.

    Those who claim too many are cut off to one number, the largest that obeys. Where clients are so few that each has
    more than its share, all count alike.

    Args:
        images: that each client claims, by client.
        max_share: of one client.

    Example:
        >>> counted({0: 300, 1: 100, 2: 10_000_000}, max_share=0.5)
        {0: 300, 1: 100, 2: 400}
    """
    falling = sorted(images.values(), reverse=True)
    rest, bound = sum(falling), float(falling[-1])
    for above, most in enumerate(falling):
        # With so many cut off to c it holds that c = max_share (above c + rest).
        possible = max_share * rest / (1 - max_share * above)
        if most <= possible or max_share * (above + 1) >= 1:
            bound = max(possible, bound)
            break
        rest -= most
    return {client: min(count, math.floor(bound + 1e-6)) for client, count in images.items()}


def _norms(floating: Mapping[str, Tensor]) -> dict[str, float]:
    """The norm of each tensor.

    NaN and infinity survive a norm, far cheaper than a look at each value, and one question to the device for all
    tensors. Huge but finite values may overflow it, so a bad norm is only a reason to look closer.
    """
    if not floating:
        return {}
    return dict(
        zip(
            floating,
            torch.stack(torch._foreach_norm(list(floating.values()))).tolist(),
            strict=True,
        )
    )


def _most(name: str) -> float:
    return MAX_STATISTICS[name.rpartition(".")[2]]


def _length(norms: Mapping[str, float]) -> float:
    """Of all weights together, without BatchNorm's statistics."""
    return math.hypot(*(norm for name, norm in norms.items() if not name.endswith(STATISTICS)))


def narrow(values: Tensor, reference: Tensor) -> Tensor:
    """float64 values in the dtype of a tensor of the state; whole numbers by rounding, not by cutting off."""
    return (values if reference.is_floating_point() else values.round()).to(reference.dtype)
