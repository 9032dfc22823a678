"""The coordinator's engine with sites in this process: it equals a simulation; who participates."""

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
from helpers import THREADS, Watching, silent
from safetensors.torch import load_file

pytest.importorskip("cryptography", reason="needs Flower: pip install -e '.[flower]'")

from memory_federation import Answer, Fake, MemoryLink, Trial

from fedx_pl.cli.sites import coordinator_run
from fedx_pl.config.compose import compose
from fedx_pl.encoder.load import Encoder
from fedx_pl.errors import UserError
from fedx_pl.federation.round import GlobalState
from fedx_pl.sites import engine as flower
from fedx_pl.sites import wire
from fedx_pl.sites.book import SiteBook
from fedx_pl.sites.engine import FlowerEngine
from fedx_pl.sites.link import Connected
from fedx_pl.sites.records import Reply
from fedx_pl.sites.site import Site, offer
from fedx_pl.sites.wire import Content
from fedx_pl.trainer import FederatedTrainer

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parts.make_images(tmp_path_factory.mktemp("sites"), {"a": 24, "b": 17, "c": 32})


# --- whole runs -----------------------------------------------------------------------------------


def federate(
    images: Path,
    folder: Path,
    *words: str,
    change: dict[str, Callable[[Answer], Answer]] | None = None,
) -> tuple[Path, str]:
    """Runs a federation of real sites and returns its folder and notes; ``change`` alters sites."""
    config = compose([*parts.WORDS, "federation.clients=3", f"run.dir={folder / 'run'}", *words])
    watching, link = Watching(), MemoryLink()
    for node, name in enumerate(("c", "a", "b")):  # They come in any order.
        own = [
            f"data.root={images / name}",
            f"data.cache={folder / 'cache'}",
            f"run.threads={THREADS}",
        ]
        site = Site(name, folder / f"state-{name}", own, lambda line: None)
        link.join(node, (change or {}).get(name, lambda answer: answer)(site.answer), key=name)

    def engine(trainer: FederatedTrainer) -> FlowerEngine:
        return FlowerEngine(trainer, link, offer(config, 3, 16), wait=60, timeout=60)  # type: ignore[arg-type]

    coordinator_run(config, silent, callbacks=[watching], engine=engine).fit()
    return folder / "run", "\n".join(watching.notes)


