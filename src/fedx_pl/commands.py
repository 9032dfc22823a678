"""What the commands of `fedx-pl` do; `cli` has what can be typed. A function here is a command of that name."""

import argparse
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from fedx_pl import config as configuration
from fedx_pl import methods, terminal
from fedx_pl.data import sources
from fedx_pl.data.survey import number
from fedx_pl.errors import UserError, install_hint
from fedx_pl.federation.checkpoint import Checkpoints
from fedx_pl.federation.orchestrator import Orchestrator
from fedx_pl.federation.plan import Plan, prepare
from fedx_pl.stopping import stopped_by_signals

if TYPE_CHECKING:
    from fedx_pl.encoder import Encoder

HERE = Path("experiments")  # in a checkout, or of the user's own
PACKAGED = Path(__file__).parent / "experiments"
LONG_SECONDS = 3600.0  # A run without a GPU that takes longer is asked about first.


def train(options: argparse.Namespace) -> None:
    """Runs a federation, or goes on with it."""
    console = terminal.make_console()
    with stopped_by_signals(), terminal.grouped_warnings(console):
        _train(options, console)


def _train(options: argparse.Namespace, console: Console) -> None:
    config = configuration.compose([*options.overrides, *([f"fork={options.fork}"] if options.fork else [])])
    if config.engine.name == "ray":
        from fedx_pl.federation.engines.ray import import_ray

        import_ray(local=not config.engine.address)  # If it is not installed, better know it now.
    console.print(terminal.announcement(config), soft_wrap=True)
    plan = prepare(config, report=lambda line: console.print(line, soft_wrap=True))
    rounds = config.federation.rounds
    if options.dry_run:
        console.print(terminal.expectation(plan, plan.estimate_seconds()), soft_wrap=True)
        console.print(terminal.plan_text(plan))
        console.print(terminal.parameters_text(plan), soft_wrap=True)
        console.print(f"{plan.steps_between(1, rounds):,} steps in all; the run folder would be {config.run_folder}",
                      soft_wrap=True)  # fmt: skip
        return
    # Before the run folder is made: whoever says no should find nothing left behind.
    seconds = None if options.yes else _confirmed_seconds(plan, console)
    with terminal.Terminal(console, rounds) as display:
        orchestrator = Orchestrator(plan, display)
        first = orchestrator.state.round + 1
        if first <= rounds:
            if seconds is None:
                console.print(terminal.expectation(plan, plan.estimate_seconds(first)), soft_wrap=True)
            display.expect(plan.steps_between(first, rounds), first)
        result = orchestrator.run()
    terminal.summary(result, console)


