"""The progress of a run on the terminal: a live bar with an ETA, and one line per round."""

from __future__ import annotations

import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text
from typing_extensions import override

from fedx_pl.callbacks.base import RoundCallback
from fedx_pl.callbacks.eta import Due, Eta
from fedx_pl.display import Clock, Display, make_console
from fedx_pl.errors import for_terminal
from fedx_pl.federation.estimate import steps_between
from fedx_pl.printing import duration

if TYPE_CHECKING:
    from fedx_pl.federation.round import RoundRecord, Update
    from fedx_pl.trainer import FederatedTrainer

__all__ = ["ProgressBar", "Terminal", "duration", "grouped_warnings", "make_console", "steps"]


class Terminal(Display):
    """The display of a run.

    Losses and images per second are those of finished clients: losses of single steps stay on the
    device until then.
    """

    def __init__(
        self, console: Console, rounds: int, due: Due, clock: Clock = time.monotonic
    ) -> None:
        """Prepares the display.

        Args:
            console: where to write.
            rounds: rounds of the whole run.
            due: which rounds evaluate what, for the ETA.
            clock: seconds, from any origin.
        """
        self.rounds = rounds
        self._left = Eta(rounds, due, clock)
        self._round_started = clock()
        self._clients = 0  # of the round
        self._images = 0
        self._rate = ""
        self._loss = ""
        self._terms = ""
        self._workers: dict[str, str] = {}
        super().__init__(console, "starting", clock=clock)

    def expect(self, steps: int, first: int = 1) -> None:
        """Sets how many optimizer steps are left, for the ETA, and the first round."""
        self._left.expect(steps, first - 1)
        self._move(f"round {first}/{self.rounds}")

    def start(self, round_number: int, done: int, clients: int, steps: int) -> None:
        """Called when a round begins, or when an earlier process has trained one of its clients.

        Only now, since real sites may have been waited for.
        """
        self._clients = clients
        self._images = 0
        self._round_started = self._clock()
        self._left.start(round_number, done / clients if clients else 0.0, steps)
        self._move(f"round {round_number}/{self.rounds}, {done}/{clients} clients")

    def step(self, count: int = 1) -> None:
        """Counts optimizer steps."""
        self._left.step(count)
        if self.live and self._left.steps:
            self._move()

    def working(self, worker: str, client: int | None) -> None:
        """Shows what each worker does, where there are several."""
        self._workers[worker] = "idle" if client is None else f"client {client}"
        self.refresh()

    def client(
        self, round_number: int, done: int, clients: int, update: Update | None = None
    ) -> None:
        """Shows how many clients of the round are done, and the losses of the last of them."""
        if update is not None:
            self._read(update)
        self._clients = clients
        self._left.client(done / clients)
        doing = f"{done}/{clients} clients" if done < clients else "evaluating"
        finished = f"round {round_number}/{self.rounds}: {done} of {clients} clients done"
        self._move(
            f"round {round_number}/{self.rounds}, {doing}",
            line=_joined(finished, self._loss, self._rate),
        )

    def row(self, row: Mapping[str, Any]) -> None:
        """Prints the line of a finished round."""
        number = row["round"]
        parts = [f"round {number:>3}/{self.rounds}" if number else "untrained    "]
        labels = {"loss": "loss", "knn_top1": "kNN", "linear_top1": "linear"}
        parts += [f"{label} {row[key]:6.2f}" for key, label in labels.items() if key in row]
        self._left.row(number, row.get("evaluate_seconds", 0.0))
        if number:
            rate = f"{row['images_per_second']:,.0f} img/s"
            parts += [rate, f"{row['round_seconds']:.1f} s", self.eta()]
        self.print("  ".join(parts))
        clients = f", 0/{self._clients} clients" if self._clients else ""
        more = number < self.rounds
        self._move(f"round {number + 1}/{self.rounds}{clients}" if more else "finishing")

    def note(self, text: str) -> None:
        """Prints a line that must not be missed."""
        self.print(f"note: {text}", style="yellow")

    def seconds_left(self) -> float | None:
        """The ETA of the run, evaluations included."""
        return self._left.seconds()

    def below(self) -> Sequence[Text]:
        """Lines with the last client's report and the state of the workers."""
        client = _joined(self._rate, self._loss and f"last client: {self._loss}", self._terms)
        workers = ", ".join(f"{worker}: {what}" for worker, what in self._workers.items())
        # A site chooses the names of its losses; there may be many workers.
        lines = [Text(for_terminal(client)), Text(workers, no_wrap=True, overflow="ellipsis")]
        return [line for line in lines if line]

    def _read(self, update: Update) -> None:
        self._images += update.images_seen
        passed = max(self._clock() - self._round_started, 1e-9)
        self._rate = f"{self._images / passed:,.0f} img/s"  # as in the round's line
        if not len(update.losses):
            return
        # A site may send fewer names than losses.
        means = zip(update.loss_names, update.losses.mean(0).tolist(), strict=False)
        total, *terms = [f"{name.replace('_', ' ')} {mean:.2f}" for name, mean in means]
        self._loss = total.replace("total", "loss")
        self._terms = ", ".join(terms if len(terms) > 1 else [])

    def _move(self, description: str | None = None, line: str = "") -> None:
        """Moves the bar by steps, or by rounds where steps are not reported."""
        self.update(self._left.done, self._left.total, description, line=line)


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


