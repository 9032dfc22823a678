"""Alarms: a collapse, a diverging client, a vanishing loss scale, and what follows."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import Watching
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_trainer import run

from fedx_pl.callbacks.health import Health
from fedx_pl.config.compose import compose
from fedx_pl.errors import UserError
from fedx_pl.federation.round import ClientMemory, GlobalState, RoundContext, RoundRecord, Update


def update(losses: list[float], **metrics: float) -> Update:
    table = torch.tensor(losses)[:, None]
    return Update(
        client=3,
        num_images=10,
        state=GlobalState(weights={}),
        memory=ClientMemory(),
        losses=table,
        loss_names=("total",),
        images_seen=10,
        metrics=metrics,
    )


def texts(row: dict[str, Any], *updates: Update) -> list[str]:
    context = RoundContext(
        round=1, rounds=2, epochs=1, seed=0, global_state=GlobalState(weights={})
    )
    record = RoundRecord(context=context, clients=[3], updates=[*updates], row=row)
    trainer = SimpleNamespace(name_of=lambda client: f"client {client}", should_stop=False)
    Health().on_round_end(trainer, record)
    assert not trainer.should_stop
    return record.alarms


def test_a_healthy_round_raises_no_alarm() -> None:
    assert texts({"rankme": 40.0, "uniformity": -2.5}, update([5.0, 4.0, 3.0])) == []
    assert texts({}, update([])) == []  # Not measured in this round; a client without steps.


def test_a_collapse_shows_in_rankme_and_uniformity() -> None:
    assert texts({"rankme": 1.04}) == ["the encoder has collapsed: rankme is 1.04, below 2"]
    assert texts({"uniformity": -0.01}) == [
        "the encoder has collapsed: uniformity is -0.01, above -0.05"
    ]


def test_a_client_diverges_if_its_loss_grows_twofold_or_is_not_finite() -> None:
    """A tenth of 20 steps is two.

    The first two have the mean 2, the last two 4.2, more than twice as much.
    """
    steps = [1.0, 3.0, *[2.0] * 16, 4.0, 4.4]
    assert texts({}, update(steps)) == ["client 3 diverges: its loss grew from 2 to 4.2"]
    assert texts({}, update([1.0, 3.0, *[2.0] * 16, 4.0, 4.0])) == []
    assert texts({}, update([1.0, float("nan")])) == ["client 3 diverges: its loss is nan"]


def test_a_loss_scale_below_one_raises_an_alarm() -> None:
    assert texts({}, update([1.0], loss_scale=0.5)) == ["client 3: its loss scale fell to 0.5"]


@pytest.mark.parametrize("on_collapse", ["warn", "stop"])
def test_a_collapse_is_noted_saved_shown_and_may_stop_the_run(
    tiny: list[str], tmp_path: Path, on_collapse: str
) -> None:
    """No encoder uses a thousand dimensions: with that bound each round is a collapse."""
    folder, display = tmp_path / "run", Watching()
    words = [*tiny, f"on_collapse={on_collapse}", "health.min_rankme=1000", f"run.dir={folder}"]
    if on_collapse == "stop":
        with pytest.raises(
            UserError, match=r"stopped after round 1: .* on_collapse=warn resumes it"
        ):
            run(compose(words), display)
        words = [*tiny, "health.min_rankme=1000", f"run.dir={folder}"]
    result = run(compose(words), display)
    assert [alarm.partition(":")[0] for alarm in result.alarms] == ["round 1", "round 2"]
    assert sum("the encoder has collapsed" in note for note in display.notes) == 2
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert "events/text_summary" in events.Tags()["tensors"]
