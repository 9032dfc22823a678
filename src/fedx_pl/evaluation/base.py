"""What an evaluation is: a way to measure the encoder of a run, after some rounds or when it is finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedx_pl.errors import Report
    from fedx_pl.evaluation.evaluate import EvaluationOptions
    from fedx_pl.evaluation.scores import Scores
    from fedx_pl.trainer import FederatedTrainer

Tick = Callable[[int, int], None]


class Evaluation:
    """Measures the model that a trainer holds.

    One of your own is a subclass with a method `measure`. ``evaluation.also=[package.module:Class]`` measures it
    whenever kNN is due, and ``fedx-pl evaluate RUN package.module:Class`` when a run is finished.
    """

    needs_labels = True
    trains_clients = False  # Then the code of the run's method must be the one that trained it.

    def __init__(self, options: EvaluationOptions) -> None:
        """Keeps the settings.

        Args:
            options: the keys ``evaluation.*``.
        """
        self.options = options

    def measure(
        self, trainer: FederatedTrainer, report: Report = print, tick: Tick | None = None
    ) -> dict[str, Any]:
        """What is found, by name. Numbers of the top level become columns of metrics.csv.

        Args:
            trainer: its ``model`` holds the global weights, ``datamodule`` the images, ``device`` says where.
            report: takes one line for each thing worth knowing.
            tick: called with (steps done, steps in all) while something is trained.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define measure(trainer, report, tick)"
        )

    def settings(self, local_epochs: int) -> dict[str, Any]:
        """What the result depends on, beside the weights; kept beside it.

        Args:
            local_epochs: of a client in a round.
        """
        return {}

    def figure(self, name: str, found: dict[str, Any]) -> Figure | None:
        """A picture of what was found, if there is one.

        Args:
            name: of the run.
            found: what `measure` returned.
        """
        return None


def details(score: Scores, classes: Sequence[str]) -> dict[str, Any]:
    """Accuracy by class, and who is taken for whom."""
    return {
        "per_class": {
            name: rounded(value) for name, value in zip(classes, score.per_class, strict=False)
        },
        "confusion": [list(row) for row in score.confusion],
    }


def rounded(value: float) -> float:
    """Nobody wants to read 28.740000000000002; nan stays."""
    return float(f"{value:.4f}")


def counter(tick: Tick | None, total: int) -> Callable[[], None]:
    """Counts its calls for ``tick(done, total)``."""
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if tick is not None:
            tick(done, total)

    return advance
