"""What a run says on the terminal: the plan, one line per round, and the summary."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fedx_pl.config import Config, flat
from fedx_pl.federation.orchestrator import Result, class_counts
from fedx_pl.federation.plan import Plan

QUIET_SECONDS = 30.0  # Without a live bar, a sign of life at least this often.


class _WithWorkers(Progress):
    """A bar, and below it what each worker does: beside it there is no room on a narrow terminal."""

    def __init__(self, *columns: ProgressColumn, **options: Any) -> None:
        self.workers: dict[str, str] = {}
        super().__init__(*columns, **options)

    def get_renderables(self) -> Iterator[RenderableType]:
        """The bar first."""
        yield self.make_tasks_table(self.tasks)
        if self.workers:
            text = ", ".join(f"{worker}: {what}" for worker, what in self.workers.items())
            yield Text(text, no_wrap=True, overflow="ellipsis")


class Terminal:
    """A live bar with an ETA on a terminal, plain lines elsewhere. Use as a context manager around a run."""

    def __init__(self, console: Console, rounds: int) -> None:
        """Prepares the display.

        Args:
            console: where to write.
            rounds: of the whole run.
        """
        self.console, self.rounds, self.steps = console, rounds, 0
        self._done, self._started, self._last_line = 0, time.monotonic(), time.monotonic()
        self._rows, self._rows_to_come = 0, 0  # Rounds tell the time where steps are taken elsewhere.
        self._live = is_live(console)
        columns = (
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn(),
            TextColumn("ETA"), TimeRemainingColumn(),
        )  # fmt: skip
        self._progress = _WithWorkers(*columns, console=console, transient=True, disable=not self._live)
        self._task = self._progress.add_task("training", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def expect(self, steps: int) -> None:
        """Tells how many optimiser steps are still to come, for the ETA."""
        self.steps, self._started = steps, time.monotonic()
        self._progress.update(self._task, total=steps)

    def step(self, count: int = 1) -> None:
        """Advances the bar, at most a few times a second."""
        self._done += count
        if self._live:
            self._progress.update(self._task, completed=self._done)

    def working(self, worker: str, client: int | None) -> None:
        """Shows what each worker does, where there are several."""
        self._progress.workers[worker] = "idle" if client is None else f"client {client}"
        self._progress.refresh()

    def client(self, round: int, done: int, of: int) -> None:
        """Shows which client of the round is done."""
        self._progress.update(self._task, description=f"round {round}/{self.rounds}, client {done}/{of}")
        if not self._live and time.monotonic() - self._last_line > QUIET_SECONDS:
            self._print(f"  round {round}/{self.rounds}: {done} of {of} clients done, {self._eta()}")

    def row(self, row: Mapping[str, Any]) -> None:
        """One line for a finished round."""
        if row["round"]:
            self._rows_to_come = self._rows_to_come or self.rounds - row["round"] + 1
            self._rows += 1
        parts = [f"round {row['round']:>3}/{self.rounds}" if row["round"] else "untrained    "]
        labels = {"loss": "loss", "knn_top1": "kNN", "linear_top1": "linear"}
        parts += [f"{label} {row[key]:6.2f}" for key, label in labels.items() if key in row]
        if row["round"]:
            parts += [f"{row['images_per_second']:.0f} img/s", f"{row['round_seconds']:.1f} s", self._eta()]
        self._print("  ".join(parts))

    def note(self, text: str) -> None:
        """A line that must not be missed."""
        self._print(f"note: {text}", style="yellow")

    def _eta(self) -> str:
        done, all = (self._done, self.steps) if self.steps else (self._rows, self._rows_to_come)
        if not done:
            return "ETA unknown"
        left = (time.monotonic() - self._started) * max(all - done, 0) / done
        return f"ETA {duration(left)}"

    def _print(self, text: str, style: str | None = None) -> None:
        self._last_line = time.monotonic()
        self.console.print(text, style=style, soft_wrap=True)


def is_live(console: Console) -> bool:
    """Whether someone watches who would like a bar that moves."""
    return console.is_terminal and not os.environ.get("CI")


@contextmanager
def steps(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar with an ETA, for work that tells how many steps are done and of how many."""
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("ETA"), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not is_live(console)) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def evaluations(found: Mapping[str, Mapping[str, Any]]) -> Table:
    """The numbers of `fedx-pl evaluate`, one per row."""
    table = Table("", "", title="evaluation", title_justify="left", show_header=False)
    for kind, numbers in found.items():
        for key, value in flat(numbers, f"{kind}.").items():
            if isinstance(value, int | float):
                table.add_row(key, f"{value:.2f}" if isinstance(value, float) else f"{value:,}")
    return table


