"""What a run shows on a terminal of 80 columns."""

import io
import re

from rich.console import Console

from fedx_pl.terminal import Terminal


def test_the_bar_keeps_its_eta_however_many_workers_there_are() -> None:
    shown = io.StringIO()
    console = Console(width=80, force_terminal=True, color_system=None, file=shown)
    with Terminal(console, rounds=20) as display:
        display.expect(1000)
        for worker in range(1, 9):
            display.working(f"worker {worker}", 10 * worker)
        display.working("worker 2", None)
        display.step(300)
        display.client(3, 4, 10)
        display._progress.refresh()
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue()))]
    bar = next(line for line in reversed(lines) if line.startswith("round 3/20, client 4/10"))
    assert re.search(r"30% \d:\d\d:\d\d ETA (-:--:--|\d:\d\d:\d\d)$", bar)
    workers = next(line for line in reversed(lines) if line.startswith("worker 1"))
    assert workers.startswith("worker 1: client 10, worker 2: idle, worker 3: client 30")
    assert workers.endswith("…")
    assert all(len(line) <= 80 for line in (bar, workers))
