"""Everything a run needs, made ready but not started: data, split, model, device; and what it will cost."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fedx_pl import backbones, methods
from fedx_pl.config import Config
from fedx_pl.data import partition, sources
from fedx_pl.data.augment import Augment
from fedx_pl.data.module import ClientData, ImageStore
from fedx_pl.data.sources import ImageData
from fedx_pl.errors import UserError
from fedx_pl.evaluation.evaluate import Evaluator
from fedx_pl.federation.client import LocalTrainer, RoundContext, resolve_precision
from fedx_pl.methods.base import SSLMethod
from fedx_pl.mixins.fedx import FedXMixin, with_fedx
from fedx_pl.seeding import derive


@dataclass(frozen=True)
class Plan:
    """A run that could start now."""

    config: Config
    data: ImageData
    clients: list[np.ndarray]  # each client's rows of the training images
    device: torch.device
    precision: str
    model: SSLMethod
    augment: Augment

    @cached_property
    def store(self) -> ImageStore:
        """The training images, put where training happens at first use."""
        return ImageStore(self.data.train.images, self.device, int(self.config.run.resident_gb * 1e9))

    @cached_property
    def evaluator(self) -> Evaluator:
        """Measures the encoder on the labelled images."""
        return Evaluator(self.config.evaluation, self.data, self.augment.plain, self.config.seed)

    def client_data(self, client: int, round: int) -> ClientData:
        """A client's batches in a round."""
        relation_size = self.config.relation_size if self.model.relation_batch else 0
        return ClientData(
            self.store,
            torch.from_numpy(self.clients[client]).to(self.device),
            self.augment,
            batch_size=self.config.optim.batch_size - relation_size,
            relation_size=relation_size,
            seed=derive(self.config.seed, "data", round, client),
        )

    def choose_clients(self, round: int) -> list[int]:
        """Who trains in a round: all, or a sample of `federation.fraction`."""
        federation = self.config.federation
        count = max(
            round_half_up(federation.fraction * len(self.clients)), min(federation.min_clients, len(self.clients))
        )
        draw = np.random.default_rng(derive(self.config.seed, "clients", round))
        return sorted(draw.choice(len(self.clients), size=max(count, 1), replace=False).tolist())

    def steps_of(self, client: int) -> int:
        """Optimiser steps of a client in one round."""
        return len(self.client_data(client, round=1)) * self.config.federation.epochs

    def steps_between(self, first: int, last: int) -> int:
        """Optimiser steps of all clients in the rounds ``first`` to ``last``."""
        steps = [self.steps_of(client) for client in range(len(self.clients))]
        return sum(steps[client] for round in range(first, last + 1) for client in self.choose_clients(round))

    def estimate_seconds(self, first_round: int = 1) -> float:
        """Expected duration: the best of a few short fits and one batch of features, on a copy of the model."""
        rounds = self.config.federation.rounds
        trainer = LocalTrainer(copy.deepcopy(self.model), self.device, self.precision)
        per_step = _time_step(trainer, max((self.client_data(c, 1) for c in range(len(self.clients))), key=len))
        training = self.steps_between(first_round, rounds) * per_step
        return training + self.evaluator.estimate_seconds(trainer.model, self.device, first_round, rounds)


def _time_step(trainer: LocalTrainer, data: ClientData, budget: float = 3.0) -> float:
    """Seconds per optimiser step, from fits of two steps, the first of which warms up."""
    two = replace(data, index=data.index[: 2 * data.views_size], relation_size=min(data.relation_size, data.views_size))
    context = RoundContext(1, 1, 1, 0, trainer.model.shared_state(), "average")
    best, spent = float("inf"), 0.0
    while spent < budget:
        started = time.perf_counter()
        trainer.run(context, 0, two, None)
        seconds = time.perf_counter() - started
        best, spent = min(best, seconds / len(two)), spent + seconds
    return best


def round_half_up(value: float) -> int:
    """``round`` goes to even numbers; half of five clients should be three."""
    return int(value + 0.5)


def prepare(config: Config, report: Callable[[str], None] = print) -> Plan:
    """Loads the data, splits it and builds the model.

    Args:
        config: of the run.
        report: takes one line for each thing worth knowing.
    """
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    device = resolve_device(config.run.device)
    data = sources.load(config.data, seed=config.seed, report=report)
    train, images = data.train, data.train.images
    clients = partition.make(
        config.partition, train.labels, train.groups, len(images), config.federation.clients, config.seed,
        fingerprint=data.fingerprint,
    )  # fmt: skip
    mean, std = _normalisation(config, channels=images.shape[3])
    size = config.augment.size if 0 < config.augment.size < images.shape[1] else 0
    augment = Augment(replace(config.augment, size=size), mean, std)
    model = build_model(config, channels=images.shape[3], image_size=size or images.shape[1])
    return Plan(config, data, clients, device, resolve_precision(config.optim.precision, device), model, augment)


def _normalisation(config: Config, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Fixed numbers: taking the mean over all clients' images would need the images in one place."""
    mean, std = tuple(config.data.mean) or (0.5,) * channels, tuple(config.data.std) or (0.25,) * channels
    for key, values in (("mean", mean), ("std", std)):
        if len(values) != channels:
            raise UserError(f"data.{key}={list(values)} has {len(values)} numbers, the images have {channels} channels")
    return mean, std


def build_model(config: Config, *, channels: int, image_size: int) -> SSLMethod:
    """The method of the configuration with freshly initialised weights, the same for the same seed."""
    method = methods.find(config.method.name)
    fedx: dict[str, Any] = {"fedx": config.fedx} if config.fedx.enabled else {}
    if fedx and not issubclass(method, FedXMixin):
        method = with_fedx(method)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(config.seed, "init"))
        backbone = backbones.build(config.backbone, channels=channels, image_size=image_size)
        model = method(backbone, optim=config.optim, **config.method_options, **fedx)
    return model.to(memory_format=torch.channels_last)


def resolve_device(name: str) -> torch.device:
    """``auto``: the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"run.device={name} is not a device; type run.device=auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"run.device={name}: this machine has no usable CUDA GPU; type run.device=cpu")
    return device
