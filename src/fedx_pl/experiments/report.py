"""The report of a folder of results: every table and figure that has runs, as Markdown and as one HTML page."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fedx_pl.errors import UserError, say
from fedx_pl.experiments import comparison, pages, tables
from fedx_pl.experiments.definition import load_experiments
from fedx_pl.experiments.differences import difference_blocks
from fedx_pl.experiments.figures import curves_figure
from fedx_pl.experiments.pages import (
    Anchor,
    Block,
    Bullets,
    Code,
    Heading,
    Inline,
    Paragraph,
    Picture,
    Strong,
    Table,
)
from fedx_pl.experiments.results import KNN, Result, Runs, match, read_results
from fedx_pl.experiments.tables import GEOMETRY, Paper
from fedx_pl.files import write_atomically

MAIN = "table1"  # the experiment whose gains open the report


def write_report(
    results: Path,
    definitions: Path = Path("experiments"),
    out: Path | None = None,
    report: Callable[[str], object] = say,
) -> list[Path]:
    """Writes ``report.md``, ``report.html`` and ``figures/NAME.png``.

    Args:
        results: folder with one JSON file per finished run, all of one profile.
        definitions: folder of the experiments, with the paper's numbers in ``paper/tables.yaml``.
        out: where to write; the folder of the results by default.
        report: takes a line for each file that was left out.

    Returns:
        the files that were written.

    Raises:
        UserError: there are no results, or a definition cannot be read.
    """
    out = results if out is None else out
    if (out / pages.FIGURES).is_symlink():
        raise UserError(
            f"{out / pages.FIGURES} is a link, and figures would be written elsewhere; remove it first"
        )
    found, problems = read_results(results)
    for problem in problems:
        report(problem)
    paper = Paper(definitions / "paper" / "tables.yaml")
    outdated: dict[str, list[str]] = {}
    order = list(paper.tables)
    experiments = sorted(
        load_experiments(definitions),
        key=lambda one: (order.index(one.name) if one.name in order else len(order), one.name),
    )
    used, begun = _shown(
        [runs for one in experiments if (runs := match(one, found, outdated)).cells]
    )

    blocks: list[Block] = [*_summary(found, used, paper)]
    for runs in used:
        blocks += _section(runs, paper)
    if begun:
        text = "Of these nothing was run, or only what stands in the tables above: "
        blocks += [
            Heading("Not begun"),
            Paragraph([f"{text}{'; '.join(_named_experiment(one) for one in begun)}."]),
        ]
    if used:
        blocks += difference_blocks(used, paper, definitions, out=out)
    blocks += _what_ran(found, used, problems, outdated=outdated)

    written = {
        out / pages.FIGURES / f"{one.name}.png": one.png
        for one in blocks
        if isinstance(one, Picture)
    }
    written[out / "report.md"] = pages.to_markdown(blocks).encode()
    written[out / "report.html"] = pages.to_html(blocks, title=_title(found)).encode()
    for path, content in written.items():
        write_atomically(path, content)
    return list(written)


def _shown(used: Sequence[Runs]) -> tuple[list[Runs], list[Runs]]:
    """The experiments that have a section, and those without a run, or whose table would only repeat earlier rows."""
    shown: list[Runs] = []
    begun: list[Runs] = []
    seen: set[str] = set()
    for runs in used:
        own = {result.hash for cell in runs.found for result in runs.of(cell)}
        repeats = runs.missing and own <= seen and runs.experiment.show == ["table"]
        (begun if repeats or not own else shown).append(runs)
        seen |= own
    return shown, begun


def _title(found: Sequence[Result]) -> str:
    return f"FedX results, profile {found[0].profile}"


def _summary(found: Sequence[Result], used: Sequence[Runs], paper: Paper) -> Iterator[Block]:
    yield Heading(_title(found), level=1)
    runs = _unique(used)
    profile = found[0].profile
    if not runs:
        yield Paragraph(
            [
                f"None of the {len(found)} results belongs to an experiment; the end of this page says why."
            ]
        )
        return
    seeds = sorted({result.seed for result in runs})
    shown = f"{len(runs)} {_plural('run', runs)} of {len(used)} {_plural('experiment', used)} at profile "
    rounds, epochs = _values(runs, "federation.rounds"), _values(runs, "federation.epochs")
    scale = f"{rounds} rounds of {epochs} local epoch{'' if epochs == '1' else 's'}"
    machine = "; ".join(sorted({result.machine for result in runs}))
    text = (
        f": {_plural('seed', seeds)} {', '.join(map(str, seeds))}; {scale}; {_hours(runs)} of wall time, summed "
        f"over the runs, on {machine}. Accuracies are top-1 of the linear probe in percent unless said otherwise."
    )
    yield Paragraph([shown, Code(profile), text])
    if profile != "paper":
        yield Paragraph([
            Strong("This is not the paper's scale."), " Its numbers stand beside ours to compare differences, not "
            "levels; ", Anchor("what differs", "#differences"), " is listed below.",
        ])  # fmt: skip
    if any(result.few_labels for result in runs):
        yield Paragraph([
            Strong("These accuracies are with few labels."), " The linear probe and kNN saw only the labels of the "
            "images that were trained on (", Code("evaluation.labels=limit"), "). The released code, and this package "
            "today, use those of all training images, which gives higher numbers.",
        ])  # fmt: skip
    yield Bullets([[Anchor(one.experiment.title, f"#{one.experiment.name}")] for one in used])
    main = next(
        (one for one in used if one.experiment.name == MAIN and one.experiment.baseline), None
    )
    if main is not None:
        label = main.variants[-1]
        rows, reference = _accuracy_gains(main, paper)
        if rows := [row for row in rows if row.label == label]:
            title = f"{label} against {main.experiment.baseline}, last round"
            yield from tables.gain_blocks(title, main, rows, reference=reference)
    yield Heading("How to read the numbers", level=3)
    yield Paragraph([comparison.rule()])


def _named_experiment(runs: Runs) -> str:
    """With its place in the paper."""
    return runs.experiment.title + (
        f" (the paper's {runs.experiment.paper})" if runs.experiment.paper else ""
    )


def _section(runs: Runs, paper: Paper) -> Iterator[Block]:
    """One experiment: all that it shows, and what is missing."""
    experiment = runs.experiment
    origin = f" – the paper's {experiment.paper}" if experiment.paper else ""
    yield Heading(f"{experiment.title}{origin}", anchor=experiment.name)
    if experiment.note:
        yield Paragraph([experiment.note])
    parts = {
        "table": _table,
        "curves": _curves,
        "errors": _errors,
        "semi": _semi,
        "geometry": _geometry,
    }
    for word in experiment.show:
        yield from parts[word](runs, paper)
    yield _coverage(runs)


def _table(runs: Runs, paper: Paper) -> Iterator[Block]:
    yield tables.accuracy_table(runs, paper)
    yield from _scale_note(runs, paper)
    if runs.experiment.baseline and _seeds_differ(runs):
        yield Paragraph([
            "Not all rows have the same seeds, which alone makes them differ: the differences below are taken seed by "
            "seed.",
        ])  # fmt: skip
    if runs.experiment.baseline:
        yield from tables.gain_blocks(
            f"{_differences(runs)}, last round", runs, *_accuracy_gains(runs, paper)
        )
    yield tables.knn_table(runs)
    if runs.experiment.baseline:
        rows, reference = tables.gains(
            runs, {"kNN": lambda result: result.last(KNN)}, lambda *_: None
        )
        yield from tables.gain_blocks(
            f"{_differences(runs)} by kNN, last round", runs, rows, reference=reference, fold=True
        )


def _accuracy_gains(runs: Runs, paper: Paper) -> tuple[list[tables.Gain], str]:
    return tables.gains(
        runs, {"last": Result.last}, lambda cell, _: (paper.numbers(runs, cell) or [None])[0]
    )


def _differences(runs: Runs) -> str:
    return f"Differences to {runs.experiment.baseline}"


def _curves(runs: Runs, paper: Paper) -> Iterator[Block]:
    figure = curves_figure(runs)
    if figure is None:
        yield Paragraph(["No round of these runs was measured."])
        return
    title = runs.experiment.title
    yield Picture.of(figure, _figure_name(runs, "curves"), f"{title}: linear top-1 by round")
    text = "Linear top-1 by round: the mean over the seeds, in a band from the lowest to the highest seed where there is "
    yield Paragraph([
        text, "more than one; a dotted line is a single seed. Dashed: the untrained network, mean over the runs of the "
        "panel.",
        " Not all lines of a panel are of the same seeds, which alone makes them differ: compare by the table of "
        "differences." if _seeds_differ(runs) else "",
    ])  # fmt: skip


def _seeds_differ(runs: Runs) -> bool:
    """Whether rows that are compared with each other are of different seeds."""
    groups = [
        [set(runs.found[cell]) for cell in runs.found if cell[:-1] == group]
        for group in runs.groups
    ]
    return any(seeds != group[0] for group in groups for seeds in group)


def _errors(runs: Runs, paper: Paper) -> Iterator[Block]:
    yield tables.errors_table(runs, paper)
    spans = tables.last_five(runs)
    rounds = f" ({' or '.join(f'{first} to {last}' for first, last in spans)})" if spans else ""
    apart = any(last - first >= tables.FIVE for first, last in spans)
    yield Paragraph([
        f"Ours: the mean of the last five measured rounds{rounds}, and of the best five, ± their standard error "
        "(sample standard deviation / √5), both averaged over the seeds. What a run still learns over the last five "
        "is part of their error; how much runs differ is not. A run with fewer than five measured rounds has none.",
        " The paper's five follow one upon the other: its code measures every round." if apart else "",
    ])  # fmt: skip
    yield from _scale_note(runs, paper)


def _semi(runs: Runs, paper: Paper) -> Iterator[Block]:
    shares = tables.semi_shares(runs)
    if not shares:
        yield _not_evaluated("semi")
        return
    yield tables.semi_table(runs, paper)
    yield Paragraph(["Top-1 after fine-tuning the whole network with a share of the labels."])
    yield from _scale_note(runs, paper)
    if runs.experiment.baseline:
        measures = tables.semi_measures(runs)
        rows, reference = tables.gains(
            runs, measures, lambda cell, share: tables.semi_paper(paper, runs, cell, share=share)
        )
        yield from tables.gain_blocks(
            _differences(runs), runs, rows, reference=reference, names=shares
        )


def _geometry(runs: Runs, paper: Paper) -> Iterator[Block]:
    from fedx_pl.evaluation.geometry_plots import geometry_figure

    found = {
        (cell, seed): dict(result.evaluations["geometry"])
        for cell, results in runs.found.items()
        for seed, result in results.items()
        if result.evaluations.get("geometry")
    }
    if not found:
        yield _not_evaluated("geometry")
        return
    yield tables.geometry_table(runs, paper)
    yield Paragraph([
        "Angles in degrees, means over the test images: between the embeddings of a local and the global model (less: "
        "the two agree more), and between the prototypes of two classes (more: the classes lie further apart).",
    ])  # fmt: skip
    yield from _scale_note(runs, paper)
    seed = min(seed for _, seed in found)
    figure = geometry_figure(
        {", ".join(cell): values for (cell, its), values in found.items() if its == seed}
    )
    title = runs.experiment.title
    yield Picture.of(
        figure,
        _figure_name(runs, "geometry"),
        f"{title}: box plot of the angles by class, histogram between classes",
    )
    yield Paragraph([f"The figure shows seed {seed}."])
    if runs.experiment.baseline:
        measures = {
            key: measure
            for key, measure in tables.geometry_measures().items()
            if key.endswith("_mean")
        }
        rows, reference = tables.gains(
            runs, measures, lambda cell, key: (paper.numbers(runs, cell) or {}).get(key)
        )
        yield from tables.gain_blocks(
            _differences(runs), runs, rows, reference=reference, names=GEOMETRY
        )


def _not_evaluated(kind: str) -> Paragraph:
    return Paragraph(["None of these results holds the evaluation ", Code(kind), "."])


def _figure_name(runs: Runs, kind: str) -> str:
    alone = not {"curves", "geometry"} <= set(runs.experiment.show)
    return runs.experiment.name if alone else f"{runs.experiment.name}-{kind}"


def _scale_note(runs: Runs, paper: Paper) -> Iterator[Block]:
    if runs.profile != "paper" and paper.has(runs):
        text = "The paper's numbers are of another scale (its network, images and rounds): "
        yield Paragraph([text, "compare differences, not levels."])


def _coverage(runs: Runs) -> Paragraph:
    """What was run, and what was not."""
    counts = sorted({len(results) for results in runs.found.values()})
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    parts: list[Inline] = [
        f"{len(runs.found)} of the {len(runs.cells)} cells of profile ", Code(runs.profile),
        f" {'was' if len(runs.found) == 1 else 'were'} run, with {seeds} {_plural('seed', range(counts[-1]))} each.",
    ]  # fmt: skip
    if runs.missing:
        parts += [" ", Strong("Not run:"), f" {'; '.join(_missing(runs))}."]
    return Paragraph([*parts, *_left_out(runs)])


def _left_out(runs: Runs) -> Iterator[Inline]:
    """The labels that the paper's profile has and this one has not; others may stand instead."""
    profiles, gone = runs.experiment.profiles, []
    for axis, known in runs.experiment.axes.items():
        theirs, ours = (
            profiles.get(name, {}).get(axis, list(known)) for name in ("paper", runs.profile)
        )
        lost, other = (
            [label for label in a if label not in b] for a, b in ((theirs, ours), (ours, theirs))
        )
        if lost:
            gone.append(_named(axis, lost) + (f" (instead: {', '.join(other)})" if other else ""))
    if gone:
        yield from (" ", Strong(f"Not part of profile {runs.profile}:"), f" {'; '.join(gone)}.")


