"""One round of one client: it takes the global state, fits, and returns an update."""

import logging
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import MixedPrecision
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from fedx_pl.data.batches import ClientData, LocalEpochs
from fedx_pl.errors import UserError
from fedx_pl.federation.device import resolve_precision
from fedx_pl.federation.options import PrivacyOptions
from fedx_pl.federation.privacy import protect
from fedx_pl.federation.regularizers import Regularizer
from fedx_pl.federation.round import (
    ClientMemory,
    GlobalState,
    RoundContext,
    Update,
    mean,
    number_of,
)
from fedx_pl.methods.base import LocalRound, SSLMethod, State, copy_state
from fedx_pl.seeding import derive

INITIAL_SCALE = 2.0**13  # of the loss in half precision; torch's 2**16 often overflows at first
SCALE_STATE = ("scale", "_growth_tracker")  # the part of a GradScaler's state that a client keeps


class LocalTrainer:
    """Trains clients in turn on one model instance, with a new Lightning `Trainer` for each."""

    def __init__(
        self,
        model: SSLMethod,
        *,
        device: torch.device,
        precision: str = "auto",
        compile: bool = False,  # noqa: A002 (as torch calls it)
        regularizer: Regularizer | None = None,
        privacy: PrivacyOptions | None = None,
        secret_noise: bool = False,
        callbacks: Sequence[pl.Callback] = (),
        tick: Callable[[], None] = lambda: None,
        max_batches: int = 0,
    ) -> None:
        """Keeps what all fits share.

        Args:
            model: takes every client's weights in turn; it moves to the device and stays there.
            device: where it trains.
            precision: Lightning's name, e.g. ``32-true`` or ``bf16-mixed``, or ``auto``.
            compile: `torch.compile` the networks once; later clients only copy weights in.
            regularizer: keeps the clients' weights close.
            privacy: what is done to an update before it is returned.
            secret_noise: draw the noise from the operating system instead of the run's seed. Real
                clients must, since everyone knows the seed.
            callbacks: Lightning callbacks of every fit. If one has a method `round_metrics`, its
                numbers are added to those of the update, but not under noise.
            tick: called after every step.
            max_batches: batches of an epoch, for a trial run; 0: all.
        """
        self.model = model.to(device)
        if compile:
            model.compile_networks()
        self.device = device
        self.precision = resolve_precision(precision, device) if precision == "auto" else precision
        self.max_batches = max_batches
        self.regularizer = regularizer or Regularizer()
        self.privacy = privacy or PrivacyOptions()
        self.secret_noise = secret_noise
        rates = _LearningRates()
        self.callbacks = [self.regularizer, rates, *callbacks, _Tick(tick)]
        # Skipped under DP noise, since numbers measured on images would leak.
        self._reporting = [rates] if self.privacy.noise else [rates, *callbacks]
        # A client keeps its loss scale, since a fresh one would skip the first steps of every fit.
        self.scaler = (
            torch.amp.GradScaler(device.type, INITIAL_SCALE)
            if self.precision == "16-mixed"
            else None
        )

    def run(
        self,
        context: RoundContext,
        *,
        client: int,
        data: ClientData,
        memory: ClientMemory | None = None,
    ) -> Update:
        """Trains one client for a round; the result depends on the arguments only."""
        started = time.perf_counter()
        before = memory or ClientMemory()
        seed = derive(context.seed, "train", context.round, client)
        torch.manual_seed(seed)  # For what a method draws by itself: dropout, a new queue.
        self._receive(context, memory)
        self.model.start_round(
            LocalRound(
                round=context.round,
                rounds=context.rounds,
                client=client,
                epochs=context.epochs,
                epochs_before=before.epochs,
                seed=seed,
                data=data,
            )
        )
        batches = LocalEpochs(data)
        with _fitting():
            self._new_trainer(context.epochs).fit(self.model, batches)
        self.model.on_round_end()
        update = self._update(context, client, data, before=before)
        return replace(update, seconds=time.perf_counter() - started, data_seconds=batches.seconds)

    def _new_trainer(self, epochs: int) -> pl.Trainer:
        gpu = self.device.type == "cuda"
        plugins: list[Any] = (
            [MixedPrecision("16-mixed", self.device.type, self.scaler)] if self.scaler else []
        )
        return pl.Trainer(
            max_epochs=epochs,
            limit_train_batches=self.max_batches or None,
            accelerator="gpu" if gpu else self.device.type,
            devices=[self.device.index or 0] if gpu else 1,
            strategy=_StayOnDevice(self.device),
            precision=None if plugins else self.precision,  # type: ignore[arg-type]
            plugins=plugins or None,
            callbacks=list(self.callbacks),  # A copy: Lightning adds those of entry points to it.
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )

    def _receive(self, context: RoundContext, memory: ClientMemory | None) -> None:
        """Loads the global state, then what the client kept."""
        kept = memory or ClientMemory()
        absent = context.round - 1 - kept.last_round if memory else 0
        self.model.receive(context.global_state.weights, kept.private if memory else None, absent)
        if memory and context.batchnorm == "local":
            copy_state(batchnorm_statistics(self.model), kept.batchnorm)
        self.regularizer.start(self.model, context.global_state.server, kept.regularizer)
        if self.scaler is not None:
            scale = {"scale": INITIAL_SCALE, "_growth_tracker": 0}
            scale |= {name: tensor.item() for name, tensor in kept.loss_scale.items()}
            self.scaler.load_state_dict(self.scaler.state_dict() | scale)

    def _update(
        self, context: RoundContext, client: int, data: ClientData, before: ClientMemory
    ) -> Update:
        model = self.model
        losses = model.loss_history()
        for_server, kept_by_regularizer = self.regularizer.finish(model)
        seed = None if self.secret_noise else derive(context.seed, "privacy", context.round, client)
        weights, norms = protect(
            model.shared_state(), context.global_state.weights, self.privacy, seed=seed
        )
        scale = self.scaler.state_dict() if self.scaler else {}
        metrics = model.round_metrics() | norms
        metrics |= {"loss_scale": scale["scale"]} if scale else {}
        for callback in self._reporting:
            metrics |= callback.round_metrics() if hasattr(callback, "round_metrics") else {}
        metrics = {name: _metric(name, value) for name, value in metrics.items()}
        memory = ClientMemory(
            private=model.private_state(),
            batchnorm=_copied(batchnorm_statistics(model)) if context.batchnorm == "local" else {},
            regularizer=kept_by_regularizer,
            loss_scale={name: torch.tensor(scale[name]) for name in SCALE_STATE if scale},
            last_round=context.round,
            steps=before.steps + len(losses),
            epochs=before.epochs + context.epochs,
        )
        return Update(
            client=client,
            num_images=data.num_images,
            state=GlobalState(weights=weights, server=for_server),
            memory=memory,
            losses=losses,
            loss_names=("total", *model.term_names),
            images_seen=len(losses) * data.views_size,
            metrics=metrics,
        )


