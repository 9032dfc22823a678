"""A round's numbers for Lightning's loggers: CSV, Weights & Biases, MLflow and whatever else there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedx_pl.callbacks.base import RoundCallback

if TYPE_CHECKING:
    from pytorch_lightning.loggers import Logger

    from fedx_pl.federation.round import RoundRecord
    from fedx_pl.trainer import FederatedTrainer


class Loggers(RoundCallback):
    """Gives every logger the settings of the run, and the numbers of each round with the round as the step."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        """Keeps the loggers.

        Args:
            loggers: as of `pl.Trainer`.
        """
        self.loggers = list(loggers)

    def on_fit_start(self, trainer: FederatedTrainer) -> None:
        """Tells the settings, and before the first round what the untrained network can do."""
        for logger in self.loggers:
            logger.log_hyperparams(trainer.description.content)
            if not trainer.current_round and trainer.untrained:
                logger.log_metrics(dict(trainer.untrained), step=0)

    def on_round_saved(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        """Tells the numbers."""
        numbers = {
            key: value for key, value in record.row.items() if isinstance(value, int | float)
        }
        for logger in self.loggers:
            logger.log_metrics(numbers, step=record.number)
            logger.save()

    def on_fit_end(self, trainer: FederatedTrainer) -> None:
        """Ends the logs well."""
        for logger in self.loggers:
            logger.finalize("success")

    def on_exception(self, trainer: FederatedTrainer, exception: BaseException) -> None:
        """Ends the logs."""
        for logger in self.loggers:
            logger.finalize("failed")
