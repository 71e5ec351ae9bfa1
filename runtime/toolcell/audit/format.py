"""How a log lies on disk: the names of its files, and the frames that hold its records.

    LOG/log.json                  the log's id
    LOG/<chain>/00000001.log      segments of one chain, in order
    LOG/<chain>/stub.json         the signed prune record, when segments were removed
    LOG/<chain>/lock              held by the process that writes the chain

A segment is a magic number and then frames. Shape of a frame: length, length with every bit inverted, the hash of the
record before, the body, the hash of this record. A record's hash is sha256(previous hash + run + sha256(body)), where
`run` is 8 bytes of the body: a receipt can show only run and digest of a record of another run, and the chain still
verifies, and it cannot pass a record of its own run off as one of another.

The body of a redacted record was written over in place. It holds the digest of what was there, and this digest stands
for the body: so the chain still verifies. Whether the redaction is genuine, only a signed record of it can tell.

This module does not know what a record says.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from toolcell.errors import AuditError, UsageError
from toolcell.journal.frames import CUT_SHORT, HEADER, Layout
from toolcell.support.atomic import write_file
from toolcell.support.private_files import make_private_folder

MAGIC: Final = b"TCAUDIT\x02"
"""First bytes of a segment. The last byte is the format's version."""

HASH_BYTES: Final = 32
MAX_BODY_BYTES: Final = 64 << 20
LAYOUT: Final = Layout(before=HASH_BYTES, after=HASH_BYTES, most=MAX_BODY_BYTES)
OVERHEAD_BYTES: Final = LAYOUT.overhead
GENESIS: Final = bytes(HASH_BYTES)
"""The previous hash of a chain's first record."""

RUN: Final = slice(16, 24)
"""Where a body holds the number of its run."""

KIND: Final = 24
"""Where a body holds the number of its kind."""

REDACTED_BODY: Final = 0xC0
"""These bits of the kind's number mark the body of a redacted record."""

ORIGINAL: Final = slice(25, 57)
"""Where a redacted body holds the digest of what was there."""

FORMAT: Final = 3
"""Version of the records. In format 2, records of runs had no salt."""
LOG_FILE, PRUNE_FILE, LOCK_FILE = "log.json", "stub.json", "lock"

_LOG_ID = re.compile(r"[0-9a-f]{32}")
_CHAIN = re.compile(r"[0-9a-f]{12}")
_SEGMENT = re.compile(r"(?!0{8})([0-9]{8})\.log")


class BadInput(UsageError, AuditError):
    """A named file or directory is missing, unreadable, unwritable or of the wrong kind. No change was found in it."""


# Frames

_sha256: Final = hashlib.sha256


@dataclass(slots=True)  # not frozen: making one would take four times as long
class Frame:
    """One whole record as stored. The reader decides whether its hashes are right."""

    offset: int
    previous_hash: bytes
    """As stored."""
    body: bytes
    record_hash: bytes
    """As stored."""

    @property
    def end(self) -> int:
        """Offset of the next frame."""
        return self.offset + OVERHEAD_BYTES + len(self.body)

    @property
    def is_intact(self) -> bool:
        """True when the stored hash fits the stored bytes."""
        body = self.body
        return _sha256(self.previous_hash + body[RUN] + body_digest(body)).digest() == self.record_hash


@dataclass(frozen=True, slots=True)
class Torn:
    """The beginning of a frame at the end of a segment. A write that was cut short leaves one."""

    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Garbage:
    """Bytes that are neither a frame nor the beginning of one."""

    offset: int
    end: int


Piece = Frame | Torn | Garbage


def body_digest(body: bytes) -> bytes:
    """Return the digest that stands for a body in its record's hash."""
    if len(body) >= ORIGINAL.stop and body[KIND] & REDACTED_BODY == REDACTED_BODY:
        return body[ORIGINAL]
    return _sha256(body).digest()


def hash_record(previous_hash: bytes, body: bytes) -> bytes:
    """Return the hash of a record."""
    return hashlib.sha256(previous_hash + body[RUN] + body_digest(body)).digest()


def hash_digest(previous_hash: bytes, run: int, digest: bytes) -> bytes:
    """Return the hash of a record of which only the run and the body's digest are known."""
    return hashlib.sha256(previous_hash + run.to_bytes(8, "big") + digest).digest()


def encode_frame(previous_hash: bytes, body: bytes) -> tuple[bytes, bytes]:
    """Return the bytes of one record, and its hash."""
    own = hash_record(previous_hash, body)
    return LAYOUT.encode(previous_hash, body, own), own


