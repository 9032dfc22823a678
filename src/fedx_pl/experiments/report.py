"""The report of a folder of results: every table and figure that has runs.

`report.md.jinja` holds the text. This module collects what it shows, writes it as Markdown and
turns that into one HTML page.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure

from fedx_pl.callbacks.plots import png
from fedx_pl.errors import UserError, say
from fedx_pl.evaluation.geometry_plots import geometry_figure
from fedx_pl.experiments import tables
from fedx_pl.experiments.comparison import Gains, compare, student
from fedx_pl.experiments.definition import Labels, load_experiments
from fedx_pl.experiments.differences import differences
from fedx_pl.experiments.figures import curves_figure
from fedx_pl.experiments.markdown import code, image, render, table, to_html
from fedx_pl.experiments.results import Result, Runs, match, read_results
from fedx_pl.experiments.tables import Paper, extent
from fedx_pl.files import write_atomically
from fedx_pl.printing import hours, plural

FIGURES = "figures"  # the folder of the pictures, beside the report
MAIN = "table1"  # the experiment whose gains open the report


def write_report(
    results: Path,
    definitions: Path = Path("experiments"),
    out: Path | None = None,
    report: Callable[[str], object] = say,
) -> list[Path]:
    """Writes ``report.md``, ``report.html`` and ``figures/NAME.png``.

    Args:
        results: the folder with one JSON file per finished run, all of one profile.
        definitions: the folder of the experiments, with the paper's numbers in
            ``paper/tables.yaml``.
        out: the folder to write to; the folder of the results by default.
        report: takes a line for each file that was left out.

    Returns:
        the files that were written.

    Raises:
        UserError: there are no results, or a definition cannot be read.
    """
    out = results if out is None else out
    if (out / FIGURES).is_symlink():
        raise UserError(
            f"{out / FIGURES} is a link, and figures would be written elsewhere; remove it first"
        )
    all_results, problems = read_results(results)
    for problem in problems:
        report(problem)
    paper = Paper(definitions / "paper" / "tables.yaml")
    outdated: dict[str, list[str]] = {}
    order = list(paper.tables)
    experiments = sorted(
        load_experiments(definitions),
        key=lambda experiment: (
            order.index(experiment.name) if experiment.name in order else len(order),
            experiment.name,
        ),
    )
    matched = [match(experiment, all_results, outdated) for experiment in experiments]
    shown, not_begun = _split([runs for runs in matched if runs.cells])

    title = f"FedX results, profile {all_results[0].profile}"
    pictures: dict[str, bytes] = {}
    used = list({result.hash: result for runs in shown for result in runs.results()}.values())
    markdown = render(
        "report.md.jinja",
        title=title,
        profile=all_results[0].profile,
        result_count=len(all_results),
        sections=[_section(runs, paper, pictures) for runs in shown],
        main_gains=_main_gains(shown, paper),
        student=lambda n: f"{student(n):.2f}",
        not_begun=[runs.experiment for runs in not_begun],
        differences=differences(shown, paper, definitions, out=out) if shown else None,
        **_summary(used),
        run_table=_run_table(used, shown),
        problems=problems,
        **_left_out(all_results, used, outdated),
    )
    written = {out / name: content for name, content in pictures.items()}
    written[out / "report.md"] = markdown.encode()
    written[out / "report.html"] = to_html(markdown, title, pictures).encode()
    for path, content in written.items():
        write_atomically(path, content)
    return list(written)


def _split(matched: Sequence[Runs]) -> tuple[list[Runs], list[Runs]]:
    """Parts the experiments that get a section from those with nothing new to show."""
    shown: list[Runs] = []
    not_begun: list[Runs] = []
    seen: set[str] = set()
    for runs in matched:
        hashes = {result.hash for result in runs.results()}
        repeats = runs.missing and hashes <= seen and runs.experiment.show == ["table"]
        (not_begun if repeats or not hashes else shown).append(runs)
        seen |= hashes
    return shown, not_begun


def _summary(used: Sequence[Result]) -> dict[str, Any]:
    """The summary of all runs."""

    def values(key: str) -> str:
        return extent({result.config[key] for result in used}) if used else ""

    return {
        "runs": used,
        "seeds": sorted({result.seed for result in used}),
        "rounds": values("federation.rounds"),
        "epochs": values("federation.epochs"),
        "wall_time": hours(sum(result.seconds for result in used)),
        "machines": sorted({result.machine for result in used}),
        "few_labels": any(result.few_labels for result in used),
        "dirty": any(result.commit.endswith("+") for result in used),
    }


def _main_gains(shown: Sequence[Runs], paper: Paper) -> Gains | None:
    """The gains of the last variant of the main experiment."""
    for runs in shown:
        if runs.experiment.name == MAIN:
            label = runs.variants[-1]
            title = f"{label} against {runs.experiment.baseline}, last round"
            return _accuracy_gains(title, runs, paper, labels=[label])
    return None


def _accuracy_gains(
    title: str, runs: Runs, paper: Paper, labels: Sequence[str] = ()
) -> Gains | None:
    def printed(cell: Labels, _: str) -> float | None:
        first: float | None = (paper.numbers(runs, cell) or [None])[0]
        return first

    return compare(title, runs, {"last": Result.last}, printed, labels=labels)


def _section(runs: Runs, paper: Paper, pictures: dict[str, bytes]) -> dict[str, Any]:
    """The section of one experiment.

    Args:
        runs: the results of the experiment.
        paper: the paper's numbers.
        pictures: receives the figures, by their path beside the report.
    """
    parts = {
        "table": _table,
        "curves": _curves,
        "errors": _errors,
        "semi": _semi,
        "geometry": _geometry,
    }
    return {
        "experiment": runs.experiment,
        "other_scale": runs.profile != "paper" and paper.has(runs),
        "seeds_differ": _seeds_differ(runs),
        "parts": {kind: parts[kind](runs, paper, pictures) for kind in runs.experiment.show},
        "coverage": _coverage(runs),
    }


def _table(runs: Runs, paper: Paper, _: dict[str, bytes]) -> dict[str, Any]:
    title = _differences_title(runs)
    return {
        "accuracy": tables.accuracy_table(runs, paper),
        "gains": _accuracy_gains(f"{title}, last round", runs, paper),
        "knn": tables.knn_table(runs),
        "knn_gains": compare(
            f"{title} by kNN, last round", runs, {"kNN": tables.last_knn}, lambda *_: None
        ),
    }


def _differences_title(runs: Runs) -> str:
    return f"Differences to {runs.experiment.baseline}"


def _curves(runs: Runs, _: Paper, pictures: dict[str, bytes]) -> dict[str, Any]:
    figure = curves_figure(runs)
    if figure is None:
        return {"picture": None}
    return {"picture": _picture(runs, "curves", figure, "linear top-1 by round", pictures)}


def _errors(runs: Runs, paper: Paper, _: dict[str, bytes]) -> dict[str, Any]:
    spans = tables.last_five(runs)
    listed = " or ".join(f"{first} to {last}" for first, last in spans)
    return {
        "table": tables.errors_table(runs, paper),
        "rounds": f" ({listed})" if spans else "",
        "apart": any(last - first >= tables.FIVE for first, last in spans),
    }


def _semi(runs: Runs, paper: Paper, _: dict[str, bytes]) -> dict[str, Any]:
    shares = tables.semi_shares(runs)
    if not shares:
        return {"table": None}
    return {
        "table": tables.semi_table(runs, paper),
        "gains": compare(
            _differences_title(runs),
            runs,
            tables.semi_measures(runs),
            lambda cell, share: tables.semi_paper(paper, runs, cell, share=share),
            names=shares,
        ),
    }


def _geometry(runs: Runs, paper: Paper, pictures: dict[str, bytes]) -> dict[str, Any]:
    geometries = {
        (cell, seed): dict(result.evaluations["geometry"])
        for cell, results in runs.by_cell.items()
        for seed, result in results.items()
        if result.evaluations.get("geometry")
    }
    if not geometries:
        return {"table": None}
    first = min(seed for _, seed in geometries)
    figure = geometry_figure(
        {", ".join(cell): values for (cell, seed), values in geometries.items() if seed == first}
    )
    alt = "box plot of the angles by class, histogram between classes"
    measures = tables.geometry_measures()
    return {
        "table": tables.geometry_table(runs, paper),
        "picture": _picture(runs, "geometry", figure, alt, pictures),
        "seed": first,
        "gains": compare(
            _differences_title(runs),
            runs,
            {key: measure for key, measure in measures.items() if key.endswith("_mean")},
            lambda cell, key: tables.geometry_paper(paper, runs, cell, key=key),
            names=tables.GEOMETRY,
        ),
    }


def _picture(runs: Runs, kind: str, figure: Figure, alt: str, pictures: dict[str, bytes]) -> Markup:
    """Draws a figure into `pictures`, and returns the Markdown that shows it."""
    has_both = {"curves", "geometry"} <= set(runs.experiment.show)
    suffix = f"-{kind}" if has_both else ""
    path = f"{FIGURES}/{runs.experiment.name}{suffix}.png"
    pictures[path] = png(figure)
    return image(f"{runs.experiment.title}: {alt}", path)


def _seeds_differ(runs: Runs) -> bool:
    """Whether rows that are compared with each other have different seeds."""
    for group in runs.groups:
        seeds = [set(results) for cell, results in runs.by_cell.items() if cell[:-1] == group]
        if any(other != seeds[0] for other in seeds):
            return True
    return False


def _coverage(runs: Runs) -> dict[str, Any]:
    """Describes which runs of an experiment are finished and which are missing."""
    counts = [len(results) for results in runs.by_cell.values()]
    return {
        "run": len(runs.by_cell),
        "cells": len(runs.cells),
        "seeds": f"{extent(counts)} {plural('seed', max(counts))}",
        "missing": _missing(runs),
        "left_out": _not_in_profile(runs),
    }


def _not_in_profile(runs: Runs) -> list[str]:
    """The labels that the paper's profile has and this one has not, with what it has instead."""
    profiles = runs.experiment.profiles
    names = []
    for axis, labels in runs.experiment.axes.items():
        theirs = profiles.get("paper", {}).get(axis, list(labels))
        ours = profiles.get(runs.profile, {}).get(axis, list(labels))
        lost = [label for label in theirs if label not in ours]
        instead = ", ".join(label for label in ours if label not in theirs)
        if lost:
            names.append(_named(axis, lost) + (f" (instead: {instead})" if instead else ""))
    return names


