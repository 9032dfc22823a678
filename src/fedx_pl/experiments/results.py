"""The results of finished runs, and which cell of which experiment each belongs to."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fedx_pl.config.build import brought
from fedx_pl.config.compose import compose, former_labels
from fedx_pl.config.schema import Config
from fedx_pl.errors import UserError, first_line, for_terminal
from fedx_pl.evaluation import EVALUATIONS
from fedx_pl.experiments.definition import Experiment, Labels
from fedx_pl.federation.content import flat
from fedx_pl.files import SEAL, unsealed
from fedx_pl.files.reading import read_json
from fedx_pl.provenance import foreign_code

FORMAT = 1
LINEAR = "linear_top1"
KNN = "knn_top1"
LABELS = "evaluation.labels"
LARGEST = 1e9  # no measurement is larger


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result file of one finished run."""

    name: str
    hash: str
    seed: int
    profile: str
    commit: str
    code: str  # hash of the method's code; empty if it is the package's, and in older files
    machine: str
    seconds: float
    config: Mapping[str, Any]  # dotted keys
    untrained: Mapping[str, Any]
    rounds: Sequence[Mapping[str, Any]]
    evaluations: Mapping[str, Any]

    @property
    def few_labels(self) -> bool:
        """Whether the probe and kNN saw a subset of the labels (``evaluation.labels=limit``)."""
        return bool(self.config[LABELS] == "limit" and self.config["data.limit"] > 0)

    @property
    def rows(self) -> list[Mapping[str, Any]]:
        """The rounds in order, without the untrained network."""
        trained = (row for row in self.rounds if row["round"] > 0)
        return sorted(trained, key=lambda row: int(row["round"]))

    def measured(self, key: str = LINEAR) -> list[tuple[int, float]]:
        """The pairs (round, accuracy) of the rounds that were measured."""
        points = [(int(row["round"]), number(row.get(key))) for row in self.rows]
        return [(round_number, value) for round_number, value in points if value is not None]

    def last(self, key: str = LINEAR) -> float | None:
        """The accuracy after the last round; None if that round has none, never an earlier one."""
        return number(self.rows[-1].get(key))

    def best(self, key: str = LINEAR) -> float | None:
        """The accuracy of the best measured round; None if none was."""
        return max((value for _, value in self.measured(key)), default=None)


Measure = Callable[[Result], float | None]  # takes one number of a run, if it has it


