"""The base class of engines, and their options."""

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
