import itertools
import math

import numpy as np
import pytest
import torch
from matplotlib import pyplot
from matplotlib.colors import to_hex

from fedx_pl.callbacks.plots import curves, partition_heatmap, pixels, view_grid


def split(clients: int, classes: int) -> np.ndarray:
    return np.random.default_rng(0).integers(1, 400, (clients, classes))


@pytest.mark.parametrize(("clients", "classes"), [(2, 2), (5, 10), (10, 100), (100, 1), (100, 10)])
def test_heatmap_shows_the_counts_and_the_client_sizes(clients, classes):
    counts = split(clients, classes)
    figure = partition_heatmap(counts, [f"class {number}" for number in range(classes)])
    bars = figure.axes[1] if classes > 1 else figure.axes[0]
    assert [bar.get_width() for bar in bars.patches] == counts.sum(1).tolist()
    if classes > 1:
        assert np.array_equal(figure.axes[0].images[0].get_array(), counts)
    height, width, channels = pixels(figure).shape
    assert channels == 3
    assert max(height, width) < 1600


def test_client_zero_is_on_top():
    for classes in (1, 3):
        bottom, top = partition_heatmap(split(4, classes), ["a"] * classes).axes[0].get_ylim()
        assert (bottom, top) == (3.5, -0.5)


def test_cells_hold_numbers_when_they_fit_and_a_color_bar_explains_them_when_not():
    few = partition_heatmap(np.array([[5, 0], [30, 400]]), ["a", "b"])
    assert [text.get_text() for text in few.axes[0].texts] == ["5", "30", "400"]
    assert len(few.axes) == 2
    many = partition_heatmap(split(100, 10), [str(number) for number in range(10)])
    assert not many.axes[0].texts
    assert len(many.axes) == 3


@pytest.mark.parametrize("clients", [5, 10, 30, 100])
def test_labels_of_clients_do_not_overlap(clients):
    figure = partition_heatmap(
        split(clients, 10), ["automobile"] * 10, [f"hospital {n}" for n in range(clients)]
    )
    pixels(figure)  # draws, which settles the layout
    boxes = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert len(boxes) >= 5
    for upper, lower in itertools.pairwise(boxes):
        assert lower.y1 <= upper.y0 + 1


def test_long_names_are_cut():
    figure = partition_heatmap(split(2, 2), ["a", "b"], ["x" * 40, "short"])
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["x" * 15 + "…", "short"]


def test_class_names_must_match_the_columns():
    with pytest.raises(ValueError, match="3 columns of counts but 2 class names"):
        partition_heatmap(split(2, 3), ["a", "b"])


def test_unlabelled_images_need_no_class_names():
    (axes,) = partition_heatmap(np.array([[3], [4]]), []).axes
    assert [bar.get_width() for bar in axes.patches] == [3, 4]


def test_an_empty_split_can_be_drawn():
    assert pixels(partition_heatmap(np.zeros((2, 3), int), ["a", "b", "c"])).size


def test_curves_skip_rounds_that_were_not_evaluated():
    rows = [
        {"round": 1, "knn_top1": 30.0, "linear_top1": None},
        {"round": 2, "knn_top1": math.nan, "linear_top1": "41.5"},  # as read from a CSV file
        {"round": 3, "knn_top1": 33.0, "linear_top1": ""},
        {"round": 4},
    ]
    (axes,) = curves(rows, {"knn_top1": 25.0, "linear_top1": None}).axes
    lines = {line.get_label(): line for line in axes.lines}
    assert sorted(lines) == ["kNN", "kNN, untrained", "linear probe"]
    assert lines["kNN"].get_xydata().tolist() == [[1, 30], [3, 33]]
    assert lines["linear probe"].get_xydata().tolist() == [[2, 41.5]]
    untrained = lines["kNN, untrained"]
    assert set(untrained.get_ydata()) == {25.0}
    assert untrained.get_linestyle() == "--"
    assert to_hex(untrained.get_color()) == to_hex(lines["kNN"].get_color())


def test_a_figure_without_curves_says_so():
    (axes,) = curves([], None).axes
    assert [text.get_text() for text in axes.texts] == ["not evaluated"]


@pytest.mark.parametrize(("size", "channels"), [(28, 1), (32, 3), (224, 3)])
def test_view_grid_puts_the_two_views_of_an_image_side_by_side(size, channels):
    """Image i has the gray value 20 (i + 1) in its first view and 20 (i + 1) + 10 in its second."""
    values = torch.arange(1, 6).float().mul(20).view(-1, 1, 1, 1).expand(5, channels, size, size)
    first, second = values / 255, (values + 10) / 255
    mean, std = [0.5] * channels, [0.25] * channels
    grid = view_grid((first - 0.5) / 0.25, (second - 0.5) / 0.25, mean, std, columns=2)
    assert grid.dtype == np.uint8
    assert grid.shape[2] == 3
    assert np.array_equal(grid[..., 0], grid[..., 2])
    inside = grid[..., 0]
    order = [list(dict.fromkeys(row[row != 255].tolist())) for row in inside[:: size // 4]]
    rows = [list(row) for row in dict.fromkeys(tuple(row) for row in order if row)]
    assert rows == [[20, 30, 40, 50], [60, 70, 80, 90], [100, 110]]


def test_view_grid_shows_at_most_so_many_pairs_and_enlarges_small_images():
    views = torch.zeros(50, 1, 28, 28)
    one = view_grid(views, views, [0.0], [1.0], pairs=1)
    assert (one == 0).all(2).sum() == 2 * 84 * 84  # 28 x 3, twice


def test_view_grid_clips_values_outside_of_the_image_range():
    views = torch.tensor([-3.0, 5.0]).view(2, 1, 1, 1).expand(2, 3, 4, 4)
    assert set(np.unique(view_grid(views, views, [0.0] * 3, [1.0] * 3))) == {0, 255}


def test_pyplot_is_not_touched():
    pyplot.close("all")
    pixels(partition_heatmap(split(2, 2), ["a", "b"]))
    pixels(curves([{"round": 1, "knn_top1": 1.0}]))
    assert pyplot.get_fignums() == []


def test_the_picture_does_not_grow_with_a_thousand_clients():
    few, many = (
        pixels(partition_heatmap(np.ones((n, 10), dtype=int), list("abcdefghij")))
        for n in (200, 2000)
    )
    assert many.shape[0] <= few.shape[0] * 1.05
