"""The serial engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from typing_extensions import override

from fedx_pl.engines.base import Engine, MemoryOf
from fedx_pl.engines.options import EngineOptions
from fedx_pl.federation.round import RoundContext, Update

if TYPE_CHECKING:
    from fedx_pl.trainer import FederatedTrainer


class SerialEngine(Engine):
    """Trains clients one after the other, in this process."""

    def __init__(self, trainer: FederatedTrainer, options: EngineOptions | None = None) -> None:
        super().__init__(trainer, options)
        self.local = trainer.local_trainer()

    @override
    def run(
        self, context: RoundContext, clients: Sequence[int], memory_of: MemoryOf
    ) -> Iterator[Update]:
        for client in clients:
            data = self.trainer.client_data(client, context.round)
            yield self.local.run(context, client=client, data=data, memory=memory_of(client))
