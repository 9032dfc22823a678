"""The tables of a report: our numbers over the seeds, and the paper's beside them."""

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fedx_pl.errors import UserError
from fedx_pl.experiments.comparison import spread
from fedx_pl.experiments.definition import Labels
from fedx_pl.experiments.markdown import table
from fedx_pl.experiments.results import KNN, Measure, Result, Runs, number
from fedx_pl.files.reading import read_yaml
from fedx_pl.printing import NOTHING, measured

FIVE = 5  # the paper's standard errors are over five rounds
GEOMETRY = {
    "local_global_mean": "local to global (°)",
    "interclass_mean": "between classes (°)",
    "alignment": "alignment",
    "uniformity": "uniformity",
    "rankme": "RankMe",
}


class Paper:
    """The paper's numbers by experiment and labels, where it has any."""

    def __init__(self, path: Path) -> None:
        """Reads the file.

        Args:
            path: ``tables.yaml``; it may be missing.

        Raises:
            UserError: it cannot be read.
        """
        try:
            content = read_yaml(path) if path.exists() else {}
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path} is not a readable table of the paper's numbers ({error})"
            ) from error
        self.tables: dict[str, Any] = _with_text_keys(content or {})

    def numbers(self, runs: Runs, cell: Labels) -> Any:
        """The paper's numbers for a cell, shaped as in the file; None if it has none."""
        node = self.tables.get(runs.experiment.name)
        for label in cell:
            node = node.get(label) if isinstance(node, dict) else None
        return node

    def has(self, runs: Runs) -> bool:
        """Whether the paper has any of an experiment's cells."""
        return any(self.numbers(runs, cell) is not None for cell in runs.cells)


