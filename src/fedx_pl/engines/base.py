"""The base class of engines, and their options."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedx_pl.errors import require
from fedx_pl.federation.round import ClientMemory, Lost, RoundContext, Update

if TYPE_CHECKING:
    from fedx_pl.trainer import FederatedTrainer

MemoryOf = Callable[[int], ClientMemory | None]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Where clients train; nothing here changes what is computed."""

    name: str = field(default="serial", metadata={"help": "serial | ray (short: engine=ray)"})
    workers: int = field(
        default=0, metadata={"help": "ray: clients trained at once; 0: one per GPU, else per core"}
    )
    gpus_per_worker: float = field(
        default=-1.0,
        metadata={"help": "ray: share of a GPU for each worker; -1: a whole one if there is one"},
    )
    address: str = field(
        default="",
        metadata={"help": "ray: of a running cluster, or auto to find one; empty: start Ray here"},
    )
    retries: int = field(
        default=1, metadata={"help": "ray: times a client is tried again after its worker died"}
    )

    def __post_init__(self) -> None:
        require(
            "engine.workers",
            self.workers,
            self.workers >= 0,
            instead="engine.workers=0 for one per GPU or core",
        )
        require(
            "engine.retries", self.retries, self.retries >= 0, instead="engine.retries=0 or more"
        )
        known = self.gpus_per_worker >= 0 or self.gpus_per_worker == -1
        require(
            "engine.gpus_per_worker",
            self.gpus_per_worker,
            known,
            instead="e.g. engine.gpus_per_worker=0.5",
        )


class Engine:
    """Trains the clients of a round."""

    def __init__(self, trainer: FederatedTrainer, options: EngineOptions | None = None) -> None:
        """Keeps the trainer, which has the model and the images and shows progress.

        Args:
            trainer: the run's trainer.
            options: the keys ``engine.*``.
        """
        self.trainer = trainer
        self.options = options or EngineOptions()

    def choose(self, round_number: int, away: Sequence[int] = ()) -> list[int]:
        """The clients of a round, without those ``away`` in quarantine, who are not replaced."""
        return [
            client for client in self.trainer.choose_clients(round_number) if client not in away
        ]

    def name_of(self, client: int) -> str:
        """A client's name in messages."""
        return f"client {client}"

    def run(
        self, context: RoundContext, clients: Sequence[int], memory_of: MemoryOf
    ) -> Iterator[Update | Lost]:
        """Trains clients and yields each update as it is finished, in any order.

        Args:
            context: the round's context.
            clients: the clients to train.
            memory_of: gives a client's memory, called when its turn comes.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define run(context, clients, memory_of)"
        )

    def close(self) -> None:
        """Ends processes and connections."""
