"""FedX (Han et al., ECCV 2022): two-sided knowledge distillation on top of any method.

    class FedXBYOL(FedXMixin, BYOL):
        pass

The method's own loss is the paper's local contrastive loss. The mixin adds three terms. They
compare embeddings ``z`` of the batch, of its second views and of an independent relation batch
``B_r``:

    local_relation    Eq. 5    both views have the same relations to B_r, seen by the local model f
    global_contrast   Eq. 7    h(f(x)) finds F(x~) among the others
    global_relation   Eq. 9    both views, after h, have the same relations to B_r as F sees it

``F`` is the global model that the round started from. It is frozen and in eval mode (except in
round 1, see `Frozen.refresh`). It is not a submodule, so it is neither optimized nor averaged nor
saved. ``h`` is a separate head, never a method's predictor.

With ``relation=queue`` there is no second batch: relations are to the latest embeddings, by f and
by F, of images of earlier steps. That saves a third of f's work and half of F's.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedx_pl.errors import options_of
from fedx_pl.losses import global_contrast, nt_xent, relational
from fedx_pl.methods.base import Embeddings, Loss, Views, mlp
from fedx_pl.mixins.base import Mixin
from fedx_pl.mixins.options import FedXOptions
from fedx_pl.mixins.relation_queue import RelationQueue
from fedx_pl.mixins.teacher import Frozen


class Seen(NamedTuple):
    """The tensors that a step's terms compare embeddings with; empty where no term uses one."""

    second: Tensor  # F(x~)
    anchors: Tensor  # f's embeddings that relations are taken to: z_r, or its queue
    teacher_anchors: Tensor  # the same by F


class FedXMixin(Mixin):
    """Adds FedX to the method that follows it in the list of base classes."""

    online_views = 2

    def __init__(self, *args: Any, fedx: FedXOptions | None = None, **kwargs: Any) -> None:
        """Adds the head ``h``.

        Args:
            args: arguments of the method.
            fedx: weights and variants; the paper's by default.
            kwargs: keyword arguments of the method.
        """
        super().__init__(*args, **kwargs)
        self.fedx = options_of("fedx", fedx, FedXOptions)
        self.now = self.fedx  # the options of this round
        self.relation_batch = self.fedx.relational and self.fedx.relation == "batch"
        self.fedx_head = (
            mlp(self.embed_dim, self.embed_dim, self.embed_dim) if self.fedx.head else nn.Identity()
        )
        self.global_model = Frozen()  # F
        self.relation_queue: RelationQueue | None = None

    def loss(self, batch: Views, z: Embeddings) -> Loss:
        """The method's own terms with their weight, and FedX's three."""
        w = self.now
        seen = self._see(batch, z)
        terms = Loss()
        if w.local_contrast > 0:
            terms |= super().loss(batch, z) * w.local_contrast
        if w.local_relation > 0:
            relation = relational(
                z.first, z.second, seen.anchors, tau=w.tau, divergence=w.divergence
            )
            terms |= Loss(local_relation=relation) * w.local_relation
        if w.is_global:
            h_first, h_second = self.fedx_head(torch.cat([z.first, z.second])).chunk(2)
        if w.global_contrast > 0:
            contrast = nt_xent if w.contrast == "symmetric" else global_contrast
            terms |= Loss(global_contrast=contrast(h_first, seen.second, w.tau)) * w.global_contrast
        if w.global_relation > 0:
            relation = relational(
                h_first, h_second, seen.teacher_anchors, tau=w.tau, divergence=w.divergence
            )
            terms |= Loss(global_relation=relation) * w.global_relation
        return terms

    def reserved_images(self, batch_size: int) -> int:
        """The size of the relation batch, which a queue leaves out, so that ``B`` is as large."""
        return self.fedx.reserved(batch_size)

    def _see(self, batch: Views, z: Embeddings) -> Seen:
        """Runs F on the views that a term uses, in one forward pass."""
        if self.fedx.relational and not self.relation_batch:
            return self._see_queue(batch, z)
        n = len(batch.rows)
        none = z.first.new_empty(0)
        anchors = none if z.relation is None else z.relation
        if not self.now.is_global:
            return Seen(none, anchors, none)
        first = n if self.now.global_contrast > 0 else 2 * n
        last = len(batch.stacked) if self.now.global_relation > 0 else 2 * n
        g = self.global_model(batch.stacked[first:last])
        return Seen(g[: 2 * n - first], anchors, g[2 * n - first :])

    def _see_queue(self, batch: Views, z: Embeddings) -> Seen:
        """F(x~), and the queue before this step's embeddings of x~ join it."""
        if self.relation_queue is None:
            data = self.local.data
            sample = self.global_model(data.plain_sample(len(batch.rows)))
            self.relation_queue = RelationQueue.filled(
                sample, min(self.fedx.queue_size, max(data.num_images, len(sample)))
            )
        before = self.relation_queue
        g = self.global_model(batch.second) if self.now.is_global else None
        self.relation_queue = before.pushed(z.second, g)
        return Seen(z.first.new_empty(0) if g is None else g, before.local, before.teacher)

    def refresh_teachers(self) -> None:
        """Freezes the received model as F."""
        super().refresh_teachers()
        self.now = self.fedx.in_round(self.local.round)
        self.global_model.refresh(nn.Sequential(self.backbone, self.projector))
        self.relation_queue = None

    def teachers(self) -> list[Frozen]:
        """The global model F."""
        return [*super().teachers(), self.global_model]
