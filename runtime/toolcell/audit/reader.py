"""Reading a log without writing to it: records in the order they were written, each with its place.

Whole and intact records only. What is damaged is counted and passed over; what happened to it is for `verify` to say.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from toolcell.audit import frames, layout, records
from toolcell.audit.frames import MAGIC, Frame, Torn
from toolcell.audit.records import Record
from toolcell.errors import AuditError


@dataclass(frozen=True, slots=True)
class RecordLocation:
    """Where a record lies."""

    chain: str
    segment: int
    offset: int


@dataclass(frozen=True, slots=True)
class Located:
    """A record and where it was found."""

    place: RecordLocation
    record: Record
    frame: Frame


@dataclass(slots=True)
class Damage:
    """What was passed over."""

    pieces: int = 0


def read_segment(
    path: Path, chain: str, number: int, start: int = len(MAGIC), damage: Damage | None = None
) -> Iterator[Located]:
    """The records of one segment from `start` on.

    Raises:
        AuditError: the file cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise AuditError(f"cannot read {path}: {exc.strerror}") from exc
    for piece in frames.pieces(data, start):
        record = _record_of(piece)
        if record is not None and isinstance(piece, Frame):
            yield Located(RecordLocation(chain, number, piece.offset), record, piece)
        elif damage is not None and not isinstance(piece, Torn):
            damage.pieces += 1


def _record_of(piece: frames.Piece) -> Record | None:
    if not isinstance(piece, Frame) or not piece.is_intact:
        return None
    try:
        return records.parse(piece.body)
    except ValueError:
        return None


def read_chain(path: Path, damage: Damage | None = None) -> Iterator[Located]:
    """The records of one chain."""
    for number, segment in layout.segments(path).items():
        yield from read_segment(segment, path.name, number, damage=damage)


def read_log(directory: Path, damage: Damage | None = None) -> Iterator[Located]:
    """The records of all chains, merged by the time they were written."""
    chains = [read_chain(path, damage) for path in layout.chains(directory)]
    yield from heapq.merge(*chains, key=lambda found: found.record.at_ns)


def read_at(directory: Path, place: RecordLocation) -> Located:
    """The record at a place that was found before.

    Raises:
        AuditError: there is none now.
    """
    path = layout.segment_path(directory / place.chain, place.segment)
    try:
        with open(path, "rb") as file:
            file.seek(place.offset)
            head = file.read(frames.HEADER.size)
            size = frames.HEADER.unpack(head)[0] if len(head) == frames.HEADER.size else 0
            data = head + file.read(min(size, frames.MAX_BODY_BYTES) + frames.OVERHEAD_BYTES - len(head))
    except OSError as exc:
        raise AuditError(f"cannot read {path}: {exc.strerror}") from exc
    piece = next(frames.pieces(data, 0), None)
    record = _record_of(piece) if piece is not None else None
    if record is None or not isinstance(piece, Frame):
        raise AuditError(f"there is no intact record at {path}:{place.offset}; run `toolcell audit verify`")
    return Located(place, record, piece)
