"""Split an attached container's bytes into its two streams, and find the end markers in standard error.

An end marker is a random word that the guest writes to standard error just before the last frame of a run. Docker
copies the two streams independently: without the marker, raw output could arrive after the frame that ends the run.
This module does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field

HEADER_BYTES = 8
STDOUT = 1
STDERR = 2
DAEMON = 3
"""Messages of the daemon itself about the stream."""

DONE_HEAD = b"\x93\x18"
"""The first bytes of a `Done` message: an array of three, then the tag."""

LENGTH_BYTES = 4


class BrokenStream(Exception):
    """The bytes are not a multiplexed stream: the daemon, or a proxy before it, is broken."""


@dataclass(slots=True)
class Demultiplexer:
    """Parse the format of Docker's attach: [stream, 0, 0, 0, length as 4 bytes big-endian], then `length` bytes."""

    _header: bytearray = field(default_factory=bytearray)
    _stream: int = 0
    _left: int = 0

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Take received bytes; return (stream, piece) in order. A piece need not be a whole write.

        Raises:
            BrokenStream: a header is invalid.
        """
        pieces: list[tuple[int, bytes]] = []
        at = 0
        while at < len(data):
            if self._left:
                piece = data[at : at + self._left]
                at += len(piece)
                self._left -= len(piece)
                pieces.append((self._stream, piece))
                continue
            missing = HEADER_BYTES - len(self._header)
            self._header += data[at : at + missing]
            at += missing
            if len(self._header) == HEADER_BYTES:
                self._read_header()
        return pieces

    def _read_header(self) -> None:
        header = bytes(self._header)
        self._header.clear()
        self._stream, self._left = header[0], int.from_bytes(header[4:], "big")
        if self._stream not in (STDOUT, STDERR, DAEMON) or header[1:4] != b"\0\0\0":
            raise BrokenStream(f"header {header.hex()}")


@dataclass(slots=True)
class DoneCounter:
    """Counts the `Done` frames in the bytes of a bridge. It validates nothing: the connection does that."""

    done: int = 0
    left: int = 0
    """Bytes that the frame under way still has."""
    _head: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> None:
        """Take more bytes of the bridge."""
        at, size = 0, len(data)
        while at < size:
            if self.left:
                step = min(self.left, size - at)
                at += step
                self.left -= step
                continue
            want = LENGTH_BYTES + len(DONE_HEAD) - len(self._head)
            self._head += data[at : at + want]
            at += want
            if len(self._head) == LENGTH_BYTES + len(DONE_HEAD):
                self._begin()

    def _begin(self) -> None:
        length = int.from_bytes(self._head[:LENGTH_BYTES], "big")
        self.done += self._head[LENGTH_BYTES:] == DONE_HEAD
        self.left = max(0, length - len(DONE_HEAD))
        self._head.clear()


@dataclass(slots=True)
class MarkedOutput:
    """Bytes of standard error, without the end markers."""

    end_marker: bytes
    """Empty when the guest writes no markers."""

    markers: int = 0
    """End markers found so far."""

    _data: bytearray = field(default_factory=bytearray)

    def __len__(self) -> int:
        return len(self._data)

    def feed(self, data: bytes) -> None:
        """Take more bytes of the stream."""
        searched = max(0, len(self._data) - len(self.end_marker))
        self._data += data
        while self.end_marker and (at := self._data.find(self.end_marker, searched)) >= 0:
            del self._data[at : at + len(self.end_marker)]
            self.markers += 1
            searched = at

    def take(self, *, is_last: bool = False) -> bytes:
        """Take what has arrived, except for what may be the beginning of an end marker. `is_last`: take that too."""
        sizes = range(0) if is_last else range(len(self.end_marker) - 1, 0, -1)
        keep = next((size for size in sizes if self._data.endswith(self.end_marker[:size])), 0)
        end = len(self._data) - keep
        taken = bytes(self._data[:end])
        del self._data[:end]
        return taken
