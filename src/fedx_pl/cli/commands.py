"""All commands of ``fedx-pl``, with their options and help.

Nothing heavy is imported here, so that help and mistakes are answered at once. The work of a
command is done by the function `run` of its module, which imports torch.
"""

import importlib
import platform
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from fedx_pl import __version__
from fedx_pl.errors import UserError, install_hint

SHELLS = ("bash", "zsh", "fish")
FILE = click.Path(readable=False, path_type=Path)  # The command itself says what it cannot read.


class _Command(click.Command):
    """A command with the option ``--debug``, which `main` looks for."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        text = "Show the traceback of an error."
        self.params.append(click.Option(["--debug"], is_flag=True, expose_value=False, help=text))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # Whose help to look at.
            raise


class _Train(_Command):
    """A command whose help ends with all keys."""

    def get_help(self, ctx: click.Context) -> str:
        # At once: the keys of the methods come from modules that import torch.
        click.echo(f"{super().get_help(ctx)}\n")
        from fedx_pl.config.reference import key_reference

        typed = [word for word in ctx.obj or () if word.startswith(("method=", "method.name="))]
        formatter = ctx.make_formatter()
        for title, rows in key_reference(typed[-1].partition("=")[2] if typed else ""):
            with formatter.section(title):
                formatter.write_dl(rows, col_max=33)
        return formatter.getvalue().strip("\n")


class _Group(click.Group):
    """Commands in the order of this file; click would sort them by name."""

    command_class = _Command

    def list_commands(self, _: click.Context) -> list[str]:
        return list(self.commands)


def _run(module: str, options: dict[str, Any], function: str = "run") -> int:
    folder = options.get("run")
    if folder and not (folder / "config.yaml").is_file():  # A mistake to name before torch loads.
        instead = f"fedx-pl {module} runs/NAME"
        raise UserError(f"{folder} is not a run folder: it has no config.yaml; type {instead}")
    command = importlib.import_module(f"fedx_pl.cli.{module}")
    return int(getattr(command, function)(SimpleNamespace(**options)) or 0)


def _require_extra(extra: str, module: str, message: str) -> None:
    """Refuses what needs an extra that is not installed, before torch is loaded."""
    if find_spec(module) is None:
        raise UserError(f"{message}; type {install_hint(extra)}")


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Prints what a bug report begins with, from metadata: importing torch takes seconds."""
    if not wanted:
        return
    from importlib.metadata import PackageNotFoundError, version

    versions = [f"fedx-pl {__version__}", f"Python {platform.python_version()}"]
    for name in ("torch", "pytorch-lightning"):
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"{name} not installed")
    click.echo(", ".join(versions))
    ctx.exit()


# --- options of several commands ------------------------------------------------------------------

Decorator = Callable[[Any], Any]


def _overrides(metavar: str, text: str) -> Decorator:
    return click.argument("overrides", nargs=-1, metavar=f"[{metavar}]...", help=text)


def _option(name: str, metavar: str, text: str, default: Any = None, **settings: Any) -> Decorator:
    return click.option(name, metavar=metavar, help=text, default=default, **settings)


def _folder(name: str, text: str, metavar: str = "FOLDER", **settings: Any) -> Decorator:
    return click.option(name, type=FILE, metavar=metavar, help=text, **settings)


def _out_file(text: str, **settings: Any) -> Decorator:
    return click.option("-o", "--out", type=FILE, metavar="FILE", help=text, **settings)


def _flag(name: str, text: str) -> Decorator:
    return click.option(name, is_flag=True, help=text)


_run_folder = click.argument("run", type=FILE, metavar="RUN", help="A run folder.")
_images = click.argument("images", type=FILE, metavar="IMAGES", help="A folder of images.")
_cache = _overrides(
    "data.cache=FOLDER", "Keep decoded copies of the images there; else they are deleted."
)
_round_text = "The round to take: one that was kept (run.keep) or the best one."
_round = click.option(
    "--round", "round_number", type=int, metavar="N", show_default="the last", help=_round_text
)
_fork = _folder("--fork", "Start a new run from the weights of this run folder.", "RUN")
_definitions = _folder(
    "--definitions", "Where experiments are defined.", show_default="./experiments, or fedx-pl's"
)
_allow_code = _flag("--allow-code", "Import the module of a method that makes its own backbone.")
_port = _option("--port", "N", "The coordinator's port.", 8000)
_insecure = _flag("--insecure", "Use neither TLS nor keys; within this machine only.")


