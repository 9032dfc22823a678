"""A site's log of tracebacks, bounded in size, since a coordinator may cause faults."""

import time
import traceback
from pathlib import Path

from fedx_pl.files import make_private, private_file

MAX_LOG = 1_000_000  # bytes


def log_fault(log: Path, error: BaseException) -> str:
    """Writes the traceback of an error to a log that only its owner can read.

    Args:
        log: the file. When it is half full, it begins anew.
        error: the error.

    Returns:
        Where the traceback is, or why it is not there, for a line of output.
    """
    half = MAX_LOG // 2
    trace = "".join(traceback.format_exception(error)).encode(errors="replace")[-half:]
    try:
        make_private(log.parent)
        mode = "ab" if log.exists() and log.stat().st_size < half else "wb"
        with open(log, mode, opener=private_file) as file:
            file.write(time.strftime("%Y-%m-%d %H:%M:%S\n").encode() + trace)
    except OSError as failure:
        return f"{log} cannot be written ({failure.strerror})"
    return f"{log} tells more"
