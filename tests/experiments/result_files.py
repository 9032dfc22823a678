"""Result files of made-up runs, as a sweep would write them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedx_pl.experiments.definition import Experiment, Labels
from fedx_pl.experiments.results import configured

DEFINITION = {
    "title": "Two data sets & <three> variants",
    "paper": "Table 9",
    "note": "Made up.",
    "base": "federation.rounds=30",
    "axes": {
        "data": {"CIFAR-10": "data=cifar10", "SVHN": "data=svhn"},
        "variant": {
            "plain": "optim.batch_size=64",
            "a<b": "optim.batch_size=32",
            "+ FedX": "fedx=true",
        },
    },
    "columns": "data",
    "baseline": "plain",
}


def write_result(
    folder: Path,
    experiment: Experiment,
    cell: Labels,
    seed: int,
    linear: Mapping[int, float],
    **changes: Any,
) -> Path:
    """Writes the result of a finished run.

    Args:
        folder: the folder of the results.
        experiment: the definition.
        cell: one label of each axis.
        seed: the seed of the run.
        linear: linear top-1 by round; that of the highest round is put into the run's last round.
        changes: other values for the keys of the file.
    """
    config = configured(experiment, cell, changes.get("profile", "mini"), seed)
    rounds = config.federation.rounds
    last = max(linear)
    rows: list[dict[str, Any]] = [{"round": 1 + index, "loss": 1.0} for index in range(rounds)]
    for round_number, value in linear.items():
        row = rows[(rounds if round_number == last else round_number) - 1]
        row |= {"linear_top1": value, "knn_top1": value / 2}
    content = {
        "format": 1,
        "name": config.name,
        "hash": config.hash,
        "seed": seed,
        "profile": "mini",
        "commit": "abc1234",
        "machine": "2 CPU threads",
        "seconds": 600.0,
        "config": config.content(),
        "untrained": {"linear_top1": 30.0, "knn_top1": 20.0},
        "rounds": rows,
        "evaluations": {},
    } | changes
    path = folder / f"{config.name}-s{seed}-{config.hash}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def lines(folder: Path) -> list[str]:
    """The lines of the report."""
    return (folder / "report.md").read_text().splitlines()


def rows(folder: Path, *starts: str) -> list[str]:
    """The Markdown table rows that begin with these cells."""
    return [line for line in lines(folder) if line.startswith("| " + " | ".join(starts) + " |")]
