"""Frames from any split of the stream, at linear cost, and never larger than allowed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rows import each_row
from toolcell_bridge.wire import framing
from toolcell_bridge.wire.errors import RemoteProtocolError, ValueTooLarge
from toolcell_bridge.wire.framing import FrameReader, frame

pytestmark = pytest.mark.quick

bodies = st.lists(st.binary(min_size=1, max_size=64))


def drained(reader: FrameReader) -> list[bytes]:
    return [bytes(body) for body in iter(reader.next_frame, None)]


@pytest.mark.conforms("T7")
@given(bodies=bodies, cuts=st.lists(st.integers(0, 400)))
def test_frames_do_not_depend_on_how_their_bytes_were_split(bodies: list[bytes], cuts: list[int]) -> None:
    wire = b"".join(map(frame, bodies))
    edges = [0, *sorted(min(cut, len(wire)) for cut in cuts), len(wire)]
    reader, got = FrameReader(max_frame_bytes=64), []

    for start, stop in itertools.pairwise(edges):
        reader.receive_data(wire[start:stop])
        got += drained(reader)

    assert got == bodies


@given(bodies=bodies)
def test_frames_do_not_depend_on_when_they_are_taken(bodies: list[bytes]) -> None:
    reader = FrameReader()
    for body in bodies:
        reader.receive_data(frame(body))
    assert drained(reader) == bodies


@pytest.mark.conforms("T7", "Q-b5")
@each_row("length", [0, 65, 2**31, 2**32 - 1])
def test_an_empty_or_oversized_frame_is_refused_by_its_length_alone(length: int) -> None:
    reader = FrameReader(max_frame_bytes=64)
    reader.receive_data(length.to_bytes(4, "big"))
    with pytest.raises(RemoteProtocolError, match=f"frame of {length} bytes"):
        reader.next_frame()


@each_row("length", [1, 64])
def test_the_smallest_and_the_largest_frame_pass(length: int) -> None:
    reader = FrameReader(max_frame_bytes=64)
    reader.receive_data(frame(bytes(length), 64))
    assert drained(reader) == [bytes(length)]


@pytest.mark.conforms("T7")
def test_half_a_frame_is_no_frame_and_no_error() -> None:
    reader = FrameReader()
    for byte in frame(b"body")[:-1]:
        reader.receive_data(bytes([byte]))
        assert reader.next_frame() is None


def test_a_body_over_the_limit_is_not_sent() -> None:
    assert frame(b"1234", 4) == b"\0\0\0\x041234"
    with pytest.raises(ValueTooLarge, match=r"message too large \(5 > 4 bytes\)"):
        frame(b"12345", 4)


class CountingBuffer(bytearray):
    """Counts the bytes that every operation of a reader touches."""

    touched = 0

    def __iadd__(self, data: Any) -> CountingBuffer:  # type: ignore[misc]
        self.touched += len(data) + 1
        return super().__iadd__(data)

    def __getitem__(self, where: Any) -> Any:
        got = super().__getitem__(where)
        self.touched += len(got)
        return got

    def __delitem__(self, where: Any) -> None:
        # What stays is not moved: CPython advances the start of the buffer.
        assert where.start in (None, 0)
        self.touched += len(range(*where.indices(len(self))))
        super().__delitem__(where)

    def __iter__(self) -> Any:
        raise AssertionError("walked byte by byte")


@pytest.mark.slow
@pytest.mark.conforms("T7")
@each_row("piece_bytes", [1, 7, 65536])
def test_a_trickled_frame_costs_linear_work(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    total = 512 * 1024
    wire = frame(bytes(total))
    buffer = CountingBuffer()
    buffers = iter([buffer, bytearray()])
    monkeypatch.setattr(framing, "bytearray", lambda: next(buffers), raising=False)
    reader = FrameReader()

    for start in range(0, len(wire), piece_bytes):
        assert reader.next_frame() is None
        reader.receive_data(wire[start : start + piece_bytes])

    assert drained(reader) == [bytes(total)]
    assert buffer.touched < 5 * len(wire)


@pytest.mark.conforms("T7")
def test_many_small_frames_in_one_piece_cost_linear_work(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = frame(b"x") * 50_000
    buffer = CountingBuffer()
    monkeypatch.setattr(framing, "bytearray", lambda: buffer, raising=False)
    reader = FrameReader()
    reader.receive_data(wire)

    assert sum(1 for _ in iter(reader.next_frame, None)) == 50_000
    assert buffer.touched < 5 * len(wire)
