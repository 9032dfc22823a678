"""The one progress display: a live bar with an ETA on a terminal, plain lines elsewhere."""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text
from typing_extensions import override

from fedx_pl.errors import Report, for_terminal
from fedx_pl.printing import duration

QUIET_SECONDS = 30.0  # Without a live bar, there is a line at least this often.
WINDOW_SECONDS = 30.0  # Older work counts less and less for the rate.

Clock = Callable[[], float]


def make_console(*, stderr: bool = False) -> Console:
    """A console that prints text as it is: paths and names may hold brackets."""
    return _Console(markup=False, highlight=False, stderr=stderr)


class _Console(Console):
    """Removes control characters, which a terminal might obey, from all strings."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(for_terminal(text), **options)


def is_live(console: Console) -> bool:
    """Whether to draw a live progress bar."""
    return console.is_interactive and not os.environ.get("CI")


class Pace:
    """The current rate of work, from reports that are frequent (steps) or rare (whole clients).

    Time outside `start` and `stop` does not count.
    """

    def __init__(self, clock: Clock) -> None:
        """Starts without work.

        Args:
            clock: seconds, from any origin.
        """
        self._clock = clock
        self._work = 0.0  # decayed, like the seconds
        self._seconds = 0.0
        self._longest = 0.0  # recent time between two reports
        self._last: float | None = None  # time of the last report; None: nothing is being done

    def start(self) -> None:
        """Called when work begins."""
        self._last = self._clock()

    def stop(self) -> None:
        """Called when work has ended with the last report; the time since then does not count."""
        self._last = None

    def done(self, work: float) -> None:
        """Reports work that was done since the last report."""
        now = self._clock()
        passed = now - self._last if self._last is not None else 0.0
        kept = self._kept(passed)
        self._work = self._work * kept + work
        self._seconds = self._seconds * kept + passed
        self._longest = max(self._longest * kept, passed)
        self._last = now

    def seconds_for(self, work: float) -> float | None:
        """The seconds that some work will still take; None without any report."""
        if not self._work:
            return None
        passed = self._clock() - self._last if self._last is not None else 0.0
        usual = min(passed, self._longest)
        # A report that is late means that the work has become slower.
        late = passed - usual
        kept = self._kept(late)
        seconds = work * (self._seconds * kept + late) / (self._work * kept)
        return max(seconds - usual, 0.0)

    def _kept(self, passed: float) -> float:
        """The share of older work; a window must hold a few reports."""
        return math.exp(-passed / max(WINDOW_SECONDS, 3 * self._longest, 3 * passed))


class Display:
    """Shows how far some work is and when it will be done. Use as a context manager around it.

    The ETA follows the current rate. What was done before the first `update` does not count for it,
    so that a resumed run is not taken for a fast one.
    """

    def __init__(
        self,
        console: Console,
        title: str,
        *,
        clock: Clock = time.monotonic,
        report: Report | None = None,
        delay: float = 0.0,
    ) -> None:
        """Prepares the display.

        Args:
            console: where the live bar is drawn.
            title: the text left of the bar, until `update` changes it.
            clock: seconds, from any origin.
            report: takes the plain lines; the console if not given.
            delay: seconds of work before a live bar appears.
        """
        self.console = console
        self.live = is_live(console)
        self._clock = clock
        self._report = report
        self._appears = clock() + delay
        self._last_line = clock()
        self._pace = Pace(clock)
        self._done: float | None = None
        self._total = 0.0
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            _EtaColumn(self.eta),
        )
        self._bar = _Bar(
            self.below, *columns, console=console, transient=True, disable=not self.live
        )
        self._task = self._bar.add_task(title, total=None)

    def __enter__(self) -> Self:
        if self._clock() >= self._appears:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(
        self, done: float, total: float, description: str | None = None, line: str = ""
    ) -> None:
        """Moves the bar, or prints a line if there was none for `QUIET_SECONDS`.

        Args:
            done: work that is done; if it is less than before, another part of the work begins.
            total: work in all.
            description: the text left of the bar; the same as before if not given.
            line: what to print where there is no bar; the ETA is added to it.
        """
        if self._done is None or done < self._done:
            self._pace = Pace(self._clock)
            self._pace.start()
        elif done > self._done:
            self._pace.done(done - self._done)
        self._done = done
        self._total = total
        self._bar.update(self._task, completed=done, total=total, description=description)
        if self.live and not self._bar.live.is_started and self._clock() >= self._appears:
            self._bar.start()
        if line and not self.live and self._clock() - self._last_line > QUIET_SECONDS:
            self.print(f"  {line}, {self.eta()}")

    def print(self, text: str, style: str | None = None) -> None:
        """Prints a line above the bar."""
        self._last_line = self._clock()
        if self._report is not None:
            self._report(text)
        else:
            self.console.print(text, style=style, soft_wrap=True)

    def refresh(self) -> None:
        """Draws the bar now; by itself it is drawn a few times a second."""
        self._bar.refresh()

    def below(self) -> Sequence[Text]:
        """Lines below the bar; beside it there is no room on a narrow terminal."""
        return ()

    def eta(self) -> str:
        """The estimated time until the work is done, as text."""
        seconds = self.seconds_left()
        return "ETA unknown" if seconds is None else f"ETA {duration(seconds)}"

    def seconds_left(self) -> float | None:
        """The ETA in seconds, by the current rate; None while nothing is known."""
        return self._pace.seconds_for(max(self._total - (self._done or 0.0), 0.0))


class _Bar(Progress):
    """A bar with lines below it."""

    def __init__(
        self, below: Callable[[], Sequence[Text]], *columns: ProgressColumn, **options: Any
    ) -> None:
        self._below = below
        super().__init__(*columns, **options)

    @override
    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield from self._below()


class _EtaColumn(ProgressColumn):
    """The ETA of the display, as in its plain lines; rich's own follows another rate."""

    def __init__(self, eta: Callable[[], str]) -> None:
        self._eta = eta
        super().__init__()

    @override
    def render(self, task: Task) -> Text:
        return Text(self._eta(), no_wrap=True)
