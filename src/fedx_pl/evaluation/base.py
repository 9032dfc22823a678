"""The contract of an evaluation, which measures the encoder of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedx_pl.errors import Report
    from fedx_pl.evaluation.options import EvaluationOptions
    from fedx_pl.evaluation.scores import Scores
    from fedx_pl.trainer import FederatedTrainer

Tick = Callable[[int, int], None]


class Evaluation:
    """Measures the model that a trainer holds.

    To write your own, subclass this and define `measure`.
    ``evaluation.also=[package.module:Class]`` measures it whenever kNN is due, and ``fedx-pl
    evaluate RUN package.module:Class`` when a run is finished.
    """

    needs_labels = True
    trains_clients = False  # Then the code of the run's method must be the one that trained it.

    def __init__(self, options: EvaluationOptions) -> None:
        """Keeps the options.

        Args:
            options: the keys ``evaluation.*``.
        """
        self.options = options

    def measure(
        self, trainer: FederatedTrainer, report: Report = print, tick: Tick | None = None
    ) -> dict[str, Any]:
        """Measures, and returns results by name; numbers become columns of metrics.csv.

        Args:
            trainer: its ``model`` holds the global weights, ``datamodule`` the images, ``device``
                says where.
            report: takes one line for each thing worth knowing.
            tick: called with (steps done, steps in all) while something is trained.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define measure(trainer, report, tick)"
        )

    def settings(self, local_epochs: int) -> dict[str, Any]:
        """The settings that the result depends on, which are kept beside it.

        Args:
            local_epochs: epochs of a client in a round.
        """
        return {}

    def figure(self, name: str, results: dict[str, Any]) -> Figure | None:
        """Draws the results, if there is something to draw.

        Args:
            name: the run.
            results: what `measure` returned.
        """
        return None


def details(score: Scores, classes: Sequence[str]) -> dict[str, Any]:
    """The accuracy by class, and the confusion matrix."""
    return {
        "per_class": {
            name: rounded(value) for name, value in zip(classes, score.per_class, strict=False)
        },
        "confusion": [list(row) for row in score.confusion],
    }


def rounded(value: float) -> float:
    """Rounds to four digits, since nobody wants to read 28.740000000000002; nan stays."""
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