def duration(seconds: float) -> str:
    """``75`` -> ``1 min 15 s``; coarse for long ones."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    if seconds < 86400:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"
    return f"{seconds / 86400:.1f} days"


def announcement(config: Config) -> str:
    """What will run, before anything does."""
    federation, backbone = config.federation, config.backbone
    lines = [
        f"{config.name}: {federation.rounds} rounds x {federation.epochs} epochs, {federation.clients} clients, "
        f"{backbone.name}, seed {config.seed}"
    ]
    if config.profile == "cpu":
        lines.append("profile cpu: a thin network, a subset of the images, few rounds: a quick look.")
        lines.append("The paper's full setting needs a GPU: PROFILE=paper (make), profile=paper.")
    return "\n".join(lines)


def expectation(plan: Plan, seconds: float) -> str:
    """On what it runs and how long it takes."""
    cuda = plan.device.type == "cuda"
    where = torch.cuda.get_device_name(plan.device) if cuda else f"{torch.get_num_threads()} CPU threads"
    line = f"{len(plan.data.train.images):,} images, {plan.precision} on {where}: about {duration(seconds)}"
    hint = "\nWithout a GPU, profile=cpu gives a small result in minutes." if not cuda and seconds > 3600 else ""
    return line + hint


def plan_text(plan: Plan) -> Table:
    """Sizes per client and steps, for ``--dry-run``."""
    table = Table(title="clients", title_justify="left")
    for column in ("client", "images", "classes", "batch", "relation batch", "steps per round"):
        table.add_column(column, justify="right")
    counts, _ = class_counts(plan)
    shown = list(range(len(plan.clients)))
    for client in shown if len(shown) <= 20 else [*shown[:10], *shown[-10:]]:
        data = plan.client_data(client, round=1)
        classes = str(int((counts[client] > 0).sum())) if plan.data.train.labels is not None else "-"
        relation = str(min(data.relation_size, data.num_images)) if data.relation_size else "-"
        row = (client, f"{data.num_images:,}", classes, data.views_size, relation, f"{plan.steps_of(client):,}")
        table.add_row(*map(str, row))
    if len(shown) > 20:
        table.caption = f"{len(shown) - 20} clients in between are not shown"
    return table


def parameters_text(plan: Plan) -> str:
    """How large the model is, and what travels."""
    total = sum(p.numel() for p in plan.model.parameters() if p.requires_grad)
    backbone = sum(p.numel() for p in plan.model.backbone.parameters())
    shared = sum(t.numel() * t.element_size() for t in plan.model.shared_state().values())
    private = sum(t.numel() * t.element_size() for t in plan.model.private_state().values())
    return (
        f"{type(plan.model).__name__}: {total:,} trainable parameters, {backbone:,} of them in the backbone; "
        f"{shared / 1e6:.1f} MB shared and {private / 1e6:.1f} MB private per client"
    )


def summary(result: Result, console: Console) -> None:
    """Accuracies by round, where everything is, and the next command."""
    if any("knn_top1" in row for row in result.rows):
        table = Table(title="accuracy on the test images (%)", title_justify="left")
        for column in ("round", "kNN", "linear", "linear top-5"):
            table.add_column(column, justify="right")
        for name, row in [
            ("untrained", result.untrained),
            *((str(row["round"]), row) for row in _measured(result.rows)),
        ]:
            table.add_row(name, *(_percent(row.get(key)) for key in ("knn_top1", "linear_top1", "linear_top5")))
        console.print(table)
        for key, name in (("linear_top1", "linear"), ("knn_top1", "kNN")):
            values = [row[key] for row in result.rows if key in row]
            before = result.untrained.get(key)
            against = "" if before is None else f", untrained {before:.2f}"
            console.print(f"{name}: last {values[-1]:.2f}, best {max(values):.2f}{against}")
    else:
        console.print("no labels: nothing to measure accuracy on; losses are in metrics.csv and TensorBoard")
    for alarm in result.alarms[-5:]:
        console.print(f"alarm: {alarm}", style="yellow", soft_wrap=True)
    if len(result.alarms) > 5:
        console.print(f"alarm: {len(result.alarms) - 5} earlier ones are in TensorBoard", style="yellow")
    console.print(f"time: {duration(result.seconds)}")
    console.print(f"run folder: {result.folder}", soft_wrap=True)
    # The environment's own command if it is not on the path, as after `make` without activating .venv.
    beside = Path(sys.executable).with_name("tensorboard")
    command = "tensorboard" if shutil.which("tensorboard") or not beside.exists() else os.path.relpath(beside)
    console.print(f"dashboards: {command} --logdir {result.folder.parent}", soft_wrap=True)


def _measured(rows: Sequence[Mapping[str, Any]], most: int = 20) -> list[Mapping[str, Any]]:
    """Rows with an accuracy; of a long run every few, with the last."""
    measured = [row for row in rows if "knn_top1" in row or "linear_top1" in row]
    every = max(1, -(-len(measured) // most))
    return [row for i, row in enumerate(measured) if (len(measured) - 1 - i) % every == 0]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
