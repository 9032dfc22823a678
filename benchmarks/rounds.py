"""``ours`` and ``plain``: rounds as users run them.

They use a configuration, `FederatedTrainer` and Lightning's Trainer.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Lap
from fedx_pl.callbacks.base import RoundCallback
from fedx_pl.config import compose as configuration
from fedx_pl.config.build import Run, build, make_trainer
from fedx_pl.engines import Engine
from fedx_pl.federation.estimate import steps_of
from fedx_pl.federation.round import RoundRecord, Update
from fedx_pl.trainer import FederatedTrainer

# With FedX, with its cheaper relation, and without it. `{batch}` is B; FedX's batch size includes
# B_r.
VARIANTS = {
    "FedX": ("method=simclr", "fedx=true", "optim.batch_size={both}"),
    "FedX queue": ("method=simclr", "fedx=true", "fedx.relation=queue", "optim.batch_size={both}"),
    "plain": ("method=simclr", "optim.batch_size={batch}"),
}


def variant(name: str, batch: int) -> list[str]:
    """Overrides of a variant.

    Args:
        name: a key of `VARIANTS`.
        batch: number of images in ``B``, and in ``B_r`` where there is one.
    """
    return [override.format(batch=batch, both=2 * batch) for override in VARIANTS[name]]


def backbone(name: str) -> list[str]:
    """Overrides of a network.

    Args:
        name: ``resnet18`` is the paper's, ``thin`` that of the cpu profile, ``thin-cifar`` the same
            with the full CIFAR stem, which makes it four times as expensive.
    """
    choice = {"resnet18": ["profile=paper", "backbone.stem=cifar"], "thin": ["profile=cpu"]}
    chosen = configuration.compose(
        choice.get(name, ["profile=cpu", "backbone.stem=cifar"])
    ).backbone
    return [
        f"backbone.name={chosen.name}",
        f"backbone.width={chosen.width}",
        f"backbone.stem={chosen.stem}",
    ]


@dataclass(frozen=True)
class Setting:
    """The settings that all parts of a benchmark share."""

    device: torch.device
    repeats: int = 3
    quick: bool = False
    overrides: tuple[str, ...] = ()  # of all our runs, e.g. data.root=... or run.compile=true
    say: Callable[[str], None] = lambda _line: None

    def build(self, *overrides: str, evaluate: bool = False) -> Run:
        """A run on CIFAR-10, ready to start.

        Args:
            *overrides: further settings.
            evaluate: whether to keep the test images; without them, nothing is evaluated.
        """
        common = (
            "data=cifar10",
            "profile=paper",
            "partition.kind=iid",
            f"run.device={self.device}",
            "run.resume=never",
        )
        config = configuration.compose([*common, *overrides, *self.overrides])
        run = build(config, report=lambda _line: None)
        if not evaluate:
            run.data.images = replace(run.data.images, test=None)
            run.trainer.attach(run.model, run.data)  # Its evaluator holds the images, too.
        settle(run)
        return run

    def few(self, full: int, quick: int) -> int:
        """A size, by whether this is a smoke run."""
        return quick if self.quick else full


@dataclass
class Silent(RoundCallback):
    """Shows nothing and notes when clients and rounds end."""

    clients: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)

    def on_note(self, trainer: FederatedTrainer, text: str) -> None:
        """Raises, since a dropped update would make the times meaningless."""
        raise RuntimeError(text)

    def on_fit_start(self, trainer: FederatedTrainer) -> None:
        """Notes the time after the evaluation of the untrained network."""
        self.rounds.append(time.perf_counter())

    def on_client_update(
        self, trainer: FederatedTrainer, record: RoundRecord, update: Update
    ) -> None:
        """Notes when a client has trained."""
        self.clients.append(time.perf_counter())

    def on_round_saved(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        """Notes when a round is trained, evaluated, saved and logged."""
        self.rounds.append(time.perf_counter())


@torch.no_grad()
def settle(run: Run) -> None:
    """Gives BatchNorm statistics of real images, as after any round but the first.

    In round 1, FedX runs ``F`` with the batch's own statistics. The 99 rounds after it are to be
    timed.
    """
    model = run.model.to(run.trainer.device).train()
    for batch in islice(run.trainer.client_data(0, round_number=1).epoch(0), 2):
        model.embed(batch.first)
    model.cpu()


def train(
    run: Run, engine: Callable[[FederatedTrainer], Engine] | None = None
) -> tuple[list[dict[str, Any]], Silent]:
    """Trains in a fresh temporary folder; returns the rows of ``metrics.csv`` and the end times.

    Args:
        run: what to train.
        engine: where clients train; as the configuration says if not given.
    """
    display = Silent()
    with tempfile.TemporaryDirectory(prefix="fedx-pl-bench-") as folder:
        config = replace(run.config, run=replace(run.config.run, dir=str(Path(folder) / "run")))
        trainer = make_trainer(config, callbacks=[display], engine=engine)
        # The same model every time: its weights do not matter, and compiled code is reused.
        trainer.fit(run.model, run.data)
    return trainer.history, display


def images_of(run: Run) -> int:
    """Images of ``B`` that all clients see in a round in which all train."""
    trainer = run.trainer
    clients = range(run.data.num_clients)
    return sum(
        steps_of(trainer, c) * trainer.client_data(c, round_number=1).views_size for c in clients
    )


def training_round(run: Run) -> Lap:
    """Times one round's local training and averaging."""
    rows, _ = train(run)
    return Lap(images_of(run), rows[-1]["train_seconds"])


def whole_round(run: Run) -> Lap:
    """Times one round with its evaluation."""
    rows, _ = train(run)
    return Lap(images_of(run), rows[-1]["round_seconds"])
