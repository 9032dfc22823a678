"""What is measured when, with labels and without."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_model
from torch import Tensor, nn

from fedx_pl.data.images import ImageData, Split
from fedx_pl.errors import UserError
from fedx_pl.evaluation import evaluate
from fedx_pl.evaluation.evaluate import EvaluationOptions, Evaluator
from fedx_pl.evaluation.features import extract
from fedx_pl.evaluation.geometry import health
from fedx_pl.evaluation.options import LinearOptions
from fedx_pl.methods import SimCLR

CPU = torch.device("cpu")


def prepare(images: Tensor) -> Tensor:
    return images.permute(0, 3, 1, 2).float().div(255)


def unlabeled(count: int, **options: Any) -> Evaluator:
    """Images whose first half is dark, as a folder that is sorted by path may be."""
    images = np.random.default_rng(0).integers(0, 100, (count, 16, 16, 3), dtype=np.uint8)
    images[count // 2 :] += 150
    data = ImageData(
        name="folder",
        train=Split(images, None),
        test=None,
        classes=(),
        group_names=(),
        source="",
        fingerprint="",
    )
    return Evaluator(EvaluationOptions(**options), data, prepare, seed=0)


def test_without_labels_the_health_of_the_training_images_is_measured_when_knn_is_due() -> None:
    evaluator, model = unlabeled(40, knn_every=2, linear_every=3), make_model(SimCLR)
    expected = health(extract(model.backbone, evaluator.data.train.images, prepare))
    found = [evaluator.measure(model, CPU, round, rounds=5) for round in range(6)]
    assert [set(row) for row in found] == [
        set(expected) if round in (0, 2, 4, 5) else set() for round in range(6)
    ]
    assert found[2] == pytest.approx(expected, rel=1e-2, abs=1e-3)
    assert evaluator.estimate_seconds(model, CPU, first_round=1, rounds=5) > 0


def test_of_many_unlabeled_images_some_are_drawn_always_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluate, "_UNLABELED", 600)
    seen: list[np.ndarray] = []

    def watched(network: torch.nn.Module, images: np.ndarray, *rest: Any) -> Tensor:
        seen.append(images)
        return extract(network, images, *rest)

    monkeypatch.setattr(evaluate, "extract", watched)
    model = make_model(SimCLR)
    looks = [unlabeled(1500).evaluate(model, CPU, knn=True, linear=True) for _ in range(2)]
    assert looks[0] == looks[1] != {}
    first, second = (np.concatenate(seen[i : i + 2]) for i in (0, 2))
    assert len(first) == 600
    assert np.array_equal(first, second)
    assert 200 < (first.mean(axis=(1, 2, 3)) > 100).sum() < 400


@pytest.mark.parametrize("count", [0, 1])
def test_where_there_are_no_images_nothing_is_measured(count: int) -> None:
    """A coordinator of real sites has none; of one image there is no spread to measure."""
    evaluator, model = unlabeled(count), make_model(SimCLR)
    assert evaluator.evaluate(model, CPU, knn=True, linear=True) == {}
    assert unlabeled(0).estimate_seconds(model, CPU, first_round=1, rounds=5) == 0


def labeled(limit: int, **options: Any) -> Evaluator:
    """Images whose class is their color; ``limit`` of them are trained on, all of class 0."""
    labels = np.arange(60) % 3
    images = np.random.default_rng(0).integers(0, 20, (60, 16, 16, 3), dtype=np.uint8)
    images[np.arange(60), :, :, labels] += 200
    whole, test = Split(images[:45], labels[:45]), Split(images[45:], labels[45:])
    names = ("red", "green", "blue")
    train = whole.take(np.flatnonzero(whole.labels == 0)[:limit])
    data = ImageData(
        name="folder",
        train=train,
        test=test,
        classes=names,
        group_names=(),
        source="",
        fingerprint="",
        whole_train=whole,
    )
    return Evaluator(EvaluationOptions(**options), data, prepare, seed=0)


def test_images_left_out_of_training_still_lend_their_labels_to_evaluations() -> None:
    """With labels of one class, only that class is predicted.

    With all labels, the mean color is enough.
    """
    model = make_model(SimCLR)
    model.backbone = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    how: dict[str, Any] = {"knn_k": 5, "linear": LinearOptions(lr=0.5)}
    few = labeled(10, labels="limit", **how).evaluate(model, CPU, knn=True, linear=True)
    many = labeled(10, **how).evaluate(model, CPU, knn=True, linear=True)
    assert few["knn_top1"] == few["linear_top1"] == pytest.approx(100 / 3, abs=0.01)
    assert many["knn_top1"] == many["linear_top1"] == 100


def test_which_labels_evaluations_use_is_all_or_limit() -> None:
    with pytest.raises(UserError, match="labels='some' is not possible; write all or limit"):
        EvaluationOptions(labels="some")
