"""A limit on the time that a run takes."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

from pytorch_lightning.callbacks import Timer
from typing_extensions import override

from fedx_pl.callbacks.base import RoundCallback

if TYPE_CHECKING:
    from fedx_pl.federation.round import RoundRecord
    from fedx_pl.trainer import FederatedTrainer


class MaxTime(RoundCallback):
    """Starts no further round when the time is up. A resumed run has the same time again."""

    def __init__(self, duration: str | timedelta | dict[str, int]) -> None:
        """Sets the limit.

        Args:
            duration: ``"DD:HH:MM:SS"``, a timedelta, or a dict of its arguments, as ``max_time`` of
                `pl.Trainer`.
        """
        self.seconds = Timer(duration).time_remaining() or 0.0
        self._started = time.monotonic()

    @override
    def on_fit_start(self, trainer: FederatedTrainer) -> None:
        self._started = time.monotonic()

    @override
    def on_round_end(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        if time.monotonic() - self._started >= self.seconds and record.number < trainer.max_rounds:
            trainer.note(
                f"the time of {timedelta(seconds=self.seconds)} is up; fit again to resume from "
                f"here"
            )
            trainer.should_stop = True
