"""Hooks for what mkdocs cannot do by itself.

- `on_files` adds pages that would go stale if they were written by hand: all configuration keys,
  all commands, and the Markdown files beside what they describe (experiments, benchmarks).
- `on_page_markdown` replaces a paragraph that is only a link to an object, such as
  ``[`fedx_pl.losses.relational`](FILE)``, by the source of that object. It also corrects links that
  lead out of docs/.
- `on_page_content` turns LaTeX into MathML, which browsers draw without a script.
"""

import ast
import contextlib
import html
import importlib
import inspect
import io
import os
import re
import textwrap
from pathlib import Path, PurePosixPath
from typing import Any

import click
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from fedx_pl import methods
from fedx_pl.cli import main as cli
from fedx_pl.cli.commands import fedx_pl
from fedx_pl.config import compose as config
from fedx_pl.config.schema import Config, all_keys
from fedx_pl.methods.parameters import hyper_parameters
from fedx_pl.printing import setting

ROOT = Path(__file__).parents[1]
REPORT = "experiments/results/mini"

# Files outside docs/ that are pages of the site: by the page's place in it.
INCLUDED = {
    "evidence/results.md": "experiments/README.md",
    "evidence/report.md": f"{REPORT}/report.md",
    "evidence/benchmarks.md": "benchmarks/README.md",
} | {
    f"evidence/figures/{file.name}": f"{REPORT}/figures/{file.name}"
    for file in (ROOT / REPORT).glob("figures/*.png")
}

