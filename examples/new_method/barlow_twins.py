"""Barlow Twins (Zbontar et al., 2021): a method that is nothing but its loss.

Type in this folder:

    fedx-pl train method=barlow_twins:BarlowTwins fedx=true profile=cpu data.root=../../data
"""

from typing import Any

from lightly.loss import BarlowTwinsLoss
from lightly.models.modules.heads import BarlowTwinsProjectionHead
from torch import nn

from fedx_pl import Embeddings, FedXMixin, Loss, SSLMethod, Views


class BarlowTwins(SSLMethod):
    """Makes the cross-correlation of the two views' embeddings the identity."""

    def __init__(
        self, backbone: nn.Module, *, redundancy: float = 5e-3, scale: float = 0.1, **base: Any
    ) -> None:
        """Sets the loss.

        Args:
            backbone: see `SSLMethod`.
            redundancy: weight of the off-diagonal part.
            scale: factor of the whole loss, whose terms are sums over dimensions.
            base: keyword arguments of `SSLMethod`.
        """
        super().__init__(backbone, **base)
        self.projector = BarlowTwinsProjectionHead(
            self.feature_dim, self.hidden_dim, self.embed_dim
        )
        self.scale = scale
        self.redundancy = BarlowTwinsLoss(redundancy)

    def loss(self, batch: Views, z: Embeddings) -> Loss:
        """Computes the redundancy reduction loss."""
        return Loss(barlow=self.scale * self.redundancy(z.first, z.second))


class FedXBarlowTwins(FedXMixin, BarlowTwins):
    """Barlow Twins with FedX; nothing else is needed."""
