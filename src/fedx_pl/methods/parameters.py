"""The hyper-parameters of a method: the arguments of its `__init__`, for the command line."""

import inspect
import re
import typing
from typing import Any

from fedx_pl.methods.base import SSLMethod


def hyper_parameters(method: type[SSLMethod]) -> dict[str, tuple[Any, Any, str]]:
    """A method's arguments with a plain default, by name: (type, default, help), its own first, then its bases'."""
    found: dict[str, tuple[Any, Any, str]] = {}
    for cls in method.__mro__:
        init = vars(cls).get("__init__")
        if init is None:
            continue
        hints, helps = typing.get_type_hints(init), _argument_help(init)
        parameters = inspect.signature(init).parameters.values()
        for parameter in parameters:
            name, default = parameter.name, parameter.default
            if isinstance(
                default, bool | int | float | str | list | tuple
            ):  # What can be typed on a command line.
                found.setdefault(
                    name, (_plain_type(hints.get(name, Any)), default, helps.get(name, ""))
                )
        if cls is SSLMethod or not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return found


def _plain_type(hint: Any) -> Any:
    """The hint if the schema can check it, else Any."""
    sequence = typing.get_origin(hint) in (list, tuple)
    return hint if hint in (bool, int, float, str) or sequence else Any


def _argument_help(init: Any) -> dict[str, str]:
    """The one-line descriptions in a Google-style docstring's Args."""
    return dict(re.findall(r"^\s+(\w+): (.+)$", inspect.getdoc(init) or "", flags=re.MULTILINE))
