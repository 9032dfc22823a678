"""The progress of a run on the terminal: a live bar with an ETA, and one line per round."""

from __future__ import annotations

import os
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from fedx_pl import printing
from fedx_pl.callbacks.base import RoundCallback
from fedx_pl.callbacks.eta import Due, Eta
from fedx_pl.errors import for_terminal
from fedx_pl.federation.estimate import steps_between

if TYPE_CHECKING:
    from fedx_pl.federation.round import RoundRecord, Update
    from fedx_pl.trainer import FederatedTrainer

QUIET_SECONDS = 30.0  # Without a live bar, a sign of life at least this often.


def make_console() -> Console:
    """On standard output, as it is: paths and names may hold brackets."""
    return _Console(markup=False, highlight=False)


class _Console(Console):
    """Shows text from outside, which a terminal might obey: all strings are rendered here, those of tables too."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Without control characters."""
        return super().render_str(for_terminal(text), **options)


class _Live(Progress):
    """A bar, and lines below it: beside it there is no room on a narrow terminal."""

    def __init__(
        self, below: Callable[[], list[Text]], *columns: ProgressColumn, **options: Any
    ) -> None:
        self.below = below
        super().__init__(*columns, **options)

    def get_renderables(self) -> Iterator[RenderableType]:
        """The bar first."""
        yield self.make_tasks_table(self.tasks)
        yield from self.below()


class _Eta(ProgressColumn):
    """The run's, as in the lines of the rounds: rich's own knows of no evaluations between the steps."""

    def __init__(self, eta: Callable[[], str]) -> None:
        self.eta = eta
        super().__init__()

    def render(self, task: Task) -> Text:
        """Asks for it."""
        return Text(self.eta(), no_wrap=True)


