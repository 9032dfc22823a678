"""What can be typed after ``fedx-pl``: all commands and their options.

It must load at once, so it imports nothing that imports torch.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from fedx_pl.errors import did_you_mean, printable

EXIT_USER_ERROR = 2
SHELLS = ("bash", "zsh", "fish")


class _Parser(argparse.ArgumentParser):
    """Tells a mistake in one line, and what takes long to list only when it is asked for."""

    listing: Callable[[], str] | None = None

    def format_help(self) -> str:
        """With the listing at its end."""
        if self.listing is not None:
            self.epilog = self.listing()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Without the usage, which says the same for every mistake."""
        end = " See" if message.endswith("?") else "; see"
        self.exit(EXIT_USER_ERROR, f"error: {printable(message)}{end} {self.prog} --help\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            near = did_you_mean(str(value), known) or f"; there are {', '.join(known)}"
            raise argparse.ArgumentError(
                None, f"there is no {str(action.metavar).lower()} {value!r}{near}"
            )


def make_parser(arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """All commands and their options; `completion` reads them, too.

    Args:
        arguments: what was typed: ``--help`` tells of the method among them.
    """
    parser = _Parser(
        prog="fedx-pl",
        usage="fedx-pl COMMAND ...",
        description="Federated self-supervised learning on PyTorch Lightning, with FedX for any method.",
        epilog="""examples:
  fedx-pl train data=cifar10 method=byol fedx=true               minutes without a GPU
  fedx-pl train data=folder data.root=IMAGES method=byol         images of yours
  fedx-pl train --help                                           all keys
  fedx-pl COMMAND --help                                         its options""",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=17
        ),
    )
    parser.add_argument(
        "-V", "--version", action="store_true", help="of fedx-pl and what it stands on"
    )
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", prog="fedx-pl")
    for command in (
        _train_parser(commands, arguments), _data_parser(commands), _evaluate_parser(commands), _sweep_parser(commands),
        _report_parser(commands), *_encoder_parsers(commands), *_federate_parsers(commands),
        _completion_parser(commands),
    ):  # fmt: skip
        command.add_argument("--debug", action="store_true", help="show tracebacks")
        command.set_defaults(parser=command)
    return parser


def _train_parser(commands: Any, arguments: Sequence[str]) -> argparse.ArgumentParser:
    train: _Parser = commands.add_parser(
        "train",
        help="run a federation",
        usage="fedx-pl train [group=choice | key=value ...] [--dry-run] [--yes] [--fork RUN] [--debug]",
        description="Example: fedx-pl train data=cifar10 method=byol fedx=true federation.rounds=20 seed=1",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.listing = partial(_all_keys, arguments)
    _add_overrides(train, "group=choice or key=value, see below")
    train.add_argument(
        "--fork", type=Path, metavar="RUN", help="a run folder: start a new run from its weights"
    )
    train.add_argument(
        "--dry-run", action="store_true", help="show the plan and its cost, train nothing"
    )
    train.add_argument(
        "--yes", action="store_true", help="do not ask before a long run without a GPU"
    )
    train.set_defaults(command="train")
    return train


def _all_keys(arguments: Sequence[str]) -> str:
    from fedx_pl.config.reference import key_reference

    named = [
        word.partition("=")[2] for word in arguments if word.startswith(("method=", "method.name="))
    ]
    return key_reference(named[-1] if named else "")


def _data_parser(commands: Any) -> argparse.ArgumentParser:
    data: _Parser = commands.add_parser(
        "data",
        help="fetch a data set and describe it",
        usage="fedx-pl data [NAME] [data.key=value ...] [--debug]",
    )
    data.add_argument(
        "name", metavar="NAME", nargs="?", help="of a data set; without it, all are listed"
    )
    _add_overrides(data, "data.root=FOLDER, data.download=false, ...")
    data.set_defaults(command="data")
    return data


def _evaluate_parser(commands: Any) -> argparse.ArgumentParser:
    evaluate: _Parser = commands.add_parser(
        "evaluate",
        help="measure a finished run again, or in other ways",
        usage="fedx-pl evaluate RUN [linear] [knn] [semi] [geometry] [evaluation.key=value ...] [--round N] [--debug]",
        description="linear probe, kNN, fine-tuning with few labels (semi), angles and collapse measures (geometry). "
        "Results go to RUN/evaluation/.",
    )
    evaluate.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    _add_overrides(evaluate, "what to measure (linear if not said) and evaluation.* keys")
    evaluate.add_argument(
        "--round",
        type=int,
        metavar="N",
        help="one of the last rounds kept (run.keep), or the best on the test images",
    )
    evaluate.set_defaults(command="evaluate")
    return evaluate


def _sweep_parser(commands: Any) -> argparse.ArgumentParser:
    sweep: _Parser = commands.add_parser(
        "sweep",
        help="run the experiments behind tables and figures",
        usage="fedx-pl sweep EXPERIMENT ... [profile=mini] [--seeds 0,1,2] [--jobs 2] [--only AXIS=LABEL,LABEL] "
        "[--dry-run] [--yes]",
        description="Runs what is not finished yet, goes on with what was cut off, and keeps a small result file of a "
        "run for `fedx-pl report`. EXPERIMENT is a file NAME.yaml, or the NAME of a definition.",
    )
    _add_overrides(sweep, "names of experiments, profile=..., run.* and data.* keys")
    sweep.add_argument("--seeds", default="0", help="e.g. 0,1,2: a run for each")
    sweep.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="runs at once; they share the CPU's threads",
    )
    sweep.add_argument("--only", action="append", default=[], help="AXIS=LABEL,LABEL: just these")
    _add_definitions(sweep)
    sweep.add_argument(
        "--results",
        type=Path,
        metavar="FOLDER",
        help="of result files; experiments/results/PROFILE",
    )
    sweep.add_argument("--dry-run", action="store_true", help="list the runs, run nothing")
    sweep.add_argument(
        "--yes", action="store_true", help="do not ask before long runs without a GPU"
    )
    sweep.set_defaults(command="sweep")
    return sweep


def _report_parser(commands: Any) -> argparse.ArgumentParser:
    report: _Parser = commands.add_parser(
        "report",
        help="tables and figures of finished experiments",
        usage="fedx-pl report [experiments/results/PROFILE] [--out FOLDER] [--debug]",
    )
    report.add_argument(
        "results",
        type=Path,
        nargs="?",
        metavar="RESULTS",
        help="folder of result files; of this machine's profile",
    )
    _add_definitions(report)
    report.add_argument(
        "--out", type=Path, metavar="FOLDER", help="of report.md, report.html and figures; RESULTS"
    )
    report.set_defaults(command="report", overrides=[])
    return report


def _add_overrides(command: argparse.ArgumentParser, text: str) -> None:
    command.add_argument("overrides", nargs="*", default=[], help=text)


def _add_definitions(command: argparse.ArgumentParser) -> None:
    text = "of the experiments; ./experiments if it has some, else those that came with fedx-pl"
    command.add_argument("--definitions", type=Path, metavar="FOLDER", help=text)


def _encoder_parsers(commands: Any) -> list[argparse.ArgumentParser]:
    """What can be done with a trained encoder."""
    export: _Parser = commands.add_parser(
        "export", help="write a run's encoder for use without this package"
    )
    export.add_argument(
        "--to", default="torch", metavar="FORMAT", help="torch | torchvision | safetensors | onnx"
    )
    export.set_defaults(command="export")
    embed: _Parser = commands.add_parser("embed", help="features of a folder of images, as a table")
    embed.set_defaults(command="embed")
    neighbours: _Parser = commands.add_parser(
        "neighbours", help="the images most like one, as a page"
    )
    neighbours.add_argument("--count", type=int, default=12, metavar="N", help="how many")
    neighbours.set_defaults(command="neighbours")
    for command in (export, embed, neighbours):
        command.add_argument("run", type=Path, metavar="RUN", help="a run folder")
        command.add_argument(
            "--round",
            type=int,
            metavar="N",
            help="an older round that was kept, or the best on the test images",
        )
        command.add_argument(
            "--allow-code",
            action="store_true",
            help="let a method that brings its backbone make it",
        )
    export.set_defaults(overrides=[])
    neighbours.add_argument("query", type=Path, metavar="QUERY", help="an image")
    for command in (embed, neighbours):
        command.add_argument(
            "images", type=Path, metavar="IMAGES", help="a folder of images; it is only read"
        )
        _add_overrides(
            command,
            "data.cache=FOLDER keeps decoded copies there; else they are deleted at the end",
        )
    export.add_argument(
        "-o", "--out", type=Path, metavar="FILE", help="RUN/encoder-FORMAT if not given"
    )
    embed.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="FILE",
        default=Path("embeddings.npz"),
        help="*.npz, or *.parquet, which needs the extra tables",
    )
    neighbours.add_argument(
        "-o", "--out", type=Path, metavar="FILE", default=Path("neighbours.html"), help="the page"
    )
    return [export, embed, neighbours]


