"""Measures a run after the fact, from its newest checkpoint: what ``fedx-pl evaluate RUN`` does.

    RUN/evaluation/linear.json, knn.json     as during training
    RUN/evaluation/semi.json                 fine-tuned on few labels
    RUN/evaluation/geometry.json, .png       angles between local and global model and between classes

Each file holds the round, the settings and the results. Nothing else in the run folder is written to.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedx_pl.callbacks import progress
from fedx_pl.cli.summary import evaluations
from fedx_pl.config.build import Plan, assemble, prepare
from fedx_pl.config.compose import compose, load
from fedx_pl.config.registry import find_method
from fedx_pl.config.schema import Config
from fedx_pl.data import split_file
from fedx_pl.data.images import ARRAYS, ImageData
from fedx_pl.errors import UserError
from fedx_pl.evaluation import finetune, geometry
from fedx_pl.evaluation.evaluate import KINDS
from fedx_pl.evaluation.features import drawn_rows, extract
from fedx_pl.evaluation.linear import PRESETS
from fedx_pl.evaluation.scores import Scores
from fedx_pl.experiments.results import evaluation_settings
from fedx_pl.federation.checkpoint import Checkpoints, RunState
from fedx_pl.federation.client import LocalTrainer
from fedx_pl.federation.round import ClientMemory, GlobalState, RoundContext
from fedx_pl.files import write_atomically
from fedx_pl.provenance import foreign_code
from fedx_pl.seeding import derive

CHANGEABLE = ("evaluation.*", "run.device", "run.threads", "data.root", "data.cache", "data.download", "fedca.base")
_UNLABELLED = 10_000  # Without test images, the angles are measured on so many training images.
_VIEWED = 2_000  # images that alignment looks at in two views

Report = Callable[[str], None]
Tick = Callable[[int, int], None]


def run(options: argparse.Namespace) -> None:
    """Measures a finished run again, or in other ways."""
    kinds = [word for word in options.overrides if "=" not in word] or ["linear"]
    allow_code = "allow_code=true" in options.overrides
    overrides = [word for word in options.overrides if "=" in word and not word.startswith("allow_code=")]
    console = progress.make_console()
    with progress.grouped_warnings(console), progress.steps(console, "evaluating") as tick:
        found = evaluate_run(
            options.run, kinds, overrides, lambda line: console.print(line, soft_wrap=True), tick, options.round,
            allow_code=allow_code,
        )  # fmt: skip
    console.print(evaluations(found))
    console.print(f"kept in {options.run / 'evaluation'}", soft_wrap=True)


def evaluate_run(
    folder: Path,
    kinds: Sequence[str],
    overrides: Sequence[str] = (),
    report: Report = print,
    tick: Tick | None = None,
    round_number: int | None = None,
    *,
    allow_code: bool = False,
    data: ImageData | None = None,
) -> dict[str, dict[str, Any]]:
    """Measures a checkpoint of a run and writes what it finds to ``RUN/evaluation/KIND.json``.

    Args:
        folder: of the run; it may still be training.
        kinds: any of `KINDS`.
        overrides: ``key=value`` for `CHANGEABLE` keys; the others are the run's own.
        report: takes one line for each thing worth knowing.
        tick: called with (steps done, steps in all) while something is trained, from the start for every kind.
        round_number: whose checkpoint; the newest one's unless given. Results of an older one go to
            ``KIND_round_00012.json``.
        allow_code: the run's method may be a class outside this package, whose module is then imported.
        data: the images of the run, if it was made from arrays; loaded as the run's configuration says if not given.

    Returns:
        The results by kind::

            linear    linear_top1, linear_top5, per_class: percent; confusion: images, by true and predicted class
            knn       likewise; rankme, uniformity: of the backbone's features
            semi      for each share of the labels, e.g. "0.01": labels (how many), top1 (percent), and as above
            geometry  local_global: for each class mean, median, q1, q3, low, high of the angles between f(x) and F(x)
                      local_global_mean
                      interclass: the angles between all pairs of class prototypes; interclass_mean
                      alignment, uniformity, rankme, feature_std: of z
                      images, clients: how many were looked at

        Angles are in degrees. What is not finite is left out, and so is what needs labels where there are none.

    Raises:
        UserError: no such run or kind, a key that cannot be changed, nothing trained yet, no labels, arrays that were
            not given, or geometry, which trains, with other code than the run's.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise UserError(f"there is no evaluation {kind!r}; type one of {', '.join(KINDS)}")
    config = _changed(_read(folder, allow_code), overrides)
    if config.data.name == ARRAYS and data is None:
        raise UserError(
            f"{folder} was trained on arrays that were brought from Python, and no command can load them; in Python, "
            f"type fedx_pl.cli.evaluate.evaluate_run(Path({str(folder)!r}), {[*kinds]}, data=DATA) "
            f"with the same ImageData"
        )
    _compare_code(folder, config, report, train="geometry" in kinds)
    run = _open(folder, config, report, round_number, train="geometry" in kinds, data=data)
    suffix = "" if round_number is None else f"_round_{round_number:05d}"
    if not run.plan.evaluator.possible and (labelled := [kind for kind in kinds if kind != "geometry"]):
        raise UserError(
            f"{folder} has no labels to measure {labelled[0]} with; type fedx-pl evaluate {folder} geometry"
        )
    found = {}
    for kind in dict.fromkeys(kinds):
        run.plan.load(run.global_state)
        found[kind] = _tidy(_measure(kind, run, report, tick))
        settings = evaluation_settings(kind, run.plan.config)
        document = {"round": run.state.round, "settings": settings, "results": found[kind]}
        write_atomically(folder / "evaluation" / f"{kind}{suffix}.json", json.dumps(document, indent=1).encode())
        if kind == "geometry":
            from fedx_pl.experiments.geometry_plots import geometry_figure  # Here: matplotlib slows every start down.

            geometry_figure({run.plan.config.name: found[kind]}).savefig(
                folder / "evaluation" / f"geometry{suffix}.png"
            )
    return found


