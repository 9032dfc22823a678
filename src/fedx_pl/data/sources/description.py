"""Texts about data sets, for `fedx-pl data`."""

import textwrap

import numpy as np

from fedx_pl.data.images import ImageData, Split
from fedx_pl.data.sources import named
from fedx_pl.data.sources.survey import number


def overview() -> str:
    """Lists the data sets, with what to type for each."""
    rows = []
    for name, make in named.NAMED.items():
        spec = make()
        height, width, channels = spec.shape
        train, test = spec.counts
        kind = f"{height} x {width}, {'color' if channels == 3 else 'gray'}"
        rows.append((name, f"{train:,} + {test:,} images, {kind}", ""))
    imagenet = "ten classes of your copy of ImageNet"
    rows.append(("imagenet10", imagenet, " data.root=/path/to/imagenet"))
    rows.append(("folder", "your own images", " data.root=/path/to/images"))
    lines = [f"  {name:<11}{text:<42}fedx-pl data {name}{more}" for name, text, more in rows]
    return "\n".join(["data sets, and what to type to fetch and describe one:", *lines])


def describe(data: ImageData) -> str:
    """Describes a data set: counts, size, color statistics, origin."""
    height, width, channels = data.train.images.shape[1:]
    plural = "s" if channels > 1 else ""
    lines = [f"{data.name}: {height} x {width} pixels, {channels} channel{plural}"]
    lines += _split_lines("train", data.train, data.classes)
    lines += _split_lines("test", data.test, data.classes)
    mean, std = _statistics(data.train.images)
    lines.append("mean: " + " ".join(f"{value:.4f}" for value in mean))
    lines.append("std: " + " ".join(f"{value:.4f}" for value in std))
    if data.group_names:
        lines.append(f"sub-folders: {len(data.group_names)}")
    if data.value_range:
        low, high = map(number, data.value_range)
        lines.append(
            f"value range: {low}..{high} became 0..255 in images of more than 8 bits per value"
        )
    if data.skipped:
        lines.append(f"skipped: {data.skipped} files that are no readable images")
    return "\n".join([*lines, f"source: {data.source}", f"fingerprint: {data.fingerprint}"])


def _split_lines(name: str, split: Split | None, classes: tuple[str, ...]) -> list[str]:
    if split is None:
        return [f"{name}: none"]
    lines = [f"{name}: {len(split.images)} images"]
    if split.labels is not None and classes:
        counts = np.bincount(split.labels[split.labels >= 0], minlength=len(classes))
        shown = [f"{label} {count}" for label, count in zip(classes, counts, strict=True)]
        if unlabeled := int((split.labels < 0).sum()):
            shown.append(f"unlabeled {unlabeled}")
        text = textwrap.fill(", ".join(shown), 100, initial_indent="  ", subsequent_indent="  ")
        lines.append(text)
    return lines


def _statistics(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation per channel, in [0, 1]; exact, and in blocks for memory maps.

    Args:
        images: uint8 ``(N, H, W, C)``.

    Returns:
        Two arrays, float64 ``(C,)``.
    """
    counts = np.zeros((images.shape[-1], 256), np.int64)
    for start in range(0, len(images), 1024):
        block = images[start : start + 1024]
        for channel in range(len(counts)):
            counts[channel] += np.bincount(block[..., channel].reshape(-1), minlength=256)
    levels = np.arange(256) / 255
    share = counts / counts.sum(axis=1, keepdims=True)
    mean = share @ levels
    return mean, np.sqrt(share @ levels**2 - mean**2)