def split_segment(data: bytes, offset: int = len(MAGIC)) -> Iterator[Piece]:
    """Yield every piece of a segment from `offset` on. After garbage, continue at the next intact frame.

    Takes time that is linear in the size, whatever the bytes are.
    """
    hashing = HashingBudget.of(data)
    while offset < len(data):
        piece = piece_at(data, offset, hashing)
        yield piece
        if isinstance(piece, Torn):
            return
        offset = piece.end


SCAN_FACTOR: Final = 8
"""What the search behind garbage may hash, in sizes of the segment. Crafted headers would make it quadratic."""


@dataclass(slots=True)
class HashingBudget:
    """How many bytes may still be hashed to find an intact frame behind garbage."""

    left: int

    @classmethod
    def of(cls, data: bytes) -> HashingBudget:
        """Return the budget of a segment."""
        return cls(SCAN_FACTOR * len(data))


def piece_at(data: bytes, offset: int, hashing: HashingBudget) -> Piece:
    """Return the piece of a segment at an offset before its end."""
    size = LAYOUT.body_size(data, offset)
    if size is None:
        return Garbage(offset, _next_intact(data, offset + 1, hashing))
    end = offset + OVERHEAD_BYTES + size
    if size == CUT_SHORT or end > len(data):
        return Torn(offset, data[offset:])
    start = offset + HEADER.size
    body_at = start + HASH_BYTES
    return Frame(offset, data[start:body_at], data[body_at : body_at + size], data[end - HASH_BYTES : end])


_LIKE_A_HEADER = re.compile(rb"[\x00-\x04]...[\xfb-\xff]", re.DOTALL)
"""A length of at most `MAX_BODY_BYTES`, and the first byte of its inverse."""


def _next_intact(data: bytes, offset: int, hashing: HashingBudget) -> int:
    """Return the offset of the next frame whose hash is right, or the end of the data."""
    while (found := _LIKE_A_HEADER.search(data, offset)) is not None:
        start = found.start()
        size = LAYOUT.body_size(data, start)
        if size is not None and 0 <= size <= len(data) - start - OVERHEAD_BYTES:
            hashing.left -= size
            if hashing.left < 0:
                break
            piece = piece_at(data, start, hashing)
            if isinstance(piece, Frame) and piece.is_intact:
                return start
        offset = start + 1
    return len(data)


# Files


def new_chain_name() -> str:
    """Return a name that no other chain has."""
    return os.urandom(6).hex()


def segment_path(chain: Path, number: int) -> Path:
    """Return the file of a segment."""
    return chain / f"{number:08d}.log"


def chain_directories(log: Path) -> list[Path]:
    """Return the directories of a log's chains, by name. Links do not count: they would choose where to write."""
    try:
        found = sorted(entry for entry in log.iterdir() if _CHAIN.fullmatch(entry.name))
        return [entry for entry in found if entry.is_dir() and not entry.is_symlink()]
    except OSError as exc:
        raise BadInput(f"cannot read the audit log {log}: {exc.strerror}") from exc


def segment_files(chain: Path) -> dict[int, Path]:
    """Map the number of each segment to its file, in order.

    Raises:
        AuditError: the directory cannot be read.
    """
    try:
        found = {int(match[1]): entry for entry in chain.iterdir() if (match := _SEGMENT.fullmatch(entry.name))}
    except OSError as exc:
        raise AuditError(f"cannot read {chain}: {exc.strerror}") from exc
    return dict(sorted(found.items()))


MAX_SEGMENT_BYTES: Final = 1 << 30
"""A segment is far smaller; a larger file is not read."""


def begun_segments(chain: Path, last: int = 0) -> dict[int, Path]:
    """Return the segments of a chain that can be read up to its end, as number to file, in order.

    A writer makes the next segment's file before it ends the one before. So a newest file that is empty is left out:
    once it has something in it, the segment before it is complete. It stays when the one before it is `last`, which
    was read and is complete.
    """
    found = segment_files(chain)
    newest = max(found, default=0)
    if newest - 1 in found and newest - 1 != last:
        try:
            status = found[newest].lstat()
        except OSError:
            return found  # reading it will say what is wrong
        if stat.S_ISREG(status.st_mode) and not status.st_size:
            del found[newest]
    return found


def read_segment_file(path: Path) -> bytes:
    """Return the bytes of a segment. Only a regular file is opened, and no link is followed.

    Raises:
        AuditError: it cannot be read, is not a regular file, or is too large for a segment.
    """
    return _read_file(path, 0, MAX_SEGMENT_BYTES)


