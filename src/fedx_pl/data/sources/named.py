"""The named data sets: the files each comes in, what reads them, and what the real ones hash to.

torchvision's classes read the official files. torchvision is imported late: it takes seconds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedx_pl.data.images import Split
from fedx_pl.data.sources import formats, mirrors
from fedx_pl.data.sources.formats import FormatError
from fedx_pl.errors import one_line

if TYPE_CHECKING:
    from torchvision.datasets import CIFAR10

# Mean and standard deviation of the training pixels in 0..1, per channel.
STATISTICS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "fmnist": ((0.2860,), (0.3530,)),
    "svhn": ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
    "imagenet10": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}

# sha256 of the decoded arrays, computed from the package mirrors. Their content is the official
# one: written back as data_batch_N.bin it has the checksums published for the members of CIFAR-10's
# binary archive, and the unzipped idx files have those published for Fashion-MNIST. So every form
# of a data set must decode to these bytes. No mirror holds CIFAR-100 or SVHN; the md5 sums that
# torchvision knows, the counts and the shapes stand in for their hashes.
SHA256: dict[str, dict[str, str]] = {
    "cifar10": {
        "train_images": "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
        "train_labels": "f5cfe00b0f00968c0cc5ff3b1d2de51b10e33efa277c2986f4e0fa63e58c9f4f",
        "test_images": "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
        "test_labels": "cbb7365de8ed11f05cc4c3a1e7f78144127c5e851efd83762fb18202461230bb",
    },
    "fmnist": {
        "train_images": "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
        "train_labels": "e3245b63f7c40d1c8b652835f19744d970c1613b40ddac6bcfc87b9c46e16a0b",
        "test_images": "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
        "test_labels": "d51d859896c55775b9e9e219b77ff03bcec1b6ac322f313544dc3f9e7bc94fae",
    },
}


@dataclass(frozen=True)
class RawSet:
    """A decoded data set."""

    train: Split
    test: Split
    classes: tuple[str, ...]

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays as they are cached and hashed, by name."""
        splits = {"train": self.train, "test": self.test}
        images = {f"{name}_images": split.images for name, split in splits.items()}
        labels = {
            f"{name}_labels": split.labels
            for name, split in splits.items()
            if split.labels is not None
        }
        return images | labels


@dataclass(frozen=True)
class Layout:
    """A set of files that a data set comes in.

    Attributes:
        files: paths that must exist, relative to the folder that is searched.
        read: decodes them; takes that folder and whether only the official files will do. It
            raises a `FormatError` if it cannot.
    """

    files: tuple[str, ...]
    read: Callable[[Path, bool], RawSet]

    def missing(self, folder: Path) -> list[str]:
        """The files that are not in ``folder``."""
        return [file for file in self.files if not (folder / file).exists()]


@dataclass(frozen=True, kw_only=True)
class NamedSet:
    """A data set, with how it is found and verified.

    Attributes:
        layouts: the files it comes in, preferred first.
        downloads: ``(url, file name, md5)`` from torchvision; together they are the first layout.
        shape: of one image.
        counts: of training and test images.
        sha256: of each decoded array, by name; empty if it is not known.
        mirror: the title of a package mirror, and a function that fetches the package into a
            folder and returns the folder of its files.
        folder: torchvision's sub-folder, which is searched as well.
    """

    layouts: tuple[Layout, ...]
    downloads: tuple[tuple[str, str, str], ...]
    shape: tuple[int, int, int]
    counts: tuple[int, int]
    sha256: Mapping[str, str] = field(default_factory=dict)
    mirror: tuple[str, Callable[[Path], Path]] | None = None
    folder: str = ""


_CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
_CIFAR10_BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")


def _cifar10() -> NamedSet:
    from torchvision.datasets import CIFAR10

    batches = tuple(f"{name}.bin" for name in _CIFAR10_BATCHES)
    sheets = tuple(f"{name}.png" for name in _CIFAR10_BATCHES)
    labels = ("train_lables.json", "test_lables.json")  # the package spells them so

    def from_batches(files: Mapping[str, bytes]) -> RawSet:
        train = formats.cifar_binary(files, batches[:-1])
        test = formats.cifar_binary(files, batches[-1:])
        return RawSet(Split(*train), Split(*test), _CIFAR10_CLASSES)

    def read_archive(folder: Path, _: bool) -> RawSet:
        return from_batches(formats.read_tar(folder / "cifar-10-binary.tar.gz", batches))

    def read_extracted(folder: Path, _: bool) -> RawSet:
        return from_batches(formats.read_files(folder / "cifar-10-batches-bin", batches))

    def read_mirror(folder: Path, _: bool) -> RawSet:
        files = formats.read_tar(folder / mirrors.CIFAR10_TARBALL, (*sheets, *labels))
        train = mirrors.cifar10_sheets(files, sheets[:-1], labels[0])
        test = mirrors.cifar10_sheets(files, sheets[-1:], labels[1])
        return RawSet(Split(*train), Split(*test), _CIFAR10_CLASSES)

    return NamedSet(
        layouts=(
            *_pickled_layouts(CIFAR10),
            Layout(("cifar-10-binary.tar.gz",), read_archive),
            Layout(("cifar-10-batches-bin",), read_extracted),
            Layout((mirrors.CIFAR10_TARBALL,), read_mirror),
        ),
        downloads=((CIFAR10.url, CIFAR10.filename, CIFAR10.tgz_md5),),
        shape=(32, 32, 3),
        counts=(50_000, 10_000),
        sha256=SHA256["cifar10"],
        mirror=(mirrors.CIFAR10_TITLE, mirrors.fetch_cifar10),
    )


