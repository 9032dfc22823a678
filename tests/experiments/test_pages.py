import base64
import re
from html.parser import HTMLParser

import pytest
from matplotlib.figure import Figure

from fedx_pl.experiments.pages import (
    Anchor,
    Bullets,
    Code,
    Heading,
    Paragraph,
    Picture,
    Strong,
    Table,
    to_html,
    to_markdown,
)

TRICKY = "<b>*a* & _b_|`c`</b>"


class Reader(HTMLParser):
    """Collects the text and checks that tags are closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text, self.sources = "", []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "img"):
            self.open.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def page():
    return [
        Heading("A & B", level=1),
        Heading("Part <1>", anchor="part"),
        Paragraph(["plain ", Code("x|y"), " and ", Strong(TRICKY), Anchor("there", "#part")]),
        Bullets([["one"], [TRICKY]]),
        Table(
            ["name", "value", "verdict"],
            [[TRICKY, "-1.00", "good"], ["+ FedX", "2.00", Strong("bad")]],
        ),
        Table(["a"], [["b"]], fold="more & more"),
    ]


def test_html_is_well_formed_and_shows_every_label_as_it_is():
    reader = Reader(to_html(page(), "A & B"))
    assert reader.text.count(TRICKY) == 3
    for text in ("A & B", "Part <1>", "x|y", "more & more", "+ FedX"):
        assert text in reader.text


def test_html_has_no_scripts_and_loads_nothing():
    picture = Picture("plot", b"PNG", 'a "plot"')
    html = to_html([*page(), picture], "title")
    assert "<script" not in html
    assert Reader(html).sources == [
        "#part",
        f"data:image/png;base64,{base64.b64encode(b'PNG').decode()}",
    ]
    assert "prefers-color-scheme: dark" in html
    assert "width=device-width" in html


def test_markdown_escapes_what_would_be_markup():
    text = to_markdown(page())
    escaped = r"\<b\>\*a\* &amp; \_b\_\|\`c\`\</b\>"
    assert f"| {escaped} | -1.00 | good |" in text
    assert f"**{escaped}**" in text
    assert "`x\\|y`" in text
    assert '<a id="part"></a>\n\n## Part \\<1\\>' in text
    assert "<details><summary>more &amp; more</summary>" in text


@pytest.mark.parametrize("text", ["`` <img> ``", "a\n\n<img>\n", "```<img>", "a\u2028<img>"])
def test_code_of_others_cannot_leave_its_fence(text):
    line = to_markdown([Paragraph(["a commit: ", Code(text), "."])])
    fence = re.search("`+", line)[0]
    assert line.count("\n") == 1
    assert re.fullmatch(rf"a commit: {fence}(?!`).*<img>.*(?<!`){fence}\.\n", line)
    assert not re.search(
        rf"(?<!`){fence}(?!`)", line[len("a commit: ") + len(fence) : -len(fence) - 2]
    )


def test_a_text_that_opens_a_table_is_no_html():
    text = to_markdown([Table(["a"], [["b"]], fold="<img src=x>\n\n<img>")])
    assert text.startswith("<details><summary>&lt;img src=x&gt;  &lt;img&gt;</summary>")


def test_a_line_that_starts_with_a_plus_is_no_list():
    assert to_markdown([Paragraph(["+ FedX"]), Bullets([["- a"]])]) == "\\+ FedX\n\n- \\- a\n"


def test_numbers_are_set_to_the_right_words_to_the_left():
    assert "|---|---:|---|".replace("|", " | ").strip() in to_markdown([page()[4]])
    html = to_html([page()[4]], "")
    assert html.count('<th class="left">') == 4  # two in the head, one per row
    assert '<td>2.00</td><td class="left"><strong>bad</strong></td>' in html


def test_the_same_figure_gives_the_same_bytes_and_a_link_in_markdown():
    pictures = []
    for _ in range(2):
        figure = Figure()
        figure.subplots().plot([1, 2])
        pictures.append(Picture.of(figure, "line", "a line"))
    assert pictures[0] == pictures[1]
    assert pictures[0].png.startswith(b"\x89PNG")
    assert to_markdown(pictures[:1]) == "![a line](figures/line.png)\n"
