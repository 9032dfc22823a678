"""``fedx-pl sweep``: runs the experiments behind tables and figures."""

from __future__ import annotations

import warnings
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from fedx_pl.cli.confirm import confirm
from fedx_pl.config.renamed import refuse_renamed
from fedx_pl.display import make_console
from fedx_pl.errors import UserError, known_names
from fedx_pl.experiments.definition import (
    definitions_folder,
    load_experiment,
    parse_only,
    parse_places,
    parse_seeds,
    resolve_profile,
    results_folder,
)
from fedx_pl.printing import duration

if TYPE_CHECKING:
    from rich.console import Console

    from fedx_pl.experiments.jobs import Job
    from fedx_pl.experiments.sweep import Sweep


def run(options: SimpleNamespace) -> int:
    """Runs what is not finished of some experiments."""
    definitions = definitions_folder(options.definitions)
    names = [word for word in options.overrides if "=" not in word]
    if not names:
        known = ", ".join(sorted(file.stem for file in definitions.glob("*.yaml")))
        raise UserError(f"which experiment? Type fedx-pl sweep NAME, one or more of {known}")
    experiments = [load_experiment(_definition(name, definitions)) for name in names]
    overrides = [word for word in options.overrides if "=" in word]
    profiles = [word.partition("=")[2] for word in overrides if word.startswith("profile=")]
    profile = resolve_profile(profiles[0] if profiles else "auto")
    where = [word for word in overrides if not word.startswith("profile=")]
    more = parse_places(where, options.jobs)
    seeds = parse_seeds(options.seeds)
    only = parse_only(options.only, experiments)

    # Here: they load torch, and mistakes in the command should not wait for it.
    from fedx_pl.experiments.jobs import plan_jobs
    from fedx_pl.experiments.sweep import Sweep

    jobs = plan_jobs(experiments, profile, seeds, more=more, only=only)
    if not jobs:
        files = ", ".join(f"{experiment.name}.yaml" for experiment in experiments)
        raise UserError(
            f"profile {profile} has no such run; see profiles: in {files}, or type another --only"
        )
    results = options.results or results_folder(definitions, profile)
    console = make_console()
    sweep = Sweep(jobs, results, options.jobs, console=console)
    seconds = sweep.expected_seconds()
    expected = ""
    if seconds:
        expected = f": about {duration(seconds)}, judging by the rounds of earlier runs"
    console.print(
        f"{', '.join(names)}, profile {profile}, seeds {options.seeds}: {len(jobs)} runs, "
        f"{len(sweep.done)} finished already, {sweep.rounds_left():,} rounds to go, "
        f"{options.jobs} at once{expected}",
        soft_wrap=True,
    )
    if options.dry_run:
        for job in sweep.waiting:
            console.print(f"fedx-pl train {' '.join(job.overrides)}", soft_wrap=True)
        return 0
    if not options.yes:
        _confirm(sweep, seconds, console)
    failed = sweep.run()
    for job in failed:
        see = f", see {job.log}" if job.log.exists() else ""
        console.print(f"failed: {job.name} ({job.title}){see}", soft_wrap=True)
    console.print(
        f"results: {results}; tables and figures: fedx-pl report {results}", soft_wrap=True
    )
    return 1 if failed else 0


def _definition(name: str, definitions: Path) -> Path:
    file = Path(name) if name.endswith(".yaml") else definitions / f"{name}.yaml"
    if not file.exists():
        refuse_renamed(f"fedx-pl sweep {name}")
        names = sorted(path.stem for path in definitions.glob("*.yaml"))
        raise UserError(f"there is no experiment {name}{known_names(name, names)}")
    return file


def _confirm(sweep: Sweep, seconds: float | None, console: Console) -> None:
    """Asks before the paper's setting is run without a GPU, which may take months.

    The runs themselves do not ask: they are started with ``--yes``.

    Args:
        sweep: the runs.
        seconds: the time they take judging by earlier runs; None if there were none.
        console: where to write.

    Raises:
        UserError: the answer is no, or nobody can be asked.
    """
    if not sweep.rounds_left() or not any(_on_cpu(job) for job in sweep.waiting):
        return
    console.print("profile paper: made for a GPU, and there is none here.", soft_wrap=True)
    if seconds is None and (seconds := _measured_seconds(sweep, console)) is not None:
        console.print(
            f"All runs take about {duration(seconds)}, judging by a few steps of one.",
            soft_wrap=True,
        )
    confirm(seconds, "profile=mini for small runs")


def _on_cpu(job: Job) -> bool:
    from fedx_pl.config.build import lacks_gpu

    with suppress(UserError):  # A device that is not there: the run will say so.
        return lacks_gpu(job.config)
    return False


def _measured_seconds(sweep: Sweep, console: Console) -> float | None:
    """The time of all rounds that are left, by those of the first run; None if it fails."""
    from fedx_pl.config.build import build

    config = sweep.waiting[0].config
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # They will be in the run's log.
            run = build(config, lambda line: console.print(line, soft_wrap=True))
            per_round = run.trainer.estimate_seconds() / config.federation.rounds
    except Exception:  # A user's method may fail in any way; its run will say why.
        return None
    return per_round * sweep.rounds_left() / sweep.workers
