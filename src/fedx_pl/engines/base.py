"""What an engine is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from fedx_pl.engines.options import EngineOptions
from fedx_pl.federation.round import ClientMemory, Lost, RoundContext, Update

if TYPE_CHECKING:
    from fedx_pl.trainer import FederatedTrainer

MemoryOf = Callable[[int], ClientMemory | None]


class Engine:
    """Trains the clients of a round."""

    def __init__(self, trainer: FederatedTrainer, options: EngineOptions | None = None) -> None:
        """Keeps the trainer: it knows the model, the images and how a client is trained, and is told about progress.

        Args:
            trainer: of the run.
            options: the keys ``engine.*``.
        """
        self.trainer = trainer
        self.options = options or EngineOptions()

    def choose(self, round_number: int, away: Sequence[int] = ()) -> list[int]:
        """Who trains in a round; those who are ``away``, in quarantine, do not, and nobody takes their place."""
        return [
            client for client in self.trainer.choose_clients(round_number) if client not in away
        ]

    def name_of(self, client: int) -> str:
        """A client's name for people."""
        return f"client {client}"

    def run(
        self, context: RoundContext, clients: Sequence[int], memory_of: MemoryOf
    ) -> Iterator[Update | Lost]:
        """Trains clients and yields each as it finishes, in any order.

        Args:
            context: of the round.
            clients: who trains.
            memory_of: what a client remembers, asked for when its turn comes.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define run(context, clients, memory_of)"
        )

    def close(self) -> None:
        """Lets go of processes and connections."""
