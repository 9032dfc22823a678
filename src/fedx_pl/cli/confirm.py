"""The question before long work without a GPU, the same for one run and for a sweep."""

import sys

from fedx_pl.callbacks.progress import duration
from fedx_pl.errors import UserError

LONG_SECONDS = 3600.0  # Shorter work is not asked about.


def confirm(seconds: float | None, smaller: str) -> None:
    """Asks whether to train the paper's setting on the CPU, if that is long.

    Args:
        seconds: expected; None if nobody knows, which counts as long.
        smaller: what to type for something quicker, and what that is.

    Raises:
        UserError: the answer is no, or nobody can be asked.
    """
    if seconds is not None and seconds <= LONG_SECONDS:
        return
    if sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty():
        print("Train on the CPU all the same? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
        raise UserError(f"nothing was started; type {smaller}")
    time = "weeks" if seconds is None else f"about {duration(seconds)}"
    raise UserError(
        f"profile=paper takes {time} here, without a GPU; add --yes to train all the same "
        f"(make: ARGS=--yes), or type {smaller}"
    )
