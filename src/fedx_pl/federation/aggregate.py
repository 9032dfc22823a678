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
        self._sums = [torch.zeros_like(tensor, dtype=torch.float64) for tensor in self._reference.values()]
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
        # A list of another dtype is widened tensor by tensor as it is added: no second copy of the weights is made.
        torch._foreach_add_(self._sums, [state[name].detach() for name in self._reference], alpha=num_images)
        self.num_images += num_images
        self.num_clients += 1

    def result(self) -> State:
        """The average in the dtypes of the reference; integer buffers (BatchNorm's step counter) are rounded."""
        if not self.num_clients:
            raise ValueError("no update was added")
        sums = zip(self._reference.items(), self._sums, strict=True)
        return {name: self._mean(total, reference) for (name, reference), total in sums}

    def _mean(self, total: Tensor, reference: Tensor) -> Tensor:
        mean = total / self.num_images
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
        floating = {name: state[name] for name, tensor in self._reference.items() if tensor.is_floating_point()}
        # NaN and infinity survive a sum, which is far cheaper than a look at each value, and one question to the device
        # for all tensors. Huge but finite values may overflow it, so a bad sum is only a reason to look closer.
        if floating and not torch.isfinite(torch.stack([tensor.sum() for tensor in floating.values()])).all():
            for name, tensor in floating.items():
                if not torch.isfinite(tensor).all():
                    raise BadUpdate(f"{name} holds NaN or infinity")
