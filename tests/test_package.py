"""The installed package: public names, metadata, and a wheel that works outside the checkout."""

import configparser
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml
from helpers import PATIENCE, THREADS
from PIL import Image

import fedx_pl

ROOT = Path(__file__).parents[1]
PARTS = (
    "src",
    "configs",
    "experiments",
    "setup.cfg",
    "pyproject.toml",
    "Makefile",
    "README.md",
    "LICENSE",
)
HINT = "from fedx_pl.errors import install_hint; print(install_hint('flower'))"


def test_every_public_name_can_be_imported() -> None:
    for name in fedx_pl.__all__:
        assert getattr(fedx_pl, name).__name__ == name
        assert name in dir(fedx_pl)
    with pytest.raises(AttributeError, match="no attribute 'FedY'"):
        fedx_pl.FedY  # noqa: B018


def test_the_public_names_import_little_beside_torch_and_lightning() -> None:
    script = """import sys, torch, pytorch_lightning
before = set(sys.modules)
from fedx_pl import FedXMixin, SSLMethod
print(*{name.partition(".")[0] for name in set(sys.modules) - before})"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    slow = {
        "matplotlib",
        "scipy",
        "pandas",
        "omegaconf",
        "rich",
        "tensorboard",
        "flwr",
        "ray",
        "torchvision",
    }
    assert not slow & set(done.stdout.split())


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == fedx_pl.__version__
    assert f"## [{fedx_pl.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert citation["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert any(
        one.get("value") == "2207.09158" for one in citation["preferred-citation"]["identifiers"]
    )


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ACTION = re.compile(r"(actions|pypa)/[a-z-]+@(v\d+|release/v\d+)")
INDEX_TOKEN = {"id-token": "write"}


def jobs_of(workflow: Path) -> dict[str, dict[str, Any]]:
    return yaml.safe_load(workflow.read_text())["jobs"]


def steps_of(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in jobs_of(workflow).values() for step in job.get("steps", [])]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_only_read_and_pins_its_actions(workflow: Path) -> None:
    assert yaml.safe_load(workflow.read_text())["permissions"] == {"contents": "read"}
    for name, job in jobs_of(workflow).items():
        assert job.get("permissions") == (INDEX_TOKEN if name == "publish" else None)
        assert "uses" in job or job["timeout-minutes"] <= 120
    for step in steps_of(workflow):
        assert "run" in step or ACTION.fullmatch(step["uses"]), step
        if step.get("uses", "").startswith("actions/setup-python"):
            assert step["with"]["cache"] == "pip"
            assert (ROOT / step["with"]["cache-dependency-path"]).exists()


def test_workflows_run_make_targets_that_exist() -> None:
    if shutil.which("make") is None:
        pytest.skip("needs make: apt-get install make")
    runs = [step["run"] for workflow in WORKFLOWS for step in steps_of(workflow) if "run" in step]
    targets = {
        target for line in runs for target in re.findall(r"\bmake (?:--\w+ )*([a-z-]+)", line)
    }
    assert targets == {"lint", "test-fast", "test-slow", "docs", "dist", "version"}
    assert all("make " in line for line in runs)
    for target in sorted(targets):
        command = ["make", "--dry-run", "PYTHON=python", target]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=PATIENCE)
    version = subprocess.run(
        ["make", "--silent", "version"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert version.stdout == f"{fedx_pl.__version__}\n"


def test_ci_tests_the_versions_of_python_that_are_supported() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    tried = jobs_of(ROOT / ".github/workflows/ci.yml")["test"]["strategy"]["matrix"]["python"]
    claimed = re.findall(r"Python :: (3\.\d+)", setup["metadata"]["classifiers"])
    assert set(claimed) <= set(tried)
    assert setup["options"]["python_requires"] == f">={tried[0]}"


def test_a_release_is_tested_and_published_without_a_stored_token() -> None:
    jobs = jobs_of(ROOT / ".github/workflows/release.yml")
    assert jobs["test"]["uses"] == "./.github/workflows/ci.yml"
    assert jobs["publish"]["needs"] == ["test", "build"]
    assert jobs["publish"]["environment"] == "pypi"
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text()


def test_hooks_of_pre_commit_are_programs_that_the_dev_extra_brings() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    makefile = (ROOT / "Makefile").read_text()
    for hook in hooks:
        program = hook["entry"].split()[0]
        assert program.replace(".venv/bin", "$(BIN)") in makefile
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert "pre-commit" in setup["options.extras_require"]["dev"]


def test_templates_and_the_security_policy_name_files_that_exist() -> None:
    pages = [ROOT / "SECURITY.md", *(ROOT / ".github").rglob("*.md")]
    assert len(pages) == 5
    for page in pages:
        for name in re.findall(r"`((?:docs|tests)/[\w./-]+|[A-Z]+\.md)`", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_the_changelog_says_where_a_renamed_python_name_is_now() -> None:
    table = (ROOT / "CHANGELOG.md").read_text().partition("### Renamed")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| `(.+?)` \| `(.+?)` \|$", table, re.MULTILINE)
    names = [(old, new) for old, new in rows if new.startswith("fedx_pl.")]
    assert len(names) > 10
    for old, new in names:
        assert pkgutil.resolve_name(new) is not None
        with pytest.raises((ImportError, AttributeError)):
            resolve_function_or_class(old)


def resolve_function_or_class(name: str) -> object:
    """The object of a name; not a module that replaced an earlier function or class."""
    thing = pkgutil.resolve_name(name)
    if isinstance(thing, ModuleType):
        raise AttributeError(name)
    return thing


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`make wheel` in a copy of the checkout, with this environment instead of one of its own."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    tree = tmp_path_factory.mktemp("tree")
    for name in PARTS:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("*.egg-info", "__pycache__")
            shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, tree)
    stale = tree / "build" / "lib" / "fedx_pl" / "stale.py"  # An older build must not get into it.
    stale.parent.mkdir(parents=True)
    stale.touch()
    command = ["make", "wheel", f"BIN={Path(sys.executable).parent}", "-o", ".venv/bin/python"]
    environment = os.environ | {
        "PIP_NO_BUILD_ISOLATION": "false"
    }  # pip's way to say: without, hence without network
    subprocess.run(command, cwd=tree, env=environment, check=True, timeout=PATIENCE)
    return next((tree / "dist").glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command `fedx-pl` of a new environment that borrows what the wheel depends on."""
    home = tmp_path_factory.mktemp("environment")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(home)], check=True, timeout=PATIENCE
    )
    python = home / "bin" / "python"
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip()
    # A path in a .pth file makes installed packages importable, but not this checkout: .pth files
    # found there are not processed.
    (Path(own) / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*command, "--ignore-installed", str(wheel)], check=True, timeout=PATIENCE)
    return home / "bin" / "fedx-pl"


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.mark.slow
def test_a_wheel_has_all_files_and_no_others(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {path.relative_to(ROOT / "src") for path in (ROOT / "src" / "fedx_pl").rglob("*.py")}
    data = set()
    for folder, home in (
        (ROOT / "configs", "config/files"),
        (ROOT / "experiments", "experiments/definitions"),
    ):
        files = [*folder.rglob("*.yaml")] if folder.name == "configs" else [*folder.glob("*.yaml")]
        data |= {Path("fedx_pl") / home / path.relative_to(folder) for path in files}
    tables = Path("fedx_pl/experiments/definitions/paper/tables.yaml")
    templates = (ROOT / "src" / "fedx_pl" / "experiments" / "templates").iterdir()
    data |= {path.relative_to(ROOT / "src") for path in templates}
    expected = {*modules, *data, tables, Path("fedx_pl/py.typed")}
    packed = {Path(name) for name in names if ".dist-info/" not in name}
    assert packed == expected
    assert f"fedx_pl-{fedx_pl.__version__}.dist-info/licenses/LICENSE" in names


@pytest.mark.slow
def test_the_installed_command_trains_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    for i in range(12):
        pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{i}.png")
    shown = run(installed, "--version", cwd=tmp_path)
    assert shown.stdout.startswith(f"fedx-pl {fedx_pl.__version__}, Python 3.")
    words = [
        "data=folder",
        "data.root=images",
        "data.image_size=32",
        "method=byol",
        "fedx=true",
        "profile=cpu",
        "backbone.width=4",
        "federation.clients=2",
        "federation.rounds=1",
        "federation.epochs=1",
        "optim.batch_size=4",
        f"run.threads={THREADS}",
        "run.dir=run",
    ]
    trained = run(installed, "train", *words, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert (tmp_path / "run" / "encoder.safetensors").exists()
    # The other commands in one process, which imports torch once.
    script = f"""import fedx_pl
from fedx_pl.cli.main import main
print(fedx_pl.__file__)
assert main(["train", *{[*words, "run.dir=other"]}, "--dry-run"]) == 0
assert main(["sweep", "relation", "profile=mini", "--dry-run"]) == 0
assert main(["sweep"]) == 2
assert main(["report"]) == 2"""
    hint = run(installed.with_name("python"), "-c", HINT, cwd=tmp_path)
    assert hint.stdout == f"{installed.with_name('python')} -m pip install 'flwr<1.42,>=1.41'\n"
    others = run(installed.with_name("python"), "-c", script, cwd=tmp_path)
    assert others.returncode == 0, others.stderr
    assert others.stdout.startswith(f"{installed.parents[1]}{os.sep}")
    assert "the run folder would be other" in others.stdout
    assert "fedx-pl train profile=mini seed=0 " in others.stdout
    assert "fedx-pl sweep NAME, one or more of ablation, " in others.stderr
    assert "has no results; type fedx-pl sweep table1 profile=mini to make some" in others.stderr
    assert not any((tmp_path / name).exists() for name in ("other", "experiments"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "None")],
)
def test_threads_spin_only_briefly_unless_set_otherwise(
    given: dict[str, str], expected: str
) -> None:
    """It must be set before torch is imported; importing the package does not import torch."""
    code = (
        "import fedx_pl, os, sys; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    )
    unset = {
        key: value
        for key, value in os.environ.items()
        if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    found = subprocess.run(
        [sys.executable, "-c", code], env=unset | given, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == [expected, "False"]
