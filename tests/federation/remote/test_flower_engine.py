"""The coordinator's engine against sites in this process: the same numbers as a simulation, and what sites may do."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import federation_parts as parts
import pytest
import torch

pytest.importorskip("cryptography")

from fedx_pl.config import compose
from fedx_pl.errors import UserError
from fedx_pl.federation.client import ClientMemory, RoundContext, Update
from fedx_pl.federation.engines import Lost, flower
from fedx_pl.federation.engines.flower import FlowerEngine, SiteBook
from fedx_pl.federation.orchestrator import Orchestrator
from fedx_pl.federation.plan import Plan
from fedx_pl.federation.remote import wire
from fedx_pl.federation.remote.commands import coordinator_plan
from fedx_pl.federation.remote.link import Reply, Seen
from fedx_pl.federation.remote.site import Site, offer
from fedx_pl.federation.remote.wire import Content

Answer = Callable[[str, Content], Content | None]


class MemoryLink:
    """Calls sites instead of sending to them; messages are packed and read as on a wire."""

    def __init__(self) -> None:
        self.here: dict[int, tuple[Seen, Answer]] = {}
        self.sent: list[tuple[int, str, Content]] = []

    def join(self, node: int, answer: Answer, *, key: str = "", since: str = "1") -> None:
        self.here[node] = Seen(node, key, since), answer

    def sites(self) -> list[Seen]:
        return [seen for seen, _ in self.here.values()]

    def send(self, node: int, kind: str, content: Content, seconds: float) -> str:
        self.sent.append((node, kind, wire.unpack(*wire.pack(content))))
        return str(len(self.sent) - 1)

    def receive(self, messages: list[str]) -> Iterator[Reply]:
        for message in messages:
            node, kind, content = self.sent[int(message)]
            if node not in self.here:
                yield Reply(message, None, "Error: Node Unavailable", offline=True)
            elif (found := self.here[node][1](kind, content)) is not None:
                yield Reply(message, wire.unpack(*wire.pack(found)))

    def close(self) -> None:
        self.here.clear()


class Fake:
    """A site that does not train: it gives back the weights it got, and what else a test wants."""

    def __init__(self, name: str, **changed: Any) -> None:
        self.name, self.changed, self.deaf = name, changed, False

    def __call__(self, kind: str, content: Content) -> Content | None:
        if self.deaf and kind == wire.TRAIN:
            return None
        if kind == wire.HELLO:
            return Content({"site": self.name, "images": 10}, {})
        told = {"site": self.name, "images": 10, "seen": 10, "steps": content.meta["steps"] + 2, "remembered": True}
        return Content(told | {"losses": {"total": 1.0, "term": 0.5}, "metrics": {}} | self.changed, content.tensors)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parts.make_images(tmp_path_factory.mktemp("sites"), {"a": 24, "b": 17, "c": 32})


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A coordinator's plan for three sites."""
    return coordinator_plan(compose([*parts.WORDS, "federation.clients=3", "federation.rounds=4"]), lambda line: None)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower, "POLL_SECONDS", 0.005)
    monkeypatch.setattr(flower, "GRACE_SECONDS", 0.1)


class Trial:
    """An engine with its link, what it noted, and a round to run."""

    def __init__(self, plan: Plan, folder: Path, *words: str, wait: float = 0.02, timeout: float = 5.0) -> None:
        config = compose([*parts.WORDS, "federation.clients=3", "federation.rounds=4", f"run.dir={folder}", *words])
        self.plan = replace(plan, config=config)
        self.watching, self.link = parts.Watching(), MemoryLink()
        self.engine = FlowerEngine(
            self.plan, self.watching, self.link, offer(config, 3, 16), wait=wait, timeout=timeout
        )  # type: ignore[arg-type]

    @property
    def notes(self) -> str:
        return "\n".join(self.watching.notes)

    def run(self, clients: list[int], memory: ClientMemory | None = None, round: int = 1) -> list[Update | Lost]:
        context = RoundContext(round, 4, 1, 0, {"w": torch.arange(3.0)}, "average")
        return list(self.engine.run(context, clients, lambda client: memory))


