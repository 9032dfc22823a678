"""Excludes clients that repeatedly send bad updates, or none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from fedx_pl.callbacks.base import RoundCallback

if TYPE_CHECKING:
    from fedx_pl.federation.round import RoundRecord
    from fedx_pl.trainer import FederatedTrainer


class Quarantine(RoundCallback):
    """Excludes a client after some bad updates in a row.

    A good update resets the count, being absent does not. A client that is present and does not
    answer counts as bad, too: each round would wait for it.
    """

    def __init__(self, limit: int) -> None:
        """Sets the limit.

        Args:
            limit: bad updates in a row; 0 excludes no client.
        """
        self.limit = limit
        self.strikes: dict[int, int] = {}  # bad updates in a row, by client

    @override
    def on_round_end(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        for update in record.updates:
            self.strikes.pop(update.client, None)
        for client in record.at_fault:
            self.strikes[client] = self.strikes.get(client, 0) + 1
        self._exclude(trainer)

    @override
    def on_fit_start(self, trainer: FederatedTrainer) -> None:
        self._exclude(trainer)

    def _exclude(self, trainer: FederatedTrainer) -> None:
        excluded = sorted(
            client for client, count in self.strikes.items() if 0 < self.limit <= count
        )
        if excluded != trainer.excluded:
            names = ", ".join(map(trainer.name_of, excluded))
            trainer.note(
                f"in quarantine after aggregate.quarantine={self.limit} bad or missing updates in "
                f"a row: {names or 'none'}"
            )
        trainer.excluded = excluded

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"strikes": self.strikes}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        # JSON has turned the clients' numbers into texts.
        self.strikes = {
            int(client): int(count) for client, count in state.get("strikes", {}).items()
        }
