"""The paper's embedding analysis as a figure, for one run or several side by side."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's colours, which stay apart for every kind of colour vision; more runs begin again.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5F5F5F")
_GREY = "#5F5F5F"


def geometry_figure(named: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Left: angles between local and global model, a box for each class. Right: a histogram of inter-class angles.

    Args:
        named: by the label of a run, what ``fedx-pl evaluate RUN geometry`` found (``results`` of its JSON file).
            A run without labels has neither boxes nor a histogram.
    """
    classes = list(
        dict.fromkeys(name for found in named.values() for name in found.get("local_global", {}))
    )
    boxes = len(classes) * len(named)
    figure = Figure(
        figsize=(min(max(0.2 * boxes, 5.6), 20) + 4, 4.2), dpi=110, layout="constrained"
    )
    left, right = figure.subplots(1, 2, width_ratios=[figure.get_figwidth() - 4, 4])
    colours = {label: _COLOURS[number % len(_COLOURS)] for number, label in enumerate(named)}
    _draw_boxes(left, named, classes, colours=colours)
    _draw_histogram(right, named, colours)
    for axes in (left, right):
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        if not axes.has_data():
            axes.text(
                0.5,
                0.5,
                "no labels",
                transform=axes.transAxes,
                ha="center",
                va="center",
                color=_GREY,
            )
    handles = [Patch(facecolor=colour, alpha=0.6, label=label) for label, colour in colours.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False)
    return figure


def _draw_boxes(
    axes: Axes,
    named: Mapping[str, Mapping[str, Any]],
    classes: list[str],
    colours: Mapping[str, str],
) -> None:
    """A group of boxes for each class, one box for each run: the median is a line, the mean a dot."""
    width = 0.8 / len(named)
    for number, (label, found) in enumerate(named.items()):
        here = [
            (place, found["local_global"][name])
            for place, name in enumerate(classes)
            if name in found.get("local_global", {})
        ]
        if not here:
            continue
        keys = {
            "med": "median",
            "q1": "q1",
            "q3": "q3",
            "whislo": "low",
            "whishi": "high",
            "mean": "mean",
        }
        axes.bxp(
            [{theirs: box[ours] for theirs, ours in keys.items()} for _, box in here],
            positions=[place + (number + 0.5) * width - 0.4 for place, _ in here],
            widths=0.8 * width,
            manage_ticks=False,
            showfliers=False,
            showmeans=True,
            patch_artist=True,
            boxprops={"facecolor": colours[label], "alpha": 0.6, "linewidth": 0.8},
            whiskerprops={"color": colours[label]},
            capprops={"color": colours[label]},
            medianprops={"color": "black"},
            meanprops={"marker": "o", "markersize": 3, "markerfacecolor": "black", "markeredgecolor": "black"},
        )  # fmt: skip
    axes.set_xticks(
        range(len(classes)), classes, rotation=45 if len(classes) <= 20 else 90, ha="right", fontsize=8,
        parse_math=False,
    )  # fmt: skip
    axes.set(title="local against global model", ylabel="angle (degrees)")
    axes.set_ylim(bottom=0)


def _draw_histogram(
    axes: Axes, named: Mapping[str, Mapping[str, Any]], colours: Mapping[str, str]
) -> None:
    """All pairs of class prototypes in bins of 5 degrees, the means as dashed lines."""
    labelled = {label: found for label, found in named.items() if found.get("interclass")}
    every = [angle for found in labelled.values() for angle in found["interclass"]]
    if every:
        bins = np.arange(
            5 * np.floor(min(every) / 5), 5 * np.floor(max(every) / 5) + 10, 5
        ).tolist()
        for label, found in labelled.items():
            colour, mean = colours[label], found["interclass_mean"]
            axes.hist(found["interclass"], bins, color=colour, alpha=0.45, edgecolor=colour)
            axes.axvline(
                mean, color=colour, linestyle="--", linewidth=1.6, label=f"mean {mean:.1f}°"
            )
        axes.legend(fontsize=8)
    axes.set(title="between class prototypes", xlabel="angle (degrees)", ylabel="pairs of classes")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
