"""Experiments: which runs make a table or a figure. A definition is data, ``experiments/NAME.yaml``::

    title: Two methods with and without FedX
    axes:                                  # runs are the product of the axes' labels
      data: {CIFAR-10: data=cifar10, SVHN: data=svhn}
      method: {FedSimCLR: method=simclr, FedBYOL: method=byol}
      variant: {plain: optim.batch_size=64, + FedX: fedx=true}
    columns: data                          # the axis that is spread over columns; the others make the rows
    baseline: plain                        # of the last axis: the others are compared with it, seed by seed

Optional: ``base`` (overrides of all runs), ``evaluate`` (``semi``, ``geometry``: measured after training), ``runs``
(the name of another definition whose axes are meant), ``show`` (``table``, ``curves``, ``errors``, ``semi``,
``geometry``; a table unless given), ``paper`` (where the paper has it), ``note``, ``profiles`` (for one profile,
the labels of an axis that are left, e.g. ``mini: {data: [CIFAR-10]}``) and ``needs``: runs that others build on, by
name, as overrides on top of all axes but the last; ``@NAME`` in an override is the folder of that run.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedx_pl.config.compose import compose
from fedx_pl.config.schema import Config
from fedx_pl.errors import UserError, known_names, short
from fedx_pl.evaluation import EVALUATIONS
from fedx_pl.files.reading import read_yaml

SHOWN = ("table", "curves", "errors", "semi", "geometry")
Labels = tuple[str, ...]
HERE = Path("experiments")  # in a checkout, or of the user's own
PACKAGED = Path(__file__).parent / "definitions"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One table or figure."""

    name: str
    title: str
    axes: dict[str, dict[str, list[str]]]  # axis -> label -> overrides
    base: list[str] = field(default_factory=list)
    columns: str = ""  # an axis, or empty: each run is a row
    baseline: str = ""  # a label of the last axis, or empty: nothing is compared
    evaluate: list[str] = field(default_factory=list)
    show: list[str] = field(default_factory=lambda: ["table"])
    needs: dict[str, list[str]] = field(default_factory=dict)
    paper: str = ""
    note: str = ""
    profiles: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    def cells(self, profile: str) -> Iterator[Labels]:
        """All combinations of labels, one of each axis, that are part of the profile."""
        kept = self.profiles.get(profile, {})
        yield from itertools.product(
            *(kept.get(axis, list(labels)) for axis, labels in self.axes.items())
        )

    def overrides(
        self, cell: Labels, profile: str, seed: int, more: Sequence[str] = ()
    ) -> list[str]:
        """What to type after ``fedx-pl train`` for one run.

        Args:
            cell: one label of each axis.
            profile: ``paper``, ``mini``, ...
            seed: of the run.
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
        """The runs that the one of ``cell`` builds on, by name: `needs` on top of all axes but the last."""
        start = [f"profile={profile}", f"seed={seed}", *self.base, *self._of_axes(cell[:-1])]
        words = self._of_axes(cell)
        return {
            name: [*start, *own, *more]
            for name, own in self.needs.items()
            if any(word.endswith(f"=@{name}") for word in words)
        }

    def _of_axes(self, cell: Labels) -> list[str]:
        axes = zip(self.axes.values(), cell, strict=False)
        return [word for labels, label in axes for word in labels[label]]


def load_experiment(path: Path) -> Experiment:
    """Reads a definition.

    Raises:
        UserError: it cannot be read, or a key, axis or label in it does not exist.
    """
    try:
        return _load(path)
    except (
        TypeError,
        ValueError,
        AttributeError,
        KeyError,
    ) as error:  # A list where a mapping belongs, and so on.
        raise UserError(
            f"{path} is not an experiment ({short(error)}); see docs/experiments.md"
        ) from error


def _load(path: Path, readers: tuple[Path, ...] = ()) -> Experiment:
    """Reads a definition.

    Args:
        path: of the file.
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
    if (
        "title" not in content
        or not isinstance(axes, dict)
        or not all(isinstance(v, dict) for v in axes.values())
    ):
        raise UserError(
            f"{path} needs a title and axes, e.g. axes: {{variant: {{plain: method=simclr}}}}"
        )
    axes = {
        axis: {str(k): _words(v) for k, v in labels.items()}
        for axis, labels in content.pop("axes").items()
    }
    needs = {name: _words(words) for name, words in content.pop("needs", {}).items()}
    experiment = Experiment(
        name=path.stem, axes=axes, base=_words(content.pop("base", [])), needs=needs, **content
    )
    _check(experiment, path)
    return experiment


def load_experiments(folder: Path) -> list[Experiment]:
    """All definitions of a folder, by name."""
    return [load_experiment(path) for path in sorted(folder.glob("*.yaml"))]


def parse_seeds(text: str) -> list[int]:
    """``"0,1,2"`` -> [0, 1, 2]."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise UserError(f"--seeds {text} are not whole numbers from 0 on; type --seeds 0,1,2")
    return [int(word) for word in words]


def parse_only(words: Sequence[str], experiments: Sequence[Experiment]) -> dict[str, list[str]]:
    """``["method=FedSimCLR,FedBYOL"]`` -> the labels to run, by axis."""
    known: dict[str, list[str]] = {}
    for experiment in experiments:
        for axis, labels in experiment.axes.items():
            known.setdefault(axis, []).extend(labels)
    found: dict[str, list[str]] = {}
    for word in words:
        axis, _, listed = word.partition("=")
        found[axis] = [*found.get(axis, []), *(label.strip() for label in listed.split(","))]
        if axis not in known:
            raise UserError(
                f"--only {word}: there is no axis {axis!r}; the axes are {', '.join(known)}"
            )
        if unknown := [label for label in found[axis] if label not in known[axis]]:
            raise UserError(
                f"--only {word}: {axis} has no {unknown[0]!r}; it has {', '.join(dict.fromkeys(known[axis]))}"
            )
    return found


def _words(value: Any) -> list[str]:
    """``"a=1 b=2"`` or a list of such; nothing is no override."""
    return [
        word
        for text in ([value] if isinstance(value, str) else value or [])
        for word in str(text).split()
    ]


def _check(experiment: Experiment, path: Path) -> None:
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
    for word in itertools.chain(
        *(words for labels in experiment.axes.values() for words in labels.values())
    ):
        if "=@" in word:
            require(f"{word}:", word.partition("=@")[2], experiment.needs)
    if experiment.columns:
        require("columns:", experiment.columns, experiment.axes)
    if experiment.baseline:
        require("baseline:", experiment.baseline, list(experiment.axes.values())[-1])
    for profile, kept in experiment.profiles.items():
        for axis, labels in kept.items():
            require(f"profiles: {profile}:", axis, experiment.axes)
            for label in labels:
                require(f"profiles: {profile}: {axis}:", label, experiment.axes[axis])


def definitions_folder(given: Path | None = None) -> Path:
    """Of the experiments: the given one; `HERE` if it has some, as in a checkout; else those of the package."""
    return given or (HERE if any(HERE.glob("*.yaml")) else PACKAGED)


def results_folder(definitions: Path, profile: str) -> Path:
    """Beside the definitions, but never within the installed package."""
    return (HERE if definitions == PACKAGED else definitions) / "results" / profile
