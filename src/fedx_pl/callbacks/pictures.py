"""Pictures of an embedding: nearest neighbors, and a map of all images."""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from fedx_pl.palette import CATEGORIES, FRAME, GREEN, PALE_GRAY, VERMILION, WHITE, rgb

QUERIES = 8
NEIGHBORS = 7
_THUMBNAIL = 32  # pixels in the projector's sprite, which may have 8192
_SHOWN = 72  # pixels in the grid


def nearest_neighbors(features: Tensor, labels: np.ndarray | None) -> Tensor:
    """Finds the nearest neighbors of some images by cosine similarity.

    The queries are the first image of each class, or the first images without labels, at most
    eight. They are the same in every round, so that rounds can be compared.

    Args:
        features: float (N, D) of at least two images.
        labels: int (N,), -1 for an image without a label.

    Returns:
        int64 (Q, 1 + K) rows of ``features``: the query, then its neighbors, the nearest first.
    """
    queries = torch.tensor(_one_of_each(labels, len(features)))
    unit = F.normalize(features, dim=1)
    similarity = unit[queries] @ unit.T
    similarity[torch.arange(len(queries)), queries] = -math.inf  # An image is not its own neighbor.
    nearest = similarity.topk(min(NEIGHBORS, len(features) - 1), dim=1).indices
    return torch.cat([queries[:, None], nearest], 1)


def _one_of_each(labels: np.ndarray | None, count: int) -> list[int]:
    if labels is None or (labels < 0).all():
        return list(range(min(QUERIES, count)))
    _, first = np.unique(labels[labels >= 0], return_index=True)
    rows: list[int] = np.flatnonzero(labels >= 0)[first][:QUERIES].tolist()
    return rows


def neighbor_grid(images: Tensor, rows: Tensor, labels: np.ndarray | None) -> np.ndarray:
    """Draws a row for each query: the query, a gap, and its neighbors.

    A neighbor of the query's class has a green frame, another one a red frame.

    Args:
        images: uint8 (N, H, W, C).
        rows: from `nearest_neighbors`.
        labels: int (N,), or None for no frames.

    Returns:
        uint8 (height, width, 3).
    """
    shown = _resized(images[rows.flatten()], _SHOWN).permute(0, 2, 3, 1).numpy()
    shown = shown.reshape(*rows.shape, _SHOWN, _SHOWN, 3)
    frame = 4
    gap = 8
    side = _SHOWN + 2 * frame
    cell = side + gap
    lines, columns = rows.shape
    canvas = np.full((lines * cell + gap, columns * cell + 3 * gap, 3), 255, np.uint8)
    for line in range(lines):
        for column in range(columns):
            top = gap + line * cell
            left = gap + column * cell + (2 * gap if column else 0)
            color = WHITE
            if labels is not None and column and labels[rows[line, 0]] >= 0:
                is_same = labels[rows[line, column]] == labels[rows[line, 0]]
                color = GREEN if is_same else VERMILION
            framed = canvas[top : top + side, left : left + side]
            framed[:] = rgb(color)
            framed[frame:-frame, frame:-frame] = shown[line, column]
    return canvas


def embedding_map(features: Tensor, labels: np.ndarray | None, classes: Sequence[str]) -> Figure:
    """Draws the normalized features along their two main axes, with a color for each class.

    Args:
        features: float (N, D).
        labels: int (N,) or None; classes after the tenth share a gray.
        classes: the names of the classes.
    """
    points, shares = main_axes(F.normalize(features, dim=1))
    figure = Figure(figsize=(6, 4.4), dpi=110, layout="constrained")
    axes = figure.subplots()
    if labels is None:
        labels = np.full(len(points), -1)
    colored = np.where(labels < len(CATEGORIES), labels, -1)
    if (colored < 0).any():
        name = "other classes" if (colored >= 0).any() else "images"
        x, y = points[colored < 0].T
        axes.scatter(x, y, s=9, color=PALE_GRAY, label=name, linewidths=0)
    for label in np.unique(colored[colored >= 0]):
        x, y = points[colored == label].T
        axes.scatter(x, y, s=9, color=CATEGORIES[label], label=classes[label], linewidths=0)
    axes.set(
        xlabel=f"first main axis, {shares[0]:.0%} of the variance",
        ylabel=f"second main axis, {shares[1]:.0%}",
    )
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_color(FRAME)
    figure.legend(loc="outside right upper", frameon=False, markerscale=2.5, fontsize=11)
    return figure


def main_axes(features: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Projects features onto the two directions of largest variance.

    The sign of an axis is arbitrary. Here its largest coordinate is positive, so that the maps of
    successive rounds do not flip.

    Args:
        features: float (N, D).

    Returns:
        The coordinates (N, 2), and the share of the variance along each axis.
    """
    centered = features.double() - features.double().mean(0)
    u, singular, _ = torch.linalg.svd(centered, full_matrices=False)
    # A single feature has one axis only; the second is zero.
    u = F.pad(u, (0, 2))[:, :2]
    singular = F.pad(singular, (0, 2))
    points = (u * singular[:2]).numpy()
    flip = np.sign(points[np.abs(points).argmax(0), [0, 1]])
    shares = (singular[:2] ** 2 / (singular**2).sum().clamp(min=1e-12)).numpy()
    return points * np.where(flip == 0, 1, flip), shares


def thumbnails(images: Tensor) -> Tensor:
    """Shrinks images so that a thousand fit into the sprite of the projector.

    Args:
        images: uint8 (N, H, W, C).

    Returns:
        float (N, 3, h, w) in 0 to 1.
    """
    # In parts, since a thousand large images at once would fill the memory.
    parts = [_resized(part, _THUMBNAIL) for part in images.split(100)]
    return torch.cat(parts).float() / 255


def _resized(images: Tensor, side: int) -> Tensor:
    """Resizes uint8 (N, H, W, C) to (N, 3, side, side); enlarges without smoothing."""
    pixels = images.permute(0, 3, 1, 2).float()
    is_large = max(pixels.shape[2:]) > side
    resized = F.interpolate(pixels, (side, side), mode="area" if is_large else "nearest")
    return resized.round().to(torch.uint8).expand(-1, 3, -1, -1)
