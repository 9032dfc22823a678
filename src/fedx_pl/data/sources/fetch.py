"""Downloads official files from torchvision's addresses.

On a closed network this gives up within seconds, with a one-line `FetchError`.
"""

from __future__ import annotations

import errno
import os
import socket
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedx_pl.errors import UserError, one_line

PROBE_SECONDS = 5.0
STALL_SECONDS = 15.0  # a download that receives nothing for so long has failed


class FetchError(Exception):
    """This way of getting the files failed; the message is one line."""


def download(files: Sequence[tuple[str, str, str]], folder: Path) -> None:
    """Downloads files with torchvision into ``folder``, all of them or none.

    Args:
        files: ``(url, file name, md5)`` of each, from torchvision's classes.
        folder: created if needed.

    Raises:
        FetchError: the network or the content is at fault.
        UserError: the disk is full.
    """
    from torchvision.datasets.utils import download_url

    for url, _, _ in files:
        _probe(url)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Not straight into their place: an interrupted download must not look like a file that
        # the user put there.
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as part, _stall_timeout():
            for url, name, md5 in files:
                download_url(url, part, name, md5)
            for _, name, _ in files:
                os.replace(Path(part) / name, folder / name)
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"the disk is full: no room in {folder}; free some, or set data.root=DIR"
            ) from error
        raise FetchError(_reason(error)) from error


def _probe(url: str) -> None:
    """Checks that ``url`` answers within ``PROBE_SECONDS``.

    A socket timeout alone is not enough: it does not cover a name server that never answers. So
    the request runs in a daemon thread, which is left behind if it hangs. It is made by urllib,
    as torchvision's are, so the user's proxy settings hold.

    Raises:
        FetchError: no answer, or an answer that is not a success.
    """
    failure: list[BaseException] = []

    def request() -> None:
        try:
            # The headers are enough; the body is never read.
            with urllib.request.urlopen(url, timeout=PROBE_SECONDS):
                pass
        except Exception as error:
            failure.append(error)

    thread = threading.Thread(target=request, name="fedx-pl-probe", daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    if thread.is_alive():
        raise FetchError(f"no answer within {PROBE_SECONDS:g} s from {url}")
    if failure:
        raise FetchError(f"{_reason(failure[0])} ({url})")


@contextmanager
def _stall_timeout() -> Iterator[None]:
    # torchvision takes no timeout, so only the process-wide default remains.
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(STALL_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _reason(error: BaseException) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        reason = error.reason
        return one_line(reason) if isinstance(reason, BaseException) else str(reason)
    return one_line(error)
