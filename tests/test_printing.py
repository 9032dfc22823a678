"""One printer for numbers and settings: what tables, summaries and progress show."""

import pytest

from fedx_pl.printing import byte_size, duration, hours, measured, plural, setting


@pytest.mark.parametrize(
    ("value", "sign", "text"),
    [
        (38.914, "", "38.91"),
        (-0.001, "", "0.00"),
        (-0.001, "+", "+0.00"),
        (-0.006, "+", "-0.01"),
        (1.5, "+", "+1.50"),
        (1234567, "", "1,234,567"),
        (0, "", "0"),
        (None, "", "-"),
        (None, "+", "-"),
    ],
)
def test_a_measured_number(value: float | None, sign: str, text: str) -> None:
    assert measured(value, sign) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s"),
        (59.6, "1 min 0 s"),
        (75, "1 min 15 s"),
        (3600, "1 h 0 min"),
        (86399, "23 h 59 min"),
        (129600, "1.5 days"),
    ],
)
def test_a_time(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_computing_time() -> None:
    assert hours(90) == "1.5 minutes"
    assert hours(92520) == "25.7 hours"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (2_500_000, "2.5 MB"),
        (999_960_000, "1.0 GB"),
        (5e15, "5000.0 TB"),
    ],
)
def test_a_number_of_bytes(count: float, text: str) -> None:
    assert byte_size(count) == text


@pytest.mark.parametrize(
    ("value", "text"), [(True, "true"), (0.5, "0.5"), ([1, False], "[1,false]"), ("a", "a")]
)
def test_a_setting_is_printed_as_it_is_typed(value: object, text: str) -> None:
    assert setting(value) == text


def test_a_plural() -> None:
    assert [plural("run", count) for count in (0, 1, 2)] == ["runs", "run", "runs"]
