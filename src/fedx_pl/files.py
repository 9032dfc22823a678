"""Writing files so that a crash leaves the old one or the new one, never half of one; and one writer at a time."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from safetensors.torch import save
from torch import Tensor

from fedx_pl.errors import UserError

try:
    import fcntl
except ImportError:  # Not on Windows: there a folder is not locked.
    fcntl = None  # type: ignore[assignment]


def tensor_bytes(state: Mapping[str, Tensor]) -> bytes:
    """As safetensors, which store plain memory order; channels_last weights have another."""
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()})


def size_of(state: Mapping[str, Tensor]) -> int:
    """In bytes, as it travels."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def json_text(value: Any, *, indent: int | None = None) -> str:
    """JSON that every program can read: a number that is not finite becomes null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def checksum(content: bytes) -> str:
    """SHA-256."""
    return hashlib.sha256(content).hexdigest()


def write_atomically(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Writes a sibling, syncs it (what is not synced outlives the process, but maybe not the machine), renames it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def clear_unfinished(folder: Path) -> None:
    """Removes what processes that were killed left half written; only for who holds the folder's lock."""
    for path in list(folder.rglob(".*.tmp")):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes renames inside a folder survive a power loss."""
    if os.name != "posix":
        return  # Elsewhere a folder cannot be opened.
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_locked(folder: Path) -> bool:
    """Whether another process trains in a folder; leaves nothing there."""
    if not (folder / ".lock").exists():
        return False
    try:
        lock(folder).close()
    except UserError:
        return True
    return False


def lock(folder: Path) -> IO[str]:
    """Keeps other processes out of a folder until the returned file is closed or this process ends, however it ends."""
    file = open(folder / ".lock", "w")  # noqa: SIM115 (held open on purpose)
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise UserError(
                f"another process is training in {folder}; wait for it, end it, or type run.dir=ANOTHER"
            ) from None
        except OSError:
            pass  # Some network file systems cannot lock.
    return file
