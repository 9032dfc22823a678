"""The code of a run: the method's files and what they import, and nothing of a library."""

from pathlib import Path

import pytest
from helpers import METHOD, forget_modules, write_modules

from fedx_pl import SSLMethod, methods
from fedx_pl.config import registry
from fedx_pl.provenance.foreign_code import Record, code_of, read_record, write_record


def load(name: str) -> type[SSLMethod]:
    return registry.find(registry.METHOD, f"{name}:Mine")


@pytest.mark.parametrize("name", list(methods.BUILT_IN))
def test_a_method_of_the_package_has_no_foreign_code(name: str) -> None:
    assert code_of(methods.BUILT_IN[name]) == {}


def test_what_a_method_imports_counts_however_it_is_imported(modules: Path) -> None:
    """Imports are direct, from a folder without ``__init__``, through a module, in a function.

    A file that is not imported does not count, nor does a library.
    """
    (modules / "parts").mkdir()
    (modules / "parts" / "blocks.py").write_text("import constants\n")
    write_modules(
        modules,
        constants="TAU = 0.1\n",
        late="X = 1\n",
        unused="Y = 1\n",
        nets="from parts import blocks\n",
    )
    write_modules(
        modules, mine="import json, torch, lightly, nets\ndef f():\n    import late\n" + METHOD
    )
    assert set(code_of(load("mine"))) == {"mine", "nets", "parts.blocks", "constants", "late"}


def test_a_package_counts_with_its_relative_imports_and_its_inits(modules: Path) -> None:
    write_modules(
        modules,
        mine_pkg__losses="from . import base\n",
        mine_pkg__base="Z = 1\n",
        mine_pkg__other="W = 1\n",
    )
    (modules / "mine_pkg" / "__init__.py").write_text("")
    write_modules(modules, mine_pkg__method="from .losses import *\n" + METHOD)
    found = set(code_of(load("mine_pkg.method")))
    assert found == {"mine_pkg", "mine_pkg.method", "mine_pkg.losses", "mine_pkg.base"}


def test_base_classes_and_mixins_count(modules: Path) -> None:
    write_modules(modules, basis=METHOD.replace("Mine", "Basis"))
    write_modules(modules, extra="class Extra:\n    pass\n")
    mine = """
import basis, extra
from fedx_pl import FedXMixin
class Mine(FedXMixin, extra.Extra, basis.Basis):
    pass
"""
    write_modules(modules, mine=mine)
    assert set(code_of(load("mine"))) == {"mine", "basis", "extra"}


def test_an_installed_method_counts_with_its_package_and_no_other(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages lie side by side, each with its ``dist-info``, as pip installs them."""
    site = modules / "site-packages"
    monkeypatch.syspath_prepend(str(site))
    write_modules(
        site,
        installed_ssl__method="import other_library\nfrom installed_ssl import heads\n" + METHOD,
    )
    write_modules(site, installed_ssl__heads="", installed_ssl__init="", other_library="")
    assert set(code_of(load("installed_ssl.method"))) == {
        "installed_ssl.method",
        "installed_ssl.heads",
    }


def test_any_edit_shows_and_a_moved_folder_does_not(modules: Path) -> None:
    write_modules(modules, mine="import parts_of_mine\n" + METHOD, parts_of_mine="TAU = 0.1\n")
    first = code_of(load("mine"))
    forget_modules(modules)
    assert code_of(load("mine")) == first
    forget_modules(modules)
    write_modules(modules, parts_of_mine="TAU = 0.2\n")
    second = code_of(load("mine"))
    assert second["mine"] == first["mine"]
    assert second["parts_of_mine"] != first["parts_of_mine"]
    assert Record(first).hash != Record(second).hash


def test_a_record_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    write_record(tmp_path, record := Record({"mine": "00ff"}, "TinyNet"))
    assert read_record(tmp_path) == record
    for text in ("", "[]", "{}", '{"modules": 7, "backbone": ""}', "[" * 50_000):
        (tmp_path / "code.json").write_text(text)
        assert read_record(tmp_path) is None
    write_record(tmp_path, Record())
    assert not (tmp_path / "code.json").exists()
