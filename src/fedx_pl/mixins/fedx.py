"""FedX (Han et al., ECCV 2022): two-sided knowledge distillation on top of any method.

    class FedXBYOL(FedXMixin, BYOL):
        pass

The method's own loss is the paper's local contrastive loss. The mixin adds three terms, from embeddings ``z`` of the
batch, of its second views and of an independent relation batch ``B_r``:

    local_relation    Eq. 5    both views have the same relations to B_r, seen by the local model f
    global_contrast   Eq. 7    h(f(x)) finds F(x~) among the others
    global_relation   Eq. 9    both views, after h, have the same relations to B_r as F sees it

``F`` is the global model the round started from: frozen, in eval mode (but for round 1, see `on_round_start`), and no
part of this module's tree, so that it is neither optimised nor averaged nor saved. ``h`` is a head of its own, never a
method's predictor.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from lightly.models.utils import deactivate_requires_grad
from torch import Tensor, nn

from fedx_pl.errors import UserError, require
from fedx_pl.losses import global_contrast, nt_xent, relational
from fedx_pl.methods.base import Embeddings, Loss, SSLMethod, Views, copy_state, mlp

_TERMS = ("local_contrast", "local_relation", "global_contrast", "global_relation")


@dataclass(frozen=True)
class FedXOptions:
    """The four terms and their variants."""

    enabled: bool = field(default=False, metadata={"help": "add FedX to the method (short: fedx=true)"})
    local_contrast: float = field(default=1.0, metadata={"help": "weight of the method's own loss"})
    local_relation: float = field(default=1.0, metadata={"help": "weight of the local relational loss"})
    global_contrast: float = field(default=1.0, metadata={"help": "weight of the global contrastive loss"})
    global_relation: float = field(default=1.0, metadata={"help": "weight of the global relational loss"})
    tau: float = field(default=0.1, metadata={"help": "temperature of FedX's own three terms"})
    divergence: str = field(default="jsd", metadata={"help": "jsd (Eq. 5) | authors (the released code's form)"})
    contrast: str = field(default="symmetric", metadata={"help": "symmetric (the released code's) | literal (Eq. 7)"})
    head: bool = field(default=True, metadata={"help": "the projection head h; false compares f and F directly"})
    relation_size: int = field(default=0, metadata={"help": "images in B_r; 0 = half of optim.batch_size"})

    def __post_init__(self) -> None:
        known = self.divergence in ("jsd", "authors")
        require("fedx.divergence", self.divergence, known, "fedx.divergence=jsd or authors")
        known = self.contrast in ("symmetric", "literal")
        require("fedx.contrast", self.contrast, known, "fedx.contrast=symmetric or literal")
        require("fedx.tau", self.tau, self.tau > 0, "a positive number; the paper's is fedx.tau=0.1")
        weights = {name: getattr(self, name) for name in _TERMS}
        for name, weight in weights.items():
            require(f"fedx.{name}", weight, weight >= 0, f"fedx.{name}=0 to leave the term out")
        if not any(weights.values()):
            raise UserError(f"all of fedx.{', fedx.'.join(_TERMS)} are 0: nothing is left to train")


class FedXMixin(SSLMethod):
    """Adds FedX to the method that follows it in the list of base classes."""

    online_views = 2
    _teacher: nn.Module | None  # F

    def __init__(self, *args: Any, fedx: FedXOptions | None = None, **kwargs: Any) -> None:
        """Adds the head ``h``.

        Args:
            args: of the method.
            fedx: weights and variants; the paper's by default.
            kwargs: of the method.
        """
        super().__init__(*args, **kwargs)
        self.fedx = fedx or FedXOptions()
        self.relation_batch = self.fedx.local_relation > 0 or self.fedx.global_relation > 0
        self.fedx_head = mlp(self.embed_dim, self.embed_dim, self.embed_dim) if self.fedx.head else nn.Identity()
        self._set_teacher(None)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if any("loss" in vars(base) for base in order[1 : order.index(FedXMixin)] if not issubclass(base, FedXMixin)):
            bases = ", ".join(base.__name__ for base in cls.__bases__)
            raise TypeError(f"FedXMixin must come first: class {cls.__name__}(FedXMixin, ...), not ({bases})")

    def loss(self, batch: Views, z: Embeddings) -> Loss:
        """The method's own terms, untouched but for their weight, and FedX's three."""
        w, terms = self.fedx, Loss()
        if w.local_contrast > 0:
            terms = terms | super().loss(batch, z) * w.local_contrast
        if w.local_relation > 0:
            assert z.relation is not None
            local_relation = relational(z.first, z.second, z.relation, w.tau, w.divergence)
            terms = terms | Loss(local_relation=w.local_relation * local_relation)
        if w.global_contrast > 0 or w.global_relation > 0:
            terms = terms | self._global_terms(batch, z)
        return terms

    def _global_terms(self, batch: Views, z: Embeddings) -> Loss:
        w, terms = self.fedx, Loss()
        h_first, h_second = self.fedx_head(torch.cat([z.first, z.second])).chunk(2)
        g_second, g_relation = self._teach(batch)
        if g_second is not None:
            contrast = nt_xent if w.contrast == "symmetric" else global_contrast
            terms = terms | Loss(global_contrast=w.global_contrast * contrast(h_first, g_second, w.tau))
        if g_relation is not None:
            global_relation = relational(h_first, h_second, g_relation, w.tau, w.divergence)
            terms = terms | Loss(global_relation=w.global_relation * global_relation)
        return terms

    # --- the global model F -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _teach(self, batch: Views) -> tuple[Tensor | None, Tensor | None]:
        """F(x~) and F(x_r), each only if a term uses it, in one forward pass."""
        assert self._teacher is not None, "start_round() makes the global model F"
        second = batch.second if self.fedx.global_contrast > 0 else None
        relation = batch.relation if self.fedx.global_relation > 0 else None
        g = self._teacher(torch.cat([x for x in (second, relation) if x is not None]))
        n = 0 if second is None else len(second)
        return (None if second is None else g[:n]), (None if relation is None else g[n:])

    def on_round_start(self) -> None:
        """Freezes the model that was just received as F."""
        super().on_round_start()
        online, teacher = nn.Sequential(self.backbone, self.projector), self._teacher
        if teacher is None:
            teacher = copy.deepcopy(online).eval()
            deactivate_requires_grad(teacher)
            self._set_teacher(teacher)
        else:  # One F per process: later rounds only copy weights.
            copy_state(teacher.state_dict(), online.state_dict())
        for module in teacher.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                # Before its first round the global model has no BatchNorm statistics: with the initial 0 and 1 it gives
                # all images nearly one embedding, and pulling f there makes BYOL collapse. The batch's own serve then.
                module.train(not module.num_batches_tracked)

    def on_train_start(self) -> None:
        """Lightning has moved the module by now; F is outside of it and follows by hand."""
        super().on_train_start()
        assert self._teacher is not None
        self._teacher.to(self.device)

    def _set_teacher(self, teacher: nn.Module | None) -> None:
        # Past nn.Module.__setattr__, which would make F a part of the tree.
        object.__setattr__(self, "_teacher", teacher)


def with_fedx(method: type[SSLMethod]) -> type[SSLMethod]:
    """``class FedX<Method>(FedXMixin, Method)``, for methods that are only known by name."""
    return type(f"FedX{method.__name__}", (FedXMixin, method), {"__doc__": f"FedX on {method.__name__}."})
