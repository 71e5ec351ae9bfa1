"""One durable file: records that are appended, each sealed with a key and tied to the one before.

Runs, sessions, drafts and maps each have such a file; a table says what each of its records does. Written data outlives
the process; it is not forced to the disk, so a power cut may lose the last records.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from toolcell.errors import ResumeError
from toolcell.journal.disk_budget import DiskBudget
from toolcell.journal.frames import HEADER, Layout, NotUndone, append_whole, frames_of
from toolcell.journal.marks import Mark, open_mark
from toolcell.support.file_lock import lock
from toolcell.support.packing import pack, unpack

CHECKSUM_BYTES: Final = 4
"""The start of an HMAC-SHA256 over the checksum before and the record, with the key of the directory. So nobody without
the key adds a decision or an answer, or changes, moves or exchanges records."""

LAYOUT: Final = Layout(before=CHECKSUM_BYTES, after=0, most=0xFFFFFFFF)


State = TypeVar("State")
"""What a file stands for."""


class OlderCopy(ValueError):
    """A file had got further than what is there now."""


class Damaged(ValueError):
    """A file was changed, or cannot be read."""


class UnderWay(ResumeError):
    """Somebody has the file open."""


@dataclass(frozen=True, slots=True)
class RecordKind:
    """One kind of record: the types of its fields, and what it does to the state that a file stands for."""

    fields: tuple[type | tuple[type, ...], ...]
    apply: Callable[..., None]
    """Called with the state and the fields."""


Table = Mapping[str, RecordKind]
"""What each record of a file does, by its kind."""


def apply_record(table: Table, state: object, record: list[Any]) -> None:
    """Do what a record says.

    Raises:
        ValueError: there is no such record, or its fields are others.
    """
    name, *fields = record
    kind = table.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"a record of an unknown kind: {name!r:.40}")
    if len(fields) != len(kind.fields) or not all(map(isinstance, fields, kind.fields)):
        raise ValueError(f"a record {name!r} with {len(fields)} other fields")
    kind.apply(state, *fields)


class JournalFile:
    """An open file of records. Only one process has it open at a time."""

    def __init__(
        self,
        path: Path,
        marks: Path | None = None,
        key: bytes = b"",
        *,
        late_after: Collection[str] = (),
        room: DiskBudget | None = None,
    ) -> None:
        """Open or make the file. `marks`: the directory with the marks of the journals, which find older copies.
        `key`: of the checksums. `late_after`: records of these kinds wait in memory, and the file is made with the
        first of another kind; making a file costs more than most scripts do. `room`: that of its directory.

        Raises:
            ResumeError: another process, or another run of this one, has it open.
            OSError: it is not a file, or cannot be opened.
        """
        self.path = path
        self._marks, self._key, self._room = marks, key, room
        self._fd, self._size, self._last = -1, 0, b"\0" * CHECKSUM_BYTES
        self._mark: Mark | None = None
        self._late_after = frozenset(late_after)
        self._waiting: list[tuple[Any, ...]] = []
        self._is_late = bool(late_after)
        if not self._is_late:
            self._open()

    def _open(self) -> None:
        path = self.path
        if self._room is not None and not path.exists():
            self._room.take(0, files=1)
        kind = os.O_NOFOLLOW | os.O_NONBLOCK  # no link, and no wait for the other end of a pipe
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | kind, 0o600)
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            self.close()
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        try:
            is_ours = lock(self._fd, wait=False)
        except OSError:
            self.close()
            raise
        if not is_ours:
            self.close()
            raise UnderWay(f"run {path.stem} is under way; it can be resumed when it has ended")
        if not _is_at(path, self._fd):  # removed between open and lock: others would make, and lock, another one
            self.close()
            raise UnderWay(f"run {path.stem} was removed just now")
        self._size = os.fstat(self._fd).st_size
        self._mark = open_mark(self._marks, path.stem)

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

    # Writing

    def write(self, *fields: Any) -> None:
        """Append one record: its kind, and its fields.

        Raises:
            OSError: it could not be written, and no part of it is in the file.
        """
        if self._is_late:
            if fields[0] in self._late_after:
                self._waiting.append(fields)
                return
            self._make()
        self._append(fields)

    def _append(self, fields: tuple[Any, ...]) -> None:
        body = pack(list(fields))
        checksum = self._checksum(body)
        frame = LAYOUT.encode(checksum, body)
        if self._room is not None:
            self._room.take(len(frame))
        try:
            append_whole(self._fd, frame)
        except NotUndone:
            self.close()  # then nothing is written after it
            raise
        self._size += len(frame)
        self._last = checksum
        if self._mark is not None:
            self._mark.set(self._size, int.from_bytes(checksum, "big"))

    def _make(self) -> None:
        """Make a file that was late, and write what waits."""
        try:
            self._open()
            self.check_new()
        except ResumeError as exc:  # ids are random: somebody made the file on purpose
            raise OSError(errno.EEXIST, str(exc), str(self.path)) from exc
        try:
            for each in self._waiting:
                self._append(each)
        except OSError:
            self.close()  # a call must not stand in a file that does not say whose it is
            raise
        self._is_late, self._waiting = False, []

    def clear(self) -> None:
        """Remove every record.

        Raises:
            OSError: they could not be removed.
        """
        if self._mark is not None:
            self._mark.set(0, 0)  # first: a host that is killed in between leaves no end to look for
        os.ftruncate(self._fd, 0)
        self._size, self._last = 0, b"\0" * CHECKSUM_BYTES

    def remove(self) -> None:
        """Remove the file, if it was made, and its mark; it is open until `close`.

        Raises:
            OSError: the file could not be removed.
        """
        if self._is_late:
            return
        self.path.unlink(missing_ok=True)
        if self._mark is not None:
            with suppress(OSError):
                self._mark.path.unlink(missing_ok=True)

    def _checksum(self, body: bytes) -> bytes:
        mac = hmac.new(self._key, self._last, hashlib.sha256)
        mac.update(body)
        return mac.digest()[:CHECKSUM_BYTES]

    # Reading

    def load(self, table: Table, state: State) -> State:
        """Do what each record says, in order, and return the state. What a killed host had not written to its end is
        removed from the end of the file.

        Raises:
            OlderCopy: it does not hold what this machine wrote last.
            Damaged: a record was changed, or means nothing.
        """
        for _ in self.load_each(table, state):
            pass
        return state

    def load_each(self, table: Table, state: object) -> Iterator[int]:
        """Do the same, and yield the place of each record, for `read_at`, before it is done. To be taken to its end."""
        try:
            for place, record in self._records():
                yield place
                apply_record(table, state, record)
        except OlderCopy:
            raise
        except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as exc:
            raise Damaged(f"{type(exc).__name__}: {exc}") from exc

    def read(self) -> list[list[Any]]:
        """Return all records. Raises as `load`."""
        return [record for _, record in self._records()]

    def _records(self) -> Iterator[tuple[int, list[Any]]]:
        """Yield each record with its place."""
        self._last, at = b"\0" * CHECKSUM_BYTES, 0
        mark = self._mark.read() if self._mark is not None else None
        is_whole = mark is None or mark == (0, 0)
        with open(self.path, "rb") as file:
            for frame in frames_of(file, LAYOUT):
                if self._checksum(frame.body) != frame.before:  # what follows says what was made: it is not dropped
                    raise ValueError("a record was changed")
                self._last = frame.before
                yield at, unpack(frame.body)
                at = frame.end
                is_whole = is_whole or mark == (at, int.from_bytes(frame.before, "big"))
        if not is_whole:
            self._refuse_older()
        if at < os.fstat(self._fd).st_size:
            os.ftruncate(self._fd, at)
        self._size = at

    def read_at(self, place: int) -> list[Any]:
        """Return the record at a place of `load_each`.

        Raises:
            OSError, ValueError: it is not there any more.
        """
        size = LAYOUT.body_size(os.pread(self._fd, HEADER.size, place))
        if size is None or size < 0:
            raise ValueError("a record is not there any more")
        record: list[Any] = unpack(os.pread(self._fd, size, place + LAYOUT.overhead))
        return record

    def _refuse_older(self) -> NoReturn:
        assert self._mark is not None
        mark = self._mark.read() or (0, 0)
        raise OlderCopy(
            f"the journal of run {self.path.stem} got to {mark[0]} bytes on this machine, and that record is not in "
            "it: an older copy was put back, or its end was lost. What the run did since is unknown; run the script "
            f"again, or remove {self._mark.path} to carry on nevertheless"
        )


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
