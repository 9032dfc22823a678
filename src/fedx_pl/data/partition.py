"""Partitions: objects that split a data set over clients.

    Dirichlet(clients=10, beta=0.5)

To write your own, subclass `Partition` and define `deal`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedx_pl.data import dealing, split_file
from fedx_pl.data.images import ImageData
from fedx_pl.errors import UserError
from fedx_pl.options import OptionError


@dataclass(frozen=True)
class Partition:
    """A way to split the training images over clients."""

    clients: int = 10

    def deal(self, data: ImageData, seed: int) -> list[np.ndarray]:
        """Deals the rows: one sorted int64 array per client, disjoint and not empty.

        Args:
            data: the images, with labels and groups if there are any.
            seed: the same for the same split.
        """
        raise UserError(f"partition={type(self).__name__} must define deal(data, seed)")


@dataclass(frozen=True)
class IID(Partition):
    """A split into equal parts at random."""

    def deal(self, data: ImageData, seed: int) -> list[np.ndarray]:
        """Shuffles all rows and cuts them into equal parts."""
        return dealing.iid(len(data.train.images), self.clients, seed)


@dataclass(frozen=True)
class Dirichlet(Partition):
    """A mix of classes whose shares come from Dir(beta); a smaller beta is more skewed."""

    beta: float = 0.5
    min_size: int = 10  # fewest images of a client

    def __post_init__(self) -> None:
        dealing.check_beta(self.beta)

    def deal(self, data: ImageData, seed: int) -> list[np.ndarray]:
        """Draws shares of each class; the images must have labels."""
        dealing.check_clients(self.clients, len(data.train.images))
        return dealing.dirichlet(
            _labels(data, Dirichlet), self.clients, self.beta, seed=seed, min_size=self.min_size
        )


@dataclass(frozen=True)
class QuantitySkew(Partition):
    """Skewed sizes, which follow Dir(beta), with the same mix of classes."""

    beta: float = 0.5
    min_size: int = 10

    def __post_init__(self) -> None:
        dealing.check_beta(self.beta)

    def deal(self, data: ImageData, seed: int) -> list[np.ndarray]:
        """Draws sizes, and deals random images."""
        return dealing.quantity_skew(
            len(data.train.images), self.clients, self.beta, seed=seed, min_size=self.min_size
        )


@dataclass(frozen=True)
class ClassesPerClient(Partition):
    """A few classes for each client."""

    classes: int = 2

    def deal(self, data: ImageData, seed: int) -> list[np.ndarray]:
        """Gives classes to clients; the images must have labels."""
        dealing.check_clients(self.clients, len(data.train.images))
        return dealing.classes_per_client(
            _labels(data, ClassesPerClient), self.clients, self.classes, seed=seed
        )


@dataclass(frozen=True)
class Folders(Partition):
    """One client per sub-folder of the images, in sorted order."""

    def deal(self, data: ImageData, seed: int) -> list[np.ndarray]:
        """Makes a client of each sub-folder; the images must have groups."""
        dealing.check_clients(self.clients, len(data.train.images))
        if data.train.groups is None:
            problem = "needs sub-folders in {root}"
            advice = "{partition=IID()} or {partition=QuantitySkew()}"
            raise OptionError("partition=Folders()", ..., problem, advice)
        split = dealing.by_group(data.train.groups)
        if len(split) != self.clients:
            problem = f"but {{root}} has {len(split)} sub-folders ({{partition=Folders()}})"
            raise OptionError("clients", self.clients, problem, f"{{clients}}={len(split)}")
        return split


@dataclass(frozen=True)
class FromFile(Partition):
    """The split of an earlier run, from its split.json."""

    file: str = ""

    def deal(self, data: ImageData, seed: int) -> list[np.ndarray]:
        """Reads the file, which must be of the same images."""
        split = split_file.load(
            self.file, fingerprint=data.fingerprint, num_images=len(data.train.images)
        )
        if len(split) != self.clients:
            problem = f"deals to {len(split)} clients, not {self.clients}"
            raise OptionError("file", self.file, problem, f"{{clients}}={len(split)}")
        return split


@dataclass(frozen=True)
class Given(Partition):
    """Rows that are given, such as those of one data set per client."""

    rows: tuple[tuple[int, ...], ...] = ()

    def deal(self, data: ImageData, seed: int) -> list[np.ndarray]:
        """Returns the given rows."""
        return [np.array(rows, np.int64) for rows in self.rows]


@dataclass(frozen=True)
class Elsewhere(Partition):
    """An empty split: the images are at real sites, which do not share them."""

    def deal(self, data: ImageData, seed: int) -> list[np.ndarray]:
        """Returns no rows."""
        return []


def checked(rows: Any, partition: Partition, num_images: int) -> list[np.ndarray]:
    """Checks what `Partition.deal` returned.

    Returns:
        Sorted int64 rows of each client, disjoint and not empty.

    Raises:
        UserError: a client's rows are something else; it names the client.
    """

    def wrong(what: str) -> UserError:
        return UserError(
            f"partition={type(partition).__name__} gives {what}; deal(data, seed) returns one "
            f"array of image numbers from 0 to {num_images - 1} for each client, disjoint and not "
            f"empty"
        )

    if not isinstance(rows, Sequence | np.ndarray):
        raise wrong(f"a {type(rows).__name__}")
    if not len(rows) and not isinstance(partition, Elsewhere):
        raise wrong("images to no client")
    owner = np.full(num_images, -1, np.int64)
    clients = []
    for client, client_rows in enumerate(rows):
        numbers = np.asarray(client_rows)
        if not numbers.size:
            raise wrong(f"no images to client {client}")
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
            raise wrong(
                f"{numbers.dtype} {numbers.shape} to client {client}, which are no image numbers"
            )
        if numbers.min() < 0 or numbers.max() >= num_images:
            odd = numbers[(numbers < 0) | (numbers >= num_images)][0]
            raise wrong(f"image {odd} to client {client}")
        numbers = np.sort(numbers.astype(np.int64, copy=False))
        if len(taken := numbers[owner[numbers] >= 0]):
            raise wrong(f"image {taken[0]} to client {owner[taken[0]]} and to client {client}")
        if len(twice := numbers[1:][numbers[1:] == numbers[:-1]]):
            raise wrong(f"image {twice[0]} twice to client {client}")
        owner[numbers] = client
        clients.append(numbers)
    return clients


# By their names on the command line.
PARTITIONS: dict[str, type[Partition]] = {
    "iid": IID,
    "dirichlet": Dirichlet,
    "classes": ClassesPerClient,
    "quantity": QuantitySkew,
    "folders": Folders,
}


def _labels(data: ImageData, kind: type[Partition]) -> np.ndarray:
    if data.train.labels is None:
        problem = "needs labels and the images have none"
        advice = (
            "{partition=IID()} or {partition=QuantitySkew()}, "
            "or {partition=Folders()} if they are in folders"
        )
        raise OptionError(f"partition={kind.__name__}()", ..., problem, advice)
    return data.train.labels
