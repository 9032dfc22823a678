"""Pictures of many runs. Plain ``Figure`` objects, as in `plots`."""

import statistics
from collections import defaultdict

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedx_pl.experiments.definition import Labels
from fedx_pl.experiments.results import LINEAR, Runs, number

# Okabe and Ito's colours, with grey in the place of their yellow, which is hard to see on white; shapes tell them
# apart as well.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#5F5F5F")
_MARKERS = "os^DvPX*<>"


def curves_figure(runs: Runs) -> Figure | None:
    """Linear top-1 by round: a panel for each group of cells, a line for each label of the last axis.

    A line is the mean over the seeds, its band reaches from the least to the greatest, and it is dotted where there is
    one seed; the dashed line is the untrained network. Panels of the axis that the table spreads over columns stand
    side by side.

    Returns:
        nothing if no run has an accuracy.
    """
    panels = [
        group
        for group in runs.groups
        if any(_points(runs, (*group, label)) for label in runs.variants)
    ]
    if not panels:
        return None
    grid = _grid(runs, panels)
    lines, columns = len(grid), max(map(len, grid))
    size = (3.6 * columns + 0.4, 2.5 * lines + 0.8) if len(panels) > 1 else (7.2, 4.6)
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    for row, line in zip(figure.subplots(lines, columns, squeeze=False), grid, strict=True):
        for axes, group in zip(row, line, strict=False):
            if group is not None:
                _draw(axes, runs, group)
        for axes in row[: len(line)]:
            axes.set_visible(axes.has_data())
        for axes in row[len(line) :]:
            axes.set_visible(False)
    found: dict[str, Artist] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        found = dict(zip(labels, handles, strict=True)) | found
    order = [label for label in (*runs.variants, "untrained") if label in found]
    columns = min(len(order), 2 if columns == 1 and len(order) > 4 else 4)
    figure.legend(
        [found[label] for label in order],
        order,
        loc="outside upper center",
        ncols=columns,
        frameon=False,
    )
    figure.supxlabel("round", fontsize=10)
    figure.supylabel("linear top-1 (%)", fontsize=10)
    return figure


def _grid(runs: Runs, panels: list[Labels]) -> list[list[Labels | None]]:
    """Places the panels: one column for each label of the `columns` axis, or, without several, up to three in a row."""
    axes = list(runs.experiment.axes)
    spread = axes.index(runs.experiment.columns) if runs.experiment.columns in axes[:-1] else None
    wide = [] if spread is None else list(dict.fromkeys(group[spread] for group in panels))
    if spread is None or len(wide) == 1:
        return [list(panels[start : start + 3]) for start in range(0, len(panels), 3)]
    rest = list(dict.fromkeys(group[:spread] + group[spread + 1 :] for group in panels))
    wanted = [[(*group[:spread], label, *group[spread:]) for label in wide] for group in rest]
    return [[group if group in panels else None for group in line] for line in wanted]


def _points(runs: Runs, cell: Labels) -> dict[int, list[float]]:
    """The accuracies of all seeds, by round."""
    found: dict[int, list[float]] = defaultdict(list)
    for result in runs.of(cell):
        for round_number, value in result.measured():
            found[round_number].append(value)
    return dict(sorted(found.items()))


def _draw(axes: Axes, runs: Runs, group: Labels) -> None:
    untrained = []
    for position, label in enumerate(runs.variants):
        colour = _COLOURS[position % len(_COLOURS)]
        points = _points(runs, (*group, label))
        levels = [number(result.untrained.get(LINEAR)) for result in runs.of((*group, label))]
        untrained += [level for level in levels if level is not None]
        if not points:
            continue
        marker = _MARKERS[position % len(_MARKERS)]
        means = [statistics.fmean(values) for values in points.values()]
        size = 4 if len(points) <= 40 else 0
        several = any(len(values) > 1 for values in points.values())
        style = "-" if several else ":"
        axes.plot(
            list(points),
            means,
            style,
            color=colour,
            marker=marker,
            markersize=size,
            linewidth=1.6,
            label=label,
        )
        if several:
            lowest, highest = map(min, points.values()), map(max, points.values())
            alpha = 0.18 if len(runs.variants) <= 4 else 0.08  # many bands would hide the lines
            axes.fill_between(
                list(points), list(lowest), list(highest), color=colour, alpha=alpha, linewidth=0
            )
    if untrained:
        axes.axhline(
            statistics.fmean(untrained),
            color="#5F5F5F",
            linestyle="--",
            linewidth=1.1,
            label="untrained",
        )
    axes.set_title(", ".join(group), fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
