"""``fedx-pl evaluate``: measures a checkpoint of a run.

    RUN/evaluation/linear.json, knn.json    as during training
    RUN/evaluation/semi.json                fine-tuned with few labels
    RUN/evaluation/geometry.json, .png      angles between local and global models, and classes

Each file holds the round, the settings and the results. Nothing else in the run folder is changed.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from fedx_pl.callbacks import progress
from fedx_pl.cli.summary import evaluations
from fedx_pl.config.build import brought, build
from fedx_pl.config.compose import compose, load
from fedx_pl.config.registry import EVALUATION, make
from fedx_pl.config.schema import Config
from fedx_pl.data import split_file
from fedx_pl.data.images import ARRAYS, NO_CACHE, RESIZED, ImageData, cache_folder
from fedx_pl.data.partition import Partition
from fedx_pl.errors import Report, UserError, say
from fedx_pl.evaluation.base import Tick
from fedx_pl.evaluation.options import PRESETS
from fedx_pl.federation.identity import PYTHON
from fedx_pl.federation.run_folder import read_run
from fedx_pl.files import sealed, write_atomically
from fedx_pl.provenance import foreign_code
from fedx_pl.trainer import FederatedTrainer

CHANGEABLE = (
    "evaluation.*",
    "run.device",
    "run.threads",
    "data.root",
    "data.cache",
    "data.download",
    "fedca.base",
)


def run(options: SimpleNamespace) -> None:
    """Measures a run and prints the results."""
    kinds = [word for word in options.overrides if "=" not in word] or ["linear"]
    allow_code = "allow_code=true" in options.overrides
    overrides = [
        word for word in options.overrides if "=" in word and not word.startswith("allow_code=")
    ]
    console = progress.make_console()
    with progress.grouped_warnings(console), progress.steps(console, "evaluating") as tick:
        results = evaluate_run(
            options.run,
            kinds,
            overrides,
            report=lambda line: console.print(line, soft_wrap=True),
            tick=tick,
            round_number=options.round_number,
            allow_code=allow_code,
        )
    console.print(evaluations(results))
    console.print(f"written to {options.run / 'evaluation'}", soft_wrap=True)


def evaluate_run(
    folder: Path,
    kinds: Sequence[str],
    overrides: Sequence[str] = (),
    report: Report = say,
    tick: Tick | None = None,
    round_number: int | None = None,
    *,
    allow_code: bool = False,
    data: ImageData | None = None,
) -> dict[str, dict[str, Any]]:
    """Measures a checkpoint of a run and writes the results to ``RUN/evaluation/KIND.json``.

    Args:
        folder: the run folder; the run may still be training.
        kinds: names of `EVALUATIONS`, or ``package.module:Class``.
        overrides: ``key=value`` for `CHANGEABLE` keys; all others are as in the run.
        report: called with each line for the user.
        tick: called with (steps done, steps in all) while something is trained; each kind starts
            from 0.
        round_number: the round to measure, the last unless given. The results of an older one are
            written to ``KIND_round_00012.json``.
        allow_code: whether the module of a class outside this package may be imported.
        data: the images of a run that was made from arrays; others are loaded as its configuration
            says.

    Returns:
        The results by kind::

            linear    linear_top1, linear_top5, per_class: percent
                      confusion: numbers of images, by true and predicted class
            knn       likewise; rankme, uniformity: of the backbone's features
            semi      for each share of the labels, such as "0.01": labels (how many),
                      top1 (percent), per_class and confusion
            geometry  local_global: for each class mean, median, q1, q3, low and high of the
                      angles between f(x) and F(x)
                      local_global_mean
                      interclass: the angles between all pairs of class prototypes
                      interclass_mean
                      alignment, uniformity, rankme, feature_std: of z
                      images, clients: how many were measured

        Angles are in degrees. Numbers that are not finite are left out, and so is what needs labels
        if there are none.

    Raises:
        UserError: there is no such run or kind, a key cannot be changed, nothing is trained yet,
            labels or arrays are missing, or geometry, which trains, would use other code.
    """
    config = _changed(_read(folder, allow_code), overrides)
    evaluations = {kind: make(EVALUATION, kind, None, config.evaluation) for kind in kinds}
    train = any(evaluation.trains_clients for evaluation in evaluations.values())
    if config.data.name == ARRAYS and data is None:
        raise UserError(
            f"{folder} was trained on arrays that were brought from Python, and no command can "
            "load them; in Python, type fedx_pl.cli.evaluate.evaluate_run("
            f"Path({str(folder)!r}), {[*kinds]}, data=DATA) with the same ImageData"
        )
    _compare_code(folder, config, report, train=train)
    trainer = _open(folder, config, report, round_number=round_number, train=train, data=data)
    suffix = "" if round_number is None else f"_round_{round_number:05d}"
    labeled = [kind for kind, evaluation in evaluations.items() if evaluation.needs_labels]
    if labeled and not trainer.evaluator.possible:
        raise UserError(
            f"{folder} has no labels to measure {labeled[0]} with; "
            f"type fedx-pl evaluate {folder} geometry"
        )
    results = {}
    for kind, evaluation in evaluations.items():
        trainer.model.load_shared(trainer.global_state.weights)
        results[kind] = _tidy(evaluation.measure(trainer, report, tick))
        document = {
            "round": trainer.current_round,
            "settings": evaluation.settings(trainer.local_epochs),
            "results": results[kind],
        }
        file = folder / "evaluation" / f"{kind.replace(':', '.')}{suffix}.json"
        write_atomically(file, json.dumps(sealed(document), indent=1).encode())
        if (figure := evaluation.figure(config.name, results[kind])) is not None:
            from fedx_pl.callbacks import plots  # Here, since matplotlib loads slowly.

            write_atomically(file.with_suffix(".png"), plots.png(figure))
    return results


def _read(folder: Path, allow_code: bool) -> Config:
    if not (folder / "config.yaml").is_file():
        raise UserError(
            f"{folder} is not a run folder: it has no config.yaml; type fedx-pl evaluate runs/NAME"
        )
    config = load(folder / "config.yaml", trusted=["*"] if allow_code else [])
    # Whoever sent the run does not choose where files are written; caches that exist are read.
    config = _replaced(_replaced(config, "data.cache", ""), "data.download", False)
    known = config.data.name in RESIZED or (cache_folder(config.data) / config.data.name).is_dir()
    changed: Config = config if known else _replaced(config, "data.cache", NO_CACHE)
    return changed


def _changed(config: Config, overrides: Sequence[str]) -> Config:
    """The configuration with the overrides applied."""
    typed = compose([f"method={config.method.name}", *overrides])  # Checks names, types and values.
    keys = [override.partition("=")[0] for override in overrides]
    if "evaluation.linear.preset" in keys:  # Before the others, so that other keys win.
        config = _replaced(config, "evaluation.linear", PRESETS[typed.evaluation.linear.preset])
    for key in keys:
        value: Any = typed
        for part in key.split("."):
            value = getattr(value, part, None)
        if not any(fnmatch(key, pattern) for pattern in CHANGEABLE) or dataclasses.is_dataclass(
            value
        ):
            raise UserError(
                f"{key} cannot be changed for a run that exists; only {', '.join(CHANGEABLE)} can"
            )
        config = _replaced(config, key, value)
    return config


def _replaced(options: Any, key: str, value: Any) -> Any:
    """A copy of nested frozen dataclasses with the value of a dotted key changed."""
    first, _, rest = key.partition(".")
    return replace(
        options, **{first: _replaced(getattr(options, first), rest, value) if rest else value}
    )


def _compare_code(folder: Path, config: Config, report: Report, *, train: bool) -> None:
    """Compares the code with the run's; if it was edited, weights are measured, but not trained."""
    before = foreign_code.read_record(folder)
    code = foreign_code.code_of(*brought(config))
    if before is None and code:
        report(f"note: {folder} does not say which code trained it; today's code measures it")
    changed = foreign_code.differing(before.modules, code) if before else []
    if before and before.objects and train and config.profile == PYTHON:
        raise UserError(
            f"geometry trains clients once more, and {folder} was made in Python with "
            f"{', '.join(before.objects)}, which no key can name; give that trainer "
            f"evaluations=[Geometry(EvaluationOptions())]"
        )
    if not changed:
        return
    files = foreign_code.describe(changed)
    if train:
        raise UserError(
            f"geometry trains clients once more, and {files} changed since {folder} was trained; "
            f"put the old code back, or type fedx-pl evaluate {folder} linear knn semi, which only "
            "use its weights"
        )
    report(f"note: {files} changed since {folder} was trained; today's code measures its weights")


