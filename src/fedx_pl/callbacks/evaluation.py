"""Measures the global encoder after rounds: kNN, linear probe, collapse."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fedx_pl.callbacks.base import RoundCallback

if TYPE_CHECKING:
    from fedx_pl.evaluation.evaluate import Evaluator
    from fedx_pl.federation.round import RoundRecord
    from fedx_pl.trainer import Orchestrator


class Evaluation(RoundCallback):
    """Adds to the row what is due after a round; measures the untrained network before the first."""

    def __init__(self, evaluator: Evaluator) -> None:
        """Uses an evaluator.

        Args:
            evaluator: knows what is due when.
        """
        self.evaluator = evaluator

    def on_fit_start(self, trainer: Orchestrator) -> None:
        """Measures what the untrained network can do."""
        if trainer.current_round == 0:
            started = time.perf_counter()
            trainer.untrained = self.evaluator.measure(trainer.model, trainer.device, 0, trainer.max_rounds)
            trainer.untrained_seconds = time.perf_counter() - started

    def on_round_end(self, trainer: Orchestrator, record: RoundRecord) -> None:
        """Measures what is due."""
        started = time.perf_counter()
        record.row |= self.evaluator.measure(trainer.model, trainer.device, record.number, trainer.max_rounds)
        seconds = time.perf_counter() - started
        record.row["evaluate_seconds"] = seconds
        record.row["round_seconds"] += seconds
