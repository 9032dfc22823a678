"""One client after the other, in this process."""

from collections.abc import Iterator, Sequence

from fedx_pl.engines.base import Engine, MemoryOf, Watcher, Work
from fedx_pl.federation.round import RoundContext, Update


class SerialEngine(Engine):
    """The smallest engine."""

    def __init__(self, plan: Work, watcher: Watcher) -> None:
        super().__init__(plan, watcher)
        self.trainer = plan.trainer(watcher.step)

    def run(self, context: RoundContext, clients: Sequence[int], memory_of: MemoryOf) -> Iterator[Update]:
        """Trains the clients in the order given."""
        for client in clients:
            yield self.trainer.run(
                context, client=client, data=self.plan.client_data(client, context.round), memory=memory_of(client)
            )