def _open(
    folder: Path,
    config: Config,
    report: Report,
    round_number: int | None,
    *,
    train: bool,
    data: ImageData | None,
) -> FederatedTrainer:
    """The run as a round left it; without ``train`` its loss is not needed."""
    # Before images are downloaded for a configuration that is not the run's.
    read_run(folder, round_number)
    # FedCA's base is not in the run folder, and is needed for training only.
    config = config if train else _replaced(config, "fedca.enabled", False)
    trainer = build(
        config, report, images=data, partition=_Split(folder=folder, loaded=data is None)
    ).trainer
    trainer.load_checkpoint(folder, round_number)
    report(
        f"{config.name}: round {trainer.current_round} of {trainer.max_rounds}, on {trainer.device}"
    )
    return trainer


@dataclass(frozen=True, kw_only=True)
class _Split(Partition):
    """The partition of a run, from its folder."""

    folder: Path
    loaded: bool  # whether the images were loaded as the configuration says

    def deal(self, data: ImageData, _: int) -> list[np.ndarray]:
        try:
            return split_file.load(
                self.folder / "split.json",
                fingerprint=data.fingerprint,
                num_images=len(data.train.images),
            )
        except UserError as error:  # It names `partition.file`, which was not given here.
            typed = "type data.root=FOLDER with those images"
            instead = typed if self.loaded else "give those as data"
            raise UserError(f"{self.folder} was trained on other images; {instead}") from error


def _tidy(value: Any) -> Any:
    """Rounds to four digits, and drops numbers that are not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _tidy(inner) for key, inner in value.items() if _is_finite(inner)}
    if isinstance(value, list):
        return [_tidy(inner) for inner in value if _is_finite(inner)]
    return round(value, 4) if isinstance(value, float) else value


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
