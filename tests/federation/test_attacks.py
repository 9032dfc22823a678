"""A small federation with one bad client.

Tests what each rule keeps of the honest clients' mean, and what it costs without an attack.

pytest tests/federation/test_attacks.py -n 0 -s     prints the tables of docs/robustness.md
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Watching, fitted, made, tiny_federation
from safetensors.torch import load_file
from torch import Tensor

from fedx_pl.callbacks.tensorboard import RunWriter
from fedx_pl.config.compose import compose
from fedx_pl.engines import Lost
from fedx_pl.engines.local import SerialEngine
from fedx_pl.errors import UserError
from fedx_pl.federation.options import AggregateOptions
from fedx_pl.federation.robust import make_rule
from fedx_pl.federation.round import GlobalState, RoundContext, Update
from fedx_pl.methods.base import State
from fedx_pl.trainer import FederatedTrainer

CLIENTS, ATTACKER = 7, 2
RULES = ("mean", "clip", "median", "trimmed", "krum")


# --- attacks: well formed, so that only their values can betray them ------------------------------


def corrupted(state: State, change: Callable[[str, Tensor], Tensor]) -> State:
    found = {
        name: change(name, tensor) if tensor.is_floating_point() else tensor
        for name, tensor in state.items()
    }
    return {
        name: t.clamp(min=0) if name.endswith("running_var") else t for name, t in found.items()
    }


def scaled(factor: float) -> Callable[[State, State], State]:
    return lambda state, start: corrupted(
        state, lambda name, t: start[name] + factor * (t - start[name])
    )


def random(state: State, start: State) -> State:
    draw = torch.Generator().manual_seed(0)
    return corrupted(state, lambda _, t: torch.randn(t.shape, generator=draw))


ATTACKS = {"sign flip": scaled(-1), "x1000": scaled(1000), "random": random}
LIE = 10_000_000  # images that it claims beside a flipped sign


# --- a federation that is trained once ------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips pictures, which would take most of the time."""
    monkeypatch.setattr(RunWriter, "partition", lambda *_: None)


