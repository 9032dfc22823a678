"""The contract of a self-supervised method.

A method defines only what is special about it: its networks, its ``loss``, and which part of its
state stays with the client. The base class owns the optimizer, the counters, the EMA updates, the
history of losses and the exchange of state.

The smallest method is its loss::

    class SimCLR(SSLMethod):
        def loss(self, batch: Views, z: Embeddings) -> Loss:
            return Loss(contrastive=nt_xent(z.first, z.second, tau=0.1))

Hyper-parameters are the arguments of ``__init__`` that have a default. The command line finds them
there, with their types (``method.embed_dim=128``).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import pytorch_lightning as pl
import torch
from lightly.models.modules.heads import ProjectionHead
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from fedx_pl.backbones import with_feature_dim
from fedx_pl.errors import UserError, options_of
from fedx_pl.methods.optim import OptimOptions
from fedx_pl.options import check
from fedx_pl.provenance import loaded_code

State = dict[str, Tensor]


class Views(NamedTuple):
    """A training batch of ``n`` images, augmented and normalized on the training device.

    Views are stacked in one tensor, so a forward pass over adjacent views needs no copy.
    """

    stacked: Tensor  # (2n + r, C, h, w): x, x~, x_r
    rows: Tensor  # (n,) positions of the images within the client's data

    @property
    def first(self) -> Tensor:
        """The first views x, (n, C, h, w)."""
        return self.stacked[: len(self.rows)]

    @property
    def second(self) -> Tensor:
        """The second views x~, (n, C, h, w): another augmentation of the same images."""
        return self.stacked[len(self.rows) : 2 * len(self.rows)]

    @property
    def relation(self) -> Tensor | None:
        """The independent batch B_r, (r, C, h, w); None unless `relation_batch` asks for it."""
        views = 2 * len(self.rows)
        return self.stacked[views:] if len(self.stacked) > views else None


class Embeddings(NamedTuple):
    """``z = projector(backbone(x))`` of a batch, all from one forward pass."""

    first: Tensor  # (n, d)
    second: Tensor  # (n, d); equal to `first` for methods with `online_views = 1`
    relation: Tensor | None = None  # (r, d)


class Loss(dict[str, Tensor]):
    """Named scalar terms whose plain sum is minimized."""

    @property
    def total(self) -> Tensor:
        """The sum of all terms."""
        return self.stacked().sum()

    def stacked(self) -> Tensor:
        """All terms in one tensor (terms,).

        A term of one element may have any number of axes.

        Raises:
            UserError: a term is not one number.
        """
        for name, term in self.items():
            if not isinstance(term, Tensor):
                raise UserError(
                    f"the loss term {name!r} is {term!r}, not a tensor; return "
                    f"z.first.new_tensor({term!r}), which is on the same device, or leave it out"
                )
            if term.numel() != 1:
                raise UserError(
                    f"the loss term {name!r} has shape {tuple(term.shape)}, not one number; "
                    f"return its mean, e.g. Loss({name}=term.mean())"
                )
        return torch.stack([term.reshape(()) for term in self.values()])

    def __mul__(self, weight: float) -> "Loss":
        return Loss({name: weight * term for name, term in self.items()})

    def __or__(self, other: dict[str, Tensor]) -> "Loss":  # type: ignore[override]
        if twice := self.keys() & other.keys():
            raise ValueError(
                f"two loss terms are both named {sorted(twice)}; give each its own name"
            )
        return Loss({**self, **other})

    def __ior__(self, other: dict[str, Tensor]) -> "Loss":  # type: ignore[override]
        return self | other  # `dict.__ior__` would let the second of two terms of one name win.


class EmaPair(NamedTuple):
    """``target <- momentum * target + (1 - momentum) * online`` after every step."""

    online: nn.Module
    target: nn.Module
    momentum: float


class LocalData(Protocol):
    """Access of a method to the client's own images."""

    @property
    def num_images(self) -> int:
        """The number of images that the client owns."""

    @property
    def batch_size(self) -> int:
        """Images per batch, as configured."""

    def plain_batches(self) -> Iterator[Tensor]:
        """All images in order, not augmented, normalized, batch by batch."""

    def plain_sample(self, size: int) -> Tensor:
        """Draws up to ``size`` images at random, normalized and not augmented."""


class _UnknownData:
    """Stands for the images behind a loader that a plain `pl.Trainer` was given."""

    def __getattr__(self, name: str) -> Any:
        raise UserError(
            f"this method asks for {name} of the images, which a loader does not know; "
            f"give pl.Trainer.fit the FederatedDataModule itself"
        )


@dataclass(frozen=True, kw_only=True)
class LocalRound:
    """The state of a client when its local training starts."""

    round: int  # 1-based
    rounds: int
    client: int
    epochs: int  # local epochs of this round
    epochs_before: int  # local epochs this client has trained in earlier rounds
    seed: int
    data: LocalData


