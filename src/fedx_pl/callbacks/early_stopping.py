"""Stops a run that no longer improves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from fedx_pl.callbacks.base import RoundCallback
from fedx_pl.options import check, whole_number

if TYPE_CHECKING:
    from fedx_pl.federation.round import RoundRecord
    from fedx_pl.trainer import FederatedTrainer


class EarlyStopping(RoundCallback):
    """Ends the run when a number of the row has not improved, as Lightning's `EarlyStopping`."""

    def __init__(
        self,
        monitor: str = "knn_top1",
        *,
        patience: int = 3,
        min_delta: float = 0.0,
        mode: str = "max",
    ) -> None:
        """Sets what is monitored.

        Args:
            monitor: a column of metrics.csv; rounds without it do not count.
            patience: measurements without an improvement after which the run ends.
            min_delta: a smaller change is not an improvement.
            mode: ``max`` if larger is better, ``min`` if smaller is better.
        """
        check("mode", mode, choices=("max", "min"))
        self.monitor = monitor
        self.patience = whole_number("patience", patience, at_least=1)
        self.min_delta = min_delta
        self.mode = mode
        self.best: float | None = None
        self.waited = 0

    @override
    @property
    def state_key(self) -> str:
        return f"EarlyStopping({self.monitor}, {self.mode})"

    @override
    def on_round_end(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        value = record.row.get(self.monitor)
        if value is None:
            return
        sign = 1 if self.mode == "max" else -1
        if self.best is None or sign * (value - self.best) > self.min_delta:
            self.best = value
            self.waited = 0
            return
        self.waited += 1
        if self.waited >= self.patience and record.number < trainer.max_rounds:
            trainer.note(
                f"{self.monitor} has not been better than {self.best:g} for {self.waited} "
                f"measurements: stop"
            )
            trainer.should_stop = True

    @override
    def on_fit_end(self, trainer: FederatedTrainer) -> None:
        # A number that is never there would never stop the run.
        if self.best is None and trainer.history:
            there = ", ".join(
                key for key, value in trainer.history[-1].items() if isinstance(value, float)
            )
            trainer.note(
                f"EarlyStopping has waited for {self.monitor}, which no round had; there is {there}"
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        best = state.get("best")
        self.best = None if best is None else float(best)
        self.waited = int(state.get("waited", 0))