def number(value: Any) -> float | None:
    """A finite number as it is; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def read_results(folder: Path) -> tuple[list[Result], list[str]]:
    """Reads all ``*.json`` of a folder.

    Returns:
        The results by name and seed, and a sentence for each file that was left out.

    Raises:
        UserError: the folder has no result, or results of several profiles, which no table mixes.
    """
    results: dict[str, Result] = {}
    problems = []
    for path in sorted(folder.glob("*.json")):
        try:
            result = read_result(path)
        except (OSError, ValueError) as error:
            problems.append(
                f"{path.name} is no result of a finished run and was left out ({error})"
            )
            continue
        if result.hash in results:
            problems.append(f"{path.name} is a second result of run {result.hash} and was left out")
            continue
        results[result.hash] = result
    if not results:
        left_out = f": {'; '.join(problems)}" if problems else ""
        raise UserError(
            f"{folder} has no results{left_out}; type fedx-pl sweep table1 profile=mini to make "
            "some"
        )
    profiles = sorted({result.profile for result in results.values()})
    if len(profiles) > 1:
        raise UserError(
            f"{folder} has results of several profiles ({', '.join(profiles)}); give each its own "
            "folder"
        )
    in_order = sorted(results.values(), key=lambda one: (one.name, one.hash, one.seed))
    return in_order, problems


def read_result(path: Path) -> Result:
    """Reads the result file of one run.

    Raises:
        OSError: there is no such file.
        ValueError: it is not the result of a finished run; the message says why.
    """
    if path.exists() and not path.is_file():
        raise ValueError("it is not a file")  # Reading a pipe or a device may not end.
    try:
        return _checked(_harmless(read_json(path)))
    except KeyError as error:
        raise ValueError(f"it has no {error}") from error
    except (TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(first_line(error)) from error


def _harmless(tree: Any) -> Any:
    """Escapes the control characters in all texts of a file, so that they can be printed."""
    if isinstance(tree, dict):
        return {for_terminal(key): _harmless(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_harmless(value) for value in tree]
    return for_terminal(tree) if isinstance(tree, str) else tree


def _checked(content: Any) -> Result:
    """Makes a result of the content of a file.

    Raises:
        ValueError: a value is impossible; the message says which.
        KeyError: a key is missing.
    """
    if content["format"] != FORMAT:
        raise ValueError(f"its format is {content['format']}, known is {FORMAT}")
    result = Result(
        name=str(content["name"]),
        hash=str(content["hash"]),
        seed=int(content["seed"]),
        profile=str(content["profile"]),
        commit=str(content["commit"]),
        code=str(content.get("code", "")),
        machine=str(content["machine"]),
        seconds=float(content["seconds"]),
        config=_with_labels(flat(content["config"])),
        untrained=dict(content.get("untrained") or {}),
        rounds=[dict(row) for row in content["rounds"]],
        evaluations={
            kind: dict(values) for kind, values in (content.get("evaluations") or {}).items()
        },
    )
    for key in ("data.name", "method.name", "fedx.enabled"):
        if key not in result.config:
            raise KeyError(f"config.{key}")
    for key in ("federation.rounds", "federation.epochs", "data.limit"):
        value = result.config[key]
        _require(f"config.{key}", value, isinstance(value, int), instead="a whole number")
    _require("seconds", result.seconds, 0 <= result.seconds < LARGEST, instead="a time")
    rounds = result.config["federation.rounds"]
    for row in (result.untrained, *result.rounds):
        _check_numbers(row)
    for kind, values in result.evaluations.items():
        _check_numbers(values)
        if kind in _CHECKS:
            _CHECKS[kind](values)
    if not result.rows or result.rows[-1]["round"] != rounds:
        raise ValueError(f"its rounds end before the last, {rounds}")
    return result


def _check_numbers(row: Mapping[str, Any]) -> None:
    """Refuses numbers whose squares would overflow; not finite ones count as not measured."""
    for key, value in row.items():
        size = abs(number(value) or 0)
        _require(key, value, size < LARGEST, instead="a measurement")


def _check_semi(evaluation: Mapping[str, Any]) -> None:
    for share, values in evaluation.items():
        if isinstance(values, Mapping) and "labels" in values:
            _require("semi", share, 0 < float(share) <= 1, instead="a share of the labels")
            labels = values["labels"]
            is_count = isinstance(labels, int) and 0 <= labels < LARGEST
            _require("labels", labels, is_count, instead="a count")
            _check_numbers(values)
        else:
            _require("semi", share, not _is_number(share), instead="a share with its results")


def _check_geometry(evaluation: Mapping[str, Any]) -> None:
    for name, box in evaluation.get("local_global", {}).items():
        for key in ("median", "q1", "q3", "low", "high", "mean"):
            _require(f"{name} {key}", box[key], _is_angle(box[key]), instead="an angle")
    between = evaluation.get("interclass") or []
    for angle in [*between, evaluation["interclass_mean"]] if between else []:
        _require("interclass", angle, _is_angle(angle), instead="an angle")


# What tables and figures rely on, by evaluation.
_CHECKS = {"semi": _check_semi, "geometry": _check_geometry}


def _is_angle(value: Any) -> bool:
    angle = number(value)
    return angle is not None and 0 <= angle <= 180


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _require(key: str, value: Any, possible: bool, instead: str) -> None:
    if not possible:
        raise ValueError(f"its {key} is {str(value)[:50]!r}, not {instead}")


def _with_labels(config: dict[str, Any]) -> dict[str, Any]:
    """Adds which labels were used, if the file is older than that choice."""
    return {LABELS: former_labels(config.get("data.limit")), "data.limit": 0, **config}


def changes(result: Result, config: Config, ignored: Sequence[str] = ()) -> list[str]:
    """Lists how the configuration and the code of a result differ from the current ones.

    A changed default or an edited method does not change the hash, so the stored values are
    compared. Keys that only one side has do not matter, nor does code that an older file does not
    record.

    Args:
        result: the result of a finished run.
        config: the current configuration of that run.
        ignored: keys that may differ.
    """
    then = result.config
    now = settings(config)
    if not then["data.limit"]:
        ignored = [*ignored, LABELS]  # Without a limit, both choices mean all labels.
    keys = [key for key in now if key in then and key not in ignored and now[key] != then[key]]
    differences = [f"{key} was {then[key]}, is {now[key]}" for key in keys]
    if result.code and result.code != (code := foreign_code.hash_of(*brought(config))):
        differences.append(
            f"the code of method={config.method.name} was {result.code}, is {code or 'the package'}"
        )
    return differences


def settings(config: Config) -> dict[str, Any]:
    """All settings that decide a result, by dotted key, with the types of JSON."""
    return flat(json.loads(json.dumps(config.content())))


def configured(experiment: Experiment, cell: Labels, profile: str, seed: int) -> Config:
    """The configuration of a cell's run."""
    return composed(experiment.overrides(cell, profile, seed))


