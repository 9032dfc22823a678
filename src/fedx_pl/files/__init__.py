"""Writing files so that a crash leaves the old one or the new one, never half of one; and one writer at a time."""

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
except ImportError:  # Not on Windows: there a folder is not locked.
    fcntl = None  # type: ignore[assignment]

SEAL = "checksum"  # the key that `sealed` adds
_ROUND = re.compile(r"round_([0-9]{5}|[1-9][0-9]{5,})")
_LOCK = ".lock"
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # Not on Windows.
_TRIES, _PAUSE = 10, 0.02  # seconds


def tensor_bytes(state: "Mapping[str, Tensor]") -> bytes:
    """As safetensors, which store plain memory order; channels_last weights have another."""
    from safetensors.torch import save

    return save({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()})


def size_of(state: "Mapping[str, Tensor]") -> int:
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


# How names of what is being written end. No file of a user's own is called so, and what is found under such a name in
# a folder of ours was left by a process that was killed.
UNFINISHED = ".fedx-pl.tmp"


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object with its own checksum in it, which `unsealed` looks at."""
    return {**record, SEAL: checksum(json.dumps(record).encode())}


def unsealed(record: Any) -> dict[str, Any]:
    """Reverses `sealed`.

    Raises:
        ValueError: it has no checksum, or another one.
    """
    if not isinstance(record, dict) or SEAL not in record:
        raise ValueError("it has no checksum")
    content = {key: value for key, value in record.items() if key != SEAL}
    if checksum(json.dumps(content).encode()) != record[SEAL]:
        raise ValueError("it does not match its checksum")
    return content


def sums_of(files: Mapping[str, bytes]) -> bytes:
    """The content of SHA256SUMS for some files, as ``sha256sum --check`` reads it."""
    return "".join(f"{checksum(content)}  {name}\n" for name, content in files.items()).encode()


def read_verified(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Reads all files that the SHA256SUMS of a folder is about.

    Raises:
        ValueError: one of them is not what it was.
        OSError: one of them is missing.
    """
    files = {name: (folder / name).read_bytes() for name in names}
    if sums_of(files) != (folder / "SHA256SUMS").read_bytes():
        raise ValueError("its files do not match SHA256SUMS")
    return files


def round_folders(checkpoints: Path) -> list[Path]:
    """The rounds in a folder of checkpoints, the oldest first; a copy that somebody made there is none of them."""
    names = os.listdir(checkpoints) if checkpoints.is_dir() else []
    rounds = {int(name.removeprefix("round_")): name for name in names if _ROUND.fullmatch(name)}
    return [checkpoints / rounds[number] for number in sorted(rounds)]


def require_plain(folder: Path, inside: Sequence[str] = ()) -> None:
    """Raises a `UserError` if a folder holds a link, a pipe or a device: writing would change what is elsewhere.

    Args:
        folder: may be a link itself, and need not exist.
        inside: the folders in it that are searched as well, with all that is in them.
    """
    if not folder.is_dir():
        return
    waiting, own = [folder], {folder / name for name in inside}
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                path = Path(entry.path)
                if entry.is_symlink():
                    raise UserError(
                        f"{path} is a link to {os.readlink(path)}, and a run folder holds no links: files elsewhere "
                        f"would be changed; replace it by a copy of what it leads to, or remove it"
                    )
                if entry.is_dir():
                    if path in own or any(parent in own for parent in path.parents):
                        waiting.append(path)
                elif not entry.is_file():
                    raise UserError(
                        f"{path} is neither a file nor a folder; remove it from the run folder"
                    )


def require_there(folder: Path) -> None:
    """Raises a `UserError` if a run folder is gone; to write to it would make another one, with half a run."""
    if not folder.is_dir():
        raise UserError(
            f"{folder} was deleted or moved while it was trained in, and nothing more can be saved there; move it back "
            f"and start again to go on after its last round, or start again for a new run"
        )


def write_atomically(
    path: Path, content: bytes, *, sync: bool = True, private: bool = False
) -> None:
    """Writes a sibling, syncs it (what is not synced outlives the process, but maybe not the machine), renames it.

    A link is replaced and not followed.

    Args:
        path: of the file.
        content: of the file.
        sync: wait until it is on the disk.
        private: nobody else may read it, nor list the folders that are made for it.

    Raises:
        UserError: there is a folder or a device of that name.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a file, and is left as it is; type another name")
    make_private(path.parent) if private else path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{UNFINISHED}")
    temporary.unlink(missing_ok=True)  # Of a process that was killed and had the same number.
    try:
        with open(temporary, "xb", opener=private_file if private else None) as file:
            file.write(content)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Gives a file to write into, and moves it to ``path`` when the block ends without an error.

    Like `write_atomically`, for content that is made piece by piece. A link is followed.
    """
    place = Path(os.path.realpath(path))
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.with_name(f".{place.name}.{os.getpid()}{UNFINISHED}")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, place)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def require_file(path: Path, option: str = "-o") -> None:
    """Refuses a place that no file can be written to.

    Args:
        path: as typed after ``option``.
        option: of the command.

    Raises:
        UserError: it is a folder, a pipe or a device, or there is no folder for it.
    """
    if not path.parent.is_dir():
        raise UserError(
            f"{option} {path}: there is no folder {path.parent}; make it first, or type another name"
        )
    if path.exists() and not path.is_file():
        raise UserError(
            f"{option} {path} is not a file, and is left as it is; type the name of a new file"
        )


def make_private(folder: Path) -> None:
    """Makes a folder, and those above it that are missing, for this user alone; one that is there stays as it is."""
    for missing in reversed([place for place in (folder, *folder.parents) if not place.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def private_file(path: str, flags: int) -> int:
    """An `opener` for `open`: the file is for this user alone, also if it was there and open to others."""
    number = os.open(path, flags, 0o600)
    if hasattr(os, "fchmod"):  # Not on Windows.
        os.fchmod(number, 0o600)
    return number


def clear_unfinished(folder: Path) -> None:
    """Removes what processes that were killed left half written; only for who holds the folder's lock."""
    for path in list(folder.rglob(f".*{UNFINISHED}")):
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
    """Whether another process trains in a folder; leaves nothing there.

    Those who ask do not see each other, and who starts to train meanwhile waits for the answer.
    """
    try:
        handle = os.open(folder / _LOCK, os.O_RDONLY | _NO_LINK)
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
    """Keeps other processes out of a folder until the returned file is closed or this process ends, however it ends.

    Raises:
        UserError: another process holds it.
    """
    file = os.fdopen(os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o666), "r+")
    for tries_left in reversed(range(_TRIES)):
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if tries_left:
                time.sleep(_PAUSE)  # It may be somebody who only asks, see `is_locked`.
                continue
            file.close()
            raise UserError(
                f"another process is training in {folder}; wait for it, end it, or use another folder"
            ) from None
        except OSError as error:  # Some network file systems cannot lock.
            warnings.warn(
                f"the file system of {folder} cannot lock files ({error.strerror}): a second process that trains "
                f"there would not be noticed; see to it that there is none",
                stacklevel=2,
            )
            break
    return file
