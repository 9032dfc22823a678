"""Frozen features: what kNN, the linear probe and the geometry report measure."""

import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from fedx_pl.backbones import eager


def drawn_rows(images: int, most: int, seed: int) -> np.ndarray:
    """Draws rows, since the first images of a sorted folder may be all of one kind."""
    return np.random.default_rng(seed).permutation(images)[:most]


def extract(
    backbone: nn.Module,
    images: Tensor | np.ndarray,
    prepare: Callable[[Tensor], Tensor],
    batch_size: int = 500,
) -> Tensor:
    """Computes features of all images, without augmentation and without a trace in the backbone.

    Runs in eval and inference mode. The training flag of every submodule is put back as it was, so
    frozen (eval mode) BatchNorm layers inside a training network come back frozen; BatchNorm
    statistics do not move.

    Args:
        backbone: maps float (B, C, h, w) to (B, D); more axes are flattened.
        images: uint8 (N, H, W, C) on any device, or a NumPy array or memmap of the same shape, read
            batch by batch.
        prepare: maps uint8 (B, H, W, C) on the backbone's device to normalized float (B, C, h, w).
        batch_size: images per forward pass.

    Returns:
        float32 (N, D) on the backbone's device.
    """
    if len(images) == 0:
        raise ValueError("there are no images to extract features from")
    parameter = next(backbone.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    modes = [(module, module.training) for module in backbone.modules()]
    backbone.eval()
    try:
        with torch.inference_mode(), eager(backbone):
            batches = [
                backbone(prepare(_batch(images, start, batch_size).to(device))).flatten(1).float()
                for start in range(0, len(images), batch_size)
            ]
    finally:
        for module, training in modes:
            module.training = training
    # Outside inference mode: an ordinary tensor, which autograd may use later
    return torch.cat(batches)


def _batch(images: Tensor | np.ndarray, start: int, size: int) -> Tensor:
    """Rows as a tensor; NumPy rows are copied, because a memory map may be read-only."""
    rows = images[start : start + size]
    return rows if isinstance(rows, Tensor) else torch.from_numpy(np.array(rows))


def measurable(
    train_x: Tensor, train_y: Tensor, test_x: Tensor, test_y: Tensor, classes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """The labeled part of both sets on one device, or ``None`` if there is nothing to measure.

    Non-finite features and sets without labels warn instead of raising: a collapsed run, or one on
    unlabeled images, has no accuracy, but its training continues.

    Args:
        train_x: (N, D) features.
        train_y: (N,) labels in 0 .. classes - 1, or -1 for an unlabeled image.
        test_x: (M, D) features.
        test_y: (M,) labels like ``train_y``.
        classes: number of classes.
    """
    sets = []
    for name, x, y in (("train", train_x, train_y), ("test", test_x, test_y)):
        y = y.to(train_x.device, torch.int64)
        x = x.to(train_x.device, torch.float32)
        keep = y >= 0
        if not keep.all():
            x, y = x[keep], y[keep]
        if len(y) == 0:
            warnings.warn(f"no labeled {name} images: the accuracy is nan", stacklevel=3)
            return None
        if y.max() >= classes:
            raise ValueError(
                f"a {name} label is {int(y.max())}, but there are only {classes} classes"
            )
        if not torch.isfinite(x).all():
            warnings.warn(f"the {name} features hold NaN or Inf: the accuracy is nan", stacklevel=3)
            return None
        sets += [x, y]
    return sets[0], sets[1], sets[2], sets[3]
