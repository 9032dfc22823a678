"""The question before hours of training without a GPU, for one run and for a sweep."""

import sys

from fedx_pl.errors import UserError
from fedx_pl.printing import duration

LONG_SECONDS = 3600.0  # No question about anything shorter.


def confirm(seconds: float | None, smaller: str) -> None:
    """Asks whether to train the paper's setting on the CPU if that takes long.

    Args:
        seconds: the expected time; None if it is not known, which counts as long.
        smaller: what to type for something quicker, and what that gives.

    Raises:
        UserError: the answer is no, or nobody can be asked.
    """
    if seconds is not None and seconds <= LONG_SECONDS:
        return
    if sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty():
        print("Train on the CPU anyway? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
        raise UserError(f"nothing was started; type {smaller}")
    time = "weeks" if seconds is None else f"about {duration(seconds)}"
    raise UserError(
        f"profile=paper takes {time} here, without a GPU; add --yes to train anyway "
        f"(make: ARGS=--yes), or type {smaller}"
    )
