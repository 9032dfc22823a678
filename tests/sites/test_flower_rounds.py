"""A round of the coordinator's engine: sites leave, return, stay silent or send nonsense."""

from pathlib import Path
from typing import Any

import federation_parts as parts
import pytest
import torch

pytest.importorskip("cryptography", reason="needs Flower: pip install -e '.[flower]'")

from memory_federation import Fake, Trial

from fedx_pl.engines import Lost
from fedx_pl.federation.round import ClientMemory, GlobalState, RoundContext, Update
from fedx_pl.sites import engine as flower
from fedx_pl.sites import wire
from fedx_pl.sites.link import Connected
from fedx_pl.sites.records import Reply

pytestmark = pytest.mark.usefixtures("quick")


def test_a_site_receives_what_the_coordinator_remembers_about_it(trial: Trial) -> None:
    trial.link.join(0, Fake("a"))
    trial.engine.choose(1)
    (found,) = trial.run([0], ClientMemory(last_round=2, steps=6, epochs=2), round=3)
    (_, kind, content) = trial.link.sent[-1]
    assert kind == wire.TRAIN
    run = trial.engine.book.run
    numbers = {"round": 3, "client": 0, "last_round": 2, "steps": 6, "epochs": 2}
    assert content.meta == {"run": run, "health": True} | numbers
    assert isinstance(found, Update)
    assert found.memory == ClientMemory(last_round=3, steps=8, epochs=3)
    assert (found.client, found.num_images, found.images_seen) == (0, 10, 10)
    assert found.loss_names == ("total", "term")
    assert found.losses.tolist() == [[1.0, 0.5]]
    assert parts.same(found.state.tensors(), {"w": torch.arange(3.0)})


def test_a_site_that_is_gone_is_lost_without_fault(trial: Trial) -> None:
    gone = Fake("a")
    trial.link.join(0, gone)
    trial.link.join(1, Fake("b"))
    trial.engine.choose(1)
    gone.deaf = True
    rounds = trial.engine.run(
        RoundContext(
            round=1,
            rounds=4,
            epochs=1,
            seed=0,
            global_state=GlobalState(weights={"w": torch.ones(1)}),
            batchnorm="average",
        ),
        [0, 1],
        lambda client: None,
    )
    assert isinstance(next(rounds), Update)  # b, while a is silent
    del trial.link.here[0]
    (lost,) = list(rounds)
    assert isinstance(lost, Lost)
    assert (lost.client, lost.fault) == (0, False)
    trial.link.join(0, Fake("a"), since="2")
    assert trial.engine.choose(2) == [0, 1]  # And welcome in the next round.


def test_a_site_that_was_away_is_greeted_and_asked_again(trial: Trial) -> None:
    """It is killed and returns unnoticed, but its connection has another start time."""
    killed = Fake("a")
    trial.link.join(0, killed)
    trial.engine.choose(1)
    killed.deaf = True
    rounds = trial.engine.run(
        RoundContext(
            round=1,
            rounds=4,
            epochs=1,
            seed=0,
            global_state=GlobalState(weights={"w": torch.ones(1)}),
            batchnorm="average",
        ),
        [0],
        lambda client: None,
    )
    step = iter(rounds)
    sites = trial.link.sites

    def come_back() -> list[Connected]:
        if len(trial.link.sent) == 2:  # hello, train
            trial.link.join(0, Fake("a"), since="2")
        return sites()

    trial.link.sites = come_back  # type: ignore[method-assign]
    assert isinstance(next(step), Update)
    assert [kind for _, kind, _ in trial.link.sent] == [
        wire.HELLO,
        wire.TRAIN,
        wire.HELLO,
        wire.TRAIN,
    ]
    assert trial.link.sent[3][2].meta == trial.link.sent[1][2].meta
    assert "site a was away and is asked again" in trial.notes
    assert list(step) == []


