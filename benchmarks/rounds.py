"""``ours`` and ``plain``: rounds as users run them, through configuration, plan, orchestrator and Trainer."""

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
from fedx_pl.config.build import Plan, prepare
from fedx_pl.federation.round import RoundRecord, Update
from fedx_pl.trainer import Orchestrator

# With FedX, with its cheaper relation, and without it. `{batch}` is B; FedX's batch size counts B_r too.
VARIANTS = {
    "FedX": ("method=simclr", "fedx=true", "optim.batch_size={both}"),
    "FedX queue": ("method=simclr", "fedx=true", "fedx.relation=queue", "optim.batch_size={both}"),
    "plain": ("method=simclr", "optim.batch_size={batch}"),
}


def variant(name: str, batch: int) -> list[str]:
    """Overrides of a variant whose batch ``B`` (and ``B_r``, where there is one) has ``batch`` images."""
    return [override.format(batch=batch, both=2 * batch) for override in VARIANTS[name]]


def backbone(name: str) -> list[str]:
    """Overrides of a network.

    Args:
        name: ``resnet18`` is the paper's, ``thin`` that of the cpu profile, ``thin-cifar`` the same with the full
            CIFAR stem, which makes it four times as expensive.
    """
    choice = {"resnet18": ["profile=paper", "backbone.stem=cifar"], "thin": ["profile=cpu"]}
    chosen = configuration.compose(choice.get(name, ["profile=cpu", "backbone.stem=cifar"])).backbone
    return [f"backbone.name={chosen.name}", f"backbone.width={chosen.width}", f"backbone.stem={chosen.stem}"]


@dataclass(frozen=True)
class Setting:
    """What all parts of a benchmark share."""

    device: torch.device
    repeats: int = 3
    quick: bool = False
    overrides: tuple[str, ...] = ()  # for everything of ours, e.g. data.root=... or run.compile=true
    say: Callable[[str], None] = lambda line: None

    def plan(self, *overrides: str, evaluate: bool = False) -> Plan:
        """A run on CIFAR-10, ready to start; without ``evaluate`` it has no test images, so nothing is measured."""
        common = (
            "data=cifar10", "profile=paper", "partition.kind=iid", f"run.device={self.device}", "run.resume=never",
        )  # fmt: skip
        config = configuration.compose([*common, *overrides, *self.overrides])
        plan = prepare(config, report=lambda line: None)
        if not evaluate:
            plan = replace(plan, data=replace(plan.data, test=None))
        settle(plan)
        return plan

    def few(self, full: int, quick: int) -> int:
        """A size, by whether this is a smoke run."""
        return quick if self.quick else full


@dataclass
class Silent(RoundCallback):
    """Shows nothing and notes when clients and rounds end."""

    clients: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)

    def step(self, count: int = 1) -> None:
        """Is what an engine alone calls."""

    def working(self, worker: str, client: int | None) -> None:
        """Is what an engine alone calls."""

    def note(self, text: str) -> None:
        """A dropped update would make the times meaningless."""
        raise RuntimeError(text)

    def on_note(self, trainer: Orchestrator, text: str) -> None:
        """Does the same within a run."""
        self.note(text)

    def on_fit_start(self, trainer: Orchestrator) -> None:
        """The untrained network is measured."""
        self.rounds.append(time.perf_counter())

    def on_client_update(self, trainer: Orchestrator, record: RoundRecord, update: Update) -> None:
        """A client is done."""
        self.clients.append(time.perf_counter())

    def on_round_saved(self, trainer: Orchestrator, record: RoundRecord) -> None:
        """A round is trained, measured, saved and logged."""
        self.rounds.append(time.perf_counter())


@torch.no_grad()
def settle(plan: Plan) -> None:
    """Gives BatchNorm statistics of real images, as after any round but the first.

    In round 1 FedX runs ``F`` with the batch's own statistics; what is to be timed are the 99 rounds after it.
    """
    model = plan.model.to(plan.device).train()
    for batch in islice(plan.client_data(0, round_number=1).epoch(0), 2):
        model.embed(batch.first)
    model.cpu()


def run(plan: Plan) -> tuple[list[dict[str, Any]], Silent]:
    """Runs a plan in a fresh temporary folder; returns the rows of ``metrics.csv`` and when things ended."""
    display = Silent()
    with tempfile.TemporaryDirectory(prefix="fedx-pl-bench-") as folder:
        config = replace(plan.config, run=replace(plan.config.run, dir=str(Path(folder) / "run")))
        # The same model instance again and again: its weights do not matter here, and compiled code is reused.
        rows = Orchestrator(replace(plan, config=config), display).run().rows
    return rows, display


def images_of(plan: Plan) -> int:
    """Images of ``B`` that all clients see in a round in which all train."""
    return sum(plan.steps_of(c) * plan.client_data(c, round_number=1).views_size for c in range(len(plan.clients)))


def training_round(plan: Plan) -> Lap:
    """One round's local training and averaging."""
    rows, _ = run(plan)
    return Lap(images_of(plan), rows[-1]["train_seconds"])


def whole_round(plan: Plan) -> Lap:
    """One round with its evaluation."""
    rows, _ = run(plan)
    return Lap(images_of(plan), rows[-1]["round_seconds"])