@pytest.mark.parametrize(
    "method", [("method=simclr",), parts.BYOL_FEDX], ids=["simclr", "byol+fedx"]
)
def test_sites_come_to_the_same_weights_as_a_simulation(
    images: Path, tmp_path: Path, method: tuple[str, ...]
) -> None:
    """Weights are bit-identical after each round; round 2 needs the private state of round 1."""
    expected = parts.serial(images, tmp_path / "serial", *method, "federation.rounds=2")
    found, _ = federate(images, tmp_path, *method, "federation.rounds=2")
    for round in (1, 2):
        assert parts.same(parts.weights(found, round), parts.weights(expected, round))
    serial_rows, rows = (
        json.loads((run / "metrics.json").read_text())["rounds"] for run in (expected, found)
    )
    for ours, theirs in zip(rows, serial_rows, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert {
            "rankme",
            "uniformity",
            "alignment",
        } <= ours.keys()  # No labels: sites measure for themselves.
    assert not list((found / "clients").glob("*"))  # Private state stays at home.


def test_a_coordinator_with_labelled_images_evaluates_on_them(images: Path, tmp_path: Path) -> None:
    """The weights equal those without evaluation, and sites measure nothing."""
    labelled = parts.make_images(tmp_path / "labelled", {"cat": 12, "dog": 12})
    words = [f"data.root={labelled}", "data.labels=folders", f"data.cache={tmp_path / 'cache'}"]
    found, _ = federate(
        images, tmp_path / "with", *words, "federation.rounds=1", "evaluation.linear.epochs=2"
    )
    plain, _ = federate(images, tmp_path / "without", "federation.rounds=1")
    assert parts.same(parts.weights(found, 1), parts.weights(plain, 1))
    (row,) = json.loads((found / "metrics.json").read_text())["rounds"]
    assert {"knn_top1", "linear_top1", "rankme", "uniformity"} <= row.keys()
    assert "alignment" not in row


def nan(answer: Answer) -> Answer:
    def bad(kind: str, content: Content) -> Content | None:
        found = answer(kind, content)
        if found and kind == wire.TRAIN:
            found.tensors["backbone.conv1.weight"][0] = math.nan
        return found

    return bad


def replaced(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> Callable[[Answer], Answer]:
    def make(answer: Answer) -> Answer:
        def bad(kind: str, content: Content) -> Content | None:
            found = answer(kind, content)
            return found and (
                found._replace(tensors=change(found.tensors)) if kind == wire.TRAIN else found
            )

        return bad

    return make


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (nan, "backbone.conv1.weight holds NaN or infinity"),
        (
            replaced(lambda state: state | {"backbone.conv1.weight": torch.ones(3)}),
            "backbone.conv1.weight has shape (3,)",
        ),
        (
            replaced(lambda state: state | {"surprise": torch.ones(3)}),
            "1 tensors are unknown, e.g. surprise",
        ),
    ],
    ids=["nan", "shape", "unknown"],
)
def test_a_bad_update_is_dropped_by_name_and_the_others_make_the_round(
    images: Path, tmp_path: Path, change: Any, reason: str
) -> None:
    """The result equals a run of a and b alone, which are clients 0 and 1 in both."""
    others = tmp_path / "others"
    others.mkdir()
    for name in "ab":
        (others / name).symlink_to(images / name)
    expected = parts.serial(others, tmp_path / "serial", "federation.rounds=1")
    found, notes = federate(images, tmp_path, "federation.rounds=1", change={"c": change})
    assert f"round 1: dropped site c: {reason}" in notes
    assert parts.same(parts.weights(found, 1), parts.weights(expected, 1))


# --- the end --------------------------------------------------------------------------------------


def last_messages(trial: Trial) -> dict[int, Content]:
    return {node: content for node, kind, content in trial.link.sent if kind == wire.END}


def test_every_site_learns_that_the_federation_has_finished_and_keeps_its_encoder(
    images: Path, tmp_path: Path
) -> None:
    run, _ = federate(images, tmp_path, "federation.rounds=1")
    expected = load_file(run / "encoder.safetensors")
    for name in "abc":
        (folder,) = (tmp_path / f"state-{name}").glob("*/encoder")
        assert parts.same(Encoder.of(folder).backbone.state_dict(), expected)


@pytest.mark.parametrize("leave", [True, False])
def test_the_coordinator_decides_whether_it_leaves_an_encoder(trial: Trial, leave: bool) -> None:
    trial.link.join(0, Fake("a"))
    trial.engine.choose(1)
    trial.link.join(1, Fake("late"))
    trial.engine.leave_encoder = leave
    trial.trainer.state.round, trial.trainer.global_state = (
        4,
        GlobalState(weights={"w": torch.arange(3.0)}),
    )
    trial.engine.close()
    messages = last_messages(trial)
    assert messages.keys() == {0, 1}
    for content in messages.values():
        meta = {"run": trial.engine.book.run, "outcome": wire.FINISHED, "round": 4}
        # A site that was just started needs the configuration to make an encoder of the weights.
        assert content.meta == meta | ({"config": trial.engine.offer} if leave else {})
        assert content.tensors.keys() == ({"w"} if leave else set())


def test_a_coordinator_that_stops_early_says_so_and_gives_nothing_away(trial: Trial) -> None:
    silent_one = Fake("a")
    trial.link.join(0, silent_one)
    trial.engine.choose(1)
    # The site trains and its answer never arrives.
    trial.link.receive = lambda messages: iter(())  # type: ignore[method-assign]
    trial.engine.close()
    (content,) = last_messages(trial).values()
    assert (content.meta["outcome"], content.meta["round"], content.tensors) == (
        wire.STOPPED,
        0,
        {},
    )
    assert not trial.link.here  # The link is closed all the same.


