"""Files that were made to be read for ever: each is refused, in one line."""

import json
import os
from pathlib import Path

import pytest
import torch

from fedx_pl.files import tensor_bytes
from fedx_pl.files.reading import (
    parse_json,
    parse_tensors,
    parse_yaml,
    read_bytes,
    read_json,
    read_yaml,
)

# Nine lines that stand for three billion values.
LAUGHS = "a: &a [ha, ha, ha, ha, ha, ha, ha, ha, ha]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)


def spelled_otherwise(content: bytes) -> bytes:
    """The same tensors, written without a word that could be counted."""
    header = content[8:].replace(b'"dtype"', b'"\\u0064type"')
    return len(header).to_bytes(8, "little") + header


def zero_size_tensors(count: int, shape: tuple[int, ...] = (0,)) -> bytes:
    header = {
        str(number): {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
        for number in range(count)
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (LAUGHS, "more than 50,000 values"),
        ("a: &a [1, *a]", "more than 50,000 values"),
        ("[" * 3000, "nests more than 20 deep"),
        ("{a: " * 3000, "nests more than 20 deep"),
        ("- " * 3000, "nests more than 20 deep"),
        ("#" * 300_000, "300,000 characters"),
        ("!!bool perhaps", "perhaps"),
        ("!!int ''", "index"),
        ("1" + ":1" * 3000 + ".5", "too large"),
        ("2001-99-99", "month"),
        ("!!python/object/apply:os.system [true]", "could not determine a constructor"),
        ("a: [", "line 1"),
    ],
)
def test_huge_yaml_is_refused_in_one_line(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as error:
        parse_yaml(text)
    assert "\n" not in str(error.value)


def test_yaml_with_a_few_aliases_is_read() -> None:
    text = "usual: &usual {lr: 0.1}\nrun: {<<: *usual, seed: 1}\nother: *usual"
    assert parse_yaml(text) == {
        "usual": {"lr": 0.1},
        "run": {"lr": 0.1, "seed": 1},
        "other": {"lr": 0.1},
    }
    assert parse_yaml("[1, no]", plain=True) == ["1", "no"]


@pytest.mark.parametrize(
    "text", ["[" * 21 + "]" * 21, "[" * 100_000, '{"a":' * 60 + "1" + "}" * 60]
)
def test_json_that_nests_too_deep_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="nests more than 20 deep"):
        parse_json(text)
    assert parse_json('{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (zero_size_tensors(50_001), "50,001 tensors"),
        (spelled_otherwise(zero_size_tensors(50_001)), "50,001 tensors"),
        ((2**40).to_bytes(8, "little") + b"{}", "bytes of names"),
        (zero_size_tensors(1, shape=(0, 2**62, 2**62)), "overflow"),
        (b"abc", "header"),
        (b"", "header"),
    ],
)
def test_too_many_tensors_are_refused(content: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_tensors(content)


def test_whole_files_are_read(tmp_path: Path) -> None:
    content = tensor_bytes({"w": torch.arange(3.0)})
    assert torch.equal(parse_tensors(content)["w"], torch.arange(3.0))
    (tmp_path / "a.json").write_text('{"a": "ä"}', encoding="utf-8")
    assert read_json(tmp_path / "a.json") == read_yaml(tmp_path / "a.json") == {"a": "ä"}


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")  # Opening it would wait for a writer.
    for path in (Path(os.devnull), Path("/dev/zero"), pipe, tmp_path):
        for read in (read_yaml, read_json, read_bytes):
            with pytest.raises(OSError, match="not a regular file"):
                read(path)


def test_a_file_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "long", "wb") as file:
        file.truncate(10**12)  # A hole, which takes no room.
    for read in (read_yaml, read_json):
        with pytest.raises(ValueError, match="1,000,000,000,000 bytes"):
            read(tmp_path / "long")
