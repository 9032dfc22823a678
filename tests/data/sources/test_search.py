"""Where a named data set is searched, and the error if it is not found."""

import os
from pathlib import Path

import pytest
from dataset_files import options, silent, write_cifar10

from fedx_pl.data.sources import load
from fedx_pl.errors import UserError


@pytest.mark.usefixtures("closed")
@pytest.mark.parametrize("name", ["cifar10", "cifar100", "svhn", "fmnist"])
def test_the_error_lists_files_when_every_source_fails(
    tmp_path: Path, lines: list[str], name: str
) -> None:
    with pytest.raises(UserError) as caught:
        load(options(tmp_path, name, download=True), report=lines.append)
    files = {
        "cifar10": "cifar-10-python.tar.gz",
        "cifar100": "cifar-100-python.tar.gz",
        "svhn": "train_32x32.mat and test_32x32.mat",
        "fmnist": "train-images-idx3-ubyte.gz and train-labels-idx1-ubyte.gz",
    }
    assert files[name] in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)
    assert len(lines) == (5 if name in ("cifar10", "fmnist") else 3)
    assert all("\n" not in line for line in lines)
    assert any("Connection refused" in line for line in lines)
    if name in ("cifar10", "fmnist"):
        assert "is not installed" in lines[-1]


def test_a_second_load_reads_the_cache(tmp_path: Path, lines: list[str]) -> None:
    archive = write_cifar10(tmp_path)
    fingerprint = load(options(tmp_path), report=silent).fingerprint
    archive.unlink()
    data = load(options(tmp_path), report=lines.append)
    assert data.source.startswith("cache (files in")
    assert data.fingerprint == fingerprint
    assert data.train.images.flags.writeable
    assert lines == []


def test_an_unwritable_cache_is_only_a_line(tmp_path: Path, lines: list[str]) -> None:
    write_cifar10(tmp_path)
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert len(load(options(tmp_path), report=lines.append).train.images) == 20
    assert any("not cached" in line for line in lines)


@pytest.mark.parametrize("verify", [True, False])
def test_pipes_and_devices_are_no_archives(tmp_path: Path, lines: list[str], verify: bool) -> None:
    os.mkfifo(tmp_path / "cifar-10-python.tar.gz")
    (tmp_path / "cifar-10-binary.tar.gz").symlink_to("/dev/zero")
    (tmp_path / "cifar-100-python").mkdir()
    for name in ("train", "test", "meta"):
        os.mkfifo(tmp_path / "cifar-100-python" / name)
    for name in ("cifar10", "cifar100"):
        with pytest.raises(UserError, match="no source had it"):
            load(options(tmp_path, name, verify=verify), report=lines.append)
    expected = "cifar-10-python.tar.gz: not a file; cifar-10-binary.tar.gz: not a file"
    assert expected in "".join(lines)
