"""In which settings the runs of a report differ from the paper."""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedx_pl.config.compose import compose
from fedx_pl.config.schema import Config, all_keys
from fedx_pl.experiments.pages import (
    Anchor,
    Block,
    Bullets,
    Code,
    Heading,
    Inline,
    Paragraph,
    Table,
)
from fedx_pl.experiments.results import Runs, configured, number, settings
from fedx_pl.experiments.tables import Paper
from fedx_pl.mixins import MIXINS

Settings = Mapping[str, Any]
_NAMES = ("name", "profile", "seed", "fedca.base")  # these say which run it is, not how it is done


def difference_blocks(
    used: Sequence[Runs], paper: Paper, definitions: Path, out: Path
) -> list[Block]:
    """The section: a table of all keys that differ, and what no key says.

    Args:
        used: the experiments that have results.
        paper: its numbers, which tell what it has run.
        definitions: the folder of the experiments, beside ``docs``.
        out: the folder of the report.
    """
    compared = _configurations(used, paper)
    profile = used[0].profile
    blocks: list[Block] = [Heading("What differs from the paper", anchor="differences")]
    rows = _rows(compared)
    if rows:
        blocks.append(Paragraph([
            "All settings of each run of the paper's experiments are compared with those of the same run at profile ",
            Code("paper"), ", key by key; of a run that the paper has not, with what it does with that data set and "
            "method. These are not the same.",
        ]))  # fmt: skip
        head = ["key", "profile paper", f"here ({profile})", "where", "meaning"]
        blocks.append(Table(head, rows, labels=1))
    else:
        blocks.append(
            Paragraph(["All settings of the runs are those of profile ", Code("paper"), "."])
        )
    return [
        *blocks,
        Paragraph(["And what no key says:"]),
        Bullets([*_remarks([one.here for one in compared], definitions, out), *_fedu_remark(used)]),
    ]


@dataclass(frozen=True)
class _Compared:
    """A configuration, the same at the paper's scale, and the experiment that it comes from."""

    here: Settings
    paper: Settings
    experiment: str


def _configurations(used: Sequence[Runs], paper: Paper) -> list[_Compared]:
    """Of all cells that have a result, each once."""
    found: dict[str, _Compared] = {}
    for runs in used:
        experiment = runs.experiment
        in_paper = set(experiment.cells("paper")) if experiment.paper else set()
        for cell, results in runs.found.items():
            seed = min(results)
            here = configured(experiment, cell, runs.profile, seed=seed)
            if here.hash in found:
                continue
            if cell not in in_paper:
                there = _usual(here)
            elif (
                cell[-1] == experiment.baseline
                and paper.has(runs)
                and paper.numbers(runs, cell) is None
            ):
                there = configured(
                    experiment, cell[:-1], "paper", seed=seed
                )  # A baseline of our own.
            else:
                there = configured(experiment, cell, "paper", seed=seed)
            found[here.hash] = _Compared(settings(here), settings(there), experiment.name)
    return list(found.values())


def _usual(config: Config) -> Config:
    """What the paper does with a data set and a method."""
    mixins = [f"{name}={str(getattr(config, name).enabled).lower()}" for name in MIXINS]
    chosen = [f"data={config.data.name}", f"method={config.method.name}", f"seed={config.seed}"]
    return compose(["profile=paper", *chosen, *mixins])


def _rows(compared: Sequence[_Compared]) -> list[list[Inline]]:
    places: dict[tuple[str, str, str], list[_Compared]] = defaultdict(list)
    for one in compared:
        for key in dict.fromkeys([*one.paper, *one.here]):
            paper, here = one.paper.get(key), one.here.get(key)
            if here != paper and key not in _NAMES:
                places[key, _text(paper), _text(here)].append(one)
    helps = {key: text for key, _, text in all_keys()}
    return [
        [Code(key), Code(paper), Code(here), _where(place, compared), helps.get(key, "")]
        for (key, paper, here), place in sorted(places.items())
    ]


