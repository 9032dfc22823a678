"""Runs every line of the README and of the docs' first pages.

`test_doc_extras` starts it in an environment without any extra. A line may fail only if it names
the extra that it needs, and then with an error that says how to install that extra.
"""

import json
import re
import sys
from pathlib import Path

import pytest
from doc_blocks import ROOT, SHELL, blocks_of, needed_extra, prose_of
from test_doc_blocks import at_work, shrink, tiny_words, workshop  # noqa: F401

from fedx_pl.cli import main as cli
from fedx_pl.errors import install_hint

FIRST = [
    ROOT / "README.md",
    ROOT / "docs" / "index.md",
    ROOT / "docs" / "tutorials" / "first-federation.md",
]
INLINE = re.compile(r"`(fedx-pl [^`]+)`")


@pytest.mark.parametrize("page", FIRST, ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.usefixtures("at_work")
def test_every_line_runs(
    page: Path,
    tiny_words: list[str],  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    names: dict[str, object] = {"__name__": "__docs__"}
    commands: list[tuple[list[str], str]] = []
    for block in blocks_of(page):
        if block.language == "python" and not block.exempt:
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)
        elif block.language in SHELL and not block.exempt:
            commands += block.commands_with_extras
    for line in prose_of(page).splitlines():
        commands += [
            (found[1].split(), needed_extra(line[found.end() :])) for found in INLINE.finditer(line)
        ]
    for words, extra in commands:
        if (
            words[0] != "fedx-pl" or words[1] == "report"
        ):  # What has no results has nothing to report.
            continue
        capsys.readouterr()
        code = cli.main(small(words[1:], tiny_words))
        error = capsys.readouterr().err
        assert code == (2 if extra else 0), f"{page.name}: {words}: {error}"
        assert not extra or install_hint(extra) in error, f"{page.name}: {words}: {error}"


@pytest.mark.usefixtures("at_work")
def test_every_cell_of_the_notebook_runs() -> None:
    names: dict[str, object] = {"__name__": "__docs__"}
    for cell in json.loads((ROOT / "examples" / "first_federation.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(line for line in cell["source"] if not line.startswith("%")), names)


def test_no_extra_can_be_imported() -> None:
    assert not {"flwr", "ray", "onnx", "pyarrow", "dp_accounting"} & set(sys.modules)
    for name in ("flwr", "ray", "onnx", "pyarrow", "dp_accounting"):
        with pytest.raises(ImportError):
            __import__(name)


def small(arguments: list[str], tiny_words: list[str]) -> list[str]:  # noqa: F811
    """A command whose work takes seconds."""
    words = [word for word in arguments if word != "..."]
    if words[0] == "train" and "--help" not in words:
        folder = []
        if "data=folder" in words:
            folder = [
                "data.image_size=32",
                *(word for word in words if word.startswith("data.root=")),
            ]
        return [
            *words,
            *shrink(words, tiny_words),
            "federation.rounds=1",
            "optim.batch_size=8",
            *folder,
        ]
    if words[0] == "data":
        return [*words, *(word for word in tiny_words if word.startswith("data."))]
    if words[0] == "evaluate":
        return [*words, "evaluation.semi.epochs=1"]
    if words[0] == "sweep":
        return [*words, "--dry-run"]
    if words[:2] == ["federate", "server"] and "--clients" not in words:
        return [*words, "--clients", "1"]
    return words
