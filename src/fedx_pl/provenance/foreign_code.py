"""The code of a run that is not part of this package: the user's method and what it imports.

A run is its configuration and this code. It covers the modules that define the method and its base
classes and, from there on, each module that these import, also within a function, if it is a file
of the user's own: not Python's, not this package's, not of an installed library. A method that is
installed itself counts with its whole package. What has no file, as a class in a notebook, or is in
a script's ``__main__``, counts by its `fingerprint`.

Not covered: modules whose names are computed, and files that a method reads.
"""

import ast
import importlib.util
import json
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from fedx_pl.files import checksum, write_atomically
from fedx_pl.files.reading import read_json
from fedx_pl.provenance.fingerprint import (
    Definition,
    Named,
    Part,
    Rules,
    fingerprint,
    fingerprint_of_values,
    held_by,
    imported_by,
    is_transparent,
)

FILE = "code.json"  # in a run folder
Code = dict[str, str]  # SHA-256 by name of module, or of class or function if it has no file


@dataclass(frozen=True)
class Record:
    """The record of the code that trained a run."""

    modules: Code = field(default_factory=dict)
    # The class of a backbone that the method brought; empty: the configuration's
    backbone: str = ""
    # Likewise, what a run was given in Python that no key can say
    objects: Code = field(default_factory=dict)

    @property
    def hash(self) -> str:
        """The hash for result files, sixteen digits; empty if all code is this package's."""
        return (
            checksum(json.dumps(self.modules, sort_keys=True).encode())[:16] if self.modules else ""
        )


def read_record(folder: Path) -> Record | None:
    """Reads the record of a run folder; None if it cannot be read, or is absent."""
    try:
        content = read_json(folder / FILE)
        modules = {str(name): str(sha256) for name, sha256 in content["modules"].items()}
        objects = {str(name): str(sha256) for name, sha256 in content.get("objects", {}).items()}
        return Record(modules, str(content["backbone"]), objects)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_record(folder: Path, record: Record) -> None:
    """Writes a record, unless all code of the run is this package's."""
    if record == Record():
        (folder / FILE).unlink(missing_ok=True)
    else:
        write_atomically(folder / FILE, json.dumps(asdict(record), indent=1).encode())


def code_of(*things: Any) -> Code:
    """The code of classes and functions on disk; empty for those of this package or a library."""
    return {name: sha256 for thing in things for name, sha256 in _code_of(thing).items()}


def _code_of(thing: Any) -> Code:
    if isinstance(thing, FunctionType):
        return {} if _is_foreign_library(thing.__module__) else _Walk(homes=set()).run([thing])
    kind_of = thing if isinstance(thing, type) else type(thing)
    classes = [kind for kind in kind_of.__mro__ if not _is_packaged(kind.__module__)]
    built_on_us = [
        kind for kind in classes if any(_is_packaged(base.__module__) for base in kind.__mro__)
    ]
    if not built_on_us and _is_foreign_library(kind_of.__module__):
        return {}
    return _Walk(homes={_top(kind.__module__) for kind in built_on_us}).run(classes)


def _is_foreign_library(name: str) -> bool:
    file = file_of(name)
    return _is_packaged(name) or (file is not None and _is_library(file, name))


def hash_of(*things: Any) -> str:
    """`Record.hash` of the code of classes and functions as it is on disk now."""
    return Record(code_of(*things)).hash


def hash_of_values(values: Mapping[str, object]) -> str:
    """Hashes numbers, tensors, functions and objects by name, the same in every process."""
    walk = _Walk(homes=set())
    content = fingerprint_of_values(values, walk.rules)
    return checksum(json.dumps([content, walk.run([])]).encode())


def file_of(name: str) -> Path | None:
    """The file of a module, imported or not; None for a class or function without a file."""
    return _locate(name).file


