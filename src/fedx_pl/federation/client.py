"""One client, one round: take the global state, fit, return an update."""

import logging
import signal
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import MixedPrecision
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from fedx_pl.data.batches import ClientData, LocalEpochs
from fedx_pl.errors import UserError
from fedx_pl.evaluation.features import extract
from fedx_pl.evaluation.geometry import angles
from fedx_pl.federation.privacy import PrivacyOptions, protect
from fedx_pl.federation.regularizers import Regularizer, join, split
from fedx_pl.methods.base import LocalRound, SSLMethod, State, copy_state
from fedx_pl.seeding import derive

ANGLE_IMAGES = 128  # of a client's own, whose embeddings are compared before and after it trains
INITIAL_SCALE = 2.0**13  # of a client's loss in half precision; torch's own, 2**16, often overflows at first


@dataclass(frozen=True)
class RoundContext:
    """All that is the same for every client of a round."""

    round: int  # 1-based
    rounds: int
    epochs: int
    seed: int  # of the run
    global_state: State
    batchnorm: str  # average | local


@dataclass(frozen=True)
class ClientMemory:
    """What a client remembers between rounds: its private tensors, when it last trained and how far it got."""

    private: State
    last_round: int = 0
    steps: int = 0
    epochs: int = 0


@dataclass(frozen=True)
class Update:
    """What a client gives back: ``state``, ``num_images`` and scalars for the server; ``memory`` stays home."""

    client: int
    num_images: int
    state: State
    memory: ClientMemory
    losses: Tensor  # (steps, 1 + terms): total, then the named terms
    loss_names: tuple[str, ...]
    images_seen: int
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0  # that it took
    data_seconds: float = 0.0  # of them, spent on making batches

    def loss(self, name: str = "total") -> Tensor:
        """The total, or a term, by step."""
        return self.losses[:, self.loss_names.index(name)]