@pytest.fixture
def trial(plan: Plan, tmp_path: Path) -> Trial:
    return Trial(plan, tmp_path / "run")


# --- whole runs -------------------------------------------------------------------------------------------------------


def federate(
    images: Path, folder: Path, *words: str, change: dict[str, Callable[[Answer], Answer]] | None = None
) -> tuple[Path, str]:
    """A whole run with real sites, of which ``change`` makes some misbehave: its folder and its notes."""
    config = compose([*parts.WORDS, "federation.clients=3", f"run.dir={folder / 'run'}", *words])
    watching, link = parts.Watching(), MemoryLink()
    for node, name in enumerate(("c", "a", "b")):  # They come in any order.
        own = [f"data.root={images / name}", f"data.cache={folder / 'cache'}", "run.threads=1"]
        site = Site(name, folder / f"state-{name}", own, lambda line: None)
        link.join(node, (change or {}).get(name, lambda answer: answer)(site.answer), key=name)

    def engine(plan: Plan, watcher: Any) -> FlowerEngine:
        return FlowerEngine(plan, watcher, link, offer(config, 3, 16), wait=60, timeout=60)  # type: ignore[arg-type]

    Orchestrator(coordinator_plan(config, lambda line: None), watching, engine).run()
    return folder / "run", "\n".join(watching.notes)


@pytest.mark.parametrize("method", [("method=simclr",), parts.BYOL_FEDX], ids=["simclr", "byol+fedx"])
def test_sites_come_to_the_same_weights_as_a_simulation(images: Path, tmp_path: Path, method: tuple[str, ...]) -> None:
    """To the bit, after each of two rounds; the second needs the private state of the first."""
    expected = parts.serial(images, tmp_path / "serial", *method, "federation.rounds=2")
    found, _ = federate(images, tmp_path, *method, "federation.rounds=2")
    for round in (1, 2):
        assert parts.same(parts.weights(found, round), parts.weights(expected, round))
    serial_rows, rows = (json.loads((run / "metrics.json").read_text())["rounds"] for run in (expected, found))
    for ours, theirs in zip(rows, serial_rows, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert {"rankme", "uniformity", "alignment"} <= ours.keys()  # No labels: sites measure for themselves.
    assert not list((found / "clients").glob("*"))  # Private state stays at home.


def nan(answer: Answer) -> Answer:
    def bad(kind: str, content: Content) -> Content | None:
        found = answer(kind, content)
        if found and kind == wire.TRAIN:
            found.tensors["backbone.conv1.weight"][0] = math.nan
        return found

    return bad


def replaced(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Answer], Answer]:
    def make(answer: Answer) -> Answer:
        def bad(kind: str, content: Content) -> Content | None:
            found = answer(kind, content)
            return found and (found._replace(tensors=change(found.tensors)) if kind == wire.TRAIN else found)

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
        (replaced(lambda state: state | {"surprise": torch.ones(3)}), "1 tensors are unknown, e.g. surprise"),
    ],
    ids=["nan", "shape", "unknown"],
)
def test_a_bad_update_is_dropped_by_name_and_the_others_make_the_round(
    images: Path, tmp_path: Path, change: Any, reason: str
) -> None:
    """As if only a and b were there: they are clients 0 and 1 in either case."""
    others = tmp_path / "others"
    others.mkdir()
    for name in "ab":
        (others / name).symlink_to(images / name)
    expected = parts.serial(others, tmp_path / "serial", "federation.rounds=1")
    found, notes = federate(images, tmp_path, "federation.rounds=1", change={"c": change})
    assert f"round 1: dropped site c: {reason}" in notes
    assert parts.same(parts.weights(found, 1), parts.weights(expected, 1))


# --- who is there -----------------------------------------------------------------------------------------------------


