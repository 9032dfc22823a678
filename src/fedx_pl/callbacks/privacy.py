"""What of its privacy a client has spent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fedx_pl.callbacks.base import RoundCallback

if TYPE_CHECKING:
    from fedx_pl.federation.round import RoundRecord
    from fedx_pl.trainer import Orchestrator


class PrivacyBudget(RoundCallback):
    """Adds ``epsilon`` to the row."""

    def __init__(self, epsilon_after: Callable[[int], float]) -> None:
        """Uses an accountant.

        Args:
            epsilon_after: the epsilon spent by the end of a round.
        """
        self.epsilon_after = epsilon_after

    def on_round_end(self, trainer: Orchestrator, record: RoundRecord) -> None:
        """Asks the accountant."""
        record.row["epsilon"] = self.epsilon_after(record.number)