class SSLMethod(pl.LightningModule):
    """Base of all methods; see the module docstring."""

    online_views = 2  # 1: only `first` passes through the online network (MoCo's query)
    relation_batch = False  # True: every batch also carries the relation batch B_r
    local: LocalRound  # set by `start_round`

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        loaded_code.remember(cls)

    def __init__(
        self,
        backbone: nn.Module,
        *,
        hidden_dim: int = 256,
        embed_dim: int = 256,
        optim: OptimOptions | None = None,
    ) -> None:
        """Makes the online network.

        Args:
            backbone: maps images to (n, ``backbone.feature_dim``), which is found by a forward
                pass if the backbone does not have it.
            hidden_dim: hidden units of the projector.
            embed_dim: dimensions of ``z``.
            optim: settings of the optimizer; the paper's by default.
        """
        super().__init__()
        # Those of subclasses, too: Lightning looks at their frames.
        self.save_hyperparameters(ignore=["backbone"])
        check("hidden_dim", hidden_dim, example=256, at_least=1)
        check("embed_dim", embed_dim, example=256, at_least=1)
        self.feature_dim = int(with_feature_dim(backbone).feature_dim)  # type: ignore[arg-type]
        self.hidden_dim, self.embed_dim = hidden_dim, embed_dim
        self.optim = options_of("optim", optim, OptimOptions)
        self.backbone = backbone
        self.projector: nn.Module = mlp(self.feature_dim, hidden_dim, embed_dim)
        self.term_names: tuple[str, ...] = ()
        self._terms: list[Tensor] = []
        self._in_round = False

    # --- what a method defines ----------------------------------------------------------------

    def loss(self, batch: Views, z: Embeddings) -> Loss:
        """The method's own terms for one batch, from embeddings that are already computed."""
        raise NotImplementedError(f"{type(self).__name__} must define loss(batch, z)")

    def ema_pairs(self) -> list[EmaPair]:
        """Targets that follow an online network; list the targets in `private_names`."""
        return []

    def private_names(self) -> set[str]:
        """Attributes that never leave the client, such as EMA targets and queues.

        All other modules and buffers are averaged.
        """
        return set()

    def reset_private(self) -> None:
        """Initializes the private state of a new client; the global state is already loaded."""
        for online, target, _ in self.ema_pairs():
            copy_state(target.state_dict(), online.state_dict())

    def on_round_start(self) -> None:
        """Called with `self.local` set, before the first local epoch."""

    def on_local_epoch(self, epoch: int) -> None:
        """Called before each local epoch.

        Args:
            epoch: counts all epochs of this client since the run began.
        """

    def on_round_end(self) -> None:
        """Called after the last local epoch, before the state is read."""

    def round_metrics(self) -> dict[str, float]:
        """Metrics of the round just trained, logged beside the losses."""
        return {}

    def reserved_images(self, batch_size: int) -> int:
        """The number of images of a step that are not in ``B``.

        They are the relation batch, or left out so that results are comparable.
        """
        return 0

    # --- the online network -------------------------------------------------------------------

    def embed(self, x: Tensor) -> Tensor:
        """The paper's ``f(x)``: (n, C, h, w) -> (n, embed_dim).

        Replace `backbone` or `projector` instead of overriding this method, since `FedXMixin`
        builds its ``F`` from the same two networks.
        """
        z: Tensor = self.projector(self.backbone(x))
        return z

    def embed_views(self, batch: Views) -> Embeddings:
        """Embeds all views in one forward pass, so that they share BatchNorm statistics."""
        n = len(batch.rows)
        r = len(batch.stacked) - 2 * n
        if self.online_views == 1:
            x = batch.first if batch.relation is None else torch.cat([batch.first, batch.relation])
            first, *relation = self.embed(x).split([n, r] if r else [n])
            return Embeddings(first, first, *relation)
        return Embeddings(*self.embed(batch.stacked).split([n, n, r] if r else [n, n]))

    def compile_networks(self) -> None:
        """Compiles all networks that see images; names and weights stay as they are."""
        for network in (self.backbone, *(pair.target for pair in self.ema_pairs())):
            network.compile()

    # --- shared state travels, private state stays --------------------------------------------

    def shared_state(self) -> State:
        """Copies of all tensors the server averages."""
        return {name: t.detach().clone() for name, t in self._split_state()[0].items()}

    def private_state(self) -> State:
        """Copies of all tensors that stay with this client between rounds."""
        return {name: t.detach().clone() for name, t in self.kept_tensors().items()}

    def kept_tensors(self) -> State:
        """The private tensors to keep between rounds, not copied; all of them by default."""
        return self._split_state()[1]

    def receive(
        self,
        shared: State,
        private: State | None,
        absent: int = 0,
    ) -> None:
        """Loads a client's state at the start of a round.

        Args:
            shared: the global state that the server sent.
            private: the state that the client kept; None in its first round.
            absent: rounds that the client missed since it last trained.
        """
        self.load_shared(shared)
        if private is None:
            self.reset_private()
        else:
            copy_state(self.kept_tensors(), private)

    def load_shared(self, shared: State) -> None:
        """Copies a global state into the online network."""
        copy_state(self._split_state()[0], shared)

    def _split_state(self) -> tuple[State, State]:
        private = self.private_names()
        shared: State = {}
        own: State = {}
        for name, tensor in self.state_dict().items():
            (own if name.split(".")[0] in private else shared)[name] = tensor
        return shared, own

    def setup(self, stage: str) -> None:
        """Starts the only round of a plain ``pl.Trainer().fit(method, data)``."""
        if stage != "fit" or self._in_round:
            return
        datamodule: Any = getattr(self.trainer, "datamodule", None)
        data = (
            datamodule.train_dataloader().data
            if hasattr(datamodule, "num_clients")
            else _UnknownData()
        )
        epochs = max(self.trainer.max_epochs or 1, 1)
        seed = torch.initial_seed() % 2**63
        self.start_round(
            LocalRound(
                round=1, rounds=1, client=0, epochs=epochs, epochs_before=0, seed=seed, data=data
            )
        )

    def on_fit_end(self) -> None:
        """Ends the round; the next fit starts another one."""
        self._in_round = False

    def start_round(self, local: LocalRound) -> Self:
        """Prepares for one `Trainer.fit`."""
        self.local = local
        self._in_round = True
        self.term_names = ()
        self._terms = []
        self.train()
        self.on_round_start()
        return self

    def loss_history(self) -> Tensor:
        """Losses of the round, (steps, 1 + terms): the total, then `term_names` in order."""
        if not self._terms:
            return torch.zeros(0, 1 + len(self.term_names))
        return torch.stack(self._terms).cpu()  # One copy from the device for all steps.

    # --- Lightning ----------------------------------------------------------------------------

    def training_step(self, batch: Views, batch_idx: int) -> Tensor:
        """Sums the terms, and keeps them on the device to avoid a synchronization in each step."""
        loss = self.loss(batch, self.embed_views(batch))
        if not isinstance(loss, Loss):
            name = type(self).__name__
            raise UserError(
                f"{name}.loss returns a {type(loss).__name__}; "
                f"return Loss({name.lower()}=...), named terms"
            )
        self.term_names = self.term_names or tuple(loss)
        if tuple(loss) != self.term_names:
            raise RuntimeError(
                f"loss terms changed within a round from {self.term_names} to {tuple(loss)}"
            )
        terms = loss.stacked()
        total = terms.sum()
        self._terms.append(torch.cat([total[None], terms]).detach())
        return total

    def on_train_epoch_start(self) -> None:
        """Counts epochs over all rounds, which `trainer.current_epoch` does not."""
        self.on_local_epoch(self.local.epochs_before + self.trainer.current_epoch)

    def on_train_batch_end(self, *_: Any) -> None:
        """Updates the EMA targets in place, after the optimizer's step."""
        for pair in self.ema_pairs():
            update_ema(pair)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """A new SGD optimizer of all trainable parameters."""
        lr = self.optim.lr_at(self.local.round, self.local.rounds)
        trainable = [p for p in self.parameters() if p.requires_grad]
        momentum = self.optim.momentum
        decay = self.optim.weight_decay
        optimizer = torch.optim.SGD(trainable, lr, momentum, weight_decay=decay, fused=True)
        # The fused kernel takes all momenta or none, and would fail for a head whose gradients
        # begin later than the others'. Starting from zero is what a first step does anyway.
        for parameter in trainable if momentum else ():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return optimizer