def _where(place: Sequence[_Compared], everything: Sequence[_Compared]) -> str:
    """In the fewest words: all runs, all of some data sets or methods, or by experiment."""
    rest = [one for one in everything if one not in place]
    if not rest:
        return "all runs"
    for key in ("data.name", "method.name"):
        names = list(dict.fromkeys(one.here[key] for one in place))
        if not any(one.here[key] in names for one in rest):
            return f"{key.partition('.')[0]}: {', '.join(names)}"
    few, start = (rest, "all but some of ") if len(rest) < len(place) else (place, "some of ")
    return start + ", ".join(dict.fromkeys(one.experiment for one in few))


def _remarks(everything: Sequence[Settings], definitions: Path, out: Path) -> list[list[Inline]]:
    """What is ours, or worth knowing beside the paper's numbers; only what concerns these runs."""
    remarks: list[list[Inline]] = []
    if any(one["fedx.enabled"] and one["method.name"] != "simclr" for one in everything):
        remarks.append(
            [
                "FedX on any method but SimCLR is our own design, from the paper's text: no code of it was released."
            ]
        )
    batch = "optim.batch_size"
    if any(one["fedx.enabled"] for one in everything) and len({s[batch] for s in everything}) > 1:
        remarks.append([
            "FedX cuts its batch into two halves and so takes twice the steps of a plain method with the same batch. A "
            "plain method with half the batch takes as many: that is the fair baseline. The paper's plain numbers "
            "stand beside the whole batch.",
        ])  # fmt: skip
    every = _several(everything, "evaluation.linear_every")
    text = (
        f"The best round is the best of those that were measured: one in {every} and the last one"
    )
    remarks.append([
        text, ". The paper's code measures every round. Either way the test images choose it, so that it is an "
        "optimistic number: compare methods by the last round.",
    ])  # fmt: skip
    tested = _several(everything, "data.test_limit")
    remarks.append(
        [
            f"Tested on {'the full test set' if tested == '0' else f'{tested} test images (0: all of them)'}."
        ]
    )
    if any(one["data.name"] == "cifar10" and one["augment.brightness"] == 0 for one in everything):
        remarks.append([
            "Of the colour jitter on CIFAR-10 the paper does not say how strong it is; profile paper has a usual "
            "strength, and the released code none, as runs with ", Code("augment.brightness=0"), " here.",
        ])  # fmt: skip
    if any(one["data.limit"] for one in everything):
        remarks.append(
            [
                "The linear probe and the kNN learn from the labels of the images that the clients have, no more."
            ]
        )
    guide = definitions.resolve().parent / "docs" / "faithfulness.md"
    inside = guide.exists() and out.resolve().is_relative_to(definitions.resolve().parent)
    place: Inline = Code("docs/faithfulness.md")
    if inside:
        place = Anchor(
            "docs/faithfulness.md", Path(os.path.relpath(guide, out.resolve())).as_posix()
        )
    remarks.append(
        [
            "What is the paper's, what its released code's and what ours, point by point: ",
            place,
            ".",
        ]
    )
    return remarks


def _fedu_remark(used: Sequence[Runs]) -> list[list[Inline]]:
    """In how many rounds FedU was more than BYOL."""
    runs = {result.hash: result for one in used for cell in one.found for result in one.of(cell)}
    pairs = [
        (number(row.get("divergence")), number(result.config.get("method.mu")))
        for result in runs.values()
        if result.config["method.name"] == "fedu"
        for row in result.rows
    ]
    told = [
        (divergence, mu) for divergence, mu in pairs if divergence is not None and mu is not None
    ]
    if not told:
        return []
    reached = sum(divergence >= mu for divergence, mu in told)
    return [[
        "With FedU a client keeps its own predictor once its divergence reaches ", Code("method.mu"), ". The mean over "
        f"the clients did so in {reached} of {len(told)} rounds; where no client does, FedU is BYOL.",
    ]]  # fmt: skip


def _several(everything: Sequence[Settings], key: str) -> str:
    return " or ".join(map(str, sorted({one[key] for one in everything})))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "-" if value is None else str(value)
