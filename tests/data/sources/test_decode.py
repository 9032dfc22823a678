"""Decoding of many files: in processes, once, and again if anything has changed."""

from pathlib import Path

import numpy as np
import pytest
from dataset_files import silent
from image_folders import grays, options, paint

from fedx_pl.data.sources import cache, decode, image_files, load
from fedx_pl.errors import UserError


def test_processes_give_the_same_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(150):
        paint(tmp_path / f"images/{number:03}.png", number)
    (tmp_path / "images/100.png").write_text("broken")
    here = load(options(tmp_path, cache=str(tmp_path / "one"), workers=1), report=silent)
    monkeypatch.setattr(decode, "POOL_SECONDS", 0.0)
    pool = load(options(tmp_path, cache=str(tmp_path / "two"), workers=2), report=silent)
    np.testing.assert_array_equal(pool.train.images, here.train.images)
    assert pool.fingerprint == here.fingerprint
    assert pool.skipped == 1


def test_process_that_dies_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(150):
        paint(tmp_path / f"images/{number:03}.png", number)
    (tmp_path / "dies.py").touch()
    monkeypatch.setattr(decode, "POOL_SECONDS", 0.0)
    monkeypatch.setattr(image_files, "__file__", str(tmp_path / "dies.py"))
    with pytest.raises(UserError, match=r"data\.workers=1"):
        load(options(tmp_path, workers=2))
    assert list((tmp_path / "cache").glob("*")) == []


def test_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paint(tmp_path / "images/a.png", 7)
    first = load(options(tmp_path))
    monkeypatch.setattr(decode, "decode_batch", None)
    again = load(options(tmp_path))
    np.testing.assert_array_equal(first.train.images, again.train.images)
    assert first.fingerprint == again.fingerprint


def test_large_caches_are_mapped_and_stay_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paint(tmp_path / "images/a.png", 7)
    monkeypatch.setattr(cache, "MAP_BYTES", 0)
    data = load(options(tmp_path))
    assert isinstance(data.train.images, np.memmap)
    data.train.images[:] = 0  # writable, as torch wants it, but not on the disk
    assert grays(load(options(tmp_path))) == [7]


def test_changed_folder_is_decoded_again(tmp_path: Path) -> None:
    paint(tmp_path / "images/a.png", 7)
    first = load(options(tmp_path))
    paint(tmp_path / "images/a.png", 8, size=(50, 50))
    second = load(options(tmp_path))
    assert grays(second) == [8]
    assert first.fingerprint != second.fingerprint
    assert load(options(tmp_path, image_size=9)).train.images.shape == (1, 9, 9, 3)


def test_flipped_bit_is_repaired(tmp_path: Path, lines: list[str]) -> None:
    paint(tmp_path / "images/a.png", 7)
    load(options(tmp_path))
    (path,) = (tmp_path / "cache").rglob("images.npy")
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert grays(load(options(tmp_path), report=lines.append)) == [7]
    assert len(lines) == 1
    assert "changed" in lines[0]


def test_unwritable_cache_says_what_to_type(tmp_path: Path) -> None:
    paint(tmp_path / "images/a.png")
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(UserError, match=r"set data\.cache=DIR"):
        load(options(tmp_path))
