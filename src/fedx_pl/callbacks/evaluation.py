"""Evaluates the global encoder after rounds: kNN, linear probe, collapse."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from fedx_pl.callbacks.base import RoundCallback
from fedx_pl.errors import UserError
from fedx_pl.federation.round import number_of

if TYPE_CHECKING:
    from fedx_pl.federation.round import RoundRecord
    from fedx_pl.trainer import FederatedTrainer


class EvaluationCallback(RoundCallback):
    """Evaluates the untrained network, and after each round what is due."""

    @override
    def on_fit_start(self, trainer: FederatedTrainer) -> None:
        if trainer.current_round == 0:
            started = time.perf_counter()
            trainer.untrained = self._measure(trainer, 0)
            trainer.untrained_seconds = time.perf_counter() - started

    @override
    def on_round_end(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        started = time.perf_counter()
        record.row |= self._measure(trainer, record.number, record.row)
        seconds = time.perf_counter() - started
        record.row["evaluate_seconds"] = seconds
        record.row["round_seconds"] += seconds

    def _measure(
        self, trainer: FederatedTrainer, round_number: int, row: Mapping[str, Any] | None = None
    ) -> dict[str, float]:
        row = row or {}
        metrics = trainer.evaluator.measure(
            trainer.model, trainer.device, round_number, rounds=trainer.max_rounds
        )
        for evaluation in trainer.evaluations if trainer.due(round_number)[0] else ():
            if trainer.evaluator.possible or not evaluation.needs_labels:
                numbers = evaluation.measure(trainer, trainer.note)
                # It may have trained clients.
                trainer.model.load_shared(trainer.global_state.weights)
                if not isinstance(numbers, dict):
                    name = type(evaluation).__name__
                    raise UserError(
                        f"{name}.measure returns {numbers!r}; return a dict of numbers by name"
                    )
                for key, value in numbers.items():
                    with suppress(TypeError):  # What is not one number is left out.
                        number = float(number_of(value))
                        taken = key in metrics or key in row
                        prefix = f"{type(evaluation).__name__.lower()}_" if taken else ""
                        metrics[prefix + key] = number
        return metrics
