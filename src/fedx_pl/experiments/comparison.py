"""Numbers over seeds: their spread, and whether a difference is more than the seeds' noise."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from scipy.special import stdtrit

from fedx_pl.experiments.definition import Labels
from fedx_pl.experiments.markdown import strong, table
from fedx_pl.experiments.results import Measure, Runs
from fedx_pl.printing import NOTHING, measured

ABOVE = "above the seed noise"
BELOW = "lower, beyond the seed noise"  # "below the noise" would read as "smaller than it"
WITHIN = "within the seed noise"
ONE_SEED = "one seed: no statement"
NO_SEED = "no seed in common: no statement"


def student(n: int) -> float:
    """Student's quantile for a two-sided 95 % interval of the mean of ``n`` numbers."""
    return float(stdtrit(n - 1, 0.975))


@dataclass(frozen=True)
class Spread:
    """The mean and the sample standard deviation of some numbers, one per seed."""

    values: tuple[float, ...]

    @property
    def n(self) -> int:
        """The number of values."""
        return len(self.values)

    @property
    def mean(self) -> float:
        """The mean of at least one number."""
        return statistics.fmean(self.values)

    @property
    def std(self) -> float:
        """The standard deviation of at least two numbers, with n - 1 in the denominator."""
        return statistics.stdev(self.values)

    def text(self, sign: str = "") -> str:
        """Prints ``38.91 ± 0.42 (3)``, ``38.91 (1)`` or ``-``; `sign` as in `measured`."""
        if not self.n:
            return NOTHING
        deviation = f" ± {self.std:.2f}" if self.n > 1 else ""
        return f"{measured(self.mean, sign)}{deviation} ({self.n})"

    @property
    def verdict(self) -> str:
        """Whether differences are more than noise."""
        if self.n < 2:
            return ONE_SEED if self.n else NO_SEED
        noise = student(self.n) * self.std / math.sqrt(self.n)
        return ABOVE if self.mean > noise else BELOW if self.mean < -noise else WITHIN


def spread(values: Iterable[float]) -> Spread:
    """The spread of numbers, one per seed."""
    return Spread(tuple(float(value) for value in values))


def paired(values: Mapping[int, float], baseline: Mapping[int, float]) -> Spread:
    """The differences to a baseline over the seeds that both have.

    Args:
        values: numbers by seed.
        baseline: the baseline's numbers by seed.
    """
    return spread(values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys()))


@dataclass(frozen=True, kw_only=True)
class Gain:
    """The gain of a label of the last axis over the baseline, in one group, by one measure."""

    group: Labels
    label: str
    measure: str
    differences: Spread
    paper: float | None


@dataclass(frozen=True, kw_only=True)
class Gains:
    """The comparisons of an experiment with its baseline, as a report shows them."""

    title: str
    table: Markup
    counts: list[dict[str, Any]]  # how many rows gain, for each label that has several


def compare(
    title: str,
    runs: Runs,
    measures: Mapping[str, Measure],
    printed: Callable[[Labels, str], float | None],
    names: Mapping[str, str] | None = None,
    labels: Sequence[str] = (),
) -> Gains | None:
    """Compares the labels of the last axis with the baseline, seed by seed.

    Args:
        title: the heading of the table.
        runs: the results of the experiment.
        measures: what is compared, by name.
        printed: (cell, name of the measure) -> the paper's number.
        names: the names of several measures in a column of their own.
        labels: the labels to compare; all by default.

    Returns:
        None if the experiment has no baseline, or nothing was run that could be compared.
    """
    baseline = runs.experiment.baseline
    if not baseline:
        return None
    variants = [baseline, *(label for label in runs.variants if label != baseline)]
    # The paper's plain method may be another one than our baseline.
    cells = itertools.product(variants, runs.groups, measures)
    in_paper = (label for label, group, name in cells if printed((*group, label), name) is not None)
    reference = next(in_paper, "")
    rows = []
    compared = labels or variants[1:]
    for group, label, name in itertools.product(runs.groups, compared, measures):
        values = runs.values((*group, label), measures[name])
        base = runs.values((*group, baseline), measures[name])
        if values and base and label != baseline:
            more = printed((*group, label), name)
            less = printed((*group, reference), name) if label != reference else None
            difference = None if more is None or less is None else float(more - less)
            rows.append(
                Gain(
                    group=group,
                    label=label,
                    measure=name,
                    differences=paired(values, base),
                    paper=difference,
                )
            )
    if not rows:
        return None
    counted = [
        [row for row in rows if row.label == label and row.differences.n] for label in variants
    ]
    several = [some for some in counted if len({row.group for row in some}) > 1]
    return Gains(
        title=title,
        table=_gain_table(runs, rows, reference, names=names),
        counts=[_count(some, baseline) for some in several],
    )


def _count(rows: Sequence[Gain], baseline: str) -> dict[str, Any]:
    """Counts the rows of one label by verdict, and names those with more seeds than most."""
    verdicts = Counter(row.differences.verdict for row in rows)
    names = {ABOVE: ABOVE, WITHIN: "within it", BELOW: "lower beyond it"}
    if verdicts[ONE_SEED]:
        names[ONE_SEED] = "with one seed only"
    seeds = Counter(row.differences.n for row in rows if row.differences.n > 1)
    usual = max(seeds, key=lambda n: seeds[n], default=math.inf)
    more_seeds = [row for row in rows if row.differences.n > usual]
    return {
        "label": rows[0].label,
        "baseline": baseline,
        "rows": len(rows),
        "positive": sum(row.differences.mean > 0 for row in rows),
        "verdicts": ", ".join(f"{verdicts[verdict]} {name}" for verdict, name in names.items()),
        "more_seeds": ", ".join(
            f"{' / '.join(row.group)} ({row.differences.n} instead of {usual})"
            for row in more_seeds
        ),
    }


def _gain_table(
    runs: Runs, rows: Sequence[Gain], reference: str, names: Mapping[str, str] | None
) -> Markup:
    axes = list(runs.experiment.axes)
    in_paper = any(row.paper is not None for row in rows)
    head = [*axes, f"difference to {runs.experiment.baseline}", "verdict", "range"]
    if names:
        head.insert(len(axes), "measure")
    if in_paper:
        head.append(f"the paper's difference to {reference}")
    lines = []
    for row in rows:
        values = row.differences.values
        ends = f"{measured(min(values), '+')} to {measured(max(values), '+')}" if values else ""
        verdict = row.differences.verdict
        line = [
            *row.group,
            row.label,
            row.differences.text("+"),
            strong(verdict) if verdict in (ABOVE, BELOW) else verdict,
            ends if len(values) > 1 else NOTHING,
        ]
        if names:
            line.insert(len(axes), names[row.measure])
        if in_paper:
            line.append(measured(row.paper, "+"))
        lines.append(line)
    return table(head, lines, labels=len(axes) + bool(names))
