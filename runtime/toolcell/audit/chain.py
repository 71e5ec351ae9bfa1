"""One chain as its writer sees it: taking it over where it ended, appending, going on to the next segment.

One process writes a chain at a time and holds its lock for as long. Not safe in several threads; the log above sees
to that. Nothing that was written is ever changed: an end that a crash tore off stays where it is, and the next segment
says so.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from toolcell.audit import frames, layout, records
from toolcell.audit.frames import GENESIS, MAGIC, Frame
from toolcell.audit.keys import Signer
from toolcell.audit.signatures import checkpoint_statement
from toolcell.errors import AuditError
from toolcell_bridge import __version__

_pack_head, _NUMBERS = records.HEAD.pack, records.NUMBERS
_pack_header, _sha256 = frames.HEADER.pack, hashlib.sha256
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)


@dataclass(frozen=True, slots=True)
class Tail:
    """Where a chain ended."""

    segment: int
    size: int
    """Bytes of its last segment; 0 when that has not even its magic number."""
    seq: int
    link: bytes
    torn: bytes


class Chain:
    """A chain that is being written."""

    def __init__(self, path: Path, log: str, signer: Signer, lock: int) -> None:
        self.path = path
        self.log = log
        self.name = path.name
        self.seq = 0
        self.link = GENESIS
        self.number = 0
        """Of the segment being written."""
        self.size = 0
        self.unsigned = 0
        """Records since the last checkpoint."""
        self._signer = signer
        self._lock = lock
        self._fd = -1
        self._why_ended = ""

    # Beginning

    @classmethod
    def take(cls, directory: Path, log: str, signer: Signer) -> Chain:
        """Go on with a chain that nobody writes, or begin one.

        Raises:
            AuditError: nothing can be written there.
        """
        try:
            for path in layout.chains(directory):
                chain = cls._try(path, log, signer)
                if chain is not None:
                    return chain
            path = directory / layout.new_chain_name()
            path.mkdir(mode=0o700)
            chain = cls._try(path, log, signer)
        except OSError as exc:
            raise AuditError(f"cannot write the audit log {directory}: {exc.strerror}") from exc
        assert chain is not None
        return chain

    @classmethod
    def _try(cls, path: Path, log: str, signer: Signer) -> Chain | None:
        lock = _take_lock(path / layout.LOCK_FILE)
        if lock is None:
            return None
        chain = cls(path, log, signer, lock)
        try:
            tail = find_tail(path)
            if tail is None:  # damaged: it is left alone, as evidence
                os.close(lock)
                return None
            chain._go_on(tail)
        except BaseException:
            chain.release()
            raise
        return chain

    def _go_on(self, tail: Tail) -> None:
        self.seq, self.link, self.number, self.size = tail.seq, tail.link, tail.segment, tail.size
        torn = None
        if tail.torn:
            torn = [tail.segment, len(tail.torn), hashlib.sha256(tail.torn).hexdigest()]
        if tail.segment == 0 or tail.torn:
            self._begin_segment()
        else:
            self._fd = os.open(layout.segment_path(self.path, self.number), _FLAGS)
            if tail.size <= len(MAGIC):  # made, but its maker was killed before it wrote the first record
                os.ftruncate(self._fd, 0)
                self._begin()
        python = ".".join(map(str, sys.version_info[:3]))
        host = (os.uname().nodename, os.getpid(), __version__, python)
        self.append(records.OPENED, 0, (*host, self._signer.key_id, self._signer.algorithm, torn, {}))

    def _begin_segment(self) -> None:
        self.number += 1
        self._fd = os.open(layout.segment_path(self.path, self.number), _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        self._begin()

    def _begin(self) -> None:
        """Begin the segment just made. Failing at that ends this writer: the next one finds an empty segment."""
        self.size = 0
        try:
            problem = "" if os.write(self._fd, MAGIC) == len(MAGIC) else "the disk is full"
        except OSError as exc:
            problem = exc.strerror or str(exc)
        if problem:
            os.ftruncate(self._fd, 0)
            self._end(problem)
        self.size = len(MAGIC)
        self.append(records.SEGMENT, 0, (layout.FORMAT, self.log, self.name, self.number, {}))

    # Writing

    def append(self, kind: str, run: int, fields: tuple[Any, ...]) -> int:
        """Write a record of the log's own and return its seq."""
        return self.append_packed(kind, run, records.pack_fields(fields), time.time_ns())

    def append_packed(self, kind: str, run: int, content: bytes, at_ns: int) -> int:
        """Write a record whose content is encoded already. When this returns, the kernel has it.

        Raises:
            AuditError: it could not be written; the log is as it was before.
        """
        seq = self.seq + 1
        if kind == records.RUN_STARTED:
            run = seq
        # records.body_of and frames.frame, written out: every tool call waits for this twice.
        body = _pack_head(seq, at_ns, run, _NUMBERS[kind]) + content
        size = len(body)
        link = _sha256(self.link + _sha256(body).digest()).digest()
        data = _pack_header(size, size ^ frames.INVERT) + self.link + body + link
        try:
            if os.write(self._fd, data) != len(data):
                self._take_back("the disk is full")
        except OSError as exc:
            self._take_back(exc.strerror or str(exc))
        self.size += len(data)
        self.seq, self.link = seq, link
        self.unsigned += 1
        return seq

    def _take_back(self, problem: str) -> NoReturn:
        """Remove the piece of a record that did not fit, so that the next one can follow the last whole one."""
        if self._why_ended:
            raise AuditError(f"cannot write the audit log {self.path}: {self._why_ended}")
        try:
            os.ftruncate(self._fd, self.size)
        except OSError:  # nothing may follow what is half there
            self._end(problem)
        raise AuditError(f"cannot write the audit log {self.path}: {problem}")

    def _end(self, problem: str) -> NoReturn:
        self._why_ended = f"{problem}; open it again"
        os.close(self._fd)
        self._fd = -1
        raise AuditError(f"cannot write the audit log {self.path}: {problem}")

    def checkpoint(self, reason: str) -> None:
        """Sign everything up to here."""
        seq, at_ns = self.seq + 1, time.time_ns()
        statement = checkpoint_statement(self.log, self.name, seq, at_ns, self.link, reason)
        content = records.pack_fields((reason, self._signer.key_id, self._signer.sign(statement)))
        self.append_packed(records.CHECKPOINT, 0, content, at_ns)
        self.unsigned = 0

    def rotate(self) -> int:
        """Go on in a new segment; returns the old one's descriptor, to be synced and closed.

        The new file is there before the last word of the old: a segment that ends with `rotated` has a successor, and a
        missing one was removed.
        """
        old = self._fd
        place = layout.segment_path(self.path, self.number + 1)
        try:
            new = os.open(place, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as exc:
            raise AuditError(f"cannot write the audit log {place}: {exc.strerror}") from exc
        try:
            self.checkpoint("rotated")
        except BaseException:
            os.close(new)
            place.unlink()
            raise
        self._fd, self.number = new, self.number + 1
        self._begin()
        return old

    def sync(self) -> None:
        """Return when the disk has everything.

        Raises:
            AuditError: it has not.
        """
        sync(self._fd)

    def duplicate(self) -> int:
        """A descriptor of the segment being written, to be synced and closed elsewhere."""
        return os.dup(self._fd)

    def release(self) -> None:
        """Let go of the chain. Writes nothing."""
        for descriptor in (self._fd, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._fd = self._lock = -1
        self._why_ended = "it is closed"


def sync(descriptor: int) -> None:
    """Return when the disk has everything written to `descriptor`.

    Raises:
        AuditError: it has not.
    """
    try:
        os.fsync(descriptor)
    except OSError as exc:
        raise AuditError(f"the audit log did not reach the disk: {exc.strerror}") from exc


def find_tail(path: Path) -> Tail | None:
    """Where a chain ended; None when its last segment is damaged and nothing may be added to it."""
    found = layout.segments(path)
    seq, link = 0, GENESIS
    for number in sorted(found, reverse=True):
        data = found[number].read_bytes()
        if len(data) <= len(MAGIC) and MAGIC.startswith(data):
            before = _last_record(path, number - 1)
            return Tail(number, len(data), *before, b"") if before is not None else None
        last = _walk(data)
        return None if last is None else Tail(number, len(data), *last)
    return Tail(0, 0, seq, link, b"")


def _last_record(path: Path, number: int) -> tuple[int, bytes] | None:
    if number == 0:
        return 0, GENESIS
    place = layout.segment_path(path, number)
    last = _walk(place.read_bytes()) if place.exists() else None
    return None if last is None else last[:2]


def _walk(data: bytes) -> tuple[int, bytes, bytes] | None:
    """Seq and link of the last whole record and what is torn behind it; None when something is wrong with them."""
    if not data.startswith(MAGIC):
        return None
    last: Frame | None = None
    torn = b""
    for piece in frames.pieces(data):
        match piece:
            case Frame() if piece.is_intact:
                last = piece
            case frames.Torn():
                torn = piece.data
            case _:
                return None
    if last is None:
        return None
    try:
        return records.parse(last.body).seq, last.link, torn
    except ValueError:
        return None


def _take_lock(path: Path) -> int | None:
    """Hold a lock file until its descriptor is closed; the kernel lets go when its holder dies. None: it is held."""
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
        descriptor = os.open(path / layout.LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
