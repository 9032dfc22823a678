"""Gives a round's numbers to Lightning's loggers: CSV, Weights & Biases, MLflow and others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from typing_extensions import override

from fedx_pl.callbacks.base import RoundCallback

if TYPE_CHECKING:
    from pytorch_lightning.loggers import Logger

    from fedx_pl.federation.round import RoundRecord
    from fedx_pl.trainer import FederatedTrainer


class Loggers(RoundCallback):
    """Logs the settings of the run, and the numbers of each round with the round as the step."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        """Keeps the loggers.

        Args:
            loggers: as for `pl.Trainer`.
        """
        self.loggers = list(loggers)

    @override
    def on_fit_start(self, trainer: FederatedTrainer) -> None:
        for logger in self.loggers:
            logger.log_hyperparams(trainer.description.content)
            if not trainer.current_round and trainer.untrained:
                logger.log_metrics(dict(trainer.untrained), step=0)

    @override
    def on_round_saved(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        numbers = {
            key: value for key, value in record.row.items() if isinstance(value, int | float)
        }
        for logger in self.loggers:
            logger.log_metrics(numbers, step=record.number)
            logger.save()

    @override
    def on_fit_end(self, trainer: FederatedTrainer) -> None:
        for logger in self.loggers:
            logger.finalize("success")

    @override
    def on_exception(self, trainer: FederatedTrainer, exception: BaseException) -> None:
        for logger in self.loggers:
            logger.finalize("failed")
