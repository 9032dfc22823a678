"""ProtoCL, the paper's name for PCL (Li et al., 2021): MoCo with prototypes."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedx_pl.backbones import eager
from fedx_pl.losses import proto_nce
from fedx_pl.methods.base import Embeddings, Loss, Views
from fedx_pl.methods.moco import MoCo
from fedx_pl.options import check
from fedx_pl.seeding import derive


class Clustering(NamedTuple):
    """A clustering of a client's images at one granularity; it never leaves the client."""

    prototypes: Tensor  # (k, d)
    cluster: Tensor  # (N,) which prototype each image belongs to
    concentration: Tensor  # (k,) phi


class ProtoCL(MoCo):
    """Adds ProtoNCE against clusters of the client's own images to MoCo's InfoNCE.

    The images are clustered before every local epoch, by momentum features without augmentation,
    once the client has trained for ``warmup_epochs``. The number of clusters follows the number of
    images.
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        cluster_sizes: tuple[int, ...] = (25, 10, 5),
        warmup_epochs: int = 1,
        prototype_weight: float = 1.0,
        **moco: Any,
    ) -> None:
        """Adds the clusterings.

        Args:
            backbone: see `SSLMethod`.
            cluster_sizes: images per cluster, one clustering for each.
            warmup_epochs: local epochs with MoCo's loss alone.
            prototype_weight: weight of the prototype term.
            moco: keyword arguments of `MoCo`.
        """
        check("cluster_sizes", cluster_sizes, example=[25, 10, 5], at_least=1)
        super().__init__(backbone, **moco)
        self.cluster_sizes = cluster_sizes
        self.warmup_epochs = warmup_epochs
        self.prototype_weight = prototype_weight
        self.clusterings: list[Clustering] = []

    def loss(self, batch: Views, z: Embeddings) -> Loss:
        """MoCo's loss, and the prototype term averaged over all granularities."""
        terms = [
            proto_nce(z.first, c.prototypes, c.cluster[batch.rows], concentration=c.concentration)
            for c in self.clusterings
        ]
        prototype = (
            torch.stack(terms).mean() if terms else z.first.new_zeros((), dtype=torch.float32)
        )
        return super().loss(batch, z) | Loss(prototype=self.prototype_weight * prototype)

    def on_round_start(self) -> None:
        """Forgets the previous client's clusters."""
        super().on_round_start()
        self.clusterings = []

    def on_local_epoch(self, epoch: int) -> None:
        """Clusters the client's images on momentum features."""
        super().on_local_epoch(epoch)
        counts = [self.local.data.num_images // size for size in self.cluster_sizes]
        counts = [k for k in counts if k >= 2]  # One cluster says nothing.
        if epoch < self.warmup_epochs or not counts:
            return
        self.key.eval()
        with eager(self.key):
            features = torch.cat([self.keys(x) for x in self.local.data.plain_batches()])
        self.key.train()
        generator = torch.Generator(features.device).manual_seed(
            derive(self.local.seed, "k-means", epoch)
        )
        self.clusterings = [cluster(features, k, self.tau, generator=generator) for k in counts]


@torch.no_grad()
def cluster(features: Tensor, k: int, temperature: float, generator: torch.Generator) -> Clustering:
    """Runs k-means and computes the concentration phi of each cluster.

    phi is the mean distance / log(size + 10). Clusters of at most one image get the largest phi.
    All are clipped to the 10th and 90th percentile, and scaled to a mean of ``temperature``.
    """
    centers, assigned, distance = k_means(features, k, generator)
    size = torch.bincount(assigned, minlength=k)
    phi = features.new_zeros(k).index_add_(0, assigned, distance) / (
        size.clamp(min=1) * torch.log(size + 10.0)
    )
    phi = torch.where(size <= 1, phi.max(), phi)
    low, high = torch.quantile(phi, phi.new_tensor([0.1, 0.9]))
    phi = phi.clamp(low, high)
    # Identical images make phi vanish: every cluster then has the plain temperature.
    relative = phi / phi.mean().clamp(min=1e-12)
    phi = torch.where(phi.mean() > 0, relative, torch.ones_like(phi)) * temperature
    return Clustering(F.normalize(centers, dim=1), assigned, phi)


def k_means(
    x: Tensor, k: int, generator: torch.Generator, iterations: int = 20
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs Lloyd's algorithm from random points.

    It takes 4 % of a round with clustering (profile=cpu, method.warmup_epochs=0, one thread), so
    scikit-learn's, about twice as fast, would hardly show.

    Args:
        x: (N, d) points.
        k: number of clusters.
        generator: random numbers, on the device of x.
        iterations: how often points are assigned and centers updated.

    Returns:
        Centers (k, d), each point's cluster (N,) and its distance to the center (N,).
    """
    centers = x[torch.randperm(len(x), generator=generator, device=x.device)[:k]].clone()
    before = torch.empty(0, dtype=torch.int64, device=x.device)
    for _ in range(iterations):
        _, assigned = _nearest(x, centers)
        if torch.equal(assigned, before):
            break  # The centers would stay as they are, too.
        before = assigned
        size = torch.bincount(assigned, minlength=k)
        sums = torch.zeros_like(centers).index_add_(0, assigned, x)
        # An emptied cluster keeps its center.
        centers = torch.where((size > 0)[:, None], sums / size.clamp(min=1)[:, None], centers)
    distance, assigned = _nearest(x, centers)
    return centers, assigned, distance


def _nearest(x: Tensor, centers: Tensor, rows: int = 8192) -> tuple[Tensor, Tensor]:
    """Distance to and index of the nearest center, in chunks: N x k distances would be large."""
    nearest = [torch.cdist(chunk, centers).min(dim=1) for chunk in x.split(rows)]
    return torch.cat([n.values for n in nearest]), torch.cat([n.indices for n in nearest])