@pytest.fixture(scope="module")
def overrides(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [
        *tiny_federation(tiny_root, tmp_path_factory.mktemp("runs")),
        *(f"federation.clients={CLIENTS}", "federation.rounds=1", "federation.min_clients=5"),
        *("optim.batch_size=16", "evaluation.linear_every=100", "logger=[]"),
    ]


@pytest.fixture(scope="module")
def federation(overrides: list[str]) -> Callable[[str], tuple[State, list[Update]]]:
    """For a split: the state a round starts from, and the updates of the seven honest clients."""

    @cache
    def trained(split: str) -> tuple[State, list[Update]]:
        trainer = made(compose([*overrides, split])).trainer
        start = trainer.first_state()
        context = RoundContext(
            round=1, rounds=1, epochs=1, seed=trainer.seed, global_state=start, batchnorm="average"
        )
        return start.weights, list(
            SerialEngine(trainer).run(context, range(CLIENTS), lambda _: None)
        )

    return trained


def kind_of(name: str) -> str:
    return "statistics" if "running_" in name else "weights"


def distance(a: State, b: State, kind: str) -> float:
    names = [
        name for name, tensor in a.items() if tensor.is_floating_point() and kind_of(name) == kind
    ]
    return float(sum((a[name].double() - b[name].double()).square().sum() for name in names)) ** 0.5


def off(result: State, honest: State, start: State, kind: str) -> float:
    """How far a result is from the honest mean, as a share of the way the honest mean went."""
    return distance(result, honest, kind) / distance(honest, start, kind)


def combined(rule: str, start: State, updates: list[Update]) -> State:
    aggregator = make_rule(AggregateOptions(rule=rule, max_growth=0), GlobalState(weights=start))
    for update in updates:
        aggregator.add(update.state.tensors(), update.num_images, update.client)
    return aggregator.result()


def attacked(updates: list[Update], start: State, attack: str) -> list[Update]:
    honest, corrupt = updates[ATTACKER], ATTACKS.get(attack, ATTACKS["sign flip"])
    images = LIE if attack == "claim" else honest.num_images
    state = GlobalState(weights=corrupt(honest.state.weights, start))
    bad = replace(honest, state=state, num_images=images)
    return [bad if update.client == ATTACKER else update for update in updates]


@pytest.fixture(scope="module")
def kept(federation: Any) -> dict[str, dict[str, tuple[float, float]]]:
    """The distance from the mean of the six honest clients, by rule and attack."""
    start, updates = federation("partition.kind=iid")
    honest = combined("mean", start, [update for update in updates if update.client != ATTACKER])
    found: dict[str, dict[str, tuple[float, float]]] = {}
    print(
        "\n| rule |",
        " | ".join([*ATTACKS, "claim"]),
        "|  distance of weights / statistics from the honest mean",
    )
    for rule in RULES:
        found[rule] = {}
        for attack in (*ATTACKS, "claim"):
            result = combined(rule, start, attacked(updates, start, attack))
            found[rule][attack] = (
                off(result, honest, start, "weights"),
                off(result, honest, start, "statistics"),
            )
        print(f"| {rule} |", " | ".join(f"{w:.2f} / {s:.2f}" for w, s in found[rule].values()), "|")
    return found


# --- what each rule keeps -------------------------------------------------------------------------


def test_the_mean_is_ruined(kept: Any) -> None:
    """One update in seven times a thousand: about 1000 / 7 times the way.

    A flipped one only takes 2/7 back.
    """
    assert kept["mean"]["x1000"][0] > 100
    assert kept["mean"]["random"][0] > 100
    assert kept["mean"]["sign flip"][0] == pytest.approx(2 / 7, rel=0.1)
    assert kept["mean"]["claim"][0] == pytest.approx(
        2, rel=0.1
    )  # It is the attacker's: as far back as forth.


def test_clipping_bounds_what_one_client_can_do(kept: Any) -> None:
    """It moves by at most 2 of about 7 medians, whatever it sends.

    A flipped sign has the usual norm and passes.
    """
    for attack in ("x1000", "random"):
        assert max(kept["clip"][attack]) < 0.6
    assert kept["clip"]["sign flip"] == kept["mean"]["sign flip"]
    assert (
        kept["clip"]["claim"] == kept["mean"]["claim"]
    )  # Claims are not bounded: aggregate.max_share is for that.


@pytest.mark.parametrize("rule", ["median", "trimmed"])
def test_the_median_and_the_trimmed_mean_do_not_care_how_far_off_an_attack_is(
    kept: Any, rule: str
) -> None:
    for attack in (*ATTACKS, "claim"):
        assert kept[rule][attack][0] < 0.5
        assert kept[rule][attack][1] < 0.05


def test_krum_leaves_exactly_the_attacker_out(kept: Any) -> None:
    assert all(both == (0, 0) for both in kept["krum"].values())


def test_krum_takes_an_unusual_honest_client_for_the_attacker(federation: Any) -> None:
    """At beta = 0.1 a flipped update is closer to the others than some honest updates are."""
    start, updates = federation("partition.beta=0.1")
    rule = make_rule(AggregateOptions(rule="krum"), GlobalState(weights=start))
    for update in attacked(updates, start, "sign flip"):
        rule.add(update.state.tensors(), update.num_images, update.client)
    rule.result()
    assert "weights" not in rule.remarks[ATTACKER]
    assert "statistics" in rule.remarks[ATTACKER]


def test_an_attack_on_the_weights_alone_is_bounded_too(federation: Any) -> None:
    """Statistics move about 17 times as far.

    Ten times the usual weights would not show in a norm of both.
    """
    start, updates = federation("partition.kind=iid")
    honest = combined("mean", start, [update for update in updates if update.client != ATTACKER])
    changed = scaled(10)(updates[ATTACKER].state.weights, start)
    honest_part = updates[ATTACKER].state.weights
    mixed = {
        name: changed[name] if kind_of(name) == "weights" else t for name, t in honest_part.items()
    }
    state = GlobalState(weights=mixed)
    bad = [
        replace(update, state=state) if update.client == ATTACKER else update for update in updates
    ]
    way = {
        kind: distance(updates[ATTACKER].state.weights, start, kind)
        for kind in ("weights", "statistics")
    }
    assert way["statistics"] > 10 * way["weights"]
    assert off(combined("mean", start, bad), honest, start, "weights") > 1.5
    assert off(combined("clip", start, bad), honest, start, "weights") < 0.5
    assert off(combined("krum", start, bad), honest, start, "weights") == 0


def test_what_a_rule_costs_without_an_attack(federation: Any) -> None:
    """The cost is the distance from the mean of all seven honest clients.

    Rules that leave some out pay more the more the clients differ.
    """
    splits = ("partition.kind=iid", "partition.beta=0.5", "partition.beta=0.1")
    cost: dict[str, list[float]] = {}
    print(
        "\n| rule |", " | ".join(splits), "|  distance of weights / statistics from the mean of all"
    )
    for rule in RULES:
        both = []
        for split in splits:
            start, updates = federation(split)
            mean, result = combined("mean", start, updates), combined(rule, start, updates)
            both.append([off(result, mean, start, kind) for kind in ("weights", "statistics")])
        print(f"| {rule} |", " | ".join(f"{w:.2f} / {s:.2f}" for w, s in both), "|")
        cost[rule] = [weights for weights, _ in both]
    assert cost["mean"] == [0, 0, 0]
    assert cost["clip"] == [0, 0, 0]  # Nobody was twice the median.
    for rule in ("median", "trimmed", "krum"):
        assert 0 < cost[rule][0] < cost[rule][2]
    assert all(
        trimmed < median for trimmed, median in zip(cost["trimmed"], cost["median"], strict=True)
    )


# --- through the trainer --------------------------------------------------------------------------


def run(overrides: list[str], folder: Path, display: Watching | None = None) -> FederatedTrainer:
    return fitted(
        compose([*overrides, "partition.kind=iid", f"run.dir={folder}"]), display or Watching()
    )


def saved(result: FederatedTrainer) -> State:
    return load_file(sorted((result.folder / "checkpoints").iterdir())[-1] / "global.safetensors")


Send = Callable[[int, Update], Update | Lost]


@pytest.fixture
def clients(federation: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[Send], list[list[int]]]:
    """Clients that are trained already and send what a test wants.

    Returns the clients that were asked in each round.
    """
    _, updates = federation("partition.kind=iid")

    def sending(send: Send) -> list[list[int]]:
        asked: list[list[int]] = []

        def answer(
            self: SerialEngine, context: RoundContext, clients: Any, memory_of: Any
        ) -> Iterator[Update | Lost]:
            asked.append(list(clients))
            for client in clients:
                honest = updates[client]
                state = GlobalState(weights=dict(honest.state.weights))
                memory = replace(honest.memory, last_round=context.round)
                yield send(context.round, replace(honest, state=state, memory=memory))

        monkeypatch.setattr(SerialEngine, "run", answer)
        return asked

    return sending


@pytest.mark.parametrize("rule", RULES)
def test_a_run_uses_the_rule_and_names_the_attacker(
    rule: str, federation: Any, clients: Any, overrides: list[str], tmp_path: Path
) -> None:
    start, updates = federation("partition.kind=iid")
    bad = attacked(updates, start, "x1000")
    clients(lambda _, update: replace(update, state=bad[update.client].state))
    words = [*overrides, f"aggregate={rule}", "aggregate.max_growth=0"]
    result = run(words, tmp_path / "run", display := Watching())
    expected, found = combined(rule, start, bad), saved(result)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert result.history[0]["clients"] == CLIENTS  # Well formed: nobody is dropped.
    said = {
        "clip": "clipped from norm",
        "krum": "krum left out its weights; krum left out its statistics",
    }
    notes = [note for note in display.notes if "client" in note]
    assert all("round 1: client 2: " in note and said[rule] in note for note in notes)
    assert len(notes) == (rule in said)


def test_an_attacked_federation_fails_with_the_mean_and_learns_with_clipping(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two real rounds with an update times a thousand in each.

    The second starts from what the first left.

    SimCLR that cannot tell its 2 * 16 views apart has the loss ln(31) = 3.43.
    """
    train = SerialEngine.run

    def malicious(self: SerialEngine, context: RoundContext, *rest: Any) -> Iterator[Update | Lost]:
        for update in train(self, context, *rest):
            state = ATTACKS["x1000"](update.state.weights, context.global_state.weights)
            yield (
                replace(update, state=GlobalState(weights=state))
                if update.client == ATTACKER
                else update
            )

    monkeypatch.setattr(SerialEngine, "run", malicious)
    loss = {
        rule: run(
            [*overrides, "federation.rounds=2", f"aggregate={rule}", "aggregate.max_growth=0"],
            tmp_path / rule,
        ).history[-1]["loss"]
        for rule in ("mean", "clip")
    }
    assert loss["mean"] > 3.3
    assert loss["clip"] < 3.2


# --- refused, named, completed, paused, quarantined -----------------------------------------------

CONV, VARIANCE = "backbone.conv1.weight", "backbone.bn1.running_var"


def with_weights(change: Callable[[State], State]) -> Callable[[Update], Update]:
    return lambda update: replace(update, state=GlobalState(weights=change(update.state.weights)))


MALFORMED: dict[str, Callable[[Update], Update]] = {
    "NaN or infinity": with_weights(lambda w: w | {CONV: w[CONV] * float("nan")}),
    "1 tensors are missing": with_weights(
        lambda w: {name: t for name, t in w.items() if name != CONV}
    ),
    "1 tensors are unknown, e.g. backdoor": with_weights(lambda w: w | {"backdoor": torch.ones(1)}),
    "has shape (1,)": with_weights(lambda w: w | {CONV: torch.ones(1)}),
    "is torch.float16, expected torch.float32": with_weights(lambda w: w | {CONV: w[CONV].half()}),
    "negative variances": with_weights(lambda w: w | {VARIANCE: -w[VARIANCE]}),
    "it claims -3 images": lambda u: replace(u, num_images=-3),
    "it claims 1000000000 images": lambda u: replace(u, num_images=10**9),
}


@pytest.mark.parametrize("rule", ["mean", "median"])
def test_every_kind_of_bad_update_is_refused_by_name_and_the_round_completed(
    rule: str, federation: Any, clients: Any, overrides: list[str], tmp_path: Path
) -> None:
    """Clients 0 to 3 send one kind each in round 1 and another in round 2; 4, 5 and 6 are good."""
    start, updates = federation("partition.kind=iid")
    kinds = list(MALFORMED.items())

    def send(round: int, update: Update) -> Update:
        return kinds[update.client + 4 * (round - 1)][1](update) if update.client < 4 else update

    clients(send)
    needed, display = (
        [f"aggregate={rule}", "federation.min_clients=3", "federation.rounds=2"],
        Watching(),
    )
    result = run([*overrides, *needed], tmp_path / "run", display)
    assert [row["dropped"] for row in result.history] == [4, 4]
    for number, (reason, _) in enumerate(kinds):
        said = f"round {number // 4 + 1}: dropped client {number % 4}: "
        assert any(note.startswith(said) and reason in note for note in display.notes)
    expected, found = combined(rule, start, updates[4:]), saved(result)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def negative(update: Update) -> Update:
    return replace(update, num_images=-1)


def test_too_few_good_updates_pause_the_run_and_the_same_command_resumes_it(
    clients: Any, overrides: list[str], tmp_path: Path
) -> None:
    three = [*overrides, "federation.rounds=3"]
    clients(
        lambda number, update: negative(update) if number == 2 and update.client < 3 else update
    )
    with pytest.raises(
        UserError,
        match=r"round 2 has 4 good updates, .*min_clients=5; round 1 is saved.*same command",
    ):
        run(three, tmp_path / "run")
    asked = clients(lambda _, update: update)
    assert [row["round"] for row in run(three, tmp_path / "run").history] == [1, 2, 3]
    assert len(asked) == 2  # Rounds 2 and 3.


def test_a_client_is_in_quarantine_after_bad_updates_in_a_row(
    clients: Any, overrides: list[str], tmp_path: Path
) -> None:
    """Client 1 is bad in all rounds, client 2 in rounds 1, 3 and 4 only: two in a row is the limit.

    After round 2 client 1 has two strikes and goes. Client 2 has 1, 0, 1, 2 and goes after round 4.
    """

    def send(round: int, update: Update) -> Update:
        return (
            negative(update)
            if update.client == 1 or (update.client == 2 and round in (1, 3, 4))
            else update
        )

    asked, display = clients(send), Watching()
    run([*overrides, "federation.rounds=6", "aggregate.quarantine=2"], tmp_path / "run", display)
    assert [[client for client in (1, 2) if client in who] for who in asked] == [
        [1, 2],
        [1, 2],
        [2],
        [2],
        [],
        [],
    ]
    notes = [note for note in display.notes if "aggregate.quarantine=2" in note]
    assert [note.rpartition(": ")[2] for note in notes] == ["client 1", "client 1, client 2"]


def test_strikes_survive_an_interruption_and_a_repaired_client_can_be_asked_again(
    clients: Any, overrides: list[str], tmp_path: Path
) -> None:
    """One strike in each of rounds 1 and 2, an interruption in round 3.

    After resuming, the client is absent.
    """
    four = [*overrides, "federation.rounds=4", "aggregate.quarantine=2"]

    def until(last: int) -> Send:
        def send(round: int, update: Update) -> Update:
            if round > last:
                raise KeyboardInterrupt
            return negative(update) if update.client == 1 else update

        return send

    clients(until(2))
    with pytest.raises(KeyboardInterrupt):
        run(four, tmp_path / "run")
    asked, display = clients(until(3)), Watching()
    with pytest.raises(KeyboardInterrupt):
        run(four, tmp_path / "run", display)
    assert 1 not in asked[0]
    assert any(note.endswith("in a row: client 1") for note in display.notes)
    asked = clients(until(4))
    run([*four, "aggregate.quarantine=0"], tmp_path / "run")
    assert 1 in asked[0]


@pytest.mark.parametrize("fault", [False, True])
def test_a_client_whose_machine_failed_gets_no_strike_and_one_that_answers_nonsense_does(
    fault: bool, clients: Any, overrides: list[str], tmp_path: Path
) -> None:
    asked = clients(
        lambda _, update: Lost(1, "it is gone", fault) if update.client == 1 else update
    )
    display = Watching()
    run([*overrides, "federation.rounds=2", "aggregate.quarantine=1"], tmp_path / "run", display)
    assert (1 in asked[1]) != fault
    assert "round 1: dropped client 1: it is gone" in display.notes
