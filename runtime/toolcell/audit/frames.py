"""Records as bytes: framed, length-checked, and linked into a hash chain.

A segment is a magic number and then frames. Knows neither what a record says nor where segments are kept.

Shape of a frame: length, length with every bit inverted, the link before, the body, this record's link.
A link is sha256(link before + sha256(body)): a receipt can stand in for a record of somebody else's run with its digest
alone and the chain still verifies.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

MAGIC: Final = b"TCAUDIT\x01"
"""First bytes of a segment; the last one is the format's version."""

HEADER: Final = struct.Struct(">II")
LINK_BYTES: Final = 32
OVERHEAD_BYTES: Final = HEADER.size + 2 * LINK_BYTES
MAX_BODY_BYTES: Final = 64 << 20
GENESIS: Final = bytes(LINK_BYTES)
"""What the first record of a chain is linked to."""

INVERT: Final = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Frame:
    """One whole record as it lies in a segment; whether its links hold is for the reader to ask."""

    offset: int
    before: bytes
    """The link of the record before it, as stored."""
    body: bytes
    link: bytes
    """As stored."""

    @property
    def end(self) -> int:
        """Offset of the next frame."""
        return self.offset + OVERHEAD_BYTES + len(self.body)

    @property
    def is_intact(self) -> bool:
        """True when its own bytes fit its own link."""
        return link(self.before, self.body) == self.link


@dataclass(frozen=True, slots=True)
class Torn:
    """The beginning of a frame and nothing after it: what a write that was cut short leaves."""

    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Garbage:
    """Bytes that are no frame and no beginning of one."""

    offset: int
    end: int


Piece = Frame | Torn | Garbage


def body_digest(body: bytes) -> bytes:
    """What stands for a body in its link."""
    return hashlib.sha256(body).digest()


def link(before: bytes, body: bytes) -> bytes:
    """The link of a record."""
    return hashlib.sha256(before + hashlib.sha256(body).digest()).digest()


def link_of_digest(before: bytes, digest: bytes) -> bytes:
    """The same for a record of which only the digest is known."""
    return hashlib.sha256(before + digest).digest()


def frame(before: bytes, body: bytes) -> tuple[bytes, bytes]:
    """The bytes of one record, and its link."""
    size = len(body)
    own = hashlib.sha256(before + hashlib.sha256(body).digest()).digest()
    return HEADER.pack(size, size ^ INVERT) + before + body + own, own


def pieces(data: bytes, offset: int = len(MAGIC)) -> Iterator[Piece]:
    """Everything in a segment from `offset` on. After garbage it goes on at the next intact frame."""
    while offset < len(data):
        piece = _piece(data, offset)
        yield piece
        if isinstance(piece, Torn):
            return
        offset = piece.end


def _piece(data: bytes, offset: int) -> Piece:
    size = _announced(data, offset)
    if size is None:
        return Garbage(offset, _next_intact(data, offset + 1))
    end = offset + OVERHEAD_BYTES + size
    if size < 0 or end > len(data):
        return Torn(offset, data[offset:])
    start = offset + HEADER.size
    body_at = start + LINK_BYTES
    return Frame(offset, data[start:body_at], data[body_at : body_at + size], data[end - LINK_BYTES : end])


def _announced(data: bytes, offset: int) -> int | None:
    """Length of the body at `offset`; None when it is none, -1 when there is not even a whole header."""
    if len(data) - offset < HEADER.size:
        return -1
    size, inverted = HEADER.unpack_from(data, offset)
    return size if size ^ INVERT == inverted and size <= MAX_BODY_BYTES else None


def _next_intact(data: bytes, offset: int) -> int:
    """Where reading can go on: at a frame whose link holds, else at the end."""
    for start in range(offset, len(data) - OVERHEAD_BYTES + 1):
        if _announced(data, start) is not None:
            piece = _piece(data, start)
            if isinstance(piece, Frame) and piece.is_intact:
                return start
    return len(data)
