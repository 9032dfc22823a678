"""Markdown made from names of others, and the page made from it."""

import base64
import re
from html.parser import HTMLParser

import pytest
from markupsafe import Markup

from fedx_pl.experiments.markdown import code, in_html, line, link, strong, table, text, to_html

TRICKY = "<b>*a* & _b_|`c`</b>"
HOSTILE = [
    TRICKY,
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "[a](https://example.com)",
    "![a](https://example.com/a.png)",
    "<https://example.com>",
    "&lt;script&gt;",
    "a\n\n# b\n\n<script>",
    "a\u2028<b>",
    "| a | b |",
    "`` <img> ``",
    "\\",
    "\\|",
    "**",
    "1. one",
    "- a",
    "+ FedX",
    "# a",
    "</details>",
    '<a id="x"></a>',
    "===",
    "~~~",
    "    a",
]


class Reader(HTMLParser):
    """Collects text, tags and addresses, and checks that tags are closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.sources: list[str | None] = []
        self.text = ""
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("meta", "img"):
            self.open.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data


def one_line(name: str) -> str:
    """A name as a page shows it: a browser makes one space of any white space."""
    return " ".join(name.split())


def page(name: str) -> str:
    """A page that has a name in every place that a report has for one."""
    return "\n\n".join(
        [
            f"# {text(name)}",
            f'<a id="part"></a>\n\n## Part {text(name)}',
            line(name),
            f"A {strong('b' + name)} and {code(name)}, {link(name, '#part')}.",
            f"- {line(name)}\n- last",
            table([name, "value"], [[name, "1.00"], [code(name), "2.00"], [strong(name), "-"]]),
            f"<details><summary>{in_html(name)}</summary>\n\n{table(['a'], [['b']])}\n\n</details>",
        ]
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_shown_as_it_is_and_never_becomes_markup(name):
    reader = Reader(to_html(page(name), name, {}))
    plain = Reader(to_html(page("name"), "name", {}))
    assert reader.tags == plain.tags
    assert reader.sources == plain.sources == ["#part"]
    shown = one_line(reader.text)
    assert shown.count(one_line(name)) >= 10
    assert "\\<" not in shown


def test_a_page_has_no_scripts_and_loads_nothing():
    html = to_html("![a plot](figures/a%20b.png)\n", "title", {"figures/a b.png": b"PNG"})
    assert "<script" not in html
    assert Reader(html).sources == [
        f"data:image/png;base64,{base64.b64encode(b'PNG').decode()}",
    ]
    assert "prefers-color-scheme: dark" in html
    assert "width=device-width" in html


def test_html_that_is_not_the_template_s_is_shown_as_text():
    """Escaping comes first; should it ever fail, the page still runs nothing."""
    html = to_html('<script>a</script>\n\nb <img src="x" onerror="c"> <a href="d">e</a>\n', "", {})
    assert Reader(html).sources == []
    assert "&lt;script&gt;" in html
    assert "&lt;img src=" in html


def test_markdown_escapes_what_would_be_markup():
    escaped = r"\<b\>\*a\* &amp; \_b\_\|\`c\`\</b\>"
    assert text(TRICKY) == escaped
    assert strong(TRICKY) == f"**{escaped}**"
    assert f"| {escaped} | -1.00 |" in table(["name", "value"], [[TRICKY, "-1.00"]])
    assert code("x|y") == "`x|y`"
    assert "| `x\\|y` |" in table(["name"], [[code("x|y")]])


def test_finished_markdown_is_not_escaped_again():
    assert text(strong("a")) == "**a**"
    assert text(Markup("[a](b)")) == "[a](b)"


@pytest.mark.parametrize("name", ["`` <img> ``", "a\n\n<img>\n", "```<img>", "a\u2028<img>"])
def test_code_of_others_cannot_leave_its_fence(name):
    span = code(name)
    fence = re.match("`+", span)[0]
    assert "\n" not in span
    assert re.fullmatch(rf"{fence}(?!`).*<img>.*(?<!`){fence}", span)
    assert not re.search(rf"(?<!`){fence}(?!`)", span[len(fence) : -len(fence)])


def test_no_code_is_no_fence():
    """A result that was made without git has no commit."""
    assert code("") == ""


def test_a_line_that_starts_with_a_sign_is_no_list_and_no_heading():
    assert line("+ FedX") == "\\+ FedX"
    assert line("# a") == "\\# a"
    assert line("1. a") == "1\\. a"
    assert line("10 a") == "10 a"


def test_numbers_are_set_to_the_right_and_words_to_the_left():
    content = table(
        ["name", "value", "verdict"], [["0.5", "-1.00", "good"], ["+ FedX", "2.00", strong("bad")]]
    )
    assert "| --- | ---: | --- |" in content
    html = to_html(content, "", {})
    assert '<td style="text-align:right">2.00</td>' in html
    assert "<td><strong>bad</strong></td>" in html
    assert "<th>+ FedX</th>" in html


def test_a_thicker_line_starts_each_group_of_rows():
    rows = [["a", "x", "1"], ["a", "y", "2"], ["b", "x", "3"], ["b", "y", "4"]]
    html = to_html(table(["data", "method", "value"], rows, labels=2), "", {})
    assert re.findall(r'<tr( class="group")?>\s*<th>(\w)</th>', html) == [
        ("", "a"),
        ("", "a"),
        (' class="group"', "b"),
        ("", "b"),
    ]
    alone = to_html(table(["data", "method", "value"], rows[::2], labels=2), "", {})
    assert 'class="group"' not in alone


def test_a_heading_takes_the_anchor_above_it():
    html = to_html('<a id="a &amp; b"></a>\n\n## Title\n', "", {})
    assert '<h2 id="a &amp; b">Title</h2>' in html
    assert "<a " not in html
