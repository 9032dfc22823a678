"""FedU (Zhuang et al., ICCV 2021): BYOL with a divergence-aware predictor."""

import copy
from typing import Any

import torch
from lightly.models.utils import deactivate_requires_grad
from torch import Tensor, nn

from fedx_pl.methods.base import State, copy_state
from fedx_pl.methods.byol import BYOL


class FedU(BYOL):
    """A client whose encoder moved far in its last round keeps its own predictor instead of the averaged one.

    ``d`` is the mean over convolutions of the L2 change during local training; ``d < mu`` takes the global predictor.
    The threshold depends on the network's scale, so ``divergence`` is recorded with the losses.
    """

    def __init__(self, backbone: nn.Module, *, mu: float = 0.4, **byol: Any) -> None:
        """Adds the client's own copy of the predictor.

        Args:
            backbone: see `SSLMethod`.
            mu: divergence from which on the local predictor is kept.
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
        """The own predictor and the last divergence stay at home, beside the target."""
        return super().private_names() | {"own_predictor", "divergence"}

    def reset_private(self) -> None:
        """A newcomer takes the global predictor."""
        super().reset_private()
        self._take_global_predictor()

    def receive(self, shared: State, private: State | None, absent: int = 0) -> None:
        """Puts the own predictor back in place if the client had diverged in the round before."""
        super().receive(shared, private, absent)
        if absent:
            self._take_global_predictor()
        if float(self.divergence) >= self.mu:
            copy_state(self.predictor.state_dict(), self.own_predictor.state_dict())

    def _take_global_predictor(self) -> None:
        copy_state(self.own_predictor.state_dict(), self.predictor.state_dict())
        self.divergence.zero_()

    def on_round_start(self) -> None:
        """Remembers where the convolutions started."""
        super().on_round_start()
        self._at_start = [weight.detach().clone() for weight in self._convolutions()]

    def on_round_end(self) -> None:
        """Measures how far they went, and keeps the predictor."""
        super().on_round_end()
        moved = [
            torch.linalg.vector_norm(now.detach() - start.to(now.device))
            for now, start in zip(self._convolutions(), self._at_start, strict=True)
        ]
        self.divergence.copy_(torch.stack(moved).mean())
        copy_state(self.own_predictor.state_dict(), self.predictor.state_dict())

    def round_metrics(self) -> dict[str, float]:
        """``d`` of the round just trained."""
        return super().round_metrics() | {"divergence": float(self.divergence)}

    def _convolutions(self) -> list[Tensor]:
        return [m.weight for m in self.backbone.modules() if isinstance(m, nn.Conv2d)]
