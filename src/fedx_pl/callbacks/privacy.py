"""The privacy budget that a client has spent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from fedx_pl.callbacks.base import RoundCallback

if TYPE_CHECKING:
    from fedx_pl.federation.round import RoundRecord
    from fedx_pl.trainer import FederatedTrainer


class PrivacyBudget(RoundCallback):
    """Adds ``epsilon`` to the row."""

    @override
    def on_round_end(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        record.row["epsilon"] = trainer.epsilon_after(record.number)
