"""Bounds on the values of a configuration that hold for all keys.

The fields of options have narrower bounds of their own. Objects made in Python are not checked
here.
"""

import math
from collections.abc import Mapping
from typing import Any

from fedx_pl.errors import UserError, has_controls, readable, wrong_type
from fedx_pl.options import Bounds

MAX_NAME = 150  # bytes: with seed, hash and suffix it names a file, for which systems have 255
_LOWEST, _HIGHEST = 0, 10**9  # of a number whose bounds do not say otherwise
_LONG = 2**63 - 1
_FOREIGN = Bounds(at_least=-_LONG, at_most=_LONG)  # of a part that is not ours


def require_sensible(
    values: Mapping[str, Any], usual: Mapping[str, Any], bounds: Mapping[str, Bounds]
) -> None:
    """Raises a `UserError` that names the key, its value and what to type.

    Args:
        values: of a configuration, by dotted key.
        usual: the defaults; a value that is the default is not looked at.
        bounds: of the keys whose meaning is known here.
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
                    f"{key}={readable(item)} is not UTF-8, which TensorBoard cannot keep; "
                    f"rename it first"
                )
            if isinstance(item, int | float) and not isinstance(item, bool):
                _require_within(key, item, bounds.get(key, _FOREIGN), usual.get(key))
    require_name(values["name"])


def require_name(name: str) -> None:
    """Raises a `UserError` unless the name of a run can be part of the name of a file."""
    long = len(name.encode(errors="replace")) > MAX_NAME
    if long or any(mark in name for mark in "/\\") or name in (".", ".."):
        what = f"has more than {MAX_NAME} bytes" if long else "is not the name of one folder"
        raise UserError(
            f"name={name[:MAX_NAME]} {what}; type letters, digits, dots and dashes, "
            f"e.g. name=my-run"
        )


def _require_within(key: str, value: float, bounds: Bounds, usual: object) -> None:
    low = next((end for end in (bounds.at_least, bounds.above) if end is not None), _LOWEST)
    high = next((end for end in (bounds.at_most, bounds.below) if end is not None), _HIGHEST)
    if low <= value <= high or value in bounds.also:  # NaN is not.
        return
    number = isinstance(usual, int | float) and not math.isnan(usual)
    example = f", e.g. {key}={usual}" if number else ""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if abs(value) >= 10**30 and isinstance(value, int):
        text = "a huge number"
    raise UserError(
        f"{key}={text} is out of range; type a number from {low:.0f} to {high:.0f}{example}"
    )
