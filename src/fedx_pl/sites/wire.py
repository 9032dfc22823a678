"""The wire format of coordinator and sites: one JSON text and one safetensors blob per message."""

import math
import re
from typing import Any, NamedTuple

from fedx_pl.files import json_text, tensor_bytes
from fedx_pl.files.reading import parse_json, parse_tensors
from fedx_pl.methods.base import State

# Flower's names for the kinds of messages.
HELLO = "query"
TRAIN = "train"
END = "query.end"
# How a federation ended for a site, in `END`.
FINISHED = "finished"
STOPPED = "stopped"
REFUSED = "refused"
MAX_JSON = 1_000_000  # characters
MAX_TEXT = 1000  # characters
MAX_NUMBER = 1e9  # A loss or metric beyond it measures nothing.
GONE = "it is gone; it may come back for a later round"  # why a site has no answer


class BadMessage(Exception):
    """Raised for a message that makes no sense; the text says why."""


class Content(NamedTuple):
    """The content of a message."""

    meta: dict[str, Any]
    tensors: State


def pack(content: Content) -> tuple[str, bytes]:
    """Writes a message as JSON and safetensors; NaN and infinity become null."""
    return json_text(content.meta), tensor_bytes(content.tensors)


def unpack(text: str, blob: bytes) -> Content:
    """Reads a message, which a stranger may have written."""
    if len(text) > MAX_JSON:
        raise BadMessage(f"its JSON has {len(text):,} characters")
    try:
        meta = parse_json(text, strict=True)
        tensors = parse_tensors(blob)
    except ValueError as error:
        raise BadMessage(f"it cannot be read ({error})") from error
    if not isinstance(meta, dict):
        raise BadMessage("its JSON is not an object")
    return Content(meta, tensors)


def plain(words: object) -> str:
    """A stranger's text as one short, printable line, since a terminal obeys control characters."""
    line = " ".join(str(words).split())[:MAX_TEXT]
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def whole(meta: dict[str, Any], key: str, least: int = 0, most: int = 2**53 - 1) -> int:
    """Reads a count from a message."""
    value = meta.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        range_ = f"from {least} on" if most == 2**53 - 1 else f"from {least} to {most}"
        raise BadMessage(f"{key}={plain(repr(value))} is not a whole number {range_}")
    return value


def text(meta: dict[str, Any], key: str) -> str:
    """Reads a short text from a message."""
    value = meta.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT or not value.isprintable():
        raise BadMessage(f"{key} is not a short text")
    return value


def numbers(meta: dict[str, Any], key: str, most: int = 64) -> dict[str, float]:
    """Reads named numbers from a message; null, infinite and absurdly large ones become NaN."""
    found = meta.get(key)
    if not isinstance(found, dict) or len(found) > most:
        raise BadMessage(f"{key} is not a small table of numbers")
    for name, value in found.items():
        good = value is None or (isinstance(value, int | float) and not isinstance(value, bool))
        if not (good and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", name)):
            raise BadMessage(f"{key} has an entry {plain(name)[:64]!r} that is no named number")
    return {
        name: math.nan if value is None or not abs(value) <= MAX_NUMBER else float(value)
        for name, value in found.items()
    }
