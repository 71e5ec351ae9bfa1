"""The multiplexer keeps channels apart: with any split, any order of readers, and any bytes from a hostile end."""

from __future__ import annotations

import itertools
import struct
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rows import each_row
from toolcell_bridge.wire.errors import LocalProtocolError, RemoteProtocolError
from toolcell_bridge.wire.mux import (
    CHUNK_BYTES,
    CONTROL_BYTES,
    WINDOW_BYTES,
    Control,
    Data,
    Event,
    Mux,
    Room,
    StreamEnded,
)

pytestmark = pytest.mark.quick

CHANNELS = (1, 2, 7)
WINDOW = 64

frames = st.tuples(st.sampled_from(CHANNELS), st.binary(min_size=1, max_size=WINDOW // 4))


def opened(window_bytes: int = WINDOW) -> Mux:
    mux = Mux(window_bytes)
    for channel in CHANNELS:
        mux.open(channel)
    return mux


def raw(channel: int, kind: int, body: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack(">II", channel, kind << 24 | (len(body) if length is None else length)) + body


def joined(events: list[Event]) -> dict[int, bytes]:
    found: dict[int, bytes] = defaultdict(bytes)
    for event in events:
        if isinstance(event, Data):
            found[event.channel] += event.data
    return dict(found)


@given(sent=st.lists(frames, max_size=4), bodies=st.lists(st.binary(min_size=1, max_size=9)), data=st.data())
def test_any_split_of_the_bytes_brings_the_same(
    sent: list[tuple[int, bytes]], bodies: list[bytes], data: st.DataObject
) -> None:
    near, far = opened(), opened()
    wire = b"".join([*(near.data(*each) for each in sent), *map(near.control, bodies), *map(near.end, CHANNELS)])
    edges = [0, *sorted(data.draw(st.lists(st.integers(0, len(wire))))), len(wire)]

    events = [event for start, stop in itertools.pairwise(edges) for event in far.receive_data(wire[start:stop])]

    expected: dict[int, bytes] = defaultdict(bytes)
    for channel, piece in sent:
        expected[channel] += piece
    assert joined(events) == dict(expected)
    assert [event.body for event in events if isinstance(event, Control)] == bodies
    assert [event.channel for event in events if isinstance(event, StreamEnded)] == list(CHANNELS)


@given(garbage=st.binary(max_size=300), cut=st.integers(0, 300))
def test_garbage_is_refused_or_dropped_and_never_anything_else(garbage: bytes, cut: int) -> None:
    mux = opened()
    held = 0
    try:
        for piece in (garbage[:cut], garbage[cut:]):
            held += sum(len(event.data) for event in mux.receive_data(piece) if isinstance(event, Data))
    except RemoteProtocolError:
        with pytest.raises(RemoteProtocolError, match="dead"):
            mux.receive_data(b"")
    assert held <= WINDOW * len(CHANNELS)


headers = st.tuples(
    st.sampled_from((0, *CHANNELS, 3, 8, 2**32 - 1)),
    st.integers(0, 5),
    st.binary(max_size=80),
    st.none() | st.sampled_from((0, 1, 4, WINDOW, CHUNK_BYTES + 1, 0xFFFFFF)),
)


@given(sent=st.lists(headers, max_size=12))
def test_a_hostile_end_can_make_us_hold_no_more_than_the_windows(
    sent: list[tuple[int, int, bytes, int | None]],
) -> None:
    mux = opened()
    held = 0
    try:
        for each in sent:
            held += sum(map(len, joined(mux.receive_data(raw(*each))).values()))
            assert held <= WINDOW * len(CHANNELS)
            assert all(mux.room(channel) <= WINDOW for channel in CHANNELS)
    except RemoteProtocolError:
        return


@given(moves=st.lists(st.tuples(st.sampled_from(CHANNELS), st.integers(0, WINDOW), st.booleans()), max_size=60))
def test_what_is_unread_never_exceeds_the_window_and_nothing_is_lost(moves: list[tuple[int, int, bool]]) -> None:
    near, far = opened(), opened()
    written: dict[int, int] = dict.fromkeys(CHANNELS, 0)
    unread: dict[int, int] = dict.fromkeys(CHANNELS, 0)

    for channel, amount, reads in moves:
        size = min(amount, near.room(channel))
        for event in far.receive_data(near.data(channel, bytes(size))):
            assert isinstance(event, Data)
            unread[event.channel] += len(event.data)
        written[channel] += size
        if reads:
            near.receive_data(far.credit_for(channel, unread[channel]))
            unread[channel] = 0
        assert unread[channel] <= WINDOW

    for channel in CHANNELS:
        near.receive_data(far.credit_for(channel, unread[channel]))
        assert near.room(channel) > WINDOW // 2, "a reader that took everything lets its writer go on"


def test_a_reader_that_stops_stops_its_own_channel_alone() -> None:
    near, far = opened(), opened()
    far.receive_data(near.data(1, bytes(WINDOW)))

    assert near.room(1) == 0
    assert near.room(2) == WINDOW
    assert joined(far.receive_data(near.data(2, b"goes on"))) == {2: b"goes on"}


def test_a_writer_is_told_when_there_is_room_again() -> None:
    near, far = opened(), opened()
    far.receive_data(near.data(1, bytes(WINDOW)))

    assert far.credit_for(1, WINDOW // 2 - 1) == b""
    assert near.receive_data(far.credit_for(1, 1)) == [Room(1)]
    assert near.room(1) == WINDOW // 2


def test_writing_past_the_window_is_our_own_mistake() -> None:
    mux = opened()
    with pytest.raises(LocalProtocolError, match="65 bytes on channel 1, room is for 64"):
        mux.data(1, bytes(WINDOW + 1))


def test_a_long_piece_leaves_as_chunks_that_others_fit_between() -> None:
    near, far = opened(WINDOW_BYTES), opened(WINDOW_BYTES)
    piece = bytes(range(256)) * 1024
    wire = near.data(7, piece)

    assert int.from_bytes(wire[4:8], "big") == CHUNK_BYTES
    assert joined(far.receive_data(wire)) == {7: piece}


@each_row(
    ("wire", "problem"),
    [
        (raw(1, 0, bytes(WINDOW)) + raw(1, 0, b"x"), "exceed the window"),
        (raw(1, 0, length=0), "frame of kind 0"),
        (raw(1, 0, length=CHUNK_BYTES + 1), "frame of kind 0"),
        (raw(8, 0, b"x"), "never opened"),
        (raw(0, 0, b"x"), "on channel 0"),
        (raw(1, 2) + raw(1, 2), "ended twice"),
        (raw(1, 2) + raw(1, 0, b"x"), "after its end"),
        (raw(1, 1, bytes(4)), "credit of 0 bytes"),
        (raw(1, 1, b"\0\0\0\1"), "credit of 1 bytes"),
        (raw(1, 1, b"\0\0\0"), "frame of kind 1"),
        (raw(1, 3, b"x"), "frame of kind 3"),
        (raw(0, 3, length=CONTROL_BYTES + 1), "frame of kind 3"),
        (raw(0, 3), "frame of kind 3"),
        (raw(1, 4), "frame of kind 4"),
    ],
)
def test_breaking_a_rule_ends_the_conversation(wire: bytes, problem: str) -> None:
    with pytest.raises(RemoteProtocolError, match=problem):
        opened().receive_data(wire)


def test_a_frame_is_judged_by_its_header_alone() -> None:
    with pytest.raises(RemoteProtocolError, match="exceed the window"):
        opened().receive_data(raw(1, 0, length=WINDOW + 1))


def test_late_frames_of_a_closed_channel_are_dropped() -> None:
    mux = opened()
    mux.close(2)
    wire = raw(2, 0, b"late") + raw(2, 1, b"\0\0\0\1") + raw(2, 2) + raw(1, 0, b"in time")

    assert joined(mux.receive_data(wire)) == {1: b"in time"}
    assert mux.room(2) == 0
    assert mux.end(2) == b""
    assert mux.credit_for(2, 1) == b""


@each_row("channel", [0, 6, 7, 2**32])
def test_a_channel_number_is_never_used_again(channel: int) -> None:
    with pytest.raises(LocalProtocolError, match="opened after 7"):
        opened().open(channel)


def test_taking_what_never_came_is_our_own_mistake() -> None:
    with pytest.raises(LocalProtocolError, match="1 bytes taken"):
        opened().credit_for(1, 1)


@each_row("size", [0, CONTROL_BYTES + 1])
def test_an_empty_or_overlong_control_message_is_not_sent(size: int) -> None:
    with pytest.raises(LocalProtocolError, match="control message"):
        opened().control(bytes(size))