def mlp(
    in_dim: int,
    hidden_dim: int,
    out_dim: int,
    *,
    batchnorm: bool = False,
    standardized: bool = False,
) -> nn.Module:
    """A head as in the paper: Linear, (BatchNorm,) ReLU, Linear, (BatchNorm without weights)."""
    hidden = nn.BatchNorm1d(hidden_dim) if batchnorm else None
    output = nn.BatchNorm1d(out_dim, affine=False) if standardized else None
    head: nn.Module = ProjectionHead(
        [(in_dim, hidden_dim, hidden, nn.ReLU()), (hidden_dim, out_dim, output, None)]
    )
    return head


def update_ema(pair: EmaPair) -> None:
    """Moves the target's parameters towards the online ones in place.

    BatchNorm statistics are left alone.
    """
    move = get_ema_multi_avg_fn(pair.momentum)
    move(tuple(pair.target.parameters()), tuple(pair.online.parameters()), 0)


@torch.no_grad()
def copy_state(into: State, source: State) -> None:
    """Copies ``source`` into the tensors of ``into``; both must have the same names and shapes."""
    if into.keys() != source.keys():
        odd = sorted(into.keys() ^ source.keys())
        raise ValueError(f"states differ in {len(odd)} names, the first is {odd[0]!r}")
    for name, tensor in into.items():
        if tensor.shape != source[name].shape:
            raise ValueError(
                f"{name} has shape {tuple(source[name].shape)}, expected {tuple(tensor.shape)}"
            )
    if into:
        # Private, and 1.4 times as fast as a loop on a thin ResNet-18 (one thread).
        torch._foreach_copy_(list(into.values()), [source[name] for name in into])
