"""How an encoder sees images, against hand-made embeddings."""

import math

import numpy as np
import pytest
import torch

from fedx_pl.callbacks import pictures


def at(*degrees: float) -> torch.Tensor:
    """Points on a circle; their length must not count."""
    lengths = torch.arange(1.0, len(degrees) + 1)
    turned = torch.tensor(degrees) * math.pi / 180
    return torch.stack([turned.cos(), turned.sin()], 1) * lengths[:, None]


def test_neighbors_are_sorted_by_angle_and_queries_are_one_of_each_class() -> None:
    """Points lie at 0, 10, 90 and 95 degrees.

    Seen from 0 the order is 10, 90, 95; seen from 90 it is 95, 10, 0.
    """
    found = pictures.nearest_neighbors(at(0, 10, 90, 95), np.array([4, 4, 7, 7]))
    assert found.tolist() == [[0, 1, 2, 3], [2, 3, 1, 0]]


def test_without_labels_the_first_images_are_the_queries() -> None:
    assert pictures.nearest_neighbors(at(0, 10, 90), None)[:, 0].tolist() == [0, 1, 2]
    assert pictures.nearest_neighbors(at(0, 10, 90), np.array([-1, -1, -1]))[:, 0].tolist() == [
        0,
        1,
        2,
    ]
    assert pictures.nearest_neighbors(at(0, 10, 90), np.array([-1, -1, 0]))[:, 0].tolist() == [2]


def test_the_same_class_is_framed_green_and_another_red() -> None:
    images = torch.zeros(3, 8, 8, 1, dtype=torch.uint8)
    grid = pictures.neighbor_grid(images, torch.tensor([[0, 1, 2]]), np.array([5, 5, 6]))
    assert grid.shape == (8 + 88, 3 * 88 + 24, 3)  # a cell is 72 pixels, frames of 4 and a gap of 8
    query, same, other = (tuple(grid[8, left]) for left in (8, 8 + 88 + 16, 8 + 2 * 88 + 16))
    assert (query, same, other) == ((255, 255, 255), (0, 158, 115), (213, 94, 0))
    plain = pictures.neighbor_grid(images, torch.tensor([[0, 1, 2]]), None)
    assert set(map(tuple, plain.reshape(-1, 3))) == {(255, 255, 255), (0, 0, 0)}


def test_main_axes_are_those_of_the_largest_variance() -> None:
    """(+-2, +-1) has variances 4 and 1 along the coordinate axes: shares of 0.8 and 0.2."""
    points = torch.tensor([[2.0, 1.0, 7.0], [2.0, -1.0, 7.0], [-2.0, 1.0, 7.0], [-2.0, -1.0, 7.0]])
    found, shares = pictures.main_axes(points)
    assert shares == pytest.approx([0.8, 0.2])
    assert np.abs(found) == pytest.approx(np.array([[2.0, 1.0]] * 4))


def test_an_axis_points_where_its_farthest_point_lies() -> None:
    line = torch.tensor([[0.0], [1.0], [5.0]])  # mean 2: the farthest is 5, 3 away
    for sign in (1, -1):
        found, shares = pictures.main_axes(sign * line)
        assert found[:, 0] == pytest.approx([-2, -1, 3])
        assert shares == pytest.approx([1, 0])


@pytest.mark.parametrize("labels", [None, np.array([0, 1, 12, -1])])
def test_a_map_names_the_classes_it_shows(labels: np.ndarray | None) -> None:
    figure = pictures.embedding_map(at(0, 10, 90, 95), labels, [f"kind {i}" for i in range(13)])
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == (["images"] if labels is None else ["other classes", "kind 0", "kind 1"])


def test_a_map_of_a_collapsed_encoder_is_still_a_map() -> None:
    points, shares = pictures.main_axes(torch.ones(5, 3))
    assert np.isfinite(points).all()
    assert np.isfinite(shares).all()


def test_thumbnails_are_small_and_in_colour() -> None:
    grey = torch.full((2, 100, 60, 1), 51, dtype=torch.uint8)
    small = pictures.thumbnails(grey)
    assert small.shape == (2, 3, 32, 32)
    assert small.unique().tolist() == pytest.approx([0.2])
