"""Figures of many runs. Plain ``Figure`` objects, as in `plots`."""

import itertools
import statistics
from collections import defaultdict

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedx_pl.experiments.definition import Labels
from fedx_pl.experiments.results import LINEAR, Runs, number
from fedx_pl.palette import GRAY, category, tidy

_MARKERS = "os^DvPX*<>"  # tell lines apart as well as colors do


def curves_figure(runs: Runs) -> Figure | None:
    """Draws linear top-1 by round: a panel for each group of cells, a line for each variant.

    A line is the mean over the seeds; its band reaches from the lowest to the highest seed. It is
    dotted where there is one seed. The dashed line is the untrained network. The panels for the
    table's column axis are side by side.

    Returns:
        None if no run has an accuracy.
    """
    panels = [
        group
        for group in runs.groups
        if any(_points(runs, (*group, label)) for label in runs.variants)
    ]
    if not panels:
        return None
    grid = _grid(runs, panels)
    columns = max(map(len, grid))
    size = (3.6 * columns + 0.4, 2.5 * len(grid) + 0.8) if len(panels) > 1 else (7.2, 4.6)
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    for row, groups in zip(figure.subplots(len(grid), columns, squeeze=False), grid, strict=True):
        for axes, group in itertools.zip_longest(row, groups):
            if group is not None:
                _draw(axes, runs, group)
            axes.set_visible(axes.has_data())
    handles: dict[str, Artist] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    labels = [label for label in (*runs.variants, "untrained") if label in handles]
    figure.legend(
        [handles[label] for label in labels],
        labels,
        loc="outside upper center",
        ncols=min(len(labels), 2 if columns == 1 and len(labels) > 4 else 4),
        frameon=False,
    )
    figure.supxlabel("round", fontsize=10)
    figure.supylabel("linear top-1 (%)", fontsize=10)
    return figure


def _grid(runs: Runs, panels: list[Labels]) -> list[list[Labels | None]]:
    """Places the panels: a column for each label of the `columns` axis, or three in a row."""
    axes = list(runs.experiment.axes)
    in_rows: list[list[Labels | None]] = [
        list(panels[start : start + 3]) for start in range(0, len(panels), 3)
    ]
    if runs.experiment.columns not in axes[:-1]:
        return in_rows
    place = axes.index(runs.experiment.columns)
    columns = list(dict.fromkeys(group[place] for group in panels))
    if len(columns) == 1:
        return in_rows
    rest = list(dict.fromkeys(group[:place] + group[place + 1 :] for group in panels))
    wanted = [[(*group[:place], label, *group[place:]) for label in columns] for group in rest]
    return [[group if group in panels else None for group in row] for row in wanted]


def _points(runs: Runs, cell: Labels) -> dict[int, list[float]]:
    """The accuracies of all seeds, by round."""
    points: dict[int, list[float]] = defaultdict(list)
    for result in runs.results_of(cell):
        for round_number, value in result.measured():
            points[round_number].append(value)
    return dict(sorted(points.items()))


def _draw(axes: Axes, runs: Runs, group: Labels) -> None:
    untrained = []
    for position, label in enumerate(runs.variants):
        color = category(position)
        points = _points(runs, (*group, label))
        levels = [
            number(result.untrained.get(LINEAR)) for result in runs.results_of((*group, label))
        ]
        untrained += [level for level in levels if level is not None]
        if not points:
            continue
        several = any(len(values) > 1 for values in points.values())
        axes.plot(
            list(points),
            [statistics.fmean(values) for values in points.values()],
            "-" if several else ":",
            color=color,
            marker=_MARKERS[position % len(_MARKERS)],
            markersize=4 if len(points) <= 40 else 0,
            linewidth=1.6,
            label=label,
        )
        if several:
            axes.fill_between(
                list(points),
                [min(values) for values in points.values()],
                [max(values) for values in points.values()],
                color=color,
                alpha=0.18 if len(runs.variants) <= 4 else 0.08,  # many bands would hide the lines
                linewidth=0,
            )
    if untrained:
        axes.axhline(
            statistics.fmean(untrained),
            color=GRAY,
            linestyle="--",
            linewidth=1.1,
            label="untrained",
        )
    axes.set_title(", ".join(group), fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
    axes.tick_params(labelsize=8)
    tidy(axes)
