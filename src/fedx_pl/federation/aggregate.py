"""How clients' weights become the new global weights."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedx_pl.methods.base import State


class BadUpdate(Exception):
    """A client's update that must not be averaged; the message says why."""


class FedAvg:
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

    def __init__(self, reference: Mapping[str, Tensor]) -> None:
        """Starts an empty average.

        Args:
            reference: the state every update must match in names, shapes and dtypes: the current global state.
        """
        self._reference = {name: tensor.detach() for name, tensor in reference.items()}
        self._sums: State = {}
        self.num_images = 0
        self.num_clients = 0

    def add(self, state: Mapping[str, Tensor], num_images: int) -> None:
        """Folds one client in.

        Args:
            state: its shared state after local training.
            num_images: how many images it owns: its weight.

        Raises:
            BadUpdate: names, shapes or dtypes differ, a value is NaN or infinite, or ``num_images`` is not
                positive. The average is as before.
        """
        self._check(state, num_images)
        for name, tensor in state.items():
            weighted = tensor.detach().to(torch.float64) * num_images
            self._sums[name] = self._sums[name].add_(weighted) if name in self._sums else weighted
        self.num_images += num_images
        self.num_clients += 1

    def result(self) -> State:
        """The average in the dtypes of the reference; integer buffers (BatchNorm's step counter) are rounded."""
        if not self.num_clients:
            raise ValueError("no update was added")
        return {name: self._mean(name, reference) for name, reference in self._reference.items()}

    def _mean(self, name: str, reference: Tensor) -> Tensor:
        mean = self._sums[name] / self.num_images
        return (mean if reference.is_floating_point() else mean.round()).to(reference.dtype)

    def _check(self, state: Mapping[str, Tensor], num_images: int) -> None:
        if num_images <= 0:
            raise BadUpdate(f"it claims {num_images} images")
        if missing := self._reference.keys() - state.keys():
            raise BadUpdate(f"{len(missing)} tensors are missing, e.g. {min(missing)}")
        if extra := state.keys() - self._reference.keys():
            raise BadUpdate(f"{len(extra)} tensors are unknown, e.g. {min(extra)}")
        for name, reference in self._reference.items():
            tensor = state[name]
            if tensor.shape != reference.shape:
                raise BadUpdate(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(reference.shape)}")
            if tensor.dtype != reference.dtype:
                raise BadUpdate(f"{name} is {tensor.dtype}, expected {reference.dtype}")
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise BadUpdate(f"{name} holds NaN or infinity")
