"""Writing files so that a crash leaves the old one or the new one, never half of one."""

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a sibling, syncs it and renames it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Makes renames inside a folder survive a power loss."""
    if os.name != "posix":
        return  # Elsewhere a folder cannot be opened.
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