def _missing(runs: Runs) -> list[str]:
    """Names the cells without a result; a label without any run is named once."""
    cells = runs.missing
    names = []
    for place, axis in enumerate(runs.experiment.axes):
        with_runs = {cell[place] for cell in runs.by_cell}
        without = [
            label
            for label in dict.fromkeys(cell[place] for cell in runs.missing)
            if label not in with_runs
        ]
        cells = [cell for cell in cells if cell[place] not in without]
        if without:
            names.append(_named(axis, without))
    return names + [" / ".join(cell) for cell in cells]


def _named(axis: str, labels: Sequence[str]) -> str:
    """Lists labels in a sentence, with their axis where a number alone would say too little."""
    listed = ", ".join(labels)
    return f"{axis} {listed}" if labels[0][:1].isdigit() else listed


def _run_table(used: Sequence[Result], shown: Sequence[Runs]) -> Markup:
    """All runs that the report is made of."""
    several_machines = len({result.machine for result in used}) > 1
    head = ["cell", "seed", "run", "hash", "commit", "minutes", "used in"]
    if several_machines:
        head.insert(-1, "machine")
    rows = []
    for result in used:
        cells = [
            (runs.experiment.name, cell)
            for runs in shown
            for cell in runs.by_cell
            if result in runs.results_of(cell)
        ]
        row = [
            " / ".join(cells[0][1]),
            str(result.seed),
            result.name,
            code(result.hash),
            code(result.commit),
            f"{result.seconds / 60:.1f}",
            ", ".join(dict.fromkeys(name for name, _ in cells)),
        ]
        if several_machines:
            row.insert(-1, result.machine)
        rows.append(row)
    return table(head, rows)


def _left_out(
    all_results: Sequence[Result], used: Sequence[Result], outdated: dict[str, list[str]]
) -> dict[str, list[str]]:
    """The results that are in no table: those of an older default, and those of no experiment."""
    hashes = {result.hash for result in used}
    unused = [result for result in all_results if result.hash not in hashes]
    return {
        "outdated": [
            f"{result.name} ({', '.join(outdated[result.hash])})"
            for result in unused
            if result.hash in outdated
        ],
        "unused": [result.name for result in unused if result.hash not in outdated],
    }
