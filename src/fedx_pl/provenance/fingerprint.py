"""Hashes live objects, the same in every process, such as a class in a notebook without a file.

Everything is taken apart until only plain values are left. A function is its bytecode, what it
holds and the globals that it names; an instance is its class and what pickle would save of it; a
tensor is its values. No address and no order of a set gets into the hash.
"""

import copyreg
import dis
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from types import CellType, CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedx_pl.files import checksum

Named = type | FunctionType | ModuleType
Definition = type | FunctionType

_PLAIN = {bool, int, float, complex, str, bytes, type(None)}
_IMMUTABLE = {tuple, frozenset, CodeType}  # Equal constants may or may not be one object.
_MOST_ITEMS = 10_000  # of one container
_MOST_VALUES = 1_000_000  # of one class or function
_MOST_ELEMENTS = 1 << 22  # of one array or tensor
_GLOBAL_READS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
# What torch keeps in every module for itself; it differs between versions of torch.
_TORCH_INTERNALS = vars(nn.Module()).keys() - {"_parameters", "_buffers", "_modules"}


class Part(NamedTuple):
    """A value that was taken apart one step further."""

    label: str
    parts: Sequence[object] = ()


class Rules(NamedTuple):
    """Decides what is not taken apart here."""

    refer: Callable[[Named], Part]  # a name for a class, a function or a module
    # Whether instances of a class count by the name of the class only
    is_opaque: Callable[[type], bool]


def fingerprint(thing: Definition, rules: Rules) -> str:
    """The SHA-256 of a class or function; what it refers to counts by the labels of ``rules``."""
    return _hash(_class_parts(thing) if isinstance(thing, type) else _function_parts(thing), rules)


def fingerprint_of_values(values: Mapping[str, object], rules: Rules) -> str:
    """The SHA-256 of values by name."""
    return _hash(sorted(values.items()), rules)


def is_transparent(kind: type) -> bool:
    """Whether instances are mere data, or a network, even if a library defines their class."""
    return issubclass(
        kind, nn.Module | torch.dtype | torch.device | tuple | list | dict
    ) or is_dataclass(kind)


def held_by(function: FunctionType) -> list[object]:
    """The values of a function's closure, and the function that it decorates."""
    return [function.__dict__.get("__wrapped__"), *map(_content, function.__closure__ or ())]


def imported_by(code: CodeType) -> Iterator[str]:
    """The names that a function imports when it runs; of ``from a import b``, also ``a.b``."""
    base = ""
    for step in _steps(code):
        if step.opname == "IMPORT_NAME":
            base = step.argval
            yield base
        elif step.opname == "IMPORT_FROM":
            yield f"{base}.{step.argval}"


def _hash(parts: Sequence[object], rules: Rules) -> str:
    digest = hashlib.sha256()
    for line in _lines(parts, rules, {}):
        digest.update(f"{line}\n".encode())
    return digest.hexdigest()


def _lines(
    parts: Sequence[object], rules: Rules, seen: dict[int, tuple[int, object]]
) -> Iterator[str]:
    """Yields values as text, breadth first, so that a huge one leaves room for its neighbors.

    Args:
        parts: the values.
        rules: of the walk.
        seen: number and object by id. It holds the objects, since the id of a dead one is given to
            another.
    """
    queue = deque(parts)
    for _ in range(_MOST_VALUES):
        if not queue:
            return
        value = queue.popleft()
        kind = type(value)
        if kind in _PLAIN:
            yield _plain_text(value)
        elif id(value) in seen:
            yield f"again {seen[id(value)][0]}"
        else:
            if kind not in _IMMUTABLE:
                seen[id(value)] = len(seen), value
            label, inner = _take_apart(value, kind, rules, seen=seen)
            yield f"{label} {len(inner)}"
            queue.extend(inner[:_MOST_ITEMS])


