"""Sites that lie against whole runs: one bad site never decides for the others."""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import federation_parts as parts
import pytest
import torch
from helpers import silent
from torch import Tensor

pytest.importorskip("cryptography", reason="needs Flower: pip install -e '.[flower]'")

from memory_federation import Answer, Fake, federate

from fedx_pl.cli.sites import coordinator_run
from fedx_pl.config.compose import REAL_SITES, compose
from fedx_pl.errors import UserError
from fedx_pl.federation import pending
from fedx_pl.federation.aggregate import Aggregator
from fedx_pl.methods.base import State
from fedx_pl.sites import engine as flower
from fedx_pl.sites import wire
from fedx_pl.sites.wire import Content

pytestmark = pytest.mark.usefixtures("quick")


def no_constants(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rounds in metrics.json, which must be JSON to the letter."""
    rows: list[dict[str, Any]] = json.loads(
        (folder / "metrics.json").read_text(), parse_constant=no_constants
    )["rounds"]
    return rows


def test_a_site_that_reports_a_hundred_names_does_not_affect_the_others(tmp_path: Path) -> None:
    """It always answers first; the other sites report losses and a metric of their own."""
    many = {f"n{i}": 1.0 for i in range(60)}
    first = Fake("a", losses={"total": 1.0, **many}, metrics={f"m{i}": 1.0 for i in range(40)})
    others = {name: Fake(name, metrics={"rankme": 9.0, "own": 1.0}) for name in "bc"}
    trainer, notes = federate(tmp_path, {"a": first} | others, "federation.rounds=4")
    assert [row["clients"] for row in trainer.history] == [3, 3, 3, 3]
    assert "dropped" not in notes


def test_names_beyond_the_bound_are_a_fault_of_the_site_that_sent_them(tmp_path: Path) -> None:
    """60 new names per round exceed the bound in round 2, even beside usual names."""

    def inventive(kind: str, content: Content) -> Content | None:
        number = content.meta.get("round")
        return Fake("a", losses={"total": 1.0, **{f"r{number}_{i}": 1.0 for i in range(60)}})(
            kind, content
        )

    trainer, notes = federate(
        tmp_path, {"a": inventive, "b": Fake("b"), "c": Fake("c")}, "federation.rounds=2"
    )
    assert [row["clients"] for row in trainer.history] == [3, 2]
    assert "round 2: dropped site a: it tells too many different numbers" in notes


class Stopping(Fake):
    """A site whose first answer stops the coordinator."""

    stopped = False

    def __call__(self, kind: str, content: Content) -> Content | None:
        if kind == wire.TRAIN and not self.stopped:
            self.stopped = True
            raise KeyboardInterrupt
        return super().__call__(kind, content)


def telling(name: str, loss: str) -> Answer:
    """A site that sends its loss as raw text, which our own packing would encode."""

    def answer(kind: str, content: Content) -> Content | None:
        found = Fake(name, losses={"total": 0})(kind, content)
        if kind == wire.HELLO or found is None:
            return found
        text, blob = wire.pack(found)
        try:
            return wire.unpack(text.replace('"total": 0', f'"total": {loss}'), blob)
        except wire.BadMessage as error:
            return Content({"error": str(error)}, {})

    return answer


@pytest.mark.parametrize(
    ("first", "second"),
    [("1e308", "-1e308"), ("1e308", "1e308"), ("Infinity", "-Infinity"), ("1e999", "-1e999")],
)
def test_absurd_losses_of_two_sites_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, second: str
) -> None:
    """Their updates are in the run folder at the restart; the round shows the loss of c."""
    monkeypatch.setattr(pending, "WORTH", 0)  # Keeps every update of the unfinished round.
    sites = {"a": telling("a", first), "b": telling("b", second), "c": Stopping("c")}
    with pytest.raises(KeyboardInterrupt):
        federate(tmp_path, sites, "federation.rounds=1")
    federate(tmp_path, sites, "federation.rounds=1")
    (row,) = rows_of(tmp_path)
    assert row["loss"] == 1.0


def test_a_saved_update_that_is_refused_when_the_run_resumes_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older version accepted it and stopped within the round; its site is asked again."""
    monkeypatch.setattr(pending, "WORTH", 0)
    sites = {"a": Fake("a", images=10**9), "b": Stopping("b")}
    monkeypatch.setattr(Aggregator, "add", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        federate(tmp_path, sites, "federation.rounds=1")
    monkeypatch.undo()
    trainer, notes = federate(tmp_path, {"a": Fake("a"), "b": Fake("b")}, "federation.rounds=1")
    assert "the saved update of site a is left out: it claims 1000000000 images" in notes
    assert trainer.history[0]["clients"] == 2


def test_metrics_are_json_even_if_no_site_reports_a_loss(tmp_path: Path) -> None:
    silent = {name: Fake(name, losses={"total": None}, metrics={"own": None}) for name in "ab"}
    federate(tmp_path, silent, "federation.rounds=1")
    (row,) = rows_of(tmp_path)
    assert row["loss"] is None
    assert "own" not in row
    state = tmp_path / "checkpoints" / "round_00001" / "state.json"
    assert json.loads(state.read_text(), parse_constant=no_constants)["rows"][0]["loss"] is None
    trainer, _ = federate(tmp_path, silent, "federation.rounds=1")  # Finished: it is only read.
    assert math.isnan(trainer.history[0]["loss"])


@pytest.mark.parametrize(
    "lie", [{"rankme": -1e300}, {"rankme": 0.5}, {"rankme": 1.0, "uniformity": 0.0}]
)
def test_one_site_cannot_stop_the_others_by_a_collapse_that_is_none(
    tmp_path: Path, lie: dict[str, float]
) -> None:
    """The first two values are impossible; the last is possible, but from one site of three."""
    honest = {"rankme": 40.0, "uniformity": -3.0}
    sites = {"a": Fake("a", metrics=lie)} | {name: Fake(name, metrics=honest) for name in "bc"}
    trainer, notes = federate(tmp_path, sites, "federation.rounds=3", "on_collapse=stop")
    assert trainer.current_round == 3
    assert "collapsed" not in notes
    assert trainer.alarms == []


def test_a_collapse_that_only_one_site_measures_stops_nobody(tmp_path: Path) -> None:
    """The other sites report no metric, so none of them can disagree."""
    sites = {"a": Fake("a", metrics={"rankme": 1.0, "uniformity": 0.0})}
    sites |= {name: Fake(name) for name in "bc"}
    trainer, _ = federate(tmp_path, sites, "federation.rounds=2", "on_collapse=stop")
    assert trainer.current_round == 2
    assert trainer.alarms == []


def test_a_collapse_that_most_sites_see_stops_the_run(tmp_path: Path) -> None:
    sites = {name: Fake(name, metrics={"rankme": 1.0}) for name in "ab"} | {
        "c": Fake("c", metrics={"rankme": 1e8})
    }
    with pytest.raises(UserError, match="the encoder has collapsed"):
        federate(tmp_path, sites, "federation.rounds=3", "on_collapse=stop")


def test_a_silent_site_costs_the_timeout_three_times_and_is_then_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock advances by one second at each reading; a round waits for --timeout seconds."""
    seconds = itertools.count()
    monkeypatch.setattr(
        flower,
        "time",
        SimpleNamespace(monotonic=lambda: float(next(seconds)), sleep=lambda _: None),
    )
    mute = Fake("a")
    mute.deaf = True
    trainer, notes = federate(
        tmp_path, {"a": mute, "b": Fake("b"), "c": Fake("c")}, "federation.rounds=5", timeout=30
    )
    assert notes.count("dropped site a: no answer within 30 s") == 3
    assert (
        "in quarantine after aggregate.quarantine=3 bad or missing updates in a row: site a"
        in notes
    )
    assert [row["dropped"] for row in trainer.history] == [1, 1, 1, 0, 0]


# --- poison ---------------------------------------------------------------------------------------


class Poisoner(Fake):
    """A site that sends manipulated weights."""

    def __init__(self, name: str, change: Callable[[str, Tensor], Tensor], **changed: Any) -> None:
        super().__init__(name, **changed)
        self.change = change

    def __call__(self, kind: str, content: Content) -> Content | None:
        found = super().__call__(kind, content)
        if kind == wire.HELLO or found is None:
            return found
        return found._replace(
            tensors={name: self.change(name, t) for name, t in found.tensors.items()}
        )


def scaled(factor: float) -> Callable[[str, Tensor], Tensor]:
    """Scales all weights; statistics and counters stay."""
    return lambda name, t: (
        t if name.endswith(("running_mean", "running_var", "tracked")) else t * factor
    )


def one_layer(factor: float) -> Callable[[str, Tensor], Tensor]:
    """Scales one layer; with two honest sites, -2 gives a mean of zero."""
    return lambda name, t: t * factor if name == "backbone.conv1.weight" else t


def filled(end: str, value: float) -> Callable[[str, Tensor], Tensor]:
    return lambda name, t: torch.full_like(t, value) if name.endswith(end) else t


def untrained() -> State:
    """The weights that the first round starts from."""
    config = compose([*parts.WORDS, "federation.clients=3"])
    return coordinator_run(config, silent).trainer.first_state().tensors()


@pytest.mark.parametrize(
    ("change", "changed", "reason"),
    [
        (scaled(-2), {}, "its weights kept -2 of the global ones"),
        (scaled(0.001), {"images": 10_000_000}, "its weights kept 0.001 of the global ones"),
        (scaled(1e-45), {}, "of the global ones, possible is 0.01 or more"),
        (one_layer(-2), {}, "its backbone.conv1.weight kept -2 of the global ones"),
        (one_layer(1e-45), {}, "its backbone.conv1.weight kept "),
        (filled("running_mean", 3e38), {}, "running_mean holds 3e+38, possible is 1e+06"),
        (filled("running_var", 3e38), {}, "running_var holds 3e+38, possible is 1e+12"),
        (filled("num_batches_tracked", 2**62), {}, "num_batches_tracked moved by more than"),
    ],
    ids=[
        "turned",
        "shrunk",
        "nothing",
        "layer turned",
        "layer shrunk",
        "mean",
        "variance",
        "counter",
    ],
)
def test_poison_of_permitted_length_is_refused_by_the_plain_mean_too(
    tmp_path: Path, change: Any, changed: dict[str, Any], reason: str
) -> None:
    """The other sites return the weights unchanged, so the model must not change."""
    sites = {"a": Fake("a"), "b": Fake("b"), "c": Poisoner("c", change, **changed)}
    _, notes = federate(tmp_path, sites, "federation.rounds=1", "aggregate=mean")
    assert "round 1: dropped site c: " in notes
    assert reason in notes
    assert parts.same(parts.weights(tmp_path, 1), untrained())


def test_by_default_the_influence_of_a_site_is_bounded_whatever_it_claims(
    tmp_path: Path,
) -> None:
    """a and b change by 1%, c by 10% with 10,000,000 images; it is clipped to 2%, share 1/2.

    (1 + 1) / 4 + 2 / 2 = 1.5%; a plain mean weighted by its claim would give 10%.
    """
    sites = {name: Poisoner(name, scaled(1.01)) for name in "ab"}
    sites["c"] = Poisoner("c", scaled(1.1), images=10_000_000)
    _, notes = federate(tmp_path, sites, "federation.rounds=1", *REAL_SITES)
    after, before = (
        state["backbone.conv1.weight"].norm() for state in (parts.weights(tmp_path, 1), untrained())
    )
    assert (after / before).item() == pytest.approx(1.015, rel=1e-4)
    assert "its 10,000,000 images count as 20, aggregate.max_share=0.5" in notes
    assert "the change of its weights was clipped" in notes
