"""Every block of code in README.md and docs/ runs, or is accepted by the program.

Python blocks of a page run in order, in one namespace and in one folder. Federations are made
small by extra overrides and a tiny CIFAR-10. Commands are read by the real parser and their
overrides are composed; in tutorials they are run as well.
"""

import configparser
import importlib
import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest
from doc_blocks import PAGES, ROOT, SHELL, blocks_of, prose_of
from helpers import THREADS
from PIL import Image
from pytorch_lightning.loggers.logger import DummyLogger
from safetensors.torch import save_file

from fedx_pl import FederatedTrainer, RoundCallback, api, backbones, methods
from fedx_pl.cli import main as cli
from fedx_pl.cli.commands import fedx_pl
from fedx_pl.config import registry
from fedx_pl.config.compose import compose
from fedx_pl.config.schema import Config, all_keys
from fedx_pl.data import sources
from fedx_pl.data.images import DataOptions, ImageData
from fedx_pl.errors import UserError
from fedx_pl.evaluation import EVALUATIONS
from fedx_pl.federation.privacy import PrivacyOptions
from fedx_pl.methods.parameters import hyper_parameters

pytestmark = pytest.mark.xdist_group("docs")
# Commands of these programs are not checked.
OTHER_PROGRAMS = ("cd", "export", "git", "python", "python3", "ray")


@pytest.fixture(scope="module")
def tiny_words(tiny_root: Path) -> list[str]:
    """Overrides that make any federation run in seconds."""
    return [
        f"data.root={tiny_root}",
        "data.verify=false",
        "data.download=false",
        "backbone.name=resnet10",
        "backbone.width=4",
        "federation.clients=3",
        "evaluation.linear.epochs=5",
        f"run.threads={THREADS}",
    ]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory, tiny_words: list[str]) -> Path:
    """A folder with the files that pages mention.

    These are ``runs/NAME``, ``images/``, ``query.jpg``, experiments and a method.
    """
    folder = tmp_path_factory.mktemp("workshop")
    words = [
        "train",
        "method=byol",
        "fedx=true",
        *tiny_words,
        "federation.rounds=1",
        "federation.epochs=1",
    ]
    assert cli.main([*words, f"run.dir={folder / 'runs' / 'NAME'}"]) == 0
    (folder / "runs" / "...").mkdir()
    paper = backbones.build(Config().backbone, channels=3, image_size=32)
    save_file(paper.state_dict(), folder / "runs" / "..." / "encoder.safetensors")
    rng = np.random.default_rng(0)
    names = [f"images/site/{number}.png" for number in range(24)]
    for name in ("query.jpg", "images/a.jpg", *names):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        Image.fromarray(rng.integers(0, 256, (40, 48, 3), dtype=np.uint8)).save(folder / name)
    shutil.copytree(
        ROOT / "experiments", folder / "experiments", ignore=shutil.ignore_patterns("results")
    )
    (folder / "my_module.py").write_text(
        "from fedx_pl import FedXMixin\nfrom fedx_pl.methods import SimCLR\n"
        "class MySSL(SimCLR): pass\nclass MyFedX(FedXMixin, MySSL): pass\n"
    )
    return folder


