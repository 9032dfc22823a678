"""Pages as lists of blocks, written twice: as Markdown, and as one HTML page that needs no other file.

Text is never parsed: what is code, bold or a link is said by its type, so that any label can stand anywhere.
"""

import base64
import html
import io
import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from matplotlib.figure import Figure

FIGURES = "figures"  # the folder of the pictures, beside the Markdown page


@dataclass(frozen=True)
class Code:
    """As typed in a file or on a command line."""

    text: str


@dataclass(frozen=True)
class Strong:
    """Bold."""

    text: str


@dataclass(frozen=True)
class Anchor:
    """To another place; ``#anchor`` is a heading of this page."""

    text: str
    target: str


Inline = str | Code | Strong | Anchor


@dataclass(frozen=True)
class Heading:
    """Starts a section."""

    text: str
    level: int = 2
    anchor: str = ""


@dataclass(frozen=True)
class Paragraph:
    """Running text."""

    parts: Sequence[Inline]


@dataclass(frozen=True)
class Bullets:
    """A list, each entry a line of text."""

    entries: Sequence[Sequence[Inline]]


@dataclass(frozen=True)
class Table:
    """Rows below a head; the first `labels` columns name the row. With a `fold` it opens on a click on that text."""

    head: Sequence[str]
    rows: Sequence[Sequence[Inline]]
    _: KW_ONLY
    labels: int = 1
    fold: str = ""

    def is_left(self, column: int) -> bool:
        """Whether the column holds words, not numbers."""
        cells = [row[column] for row in self.rows]
        return column < self.labels or any(
            not isinstance(cell, str) or cell[:1].isalpha() for cell in cells
        )


@dataclass(frozen=True)
class Picture:
    """A drawn figure; `alt` says what is on it."""

    name: str
    png: bytes
    alt: str

    @classmethod
    def of(cls, figure: Figure, name: str, alt: str) -> "Picture":
        """Draws the figure."""
        buffer = io.BytesIO()
        figure.savefig(
            buffer, format="png", metadata={"Software": None}
        )  # The same numbers give the same file.
        return cls(name, buffer.getvalue(), alt)


Block = Heading | Paragraph | Bullets | Table | Picture


def to_markdown(blocks: Sequence[Block]) -> str:
    """The page as Markdown; its pictures are expected in the folder `FIGURES`."""
    return "\n\n".join(map(_markdown_block, blocks)) + "\n"


def _markdown_block(block: Block) -> str:
    match block:
        case Heading(text, level, anchor):
            line = f"{'#' * level} {_markdown_text(text)}"
            return f'<a id="{html.escape(anchor)}"></a>\n\n{line}' if anchor else line
        case Paragraph(parts):
            return _markdown_line(parts)
        case Bullets(entries):
            return "\n".join(f"- {_markdown_line(entry)}" for entry in entries)
        case Picture(name, _, alt):
            return f"![{_markdown_text(alt)}]({FIGURES}/{name}.png)"
    rule = ["---" if block.is_left(column) else "---:" for column in range(len(block.head))]
    lines = [[_markdown([cell]) for cell in row] for row in (block.head, *block.rows)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))
    fold = html.escape(
        " ".join(block.fold.splitlines())
    )  # within HTML, where Markdown's escapes mean nothing
    return f"<details><summary>{fold}</summary>\n\n{table}\n\n</details>" if fold else table


def _markdown_line(parts: Sequence[Inline]) -> str:
    return re.sub(
        r"^([+#-])", r"\\\1", _markdown(parts)
    )  # "+ FedX" at the start of a line is no list.


def _markdown(parts: Sequence[Inline]) -> str:
    return "".join(map(_markdown_part, parts))


def _markdown_part(part: Inline) -> str:
    match part:
        case Code(text):
            # Code inside of a table still needs its bars escaped; a fence longer than any in it lets it hold others.
            text = " ".join(text.replace("|", "\\|").splitlines())
            fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
            return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"
        case Strong(text):
            return f"**{_markdown_text(text)}**"
        case Anchor(text, target):
            return f"[{_markdown_text(text)}]({target})"
    return _markdown_text(part)


