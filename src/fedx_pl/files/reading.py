"""Reading untrusted files: what is too long or too deeply nested is refused before it is read.

Wrong content is a `ValueError` with a message of one line; an error of the system is an `OSError`.
"""

import errno
import json
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fedx_pl.errors import one_line

if TYPE_CHECKING:
    from torch import Tensor

# Bytes. A configuration has 4,000, and PyYAML needs about ten seconds for a million.
MAX_YAML = 250_000
MAX_JSON = 64_000_000  # bytes; a split of a million images has 8 million
MAX_DEPTH = 20  # of nested lists and mappings
MAX_NODES = 50_000  # values in a YAML file; those behind an alias count each time
MAX_TENSORS = 50_000  # in one file
MAX_HEADER = 10_000_000  # bytes of names and shapes of tensors


def read_bytes(path: Path, limit: int | None = None) -> bytes:
    """The content of a regular file; devices and pipes might never end.

    Args:
        path: the file.
        limit: the largest number of bytes.

    Raises:
        OSError: it cannot be read, or is not a regular file.
        ValueError: it is too long.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if limit is not None and status.st_size > limit:
        raise ValueError(f"it has {status.st_size:,} bytes; at most {limit:,} are read")
    with open(path, "rb") as file:
        return file.read() if limit is None else file.read(limit)


def read_yaml(path: Path) -> Any:
    """Plain values from an untrusted YAML file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not YAML, or larger or deeper than a configuration can be.
    """
    return parse_yaml(read_bytes(path, MAX_YAML))


def parse_yaml(text: str | bytes, *, plain: bool = False) -> Any:
    """Plain values from untrusted YAML.

    Args:
        text: in UTF-8 if it is bytes.
        plain: keep all values as text.
    """
    if len(text) > MAX_YAML:
        raise ValueError(f"it has {len(text):,} characters; at most {MAX_YAML:,} are read")
    try:
        decoded = text.decode() if isinstance(text, bytes) else text
        return yaml.load(decoded, Loader=_BoundedTextLoader if plain else _BoundedLoader)
    except Exception as error:  # Its parsers of numbers, dates and so on raise anything.
        raise ValueError(one_line(error)) from error


def read_json(path: Path) -> Any:
    """Plain values from an untrusted JSON file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON, or larger or deeper than one of ours can be.
    """
    return parse_json(read_bytes(path, MAX_JSON))


def parse_json(text: str | bytes, *, strict: bool = False) -> Any:
    """Plain values from untrusted JSON; a `ValueError` if it is not JSON, or nests too deep.

    Args:
        text: in UTF-8 if it is bytes.
        strict: refuse NaN and Infinity, which Python reads and JSON does not have.
    """
    if len(text) > MAX_JSON:
        raise ValueError(f"it has {len(text):,} characters; at most {MAX_JSON:,} are read")
    try:
        tree = json.loads(text, parse_constant=_no_constant if strict else None)
    except RecursionError:
        raise ValueError(f"it nests more than {MAX_DEPTH} deep") from None
    level = [tree]
    for _ in range(MAX_DEPTH + 1):
        level = [node for node in level if isinstance(node, dict | list)]
        if not level:
            return tree
        level = [
            item for node in level for item in (node.values() if isinstance(node, dict) else node)
        ]
    raise ValueError(f"it nests more than {MAX_DEPTH} deep")


def parse_tensors(content: bytes) -> "dict[str, Tensor]":
    """The tensors of untrusted safetensors; a `ValueError` if unreadable or too many."""
    length = int.from_bytes(content[:8], "little")
    if length > MAX_HEADER:
        raise ValueError(
            f"it has {length:,} bytes of names of tensors; at most {MAX_HEADER:,} are read"
        )
    try:
        count = len(parse_json(content[8 : 8 + length]))
    except (TypeError, ValueError) as error:
        raise ValueError(f"its header cannot be read ({one_line(error)})") from error
    if count > MAX_TENSORS:
        raise ValueError(f"it has {count:,} tensors; at most {MAX_TENSORS:,} are read")
    from safetensors.torch import load

    try:
        return load(content)
    except Exception as error:  # A dtype that torch does not have, a shape beyond 64 bits, ...
        raise ValueError(one_line(error)) from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class _Bounded:
    """Counts the values of a YAML document while it is read."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)  # type: ignore[call-arg]
        self.depth = 0
        self.count = 0
        self.sizes: dict[int, int] = {}  # by the id of a finished node

    def compose_node(self, parent: Any, index: Any) -> Any:
        before = self.count
        alias = self.check_event(yaml.AliasEvent)  # type: ignore[attr-defined]
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ValueError(f"it nests more than {MAX_DEPTH} deep")
        node = super().compose_node(parent, index)  # type: ignore[misc]
        # Behind an alias stands a whole tree, which others will walk through: a few lines can stand
        # for billions. One that is not finished holds itself, and has no end.
        self.count += self.sizes.get(id(node), MAX_NODES) if alias else 1
        if self.count > MAX_NODES:
            raise ValueError(f"it has more than {MAX_NODES:,} values")
        self.sizes.setdefault(id(node), self.count - before)
        self.depth -= 1
        return node


class _BoundedLoader(_Bounded, yaml.SafeLoader):
    pass


class _BoundedTextLoader(_Bounded, yaml.BaseLoader):
    pass
