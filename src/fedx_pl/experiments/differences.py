"""The settings in which the runs of a report differ from the paper."""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fedx_pl.config.compose import compose
from fedx_pl.config.schema import Config, all_keys
from fedx_pl.experiments.markdown import code, link, table
from fedx_pl.experiments.results import Runs, configured, number, settings
from fedx_pl.experiments.tables import Paper
from fedx_pl.mixins import MIXINS
from fedx_pl.printing import NOTHING, setting

Settings = Mapping[str, Any]
_NAMES = ("name", "profile", "seed", "fedca.base")  # which run it is, not how it is done


def differences(
    shown: Sequence[Runs], paper: Paper, definitions: Path, out: Path
) -> dict[str, Any]:
    """The section on differences: keys with other values, and differences without a key.

    Args:
        shown: the experiments that have results.
        paper: the paper's numbers, which tell what it has run.
        definitions: the folder of the experiments, beside ``docs``.
        out: the folder of the report.
    """
    compared = _configurations(shown, paper)
    settings_here = [pair.here for pair in compared]
    rows = _rows(compared)
    head = ["key", "profile paper", f"here ({shown[0].profile})", "where", "meaning"]
    with_fedx = [one for one in settings_here if one["fedx.enabled"]]
    batches = {one["optim.batch_size"] for one in settings_here}
    return {
        "table": table(head, rows) if rows else None,
        "fedx_elsewhere": any(one["method.name"] != "simclr" for one in with_fedx),
        "batches_differ": bool(with_fedx) and len(batches) > 1,
        "measured_every": _values(settings_here, "evaluation.linear_every"),
        "test_images": _values(settings_here, "data.test_limit"),
        "no_jitter": any(
            one["data.name"] == "cifar10" and one["augment.brightness"] == 0
            for one in settings_here
        ),
        "limited": any(one["data.limit"] for one in settings_here),
        "guide": _guide(definitions, out),
        **_fedu(shown),
    }


@dataclass(frozen=True)
class _Compared:
    """A configuration, the same run at the paper's scale, and the experiment it comes from."""

    here: Settings
    paper: Settings
    experiment: str


def _configurations(shown: Sequence[Runs], paper: Paper) -> list[_Compared]:
    """The configurations of all cells that have a result, each once."""
    compared: dict[str, _Compared] = {}
    for runs in shown:
        experiment = runs.experiment
        in_paper = set(experiment.cells("paper")) if experiment.paper else set()
        for cell, results in runs.by_cell.items():
            seed = min(results)
            here = configured(experiment, cell, runs.profile, seed=seed)
            if here.hash in compared:
                continue
            is_baseline = cell[-1] == experiment.baseline
            if cell not in in_paper:
                there = _usual(here)
            elif is_baseline and paper.has(runs) and paper.numbers(runs, cell) is None:
                # The baseline is ours: the paper has the run without the last axis.
                there = configured(experiment, cell[:-1], "paper", seed=seed)
            else:
                there = configured(experiment, cell, "paper", seed=seed)
            compared[here.hash] = _Compared(settings(here), settings(there), experiment.name)
    return list(compared.values())


def _usual(config: Config) -> Config:
    """The paper's settings for a data set and a method."""
    mixins = [f"{name}={setting(getattr(config, name).enabled)}" for name in MIXINS]
    chosen = [f"data={config.data.name}", f"method={config.method.name}", f"seed={config.seed}"]
    return compose(["profile=paper", *chosen, *mixins])


def _rows(compared: Sequence[_Compared]) -> list[list[str]]:
    """A row for each key and pair of values that differ."""
    places: dict[tuple[str, str, str], list[_Compared]] = defaultdict(list)
    for pair in compared:
        for key in dict.fromkeys([*pair.paper, *pair.here]):
            paper = pair.paper.get(key)
            here = pair.here.get(key)
            if here != paper and key not in _NAMES:
                places[key, _printed(paper), _printed(here)].append(pair)
    meanings = {key: text for key, _, text in all_keys()}
    return [
        [code(key), code(paper), code(here), _where(place, compared), meanings.get(key, "")]
        for (key, paper, here), place in sorted(places.items())
    ]


def _printed(value: Any) -> str:
    return NOTHING if value is None else setting(value)


def _where(place: Sequence[_Compared], compared: Sequence[_Compared]) -> str:
    """Names the runs briefly: all, all of some data sets or methods, or by their experiments."""
    rest = [pair for pair in compared if pair not in place]
    if not rest:
        return "all runs"
    for key in ("data.name", "method.name"):
        names = list(dict.fromkeys(pair.here[key] for pair in place))
        if not any(pair.here[key] in names for pair in rest):
            return f"{key.partition('.')[0]}: {', '.join(names)}"
    if len(rest) < len(place):
        return f"all but some of {_experiments(rest)}"
    return f"some of {_experiments(place)}"


def _experiments(compared: Sequence[_Compared]) -> str:
    return ", ".join(dict.fromkeys(pair.experiment for pair in compared))


def _guide(definitions: Path, out: Path) -> Markup:
    """Names the page on the paper, its code and ours; as a link if the report lies beside it."""
    name = "docs/faithfulness.md"
    root = definitions.resolve().parent
    if not (root / name).exists() or not out.resolve().is_relative_to(root):
        return code(name)
    return link(name, Path(os.path.relpath(root / name, out.resolve())).as_posix())


def _fedu(shown: Sequence[Runs]) -> dict[str, int]:
    """Counts the rounds in which FedU differed from BYOL."""
    results = {result.hash: result for runs in shown for result in runs.results()}
    pairs = [
        (number(row.get("divergence")), number(result.config.get("method.mu")))
        for result in results.values()
        if result.config["method.name"] == "fedu"
        for row in result.rows
    ]
    known = [(value, mu) for value, mu in pairs if value is not None and mu is not None]
    return {"fedu_rounds": len(known), "fedu_apart": sum(value >= mu for value, mu in known)}


def _values(configurations: Sequence[Settings], key: str) -> str:
    return " or ".join(map(str, sorted({one[key] for one in configurations})))