def _markdown_text(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(text.replace("&", "&amp;").splitlines()))


_STYLE = """
:root { color-scheme: light dark; --ink: #1d1f23; --page: #fff; --line: #d5d8dd; --soft: #f3f4f6; --link: #005a8f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6ea; --page: #15171b; --line: #3b3f47; --soft: #22252b; --link: #7cc4f5; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem 1rem 4rem; color: var(--ink); background: var(--page);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: break-word; }
h1, h2, h3 { line-height: 1.25; text-wrap: balance; }
h2 { margin-top: 3rem; padding-top: 1rem; border-top: 1px solid var(--line); }
h3 { margin-top: 2rem; }
p, ul { max-width: 48rem; }
ul { padding-left: 1.2rem; }
a { color: var(--link); }
code { padding: .1em .3em; border-radius: .25em; background: var(--soft); font-size: .9em; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
thead th { vertical-align: bottom; border-bottom: 2px solid var(--line); white-space: normal;
  min-width: 4.5rem; max-width: 8rem; }
th { font-weight: 600; }
tbody th { font-weight: 400; }
.left { text-align: left; }
tr.group > * { border-top: 2px solid var(--line); }
summary { cursor: pointer; }
figure { margin: 1rem 0; }
@media (max-width: 40rem) {
  table { font-size: .8rem; }
  th, td { padding-right: .6rem; }
}
img { display: block; max-width: 100%; height: auto; background: #fff; border-radius: .4rem; }
"""


def to_html(blocks: Sequence[Block], title: str) -> str:
    """The page as HTML with its pictures and its style inside; it has no scripts and loads nothing."""
    body = "\n".join(map(_html_block, blocks))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _html_block(block: Block) -> str:
    match block:
        case Heading(text, level, anchor):
            mark = f' id="{html.escape(anchor)}"' if anchor else ""
            return f"<h{level}{mark}>{html.escape(text)}</h{level}>"
        case Paragraph(parts):
            return f"<p>{_html(parts)}</p>"
        case Bullets(entries):
            return "<ul>\n" + "\n".join(f"<li>{_html(entry)}</li>" for entry in entries) + "\n</ul>"
        case Picture(_, png, alt):
            data = base64.b64encode(png).decode()
            return f'<figure><img alt="{html.escape(alt)}" src="data:image/png;base64,{data}"></figure>'
    table = _html_table(block)
    fold = html.escape(block.fold)
    return f"<details><summary>{fold}</summary>\n{table}\n</details>" if fold else table


def _html_table(table: Table) -> str:
    left = [table.is_left(column) for column in range(len(table.head))]
    head = "".join(
        _html_cell("th", text, is_left) for text, is_left in zip(table.head, left, strict=True)
    )
    # A thicker line where any label but the last changes: the eye finds the group, if it has several rows.
    groups = [list(row[: table.labels - 1]) for row in table.rows]
    starts = [number > 0 and group != groups[number - 1] for number, group in enumerate(groups)]
    if sum(starts) + 1 == len(groups):
        starts = [False] * len(groups)
    rows = []
    for row, start in zip(table.rows, starts, strict=True):
        tags = ["th" if column < table.labels else "td" for column in range(len(row))]
        cells = "".join(_html_cell(*cell) for cell in zip(tags, row, left, strict=True))
        rows.append(f'<tr class="group">{cells}</tr>' if start else f"<tr>{cells}</tr>")
    body = "\n".join(rows)
    return (
        '<div class="scroll" tabindex="0"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _html_cell(tag: str, text: Inline, is_left: bool) -> str:
    mark = ' class="left"' if is_left else ""
    return f"<{tag}{mark}>{_html([text])}</{tag}>"


def _html(parts: Sequence[Inline]) -> str:
    return "".join(map(_html_part, parts))


def _html_part(part: Inline) -> str:
    match part:
        case Code(text):
            return f"<code>{html.escape(text)}</code>"
        case Strong(text):
            return f"<strong>{html.escape(text)}</strong>"
        case Anchor(text, target):
            return f'<a href="{html.escape(target)}">{html.escape(text)}</a>'
    return html.escape(part)
