"""The images of a federation as a `LightningDataModule`: who owns which, and how they become batches.

data = FederatedDataModule("cifar10", partition=Dirichlet(clients=10, beta=0.5))
pl.Trainer(max_epochs=10).fit(SimCLR(resnet18()), data)     # all clients' images in one place: the upper bound
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedx_pl.data import sources
from fedx_pl.data.augment import Augment, AugmentOptions
from fedx_pl.data.batches import ClientData, ImageStore, LocalEpochs, batches_of
from fedx_pl.data.images import ARRAYS, DataOptions, ImageData, Split, normalization
from fedx_pl.data.partition import Dirichlet, Given, Partition
from fedx_pl.data.sources.cache import fingerprint_of
from fedx_pl.data.sources.named import STATISTICS
from fedx_pl.errors import UserError, require
from fedx_pl.methods.base import SSLMethod
from fedx_pl.seeding import derive

Arrays = tuple[np.ndarray, np.ndarray | None]  # uint8 (N, H, W, C), and labels (N,) if there are any


class FederatedDataModule(pl.LightningDataModule):
    """Images, their split over clients and their augmentation."""

    def __init__(
        self,
        source: "str | DataOptions | ImageData | Arrays | Sequence[Dataset[Any]]",
        *,
        partition: Partition | None = None,
        test: Arrays | None = None,
        batch_size: int = 128,
        augment: AugmentOptions | None = None,
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
        root: str = "data",
        limit: int = 0,
        resident_gb: float = 4.0,
        seed: int = 0,
        report: Callable[[str], None] = print,
    ) -> None:
        """Says which images; they are loaded by `setup`.

        Args:
            source: the name of a data set (``"cifar10"``, ``"folder"``), `DataOptions` with more to say, a pair of
                arrays (images uint8 (N, H, W, C), labels (N,) or None), or one map-style data set per client, whose
                items are images or (image, label).
            partition: how images are dealt to clients; `Dirichlet()` if not given. Data sets of clients need none.
            test: labeled arrays to evaluate on, for arrays and data sets.
            batch_size: images per step; with FedX, half of them make the relation batch.
            augment: random views; those of the paper if not given.
            mean: per channel, of pixels in 0..1; known for named data sets, 0.5 for others.
            std: likewise; 0.25 for others.
            root: where archives lie, or the folder of images.
            limit: train on so many images, chosen by the seed; 0: on all.
            resident_gb: images up to this size stay on the training device.
            seed: of the split and of the limit.
            report: takes a line for each thing worth knowing while images are loaded.
        """
        super().__init__()
        require("batch_size", batch_size, batch_size >= 2, "batch_size=2 or more")
        self.source, self.test, self.report = source, test, report
        self.partition = partition or Dirichlet()
        self.batch_size, self.augment_options = batch_size, augment or AugmentOptions()
        self.mean, self.std = tuple(mean), tuple(std)
        self.root, self.limit, self.resident_gb, self.seed = root, limit, resident_gb, seed
        self._stores: dict[torch.device, ImageStore] = {}
        self._ready = False

    def setup(self, stage: str | None = None) -> None:
        """Loads the images and deals them out, once."""
        if self._ready:
            return
        self.images = self._load()
        self.clients = self.partition.deal(self.images, self.seed)
        self.augment = self._make_augment()
        self._ready = True

    @property
    def num_clients(self) -> int:
        """How many clients own the images."""
        return len(self.clients)

    def client(
        self, client: int, *, seed: int, round_number: int, model: SSLMethod, device: torch.device
    ) -> ClientData:
        """A client's batches in a round.

        Args:
            client: whose.
            seed: of the run.
            round_number: the round, from 1.
            model: says whether it wants a relation batch.
            device: where it trains.
        """
        return self._batches(self.clients[client], derive(seed, "data", round_number, client), model, device)

    def train_dataloader(self) -> LocalEpochs:
        """All clients' images together, for a plain `pl.Trainer`."""
        self.setup()
        trainer = self.trainer
        model = trainer.lightning_module if trainer else None
        device = trainer.strategy.root_device if trainer else torch.device("cpu")
        rows = np.sort(np.concatenate(self.clients))
        return LocalEpochs(self._batches(rows, derive(self.seed, "pooled"), model, device))

    def _batches(self, rows: np.ndarray, seed: int, model: object, device: torch.device) -> ClientData:
        if device not in self._stores:
            self._stores[device] = ImageStore(self.images.train.images, device, int(self.resident_gb * 1e9))
        store = self._stores[device]
        return batches_of(store, rows, self.augment, batch_size=self.batch_size, model=model, seed=seed)

    def _load(self) -> ImageData:
        source = self.source
        if isinstance(source, str):
            mean, std = STATISTICS.get(source, ((), ()))
            source = DataOptions(name=source, root=self.root, limit=self.limit, mean=list(mean), std=list(std))
        if isinstance(source, DataOptions):
            return sources.load(source, seed=self.seed, report=self.report)
        if isinstance(source, ImageData):
            return source
        if isinstance(source, tuple):
            return _of_arrays(source, self.test)
        images, owners = _of_datasets(source)
        rows = tuple(tuple(np.flatnonzero(owners == client).tolist()) for client in range(len(source)))
        self.partition = Given(clients=len(source), rows=rows)
        return _of_arrays(images, self.test)

    def _make_augment(self) -> Augment:
        _, side, _, channels = self.images.train.images.shape
        known = self.images.options or DataOptions(name=ARRAYS)
        statistics = normalization(self.mean or known.mean, self.std or known.std, channels)
        return Augment(self.augment_options.for_side(side), *statistics)


def _of_arrays(train: Arrays, test: Arrays | None) -> ImageData:
    images, labels = train
    if images.dtype != np.uint8 or images.ndim != 4:
        raise UserError(
            f"the images are {images.dtype} {images.shape}; give uint8 (N, H, W, C), e.g. images.transpose(0, 2, 3, 1)"
        )
    classes = tuple(str(number) for number in range(int(labels.max()) + 1)) if labels is not None else ()
    held_out = None if test is None else Split(*test)
    name = fingerprint_of(Split(images, labels), held_out)
    return ImageData(ARRAYS, Split(images, labels), held_out, classes, (), "arrays", name)


def _of_datasets(clients: "Sequence[Dataset[Any]]") -> tuple[Arrays, np.ndarray]:
    """All items of the clients' data sets as arrays, and who owns which."""
    images: list[np.ndarray] = []
    labels: list[int] = []
    owners: list[int] = []
    for client, dataset in enumerate(clients):
        for number in range(len(dataset)):  # type: ignore[arg-type]
            item = dataset[number]
            image, label = item if isinstance(item, tuple) else (item, -1)
            images.append(_pixels(image))
            labels.append(int(label))
            owners.append(client)
    labeled = np.array(labels, np.int64)
    return (np.stack(images), labeled if (labeled >= 0).any() else None), np.array(owners)


def _pixels(image: Any) -> np.ndarray:
    """An image as uint8 (H, W, C): a PIL image, an array (H, W, C), or a tensor (C, H, W) of bytes or of 0..1."""
    if isinstance(image, Tensor):
        whole = image if image.dtype == torch.uint8 else (image * 255).round().clamp(0, 255).to(torch.uint8)
        return np.ascontiguousarray(whole.movedim(0, -1).numpy())
    pixels = np.asarray(image)
    return pixels[..., None] if pixels.ndim == 2 else pixels
