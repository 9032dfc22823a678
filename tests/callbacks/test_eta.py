"""The ETA follows the current rate and counts only what this process trains, without waiting."""

import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import every_round
from rich.console import Console

from fedx_pl.callbacks.eta import Eta
from fedx_pl.callbacks.progress import Terminal
from fedx_pl.federation.round import ClientMemory, GlobalState, RoundContext, RoundRecord, Update


class Clock:
    """A clock that only the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def steps(eta: Eta, clock: Clock, count: int, seconds_each: float) -> None:
    for _ in range(count):
        clock.pass_by(seconds_each)
        eta.step(1)


def left(eta: Eta) -> float:
    seconds = eta.seconds()
    assert seconds is not None
    return seconds


def test_the_eta_follows_the_current_rate() -> None:
    """1,000 steps at .1 s, then at 1 s: after 120 of these, 880 are left.

    The mean of the run would say 3 min.
    """
    clock = Clock()
    eta = Eta(1, every_round, clock)
    eta.expect(2000, finished=0)
    eta.start(1, 0.0, 0)
    assert eta.seconds() is None
    steps(eta, clock, 1000, 0.1)
    assert left(eta) == pytest.approx(100, rel=0.01)
    steps(eta, clock, 120, 1.0)
    assert left(eta) == pytest.approx(880, rel=0.25)
    steps(eta, clock, 120, 1.0)
    assert left(eta) == pytest.approx(760, rel=0.02)


def test_the_eta_grows_while_the_next_step_is_late() -> None:
    clock = Clock()
    eta = Eta(1, every_round, clock)
    eta.expect(1000, finished=0)
    eta.start(1, 0.0, 0)
    steps(eta, clock, 500, 0.1)
    before = left(eta)
    clock.pass_by(60)
    assert left(eta) > 3 * before


@pytest.mark.parametrize("expected_steps", [0, 400])
def test_a_resumed_round_counts_only_what_this_process_trains(expected_steps: int) -> None:
    """Two clients of 100 steps of 1 s in each of two rounds.

    One had finished: one to train here, then two.

    It is the same where steps are not reported, as in a federation of sites.
    """
    clock = Clock()
    eta = Eta(2, every_round, clock)
    if expected_steps:
        eta.expect(expected_steps, finished=0)
    eta.start(1, 0.5, 100)
    steps(eta, clock, 50, 1.0)
    assert eta.seconds() == (pytest.approx(250) if expected_steps else None)
    steps(eta, clock, 50, 1.0)
    eta.client(1.0)
    assert left(eta) == pytest.approx(200)
    eta.row(1, 0.0)
    assert left(eta) == pytest.approx(200)


@pytest.mark.parametrize("expected_steps", [0, 300])
def test_the_wait_for_sites_does_not_count_as_training(expected_steps: int) -> None:
    clock = Clock()
    eta = Eta(3, every_round, clock)
    if expected_steps:
        eta.expect(expected_steps, finished=0)
    clock.pass_by(3600)
    for number in (1, 2):
        eta.start(number, 0.0, 0)
        clock.pass_by(100)
        eta.step(100)
        eta.client(1.0)
        eta.row(number, 0.0)
        clock.pass_by(3600)
        assert left(eta) == pytest.approx(100 * (3 - number))


def test_evaluations_are_part_of_the_eta() -> None:
    """Each round trains for 10 s and evaluates for 20 s.

    Before the first, the untrained network's time is taken.
    """
    clock = Clock()
    eta = Eta(3, every_round, clock)
    eta.expect(30, finished=0)
    eta.row(0, 30.0)
    eta.start(1, 0.0, 0)
    steps(eta, clock, 5, 1.0)
    assert left(eta) == pytest.approx(25 + 3 * 30)
    steps(eta, clock, 5, 1.0)
    eta.client(1.0)
    clock.pass_by(20)
    assert left(eta) == pytest.approx(
        20 + 2 * 30 + 10
    )  # 10 s of this evaluation are still to come.
    eta.row(1, 20.0)
    assert left(eta) == pytest.approx(20 + 2 * 20)
    eta.start(2, 0.0, 0)
    steps(eta, clock, 10, 1.0)
    eta.client(1.0)
    clock.pass_by(20)
    eta.row(2, 20.0)
    assert left(eta) == pytest.approx(30)


def train(eta: Eta, clock: Clock, round_number: int, evaluating: float) -> None:
    """A round of three steps of 1 s, and what follows it."""
    eta.start(round_number, 0.0, 0)
    steps(eta, clock, 3, 1.0)
    eta.client(1.0)
    clock.pass_by(evaluating)
    eta.row(round_number, evaluating)


def test_only_rounds_that_evaluate_add_to_the_eta() -> None:
    """32 rounds of 3 s, four of which evaluate for 12 s.

    That is 144 s, whatever the empty evaluations between them took.
    """
    clock = Clock()
    eta = Eta(32, lambda number, _: (number % 8 == 0, number % 8 == 0), clock)
    eta.expect(96, finished=0)
    eta.row(0, 12.0)
    eta.start(1, 0.0, 0)
    steps(eta, clock, 1, 1.0)
    assert left(eta) == pytest.approx(95 + 4 * 12)
    for number in range(1, 32):
        train(eta, clock, number, evaluating=12.0 if number % 8 == 0 else 0.0)
        assert left(eta) == pytest.approx(3 * (32 - number) + 12 * (4 - number // 8))


def test_each_kind_of_evaluation_has_its_own_duration() -> None:
    """Every round has kNN (2 s), every third a linear probe, too (12 s).

    None of them is like the untrained one.
    """
    clock = Clock()
    eta = Eta(6, lambda number, _: (True, number % 3 == 0), clock)
    eta.expect(18, finished=0)
    eta.row(0, 10.0)
    train(eta, clock, 1, evaluating=2.0)
    assert left(eta) == pytest.approx(5 * 3 + 3 * 2 + 2 * 10)
    train(eta, clock, 2, evaluating=2.0)
    train(eta, clock, 3, evaluating=12.0)
    assert left(eta) == pytest.approx(3 * 3 + 2 * 2 + 12)


def test_a_resumed_run_uses_its_first_evaluation() -> None:
    """It does not measure the untrained network again.

    A probe that is still to come takes as long as kNN.
    """
    clock = Clock()
    eta = Eta(4, lambda number, rounds: (number > 2, number == rounds), clock)
    eta.expect(9, finished=1)
    train(eta, clock, 2, evaluating=0.0)
    assert left(eta) == pytest.approx(2 * 3)
    train(eta, clock, 3, evaluating=5.0)
    assert left(eta) == pytest.approx(3 + 5)


def test_clients_that_never_reported_do_not_stay_in_the_eta() -> None:
    """One of two clients with 50 steps is lost; after the last round no time is left."""
    clock = Clock()
    eta = Eta(2, every_round, clock)
    eta.expect(200, finished=0)
    for number in (1, 2):
        eta.start(number, 0.0, 0)
        steps(eta, clock, 50, 1.0)
        eta.client(1.0)
        eta.row(number, 0.0)
        assert left(eta) == pytest.approx(100 * (2 - number))


def update(client: int, images: int = 100, seconds: float = 0.0) -> Update:
    losses = torch.ones(2, 1)
    return Update(
        client=client,
        num_images=images,
        state=GlobalState(weights={}),
        memory=ClientMemory(),
        losses=losses,
        loss_names=("total",),
        images_seen=images,
        seconds=seconds,
    )


def test_the_display_does_not_count_the_wait_for_sites() -> None:
    clock = Clock()
    console = Console(width=80, color_system=None, file=io.StringIO())
    row: dict[str, Any] = {"images_per_second": 10.0, "round_seconds": 10.0}
    with Terminal(console, 3, every_round, clock) as display:
        clock.pass_by(3600)
        display.start(1, 0, 2, 0)
        clock.pass_by(5)
        display.client(1, 1, 2, update(0))
        clock.pass_by(5)
        display.client(1, 2, 2, update(1))
        display.row({"round": 1, **row})
    assert isinstance(console.file, io.StringIO)
    assert "10 img/s  10.0 s  ETA 20 s" in console.file.getvalue()
    assert display.below()[0].plain.startswith("20 img/s, ")


def test_images_of_an_earlier_process_are_not_in_the_rate() -> None:
    """100 images in 10 s here; the client that was trained before took other seconds."""
    context = RoundContext(
        round=1, rounds=1, epochs=1, seed=0, global_state=GlobalState(weights={})
    )
    updates = [update(0, 900, seconds=30.0), update(1, 100, seconds=10.0)]
    record = RoundRecord(
        context=context, clients=[0, 1], updates=updates, resumed=[0], train_seconds=10.0
    )
    assert record.images_per_second() == 10
    record = replace(record, resumed=[0, 1], train_seconds=0.1)
    assert record.images_per_second() == 25