class LocalTrainer:
    """Runs clients one after the other on one model instance, with a new Lightning `Trainer` for each."""

    def __init__(
        self,
        model: SSLMethod,
        device: torch.device,
        precision: str,
        tick: Callable[[], None] = lambda: None,
        compile: bool = False,
        regularizer: Regularizer | None = None,
        privacy: PrivacyOptions | None = None,
        secret_noise: bool = False,
        angles_below: int = 0,
    ) -> None:
        """Keeps what is shared by all fits.

        Args:
            model: takes every client's weights in turn; it moves to the device and stays there.
            device: where it trains.
            precision: Lightning's name, e.g. ``32-true`` or ``bf16-mixed``.
            tick: called after every step.
            compile: `torch.compile` the networks, once: later clients only copy weights in.
            regularizer: holds clients together by their weights.
            privacy: what is done to an update before it is given back.
            secret_noise: its noise is the operating system's, not the run's seed's. A must where the client is real:
                everyone knows the seed.
            angles_below: clients of smaller numbers also tell how far training has turned their embeddings.
        """
        self.model = model.to(device)
        if compile:
            model.compile_networks()
        self.device = device
        self.precision = precision
        self.tick = tick
        self.regularizer = regularizer or Regularizer()
        self.privacy, self.secret_noise = privacy or PrivacyOptions(), secret_noise
        self.angles_below = angles_below
        # A client keeps its loss scale from round to round: a fresh one would skip the first steps of every fit.
        self.scaler = torch.amp.GradScaler(device.type, INITIAL_SCALE) if precision == "16-mixed" else None
        self._plugins: list[Any] = [MixedPrecision("16-mixed", device.type, self.scaler)] if self.scaler else []

    def run(self, context: RoundContext, client: int, data: ClientData, memory: ClientMemory | None) -> Update:
        """Trains one client for the round's local epochs; the result depends on nothing but the arguments."""
        started = time.perf_counter()
        seed = derive(context.seed, "train", context.round, client)
        torch.manual_seed(seed)  # For whatever a method draws by itself: dropout, a fresh queue.
        self._receive(context, memory)
        before = memory or ClientMemory({})
        # Not under noise: it would tell of the images what the noise is to hide.
        asked = client < self.angles_below and not self.privacy.noise
        sample = data.plain_sample(ANGLE_IMAGES) if asked else None
        received = self._embed(sample) if sample is not None else None
        epochs, rates = LocalEpochs(data), _LearningRates()
        self.model.start_round(
            LocalRound(context.round, context.rounds, client, context.epochs, before.epochs, seed, data)
        )
        with _quiet_lightning():
            try:
                self._trainer(context.epochs, rates).fit(self.model, epochs)
            except SystemExit:  # Lightning turns Ctrl-C into an exit and stops listening for it; we have a run to save.
                signal.signal(signal.SIGINT, signal.default_int_handler)
                raise KeyboardInterrupt from None
        self.model.on_round_end()
        update = self._update(context, client, data, before)
        update.metrics.update(rates.mean())
        if sample is not None and received is not None:
            update.metrics["angle"] = angles(self._embed(sample), received).mean().item()
        return replace(update, seconds=time.perf_counter() - started, data_seconds=epochs.seconds)

    def _embed(self, images: Tensor) -> Tensor:
        """The paper's ``f(x)`` of normalised images, in eval mode."""
        return extract(nn.Sequential(self.model.backbone, self.model.projector), images, lambda batch: batch)

    def _trainer(self, epochs: int, rates: pl.Callback) -> pl.Trainer:
        return pl.Trainer(
            max_epochs=epochs,
            accelerator="gpu" if self.device.type == "cuda" else self.device.type,
            devices=[self.device.index or 0] if self.device.type == "cuda" else 1,
            strategy=_StayOnDevice(self.device),
            precision=None if self._plugins else self.precision,  # type: ignore[arg-type]
            plugins=self._plugins or None,
            callbacks=[self.regularizer, rates, _Tick(self.tick)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )

    def _receive(self, context: RoundContext, memory: ClientMemory | None) -> None:
        weights, server = split(context.global_state)
        kept = memory.private if memory else {}
        absent = context.round - 1 - memory.last_round if memory else 0
        self.model.receive(weights, _under("", kept) if memory else None, absent)
        if memory is not None and context.batchnorm == "local":
            copy_state(batchnorm_statistics(self.model), _under(_BATCHNORM, kept))
        self.regularizer.start(self.model, server, _under(_REGULARIZER, kept))
        if self.scaler is not None:
            scale = {name: tensor.item() for name, tensor in _under(_SCALE, kept).items()}
            fresh = {"scale": INITIAL_SCALE, "_growth_tracker": 0}
            self.scaler.load_state_dict(self.scaler.state_dict() | fresh | scale)

    def _update(self, context: RoundContext, client: int, data: ClientData, before: ClientMemory) -> Update:
        private = self.model.private_state()
        if context.batchnorm == "local":
            statistics = batchnorm_statistics(self.model)
            private |= {_BATCHNORM + name: buffer.clone() for name, buffer in statistics.items()}
        for_server, kept = self.regularizer.finish(self.model)
        private |= {_REGULARIZER + name: tensor for name, tensor in kept.items()}
        seed = None if self.secret_noise else derive(context.seed, "privacy", context.round, client)
        shared, told = protect(self.model.shared_state(), split(context.global_state)[0], self.privacy, seed)
        if self.scaler is not None:
            state = self.scaler.state_dict()
            private |= {_SCALE + name: torch.tensor(state[name]) for name in ("scale", "_growth_tracker")}
            told["loss_scale"] = state["scale"]
        losses = self.model.loss_history()
        return Update(
            client,
            data.num_images,
            join(shared, for_server),
            ClientMemory(
                private,
                last_round=context.round,
                steps=before.steps + len(losses),
                epochs=before.epochs + context.epochs,
            ),
            losses,
            ("total", *self.model.term_names),
            len(losses) * data.views_size,
            self.model.round_metrics() | told,
        )


# Mark what a client keeps beside the method's private state.
_BATCHNORM = "batchnorm/"  # statistics, under `federation.batchnorm=local`
_REGULARIZER = "regularizer/"
_SCALE = "scale/"  # of the loss, in half precision


def _under(mark: str, kept: State) -> State:
    """What was kept under a mark, by its plain name; without a mark, the method's own."""
    if not mark:
        return {
            name: tensor for name, tensor in kept.items() if not name.startswith((_BATCHNORM, _REGULARIZER, _SCALE))
        }
    return {name.removeprefix(mark): tensor for name, tensor in kept.items() if name.startswith(mark)}


def batchnorm_statistics(model: SSLMethod) -> State:
    """Running means and variances of the shared network, by name, not copied."""
    private = model.private_names()
    return {
        f"{module_name}.{name}": buffer
        for module_name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module_name.split(".")[0] not in private
        for name, buffer in module.named_buffers(recurse=False)
    }


class _StayOnDevice(SingleDeviceStrategy):
    """Leaves the module where it is after a fit; Lightning would move it to the CPU and empty the GPU's cache."""

    def teardown(self) -> None:
        self.optimizers = []  # A Trainer is full of cycles: the momentum would live on until Python happens to collect.
        self.precision_plugin.teardown()


class _LearningRates(pl.Callback):
    """Reads the learning rate of every step from the optimizer itself, which may be the method's own.

    Of several parameter groups it is that of the group with the most parameters.
    """

    def __init__(self) -> None:
        self._group: dict[str, Any] = {}
        self._rates: list[float | Tensor] = []

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        if groups:
            self._group = max(groups, key=lambda group: sum(p.numel() for p in group["params"]))

    def on_before_optimizer_step(self, *_: Any) -> None:
        rate = self._group.get("lr")
        if rate is not None:
            # A tensor's value would have to be waited for: it is read when the round is over.
            self._rates.append(rate.detach().clone() if isinstance(rate, Tensor) else rate)

    def mean(self) -> dict[str, float]:
        """``lr`` of the round, the mean over its steps; nothing without an optimizer."""
        rates = [float(rate) for rate in self._rates]
        return {"lr": mean(rates)} if rates else {}


def mean(values: Sequence[float]) -> float:
    """The mean; of equal values the value itself, to the last bit."""
    return values[0] if len(set(values)) == 1 else statistics.fmean(values)


class _Tick(pl.Callback):
    """Tells of every step."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self.tick = tick

    def on_train_batch_end(self, *_: Any) -> None:
        self.tick()


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Lightning greets and takes leave at every `fit`; a run makes thousands."""
    logger = logging.getLogger("pytorch_lightning")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*does not have many workers.*")
            warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.*")  # Lightning on a newer torch
            yield
    finally:
        logger.setLevel(level)


def resolve_precision(precision: str, device: torch.device) -> str:
    """``auto``: bf16-mixed on GPUs that have it, 16-mixed on older ones, 32-true on a CPU."""
    if precision == "16-mixed" and device.type == "cpu":
        raise UserError("optim.precision=16-mixed needs a GPU; type optim.precision=auto, 32-true or bf16-mixed")
    if precision != "auto":
        return precision
    if device.type != "cuda":
        return "32-true"
    return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "16-mixed"