def _missing(runs: Runs) -> list[str]:
    """Names the cells without a result; a label of which nothing was run is named once."""
    left, names = list(runs.missing), []
    for place, axis in enumerate(runs.experiment.axes):
        labels, there = (
            dict.fromkeys(cell[place] for cell in runs.missing),
            {cell[place] for cell in runs.found},
        )
        gone = [label for label in labels if label not in there]
        left = [cell for cell in left if cell[place] not in gone]
        names += [_named(axis, gone)] if gone else []
    return names + [" / ".join(cell) for cell in left]


def _named(axis: str, labels: Sequence[str]) -> str:
    """Labels in a sentence, where a number alone would say too little."""
    listed = ", ".join(labels)
    return f"{axis} {listed}" if labels[0][:1].isdigit() else listed


def _what_ran(
    found: Sequence[Result],
    used: Sequence[Runs],
    problems: Sequence[str],
    outdated: dict[str, list[str]],
) -> Iterator[Block]:
    """All runs that the report is made of, and the results that it could not use."""
    runs = _unique(used)
    yield Heading("What ran", anchor="runs")
    if runs:
        machines = sorted({result.machine for result in runs})
        head = [
            "cell",
            "seed",
            "run",
            "hash",
            "commit",
            "minutes",
            *["machine"] * (len(machines) > 1),
            "used in",
        ]
        rows: list[list[Inline]] = []
        for result in runs:
            cells = [
                (one.experiment.name, cell)
                for one in used
                for cell in one.found
                if result in one.of(cell)
            ]
            rows.append([
                " / ".join(cells[0][1]), str(result.seed), result.name, Code(result.hash), Code(result.commit),
                f"{result.seconds / 60:.1f}", *[result.machine] * (len(machines) > 1),
                ", ".join(dict.fromkeys(name for name, _ in cells)),
            ])  # fmt: skip
        text = f"{len(runs)} {_plural('run', runs)}, {_hours(runs)} of wall time, summed over the runs, on "
        dirty = (
            " A commit with a + had changed files."
            if any(one.commit.endswith("+") for one in runs)
            else ""
        )
        yield Paragraph([text, "; ".join(machines), f".{dirty}"])
        yield Table(head, rows, fold="All runs: seed, hash, commit and wall time")
    kept = {result.hash for result in runs}
    left_out: list[list[Inline]] = [[problem] for problem in problems]
    old = [result for result in found if result.hash in outdated and result.hash not in kept]
    if old:
        text = f"{len(old)} {_plural('result', old)} of an older default {'was' if len(old) == 1 else 'were'} left out: "
        left_out.append(
            [text, "; ".join(f"{one.name} ({', '.join(outdated[one.hash])})" for one in old)]
        )
    unknown = [one.name for one in found if one.hash not in kept and one.hash not in outdated]
    if unknown:
        text = f"{len(unknown)} {_plural('result', unknown)} in no table (of no experiment here, or built on by others): "
        left_out.append([text, ", ".join(dict.fromkeys(unknown))])
    if left_out:
        yield Heading("Left out", level=3)
        yield Bullets(left_out)


def _unique(used: Sequence[Runs]) -> list[Result]:
    """The results that are used, each once, in the order of the tables, which share many."""
    return list(
        {
            result.hash: result for one in used for cell in one.found for result in one.of(cell)
        }.values()
    )


def _values(runs: Sequence[Result], key: str) -> str:
    """The value of a key, or the range of its values where they differ."""
    values = sorted({result.config[key] for result in runs})
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _hours(runs: Sequence[Result]) -> str:
    seconds = sum(result.seconds for result in runs)
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.1f} minutes"


def _plural(word: str, things: Sequence[object]) -> str:
    return word if len(things) == 1 else f"{word}s"
