"""Images from Python, as arrays or as torch data sets: checked, and made uint8 (N, H, W, C)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from fedx_pl.data.images import ARRAYS, Arrays, ImageData, Split
from fedx_pl.data.sources import cache
from fedx_pl.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import Dataset

_MAX_CHANNELS = 4  # where it is not clear which axis they are
_MAX_CLASSES = 100_000
_SLACK = 0.01  # Resizing may overshoot 0..1 by so much.


def is_pair(source: object) -> bool:
    """Whether the source is (images, labels), not one data set per client."""
    if not (isinstance(source, tuple | list) and len(source) == 2):
        return False
    images, labels = source
    plain = (
        labels is None or is_array(labels) or (isinstance(labels, list) and _is_whole(labels[:1]))
    )
    return is_array(images) or (isinstance(images, list) and plain)


def _is_whole(labels: list[Any]) -> bool:
    return bool(labels) and isinstance(labels[0], int | np.integer)


def is_array(source: object) -> bool:
    """Whether the source is an array or a tensor."""
    from torch import Tensor

    return isinstance(source, np.ndarray | Tensor)


def of_arrays(train: Arrays, test: Arrays | None = None) -> ImageData:
    """Makes image data of arrays, to train on and to evaluate on.

    Args:
        train: images uint8 (N, H, W, C), or (N, H, W) if they are gray, and labels (N,) or None.
        test: likewise, with labels.

    Raises:
        UserError: they are something else.
    """
    split = _split(train, "the")
    held_out = None if test is None else _split(test, "the test")
    if held_out is not None:
        _require_fitting(split, held_out)
    labels = [
        part.labels for part in (split, held_out) if part is not None and part.labels is not None
    ]
    classes = max((int(values.max()) + 1 for values in labels), default=0)
    return ImageData(
        name=ARRAYS,
        train=split,
        test=held_out,
        classes=tuple(map(str, range(classes))) if split.labels is not None else (),
        group_names=(),
        source="arrays",
        fingerprint=cache.fingerprint_of(split, held_out),
    )


def of_datasets(
    clients: Sequence[Dataset[Any]], whose: str = "client"
) -> tuple[Arrays, np.ndarray]:
    """Turns all items of data sets into arrays, and notes which data set each is from.

    Args:
        clients: map-style data sets, or lists, whose items are images or (image, label).
        whose: what a data set is called in an error message, before its number.

    Raises:
        UserError: an item is something else; it is named.
    """
    images: list[np.ndarray] = []
    labels: list[int] = []
    owners: list[int] = []
    for client, dataset in enumerate(clients):
        count = _length(dataset, f"{whose} {client}")
        for number in range(count):
            item = f"item {number} of {whose} {client}"
            image, label = _parts(dataset[number], item)
            images.append(_pixels(image, item))
            labels.append(_label(label, item))
            owners.append(client)
            if images[-1].shape != images[0].shape:
                raise UserError(
                    f"{item} is an image of shape {images[-1].shape}, the first one of all has "
                    f"{images[0].shape}; bring all to one, e.g. with "
                    f"torchvision.transforms.Resize((96, 96))"
                )
    labeled = np.array(labels, np.int64)
    return (np.stack(images), labeled if (labeled >= 0).any() else None), np.array(owners)


def _split(arrays: Arrays, which: str) -> Split:
    if not is_pair(arrays):
        raise UserError(
            f"{which} images are given as {_kind(arrays)}; give a pair (images, labels) of arrays"
        )
    try:
        images = np.asarray(arrays[0])
        labels = arrays[1]
    except ValueError:
        raise UserError(f"{which} images are of different shapes; bring all to one") from None
    images = images[..., None] if images.ndim == 3 else images
    if images.dtype != np.uint8 or images.ndim != 4:
        raise UserError(
            f"{which} images are {images.dtype} {images.shape}; give uint8 (N, H, W, C), e.g. "
            f"{_bytes(images)}"
        )
    if images.shape[3] > _MAX_CHANNELS >= images.shape[1]:
        raise UserError(
            f"{which} images are {images.shape}, with channels first; give uint8 (N, H, W, C), "
            f"e.g. images.transpose(0, 2, 3, 1)"
        )
    if not images.size:
        raise UserError(f"{which} images are {images.shape}: there are none; give at least one")
    return Split(
        images, None if labels is None else _labels(np.asarray(labels), len(images), which)
    )


def _bytes(images: np.ndarray) -> str:
    """The code that a user may type to make bytes of other images."""
    if images.dtype == np.uint8:
        return "images.transpose(0, 2, 3, 1)"
    bright = images.dtype.kind == "f" and images.size and images.max() <= 1
    return (
        "(images * 255).round().astype(np.uint8)"
        if bright
        else "images.astype(np.uint8) if they are 0..255"
    )


def _labels(labels: np.ndarray, count: int, which: str) -> np.ndarray | None:
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if labels.shape != (count,):
        each = ", e.g. labels.argmax(axis=1)" if labels.ndim == 2 else ""
        raise UserError(
            f"{which} labels are {labels.shape} for {count} images; give one for each, "
            f"({count},){each}"
        )
    if labels.dtype.kind not in "iu":
        raise UserError(
            f"{which} labels are {labels.dtype}; give integers from 0, e.g. np.unique(labels, "
            f"return_inverse=True)[1]"
        )
    if labels.max() >= _MAX_CLASSES:
        raise UserError(
            f"{which} labels go up to {labels.max()}; give integers from 0 without gaps, e.g. "
            f"np.unique(labels, return_inverse=True)[1]"
        )
    if labels.min() < -1:
        raise UserError(
            f"{which} labels begin with {labels.min()}; give integers from 0, -1 for an image "
            f"without one"
        )
    return labels.astype(np.int64, copy=False) if labels.max() >= 0 else None


def _require_fitting(train: Split, test: Split) -> None:
    if test.images.shape[1:] != train.images.shape[1:]:
        raise UserError(
            f"the test images are {test.images.shape[1:]} and the training images "
            f"{train.images.shape[1:]} (H, W, C); give both in one size and with the same channels"
        )
    for split, which in ((test, "the test"), (train, "the training")):
        if split.labels is None:
            raise UserError(
                f"{which} images have no labels, and evaluation needs them; give (images, "
                f"labels), or leave out test"
            )


def _length(dataset: Any, which: str) -> int:
    from torch.utils.data import DataLoader, IterableDataset

    name = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise UserError(f"{which} is a DataLoader; give its data set, loader.dataset")
    if is_array(dataset) or is_pair(dataset) or isinstance(dataset, str):
        raise UserError(
            f"{which} is {_kind(dataset)}, not a data set; give e.g. "
            f"torch.utils.data.TensorDataset(images, labels) with uint8 images (N, C, H, W)"
        )
    if (
        isinstance(dataset, IterableDataset)
        or not hasattr(dataset, "__len__")
        or not hasattr(dataset, "__getitem__")
    ):
        raise UserError(
            f"{which} is a {name}, which has no length or no items by number; give a list: "
            f"list(dataset)"
        )
    if not (count := len(dataset)):
        raise UserError(f"{which} is a {name} without images; leave it out")
    return count


def _parts(item: Any, which: str) -> tuple[Any, Any]:
    if isinstance(item, dict):
        raise UserError(
            f"{which} is a dict of {', '.join(map(str, item))}; return (image, label) from "
            f"__getitem__"
        )
    if not isinstance(item, tuple | list):
        return item, None
    if len(item) > 2 or not item:
        raise UserError(
            f"{which} has {len(item)} parts; return an image or (image, label) from __getitem__"
        )
    return item[0], item[1] if len(item) == 2 else None


def _label(label: Any, which: str) -> int:
    if label is None:
        return -1
    try:
        number = np.asarray(label)
        whole = number.size == 1 and number.dtype.kind in "biu"
    except (TypeError, ValueError, RuntimeError):
        whole = False
    if not whole:
        raise UserError(f"{which} has the label {label!r}; return an integer from 0, or no label")
    return int(number.item())


def _pixels(image: Any, which: str) -> np.ndarray:
    """Converts an image to uint8 (H, W, C).

    Args:
        image: a PIL image, an array (H, W, C), or a tensor (C, H, W); bytes, or floats of 0..1.
        which: what it is called in an error message.
    """
    import torch
    from torch import Tensor

    if isinstance(image, Image.Image) and image.mode not in ("L", "RGB", "RGBA"):
        raise UserError(
            f"{which} is a PIL image of mode {image.mode}; "
            f'return image.convert("RGB"), or "L" for gray'
        )
    try:
        pixels = (
            image.detach().cpu() if isinstance(image, Tensor) else torch.from_numpy(np.array(image))
        )
    except TypeError:
        raise UserError(
            f"{which} is {image!r}; return an image: a tensor, an array or a PIL image"
        ) from None
    if isinstance(image, Tensor) and pixels.ndim == 3:
        pixels = pixels.movedim(0, -1)
    if pixels.ndim not in (2, 3):
        raise UserError(
            f"{which} has the shape {tuple(pixels.shape)}; return one image, (C, H, W) or (H, W)"
        )
    if pixels.is_floating_point():
        pixels = _as_bytes(pixels, which)
    if pixels.dtype != torch.uint8:
        raise UserError(
            f"{which} is of {pixels.dtype}; return bytes (uint8), or floats of 0..1 as of "
            f"ToTensor()"
        )
    return np.ascontiguousarray((pixels if pixels.ndim == 3 else pixels[..., None]).numpy())


def _as_bytes(pixels: Tensor, which: str) -> Tensor:
    low, high = (pixels.min().item(), pixels.max().item()) if pixels.numel() else (0.0, 0.0)
    if not (low >= -_SLACK and high <= 1 + _SLACK):  # Written so that NaN fails too.
        raise UserError(
            f"{which} has values from {low:.3g} to {high:.3g}; return bytes (uint8) or floats of "
            f"0..1 as of ToTensor(), without Normalize: the data module normalizes, by its mean= "
            f"and std="
        )
    return (pixels * 255).round().clamp(0, 255).byte()


def _kind(value: object) -> str:
    if is_array(value):
        return f"an array of shape {tuple(value.shape)}"  # type: ignore[attr-defined]
    return f"a {type(value).__name__}" + (
        f" of {len(value)}" if isinstance(value, tuple | list) else ""
    )
