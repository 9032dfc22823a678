"""The display of a run: a live bar on a terminal, plain lines elsewhere, each warning once."""

import io
import itertools
import re
import warnings

import pytest
import torch
from helpers import every_round
from rich.console import Console

from fedx_pl.callbacks import progress
from fedx_pl.callbacks.progress import Terminal
from fedx_pl.cli.summary import evaluations
from fedx_pl.federation.round import ClientMemory, GlobalState, Update
from fedx_pl.printing import duration


def update(images: int = 100) -> Update:
    """The update of a client that made two steps."""
    losses = torch.tensor([[3.0, 2.0, 1.0], [5.0, 3.5, 1.5]])
    return Update(
        client=0,
        num_images=images,
        state=GlobalState(weights={}),
        memory=ClientMemory(),
        losses=losses,
        loss_names=("total", "byol", "local_relation"),
        images_seen=images,
    )


def console(terminal: bool) -> Console:
    return Console(width=80, force_terminal=terminal, color_system=None, file=io.StringIO())


@pytest.fixture
def live() -> Console:
    return console(True)


@pytest.fixture
def plain() -> Console:
    return console(False)


def lines_of(console: Console) -> list[str]:
    """The output without the codes that move the cursor."""
    assert isinstance(console.file, io.StringIO)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    return [line.rstrip() for line in re.split(r"[\r\n]+", text)]


def test_the_live_display_shows_round_clients_losses_speed_and_eta(live: Console) -> None:
    with Terminal(live, 20, every_round) as display:
        display.expect(1000, first=3)
        display.step(300)
        display.client(3, 4, 10, update())
        display.refresh()
    lines = lines_of(live)
    bar = next(line for line in reversed(lines) if line.startswith("round 3/20, 4/10 clients "))
    assert re.search(r" 30% \d:\d\d:\d\d ETA \d+ s$", bar)
    below = next(line for line in reversed(lines) if "img/s" in line)
    assert re.fullmatch(
        r"[\d,]+ img/s, last client: loss 4.00, byol 2.75, local relation 1.25", below
    )
    assert all(len(line) <= 80 for line in lines)


def test_the_bar_says_when_a_round_is_evaluated_and_the_next_begins(live: Console) -> None:
    with Terminal(live, 2, every_round) as display:
        display.expect(10)
        display.client(1, 5, 5, update())
        display.refresh()
        display.row({"round": 1, "loss": 4.0, "images_per_second": 1234.0, "round_seconds": 5.0})
        display.refresh()
    lines = lines_of(live)
    starts = [
        re.split(r"  | ━", line)[0] for line in lines if line.startswith("round") and "%" in line
    ]
    assert "round 1/2, evaluating" in starts
    assert starts[-1] == "round 2/2, 0/5 clients"
    assert any(re.match(r"round +1/2 +loss +4.00 +1,234 img/s +5.0 s", line) for line in lines)


def test_the_bar_moves_by_rounds_where_steps_are_not_reported(live: Console) -> None:
    with Terminal(live, 4, every_round) as display:
        display.client(1, 1, 2, update())
        display.client(1, 2, 2, None)  # Dropped: the loss of the one before stays.
        display.refresh()
    bar = next(line for line in reversed(lines_of(live)) if line.startswith("round 1/4"))
    assert re.search(r" 25% \d:\d\d:\d\d ETA \d+ s$", bar)


def test_the_bar_keeps_its_eta_however_many_workers_there_are(live: Console) -> None:
    with Terminal(live, 20, every_round) as display:
        display.expect(1000)
        for worker in range(1, 9):
            display.working(f"worker {worker}", 10 * worker)
        display.working("worker 2", None)
        display.step(300)
        display.client(3, 4, 10, update())
        display.refresh()
    lines = lines_of(live)
    bar = next(line for line in reversed(lines) if line.startswith("round 3/20, 4/10 clients"))
    assert re.search(r"30% \d:\d\d:\d\d ETA \d+ s$", bar)
    workers = next(line for line in reversed(lines) if line.startswith("worker 1"))
    assert workers.startswith("worker 1: client 10, worker 2: idle, worker 3: client 30")
    assert workers.endswith("…")
    assert all(len(line) <= 80 for line in (bar, workers))


@pytest.mark.parametrize(
    ("terminal_there", "variable", "value"),
    [(False, "TERM", "xterm"), (True, "CI", "true"), (True, "TERM", "dumb")],
)
def test_without_a_live_terminal_there_is_a_plain_line_now_and_then(
    terminal_there: bool, variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    screen = console(terminal_there)
    with Terminal(screen, 2, every_round) as display:
        display.expect(10)
        display.step(5)
        display.client(1, 1, 2, update())
        monkeypatch.setattr("fedx_pl.display.QUIET_SECONDS", 0.0)
        display.client(1, 2, 2, update())
    lines = [line for line in lines_of(screen) if line]
    assert len(lines) == 1
    assert re.fullmatch(
        r"  round 1/2: 2 of 2 clients done, loss 4.00, [\d,]+ img/s, ETA \d+ s", lines[0]
    )


def test_steps_of_an_evaluation_are_plain_lines_with_an_eta(plain: Console) -> None:
    """Ten seconds a step: a line after 40 s, and one 40 s later in the second part."""
    clock = itertools.count(0, 10)
    now = 0

    def stopped_clock() -> float:
        return now

    with progress.steps(plain, "evaluating", stopped_clock) as tick:
        for done, total in [
            *((done, 10) for done in range(1, 6)),
            *((d, 2000) for d in range(1, 6)),
        ]:
            now = next(clock)
            tick(done, total)
    lines = [line for line in lines_of(plain) if line]
    assert lines == [
        "  evaluating: 5 of 10 steps, ETA 50 s",
        "  evaluating: 4 of 2,000 steps, ETA 5 h 32 min",
    ]


def test_a_warning_is_shown_once_and_counted(plain: Console) -> None:
    def warn(text: str, category: type[Warning] = UserWarning) -> None:
        with (
            warnings.catch_warnings()
        ):  # As around each fit: Python forgets then what it has shown.
            warnings.warn(text, category, stacklevel=1)

    with progress.grouped_warnings(plain):
        for _ in range(3):
            warn("the loader is\n slow")
        warn("seen once")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "chatter")
            warn("chatter")
    lines = [line for line in lines_of(plain) if line]
    assert len(lines) == 3
    assert re.fullmatch(
        r"warning: the loader is slow \(UserWarning, test_progress.py:\d+\)", lines[0]
    )
    assert lines[1].startswith("warning: seen once (")
    assert lines[2] == "warning, 3 times: the loader is slow"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (119.7, "2 min 0 s"),
        (3599.8, "1 h 0 min"),
        (90000, "1.0 days"),
    ],
)
def test_a_duration_never_has_sixty_seconds(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_numbers_of_an_evaluation_have_plain_names() -> None:
    """Some names contain the kind already; two kinds have a `rankme`."""
    found = {
        "linear": {"linear_top1": 41.5},
        "knn": {"knn_top1": 30.0, "rankme": 2.0},
        "semi": {"0.01": {"labels": 25, "top1": 20.0}},
        "geometry": {"rankme": 3.0},
    }
    output = io.StringIO()
    Console(file=output, width=100).print(evaluations(found))
    names = [
        line.split("│")[1].strip()
        for line in output.getvalue().splitlines()
        if line.startswith("│")
    ]
    assert names == [
        "linear_top1",
        "knn_top1",
        "knn.rankme",
        "semi.0.01.labels",
        "semi.0.01.top1",
        "geometry.rankme",
    ]
