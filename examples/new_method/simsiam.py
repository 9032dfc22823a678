"""SimSiam (Chen & He, 2021): a custom method with one loss and one extra network.

Type in this folder:

    fedx-pl train method=simsiam:SimSiam fedx=true profile=cpu data.root=../../data
"""

from typing import Any

import torch
from lightly.loss import NegativeCosineSimilarity
from lightly.models.modules.heads import SimSiamPredictionHead, SimSiamProjectionHead
from torch import nn

from fedx_pl import Embeddings, FedXMixin, Loss, SSLMethod, Views


class SimSiam(SSLMethod):
    """Predicts one view's embedding from the other's, whose gradient is stopped."""

    def __init__(self, backbone: nn.Module, *, bottleneck: int = 64, **base: Any) -> None:
        """Adds the predictor.

        Args:
            backbone: see `SSLMethod`.
            bottleneck: hidden units of the predictor.
            base: keyword arguments of `SSLMethod`.
        """
        super().__init__(backbone, **base)
        self.projector = SimSiamProjectionHead(self.feature_dim, self.hidden_dim, self.embed_dim)
        self.predictor = SimSiamPredictionHead(self.embed_dim, bottleneck, self.embed_dim)
        self.distance = NegativeCosineSimilarity()

    def loss(self, batch: Views, z: Embeddings) -> Loss:
        """Computes the symmetrized negative cosine similarity."""
        first, second = self.predictor(torch.cat([z.first, z.second])).chunk(2)
        loss = self.distance(first, z.second.detach()) + self.distance(second, z.first.detach())
        return Loss(simsiam=loss / 2)


class FedXSimSiam(FedXMixin, SimSiam):
    """SimSiam with FedX; nothing else is needed."""
