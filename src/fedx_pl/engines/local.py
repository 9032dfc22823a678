"""One client after the other, in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fedx_pl.engines.base import Engine, EngineOptions, MemoryOf
from fedx_pl.federation.round import RoundContext, Update

if TYPE_CHECKING:
    from fedx_pl.trainer import FederatedTrainer


class SerialEngine(Engine):
    """The smallest engine."""

    def __init__(self, trainer: FederatedTrainer, options: EngineOptions | None = None) -> None:
        super().__init__(trainer, options)
        self.local = trainer.local_trainer()

    def run(
        self, context: RoundContext, clients: Sequence[int], memory_of: MemoryOf
    ) -> Iterator[Update]:
        """Trains the clients in the order given."""
        for client in clients:
            data = self.trainer.client_data(client, context.round)
            yield self.local.run(context, client=client, data=data, memory=memory_of(client))
