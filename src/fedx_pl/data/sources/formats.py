"""Readers of files that torchvision has no class for: CIFAR-10's binary batches, and packed files.

Every reader raises a `FormatError` with a one-line reason, whatever is wrong with the file.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

import numpy as np

from fedx_pl.errors import one_line

# The largest official member is CIFAR-100's train batch, 155 MB. More is a decompression bomb.
MAX_MEMBER_BYTES = 512 * 2**20
_RECORD_BYTES = 1 + 3 * 32 * 32  # of CIFAR-10's binary batches: a label, then planar pixels


class FormatError(Exception):
    """The file is not what its name says; the message is one line."""


def read_tar(path: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Reads members of a tar archive into memory, by base name.

    Nothing is extracted, so a hostile archive has no path to traverse and no link to follow.

    Args:
        path: a ``.tar``, ``.tar.gz`` or ``.tgz`` file.
        names: base names of the wanted members.

    Returns:
        The content by base name, without names that are not in the archive.
    """
    wanted = set(names)
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                if name not in wanted or name in contents or not member.isreg():
                    continue
                if member.size > MAX_MEMBER_BYTES:
                    raise FormatError(f"{path.name}: {name} is too large ({member.size} bytes)")
                stream = archive.extractfile(member)
                content = stream.read() if stream else b""
                if len(content) != member.size:
                    raise FormatError(f"{path.name}: truncated in {name}")
                contents[name] = content
                if len(contents) == len(wanted):
                    break
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise FormatError(f"{path.name}: broken archive ({one_line(error)})") from error
    return contents


def read_files(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Reads the files of an extracted archive; the counterpart of `read_tar`."""
    try:
        return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    except OSError as error:
        raise FormatError(f"{folder.name}: {one_line(error)}") from error


def read_unzipped(path: Path) -> bytes:
    """Reads a file, and unpacks it if it is gzipped."""
    try:
        with path.open("rb") as raw:
            is_gzip = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_gzip else path.open("rb") as stream:
            return stream.read(MAX_MEMBER_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        raise FormatError(f"{path.name}: {one_line(error)}") from error


def cifar_binary(files: Mapping[str, bytes], names: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
    """Parses CIFAR-10's binary batches.

    Args:
        files: content by name.
        names: the batches of one split, in order.

    Returns:
        Images, uint8 ``(N, 32, 32, 3)``, and labels, int64 ``(N,)``.
    """
    images = []
    labels = []
    for name in names:
        content = np.frombuffer(required(files, name), np.uint8)
        if content.size == 0 or content.size % _RECORD_BYTES:
            raise FormatError(
                f"{name}: {content.size} bytes are not a whole number of "
                f"{_RECORD_BYTES}-byte records"
            )
        records = content.reshape(-1, _RECORD_BYTES)
        images.append(records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        labels.append(records[:, 0].astype(np.int64))
    return np.ascontiguousarray(np.concatenate(images)), np.concatenate(labels)


def required(files: Mapping[str, bytes], name: str) -> bytes:
    """The content of a file that must be there."""
    if name not in files:
        raise FormatError(f"{name} is missing")
    return files[name]
