"""Parts of one's own by their name on the command line."""

import csv
from pathlib import Path

import pytest

from fedx_pl.cli.main import main
from fedx_pl.config.registry import find_callback
from fedx_pl.errors import UserError

CALLBACK = """
from fedx_pl import RoundCallback

class Counting(RoundCallback):
    def on_round_end(self, trainer, record):
        record.row["counted"] = len(record.updates)
        trainer.should_stop = True

class Other:
    pass
"""


def test_a_callback_from_the_command_line_counts_and_stops(tiny: list[str], modules: Path) -> None:
    (modules / "watchful.py").write_text(CALLBACK)
    run = modules / "run"
    assert main(["train", *tiny, "callbacks=[watchful:Counting]", f"run.dir={run}"]) == 0
    with open(run / "metrics.csv") as file:
        assert [row["counted"] for row in csv.DictReader(file)] == ["3"]
    # It is not part of what the run is: without it, the run goes on.
    assert main(["train", *tiny, f"run.dir={run}"]) == 0
    with open(run / "metrics.csv") as file:
        assert [row["counted"] for row in csv.DictReader(file)] == ["3", ""]


def test_a_callback_that_is_none_is_refused_by_name(modules: Path) -> None:
    (modules / "watchful.py").write_text(CALLBACK)
    with pytest.raises(UserError, match=r"callbacks=\[counting\] is not known; .* callbacks=\[package.module:Class\]"):
        find_callback("counting")
    with pytest.raises(UserError, match=r"watchful has no 'Countin'; it has Counting"):
        find_callback("watchful:Countin")
    with pytest.raises(UserError, match=r"not a subclass of fedx_pl.RoundCallback"):
        find_callback("watchful:Other")
    with pytest.raises(UserError, match=r"callbacks=nowhere:A: cannot import nowhere"):
        find_callback("nowhere:A")
