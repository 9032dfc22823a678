"""The hyper-parameters of a method: the arguments of its `__init__`, for the command line."""

import ast
import importlib.util
import inspect
import re
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

_PLAIN = (bool, int, float, str, list, tuple)  # what can be typed on a command line


class Parameter(NamedTuple):
    """An argument with a plain default."""

    hint: Any  # Any if the schema cannot check it
    default: Any
    description: str


def hyper_parameters(method: type) -> dict[str, Parameter]:
    """A method's arguments with a plain default, by name; its own come before its bases'."""
    found: dict[str, Parameter] = {}
    for cls in method.__mro__:
        init = vars(cls).get("__init__")
        if init is None:
            continue
        hints = typing.get_type_hints(init)
        helps = _argument_help(inspect.getdoc(init))
        parameters = inspect.signature(init).parameters.values()
        for parameter in parameters:
            name = parameter.name
            default = parameter.default
            if isinstance(default, _PLAIN):
                hint = _plain_type(hints.get(name, Any))
                found.setdefault(name, Parameter(hint, default, helps.get(name, "")))
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return found


@cache
def declared_parameters(path: str) -> dict[str, Parameter]:
    """The hyper-parameters of a built-in method, read from its source without importing it.

    Importing the method would import torch and Lightning, which takes seconds; a typo in a key
    should be answered at once.

    Args:
        path: ``package.module:Class``.
    """
    found: dict[str, Parameter] = {}
    for init in _constructors(path):
        arguments = init.args
        helps = _argument_help(ast.get_docstring(init))
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            hint = ast.unparse(argument.annotation) if argument.annotation else "Any"
            if isinstance(default, ast.Constant | ast.Tuple | ast.List | ast.UnaryOp):
                value = ast.literal_eval(default)
                if isinstance(value, _PLAIN):
                    kind = _plain_type(eval(hint, {"Any": Any}))
                    parameter = Parameter(kind, value, helps.get(argument.arg, ""))
                    found.setdefault(argument.arg, parameter)
        if arguments.kwarg is None:
            break
    return found


def _constructors(path: str) -> Iterator[ast.FunctionDef]:
    """The `__init__` of a class and of its bases, from the source."""
    module, _, name = path.partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    imports = [item for item in tree.body if isinstance(item, ast.ImportFrom)]
    homes = {alias.name: item.module for item in imports for alias in item.names}
    classes = [item for item in tree.body if isinstance(item, ast.ClassDef)]
    found = next(item for item in classes if item.name == name)
    for item in found.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            yield item
    for base in found.bases:
        if isinstance(base, ast.Name) and base.id in homes:
            yield from _constructors(f"{homes[base.id]}:{base.id}")


def _plain_type(hint: Any) -> Any:
    """The hint if the schema can check it, else Any."""
    sequence = typing.get_origin(hint) in (list, tuple)
    return hint if hint in (bool, int, float, str) or sequence else Any


def _argument_help(docstring: str | None) -> dict[str, str]:
    """The one-line descriptions in a Google-style docstring's Args."""
    return dict(re.findall(r"^\s+(\w+): (.+)$", docstring or "", flags=re.MULTILINE))
