"""Where a chain ends on disk, and whether a writer may go on there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from toolcell.audit import records
from toolcell.audit.format import (
    GENESIS,
    HASH_BYTES,
    LAYOUT,
    MAGIC,
    OVERHEAD_BYTES,
    Frame,
    opened_segment,
    segment_files,
)
from toolcell.audit.keys import Signer
from toolcell.audit.signatures import Head, checkpoint_statement
from toolcell.errors import AuditError
from toolcell.journal.frames import CUT_SHORT, HEADER


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of a chain on disk."""

    segment: int
    size: int
    """Bytes of the last segment. 0: it has no magic number yet."""
    last: Frame | None = None
    """The last whole record; None in a chain without records."""
    torn: int = 0
    """Bytes of a record that was cut short."""

    @property
    def seq(self) -> int:
        """Number of the last whole record."""
        return 0 if self.last is None else records.parse(self.last.body).seq

    @property
    def record_hash(self) -> bytes:
        """Hash of the last whole record."""
        return GENESIS if self.last is None else self.last.record_hash


def find_tail(path: Path) -> Tail | None:
    """Find the end of a chain. None: its last segment is damaged."""
    found = segment_files(path)
    for number in sorted(found, reverse=True):
        with opened_segment(found[number]) as file:
            start = file.read(len(MAGIC) + 1)
            if len(start) <= len(MAGIC) and MAGIC.startswith(start):
                before = Tail(0, 0) if number == 1 else _end_of_file(found.get(number - 1), number - 1)
                return None if before is None else Tail(number, len(start), before.last, before.torn)
            file.seek(0)
            return end_of_segment(number, file)
    return Tail(0, 0)


def tail_of(path: Path) -> tuple[Tail | None, str]:
    """Find the end of a chain, or say why it cannot be read."""
    try:
        return find_tail(path), ""
    except AuditError as exc:
        return None, str(exc)


def _end_of_file(file: Path | None, number: int) -> Tail | None:
    if file is None:
        return None
    with opened_segment(file) as opened:
        return end_of_segment(number, opened)


def end_of_segment(number: int, file: BinaryIO) -> Tail | None:
    """Find the end of one segment. None: it is damaged. What stands behind the first damage is not read."""
    if file.read(len(MAGIC)) != MAGIC:
        return None
    last, size, torn = None, len(MAGIC), 0
    while header := file.read(HEADER.size):
        body_size = LAYOUT.body_size(header)
        if body_size is None:
            return None
        rest = b"" if body_size == CUT_SHORT else file.read(OVERHEAD_BYTES - HEADER.size + body_size)
        if body_size == CUT_SHORT or len(header) + len(rest) < OVERHEAD_BYTES + body_size:
            torn = len(header) + len(rest)
            break
        last = Frame(size, rest[:HASH_BYTES], rest[HASH_BYTES:-HASH_BYTES], rest[-HASH_BYTES:])
        if not last.is_intact:
            return None
        size += len(header) + len(rest)
    if last is None:
        return None
    try:
        records.parse(last.body)
    except ValueError:
        return None
    return Tail(number, size + torn, last, torn)


GONE: Final = "it is not there"


@dataclass(frozen=True, slots=True)
class Left:
    """A chain that a writer did not continue, and where the chain ended then."""

    chain: str
    seq: int
    record_hash: bytes
    why: str

    @classmethod
    def of(cls, chain: str, tail: Tail | None, why: str) -> Left:
        """Describe a chain that is there. A damaged one has no end that could be named: its seq is 0."""
        return cls(chain, 0, GENESIS, why) if tail is None else cls(chain, tail.seq, tail.record_hash, why)

    def to_list(self) -> list[Any]:
        """Shape in a record: [chain, seq, record hash, why]."""
        return [self.chain, self.seq, self.record_hash, self.why]


def why_left(tail: Tail | None, log: str, chain: str, signer: Signer, head: Head | None) -> str:
    """Say why a chain may not be continued; empty when it may."""
    if tail is None:
        return "its last segment is damaged"
    if head is not None and head.seq > tail.seq:
        return f"it ends at record {tail.seq} and had got to {head.seq}: its end was cut off"
    if tail.torn:
        return f"it ends in {tail.torn} bytes of a record cut short"
    if tail.last is None:
        return ""
    record = records.parse(tail.last.body)
    if record.kind != records.CHECKPOINT:
        return "its last record is not signed"
    try:
        reason, key, signature = (record.fields[name] for name in ("reason", "key", "signature"))
        statement = checkpoint_statement(log, chain, record.seq, record.at_ns, tail.last.previous_hash, reason)
        if key != signer.key_id:
            return f"it was signed with another key, {key}"
        return "" if signer.is_valid(statement, signature) else "its last signature is forged"
    except Exception as exc:  # the record may hold anything, and a caller's signer may not know how to verify
        return f"its last signature could not be checked: {type(exc).__name__}: {exc}"[:200]


def newest_first(path: Path) -> float:
    """Sort key. The order decides only which of several good chains goes on, so file times may decide it."""
    try:
        return -max((file.lstat().st_mtime for file in segment_files(path).values()), default=0.0)
    except (OSError, AuditError):
        return 0.0
