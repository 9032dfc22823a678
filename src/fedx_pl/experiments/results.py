"""The results of finished runs, and which cell of which experiment each belongs to."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fedx_pl.config.build import brought
from fedx_pl.config.compose import compose, former_labels
from fedx_pl.config.schema import Config
from fedx_pl.errors import UserError, for_terminal
from fedx_pl.evaluation import EVALUATIONS
from fedx_pl.experiments.definition import Experiment, Labels
from fedx_pl.federation.content import flat
from fedx_pl.files import SEAL, unsealed
from fedx_pl.files.reading import read_json
from fedx_pl.provenance import foreign_code

FORMAT = 1
LINEAR, KNN = "linear_top1", "knn_top1"
LABELS = "evaluation.labels"
LARGEST = 1e9  # that a measurement may be


@dataclass(frozen=True, kw_only=True)
class Result:
    """One finished run, as the sweep wrote it."""

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
        """Whether the probe and kNN saw the labels of a subset only (``evaluation.labels=limit``)."""
        return self.config[LABELS] == "limit" and self.config["data.limit"] > 0

    @property
    def rows(self) -> list[Mapping[str, Any]]:
        """The rounds in order, without the untrained network."""
        return sorted(
            (row for row in self.rounds if row["round"] > 0), key=lambda row: int(row["round"])
        )

    def measured(self, key: str = LINEAR) -> list[tuple[int, float]]:
        """(round, accuracy) of the rounds that were measured."""
        points = [(int(row["round"]), number(row.get(key))) for row in self.rows]
        return [(round_number, value) for round_number, value in points if value is not None]

    def last(self, key: str = LINEAR) -> float | None:
        """The accuracy after the last round; nothing if that round has none, never an earlier one."""
        return number(self.rows[-1].get(key))

    def best(self, key: str = LINEAR) -> float | None:
        """The accuracy of the best measured round."""
        return max((value for _, value in self.measured(key)), default=None)


Measure = Callable[[Result], float | None]  # one number of a run, if it has it


def number(value: Any) -> float | None:
    """What was measured; nothing for nan and for what is no number."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None


def read_results(folder: Path) -> tuple[list[Result], list[str]]:
    """Reads all ``*.json`` of a folder.

    Returns:
        (the results by name and seed, a sentence for each file that had to be left out)

    Raises:
        UserError: the folder has no result, or has results of several profiles, which are never mixed in one table.
    """
    found: dict[str, Result] = {}
    problems = []
    for path in sorted(folder.glob("*.json")):
        try:
            result = read_result(path)
        except (OSError, ValueError) as error:
            problems.append(
                f"{path.name} is no result of a finished run and was left out ({error})"
            )
            continue
        if result.hash in found:
            problems.append(f"{path.name} is a second result of run {result.hash} and was left out")
            continue
        found[result.hash] = result
    if not found:
        left_out = f": {'; '.join(problems)}" if problems else ""
        raise UserError(
            f"{folder} has no results{left_out}; type fedx-pl sweep table1 profile=mini to make some"
        )
    profiles = sorted({result.profile for result in found.values()})
    if len(profiles) > 1:
        raise UserError(
            f"{folder} has results of several profiles ({', '.join(profiles)}); give each its own folder"
        )
    return sorted(
        found.values(), key=lambda result: (result.name, result.hash, result.seed)
    ), problems


def read_result(path: Path) -> Result:
    """Reads the file of one run.

    Raises:
        OSError: there is no such file.
        ValueError: it is no result of a finished run; the message says why.
    """
    if path.exists() and not path.is_file():
        raise ValueError("it is not a file")  # Reading a pipe or a device may not end.
    try:
        return _checked(_harmless(read_json(path)))
    except KeyError as error:
        raise ValueError(f"it has no {error}") from error
    except (TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(str(error).partition("\n")[0]) from error


def _harmless(tree: Any) -> Any:
    """The content of a file with texts that can be written and printed anywhere."""
    if isinstance(tree, dict):
        return {for_terminal(key): _harmless(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_harmless(value) for value in tree]
    return for_terminal(tree) if isinstance(tree, str) else tree


def _checked(content: Any) -> Result:
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
            name: dict(found) for name, found in (content.get("evaluations") or {}).items()
        },
    )
    for key in ("data.name", "method.name", "fedx.enabled"):
        if key not in result.config:
            raise KeyError(f"config.{key}")
    for key in ("federation.rounds", "federation.epochs", "data.limit"):
        _require(
            f"config.{key}",
            result.config[key],
            isinstance(result.config[key], int),
            instead="a whole number",
        )
    _require("seconds", result.seconds, 0 <= result.seconds < LARGEST, instead="a time")
    rounds = result.config["federation.rounds"]
    for row in (result.untrained, *result.rounds):
        _check_numbers(row)
    for kind, found in result.evaluations.items():
        _check_numbers(found)
        if kind in _CHECKS:
            _CHECKS[kind](found)
    if not result.rows or result.rows[-1]["round"] != rounds:
        raise ValueError(f"its rounds end before the last, {rounds}")
    return result


def _check_numbers(row: Mapping[str, Any]) -> None:
    """Numbers of which sums and squares can be taken; what is not finite counts as not measured."""
    for key, value in row.items():
        known = number(value)
        _require(key, value, known is None or abs(known) < LARGEST, instead="a measurement")


