"""Frames: every record is read back, a cut record is recognized, and no other bytes are taken for a record."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolcell.audit.format import (
    GENESIS,
    MAGIC,
    MAX_BODY_BYTES,
    Frame,
    Garbage,
    Torn,
    body_digest,
    encode_frame,
    hash_digest,
    hash_record,
    split_segment,
)
from toolcell.journal.frames import HEADER

bodies = st.lists(st.binary(max_size=80), min_size=1, max_size=6)


def segment(contents: list[bytes]) -> bytes:
    data, last_hash = MAGIC, GENESIS
    for body in contents:
        framed, last_hash = encode_frame(last_hash, body)
        data += framed
    return data


@given(contents=bodies)
def test_framed_records_are_read_back_with_their_hashes(contents: list[bytes]) -> None:
    found = list(split_segment(segment(contents)))

    assert [piece.body for piece in found if isinstance(piece, Frame)] == contents
    assert all(isinstance(piece, Frame) and piece.is_intact for piece in found)
    previous_hash = GENESIS
    for piece in found:
        assert isinstance(piece, Frame)
        assert piece.previous_hash == previous_hash
        previous_hash = piece.record_hash


@given(contents=bodies, data=st.data())
def test_a_segment_cut_anywhere_gives_whole_records_and_at_most_one_torn(
    contents: list[bytes], data: st.DataObject
) -> None:
    whole = segment(contents)
    size = data.draw(st.integers(len(MAGIC), len(whole)))
    found = list(split_segment(whole[:size]))

    assert all(isinstance(piece, Frame) and piece.is_intact for piece in found[:-1])
    assert [piece.body for piece in found if isinstance(piece, Frame)] == contents[
        : sum(isinstance(p, Frame) for p in found)
    ]
    if found and isinstance(found[-1], Torn):
        assert found[-1].offset + len(found[-1].data) == size


@given(contents=bodies, noise=st.binary(min_size=8, max_size=60), data=st.data())
def test_reading_continues_after_garbage(contents: list[bytes], noise: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(contents) - 1))
    head, tail = segment(contents[:at]), segment(contents)[len(segment(contents[:at])) :]
    found = list(split_segment(head + noise + tail))

    if isinstance(found[at], Garbage):
        assert [piece.body for piece in found if isinstance(piece, Frame) and piece.is_intact] == contents
    else:  # the noise looks like a header, and announces more than there is
        assert not all(isinstance(piece, Frame) and piece.is_intact for piece in found)


@given(noise=st.binary(max_size=200))
def test_any_bytes_can_be_read_without_an_exception(noise: bytes) -> None:
    found = list(split_segment(noise, 0))

    assert sum(len(p.data) if isinstance(p, Torn) else p.end - p.offset for p in found) == len(noise)


def test_a_header_that_announces_too_much_is_garbage() -> None:
    size = MAX_BODY_BYTES + 1
    header = HEADER.pack(size, size ^ 0xFFFFFFFF)

    assert isinstance(next(split_segment(MAGIC + header)), Garbage)


@pytest.mark.parametrize("position", ["previous_hash", "body", "record_hash"])
def test_a_frame_is_intact_only_as_a_whole(position: str) -> None:
    piece = next(split_segment(segment([b"something"])))
    assert isinstance(piece, Frame)
    changed = {"previous_hash": piece.previous_hash, "body": piece.body, "record_hash": piece.record_hash}
    changed[position] = bytes([changed[position][0] ^ 1]) + changed[position][1:]

    assert not Frame(piece.offset, **changed).is_intact


def test_a_digest_can_stand_for_a_body_in_the_chain() -> None:
    body = bytes(16) + (7).to_bytes(8, "big") + b"x"
    assert hash_digest(GENESIS, 7, body_digest(body)) == hash_record(GENESIS, body)
    assert hash_digest(GENESIS, 8, body_digest(body)) != hash_record(GENESIS, body)
