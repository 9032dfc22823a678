"""What an engine is."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from fedx_pl.data.batches import ClientData
from fedx_pl.data.images import ImageData
from fedx_pl.errors import require
from fedx_pl.federation.client import LocalTrainer
from fedx_pl.federation.round import ClientMemory, RoundContext, Update
from fedx_pl.methods.base import SSLMethod

MemoryOf = Callable[[int], ClientMemory | None]


@dataclass(frozen=True)
class EngineOptions:
    """Where clients train; nothing here changes what is computed."""

    name: str = field(default="serial", metadata={"help": "serial | ray (short: engine=ray)"})
    workers: int = field(default=0, metadata={"help": "ray: clients trained at once; 0: one per GPU, else per core"})
    gpus_per_worker: float = field(
        default=-1.0, metadata={"help": "ray: share of a GPU for each worker; -1: a whole one if there is one"}
    )
    address: str = field(
        default="", metadata={"help": "ray: of a running cluster, or auto to find one; empty: start Ray here"}
    )
    retries: int = field(default=1, metadata={"help": "ray: times a client is tried again after its worker died"})

    def __post_init__(self) -> None:
        require("engine.name", self.name, self.name in ("serial", "ray"), "engine=serial or ray")
        require("engine.workers", self.workers, self.workers >= 0, "engine.workers=0 for one per GPU or core")
        require("engine.retries", self.retries, self.retries >= 0, "engine.retries=0 or more")
        known = self.gpus_per_worker >= 0 or self.gpus_per_worker == -1
        require("engine.gpus_per_worker", self.gpus_per_worker, known, "e.g. engine.gpus_per_worker=0.5")


@dataclass(frozen=True)
class Lost:
    """A client that has nothing to give in this round."""

    client: int
    reason: str
    fault: bool = False  # It answered, but not as it should.


class Work(Protocol):
    """What an engine needs to know of a run: the model, who owns what, and how a client is trained."""

    @property
    def model(self) -> SSLMethod:
        """Takes every client's weights in turn."""

    @property
    def data(self) -> ImageData:
        """All images."""

    @property
    def clients(self) -> list[np.ndarray]:
        """Each client's rows of the training images."""

    @property
    def device(self) -> torch.device:
        """Where this process trains."""

    @property
    def engine(self) -> EngineOptions:
        """Where clients are to be trained."""

    @property
    def threads(self) -> int:
        """CPU threads that the user wants; 0: no matter."""

    @property
    def on_cpu(self) -> bool:
        """Whether the user wants no GPU."""

    @property
    def clients_per_round(self) -> int:
        """How many train in a round."""

    def choose_clients(self, round_number: int) -> list[int]:
        """Who trains in a round."""

    def client_data(self, client: int, round_number: int) -> ClientData:
        """A client's batches in a round."""

    def trainer(self, tick: Callable[[], None]) -> LocalTrainer:
        """Trains clients on the model."""

    def elsewhere(self, *, threads: int, gpu: bool) -> "Callable[[Callable[[str], None]], Work]":
        """Makes the same work in another process. What is returned can be pickled; it takes a reporter of lines."""


class Watcher(Protocol):
    """Whom an engine tells how far it is."""

    def step(self, count: int = 1) -> None:
        """Optimiser steps of some client are done."""

    def working(self, worker: str, client: int | None) -> None:
        """A worker takes up a client, or has nothing to do (None)."""

    def note(self, text: str) -> None:
        """Something the user should see."""


class Engine:
    """Trains the clients of a round."""

    def __init__(self, plan: Work, watcher: Watcher) -> None:
        """Keeps what it needs.

        Args:
            plan: of the run.
            watcher: told about progress.
        """
        self.plan, self.watcher = plan, watcher

    def choose(self, round_number: int, away: Sequence[int] = ()) -> list[int]:
        """Who trains in a round; those who are ``away``, in quarantine, do not, and nobody takes their place."""
        return [client for client in self.plan.choose_clients(round_number) if client not in away]

    def name_of(self, client: int) -> str:
        """A client's name for people."""
        return f"client {client}"

    def run(self, context: RoundContext, clients: Sequence[int], memory_of: MemoryOf) -> Iterator[Update | Lost]:
        """Trains clients and yields each as it finishes, in any order.

        Args:
            context: of the round.
            clients: who trains.
            memory_of: what a client remembers, asked for when its turn comes.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Lets go of processes and connections."""
