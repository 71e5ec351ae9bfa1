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


@given(value=plain)
def test_a_body_says_what_was_written_and_another_spelling_of_it_is_refused(value: Any) -> None:
    fields = (1, "ok", 5, value, None, {})
    body = packing.pack_fields(fields)

    assert tuple(records.fields_of(records.CALL_ENDED, body).values()) == fields
    with pytest.raises(ValueError, match=r"not written by|list of its fields|not a record"):
        records.fields_of(records.CALL_ENDED, b"\xdc\x00\x06" + body[1:])


@pytest.mark.parametrize("kind", FIELDS)
def test_an_event_has_the_fields_of_its_kind_in_order(kind: str) -> None:
    found = records.fields_of(kind, packing.pack_fields(EXAMPLES[kind]))

    assert (*found,) == FIELDS[kind]
    assert (*found.values(),) == EXAMPLES[kind]


@given(noise=st.binary(max_size=100), kind=st.sampled_from(sorted(FIELDS)))
def test_any_bytes_are_a_body_or_a_value_error(noise: bytes, kind: str) -> None:
    try:
        found = records.fields_of(kind, noise)
    except ValueError:
        return
    assert (*found,) == FIELDS[kind]


def test_the_hash_of_an_event_never_changes_silently() -> None:
    digest = records.event_digest("0123456789ab", 2, 0, "opened", 5, bytes(16) + b"\x90")
    assert records.hash_digest(bytes(32), 0, digest).hex() == (
        "20c66fbc0fe1e44a343ba56dab38529fcf5f15f1e3a9bb6a381f8b3a27166f74"
    )


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
