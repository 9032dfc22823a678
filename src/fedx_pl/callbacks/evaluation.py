"""Measures the global encoder after rounds: kNN, linear probe, collapse."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedx_pl.callbacks.base import RoundCallback
from fedx_pl.errors import UserError

if TYPE_CHECKING:
    from fedx_pl.federation.round import RoundRecord
    from fedx_pl.trainer import FederatedTrainer


class EvaluationCallback(RoundCallback):
    """Adds to the row what is due after a round; measures the untrained network before the first."""

    def on_fit_start(self, trainer: FederatedTrainer) -> None:
        """Measures what the untrained network can do."""
        if trainer.current_round == 0:
            started = time.perf_counter()
            trainer.untrained = self._measure(trainer, 0)
            trainer.untrained_seconds = time.perf_counter() - started

    def on_round_end(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        """Measures what is due."""
        started = time.perf_counter()
        record.row |= self._measure(trainer, record.number, record.row)
        seconds = time.perf_counter() - started
        record.row["evaluate_seconds"] = seconds
        record.row["round_seconds"] += seconds

    def _measure(
        self, trainer: FederatedTrainer, round_number: int, row: Mapping[str, Any] | None = None
    ) -> dict[str, float]:
        row = row or {}
        found = trainer.evaluator.measure(
            trainer.model, trainer.device, round_number, rounds=trainer.max_rounds
        )
        for evaluation in trainer.evaluations if trainer.due(round_number)[0] else ():
            if trainer.evaluator.possible or not evaluation.needs_labels:
                numbers = evaluation.measure(trainer, trainer.note)
                trainer.model.load_shared(
                    trainer.global_state.weights
                )  # It may have trained clients.
                if not isinstance(numbers, dict):
                    name = type(evaluation).__name__
                    raise UserError(
                        f"{name}.measure returns {numbers!r}; return a dict of numbers by name"
                    )
                for key, value in numbers.items():
                    value = value.item() if getattr(value, "shape", None) == () else value
                    if isinstance(value, int | float):
                        taken = key in found or key in row
                        found[f"{type(evaluation).__name__.lower()}_{key}" if taken else key] = (
                            float(value)
                        )
        return found
