"""How an encoder sees images: what it finds alike, and all of them on a map."""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

QUERIES, NEIGHBOURS = 8, 7
_THUMBNAIL, _SHOWN = 32, 72  # pixels: in the projector's sprite, which may have 8192; in the grid
_SAME, _OTHER, _NONE = (0, 158, 115), (213, 94, 0), (255, 255, 255)  # Okabe and Ito's green and red
_COLOURS = [
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#B2A800", "#000000", "#999999", "#7B3294",
]  # fmt: skip


def neighbours(features: Tensor, labels: np.ndarray | None) -> Tensor:
    """Some images and those most like each, by cosine similarity.

    The queries are the first image of each class, or without labels the first images of all, eight at most: the same
    in every round, so that rounds can be compared.

    Args:
        features: float (N, D), N being 2 or more.
        labels: int (N,), -1 for an image without one.

    Returns:
        int64 (Q, 1 + K) rows of ``features``: the query, then its neighbours, the most similar first.
    """
    queries = torch.tensor(_one_of_each(labels, len(features)))
    unit = F.normalize(features, dim=1)
    like = unit[queries] @ unit.T
    like[torch.arange(len(queries)), queries] = -math.inf  # Not itself.
    nearest = like.topk(min(NEIGHBOURS, len(features) - 1), dim=1).indices
    return torch.cat([queries[:, None], nearest], 1)


def _one_of_each(labels: np.ndarray | None, count: int) -> list[int]:
    if labels is None or (labels < 0).all():
        return list(range(min(QUERIES, count)))
    _, first = np.unique(labels[labels >= 0], return_index=True)
    return np.flatnonzero(labels >= 0)[first][:QUERIES].tolist()


def neighbour_grid(images: Tensor, rows: Tensor, labels: np.ndarray | None) -> np.ndarray:
    """A line for each query: the query, a gap, its neighbours, framed green if of the query's class and red if not.

    Args:
        images: uint8 (N, H, W, C).
        rows: of `neighbours`.
        labels: int (N,), or none: then there are no frames.

    Returns:
        uint8 (height, width, 3).
    """
    shown = (
        _resized(images[rows.flatten()], _SHOWN)
        .permute(0, 2, 3, 1)
        .numpy()
        .reshape(*rows.shape, _SHOWN, _SHOWN, 3)
    )
    frame, gap = 4, 8
    cell = _SHOWN + 2 * frame + gap
    lines, columns = rows.shape
    canvas = np.full((lines * cell + gap, columns * cell + 3 * gap, 3), 255, np.uint8)
    for line in range(lines):
        for column in range(columns):
            top, left = gap + line * cell, gap + column * cell + (2 * gap if column else 0)
            colour = _NONE
            if labels is not None and column and labels[rows[line, 0]] >= 0:
                colour = _SAME if labels[rows[line, column]] == labels[rows[line, 0]] else _OTHER
            canvas[top : top + _SHOWN + 2 * frame, left : left + _SHOWN + 2 * frame] = colour
            canvas[top + frame : top + frame + _SHOWN, left + frame : left + frame + _SHOWN] = (
                shown[line, column]
            )
    return canvas


def embedding_map(features: Tensor, labels: np.ndarray | None, classes: Sequence[str]) -> Figure:
    """The directions of the features along their two main axes, a colour for each of the first ten classes.

    Args:
        features: float (N, D).
        labels: int (N,) or none.
        classes: their names.
    """
    points, shares = main_axes(F.normalize(features, dim=1))
    figure = Figure(figsize=(6, 4.4), dpi=110, layout="constrained")
    axes = figure.subplots()
    known = (
        np.full(len(points), -1) if labels is None else np.where(labels < len(_COLOURS), labels, -1)
    )
    if (known < 0).any():
        rest = "other classes" if (known >= 0).any() else "images"
        axes.scatter(
            points[known < 0, 0],
            points[known < 0, 1],
            s=9,
            color="#BBBBBB",
            label=rest,
            linewidths=0,
        )
    for label in np.unique(known[known >= 0]):
        x, y = points[known == label].T
        axes.scatter(x, y, s=9, color=_COLOURS[label], label=classes[label], linewidths=0)
    axes.set(
        xlabel=f"first main axis, {shares[0]:.0%} of the variance",
        ylabel=f"second main axis, {shares[1]:.0%}",
    )
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_color("#CCCCCC")
    figure.legend(loc="outside right upper", frameon=False, markerscale=2.5, fontsize=11)
    return figure


def main_axes(features: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates (N, 2) along the two directions of largest variance, and the shares of the variance they have.

    An axis may point either way; here the way on which its largest coordinate lies, so that maps of neighbouring
    rounds do not flip for nothing.
    """
    centred = features.double() - features.double().mean(0)
    u, singular, _ = torch.linalg.svd(centred, full_matrices=False)
    u, singular = F.pad(u, (0, 2))[:, :2], F.pad(singular, (0, 2))  # One feature has one axis only.
    points = (u * singular[:2]).numpy()
    flip = np.sign(points[np.abs(points).argmax(0), [0, 1]])
    shares = (singular[:2] ** 2 / (singular**2).sum().clamp(min=1e-12)).numpy()
    return points * np.where(flip == 0, 1, flip), shares


def thumbnails(images: Tensor) -> Tensor:
    """uint8 (N, H, W, C) -> float (N, 3, h, w) in 0 to 1, small enough for a sprite of a thousand."""
    parts = [
        _resized(part, _THUMBNAIL) for part in images.split(100)
    ]  # A thousand large ones would fill the memory.
    return torch.cat(parts).float() / 255


def _resized(images: Tensor, side: int) -> Tensor:
    """uint8 (N, H, W, C) -> uint8 (N, 3, side, side); small ones are enlarged without smoothing."""
    pixels = images.permute(0, 3, 1, 2).float()
    large = max(pixels.shape[2:]) > side
    found = F.interpolate(pixels, (side, side), mode="area" if large else "nearest")
    return found.round().to(torch.uint8).expand(-1, 3, -1, -1)
