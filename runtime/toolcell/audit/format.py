"""How a log lies on disk: the names of its files, and the frames that hold its records.

    LOG/log.json                  the log's id
    LOG/<chain>/00000001.log      segments of one chain, in order
    LOG/<chain>/stub.json         the signed prune record, when segments were removed
    LOG/<chain>/lock              held by the process that writes the chain
    LOG/index.sqlite              for queries; can be removed at any time

A segment is a magic number and then frames. Shape of a frame: length, length with every bit inverted, the hash of the
record before, the body, the hash of this record. A record's hash is sha256(previous hash + sha256(body)): a receipt
can show only the digest of a record of somebody else's run, and the chain still verifies.

This module does not know what a record says.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from toolcell.errors import AuditError, UsageError

MAGIC: Final = b"TCAUDIT\x01"
"""First bytes of a segment. The last byte is the format's version."""

HEADER: Final = struct.Struct(">II")
HASH_BYTES: Final = 32
OVERHEAD_BYTES: Final = HEADER.size + 2 * HASH_BYTES
MAX_BODY_BYTES: Final = 64 << 20
GENESIS: Final = bytes(HASH_BYTES)
"""The previous hash of a chain's first record."""

INVERT: Final = 0xFFFFFFFF

FORMAT: Final = 1
LOG_FILE, PRUNE_FILE, LOCK_FILE, INDEX_FILE = "log.json", "stub.json", "lock", "index.sqlite"

_CHAIN = re.compile(r"[0-9a-f]{12}")
_SEGMENT = re.compile(r"(\d{8})\.log")


class BadInput(UsageError, AuditError):
    """A named file or directory is missing, unreadable, unwritable or of the wrong kind. No change was found in it."""


# Frames


@dataclass(frozen=True, slots=True)
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
        return hash_record(self.previous_hash, self.body) == self.record_hash


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
    return hashlib.sha256(body).digest()


def hash_record(previous_hash: bytes, body: bytes) -> bytes:
    """Return the hash of a record."""
    return hashlib.sha256(previous_hash + hashlib.sha256(body).digest()).digest()


def hash_digest(previous_hash: bytes, digest: bytes) -> bytes:
    """Return the hash of a record of which only the body's digest is known."""
    return hashlib.sha256(previous_hash + digest).digest()


def encode_frame(previous_hash: bytes, body: bytes) -> tuple[bytes, bytes]:
    """Return the bytes of one record, and its hash."""
    size = len(body)
    own = hash_record(previous_hash, body)
    return HEADER.pack(size, size ^ INVERT) + previous_hash + body + own, own


def split_segment(data: bytes, offset: int = len(MAGIC)) -> Iterator[Piece]:
    """Yield every piece of a segment from `offset` on. After garbage, continue at the next intact frame."""
    while offset < len(data):
        piece = _piece_at(data, offset)
        yield piece
        if isinstance(piece, Torn):
            return
        offset = piece.end


def _piece_at(data: bytes, offset: int) -> Piece:
    size = _body_size(data, offset)
    if size is None:
        return Garbage(offset, _next_intact(data, offset + 1))
    end = offset + OVERHEAD_BYTES + size
    if size < 0 or end > len(data):
        return Torn(offset, data[offset:])
    start = offset + HEADER.size
    body_at = start + HASH_BYTES
    return Frame(offset, data[start:body_at], data[body_at : body_at + size], data[end - HASH_BYTES : end])


def _body_size(data: bytes, offset: int) -> int | None:
    """Return the length in the header at `offset`. None: this is no header. -1: the data ends inside the header."""
    if len(data) - offset < HEADER.size:
        return -1
    size, inverted = HEADER.unpack_from(data, offset)
    return size if size ^ INVERT == inverted and size <= MAX_BODY_BYTES else None


def _next_intact(data: bytes, offset: int) -> int:
    """Return the offset of the next frame whose hash is right, or the end of the data."""
    for start in range(offset, len(data) - OVERHEAD_BYTES + 1):
        if _body_size(data, start) is not None:
            piece = _piece_at(data, start)
            if isinstance(piece, Frame) and piece.is_intact:
                return start
    return len(data)


# Files


def new_chain_name() -> str:
    """Return a name that no other chain has."""
    return os.urandom(6).hex()


def segment_path(chain: Path, number: int) -> Path:
    """Return the file of a segment."""
    return chain / f"{number:08d}.log"


def chain_directories(log: Path) -> list[Path]:
    """Return the directories of a log's chains, by name."""
    try:
        return sorted(entry for entry in log.iterdir() if _CHAIN.fullmatch(entry.name) and entry.is_dir())
    except OSError as exc:
        raise BadInput(f"cannot read the audit log {log}: {exc.strerror}") from exc


def segment_files(chain: Path) -> dict[int, Path]:
    """Map the number of each segment to its file, in order."""
    found = {int(match[1]): entry for entry in chain.iterdir() if (match := _SEGMENT.fullmatch(entry.name))}
    return dict(sorted(found.items()))


def read_log_id(log: Path) -> str:
    """Return the id that the log in this directory was given when it was created.

    Raises:
        BadInput: there is no log there, or we may not read it.
        AuditError: the file with its id is damaged.
    """
    try:
        described = json.loads((log / LOG_FILE).read_text(encoding="utf-8"))
        return str(described["log"])
    except FileNotFoundError as exc:
        raise BadInput(f"there is no audit log in {log}") from exc
    except NotADirectoryError as exc:
        why = "is a file, and a log is a directory; a receipt is read by `toolcell audit verify` alone"
        raise BadInput(f"{log} {why}") from exc
    except OSError as exc:
        why = f"{exc.strerror}; a log is read by the user who writes it"
        raise BadInput(f"cannot read {log / LOG_FILE}: {why}") from exc
    except (ValueError, KeyError, TypeError) as exc:
        raise AuditError(f"{log / LOG_FILE} is damaged: {exc}") from exc


def create_log(log: Path) -> str:
    """Return the id of the log in this directory; create directory and log if needed. Safe in several processes.

    Raises:
        AuditError: the log cannot be created.
    """
    try:
        log.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = log / LOG_FILE
        if not path.exists():
            with suppress(FileExistsError):
                write_new(path, json_text({"format": FORMAT, "log": os.urandom(16).hex()}))
    except OSError as exc:
        raise AuditError(f"cannot make an audit log in {log}: {exc.strerror}") from exc
    return read_log_id(log)


def json_text(content: Mapping[str, Any]) -> str:
    """Return the text of a log's JSON file."""
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def write_new(path: Path, text: str) -> None:
    """Write a file that only its owner may read. It appears complete or not at all, and replaces nothing.

    Raises:
        FileExistsError: there is a file of this name.
    """
    draft = _write_draft(path, text)
    try:
        os.link(draft, path)
    finally:
        draft.unlink()


def replace_file(path: Path, text: str) -> None:
    """Replace a file in one step. Only its owner may read it."""
    os.replace(_write_draft(path, text), path)


def _write_draft(path: Path, text: str) -> Path:
    draft = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    return draft
