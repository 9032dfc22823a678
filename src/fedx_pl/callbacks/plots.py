"""Figures of a run.

Plain ``Figure`` objects, never pyplot: no global state, no display, safe in any thread.
"""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from fedx_pl.palette import BLUE, FRAME, GRAY, VERMILION, tidy
from fedx_pl.printing import measured

# The accuracies that are drawn: the key of a row, the label, the color and the marker, since shapes
# tell lines apart as well as colors do.
_ACCURACIES = (("linear_top1", "linear probe", BLUE, "o"), ("knn_top1", "kNN", VERMILION, "s"))


def partition_heatmap(
    counts: np.ndarray, classes: Sequence[str], clients: Sequence[str] | None = None
) -> Figure:
    """Draws how many images of each class every client has, and beside it each client's total.

    Args:
        counts: integer (clients, classes), or (clients, 1) when the images have no labels.
        classes: names of the columns; ignored when there is only one.
        clients: names of the rows; their numbers by default.
    """
    counts = np.asarray(counts)
    rows, columns = counts.shape
    if columns > 1 and len(classes) != columns:
        raise ValueError(f"{columns} columns of counts but {len(classes)} class names")
    names = [_short(name) for name in (map(str, range(rows)) if clients is None else clients)]
    # Many cells are drawn smaller (in inches), so that the picture stays between a postcard and two
    # pages: its memory must not grow with the number of clients.
    width = columns * min(max(7.5 / columns, 0.1), 0.75) if columns > 1 else 0
    cell_height = min(max(9.0 / rows, 0.1), 0.36, 20.0 / rows)
    figure = Figure(figsize=(width + 3.6, rows * cell_height + 1.5), dpi=110, layout="constrained")
    if columns > 1:
        heat, bars = figure.subplots(1, 2, sharey=True, width_ratios=[width, 1.8])
        _draw_heat(heat, counts, classes, width=width / columns, height=cell_height)
        bars.tick_params(axis="y", which="both", length=0, labelleft=False)
    else:  # A single column would repeat the bars.
        heat = bars = figure.subplots()
        heat.set_ylim(rows - 0.5, -0.5)
    heat.set_ylabel("client")
    heat.set_yticks(*_ticks(names, cell_height))
    heat.tick_params(length=0, labelsize=8)

    sizes = counts.sum(1)
    bars.barh(np.arange(rows), sizes, height=0.8, color=BLUE)
    bars.spines[["top", "right", "left"]].set_visible(False)
    bars.set_xlabel("images per client")
    if cell_height * 72 >= 11:
        labels = [measured(int(size)) for size in sizes]
        bars.bar_label(bars.containers[0], labels, padding=3, fontsize=8)
        bars.margins(x=0.35)  # room for the longest number
        bars.spines["bottom"].set_visible(False)
        bars.set_xticks([])
    else:
        bars.xaxis.set_major_locator(MaxNLocator(3, integer=True))
        bars.tick_params(axis="x", labelsize=8)
    figure.suptitle(f"{measured(int(sizes.sum()))} images on {rows} clients", fontsize=11)
    return figure