class ProgressBar(RoundCallback):
    """Shows a run on a console, which is standard output if not given."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or make_console()
        self._terminal: Terminal | None = None
        self._done = 0  # clients of the round

    def _display(self, trainer: FederatedTrainer) -> Terminal:
        if self._terminal is None:
            self._terminal = Terminal(
                self.console, trainer.max_rounds, lambda number, _: trainer.due(number)
            )
        return self._terminal

    @override
    def on_fit_start(self, trainer: FederatedTrainer) -> None:
        display = self._display(trainer)
        display.__enter__()
        first = trainer.current_round + 1
        if first <= trainer.max_rounds and trainer.datamodule.clients:
            display.expect(steps_between(trainer, first, trainer.max_rounds), first)
        if first == 1 and trainer.untrained:
            seconds = trainer.untrained_seconds
            display.row({"round": 0, **trainer.untrained, "evaluate_seconds": seconds})

    @override
    def on_round_start(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        self._done = 0
        self._display(trainer).start(record.number, 0, len(record.clients), steps=0)

    @override
    def on_client_start(self, trainer: FederatedTrainer, worker: str, client: int | None) -> None:
        self._display(trainer).working(worker, client)

    @override
    def on_client_steps(self, trainer: FederatedTrainer, count: int) -> None:
        self._display(trainer).step(count)

    @override
    def on_client_update(
        self, trainer: FederatedTrainer, record: RoundRecord, update: Update
    ) -> None:
        self._done += 1
        display = self._display(trainer)
        clients = len(record.clients)
        if update.client in record.resumed:
            # An earlier process trained it, so the round's time starts again.
            display.start(record.number, self._done, clients, steps=len(update.losses))
        else:
            display.client(record.number, self._done, clients, update=update)

    @override
    def on_client_refused(
        self,
        trainer: FederatedTrainer,
        record: RoundRecord,
        client: int,
        reason: str,
    ) -> None:
        self._done += 1
        self._display(trainer).client(record.number, self._done, len(record.clients))

    @override
    def on_round_saved(self, trainer: FederatedTrainer, record: RoundRecord) -> None:
        display = self._display(trainer)
        display.row(record.row)
        for alarm in record.alarms:
            display.note(f"round {record.number}: {alarm}")

    @override
    def on_note(self, trainer: FederatedTrainer, text: str) -> None:
        self._display(trainer).note(text)

    @override
    def on_fit_end(self, trainer: FederatedTrainer) -> None:
        self._display(trainer).__exit__()

    @override
    def on_exception(self, trainer: FederatedTrainer, exception: BaseException) -> None:
        self._display(trainer).__exit__()


@contextmanager
def grouped_warnings(console: Console) -> Iterator[None]:
    """Shows each warning once, and at the end how often it came: clients give the same ones."""
    counts: Counter[str] = Counter()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        *_: Any,
        **__: Any,
    ) -> None:
        text = " ".join(str(message).split())
        counts[text] += 1
        if counts[text] == 1:
            place = f"{category.__name__}, {Path(filename).name}:{lineno}"
            console.print(f"warning: {text} ({place})", style="yellow", soft_wrap=True)

    with warnings.catch_warnings():
        # We count them; what others ignore stays ignored.
        warnings.simplefilter("always", append=True)
        warnings.showwarning = show
        try:
            yield
        finally:
            for text, count in counts.items():
                if count > 1:
                    short = textwrap.shorten(text, 60, placeholder=" ...")
                    shown = f"warning, {count} times: {short}"
                    console.print(shown, style="yellow", soft_wrap=True)


@contextmanager
def steps(
    console: Console, title: str, clock: Clock = time.monotonic
) -> Iterator[Callable[[int, int], None]]:
    """Gives a function to call with (steps done, steps in all), for one or several tasks."""
    with Display(console, title, clock=clock) as display:

        def tick(done: int, total: int) -> None:
            display.update(done, total, line=f"{title}: {done:,} of {total:,} steps")

        yield tick
