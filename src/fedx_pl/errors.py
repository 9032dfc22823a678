"""The exception for mistakes of the user, and how messages are made and printed."""

import json
import os
import re
import shlex
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

Report = Callable[[str], None]  # prints a line
Options = TypeVar("Options")

# Control characters, marks of the direction of writing, and bytes that are not UTF-8 (surrogates).
_UNREADABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_ESCAPED = re.compile(r"\\(x[0-9a-f]{2}|u[0-9a-f]{4})")
MAX_SHOWN = 200  # characters of a value in a message
MAX_MESSAGE = 2000


class UserError(Exception):
    """A mistake in the input, which the user can correct.

    The message names the key or argument, its value and what to write instead. A command prints it
    as one line, without a traceback unless ``--debug`` was typed, and exits with code 2.
    """


def require(flag: str, value: object, possible: bool, instead: str) -> None:
    """Raises a `UserError` for a flag of the command line unless its value is possible.

    Args:
        flag: as it is typed, e.g. ``--count``.
        value: that was given.
        possible: the check; write it so that NaN fails.
        instead: what to type.
    """
    if not possible:
        raise UserError(f"{flag}={short(value)} is not possible; type {instead}")


def first_line(error: BaseException) -> str:
    """The first line of what an exception says, which may be many; its type if it says nothing."""
    return str(error).strip().partition("\n")[0].strip() or type(error).__name__


def one_line(error: BaseException) -> str:
    """All that an exception says, on one line; its type if it says nothing."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_SHOWN * 2 else f"{text[: MAX_SHOWN * 2]}..."


def short(value: object) -> str:
    """A value as text, cut to what fits into a message."""
    text = str(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def printable(message: str) -> str:
    """A message without control characters, which the name of a file may hold.

    A long message loses its middle, since its end says what to type.
    """
    if len(message) > MAX_MESSAGE:
        message = f"{message[: MAX_MESSAGE // 2]} ... {message[-MAX_MESSAGE // 2 :]}"
    return for_terminal(message)


def has_controls(text: str) -> bool:
    """Whether a text holds control characters, or surrogates that do not stand for a byte.

    Bytes that are not UTF-8, which file names may hold, are allowed: Python has surrogates for
    them.
    """
    categories = {letter: unicodedata.category(letter) for letter in set(text)}
    lone = [
        letter
        for letter, kind in categories.items()
        if kind == "Cs" and not "\udc80" <= letter <= "\udcff"
    ]
    return bool(lone) or "Cc" in categories.values()


def options_of(name: str, value: Any, kind: type[Options]) -> Options:
    """The value of an argument that takes options; None stands for the defaults.

    Args:
        name: name of the argument.
        value: the value that was given.
        kind: the class of the options.

    Raises:
        UserError: the value is something else.
    """
    if value is None:
        return kind()
    if not isinstance(value, kind):
        shown = value.__name__ if isinstance(value, type) else repr(value)
        shown = shown if len(shown) < 60 else f"{type(value).__name__}(...)"
        raise UserError(f"{name}={shown} is not possible; write {name}={kind.__name__}(...)")
    return value


@contextmanager
def in_arguments(wanted: bool = True) -> Iterator[None]:
    """Makes a `UserError` of `data.sources` speak of arguments: it names ``data.*`` keys.

    Args:
        wanted: False leaves it as it is.
    """
    try:
        yield
    except UserError as error:
        text = re.sub(
            r"(?<![\w./=\"'-])data\.(?=[a-z])", "", str(error).replace("data.name", "source")
        )
        if not wanted or text == str(error):
            raise
        raise UserError(re.sub(r"\btype (?!of\b)", "write ", text)) from error.__cause__


def wrong_type(key: str, value: object, usual: object) -> str:
    """The message for a value that cannot be converted to the type of its key.

    Args:
        key: the key, as typed on the command line.
        value: the value that was given.
        usual: a value of the right type; a dictionary for a group of keys.
    """
    value = short(value)
    if isinstance(usual, dict):
        first, example = next(iter(usual.items()))
        return (
            f"{key} is a group of keys and has no value of its own; "
            f"type e.g. {key}.{first}={example}"
        )
    if isinstance(usual, bool):
        return f"{key}={value} is neither true nor false; type {key}=true or {key}=false"
    if isinstance(usual, list):
        kind = (
            "a list of numbers in brackets"
            if usual and isinstance(usual[0], int | float)
            else "a list in brackets"
        )
        example = f"[{','.join(map(str, usual or ('a', 'b')))}]"
        return f"{key}={value} is not {kind}; type e.g. {key}={example}"
    kinds = {int: "a whole number", float: "a number", str: "a single text"}
    kind = kinds.get(type(usual), "a value that it takes")
    example = f"{usual}" or "NAME"
    return f"{key}={value} is not {kind}; type e.g. {key}={example}"


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that was probably meant; empty if none is near enough.

    The right last part in the wrong group counts as near: ``rounds`` is ``federation.rounds``.
    """
    if len(word) > MAX_SHOWN:
        return ""  # Not a typo, and comparing takes the square of its length.
    words = list(known)
    leaf = word.split(".")[-1]
    if same_leaf := [candidate for candidate in words if candidate.split(".")[-1] == leaf]:
        return same_leaf[0]
    whole = "." in word  # Otherwise the groups of the candidates do not count.
    scores = {
        candidate: _likeness(
            word.lower(), (candidate if whole else candidate.split(".")[-1]).lower()
        )
        for candidate in words
    }
    best = max(words, key=scores.__getitem__, default="")
    return best if best and scores[best] else ""


