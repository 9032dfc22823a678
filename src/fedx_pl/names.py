"""Texts from outside: names are made readable where they enter, lines harmless where they reach a terminal."""

import os
import re
from pathlib import Path

# Control characters, marks that turn the direction of writing, and bytes that are no UTF-8 (surrogates).
_UNREADABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_ESCAPED = re.compile(r"\\(x[0-9a-f]{2}|u[0-9a-f]{4})")


def readable(name: str | Path) -> str:
    r"""A name of a file or folder as text that every format can hold.

    Names on a disk are bytes. What is no text becomes ``\xe9``, a control character ``\x1b``. Different names stay
    different: a name that is spelled like that has its backslashes doubled.
    """
    text = str(name)
    if not _UNREADABLE.search(text) and not _ESCAPED.search(text):
        return text
    return _UNREADABLE.sub(_escape, text.replace("\\", "\\\\"))


def for_terminal(text: object) -> str:
    """Text that a terminal shows and does not obey; its lines stay lines."""
    return _UNREADABLE.sub(lambda found: found[0] if found[0] in "\n\t" else _escape(found), str(text))


def say(text: object) -> None:
    """Prints a line that may hold names from outside."""
    print(for_terminal(text))


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # as Python spells the byte of a name
        return f"\\x{os.fsencode(found[0])[0]:02x}"
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}"
