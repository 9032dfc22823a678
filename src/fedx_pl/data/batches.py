"""Batches of one client: rows of the resident images, augmented on the training device."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedx_pl.data.augment import Augment
from fedx_pl.methods.base import SSLMethod, Views
from fedx_pl.seeding import derive


class ImageStore:
    """All images of the process, uint8 (N, H, W, C), on the training device if they fit."""

    def __init__(self, images: np.ndarray, device: torch.device, resident_bytes: int) -> None:
        """Copies the images to the device if they fit.

        Args:
            images: (N, H, W, C) array, possibly memory-mapped.
            device: where training happens.
            resident_bytes: how much of the device's memory images may take.
        """
        self.device = device
        # The device of indices to `take`.
        self.index_device = device if images.nbytes <= resident_bytes else torch.device("cpu")
        self._resident: Tensor | None = None
        self._mapped = images
        if images.nbytes <= resident_bytes:
            whole = np.ascontiguousarray(images)
            # torch warns about read-only arrays although nothing here writes to them.
            self._resident = torch.from_numpy(whole if whole.flags.writeable else whole.copy()).to(
                device
            )

    def __len__(self) -> int:
        return len(self._mapped)

    def take(self, index: Tensor) -> Tensor:
        """Copies images (n, H, W, C) to the training device; ``index`` is on `index_device`."""
        if self._resident is not None:
            return self._resident[index]
        images = torch.from_numpy(self._mapped[index.numpy()])
        # Only from pinned memory does a copy to a GPU overlap with what the GPU is doing.
        images = images.pin_memory() if self.device.type == "cuda" else images
        return images.to(self.device, non_blocking=True)


@dataclass(frozen=True, kw_only=True)
class ClientData:
    """A client's images and how they become batches.

    Batches have one static shape. What is left over when the client's images do not fill the last
    batch comes in another epoch, since each is shuffled anew; a client smaller than a batch trains
    on one batch of all it has, and one with a single image on that image twice.
    """

    store: ImageStore
    index: Tensor  # (N,) the client's rows of the store, on the store's `index_device`
    augment: Augment
    batch_size: int  # as configured; `views_size` is what a batch really holds
    relation_size: int  # 0: no relation batch
    seed: int  # of this client in this round

    @property
    def num_images(self) -> int:
        """The number of images that the client owns."""
        return len(self.index)

    @property
    def views_size(self) -> int:
        """The number of images in each batch ``B``."""
        return min(self.batch_size, self.num_images)

    def __len__(self) -> int:
        return self.num_images // self.views_size

    def epoch(self, number: int) -> Iterator[Views]:
        """Yields the batches of a local epoch; the client's seed and the epoch decide them."""
        device = self.store.device
        generator = torch.Generator(device).manual_seed(derive(self.seed, "augment", number))
        order = self._order("order", number)
        relation = self._relation_batches(number)
        for chosen in order[: len(self) * self.views_size].split(self.views_size):
            chosen = at_least_two(chosen)
            images = self.store.take(self.index[chosen])
            parts = (
                [images, images, self.store.take(next(relation))]
                if self.relation_size
                else [images, images]
            )
            # All views in one go: on a CPU, calls cost about as much as their arithmetic.
            yield Views(
                self.augment(torch.cat(parts), generator), chosen.to(device, non_blocking=True)
            )

    def _relation_batches(self, number: int) -> Iterator[Tensor]:
        """Yields ``B_r``, in an order independent of ``B`` that starts again when it is used up."""
        size = min(self.relation_size, self.num_images)
        lap = 0
        while True:
            order = self.index[self._order("relation", number, lap)]
            yield from order[: self.num_images // size * size].split(size)
            lap += 1

    def _order(self, *purpose: int | str) -> Tensor:
        generator = torch.Generator().manual_seed(derive(self.seed, *purpose))
        return torch.randperm(self.num_images, generator=generator).to(self.store.index_device)

    def plain_batches(self, batch_size: int = 500) -> Iterator[Tensor]:
        """Yields all images in order, un-augmented and normalized."""
        for rows in self.index.split(batch_size):
            yield self.augment.plain(self.store.take(rows))

    def plain_sample(self, size: int) -> Tensor:
        """Draws at most ``size`` images at random, un-augmented and normalized."""
        return self.augment.plain(
            self.store.take(self.index[at_least_two(self._order("sample")[:size])])
        )


def batches_of(
    store: ImageStore,
    rows: np.ndarray,
    augment: Augment,
    *,
    batch_size: int,
    model: object,
    seed: int,
) -> ClientData:
    """The batches that a model asks for.

    Args:
        store: all images.
        rows: (N,) of them, the client's own.
        augment: makes the views.
        batch_size: images per step. ``B`` is as large with FedX's relational terms as without them,
            or an ablation would change two things at once.
        model: says how many of a step's images are reserved, and whether they come as a relation
            batch. What is no `SSLMethod` wants none.
        seed: of this client in this round.
    """
    reserved = 0
    relation_batch = False
    if isinstance(model, SSLMethod):
        reserved = model.reserved_images(batch_size)
        relation_batch = model.relation_batch
    return ClientData(
        store=store,
        index=torch.from_numpy(rows).to(store.index_device),
        augment=augment,
        batch_size=batch_size - reserved,
        relation_size=reserved if relation_batch else 0,
        seed=seed,
    )


def at_least_two(rows: Tensor) -> Tensor:
    """Doubles a single row, since BatchNorm needs two."""
    return rows.repeat(2) if len(rows) == 1 else rows


class LocalEpochs:
    """Iterates over a new epoch of `ClientData` each time Lightning asks."""

    def __init__(self, data: ClientData) -> None:
        self.data = data
        self.number = 0
        self.seconds = 0.0  # spent on making batches; on a GPU, on asking for them

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Views]:
        # A generator, so that an epoch counts when its first batch is asked for: Lightning also
        # makes iterators that it never uses.
        number = self.number
        self.number += 1
        batches = self.data.epoch(number)
        while True:
            started = time.perf_counter()
            batch = next(batches, None)
            self.seconds += time.perf_counter() - started
            if batch is None:
                return
            yield batch
