"""Measures an encoder after a round: kNN and linear probe, on features extracted once."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedx_pl.data.images import ImageData, Split
from fedx_pl.evaluation.features import drawn_rows, extract
from fedx_pl.evaluation.geometry import health
from fedx_pl.evaluation.knn import knn_scores
from fedx_pl.evaluation.linear import linear_probe
from fedx_pl.evaluation.options import EvaluationOptions
from fedx_pl.evaluation.scores import Scores
from fedx_pl.methods.base import SSLMethod
from fedx_pl.seeding import derive

_UNLABELED = 10_000  # Without labels, the health is that of so many training images.
_ENOUGH = 10  # Fewer images use few dimensions, whatever the encoder: that would be a false alarm.


class Evaluator:
    """Measures what is due; without labels only the `health`, which warns of a collapse."""

    def __init__(
        self,
        options: EvaluationOptions,
        data: ImageData,
        prepare: Callable[[Tensor], Tensor],
        seed: int,
    ) -> None:
        """Keeps the options and the images.

        Args:
            options: how often, and the probe's settings.
            data: with labels for evaluation, or without.
            prepare: uint8 (n, H, W, C) -> normalized network input.
            seed: of the run.
        """
        self.options = options
        self.data = data
        self.prepare = prepare
        self.seed = seed

    @property
    def possible(self) -> bool:
        """Whether there are labels to measure against."""
        return self.data.test is not None and self.labeled.labels is not None

    @property
    def labeled(self) -> Split:
        """The training images whose labels evaluations may use."""
        return self.data.labeled if self.options.labels == "all" else self.data.train

    def due(self, round_number: int, rounds: int) -> tuple[bool, bool]:
        """Whether (kNN, linear) are due after a round; round 0 and the last round have both."""
        if round_number in (0, rounds):
            return True, True
        return (
            round_number % self.options.knn_every == 0,
            round_number % self.options.linear_every == 0,
        )

    def measure(
        self, model: SSLMethod, device: torch.device, round_number: int, rounds: int
    ) -> dict[str, float]:
        """Measures what is due after a round; results by name."""
        knn, linear = self.due(round_number, rounds)
        return self.evaluate(model, device, knn=knn, linear=linear)

    def evaluate(
        self, model: SSLMethod, device: torch.device, *, knn: bool, linear: bool
    ) -> dict[str, float]:
        """Measures accuracies in percent, and beside kNN the `health` of the test features.

        Without labels there is only the health, of some training images, always the same ones.

        Args:
            model: whose backbone is measured.
            device: where.
            knn: ``knn_top1``, ``rankme``, ``uniformity`` and ``feature_std`` are wanted.
            linear: ``linear_top1`` and ``linear_top5`` are wanted.
        """
        found = {}
        if self.possible and (knn or linear):
            scores, collapse = self.scores(model, device, knn=knn, linear=linear)
            found = {f"{kind}_top1": score.top1 for kind, score in scores.items()} | collapse
            found |= {"linear_top5": scores["linear"].top5} if linear else {}
        elif knn and len(self._sample) >= _ENOUGH:
            found = health(self._sampled(model, device))
        # A collapsed network has warned already, and JSON has no NaN; nobody wants to read
        # 28.740000000000002.
        return {
            name: float(f"{value:.4f}") for name, value in found.items() if math.isfinite(value)
        }

    def scores(
        self, model: SSLMethod, device: torch.device, *, knn: bool, linear: bool
    ) -> tuple[dict[str, Scores], dict[str, float]]:
        """The scores of kNN and linear probe, and beside kNN the `health` of the test features."""
        assert self.data.test is not None
        train_x, train_y = self._features(model, device, self.labeled)
        test_x, test_y = self._features(model, device, self.data.test)
        sets = (train_x, train_y, test_x, test_y)
        classes = len(self.data.classes)
        found: dict[str, Scores] = {}
        if knn:
            found["knn"] = knn_scores(*sets, k=self.options.knn_k, classes=classes)
        if linear:
            seed = derive(self.seed, "linear")
            found["linear"] = linear_probe(
                *sets, classes=classes, options=self.options.linear, seed=seed
            )
        return found, health(test_x) if knn else {}

    def _features(
        self, model: SSLMethod, device: torch.device, split: Split
    ) -> tuple[Tensor, Tensor]:
        assert split.labels is not None
        features = extract(model.backbone.to(device), split.images, self.prepare)
        return features, torch.from_numpy(split.labels).to(device)

    @cached_property
    def _sample(self) -> np.ndarray:
        """The rows of training images whose health is measured."""
        return drawn_rows(len(self.data.train.images), _UNLABELED, derive(self.seed, "health"))

    def _sampled(self, model: SSLMethod, device: torch.device) -> Tensor:
        network = model.backbone.to(device)
        images = self.data.train.images
        # A part at a time: so many large images may be more than memory holds.
        parts = (self._sample[start : start + 500] for start in range(0, len(self._sample), 500))
        return torch.cat([extract(network, images[rows], self.prepare) for rows in parts])

    def estimate_seconds(
        self, model: SSLMethod, device: torch.device, first_round: int, rounds: int
    ) -> float:
        """Estimates the time of all evaluations by one batch and one epoch of the probe."""
        left = rounds - first_round + 1
        # The untrained network and the last round have one anyway.
        looks = 2 + left // self.options.knn_every
        sample = (self.data.test or self.data.train).images[:500]
        if not len(sample):
            return 0.0
        started = time.perf_counter()
        features = extract(model.backbone.to(device), sample, self.prepare)
        per_image = (time.perf_counter() - started) / len(sample)
        if not self.possible:
            return looks * len(self._sample) * per_image
        assert self.data.test is not None
        labels = torch.zeros(len(features), dtype=torch.long, device=features.device)
        options = replace(self.options.linear, epochs=5)
        started = time.perf_counter()
        linear_probe(
            features,
            labels,
            features,
            test_y=labels,
            classes=len(self.data.classes),
            options=options,
            seed=0,
        )
        per_row = (time.perf_counter() - started) / (5 * len(features))
        probes = 2 + left // self.options.linear_every
        passes = max(probes, looks)
        images = len(self.labeled.images) + len(self.data.test.images)
        rows = len(self.labeled.images) * self.options.linear.epochs
        return passes * images * per_image + probes * rows * per_row