def _draw_heat(
    axes: Axes, counts: np.ndarray, classes: Sequence[str], width: float, height: float
) -> None:
    """Draws the (clients, classes) cells, with numbers if they fit and a color bar if not.

    Args:
        axes: where to draw.
        counts: integer (clients, classes).
        classes: names of the columns.
        width: of a cell, in inches.
        height: of a cell, in inches.
    """
    # Skewed splits have a few huge cells; the square root keeps small and empty cells distinct.
    norm = PowerNorm(0.5, vmin=0, vmax=max(1, counts.max()))
    image = axes.imshow(counts, cmap="Blues", norm=norm, aspect="auto")
    digit = 5.5  # the width of a digit of 8 points, in points
    if width * 72 >= digit * len(str(counts.max())) and height * 72 >= 11:
        for (row, column), count in np.ndenumerate(counts):
            if count:
                color = "white" if norm(count) > 0.6 else "black"
                axes.text(
                    column, row, f"{count}", ha="center", va="center", fontsize=8, color=color
                )
    else:
        axes.figure.colorbar(
            image, ax=axes, location="top", label="images per cell", aspect=50, shrink=0.5, pad=0.01
        )
    if min(width, height) >= 0.15:  # white lines between the cells
        axes.set_xticks(np.arange(counts.shape[1] + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(counts.shape[0] + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=1.5)
        axes.tick_params(which="minor", length=0)
    names = [_short(name) for name in classes]
    axes.set_xticks(*_ticks(names, width))
    if max(map(len, names)) * 0.07 > width:  # A letter of 8 points is about 0.07 inches wide.
        axes.tick_params(axis="x", labelrotation=90)
    axes.set_xlabel("class")
    axes.spines[:].set_color(FRAME)


def _ticks(names: Sequence[str], inches: float) -> tuple[list[int], list[str]]:
    """Positions and labels of every n-th name, for the least n that leaves 11 points to each."""
    step = next((n for n in (1, 5, 10, 20, 50, 100) if n * inches * 72 >= 11), len(names))
    chosen = list(range(0, len(names), step))
    return chosen, [names[position] for position in chosen]


def _short(name: str) -> str:
    """Shortens a name to fit beside a picture."""
    return name if len(name) <= 16 else f"{name[:15]}…"


def curves(rows: Sequence[Mapping[str, Any]], untrained: Mapping[str, Any] | None = None) -> Figure:
    """Draws accuracy by round, and the untrained encoder as a dashed line of the same color.

    Args:
        rows: one mapping per round, with ``round`` and any of ``linear_top1`` and ``knn_top1`` in
            percent. A round that was not evaluated has no such key, or ``None``, nan or an empty
            string there.
        untrained: the same accuracies of the encoder before the first round.
    """
    figure = Figure(figsize=(6.4, 4), dpi=110, layout="constrained")
    axes = figure.subplots()
    for key, label, color, marker in _ACCURACIES:
        points = [(int(row["round"]), _number(row.get(key))) for row in rows]
        points = [(number, value) for number, value in points if math.isfinite(value)]
        if points:
            rounds, values = zip(*points, strict=True)
            size = 4 if len(points) <= 40 else 0
            axes.plot(
                rounds,
                values,
                color=color,
                marker=marker,
                markersize=size,
                linewidth=1.8,
                label=label,
            )
        level = _number((untrained or {}).get(key))
        if math.isfinite(level):
            axes.axhline(
                level,
                color=color,
                linestyle="--",
                linewidth=1.2,
                alpha=0.8,
                label=f"{label}, untrained",
            )
    axes.set(xlabel="round", ylabel="top-1 accuracy (%)")
    axes.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 5, 10], integer=True))
    tidy(axes)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    else:
        axes.text(
            0.5,
            0.5,
            "not evaluated",
            transform=axes.transAxes,
            ha="center",
            va="center",
            color=GRAY,
        )
    return figure


def _number(value: object) -> float:
    """Reads a cell of a metrics table; nan if it was not measured."""
    return math.nan if value is None or value == "" else float(value)  # type: ignore[arg-type]


def view_grid(
    first: Tensor,
    second: Tensor,
    mean: Sequence[float],
    std: Sequence[float],
    *,
    pairs: int = 32,
    columns: int = 4,
) -> np.ndarray:
    """Draws two augmented views of the same images side by side, enlarged without smoothing.

    Args:
        first: normalized float (B, C, H, W) with 1 or 3 channels.
        second: the other view of the same images, of the same shape.
        mean: the mean of each channel that the normalization subtracts.
        std: the standard deviation of each channel that it divides by.
        pairs: how many pairs to show at most.
        columns: pairs per row.

    Returns:
        uint8 (height, width, 3).
    """
    views = torch.stack([first[:pairs], second[:pairs]], 1)  # (P, 2, C, H, W)
    views = views.detach().float().cpu()
    views = views * torch.tensor(std).view(-1, 1, 1) + torch.tensor(mean).view(-1, 1, 1)
    pixels = (views.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 1, 3, 4, 2).numpy()
    count, _, height, width, _ = pixels.shape
    zoom = max(1, 100 // max(height, width))  # 28 pixels become 84, and 32 become 96
    pixels = pixels.repeat(zoom, axis=2).repeat(zoom, axis=3)
    height *= zoom
    width *= zoom
    inner = 2  # The two views of an image nearly touch,
    outer = 14  # and adjacent pairs do not.
    columns = min(columns, count)
    lines = math.ceil(count / columns)
    pair_width = 2 * width + inner
    canvas = np.full(
        (lines * (height + outer) + outer, columns * (pair_width + outer) + outer, 3), 255, np.uint8
    )
    for number, (left, right) in enumerate(pixels):
        top = outer + number // columns * (height + outer)
        start = outer + number % columns * (pair_width + outer)
        canvas[top : top + height, start : start + width] = left
        canvas[top : top + height, start + width + inner : start + pair_width] = right
    return canvas


def pixels(figure: Figure) -> np.ndarray:
    """Draws a figure as uint8 (height, width, 3)."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def png(figure: Figure) -> bytes:
    """Draws a figure as the content of a PNG file."""
    stream = io.BytesIO()
    # Without the version of matplotlib, the same numbers give the same file.
    figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()
