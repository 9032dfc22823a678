"""Messages as Flower's records.

A site may have forged them, so they are measured before they are put together.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from fedx_pl.sites import wire

MOST_RECORD = 2 * 2**20  # bytes of an object that is no part of the weights; the JSON is one


class Size(NamedTuple):
    """The bytes of the tensors in a message: their names and shapes alone, and everything."""

    names: int
    tensors: int


class Reply(NamedTuple):
    """The answer to a message, or why there is none."""

    message: str
    content: wire.Content | None
    error: str = ""
    offline: bool = False  # The site is gone: no fault of its answer.


class Coming(NamedTuple):
    """An answer that is being uploaded: a site announces it first, then sends its parts."""

    message: str
    parts: list[str]
    there: dict[str, bytes]
    made_here: bool  # by the SuperLink, as nobody answers


def reply_of(asked: str, coming: Coming, sent: Size) -> Reply:
    """Reads an answer whose parts have all come.

    Args:
        asked: the message that it answers.
        coming: its parts.
        sent: the size of the largest message to a site; an answer is about as large.
    """
    from flwr.common.constant import ErrorCode
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    try:
        most = Size(2 * sent.names + 2**16, 2 * sent.tensors + 2**20)
        require_small(coming.there, most.tensors)
        message: Any = inflate_object_from_contents(coming.message, coming.there)
        if message.has_error():
            known = message.error.code in (
                ErrorCode.NODE_UNAVAILABLE,
                ErrorCode.MESSAGE_UNAVAILABLE,
            )
            gone = known and coming.made_here
            return Reply(
                asked,
                None,
                wire.GONE if gone else wire.plain(message.error.reason) or "no answer",
                offline=gone,
            )
        return Reply(asked, read(message.content, most))
    except wire.BadMessage as error:
        return Reply(asked, None, wire.plain(error))
    except Exception as error:  # Whatever Flower's readers do with bytes that a site made up.
        return Reply(asked, None, f"it cannot be read ({type(error).__name__})")


def require_small(parts: dict[str, bytes], most: float) -> None:
    """Refuses an array that names a part many times: a small answer could stand for terabytes."""
    from flwr.app import Array
    from flwr.supercore.inflatable.inflatable_object import (
        get_object_body,
        get_object_head_values_from_object_content,
    )

    total = 0
    for content in parts.values():
        kind, children, _ = get_object_head_values_from_object_content(content)
        if kind != "ArrayChunk" and len(content) > MOST_RECORD:
            raise wire.BadMessage(f"it has a record of {len(content):,} bytes")
        if kind == "Array":
            total += sum(
                len(parts[children[at]])
                for at in json.loads(get_object_body(content, Array))["arraychunk_ids"]
            )
    if total > most:
        raise wire.BadMessage(f"it has {total:,} bytes of tensors, {most:,.0f} are allowed")


def size_of(blob: bytes) -> Size:
    """Measures safetensors without reading them."""
    return Size(int.from_bytes(blob[:8], "little"), len(blob))


def record(content: wire.Content) -> Any:
    """Makes the Flower record of a message without a seal: a site's answer."""
    return sealed_record(*wire.pack(content), {})


def sealed_record(text: str, blob: bytes, seal: dict[str, Any]) -> Any:
    """Makes the Flower record of a message.

    Args:
        text: its JSON.
        blob: its tensors.
        seal: the fields of its seal, if it has one.
    """
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    array = Array(dtype="uint8", shape=(len(blob),), stype="safetensors", data=blob)
    return RecordDict(
        {"tensors": ArrayRecord({"blob": array}), "meta": ConfigRecord({"json": text} | seal)}
    )


def read(
    record: Any, most: Size | None = None, check: Callable[[Any, str, bytes], None] | None = None
) -> wire.Content:
    """Reads a Flower record, which a stranger may have made.

    Args:
        record: the record of a message.
        most: the size that its tensors may have.
        check: takes the fields of the seal, the JSON and the tensors; raises `BadMessage` if they
            are not genuine.
    """
    try:
        text = record["meta"]["json"]
        blob = record["tensors"]["blob"].data
    except (KeyError, TypeError, AttributeError) as error:
        raise wire.BadMessage(f"it lacks {error}") from error
    if not isinstance(text, str) or not isinstance(blob, bytes):
        raise wire.BadMessage("it has another form")
    if most is not None and (size_of(blob).names > most.names or len(blob) > most.tensors):
        raise wire.BadMessage("it has more or larger tensors than the network")
    if check is not None:
        check(record["meta"], text, blob)
    return wire.unpack(text, blob)
