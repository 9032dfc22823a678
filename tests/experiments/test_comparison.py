import numpy as np
import pytest
from scipy.stats import ttest_rel

from fedx_pl.experiments.comparison import (
    ABOVE,
    BELOW,
    NO_SEED,
    ONE_SEED,
    WITHIN,
    paired,
    spread,
    student,
)


def test_a_spread_is_mean_and_sample_deviation_with_the_number_of_seeds():
    """-.42, 0, .42 from the mean: the variance is 2 x .1764 / (3 - 1) = .42 squared."""
    assert spread([38.49, 38.91, 39.33]).text() == "38.91 ± 0.42 (3)"
    assert spread([38.91]).text() == "38.91 (1)"
    assert spread([]).text() == "-"


def test_gains_have_a_sign():
    assert spread([1.0, 2.0]).text("+") == "+1.50 ± 0.71 (2)"


def test_students_quantiles_are_the_tables():
    """Printed tables, 97.5 %: 12.706 for one degree of freedom, 4.303 for two, 2.776 for four."""
    assert [round(student(n), 3) for n in (2, 3, 5)] == [12.706, 4.303, 2.776]


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([2, 3, 4], ABOVE),  # std 1, standard error 1/sqrt(3) = .577, times 4.303 = 2.484 < 3
        ([-2, -3, -4], BELOW),
        ([1, 2, 3], WITHIN),  # the same noise, 2.484 > 2
        ([1.0, 1.2], WITHIN),  # std .1414, standard error .1, times 12.706 = 1.27 > 1.1
        ([1.0, 1.1], ABOVE),  # half of that noise, .635 < 1.05
        ([0, 0, 0], WITHIN),
        ([5], ONE_SEED),
        ([], NO_SEED),
    ],
)
def test_a_verdict_needs_more_than_students_t_standard_errors(differences, verdict):
    assert spread(differences).verdict == verdict


def test_the_verdict_is_that_of_a_paired_t_test_at_95_percent():
    rng = np.random.default_rng(0)
    verdicts = set()
    for _ in range(200):
        seeds = range(rng.integers(2, 6))
        plain = {seed: rng.normal(40, 2) for seed in seeds}
        other = {seed: value + rng.normal(1, 0.7) for seed, value in plain.items()}
        verdict = paired(other, plain).verdict
        p = ttest_rel(list(other.values()), list(plain.values())).pvalue
        assert (verdict == WITHIN) == (p >= 0.05)
        verdicts.add(verdict)
    assert {WITHIN, ABOVE} <= verdicts


def test_only_seeds_that_both_have_are_paired():
    """Seed 1: 3 - 1 = 2; seed 2: 7 - 4 = 3; seeds 0 and 9 stand alone."""
    assert paired({1: 3.0, 2: 7.0, 9: 99.0}, {0: 50.0, 2: 4.0, 1: 1.0}).values == (2.0, 3.0)
