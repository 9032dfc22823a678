"""An edit while Python runs: it has the old code, and the file has the new one."""

import importlib
import sys
from pathlib import Path

import pytest
from helpers import METHOD, forget_modules, notebook, write_modules

from fedx_pl import SSLMethod
from fedx_pl.config import registry
from fedx_pl.errors import UserError
from fedx_pl.provenance import loaded_code
from fedx_pl.provenance.foreign_code import code_of
from fedx_pl.provenance.loaded_code import require_current


def load(name: str) -> type[SSLMethod]:
    return registry.find(registry.METHOD, f"{name}:Mine")


def test_a_file_that_was_edited_after_its_import_is_not_taken_for_what_runs(modules: Path) -> None:
    """Python keeps the old code: neither the old nor the new hash would be right."""
    write_modules(modules, mine=METHOD)
    method = load("mine")
    assert require_current(method) == code_of(method)
    write_modules(modules, mine=METHOD.replace("mean", "sum"))
    with pytest.raises(
        UserError, match=r"mine\.py was edited after this process imported it.*start Python"
    ):
        require_current(method)


def test_an_edit_between_the_import_and_the_first_run_is_noticed(modules: Path) -> None:
    """The edit may be anywhere in the file, with no run before it.

    What was loaded is noted when the class is made.
    """
    text = "TAU = [0.1]\n" + METHOD
    for old, new in [("mean", "sum"), ("[0.1]", "[0.2]"), ("Loss(a=", "Loss(b="), ("TAU", "# TAU")]:
        write_modules(modules, mine=text)
        importlib.import_module("mine")
        write_modules(modules, mine=text.replace(old, new))
        with pytest.raises(UserError, match=r"mine\.py was edited after this process imported it"):
            require_current(load("mine"))
        forget_modules(modules)
    write_modules(modules, mine=text)
    method = load("mine")
    (modules / "mine.py").unlink()
    with pytest.raises(UserError, match=r"mine\.py was edited after"):
        require_current(method)


HELPER = """
import functools, torch
from dataclasses import dataclass

@dataclass
class Options:
    tau: float = 0.1

class Crit:
    @property
    def scale(self):
        return 2
    @torch.no_grad()
    def apply(self, x):
        return 3 * x
    @functools.lru_cache
    def cached(self):
        return 4
    class Inner:
        five = staticmethod(lambda x: x * 5)

TABLE = {"six": lambda x: x * 6}
"""


@pytest.mark.parametrize("number", [None, 2, 3, 4, 5, 6])
def test_a_helper_that_was_edited_before_the_method_was_made_is_noticed(
    modules: Path, number: int | None
) -> None:
    """Functions are compared with the file, also in classes, in tables and under decorators."""
    write_modules(modules, helper=HELPER)
    crit = importlib.import_module("helper").Crit()
    for _ in range(20):  # Python may rewrite the bytecode of functions that run often.
        crit.apply(crit.scale)
    if number is not None:
        write_modules(modules, helper=HELPER.replace(str(number), "9"))
    write_modules(modules, mine="import helper\n" + METHOD)
    method = load("mine")
    if number is None:
        assert set(require_current(method)) == {"mine", "helper"}
    else:
        with pytest.raises(UserError, match=r"helper\.py was edited after"):
            require_current(method)


def test_a_helper_that_was_edited_between_two_versions_of_a_class_is_noticed(modules: Path) -> None:
    """A notebook makes its class anew, and the kernel still has the helper's old value."""
    write_modules(modules, helper="TAU = [0.1]\n")
    cell = "import helper\n" + METHOD.replace("mean()", "mean() * helper.TAU[0]")
    require_current(notebook(cell))
    write_modules(modules, helper="TAU = [0.2]\n")
    with pytest.raises(UserError, match=r"helper\.py was edited after"):
        require_current(notebook(cell))
    importlib.reload(sys.modules["helper"])
    assert "helper" in require_current(notebook(cell))


def test_a_module_that_was_reloaded_is_current_and_what_has_its_old_values_is_not(
    modules: Path,
) -> None:
    write_modules(modules, helper="TAU = 0.1\n", mine="from helper import TAU\n" + METHOD)
    require_current(load("mine"))
    write_modules(modules, helper="TAU = 0.2\n")
    importlib.reload(sys.modules["helper"])
    with pytest.raises(UserError, match=r"helper\.py was edited after"):
        require_current(load("mine"))
    importlib.reload(sys.modules["mine"])
    assert set(require_current(load("mine"))) == {"mine", "helper"}


def test_a_decorator_that_rewrites_bytecode_is_no_edit(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Typeguard's does. A file older than the process cannot have been edited since."""
    rewriting = """
    def rewritten(function):
        function.__code__ = function.__code__.replace(co_consts=(None, 7))
        return function
    @rewritten
    def f():
        return 6
    """
    write_modules(modules, helper=rewriting, mine="import helper\n" + METHOD)
    with pytest.raises(UserError, match=r"helper\.py was edited after"):
        require_current(load("mine"))
    forget_modules(modules)
    monkeypatch.setattr(loaded_code, "_PROCESS_START", (modules / "helper.py").stat().st_ctime + 1)
    assert "helper" in require_current(load("mine"))
