import math

import numpy as np
import pytest
import torch

from fedx_pl.evaluation import knn
from fedx_pl.evaluation.knn import knn_scores, knn_votes


def at(*degrees: float) -> torch.Tensor:
    """Points in the plane at these angles.

    Their cosine similarity is the cosine of the difference.
    """
    angles = torch.tensor(degrees).deg2rad()
    return torch.stack([angles.cos(), angles.sin()], 1)


def brute_force(train_x, train_y, test_x, k, tau, classes):
    """One sample, one neighbor at a time, in float64."""
    train = [row / np.linalg.norm(row) for row in train_x.double().numpy()]
    predictions = []
    for row in test_x.double().numpy():
        similarity = [float(row / np.linalg.norm(row) @ other) for other in train]
        votes = [0.0] * classes
        for neighbor in sorted(range(len(train)), key=lambda i: -similarity[i])[:k]:
            votes[int(train_y[neighbor])] += math.exp(similarity[neighbor] / tau)
        predictions.append(max(range(classes), key=votes.__getitem__))
    return predictions


@pytest.mark.parametrize(("k", "tau"), [(1, 0.1), (5, 0.1), (20, 0.5), (60, 0.07)])
@pytest.mark.parametrize(
    "chunk", [1, 200, 16_000_000]
)  # one row, several rows and all rows at once
def test_equals_the_brute_force_vote(monkeypatch, k, tau, chunk):
    monkeypatch.setattr(knn, "_CHUNK_ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(0)
    train_y = torch.randint(0, 4, (60,), generator=generator)
    train_x = torch.randn(60, 6, generator=generator) + train_y[:, None] * 0.5
    test_x = torch.randn(30, 6, generator=generator) + 0.75
    predictions = knn_votes(train_x, train_y, test_x, k=k, tau=tau, classes=4).argmax(1)
    assert predictions.tolist() == brute_force(train_x, train_y, test_x, k, tau, 4)


def test_temperature_decides_between_one_near_and_two_far_neighbors():
    """Query at 0, class 0 at 10 degrees, class 1 twice at 40: similarities 0.985 and 0.766.

    The far pair wins if 2 exp(0.766 / tau) > exp(0.985 / tau), that is if tau > 0.219 / ln 2 =
    0.316.
    """
    train_x, train_y = at(10, 40, -40), torch.tensor([0, 1, 1])
    assert knn_votes(train_x, train_y, at(0), k=3, tau=0.30, classes=2).argmax(1).tolist() == [0]
    assert knn_votes(train_x, train_y, at(0), k=3, tau=0.33, classes=2).argmax(1).tolist() == [1]
    assert knn_votes(train_x, train_y, at(0), k=1, tau=0.33, classes=2).argmax(1).tolist() == [0]


def test_length_of_the_features_does_not_matter():
    train_x, train_y = torch.cat([at(0) * 1e-3, at(50) * 1e3]), torch.tensor([0, 1])
    assert (
        knn_scores(train_x, train_y, at(20, 30) * 7, torch.tensor([0, 1]), k=1, classes=2).top1
        == 100.0
    )


def test_accuracy_is_in_percent_and_k_is_clipped():
    train_x, train_y = at(0, 5, 90, 95), torch.tensor([0, 0, 1, 1])
    test_y = torch.tensor([0, 1, 0, 1])
    assert knn_scores(train_x, train_y, at(1, 91, 92, 93), test_y, k=200, classes=2).top1 == 75.0


def test_a_tiny_temperature_does_not_overflow():
    """exp(1 / 0.005) is beyond float32: inf votes would tie and the lowest class would win."""
    train_x, train_y = at(0, 3), torch.tensor([1, 0])
    assert knn_votes(train_x, train_y, at(0), k=2, tau=0.005, classes=2).argmax(1).tolist() == [1]


def test_unlabeled_images_neither_vote_nor_count():
    train_x, train_y = at(0, 1, 2, 60), torch.tensor([-1, -1, -1, 1])
    assert (
        knn_scores(train_x, train_y, at(0, 90), torch.tensor([1, -1]), k=3, classes=2).top1 == 100.0
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["train", "test"])
def test_non_finite_features_give_nan_and_a_warning(bad, where):
    sets = {"train": at(0, 90), "test": at(0, 90)}
    sets[where][0, 0] = bad
    y = torch.tensor([0, 1])
    with pytest.warns(UserWarning, match=f"{where} features hold NaN or Inf"):
        assert math.isnan(knn_scores(sets["train"], y, sets["test"], y, classes=2).top1)


def test_no_labels_give_nan_and_a_warning():
    y = torch.tensor([0, 1])
    with pytest.warns(UserWarning, match="no labeled test images"):
        assert math.isnan(knn_scores(at(0, 90), y, at(0, 90), torch.full((2,), -1), classes=2).top1)


def test_a_collapsed_encoder_is_at_chance_level():
    """All features equal: every vote is the same, so one class is predicted for all."""
    y = torch.arange(4).repeat(5)
    assert knn_scores(torch.zeros(20, 3), y, torch.zeros(20, 3), y, classes=4).top1 == 25.0
