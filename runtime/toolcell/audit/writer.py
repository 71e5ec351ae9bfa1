"""Write one chain: continue it where it ended, append records, go on to the next segment.

One process writes a chain at a time and holds its lock while it does. A `ChainWriter` is not safe in several threads;
`AuditLog` takes care of that. Nothing that was written is ever changed: an end that a crash cut short stays in its
segment, and the next segment records it.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from toolcell.audit import records
from toolcell.audit.format import (
    FORMAT,
    GENESIS,
    HEADER,
    INVERT,
    LOCK_FILE,
    MAGIC,
    Frame,
    Torn,
    chain_directories,
    new_chain_name,
    segment_files,
    segment_path,
    split_segment,
)
from toolcell.audit.keys import Signer
from toolcell.audit.signatures import checkpoint_statement
from toolcell.errors import AuditError
from toolcell_bridge import __version__

_pack_head, _NUMBERS = records.HEAD.pack, records.NUMBERS
_pack_header, _sha256 = HEADER.pack, hashlib.sha256
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of a chain on disk."""

    segment: int
    size: int
    """Bytes of the last segment. 0: it has no magic number yet."""
    seq: int
    record_hash: bytes
    torn: bytes


class ChainWriter:
    """A chain that this process writes."""

    def __init__(self, path: Path, log: str, signer: Signer, lock: int) -> None:
        self.path = path
        self.log = log
        self.name = path.name
        self.seq = 0
        self.last_hash = GENESIS
        self.segment = 0
        """Number of the segment being written."""
        self.segment_bytes = 0
        self.unsigned_records = 0
        """Records since the last checkpoint."""
        self._signer = signer
        self._lock = lock
        self._fd = -1
        self._why_closed = ""

    # Opening

    @classmethod
    def open(cls, directory: Path, log: str, signer: Signer) -> ChainWriter:
        """Continue a chain that no process writes, or create one.

        Raises:
            AuditError: the directory cannot be written.
        """
        try:
            for path in chain_directories(directory):
                chain = cls._open_if_free(path, log, signer)
                if chain is not None:
                    return chain
            path = directory / new_chain_name()
            path.mkdir(mode=0o700)
            chain = cls._open_if_free(path, log, signer)
        except OSError as exc:
            raise AuditError(f"cannot write the audit log {directory}: {exc.strerror}") from exc
        assert chain is not None
        return chain

    @classmethod
    def _open_if_free(cls, path: Path, log: str, signer: Signer) -> ChainWriter | None:
        lock = _take_lock(path / LOCK_FILE)
        if lock is None:
            return None
        chain = cls(path, log, signer, lock)
        try:
            tail = find_tail(path)
            if tail is None:  # the chain is damaged: leave it alone, as evidence
                os.close(lock)
                return None
            chain._resume(tail)
        except BaseException:
            chain.release()
            raise
        return chain

    def _resume(self, tail: Tail) -> None:
        self.seq, self.last_hash = tail.seq, tail.record_hash
        self.segment, self.segment_bytes = tail.segment, tail.size
        torn = None
        if tail.torn:
            torn = [tail.segment, len(tail.torn), hashlib.sha256(tail.torn).hexdigest()]
        if tail.segment == 0 or tail.torn:
            self._create_segment()
        else:
            self._fd = os.open(segment_path(self.path, self.segment), _FLAGS)
            if tail.size <= len(MAGIC):  # its writer was killed before it wrote the first record
                os.ftruncate(self._fd, 0)
                self._write_segment_start()
        python = ".".join(map(str, sys.version_info[:3]))
        host = (os.uname().nodename, os.getpid(), __version__, python)
        self.append(records.OPENED, 0, (*host, self._signer.key_id, self._signer.algorithm, torn, {}))

    def _create_segment(self) -> None:
        self.segment += 1
        self._fd = os.open(segment_path(self.path, self.segment), _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        self._write_segment_start()

    def _write_segment_start(self) -> None:
        """Write the magic number and first record of a new segment.

        A failure closes this writer, and the next writer finds an empty segment.
        """
        self.segment_bytes = 0
        try:
            problem = "" if os.write(self._fd, MAGIC) == len(MAGIC) else "the disk is full"
        except OSError as exc:
            problem = exc.strerror or str(exc)
        if problem:
            os.ftruncate(self._fd, 0)
            self._close_after(problem)
        self.segment_bytes = len(MAGIC)
        self.append(records.SEGMENT, 0, (FORMAT, self.log, self.name, self.segment, {}))

    # Writing

    def append(self, kind: str, run: int, fields: tuple[Any, ...]) -> int:
        """Write a record about the log itself and return its seq."""
        return self.append_packed(kind, run, records.pack_fields(fields), time.time_ns())

    def append_packed(self, kind: str, run: int, content: bytes, at_ns: int) -> int:
        """Write a record whose content is encoded already. When this returns, the kernel has the record.

        Raises:
            AuditError: the record could not be written; the log is as it was before.
        """
        seq = self.seq + 1
        if kind == records.RUN_STARTED:
            run = seq
        # records.encode_body and format.encode_frame, inlined: every tool call waits for this twice.
        body = _pack_head(seq, at_ns, run, _NUMBERS[kind]) + content
        size = len(body)
        record_hash = _sha256(self.last_hash + _sha256(body).digest()).digest()
        data = _pack_header(size, size ^ INVERT) + self.last_hash + body + record_hash
        try:
            if os.write(self._fd, data) != len(data):
                self._undo_write("the disk is full")
        except OSError as exc:
            self._undo_write(exc.strerror or str(exc))
        self.segment_bytes += len(data)
        self.seq, self.last_hash = seq, record_hash
        self.unsigned_records += 1
        return seq

    def _undo_write(self, problem: str) -> NoReturn:
        """Remove the part of a record that was written, so that the next record can follow the last whole one."""
        if self._why_closed:
            raise AuditError(f"cannot write the audit log {self.path}: {self._why_closed}")
        try:
            os.ftruncate(self._fd, self.segment_bytes)
        except OSError:  # no record may follow a part of one
            self._close_after(problem)
        raise AuditError(f"cannot write the audit log {self.path}: {problem}")

    def _close_after(self, problem: str) -> NoReturn:
        self._why_closed = f"{problem}; open it again"
        os.close(self._fd)
        self._fd = -1
        raise AuditError(f"cannot write the audit log {self.path}: {problem}")

    def checkpoint(self, reason: str) -> None:
        """Sign everything written so far."""
        seq, at_ns = self.seq + 1, time.time_ns()
        statement = checkpoint_statement(self.log, self.name, seq, at_ns, self.last_hash, reason)
        content = records.pack_fields((reason, self._signer.key_id, self._signer.sign(statement)))
        self.append_packed(records.CHECKPOINT, 0, content, at_ns)
        self.unsigned_records = 0

    def rotate(self) -> int:
        """Continue in a new segment. Return the old segment's descriptor; the caller syncs and closes it.

        The new file is created before the old one gets its last record. So a segment that ends with `rotated` always
        has a successor, and a missing successor was removed.
        """
        old = self._fd
        path = segment_path(self.path, self.segment + 1)
        try:
            new = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as exc:
            raise AuditError(f"cannot write the audit log {path}: {exc.strerror}") from exc
        try:
            self.checkpoint("rotated")
        except BaseException:
            os.close(new)
            path.unlink()
            raise
        self._fd, self.segment = new, self.segment + 1
        self._write_segment_start()
        return old

    def sync(self) -> None:
        """Wait until everything is on disk.

        Raises:
            AuditError: the disk reported an error.
        """
        sync(self._fd)

    def duplicate(self) -> int:
        """Return another descriptor of the open segment; the caller syncs and closes it."""
        return os.dup(self._fd)

    def release(self) -> None:
        """Close the files and release the lock. Writes nothing."""
        for descriptor in (self._fd, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._fd = self._lock = -1
        self._why_closed = "it is closed"


def sync(descriptor: int) -> None:
    """Wait until everything written to `descriptor` is on disk.

    Raises:
        AuditError: the disk reported an error.
    """
    try:
        os.fsync(descriptor)
    except OSError as exc:
        raise AuditError(f"the audit log did not reach the disk: {exc.strerror}") from exc


def find_tail(path: Path) -> Tail | None:
    """Find the end of a chain. None: its last segment is damaged, and nothing may be added to it."""
    found = segment_files(path)
    for number in sorted(found, reverse=True):
        data = found[number].read_bytes()
        if len(data) <= len(MAGIC) and MAGIC.startswith(data):
            before = _end_of_segment(path, number - 1)
            return Tail(number, len(data), *before, b"") if before is not None else None
        last = _last_record(data)
        return None if last is None else Tail(number, len(data), *last)
    return Tail(0, 0, 0, GENESIS, b"")


def _end_of_segment(path: Path, number: int) -> tuple[int, bytes] | None:
    if number == 0:
        return 0, GENESIS
    file = segment_path(path, number)
    last = _last_record(file.read_bytes()) if file.exists() else None
    return None if last is None else last[:2]


def _last_record(data: bytes) -> tuple[int, bytes, bytes] | None:
    """Return seq and hash of a segment's last whole record, and the torn bytes after it. None: it is damaged."""
    if not data.startswith(MAGIC):
        return None
    last: Frame | None = None
    torn = b""
    for piece in split_segment(data):
        match piece:
            case Frame() if piece.is_intact:
                last = piece
            case Torn():
                torn = piece.data
            case _:
                return None
    if last is None:
        return None
    try:
        return records.parse(last.body).seq, last.record_hash, torn
    except ValueError:
        return None


def _take_lock(path: Path) -> int | None:
    """Lock a file and return its descriptor; closing it releases the lock. None: another process holds the lock."""
    # Not `filelock`: on a file system without flock it falls back to a lock that survives SIGKILL, and it has no
    # shared, read-only probe such as `is_locked`, which must work for readers who may not write the directory.
    try:
        import fcntl
    except ImportError as exc:
        raise AuditError(f"audit logs need POSIX file locks, which {sys.platform} has not") from exc
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def is_locked(path: Path) -> bool:
    """True while a process writes the chain."""
    import fcntl

    try:
        descriptor = os.open(path / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
