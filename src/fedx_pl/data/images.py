"""Options that choose images, and the arrays that hold them."""

from __future__ import annotations

import atexit
import math
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from fedx_pl.errors import UserError
from fedx_pl.files import LOCK, lock
from fedx_pl.options import OptionError, Options, option
from fedx_pl.printing import byte_size

try:
    import fcntl
    import resource
except ImportError:  # Not on Windows.
    fcntl = resource = None  # type: ignore[assignment]

ARRAYS = "arrays"  # the name of images that were brought from Python, which nothing here can load
NO_CACHE = "none"  # data.cache: decoded copies are deleted when the process ends
# Where data.image_size has a meaning: the images of other data sets have one size.
RESIZED = ("folder", "imagenet10", ARRAYS)
VALUE_RANGE_FILE = "value_range.json"  # in a run folder, if its images had such a range
# The values that become 0 and 255 in images with more than 8 bits per value.
ValueRange = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class DataOptions(Options):
    """Options of the images: their source, their place and how they are read."""

    name: str = option("cifar10", "cifar10, cifar100, svhn, fmnist, imagenet10 or folder")
    root: str = option(
        "data",
        "where archives lie; for folder: your images; "
        "for imagenet10: the folder with train/ and val/",
    )
    cache: str = option(
        "",
        "where decoded copies go; empty: ROOT/cache, or data/cache for folder and imagenet10; "
        "none: to a private folder that is deleted at the end",
    )
    verify: bool = option(True, "false accepts a copy that is not the official one")
    download: bool = option(True, "false never touches the network")
    limit: int = option(0, "train on this many images, chosen by the seed; 0 = all", at_least=0)
    test_limit: int = option(
        0, "use this many test images, chosen by the seed; 0 = all", at_least=0
    )
    image_size: int = option(
        0,
        "folder, imagenet10: side length as stored; 0 = 96 for folder, 256 for imagenet10",
        at_least=0,
        at_most=2**16,
    )
    grayscale: bool = option(False, "folder, imagenet10: store one channel instead of three")
    value_range: list[float] = option(
        [],
        "black and white of images of more than 8 bits, e.g. [0,4095]; empty: as they use",
        example=[0.0, 4095.0],
        also=([],),
        at_least=-(10**9),
    )
    labels: str = option(
        "none", "folder: none, folders (parent folder = class) or a CSV file path,label"
    )
    test_root: str = option(
        "", "folder: labeled images to evaluate on; empty: hold out test_fraction"
    )
    test_fraction: float = option(
        0.2,
        "folder: share of the labeled images kept out of training, to evaluate on",
        at_least=0,
        at_most=1,
    )
    classes: list[str] = option(
        [], "imagenet10: the class folders to use, e.g. [n01440764,n02102040]"
    )
    mean: list[float] = option(
        [], "per channel, in 0..1, subtracted from every image; empty = 0.5", at_least=-(10**9)
    )
    std: list[float] = option([], "per channel, divides every image; empty = 0.25", at_least=0)
    workers: int = option(
        0, "processes that decode images; 0 = number of cores", at_least=0, at_most=1024
    )


def root_folder(options: DataOptions) -> Path:
    """The folder ``root``, with ``~`` expanded."""
    return Path(options.root).expanduser()


def cache_folder(options: DataOptions) -> Path:
    """The folder that decoded copies go to.

    A folder of images is the user's own and often read-only, so its cache defaults to the working
    directory.
    """
    if options.cache == NO_CACHE:
        return _temporary_folder()
    if options.cache:
        return Path(options.cache).expanduser()
    return (
        Path("data/cache")
        if options.name in ("folder", "imagenet10")
        else root_folder(options) / "cache"
    )


def require_memory(key: str, value: object, needed: int, what: str) -> None:
    """Refuses what would not fit into this machine's memory, before any of it is taken.

    Args:
        key: as typed on the command line.
        value: that was given.
        needed: bytes, at least.
        what: needs them.

    Raises:
        UserError: there is less, by the machine or by a limit of this process.
    """
    available = _memory()
    if needed > available:
        raise UserError(
            f"{key}={value}: {what} would take {byte_size(needed)} of memory, and "
            f"{byte_size(available)} are there; type a smaller number"
        )


