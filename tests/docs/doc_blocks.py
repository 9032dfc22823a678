"""The blocks of code in Markdown: fenced ones, and those that are indented by four spaces."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELL = ("bash", "sh", "console")

_FENCE = re.compile(r"^```(\w*)(.*)$")
_EXEMPT = re.compile(r"^<!-- not run: (.+) -->$")
_LIST_ITEM = re.compile(r"^\s*([-*]|\d+\.) ")
_COMMAND = re.compile(r"^(\$ )?(fedx-pl|make|pip|pytest|\S*python3?|ray|cd|export|git) ")
_EXTRA = re.compile(r"`?\b(\w+)`? extra\b|\bextra `(\w+)`")


@dataclass(frozen=True)
class Block:
    """One block of code."""

    page: Path
    line: int  # of its first line of code, 1-based
    language: str  # "python", one of SHELL, or something that is only shown
    title: str  # the file that it is, if the page says so
    text: str
    exempt: str  # why it is not run; empty: it is

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        """The commands of a block as lists of words, without comments.

        In a console block, only lines that begin with ``$`` are commands.
        """
        return [words for words, _ in self.commands_with_extras]

    @property
    def commands_with_extras(self) -> list[tuple[list[str], str]]:
        """The same, each with the extra that its comment says it needs; empty if none."""
        text = self.text.replace("\\\n", " ")
        lines = [line.strip() for line in text.splitlines()]
        if any(line.startswith("$ ") for line in lines):  # What does not begin with it is output.
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        found = [
            (shlex.split(line, comments=True), needed_extra(line.partition(" #")[2]))
            for line in lines
        ]
        return [
            (words[1:] if words[0] == "exec" else words, extra) for words, extra in found if words
        ]


def blocks_of(page: Path) -> list[Block]:
    """All blocks of a page, in order."""
    lines = page.read_text().splitlines()
    found: list[Block] = []
    before = ""  # the last line that was not empty
    at = 0
    while at < len(lines):
        line = lines[at]
        exempt = _EXEMPT.match(before)
        reason = exempt[1] if exempt else ""
        if fence := _FENCE.match(line):
            end = lines.index("```", at + 1)
            title = re.search(r'title="([^"]*)"', fence[2])
            code = "\n".join(lines[at + 1 : end])
            found.append(
                Block(page, at + 2, fence[1] or "text", title[1] if title else "", code, reason)
            )
            at, before = end, ""
        elif (
            line.startswith("    ")
            and not _LIST_ITEM.match(before)
            and (not at or not lines[at - 1].strip())
        ):
            end = at
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            code = "\n".join(row[4:] for row in lines[at:end]).rstrip()
            found.append(Block(page, at + 1, _guess(code), "", code, reason))
            at, before = end - 1, ""
        elif line.strip():
            before = line
        at += 1
    return found


def needed_extra(text: str) -> str:
    """The extra named in a text such as "needs the `ray` extra" or "(extra `ray`)", or ""."""
    found = _EXTRA.search(text)
    return (found[1] or found[2]) if found else ""


def prose_of(page: Path) -> str:
    """A page without its blocks of code."""
    lines = page.read_text().splitlines()
    for block in blocks_of(page):
        for number in range(block.line - 1, block.line + block.text.count("\n")):
            lines[number] = ""
    return "\n".join(lines)


def _guess(code: str) -> str:
    """The language of a block that does not name it."""
    rows = [row for row in code.splitlines() if row.strip()]
    if any(re.match(r"(import|from) \w", row) for row in rows):
        return "python"
    return "bash" if _COMMAND.match(rows[0]) else "text"
