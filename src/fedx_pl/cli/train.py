"""``fedx-pl train``: runs a federation, or resumes it."""

import argparse
import warnings

from rich.console import Console

from fedx_pl.callbacks import progress
from fedx_pl.cli.confirm import confirm
from fedx_pl.cli.stopping import stopped_by_signals
from fedx_pl.cli.summary import summary
from fedx_pl.config.build import Plan, lacks_gpu, prepare
from fedx_pl.config.compose import compose
from fedx_pl.config.describe import announcement, expectation, parameters_text, plan_text
from fedx_pl.federation.checkpoint import Checkpoints
from fedx_pl.trainer import Orchestrator


def run(options: argparse.Namespace) -> None:
    """Runs a federation, or goes on with it."""
    console = progress.make_console()
    with stopped_by_signals(), progress.grouped_warnings(console):
        _train(options, console)


def _train(options: argparse.Namespace, console: Console) -> None:
    config = compose([*options.overrides, *([f"fork={options.fork}"] if options.fork else [])])
    if config.engine.name == "ray":
        from fedx_pl.engines.ray import import_ray

        import_ray(local=not config.engine.address)  # If it is not installed, better know it now.
    console.print(announcement(config), soft_wrap=True)
    plan = prepare(config, report=lambda line: console.print(line, soft_wrap=True))
    rounds = config.federation.rounds
    if options.dry_run:
        console.print(expectation(plan, plan.estimate_seconds()), soft_wrap=True)
        console.print(plan_text(plan))
        console.print(parameters_text(plan), soft_wrap=True)
        console.print(f"{plan.steps_between(1, rounds):,} steps in all; the run folder would be {config.run_folder}",
                      soft_wrap=True)  # fmt: skip
        return
    # Before the run folder is made: whoever says no should find nothing left behind.
    seconds = None if options.yes else _confirmed_seconds(plan, console)
    bar = progress.ProgressBar(rounds=rounds, due=plan.evaluator.due, console=console)
    orchestrator = Orchestrator(plan, [bar])
    first = orchestrator.current_round + 1
    if first <= rounds and seconds is None:
        console.print(expectation(plan, plan.estimate_seconds(first)), soft_wrap=True)
    summary(orchestrator.run(), console)


def _confirmed_seconds(plan: Plan, console: Console) -> float | None:
    """Says how long the paper's setting takes without a GPU, and asks if it is long.

    Returns:
        The expected seconds, once they have been printed; None if this run needs no question.

    Raises:
        UserError: the answer is no, or nobody can be asked.
    """
    if not lacks_gpu(plan.config):
        return None
    with warnings.catch_warnings():  # The orchestrator will tell of a damaged checkpoint.
        warnings.simplefilter("ignore")
        found = Checkpoints(plan.config.run_folder).latest(mend=False)
    first = (found[0].round if found else 0) + 1
    if first > plan.config.federation.rounds:
        return None
    seconds = plan.estimate_seconds(first)
    console.print(expectation(plan, seconds), soft_wrap=True)
    confirm(seconds, "profile=cpu for a small result in minutes")
    return seconds
