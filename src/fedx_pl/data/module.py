"""The images of a federation as a `LightningDataModule`.

data = FederatedDataModule("cifar10", partition=Dirichlet(clients=10, beta=0.5))
pl.Trainer(max_epochs=10).fit(SimCLR(resnet18()), data)     # all clients' images in one place: the
upper bound
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset

from fedx_pl.data import sources
from fedx_pl.data.augment import Augment
from fedx_pl.data.batches import ClientData, ImageStore, LocalEpochs, batches_of
from fedx_pl.data.images import (
    ARRAYS,
    RESIZED,
    Arrays,
    DataOptions,
    ImageData,
    Split,
    normalization,
    require_memory,
)
from fedx_pl.data.options import AugmentOptions
from fedx_pl.data.partition import Dirichlet, Given, Partition, checked
from fedx_pl.data.sources.named import STATISTICS
from fedx_pl.errors import UserError, in_arguments, options_of, say
from fedx_pl.methods.base import SSLMethod
from fedx_pl.options import OptionError, whole_number
from fedx_pl.seeding import derive


class FederatedDataModule(pl.LightningDataModule):
    """Images, their split over clients and their augmentation."""

    def __init__(
        self,
        source: "str | DataOptions | ImageData | Arrays | Dataset[Any] | Sequence[Dataset[Any]]",
        *,
        partition: Partition | None = None,
        test: "Arrays | Dataset[Any] | None" = None,
        batch_size: int = 128,
        augment: AugmentOptions | None = None,
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
        root: str = "data",
        limit: int = 0,
        resident_gb: float = 4.0,
        seed: int = 0,
        loader: sources.Source | None = None,
        report: Callable[[str], None] = say,
    ) -> None:
        """Chooses the images; `setup` loads them.

        Args:
            source: the name of a data set (``"cifar10"``, ``"folder"``), `DataOptions` with more to
                say, a pair of arrays (images uint8 (N, H, W, C), labels (N,) or None), a map-style
                data set whose items are images or (image, label), or a list with one such data set
                per client.
            partition: how images are dealt to clients; `Dirichlet()` if not given. Data sets of
                clients need none.
            test: labeled arrays or a data set to evaluate on, for arrays and data sets.
            batch_size: images per step; with FedX, half of them make the relation batch.
            augment: random views; those of the paper if not given.
            mean: per channel, of pixels in 0..1; known for named data sets, 0.5 for others.
            std: likewise; 0.25 for others.
            root: where archives lie, or the folder of images.
            limit: train on so many images, chosen by the seed; 0: on all.
            resident_gb: images up to this size stay on the training device.
            seed: of the split and of the limit.
            loader: a function of your own that loads the images of `DataOptions`; it is given them
                and ``report``, and returns (images, labels), two such pairs to train on and to
                evaluate on, or `ImageData`.
            report: takes a line for each thing worth knowing while images are loaded.
        """
        super().__init__()
        batch_size = whole_number("batch_size", batch_size, at_least=2)
        limit = whole_number("limit", limit, at_least=0)
        seed = whole_number("seed", seed, at_least=0)
        _require_meant(source, partition=partition, test=test, limit=limit, loader=loader)
        self.source = source
        self.test = test
        self.report = report
        self.loader = loader
        self.partition = partition or Dirichlet()
        self.batch_size = batch_size
        self.augment_options = options_of("augment", augment, AugmentOptions)
        self.mean, self.std = _per_channel("mean", mean), _per_channel("std", std)
        self.root = root
        self.limit = limit
        self.resident_gb = resident_gb
        self.seed = seed
        self._stores: dict[torch.device, ImageStore] = {}
        self._ready = False

    def setup(self, stage: str | None = None) -> None:
        """Loads the images and deals them out, once."""
        if self._ready:
            return
        with in_arguments(not isinstance(self.source, DataOptions | ImageData)):
            self.images = self._load()
            dealt = self.partition.deal(self.images, self.seed)
            self.clients = checked(dealt, self.partition, len(self.images.train.images))
            self.augment = self._make_augment()
        self._ready = True

    def __getstate__(self) -> dict[str, Any]:
        """The state for another process, without test images and images that it can load again."""
        state = vars(self) | {"report": _silent, "_stores": {}, "trainer": None, "test": None}
        if isinstance(self.source, str | DataOptions):
            for name in ("images", "clients", "augment"):
                state.pop(name, None)
            state["_ready"] = False
        elif self._ready:
            state["images"] = replace(self.images, test=None, whole_train=None)
            state["source"] = state["images"]
        return state

    @property
    def num_clients(self) -> int:
        """The number of clients that own the images."""
        return len(self.clients) or self.partition.clients

    @property
    def channels(self) -> int:
        """The number of channels of an image."""
        return int(self.images.train.images.shape[3])

    @property
    def image_size(self) -> int:
        """The side of an image as the network sees it."""
        return self.augment.options.size or self.images.train.images.shape[1]

    @property
    def options(self) -> DataOptions:
        """The options that choose these images."""
        if self.images.options is not None:
            return self.images.options
        return DataOptions(
            name=ARRAYS,
            image_size=self.images.train.images.shape[1],
            grayscale=self.channels == 1,
            mean=list(self.augment.mean),
            std=list(self.augment.std),
        )

    def class_counts(self) -> tuple[np.ndarray, list[str]]:
        """Images of each class at each client (clients, classes), and the names of the classes."""
        labels = self.images.train.labels
        if labels is None:
            return np.array([[len(rows)] for rows in self.clients]), ["images"]
        names = [*self.images.classes, "unlabeled"]
        counts = np.stack(
            [np.bincount(labels[rows] % len(names), minlength=len(names)) for rows in self.clients]
        )
        return (counts, names) if counts[:, -1].any() else (counts[:, :-1], names[:-1])

    def store_of(self, split: Split, device: torch.device) -> ImageStore:
        """The images on the device where training happens."""
        return ImageStore(split.images, device, int(self.resident_gb * 1e9))

    def client(
        self, client: int, *, seed: int, round_number: int, model: SSLMethod, device: torch.device
    ) -> ClientData:
        """The batches of a client in a round.

        Args:
            client: whose.
            seed: of the run.
            round_number: the round, from 1.
            model: says whether it wants a relation batch.
            device: where it trains.
        """
        seed = derive(seed, "data", round_number, client)
        return self.batches(self.clients[client], seed, model=model, device=device)

    def train_dataloader(self) -> LocalEpochs:
        """All clients' images together, for a plain `pl.Trainer`."""
        self.setup()
        trainer = self.trainer
        model = trainer.lightning_module if trainer else None
        device = trainer.strategy.root_device if trainer else torch.device("cpu")
        rows = np.sort(np.concatenate(self.clients))
        return LocalEpochs(
            self.batches(rows, derive(self.seed, "pooled"), model=model, device=device)
        )

    def batches(
        self, rows: np.ndarray, seed: int, *, model: object, device: torch.device
    ) -> ClientData:
        """Batches of some training images.

        Args:
            rows: (N,) of the training images.
            seed: of their order and of their views.
            model: says whether it wants a relation batch.
            device: where it trains.
        """
        if device not in self._stores:
            self._stores[device] = self.store_of(self.images.train, device)
        store = self._stores[device]
        return batches_of(
            store, rows, self.augment, batch_size=self.batch_size, model=model, seed=seed
        )

    def _load(self) -> ImageData:
        source = self.source
        if isinstance(source, str):
            mean, std = STATISTICS.get(source, ((), ()))
            source = DataOptions(
                name=source, root=self.root, limit=self.limit, mean=list(mean), std=list(std)
            )
        if isinstance(source, DataOptions):
            self._require_memory(source)
            return sources.load(source, seed=self.seed, report=self.report, source=self.loader)
        if isinstance(source, ImageData):
            return source
        test = _arrays(self.test, "the test images")
        if not _one_per_client(source):
            return sources.of_arrays(_arrays(source, "source"), test)  # type: ignore[arg-type]
        images, owners = sources.of_datasets(source)  # type: ignore[arg-type]
        count = int(owners[-1]) + 1
        rows = tuple(tuple(np.flatnonzero(owners == client).tolist()) for client in range(count))
        self.partition = Given(clients=count, rows=rows)
        return sources.of_arrays(images, test)

    def _require_memory(self, source: DataOptions) -> None:
        """Refuses, before hours of decoding, a batch with two views that cannot fit."""
        if self.loader is not None or source.name not in RESIZED:
            return
        side = sources.stored_side(source)
        channels = sources.stored_channels(source)
        view = self.augment_options.for_side(side).size or side
        needed = self.batch_size * channels * (side**2 + 2 * 4 * view**2)
        require_memory(
            "data.image_size", side, needed, what=f"training on {self.batch_size} images at a time"
        )

    def _make_augment(self) -> Augment:
        _, side, _, channels = self.images.train.images.shape
        options = self.images.options or DataOptions(name=ARRAYS)
        statistics = normalization(self.mean or options.mean, self.std or options.std, channels)
        return Augment(self.augment_options.for_side(side), *statistics)


