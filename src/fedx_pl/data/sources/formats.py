"""Parsers of the official file formats: bytes or paths in, arrays out; no network, no cache, no options.

Every parser raises ``FormatError`` with a one-line reason, whatever is wrong with the file.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import pickle
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import numpy as np
from PIL import Image

# The largest member of an official archive is CIFAR-100's train batch, 155 MB. More is a decompression bomb.
MAX_MEMBER_BYTES = 512 * 2**20


class FormatError(Exception):
    """The file is not what its name says; the message is one line."""


def read_tar(path: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Reads members of a tar archive into memory, by base name.

    Nothing is extracted, so a hostile archive has no path to traverse and no link to follow.

    Args:
        path: a ``.tar``, ``.tar.gz`` or ``.tgz`` file.
        names: base names of the wanted members.

    Returns:
        Content by base name; names that are not in the archive are absent.
    """
    wanted, found = set(names), {}
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                if name not in wanted or name in found or not member.isreg():
                    continue
                if member.size > MAX_MEMBER_BYTES:
                    raise FormatError(f"{path.name}: {name} is too large ({member.size} bytes)")
                stream = archive.extractfile(member)
                content = stream.read() if stream else b""
                if len(content) != member.size:
                    raise FormatError(f"{path.name}: truncated in {name}")
                found[name] = content
                if len(found) == len(wanted):
                    break
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise FormatError(f"{path.name}: broken archive ({one_line(error)})") from error
    return found