def batchnorm_statistics(model: SSLMethod) -> State:
    """The running means and variances of the shared network by name, not copied."""
    private = model.private_names()
    return {
        f"{module_name}.{name}": buffer
        for module_name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and module_name.split(".")[0] not in private
        for name, buffer in module.named_buffers(recurse=False)
    }


def _metric(name: str, value: Any) -> float:
    try:
        number: float = number_of(value)
        return number
    except TypeError as error:
        raise UserError(
            f"round_metrics() has {name!r}: {value!r}, which is not one number; return e.g. its "
            f"mean"
        ) from error


def _copied(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}


class _StayOnDevice(SingleDeviceStrategy):
    """Leaves the module on its device after a fit; Lightning would move it to the CPU."""

    def teardown(self) -> None:
        # A Trainer is full of reference cycles: momentum would stay until Python collects them.
        self.optimizers = []
        self.precision_plugin.teardown()


class _LearningRates(pl.Callback):
    """Records the learning rate of every step, of the parameter group with the most parameters."""

    def __init__(self) -> None:
        self._group: dict[str, Any] = {}
        self._rates: list[float | Tensor] = []

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._group = {}
        self._rates = []
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        if groups:
            self._group = max(groups, key=lambda group: sum(p.numel() for p in group["params"]))

    def on_before_optimizer_step(self, *_: Any) -> None:
        rate = self._group.get("lr")
        if rate is not None:
            # Reading a tensor would wait for the device, so that is done at the end of the round.
            self._rates.append(rate.detach().clone() if isinstance(rate, Tensor) else rate)

    def round_metrics(self) -> dict[str, float]:
        """``lr``, the mean over the round's steps; nothing without an optimizer."""
        rates = [float(rate) for rate in self._rates]
        return {"lr": mean(rates)} if rates else {}


class _Tick(pl.Callback):
    """Calls `tick` after every batch."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self.tick = tick

    def on_train_batch_end(self, *_: Any) -> None:
        self.tick()


@contextmanager
def _fitting() -> Iterator[None]:
    """Silences Lightning, which prints at every `fit`, and makes Ctrl-C a KeyboardInterrupt."""
    logger = logging.getLogger("pytorch_lightning")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*does not have many workers.*")
            # Lightning on a newer torch.
            warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.*")
            yield
    except SystemExit:  # Lightning turns Ctrl-C into an exit and removes the signal handler.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        raise KeyboardInterrupt from None
    finally:
        logger.setLevel(level)
