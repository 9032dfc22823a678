"""The tables of a report: ours over seeds, and the paper's beside them."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedx_pl.errors import UserError
from fedx_pl.experiments.comparison import (
    ABOVE,
    BELOW,
    ONE_SEED,
    WITHIN,
    Spread,
    decimal,
    paired,
    spread,
)
from fedx_pl.experiments.definition import Labels
from fedx_pl.experiments.pages import Block, Heading, Inline, Paragraph, Strong, Table
from fedx_pl.experiments.results import KNN, Measure, Result, Runs, number
from fedx_pl.files.reading import read_yaml

FIVE = 5  # rounds that the paper's standard errors are over
GEOMETRY = {
    "local_global_mean": "local to global (°)",
    "interclass_mean": "between classes (°)",
    "alignment": "alignment",
    "uniformity": "uniformity",
    "rankme": "RankMe",
}


class Paper:
    """The paper's numbers, by experiment and labels; an experiment or a cell that it does not have has none."""

    def __init__(self, path: Path) -> None:
        """Reads the file.

        Args:
            path: of ``tables.yaml``; experiments of one's own need none.

        Raises:
            UserError: it cannot be read.
        """
        try:
            content = read_yaml(path) if path.exists() else {}
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path} is not a readable table of the paper's numbers ({error})"
            ) from error
        self.tables: dict[str, Any] = _text_keys(content or {})

    def numbers(self, runs: Runs, cell: Labels) -> Any:
        """What the paper has for a cell: shaped as in the file, or nothing."""
        found = self.tables.get(runs.experiment.name)
        for label in cell:
            found = found.get(label) if isinstance(found, dict) else None
        return found

    def has(self, runs: Runs) -> bool:
        """Whether it has any of an experiment's cells."""
        return any(self.numbers(runs, cell) is not None for cell in runs.cells)


def _text_keys(tree: Any) -> Any:
    return (
        {str(key): _text_keys(value) for key, value in tree.items()}
        if isinstance(tree, dict)
        else tree
    )


def accuracy_table(runs: Runs, paper: Paper) -> Table:
    """Linear top-1 of the last round, and of the round that is best on the test images, as in the paper."""

    def fields(cell: Labels) -> list[str]:
        own = [_over_seeds(runs, cell, Result.last), _over_seeds(runs, cell, Result.best)]
        return [*own, _pair(paper.numbers(runs, cell), decimal)]

    heads = ["last", "best (on test)", "the paper's last / best (on test)"]
    return _grid(runs, heads if paper.has(runs) else heads[:-1], fields)


def knn_table(runs: Runs) -> Table:
    """kNN top-1 of the last round."""

    def fields(cell: Labels) -> list[str]:
        return [_over_seeds(runs, cell, lambda result: result.last(KNN))]

    return _grid(runs, ["kNN"], fields, fold="kNN top-1 of the last round")


def errors_table(runs: Runs, paper: Paper) -> Table:
    """Means and standard errors of the last five and the best five measured rounds, averaged over the seeds."""

    def over_seeds(cell: Labels, order: Callable[[list[float]], list[float]]) -> str:
        chosen = [
            order([value for _, value in result.measured()])[-FIVE:] for result in runs.of(cell)
        ]
        found = [_standard_error(values) for values in chosen if len(values) == FIVE]
        return _with_error(
            [statistics.fmean(part) for part in zip(*found, strict=True)], f" ({len(found)})"
        )

    def fields(cell: Labels) -> list[str]:
        printed = _pair(paper.numbers(runs, cell), _with_error)
        return [over_seeds(cell, list), over_seeds(cell, sorted), printed]

    heads = ["last five", "best five (on test)", "the paper's last / best round ± error over five"]
    return _grid(runs, heads if paper.has(runs) else heads[:-1], fields)


def last_five(runs: Runs) -> list[tuple[int, int]]:
    """The first and the last of the last five measured rounds: one pair unless the runs differ."""
    measured = [
        [round_number for round_number, _ in result.measured()]
        for cell in runs.found
        for result in runs.of(cell)
    ]
    return sorted({(rounds[-FIVE], rounds[-1]) for rounds in measured if len(rounds) >= FIVE})