def _confirmed_seconds(plan: Plan, console: Console) -> float | None:
    """Says how long the paper's setting takes without a GPU, and asks if it is long.

    Returns:
        The expected seconds, once they have been printed; None if this run needs no question.

    Raises:
        UserError: the answer is no, or nobody can be asked.
    """
    if not plan.lacks_gpu:
        return None
    with warnings.catch_warnings():  # The orchestrator will tell of a damaged checkpoint.
        warnings.simplefilter("ignore")
        found = Checkpoints(plan.config.run_folder).latest(mend=False)
    first = (found[0].round if found else 0) + 1
    if first > plan.config.federation.rounds:
        return None
    seconds = plan.estimate_seconds(first)
    console.print(terminal.expectation(plan, seconds), soft_wrap=True)
    if seconds <= LONG_SECONDS:
        return seconds
    if sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty():
        print("Train on the CPU all the same? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return seconds
        raise UserError("nothing was started; type profile=cpu for a small result in minutes")
    raise UserError(
        f"profile=paper takes about {terminal.duration(seconds)} here, without a GPU; add --yes to train all the same "
        f"(make: ARGS=--yes), or type profile=cpu for a small result in minutes"
    )


def data(options: argparse.Namespace) -> None:
    """Fetches a data set and describes it; without a name, lists what there is."""
    if options.name is None:
        print(sources.overview())
        return
    # All of it: the limit of a profile is for training.
    config = configuration.compose([f"data={options.name}", "data.limit=0", *options.overrides])
    print(sources.describe(sources.load(config.data, seed=config.seed)))


def evaluate(options: argparse.Namespace) -> None:
    """Measures a finished run again, or in other ways."""
    from fedx_pl import revisit  # Here and below: what only one command needs would slow every start down.

    kinds = [word for word in options.overrides if "=" not in word] or ["linear"]
    allow_code = "allow_code=true" in options.overrides
    overrides = [word for word in options.overrides if "=" in word and not word.startswith("allow_code=")]
    console = terminal.make_console()
    with terminal.grouped_warnings(console), terminal.steps(console, "evaluating") as tick:
        found = revisit.evaluate_run(
            options.run, kinds, overrides, lambda line: console.print(line, soft_wrap=True), tick, options.round,
            allow_code=allow_code,
        )  # fmt: skip
    console.print(terminal.evaluations(found))
    console.print(f"kept in {options.run / 'evaluation'}", soft_wrap=True)


def sweep(options: argparse.Namespace) -> int:
    """Runs what is left of some experiments."""
    from fedx_pl import runner
    from fedx_pl.sweep import load_experiment, parse_only, parse_seeds

    definitions = definitions_folder(options.definitions)
    names = [word for word in options.overrides if "=" not in word]
    if not names:
        known = ", ".join(sorted(file.stem for file in definitions.glob("*.yaml")))
        raise UserError(f"which experiment? Type fedx-pl sweep NAME, one or more of {known}")
    words = [word for word in options.overrides if "=" in word]
    profile = next((word.partition("=")[2] for word in words if word.startswith("profile=")), "auto")
    profile = runner.resolve_profile(profile)
    more = runner.places([word for word in words if not word.startswith("profile=")], options.jobs)
    experiments = [
        load_experiment(Path(name) if name.endswith(".yaml") else definitions / f"{name}.yaml") for name in names
    ]
    seeds = parse_seeds(options.seeds)
    jobs = runner.plan_jobs(experiments, profile, seeds, more, parse_only(options.only, experiments))
    if not jobs:
        files = ", ".join(f"{one.name}.yaml" for one in experiments)
        raise UserError(f"profile {profile} has no such run; see profiles: in {files}, or type another --only")
    results = options.results or _results_folder(definitions, profile)
    console = terminal.make_console()
    sweep = runner.Sweep(jobs, results, options.jobs, console)
    seconds = sweep.expected_seconds()
    console.print(
        f"{', '.join(names)}, profile {profile}, seeds {options.seeds}: {len(jobs)} runs, {len(sweep.done)} finished "
        f"already, {sweep.rounds_left():,} rounds to go, {options.jobs} at once"
        + (f": about {terminal.duration(seconds)}, by the rounds of earlier runs" if seconds else ""),
        soft_wrap=True,
    )
    if options.dry_run:
        for job in sweep.waiting:
            console.print(f"fedx-pl train {' '.join(job.overrides)}", soft_wrap=True)
        return 0
    failed = sweep.run()
    for job in failed:
        see = f", see {job.log}" if job.log.exists() else ""
        console.print(f"failed: {job.name} ({job.title}){see}", soft_wrap=True)
    console.print(f"results: {results}; tables and figures: fedx-pl report {results}", soft_wrap=True)
    return 1 if failed else 0


def report(options: argparse.Namespace) -> None:
    """Writes the tables and figures of finished experiments."""
    from fedx_pl import runner
    from fedx_pl.reporting.report import write_report

    definitions = definitions_folder(options.definitions)
    results = options.results or _results_folder(definitions, runner.resolve_profile("auto"))
    for file in write_report(results, definitions, options.out):
        print(file)


def definitions_folder(given: Path | None = None) -> Path:
    """Of the experiments: the given one; `HERE` if it has some, as in a checkout; else those of the package."""
    return given or (HERE if any(HERE.glob("*.yaml")) else PACKAGED)


def _results_folder(definitions: Path, profile: str) -> Path:
    """Beside the definitions, but never within the installed package."""
    return (HERE if definitions == PACKAGED else definitions) / "results" / profile


def export(options: argparse.Namespace) -> None:
    """Writes a run's encoder for use without this package."""
    from fedx_pl import encoder

    with terminal.grouped_warnings(terminal.make_console()):
        file, line = encoder.export(options.run, options.to, options.out, options.round, allow_code=options.allow_code)
    print(file)
    if value_range := encoder.value_range_of(options.run):
        low, high = map(number, value_range)
        print(f"it takes floats from 0 to 1; 16-bit images: (value - {low}) / ({high} - {low}), cut off at 0 and 1")
    print(f"load it with: {line}")


def _encoder(options: argparse.Namespace) -> "Encoder":
    from fedx_pl.encoder import Encoder

    with terminal.grouped_warnings(terminal.make_console()):
        return Encoder.of(options.run, options.round, allow_code=options.allow_code)


def embed(options: argparse.Namespace) -> None:
    """Writes the features of a folder of images."""
    from fedx_pl.encoder import write_table

    paths, features = _encoder(options).embed_folder(options.images)
    write_table(options.out, paths, features)
    print(f"{options.out}: {len(paths):,} images, {features.shape[1]} features each")


def neighbours(options: argparse.Namespace) -> None:
    """Finds the images most like one."""
    from fedx_pl import neighbours

    encoder = _encoder(options)
    found = neighbours.find(encoder, options.query, options.images, options.count)
    neighbours.contact_sheet(options.out, options.query, options.images, found, encoder.value_range)
    for path, like in found:
        print(f"{like:.3f}  {path}")
    print(f"pictures: {options.out}")


def federate(options: argparse.Namespace) -> None:
    """``federate keys | server | client``."""
    try:
        from fedx_pl.federation.remote import commands
    except ImportError as error:
        raise UserError(f"a federation of sites needs Flower ({error}); type {install_hint('flower')}") from error
    if options.kind == "server":
        options.host = options.host or ("127.0.0.1" if options.insecure else "0.0.0.0")
    getattr(commands, options.kind)(options)


def completion(options: argparse.Namespace) -> None:
    """Prints a completion script."""
    from fedx_pl.completion import script

    print(script(options.shell), end="")


def key_reference(method_name: str = "") -> str:
    """All groups, choices and keys with defaults and help, from the schema.

    Args:
        method_name: a method whose keys to list as well, if it is not built in.
    """
    lines = ["groups (group=choice):"]
    for group in configuration.GROUPS:
        own = ", or package.module:Class" if group == "method" else ""
        auto = ", auto" if group == "profile" else ""
        lines.append(f"  {group}={' | '.join(configuration.choices(group))}{auto}{own}")
    lines += ["  fedx=true | false", ""]
    lines += ["keys (key=value) and the paper's defaults; without a GPU, profile=cpu has others:"]
    lines += [_key_line(key, default, text) for key, default, text in configuration.all_keys()]
    listed = dict(methods.BUILT_IN)
    try:
        listed |= {method_name: methods.find(method_name)} if method_name else {}
    except UserError as error:  # The rest of the help is still worth reading.
        lines += ["", f"error: {error}"]
    for name, method in listed.items():
        lines += ["", f"keys of method={name}:"]
        for key, (_, default, text) in configuration.hyper_parameters(method).items():
            lines.append(_key_line(f"method.{key}", default, text))
    return "\n".join(lines)


def _key_line(key: str, default: object, text: str) -> str:
    value = str(default).lower() if isinstance(default, bool) else str(default)
    return f"  {f'{key}={value}':<32} {text}"