def _likeness(word: str, candidate: str) -> float:
    """The similarity of two words, from 0 to 1; 0 if one is hardly a typo of the other.

    People seldom miss the first letter. One letter of three or four makes another word (gpu, cpu),
    and long words share many letters by chance.
    """
    ratio = SequenceMatcher(None, word, candidate).ratio()
    cut_short = len(word) > 2 and candidate.startswith(word)  # eval for evaluate
    swapped = sorted(word) == sorted(candidate)  # svnh for svhn
    if cut_short or swapped:
        return max(ratio, 0.9)
    if word[:1] != candidate[:1]:
        return ratio if ratio >= 0.85 else 0.0
    enough = 0.76 if len(word) <= 4 else 0.65 if len(word) <= 6 else 0.8
    return ratio if ratio >= enough else 0.0


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """``; did you mean PREFIXNAME?`` for an error message; empty if no known word is near."""
    near = nearest(word, known)
    return f"; did you mean {prefix}{near}?" if near else ""


def known_names(word: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a message about an unknown word: the nearest name, and all names."""
    names = list(known)
    guess = did_you_mean(word, names, prefix)
    return f"{guess} Known: {', '.join(names)}" if guess else f"; type one of {', '.join(names)}"


def install_hint(extra: str) -> str:
    """The command that installs an extra into the running environment.

    It works wherever the package came from. A checkout is named by its folder. For a wheel the
    command lists the requirements of the extra, since no index need know the package.
    """
    pip = f"{shlex.quote(sys.executable)} -m pip install"
    if (checkout := _checkout()) is not None:
        return f"{pip} -e {shlex.quote(f'{checkout}[{extra}]')}"
    return f"{pip} {' '.join(shlex.quote(requirement) for requirement in _requirements(extra))}"


def _checkout() -> Path | None:
    """The folder of an editable install; None for a wheel."""
    from importlib.metadata import PackageNotFoundError, distribution  # Here: it loads slowly.

    try:
        text = distribution("fedx-pl").read_text("direct_url.json")
    except PackageNotFoundError:  # Not installed: the source is on the path.
        folder = Path(__file__).parents[2]
    else:
        origin = json.loads(text or "{}")
        if not origin.get("dir_info", {}).get("editable"):
            return None
        folder = Path(unquote(urlsplit(origin["url"]).path))
    return folder if (folder / "setup.cfg").is_file() else None


def _requirements(extra: str) -> list[str]:
    """The requirements of an extra, from the metadata of the installed package."""
    from importlib.metadata import PackageNotFoundError, distribution  # Here: it loads slowly.

    try:
        lines = distribution("fedx-pl").requires or []
    except PackageNotFoundError:
        return [f"fedx-pl[{extra}]"]
    parts = [line.partition(";") for line in lines]
    found = [
        name.strip()
        for name, _, marker in parts
        if re.search(rf"""\bextra == ["']{extra}["']""", marker)
    ]
    return found or [f"fedx-pl[{extra}]"]


# --- untrusted texts: made readable where they enter, and harmless where they are printed ---------


def readable(name: str | Path) -> str:
    r"""The name of a file or folder as text that every format can hold.

    Names on a disk are bytes. A byte that is not text becomes ``\xe9``, a control character
    ``\x1b``. Different names stay different: a name that contains such an escape has its
    backslashes doubled.
    """
    text = str(name)
    if not _UNREADABLE.search(text) and not _ESCAPED.search(text):
        return text
    return _UNREADABLE.sub(_escape, text.replace("\\", "\\\\"))


def for_terminal(text: object) -> str:
    """Text without control characters; line breaks and tabs stay."""
    return _UNREADABLE.sub(
        lambda found: found[0] if found[0] in "\n\t" else _escape(found), str(text)
    )


def say(text: object) -> None:
    """Prints a line that may hold untrusted names."""
    print(for_terminal(text))


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # as Python spells the byte of a name
        return f"\\x{os.fsencode(found[0])[0]:02x}"
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}"
