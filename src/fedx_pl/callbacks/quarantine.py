"""Clients that send bad updates, or none, again and again are not asked any more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedx_pl.callbacks.base import RoundCallback

if TYPE_CHECKING:
    from fedx_pl.federation.round import RoundRecord
    from fedx_pl.trainer import FederatedTrainer


class Quarantine(RoundCallback):
    """Excludes a client after so many bad updates in a row. A good one clears them; being absent does not.

    One that is there and keeps silent is bad, too: each round would wait for it.
    """

    def __init__(self, limit: int) -> None:
        """Sets the limit.

        Args:
            limit: bad updates in a row; 0 excludes nobody.
        """
        self.limit = limit
        self.strikes: dict[int, int] = {}  # bad updates in a row, by client

    def on_round_end(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        """Counts, and excludes those who have reached the limit."""
        for update in record.updates:
            self.strikes.pop(update.client, None)
        for client in record.at_fault:
            self.strikes[client] = self.strikes.get(client, 0) + 1
        self._exclude(trainer)

    def on_fit_start(self, trainer: FederatedTrainer) -> None:
        """Excludes those who had reached the limit when the run was interrupted."""
        self._exclude(trainer)

    def _exclude(self, trainer: FederatedTrainer) -> None:
        excluded = sorted(
            client for client, count in self.strikes.items() if 0 < self.limit <= count
        )
        if excluded != trainer.excluded:
            names = ", ".join(map(trainer.name_of, excluded))
            trainer.note(
                f"not asked any more after aggregate.quarantine={self.limit} bad or missing updates in a row: {names}"
            )
        trainer.excluded = excluded

    def state_dict(self) -> dict[str, Any]:
        """The strikes."""
        return {"strikes": self.strikes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """JSON has made texts of the clients' numbers."""
        self.strikes = {
            int(client): int(count) for client, count in state.get("strikes", {}).items()
        }