def differing(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The names whose content is not the same, or that only one of the two has."""
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]


def describe(names: list[str]) -> str:
    """Lists the files of some modules, at most three, for a message."""
    shown = [_short(file) if (file := file_of(name)) else name for name in names[:3]]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class _Walk:
    """Collects code, starting from a class."""

    def __init__(self, homes: set[str]) -> None:
        self.homes = homes  # top-level names of packages that count wherever they are installed
        self.code: Code = {}
        self._modules: set[str] = set()
        # Classes and functions without a file and their names, by id.
        self._named: dict[int, tuple[str, Definition]] = {}
        self._waiting: deque[Definition] = deque()
        self.rules = Rules(self._refer, self._is_opaque)

    def run(self, classes: Sequence[Definition]) -> Code:
        """Collects the code of some classes or functions, and all that it refers to."""
        for kind in classes:
            self._refer(kind)
        while self._waiting:
            thing = self._waiting.popleft()
            self.code[self._named[id(thing)][0]] = fingerprint(thing, self.rules)
            for name in imported_by(thing.__code__) if isinstance(thing, FunctionType) else ():
                self._visit_module(name)
        return dict(sorted(self.code.items()))

    def _refer(self, thing: Named) -> Part:
        """Names a class, a function or a module, and sees to it that its code is collected."""
        if isinstance(thing, ModuleType):
            self._visit_module(thing.__name__)
            return Part(f"module {thing.__name__}")
        name = _module_of(thing)
        label = f"{name}.{thing.__qualname__}"
        if not _has_file(name):
            return Part(self._wait(thing, label))
        self._visit_module(name)
        return Part(label, held_by(thing) if isinstance(thing, FunctionType) else ())

    def _wait(self, thing: Definition, label: str) -> str:
        if id(thing) not in self._named:
            while label in self.code:  # Every lambda has the same name.
                label += "'"
            self.code[label] = ""
            self._named[id(thing)] = label, thing
            self._waiting.append(thing)
        return self._named[id(thing)][0]

    def _is_opaque(self, kind: type) -> bool:
        """Whether only the class counts: what a library keeps in its objects differs by version."""
        name = str(kind.__module__)
        file = file_of(name)
        if is_transparent(kind) or _top(name) in self.homes:
            return False
        # Weak references come and go with what else is alive.
        is_weak = name in ("weakref", "_weakrefset")
        return is_weak or _is_packaged(name) or (file is not None and _is_installed(file, name))

    def _visit_module(self, name: str) -> None:
        if name in self._modules or _is_packaged(name):
            return
        self._modules.add(name)
        if "." in name:
            self._visit_module(name.rpartition(".")[0])
        file, package, _ = _locate(name)
        if file is None or (_top(name) not in self.homes and _is_library(file, name)):
            return
        try:
            content = file.read_bytes()
        except OSError:  # A module within an archive.
            return
        self.code[name] = checksum(content)
        for imported in _imports(content, package) if file.suffix == ".py" else ():
            self._visit_module(imported)


class _Place(NamedTuple):
    """The place of a module."""

    file: Path | None = None
    package: str = ""  # that its relative imports start from
    path: Sequence[str] | None = None  # where its sub-modules are; None: it is no package


def _has_file(name: str) -> bool:
    if file_of(name) is None:
        return name in sys.builtin_module_names
    return name != "__main__"  # Only what the run uses of a script counts, as for a notebook.


def _locate(name: str) -> _Place:
    """Finds a module without importing anything; one that is not there has no file."""
    module = sys.modules.get(name)
    if module is not None:
        file = getattr(module, "__file__", None)
        path = getattr(module, "__path__", None)
        return _Place(
            Path(file) if file else None,
            module.__package__ or "",
            None if path is None else [*path],
        )
    parent, dot, _ = name.rpartition(".")
    path = _locate(parent).path if dot else None
    try:
        spec = PathFinder.find_spec(name, path) if path is not None or not dot else None
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return _Place()
    file = spec.origin if spec.has_location else None
    inner = spec.submodule_search_locations
    return _Place(
        Path(file) if file else None, spec.parent or "", None if inner is None else [*inner]
    )


def _imports(content: bytes, package: str) -> Iterator[str]:
    """The names that a source file imports; of ``from a import b``, ``a.b`` may be no module."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            try:
                base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            except (ImportError, ValueError):
                continue
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _is_packaged(name: str) -> bool:
    return _top(name) == "fedx_pl"


def _is_library(file: Path, name: str) -> bool:
    python = Path(sysconfig.get_paths()["stdlib"])
    return file.resolve().is_relative_to(python.resolve()) or _is_installed(file, name)


def _is_installed(file: Path, name: str) -> bool:
    """Whether a file is installed: what pip puts into a folder has a ``*.dist-info`` beside it."""
    levels = name.count(".") + (file.name == "__init__.py")
    home = file.parents[levels] if levels < len(file.parents) else file.parent
    return home.name == "site-packages" or _has_installed(home)


@cache
def _has_installed(folder: Path) -> bool:
    return next(folder.glob("*.dist-info"), None) is not None


def _module_of(thing: Definition) -> str:
    """The module whose file has the source: `functools.wraps` copies another ``__module__``."""
    name = thing.__globals__.get("__name__") if isinstance(thing, FunctionType) else None
    return str(name or thing.__module__)


def _top(name: str) -> str:
    return name.partition(".")[0]


def _short(file: Path) -> str:
    resolved = file.resolve()
    here = Path.cwd()
    return str(resolved.relative_to(here)) if resolved.is_relative_to(here) else str(resolved)
