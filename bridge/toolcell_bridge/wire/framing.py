"""Frames: a 4-byte big-endian length, then that many bytes of body, read from any split of the stream."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Final, TypeAlias

from toolcell_bridge.wire.errors import RemoteProtocolError, ValueTooLarge

MAX_FRAME_BYTES: Final = 8 * 1024 * 1024
"""Default for the largest body that an end accepts."""

HEADER_BYTES: Final = 4

Part: TypeAlias = bytes | memoryview
"""Part of a frame that is to be written: a memoryview is that of an array or a table, and not a copy."""

_LARGE_BYTES: Final = 64 * 1024

_MAPPED_BYTES: Final = 256 * 1024
"""A longer frame is collected in memory of its own, into which a socket can write. The kernel gives it page by page."""

FRAME_CURE: Final = "; the limit is frame_bytes: send less at a time, or a file"
"""What to do about a message that is too large."""


def frame(body: bytes, max_frame_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Put the length in front.

    Raises:
        ValueTooLarge: the other end would refuse it.
    """
    if len(body) > max_frame_bytes:
        raise ValueTooLarge("message", len(body), max_frame_bytes, cure=FRAME_CURE)
    return len(body).to_bytes(HEADER_BYTES, "big") + body


class FrameReader:
    """Collects received bytes and hands out bodies.

    A length is checked as soon as its four bytes are here, and reserves no memory. A reader that is drained after each
    `receive_data` holds less than one frame more than it was given.
    """

    __slots__ = ("_end", "_filled", "_max_frame_bytes", "buffer", "large")

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        # Appending to and deleting from the front of a bytearray are both amortised O(1) per byte in CPython,
        # so no split of the stream, and no number of frames in one piece, costs more than linear time.
        self.buffer = bytearray()
        """What was received and not handed out."""
        self._end = 0
        """Where the current frame ends in the buffer; 0 while its length is not known."""
        self.large: mmap.mmap | None = None
        """The frame that is collected apart from the buffer, with its length."""
        self._filled = 0
        """Bytes of it that were received."""

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Take more of the stream."""
        if self.large is None:
            self.buffer += data
            return
        room = self.room()
        taken = min(len(data), len(room))
        room[:taken] = data if taken == len(data) else memoryview(data)[:taken]
        self.fill(taken)
        if taken < len(data):
            self.buffer += memoryview(data)[taken:]

    def room(self) -> memoryview:
        """Return the memory in which the rest of `large` belongs; `fill` says how much of it was written."""
        return memoryview(self.large or b"")[self._filled :]

    def fill(self, size: int) -> None:
        """Take note of so many bytes that were written to `room`."""
        self._filled += size

    def next_frame(self) -> bytearray | memoryview | None:
        """Return the next body, or None when more bytes are needed.

        Raises:
            RemoteProtocolError: the announced length is zero or over the limit.
            MemoryError: there is no memory for a long one.
        """
        if self.large is not None:
            return self._large_frame(self.large)
        buffer = self.buffer
        if not self._end:
            if len(buffer) < HEADER_BYTES:
                return None
            length = int.from_bytes(buffer[:HEADER_BYTES], "big")
            if not 0 < length <= self._max_frame_bytes:
                raise RemoteProtocolError(
                    f"frame of {length} bytes announced, 1 to {self._max_frame_bytes} are allowed"
                )
            self._end = HEADER_BYTES + length
        if len(buffer) < self._end:
            if self._end > _MAPPED_BYTES:
                self._begin_large()
            return None
        if len(buffer) == self._end > _LARGE_BYTES:  # handed out without a copy
            body, self.buffer = buffer, bytearray()
            del body[:HEADER_BYTES]
        else:
            body = buffer[HEADER_BYTES : self._end]
            del buffer[: self._end]
        self._end = 0
        return body

    def _begin_large(self) -> None:
        try:
            self.large = mmap.mmap(-1, self._end)
        except (OSError, ValueError) as exc:
            raise MemoryError(f"no memory for a message of {self._end} bytes") from exc
        received, self.buffer = self.buffer, bytearray()
        self._filled = self._end = 0
        self.receive_data(received)

    def _large_frame(self, large: mmap.mmap) -> memoryview | None:
        if self._filled < len(large):
            return None
        self.large = None
        return memoryview(large)[HEADER_BYTES:]

    def take_texts(self, starts: Sequence[bytes], most: int) -> list[bytearray]:
        """Take the frames that come next as long as each is one of `starts` and an ASCII text as long as its index.

        Return the texts. Any other frame, also a malformed one, is left to `next_frame`.
        """
        buffer, found, at = self.buffer, list[bytearray](), 0
        if self._end:
            return found
        head = len(starts[0])
        while len(found) < most and len(buffer) > at + head:
            size = buffer[at + head - 1]
            end = at + head + size
            if size >= len(starts) or end > len(buffer) or not buffer.startswith(starts[size], at):
                break
            if not (text := buffer[at + head : end]).isascii():
                break
            found.append(text)
            at = end
        del buffer[:at]
        return found
