"""The command ``fedx-pl``."""

import argparse
import errno
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fedx_pl import config as configuration
from fedx_pl import methods, terminal
from fedx_pl.data import sources
from fedx_pl.errors import UserError
from fedx_pl.federation.orchestrator import Orchestrator
from fedx_pl.federation.plan import prepare
from fedx_pl.stopping import Stopped, stopped_by_signals

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the exit code is 2 for a mistake the user can mend."""
    parser = _parser()
    options, more = parser.parse_known_args(arguments)  # Overrides may stand before and after flags.
    if flags := [word for word in more if word.startswith("-")]:
        parser.error(f"unknown option {flags[0]}")
    options.overrides += more
    try:
        return int(options.command(options) or 0)
    except UserError as error:
        if options.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except OSError as error:
        if options.debug:
            raise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "free some space, then run the same command to go on" if full else "--debug shows where"
        print(f"error: {error}; {advice}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(f"\ninterrupted; {_how_to_go_on(arguments)}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Stopped as signal:
        print(f"\nstopped by {signal}; {_how_to_go_on(arguments)}", file=sys.stderr)
        return 0


def _how_to_go_on(arguments: Sequence[str] | None) -> str:
    words = shlex.join(["fedx-pl", *(sys.argv[1:] if arguments is None else arguments)])
    return f"the same command goes on after the last finished client: {words}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fedx-pl", description="Federated self-supervised learning, with FedX.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="run a federation",
        usage="fedx-pl train [group=choice | key=value ...] [--dry-run] [--debug]",
        description="Example: fedx-pl train data=cifar10 method=byol fedx=true federation.rounds=20 seed=1",
        epilog=_key_reference(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("overrides", nargs="*", help="group=choice or key=value, see below")
    train.add_argument("--fork", type=Path, help="a run folder: start a new run from its weights")
    train.add_argument("--dry-run", action="store_true", help="show the plan and its cost, train nothing")
    train.set_defaults(command=_train)
    data = commands.add_parser(
        "data", help="fetch a data set and describe it", usage="fedx-pl data NAME [key=value ...]"
    )
    data.add_argument("name", help=", ".join(configuration.choices("data")))
    data.add_argument("overrides", nargs="*", help="data.root=FOLDER, data.download=false, ...")
    data.set_defaults(command=_data)
    evaluate = commands.add_parser(
        "evaluate",
        help="measure a finished run again, or in other ways",
        usage="fedx-pl evaluate RUN [linear] [knn] [semi] [geometry] [evaluation.key=value ...]",
        description="linear probe, kNN, fine-tuning with few labels (semi), angles and collapse measures (geometry). "
        "Results go to RUN/evaluation/.",
    )
    evaluate.add_argument("run", type=Path, help="a run folder")
    evaluate.add_argument("overrides", nargs="*", help="what to measure (linear if not said) and evaluation.* keys")
    evaluate.add_argument("--round", type=int, help="of an older checkpoint that was kept (run.keep)")
    evaluate.set_defaults(command=_evaluate)
    sweep = commands.add_parser(
        "sweep",
        help="run the experiments behind tables and figures",
        usage="fedx-pl sweep EXPERIMENT ... [profile=mini] [--seeds 0,1,2] [--jobs 2] [--only AXIS=LABEL,LABEL]",
        description="Runs what is not finished yet, goes on with what was cut off, and keeps a small result file of a "
        "run for `fedx-pl report`. EXPERIMENT is a file experiments/NAME.yaml, or its NAME.",
    )
    sweep.add_argument("overrides", nargs="+", help="names of experiments, profile=..., run.* and data.* keys")
    sweep.add_argument("--seeds", default="0", help="e.g. 0,1,2: a run for each")
    sweep.add_argument("--jobs", type=int, default=1, help="runs at once; they share the CPU's threads")
    sweep.add_argument("--only", action="append", default=[], help="AXIS=LABEL,LABEL: just these")
    sweep.add_argument("--definitions", type=Path, default=Path("experiments"), help="folder of the experiments")
    sweep.add_argument("--results", type=Path, help="folder of the result files; DEFINITIONS/results/PROFILE")
    sweep.add_argument("--dry-run", action="store_true", help="list the runs, run nothing")
    sweep.set_defaults(command=_sweep)
    report = commands.add_parser(
        "report",
        help="tables and figures of finished experiments",
        usage="fedx-pl report [experiments/results/PROFILE]",
    )
    report.add_argument("results", type=Path, nargs="?", help="folder of result files; of this machine's profile")
    report.add_argument("--definitions", type=Path, default=Path("experiments"), help="folder of the experiments")
    report.add_argument("--out", type=Path, help="where report.md, report.html and figures go; the results' folder")
    report.set_defaults(command=_report, overrides=[])
    more = [*_encoder_parsers(commands), *_federate_parser(commands)]
    for command in (train, data, evaluate, sweep, report, *more):
        command.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _encoder_parsers(commands: Any) -> list[argparse.ArgumentParser]:
    """What can be done with a trained encoder."""
    export = commands.add_parser("export", help="write a run's encoder for use without this package")
    export.add_argument("--to", default="torch", help="torch | torchvision | safetensors | onnx")
    export.set_defaults(command=_export)
    embed = commands.add_parser("embed", help="features of a folder of images, as a table")
    embed.set_defaults(command=_embed)
    neighbours = commands.add_parser("neighbours", help="the images most like one, as a page")
    neighbours.add_argument("--count", type=int, default=12, help="how many")
    neighbours.set_defaults(command=_neighbours)
    for command in (export, embed, neighbours):
        command.add_argument("run", type=Path, help="a run folder")
        command.add_argument("--round", type=int, help="of an older checkpoint that was kept, or of the best")
        command.set_defaults(overrides=[])
    neighbours.add_argument("query", type=Path, help="an image")
    for command in (embed, neighbours):
        command.add_argument("images", type=Path, help="a folder of images; it is only read")
    export.add_argument("-o", "--out", type=Path, help="the file; RUN/encoder-FORMAT")
    embed.add_argument("-o", "--out", type=Path, default=Path("embeddings.parquet"), help="*.parquet or *.npz")
    neighbours.add_argument("-o", "--out", type=Path, default=Path("neighbours.html"), help="the page")
    return [export, embed, neighbours]


def _export(options: argparse.Namespace) -> None:
    from fedx_pl import encoder

    file, line = encoder.export(options.run, options.to, options.out, options.round)
    print(f"{file}\nload it with: {line}")


def _embed(options: argparse.Namespace) -> None:
    from fedx_pl.encoder import Encoder, write_table

    paths, features = Encoder.of(options.run, options.round).embed_folder(options.images)
    write_table(options.out, paths, features)
    print(f"{options.out}: {len(paths):,} images, {features.shape[1]} features each")


def _neighbours(options: argparse.Namespace) -> None:
    from fedx_pl import neighbours
    from fedx_pl.encoder import Encoder

    found = neighbours.find(Encoder.of(options.run, options.round), options.query, options.images, options.count)
    neighbours.contact_sheet(options.out, options.query, options.images, found)
    for path, like in found:
        print(f"{like:.3f}  {path}")
    print(f"pictures: {options.out}")


def _federate_parser(commands: Any) -> list[argparse.ArgumentParser]:
    """``fedx-pl federate keys | server | client``."""
    group = commands.add_parser("federate", help="a federation of real sites, over Flower")
    kinds = group.add_subparsers(required=True, metavar="keys | server | client")
    keys = kinds.add_parser("keys", help="make the CA, the coordinator's certificate and a key for each site")
    keys.add_argument("--sites", required=True, help="names, e.g. hospital-a,hospital-b")
    keys.add_argument("--host", default="", help="by which sites reach the coordinator; this machine's name")
    keys.add_argument("--port", type=int, default=8000, help="of the coordinator")
    keys.add_argument("--out", type=Path, default=Path("keys"), help="folder to put them in")
    keys.set_defaults(command=_federate, kind="make_keys", overrides=[])
    server = kinds.add_parser(
        "server",
        help="coordinate the rounds",
        usage="fedx-pl federate server experiment=DATA-METHOD[-fedx] [key=value ...] --clients N [--keys keys/server]",
    )
    server.add_argument("overrides", nargs="*", help="as for fedx-pl train")
    server.add_argument("--clients", type=int, required=True, help="sites of the federation")
    server.add_argument("--keys", type=Path, default=Path("keys/server"), help="of fedx-pl federate keys")
    server.add_argument("--host", default="", help="address to listen on; all, or this machine only if --insecure")
    server.add_argument("--port", type=int, default=8000, help="to listen on")
    server.add_argument("--wait", type=float, default=600, help="seconds the first round waits for all sites")
    server.add_argument("--timeout", type=float, default=86400, help="seconds a round waits for a site's answer")
    server.add_argument("--insecure", action="store_true", help="no TLS and no keys, within this machine")
    server.set_defaults(command=_federate, kind="server")
    client = kinds.add_parser(
        "client",
        help="take part with the images of this site",
        usage="fedx-pl federate client --data IMAGES --keys FOLDER [--server HOST:PORT] [run.device=cuda ...]",
    )
    client.add_argument("overrides", nargs="*", help="run.*, data.* and privacy.* keys of this site")
    client.add_argument("--data", type=Path, required=True, help="folder of this site's images; it is only read")
    client.add_argument("--server", default="", help="HOST:PORT of the coordinator; as in the site's keys")
    client.add_argument("--keys", type=Path, default=Path("."), help="the folder made for this site")
    client.add_argument("--state", type=Path, help="folder for this site's private state; fedx-site-NAME")
    client.add_argument("--name", default="", help="of this site, with --insecure; the name of its folder of images")
    client.add_argument("--allow-code", action="store_true", help="let the coordinator name methods as module:Class")
    client.add_argument("--insecure", action="store_true", help="no TLS and no keys, within this machine")
    client.set_defaults(command=_federate, kind="client")
    return [keys, server, client]


def _federate(options: argparse.Namespace) -> None:
    try:
        from fedx_pl.federation.remote import commands
    except ImportError as error:
        raise UserError(f"a federation of sites needs Flower ({error}); type pip install 'fedx-pl[flower]'") from error
    if options.kind == "server":
        options.host = options.host or ("127.0.0.1" if options.insecure else "0.0.0.0")
    getattr(commands, options.kind)(options)


def _train(options: argparse.Namespace) -> None:
    with stopped_by_signals():
        _run(options)


def _run(options: argparse.Namespace) -> None:
    config = configuration.compose([*options.overrides, *([f"fork={options.fork}"] if options.fork else [])])
    if config.engine.name == "ray":
        from fedx_pl.federation.engines.ray import import_ray

        import_ray(local=not config.engine.address)  # If it is not installed, better know it now.
    console = Console(markup=False, highlight=False)  # Paths and names may hold brackets.
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
    with terminal.Terminal(console, rounds) as display:
        orchestrator = Orchestrator(plan, display)
        first = orchestrator.state.round + 1
        if first <= rounds:
            console.print(terminal.expectation(plan, plan.estimate_seconds(first)), soft_wrap=True)
            display.expect(plan.steps_between(first, rounds))
        result = orchestrator.run()
    terminal.summary(result, console)


def _data(options: argparse.Namespace) -> None:
    config = configuration.compose([f"data={options.name}", *options.overrides])
    print(sources.describe(sources.load(config.data, seed=config.seed)))


def _evaluate(options: argparse.Namespace) -> None:
    from fedx_pl import revisit  # Here and below: what only one command needs would slow every start down.

    kinds = [word for word in options.overrides if "=" not in word] or ["linear"]
    allow_code = "allow_code=true" in options.overrides
    overrides = [word for word in options.overrides if "=" in word and not word.startswith("allow_code=")]
    console = Console(markup=False, highlight=False)
    with terminal.steps(console, "evaluating") as tick:
        found = revisit.evaluate_run(
            options.run, kinds, overrides, lambda line: console.print(line, soft_wrap=True), tick, options.round,
            allow_code=allow_code,
        )  # fmt: skip
    console.print(terminal.evaluations(found))
    console.print(f"kept in {options.run / 'evaluation'}", soft_wrap=True)


def _sweep(options: argparse.Namespace) -> int:
    from fedx_pl import runner
    from fedx_pl.sweep import load_experiment

    names = [word for word in options.overrides if "=" not in word]
    if not names:
        known = ", ".join(sorted(file.stem for file in options.definitions.glob("*.yaml")))
        raise UserError(f"which experiment? Type fedx-pl sweep NAME, one or more of {known}")
    words = [word for word in options.overrides if "=" in word]
    profile = next((word.partition("=")[2] for word in words if word.startswith("profile=")), "auto")
    profile = runner.resolve_profile(profile)
    more = runner.places([word for word in words if not word.startswith("profile=")], options.jobs)
    experiments = [
        load_experiment(Path(name) if name.endswith(".yaml") else options.definitions / f"{name}.yaml")
        for name in names
    ]
    seeds = runner.parse_seeds(options.seeds)
    jobs = runner.plan_jobs(experiments, profile, seeds, more, runner.parse_only(options.only, experiments))
    results = options.results or options.definitions / "results" / profile
    console = Console(markup=False, highlight=False)
    sweep = runner.Sweep(jobs, results, options.jobs, console)
    rounds = sum(job.config.federation.rounds for job in sweep.waiting)
    console.print(
        f"{', '.join(names)}, profile {profile}, seeds {options.seeds}: {len(jobs)} runs, {len(sweep.done)} finished "
        f"already, {rounds:,} rounds to go, {options.jobs} at once",
        soft_wrap=True,
    )
    if options.dry_run:
        for job in sweep.waiting:
            console.print(f"fedx-pl train {' '.join(job.overrides)}", soft_wrap=True)
        return 0
    failed = sweep.run()
    for job in failed:
        console.print(f"failed: {job.name}, see {job.log}", soft_wrap=True)
    console.print(f"results: {results}; tables and figures: fedx-pl report {results}", soft_wrap=True)
    return 1 if failed else 0


def _report(options: argparse.Namespace) -> None:
    from fedx_pl import runner
    from fedx_pl.reporting.report import write_report

    results = options.results or options.definitions / "results" / runner.resolve_profile("auto")
    for file in write_report(results, options.definitions, options.out):
        print(file)


def _key_reference() -> str:
    """All groups, choices and keys with defaults and help, from the schema."""
    lines = ["groups (group=choice):"]
    for group in ("data", "method", "recipe", "profile"):
        own = ", or package.module:Class" if group == "method" else ""
        auto = ", auto" if group == "profile" else ""
        lines.append(f"  {group}={' | '.join(configuration.choices(group))}{auto}{own}")
    lines += ["  fedx=true | false", "", "keys (key=value) and their defaults:"]
    lines += [_key_line(key, default, text) for key, default, text in configuration.all_keys()]
    for name, method in methods.BUILT_IN.items():
        lines += ["", f"keys of method={name}:"]
        for key, (_, default, text) in configuration.hyper_parameters(method).items():
            lines.append(_key_line(f"method.{key}", default, text))
    return "\n".join(line.replace("%", "%%") for line in lines)


def _key_line(key: str, default: object, text: str) -> str:
    value = str(default).lower() if isinstance(default, bool) else str(default)
    return f"  {f'{key}={value}':<32} {text}"