def test_sites_are_numbered_by_name_and_keep_their_numbers(plan: Plan, trial: Trial, tmp_path: Path) -> None:
    for node, name in enumerate(("m", "z", "k")):
        trial.link.join(node, Fake(name))
    assert trial.engine.choose(1) == [0, 1, 2]
    assert [trial.engine.name_of(client) for client in (0, 1, 2)] == ["site k", "site m", "site z"]

    again = Trial(plan, tmp_path / "run", "federation.clients=4")  # Another process of the same run, and a new site.
    for node, name in enumerate(("z", "a", "m", "k")):
        again.link.join(node, Fake(name))
    assert again.engine.choose(2) == [0, 1, 2, 3]
    assert [again.engine.name_of(client) for client in range(4)] == ["site k", "site m", "site z", "site a"]
    assert again.engine.book.run == trial.engine.book.run
    assert json.loads((tmp_path / "run" / "federation.json").read_text())["sites"] == ["k", "m", "z", "a"]


def test_known_sites_are_numbered_before_they_come(trial: Trial) -> None:
    trial.engine.book.expect(["a", "b", "c"])
    trial.link.join(7, Fake("c"), key="c")
    assert trial.engine.choose(1) == [2]


def test_another_run_has_another_name_among_its_sites(tmp_path: Path) -> None:
    names = {SiteBook(tmp_path / f"{number}" / "federation.json").run for number in range(3)}
    assert len(names) == 3


@pytest.mark.parametrize("content", ["", "{", "[]", '{"run": "ab"}', '{"run": "ab", "sites": 3}'])
def test_a_damaged_book_of_sites_is_not_begun_anew(tmp_path: Path, content: str) -> None:
    (tmp_path / "federation.json").write_text(content)
    with pytest.raises(UserError, match=r"federation\.json is damaged"):
        SiteBook(tmp_path / "federation.json")
    assert (tmp_path / "federation.json").read_text() == content


def test_the_first_round_waits_for_all_and_later_ones_for_enough(plan: Plan, tmp_path: Path) -> None:
    trial = Trial(plan, tmp_path / "run", "federation.min_clients=2", wait=0.1)
    trial.link.join(0, Fake("a"))
    trial.link.join(1, Fake("b"))
    assert trial.engine.choose(1) == [0, 1]  # After --wait seconds.
    assert "round 1 waits for 3 sites; there now: a, b" in trial.notes
    trial.engine.wait = 1e9
    assert trial.engine.choose(2) == [0, 1]  # At once.


def test_a_share_of_the_sites_trains(plan: Plan, tmp_path: Path) -> None:
    """Half of six: three, drawn anew in each round, the same ones for the same seed."""
    words = ("federation.clients=6", "federation.fraction=0.5")
    chosen = []
    for folder in ("one", "two"):
        trial = Trial(plan, tmp_path / folder, *words)
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
    assert content.meta["config"]["data"] == {"image_size": 16, "grayscale": False, "mean": [], "std": []}
    assert "run" not in content.meta["config"]
    assert str(trial.plan.config.run_folder) not in json.dumps(content.meta)


def test_a_name_that_is_not_its_key_s_is_refused(trial: Trial) -> None:
    trial.link.join(0, Fake("a"), key="a")
    trial.link.join(1, Fake("a"), key="b")
    assert trial.engine.choose(1) == [0]
    assert "site b cannot take part: its key is that of site b, but it calls itself a" in trial.notes


def test_of_two_sites_with_one_name_the_second_takes_part_when_the_first_has_left(trial: Trial) -> None:
    """Without keys a site that restarts is another node, and its old one seems to be there for some seconds."""
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
def test_who_does_not_greet_back_takes_no_part(trial: Trial, reply: Content, reason: str) -> None:
    trial.link.join(0, Fake("a"))
    trial.link.join(1, lambda kind, content: reply, key="b")
    assert trial.engine.choose(1) == [0]
    assert f"site b cannot take part: {reason}" in trial.notes
    trial.engine.choose(2)
    assert trial.notes.count("cannot take part") == 1  # Not asked again, until it reconnects.


