"""The summary that is printed when a command has finished."""

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedx_pl.federation.content import flat
from fedx_pl.printing import duration, measured
from fedx_pl.trainer import FederatedTrainer

FILES = {  # those of a run folder that people look at
    "metrics.csv": "losses, accuracies and times, a row per round",
    "accuracy.png": "accuracy by round",
    "encoder.safetensors": "the trained encoder's weights",
    "config.yaml": "every setting of the run",
    "tensorboard": "the dashboards",
}


def evaluations(found: Mapping[str, Mapping[str, Any]]) -> Table:
    """A table of the numbers of `fedx-pl evaluate`."""
    table = Table("", "", title="evaluation", title_justify="left", show_header=False)
    for kind, numbers in found.items():
        for key, value in flat(numbers).items():
            if isinstance(value, int | float):
                key = key if key.startswith(f"{kind}_") else f"{kind}.{key}"
                table.add_row(key, measured(value))
    return table


def summary(trainer: FederatedTrainer, console: Console) -> None:
    """Prints the accuracies by round, where the files are and what to type next."""
    if any("knn_top1" in row for row in trainer.history):
        table = Table(title="accuracy on the test images (%)", title_justify="left")
        for column in ("round", "kNN", "linear", "linear top-5"):
            table.add_column(column, justify="right")
        for name, row in [
            ("untrained", trainer.untrained),
            *((str(row["round"]), row) for row in _measured(trainer.history)),
        ]:
            table.add_row(
                name,
                *(_percent(row.get(key)) for key in ("knn_top1", "linear_top1", "linear_top5")),
            )
        console.print(table)
        for key, name in (("linear_top1", "linear"), ("knn_top1", "kNN")):
            values = [row[key] for row in trainer.history if key in row]
            before = trainer.untrained.get(key)
            against = "" if before is None else f", untrained {measured(before)}"
            best = f"best on the test images {measured(max(values))}"
            console.print(f"{name}: last {measured(values[-1])}, {best}{against}")
    else:
        console.print(
            "no labels, so no accuracy was measured; losses are in metrics.csv and TensorBoard"
        )
    for alarm in trainer.alarms[-5:]:
        console.print(f"alarm: {alarm}", style="yellow", soft_wrap=True)
    if len(trainer.alarms) > 5:
        console.print(
            f"alarm: {len(trainer.alarms) - 5} earlier ones are in TensorBoard", style="yellow"
        )
    console.print(f"time: {duration(trainer.seconds)}")
    console.print(f"run folder: {trainer.folder}", soft_wrap=True)
    for name, what in FILES.items():
        if (trainer.folder / name).exists():
            console.print(f"  {name:<20} {what}", soft_wrap=True)
    console.print("next:")
    for command in _next_commands(trainer):
        console.print(f"  {command}", soft_wrap=True)


def _next_commands(trainer: FederatedTrainer) -> list[str]:
    folder = shlex.quote(str(trainer.folder))
    runs = shlex.quote(str(trainer.folder.parent))
    labeled = any("knn_top1" in row for row in trainer.history)
    use = f"evaluate {folder} semi geometry" if labeled else f"neighbors {folder} QUERY.jpg IMAGES"
    return [
        f"{_command('tensorboard')} --logdir {runs} --samples_per_plugin images=100",
        f"{_command('fedx-pl')} {use}",
        f"{_command('fedx-pl')} export {folder} --to torch",
    ]


def _command(name: str) -> str:
    """A program by name, or by path if its environment is not active, as after `make`."""
    beside = Path(sys.executable).with_name(name)
    if shutil.which(name) or not beside.exists():
        return name
    return str(beside.relative_to(Path.cwd()) if beside.is_relative_to(Path.cwd()) else beside)


def _measured(rows: Sequence[Mapping[str, Any]], most: int = 20) -> list[Mapping[str, Any]]:
    """Rows with an accuracy; at most about ``most``, the last among them."""
    measured = [row for row in rows if "knn_top1" in row or "linear_top1" in row]
    every = max(1, -(-len(measured) // most))
    return [row for i, row in enumerate(measured) if (len(measured) - 1 - i) % every == 0]


def _percent(value: float | None) -> str:
    return measured(value)