# --- the commands ---------------------------------------------------------------------------------

EXAMPLES = """\b
Examples:
  fedx-pl train data=cifar10 method=byol fedx=true        a first result
  fedx-pl train data=folder data.root=IMAGES method=byol  your own images
  fedx-pl train --help                                    all keys
  fedx-pl COMMAND --help                                  a command's options"""
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}
WORDS = {"options_metavar": "", "subcommand_metavar": "COMMAND ..."}


@click.group("fedx-pl", cls=_Group, context_settings=SETTINGS, epilog=EXAMPLES, **WORDS)
@click.option(
    "-V",
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Show the versions of fedx-pl, Python, torch and Lightning.",
)
def fedx_pl() -> None:
    """Federated self-supervised learning on PyTorch Lightning, with FedX for any method."""


@fedx_pl.command(cls=_Train)
@_overrides("GROUP=CHOICE|KEY=VALUE", "What to train; all groups and keys are listed below.")
@_fork
@_flag("--dry-run", "Show the plan and how long it takes; train nothing.")
@_flag("--yes", "Do not ask before a long run without a GPU.")
def train(overrides: tuple[str, ...], fork: Path | None, **options: Any) -> int:
    """Train a federation, or resume it.

    Example: fedx-pl train data=cifar10 method=byol fedx=true seed=1
    """
    from fedx_pl.config.compose import compose

    config = compose([*overrides, *([f"fork={fork}"] if fork else [])])
    if config.engine.name == "ray":
        _require_extra("ray", "ray", "engine=ray needs Ray")
    return _run("train", options | {"config": config})


@fedx_pl.command()
@click.argument("name", required=False, metavar="[NAME]", help="A data set. Without it, list all.")
@_overrides("data.KEY=VALUE", "Such as data.root=FOLDER or data.download=false.")
def data(name: str | None, overrides: tuple[str, ...]) -> int:
    """Download a data set and describe it."""
    from fedx_pl.config.compose import compose

    # All of it: the limit of a profile is for training.
    config = compose([f"data={name}", "data.limit=0", *overrides]) if name is not None else None
    return _run("data", {"config": config})


KINDS = """\b
KIND is one or more of:
  linear    accuracy of a linear probe
  knn       accuracy of a vote of the nearest neighbors
  semi      accuracy after fine-tuning with few labels
  geometry  angles between models and between classes, signs of collapse"""


@fedx_pl.command(epilog=KINDS)
@_run_folder
@_overrides("KIND|KEY=VALUE", "What to measure (linear unless given), and evaluation.* keys.")
@_round
def evaluate(**options: Any) -> int:
    """Measure a finished run again, or in other ways.

    Results are written to RUN/evaluation.
    """
    return _run("evaluate", options)


@fedx_pl.command()
@_overrides(
    "EXPERIMENT|KEY=VALUE",
    "Names of experiments or files NAME.yaml; profile=NAME, run.* and data.* keys.",
)
@_option("--seeds", "N,N", "Run once with each of these seeds.", "0")
@_option("--jobs", "N", "How many runs to train at once.", 1)
@_option("--only", "AXIS=LABEL,LABEL", "Run only these labels of an axis.", multiple=True)
@_definitions
@_folder("--results", "Where result files go.", show_default="experiments/results/PROFILE")
@_flag("--dry-run", "List the runs; train nothing.")
@_flag("--yes", "Do not ask before long runs without a GPU.")
def sweep(**options: Any) -> int:
    """Run the experiments behind tables and figures.

    Finished runs are skipped and interrupted ones resumed. Each run leaves a small result file for
    `fedx-pl report`.
    """
    return _run("sweep", options)


RESULTS = "A folder of result files. Without it, experiments/results/PROFILE."


@fedx_pl.command()
@click.argument("results", required=False, type=FILE, metavar="[RESULTS]", help=RESULTS)
@_definitions
@_folder("--out", "Where report.md, report.html and figures go.", show_default="RESULTS")
def report(**options: Any) -> int:
    """Write tables and figures of finished experiments."""
    return _run("report", options)


@fedx_pl.command()
@_run_folder
@_option("--to", "FORMAT", "One of torch, torchvision, safetensors, onnx.", "torch")
@_out_file("The file to write.", show_default="RUN/encoder-FORMAT")
@_round
@_allow_code
def export(**options: Any) -> int:
    """Write a run's encoder for use without fedx-pl."""
    if options["to"] == "onnx":
        _require_extra("onnx", "onnxscript", "--to onnx needs onnx and onnxscript")
    return _run("export", options)


