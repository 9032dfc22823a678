"""The evaluation by fine-tuning on few labels."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fedx_pl.errors import Report
from fedx_pl.evaluation import finetune
from fedx_pl.evaluation.base import Evaluation, Tick, counter, details
from fedx_pl.seeding import derive

if TYPE_CHECKING:
    from fedx_pl.trainer import FederatedTrainer


class FewLabels(Evaluation):
    """Fine-tunes the encoder on each share of the labels."""

    def measure(
        self, trainer: FederatedTrainer, report: Report = print, tick: Tick | None = None
    ) -> dict[str, Any]:
        """Measures the accuracy by share, in percent."""
        data = trainer.datamodule.images
        options = self.options.semi
        labeled = trainer.evaluator.labeled
        augment = trainer.datamodule.augment
        labels = labeled.labels
        assert labels is not None
        assert data.test is not None
        seed = derive(trainer.seed, "semi")
        store = trainer.datamodule.store_of(labeled, trainer.device)
        subsets = [
            finetune.labeled_subset(labels, fraction, seed) for fraction in options.fractions
        ]
        advance = counter(tick, sum(options.steps(len(rows)) for rows in subsets))
        found = {}
        for fraction, rows in zip(options.fractions, subsets, strict=True):
            network = finetune.fine_tune(
                trainer.model.backbone,
                store,
                rows,
                labels=labels[rows],
                augment=augment,
                classes=len(data.classes),
                options=options,
                seed=seed,
                tick=advance,
            )
            score = finetune.scores(network, data.test, augment.plain)
            found[f"{fraction:g}"] = {
                "labels": len(rows),
                "top1": score.top1,
                **details(score, data.classes),
            }
        return found

    def settings(self, local_epochs: int) -> dict[str, Any]:
        """The labels, and how the network is trained."""
        return {"labels": self.options.labels, **asdict(self.options.semi)}
