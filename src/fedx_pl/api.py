"""The command line's power in Python::

from fedx_pl import federate

result = federate("cifar10-byol-fedx", rounds=5, profile="cpu")
result.history          # a DataFrame, one row per round
result.encoder          # images in, features out
result.plot()           # accuracy by round
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedx_pl.config.build import lacks_gpu, prepare
from fedx_pl.config.compose import compose
from fedx_pl.config.schema import flat
from fedx_pl.trainer import Orchestrator, Result

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from fedx_pl.encoder.load import Encoder

_SHORT = {"rounds": "federation.rounds", "clients": "federation.clients", "epochs": "federation.epochs"}


@dataclass(frozen=True)
class Federation:
    """A finished run."""

    result: Result

    @property
    def folder(self) -> Path:
        """Of the run."""
        return self.result.folder

    @cached_property
    def encoder(self) -> Encoder:
        """The trained encoder, in eval mode on the CPU."""
        from fedx_pl.encoder.load import Encoder

        return Encoder.of(self.folder, allow_code=True)  # This process has run it.

    @cached_property
    def history(self) -> pandas.DataFrame:
        """Losses, accuracies and times, one row per round; row 0 is the untrained network."""
        import pandas  # Here, for it takes a second.

        rows: list[dict[str, Any]] = [{"round": 0, **self.result.untrained}, *self.result.rows]
        return pandas.DataFrame(rows).set_index("round")

    def plot(self) -> Figure:
        """Accuracy by round."""
        from fedx_pl.callbacks import plots

        return plots.curves(self.result.rows, self.result.untrained)


def federate(experiment: str = "", *overrides: str, quiet: bool = False, **settings: Any) -> Federation:
    """Runs a federation, or goes on with it; a finished one is read.

    Args:
        experiment: ``DATA-METHOD`` or ``DATA-METHOD-fedx``; empty if overrides say it.
        overrides: ``key=value``, as on the command line.
        quiet: print nothing.
        settings: ``rounds``, ``clients``, ``epochs``, ``seed``, ``profile`` (``paper`` with a GPU and ``cpu`` without
            if not given), ..., or whole groups as mappings: ``optim={"lr": 0.02}``.

    Raises:
        UserError: as on the command line.
    """
    words = [f"experiment={experiment}"] if experiment else []
    given = flat({_SHORT.get(key, key): value for key, value in settings.items()})
    words += [*overrides, *(f"{key}={_text(value)}" for key, value in given.items())]
    config = compose(words)
    if quiet:
        return Federation(Orchestrator(prepare(config, report=lambda line: None)).run())
    from fedx_pl.callbacks import progress
    from fedx_pl.config.describe import announcement, expectation

    console = progress.make_console()
    console.print(announcement(config), soft_wrap=True)
    plan = prepare(config)
    bar = progress.ProgressBar(rounds=config.federation.rounds, due=plan.evaluator.due, console=console)
    orchestrator = Orchestrator(plan, [bar])
    first = orchestrator.current_round + 1
    if first <= config.federation.rounds and lacks_gpu(config):
        orchestrator.note(expectation(plan, plan.estimate_seconds(first)))
    return Federation(orchestrator.run())


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(map(_text, value))}]" if isinstance(value, list | tuple) else str(value)