@fedx_pl.command()
@_run_folder
@_images
@_cache
@_out_file("The table to write, *.npz or *.parquet.", default=Path("embeddings.npz"))
@_round
@_allow_code
def embed(**options: Any) -> int:
    """Write the features of a folder of images as a table."""
    return _run("embed", options)


@fedx_pl.command()
@_run_folder
@click.argument("query", type=FILE, metavar="QUERY", help="An image.")
@_images
@_cache
@_option("--count", "N", "How many images to find.", 12)
@_out_file("The HTML page to write.", default=Path("neighbors.html"))
@_round
@_allow_code
def neighbors(**options: Any) -> int:
    """Find the images most similar to one, and show them on a page."""
    return _run("neighbors", options)


@fedx_pl.group(cls=_Group, **WORDS)
def federate() -> None:
    """Train across real sites, over Flower."""


def _federate(function: str, options: dict[str, Any]) -> int:
    _require_extra("flower", "flwr", "a federation of sites needs Flower")
    return _run("sites", options, function)


@federate.command()
@_option("--sites", "NAMES", "Such as hospital-a,hospital-b.", "", show_default=False)
@_option(
    "--revoke",
    "NAMES",
    "Refuse the keys of these sites; --sites makes new ones.",
    "",
    show_default=False,
)
@_option(
    "--host",
    "NAME",
    "The name by which sites reach the coordinator.",
    "",
    show_default="the name of this machine",
)
@_port
@_folder("--out", "Where keys and certificates go.", default=Path("keys"))
def keys(**options: Any) -> int:
    """Make the coordinator's certificates and a key for each site."""
    return _federate("make_keys", options)


@federate.command()
@_overrides("GROUP=CHOICE|KEY=VALUE", "What to train, as for fedx-pl train.")
@_option("--clients", "N", "How many sites take part.", type=int, required=True)
@_folder("--keys", "The folder that fedx-pl federate keys made.", default=Path("keys/server"))
@_fork
@_option(
    "--host",
    "ADDRESS",
    "The address to listen on.",
    "",
    show_default="all; with --insecure, 127.0.0.1",
)
@_port
@_option("--wait", "SECONDS", "How long the first round waits for all sites.", 600.0)
@_option("--timeout", "SECONDS", "How long a round waits for a site's answer.", 86400.0)
@_flag("--no-encoder", "Do not leave the trained encoder with the sites at the end.")
@_insecure
def server(**options: Any) -> int:
    """Coordinate the rounds.

    Example: fedx-pl federate server experiment=cifar10-byol-fedx --clients 3
    """
    host = options["host"] or ("127.0.0.1" if options["insecure"] else "0.0.0.0")
    return _federate("server", options | {"host": host})


@federate.command()
@_overrides("KEY=VALUE", "This site's own run.*, data.*, privacy.* and site.* keys.")
@_folder("--data", "The folder of this site's images; it is only read.", "IMAGES", required=True)
@_folder("--keys", "The folder of keys that was made for this site.", default=Path())
@_option(
    "--server", "HOST:PORT", "The coordinator's address.", "", show_default="as in the site's keys"
)
@_folder("--state", "Where this site's private state is kept.", show_default="fedx-site-NAME")
@_option(
    "--name",
    "NAME",
    "The name of this site, with --insecure.",
    "",
    show_default="the name of the folder of images",
)
@_flag("--allow-code", "Import modules that the coordinator names, as in method=module:Class.")
@_flag("--stay", "Wait for the next federation when one has finished.")
@_insecure
def client(**options: Any) -> int:
    """Take part with the images of this site.

    Example: fedx-pl federate client --data IMAGES --keys keys/sites/hospital-a
    """
    return _federate("client", options)


INSTALL = """\b
Type one of these once, and again after an update; then start a new shell:
  fedx-pl completion bash > ~/.local/share/bash-completion/completions/fedx-pl
  fedx-pl completion zsh > FOLDER/_fedx-pl    FOLDER: one of your $fpath
  fedx-pl completion fish > ~/.config/fish/completions/fedx-pl.fish"""


@fedx_pl.command(epilog=INSTALL)
@click.argument("shell", type=click.Choice(SHELLS), metavar="SHELL", help=", ".join(SHELLS))
def completion(**options: Any) -> int:
    """Print a script that completes commands and keys."""
    return _run("completion", options)
