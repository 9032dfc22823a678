"""Numbers that go wrong: a collapsed representation, a client that diverges, a loss scale that runs out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fedx_pl.callbacks.base import RoundCallback
from fedx_pl.callbacks.options import HealthOptions
from fedx_pl.errors import UserError

if TYPE_CHECKING:
    from fedx_pl.federation.round import RoundRecord, Update
    from fedx_pl.trainer import FederatedTrainer

COLLAPSED = "the encoder has collapsed"


class Health(RoundCallback):
    """Raises alarms, and ends the run of a collapsed encoder if the options say so."""

    def __init__(self, options: HealthOptions | None = None) -> None:
        """Sets the thresholds.

        Args:
            options: when to raise an alarm, and what follows.
        """
        self.options = options or HealthOptions()
        self.alarms: list[str] = []  # of all rounds

    def on_fit_start(self, trainer: FederatedTrainer) -> None:
        """Refuses to resume a run that was stopped by a collapse."""
        self._refuse_collapsed(trainer)

    def on_round_end(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        """Looks at the row and at every client."""
        record.alarms += [*self._collapse(record)]
        for update in record.updates:
            record.alarms += [
                f"{trainer.name_of(update.client)}{problem}" for problem in self._problems(update)
            ]
        self.alarms += [f"round {record.number}: {alarm}" for alarm in record.alarms]
        trainer.should_stop |= self.options.on_collapse == "stop" and self._collapsed(record.number)

    def on_fit_end(self, trainer: FederatedTrainer) -> None:
        """Tells why the run ends early."""
        self._refuse_collapsed(trainer)

    def _collapse(self, record: RoundRecord) -> Iterator[str]:
        """By the row; where clients measure for themselves, more than half of them must say so."""
        told = {
            name: [update.metrics[name] for update in record.updates if name in update.metrics]
            for name in ("rankme", "uniformity")
        }
        rankme = statistics.median_high(told["rankme"] or [record.row.get("rankme", math.inf)])
        uniformity = statistics.median_low(
            told["uniformity"] or [record.row.get("uniformity", -math.inf)]
        )
        if rankme < (least := self.options.min_rankme):
            yield f"{COLLAPSED}: rankme is {rankme:.3g}, below {least:g}"
        if uniformity > (most := self.options.max_uniformity):
            yield f"{COLLAPSED}: uniformity is {uniformity:.3g}, above {most:g}"

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
        """Raises a `UserError`, unless it is the last round, which ends the run in any case."""
        number = trainer.current_round
        if (
            self.options.on_collapse == "stop"
            and self._collapsed(number)
            and number < trainer.max_rounds
        ):
            raise UserError(
                f"stopped after round {number}: the encoder has collapsed (on_collapse=stop); the run is saved in "
                f"{trainer.folder}, and on_collapse=warn goes on"
            )

    def state_dict(self) -> dict[str, Any]:
        """The alarms so far."""
        return {"alarms": self.alarms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes them over."""
        self.alarms = list(map(str, state.get("alarms", [])))


def _ends(update: Update) -> tuple[float, float]:
    """Mean total loss of the first and of the last tenth of a client's steps."""
    total = update.loss()
    if not len(total):
        return 0.0, 0.0
    share = max(1, len(total) // 10)
    return total[:share].mean().item(), total[-share:].mean().item()