def test_a_greeting_that_got_lost_is_sent_again(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
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


# --- a round ----------------------------------------------------------------------------------------------------------


def test_a_site_is_told_what_the_coordinator_remembers_of_it(trial: Trial) -> None:
    trial.link.join(0, Fake("a"))
    trial.engine.choose(1)
    (found,) = trial.run([0], ClientMemory({}, last_round=2, steps=6, epochs=2), round=3)
    (_, kind, content) = trial.link.sent[-1]
    assert kind == wire.TRAIN
    run = trial.engine.book.run
    numbers = {"round": 3, "client": 0, "last_round": 2, "steps": 6, "epochs": 2}
    assert content.meta == {"run": run, "health": True} | numbers
    assert isinstance(found, Update)
    assert found.memory == ClientMemory({}, last_round=3, steps=8, epochs=3)
    assert (found.client, found.num_images, found.images_seen) == (0, 10, 10)
    assert found.loss_names == ("total", "term")
    assert found.losses.tolist() == [[1.0, 0.5]]
    assert parts.same(found.state, {"w": torch.arange(3.0)})


def test_a_site_that_is_gone_is_lost_without_fault(trial: Trial) -> None:
    gone = Fake("a")
    trial.link.join(0, gone)
    trial.link.join(1, Fake("b"))
    trial.engine.choose(1)
    gone.deaf = True
    rounds = trial.engine.run(RoundContext(1, 4, 1, 0, {"w": torch.ones(1)}, "average"), [0, 1], lambda client: None)
    assert isinstance(next(rounds), Update)  # b, while a is silent
    del trial.link.here[0]
    (lost,) = list(rounds)
    assert isinstance(lost, Lost)
    assert (lost.client, lost.fault) == (0, False)
    trial.link.join(0, Fake("a"), since="2")
    assert trial.engine.choose(2) == [0, 1]  # And welcome in the next round.


def test_a_site_that_was_away_is_greeted_and_asked_again(trial: Trial) -> None:
    """It was killed while it trained, and is back before its absence was noticed: its connection has another start."""
    killed = Fake("a")
    trial.link.join(0, killed)
    trial.engine.choose(1)
    killed.deaf = True
    rounds = trial.engine.run(RoundContext(1, 4, 1, 0, {"w": torch.ones(1)}, "average"), [0], lambda client: None)
    step = iter(rounds)
    sites = trial.link.sites

    def come_back() -> list[Seen]:
        if len(trial.link.sent) == 2:  # hello, train
            trial.link.join(0, Fake("a"), since="2")
        return sites()

    trial.link.sites = come_back  # type: ignore[method-assign]
    assert isinstance(next(step), Update)
    assert [kind for _, kind, _ in trial.link.sent] == [wire.HELLO, wire.TRAIN, wire.HELLO, wire.TRAIN]
    assert trial.link.sent[3][2].meta == trial.link.sent[1][2].meta
    assert "site a was away and is asked again" in trial.notes
    assert list(step) == []


def test_a_site_that_connects_anew_is_not_there_for_a_moment(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its old connection has ended, its new one has not begun: its message is answered by the SuperLink, for it."""
    monkeypatch.setattr(flower, "GRACE_SECONDS", 60.0)
    trial.link.join(0, Fake("a"))
    trial.engine.choose(1)
    send, sites, looks = trial.link.send, trial.link.sites, []

    def leave(*words: Any) -> str:
        if words[1] == wire.TRAIN and not looks:
            del trial.link.here[0]
        return send(*words)

    def come_back() -> list[Seen]:
        looks.append(1)
        if len(looks) == 3:
            trial.link.join(0, Fake("a"), since="2")
        return sites()

    monkeypatch.setattr(trial.link, "send", leave)
    monkeypatch.setattr(trial.link, "sites", come_back)
    (found,) = trial.run([0])
    assert isinstance(found, Update)
    assert "site a was away and is asked again" in trial.notes


def test_an_upload_that_broke_off_is_given_up(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """The site is there, as far as anyone knows, and its answer will never come."""
    trial.link.join(0, Fake("a"))
    trial.engine.choose(1)
    monkeypatch.setattr(
        trial.link, "receive", lambda messages: [Reply(messages[0], None, "its upload broke off", offline=True)]
    )
    assert trial.run([0]) == [Lost(0, wire.GONE)]


def test_a_silent_site_is_given_up_after_the_timeout(plan: Plan, tmp_path: Path) -> None:
    trial = Trial(plan, tmp_path / "run", timeout=0.2)
    silent = Fake("a")
    trial.link.join(0, silent)
    trial.link.join(1, Fake("b"))
    trial.engine.choose(1)
    silent.deaf = True
    update, lost = trial.run([0, 1])
    assert isinstance(update, Update)
    assert lost == Lost(0, "no answer within 0 s")


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
        ({"losses": {"total": 10**400}}, "too large"),
        ({"losses": {f"n{i}": 1 for i in range(100)}}, "losses is not a small table"),
        ({"metrics": {"a b": 1}}, "metrics has an entry 'a b'"),
        ({"metrics": None}, "metrics is not a small table"),
        ({"metrics": {"round": 99}}, "it tells round, which is the coordinator's"),
        ({"metrics": {"loss": 0}}, "it tells loss, which is the coordinator's"),
        ({"metrics": {"knn_top1": 100}}, "it tells knn_top1, which is the coordinator's"),
        ({"metrics": {"loss_term": 0}}, "it tells loss_term, which is the coordinator's"),
        ({"metrics": {"epsilon": 0}}, "it tells epsilon, which is the coordinator's"),
    ],
)
def test_answers_that_make_no_sense_are_a_fault(trial: Trial, changed: dict[str, Any], reason: str) -> None:
    trial.link.join(0, Fake("a", **changed))
    trial.engine.choose(1)
    (lost,) = trial.run([0], ClientMemory({}, 1, steps=6, epochs=1), round=2)
    assert isinstance(lost, Lost)
    assert lost.fault
    assert reason in lost.reason


def test_answers_that_cannot_be_read_are_a_fault(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    trial.link.join(0, Fake("a"))
    trial.engine.choose(1)
    monkeypatch.setattr(trial.link, "receive", lambda messages: [Reply(messages[0], None, "it cannot be read")])
    assert trial.run([0]) == [Lost(0, "it cannot be read", fault=True)]


@pytest.mark.parametrize(
    "changed",
    [
        {"losses": {"total": None, "term": None}},
        {"losses": {"total": 1, "never_heard_of": 2}},
        {"metrics": {"rankme": 3.5, "own": None, "loss_scale": 8192}},
        {"surprise": {"deep": [1, 2]}, "last_round": "never", "site": "someone else"},
    ],
)
def test_strange_words_do_no_harm(trial: Trial, changed: dict[str, Any]) -> None:
    trial.link.join(0, Fake("a", **changed))
    trial.engine.choose(1)
    (found,) = trial.run([0])
    assert isinstance(found, Update)
    assert found.client == 0
    assert found.losses.shape == (1, len(found.loss_names))
    assert found.loss_names[0] == "total"


def test_a_site_that_lost_its_private_state_goes_on_counting(trial: Trial) -> None:
    """It counts from 0 again: 2 steps of this round, after 6 before."""
    trial.link.join(0, Fake("a", remembered=False, steps=2))
    trial.engine.choose(1)
    (found,) = trial.run([0], ClientMemory({}, 3, steps=6, epochs=3), round=4)
    assert isinstance(found, Update)
    assert found.memory == ClientMemory({}, 4, steps=8, epochs=4)
    assert "site a had lost its private state and started anew" in trial.notes
