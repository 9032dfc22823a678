"""Text of numbers and settings for tables, summaries, reports and progress."""

from typing import Any

NOTHING = "-"  # printed for what was not measured
_UNITS = ("bytes", "kB", "MB", "GB", "TB")


def measured(value: float | None, sign: str = "") -> str:
    """Prints a measured number: a fraction with two digits, a count with thousands separators.

    Args:
        value: a percentage, a loss or a count; None for what was not measured.
        sign: ``+`` to print the sign of a positive difference as well.
    """
    if value is None:
        return NOTHING
    if isinstance(value, int):
        return f"{value:{sign},}"
    return f"{round(value, 2) + 0.0:{sign}.2f}"  # adding zero makes 0.00 of -0.00


def duration(seconds: float) -> str:
    """Prints a time: ``75`` -> ``1 min 15 s``; coarser for longer times."""
    seconds = round(seconds)  # First, or there would be minutes of 60 seconds.
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    if seconds < 86400:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"
    return f"{seconds / 86400:.1f} days"


def hours(seconds: float) -> str:
    """Prints computing time in hours, or in minutes below one hour."""
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.1f} minutes"


def byte_size(count: float) -> str:
    """Prints a number of bytes: ``2_500_000`` -> ``2.5 MB``."""
    power = 0
    while abs(count) >= 999.95 and power < len(_UNITS) - 1:
        count /= 1000
        power += 1
    return f"{count:.1f} {_UNITS[power]}" if power else f"{count:.0f} {_UNITS[0]}"


def setting(value: Any) -> str:
    """Prints the value of a setting as it is typed after ``key=``."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(map(setting, value))}]" if isinstance(value, list | tuple) else str(value)


def plural(word: str, count: int) -> str:
    """``run`` for one, ``runs`` for any other number."""
    return word if count == 1 else f"{word}s"