def test_a_site_that_connects_anew_is_not_there_for_a_moment(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its two connections, the SuperLink answers its message with an error."""
    monkeypatch.setattr(flower, "GRACE_SECONDS", 60.0)
    trial.link.join(0, Fake("a"))
    trial.engine.choose(1)
    send, sites, looks = trial.link.send, trial.link.sites, []

    def leave(*words: Any, **named: Any) -> str:
        if words[1] == wire.TRAIN and not looks:
            del trial.link.here[0]
        return send(*words, **named)

    def come_back() -> list[Connected]:
        looks.append(1)
        if len(looks) == 3:
            trial.link.join(0, Fake("a"), since="2")
        return sites()

    monkeypatch.setattr(trial.link, "send", leave)
    monkeypatch.setattr(trial.link, "sites", come_back)
    (found,) = trial.run([0])
    assert isinstance(found, Update)
    assert "site a was away and is asked again" in trial.notes


def test_an_upload_that_broke_off_is_a_fault_of_a_site_that_never_left(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would delay every round by the upload timeout without a strike."""
    trial.link.join(0, Fake("a"))
    trial.engine.choose(1)
    monkeypatch.setattr(
        trial.link,
        "receive",
        lambda messages: [Reply(messages[0], None, "its upload broke off", offline=True)],
    )
    assert trial.run([0]) == [Lost(0, "its answer never came whole", fault=True)]


def test_a_silent_site_is_given_up_after_the_timeout(tmp_path: Path) -> None:
    trial = Trial(tmp_path / "run", timeout=0.2)
    silent = Fake("a")
    trial.link.join(0, silent)
    trial.link.join(1, Fake("b"))
    trial.engine.choose(1)
    silent.deaf = True
    update, lost = trial.run([0, 1])
    assert isinstance(update, Update)
    assert lost == Lost(0, "no answer within 0 s", fault=True)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"error": "out of memory"}, "out of memory"),
        ({"error": ""}, "error is not a short text"),
        ({"images": True}, "images=True"),
        ({"images": 0}, "images=0"),
        ({"images": 2**60}, "images="),
        ({"images": 1.5}, "images=1.5"),
        ({"images": None}, "images=None"),
        ({"seen": -1}, "seen=-1"),
        ({"seen": "many"}, "seen='many'"),
        ({"steps": 5}, "steps=5"),  # Fewer than before.
        ({"steps": False}, "steps=False"),
        ({"losses": {}}, "it tells no loss"),
        ({"losses": None}, "losses is not a small table"),
        ({"losses": [1]}, "losses is not a small table"),
        ({"losses": {"total": True}}, "losses has an entry 'total'"),
        ({"losses": {"total": "1"}}, "losses has an entry 'total'"),
        ({"losses": {"total": 1, "../x": 1}}, "losses has an entry '../x'"),
        ({"seen": 11}, "seen=11 is not a whole number from 0 to 10"),  # Ten images, one epoch.
        ({"steps": 17}, "steps=17 is not a whole number from 6 to 16"),
        ({"steps": 2**53 - 1}, "steps="),
        ({"remembered": False, "steps": 11}, "steps=11 is not a whole number from 0 to 10"),
        ({"losses": {"total": 1, "verlust_ä": 1}}, "losses has an entry 'verlust_ä'"),
        ({"metrics": {"rankme": 0.5}}, "it tells rankme=0.5, possible are 1 to 1e+09"),
        ({"metrics": {"rankme": -1e8}}, "it tells rankme=-1e+08"),
        ({"metrics": {"uniformity": 0.1}}, "it tells uniformity=0.1, possible are -8 to 0"),
        ({"metrics": {"alignment": 5}}, "it tells alignment=5, possible are 0 to 4"),
        ({"metrics": {"angle": 200}}, "it tells angle=200, possible are 0 to 180"),
        ({"metrics": {"lr": -1}}, "it tells lr=-1"),
        ({"losses": {f"n{i}": 1 for i in range(100)}}, "losses is not a small table"),
        ({"metrics": {"a b": 1}}, "metrics has an entry 'a b'"),
        ({"metrics": None}, "metrics is not a small table"),
        ({"metrics": {"round": 99}}, "it tells round, which is the coordinator's"),
        ({"metrics": {"loss": 0}}, "it tells loss, which is the coordinator's"),
        ({"metrics": {"knn_top1": 100}}, "it tells knn_top1, which is the coordinator's"),
        ({"metrics": {"loss_term": 0}}, "it tells loss_term, which is the coordinator's"),
        ({"metrics": {"epsilon": 0}}, "it tells epsilon, which is the coordinator's"),
        ({"metrics": {"bytes_up": 0}}, "it tells bytes_up, which is the coordinator's"),
        ({"metrics": {"drift": 0}}, "it tells drift, which is the coordinator's"),
        ({"metrics": {"images": 0}}, "it tells images, which is the coordinator's"),
    ],
)
def test_answers_that_make_no_sense_are_a_fault(
    trial: Trial, changed: dict[str, Any], reason: str
) -> None:
    trial.link.join(0, Fake("a", **changed))
    trial.engine.choose(1)
    (lost,) = trial.run([0], ClientMemory(last_round=1, steps=6, epochs=1), round=2)
    assert isinstance(lost, Lost)
    assert lost.fault
    assert reason in lost.reason


def test_answers_that_cannot_be_read_are_a_fault(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial.link.join(0, Fake("a"))
    trial.engine.choose(1)
    monkeypatch.setattr(
        trial.link, "receive", lambda messages: [Reply(messages[0], None, "it cannot be read")]
    )
    assert trial.run([0]) == [Lost(0, "it cannot be read", fault=True)]


@pytest.mark.parametrize(
    "changed",
    [
        {"losses": {"total": None, "term": None}},
        {"losses": {"total": 10**400, "term": -1e308}, "metrics": {"rankme": -1e300}},
        {"metrics": {"rankme": 0.9999999, "uniformity": 4e-7}},  # Rounding, of a collapsed encoder.
        {"losses": {"total": 1, "never_heard_of": 2}},
        {"metrics": {"rankme": 3.5, "own": None, "loss_scale": 8192}},
        {"surprise": {"deep": [1, 2]}, "last_round": "never", "site": "someone else"},
    ],
)
def test_strange_text_does_no_harm(trial: Trial, changed: dict[str, Any]) -> None:
    trial.link.join(0, Fake("a", **changed))
    trial.engine.choose(1)
    (found,) = trial.run([0])
    assert isinstance(found, Update)
    assert found.client == 0
    assert found.losses.shape == (1, len(found.loss_names))
    assert found.loss_names[0] == "total"


def test_a_site_that_lost_its_private_state_keeps_its_counts(trial: Trial) -> None:
    """The site counts from 0 again: 2 steps in this round, after 6 earlier ones."""
    trial.link.join(0, Fake("a", remembered=False, steps=2))
    trial.engine.choose(1)
    (found,) = trial.run([0], ClientMemory(last_round=3, steps=6, epochs=3), round=4)
    assert isinstance(found, Update)
    assert found.memory == ClientMemory(last_round=4, steps=8, epochs=4)
    assert "site a had lost its private state and started anew" in trial.notes
