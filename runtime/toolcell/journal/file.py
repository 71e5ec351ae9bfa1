"""A journal on disk: one file for each run, to which records are appended, each with its length and checksum.

The start of a call is written before its tool runs. So a host that is killed leaves a start without an answer, never an
effect without a record. Written data outlives the process; it is not forced to the disk, so a power cut may lose the
last records.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn

from toolcell.errors import ResumeError
from toolcell.journal.ledger import Journal, JournalEntry, RecordedDecision
from toolcell.journal.marks import Mark, open_mark
from toolcell.packing import pack, unpack
from toolcell.results import PendingCall

HEAD: Final = struct.Struct(">III")
"""Length of the record that follows, the length with every bit inverted, and the record's checksum.

The checksum is the start of an HMAC-SHA256 over the checksum before and the record, with the key of the directory. So
nobody without the key adds a decision or an answer, or changes, moves or exchanges records.

A length that was changed is told by its inverse. Otherwise it would look like the end of a journal that was cut short.
"""

INVERT: Final = 0xFFFFFFFF

SUFFIX: Final = ".journal"
RUN, CALL, START, ANSWER, LABELS = "run", "call", "start", "answer", "labels"
SUSPENDED, RESUMED, ENDED, PAST = "suspended", "resumed", "ended", "past"


class OlderCopy(ValueError):
    """A journal had got further than what is there now."""


class UnderWay(ResumeError):
    """Somebody has the journal open."""


class JournalFile:
    """An open journal. Only one process has it open at a time."""

    def __init__(self, path: Path, marks: Path | None = None, key: bytes = b"") -> None:
        """Open or make the file. `marks`: the directory with the marks of the journals, which find older copies.
        `key`: of the checksums.

        Raises:
            ResumeError: another process, or another run of this one, has it open.
            OSError: it is no file, or cannot be opened.
        """
        import fcntl  # not on Windows, where nothing opens a journal

        self.path = path
        self._key, self._last = key, 0
        self._mark: Mark | None = None
        kind = os.O_NOFOLLOW | os.O_NONBLOCK  # no link, and no wait for the other end of a pipe
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | kind, 0o600)
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            self.close()
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(self._fd)
            raise UnderWay(f"run {path.stem} is under way; it can be resumed when it has ended") from exc
        if not _is_at(path, self._fd):  # removed between open and lock: others would make, and lock, another one
            self.close()
            raise UnderWay(f"run {path.stem} was removed just now")
        self._size = os.fstat(self._fd).st_size
        self._mark = open_mark(marks, path.stem)

    def check_new(self) -> None:
        """Check that the file is for a run that begins.

        Raises:
            ResumeError: it has the records of another one; it is closed then.
        """
        if self._size:
            self.close()
            raise ResumeError(f"there is a run {self.path.stem} already")

    def close(self) -> None:
        """Close the file, so that others may open it. Safe to call twice."""
        if self._mark is not None:
            self._mark.close()
            self._mark = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def write(self, *fields: Any) -> None:
        """Append one record.

        Raises:
            OSError: it could not be written, and no part of it is in the file.
        """
        body = pack(list(fields))
        length, checksum = len(body), self._checksum(body)
        whole = left = HEAD.pack(length, length ^ INVERT, checksum) + body
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:
            self._remove_end(len(whole) - len(left))
            raise
        self._size += len(whole)
        self._last = checksum
        if self._mark is not None:
            self._mark.set(self._size, checksum)

    def clear(self) -> None:
        """Remove every record.

        Raises:
            OSError: they could not be removed.
        """
        if self._mark is not None:
            self._mark.set(0, 0)  # first: a host that is killed in between leaves no end to look for
        os.ftruncate(self._fd, 0)
        self._size = self._last = 0

    def remove(self) -> None:
        """Remove the file and its mark; it is open until `close`.

        Raises:
            OSError: the file could not be removed.
        """
        self.path.unlink(missing_ok=True)
        if self._mark is not None:
            with suppress(OSError):
                self._mark.path.unlink(missing_ok=True)

    def _checksum(self, body: bytes) -> int:
        mac = hmac.new(self._key, self._last.to_bytes(4, "big"), hashlib.sha256)
        mac.update(body)
        return int.from_bytes(mac.digest()[:4], "big")

    def _remove_end(self, length: int) -> None:
        """Remove a part of a record: a reader would take the next record for the rest of it."""
        if not length:
            return
        try:
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - length)
        except OSError:
            self.close()  # then nothing is written after it
            raise

    def read(self) -> list[list[Any]]:
        """Return all records. What a killed host had not written to its end is removed from the end of the file.

        Raises:
            OlderCopy: it does not hold what this machine wrote last.
            ValueError: a record was changed.
        """
        return [fields for _, fields in self.records()]

    def records(self) -> Iterator[tuple[int, list[Any]]]:
        """Yield each record with its place in the file, for `read_at`; otherwise as `read`. To be taken to its end."""
        self._last, at = 0, 0
        mark = self._mark.read() if self._mark is not None else None
        is_whole = mark is None or mark == (0, 0)
        with open(self.path, "rb") as file:
            while len(head := file.read(HEAD.size)) == HEAD.size:
                length, inverted, checksum = HEAD.unpack(head)
                if length ^ INVERT != inverted:
                    raise ValueError("the length of a record was changed")
                body = file.read(length)
                if len(body) < length:
                    break
                if self._checksum(body) != checksum:  # what follows it says what was made, so it is not dropped
                    raise ValueError("a record was changed")
                self._last = checksum
                yield at, unpack(body)
                at += HEAD.size + length
                is_whole = is_whole or mark == (at, checksum)
        if not is_whole:
            self._refuse_older()
        if at < os.fstat(self._fd).st_size:
            os.ftruncate(self._fd, at)
        self._size = at

    def read_at(self, place: int) -> list[Any]:
        """Return the record that `records` found at a place.

        Raises:
            OSError, ValueError: it is not there any more.
        """
        length, _, _ = HEAD.unpack(os.pread(self._fd, HEAD.size, place))
        fields: list[Any] = unpack(os.pread(self._fd, length, place + HEAD.size))
        return fields

    def _refuse_older(self) -> NoReturn:
        assert self._mark is not None
        mark = self._mark.read() or (0, 0)
        raise OlderCopy(
            f"the journal of run {self.path.stem} got to {mark[0]} bytes on this machine, and that record is not in "
            "it: an older copy was put back, or its end was lost. What the run did since is unknown; run the script "
            f"again, or remove {self._mark.path} to carry on nevertheless"
        )

    # A journal's records

    def write_header(self, journal: Journal) -> None:
        """Record the run, and the calls of the run that it repairs."""
        self.write(RUN, journal.id, journal.header)
        if journal.past:
            self.write(PAST, [_past_fields(entry) for entry in journal.past if entry is not None])
        if journal.labels:
            self.write_labels(journal.labels)

    def write_call(self, entry: JournalEntry) -> None:
        """Record a call."""
        self.write(
            CALL, entry.number, entry.tool, entry.args, entry.began, entry.began_ns, entry.is_started, entry.reused
        )
        entry.is_written = True

    def write_start(self, entry: JournalEntry) -> None:
        """Record that the tool of a call is about to run."""
        self.write(START, entry.number)

    def write_labels(self, labels: Iterable[str]) -> None:
        """Record what the run has read."""
        self.write(LABELS, sorted(labels))

    def write_answer(self, entry: JournalEntry) -> None:
        """Record an answer."""
        self.write(ANSWER, entry.number, entry.answer, entry.ended, entry.ended_ns, entry.is_refused)

    def write_suspended(self, token_id: str, expires: float, calls: list[tuple[int, PendingCall]]) -> None:
        """Record that the run waits for decisions."""
        rows = [[number, each.id, each.args, each.line, each.digest, each.reason] for number, each in calls]
        self.write(SUSPENDED, token_id, expires, rows)

    def write_resumed(self, token_id: str, decided: dict[int, RecordedDecision]) -> None:
        """Record that a token was used, and what was decided."""
        rows = [[number, each.kind, each.data, each.digest, each.reason] for number, each in decided.items()]
        self.write(RESUMED, token_id, rows)


BEFORE = (RUN, PAST, LABELS)
"""Records that wait in memory for the first one of another kind."""


class LateJournalFile(JournalFile):
    """A journal of a run that begins. Making a file costs more than most scripts do."""

    def __init__(self, path: Path, marks: Path | None = None, key: bytes = b"") -> None:
        self.path = path
        self._fd, self._size, self._mark = -1, 0, None
        self._marks, self._key = marks, key
        self._waiting: list[tuple[Any, ...]] | None = []

    def write(self, *fields: Any) -> None:
        """Append one record.

        Raises:
            OSError: it could not be written.
        """
        if self._waiting is not None:
            if fields[0] in BEFORE:
                self._waiting.append(fields)
                return
            waiting = self._make()
            for each in waiting:
                super().write(*each)
            self._waiting = None
        super().write(*fields)

    def remove(self) -> None:
        """Remove the file, if it was made."""
        if self._waiting is None:
            super().remove()

    def _make(self) -> list[tuple[Any, ...]]:
        waiting = self._waiting or []
        try:
            super().__init__(self.path, self._marks, self._key)
            self.check_new()
        except ResumeError as exc:  # ids are random: somebody made the file on purpose
            raise OSError(errno.EEXIST, str(exc), str(self.path)) from exc
        return waiting


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _past_fields(entry: JournalEntry) -> list[Any]:
    return [entry.tool, entry.args, entry.answer, entry.is_started, entry.is_refused]


def _past_entry(number: int, fields: list[Any]) -> JournalEntry:
    entry = JournalEntry(number, fields[0], fields[1], 0)
    entry.answer, entry.is_started, entry.is_refused = fields[2:]
    return entry


class JournalLoader:
    """Rebuilds a journal from its records."""

    def __init__(self) -> None:
        self.journal = Journal("")
        self.used: set[str] = set()
        """Tokens that were used."""
        self.is_ended = False
        self._numbers: dict[int, JournalEntry] = {}

    def load(self, records: list[list[Any]]) -> JournalLoader:
        """Apply all records, in order."""
        for kind, *fields in records:
            getattr(self, f"_{kind}")(*fields)
        self.journal.entries.sort(key=lambda entry: entry.number)
        return self

    def _run(self, ident: str, header: dict[str, Any]) -> None:
        self.journal.id, self.journal.header = ident, header

    def _past(self, rows: list[list[Any]]) -> None:
        self.journal.past = [_past_entry(number, fields) for number, fields in enumerate(rows)]

    def _call(
        self, number: int, tool: str, args: Any, began: int, began_ns: int, is_started: bool, reused: int | None
    ) -> None:
        entry = JournalEntry(number, tool, args, began)
        entry.began_ns, entry.is_started, entry.is_written, entry.reused = began_ns, is_started, True, reused
        if reused is not None:
            self.journal.past[reused] = None
        self._numbers[number] = entry
        self.journal.entries.append(entry)
        self.journal.stamp = max(self.journal.stamp, began)

    def _start(self, number: int) -> None:
        self._numbers[number].start()

    def _answer(self, number: int, frame: bytes, ended: int, ended_ns: int, is_refused: bool) -> None:
        entry = self._numbers[number]
        entry.answer, entry.ended, entry.ended_ns, entry.is_refused = frame, ended, ended_ns, is_refused
        entry.pending = None
        entry.is_taken_over = entry.reused is not None and bool(frame) and not (entry.is_started or is_refused)
        self.journal.size += len(frame)
        self.journal.stamp = max(self.journal.stamp, ended)

    def _labels(self, labels: list[str]) -> None:
        self.journal.labels |= frozenset(labels)

    def _suspended(self, token_id: str, expires: float, rows: list[list[Any]]) -> None:
        self.journal.token, self.journal.expires = token_id, expires
        self.is_ended = False  # a run that was lost and carried on waits now
        for number, ident, args, line, digest, reason in rows:
            entry = self._numbers[number]
            entry.pending = PendingCall(ident, entry.tool, args, line, digest, reason)

    def _resumed(self, token_id: str, rows: list[list[Any]]) -> None:
        self.used.add(token_id)
        self.journal.token = ""
        for number, *decision in rows:
            self._numbers[number].decide(RecordedDecision(*decision))

    def _ended(self, outcome: str) -> None:
        self.is_ended = True


def write_waiting(journal: Journal, file: JournalFile) -> None:
    """Record what a suspended run waits for, and its token."""
    for entry in journal.entries:
        if entry.pending is not None and not entry.is_written:
            file.write_call(entry)
    waiting = [(entry.number, entry.pending) for entry in journal.entries if entry.pending is not None]
    file.write_suspended(journal.token, journal.expires, waiting)
