"""RUN/metrics.csv and metrics.json, with a row per round."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from typing_extensions import override

from fedx_pl.callbacks.base import RoundCallback, plain
from fedx_pl.errors import UserError
from fedx_pl.files import json_text, write_atomically

if TYPE_CHECKING:
    from fedx_pl.federation.round import RoundRecord
    from fedx_pl.trainer import FederatedTrainer

FIRST_COLUMNS = ("round", "knn_top1", "linear_top1", "linear_top5", "loss")


class MetricsFiles(RoundCallback):
    """Writes both files again after every round; a thousand rounds are a few hundred kilobytes."""

    @override
    def on_round_saved(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        self._write(trainer)

    @override
    def on_fit_end(self, trainer: FederatedTrainer) -> None:
        # Again, in case an earlier process was killed after it saved the last round.
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
    """Turns what the user's callbacks added to the row into plain numbers, before it is written."""

    def __init__(self, callbacks: Sequence[RoundCallback]) -> None:
        """Keeps the names of the callbacks.

        Args:
            callbacks: the user's callbacks.
        """
        names = ", ".join(type(callback).__name__ for callback in callbacks)
        self._where = f"record.row, as {names} left it,"

    @override
    def on_round_end(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        if not isinstance(record.row, dict) or not all(isinstance(key, str) for key in record.row):
            raise UserError(
                f"{self._where} is not a dict of values by name; add to it: "
                f"record.row['name'] = value"
            )
        record.row = {key: plain(value, self._where, key) for key, value in record.row.items()}