def semi_shares(runs: Runs) -> dict[str, str]:
    """The shares of labels as they are written in the results, each with its name: ``1 % (25 labels)``."""
    labels: dict[str, set[int]] = {}
    for found in (
        result.evaluations.get("semi", {}) for cell in runs.found for result in runs.of(cell)
    ):
        for share, values in found.items():
            if isinstance(values, Mapping) and "labels" in values:
                labels.setdefault(share, set()).add(values["labels"])
    return {
        share: f"{100 * float(share):g} % ({_extent(labels[share])} labels)"
        for share in sorted(labels, key=float)
    }


def semi_measures(runs: Runs) -> dict[str, Measure]:
    """Top-1 after fine-tuning, by share."""

    def top1(share: str) -> Measure:
        return lambda result: number(result.evaluations.get("semi", {}).get(share, {}).get("top1"))

    return {share: top1(share) for share in semi_shares(runs)}


def semi_table(runs: Runs, paper: Paper) -> Table:
    """Top-1 after fine-tuning with few labels."""
    measures, known = semi_measures(runs), paper.has(runs)

    def fields(cell: Labels) -> list[str]:
        found = []
        for share, measure in measures.items():
            found.append(_over_seeds(runs, cell, measure))
            found += [_decimal_or_none(semi_paper(paper, runs, cell, share=share))] * known
        return found

    heads = [
        head for share in semi_shares(runs).values() for head in (share, *["the paper's"] * known)
    ]
    return _grid(runs, heads, fields)


def semi_paper(paper: Paper, runs: Runs, cell: Labels, share: str) -> float | None:
    """The paper's top-1 for a share of labels."""
    printed = paper.numbers(runs, cell) or {}
    return next((value for key, value in printed.items() if float(key) == float(share)), None)


def geometry_measures() -> dict[str, Measure]:
    """The numbers of the embedding's geometry, by their key in the results."""

    def value(key: str) -> Measure:
        return lambda result: number(result.evaluations.get("geometry", {}).get(key))

    return {key: value(key) for key in GEOMETRY}


