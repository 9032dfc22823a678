"""Scores against counts by hand."""

import math

import pytest
import torch

from fedx_pl.evaluation.scores import score


def test_four_images_of_three_classes_by_hand() -> None:
    """Labels 0 0 1 1, predictions 0 2 1 1.

    Three of four are right; class 0 half, class 1 all, class 2 has no image.
    """
    outputs = torch.tensor([[3.0, 1.0, 2.0], [1.0, 0.0, 2.0], [0.0, 5.0, 1.0], [0.0, 2.0, 1.0]])
    found = score(outputs, torch.tensor([0, 0, 1, 1]), classes=3)
    assert found.top1 == 75.0
    assert found.top5 == 100.0
    assert found.per_class[:2] == (50.0, 100.0)
    assert math.isnan(found.per_class[2])
    assert found.confusion == ((1, 0, 1), (0, 2, 0), (0, 0, 0))


def test_top_5_is_among_the_five_largest() -> None:
    """Of six classes the label is the smallest output once in four."""
    outputs = torch.arange(6.0).repeat(4, 1)
    found = score(outputs, torch.tensor([0, 1, 2, 5]), classes=6)
    assert (found.top1, found.top5) == (25.0, 75.0)


@pytest.mark.parametrize("classes", [2, 7, 100])
def test_accuracies_agree_with_the_confusion_matrix(classes: int) -> None:
    torch.manual_seed(0)
    labels = torch.randint(classes, (500,))
    found = score(torch.randn(500, classes), labels, classes)
    confusion = torch.tensor(found.confusion)
    assert found.top1 == pytest.approx(100 * confusion.trace().item() / 500, rel=1e-6)
    assert confusion.sum(1).tolist() == torch.bincount(labels, minlength=classes).tolist()
