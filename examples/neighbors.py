"""Draws the picture in the README: test images and their nearest neighbors in the training set.

    python examples/neighbors.py runs/NAME docs/neighbors.png

Nothing is chosen by hand: the query is the first test image of each class. A green frame marks a
neighbor of the same class. The encoder never saw a label.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch.nn.functional as F

from fedx_pl import Encoder
from fedx_pl.config import compose as config
from fedx_pl.data import sources
from fedx_pl.palette import GREEN, PALE_GRAY

NEIGHBORS = 6


def draw(run: Path, picture: Path) -> None:
    """Writes the picture of a run on labeled images."""
    settings = config.load(run / "config.yaml")
    data = sources.load(settings.data, seed=settings.seed)
    encoder = Encoder.of(run)
    train = data.labeled
    queries = [
        int(np.flatnonzero(data.test.labels == label)[0]) for label in range(len(data.classes))
    ]
    bank = F.normalize(encoder.embed(train.images))
    nearest = (
        (F.normalize(encoder.embed(data.test.images[queries])) @ bank.T)
        .topk(NEIGHBORS)
        .indices.numpy()
    )

    # Two blocks of a query and its neighbors, with a gap between them.
    rows = len(queries) // 2
    columns = 2 * NEIGHBORS + 3
    figure, axes = plt.subplots(rows, columns, figsize=(columns * 0.74, rows * 0.92), dpi=120)
    for axis in axes.flat:
        axis.set_axis_off()
    for label, query in enumerate(queries):
        row = label % rows
        start = (label // rows) * (NEIGHBORS + 2)
        show(axes[row, start], data.test.images[query], "black", data.classes[label])
        for place, image in enumerate(nearest[label]):
            color = GREEN if train.labels[image] == label else PALE_GRAY
            show(axes[row, start + 1 + place], train.images[image], color)
    figure.subplots_adjust(0.005, 0.01, 0.995, 0.95, wspace=0.1, hspace=0.34)
    figure.savefig(picture)


def show(axis: plt.Axes, image: np.ndarray, color: str, title: str = "") -> None:
    """Draws one image in a frame."""
    axis.set_axis_on()
    axis.set(xticks=[], yticks=[])
    axis.imshow(image, interpolation="bicubic")
    axis.set_title(title, fontsize=8, pad=3)
    for side in axis.spines.values():
        side.set(color=color, linewidth=2.2)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
