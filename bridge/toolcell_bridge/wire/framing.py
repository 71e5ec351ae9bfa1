"""Frames: a 4-byte big-endian length, then that many bytes of body, read from any split of the stream."""

from __future__ import annotations

from typing import Final

from toolcell_bridge.wire.errors import RemoteProtocolError, ValueTooLarge

MAX_FRAME_BYTES: Final = 8 * 1024 * 1024
"""Default for the largest body that an end accepts."""

HEADER_BYTES: Final = 4

_LARGE_BYTES: Final = 64 * 1024

_SHORT_TEXT: Final = 0xA0
_SHORT_TEXT_BYTES: Final = 31
"""Of msgpack: the first byte of a text that is no longer than this, with its length in it."""

_TEXT_AND_LENGTH: Final = 0xD9
"""Of msgpack: what comes before the length of a text of up to 255 bytes."""

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

    __slots__ = ("_end", "_max_frame_bytes", "buffer")

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        # Appending to and deleting from the front of a bytearray are both amortised O(1) per byte in CPython,
        # so no split of the stream, and no number of frames in one piece, costs more than linear time.
        self.buffer = bytearray()
        """What was received and not handed out."""
        self._end = 0
        """Where the current frame ends in the buffer; 0 while its length is not known."""

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Take more of the stream."""
        self.buffer += data

    def next_frame(self) -> bytearray | None:
        """Return the next body, or None when more bytes are needed.

        Raises:
            RemoteProtocolError: the announced length is zero or over the limit.
        """
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
            return None
        if len(buffer) == self._end > _LARGE_BYTES:  # handed out without a copy
            body, self.buffer = buffer, bytearray()
            del body[:HEADER_BYTES]
        else:
            body = buffer[HEADER_BYTES : self._end]
            del buffer[: self._end]
        self._end = 0
        return body

    def take_short(self, head: bytes, most: int) -> list[bytearray]:
        """Take the frames that come next as long as each is `head` and one short ASCII text of msgpack, not empty.

        Return the texts; one that ends a line is the last. Any other frame, also a malformed one, is left to
        `next_frame`.
        """
        buffer = self.buffer
        found: list[bytearray] = []
        if self._end or len(buffer) <= HEADER_BYTES + len(head):
            return found
        at = 0
        while len(found) < most and buffer.startswith(b"\0\0\0", at) and len(buffer) > at + HEADER_BYTES:
            form = at + HEADER_BYTES + len(head)
            end = at + HEADER_BYTES + buffer[at + HEADER_BYTES - 1]
            if end > len(buffer) or form >= end or not buffer.startswith(head, at + HEADER_BYTES):
                break
            text = form + 2 if buffer[form] == _TEXT_AND_LENGTH else form + 1
            if text >= end or buffer[text - 1] != (end - text if text == form + 2 else _SHORT_TEXT | end - text):
                break
            if (
                end - text > (255 if text == form + 2 else _SHORT_TEXT_BYTES)
                or not (piece := buffer[text:end]).isascii()
            ):
                break
            found.append(piece)
            at = end
            if piece.endswith(b"\n"):
                break
        del buffer[:at]
        return found
