"""The one store for tensors and plain values: atomic, checked by SHA-256, never unpickled.

A tensor file is one safetensors file, whose writer keeps the checksum elsewhere. A record is a
folder that carries its checksums itself and appears by one rename:

    global.safetensors     tensors
    state.json             plain values
    SHA256SUMS             of the two, as `sha256sum --check` reads it
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fedx_pl.files import (
    UNFINISHED,
    checksum,
    json_text,
    sync_folder,
    tensor_bytes,
    write_atomically,
)
from fedx_pl.files.reading import parse_json, parse_tensors, read_bytes

TENSORS = "global.safetensors"
VALUES = "state.json"
SUMS = "SHA256SUMS"


def save_tensors(
    file: Path, tensors: Mapping[str, Tensor], *, sync: bool = True, private: bool = False
) -> str:
    """Writes a tensor file and returns its checksum, which `load_tensors` asks for.

    Args:
        file: the file to write.
        tensors: by name.
        sync: as for `write_atomically`.
        private: as for `write_atomically`.
    """
    content = tensor_bytes(tensors)
    write_atomically(file, content, sync=sync, private=private)
    return checksum(content)


def load_tensors(file: Path, sha256: str) -> dict[str, Tensor]:
    """Reads a tensor file.

    Raises:
        OSError: it is missing, or not a regular file.
        ValueError: it does not match its checksum, or is not safetensors.
    """
    content = read_bytes(file)
    if checksum(content) != sha256:
        raise ValueError("it does not match its checksum")
    return parse_tensors(content)


def save_record(
    folder: Path,
    tensors: Mapping[str, Tensor],
    values: Any,
    *,
    sync: bool = True,
    private: bool = False,
) -> None:
    """Writes a record, replacing an older one.

    Args:
        folder: the record's folder.
        tensors: by name.
        values: anything that fits in JSON; numbers that are not finite become null.
        sync: wait until it is on disk.
        private: no other user may read it.
    """
    files = {TENSORS: tensor_bytes(tensors), VALUES: json_text(values, indent=1).encode()}
    temporary = folder.with_name(f".{folder.name}{UNFINISHED}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        for name, content in (files | {SUMS: sums_of(files)}).items():
            write_atomically(temporary / name, content, sync=sync, private=private)
        if sync:
            sync_folder(temporary)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if sync:
        sync_folder(folder.parent)


def load_record(folder: Path) -> tuple[dict[str, Tensor], Any]:
    """Reads a record: its tensors and its plain values.

    Raises:
        OSError: one of its files is missing, or not a regular file.
        ValueError: its files do not match their checksums, or cannot be parsed.
    """
    files = verify_record(folder)
    return parse_tensors(files[TENSORS]), parse_json(files[VALUES])


def verify_record(folder: Path) -> dict[str, bytes]:
    """Reads a record's files and compares them with their checksums; raises like `load_record`."""
    files = {name: read_bytes(folder / name) for name in (TENSORS, VALUES)}
    if sums_of(files) != read_bytes(folder / SUMS):
        raise ValueError(f"its files do not match {SUMS}")
    return files


def sums_of(files: Mapping[str, bytes]) -> bytes:
    """The content of SHA256SUMS for some files."""
    return "".join(f"{checksum(content)}  {name}\n" for name, content in files.items()).encode()
