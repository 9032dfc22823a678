"""The store: what was saved is loaded, to the bit, or refused."""

import math
import os
import subprocess
from pathlib import Path

import pytest
import torch

from fedx_pl.files import replacing, write_atomically
from fedx_pl.files.store import load_record, load_tensors, save_record, save_tensors

TENSORS = {"w": torch.arange(6.0).reshape(2, 3), "steps": torch.tensor(7)}


def flip_last_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_tensors_are_loaded_with_the_checksum_that_saving_returned(tmp_path: Path) -> None:
    sha256 = save_tensors(tmp_path / "a.safetensors", TENSORS)
    loaded = load_tensors(tmp_path / "a.safetensors", sha256)
    assert all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)
    flip_last_bit(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="does not match its checksum"):
        load_tensors(tmp_path / "a.safetensors", sha256)


def test_a_record_is_loaded_as_it_was_saved_last(tmp_path: Path) -> None:
    save_record(tmp_path / "a", {}, {"old": 1})
    save_record(tmp_path / "a", TENSORS, {"loss": math.nan, "names": ("x", "y")})
    tensors, values = load_record(tmp_path / "a")
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    assert values == {"loss": None, "names": ["x", "y"]}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    subprocess.run(
        ["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=tmp_path / "a", check=True
    )


@pytest.mark.parametrize("name", ["global.safetensors", "state.json", "SHA256SUMS"])
def test_a_record_with_a_damaged_or_missing_file_is_refused(tmp_path: Path, name: str) -> None:
    save_record(tmp_path / "a", TENSORS, {"loss": 1.0})
    flip_last_bit(tmp_path / "a" / name)
    with pytest.raises(ValueError, match="do not match SHA256SUMS"):
        load_record(tmp_path / "a")
    (tmp_path / "a" / name).unlink()
    with pytest.raises(FileNotFoundError):
        load_record(tmp_path / "a")
    os.mkfifo(tmp_path / "a" / name)
    with pytest.raises(OSError, match="not a regular file"):
        load_record(tmp_path / "a")


def test_a_record_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_record(tmp_path / "a", TENSORS, {"loss": 1.0})

    def full_disk(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        save_record(tmp_path / "a", {}, {})
    assert load_record(tmp_path / "a")[1] == {"loss": 1.0}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_writing_replaces_a_link_and_a_stream_follows_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    with replacing(tmp_path / "link") as stream:
        stream.write(b"streamed")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "streamed"
    write_atomically(tmp_path / "link", b"written")
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "streamed"
