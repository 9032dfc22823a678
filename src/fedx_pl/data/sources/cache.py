"""Decoded arrays on disk: a folder of ``.npy`` files and a ``manifest.json`` with their hashes.

A cache is complete or absent: it is written beside its place and moved there in one step, and what
it holds is hashed again on every load. Nothing but a cache is ever replaced or removed: its place
may be the user's own folder.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from fedx_pl.data.images import Split
from fedx_pl.errors import UserError, one_line
from fedx_pl.files import private_file, sync_folder, write_atomically

MANIFEST = "manifest.json"
# Larger arrays are mapped instead of read: a folder of images may exceed the memory.
MAP_BYTES = 2**30
_BLOCK = 2**26
_STALE_SECONDS = 24 * 3600
_PARTS = {"arrays", "info"}  # of a manifest, beside its own sha256


class CacheError(Exception):
    """The cache cannot be used; the message is one line."""


@dataclass(frozen=True)
class Cached:
    """The content of a cache.

    Attributes:
        arrays: by file stem.
        hashes: sha256 of each array's bytes, by file stem.
        info: what the writer noted: source, class names ...
    """

    arrays: dict[str, np.ndarray]
    hashes: dict[str, str]
    info: dict[str, Any] = field(default_factory=dict)


def sha256(array: np.ndarray) -> str:
    """Hashes the bytes of an array in C order."""
    digest = hashlib.sha256()
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    # Block by block: a memory map must not become resident as a whole.
    for start in range(0, flat.size, _BLOCK):
        digest.update(flat[start : start + _BLOCK].data)
    return digest.hexdigest()


def fingerprint(hashes: Mapping[str, str]) -> str:
    """Makes a short hash of content whose parts have these hashes."""
    return hashlib.sha256(json.dumps(dict(hashes), sort_keys=True).encode()).hexdigest()[:16]


def fingerprint_of(train: Split, test: Split | None) -> str:
    """The fingerprint of arrays from Python."""
    arrays = {"images": train.images, "labels": train.labels}
    if test is not None:
        arrays |= {"test images": test.images, "test labels": test.labels}
    return fingerprint(
        {
            f"{key} {array.shape}": sha256(array)
            for key, array in arrays.items()
            if array is not None
        }
    )


def read(folder: Path, *, unsigned: bool = False) -> Cached:
    """Loads and verifies a cache.

    Args:
        folder: the cache.
        unsigned: accept one of an older version, whose manifest has no checksum.

    Raises:
        CacheError: it is absent, incomplete or not what was written.
    """
    if not folder.is_dir():
        raise CacheError(f"none in {folder}")
    try:
        manifest = json.loads(_regular(folder / MANIFEST).read_bytes())
        if set(manifest) == _PARTS and not unsigned:
            raise CacheError(f"{folder} is of an older version, without a checksum of its manifest")
        if set(manifest) != _PARTS and manifest["sha256"] != _digest(manifest):
            raise CacheError(f"{folder / MANIFEST} has changed since it was written")
        arrays = {}
        hashes = {}
        for name, entry in manifest["arrays"].items():
            path = _regular(folder / f"{name}.npy")
            # Before memory is taken: a damaged header may ask for any amount of it.
            if _header_of(path) != (entry["shape"], entry["dtype"]):
                raise CacheError(f"{path} has changed since it was written")
            # "c", copy on write: torch wants writable memory, the verified file must stay as it is
            arrays[name] = np.load(
                path, mmap_mode="c" if path.stat().st_size > MAP_BYTES else None, allow_pickle=False
            )
            hashes[name] = sha256(arrays[name])
            if hashes[name] != entry["sha256"]:
                raise CacheError(f"{path} has changed since it was written")
        return Cached(arrays, hashes, manifest["info"])
    except (CacheError, MemoryError):
        raise
    except Exception as error:  # numpy and json fed with foreign bytes fail in any way they like
        raise CacheError(f"{folder} is damaged ({one_line(error)})") from error


def _regular(path: Path) -> Path:
    if path.exists() and not path.is_file():
        raise CacheError(f"{path} is not a file")  # reading a pipe or a device may not end
    return path


def _header_of(path: Path) -> tuple[list[int], str]:
    """Shape and type of the array in a file that `ArrayWriter` wrote."""
    with open(path, "rb") as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise CacheError(f"{path} has changed since it was written")
        shape, by_columns, dtype = np.lib.format.read_array_header_1_0(file)
    return list(shape), f"{dtype} by columns" if by_columns else str(dtype)


def _digest(manifest: Mapping[str, Any]) -> str:
    """The sha256 of a manifest's content."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class ArrayWriter:
    """Appends blocks to a ``.npy`` file whose number of rows is not known in advance.

    A memory map would be simpler, but writing one on a full disk ends the process with a signal; a
    write fails.
    """

    def __init__(
        self, path: Path, row_shape: tuple[int, ...], dtype: str, *, private: bool = False
    ) -> None:
        self.path = path
        self.row_shape = row_shape
        self.dtype = np.dtype(dtype)
        self.rows = 0
        self._opener = private_file if private else None
        self._digest = hashlib.sha256()

    def __enter__(self) -> ArrayWriter:
        self._file: BinaryIO = open(self.path, "wb", opener=self._opener)
        self._header()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._file:
            if kind is None:
                end = self._file.tell()
                self._file.seek(0)
                self._header()  # numpy pads headers so that the first dimension may grow in place
                self._file.seek(end)
                self._file.flush()
                os.fsync(self._file.fileno())

    def append(self, block: np.ndarray) -> None:
        """Writes rows, ``(n, *row_shape)``."""
        if block.shape[1:] != self.row_shape or block.dtype != self.dtype:
            raise ValueError(
                f"rows of {block.dtype} {block.shape[1:]}, expected {self.dtype} {self.row_shape}"
            )
        content = np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
        self._file.write(content)
        self._digest.update(content)
        self.rows += len(block)

    @property
    def entry(self) -> dict[str, Any]:
        """The entry of this array in the manifest."""
        return {
            "shape": [self.rows, *self.row_shape],
            "dtype": str(self.dtype),
            "sha256": self._digest.hexdigest(),
        }

    def _header(self) -> None:
        header = {
            "descr": self.dtype.str,
            "fortran_order": False,
            "shape": (self.rows, *self.row_shape),
        }
        np.lib.format.write_array_header_1_0(self._file, header)


