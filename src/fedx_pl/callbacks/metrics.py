"""RUN/metrics.csv and metrics.json: a row per round."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedx_pl.callbacks.base import RoundCallback, plain
from fedx_pl.errors import UserError
from fedx_pl.files import json_text, write_atomically

if TYPE_CHECKING:
    from fedx_pl.federation.round import RoundRecord
    from fedx_pl.trainer import FederatedTrainer

FIRST_COLUMNS = ("round", "knn_top1", "linear_top1", "linear_top5", "loss")


class MetricsFiles(RoundCallback):
    """Writes both files after every round."""

    def on_round_saved(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        """Writes them anew: a run of a thousand rounds has a few hundred kilobytes."""
        self._write(trainer)

    def on_fit_end(self, trainer: FederatedTrainer) -> None:
        """Writes them again, in case that the last round was saved and the process then killed."""
        self._write(trainer)

    def _write(self, trainer: FederatedTrainer) -> None:
        rows = trainer.history
        columns = list(dict.fromkeys([*FIRST_COLUMNS, *(key for row in rows for key in row)]))
        text = io.StringIO()
        table = csv.DictWriter(text, columns, restval="")
        table.writeheader()
        table.writerows(rows)
        write_atomically(trainer.folder / "metrics.csv", text.getvalue().encode())
        whole = {"untrained": trainer.untrained, "rounds": rows, "seconds": trainer.seconds}
        write_atomically(trainer.folder / "metrics.json", json_text(whole, indent=1).encode())


class PlainRow(RoundCallback):
    """Makes plain numbers of what the user's callbacks have added to the row, before anyone writes or shows it."""

    def __init__(self, own: Sequence[RoundCallback]) -> None:
        """Keeps their names.

        Args:
            own: the user's callbacks.
        """
        self._where = (
            f"record.row, as {', '.join(type(callback).__name__ for callback in own)} left it,"
        )

    def on_round_end(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        """Refuses what is no plain number or text."""
        if not isinstance(record.row, dict) or not all(isinstance(key, str) for key in record.row):
            raise UserError(
                f"{self._where} is no dict of values by name; add to it: record.row['name'] = value"
            )
        record.row = {key: plain(value, self._where, key) for key, value in record.row.items()}
