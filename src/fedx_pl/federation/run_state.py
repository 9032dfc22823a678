"""The JSON part of a checkpoint. Its checksum may fit although somebody forged its content."""

import math
from dataclasses import dataclass, field
from typing import Any

from safetensors import SafetensorError

# What reading a damaged or forged file may raise.
DAMAGED = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, IndexError),
    *(OverflowError, RecursionError, SafetensorError),
)
# Columns of metrics.csv that are used again. A user's callbacks may add others.
_NUMBERS = (
    "loss",
    "knn_top1",
    "linear_top1",
    "linear_top5",
    "clients",
    "dropped",
    "images_per_second",
    "train_seconds",
    "round_seconds",
    "data_seconds",
    "step_seconds",
    "aggregate_seconds",
    "evaluate_seconds",
    "bytes_up",
    "bytes_down",
)
_MAX_COUNT = 2**53  # more than any run can count


@dataclass(frozen=True, kw_only=True)
class ClientRecord:
    """The part of a client's memory that fits in JSON."""

    last_round: int
    steps: int
    epochs: int
    sha256: str  # checksum of its file; empty if the client keeps nothing
    images: int = 0  # images that it owns
    bytes: int = 0  # size of its file


@dataclass(kw_only=True)
class RunState:
    """The state of a run after a round, without tensors."""

    round: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)  # metrics.csv
    untrained: dict[str, float] = field(default_factory=dict)
    clients: dict[int, ClientRecord] = field(default_factory=dict)
    seconds: float = 0.0
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)  # their states, by key
    config: str = ""  # hash of the run's configuration
    # Content of the files beside the checkpoints, see `run_folder`; None in runs of older versions.
    described: dict[str, Any] | None = None

    @property
    def best(self) -> int:
        """The round with the best linear accuracy, or else kNN accuracy; 0 if there is neither."""
        for key in ("linear_top1", "knn_top1"):
            if measured := [row for row in self.rows if key in row]:
                return int(max(measured, key=lambda row: row[key])["round"])
        return 0


def state_of(manifest: Any) -> RunState:
    """The state that state.json describes.

    Raises:
        Exception: one of `DAMAGED`; something in it is not possible.
    """
    rows = manifest["rows"]
    untrained = manifest["untrained"]
    callbacks = manifest.get("callbacks")
    if callbacks is None:
        callbacks = _former_callbacks(manifest)
    described = manifest.get("described")
    for part, kind in (
        (rows, list),
        (untrained, dict),
        (callbacks, dict),
        (described, dict | None),
    ):
        if not isinstance(part, kind):
            raise TypeError(f"it has {type(part).__name__} for {kind}")
    if not all(isinstance(part, dict) for part in (*rows, *callbacks.values())):
        raise TypeError("a row or a callback's state has no keys")
    # A number that was not finite is null in JSON.
    rows = [
        {key: math.nan if value is None else value for key, value in row.items()} for row in rows
    ]
    for row in (untrained, *rows):
        for key in row.keys() & set(_NUMBERS):
            real(row[key])
    for row in rows:
        whole(row["round"])
    if not isinstance(config := manifest.get("config", ""), str):
        raise TypeError("its configuration's hash is not a text")
    if not math.isfinite(seconds := real(manifest["seconds"])):
        raise ValueError("its seconds are not finite")
    return RunState(
        round=whole(manifest["round"]),
        rows=rows,
        untrained=untrained,
        clients={
            whole(int(client)): record_of(record) for client, record in manifest["clients"].items()
        },
        seconds=seconds,
        callbacks=callbacks,
        config=config,
        described=described,
    )


def record_of(content: dict[str, Any]) -> ClientRecord:
    """A client's record, or one of `DAMAGED`."""
    record = ClientRecord(**content)
    for count in (record.last_round, record.steps, record.epochs, record.images, record.bytes):
        whole(count)
    if not isinstance(record.sha256, str):
        raise TypeError("a checksum is not a text")
    return record


def whole(value: Any) -> int:
    """A count, or a `ValueError`."""
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        raise ValueError(f"{str(value)[:40]} is not a count")
    return value


def real(value: Any) -> float:
    """A number, NaN and infinity included, or a `ValueError`."""
    possible = isinstance(value, int | float) and not isinstance(value, bool)
    if not possible or 1e300 < abs(value) < math.inf:
        raise ValueError(f"{str(value)[:40]} is not a number")
    number: float = value
    return number


def _former_callbacks(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The callbacks' states in a checkpoint of version 0.1, which had no callbacks."""
    return {
        "Quarantine": {"strikes": manifest.get("strikes", {})},
        "Dashboard": {"files": manifest.get("events")},
        "Health": {"alarms": manifest.get("alarms", [])},
    }
