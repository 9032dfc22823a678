"""FedX (Han et al., ECCV 2022): two-sided knowledge distillation on top of any method.

    class FedXBYOL(FedXMixin, BYOL):
        pass

The method's own loss is the paper's local contrastive loss. The mixin adds three terms, from embeddings ``z`` of the
batch, of its second views and of an independent relation batch ``B_r``:

    local_relation    Eq. 5    both views have the same relations to B_r, seen by the local model f
    global_contrast   Eq. 7    h(f(x)) finds F(x~) among the others
    global_relation   Eq. 9    both views, after h, have the same relations to B_r as F sees it

``F`` is the global model the round started from: frozen, in eval mode (but for round 1, see `Frozen.refresh`), and no
part of this module's tree, so that it is neither optimised nor averaged nor saved. ``h`` is a head of its own, never a
method's predictor.

With ``relation=queue`` there is no second batch: relations are to the latest embeddings, f's own and F's, of the
images of earlier steps. That saves a third of f's work and half of F's.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from fedx_pl.errors import UserError, require
from fedx_pl.losses import global_contrast, nt_xent, relational
from fedx_pl.methods.base import Embeddings, Loss, Views, mlp
from fedx_pl.mixins.base import Mixin
from fedx_pl.mixins.teacher import Frozen

_TERMS = ("local_contrast", "local_relation", "global_contrast", "global_relation")


@dataclass(frozen=True)
class FedXOptions:
    """The four terms and their variants."""

    enabled: bool = field(default=False, metadata={"help": "add FedX to the method (short: fedx=true)"})
    local_contrast: float = field(
        default=1.0, metadata={"help": "weight of the method's own loss (and of what other mixins added to it)"}
    )
    local_relation: float = field(default=1.0, metadata={"help": "weight of the local relational loss"})
    global_contrast: float = field(default=1.0, metadata={"help": "weight of the global contrastive loss"})
    global_relation: float = field(default=1.0, metadata={"help": "weight of the global relational loss"})
    tau: float = field(default=0.1, metadata={"help": "temperature of FedX's own three terms"})
    divergence: str = field(default="jsd", metadata={"help": "jsd (Eq. 5) | authors (the released code's form)"})
    contrast: str = field(default="symmetric", metadata={"help": "symmetric (the released code's) | literal (Eq. 7)"})
    head: bool = field(default=True, metadata={"help": "the projection head h; false compares f and F directly"})
    relation: str = field(
        default="batch", metadata={"help": "batch: relations to a second batch B_r | queue: to earlier steps (cheaper)"}
    )
    relation_size: int = field(
        default=0, metadata={"help": "images of optim.batch_size that are B_r, or left out (queue); 0 = half"}
    )
    queue_size: int = field(default=256, metadata={"help": "relation=queue: embeddings kept"})
    warmup: int = field(default=0, metadata={"help": "rounds without the global terms, while F knows little"})

    def __post_init__(self) -> None:
        known = self.divergence in ("jsd", "authors")
        require("fedx.divergence", self.divergence, known, "fedx.divergence=jsd or authors")
        known = self.contrast in ("symmetric", "literal")
        require("fedx.contrast", self.contrast, known, "fedx.contrast=symmetric or literal")
        known = self.relation in ("batch", "queue")
        require("fedx.relation", self.relation, known, "fedx.relation=batch or queue")
        require("fedx.queue_size", self.queue_size, self.queue_size >= 2, "fedx.queue_size=256")
        require("fedx.tau", self.tau, self.tau > 0, "a positive number; the paper's is fedx.tau=0.1")
        require("fedx.warmup", self.warmup, self.warmup >= 0, "fedx.warmup=0 or more rounds")
        weights = {name: getattr(self, name) for name in _TERMS}
        for name, weight in weights.items():
            require(f"fedx.{name}", weight, weight >= 0, f"fedx.{name}=0 to leave the term out")
        if not any(weights.values()):
            raise UserError(f"all of fedx.{', fedx.'.join(_TERMS)} are 0: nothing is left to train")
        if self.warmup and not (self.local_contrast or self.local_relation):
            raise UserError(
                f"fedx.warmup={self.warmup} leaves nothing to train in the first rounds, since fedx.local_contrast "
                f"and fedx.local_relation are 0; type fedx.warmup=0"
            )

    def in_round(self, round_number: int) -> "FedXOptions":
        """The options of a round: without the global terms while the warm-up lasts."""
        if round_number > self.warmup:
            return self
        return replace(self, global_contrast=0.0, global_relation=0.0, warmup=0)


class FedXMixin(Mixin):
    """Adds FedX to the method that follows it in the list of base classes."""

    online_views = 2
    _queues: tuple[Tensor, Tensor] | None  # (k, d) each: z of x~ from earlier steps, as f and as F saw them

    def __init__(self, *args: Any, fedx: FedXOptions | None = None, **kwargs: Any) -> None:
        """Adds the head ``h``.

        Args:
            args: of the method.
            fedx: weights and variants; the paper's by default.
            kwargs: of the method.
        """
        super().__init__(*args, **kwargs)
        self.fedx = fedx or FedXOptions()
        self.now = self.fedx  # what counts in this round
        self.relational = self.fedx.local_relation > 0 or self.fedx.global_relation > 0
        self.relation_batch = self.relational and self.fedx.relation == "batch"
        self.fedx_head = mlp(self.embed_dim, self.embed_dim, self.embed_dim) if self.fedx.head else nn.Identity()
        self.global_model = Frozen()  # F
        self._queues = None

    def reserved_images(self, batch_size: int) -> int:
        """The relation batch ``B_r``; with a queue it is left out, so that ``B`` is as large."""
        return self.fedx.relation_size or batch_size // 2

    def loss(self, batch: Views, z: Embeddings) -> Loss:
        """The method's own terms, untouched but for their weight, and FedX's three."""
        w, terms = self.now, Loss()
        g_second, anchors, g_anchors = self._look(batch, z)
        if w.local_contrast > 0:
            terms = terms | super().loss(batch, z) * w.local_contrast
        if w.local_relation > 0:
            assert anchors is not None
            local_relation = relational(z.first, z.second, anchors, w.tau, w.divergence)
            terms = terms | Loss(local_relation=w.local_relation * local_relation)
        if w.global_contrast > 0 or w.global_relation > 0:
            h_first, h_second = self.fedx_head(torch.cat([z.first, z.second])).chunk(2)
        if w.global_contrast > 0:
            assert g_second is not None
            contrast = nt_xent if w.contrast == "symmetric" else global_contrast
            terms = terms | Loss(global_contrast=w.global_contrast * contrast(h_first, g_second, w.tau))
        if w.global_relation > 0:
            assert g_anchors is not None
            global_relation = relational(h_first, h_second, g_anchors, w.tau, w.divergence)
            terms = terms | Loss(global_relation=w.global_relation * global_relation)
        return terms

    def _look(self, batch: Views, z: Embeddings) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """F(x~), and what relations are taken to, as f and as F see it: z_r and F(x_r), or the two queues.

        F looks only at what a term uses, in one forward pass.
        """
        n, w = len(batch.rows), self.now
        if self.relational and not self.relation_batch:
            return self._look_back(batch, z)
        if w.global_contrast == 0 and w.global_relation == 0:
            return None, z.relation, None
        first = n if w.global_contrast > 0 else 2 * n
        last = len(batch.stacked) if w.global_relation > 0 else 2 * n
        g = self.global_model(batch.stacked[first:last])
        return g[: 2 * n - first], z.relation, g[2 * n - first :]

    # --- relation=queue -----------------------------------------------------------------------------------------------

    def _look_back(self, batch: Views, z: Embeddings) -> tuple[Tensor | None, Tensor, Tensor]:
        """F(x~) and both queues as they are before this step's embeddings of x~ join them."""
        w = self.now
        if self._queues is None:
            self._queues = self._first_queues(len(batch.rows))
        before, g_before = self._queues
        needed = w.global_contrast > 0 or w.global_relation > 0
        g = self.global_model(batch.second) if needed else None
        # New tensors, not writes into the old ones: the backward pass still reads those.
        self._queues = _join(z.second, before), g_before if g is None else _join(g, g_before)
        return g, before, g_before

    @torch.no_grad()
    def _first_queues(self, n: int) -> tuple[Tensor, Tensor]:
        """At its first step f is F: both have the same view of some of the client's images.

        One batch of them, again and again until the queue is full: a relation to an image that is there four times is
        four times a quarter, and a whole queue of images would cost as much as several steps.
        """
        g = _unit(self.global_model(self.local.data.plain_sample(n)))
        length = min(self.fedx.queue_size, max(self.local.data.num_images, len(g)))
        g = g.repeat(-(-length // len(g)), 1)[:length]
        return g, g

    # --- the global model F -------------------------------------------------------------------------------------------

    def refresh_teachers(self) -> None:
        """Freezes the model that was just received as F."""
        super().refresh_teachers()
        self.now = self.fedx.in_round(self.local.round)
        self.global_model.refresh(nn.Sequential(self.backbone, self.projector))
        self._queues = None

    def teachers(self) -> list[Frozen]:
        """F."""
        return [*super().teachers(), self.global_model]


@torch.no_grad()
def _join(new: Tensor, queue: Tensor) -> Tensor:
    """The newest embeddings first, the oldest fall out; normalised, so that half precision loses nothing by it."""
    return torch.cat([_unit(new), queue])[: len(queue)]


def _unit(z: Tensor) -> Tensor:
    return nnf.normalize(z.float(), dim=1)
