"""The command ``fedx-pl``."""

import argparse
import errno
import sys
from collections.abc import Sequence

from rich.console import Console

from fedx_pl import config as configuration
from fedx_pl import methods, terminal
from fedx_pl.data import sources
from fedx_pl.errors import UserError
from fedx_pl.federation.orchestrator import Orchestrator
from fedx_pl.federation.plan import prepare

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
        print("\ninterrupted; the same command goes on after the last finished round", file=sys.stderr)
        return EXIT_INTERRUPTED


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
    train.add_argument("--dry-run", action="store_true", help="show the plan and its cost, train nothing")
    train.set_defaults(command=_train)
    data = commands.add_parser(
        "data", help="fetch a data set and describe it", usage="fedx-pl data NAME [key=value ...]"
    )
    data.add_argument("name", help=", ".join(configuration.choices("data")))
    data.add_argument("overrides", nargs="*", help="data.root=FOLDER, data.download=false, ...")
    data.set_defaults(command=_data)
    for command in (train, data):
        command.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _train(options: argparse.Namespace) -> None:
    config = configuration.compose(options.overrides)
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