@dataclass(frozen=True)
class _Run:
    """A run as its newest checkpoint has it."""

    plan: Plan
    checkpoints: Checkpoints
    state: RunState
    global_state: GlobalState  # on the plan's device


def _read(folder: Path, allow_code: bool) -> Config:
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder} is not a run folder: it has no config.yaml; type fedx-pl evaluate runs/NAME")
    return load(folder / "config.yaml", trusted="*" if allow_code else "")


def _changed(config: Config, overrides: Sequence[str]) -> Config:
    """The configuration with the overrides on top."""
    typed = compose([f"method={config.method.name}", *overrides])  # Checks names, types and values.
    keys = [override.partition("=")[0] for override in overrides]
    if "evaluation.linear.preset" in keys:  # Before the others, so that a key of one's own wins.
        config = _replaced(config, "evaluation.linear", PRESETS[typed.evaluation.linear.preset])
    for key in keys:
        value: Any = typed
        for part in key.split("."):
            value = getattr(value, part, None)
        if not any(fnmatch(key, pattern) for pattern in CHANGEABLE) or dataclasses.is_dataclass(value):
            raise UserError(f"{key} cannot be changed for a run that exists; only {', '.join(CHANGEABLE)} can")
        config = _replaced(config, key, value)
    return config


def _replaced(options: Any, key: str, value: Any) -> Any:
    """A copy of nested frozen dataclasses with the value of a dotted key changed."""
    first, _, rest = key.partition(".")
    return replace(options, **{first: _replaced(getattr(options, first), rest, value) if rest else value})


def _compare_code(folder: Path, config: Config, report: Report, *, train: bool) -> None:
    """Weights may be measured with code that was edited since, which is told; they are not trained with it."""
    before, code = foreign_code.read_record(folder), foreign_code.code_of(find_method(config.method.name))
    if before is None and code:
        report(f"note: {folder} does not say which code trained it; it is measured with the code of today")
    changed = foreign_code.differing(before.modules, code) if before else []
    if not changed:
        return
    files = foreign_code.describe(changed)
    if train:
        raise UserError(
            f"geometry trains clients once more, and {files} changed since {folder} was trained; put the old code "
            f"back, or type fedx-pl evaluate {folder} linear knn semi, which only use its weights"
        )
    report(f"note: {files} changed since {folder} was trained; its weights are measured with the code of today")


