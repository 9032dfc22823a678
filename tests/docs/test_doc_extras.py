"""The README and the docs' first pages work after the default install.

Whatever needs an extra says so on the page.
"""

import configparser
import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
from doc_blocks import ROOT
from packaging.requirements import Requirement

# A sitecustomize module: child processes read it, too, since its folder is on PYTHONPATH.
HOOK = """
import importlib.machinery, sys
REFUSED = frozenset({refused})
class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] in REFUSED:
            return None
        return super().find_spec(fullname, path, target)
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder
"""


def normal(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(requirements: list[str]) -> set[str]:
    """The distributions that requirements bring with them, as far as they are installed."""
    found: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    left = [Requirement(text) for text in requirements]
    while left:
        requirement = left.pop()
        name, extras = normal(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            needed = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        found.add(name)
        for text in needed:
            other = Requirement(text)
            if other.marker is None or any(
                other.marker.evaluate({"extra": extra}) for extra in ("", *extras)
            ):
                left.append(other)
    return found


def modules_of_extras(*installed: str) -> set[str]:
    """Top-level modules that come only with extras other than the installed ones.

    Modules that the test itself needs are left out.
    """
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = {
        extra: lines.split("\n")[1:] for extra, lines in setup["options.extras_require"].items()
    }
    kept = closure(
        [
            *setup["options"]["install_requires"].split("\n")[1:],
            *(line for extra in installed for line in extras[extra]),
            "pytest",
            "hypothesis",
            "setuptools",
            "pip",
        ]
    )
    refused = closure([line for lines in extras.values() for line in lines]) - kept
    owners = packages_distributions().items()
    return {module for module, names in owners if {normal(name) for name in names} <= refused}


def environment_without(modules: set[str], folder: Path) -> dict[str, str]:
    """Environment variables with which Python and its children cannot import some modules."""
    (folder / "sitecustomize.py").write_text(HOOK.format(refused=json.dumps(sorted(modules))))
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path}


def test_modules_that_come_only_with_extras() -> None:
    refused = modules_of_extras()
    assert not {"numpy", "torch", "pandas", "pytest", "rich", "fedx_pl", "packaging"} & refused
    for module in ("flwr", "ray", "onnx", "onnxscript", "pyarrow", "dp_accounting", "mkdocs"):
        assert module in refused or module not in packages_distributions()
    assert "mkdocs" not in modules_of_extras("docs")
    assert {"mypy", "flwr"} & modules_of_extras("docs")


@pytest.mark.slow
def test_the_first_pages_run_without_extras(tmp_path: Path) -> None:
    environment = environment_without(modules_of_extras(), tmp_path)
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        f"--basetemp={tmp_path / 'base'}",
    ]
    done = subprocess.run(
        [*command, str(ROOT / "tests" / "docs" / "first_pages.py")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    if done.returncode:
        pytest.fail(done.stdout[-6000:] + done.stderr[-2000:])
