"""FedU (Zhuang et al., ICCV 2021): BYOL with a divergence-aware predictor."""

import copy
from typing import Any

import torch
from lightly.models.utils import deactivate_requires_grad
from torch import Tensor, nn

from fedx_pl.methods.base import State, copy_state
from fedx_pl.methods.byol import BYOL


class FedU(BYOL):
    """A client whose encoder moved far in its last round keeps its own predictor.

    ``d`` is the L2 change of a convolution during local training, averaged over convolutions. A
    client with ``d < mu`` takes the averaged predictor. The right threshold depends on the scale of
    the network, so ``divergence`` is logged with the losses.
    """

    def __init__(self, backbone: nn.Module, *, mu: float = 0.4, **byol: Any) -> None:
        """Adds the client's own copy of the predictor.

        Args:
            backbone: see `SSLMethod`.
            mu: smallest divergence at which the local predictor is kept.
            byol: keyword arguments of `BYOL`.
        """
        super().__init__(backbone, **byol)
        self.mu = mu
        self.own_predictor = copy.deepcopy(self.predictor)
        deactivate_requires_grad(self.own_predictor)
        self.divergence: Tensor
        self.register_buffer("divergence", torch.zeros(()))
        self._at_start: list[Tensor] = []

    def private_names(self) -> set[str]:
        """The client's predictor and last divergence stay with it, like the target."""
        return super().private_names() | {"own_predictor", "divergence"}

    def reset_private(self) -> None:
        """Takes the global predictor."""
        super().reset_private()
        self._take_global_predictor()

    def receive(self, shared: State, private: State | None, absent: int = 0) -> None:
        """Restores the client's own predictor if it diverged in its last round."""
        super().receive(shared, private, absent)
        if absent:
            self._take_global_predictor()
        if float(self.divergence) >= self.mu:
            copy_state(self.predictor.state_dict(), self.own_predictor.state_dict())

    def _take_global_predictor(self) -> None:
        copy_state(self.own_predictor.state_dict(), self.predictor.state_dict())
        self.divergence.zero_()

    def on_round_start(self) -> None:
        """Keeps the weights that the convolutions start from."""
        super().on_round_start()
        self._at_start = [weight.detach().clone() for weight in self._convolutions()]

    def on_round_end(self) -> None:
        """Measures the change of the convolutions, and keeps the predictor."""
        super().on_round_end()
        moved = [
            torch.linalg.vector_norm(now.detach() - start.to(now.device))
            for now, start in zip(self._convolutions(), self._at_start, strict=True)
        ]
        self.divergence.copy_(torch.stack(moved).mean())
        copy_state(self.own_predictor.state_dict(), self.predictor.state_dict())

    def round_metrics(self) -> dict[str, float]:
        """The divergence ``d`` of the round just trained."""
        return super().round_metrics() | {"divergence": float(self.divergence)}

    def _convolutions(self) -> list[Tensor]:
        return [m.weight for m in self.backbone.modules() if isinstance(m, nn.Conv2d)]
