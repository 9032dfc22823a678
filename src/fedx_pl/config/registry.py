"""The registry of parts: finds the class or function behind a word of the command line.

A word is the name of a built-in part, an entry point of an installed package (of the group
``fedx_pl.methods``, ``fedx_pl.mixins``, ...), or ``package.module:Name``.
"""

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from fedx_pl.backbone_options import BACKBONES
from fedx_pl.data.images import ARRAYS
from fedx_pl.data.partition import PARTITIONS
from fedx_pl.data.sources import SOURCES
from fedx_pl.engines import ENGINES
from fedx_pl.errors import UserError, known_names
from fedx_pl.evaluation import EVALUATIONS
from fedx_pl.federation.options import REGULARIZERS, RULES
from fedx_pl.methods import BUILT_IN
from fedx_pl.mixins import MIXINS
from fedx_pl.parts import Parts, imported

if TYPE_CHECKING:
    from fedx_pl.methods.base import SSLMethod

LOGGERS: Parts[Any] = Parts(
    {
        "tensorboard": "fedx_pl.callbacks.dashboard:Dashboard",
        "csv": "pytorch_lightning.loggers:CSVLogger",
    }
)
CALLBACKS: Parts[Any] = Parts({"early_stopping": "fedx_pl.callbacks.early_stopping:EarlyStopping"})


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of part."""

    key: str  # what is typed before the equals sign
    group: str  # of entry points, after ``fedx_pl.``
    built_in: Mapping[str, Any]  # parts by word
    base_path: str = ""  # of the class that a part must be a subclass of; empty: a function will do
    form: str = "{key}={word}"  # how a word is typed

    @property
    def base(self) -> type | None:
        """The required base class; None if a function will do."""
        return imported(self.base_path) if self.base_path else None

    def typed(self, word: str) -> str:
        """A word as it is typed."""
        return self.form.format(key=self.key, word=word)


_LIST = "{key}=[{word}]"
METHOD = Kind(
    key="method", group="methods", built_in=BUILT_IN, base_path="fedx_pl.methods.base:SSLMethod"
)
MIXIN = Kind(
    key="mixins",
    group="mixins",
    built_in=MIXINS,
    base_path="fedx_pl.mixins.base:Mixin",
    form=_LIST,
)
BACKBONE = Kind(key="backbone.name", group="backbones", built_in=BACKBONES)
DATA = Kind(key="data", group="data", built_in=SOURCES)
PARTITION = Kind(
    key="partition.kind",
    group="partitions",
    built_in=PARTITIONS,
    base_path="fedx_pl.data.partition:Partition",
)
RULE = Kind(
    key="aggregate",
    group="rules",
    built_in=RULES,
    base_path="fedx_pl.federation.aggregate:Aggregator",
)
REGULARIZER = Kind(
    key="regularizer",
    group="regularizers",
    built_in=REGULARIZERS,
    base_path="fedx_pl.federation.regularizers:Regularizer",
)
ENGINE = Kind(
    key="engine", group="engines", built_in=ENGINES, base_path="fedx_pl.engines.base:Engine"
)
EVALUATION = Kind(
    key="evaluate",
    group="evaluations",
    built_in=EVALUATIONS,
    base_path="fedx_pl.evaluation.base:Evaluation",
    form="fedx-pl {key} RUN {word}",
)
LOGGER = Kind(
    key="logger",
    group="loggers",
    built_in=LOGGERS,
    base_path="pytorch_lightning.loggers:Logger",
    form=_LIST,
)
CALLBACK = Kind(
    key="callbacks",
    group="callbacks",
    built_in=CALLBACKS,
    base_path="fedx_pl.callbacks.base:RoundCallback",
    form=_LIST,
)
KINDS = (
    METHOD,
    MIXIN,
    BACKBONE,
    DATA,
    PARTITION,
    RULE,
    REGULARIZER,
    ENGINE,
    EVALUATION,
    LOGGER,
    CALLBACK,
)

# The keys of the configuration that hold one such word: (group, key within it).
WORDS = {
    ("method", "name"): METHOD,
    ("backbone", "name"): BACKBONE,
    ("data", "name"): DATA,
    ("partition", "kind"): PARTITION,
    ("aggregate", "rule"): RULE,
    ("regularizer", "name"): REGULARIZER,
    ("engine", "name"): ENGINE,
}

_BROUGHT: "dict[str, type[SSLMethod]]" = {}  # classes given from Python, by their path


def find(kind: Kind, word: str) -> Any:
    """The class or function behind a word.

    Raises:
        UserError: there is none, or it is of another kind; the message names the nearest word.
    """
    if word in kind.built_in:
        return kind.built_in[word]
    if kind is METHOD and word in _BROUGHT:
        return _BROUGHT[word]
    plugins = {point.name: point for point in entry_points(group=f"fedx_pl.{kind.group}")}
    if word in plugins:
        return _checked(kind, word, plugins[word].load())
    if ":" in word:
        return _checked(kind, word, _import(kind, word))
    names = [name for name in (*kind.built_in, *plugins) if name != ARRAYS]
    guess = known_names(word, names, prefix=kind.typed("").strip("[]")) if names else ""
    what = "class" if kind.base_path else "function"
    own = kind.typed("package.module:Class" if kind.base_path else "package.module:function")
    raise UserError(f"{kind.typed(word)} is not known{guess}; or give your own {what} as {own}")


def require_known(kind: Kind, word: str) -> None:
    """Raises a `UserError` if there is nothing behind a word; a built-in part is not imported."""
    if is_foreign(kind, word):
        find(kind, word)


def is_foreign(kind: Kind, word: str) -> bool:
    """Whether a word is not the name of a built-in part."""
    return word not in kind.built_in


def bring(method: "type[SSLMethod]") -> str:
    """Registers a class by its path, wherever it was defined, and returns the path."""
    path = f"{method.__module__}:{method.__qualname__}"
    _BROUGHT[path] = _checked(METHOD, path, method)
    return path


def own_settings(thing: Any, known: type) -> dict[str, Any]:
    """The arguments with a plain default that a part adds to the keys of its group.

    Args:
        thing: a class or function.
        known: the dataclass of the keys of the group.
    """
    usual = {field.name for field in dataclasses.fields(known)}
    parameters = inspect.signature(thing).parameters.values()
    plain = [
        parameter
        for parameter in parameters
        if isinstance(parameter.default, bool | int | float | str)
    ]
    return {parameter.name: parameter.default for parameter in plain if parameter.name not in usual}


def make(kind: Kind, word: str, options: object, /, *args: Any, **given: Any) -> Any:
    """Calls the class or function behind a word with the arguments that it takes.

    Args:
        kind: the kind of part.
        word: the word, as typed.
        options: the keys of its group, which hold the arguments.
        args: positional arguments, which it must take.
        given: more keyword arguments, which it need not take.

    Raises:
        UserError: it cannot be called so, or it raises; the message names the word and the error.
    """
    thing = find(kind, word)
    parameters = inspect.signature(thing).parameters
    everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    taken = {
        name: getattr(options, name)
        for name in parameters
        if hasattr(options, name) and name not in given
    }
    taken |= {name: value for name, value in given.items() if everything or name in parameters}
    missing = _without_default(parameters.values(), len(args), taken)
    if missing:
        raise UserError(
            f"{kind.typed(word)} cannot be made: its argument {missing[0]} has no default; "
            f"keys come from arguments with plain defaults, "
            f"so write e.g. {missing[0]}=1 in its signature"
        )
    with making(kind.typed(word)):
        return thing(*args, **taken)


@contextmanager
def making(typed: str) -> Iterator[None]:
    """Turns whatever a part raises while it is made into a `UserError` that names it.

    Args:
        typed: the key and the word of the part.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # Whatever a user's code raises.
        reason = f"{type(error).__name__}: {error}".replace("\n", " ")
        raise UserError(
            f"{typed} cannot be made ({reason}); --debug shows where it fails"
        ) from error