def composed(overrides: Sequence[str]) -> Config:
    """Composes a configuration once for all seeds, since composing is slow.

    Args:
        overrides: the arguments of ``fedx-pl train``, with a seed.
    """
    seeds = [word for word in overrides if word.startswith("seed=")]
    config = _composed(tuple(word for word in overrides if word not in seeds))
    return dataclasses.replace(config, seed=int(seeds[-1].removeprefix("seed=")))


@cache
def _composed(overrides: tuple[str, ...]) -> Config:
    return compose(overrides)


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The results of one experiment."""

    experiment: Experiment
    profile: str
    cells: list[Labels]  # of the experiment at this profile, in its order
    # By cell and seed; cells without a result are absent.
    by_cell: dict[Labels, dict[int, Result]] = field(default_factory=dict)

    def results_of(self, cell: Labels) -> list[Result]:
        """A cell's results, by seed."""
        return list(self.by_cell.get(cell, {}).values())

    def results(self) -> Iterator[Result]:
        """The results of all cells."""
        for cell in self.by_cell:
            yield from self.results_of(cell)

    def values(self, cell: Labels, measure: Measure) -> dict[int, float]:
        """A number of the runs of a cell, by seed; runs without it are left out."""
        numbers = {seed: measure(result) for seed, result in self.by_cell.get(cell, {}).items()}
        return {seed: value for seed, value in numbers.items() if value is not None}

    @property
    def groups(self) -> list[Labels]:
        """The cells without the label of the last axis; runs are compared within a group."""
        return list(dict.fromkeys(cell[:-1] for cell in self.cells))

    @property
    def variants(self) -> list[str]:
        """The labels of the last axis."""
        return list(dict.fromkeys(cell[-1] for cell in self.cells))

    @property
    def missing(self) -> list[Labels]:
        """The cells without a result."""
        return [cell for cell in self.cells if cell not in self.by_cell]


def match(
    experiment: Experiment, results: Sequence[Result], outdated: dict[str, list[str]]
) -> Runs:
    """Finds the results of an experiment's cells.

    Args:
        experiment: the definition.
        results: results of one profile.
        outdated: receives, by the hash of a result, how it differs from the current configuration:
            it was run with another default, and is left out.
    """
    profile = results[0].profile
    by_hash = {result.hash: result for result in results}
    seeds = sorted({result.seed for result in results})
    runs = Runs(experiment=experiment, profile=profile, cells=list(experiment.cells(profile)))
    # Results measured with few labels may be reported, but never in one table with others.
    ignored = [LABELS] if all(result.few_labels for result in results) else []
    for cell in runs.cells:
        for seed in seeds:
            config = configured(experiment, cell, profile, seed=seed)
            result = by_hash.get(config.hash)
            if result is None or not result.evaluations.keys() >= set(experiment.evaluate):
                continue
            if differences := changes(result, config, ignored):
                outdated[result.hash] = differences
            else:
                runs.by_cell.setdefault(cell, {})[seed] = result
    return runs


def evaluation_settings(kind: str, config: Config) -> dict[str, Any]:
    """The settings that an evaluation depends on, beside the weights."""
    return EVALUATIONS[kind](config.evaluation).settings(config.federation.epochs)


def read_evaluation(folder: Path, kind: str, config: Config) -> dict[str, Any] | None:
    """Reads an evaluation of a finished run.

    Args:
        folder: the run folder.
        kind: ``semi``, ``geometry``, ...
        config: the configuration of the run.

    Returns:
        None if it is missing or damaged, of an earlier round, or made with other settings.
    """
    try:
        document = read_json(folder / "evaluation" / f"{kind}.json")
        if SEAL in document:  # Files of earlier versions have no seal.
            document = unsealed(document)
        now = evaluation_settings(kind, config)
        then = dict(document["settings"])
        if "labels" in now:
            then.setdefault("labels", former_labels(config.data.limit))
        is_current = document["round"] == config.federation.rounds and then == now
        return document["results"] if is_current else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
