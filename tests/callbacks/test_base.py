"""A user's callback can do what built-in ones do: numbers, notes, a stop, state."""

import csv
from pathlib import Path
from typing import Any

import pytest
from helpers import fitted
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedx_pl.callbacks.base import RoundCallback
from fedx_pl.callbacks.dashboard import layout
from fedx_pl.config.compose import compose
from fedx_pl.federation.round import RoundRecord, Update
from fedx_pl.trainer import FederatedTrainer


def run(words: list[str], *callbacks: RoundCallback) -> FederatedTrainer:
    return fitted(compose(words), *callbacks)


class Everything(RoundCallback):
    """Keeps the order of all calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(("on_", "setup", "state_dict", "load_state_dict")):
            self.calls.append(name)
        return super().__getattribute__(name)


def test_hooks_are_called_in_the_order_of_the_contract(quick: list[str]) -> None:
    """There are three clients; steps and notes may come between other calls."""
    everything = Everything()
    run([*quick, "federation.rounds=1"], everything)
    calls = [name for name in everything.calls if name not in ("on_client_steps", "on_note")]
    assert calls == [
        "load_state_dict",
        "setup",
        "on_fit_start",
        "on_round_start",
        *["on_client_update"] * 3,
        "on_round_end",
        "state_dict",
        "on_round_saved",
        "on_fit_end",
    ]
    assert everything.calls.count("on_client_steps") > 3


class Loudest(RoundCallback):
    """Adds the largest loss of a client, a note, and counts the rounds it has seen."""

    def __init__(self, stop_after: int = 0) -> None:
        self.seen, self.stop_after = 0, stop_after

    def on_client_update(
        self, trainer: FederatedTrainer, record: RoundRecord, update: Update
    ) -> None:
        update.metrics["weights"] = float(len(update.state.weights))

    def on_round_end(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        self.seen += 1
        record.row["loudest"] = max(float(update.loss().mean()) for update in record.updates)
        trainer.note("the loudest client is known")
        trainer.should_stop = self.seen == self.stop_after

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state.get("seen", 0)


def test_numbers_of_a_callback_are_in_the_table_and_in_tensorboard(tiny: list[str]) -> None:
    result = run(tiny, Loudest())
    with open(result.folder / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loudest"]) for row in rows] == [row["loudest"] for row in result.history]
    assert all(row["loudest"] >= row["loss"] for row in result.history)
    assert result.history[0]["weights"] > 10
    events = EventAccumulator(str(result.folder / "tensorboard"))
    events.Reload()
    assert len(events.Scalars("custom/loudest")) == 2
    pages = layout(result.history, ["loudest"])
    assert pages["Custom"] == {"loudest": ["custom/loudest$"]}
    assert "loudest" not in pages["Clients"]  # There it would be a chart without a curve.
    assert "weights" in pages["Clients"]


def test_a_callback_stops_the_run_and_its_state_survives_the_process(
    quick: list[str], tmp_path: Path
) -> None:
    words = [*quick, "federation.rounds=3", f"run.dir={tmp_path / 'run'}"]
    first = Loudest(stop_after=1)
    assert [row["round"] for row in run(words, first).history] == [1]
    second = Loudest()
    assert [row["round"] for row in run(words, second).history] == [1, 2, 3]
    assert second.seen == 3


def test_an_exception_reaches_callbacks_and_the_caller(quick: list[str]) -> None:
    class Broken(RoundCallback):
        heard: BaseException | None = None

        def on_round_start(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
            raise RuntimeError("enough")

        def on_exception(self, trainer: FederatedTrainer, exception: BaseException) -> None:
            self.heard = exception

    broken = Broken()
    with pytest.raises(RuntimeError, match="enough") as error:
        run(quick, broken)
    assert broken.heard is error.value
