"""``fedx-pl train``: runs a federation, or resumes it."""

import warnings
from types import SimpleNamespace

from rich.console import Console

from fedx_pl.callbacks import progress
from fedx_pl.cli.confirm import confirm
from fedx_pl.cli.stopping import stopped_by_signals
from fedx_pl.cli.summary import summary
from fedx_pl.config.build import Run, build, lacks_gpu
from fedx_pl.config.describe import (
    Expectation,
    announcement,
    clients_table,
    expectation,
    parameters_text,
)
from fedx_pl.federation.checkpoint import Checkpoints
from fedx_pl.federation.estimate import steps_between


def run(options: SimpleNamespace) -> None:
    """Runs a federation, or resumes it."""
    console = progress.make_console()
    with stopped_by_signals(), progress.grouped_warnings(console):
        _train(options, console)


def _train(options: SimpleNamespace, console: Console) -> None:
    config = options.config
    console.print(announcement(config), soft_wrap=True)

    def say(line: str) -> None:
        console.print(line, soft_wrap=True)

    run = build(config, say, callbacks=[progress.ProgressBar(console)])
    if options.dry_run:
        say(expectation(run, run.trainer.estimate_seconds()))
        console.print(clients_table(run))
        say(parameters_text(run.model))
        steps = steps_between(run.trainer, 1, config.federation.rounds)
        say(f"{steps:,} steps in all; the run folder would be {config.run_folder}")
        return
    # Before the run folder is made, so that nothing is left behind if the answer is no.
    seconds = None if options.yes else _confirmed_seconds(run, console)
    if seconds is None:
        run.trainer.callbacks.append(Expectation(run, say))
    summary(run.fit(), console)


def _confirmed_seconds(run: Run, console: Console) -> float | None:
    """Says how long the paper's setting takes without a GPU, and asks if that is long.

    Returns:
        The expected seconds, which were printed; None if this run needs no question.

    Raises:
        UserError: the answer is no, or nobody can be asked.
    """
    if not lacks_gpu(run.config):
        return None
    with warnings.catch_warnings():  # The trainer will warn of a damaged checkpoint.
        warnings.simplefilter("ignore")
        latest = Checkpoints(run.config.run_folder).latest(mend=False)
    first = (latest[0].round if latest else 0) + 1
    if first > run.config.federation.rounds:
        return None
    seconds = run.trainer.estimate_seconds(first)
    console.print(expectation(run, seconds), soft_wrap=True)
    confirm(seconds, "profile=cpu for a small result in minutes")
    return seconds
