"""Experiments: which runs make a table or a figure.

A definition is data, ``experiments/NAME.yaml``::

    title: Two methods with and without FedX
    axes:                                  # runs are the product of the axes' labels
      data: {CIFAR-10: data=cifar10, SVHN: data=svhn}
      method: {FedSimCLR: method=simclr, FedBYOL: method=byol}
      variant: {plain: optim.batch_size=64, + FedX: fedx=true}
    columns: data                          # the axis whose labels are columns; others make the rows
    baseline: plain                        # a label of the last axis; others are compared with it

Optional keys:

- ``base``: overrides of all runs.
- ``evaluate``: ``semi``, ``geometry``; measured after training.
- ``runs``: the name of another definition, to use its axes.
- ``show``: ``table`` (the default), ``curves``, ``errors``, ``semi``, ``geometry``.
- ``paper``: where the paper has it.
- ``note``: a text below the title.
- ``profiles``: the labels that a profile keeps of an axis, e.g. ``mini: {data: [CIFAR-10]}``.
- ``needs``: runs that others build on, by name, as overrides on top of all axes but the last;
  ``@NAME`` in an override is the folder of that run.
"""

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedx_pl.config.compose import compose, has_gpu
from fedx_pl.config.schema import Config
from fedx_pl.errors import UserError, known_names, short
from fedx_pl.evaluation import EVALUATIONS
from fedx_pl.files.reading import read_yaml

SHOWN = ("table", "curves", "errors", "semi", "geometry")
Labels = tuple[str, ...]
HERE = Path("experiments")  # the definitions of a checkout, or the user's own
PACKAGED = Path(__file__).parent / "definitions"
# Overrides that say where and how to run, and change no result.
_PLACES = ("run.", "data.root=", "data.cache=", "data.download=", "data.workers=")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The definition of one table or figure."""

    name: str
    title: str
    axes: dict[str, dict[str, list[str]]]  # axis -> label -> overrides
    base: list[str] = field(default_factory=list)
    columns: str = ""  # an axis; if empty, each run is a row
    baseline: str = ""  # a label of the last axis; if empty, nothing is compared
    evaluate: list[str] = field(default_factory=list)
    show: list[str] = field(default_factory=lambda: ["table"])
    needs: dict[str, list[str]] = field(default_factory=dict)
    paper: str = ""
    note: str = ""
    profiles: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    def cells(self, profile: str) -> Iterator[Labels]:
        """All combinations of the labels that the profile keeps, one of each axis."""
        kept = self.profiles.get(profile, {})
        yield from itertools.product(
            *(kept.get(axis, list(labels)) for axis, labels in self.axes.items())
        )

    def overrides(
        self, cell: Labels, profile: str, seed: int, more: Sequence[str] = ()
    ) -> list[str]:
        """The arguments of ``fedx-pl train`` for one run.

        Args:
            cell: one label of each axis.
            profile: ``paper``, ``mini``, ...
            seed: the seed of the run.
            more: overrides that say where and how to run, such as ``run.threads=1``.
        """
        words = [*self.base, *self._of_axes(cell)]
        for name, needed in self.needed(cell, profile, seed, more=more).items():
            words = [word.replace(f"=@{name}", f"={compose(needed).run_folder}") for word in words]
        return [f"profile={profile}", f"seed={seed}", *words, *more]

    def config(self, cell: Labels, profile: str, seed: int) -> Config:
        """The configuration of one run."""
        return compose(self.overrides(cell, profile, seed))

    def needed(
        self, cell: Labels, profile: str, seed: int, more: Sequence[str] = ()
    ) -> dict[str, list[str]]:
        """The overrides of the runs that the run of ``cell`` builds on, by name."""
        shared = [f"profile={profile}", f"seed={seed}", *self.base, *self._of_axes(cell[:-1])]
        words = self._of_axes(cell)
        return {
            name: [*shared, *overrides, *more]
            for name, overrides in self.needs.items()
            if any(word.endswith(f"=@{name}") for word in words)
        }

    def _of_axes(self, cell: Labels) -> list[str]:
        """The overrides of the labels of the first axes."""
        axes = zip(self.axes.values(), cell, strict=False)
        return [word for labels, label in axes for word in labels[label]]


def load_experiment(path: Path) -> Experiment:
    """Reads a definition.

    Raises:
        UserError: it cannot be read, or a key, axis or label in it does not exist.
    """
    try:
        return _load(path)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        # Such as a list where a mapping belongs.
        raise UserError(
            f"{path} is not an experiment ({short(error)}); see docs/experiments.md"
        ) from error


def _load(path: Path, readers: tuple[Path, ...] = ()) -> Experiment:
    """Reads a definition, and the one whose axes it uses.

    Args:
        path: the file.
        readers: the files that name it in ``runs``.
    """
    try:
        content = read_yaml(path)
    except (OSError, ValueError) as error:
        names = [file.stem for file in sorted(path.parent.glob("*.yaml"))]
        raise UserError(
            f"{path} is not a readable experiment ({error}); known: {', '.join(names)}"
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not an experiment: it has no keys")
    if other := content.pop("runs", None):
        file = path.with_name(f"{Path(str(other)).name}.yaml")
        if file.stem != other or file in (path, *readers):
            raise UserError(
                f"{path}: runs: {other} is not the name of another definition beside it"
            )
        origin = _load(file, readers=(*readers, path))
        inherited = {
            key: getattr(origin, key)
            for key in ("axes", "base", "columns", "baseline", "needs", "profiles")
        }
        content = inherited | content
    known = [name for name in Experiment.__dataclass_fields__ if name != "name"]
    for key in content:
        if key not in known:
            raise UserError(f"{path}: there is no key {key!r}{known_names(str(key), known)}")
    axes = content.get("axes")
    has_axes = isinstance(axes, dict) and all(isinstance(axis, dict) for axis in axes.values())
    if "title" not in content or not has_axes:
        raise UserError(
            f"{path} needs a title and axes, e.g. axes: {{variant: {{plain: method=simclr}}}}"
        )
    axes = {
        axis: {str(label): _words(words) for label, words in labels.items()}
        for axis, labels in content.pop("axes").items()
    }
    needs = {name: _words(words) for name, words in content.pop("needs", {}).items()}
    experiment = Experiment(
        name=path.stem, axes=axes, base=_words(content.pop("base", [])), needs=needs, **content
    )
    _check(experiment, path)
    return experiment


def load_experiments(folder: Path) -> list[Experiment]:
    """Reads all definitions of a folder, by name."""
    return [load_experiment(path) for path in sorted(folder.glob("*.yaml"))]


def parse_seeds(text: str) -> list[int]:
    """Reads ``--seeds``: ``"0,1,2"`` -> [0, 1, 2]."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise UserError(f"--seeds {text} are not whole numbers from 0 on; type --seeds 0,1,2")
    return [int(word) for word in words]


