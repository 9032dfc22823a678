"""Messages: what goes in comes out, and bytes from anyone are read or refused, nothing else."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedx_pl.sites import wire
from fedx_pl.sites.wire import BadMessage, Content

EMPTY = wire.pack(Content({}, {}))[1]


def blob(header: object, data: bytes = b"") -> bytes:
    """Builds safetensors by hand: the header's length in eight bytes, the header, the data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(dtype: str, shape: list[int], size: int) -> bytes:
    return blob({"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}, bytes(size))


def test_a_message_comes_back_as_it_was() -> None:
    meta = {
        "run": "ab12",
        "round": 3,
        "config": {"optim": {"lr": 0.1}, "mean": [0.5, 0.25]},
        "health": True,
        "x": None,
    }
    tensors = {
        "weight": torch.randn(4, 3, 2, 2),
        "channels_last": torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
        "a/slice": torch.arange(12).reshape(3, 4)[:, 1:3],
        "steps": torch.tensor(2**40),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "mask": torch.tensor([True, False]),
        "none": torch.zeros(0, 5),
        "nan": torch.tensor([math.nan, math.inf]),
    }
    found = wire.unpack(*wire.pack(Content(meta, tensors)))
    assert found.meta == meta
    assert found.tensors.keys() == tensors.keys()
    for name, original in tensors.items():
        assert found.tensors[name].dtype == original.dtype
        assert torch.equal(found.tensors[name].nan_to_num(7), original.nan_to_num(7))


def test_packing_changes_nothing_at_home() -> None:
    weight = torch.nn.Parameter(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))
    wire.pack(Content({}, {"w": weight}))
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert weight.requires_grad


def test_what_is_no_number_travels_as_null_and_is_not_a_number_again() -> None:
    """JSON has no NaN, so null replaces it in tables and lists at any depth."""
    losses = {"total": math.nan, "term": -math.inf, "good": 1.5}
    text, data = wire.pack(Content({"losses": losses, "deep": [{"x": (math.inf, 2)}]}, {}))
    assert "NaN" not in text
    assert "Infinity" not in text
    meta = wire.unpack(text, data).meta
    assert meta["deep"] == [{"x": [None, 2]}]
    found = wire.numbers(meta, "losses")
    assert math.isnan(found["total"])
    assert math.isnan(found["term"])
    assert found["good"] == 1.5


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "nonsense",
        "[]",
        '"text"',
        "3",
        "null",
        "[" * 100_000,
        '{"a":' * 100_000,
        "{'a': 1}",
        '{"a": ' + "9" * 5000 + "}",
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a": 1} {"b": 2}',
        " " * (wire.MAX_JSON + 1),
    ],
    ids=lambda text: text[:12].strip() or "blank",
)
def test_text_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(BadMessage):
        wire.unpack(text, EMPTY)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        b"\xff" * 64,
        blob(b"{"),
        blob(b'{"w":' * 60_000),
        blob([]),
        blob({"w": 3}),
        tensor("F32", [4], 16)[:-1],  # torn
        tensor("F32", [4], 16) + b"more",
        tensor("F32", [5], 16),
        tensor("F32", [-1], 4),
        tensor("F32", [2**40, 2**40], 16),  # overflows
        tensor("F32", [0, 2**62, 2**62], 0),  # has no element, and strides that overflow
        tensor("F4", [2], 1),
        tensor("F8_E8M0", [1], 1),
        tensor("WORD", [1], 1),
    ],
)
def test_tensors_that_are_none_are_refused(data: bytes) -> None:
    with pytest.raises(BadMessage):
        wire.unpack("{}", data)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(
    st.text(max_size=40) | json_like.map(json.dumps), st.binary(max_size=80) | json_like.map(blob)
)
def test_no_bytes_do_anything_but_be_refused(text: str, data: bytes) -> None:
    try:
        found = wire.unpack(text, data)
    except BadMessage:
        return
    assert isinstance(found.meta, dict)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 200), st.binary(min_size=1, max_size=8))
def test_a_damaged_message_is_refused_or_has_tensors(at: int, damage: bytes) -> None:
    good = wire.pack(Content({}, {"a": torch.ones(3, 2), "b": torch.arange(4)}))[1]
    bad = good[: at % len(good)] + damage + good[at % len(good) + len(damage) :]
    try:
        found = wire.unpack("{}", bad)
    except BadMessage:
        return
    assert all(isinstance(value, torch.Tensor) for value in found.tensors.values())


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(["key", "other"]), json_like))
def test_fields_are_what_they_should_be_or_refused(meta: dict[str, object]) -> None:
    meta = json.loads(json.dumps(meta))  # As it would arrive.
    for read in (wire.whole, wire.text, wire.numbers):
        try:
            found = read(meta, "key")
        except BadMessage:
            continue
        assert isinstance(found, int | str | dict)
        assert not isinstance(found, bool)


def test_counts() -> None:
    assert wire.whole({"n": 0}, "n") == 0
    assert wire.whole({"n": 2**53 - 1}, "n", 5) == 2**53 - 1
    with pytest.raises(BadMessage, match=r"n=8 is not a whole number from 5 to 7"):
        wire.whole({"n": 8}, "n", 5, 7)
    for bad in (True, False, -1, 4, 2**53, 1.0, "7", None, [7], math.nan):
        with pytest.raises(BadMessage, match=r"n=.* is not a whole number from 5 on"):
            wire.whole({"n": bad}, "n", 5)
    with pytest.raises(BadMessage):
        wire.whole({}, "n")


def test_texts() -> None:
    assert wire.text({"t": "hospital-ä"}, "t") == "hospital-ä"
    for bad in ("", "x" * 1001, "two\nlines", "\x1b[2J", "\u202e", "\ud800", 3, None, ["x"]):
        with pytest.raises(BadMessage, match="t is not a short text"):
            wire.text({"t": bad}, "t")


def test_tables_of_numbers() -> None:
    assert wire.numbers({"t": {"a": 1, "b": 2.5}}, "t") == {"a": 1.0, "b": 2.5}
    for absurd in ("1e999", "-1e999", "1e308", "-1e10", "9" * 400):
        assert math.isnan(wire.numbers(json.loads(f'{{"t": {{"a": {absurd}}}}}'), "t")["a"])
    many = {f"n{i}": 1 for i in range(65)}
    for bad in (
        None,
        [],
        3,
        many,
        {"a": True},
        {"a": "1"},
        {"a": [1]},
        {"a b": 1},
        {"": 1},
        {"a/b": 1},
        {"x" * 65: 1},
        {"verlust_ä": 1},
    ):
        with pytest.raises(BadMessage, match="t "):
            wire.numbers({"t": bad}, "t")


def test_text_of_others_is_one_line_without_terminal_codes() -> None:
    assert wire.plain("  a\n\tb \x1b[31m\u202ec\ud800 ") == "a b ?[31m?c?"
    assert wire.plain(ValueError("x" * 5000)) == "x" * 1000
    assert wire.plain("") == ""