@contextmanager
def replacing(folder: Path, *, private: bool = False) -> Iterator[Path]:
    """Yields an empty folder, and moves it to ``folder`` if the block ends without an error.

    Args:
        folder: the place.
        private: for this user alone.

    Raises:
        UserError: the disk is full.
        CacheError: ``folder`` holds something else than a cache, which is left as it is.
    """
    fresh = folder.parent / f"{_beside(folder)}{uuid.uuid4().hex}"
    if os.path.lexists(folder) and not _is_cache(folder):
        raise CacheError(
            f"{folder} holds something else than a cache, and is left as it is; move or delete it "
            f"yourself"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        fresh.mkdir(mode=0o700 if private else 0o777)
        yield fresh
        sync_folder(fresh)
        if folder.exists():
            # A folder that is not empty cannot be replaced in one step.
            os.replace(folder, f"{fresh}-old")
        try:
            os.replace(fresh, folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise  # else: another process was faster and wrote the same content
        sync_folder(folder.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"the disk is full: no room in {folder.parent}; free some, or set data.cache=DIR"
            ) from error
        raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(f"{fresh}-old", ignore_errors=True)


def write(
    folder: Path,
    arrays: Mapping[str, np.ndarray],
    info: Mapping[str, Any],
    *,
    private: bool = False,
) -> None:
    """Writes arrays as a new cache, replacing an old one; ``private``: for this user alone."""
    with replacing(folder, private=private) as fresh:
        entries = {}
        for name, array in arrays.items():
            file = fresh / f"{name}.npy"
            with ArrayWriter(file, array.shape[1:], str(array.dtype), private=private) as writer:
                writer.append(array)
            entries[name] = writer.entry
        write_manifest(fresh, entries, info, private=private)


def write_manifest(
    folder: Path,
    entries: Mapping[str, Mapping[str, Any]],
    info: Mapping[str, Any],
    *,
    private: bool = False,
) -> None:
    """Writes ``manifest.json`` and waits until it is on the disk."""
    # As it is read back.
    manifest = json.loads(json.dumps({"arrays": dict(entries), "info": dict(info)}))
    content = json.dumps(manifest | {"sha256": _digest(manifest)}, indent=1)
    write_atomically(folder / MANIFEST, content.encode(), private=private)


def _is_cache(folder: Path) -> bool:
    """Whether a folder is empty, or holds nothing but arrays and a (maybe damaged) manifest."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    names = {entry.name for entry in folder.iterdir()}
    if not names:
        return True
    if MANIFEST not in names or not all(
        name == MANIFEST or name.endswith(".npy") for name in names
    ):
        return False
    if not (folder / MANIFEST).is_file():
        return False
    content = (folder / MANIFEST).read_bytes()
    arrays = {name.removesuffix(".npy") for name in names - {MANIFEST}}
    missing = [part for part in {*_PARTS, "sha256", *arrays} if f'"{part}"'.encode() not in content]
    return len(missing) <= 1  # A flipped bit may be in one of them.


def _beside(folder: Path) -> str:
    """The start of the names of unfinished folders that are to become ``folder``."""
    return f".fedx-pl-{folder.name}-"


def _sweep(folder: Path) -> None:
    """Removes what killed writers of this cache left behind, long enough ago not to be at work."""
    ours = re.compile(re.escape(_beside(folder)) + "[0-9a-f]{32}(-old)?")
    for left in folder.parent.iterdir():
        with suppress(OSError):  # another process sweeps, too
            if ours.fullmatch(left.name) and time.time() - left.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left)
