"""The colors of every figure and page.

Okabe and Ito's colors, which stay distinct for every kind of color vision. Their yellow is hard to
see on white and left out; olive and purple make ten, one for each class of CIFAR-10.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE = "#0072B2"
VERMILION = "#D55E00"
GREEN = "#009E73"
PINK = "#CC79A7"
ORANGE = "#E69F00"
SKY = "#56B4E9"
BLACK = "#000000"
GRAY = "#5F5F5F"
OLIVE = "#B2A800"
PURPLE = "#7B3294"
CATEGORIES = (BLUE, VERMILION, GREEN, PINK, ORANGE, SKY, BLACK, GRAY, OLIVE, PURPLE)

WHITE = "#FFFFFF"
GRID = "#DDDDDD"
FRAME = "#CCCCCC"
PALE_GRAY = "#BBBBBB"  # points and frames that stand back

# The colors of an HTML page by the name of their CSS variable.
LIGHT = {"ink": "#1D1F23", "page": WHITE, "line": "#D5D8DD", "soft": "#F3F4F6", "link": "#005A8F"}
DARK = {
    "ink": "#E4E6EA",
    "page": "#15171B",
    "line": "#3B3F47",
    "soft": "#22252B",
    "link": "#7CC4F5",
}


def category(index: int) -> str:
    """The color of the n-th line, run or class; they begin again after ten."""
    return CATEGORIES[index % len(CATEGORIES)]


def rgb(color: str) -> tuple[int, int, int]:
    """``#D55E00`` -> (213, 94, 0)."""
    red, green, blue = bytes.fromhex(color.removeprefix("#"))
    return red, green, blue


def tidy(axes: "Axes") -> None:
    """Draws pale horizontal lines behind the data, and no frame above and to the right of it."""
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
