"""Options with bounds, which are declared beside the default and checked in one place.

    @dataclass(frozen=True, kw_only=True)
    class OptimOptions(Options):
        lr: float = option(0.01, "learning rate", above=0)

A value that is not possible raises an `OptionError`, which speaks of arguments: ``lr=-1 is not
possible; write a number above 0, e.g. lr=0.01``. The command line names the key instead.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from operator import index
from typing import Any

from fedx_pl.errors import UserError, short

_REFERENCE = re.compile(r"\{([\w=()]+)\}")


class OptionError(UserError):
    """An option or argument whose value is not possible.

    The text is made from parts, so that the command line can name keys where Python names
    arguments. ``problem`` and ``advice`` put the names of options in braces: ``also {clip}=1``.

    Attributes:
        name: of the argument.
        value: that was given; ``...`` if the problem says it.
        problem: what is wrong with it.
        advice: what to write instead.
        owner: the class of options that has it; None for an argument of a function.
    """

    def __init__(
        self,
        name: str,
        value: Any = ...,
        problem: str = "is not possible",
        advice: str = "",
        owner: type | None = None,
    ) -> None:
        super().__init__(name, value, problem, advice, owner)  # As pickle will call it.
        self.name = name
        self.value = value
        self.problem = problem
        self.advice = advice
        self.owner = owner

    def __str__(self) -> str:
        return self.text()

    def text(
        self,
        spelled: Callable[[str], str] = str,
        *,
        shown: Callable[[Any], str] = repr,
        write: str = "write",
    ) -> str:
        """The text of the error message.

        Args:
            spelled: how the user knows an argument, by its name.
            shown: how the user writes a value.
            write: what the user does to change it.
        """
        value = "" if self.value is ... else f"={short(shown(self.value))}"
        advice = f"; {write} {self.advice}" if self.advice else ""
        rest = _REFERENCE.sub(lambda found: spelled(found[1]), f"{self.problem}{advice}")
        return f"{spelled(self.name)}{value} {rest}"


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The bounds of an option; for a list, those of each item."""

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None  # infinity is refused unless this is infinite
    choices: tuple[Any, ...] = ()
    also: tuple[Any, ...] = ()  # values that are possible although they are out of bounds
    example: Any = None  # a possible value; its type is the type of the option

    @property
    def any(self) -> bool:
        """Whether everything is possible."""
        ends = (self.above, self.at_least, self.below, self.at_most)
        return not self.choices and all(end is None for end in ends)

    def holds(self, value: Any) -> bool:
        """Whether a value is possible."""
        if isinstance(self.example, list | tuple):
            several = isinstance(value, Sequence) and not isinstance(value, str)
            enough = several and (len(value) > 0 or [] in (self.example, *self.also))
            return enough and all(self._has(item) for item in value)
        return self._has(value)

    def _has(self, value: Any) -> bool:
        if self.choices:
            alike = isinstance(value, bool) == isinstance(self.choices[0], bool)  # True is 1.
            return alike and value in self.choices
        whole = isinstance(self._item, int)
        number = hasattr(value, "__index__") if whole else isinstance(value, Real)
        if isinstance(value, bool) or not number:
            return False
        if value in self.also:
            return True
        return bool(
            (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.below is None or value < self.below)
            and (value <= self.at_most if self.at_most is not None else value < math.inf)
        )

    @property
    def _item(self) -> Any:
        """An example of one number."""
        if isinstance(self.example, list | tuple):
            return self.example[0] if self.example else 0.0
        return self.example

    def advice(self, name: str) -> str:
        """The advice for an option whose value is not possible."""
        if self.choices:
            return " or ".join(map(str, self.choices))
        whole = isinstance(self._item, int)
        if isinstance(self.example, list | tuple):
            kind = "a list of whole numbers" if whole else "a list of numbers"
        else:
            kind = "a whole number" if whole else "a number"
        if self.at_least is not None and self.at_most is not None and self.at_most < math.inf:
            limits = f"from {self.at_least} to {self.at_most}"
        else:
            ends = {
                "above": self.above,
                "of at least": self.at_least,
                "below": self.below,
                "of at most": self.at_most,
            }
            finite = {word: end for word, end in ends.items() if end not in (None, math.inf)}
            limits = " and ".join(f"{word} {end}" for word, end in finite.items())
        others = "".join(f" or {value}" for value in self.also)
        example = re.sub(r"\.0\b| ", "", str(self.example))
        return f"{kind} {limits}{others}, e.g. {{{name}}}={example}"


def option(default: Any, description: str = "", *, example: Any = None, **bounds: Any) -> Any:
    """A field of a dataclass of options.

    Args:
        default: its default; a list is copied.
        description: one line for ``--help``.
        example: a value to show in messages; the default if not given.
        bounds: see `Bounds`.
    """
    limits = Bounds(example=default if example is None else example, **bounds)
    metadata = {"help": description, "bounds": limits}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


class Options:
    """Base of all dataclasses of options: their fields are checked when one is made."""

    def __post_init__(self) -> None:
        validate(self)


def validate(options: Any) -> None:
    """Checks all fields of a dataclass.

    Raises:
        OptionError: for the first one that is out of its bounds.
    """
    for item in dataclasses.fields(options):
        bounds = item.metadata.get("bounds")
        if bounds is not None:
            _check(item.name, getattr(options, item.name), bounds, type(options))


def check(name: str, value: Any, *, example: Any = None, **bounds: Any) -> None:
    """Checks an argument of a function.

    Args:
        name: of the argument.
        value: that was given.
        example: a possible value, of the right type; not needed beside ``choices``.
        bounds: see `Bounds`.

    Raises:
        OptionError: it is out of its bounds.
    """
    _check(name, value, Bounds(example=example, **bounds), None)


def whole_number(name: str, value: Any, *, at_least: int) -> int:
    """The value of an argument that is a whole number, as an int.

    Args:
        name: of the argument.
        value: that was given; numpy's integers count, True and 3.0 do not.
        at_least: the smallest one that is possible.

    Raises:
        OptionError: it is something else.
    """
    check(name, value, example=max(at_least, 1), at_least=at_least)
    return index(value)


def _check(name: str, value: Any, bounds: Bounds, owner: type | None) -> None:
    if not bounds.any and not bounds.holds(value):
        raise OptionError(name, value, advice=bounds.advice(name), owner=owner)
