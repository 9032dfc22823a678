"""What no value of a configuration may be, whatever its key: one check for all keys, after those of each group.

Objects made in Python are not checked here: whoever writes a program may know better.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from fedx_pl.errors import UserError, has_controls, readable, wrong_type

MAX_NAME = (
    150  # bytes: with seed, hash and suffix it is the name of a file, for which systems have 255
)
_LONG = 2**63 - 1


class Range(NamedTuple):
    """From the lowest to the highest value of a key."""

    low: float = 0
    high: float = 10**9


# Those of other keys are the defaults of `Range`; many groups have narrower ones, which they check by themselves.
_RANGES = {
    "seed": Range(-_LONG, _LONG),
    "data.image_size": Range(high=2**16),
    "data.test_fraction": Range(high=1),
    "data.value_range": Range(low=-(10**9)),
    "data.mean": Range(low=-(10**9)),
    "data.workers": Range(high=1024),
    "augment.pad": Range(high=2**16),
    "augment.size": Range(high=2**16),
    "backbone.width": Range(high=2**16),
    "aggregate.max_growth": Range(high=math.inf),  # never
    "health.max_growth": Range(high=math.inf),
    "health.max_uniformity": Range(low=-(10**9)),
    "engine.workers": Range(high=1024),
    "engine.gpus_per_worker": Range(low=-1, high=1024),
    "run.threads": Range(high=1024),
}
_OF_OTHERS = Range(-_LONG, _LONG)  # keys of a part that is not ours, which knows what they mean


def require_sensible(
    values: Mapping[str, Any], usual: Mapping[str, Any], ours: Collection[str]
) -> None:
    """Raises a `UserError` that names the key, its value and what to type.

    Args:
        values: of a configuration, by dotted key.
        usual: the defaults; what is as usual is not looked at.
        ours: the keys whose meaning is known here.
    """
    for key, value in values.items():
        if usual.get(key, ...) == value:
            continue
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, list | dict):
                raise UserError(wrong_type(key, value, usual.get(key)))
            if isinstance(item, str) and has_controls(item):
                raise UserError(
                    f"{key}={item!r} holds a character that cannot be printed; type it without"
                )
            if isinstance(item, str) and item.encode(errors="replace").decode() != item:
                raise UserError(
                    f"{key}={readable(item)} is not UTF-8, which TensorBoard cannot keep; rename it first"
                )
            if isinstance(item, int | float) and not isinstance(item, bool):
                allowed = _RANGES.get(key, Range()) if key in ours else _OF_OTHERS
                _require_within(key, item, allowed, usual.get(key))
    require_name(values["name"])


def require_name(name: str) -> None:
    """Raises a `UserError` unless a run's name can be part of a file's."""
    long = len(name.encode(errors="replace")) > MAX_NAME
    if long or any(mark in name for mark in "/\\") or name in (".", ".."):
        what = f"has more than {MAX_NAME} bytes" if long else "is not the name of one folder"
        raise UserError(
            f"name={name[:MAX_NAME]} {what}; type letters, digits, dots and dashes, e.g. name=my-run"
        )


def _require_within(key: str, value: float, allowed: Range, usual: object) -> None:
    if allowed.low <= value <= allowed.high:  # NaN is not.
        return
    number = isinstance(usual, int | float) and not math.isnan(usual)
    example = f", e.g. {key}={usual}" if number else ""
    text = (
        f"{value:.6g}"
        if isinstance(value, float)
        else f"{value}"
        if abs(value) < 10**30
        else "a huge number"
    )
    low, high = (end if math.isinf(end) else int(end) for end in allowed)
    raise UserError(f"{key}={text} is out of range; type a number from {low} to {high}{example}")
