"""SimCLR (Chen et al., 2020)."""

from fedx_pl.losses import nt_xent
from fedx_pl.methods.base import Embeddings, Loss, SSLMethod, Views


class SimCLR(SSLMethod):
    """Contrast the two views of an image against all other views of the batch."""

    def loss(self, batch: Views, z: Embeddings) -> Loss:
        """NT-Xent over 2n views."""
        return Loss(contrastive=nt_xent(z.first, z.second, self.tau))