def read_files(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Reads the files of an extracted archive; the counterpart of ``read_tar``."""
    try:
        return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    except OSError as error:
        raise FormatError(f"{folder.name}: {one_line(error)}") from error


def cifar_python(
    files: Mapping[str, bytes], names: Iterable[str], label_key: str
) -> tuple[np.ndarray, np.ndarray]:
    """Parses CIFAR's pickled batches.

    Args:
        files: content by name.
        names: the batches of one split, in order.
        label_key: ``"labels"`` (CIFAR-10) or ``"fine_labels"`` (CIFAR-100).

    Returns:
        Images, uint8 ``(N, 32, 32, 3)``, and labels, int64 ``(N,)``.
    """
    images, labels = [], []
    for name in names:
        batch = unpickle(_member(files, name), name)
        if not isinstance(batch, dict) or "data" not in batch or label_key not in batch:
            raise FormatError(f"{name}: no 'data' and '{label_key}' in it")
        images.append(_planar(np.asarray(batch["data"]), name))
        labels.append(_labels(batch[label_key], name))
    return np.concatenate(images), np.concatenate(labels)


def cifar_names(files: Mapping[str, bytes], name: str, key: str) -> tuple[str, ...]:
    """Reads class names from CIFAR's pickled ``meta`` file; empty when the file is absent."""
    if name not in files:
        return ()
    meta = unpickle(files[name], name)
    names = meta.get(key) if isinstance(meta, dict) else None
    if not isinstance(names, list):
        raise FormatError(f"{name}: no '{key}' in it")
    return tuple(str(item) for item in names)


def cifar_binary(files: Mapping[str, bytes], names: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
    """Parses CIFAR-10's binary batches: records of one label byte and 3072 planar pixel bytes.

    Returns:
        Images, uint8 ``(N, 32, 32, 3)``, and labels, int64 ``(N,)``.
    """
    images, labels = [], []
    for name in names:
        content = np.frombuffer(_member(files, name), np.uint8)
        if content.size == 0 or content.size % 3073:
            raise FormatError(
                f"{name}: {content.size} bytes are not a whole number of 3073-byte records"
            )
        records = content.reshape(-1, 3073)
        images.append(_planar(records[:, 1:], name))
        labels.append(records[:, 0].astype(np.int64))
    return np.concatenate(images), np.concatenate(labels)


def png_rows(
    files: Mapping[str, bytes], names: Iterable[str], labels: str
) -> tuple[np.ndarray, np.ndarray]:
    """Parses PNG sheets that hold one 32 x 32 image per row of 1024 RGB pixels, and a JSON list of labels.

    Returns:
        Images, uint8 ``(N, 32, 32, 3)``, and labels, int64 ``(N,)``.
    """
    sheets = []
    for name in names:
        try:
            with Image.open(io.BytesIO(_member(files, name)), formats=["PNG"]) as image:
                if image.width != 1024 or image.mode != "RGB":
                    raise FormatError(
                        f"{name}: expected 1024 RGB pixels per row, found {image.width} {image.mode}"
                    )
                sheets.append(np.asarray(image).reshape(-1, 32, 32, 3))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise FormatError(f"{name}: {one_line(error)}") from error
    try:
        values = json.loads(_member(files, labels))
    except ValueError as error:
        raise FormatError(f"{labels}: {one_line(error)}") from error
    return np.concatenate(sheets), _labels(values, labels)


def svhn_mat(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Parses SVHN's cropped digits: ``X`` ``(32, 32, 3, N)`` and ``y`` ``(N, 1)``, where class 10 is the digit 0.

    Returns:
        Images, uint8 ``(N, 32, 32, 3)``, and labels, int64 ``(N,)``.
    """
    from scipy.io import loadmat  # only SVHN needs scipy's readers

    try:
        content = loadmat(path, variable_names=["X", "y"])
        images, labels = content["X"], content["y"].astype(np.int64).reshape(-1)
    except Exception as error:  # scipy's reader fails with whatever the bytes happen to mean
        raise FormatError(f"{path.name}: not the expected .mat file ({one_line(error)})") from error
    if images.ndim != 4 or images.shape[:3] != (32, 32, 3) or images.dtype != np.uint8:
        raise FormatError(
            f"{path.name}: X is {images.dtype} {images.shape}, expected uint8 (32, 32, 3, N)"
        )
    return np.ascontiguousarray(images.transpose(3, 0, 1, 2)), labels % 10


def idx(path: Path) -> np.ndarray:
    """Parses an idx file of unsigned bytes, gzipped or not; the shape is in its header."""
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            with gzip.open(io.BytesIO(content)) as stream:
                content = stream.read(MAX_MEMBER_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        raise FormatError(f"{path.name}: {one_line(error)}") from error
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise FormatError(f"{path.name}: not an idx file of bytes")
    start = 4 + 4 * content[3]
    shape = tuple(int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4))
    if len(content) != start + math.prod(shape):
        raise FormatError(
            f"{path.name}: {len(content)} bytes do not hold an array of shape {shape}"
        )
    return (
        np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()
    )  # bytes are read-only, torch objects


def one_line(error: BaseException) -> str:
    """The message of an exception on one line, or its type when it has none."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else text[:397] + "..."


def unpickle(content: bytes, name: str) -> Any:
    """Loads a pickle that may hold only containers, text, numbers and plain numeric numpy arrays.

    CIFAR's official archives are pickles written by Python 2; a pickle can name any function to be called on load,
    so each name that an array needs is replaced by a stand-in of ours and every other one is refused.
    """
    try:
        # latin1 is what maps Python 2 byte strings, keys and pixel data alike, to something Python 3 understands
        return _ArrayUnpickler(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:  # opcodes of a hostile or broken stream fail in any way they like
        raise FormatError(f"{name}: {one_line(error)}") from error


class _PickledDtype:
    """Stands in for ``numpy.dtype``: integers only, so no state of a hostile pickle reaches numpy's C code."""

    def __init__(self, code: str, *_: Any) -> None:
        if code not in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8"):
            raise pickle.UnpicklingError(f"refused, an array of type {code}")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] == ">":
            self.dtype = self.dtype.newbyteorder(">")


class _PickledArray:
    """Stands in for ``numpy.ndarray``; ``np.asarray`` of it is the array."""

    def __init__(self, *_: Any) -> None:
        self.array = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, raw = state
        content = (
            raw.encode("latin1") if isinstance(raw, str) else raw
        )  # Python 2 wrote a byte string
        self.array = np.frombuffer(content, dtype.dtype).reshape(
            shape, order="F" if fortran else "C"
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.array if dtype is None else self.array.astype(dtype)


def _array_from_buffer(
    buffer: Any, dtype: _PickledDtype, shape: tuple[int, ...], order: str, *_: Any
) -> np.ndarray:
    return np.frombuffer(buffer, dtype.dtype).reshape(shape, order="F" if order == "F" else "C")


def _latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"refused, text in {encoding}")
    return text.encode("latin1")


class _ArrayUnpickler(pickle.Unpickler):
    """Knows the few names in a pickled array of integers, and no other."""

    allowed: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy", "dtype"): _PickledDtype,
        ("numpy", "ndarray"): _PickledArray,
        ("numpy.core.multiarray", "_reconstruct"): _PickledArray,
        ("numpy._core.multiarray", "_reconstruct"): _PickledArray,
        ("numpy.core.numeric", "_frombuffer"): _array_from_buffer,
        ("numpy._core.numeric", "_frombuffer"): _array_from_buffer,
        ("_codecs", "encode"): _latin1,  # how newer Pythons write bytes for older ones
    }

    def find_class(self, module: str, name: str) -> Any:
        """Returns our stand-in for a name; refuses every name without one."""
        try:
            return self.allowed[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"refused, the pickle asks for {module}.{name}") from None


def _member(files: Mapping[str, bytes], name: str) -> bytes:
    if name not in files:
        raise FormatError(f"{name} is missing")
    return files[name]


def _planar(rows: np.ndarray, name: str) -> np.ndarray:
    """Turns rows of 3 x 1024 planar pixels, uint8 ``(N, 3072)``, into images ``(N, 32, 32, 3)``."""
    if rows.ndim != 2 or rows.shape[1] != 3072 or rows.dtype != np.uint8:
        raise FormatError(f"{name}: pixels are {rows.dtype} {rows.shape}, expected uint8 (N, 3072)")
    return np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _labels(values: Any, name: str) -> np.ndarray:
    try:
        labels = np.asarray(values)
        if labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer):
            return labels.astype(np.int64)
    except ValueError:  # ragged lists
        pass
    raise FormatError(f"{name}: labels are not a list of integers")
