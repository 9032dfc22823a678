"""Alarms: a collapsed representation, a diverging client, a vanishing loss scale."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from fedx_pl.callbacks.base import RoundCallback
from fedx_pl.callbacks.options import HealthOptions
from fedx_pl.errors import UserError

if TYPE_CHECKING:
    from fedx_pl.federation.round import RoundRecord, Update
    from fedx_pl.trainer import FederatedTrainer

COLLAPSED = "the encoder has collapsed"


class Health(RoundCallback):
    """Raises alarms, and ends the run if the encoder has collapsed and the options say so."""

    def __init__(self, options: HealthOptions | None = None) -> None:
        self.options = options or HealthOptions()
        self.alarms: list[str] = []  # of all rounds

    @override
    def on_fit_start(self, trainer: FederatedTrainer) -> None:
        self._refuse_collapsed(trainer)

    @override
    def on_round_end(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        record.alarms += [*self._collapse(record)]
        for update in record.updates:
            record.alarms += [
                f"{trainer.name_of(update.client)}{problem}" for problem in self._problems(update)
            ]
        self.alarms += [f"round {record.number}: {alarm}" for alarm in record.alarms]
        trainer.should_stop |= self.options.on_collapse == "stop" and self._collapsed(record.number)

    @override
    def on_fit_end(self, trainer: FederatedTrainer) -> None:
        self._refuse_collapsed(trainer)

    def _collapse(self, record: RoundRecord) -> Iterator[str]:
        """Alarms of collapse. If clients evaluate their own images, more than half must agree."""
        rankme = self._typical(record, "rankme", math.inf)
        uniformity = self._typical(record, "uniformity", -math.inf)
        if rankme < (least := self.options.min_rankme):
            yield f"{COLLAPSED}: rankme is {rankme:.3g}, below {least:g}"
        if uniformity > (most := self.options.max_uniformity):
            yield f"{COLLAPSED}: uniformity is {uniformity:.3g}, above {most:g}"

    @staticmethod
    def _typical(record: RoundRecord, name: str, healthy: float) -> float:
        """A measure of the row, or the median of the clients; those without it count as healthy."""
        if not any(name in update.metrics for update in record.updates):
            return float(record.row.get(name, healthy))
        values = [update.metrics.get(name, healthy) for update in record.updates]
        return statistics.median_high(values) if healthy > 0 else statistics.median_low(values)

    def _problems(self, update: Update) -> Iterator[str]:
        first, last = _ends(update)
        if not math.isfinite(last):
            yield f" diverges: its loss is {last}"
        elif first > 0 and last > self.options.max_growth * first:
            yield f" diverges: its loss grew from {first:.3g} to {last:.3g}"
        if (scale := update.metrics.get("loss_scale", 1.0)) < 1.0:
            yield f": its loss scale fell to {scale:.3g}"

    def _collapsed(self, number: int) -> bool:
        return any(alarm.startswith(f"round {number}: {COLLAPSED}") for alarm in self.alarms)

    def _refuse_collapsed(self, trainer: FederatedTrainer) -> None:
        """Raises a `UserError` if the last round collapsed, unless it ends the run anyway."""
        number = trainer.current_round
        if (
            self.options.on_collapse == "stop"
            and self._collapsed(number)
            and number < trainer.max_rounds
        ):
            raise UserError(
                f"stopped after round {number}: the encoder has collapsed (on_collapse=stop); the "
                f"run is saved in {trainer.folder}, and on_collapse=warn resumes it"
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"alarms": self.alarms}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.alarms = list(map(str, state.get("alarms", [])))


def _ends(update: Update) -> tuple[float, float]:
    """The mean total loss of the first and of the last tenth of a client's steps."""
    total = update.loss()
    if not len(total):
        return 0.0, 0.0
    share = max(1, len(total) // 10)
    return total[:share].mean().item(), total[-share:].mean().item()
