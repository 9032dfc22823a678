"""Whether the code that this process has loaded is still the code in its files.

Python reads a file once. After an edit it still uses the old code, and a run would be kept under
the hash of code that did not train it. What was loaded is known from three sides: the files behind
a method when its class was made, the file of a module when it was first seen here, and the
functions of a module that was edited before that.

Not noticed: an edit outside of all functions, of a module that was imported before the method that
uses it was made.
"""

import gc
import os
import sys
import time
from collections.abc import Iterator
from functools import cached_property, lru_cache, partial, partialmethod
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType
from weakref import WeakKeyDictionary

from fedx_pl.errors import UserError
from fedx_pl.provenance.fingerprint import held_by
from fedx_pl.provenance.foreign_code import Code, code_of, describe, file_of

_STALE = "edited before it was first seen"  # in place of a hash
# What functions may hide in.
_CONTAINERS = (dict, list, tuple, CellType)
_WRAPPERS = (property, classmethod, staticmethod, cached_property, partial, partialmethod)
_CARRIERS = (*_CONTAINERS, *_WRAPPERS, type(lru_cache(len)))
# The files behind a class when it was made
_made_of: WeakKeyDictionary[type, Code] = WeakKeyDictionary()
# By module: what was loaded, and its file's hash
_first_seen: dict[str, tuple[ModuleSpec | None, str]] = {}


def remember(method: type) -> None:
    """Notes the files behind a method at the moment when its class is made.

    Later would be too late: Python has read them just now, and the user may edit them at any time.
    """
    code = code_of(method)
    _made_of[method] = {name: _loaded(name, now) for name, now in code.items() if file_of(name)}


def require_current(method: type) -> Code:
    """Returns the code of a method, and refuses it if this process runs another.

    Raises:
        UserError: a file was edited after it was imported; Python would use the old content.
    """
    code = code_of(method)
    loaded = [(name, _loaded(name, now)) for name, now in code.items() if file_of(name)]
    for (
        kind
    ) in method.__mro__:  # The user's class may be a base of the one that trains, as of FedXMine.
        loaded += _made_of.get(kind, {}).items()
    edited = dict.fromkeys(name for name, sha256 in loaded if sha256 != code.get(name))
    if edited:
        raise UserError(
            f"{describe([*edited])} was edited after this process imported it, which still has "
            f"the old code; start Python (the notebook's kernel) again"
        )
    return code


def _loaded(name: str, now: str) -> str:
    """The hash of the file that a module was loaded from, as far as it is known.

    Args:
        name: of the module.
        now: the hash of its file as it is now, which counts if the module is seen for the first
            time.
    """
    module = sys.modules.get(name)
    if module is None:  # It will be read when a function imports it.
        return now
    spec = getattr(module, "__spec__", None)
    # `importlib.reload` makes a new one.
    if name not in _first_seen or _first_seen[name][0] is not spec:
        _first_seen[name] = spec, _STALE if _is_stale(module) else now
    return _first_seen[name][1]


def _is_stale(module: ModuleType) -> bool:
    """Whether functions of a loaded module are not those of its file, which was edited since."""
    compile_source = getattr(getattr(module, "__loader__", None), "source_to_code", None)
    file = file_of(module.__name__)
    if compile_source is None or file is None or file.suffix != ".py":
        return False
    try:
        if max(file.stat().st_mtime, file.stat().st_ctime) < _PROCESS_START:
            return False  # Some decorators, such as typeguard's, rewrite bytecode: that is no edit.
        in_file = set(_nested(compile_source(file.read_bytes(), str(file))))
    except (OSError, SyntaxError, ValueError):
        return True
    return any(function.__code__ not in in_file for function in _functions(module))


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """The functions of a module's own source that can be reached from its names."""
    stack: list[object] = [vars(module)]
    # It holds the objects, since the id of a dead one is given to another.
    seen: dict[int, object] = {}
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, FunctionType):
            # A function such as the __init__ of a dataclass is made from text that is in no file.
            if value.__globals__ is vars(module) and not value.__code__.co_filename.startswith("<"):
                yield value
            stack += held_by(value)
        elif isinstance(value, type) and value.__module__ == module.__name__:
            stack += vars(value).values()
        elif isinstance(value, _CARRIERS):
            stack += gc.get_referents(value)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _nested(value)


def _process_start() -> float:
    """The time when this process began, in seconds since 1970; 0 where Linux does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    return time.time() - max(age, 0) - 1


_PROCESS_START = _process_start()