def _take_apart(value: Any, kind: type, rules: Rules, seen: dict[int, tuple[int, object]]) -> Part:
    if issubclass(kind, type | FunctionType | ModuleType):
        return rules.refer(value)
    if kind in (list, tuple):
        return Part(kind.__name__, value)
    if kind in (dict, MappingProxyType):
        return Part(kind.__name__, [*value.items()])
    if issubclass(kind, set | frozenset):
        return Part("set", [kind, *sorted(value, key=lambda item: _order(item, rules, seen))])
    if issubclass(kind, Tensor | np.ndarray | np.generic):
        return Part("array", [kind, *_array_parts(value)])
    if kind is CodeType:
        return Part("code", _code_parts(value))
    if issubclass(kind, property):
        return Part("property", [kind, value.fget, value.fset, value.fdel])
    if issubclass(kind, classmethod | staticmethod):
        return Part("method", [kind, value.__func__])
    # As functools.lru_cache keeps it, or numba.
    wrapped = getattr(value, "__dict__", {}).get("__wrapped__")
    return Part("instance", [kind, wrapped, *(() if rules.is_opaque(kind) else _state(value))])


def _order(item: object, rules: Rules, seen: dict[int, tuple[int, object]]) -> str:
    """Sorts a set, whose order depends on addresses and on the hash seed of the process."""
    if type(item) in _PLAIN:
        return _plain_text(item)
    return "\n".join(_lines([item], rules._replace(refer=_place), dict(seen)))


def _plain_text(value: object) -> str:
    """Formats a plain value; integers in hexadecimal, since Python refuses long decimals."""
    return f"{type(value).__name__} {hex(value) if isinstance(value, int) else repr(value)}"


def _place(thing: Named) -> Part:
    """Tells members of a set apart without visiting them: two lambdas have the same name."""
    code = thing.__code__ if isinstance(thing, FunctionType) else None
    return Part(
        f"{getattr(thing, '__qualname__', thing.__name__)} {[*code.co_positions()] if code else ''}"
    )


def _class_parts(kind: type) -> list[object]:
    """The bases and members of a class, without dunder values, which differ by Python version."""
    members = {name: value for name, value in vars(kind).items() if not _is_note(name, value)}
    return [kind.__bases__, members]


def _is_note(name: str, value: object) -> bool:
    return name.startswith("__") and name.endswith("__") and not hasattr(type(value), "__get__")


def _function_parts(function: FunctionType) -> list[object]:
    names = sorted(
        {step.argval for step in _steps(function.__code__) if step.opname in _GLOBAL_READS}
    )
    named = {name: function.__globals__[name] for name in names if name in function.__globals__}
    held = [function.__defaults__, function.__kwdefaults__, function.__dict__, *held_by(function)]
    return [function.__code__, held, named]


def _code_parts(code: CodeType) -> list[object]:
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return [code.co_code, code.co_exceptiontable, counts, names, code.co_consts]


def _array_parts(array: Any) -> list[object]:
    """The type, shape and values; of a large array a sample of the values, spread over it."""
    shape = tuple(array.shape)
    step = 1 + int(np.prod(shape)) // _MOST_ELEMENTS
    parts: list[object] = [str(array.dtype), shape]
    try:
        if isinstance(array, Tensor):
            sample = (
                array.detach().reshape(-1)[::step].cpu().resolve_conj().resolve_neg().contiguous()
            )
            return [*parts, checksum(sample.view(torch.uint8).numpy().tobytes())]
        sample = array.reshape(-1)[::step]
        # The bytes of Python objects are addresses.
        return [*parts, sample.tolist() if array.dtype.hasobject else checksum(sample.tobytes())]
    except (RuntimeError, TypeError, ValueError):  # Sparse, quantized, without data.
        return parts


def _state(value: Any) -> list[object]:
    """The state that pickle would save; what it cannot, such as a lock, counts by its class."""
    if isinstance(value, nn.Module):
        return [{name: part for name, part in vars(value).items() if name not in _TORCH_INTERNALS}]
    try:
        reduce = copyreg.dispatch_table.get(type(value))
        reduced = reduce(value) if reduce else value.__reduce_ex__(4)
        if isinstance(reduced, str):  # The name of something global.
            return [reduced]
        return [list(part) if isinstance(part, Iterator) else part for part in reduced]
    except Exception:  # Whatever a stranger's class does when it is pickled.
        return [getattr(value, "__dict__", None)]


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # It is empty.
        return None


def _steps(code: CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _steps(value)
