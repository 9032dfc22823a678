import math

import numpy as np
import pytest
import torch
from matplotlib.cbook import boxplot_stats

from fedx_pl.evaluation.geometry import (
    alignment,
    angles,
    box,
    health,
    interclass_angles,
    prototypes,
    rankme,
    uniformity,
)


def noise(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def test_angles_of_known_directions_whatever_their_length():
    first = torch.tensor([[1.0, 0.0]] * 4)
    second = torch.tensor([[7.0, 0.0], [0.0, 0.1], [-3.0, 0.0], [2.0, 2.0]])
    torch.testing.assert_close(
        angles(first, second), torch.tensor([0, 90, 180, 45], dtype=torch.float64)
    )


def test_angles_of_parallel_vectors_are_zero_and_never_nan():
    """The float cosine of a vector with itself may be just above 1, where arccos is nan."""
    z = noise(1000, 33)
    assert angles(z, 3 * z).max() < 1e-4
    assert angles(z, -z).min() > 180 - 1e-4


def test_prototypes_are_means_of_the_class_and_leave_unlabeled_images_out():
    z = torch.tensor([[1.0, 1.0], [3.0, 5.0], [9.0, 9.0], [0.0, 2.0]])
    found = prototypes(z, torch.tensor([0, 0, -1, 2]), classes=3)
    assert found[[0, 2]].tolist() == [[2.0, 3.0], [0.0, 2.0]]
    assert found[1].isnan().all()


def test_interclass_angles_of_all_pairs_of_classes_that_have_images():
    """Prototypes (2, 0), none, (0, 1), (-1, 0).

    Pairs (0, 2), (0, 3) and (2, 3) are 90, 180 and 90 degrees apart.
    """
    z = torch.tensor([[1.0, 1.0], [3.0, -1.0], [0.0, 1.0], [-1.0, 0.0], [5.0, 5.0]])
    found = interclass_angles(z, torch.tensor([0, 0, 2, 3, -1]), classes=4)
    torch.testing.assert_close(found, torch.tensor([90, 180, 90], dtype=torch.float64))


def test_alignment_is_the_mean_squared_distance_of_directions():
    """Directions (1, 0) and (0, 1) are sqrt(2) apart, the second pair is the same: (2 + 0) / 2."""
    assert alignment(
        torch.tensor([[5.0, 0], [0, 2]]), torch.tensor([[0, 0.1], [0, 4]])
    ) == pytest.approx(1.0)


def test_uniformity_of_known_directions():
    """Three directions 120 degrees apart: every squared distance is 3, log exp(-2 * 3).

    Two equal ones and one across have the squared distances 0, 2, 2.
    """
    turn = 2 * math.pi / 3
    star = torch.tensor([[math.cos(i * turn), math.sin(i * turn)] for i in range(3)])
    assert uniformity(star) == pytest.approx(-6, abs=1e-5)
    assert uniformity(torch.tensor([[1.0, 0], [2, 0], [0, 3]])) == pytest.approx(
        math.log((1 + 2 * math.exp(-4)) / 3)
    )
    assert uniformity(star, t=0.5) == pytest.approx(-1.5, abs=1e-5)


def test_uniformity_equals_the_mean_over_pairs_and_a_sample_of_many_comes_near_it():
    z = noise(5000, 3)
    directions = torch.nn.functional.normalize(z)
    whole = torch.pdist(directions).square().mul(-2).exp().mean().log().item()
    assert uniformity(z) == uniformity(z)
    assert uniformity(z) == pytest.approx(whole, abs=0.02)
    few = torch.pdist(directions[:1500]).square().mul(-2).exp().mean().log().item()
    assert uniformity(z[:1500]) == pytest.approx(few, abs=1e-4)
    assert math.isnan(uniformity(z[:1]))


def test_rankme_is_the_exponential_of_the_entropy_of_the_singular_values():
    """Singular values 3 and 1 are shares 3/4 and 1/4."""
    expected = math.exp(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert rankme(torch.tensor([[3.0, 0.0], [0.0, 1.0], [0.0, 0.0]])) == pytest.approx(
        expected, abs=1e-4
    )
    assert rankme(torch.eye(6)) == pytest.approx(6, abs=1e-3)
    assert rankme(torch.ones(50, 8)) == pytest.approx(1, abs=1e-3)
    assert rankme(torch.zeros(50, 8)) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(("rows", "columns"), [(200, 16), (10, 40)])
def test_rankme_equals_its_definition_by_a_singular_value_decomposition(rows, columns):
    features = noise(rows, columns) * torch.logspace(0, -6, columns)
    singular = torch.linalg.svdvals(features.double())
    p = singular / singular.sum() + 1e-7
    assert rankme(features) == pytest.approx((-(p * p.log()).sum()).exp().item(), rel=1e-4)


def test_health_of_directions_that_spread_and_of_a_collapse():
    """The eight directions +-e_i in 4 dimensions.

    Each column is 1, -1 and six zeros, of variance 2 / 7.
    """
    spread = health(torch.cat([torch.eye(4), -torch.eye(4)]))
    assert spread["feature_std"] == pytest.approx(math.sqrt(2 / 7))
    assert spread["rankme"] == pytest.approx(4, abs=1e-3)
    collapsed = health(torch.ones(100, 4) + 1e-6 * noise(100, 4))
    assert collapsed["feature_std"] == pytest.approx(0, abs=1e-5)
    assert collapsed["uniformity"] == pytest.approx(0, abs=1e-5)
    assert collapsed["rankme"] == pytest.approx(1, abs=1e-3)


def test_health_of_broken_features_is_nan():
    features = noise(10, 4)
    features[3, 1] = math.inf
    assert all(math.isnan(value) for value in health(features).values())


def test_box_is_what_matplotlib_draws():
    values = torch.cat([noise(500, 1)[:, 0], torch.tensor([-20.0, 30.0, 31.0])])
    (expected,) = boxplot_stats(values.numpy())
    keys = {
        "mean": "mean",
        "median": "med",
        "q1": "q1",
        "q3": "q3",
        "low": "whislo",
        "high": "whishi",
    }
    assert box(values.reshape(-1, 1)) == {
        name: pytest.approx(expected[key]) for name, key in keys.items()
    }
    assert set(box(torch.tensor([5.0])).values()) == {5.0}


def test_box_of_numbers_by_hand():
    """0, 1, 2, 3, 4 and 100.

    Quartiles 1.25, 2.5 and 3.75, so that 100 is beyond 3.75 + 1.5 * 2.5.
    """
    found = box(torch.tensor([0.0, 1, 2, 3, 4, 100]))
    expected = {"q1": 1.25, "median": 2.5, "q3": 3.75, "low": 0.0, "high": 4.0, "mean": 110 / 6}
    assert found == {name: pytest.approx(value) for name, value in expected.items()}
    assert all(
        isinstance(value, float) and not isinstance(value, np.floating) for value in found.values()
    )
