"""Frames: how the files of the journal and of the audit log hold their records, one after the other.

A frame is a header, a body, and seals that tie the record to the one before it. The header is the length of the body,
and the length with every bit inverted: a length that was changed is told by its inverse. Otherwise it would look like
the end of a file that was cut short.

    journal        header | checksum, 4 bytes | body
    audit log      header | hash of the record before, 32 bytes | body | own hash, 32 bytes

What a seal is computed from is the business of the file's owner: `file` for journals, `audit.format` for the log.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

HEADER: Final = struct.Struct(">II")
INVERT: Final = 0xFFFFFFFF

CUT_SHORT: Final = -1
"""Length of a body whose header is not there in full."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the seals of a frame are, and how long a body may be."""

    before: int
    """Bytes of the seal between the header and the body."""
    after: int
    """Bytes of the seal after the body."""
    most: int
    """Bytes of the longest body."""

    @property
    def overhead(self) -> int:
        """Bytes of a frame beside its body."""
        return HEADER.size + self.before + self.after

    def encode(self, before: bytes, body: bytes, after: bytes = b"") -> bytes:
        """Return the bytes of a frame."""
        size = len(body)
        return HEADER.pack(size, size ^ INVERT) + before + body + after

    def body_size(self, data: bytes, offset: int = 0) -> int | None:
        """Return the length in the header at `offset`. None: there is no header; `CUT_SHORT`: the data ends in it."""
        if len(data) - offset < HEADER.size:
            return CUT_SHORT
        size, inverted = HEADER.unpack_from(data, offset)
        return size if size ^ INVERT == inverted and size <= self.most else None


@dataclass(slots=True)  # not frozen: making one would take four times as long
class RawFrame:
    """One whole frame as stored."""

    offset: int
    before: bytes
    body: bytes
    end: int


def frames_of(file: BinaryIO, layout: Layout) -> Iterator[RawFrame]:
    """Yield the whole frames of a file from its beginning. One that was cut short ends the file.

    Raises:
        ValueError: the length of a frame was changed.
    """
    at, head = 0, HEADER.size + layout.before
    while len(header := file.read(head)) == head:
        size = layout.body_size(header)
        if size is None:
            raise ValueError("the length of a record was changed")
        rest = file.read(size + layout.after)
        if len(rest) < size + layout.after:
            return
        end = at + layout.overhead + size
        yield RawFrame(at, header[HEADER.size :], rest[:size] if layout.after else rest, end)
        at = end


def append_whole(descriptor: int, data: bytes) -> None:
    """Append all of `data` to a file, or nothing: a reader would take the next record for the rest of a part.

    Raises:
        NotUndone: it could not be written, and a part of it is in the file. Nothing may be written after it.
        OSError: it could not be written, and no part of it is in the file.
    """
    left = data
    try:
        while left:
            if not (written := os.write(descriptor, left)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            left = left[written:]
    except OSError as exc:
        if len(left) < len(data):
            try:
                os.ftruncate(descriptor, os.fstat(descriptor).st_size - len(data) + len(left))
            except OSError as worse:
                raise NotUndone(*worse.args) from exc
        raise


class NotUndone(OSError):
    """A part of a record is at the end of a file, and could not be removed."""