def parse_only(words: Sequence[str], experiments: Sequence[Experiment]) -> dict[str, list[str]]:
    """Reads ``--only``: ``["method=FedSimCLR,FedBYOL"]`` -> the labels to run, by axis."""
    known: dict[str, list[str]] = {}
    for experiment in experiments:
        for axis, labels in experiment.axes.items():
            known.setdefault(axis, []).extend(labels)
    chosen: dict[str, list[str]] = {}
    for word in words:
        axis, _, listed = word.partition("=")
        chosen[axis] = [*chosen.get(axis, []), *(label.strip() for label in listed.split(","))]
        if axis not in known:
            raise UserError(
                f"--only {word}: there is no axis {axis!r}; the axes are {', '.join(known)}"
            )
        if unknown := [label for label in chosen[axis] if label not in known[axis]]:
            listed = ", ".join(dict.fromkeys(known[axis]))
            raise UserError(f"--only {word}: {axis} has no {unknown[0]!r}; it has {listed}")
    return chosen


def parse_places(words: Sequence[str], workers: int) -> list[str]:
    """Reads the overrides of a sweep, which say where and how to run, never what.

    Args:
        words: ``run.root=/scratch``, ``data.root=/data``, ...
        workers: how many runs go at once; they share the cores.
    """
    if workers < 1:
        raise UserError(f"--jobs {workers} runs nothing; type --jobs 1 or more")
    for word in words:
        if word.startswith("run.dir="):
            raise UserError(
                f"{word} would put all runs into one folder; type run.root={word.partition('=')[2]}"
            )
        if not word.startswith(_PLACES):
            raise UserError(
                f"{word} would change the experiment; write it into its YAML file, or use "
                "fedx-pl train"
            )
    threads = max(1, (os.cpu_count() or 1) // workers)
    return [f"run.threads={threads}", *words] if workers > 1 else list(words)


def resolve_profile(name: str) -> str:
    """Turns ``auto`` into ``paper`` with a GPU and ``mini`` without."""
    if name != "auto":
        return name
    return "paper" if has_gpu() else "mini"


def _words(value: Any) -> list[str]:
    """Splits ``"a=1 b=2"``, or a list of such texts, into overrides."""
    texts = [value] if isinstance(value, str) else value or []
    return [word for text in texts for word in str(text).split()]


def _check(experiment: Experiment, path: Path) -> None:
    """Raises UserError for an axis, label or evaluation that does not exist."""

    def require(what: str, word: str, known: Any) -> None:
        if word not in known:
            raise UserError(f"{path}: {what} {word!r} is not one of {', '.join(known) or 'none'}")

    for label in itertools.chain(*experiment.axes.values()):
        if "," in label:
            raise UserError(
                f"{path}: label {label!r} has a comma, where --only would end it; write it without"
            )
    for word in experiment.show:
        require("show:", word, SHOWN)
        if word in EVALUATIONS:
            require("show: needs evaluate:", word, experiment.evaluate)
    for word in experiment.evaluate:
        require("evaluate:", word, EVALUATIONS)
    for labels in experiment.axes.values():
        for word in itertools.chain(*labels.values()):
            if "=@" in word:
                require(f"{word}:", word.partition("=@")[2], experiment.needs)
    if experiment.columns:
        require("columns:", experiment.columns, experiment.axes)
    if experiment.baseline:
        require("baseline:", experiment.baseline, list(experiment.axes.values())[-1])
    for profile, kept in experiment.profiles.items():
        for axis, kept_labels in kept.items():
            require(f"profiles: {profile}:", axis, experiment.axes)
            for label in kept_labels:
                require(f"profiles: {profile}: {axis}:", label, experiment.axes[axis])


def definitions_folder(given: Path | None = None) -> Path:
    """The given folder; or `HERE`, if it has definitions; or else that of the package."""
    return given or (HERE if any(HERE.glob("*.yaml")) else PACKAGED)


def results_folder(definitions: Path, profile: str) -> Path:
    """The folder for results: beside the definitions, but never in the installed package."""
    return (HERE if definitions == PACKAGED else definitions) / "results" / profile