def _federate_parsers(commands: Any) -> list[argparse.ArgumentParser]:
    """``fedx-pl federate keys | server | client``."""
    group = commands.add_parser("federate", help="a federation of real sites, over Flower")
    kinds = group.add_subparsers(required=True, metavar="KIND")
    keys = kinds.add_parser(
        "keys", help="make the CA, the coordinator's certificate and a key for each site"
    )
    keys.add_argument("--sites", default="", metavar="NAMES", help="e.g. hospital-a,hospital-b")
    keys.add_argument(
        "--revoke",
        default="",
        metavar="NAMES",
        help="take the keys of sites back; --sites makes new ones",
    )
    keys.add_argument(
        "--host", default="", help="by which sites reach the coordinator; this machine's name"
    )
    keys.add_argument("--port", type=int, default=8000, help="of the coordinator")
    keys.add_argument(
        "--out", type=Path, default=Path("keys"), metavar="FOLDER", help="to put them in"
    )
    keys.set_defaults(command="federate", kind="make_keys", overrides=[])
    server = kinds.add_parser(
        "server",
        help="coordinate the rounds",
        usage="fedx-pl federate server experiment=DATA-METHOD[-fedx] [key=value ...] --clients N [--keys keys/server]",
    )
    _add_overrides(server, "as for fedx-pl train")
    server.add_argument(
        "--fork", type=Path, metavar="RUN", help="a run folder: start a new run from its weights"
    )
    server.add_argument(
        "--clients", type=int, required=True, metavar="N", help="sites of the federation"
    )
    server.add_argument(
        "--keys",
        type=Path,
        default=Path("keys/server"),
        metavar="FOLDER",
        help="of fedx-pl federate keys",
    )
    server.add_argument(
        "--host", default="", help="address to listen on; all, or this machine only if --insecure"
    )
    server.add_argument("--port", type=int, default=8000, help="to listen on")
    server.add_argument(
        "--wait", type=float, default=600, help="seconds the first round waits for all sites"
    )
    server.add_argument(
        "--timeout", type=float, default=86400, help="seconds a round waits for a site's answer"
    )
    server.add_argument(
        "--no-encoder",
        action="store_true",
        help="leave no trained encoder with the sites at the end",
    )
    server.add_argument(
        "--insecure", action="store_true", help="no TLS and no keys, within this machine"
    )
    server.set_defaults(command="federate", kind="server")
    client = kinds.add_parser(
        "client",
        help="take part with the images of this site",
        usage="fedx-pl federate client --data IMAGES --keys FOLDER [--server HOST:PORT] [run.device=cuda ...]",
    )
    _add_overrides(client, "run.*, data.*, privacy.* and site.* keys of this site")
    client.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="IMAGES",
        help="folder of this site's images; it is only read",
    )
    client.add_argument(
        "--server", default="", help="HOST:PORT of the coordinator; as in the site's keys"
    )
    client.add_argument(
        "--keys", type=Path, default=Path("."), metavar="FOLDER", help="the one made for this site"
    )
    client.add_argument(
        "--state", type=Path, metavar="FOLDER", help="for this site's private state; fedx-site-NAME"
    )
    client.add_argument(
        "--name", default="", help="of this site, with --insecure; the name of its folder of images"
    )
    client.add_argument(
        "--allow-code", action="store_true", help="let the coordinator name methods as module:Class"
    )
    client.add_argument(
        "--stay", action="store_true", help="wait for the next federation when one has finished"
    )
    client.add_argument(
        "--insecure", action="store_true", help="no TLS and no keys, within this machine"
    )
    client.set_defaults(command="federate", kind="client")
    return [keys, server, client]


def _completion_parser(commands: Any) -> argparse.ArgumentParser:
    completion: _Parser = commands.add_parser(
        "completion",
        help="a script that completes commands, choices and keys",
        description="Once, and again after an update; then start a new shell:\n"
        "  bash  fedx-pl completion bash > ~/.local/share/bash-completion/completions/fedx-pl\n"
        "  zsh   fedx-pl completion zsh > FOLDER/_fedx-pl       FOLDER: one of your $fpath\n"
        "  fish  fedx-pl completion fish > ~/.config/fish/completions/fedx-pl.fish",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    completion.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    completion.set_defaults(command="completion", overrides=[])
    return completion