def read_frame_at(path: Path, offset: int) -> bytes:
    """Return the bytes of one frame of a segment, or what is there in its place.

    Raises:
        AuditError: as from `read_segment_file`.
    """
    size = LAYOUT.body_size(_read_file(path, offset, HEADER.size))
    return b"" if size in (None, CUT_SHORT) else _read_file(path, offset, size + OVERHEAD_BYTES)


MAX_SMALL_BYTES: Final = 64 * 1024


def read_small_file(path: Path) -> str:
    """Return the text of a JSON file of the log. Only a regular file is opened, and no link is followed.

    Raises:
        OSError: it cannot be read, or is no such file.
        UnicodeDecodeError: it is not text.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0))
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        return file.read(MAX_SMALL_BYTES).decode("utf-8")


@contextmanager
def opened_segment(path: Path) -> Iterator[BinaryIO]:
    """Open a segment to read. Only a regular file is opened, and no link is followed.

    Raises:
        AuditError: it cannot be read, is not a regular file, is too large for a segment, or has holes.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0))
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise AuditError(f"{path} is not a regular file: it was not read")
            if status.st_size > MAX_SEGMENT_BYTES:
                raise AuditError(f"{path} has {status.st_size} bytes; a segment has at most {MAX_SEGMENT_BYTES}")
            if status.st_size > MAX_HOLES_BYTES and (holes := _holes(descriptor, status.st_size)) > MAX_HOLES_BYTES:
                raise AuditError(f"{path} has holes of {holes} bytes, which no writer leaves: it was not read")
            file.seek(0)
            yield file
    except OSError as exc:
        why = "it is a link" if exc.errno == errno.ELOOP else exc.strerror
        raise AuditError(f"cannot read {path}: {why}") from exc


MAX_HOLES_BYTES: Final = 16 << 20
"""Most bytes of a segment: some file systems make holes of what compresses well."""


def _holes(descriptor: int, size: int) -> int:
    """Return how many bytes of a file are nowhere on the disk."""
    if not hasattr(os, "SEEK_HOLE"):
        return 0
    at = holes = 0
    while at < size and holes <= MAX_HOLES_BYTES:
        begin = os.lseek(descriptor, at, os.SEEK_HOLE)
        try:
            at = os.lseek(descriptor, begin, os.SEEK_DATA)
        except OSError:  # there is only a hole up to the end
            at = size
        holes += max(0, at - begin)
    return holes


def _read_file(path: Path, offset: int, most: int) -> bytes:
    with opened_segment(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(offset)
        return file.read(min(most, size))


def _below(log: Path) -> str:
    found = next(iter(sorted(log.glob(f"*/{LOG_FILE}"))), None)
    return f"; a service keeps one for each tenant: take {found.parent}" if found else ""


def read_log_id(log: Path) -> str:
    """Return the id that the log in this directory was given when it was created.

    Raises:
        BadInput: there is no log there, or we may not read it.
        AuditError: the file with its id is damaged.
    """
    try:
        found = json.loads(read_small_file(log / LOG_FILE))["log"]
        if not _LOG_ID.fullmatch(found):  # heads are kept in a directory of this name
            raise ValueError(f"{found!r:.60} is not an id of a log")
        return str(found)
    except FileNotFoundError as exc:
        raise BadInput(f"there is no audit log in {log}{_below(log)}") from exc
    except NotADirectoryError as exc:
        why = "is a file, and a log is a directory; a receipt is read by `toolcell audit verify` alone"
        raise BadInput(f"{log} {why}") from exc
    except OSError as exc:
        why = f"{exc.strerror}; a log is read by the user who writes it"
        raise BadInput(f"cannot read {log / LOG_FILE}: {why}") from exc
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise AuditError(f"{log / LOG_FILE} is damaged: {exc}") from exc


def create_log(log: Path) -> str:
    """Return the id of the log in this directory; create directory and log if needed. Safe in several processes.

    Raises:
        BadInput: the log cannot be created.
    """
    try:
        make_private_folder(log)
        path = log / LOG_FILE
        if not path.exists():
            with suppress(FileExistsError):
                write_file(path, json_bytes({"format": FORMAT, "log": os.urandom(16).hex()}), replace=False)
    except OSError as exc:
        raise BadInput(f"cannot make an audit log in {log}: {exc.strerror}") from exc
    return read_log_id(log)


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """Return the content of a log's JSON file."""
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()