class Terminal:
    """A live display with an ETA on a terminal, plain lines elsewhere. Use as a context manager around a run.

    Losses and images per second are of the clients that are done: those of every step stay on the device until then.
    """

    def __init__(
        self, console: Console, rounds: int, due: Due, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Prepares the display.

        Args:
            console: where to write.
            rounds: of the whole run.
            due: which rounds evaluate what, for the ETA.
            clock: seconds, from any origin.
        """
        self.console, self.rounds = console, rounds
        self._clock, self._left = clock, Eta(rounds, due, clock)
        self._round_started = self._last_line = clock()
        self._images, self._rate, self._loss, self._terms = 0, "", "", ""
        self._of, self._workers = 0, dict[str, str]()
        self._live = is_live(console)
        columns = (
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn(),
            _Eta(self._eta),
        )  # fmt: skip
        self._progress = _Live(
            self._below, *columns, console=console, transient=True, disable=not self._live
        )
        self._task = self._progress.add_task("starting", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def expect(self, steps: int, first: int = 1) -> None:
        """Tells how many optimiser steps are still to come, for the ETA, and the first round."""
        self._left.expect(steps, first - 1)
        self._progress.update(self._task, total=steps, description=f"round {first}/{self.rounds}")

    def start(self, round_number: int, done: int, of: int, steps: int) -> None:
        """Begins to count the round's time and images: not before, since real sites are waited for."""
        self._of, self._images, self._round_started = of, 0, self._clock()
        self._left.start(round_number, done / of if of else 0.0, steps)
        self._move(f"round {round_number}/{self.rounds}, {done}/{of} clients")

    def step(self, count: int = 1) -> None:
        """Advances the bar, which is drawn a few times a second."""
        self._left.step(count)
        if self._live and self._left.steps:
            self._move()

    def working(self, worker: str, client: int | None) -> None:
        """Shows what each worker does, where there are several."""
        self._workers[worker] = "idle" if client is None else f"client {client}"
        self._progress.refresh()

    def client(self, round_number: int, done: int, of: int, update: Update | None = None) -> None:
        """Shows how many clients of the round are done, and what the last of them tells."""
        if update is not None:
            self._hear(update)
        self._of = of
        self._left.client(done / of)
        doing = f"{done}/{of} clients" if done < of else "evaluating"
        self._move(f"round {round_number}/{self.rounds}, {doing}")
        if not self._live and self._clock() - self._last_line > QUIET_SECONDS:
            parts = [
                f"  round {round_number}/{self.rounds}: {done} of {of} clients done",
                self._loss,
                self._rate,
                self._eta(),
            ]
            self._print(", ".join(part for part in parts if part))

    def row(self, row: Mapping[str, Any]) -> None:
        """One line for a finished round."""
        round_number = row["round"]
        parts = [f"round {round_number:>3}/{self.rounds}" if round_number else "untrained    "]
        labels = {"loss": "loss", "knn_top1": "kNN", "linear_top1": "linear"}
        parts += [f"{label} {row[key]:6.2f}" for key, label in labels.items() if key in row]
        self._left.row(round_number, row.get("evaluate_seconds", 0.0))
        if round_number:
            parts += [
                f"{row['images_per_second']:,.0f} img/s",
                f"{row['round_seconds']:.1f} s",
                self._eta(),
            ]
        self._print("  ".join(parts))
        clients = f", 0/{self._of} clients" if self._of else ""
        following = (
            f"round {round_number + 1}/{self.rounds}{clients}"
            if round_number < self.rounds
            else "finishing"
        )
        self._move(following)

    def note(self, text: str) -> None:
        """A line that must not be missed."""
        self._print(f"note: {text}", style="yellow")

    def _hear(self, update: Update) -> None:
        self._images += update.images_seen
        passed = max(self._clock() - self._round_started, 1e-9)
        self._rate = f"{self._images / passed:,.0f} img/s"  # as the round's line
        if len(update.losses):
            means = zip(
                update.loss_names, update.losses.mean(0).tolist(), strict=False
            )  # A site's word is its own.
            total, *terms = [f"{name.replace('_', ' ')} {mean:.2f}" for name, mean in means]
            self._loss, self._terms = (
                total.replace("total", "loss"),
                ", ".join(terms if len(terms) > 1 else []),
            )

    def _move(self, description: str | None = None) -> None:
        """Moves the bar by steps, or by rounds where nobody tells of steps."""
        self._progress.update(
            self._task, completed=self._left.done, total=self._left.total, description=description
        )

    def _below(self) -> list[Text]:
        now = ", ".join(
            part
            for part in (self._rate, self._loss and f"last client: {self._loss}", self._terms)
            if part
        )
        workers = ", ".join(f"{worker}: {what}" for worker, what in self._workers.items())
        # A site chooses the names of its losses; there may be many workers.
        lines = [Text(for_terminal(now)), Text(workers, no_wrap=True, overflow="ellipsis")]
        return [line for line in lines if line]

    def _eta(self) -> str:
        seconds = self._left.seconds()
        return "ETA unknown" if seconds is None else f"ETA {duration(seconds)}"

    def _print(self, text: str, style: str | None = None) -> None:
        self._last_line = self._clock()
        self.console.print(text, style=style, soft_wrap=True)


class ProgressBar(RoundCallback):
    """Shows a run on the terminal."""

    def __init__(self, console: Console | None = None) -> None:
        """Prepares nothing yet: what to expect comes with the trainer.

        Args:
            console: where to write; standard output if not given.
        """
        self.console = console or make_console()
        self._terminal: Terminal | None = None
        self._done = 0  # clients of the round

    def _display(self, trainer: FederatedTrainer) -> Terminal:
        if self._terminal is None:
            self._terminal = Terminal(
                self.console, trainer.max_rounds, lambda number, rounds: trainer.due(number)
            )
        return self._terminal

    def on_fit_start(self, trainer: FederatedTrainer) -> None:
        """Starts the bar; after the evaluation of the untrained network, says what came of it."""
        self._display(trainer).__enter__()
        first = trainer.current_round + 1
        if first <= trainer.max_rounds and trainer.datamodule.clients:
            self._display(trainer).expect(steps_between(trainer, first, trainer.max_rounds), first)
        if first == 1 and trainer.untrained:
            self._display(trainer).row(
                {"round": 0, **trainer.untrained, "evaluate_seconds": trainer.untrained_seconds}
            )

    def on_round_start(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        """Begins to count the round's time."""
        self._done = 0
        self._display(trainer).start(record.number, 0, len(record.clients), steps=0)

    def on_client_start(self, trainer: FederatedTrainer, worker: str, client: int | None) -> None:
        """Shows what each worker does."""
        self._display(trainer).working(worker, client)

    def on_client_steps(self, trainer: FederatedTrainer, count: int) -> None:
        """Moves the bar."""
        self._display(trainer).step(count)

    def on_client_update(
        self, trainer: FederatedTrainer, record: RoundRecord, update: Update
    ) -> None:
        """Counts the client; one of an earlier process took none of this one's time."""
        self._done += 1
        if update.client in record.resumed:
            self._display(trainer).start(
                record.number, self._done, len(record.clients), steps=len(update.losses)
            )
        else:
            self._display(trainer).client(
                record.number, self._done, len(record.clients), update=update
            )

    def on_client_refused(
        self, trainer: FederatedTrainer, record: RoundRecord, client: int, reason: str
    ) -> None:
        """Counts the client."""
        self._done += 1
        self._display(trainer).client(record.number, self._done, len(record.clients), update=None)

    def on_round_saved(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        """Writes the round's line, and what went wrong below it."""
        self._display(trainer).row(record.row)
        for alarm in record.alarms:
            self._display(trainer).note(f"round {record.number}: {alarm}")

    def on_note(self, trainer: FederatedTrainer, text: str) -> None:
        """Writes it."""
        self._display(trainer).note(text)

    def on_fit_end(self, trainer: FederatedTrainer) -> None:
        """Ends the bar."""
        self._display(trainer).__exit__()

    def on_exception(self, trainer: FederatedTrainer, exception: BaseException) -> None:
        """Ends the bar."""
        self._display(trainer).__exit__()


def is_live(console: Console) -> bool:
    """Whether someone watches who would like a bar that moves, on a terminal that can move it."""
    return console.is_interactive and not os.environ.get("CI")


@contextmanager
def grouped_warnings(console: Console) -> Iterator[None]:
    """Shows each warning once, in a line, and at the end how often it came: every client's fit gives the same ones."""
    counts: Counter[str] = Counter()

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: TextIO | None = None, line: str | None = None,
    ) -> None:  # fmt: skip
        text = " ".join(str(message).split())
        counts[text] += 1
        if counts[text] == 1:
            place = f"{category.__name__}, {Path(filename).name}:{lineno}"
            console.print(f"warning: {text} ({place})", style="yellow", soft_wrap=True)

    with warnings.catch_warnings():
        warnings.simplefilter(
            "always", append=True
        )  # Counted by us; what others ignore stays ignored.
        warnings.showwarning = show
        try:
            yield
        finally:
            for text, count in counts.items():
                if count > 1:
                    short = textwrap.shorten(text, 60, placeholder=" ...")
                    console.print(
                        f"warning, {count} times: {short}", style="yellow", soft_wrap=True
                    )


@contextmanager
def steps(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """An ETA, for work that tells how many steps are done and of how many: a live bar, or a line now and then."""
    live = is_live(console)
    started = said = time.monotonic()

    def tick(done: int, of: int) -> None:
        nonlocal started, said
        now = time.monotonic()
        if done <= 1:  # Work of several parts counts each from the start.
            started = now
        elif not live and now - said > QUIET_SECONDS:
            said = now
            eta = duration((now - started) / (done - 1) * (of - done))
            console.print(f"  {what}: {done:,} of {of:,} steps, ETA {eta}", soft_wrap=True)
        bar.update(task, completed=done, total=of)

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not live) as bar:
        task = bar.add_task(what, total=None)
        yield tick


def duration(seconds: float) -> str:
    """Prints a time: ``75`` -> ``1 min 15 s``; coarser for longer times."""
    return printing.duration(seconds)
