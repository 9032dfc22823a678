"""The paper's embedding analysis as a figure, for one run or several side by side."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from fedx_pl.palette import GRAY, category, tidy

# matplotlib's names for the numbers of a box, and ours.
_BOX = {
    "med": "median",
    "q1": "q1",
    "q3": "q3",
    "whislo": "low",
    "whishi": "high",
    "mean": "mean",
}


def geometry_figure(named: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draws the angles between local and global model by class, and those between classes.

    Args:
        named: by the label of a run, ``results`` in the JSON file of ``fedx-pl evaluate RUN
            geometry``. A run without labels has neither boxes nor a histogram.
    """
    names = [name for result in named.values() for name in result.get("local_global", {})]
    classes = list(dict.fromkeys(names))
    boxes_width = min(max(0.2 * len(classes) * len(named), 5.6), 20)
    figure = Figure(figsize=(boxes_width + 4, 4.2), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[boxes_width, 4])
    colors = {label: category(index) for index, label in enumerate(named)}
    _draw_boxes(left, named, classes, colors=colors)
    _draw_histogram(right, named, colors)
    for axes in (left, right):
        tidy(axes)
        if not axes.has_data():
            axes.text(
                0.5,
                0.5,
                "no labels",
                transform=axes.transAxes,
                ha="center",
                va="center",
                color=GRAY,
            )
    handles = [Patch(facecolor=color, alpha=0.6, label=label) for label, color in colors.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False)
    return figure


def _draw_boxes(
    axes: Axes,
    named: Mapping[str, Mapping[str, Any]],
    classes: list[str],
    colors: Mapping[str, str],
) -> None:
    """Draws a group of boxes for each class: the median of a run is a line, its mean a dot."""
    width = 0.8 / len(named)
    for index, (label, result) in enumerate(named.items()):
        boxes = result.get("local_global", {})
        places = [place for place, name in enumerate(classes) if name in boxes]
        if not places:
            continue
        axes.bxp(
            [{key: boxes[classes[place]][ours] for key, ours in _BOX.items()} for place in places],
            positions=[place + (index + 0.5) * width - 0.4 for place in places],
            widths=0.8 * width,
            manage_ticks=False,
            showfliers=False,
            showmeans=True,
            patch_artist=True,
            boxprops={"facecolor": colors[label], "alpha": 0.6, "linewidth": 0.8},
            whiskerprops={"color": colors[label]},
            capprops={"color": colors[label]},
            medianprops={"color": "black"},
            meanprops={
                "marker": "o",
                "markersize": 3,
                "markerfacecolor": "black",
                "markeredgecolor": "black",
            },
        )
    axes.set_xticks(
        range(len(classes)),
        classes,
        rotation=45 if len(classes) <= 20 else 90,
        ha="right",
        fontsize=8,
        parse_math=False,
    )
    axes.set(title="local against global model", ylabel="angle (degrees)")
    axes.set_ylim(bottom=0)


def _draw_histogram(
    axes: Axes, named: Mapping[str, Mapping[str, Any]], colors: Mapping[str, str]
) -> None:
    """Draws all pairs of class prototypes in bins of 5 degrees, and the means as dashed lines."""
    labeled = {label: result for label, result in named.items() if result.get("interclass")}
    angles = [angle for result in labeled.values() for angle in result["interclass"]]
    if angles:
        first = 5 * np.floor(min(angles) / 5)
        last = 5 * np.floor(max(angles) / 5) + 5
        bins = np.arange(first, last + 5, 5).tolist()
        for label, result in labeled.items():
            color = colors[label]
            mean = result["interclass_mean"]
            name = f"mean {mean:.1f}°"
            axes.hist(result["interclass"], bins, color=color, alpha=0.45, edgecolor=color)
            axes.axvline(mean, color=color, linestyle="--", linewidth=1.6, label=name)
        axes.legend(fontsize=8)
    axes.set(title="between class prototypes", xlabel="angle (degrees)", ylabel="pairs of classes")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