def _check_semi(found: Mapping[str, Any]) -> None:
    for share, values in found.items():
        if isinstance(values, Mapping) and "labels" in values:
            _require("semi", share, 0 < float(share) <= 1, instead="a share of the labels")
            labels = values["labels"]
            _require(
                "labels",
                labels,
                isinstance(labels, int) and 0 <= labels < LARGEST,
                instead="a count",
            )
            _check_numbers(values)
        else:
            _require("semi", share, not _is_number(share), instead="a share with its results")


def _check_geometry(found: Mapping[str, Any]) -> None:
    boxes = found.get("local_global", {})
    for name, box in boxes.items():
        for key in ("median", "q1", "q3", "low", "high", "mean"):
            _require(f"{name} {key}", box[key], _is_angle(box[key]), instead="an angle")
    between = found.get("interclass") or []
    for angle in [*between, found["interclass_mean"]] if between else []:
        _require("interclass", angle, _is_angle(angle), instead="an angle")


_CHECKS = {
    "semi": _check_semi,
    "geometry": _check_geometry,
}  # what tables and figures rely on, by evaluation


def _is_angle(value: Any) -> bool:
    known = number(value)
    return known is not None and 0 <= known <= 180


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
    """Adds which labels were used, where a file is older than the choice."""
    return {LABELS: former_labels(config.get("data.limit")), "data.limit": 0, **config}


def changes(result: Result, config: Config, ignored: Sequence[str] = ()) -> list[str]:
    """In what a result's configuration or code differs from today's.

    A changed default or an edited method does not show in the hash: the stored values tell. A key that only one of
    them has does not matter, nor does code of which an older file says nothing.

    Args:
        result: of a finished run.
        config: of today.
        ignored: keys that may differ.
    """
    then, now = result.config, settings(config)
    if not then["data.limit"]:
        ignored = [*ignored, LABELS]  # All labels, whichever way it is said.
    differing = [key for key in now if key in then and key not in ignored and now[key] != then[key]]
    found = [f"{key} was {then[key]}, is {now[key]}" for key in differing]
    if result.code and result.code != (code := foreign_code.hash_of(*brought(config))):
        found.append(
            f"the code of method={config.method.name} was {result.code}, is {code or 'the package'}"
        )
    return found


def settings(config: Config) -> dict[str, Any]:
    """All that decides a result, by dotted key, as JSON would bring it back."""
    return flat(json.loads(json.dumps(config.content())))


def configured(experiment: Experiment, cell: Labels, profile: str, seed: int) -> Config:
    """The run of a cell. Composing is slow, so that seeds and experiments share what is the same but for the seed."""
    words = experiment.overrides(cell, profile, seed)
    seeds = [word for word in words if word.startswith("seed=")]
    config = _composed(tuple(word for word in words if word not in seeds))
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
    found: dict[Labels, dict[int, Result]] = field(
        default_factory=dict
    )  # by seed; cells without a result are absent

    def of(self, cell: Labels) -> list[Result]:
        """A cell's results, by seed."""
        return list(self.found.get(cell, {}).values())

    def values(self, cell: Labels, measure: Measure) -> dict[int, float]:
        """A number of a cell's runs, by seed, of those that have it."""
        numbers = {seed: measure(result) for seed, result in self.found.get(cell, {}).items()}
        return {seed: value for seed, value in numbers.items() if value is not None}

    @property
    def groups(self) -> list[Labels]:
        """The cells without the label of the last axis, in order: what is compared stands within a group."""
        return list(dict.fromkeys(cell[:-1] for cell in self.cells))

    @property
    def variants(self) -> list[str]:
        """The labels of the last axis."""
        return list(dict.fromkeys(cell[-1] for cell in self.cells))

    @property
    def missing(self) -> list[Labels]:
        """Cells without a result."""
        return [cell for cell in self.cells if cell not in self.found]


def match(
    experiment: Experiment, results: Sequence[Result], outdated: dict[str, list[str]]
) -> Runs:
    """Finds the results of an experiment's cells.

    Args:
        experiment: the definition.
        results: all of one profile.
        outdated: gets the keys in which a result with the right hash differs from today's configuration, by the
            result's hash: it was run under another default, and is left out.
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
            if result is None or any(
                name not in result.evaluations for name in experiment.evaluate
            ):
                continue
            if differences := changes(result, config, ignored):
                outdated[result.hash] = differences
            else:
                runs.found.setdefault(cell, {})[seed] = result
    return runs


def evaluation_settings(kind: str, config: Config) -> dict[str, Any]:
    """What a measurement depends on, beside the weights."""
    return EVALUATIONS[kind](config.evaluation).settings(config.federation.epochs)


def read_evaluation(folder: Path, kind: str, config: Config) -> dict[str, Any] | None:
    """The results of a finished run as its configuration wants them; None if they are not there yet.

    Not there are also those of an earlier round, or with other settings.
    """
    try:
        document = read_json(folder / "evaluation" / f"{kind}.json")
        document = (
            unsealed(document) if SEAL in document else document
        )  # Those of earlier versions have none.
        now, then = evaluation_settings(kind, config), dict(document["settings"])
        if "labels" in now:
            then.setdefault("labels", former_labels(config.data.limit))
        return (
            document["results"]
            if document["round"] == config.federation.rounds and then == now
            else None
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


# --- the run ----------------------------------------------------------------------------------------------------------
