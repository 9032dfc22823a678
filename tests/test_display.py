"""The one display: a bar or a line now and then, with an ETA that follows the current rate."""

import io
import re

import pytest
from rich.console import Console

from fedx_pl.display import Display, Pace


class Clock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def console(*, terminal: bool) -> Console:
    return Console(width=80, force_terminal=terminal, color_system=None, file=io.StringIO())


def text_of(console: Console) -> str:
    """What was printed, without the codes that move the cursor."""
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def test_the_rate_between_rare_reports_counts_down() -> None:
    """Four workers report 100 steps each at once, every 300 s: 1,600 steps take 20 minutes."""
    clock = Clock()
    pace = Pace(clock)
    pace.start()
    for _ in range(3):
        clock.now += 300
        for _ in range(4):
            pace.done(100)
    assert pace.seconds_for(1600) == pytest.approx(1200)
    clock.now += 290
    assert pace.seconds_for(1600) == pytest.approx(910)


def test_the_eta_follows_the_current_rate() -> None:
    """760 steps are left after 1,000 of 0.1 s and 240 of 1 s; the mean rate would give 3.5 min."""
    clock = Clock()
    display = Display(console(terminal=False), "training", clock=clock)
    for done in range(1001):
        display.update(done, 2000)
        clock.now += 0.1
    for done in range(1001, 1241):
        clock.now += 0.9
        display.update(done, 2000)
        clock.now += 0.1
    assert display.seconds_left() == pytest.approx(760, rel=0.05)


def test_what_was_done_before_the_start_does_not_count_for_the_eta() -> None:
    """50 of 60 rounds exist when a sweep is resumed; the first new one takes 100 s."""
    clock = Clock()
    display = Display(console(terminal=False), "sweep", clock=clock)
    display.update(50, 60)
    assert display.eta() == "ETA unknown"
    clock.now += 100
    display.update(51, 60)
    assert display.eta() == "ETA 15 min 0 s"


def test_another_part_of_the_work_has_a_rate_of_its_own() -> None:
    clock = Clock()
    display = Display(console(terminal=False), "evaluating", clock=clock)
    for done in (1, 2, 3):
        display.update(done, 3)
        clock.now += 1
    display.update(1, 11)
    assert display.eta() == "ETA unknown"
    clock.now += 10
    display.update(2, 11)
    assert display.seconds_left() == pytest.approx(90)


@pytest.mark.parametrize("reported", [False, True])
def test_without_a_terminal_there_is_a_line_now_and_then(reported: bool) -> None:
    """Ten seconds a step: a line after more than 30 s, to the console or to `report`."""
    clock = Clock()
    screen = console(terminal=False)
    lines: list[str] = []
    report = lines.append if reported else None
    with Display(screen, "decoding", clock=clock, report=report) as display:
        for done in range(1, 10):
            display.update(done, 9, line=f"decoding: {done} of 9")
            clock.now += 10
    lines += text_of(screen).splitlines()
    assert lines == ["  decoding: 5 of 9, ETA 40 s", "  decoding: 9 of 9, ETA 0 s"]


def test_a_delayed_bar_appears_only_if_the_work_takes_a_while() -> None:
    clock = Clock()
    screen = console(terminal=True)
    with Display(screen, "decoding", clock=clock, delay=3.0) as display:
        display.update(1, 4)
        clock.now += 1
        display.update(2, 4)
        assert text_of(screen) == ""
        clock.now += 3
        display.update(3, 4)
        display.refresh()
        assert re.search(r"decoding .* 75% \d:\d\d:\d\d ETA \d s", text_of(screen))
