"""Options check their bounds; the error names arguments in Python and keys on the command line."""

import math
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest

from fedx_pl import FedXOptions, OptimOptions, SimCLR
from fedx_pl.backbones import resnet10
from fedx_pl.config.build import make_model
from fedx_pl.config.compose import compose
from fedx_pl.errors import UserError
from fedx_pl.options import OptionError, Options, check, option, whole_number


@dataclass(frozen=True, kw_only=True)
class Sample(Options):
    rate: float = option(0.1, "help", above=0, at_most=1)
    count: int = option(3, at_least=0)
    kind: str = option("a", choices=("a", "b"))
    growth: float = option(3.0, above=1, at_most=math.inf, also=(0,))
    shares: list[float] = option([0.5], above=0)
    extra: list[float] = option([], at_least=0)
    free: str = option("")
    plain: int = field(default=1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"rate": 0},
            "rate=0 is not possible; write a number above 0 and of at most 1, e.g. rate=0.1",
        ),
        ({"rate": math.nan}, "rate=nan is not possible"),
        ({"rate": "fast"}, "rate='fast' is not possible"),
        ({"rate": True}, "rate=True is not possible"),
        (
            {"count": -1},
            "count=-1 is not possible; write a whole number of at least 0, e.g. count=3",
        ),
        ({"count": 2.5}, "count=2.5 is not possible; write a whole number"),
        ({"count": None}, "count=None is not possible; write a whole number"),
        ({"kind": "c"}, "kind='c' is not possible; write a or b"),
        ({"growth": 1}, "growth=1 is not possible; write a number above 1 or 0, e.g. growth=3"),
        (
            {"shares": []},
            "shares=[] is not possible; write a list of numbers above 0, e.g. shares=[0.5]",
        ),
        ({"shares": [0.5, 0]}, "shares=[0.5, 0] is not possible"),
        ({"shares": 0.5}, "shares=0.5 is not possible"),
        ({"extra": [-1.0]}, "extra=[-1.0] is not possible"),
    ],
)
def test_a_field_out_of_its_bounds_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as refused:
        Sample(**values)
    assert str(refused.value).startswith(message)
    assert refused.value.name == next(iter(values))
    assert refused.value.owner is Sample


@pytest.mark.parametrize(
    "values",
    [{"rate": 1}, {"growth": 0}, {"growth": math.inf}, {"extra": []}, {"free": "x", "plain": -1}],
)
def test_what_is_within_its_bounds_or_has_none_is_kept(values: dict[str, Any]) -> None:
    sample = Sample(**values)
    assert {name: getattr(sample, name) for name in values} == values


def test_objects_do_not_share_a_list() -> None:
    first, second = Sample(), Sample()
    first.shares.append(1.0)
    assert second.shares == [0.5]


def test_an_argument_is_checked_like_a_field() -> None:
    check("tau", 0.1, example=0.1, above=0)
    with pytest.raises(
        OptionError, match=r"^tau=0 is not possible; write a number above 0, e\.g\. tau=0\.1$"
    ):
        check("tau", 0, example=0.1, above=0)
    assert whole_number("seed", 3, at_least=0) == 3
    with pytest.raises(OptionError, match=r"^seed=True is not possible"):
        whole_number("seed", True, at_least=0)


def test_an_error_survives_pickling() -> None:
    error = OptionError("noise", 1.0, "needs a bound", "{clip}=1 as well", Sample)
    back = pickle.loads(pickle.dumps(error))
    assert str(back) == str(error) == "noise=1.0 needs a bound; write clip=1 as well"
    assert back.owner is Sample


def test_errors_name_arguments_in_python_and_keys_on_the_command_line() -> None:
    with pytest.raises(UserError) as in_python:
        SimCLR(resnet10(4), tau=-1)
    assert str(in_python.value) == "tau=-1 is not possible; write a number above 0, e.g. tau=0.1"
    with pytest.raises(UserError) as typed:
        make_model(compose(["method.tau=0", "backbone.width=4"]), channels=3, image_size=32)
    assert str(typed.value) == (
        "method.tau=0.0 is not possible; type a number above 0, e.g. method.tau=0.1"
    )


@pytest.mark.parametrize(
    ("make", "word", "name", "key"),
    [
        (lambda: OptimOptions(lr=-1), "optim.lr=-1", "lr", "optim.lr"),
        (lambda: FedXOptions(tau=0), "fedx.tau=0", "tau", "fedx.tau"),
        (
            lambda: FedXOptions(warmup=1, local_contrast=0, local_relation=0),
            "",
            "warmup",
            "fedx.warmup",
        ),
        (None, "evaluation.linear.epochs=0", "epochs", "evaluation.linear.epochs"),
        (None, "aggregate=krum", "byzantine", "aggregate.byzantine"),
    ],
)
def test_a_key_is_named_with_its_group(make: Any, word: str, name: str, key: str) -> None:
    if make is not None:
        with pytest.raises(UserError, match=rf"^{name}="):
            make()
    words = [word] if word else ["fedx.warmup=1", "fedx.local_contrast=0", "fedx.local_relation=0"]
    with pytest.raises(UserError, match=rf"^{key}=.* type "):
        compose(words)
