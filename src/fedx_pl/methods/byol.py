"""BYOL (Grill et al., 2020)."""

import copy
from typing import Any

import torch
from lightly.models.utils import deactivate_requires_grad
from torch import nn

from fedx_pl import losses
from fedx_pl.methods.base import EmaPair, Embeddings, Loss, SSLMethod, State, Views, mlp
from fedx_pl.options import check


class BYOL(SSLMethod):
    """Predicts the target network's embedding of the other view; there are no negatives.

    The online backbone, projector and predictor are averaged. The target network stays with the
    client between rounds. After a missed round it is reset to the global model, since an old target
    would pull the client back to where the federation was.
    """

    def __init__(self, backbone: nn.Module, *, momentum: float = 0.99, **base: Any) -> None:
        """Adds predictor and target.

        Args:
            backbone: see `SSLMethod`.
            momentum: momentum of the target's moving average.
            base: keyword arguments of `SSLMethod`.
        """
        check("momentum", momentum, example=0.99, at_least=0, at_most=1)
        super().__init__(backbone, **base)
        self.momentum = momentum
        # BYOL's heads have a BatchNorm, unlike those of contrastive methods: without it the
        # targets collapse easily. z is standardized, because nothing in BYOL's loss keeps the z of
        # different images apart, and FedX's relational terms draw them together.
        self.projector = mlp(
            self.feature_dim, self.hidden_dim, self.embed_dim, batchnorm=True, standardized=True
        )
        self.predictor = mlp(self.embed_dim, self.hidden_dim, self.embed_dim, batchnorm=True)
        self.target = nn.Sequential(copy.deepcopy(self.backbone), copy.deepcopy(self.projector))
        deactivate_requires_grad(self.target)

    def loss(self, batch: Views, z: Embeddings) -> Loss:
        """``2 - 2 cos``, symmetrized over the two views."""
        n = len(batch.first)
        prediction = self.predictor(torch.cat([z.first, z.second]))
        with torch.no_grad():
            target = self.target(batch.stacked[: 2 * n])
        return Loss(
            byol=losses.alignment(prediction[:n], target[n:])
            + losses.alignment(prediction[n:], target[:n])
        )

    def ema_pairs(self) -> list[EmaPair]:
        """The target follows the backbone and the projector."""
        return [EmaPair(nn.Sequential(self.backbone, self.projector), self.target, self.momentum)]

    def private_names(self) -> set[str]:
        """The target network stays with the client."""
        return super().private_names() | {"target"}

    def receive(self, shared: State, private: State | None, absent: int = 0) -> None:
        """Resets the target after an absence; other private state, e.g. of a mixin, is kept."""
        super().receive(shared, private, absent)
        if absent:
            SSLMethod.reset_private(self)
