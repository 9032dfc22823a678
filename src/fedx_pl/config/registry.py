"""How a name on the command line becomes a class."""

import importlib
import sys
from importlib.metadata import entry_points

from fedx_pl.callbacks.base import RoundCallback
from fedx_pl.errors import UserError, known_names
from fedx_pl.methods import BUILT_IN
from fedx_pl.methods.base import SSLMethod


def find_method(name: str) -> type[SSLMethod]:
    """The class behind ``method=name``.

    Args:
        name: a built-in method, an entry point of the group ``fedx_pl.methods``, or ``package.module:Class``.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    plugins = {point.name: point for point in entry_points(group="fedx_pl.methods")}
    if name in plugins:
        return _check(name, plugins[name].load())
    if ":" in name:
        return _check(name, _import("method", name, SSLMethod))
    names = [*BUILT_IN, *plugins]
    raise UserError(
        f"method={name} is not known{known_names(name, names, prefix='method=')}; or give your own class as "
        f"method=package.module:Class"
    )


def find_callback(path: str) -> type[RoundCallback]:
    """The class behind an item of ``callbacks=[...]``.

    Args:
        path: an entry point of the group ``fedx_pl.callbacks``, or ``package.module:Class``.
    """
    plugins = {point.name: point for point in entry_points(group="fedx_pl.callbacks")}
    if path not in plugins and ":" not in path:
        raise UserError(f"callbacks=[{path}] is not known; give your own class as callbacks=[package.module:Class]")
    found = plugins[path].load() if path in plugins else _import("callbacks", path, RoundCallback)
    if not (isinstance(found, type) and issubclass(found, RoundCallback)):
        raise UserError(f"callbacks=[{path}] is {found!r}, which is not a subclass of fedx_pl.RoundCallback")
    return found


def _import(key: str, path: str, kind: type) -> object:
    module_name, _, class_name = path.partition(":")
    if "" not in sys.path:  # A console script does not look in the folder it is started from; `python -m` does.
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # Whatever a stranger's module does when it is imported.
        reason = f"{type(error).__name__}: {error}".replace("\n", " ")
        raise UserError(f"{key}={path}: cannot import {module_name} ({reason}); start where it can be found") from error
    if not hasattr(module, class_name):
        own = [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module_name]
        classes = [v.__name__ for v in own if issubclass(v, kind)]
        raise UserError(
            f"{key}={path}: {module_name} has no {class_name!r}; it has {', '.join(classes) or f'no {kind.__name__}'}"
        )
    return getattr(module, class_name)


def _check(name: str, found: object) -> type[SSLMethod]:
    if not (isinstance(found, type) and issubclass(found, SSLMethod)):
        raise UserError(f"method={name} is {found!r}, which is not a subclass of fedx_pl.SSLMethod")
    if found.loss is SSLMethod.loss:
        raise UserError(f"method={name} has no loss of its own; write def loss(self, batch, z)")
    return found