def _memory() -> float:
    """The number of bytes that this process may use."""
    try:
        physical = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        limits = (
            [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
            if resource
            else []
        )
    except (AttributeError, OSError, ValueError):  # Not every system tells.
        return math.inf
    return min([physical, *(limit for limit in limits if limit >= 0)])


_TEMPORARY = "fedx-pl-images-"  # how names of folders for decoded copies begin that are not kept
_NEW_SECONDS = 60.0  # A folder that was just made may not be locked yet.


@cache
def _temporary_folder() -> Path:
    """Makes a private folder, deleted when this process ends, or by the next if it was killed."""
    _delete_left_behind()
    folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY))
    owner = os.getpid()
    held = lock(folder)  # for as long as this process lives

    def delete() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)
            held.close()

    atexit.register(delete)
    return folder


def _delete_left_behind() -> None:
    """Deletes decoded copies of this user's processes that were killed."""
    if fcntl is None:
        return
    for folder in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY}*"):
        # An error is a process that still lives, a folder of another user, or one that another
        # process deletes just now.
        with suppress(OSError):
            about = folder.lstat()
            new = time.time() - about.st_mtime < _NEW_SECONDS
            if new or not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
                continue
            with open(folder / LOCK, "rb") as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)


@dataclass(frozen=True)
class Split:
    """Images that are used together.

    Attributes:
        images: uint8, ``(N, H, W, C)``; copy-on-write memory map of the cache when large.
        labels: int64, ``(N,)``, -1 where an image has none; ``None`` when no image has one.
        groups: int64, ``(N,)``, the top-level sub-folder of each image, an index into
            ``ImageData.group_names``.
    """

    images: np.ndarray
    labels: np.ndarray | None
    groups: np.ndarray | None = None

    def take(self, index: np.ndarray) -> Split:
        """Returns a copy of the rows ``index`` ``(n,)``."""
        labels = None if self.labels is None else self.labels[index]
        groups = None if self.groups is None else self.groups[index]
        return Split(np.asarray(self.images[index]), labels, groups)


# uint8 (N, H, W, C), and labels (N,) if there are any.
Arrays = tuple[np.ndarray, np.ndarray | None]


@dataclass(frozen=True, kw_only=True)
class ImageData:
    """A data set, decoded and verified.

    Attributes:
        name: of a data set, or `ARRAYS`.
        train: what clients train on.
        test: labeled images never trained on; ``None`` when there is nothing to evaluate on.
        classes: names, by label.
        group_names: names, by group.
        source: where the content came from, for people.
        fingerprint: short hash of the content and of the subset taken; split files store it.
        skipped: files in the folder that are no readable images.
        whole_train: all training images where ``data.limit`` has left some out of ``train``.
        options: what it was loaded with; ``None`` for arrays.
        value_range: what became 0 and 255 in images of more than 8 bits per value; None if there
            are none.
    """

    name: str
    train: Split
    test: Split | None
    classes: tuple[str, ...]
    group_names: tuple[str, ...]
    source: str
    fingerprint: str
    skipped: int = 0
    value_range: ValueRange | None = None
    options: DataOptions | None = None
    whole_train: Split | None = None

    @property
    def labeled(self) -> Split:
        """All training images, also those that ``data.limit`` leaves out of ``train``."""
        return self.whole_train or self.train


def normalization(
    mean: Sequence[float], std: Sequence[float], channels: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The mean and standard deviation that images are normalized with, the same for all clients.

    They are given, since computing them would need the images of all clients in one place.

    Args:
        mean: per channel, of pixels in 0..1; empty: 0.5.
        std: likewise; empty: 0.25.
        channels: of an image.

    Raises:
        UserError: there are more or fewer numbers than channels, or a standard deviation is not
            positive.
    """
    means = tuple(mean) or (0.5,) * channels
    stds = tuple(std) or (0.25,) * channels
    for name, values in (("mean", means), ("std", stds)):
        if len(values) != channels:
            advice = f"{channels} numbers, one per channel"
            raise OptionError(name, list(values), advice=advice, owner=DataOptions)
    if not all(0 <= value <= 1 for value in means):
        advice = "numbers in 0..1: divide those of 0..255 by 255"
        raise OptionError("mean", list(means), advice=advice, owner=DataOptions)
    if not all(value > 0 for value in stds):
        raise OptionError("std", list(stds), advice="positive numbers", owner=DataOptions)
    return means, stds
