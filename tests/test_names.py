"""Text from outside: names stay readable and distinct, and no terminal code is executed."""

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from fedx_pl.callbacks import progress
from fedx_pl.cli import main as cli
from fedx_pl.errors import for_terminal, readable


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plain name (1).png", "plain name (1).png"),
        ("日本 é \N{SNOWMAN}", "日本 é \N{SNOWMAN}"),
        ("back\\slash", "back\\slash"),
        ("caf\udce9", "caf\\xe9"),
        ("caf\\xe9", "caf\\\\xe9"),
        ("a\nb\x1b[2J\x9b", "a\\x0ab\\x1b[2J\\u009b"),
        ("gnp\u202eexe.", "gnp\\u202eexe."),
    ],
)
def test_names_are_readable(name: str, text: str) -> None:
    assert readable(name) == text


@given(*[st.text(st.sampled_from("\\xue908" + "\udc80\udce9\x1b\x08\x80\u202e"), max_size=8)] * 2)
def test_different_names_stay_different(first: str, second: str) -> None:
    readable(first).encode()
    assert (readable(first) == readable(second)) == (first == second)


def test_lines_stay_lines() -> None:
    assert for_terminal("one\n\ttwo\x1b]0;title\x07\r") == "one\n\ttwo\\x1b]0;title\\x07\\x0d"


def test_the_console_escapes_terminal_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    console = progress.make_console()
    console.file = io.StringIO()
    table = Table("name\x1b[31m", title="of\x1b[32m")
    table.add_row("cell\x1b[33m")
    console.print("line\x1b[2J", soft_wrap=True)
    console.print(table)
    with progress.grouped_warnings(console):
        import warnings

        warnings.warn("a warning\x1b[2J", stacklevel=1)
    shown = console.file.getvalue()
    assert "\x1b" not in shown
    assert shown.count("\\x1b") == 5


def test_errors_escape_terminal_codes_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["evaluate", str(tmp_path / "no\udce9where")]) == 2
    assert "no\\xe9where" in capsys.readouterr().err
    assert cli.main(["train", "run.dir=\x1b[2Jx"]) == 2
    error = capsys.readouterr().err
    assert "\x1b" not in error
    assert "holds a character that cannot be printed" in error
