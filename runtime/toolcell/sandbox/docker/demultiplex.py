"""Takes an attached container's two streams apart, and finds the fences in the second.

A fence is a random word that the guest writes to its standard error just before the last frame of a run: Docker copies
the two streams independently, and without it what a script wrote raw could arrive after the word that it has ended.
Works on bytes alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

HEADER_BYTES = 8
STDOUT = 1
STDERR = 2
DAEMON = 3
"""What the daemon itself has to say about the stream, instead of the program."""

DONE_HEAD = b"\x93\x18"
"""How the body of a `Done` message begins: an array of three, then its tag."""

LENGTH_BYTES = 4


class BrokenStream(Exception):
    """These bytes are no multiplexed stream: it is the daemon, or something between, that broke."""


@dataclass(slots=True)
class Demultiplexer:
    """The format of Docker's attach: [stream, 0, 0, 0, length as 4 bytes big-endian], then so many bytes."""

    _header: bytearray = field(default_factory=bytearray)
    _stream: int = 0
    _left: int = 0

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Take received bytes; returns (stream, piece) in order. Pieces need not be whole writes.

        Raises:
            BrokenStream: a header says something no daemon sends.
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
    """Counts the `Done` frames in the bytes of a bridge, without judging anything: the connection does that."""

    done: int = 0
    _head: bytearray = field(default_factory=bytearray)
    _left: int = 0

    def feed(self, data: bytes) -> None:
        """Take more of the bridge."""
        at, size = 0, len(data)
        while at < size:
            if self._left:
                step = min(self._left, size - at)
                at += step
                self._left -= step
                continue
            want = LENGTH_BYTES + len(DONE_HEAD) - len(self._head)
            self._head += data[at : at + want]
            at += want
            if len(self._head) == LENGTH_BYTES + len(DONE_HEAD):
                self._begin()

    def _begin(self) -> None:
        length = int.from_bytes(self._head[:LENGTH_BYTES], "big")
        self.done += self._head[LENGTH_BYTES:] == DONE_HEAD
        self._left = max(0, length - len(DONE_HEAD))
        self._head.clear()


@dataclass(slots=True)
class FencedOutput:
    """What came on standard error, without its fences."""

    fence: bytes
    """Empty: there are none."""

    fences: int = 0
    _data: bytearray = field(default_factory=bytearray)

    def __len__(self) -> int:
        return len(self._data)

    def feed(self, data: bytes) -> None:
        """Take more of the stream."""
        looked = max(0, len(self._data) - len(self.fence))
        self._data += data
        while self.fence and (at := self._data.find(self.fence, looked)) >= 0:
            del self._data[at : at + len(self.fence)]
            self.fences += 1
            looked = at

    def take(self, *, is_last: bool = False) -> bytes:
        """Take what is there, but for the beginning of a fence that is not whole yet and may become so."""
        sizes = range(0) if is_last else range(len(self.fence) - 1, 0, -1)
        keep = next((size for size in sizes if self._data.endswith(self.fence[:size])), 0)
        end = len(self._data) - keep
        taken = bytes(self._data[:end])
        del self._data[:end]
        return taken