@pytest.fixture
def at_work(
    workshop: Path, tiny_root: Path, tiny_words: list[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Runs a test in the workshop, with small federations.

    Modules that pages wrote are removed from ``sys.modules`` afterwards.
    """
    load = sources.load

    def shrunk(words: list[str]) -> Config:
        return compose([*words, *shrink(words, tiny_words)])

    def load_tiny(options: DataOptions, *arguments: Any, **others: Any) -> ImageData:
        if options.name == "cifar10":  # Pages give no root, or a reader's.
            options = replace(options, root=str(tiny_root), verify=False, download=False)
        return load(options, *arguments, **others)

    monkeypatch.chdir(workshop)
    monkeypatch.syspath_prepend(str(workshop))
    monkeypatch.setattr(api, "compose", shrunk)
    monkeypatch.setattr(sources, "load", load_tiny)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(workshop) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def shrink(words: list[str], tiny_words: list[str]) -> list[str]:
    """Overrides that make a run tiny but keep its number of rounds."""
    says = any(word.startswith("federation.rounds=") for word in words)
    return [*tiny_words, *([] if says else ["federation.rounds=2"])]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.usefixtures("at_work")
def test_the_blocks_of_a_page_work_in_order(page: Path, tiny_words: list[str]) -> None:
    tutorial = page.parent.name == "tutorials"
    names: dict[str, object] = {"__name__": "__docs__"}
    for block in blocks_of(page):
        if block.title and block.language != "text":
            Path(block.title).parent.mkdir(exist_ok=True, parents=True)
            Path(block.title).write_text(block.text)
        if block.exempt:
            continue
        if block.language == "python":
            # Line numbers in a traceback are then the page's.
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)
        elif block.language in SHELL:
            for words in block.commands:
                check_command(words, tiny_words if tutorial else None, str(block))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.usefixtures("at_work")
def test_commands_in_the_text_are_accepted(page: Path) -> None:
    for command in re.findall(r"`((?:fedx-pl|make) [^`]+)`", prose_of(page)):
        check_command(command.split(), None, f"{page.relative_to(ROOT)}: {command}")


def check_command(words: list[str], tiny_words: list[str] | None, where: str) -> None:
    """Fails if a command would be refused; with ``tiny_words``, runs it as well."""
    program, *arguments = words
    if program.endswith("python") and arguments[:1] == ["-m"]:
        program, arguments = arguments[1], arguments[2:]
    if program == "fedx-pl":
        check_fedx_pl(arguments, tiny_words, where)
    elif program == "make":
        check_make(arguments, where)
    elif program == "pip":
        check_pip(arguments, where)
    elif program == "pytest":
        assert (ROOT / arguments[0]).exists(), where
    elif program.partition(".")[0] == "benchmarks":
        file = ROOT / program.replace(".", "/")
        assert file.with_suffix(".py").exists() or (file / "__main__.py").exists(), where
    elif program == "pre_commit":
        assert (ROOT / ".pre-commit-config.yaml").exists(), where
    else:
        assert program in OTHER_PROGRAMS, f"{where}: is {program} a command? Nothing here checks it"


def check_fedx_pl(arguments: list[str], tiny_words: list[str] | None, where: str) -> None:
    arguments = [
        word if "=[" in word else word.strip("[]")
        for word in arguments
        if word not in ("...", "[...]")
    ]
    if arguments[-1] == "COMMAND" or len(arguments) == 1:
        arguments = [*arguments[:1], "--help"]
    command = arguments[0]
    if "--help" in arguments:
        # A class of a page is not imported here: the page's blocks do so.
        assert cli.main([word for word in arguments if ":" not in word]) == 0, where
        return
    options = parse(arguments, where)
    overrides = [
        word for word in options.overrides if "=" in word and not word.startswith("allow_code=")
    ]
    if command in ("export", "embed", "neighbors") and options.run.exists():
        assert cli.main(arguments) == 0, where
    elif command == "sweep":
        assert cli.main([*arguments, *([] if options.dry_run else ["--dry-run"])]) == 0, where
    elif command == "evaluate":
        kinds = {word for word in options.overrides if "=" not in word}
        assert kinds <= set(EVALUATIONS), f"{where}: {kinds}"
        compose(overrides)
    elif command == "data":
        compose([f"data={options.name}", *overrides])
    elif command in ("train", "federate"):
        compose(overrides)
    if command == "train" and re.search(r" data=\w+:", " ".join(arguments)):
        # Images that the page draws itself: few enough to train on as they are.
        assert cli.main([*arguments, f"run.threads={THREADS}"]) == 0, where
    elif tiny_words and command in ("train", "data"):
        more = [word for word in tiny_words if command == "train" or word.startswith("data.")]
        more = more if command == "data" else shrink(overrides, more)
        assert cli.main([*arguments, *more]) == 0, where


def parse(arguments: list[str], where: str) -> SimpleNamespace:
    """The options that a command would get."""
    command: click.Command = fedx_pl
    try:
        while isinstance(command, click.Group):
            name, command, arguments = command.resolve_command(click.Context(command), arguments)
        context = command.make_context(name, list(arguments))
    except click.UsageError as error:
        pytest.fail(f"{where}: {error.format_message()}")
    return SimpleNamespace(**({"overrides": ()} | context.params))


def check_make(arguments: list[str], where: str) -> None:
    if shutil.which("make") is None:
        pytest.skip("needs make: apt-get install make")
    optional = re.sub(
        r"\[[^\]]*\]|'[^']*\]", "", " ".join(arguments)
    ).split()  # [-fedx], [PROFILE=...]
    targets = [target for word in optional if "=" not in word for target in expand(word)]
    if any(target.isupper() or "DATA" in target or target == "NAME" for target in targets):
        return  # make DATA-METHOD: a pattern
    values = [word for word in optional if "=" in word]
    command = [
        "make",
        "-n",
        "-o",
        ".venv/installed",
        "-o",
        ".venv/installed-dev",
        "-o",
        ".venv/installed-docs",
        *targets,
        *values,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{where}: {done.stderr}"


def expand(word: str) -> list[str]:
    """``{a,b}-{c,d}`` -> a-c, a-d, b-c, b-d."""
    parts = [part.split(",") for part in re.findall(r"\{([^}]*)\}", word)]
    return [
        re.sub(r"\{[^}]*\}", "{}", word).format(*choice) for choice in itertools.product(*parts)
    ]


def check_pip(arguments: list[str], where: str) -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    for extras in re.findall(r"(?:fedx-pl|\.|\.whl)\[([\w,]+)\]", " ".join(arguments)):
        unknown = set(extras.split(",")) - set(setup["options.extras_require"])
        assert not unknown, f"{where}: setup.cfg has no extra {unknown}"


def test_keys_that_the_text_names_exist() -> None:
    known = {key for key, _, _ in all_keys()}
    known |= {
        f"method.{key}" for method in methods.BUILT_IN.values() for key in hyper_parameters(method)
    }
    groups = {key.partition(".")[0] for key in known if "." in key}
    shown = re.compile(rf"`((?:{'|'.join(groups)})\.[a-z_.]+)(?:=[^`]*)?`")
    for page in PAGES:
        code = "\n".join(block.text for block in blocks_of(page) if block.language == "python")
        for key in shown.findall(prose_of(page)):
            if key.endswith((".md", ".py", ".yaml", ".json", ".sh")):
                continue
            group = any(name.startswith(f"{key.rstrip('.')}.") for name in known)
            own = f"{key.rpartition('.')[2]}: " in code  # of a part that the page writes
            assert key in known or group or own, (
                f"{page.relative_to(ROOT)} speaks of {key}, which is no key"
            )


def test_few_blocks_are_exempt_and_each_says_why() -> None:
    exempt = [block for page in PAGES for block in blocks_of(page) if block.exempt]
    assert len(exempt) <= 3, [str(block) for block in exempt]
    marks = sum(
        page.read_text().count("<!-- not run") for page in PAGES if page.name != "contributing.md"
    )
    assert marks == len(exempt), "a mark that is not right above a block, or that gives no reason"


def test_blocks_are_found_in_both_styles(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Text:\n\n    fedx-pl data cifar10   # comment\n\n- item\n\n    of the item\n\n"
        '```python title="a.py"\nx = 1\n```\n\n<!-- not run: because -->\n\n    from a import b\n\n'
        "```console\n$ make test\nok\n```\n"
    )
    found = blocks_of(page)
    assert [(b.language, b.title, b.exempt, b.line) for b in found] == [
        ("bash", "", "", 3),
        ("python", "a.py", "", 10),
        ("python", "", "because", 15),
        ("console", "", "", 18),
    ]
    assert found[0].commands == [["fedx-pl", "data", "cifar10"]]
    assert found[3].commands == [["make", "test"]]


@pytest.mark.parametrize(
    "words",
    [
        "fedx-pl train federation.round=3",
        "fedx-pl train --dryrun",
        "fedx-pl evaluate runs/NAME lineer",
        "fedx-pl sweep tabel1",
        "make cifar10-bioll",
        "make {cifar10,svnh}-byol",
        "pip install -e .[rays]",
        "pip install fedx_pl-0.1.0-py3-none-any.whl[flowers]",
        "fedx train",
    ],
)
@pytest.mark.usefixtures("at_work")
def test_stale_commands_are_noticed(words: str) -> None:
    """Each is a mistake that a page could make after the program has changed."""
    with pytest.raises((AssertionError, SystemExit, UserError, pytest.fail.Exception)):
        check_command(words.split(), None, "here")


def test_the_collector_sees_the_pages() -> None:
    """A change of style that hides all blocks from these tests would otherwise pass them."""
    run = [
        block for page in PAGES for block in blocks_of(page) if block.language in ("python", *SHELL)
    ]
    assert len(run) > 30
    assert {"README.md", "first-federation.md", "data.md", "scale.md"} <= {
        block.page.name for block in run
    }


def test_every_kind_of_part_has_its_row_and_its_example() -> None:
    page = (ROOT / "docs" / "how-to" / "extend-it.md").read_text()
    rows = re.findall(r"^\| .* \| `(\w+)` in `([\w/]+)\.py` \|$", page, re.MULTILINE)
    named = []
    for name, path in rows:
        module = path.removesuffix("/__init__").replace("/", ".")
        found = getattr(importlib.import_module(f"fedx_pl.{module}"), name)
        named.append(found.built_in if isinstance(found, registry.Kind) else found)
    command = page.partition("## Use them")[2].partition("```bash")[2].partition("```")[0]
    for kind in registry.KINDS:
        assert any(built_in is kind.built_in for built_in in named), kind.key
        assert f"`fedx_pl.{kind.group}`" in page
        key = "evaluation.also" if kind is registry.EVALUATION else kind.key.partition(".")[0]
        assert re.search(rf"\b{key}=\[?my_parts:", command), key


def test_the_page_has_the_callbacks_in_their_order() -> None:
    trainer = FederatedTrainer(
        callbacks=[RoundCallback()],
        logger=[DummyLogger(), True],
        max_time="00:01:00:00",
        privacy=PrivacyOptions(clip=1.0, noise=1.0),
    )
    order = [type(callback).__module__.rpartition(".")[2] for callback in trainer.callbacks]
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(
        r"^\|.*", page.partition("## The order of callbacks")[2].partition("## ")[0], re.MULTILINE
    )[2:]
    measuring, own, showing = (re.findall(r"`(\w+)\.py`", row) for row in rows)
    assert not own
    assert [*measuring, "base", *showing] == order