def geometry_table(runs: Runs, paper: Paper) -> Table:
    """The embedding in numbers."""
    measures, known = geometry_measures(), paper.has(runs)

    def fields(cell: Labels) -> list[str]:
        printed = (paper.numbers(runs, cell) or {}).get("interclass_mean")
        own = [_over_seeds(runs, cell, measure) for measure in measures.values()]
        return [*own[:2], *[_decimal_or_none(printed)] * known, *own[2:]]

    heads = list(GEOMETRY.values())
    return _grid(runs, [*heads[:2], *["the paper's (°)"] * known, *heads[2:]], fields)


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What one label of the last axis has more than the baseline, within one group and for one measure."""

    group: Labels
    label: str
    measure: str
    differences: Spread
    paper: float | None


def gains(
    runs: Runs, measures: Mapping[str, Measure], printed: Callable[[Labels, str], float | None]
) -> tuple[list[Gain], str]:
    """Compares all labels of the last axis with the baseline, seed by seed.

    Args:
        runs: of an experiment with a baseline.
        measures: what is compared, by name.
        printed: (cell, name of the measure) -> the paper's number.

    Returns:
        (the comparisons of what was run, the label with which the paper compares: its plain method may be another)
    """
    baseline = runs.experiment.baseline
    labels = [baseline, *(label for label in runs.variants if label != baseline)]
    in_paper = [
        label
        for label in labels
        if any(
            printed((*group, label), name) is not None for group in runs.groups for name in measures
        )
    ]
    reference = in_paper[0] if in_paper else ""
    found = []
    for group in runs.groups:
        for label in labels[1:]:
            for name, measure in measures.items():
                own, base = (runs.values((*group, word), measure) for word in (label, baseline))
                if own and base:
                    more, less = (printed((*group, word), name) for word in (label, reference))
                    paper = (
                        None if more is None or less is None or label == reference else more - less
                    )
                    found.append(
                        Gain(
                            group=group,
                            label=label,
                            measure=name,
                            differences=paired(own, base),
                            paper=paper,
                        )
                    )
    return found, reference


def gain_blocks(
    title: str,
    runs: Runs,
    rows: Sequence[Gain],
    reference: str,
    names: Mapping[str, str] | None = None,
    *,
    fold: bool = False,
) -> list[Block]:
    """The comparisons as a table, and how many rows gain where a label has several.

    Args:
        title: above the table.
        runs: of the experiment.
        rows: the comparisons.
        reference: the label with which the paper compares.
        names: of the measures, where there is more than one, for a column that tells them apart.
        fold: show the table on a click, and count nothing.
    """
    if not rows:
        return []
    axes = list(runs.experiment.axes)
    known = any(row.paper is not None for row in rows)
    head = [
        *axes,
        *["measure"] * bool(names),
        f"difference to {runs.experiment.baseline}",
        "verdict",
        "range",
    ]
    head += [f"the paper's difference to {reference}"] * known
    lines = []
    for row in rows:
        values = row.differences.values
        extent = (
            f"{decimal(min(values), '+')} to {decimal(max(values), '+')}"
            if len(values) > 1
            else "-"
        )
        verdict = row.differences.verdict
        line: list[Inline] = [*row.group, row.label, *([names[row.measure]] if names else [])]
        line += [
            row.differences.text("+"),
            Strong(verdict) if verdict in (ABOVE, BELOW) else verdict,
            extent,
        ]
        line += [_decimal_or_none(row.paper, "+")] * known
        lines.append(line)
    table = Table(head, lines, labels=len(axes) + bool(names), fold=title if fold else "")
    if fold:
        return [table]
    counted = [
        [row for row in rows if row.label == label and row.differences.n] for label in runs.variants
    ]
    several = [some for some in counted if len({row.group for row in some}) > 1]
    return [Heading(title, level=3), table, *(_count(some, runs) for some in several)]


def _count(rows: Sequence[Gain], runs: Runs) -> Paragraph:
    """How many rows of one label gain, by verdict."""
    more = sum(row.differences.mean > 0 for row in rows)
    verdicts = Counter(row.differences.verdict for row in rows)
    words = {ABOVE: ABOVE, WITHIN: "within it", BELOW: "lower beyond it"}
    words |= {ONE_SEED: "with one seed only"} if verdicts[ONE_SEED] else {}
    parts = ", ".join(f"{verdicts[verdict]} {text}" for verdict, text in words.items())
    text = f" against {runs.experiment.baseline}: the mean difference is positive in {more} of {len(rows)} rows; {parts}."
    usual = Counter(row.differences.n for row in rows if row.differences.n > 1).most_common(1)
    more_seeds = [row for row in rows if usual and row.differences.n > usual[0][0]]
    names = ", ".join(
        f"{' / '.join(row.group)} ({row.differences.n} instead of {usual[0][0]})"
        for row in more_seeds
    )
    return Paragraph(
        [Strong(rows[0].label), text, f" Of more seeds than the rest: {names}." if names else ""]
    )


def _grid(
    runs: Runs, heads: Sequence[str], fields: Callable[[Labels], list[str]], fold: str = ""
) -> Table:
    """A table of cells: the axis `columns` goes to the right, the others down."""
    axes = list(runs.experiment.axes)
    spread_axis = runs.experiment.columns
    place = axes.index(spread_axis) if spread_axis else len(axes)
    wide = list(dict.fromkeys(cell[place] for cell in runs.cells)) if spread_axis else []
    rows: dict[Labels, list[str]] = {}
    ordered = sorted(runs.cells, key=lambda cell: wide.index(cell[place])) if wide else runs.cells
    for cell in ordered:
        rows.setdefault(cell[:place] + cell[place + 1 :], []).extend(fields(cell)[: len(heads)])
    names = [axis for axis in axes if axis != spread_axis]
    head = [f"{label}: {text}" for label in wide for text in heads] if wide else list(heads)
    return Table(
        [*names, *head],
        [[*labels, *values] for labels, values in rows.items()],
        labels=len(names),
        fold=fold,
    )


def _over_seeds(runs: Runs, cell: Labels, measure: Measure) -> str:
    return spread(runs.values(cell, measure).values()).text()


def _standard_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def _with_error(found: Sequence[float], suffix: str = "") -> str:
    return f"{found[0]:.2f} ± {found[1]:.2f}{suffix}" if found else "-"


def _pair(printed: Sequence[Any] | None, text: Callable[[Any], str]) -> str:
    """The paper's last and best."""
    return (
        "-"
        if printed is None
        else " / ".join("-" if value is None else text(value) for value in printed)
    )


def _decimal_or_none(value: float | None, sign: str = "") -> str:
    return "-" if value is None else decimal(value, sign)


def _extent(values: Collection[int]) -> str:
    return f"{min(values)}" if len(values) == 1 else f"{min(values)} to {max(values)}"
