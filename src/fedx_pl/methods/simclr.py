"""SimCLR (Chen et al., 2020)."""

from typing import Any

from torch import nn

from fedx_pl.losses import nt_xent
from fedx_pl.methods.base import Embeddings, Loss, SSLMethod, Views
from fedx_pl.options import check


class SimCLR(SSLMethod):
    """Contrasts the two views of an image against all other views of the batch."""

    def __init__(self, backbone: nn.Module, *, tau: float = 0.1, **base: Any) -> None:
        """Sets the temperature.

        Args:
            backbone: see `SSLMethod`.
            tau: temperature.
            base: keyword arguments of `SSLMethod`.
        """
        check("tau", tau, example=0.1, above=0)
        super().__init__(backbone, **base)
        self.tau = tau

    def loss(self, batch: Views, z: Embeddings) -> Loss:
        """NT-Xent over 2n views."""
        return Loss(contrastive=nt_xent(z.first, z.second, self.tau))
