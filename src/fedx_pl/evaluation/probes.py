"""kNN and the linear probe, as during training."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fedx_pl.errors import Report
from fedx_pl.evaluation.base import Evaluation, Tick, details, rounded

if TYPE_CHECKING:
    from fedx_pl.trainer import FederatedTrainer


class _Probe(Evaluation):
    kind = ""

    def measure(
        self, trainer: FederatedTrainer, report: Report = print, tick: Tick | None = None
    ) -> dict[str, Any]:
        """Measures accuracies in percent; beside kNN, the health of the features."""
        knn = self.kind == "knn"
        linear = self.kind == "linear"
        scores, health = trainer.evaluator.scores(
            trainer.model, trainer.device, knn=knn, linear=linear
        )
        score = scores[self.kind]
        numbers = {f"{self.kind}_top1": score.top1, f"{self.kind}_top5": score.top5} | health
        found = {key: rounded(value) for key, value in numbers.items()}
        return {**found, **details(score, trainer.datamodule.images.classes)}


class KNN(_Probe):
    """The votes of the nearest neighbors."""

    kind = "knn"

    def settings(self, local_epochs: int) -> dict[str, Any]:
        """The labels, and the number of neighbors."""
        return {"labels": self.options.labels, "k": self.options.knn_k}


class LinearProbe(_Probe):
    """A linear classifier on frozen features."""

    kind = "linear"

    def settings(self, local_epochs: int) -> dict[str, Any]:
        """The labels, and how the classifier is trained."""
        return {"labels": self.options.labels, **asdict(self.options.linear)}