_SOURCE = re.compile(r"^\[`(fedx_pl[\w.]+)`\]\((\S+\.py)\)$", re.MULTILINE)
_LINK = re.compile(
    r"(?P<image>!?)\[(?P<text>[^\]\n]*)\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)"
)
_MATH = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated and included pages."""
    for place, origin in INCLUDED.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / origin)))
    files.append(File.generated(config, "reference/configuration.md", content=configuration_page()))
    files.append(File.generated(config, "reference/cli.md", content=cli_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Puts code into the page and corrects its links."""
    place = page.file.src_uri
    origin = PurePosixPath(INCLUDED.get(place, f"docs/{place}"))
    markdown = _SOURCE.sub(lambda found: source_block(found[1], found[2]), markdown)
    # GitHub reads Markdown inside <details> without being told to.
    markdown = markdown.replace("<details>", '<details markdown="1">')
    return _LINK.sub(lambda found: _mended(found, origin, PurePosixPath(place)), markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Draws the equations."""
    return _MATH.sub(_mathml, html)


def source_block(name: str, file: str) -> str:
    """The code of an object without its docstring, as a block with the file's name above it.

    Args:
        name: dotted path of the object, e.g. ``fedx_pl.mixins.fedx.FedXMixin.loss``.
        file: the file that the page names; it is an error if the object is in another one.
    """
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        with contextlib.suppress(ImportError):
            found: Any = importlib.import_module(".".join(parts[:end]))
            break
    try:
        for part in parts[end:]:
            found = getattr(found, part)
    except AttributeError as error:
        raise PluginError(f"there is no {name} to show: {error}") from error
    found = inspect.unwrap(found)
    path = Path(inspect.getsourcefile(found) or "").resolve()
    title = file.lstrip("./")
    if not path.as_posix().endswith(title.removeprefix("src")):
        raise PluginError(f"{name} is in {path}, not in {file}")
    code = _without_docstring(textwrap.dedent(inspect.getsource(found)))
    return f'```python title="{title}"\n{code}\n```'


def _without_docstring(code: str) -> str:
    """Removes the docstring, since the page explains the code in its own words."""
    definition = ast.parse(code).body[0]
    lines = code.rstrip().splitlines()
    if ast.get_docstring(definition) is not None:  # type: ignore[arg-type]
        first = definition.body[0]  # type: ignore[attr-defined]
        del lines[first.lineno - 1 : first.end_lineno]
    return "\n".join(lines)


def _mended(link: re.Match[str], origin: PurePosixPath, place: PurePosixPath) -> str:
    """A link as it must be on the site.

    It leads to a page. A file that is only in the repository is named by its path instead.
    """
    target = link["target"]
    if "://" in target or target.startswith("mailto:"):
        return link[0]
    path = PurePosixPath(os.path.normpath(origin.parent / target))
    inside = {source: page for page, source in INCLUDED.items()} | {"README.md": "index.md"}
    to = str(path.relative_to("docs")) if path.is_relative_to("docs") else inside.get(str(path))
    if to is not None:
        relative = os.path.relpath(to, place.parent)
        return f"{link['image']}[{link['text']}]({relative}{link['anchor'] or ''})"
    if not (ROOT / path).exists():
        return link[0]  # Stale: mkdocs says so.
    plain = link["text"].strip("`*")
    return f"`{path}`" if str(path).endswith(plain) else f"{link['text']} (`{path}`)"


def _mathml(found: re.Match[str]) -> str:
    display = "block" if found[1] == "div" else "inline"
    return convert(html.unescape(found[2]).strip(), display=display)


# --- generated pages ------------------------------------------------------------------------------


def configuration_page() -> str:
    """A page with all groups, choices and keys of the schema."""
    lines = [
        "# Configuration",
        "",
        "This page is generated from the schema. `fedx-pl train --help` prints the same keys.",
        "An override is `group=choice` or `key=value`.",
        "Choices are applied first, in the order data, recipe, profile; then each key.",
        "An unknown key, an unknown choice or a wrong type is an error that names the nearest",
        "valid one. Defaults are the paper's.",
        "",
        "A key ends at the first `=`. Its value is taken literally: `${seed}` is text and never",
        "refers to another key or to the environment. Only lists in brackets are read as YAML.",
        "Numbers are finite and at most 1,000,000,000. They are not negative unless that has a",
        "meaning. Only `health.max_growth` and `aggregate.max_growth` can be `inf`.",
        "`name` is the name of one folder.",
        "",
        "## Choices",
        "",
        f"`method=` is {_words(config.choices('method'))} or your own `package.module:Class`.",
        "The keys of methods are [below](#methods).",
        "",
        "The other choices are files that only change defaults:",
        "",
    ]
    for group in config.FILE_GROUPS:
        files = {
            choice: config.CONFIGS / group / f"{choice}.yaml" for choice in config.choices(group)
        }
        plain = [choice for choice, file in files.items() if not file.exists()]
        lines += [f"### {group}=", ""]
        if plain:
            lines += [
                f"{_words(plain)} set only their mean and standard deviation.",
                "",
            ]
        for choice, file in files.items():
            if choice not in plain:
                lines += [f'```yaml title="{group}={choice}"', file.read_text().rstrip(), "```", ""]
    lines += [
        "`profile=auto` is the default: `paper` with a GPU and `cpu` without.",
        "`experiment=DATA-METHOD[-fedx]` is short for `data=DATA method=METHOD fedx=true|false`.",
        "",
        "## Keys",
        "",
    ]
    tables: dict[str, list[tuple[str, Any, str]]] = {}
    for key, default, text in all_keys():
        tables.setdefault(key.rpartition(".")[0], []).append((key, default, text))
    for group, rows in tables.items():
        lines += [
            f"### {group or 'the run'}",
            "",
            *([_purpose(group), ""] if group else []),
            *_table(rows),
            "",
        ]
    lines += ["## Methods", ""]
    for name, method in methods.BUILT_IN.items():
        keys = hyper_parameters(method).items()
        lines += [
            f"### method={name}",
            "",
            inspect.cleandoc(method.__doc__ or "").partition("\n")[0],
            "",
        ]
        lines += [
            *_table([(f"method.{key}", default, text) for key, (_, default, text) in keys]),
            "",
        ]
    return "\n".join(lines)


def cli_page() -> str:
    """A page with the help of every command."""
    lines = [
        "# Command line",
        "",
        "This page is generated from the commands. `fedx-pl COMMAND --help` prints the same.",
        "Keys are on the page [Configuration](configuration.md).",
        "",
        *_help_sections(fedx_pl, []),
    ]
    return "\n".join(lines)


def _help_sections(command: click.Command, words: list[str]) -> list[str]:
    text = _help(words)
    text = text.partition("\ngroups (group=choice):")[0].rstrip()  # They have a page of their own.
    lines = [
        f"{'#' * min(len(words) + 2, 3)} `{' '.join(['fedx-pl', *words])}`",
        "",
        "```text",
        text,
        "```",
        "",
    ]
    below = command.commands if isinstance(command, click.Group) else {}
    for name, child in below.items():
        lines += _help_sections(child, [*words, name])
    return lines


def _help(words: list[str]) -> str:
    printed = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"  # As wide as a page, whatever the terminal of the build.
    try:
        with contextlib.redirect_stdout(printed):
            cli.main([*words, "--help"])
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return printed.getvalue()


def _purpose(group: str) -> str:
    """The first line of the docstring of a group's options."""
    options: Any = Config()
    for part in group.split("."):
        options = getattr(options, part)
    return inspect.cleandoc(type(options).__doc__ or "").partition("\n")[0]


def _table(rows: list[tuple[str, Any, str]]) -> list[str]:
    return [
        "| key and default | meaning |",
        "|---|---|",
        *(
            f"| `{key}={_value(default)}` | {text.replace('|', '&#124;')} |"
            for key, default, text in rows
        ),
    ]


def _value(default: Any) -> str:
    return setting(default)


def _words(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
