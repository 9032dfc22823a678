"""Stops a run that no longer gets better."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedx_pl.callbacks.base import RoundCallback
from fedx_pl.options import check, whole_number

if TYPE_CHECKING:
    from fedx_pl.federation.round import RoundRecord
    from fedx_pl.trainer import FederatedTrainer


class EarlyStopping(RoundCallback):
    """Ends the run when a number of the row has not improved for some measurements, as Lightning's does."""

    def __init__(
        self,
        monitor: str = "knn_top1",
        *,
        patience: int = 3,
        min_delta: float = 0.0,
        mode: str = "max",
    ) -> None:
        """Sets what is watched.

        Args:
            monitor: a column of metrics.csv; rounds that do not have it do not count.
            patience: measurements without an improvement after which the run ends.
            min_delta: a smaller change is no improvement.
            mode: ``max``: larger is better, ``min``: smaller.
        """
        check("mode", mode, choices=("max", "min"))
        patience = whole_number("patience", patience, at_least=1)
        self.monitor, self.patience, self.min_delta, self.mode = monitor, patience, min_delta, mode
        self.best: float | None = None
        self.waited = 0

    @property
    def state_key(self) -> str:
        """There may be several, for different numbers."""
        return f"EarlyStopping({self.monitor}, {self.mode})"

    def on_round_end(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        """Looks at the number."""
        value = record.row.get(self.monitor)
        if value is None:
            return
        sign = 1 if self.mode == "max" else -1
        if self.best is None or sign * (value - self.best) > self.min_delta:
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience and record.number < trainer.max_rounds:
            trainer.note(
                f"{self.monitor} has not been better than {self.best:g} for {self.waited} measurements: stop"
            )
            trainer.should_stop = True

    def on_fit_end(self, trainer: FederatedTrainer) -> None:
        """A number that is never there would never stop anything."""
        if self.best is None and trainer.history:
            there = ", ".join(
                key for key, value in trainer.history[-1].items() if isinstance(value, float)
            )
            trainer.note(
                f"EarlyStopping has waited for {self.monitor}, which no round had; there is {there}"
            )

    def state_dict(self) -> dict[str, Any]:
        """The best so far, and how long ago."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes them over."""
        best = state.get("best")
        self.best, self.waited = None if best is None else float(best), int(state.get("waited", 0))