def _with_text_keys(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    return {str(key): _with_text_keys(value) for key, value in tree.items()}


def accuracy_table(runs: Runs, paper: Paper) -> Markup:
    """Linear top-1 of the last round and of the best round on the test images, as in the paper."""

    def fields(cell: Labels) -> list[str]:
        printed = _pair(paper.numbers(runs, cell), lambda value: measured(float(value)))
        return [_over_seeds(runs, cell, Result.last), _over_seeds(runs, cell, Result.best), printed]

    heads = ["last", "best (on test)", "the paper's last / best (on test)"]
    return _grid(runs, heads if paper.has(runs) else heads[:-1], fields)


def last_knn(result: Result) -> float | None:
    """The kNN top-1 of a run after its last round."""
    return result.last(KNN)


def knn_table(runs: Runs) -> Markup:
    """The kNN top-1 of the last round, over the seeds."""
    return _grid(runs, ["kNN"], lambda cell: [_over_seeds(runs, cell, last_knn)])


def errors_table(runs: Runs, paper: Paper) -> Markup:
    """Mean and standard error of the last and the best five rounds, averaged over the seeds."""

    def over_seeds(cell: Labels, order: Callable[[list[float]], list[float]]) -> str:
        accuracies = ([value for _, value in result.measured()] for result in runs.results_of(cell))
        chosen = [order(values)[-FIVE:] for values in accuracies]
        errors = [_mean_and_error(values) for values in chosen if len(values) == FIVE]
        means = [statistics.fmean(part) for part in zip(*errors, strict=True)]
        return _with_error(means, f" ({len(errors)})")

    def fields(cell: Labels) -> list[str]:
        printed = _pair(paper.numbers(runs, cell), _with_error)
        return [over_seeds(cell, list), over_seeds(cell, sorted), printed]

    heads = ["last five", "best five (on test)", "the paper's last / best round ± error over five"]
    return _grid(runs, heads if paper.has(runs) else heads[:-1], fields)


def last_five(runs: Runs) -> list[tuple[int, int]]:
    """The first and the last of the last five measured rounds: one pair unless the runs differ."""
    measured_rounds = (
        [round_number for round_number, _ in result.measured()] for result in runs.results()
    )
    return sorted({(rounds[-FIVE], rounds[-1]) for rounds in measured_rounds if rounds[FIVE - 1 :]})


def semi_shares(runs: Runs) -> dict[str, str]:
    """The shares of labels as the results spell them, each with its name: ``1 % (25 labels)``."""
    labels: dict[str, set[int]] = {}
    for result in runs.results():
        for share, values in result.evaluations.get("semi", {}).items():
            if isinstance(values, Mapping) and "labels" in values:
                labels.setdefault(share, set()).add(values["labels"])
    return {
        share: f"{100 * float(share):g} % ({extent(labels[share])} labels)"
        for share in sorted(labels, key=float)
    }


def semi_measures(runs: Runs) -> dict[str, Measure]:
    """Top-1 after fine-tuning, by share."""

    def top1(share: str) -> Measure:
        return lambda result: number(result.evaluations.get("semi", {}).get(share, {}).get("top1"))

    return {share: top1(share) for share in semi_shares(runs)}


def semi_table(runs: Runs, paper: Paper) -> Markup:
    """Top-1 after fine-tuning with few labels."""
    measures = semi_measures(runs)
    in_paper = paper.has(runs)

    def fields(cell: Labels) -> list[str]:
        row = []
        for share, measure in measures.items():
            row.append(_over_seeds(runs, cell, measure))
            if in_paper:
                row.append(measured(semi_paper(paper, runs, cell, share=share)))
        return row

    names = semi_shares(runs).values()
    heads = [head for name in names for head in ([name, "the paper's"] if in_paper else [name])]
    return _grid(runs, heads, fields)


def semi_paper(paper: Paper, runs: Runs, cell: Labels, share: str) -> float | None:
    """The paper's top-1 for a share of labels."""
    printed = paper.numbers(runs, cell) or {}
    values = (float(value) for key, value in printed.items() if float(key) == float(share))
    return next(values, None)


def geometry_paper(paper: Paper, runs: Runs, cell: Labels, key: str) -> float | None:
    """The paper's number for a measure of the embedding's geometry."""
    value = (paper.numbers(runs, cell) or {}).get(key)
    return None if value is None else float(value)


def geometry_measures() -> dict[str, Measure]:
    """The numbers of the embedding's geometry, by their key in the results."""

    def value(key: str) -> Measure:
        return lambda result: number(result.evaluations.get("geometry", {}).get(key))

    return {key: value(key) for key in GEOMETRY}


def geometry_table(runs: Runs, paper: Paper) -> Markup:
    """The geometry of the embedding in numbers."""
    heads = list(GEOMETRY.values())
    in_paper = paper.has(runs)
    if in_paper:
        heads.insert(2, "the paper's (°)")

    def fields(cell: Labels) -> list[str]:
        row = [_over_seeds(runs, cell, measure) for measure in geometry_measures().values()]
        if in_paper:
            row.insert(2, measured(geometry_paper(paper, runs, cell, key="interclass_mean")))
        return row

    return _grid(runs, heads, fields)


def _grid(runs: Runs, heads: Sequence[str], fields: Callable[[Labels], list[str]]) -> Markup:
    """A table of all cells: the labels of the axis `columns` go to the right, the others down.

    Args:
        runs: the results of the experiment.
        heads: the names of a cell's fields.
        fields: gives the fields of a cell; those beyond `heads` are not shown.
    """
    axes = list(runs.experiment.axes)
    column_axis = runs.experiment.columns
    place = axes.index(column_axis) if column_axis else len(axes)
    columns = list(dict.fromkeys(cell[place] for cell in runs.cells)) if column_axis else []
    cells = sorted(runs.cells, key=lambda cell: columns.index(cell[place]) if columns else 0)
    rows: dict[Labels, list[str]] = {}
    for cell in cells:
        rows.setdefault(cell[:place] + cell[place + 1 :], []).extend(fields(cell)[: len(heads)])
    names = [axis for axis in axes if axis != column_axis]
    head = [f"{label}: {text}" for label in columns for text in heads] if columns else heads
    lines = [[*labels, *values] for labels, values in rows.items()]
    return table([*names, *head], lines, labels=len(names))


def _over_seeds(runs: Runs, cell: Labels, measure: Measure) -> str:
    return spread(runs.values(cell, measure).values()).text()


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def _with_error(values: Sequence[float], suffix: str = "") -> str:
    return f"{values[0]:.2f} ± {values[1]:.2f}{suffix}" if values else NOTHING


def _pair(printed: Sequence[Any] | None, text: Callable[[Any], str]) -> str:
    """The paper's last and best number."""
    if printed is None:
        return NOTHING
    return " / ".join(NOTHING if value is None else text(value) for value in printed)


def extent(values: Collection[Any]) -> str:
    """A value, or the range of several."""
    least, most = min(values), max(values)
    return str(least) if least == most else f"{least} to {most}"
