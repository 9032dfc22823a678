"""Excludes clients whose updates are bad, or missing, several times in a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedx_pl.callbacks.base import RoundCallback

if TYPE_CHECKING:
    from fedx_pl.federation.round import RoundRecord
    from fedx_pl.trainer import FederatedTrainer


class Quarantine(RoundCallback):
    """Excludes a client after several bad updates in a row.

    A good update clears the strikes; absence neither adds one nor clears them. A client that is there and does not
    answer gets a strike, since each round would wait for it.
    """

    def __init__(self, limit: int) -> None:
        """Sets the limit.

        Args:
            limit: how many bad updates in a row exclude a client; 0 excludes nobody.
        """
        self.limit = limit
        self.strikes: dict[int, int] = {}  # bad updates in a row, by client

    def on_round_end(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        """Counts strikes, and excludes clients that have reached the limit."""
        for update in record.updates:
            self.strikes.pop(update.client, None)
        for client in record.at_fault:
            self.strikes[client] = self.strikes.get(client, 0) + 1
        self._exclude(trainer)

    def on_fit_start(self, trainer: FederatedTrainer) -> None:
        """Excludes clients that had reached the limit when the run was interrupted."""
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
        """The strikes of each client."""
        return {"strikes": self.strikes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the strikes, whose keys JSON has turned into text."""
        self.strikes = {
            int(client): int(count) for client, count in state.get("strikes", {}).items()
        }
