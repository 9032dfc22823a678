"""Atomic writing of files, and locks that allow one writer at a time."""

import hashlib
import json
import math
import os
import re
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fedx_pl.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

try:
    import fcntl
except ImportError:  # Not on Windows, where folders are not locked.
    fcntl = None  # type: ignore[assignment]

SEAL = "checksum"  # key that `sealed` adds
_ROUND = re.compile(r"round_([0-9]{5}|[1-9][0-9]{5,})")
LOCK = ".lock"  # in a folder that a process has for itself
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # Not on Windows.
_LOCK_ATTEMPTS = 10
_LOCK_PAUSE = 0.02  # seconds


def tensor_bytes(state: "Mapping[str, Tensor]") -> bytes:
    """Tensors as safetensors, in plain memory order; channels_last weights have another."""
    from safetensors.torch import save

    return save({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()})


def size_of(state: "Mapping[str, Tensor]") -> int:
    """The size of a state's tensors in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Standard JSON: a number that is not finite becomes null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def checksum(content: bytes) -> str:
    """The SHA-256 checksum."""
    return hashlib.sha256(content).hexdigest()


# Suffix of what is being written. No user's file has it, and in a folder of ours it was left by a
# process that was killed.
UNFINISHED = ".fedx-pl.tmp"


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Adds a JSON object's checksum to it; `unsealed` verifies it."""
    return {**record, SEAL: checksum(json.dumps(record).encode())}


def unsealed(record: Any) -> dict[str, Any]:
    """Returns the content that `sealed` wrapped.

    Raises:
        ValueError: the checksum is missing or wrong.
    """
    if not isinstance(record, dict) or SEAL not in record:
        raise ValueError("it has no checksum")
    content = {key: value for key, value in record.items() if key != SEAL}
    if checksum(json.dumps(content).encode()) != record[SEAL]:
        raise ValueError("it does not match its checksum")
    return content


def round_folders(checkpoints: Path) -> list[Path]:
    """The folders of rounds in a folder of checkpoints, the oldest first."""
    names = os.listdir(checkpoints) if checkpoints.is_dir() else []
    rounds = {int(name.removeprefix("round_")): name for name in names if _ROUND.fullmatch(name)}
    return [checkpoints / rounds[number] for number in sorted(rounds)]


def require_plain(folder: Path, inside: Sequence[str] = ()) -> None:
    """Raises a `UserError` if a folder holds a link, a pipe or a device.

    Writing to it would change files elsewhere.

    Args:
        folder: may be a link itself, and need not exist.
        inside: folders in it that are searched, too, with all that is in them.
    """
    if not folder.is_dir():
        return
    waiting = [folder]
    searched = {folder / name for name in inside}
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                path = Path(entry.path)
                if entry.is_symlink():
                    raise UserError(
                        f"{path} is a link to {os.readlink(path)}, and a run folder holds no "
                        f"links: files elsewhere would be changed; replace it by a copy of what it "
                        f"leads to, or remove it"
                    )
                if entry.is_dir():
                    if path in searched or any(parent in searched for parent in path.parents):
                        waiting.append(path)
                elif not entry.is_file():
                    raise UserError(
                        f"{path} is neither a file nor a folder; remove it from the run folder"
                    )


def require_there(folder: Path) -> None:
    """Raises a `UserError` if a run folder is gone; writing would make one with half a run."""
    if not folder.is_dir():
        raise UserError(
            f"{folder} was deleted or moved while it was trained in, and nothing more can be saved "
            f"there; move it back and start again to resume after its last round, or start again "
            f"for a new run"
        )


def write_atomically(
    path: Path, content: bytes, *, sync: bool = True, private: bool = False
) -> None:
    """Writes a file that is either the old or the new one after a crash. A link is replaced.

    Args:
        path: the file.
        content: its bytes.
        sync: wait until it is on disk. Without, it survives a killed process, but not a power loss.
        private: no other user may read it, nor list the folders that are made for it.

    Raises:
        UserError: there is a folder or a device of that name.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a file, and is left as it is; type another name")
    with _replacing(path, sync=sync, private=private) as file:
        file.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Like `write_atomically`, for content that is made piece by piece; but a link is followed.

    The file replaces ``path`` when the block ends without an error.
    """
    with _replacing(Path(os.path.realpath(path)), sync=True, private=False) as file:
        yield file


@contextmanager
def _replacing(path: Path, *, sync: bool, private: bool) -> Iterator[IO[bytes]]:
    if private:
        make_private(path.parent)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{UNFINISHED}")
    temporary.unlink(missing_ok=True)  # Left by a killed process that had the same number.
    try:
        with open(temporary, "xb", opener=private_file if private else None) as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def require_file(path: Path, option: str = "-o") -> None:
    """Raises a `UserError` if no file can be written to a path.

    Args:
        path: as typed after ``option``.
        option: the option of the command.
    """
    if not path.parent.is_dir():
        raise UserError(
            f"{option} {path}: there is no folder {path.parent}; make it first, or type another "
            f"name"
        )
    if path.exists() and not path.is_file():
        raise UserError(
            f"{option} {path} is not a file, and is left as it is; type the name of a new file"
        )


def make_private(folder: Path) -> None:
    """Makes a folder and its missing parents, which only this user may read."""
    for missing in reversed([place for place in (folder, *folder.parents) if not place.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def private_file(path: str, flags: int) -> int:
    """An `opener` for `open`: only this user may read the file, even if it was there before."""
    handle = os.open(path, flags, 0o600)
    if hasattr(os, "fchmod"):  # Not on Windows.
        os.fchmod(handle, 0o600)
    return handle


def clear_unfinished(folder: Path) -> None:
    """Removes what killed processes left half written; the caller must hold the lock."""
    for path in list(folder.rglob(f".*{UNFINISHED}")):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes renames inside a folder survive a power loss."""
    if os.name != "posix":
        return  # Other systems cannot open a folder.
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_locked(folder: Path) -> bool:
    """Whether another process trains in a folder.

    The check takes a shared lock for a moment, for which `lock` waits.
    """
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY | _NO_LINK)
    except OSError:
        return False
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # Some network file systems cannot lock.
    finally:
        os.close(handle)
    return False


def lock(folder: Path) -> IO[str]:
    """Keeps other processes out of a folder until the returned file is closed or the process ends.

    Raises:
        UserError: another process holds it.
    """
    file = os.fdopen(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o666), "r+")
    for tries_left in reversed(range(_LOCK_ATTEMPTS)):
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if tries_left:
                time.sleep(_LOCK_PAUSE)  # It may be only `is_locked` of another process.
                continue
            file.close()
            raise UserError(
                f"another process is training in {folder}; wait for it, end it, or use another "
                "folder"
            ) from None
        except OSError as error:  # Some network file systems cannot lock.
            warnings.warn(
                f"the file system of {folder} cannot lock files ({error.strerror}): a second "
                f"process that trains there would not be noticed; see to it that there is none",
                stacklevel=2,
            )
            break
    return file