def _cifar100() -> NamedSet:
    from torchvision.datasets import CIFAR100

    return NamedSet(
        layouts=_pickled_layouts(CIFAR100),
        downloads=((CIFAR100.url, CIFAR100.filename, CIFAR100.tgz_md5),),
        shape=(32, 32, 3),
        counts=(50_000, 10_000),
    )


def _pickled_layouts(dataset: type[CIFAR10]) -> tuple[Layout, Layout]:
    """CIFAR's python batches, packed and unpacked.

    They are pickles, which may run any code. So nothing is unpickled unless the md5 of its file is
    the official one, whatever data.verify says; torchvision checks that once more.
    """
    md5 = dict((*dataset.train_list, *dataset.test_list))
    md5[dataset.meta["filename"]] = dataset.meta["md5"]

    def read_extracted(folder: Path, _: bool) -> RawSet:
        _require_md5(
            folder / dataset.base_folder,
            md5,
            instead="a pickle that has changed is never read, with data.verify=false neither",
        )
        with _format_errors(dataset.base_folder):
            train = dataset(folder, train=True)
            test = dataset(folder, train=False)
            return RawSet(
                Split(np.ascontiguousarray(train.data), np.array(train.targets, np.int64)),
                Split(np.ascontiguousarray(test.data), np.array(test.targets, np.int64)),
                tuple(train.classes),
            )

    def read_archive(folder: Path, verify: bool) -> RawSet:
        with tempfile.TemporaryDirectory(prefix="fedx-pl-") as temporary:
            extracted = Path(temporary) / dataset.base_folder
            extracted.mkdir()
            for name, content in formats.read_tar(folder / dataset.filename, md5).items():
                (extracted / name).write_bytes(content)
            return read_extracted(Path(temporary), verify)

    return (
        Layout((dataset.filename,), read_archive),
        Layout((dataset.base_folder,), read_extracted),
    )


def _svhn() -> NamedSet:
    from torchvision.datasets import SVHN

    parts = (SVHN.split_list["train"], SVHN.split_list["test"])
    md5 = {file: md5 for _, file, md5 in parts}

    # Without an md5 to compare with, torchvision checks none.
    unchecked = {split: [*part[:2], None] for split, part in SVHN.split_list.items()}
    any_svhn = type("AnySVHN", (SVHN,), {"split_list": unchecked})

    def read(folder: Path, verify: bool) -> RawSet:
        if verify:
            _require_md5(folder, md5, instead="data.verify=false accepts it")

        def split(name: str) -> Split:
            with _format_errors(f"{name}_32x32.mat"):
                dataset = any_svhn(folder, split=name)
                return Split(
                    np.ascontiguousarray(dataset.data.transpose(0, 2, 3, 1)), dataset.labels
                )

        return RawSet(split("train"), split("test"), tuple(str(digit) for digit in range(10)))

    return NamedSet(
        layouts=(Layout(tuple(md5), read),),
        downloads=tuple((url, file, md5) for url, file, md5 in parts),
        shape=(32, 32, 3),
        counts=(73_257, 26_032),
    )


def _fmnist() -> NamedSet:
    from torchvision.datasets import FashionMNIST

    zipped = tuple(name for name, _ in FashionMNIST.resources)
    plain = tuple(name.removesuffix(".gz") for name in zipped)

    def read(folder: Path, names: Iterable[str]) -> RawSet:
        """Copies the files to where torchvision looks for them, unzipped."""
        with tempfile.TemporaryDirectory(prefix="fedx-pl-") as root:
            raw = Path(root) / "FashionMNIST" / "raw"
            raw.mkdir(parents=True)
            for name in names:
                content = formats.read_unzipped(folder / name)
                (raw / name.removesuffix(".gz")).write_bytes(content)
            with _format_errors("idx files"):
                splits = []
                for is_train in (True, False):
                    dataset = FashionMNIST(root, train=is_train)
                    images = dataset.data.numpy()[..., np.newaxis]
                    splits.append(Split(images, dataset.targets.numpy()))
        return RawSet(splits[0], splits[1], tuple(FashionMNIST.classes))

    return NamedSet(
        layouts=(
            Layout(zipped, lambda folder, _: read(folder, zipped)),
            Layout(plain, lambda folder, _: read(folder, plain)),
        ),
        downloads=tuple(
            (FashionMNIST.mirrors[0] + name, name, md5) for name, md5 in FashionMNIST.resources
        ),
        shape=(28, 28, 1),
        counts=(60_000, 10_000),
        sha256=SHA256["fmnist"],
        mirror=(mirrors.FMNIST_TITLE, mirrors.fetch_fmnist),
        folder="FashionMNIST/raw",
    )


def _require_md5(folder: Path, md5: Mapping[str, str], instead: str) -> None:
    from torchvision.datasets.utils import check_integrity

    for name, expected in md5.items():
        with _format_errors(name):
            if not check_integrity(folder / name, expected):
                raise FormatError(f"missing, or not the official file (md5); {instead}")


@contextmanager
def _format_errors(name: str) -> Iterator[None]:
    """Turns whatever a reader of foreign bytes raises into a `FormatError`."""
    try:
        yield
    except Exception as error:
        raise FormatError(f"{name}: {one_line(error)}") from error


# By their names on the command line.
NAMED: dict[str, Callable[[], NamedSet]] = {
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "svhn": _svhn,
    "fmnist": _fmnist,
}
