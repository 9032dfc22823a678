"""Decoded copies that are not kept: they end with their process, or with the next one."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedx_pl.data import images
from fedx_pl.data.images import NO_CACHE, DataOptions, cache_folder
from fedx_pl.files import LOCK, lock


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The system's folder for temporary files, in a process that has made no copies yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(images.atexit, "register", lambda _: None)
    images._temporary_folder.cache_clear()
    yield tmp_path
    images._temporary_folder.cache_clear()


def left_behind(folder: Path, *, age: float = 3600.0) -> Path:
    """The folder that a killed process leaves behind."""
    folder.mkdir(mode=0o700)
    (folder / "images.npy").write_bytes(b"pixels")
    lock(folder).close()
    made = folder.stat().st_mtime - age
    os.utime(folder, (made, made))
    return folder


@pytest.mark.skipif(os.name != "posix", reason="needs locks of POSIX")
def test_copies_of_a_process_that_was_killed_are_deleted_by_the_next(temporary: Path) -> None:
    dead = left_behind(temporary / "fedx-pl-images-dead")
    alive = left_behind(temporary / "fedx-pl-images-alive")
    new = left_behind(temporary / "fedx-pl-images-new", age=0.0)
    foreign = left_behind(temporary / "others-images-dead")
    linked = temporary / "fedx-pl-images-link"
    linked.symlink_to(foreign)
    with lock(alive):
        mine = cache_folder(DataOptions(cache=NO_CACHE))
    assert not dead.exists()
    for folder in (alive, new, foreign):
        assert (folder / "images.npy").exists()
    assert linked.is_symlink()
    assert (mine / LOCK).exists()
    assert mine.stat().st_mode & 0o077 == 0
    assert cache_folder(DataOptions(cache=NO_CACHE)) == mine