def _without_default(
    parameters: Iterable[inspect.Parameter], positional: int, taken: Mapping[str, Any]
) -> list[str]:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [parameter for parameter in parameters if parameter.kind not in variadic]
    required = [
        parameter for parameter in named[positional:] if parameter.default is parameter.empty
    ]
    return [parameter.name for parameter in required if parameter.name not in taken]


def _import(kind: Kind, path: str) -> object:
    module_name, _, name = path.partition(":")
    if "" not in sys.path:  # As `python -m` does, and a console script does not.
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # Whatever a user's module raises.
        reason = f"{type(error).__name__}: {error}".replace("\n", " ")
        raise UserError(
            f"{kind.key}={path}: cannot import {module_name} ({reason}); "
            f"start where it can be found"
        ) from error
    if not hasattr(module, name):
        own = [
            v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module_name
        ]
        base = kind.base or object
        classes = ", ".join(v.__name__ for v in own if issubclass(v, base))
        raise UserError(
            f"{kind.key}={path}: {module_name} has no {name!r}; "
            f"it has {classes or f'no {base.__name__}'}"
        )
    return getattr(module, name)


def _checked(kind: Kind, word: str, found: object) -> Any:
    base: Any = kind.base
    if base is None:
        if not callable(found):
            raise UserError(f"{kind.typed(word)} is {found!r}, which is not a function")
        return found
    if not (isinstance(found, type) and issubclass(found, base)):
        home = "fedx_pl" if kind in (METHOD, CALLBACK, PARTITION) else base.__module__
        raise UserError(
            f"{kind.typed(word)} is {found!r}, which is not a subclass of {home}.{base.__name__}"
        )
    if kind is METHOD and found.loss is base.loss:  # type: ignore[attr-defined]
        raise UserError(f"method={word} has no loss of its own; write def loss(self, batch, z)")
    return found