def _open(
    folder: Path, config: Config, report: Report, round_number: int | None, *, train: bool, data: ImageData | None
) -> _Run:
    """The run as a round left it; without ``train`` it is only looked at, and its loss is not needed."""
    checkpoints = Checkpoints(folder)
    found = checkpoints.latest(mend=False) if round_number is None else checkpoints.read(round_number)
    if found is None:
        raise UserError(f"{folder} has no finished round; type fedx-pl train run.dir={folder} and the run's own keys")
    state, global_state = found
    # FedCA's base is not in the run folder, and has no part in the weights.
    config = config if train else _replaced(config, "fedca.enabled", False)
    plan = prepare(config, report) if data is None else assemble(config, data, [])
    try:
        clients = split_file.load(
            folder / "split.json", fingerprint=plan.data.fingerprint, num_images=len(plan.data.train.images)
        )
    except UserError as error:  # It speaks of `partition.file`, which the user did not give here.
        instead = "type data.root=FOLDER with those images" if data is None else "give those as data"
        raise UserError(f"{folder} was trained on other images; {instead}") from error
    report(f"{config.name}: round {state.round} of {config.federation.rounds}, on {plan.device}")
    plan.model.to(plan.device)
    global_state = global_state.to(plan.device)
    try:
        plan.load(global_state)
    except ValueError as error:
        raise UserError(f"{folder}: its weights are not those of its configuration ({error})") from error
    return _Run(replace(plan, clients=clients), checkpoints, state, global_state)


# --- the measurements -------------------------------------------------------------------------------------------------


def _measure(kind: str, run: _Run, report: Report, tick: Tick | None) -> dict[str, Any]:
    plan = run.plan
    if kind == "semi":
        return _semi(plan, tick)
    if kind == "geometry":
        return _geometry(run, report, tick)
    scores, collapse = plan.evaluator.scores(plan.model, plan.device, knn=kind == "knn", linear=kind == "linear")
    score = scores[kind]
    accuracies = {f"{kind}_top1": score.top1, f"{kind}_top5": score.top5} | collapse
    return {**{key: _rounded(value) for key, value in accuracies.items()}, **_details(score, plan.data.classes)}


def _details(score: Scores, classes: Sequence[str]) -> dict[str, Any]:
    """Accuracy by class, and who is taken for whom."""
    return {
        "per_class": {name: _rounded(value) for name, value in zip(classes, score.per_class, strict=False)},
        "confusion": [list(row) for row in score.confusion],
    }


def _rounded(value: float) -> float:
    """Nobody wants to read 28.740000000000002; nan stays."""
    return float(f"{value:.4f}")


def _semi(plan: Plan, tick: Tick | None) -> dict[str, Any]:
    """Accuracy after fine-tuning on each share of the labels."""
    data, options = plan.data, plan.config.evaluation.semi
    labels = plan.evaluator.labeled.labels
    assert labels is not None
    assert data.test is not None
    seed = derive(plan.config.seed, "semi")
    store = plan.store_of(plan.evaluator.labeled)
    subsets = [finetune.labelled_subset(labels, fraction, seed) for fraction in options.fractions]
    advance = _counter(tick, sum(options.steps(len(rows)) for rows in subsets))
    found = {}
    for fraction, rows in zip(options.fractions, subsets, strict=True):
        network = finetune.fine_tune(
            plan.model.backbone, store, rows, labels[rows], plan.augment,
            classes=len(data.classes), options=options, seed=seed, tick=advance,
        )  # fmt: skip
        score = finetune.scores(network, data.test, plan.augment.plain)
        found[f"{fraction:g}"] = {"labels": len(rows), "top1": score.top1, **_details(score, data.classes)}
    return found


def _geometry(run: _Run, report: Report, tick: Tick | None) -> dict[str, Any]:
    """The paper's embedding analysis: some clients train one more round, each from the global model F to an f."""
    plan, test = run.plan, run.plan.data.test
    images = test.images if test is not None else _some(plan, plan.data.train.images, _UNLABELLED)
    z = _embed(plan, images)
    found: dict[str, Any] = {"images": len(images), "alignment": _alignment(plan, images), **geometry.health(z)}
    angles = _local_angles(run, images, z, report, tick)
    found |= {"clients": len(angles), "local_global_mean": angles.mean().item()}
    if test is not None and test.labels is not None:
        labels, names = torch.from_numpy(test.labels).to(z.device), plan.data.classes
        there = [label for label in range(len(names)) if len(angles) and (labels == label).any()]
        found["local_global"] = {names[label]: geometry.box(angles[:, labels == label]) for label in there}
        between = geometry.interclass_angles(z, labels, len(names))
        found |= {"interclass": between.tolist(), "interclass_mean": between.mean().item()}
    return found