def test_a_site_that_comes_back_in_time_is_notified_of_the_end(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower, "END_SECONDS", 60.0)
    for node, name in enumerate("abc"):
        trial.link.join(node, Fake(name))
    trial.engine.choose(1)
    away, sites, looks = trial.link.here.pop(2), trial.link.sites, itertools.count()

    def come_back() -> list[Connected]:
        if next(looks) == 3:
            trial.link.here[2] = away
        return sites()

    trial.link.sites = come_back  # type: ignore[method-assign]
    trial.trainer.should_stop = True
    trial.engine.close()
    assert last_messages(trial).keys() == {0, 1, 2}


def test_a_site_that_cannot_take_part_learns_the_reason(trial: Trial) -> None:
    trial.link.join(0, Fake("a"))
    trial.link.join(
        1, lambda kind, content: Content({"site": "b", "error": "no images in /here"}, {}), key="b"
    )
    trial.engine.choose(1)
    (content,) = last_messages(trial).values()
    assert content.meta == {
        "run": trial.engine.book.run,
        "outcome": wire.REFUSED,
        "reason": "no images in /here",
    }


# --- who is there ---------------------------------------------------------------------------------


def test_sites_are_numbered_by_name_and_keep_their_numbers(trial: Trial, tmp_path: Path) -> None:
    for node, name in enumerate(("m", "z", "k")):
        trial.link.join(node, Fake(name))
    assert trial.engine.choose(1) == [0, 1, 2]
    assert [trial.engine.name_of(client) for client in (0, 1, 2)] == ["site k", "site m", "site z"]

    again = Trial(
        tmp_path / "run", "federation.clients=4"
    )  # Another process of the same run, and a new site.
    for node, name in enumerate(("z", "a", "m", "k")):
        again.link.join(node, Fake(name))
    assert again.engine.choose(2) == [0, 1, 2, 3]
    assert [again.engine.name_of(client) for client in range(4)] == [
        "site k",
        "site m",
        "site z",
        "site a",
    ]
    assert again.engine.book.run == trial.engine.book.run
    assert json.loads((tmp_path / "run" / "federation.json").read_text())["sites"] == [
        "k",
        "m",
        "z",
        "a",
    ]


def test_known_sites_are_numbered_before_they_come(trial: Trial) -> None:
    trial.engine.book.expect(["a", "b", "c"])
    trial.link.join(7, Fake("c"), key="c")
    assert trial.engine.choose(1) == [2]


def test_another_run_has_another_name_among_its_sites(tmp_path: Path) -> None:
    names = {SiteBook(tmp_path / f"{number}" / "federation.json").run for number in range(3)}
    assert len(names) == 3


@pytest.mark.parametrize("content", ["", "{", "[]", '{"run": "ab"}', '{"run": "ab", "sites": 3}'])
def test_a_damaged_list_of_sites_is_not_replaced(tmp_path: Path, content: str) -> None:
    (tmp_path / "federation.json").write_text(content)
    with pytest.raises(UserError, match=r"federation\.json is damaged"):
        SiteBook(tmp_path / "federation.json")
    assert (tmp_path / "federation.json").read_text() == content


