"""One palette for all figures and pages."""

import re
from pathlib import Path

from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from fedx_pl import palette

ROOT = Path(__file__).parents[1]
COLOR = re.compile(r"#(?:[0-9a-fA-F]{6}|[0-9a-fA-F]{3})\b")


def test_no_other_file_has_colors_of_its_own() -> None:
    files = [
        file
        for folder in ("src", "examples")
        for kind in ("*.py", "*.jinja")
        for file in (ROOT / folder).rglob(kind)
        if file != Path(palette.__file__)
    ]
    assert len(files) > 100
    assert not [file.name for file in files if COLOR.search(file.read_text())]


def test_ten_categories_and_then_the_first_again() -> None:
    assert len(set(palette.CATEGORIES)) == 10
    assert [palette.category(index) for index in (0, 10, 11)] == [
        palette.BLUE,
        palette.BLUE,
        palette.VERMILION,
    ]


def test_colors_as_numbers() -> None:
    assert palette.rgb(palette.VERMILION) == (213, 94, 0)


def test_text_of_a_page_can_be_read() -> None:
    """Contrast of at least 7:1 for text and 4.5:1 for links, by WCAG's formula."""
    for colors in (palette.LIGHT, palette.DARK):
        assert contrast(colors["ink"], colors["page"]) >= 7
        assert contrast(colors["link"], colors["page"]) >= 4.5


def contrast(first: str, second: str) -> float:
    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def luminance(color: str) -> float:
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in to_rgb(color)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_axes_are_tidied() -> None:
    axes = Figure().subplots()
    palette.tidy(axes)
    assert not axes.spines["top"].get_visible()
    assert axes.spines["left"].get_visible()