def _require_meant(
    source: object, *, partition: object, test: object, limit: int, loader: object
) -> None:
    """Refuses a source of the wrong kind, and arguments that it leaves without effect."""
    name = type(source).__name__
    if isinstance(source, type | DataLoader | pl.LightningDataModule) or not (
        isinstance(source, str | DataOptions | ImageData) or hasattr(source, "__getitem__")
    ):
        raise UserError(
            f'source is {source if isinstance(source, type) else name}; give a name ("cifar10"), '
            f"arrays (images, labels), a map-style torch data set, or a list with one data set "
            f"per client"
        )
    if partition is not None and not isinstance(partition, Partition):
        raise UserError(
            f"partition={partition!r} is not a Partition; write e.g. partition=IID(clients=10)"
        )
    if isinstance(source, str | DataOptions | ImageData) and test is not None:
        raise UserError(
            f"test= is for arrays and data sets; {name} has test images of its own: leave it out"
        )
    if not isinstance(source, str | DataOptions | ImageData) and loader is not None:
        raise UserError(
            "loader= is for a data set by its name; leave it out, or give a name as source"
        )
    if not isinstance(source, str) and limit:
        instead = "DataOptions(limit=...)" if isinstance(source, DataOptions) else "fewer images"
        raise UserError(f"limit={limit} is for a data set by its name; give {instead} instead")
    if _one_per_client(source):
        if not len(source):  # type: ignore[arg-type]
            raise UserError("source is an empty list; give one data set per client")
        if partition is not None:
            raise UserError(
                f"partition={type(partition).__name__} beside a list of data sets, each of which "
                f"is a client; leave it out, or give one data set, e.g. "
                f"torch.utils.data.ConcatDataset(source)"
            )


def _per_channel(name: str, values: Any) -> tuple[float, ...]:
    values = (values,) if isinstance(values, Real) else tuple(values)
    if not all(isinstance(value, Real) for value in values):
        raise OptionError(name, values, advice=f"{{{name}}}=[0.5], one per channel")
    return tuple(value if isinstance(value, int) else float(value) for value in values)


def _one_per_client(source: object) -> bool:
    return isinstance(source, tuple | list) and not sources.is_pair(source)


def _arrays(source: Any, name: str) -> Arrays | None:
    """Converts a data set to arrays."""
    if source is None:
        return None
    if sources.is_pair(source):
        pair: Arrays = source
        return pair
    if sources.is_array(source):
        return source, None
    return sources.of_datasets([source], f"{name}, data set")[0]


def _silent(line: str) -> None:
    """Drops a line."""