def _local_angles(run: _Run, images: np.ndarray, z: Tensor, report: Report, tick: Tick | None) -> Tensor:
    """Angles between f(x) and F(x), (clients, N), for all clients or as many as asked for, chosen by the run's seed."""
    plan, config, round_number = run.plan, run.plan.config, run.state.round + 1
    count = min(len(plan.clients), config.evaluation.geometry_clients)
    draw = np.random.default_rng(derive(config.seed, "geometry"))
    clients = sorted(draw.choice(len(plan.clients), size=count, replace=False).tolist())
    advance = _counter(tick, sum(plan.steps_of(client) for client in clients))
    trainer = LocalTrainer(
        plan.model, device=plan.device, precision=plan.precision, tick=advance, regularizer=plan.regularizer
    )
    # One round more than the run has: at its very end a cosine schedule would leave a learning rate of zero.
    rounds = max(round_number, config.federation.rounds)
    context = RoundContext(
        round=round_number,
        rounds=rounds,
        epochs=config.federation.epochs,
        seed=config.seed,
        global_state=run.global_state,
        batchnorm=config.federation.batchnorm,
    )
    found = []
    for client in clients:
        memory = _memory(run, client)
        trainer.run(context, client=client, data=plan.client_data(client, round_number), memory=memory)
        angles = geometry.angles(_embed(plan, images), z)
        if torch.isfinite(angles).all():
            found.append(angles)
        else:
            report(f"left client {client} out: its embeddings hold NaN or infinity")
    return torch.stack(found) if found else z.new_empty(0, len(images))


def _memory(run: _Run, client: int) -> ClientMemory | None:
    """What a client had after the round that is measured; None if it had not trained yet."""
    try:
        return run.checkpoints.load_client(client, run.state.clients.get(client))
    except UserError as error:  # It speaks of going on, which nobody wants to here.
        kept = run.checkpoints.rounds()
        others = ", ".join(str(number) for number in kept if number != run.state.round)
        instead = f"type --round with one of {others}" if others else "no other round was kept"
        instead += ", or leave it out" if run.state.round < max(kept, default=0) else ""
        raise UserError(
            f"the clients' own state of round {run.state.round} is not there (that of client {client} is missing or "
            f"damaged), and geometry needs it; {instead}"
        ) from error


def _embed(plan: Plan, images: np.ndarray, prepare: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """``z = projector(backbone(x))``, (N, embed_dim), of the model as it is now, in eval mode."""
    network = nn.Sequential(plan.model.backbone, plan.model.projector)
    return extract(network, images, prepare or plan.augment.plain)


def _alignment(plan: Plan, images: np.ndarray) -> float:
    generator = torch.Generator(plan.device).manual_seed(derive(plan.config.seed, "views"))
    some = _some(plan, images, _VIEWED)
    first, second = (_embed(plan, some, lambda batch: plan.augment(batch, generator)) for _ in range(2))
    return geometry.alignment(first, second)


def _some(plan: Plan, images: np.ndarray, most: int) -> np.ndarray:
    return images[drawn_rows(len(images), most, derive(plan.config.seed, "geometry images"))]


def _counter(tick: Tick | None, total: int) -> Callable[[], None]:
    """Counts its calls for ``tick(done, total)``."""
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if tick is not None:
            tick(done, total)

    return advance


def _tidy(value: Any) -> Any:
    """Four digits, and no nan, which JSON has not: what could not be measured is not there."""
    if isinstance(value, dict):
        return {key: _tidy(inner) for key, inner in value.items() if _there(inner)}
    if isinstance(value, list):
        return [_tidy(inner) for inner in value if _there(inner)]
    return round(value, 4) if isinstance(value, float) else value


def _there(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
