"""A process that has everything imported and forks a child for each run it is asked for.

Starting one costs nothing.

It reads JSON lines, ``{"words": [...], "fault": {"call": "fsync", "number": 7, "how": "kill"} or
null}``, answers each with the child's process id, and with its exit status once it has ended
(negative: killed by that signal). With a fault, the child is killed (or its disk is full) at the
given call of `os.fsync` or `os.replace`, before or after it happens; with ``"file"``, only calls
whose last argument ends so are counted.
"""

import errno
import json
import os
import signal
import sys
from typing import Any

import torch
from helpers import THREADS, fitted

from fedx_pl.cli.stopping import Stopped, stopped_by_signals
from fedx_pl.config.compose import compose
from fedx_pl.errors import UserError


def break_at(fault: dict[str, Any]) -> None:
    """Makes the n-th call of a function in `os` the child's last, or fail as on a full disk."""
    real, calls = getattr(os, fault["call"]), 0

    def broken(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += str(arguments[-1]).endswith(fault.get("file", ""))
        if calls != fault["number"]:
            return real(*arguments, **options)
        if fault["how"] == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        if fault["how"] == "kill after":
            real(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    setattr(os, fault["call"], broken)


def child(words: list[str], fault: dict[str, Any] | None) -> int:
    if fault:
        break_at(fault)
    try:
        with stopped_by_signals():
            fitted(compose(words))
    except Stopped:
        return 3
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 4
    return 0


def main() -> None:
    torch.set_num_threads(THREADS)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = child(order["words"], order["fault"])
            finally:
                os._exit(status)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
