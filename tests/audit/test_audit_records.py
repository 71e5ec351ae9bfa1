"""Records have one canonical form for everything that a tool returns or a guest sends."""

from __future__ import annotations

import dataclasses
import datetime
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from audit.record_examples import EXAMPLES
from toolcell.audit import records
from toolcell.audit.records import FIELDS
from toolcell.support import packing
from toolcell.support.packing import Unrecordable

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(value=plain)
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    assert packing.unpack(packing.pack(value)) == value


@given(value=plain)
def test_encoding_what_was_decoded_gives_the_same_bytes(value: Any) -> None:
    packed = packing.pack(value)

    assert packing.pack(packing.unpack(packed)) == packed


def test_the_order_of_keys_is_kept_because_a_script_can_see_it() -> None:
    assert list(packing.unpack(packing.pack({"b": 1, "a": 2}))) == ["b", "a"]


@dataclasses.dataclass
class Point:
    x: int


class Rude:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(2**70, 2**70, id="an int of any size"),
        pytest.param(-(2**70), -(2**70), id="a negative one"),
        pytest.param("\ud800", "\ud800", id="a lone surrogate"),
        pytest.param((1, 2), [1, 2], id="a tuple"),
        pytest.param({3, 1, 2}, [1, 2, 3], id="a set, as a guest gets it"),
        pytest.param(datetime.date(2026, 1, 2), "2026-01-02", id="a date"),
        pytest.param(Point(3), {"x": 3}, id="a dataclass"),
        pytest.param({1: 2}, {1: 2}, id="a key that is not text"),
    ],
)
def test_odd_values_have_a_form(value: Any, expected: Any) -> None:
    assert packing.unpack(packing.pack(value)) == expected


@pytest.mark.parametrize("value", [object(), Rude(), math.inf.__class__, open])
def test_what_has_no_form_is_named_and_costs_nothing_else(value: Any) -> None:
    first, odd, last = packing.unpack(packing.pack([1, value, 3]))

    assert (first, last) == (1, 3)
    assert isinstance(odd, Unrecordable)
    assert odd.type == type(value).__name__


def test_a_value_nested_too_deep_does_not_stop_its_record() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]

    number, odd = packing.unpack(packing.pack_fields((1, deep)))
    assert number == 1
    assert isinstance(odd, Unrecordable)


@given(value=plain, seq=st.integers(1, 2**40), at=st.integers(0, 2**60))
def test_a_record_is_canonical_exactly_as_written(value: Any, seq: int, at: int) -> None:
    fields = (1, "ok", 5, value, None, {})
    record = records.parse(records.encode_body(seq, at, 7, records.CALL_ENDED, packing.pack_fields(fields)))

    assert (record.seq, record.at_ns, record.kind, record.run) == (seq, at, records.CALL_ENDED, 7)
    assert records.is_canonical(record)
    assert tuple(record.fields.values()) == fields


@pytest.mark.parametrize("kind", FIELDS)
def test_a_record_has_the_fields_of_its_kind_in_order(kind: str) -> None:
    record = records.parse(records.encode_body(1, 2, 1, kind, packing.pack_fields(EXAMPLES[kind])))

    assert (*record.fields,) == FIELDS[kind]
    assert (*record.fields.values(),) == EXAMPLES[kind]


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"\x93\xd9\x01a\xa1b\xc4\x00", id="a text with a long header"),
        pytest.param(b"\xdc\x00\x03\xa1a\xa1b\xc4\x00", id="a list of three with a long header"),
    ],
)
def test_the_same_content_written_another_way_is_not_canonical(content: bytes) -> None:
    assert not records.is_canonical(records.parse(records.encode_body(1, 2, 0, records.CHECKPOINT, content)))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"\x93\xa1a\xa1b\xc4\x00\x00", id="something behind it"),
        pytest.param(b"\x01", id="no list"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x94\xa1a\xa1b\xc4\x00\x01", id="more fields than there are"),
        pytest.param(b"\x92\xa1a\xa1b", id="fewer fields than there are"),
        pytest.param(b"\x93\xa1a\xa1b\x01", id="a number for a signature"),
    ],
)
def test_what_no_writer_writes_is_no_record(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"content|shape|not a record"):
        records.parse(records.encode_body(1, 2, 0, records.CHECKPOINT, content))


@given(noise=st.binary(max_size=100))
def test_any_bytes_are_a_record_or_a_value_error(noise: bytes) -> None:
    try:
        record = records.parse(noise)
    except ValueError:
        return
    assert record.kind in FIELDS


def test_a_field_added_later_is_none_in_older_records() -> None:
    content = packing.pack_fields(EXAMPLES[records.TOOLS][:-1])

    assert records.parse(records.encode_body(1, 2, 0, records.TOOLS, content)).fields["more"] is None


def test_the_format_on_disk_never_changes_silently() -> None:
    body = records.encode_body(1, 2, 4, records.CHECKPOINT, packing.pack_fields(("time", "k", b"s")))

    assert body == bytes.fromhex(
        "0000000000000001 0000000000000002 0000000000000004 03 93 a4 74 69 6d 65 a1 6b c4 01 73"
    )


def test_the_numbers_of_kinds_are_fixed() -> None:
    assert records.NUMBERS == {
        "segment": 1, "opened": 2, "checkpoint": 3, "retired": 4, "tools": 5, "terms": 6, "run_started": 7,
        "call_started": 8, "call_ended": 9, "run_ended": 10, "redacted": 11,
        "witnessed": 12, "key_changed": 13, "held": 14,
    }  # fmt: skip


def test_no_guest_can_put_a_stand_in_into_a_record() -> None:
    """Stand-ins are extension types, and the bridge refuses those."""
    from toolcell_bridge.wire.codec import decode, encode
    from toolcell_bridge.wire.errors import RemoteProtocolError, UnsendableValue
    from toolcell_bridge.wire.messages import CallTool

    with pytest.raises(UnsendableValue):
        encode(CallTool(1, "x", {"a": Unrecordable("t", "x")}, None))  # type: ignore[dict-item]
    forged = b"\x95\x11\x01\xa1x\x81\xa1a" + packing.pack(Unrecordable("t", "x")) + b"\xc0"
    with pytest.raises(RemoteProtocolError):
        decode(forged)
