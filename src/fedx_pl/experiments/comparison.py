"""Numbers over seeds: their spread, and whether a difference is more than the seeds' noise."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scipy.special import stdtrit

# "Below the noise" would read as "smaller than it".
ABOVE, BELOW, WITHIN = (
    "above the seed noise",
    "lower, beyond the seed noise",
    "within the seed noise",
)
ONE_SEED, NO_SEED = "one seed: no statement", "no seed in common: no statement"
RULE = (
    "A number is the mean ± the sample standard deviation over the seeds, with the number of seeds in brackets; a seed "
    "draws the images (where not all are used), the split, the initial weights and the batches. A difference is taken "
    "seed by seed, over the seeds that both have. It is called above the seed noise if its mean is more than t "
    "standard errors above zero, and lower, beyond the seed noise, if it is as far below; t is Student's quantile for "
    "a two-sided test at 95 %: {} for two seeds, {} for three, {} for five. Each row is tested by itself, not "
    "corrected for the number of rows. With few seeds the rule is strict: within the seed noise does not mean that "
    "there is no difference. One seed allows no statement. All this holds for seeds that were chosen before looking: a "
    "row that got more seeds because the first left it open reaches a verdict more easily."
)


def rule() -> str:
    """How a verdict is reached, in words."""
    return RULE.format(*(f"{student(n):.2f}" for n in (2, 3, 5)))


def student(n: int) -> float:
    """Student's quantile for a two-sided 95 % interval of the mean of ``n`` numbers."""
    return float(stdtrit(n - 1, 0.975))


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation of some numbers; one number has no deviation, none has no mean."""

    values: tuple[float, ...]

    @property
    def n(self) -> int:
        """How many numbers."""
        return len(self.values)

    @property
    def mean(self) -> float:
        """Of the numbers."""
        return statistics.fmean(self.values)

    @property
    def std(self) -> float:
        """With n - 1 in the denominator: for at least two numbers."""
        return statistics.stdev(self.values)

    def text(self, sign: str = "") -> str:
        """``38.91 ± 0.42 (3)``, ``38.91 (1)`` or ``-``; with ``+`` as `sign` gains have theirs."""
        if not self.n:
            return "-"
        deviation = f" ± {self.std:.2f}" if self.n > 1 else ""
        return f"{decimal(self.mean, sign)}{deviation} ({self.n})"

    @property
    def verdict(self) -> str:
        """For differences: whether they are more than noise."""
        if self.n < 2:
            return ONE_SEED if self.n else NO_SEED
        noise = student(self.n) * self.std / math.sqrt(self.n)
        return ABOVE if self.mean > noise else BELOW if self.mean < -noise else WITHIN


def spread(values: Iterable[float]) -> Spread:
    """Of numbers, one per seed."""
    return Spread(tuple(values))


def paired(values: Mapping[int, float], baseline: Mapping[int, float]) -> Spread:
    """The differences to a baseline over the seeds that both have.

    Args:
        values: by seed.
        baseline: by seed.
    """
    return spread(values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys()))


def decimal(value: float, sign: str = "") -> str:
    """Two digits; nothing is not ``-0.00``."""
    return f"{round(value, 2) + 0.0:{sign}.2f}"
