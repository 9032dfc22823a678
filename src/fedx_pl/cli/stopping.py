"""SIGTERM and SIGUSR1, which clusters send before they end a job, stop a run with exit code 0.

Nothing needs to be saved then: every finished client is on the disk already, and the client that is
training would start again in any case.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Windows does not have all of them.
SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]


class Stopped(BaseException):
    """A signal asked to stop; the message is its name. Like `KeyboardInterrupt`, no `Exception`."""


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Makes the first of `SIGNALS` raise `Stopped`, and ignores further ones."""

    def stop(number: int, _: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(signal.Signals(number).name)

    before = {each: signal.signal(each, stop) for each in SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
