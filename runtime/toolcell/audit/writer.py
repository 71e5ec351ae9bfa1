"""Write one chain: continue it where it ended, append records, go on to the next segment.

One process writes a chain at a time and holds its lock while it does. A `ChainWriter` is not safe in several threads;
`AuditLog` takes care of that. Nothing that was written is ever changed.

A writer signs only what it wrote itself. It continues a chain only after a signature of its own key that nothing
follows, and never one that is behind its head. Any other chain it leaves as it is, begins a new one, and records there
which chain it left, where that chain ended and why.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from toolcell.audit import records
from toolcell.audit.format import (
    FORMAT,
    GENESIS,
    LOCK_FILE,
    MAGIC,
    RUN,
    chain_directories,
    new_chain_name,
    segment_path,
)
from toolcell.audit.keys import Signer
from toolcell.audit.signatures import Head, checkpoint_statement
from toolcell.audit.tail import GONE, Left, Tail, newest_first, tail_of, why_left
from toolcell.errors import AuditError
from toolcell.journal.frames import HEADER, INVERT, NotUndone, append_whole
from toolcell.support import packing
from toolcell.support.file_lock import take_lock
from toolcell_bridge import __version__

_pack_head, _NUMBERS = records.HEAD.pack, records.NUMBERS
_RUN_KINDS, _SALTED, _SALT_BYTES = records.RUN_KINDS, records.SALTED, records.SALT_BYTES
_pack_header, _sha256 = HEADER.pack, hashlib.sha256
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)


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
        self._salts = b""
        self._salt_at = 0

    # Opening

    @classmethod
    def open(cls, directory: Path, log: str, signer: Signer, heads: Iterable[Head] = ()) -> ChainWriter:
        """Continue a chain of this key that no process writes, or begin one. `heads` say how far chains had got.

        Raises:
            AuditError: the directory cannot be written.
        """
        known = {head.chain: head for head in heads}
        left: list[Left] = []
        try:
            for path in sorted(chain_directories(directory), key=newest_first):
                try:
                    lock = take_lock(path / LOCK_FILE)
                except OSError as exc:
                    left.append(Left(path.name, 0, GENESIS, f"its lock cannot be taken: {exc.strerror}"))
                    continue
                if lock is None:
                    continue
                tail, why = tail_of(path)
                why = why or why_left(tail, log, path.name, signer, known.get(path.name))
                if tail is not None and not why:
                    return cls._begin(path, log, signer, lock, tail, left)
                os.close(lock)
                left.append(Left.of(path.name, tail, why))
            left += [
                Left(name, head.seq, head.record_hash, GONE)
                for name, head in known.items()
                if not (directory / name).is_dir()
            ]
            path = directory / new_chain_name()
            path.mkdir(mode=0o700)
            lock = take_lock(path / LOCK_FILE)
            assert lock is not None
            return cls._begin(path, log, signer, lock, Tail(0, 0), left)
        except OSError as exc:
            raise AuditError(f"cannot write the audit log {directory}: {exc.strerror}") from exc

    @classmethod
    def _begin(cls, path: Path, log: str, signer: Signer, lock: int, tail: Tail, left: list[Left]) -> ChainWriter:
        chain = cls(path, log, signer, lock)
        try:
            chain._resume(tail, left)
        except BaseException:
            chain.release()
            raise
        return chain

    def _resume(self, tail: Tail, left: list[Left]) -> None:
        self.seq, self.last_hash = tail.seq, tail.record_hash
        self.segment, self.segment_bytes = tail.segment, tail.size
        if tail.segment == 0:
            self._create_segment()
        else:
            self._fd = os.open(segment_path(self.path, self.segment), _FLAGS)
            if tail.size <= len(MAGIC):  # its writer was killed before it wrote the first record
                os.ftruncate(self._fd, 0)
                self._write_segment_start()
        python = ".".join(map(str, sys.version_info[:3]))
        host = (os.uname().nodename, os.getpid(), __version__, python)
        found = [each.to_list() for each in left]
        self.append(records.OPENED, 0, (*host, self._signer.key_id, self._signer.algorithm, found, {}))

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
        return self.append_packed(kind, run, packing.pack_fields(fields), time.time_ns())

    def append_packed(self, kind: str, run: int, content: bytes, at_ns: int) -> int:
        """Write a record whose content is encoded already. When this returns, the kernel has the record.

        Raises:
            AuditError: the record could not be written; the log is as it was before.
        """
        seq = self.seq + 1
        if kind == records.RUN_STARTED:
            run = seq
        # records.encode_body and format.encode_frame, inlined: every tool call waits for this twice.
        if kind in _RUN_KINDS:
            body = _pack_head(seq, at_ns, run, _NUMBERS[kind] | _SALTED) + content + self._next_salt()
        else:
            body = _pack_head(seq, at_ns, run, _NUMBERS[kind]) + content
        size = len(body)
        record_hash = _sha256(self.last_hash + body[RUN] + _sha256(body).digest()).digest()
        data = _pack_header(size, size ^ INVERT) + self.last_hash + body + record_hash
        try:
            append_whole(self._fd, data)
        except NotUndone as exc:  # no record may follow a part of one
            self._close_after(exc.strerror or str(exc))
        except OSError as exc:
            raise AuditError(
                f"cannot write the audit log {self.path}: {self._why_closed or exc.strerror or exc}"
            ) from exc
        self.segment_bytes += len(data)
        self.seq, self.last_hash = seq, record_hash
        self.unsigned_records += 1
        return seq

    def _next_salt(self) -> bytes:
        """Return random bytes. They are drawn for many records at once, because a system call takes longer."""
        start = self._salt_at
        if start == len(self._salts):
            self._salts, start = os.urandom(_SALT_BYTES * 64), 0
        self._salt_at = end = start + _SALT_BYTES
        return self._salts[start:end]

    def _close_after(self, problem: str) -> NoReturn:
        self._why_closed = f"{problem}; open it again"
        os.close(self._fd)
        self._fd = -1
        raise AuditError(f"cannot write the audit log {self.path}: {problem}")

    def checkpoint(self, reason: str) -> None:
        """Sign everything written so far."""
        seq, at_ns = self.seq + 1, time.time_ns()
        statement = checkpoint_statement(self.log, self.name, seq, at_ns, self.last_hash, reason)
        content = packing.pack_fields((reason, self._signer.key_id, self._signer.sign(statement)))
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
