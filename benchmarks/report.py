"""The output of a benchmark: rows with their targets, contenders by speed, and the JSON file."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.targets import TARGETS
from fedx_pl.files import write_atomically


@dataclass(frozen=True)
class Row:
    """One measured number; its target, if there is one, has the same name."""

    name: str
    measured: float
    unit: str = "x"

    @property
    def text(self) -> str:
        """The measured number as text; the noise does not allow more than three digits."""
        digits = 2 if abs(self.measured) < 100 else 0
        return f"{self.measured:.{digits}f} {self.unit}"

    @property
    def verdict(self) -> str:
        """``met``, ``missed``, or empty without a target."""
        target = TARGETS.get(self.name)
        return "" if target is None else "met" if target.met(self.measured) else "missed"

    def to_json(self) -> dict[str, Any]:
        """The row and its target as JSON, so that the file can be read alone."""
        target = TARGETS.get(self.name)
        known = {} if target is None else {"target": target.value, "sign": target.sign}
        return {
            "name": self.name,
            "measured": self.measured,
            "unit": self.unit,
            **known,
            "verdict": self.verdict,
        }


@dataclass
class Part:
    """The outcome of one part of the benchmark."""

    rows: list[Row] = field(default_factory=list)
    # every repeat, in seconds, by contender
    times: dict[str, list[float]] = field(default_factory=dict)
    # a second table: column -> value
    contenders: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # further numbers, for the JSON only
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON."""
        return {**vars(self), "rows": [row.to_json() for row in self.rows]}


def show(console: Console, name: str, part: Part, *, quick: bool) -> None:
    """Prints a small table of rows and targets, and one of the contenders if there are any."""
    mark = " (quick: shows that it runs, measures nothing)" if quick else ""
    table = Table(title=f"{name}{mark}", title_justify="left")
    for column in ("row", "measured", "target", "met"):
        table.add_column(column, justify="left" if column == "row" else "right")
    for row in part.rows:
        target = TARGETS.get(row.name)
        style = {"missed": "red", "met": "green"}.get(row.verdict, "")
        table.add_row(row.name, row.text, str(target or ""), row.verdict, style=style)
    console.print(table)
    if part.contenders:
        speeds = Table()
        for column in part.contenders[0]:
            speeds.add_column(column, justify="left" if column == "contender" else "right")
        for contender in part.contenders:
            speeds.add_row(*map(_text, contender.values()))
        console.print(speeds)
    for note in part.notes:
        console.print(note, soft_wrap=True)


def _text(value: object) -> str:
    return "-" if value is None else f"{value:,.1f}" if isinstance(value, float) else str(value)


def save(path: Path, header: dict[str, Any], parts: dict[str, Part]) -> None:
    """Writes all measurements as JSON; raises for a number that is not finite."""
    content = {**header, "parts": {name: part.to_json() for name, part in parts.items()}}
    write_atomically(path, json.dumps(content, indent=1, allow_nan=False).encode())
