"""All callbacks of a run, in their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytorch_lightning.loggers import Logger

from fedx_pl.callbacks.dashboard import Dashboard
from fedx_pl.callbacks.drift import Drift
from fedx_pl.callbacks.evaluation import EvaluationCallback
from fedx_pl.callbacks.export import SaveEncoder
from fedx_pl.callbacks.health import Health
from fedx_pl.callbacks.loggers import Loggers
from fedx_pl.callbacks.metrics import MetricsFiles, PlainRow
from fedx_pl.callbacks.privacy import PrivacyBudget
from fedx_pl.callbacks.progress import ProgressBar
from fedx_pl.callbacks.quarantine import Quarantine
from fedx_pl.callbacks.timer import MaxTime

if TYPE_CHECKING:
    from fedx_pl.callbacks.base import RoundCallback
    from fedx_pl.trainer import FederatedTrainer


def all_callbacks(trainer: FederatedTrainer) -> list[RoundCallback]:
    """Lists the callbacks that measure, then the user's, then those that write and show."""
    users = trainer.callbacks
    given = trainer.logger
    given = [given] if isinstance(given, Logger | bool) else list(given)
    loggers = [logger for logger in given if isinstance(logger, Logger)]
    has_bar = any(isinstance(callback, ProgressBar) for callback in users)
    return [
        MetricsFiles(),
        Drift(trainer.client_curves),
        *([EvaluationCallback()] if trainer.evaluation else []),
        *([PrivacyBudget()] if trainer.privacy.noise else []),
        Health(trainer.health),
        Quarantine(trainer.aggregate.quarantine),
        *users,
        *([PlainRow(users)] if users else []),
        *([MaxTime(trainer.max_time)] if trainer.max_time is not None else []),
        *([Dashboard(trainer.client_curves)] if True in given else []),
        *([Loggers(loggers)] if loggers else []),
        SaveEncoder(),
        *([ProgressBar()] if trainer.enable_progress_bar and not has_bar else []),
    ]
