"""Markdown from Jinja templates, and one HTML page from Markdown.

A template holds the prose; every value that it prints is escaped, as Jinja does for HTML, so that a
name from outside is never read as markup. The functions here return ``Markup``: finished Markdown,
which is not escaped again.
"""

import base64
import html
import itertools
import re
from collections.abc import Mapping, Sequence
from urllib.parse import quote, unquote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

from fedx_pl import palette
from fedx_pl.printing import plural

_LAYOUT = Environment(
    loader=PackageLoader("fedx_pl.experiments"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
# The only HTML that a template writes; anything else is shown as text.
_ANCHOR = re.compile(r'<a id="([^"<>]*)"></a>')
_OWN_HTML = re.compile(r"<details><summary>[^<>]*</summary>\s*|</details>\s*")


def text(value: object) -> Markup:
    """Escapes what Markdown would read as markup."""
    if isinstance(value, Markup):
        return value
    lines = str(value).replace("&", "&amp;").splitlines()
    return Markup(re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(lines)))


def line(value: object) -> Markup:
    """Escapes a text at the start of a line, where "+ FedX" would begin a list."""
    return Markup(re.sub(r"^(\d*)([-+#~.)])", r"\1\\\2", text(value).lstrip()))


def in_html(value: object) -> Markup:
    """Escapes a text within HTML, where Markdown's escapes mean nothing."""
    return Markup(html.escape(" ".join(str(value).splitlines())))


def code(value: object) -> Markup:
    """A code span, in a fence longer than any within it."""
    content = " ".join(str(value).splitlines())
    if not content.strip():
        return Markup()
    fence = "`" * (1 + max(map(len, re.findall("`+", content)), default=0))
    return Markup(f"{fence} {content} {fence}" if "`" in content else f"`{content}`")


def strong(value: object) -> Markup:
    """Formats text as bold."""
    return Markup(f"**{text(value).strip()}**")


def link(value: object, target: str) -> Markup:
    """A link to a relative path, or to a heading of the page by ``#anchor``."""
    return Markup(f"[{text(value)}]({quote(target, safe='/#')})")


def image(alt: str, path: str) -> Markup:
    """A picture by its relative path, with a text for those who cannot see it."""
    return Markup(f"!{link(alt, path)}")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], labels: int = 1) -> Markup:
    """A table with words to the left and numbers to the right.

    Args:
        head: the names of the columns.
        rows: the cells, as text or as finished Markdown.
        labels: how many columns name the row; these are words, whatever they hold.
    """

    def holds_words(column: int) -> bool:
        cells = [row[column] for row in rows]
        return any(isinstance(cell, Markup) or cell[:1].isalpha() for cell in cells)

    rule = [
        "---" if column < labels or holds_words(column) else "---:" for column in range(len(head))
    ]
    # A bar ends a cell even within code, where `text` has not escaped it.
    cells = [[re.sub(r"(?<!\\)\|", r"\\|", text(cell)) for cell in row] for row in (head, *rows)]
    return Markup("\n".join(f"| {' | '.join(row)} |" for row in (cells[0], rule, *cells[1:])))


def render(name: str, **values: object) -> str:
    """Renders a Markdown template of this package.

    Templates are wrapped at 100 columns and spaced for the reader; here a paragraph becomes one
    line, and blocks are parted by one empty line.
    """
    environment = _LAYOUT.overlay(finalize=text)
    filters = (code, in_html, line, link, plural)
    environment.filters |= {function.__name__: function for function in filters}
    page = environment.get_template(name).render(**values)
    page = re.sub(r"(?<=[^\n])\n[ ]*(?=[^\s|<-])", " ", page)
    return re.sub(r"\n\s*\n", "\n\n", page).strip() + "\n"


def to_html(markdown: str, title: str, pictures: Mapping[str, bytes]) -> str:
    """Turns Markdown into one HTML page that has no scripts and loads nothing.

    Args:
        markdown: from `render`.
        title: the title of the window.
        pictures: the PNG files that the Markdown links to, by their relative path.
    """
    parser = MarkdownIt("commonmark", {"html": True, "xhtmlOut": False}).enable("table")
    parser.add_render_rule("html_block", _own_html)
    parser.add_render_rule("html_inline", _own_html)
    tokens = parser.parse(markdown)
    _move_anchors(tokens)
    _mark_labels(tokens)
    for token in tokens:
        for image in token.children or []:
            if image.type == "image":
                content = base64.b64encode(pictures[unquote(str(image.attrs["src"]))]).decode()
                image.attrs["src"] = f"data:image/png;base64,{content}"
    body = parser.renderer.render(tokens, parser.options, {})
    body = body.replace("<table>", '<div class="scroll" tabindex="0"><table>')
    body = body.replace("</table>", "</table></div>")
    page = _LAYOUT.get_template("page.html.jinja")
    return page.render(title=title, body=Markup(body), light=palette.LIGHT, dark=palette.DARK)


def _own_html(_renderer: object, tokens: Sequence[Token], index: int, *_: object) -> str:
    content = tokens[index].content
    return content if _OWN_HTML.fullmatch(content) else html.escape(content)


def _move_anchors(tokens: list[Token]) -> None:
    """Makes the id of a heading out of the anchor in the paragraph above it."""
    for index in range(len(tokens) - 3, 0, -1):
        anchor = _ANCHOR.fullmatch(tokens[index].content)
        if anchor and tokens[index].type == "inline" and tokens[index + 2].type == "heading_open":
            tokens[index + 2].attrs["id"] = html.unescape(anchor[1])
            del tokens[index - 1 : index + 2]


def _mark_labels(tokens: Sequence[Token]) -> None:
    """Makes headers of the cells that name a row, and sets groups of rows apart.

    The columns of words on the left of a table name the row. A group begins where any label but the
    last changes; a thicker line shows it, unless every row is a group of its own.
    """
    labels = 1
    names: list[list[str]] = []
    rows: list[Token] = []
    for index, token in enumerate(tokens):
        if token.type == "thead_open":
            head = itertools.takewhile(lambda other: other.type != "thead_close", tokens[index:])
            numbers = [bool(cell.attrs) for cell in head if cell.type == "th_open"]
            labels = numbers.index(True) if True in numbers else 1
        elif token.type == "tbody_open":
            rows = []
            names = []
        elif token.type == "tr_open":
            rows.append(token)
            names.append([])
        elif token.type == "td_open" and len(names[-1]) < labels:
            names[-1].append(tokens[index + 1].content)
            token.tag = tokens[index + 2].tag = "th"
        elif token.type == "tbody_close":
            starts = [
                row
                for row, group, previous in zip(rows[1:], names[1:], names, strict=False)
                if group[:-1] != previous[:-1]
            ]
            if len(starts) + 1 < len(rows):
                for row in starts:
                    row.attrs["class"] = "group"