def test_the_first_round_waits_for_all_and_later_ones_for_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock advances by one second at each reading."""
    seconds = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)), sleep=lambda _: None)
    monkeypatch.setattr(flower, "time", clock)
    trial = Trial(tmp_path / "run", "federation.min_clients=2", wait=5.5)
    trial.link.join(0, Fake("a"))
    trial.link.join(1, Fake("b"))
    assert trial.engine.choose(1) == [0, 1]  # After --wait seconds.
    assert "round 1 waits for 3 sites; there now: a, b" in trial.notes
    trial.engine.wait = 1e9
    assert trial.engine.choose(2) == [0, 1]  # At once.


def test_a_share_of_the_sites_trains(tmp_path: Path) -> None:
    """Three of six sites train in each round; the draw depends on the seed."""
    words = ("federation.clients=6", "federation.fraction=0.5")
    chosen = []
    for folder in ("one", "two"):
        trial = Trial(tmp_path / folder, *words)
        for node in range(6):
            trial.link.join(node, Fake(f"site-{node}"))
        chosen.append([trial.engine.choose(round) for round in range(1, 9)])
    assert chosen[0] == chosen[1]
    assert all(len(set(clients)) == 3 for clients in chosen[0])
    assert len({tuple(clients) for clients in chosen[0]}) > 1
    assert {client for clients in chosen[0] for client in clients} == set(range(6))
    trial.link.here = dict(list(trial.link.here.items())[:2])
    assert trial.engine.choose(9) == [0, 1]  # Three are wanted, two are there.


def test_a_greeting_carries_the_run_and_no_paths(trial: Trial) -> None:
    trial.link.join(0, Fake("a"))
    trial.engine.choose(1)
    ((_, kind, content),) = trial.link.sent
    assert kind == wire.HELLO
    assert content.meta["run"] == trial.engine.book.run
    assert content.meta["config"]["data"] == {
        "image_size": 16,
        "grayscale": False,
        "mean": [],
        "std": [],
    }
    assert "run" not in content.meta["config"]
    assert str(trial.trainer.folder) not in json.dumps(content.meta)


def test_a_name_that_is_not_its_key_s_is_refused(trial: Trial) -> None:
    trial.link.join(0, Fake("a"), key="a")
    trial.link.join(1, Fake("a"), key="b")
    assert trial.engine.choose(1) == [0]
    assert (
        "site b cannot take part: its key is that of site b, but it calls itself a" in trial.notes
    )


def test_of_two_sites_with_one_name_the_second_takes_part_when_the_first_has_left(
    trial: Trial,
) -> None:
    """Without keys a restarted site is a new node, and its old node stays listed for a while."""
    trial.link.join(0, Fake("a"))
    assert trial.engine.choose(1) == [0]
    trial.link.join(1, Fake("a"))
    trial.engine.choose(2)
    assert trial.engine.guests["a"].node == 0
    assert trial.notes.count("a second site a is here") == 1
    del trial.link.here[0]
    assert trial.engine.choose(3) == [0]
    assert trial.engine.guests["a"].node == 1
    assert trial.notes.count("a second site a is here") == 1


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Content({"site": "b", "error": "no images in /here"}, {}), "no images in /here"),
        (Content({"site": "b", "error": "\x1b[2J"}, {}), "error is not a short text"),
        (Content({"site": "b", "images": 0}, {}), "images=0"),
        (Content({"site": "b", "images": True}, {}), "images=True"),
        (Content({"site": "b"}, {}), "images=None"),
        (Content({"images": 10}, {}), "site is not a short text"),
        (Content({"site": ["b"], "images": 10}, {}), "site is not a short text"),
        (Content({"site": "b\n", "images": 10}, {}), "site is not a short text"),
    ],
)
def test_a_site_that_does_not_greet_back_takes_no_part(
    trial: Trial, reply: Content, reason: str
) -> None:
    trial.link.join(0, Fake("a"))
    trial.link.join(1, lambda kind, content: reply, key="b")
    assert trial.engine.choose(1) == [0]
    assert f"site b cannot take part: {reason}" in trial.notes
    trial.engine.choose(2)
    assert trial.notes.count("cannot take part") == 1  # Not asked again, until it reconnects.


def test_a_greeting_that_got_lost_is_sent_again(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive, lost = trial.link.receive, []

    def lose(messages: list[str]) -> list[Reply]:
        if not lost:
            lost.extend(messages)
            return [Reply(message, None, "it has expired", offline=True) for message in messages]
        return list(receive(messages))

    monkeypatch.setattr(trial.link, "receive", lose)
    trial.link.join(0, Fake("a"))
    assert trial.engine.choose(1) == [0]
    assert "cannot take part" not in trial.notes
    assert len(trial.link.sent) == 2
