"""SIGTERM and SIGUSR1, by which clusters announce the end of a job: the run stops at once and ends well.

Nothing needs to be saved then: every finished client is on the disk already, and the one that is training would begin
anew in any case.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = [
    getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)
]  # Not all on Windows.


class Stopped(BaseException):
    """Asked to stop; the text is the signal's name. Like `KeyboardInterrupt`, not an `Exception`."""


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Within it, the first of `SIGNALS` raises `Stopped` and further ones are ignored."""

    def stop(number: int, frame: FrameType | None) -> None:
        for one in SIGNALS:
            signal.signal(one, signal.SIG_IGN)
        raise Stopped(signal.Signals(number).name)

    before = {one: signal.signal(one, stop) for one in SIGNALS}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
