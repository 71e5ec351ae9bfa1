"""The journals of a directory: one SQLite database, with the records of runs, sessions, drafts and maps.

What is written outlives the process; it is not forced to the disk at once, so a power cut may lose the last records.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import sqlite3
import struct
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from toolcell.errors import ResumeError, StoreError, UsageError
from toolcell.support.packing import pack, unpack
from toolcell.support.private_files import make_private_folder, open_to_others
from toolcell.support.sqlite import SqliteDatabase

DATABASE: Final = "journals.db"
LOCK: Final = "journals.lock"
APPLICATION_ID: Final = 0x746C6A6E
TABLES: Final = (
    "CREATE TABLE about (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID",
    "CREATE TABLE record (kind TEXT, name TEXT, n INTEGER, at INTEGER, body BLOB, PRIMARY KEY (kind, name, n))",
    "CREATE INDEX record_by_time ON record (at)",
    "INSERT INTO about VALUES ('key', randomblob(32))",
)

RUN, SESSION, DRAFT, MAP, STATE, USED = "run", "session", "draft", "map", "state", "used"
"""Kinds of journals. A state is that of a session, by value, in pieces; a used token has one empty record."""

OF: Final[Mapping[str, tuple[str, str]]] = {RUN: (MAP, "-"), STATE: (SESSION, ".")}
"""A journal of these kinds is kept as long as one of another kind, whose name is the first part of its own: without it
an item of a map would look like one that never began."""

_IS: Final = "kind = ? AND name = ?"
PIECE_BYTES: Final = 1 << 20

State = TypeVar("State")
"""What a journal stands for."""


class Damaged(ValueError):
    """A journal cannot be read, or a record of it means nothing."""


class UnderWay(ResumeError):
    """Somebody has the journal open."""


@dataclass(frozen=True, slots=True)
class RecordKind:
    """One kind of record: the types of its fields, and what it does to the state that a journal stands for."""

    fields: tuple[type | tuple[type, ...], ...]
    apply: Callable[..., None]
    """Called with the state and the fields."""


Table = Mapping[str, RecordKind]
"""What each record of a journal does, by its kind."""


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
        raise ValueError(f"a record of kind {name!r} with other fields")
    kind.apply(state, *fields)


def make_private(folder: Path) -> None:
    """Make the directory, or check that nobody else can use the one that is there.

    Raises:
        UsageError: others can read or write it, or it belongs to somebody else.
        OSError: it cannot be made.
    """
    make_private_folder(folder)
    if problem := open_to_others(folder.stat()):
        raise UsageError(
            f"{folder} is for scripts, arguments, answers and the key of the tokens, and it {problem}; "
            f"chown it, and chmod 700 {folder}"
        )


class JournalDatabase:
    """The database of one directory. Each method that uses it raises `OSError` if it cannot be read or written."""

    def __init__(self, folder: Path, keep_s: float, token_s: float, most_bytes: int | None) -> None:
        self.folder, self._keep_s, self._token_s, self._most_bytes = folder, keep_s, token_s, most_bytes
        path = folder / DATABASE
        self._database = SqliteDatabase(path, [TABLES], application_id=APPLICATION_ID, prepare=_prepare)

    def open(self) -> bytes:
        """Make the database, remove what is kept no longer, and return the key of the tokens.

        Raises:
            UsageError: others can use the directory.
        """
        make_private(self.folder)
        self.forget_old()
        with self._reading() as db:
            (key,) = db.execute("SELECT value FROM about WHERE key = 'key'").fetchone()
        return bytes(key)

    def close(self) -> None:
        """Let go of the database. A later use opens it again."""
        self._database.close()

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._database.reading() as db:
                yield db
        except StoreError as exc:
            raise OSError(str(exc)) from exc

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._database.writing() as db:
                yield db
        except StoreError as exc:
            raise OSError(str(exc)) from exc

    # Journals

    def last(self, kind: str, name: str) -> int:
        """Return the number of the last record of a journal; 0 if there is none."""
        with self._reading() as db:
            (last,) = db.execute(f"SELECT max(n) FROM record WHERE {_IS}", (kind, name)).fetchone()
        return int(last or 0)

    def last_of_each(self, kind: str) -> dict[str, tuple[int, int]]:
        """Return number and time of the last record of each journal of a kind, by its name, in the order of names."""
        with self._reading() as db:
            rows = db.execute("SELECT name, max(n), at FROM record WHERE kind = ? GROUP BY name ORDER BY name", (kind,))
            return {name: (n, at) for name, n, at in rows}

    def records(self, kind: str, name: str) -> Iterator[tuple[int, bytes]]:
        """Yield the records of a journal, each with its number. A MiB is read at a time, and others wait meanwhile."""
        query = f"SELECT n, body FROM record WHERE {_IS} AND n > ? ORDER BY n"
        after, is_over = 0, False
        while not is_over:
            found, size = [], 0
            with self._reading() as db:
                is_over = True
                for n, body in db.execute(query, (kind, name, after)):
                    found.append((n, body))
                    after, size = n, size + len(body)
                    if size >= PIECE_BYTES:
                        is_over = False
                        break
            yield from found

    def record(self, kind: str, name: str, n: int) -> list[Any]:
        """Return one record.

        Raises:
            ValueError: it is not there, or cannot be read.
        """
        with self._reading() as db:
            found = db.execute(f"SELECT body FROM record WHERE {_IS} AND n = ?", (kind, name, n)).fetchone()
        if found is None:
            raise ValueError("a record is not there any more")
        record: list[Any] = unpack(found[0])
        return record

    def load(self, kind: str, name: str, table: Table, state: State) -> State:
        """Do what each record of a journal says, in order, and return the state.

        Raises:
            Damaged: a record cannot be read, or means nothing.
        """
        for _ in self.load_each(kind, name, table, state):
            pass
        return state

    def load_each(self, kind: str, name: str, table: Table, state: object) -> Iterator[int]:
        """Do the same; yield the number of each record before it is done. To be taken to its end."""
        try:
            for n, body in self.records(kind, name):
                yield n
                apply_record(table, state, unpack(body))
        except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as exc:
            raise Damaged(f"{type(exc).__name__}: {exc}") from exc

    def is_open(self, kind: str, name: str) -> bool:
        """Return whether somebody has a journal open, here or in another process."""
        descriptor = self.open_lock()
        try:
            found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _byte(kind, name))
        finally:
            os.close(descriptor)
        return bool(struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK)

    def open_lock(self) -> int:
        """Open the file whose bytes are locked, one for each open journal. The kernel ends its locks with it."""
        return os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def write(
        self,
        kind: str,
        name: str,
        after: int,
        bodies: Collection[bytes],
        *,
        is_anew: bool = False,
        needs_room: bool = True,
    ) -> None:
        """Append records, all of them or none. `after`: number of the last one. `is_anew`: in place of all others.
        `needs_room`: False for what ends something, and so makes room.

        Raises:
            OSError: EDQUOT: there is no room for them.
        """
        rows = [(kind, name, n, time.time_ns(), body) for n, body in enumerate(bodies, after + 1)]
        if needs_room:
            self.check_room(sum(map(len, bodies)))
        with self._writing() as db:
            if is_anew:
                db.execute(f"DELETE FROM record WHERE {_IS}", (kind, name))
            db.executemany("INSERT INTO record VALUES (?, ?, ?, ?, ?)", rows)

    def remove(self, kind: str, name: str) -> None:
        """Remove a journal, if it is there."""
        if self.last(kind, name):
            with self._writing() as db:
                db.execute(f"DELETE FROM record WHERE {_IS}", (kind, name))

    def use_once(self, token: str) -> bool:
        """Note that a token is used. False: it was before."""
        with self._writing() as db:
            row = (USED, token, 1, time.time_ns(), b"")
            return db.execute("INSERT OR IGNORE INTO record VALUES (?, ?, ?, ?, ?)", row).rowcount == 1

    # What is kept

    def check_room(self, size: int) -> None:
        """Check that there is room for so many bytes.

        Raises:
            OSError: EDQUOT: there is not.
        """
        if self._most_bytes is None or self._used() + size <= self._most_bytes:
            return
        self.forget_old()
        if (used := self._used()) + size > self._most_bytes:
            raise OSError(
                errno.EDQUOT,
                f"{used} bytes are kept of runs, drafts and sessions, and there may be {self._most_bytes}; "
                "decide about what waits, or forget sessions",
            )

    def _used(self) -> int:
        """Return the bytes of all pages that hold something."""
        with self._reading() as db:
            pages, free, size = (
                db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
            )
        return int((pages - free) * size)

    def forget_old(self) -> None:
        """Remove what nobody uses and nothing was written to for longer than it is kept."""
        now = time.time()
        query = "SELECT kind, name FROM record GROUP BY kind, name HAVING max(at) < ? ORDER BY kind, name"
        with self._reading() as db:
            if db.execute("SELECT 1 FROM record WHERE at < ?", (_ns(now - self._keep_s),)).fetchone() is None:
                return
            old = db.execute(query, (_ns(now - self._keep_s),)).fetchall()
            valid = {
                name
                for (name,) in db.execute(
                    "SELECT name FROM record WHERE kind = ? AND at >= ?", (USED, _ns(now - self._token_s))
                )
            }
        for kind, name in old:
            owner, separator = OF.get(kind, ("", "."))
            if (kind == USED and name in valid) or (owner and self.last(owner, name.rpartition(separator)[0])):
                continue
            try:
                journal = OpenJournal(self, kind, name)
            except UnderWay:
                continue
            journal.remove()
            journal.close()

    # States of sessions

    def write_state(self, session: str, content: Any) -> str:
        """Write a state by value, in pieces: no other writer waits for all of it. Return its name.

        Raises:
            OSError: it could not be written, and nothing of it is kept.
        """
        name = f"{session}.{os.urandom(4).hex()}"
        self.check_room(len(content))
        try:
            for n, start in enumerate(range(0, len(content), PIECE_BYTES)):
                self.write(STATE, name, n, [content[start : start + PIECE_BYTES]])
        except OSError:
            self.remove(STATE, name)
            raise
        return name

    def keep_states(self, session: str, names: Collection[str]) -> None:
        """Remove the states of a session, all of them but these."""
        with self._reading() as db:
            found = {
                name
                for (name,) in db.execute(
                    "SELECT DISTINCT name FROM record WHERE kind = ? AND name GLOB ?", (STATE, f"{session}.*")
                )
            }
        for name in found - set(names):
            self.remove(STATE, name)


def _prepare(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA synchronous = NORMAL")  # a commit is in the kernel's hands, so it survives a kill


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


class OpenJournal:
    """One journal. Only one process, and one object of it, has it open at a time; a kill closes it."""

    def __init__(self, database: JournalDatabase, kind: str, name: str, *, late_after: Collection[str] = ()) -> None:
        """`late_after`: records of these kinds wait in memory for the first of another kind, and most runs have none.

        Raises:
            UnderWay: it is open already.
            OSError: it cannot be opened.
        """
        self.database, self.kind, self.name = database, kind, name
        self._late_after = frozenset(late_after)
        self._waiting: list[bytes] = []
        self._fd = database.open_lock()
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _byte(kind, name))
            self._last = database.last(kind, name)
        except BlockingIOError as exc:
            self.close()
            raise UnderWay(f"{kind} {name} is under way; it can be resumed when it has ended") from exc
        except BaseException:
            self.close()
            raise

    @property
    def is_new(self) -> bool:
        """Nothing is recorded in it."""
        return not self._last

    def close(self) -> None:
        """Close it, so that others may open it. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def write(self, *fields: Any, needs_room: bool = True) -> None:
        """Append one record: its kind, and its fields. `needs_room`: as for `JournalDatabase.write`.

        Raises:
            OSError: it could not be written, and no part of it is recorded.
        """
        body = pack(list(fields))
        if not self._last and fields[0] in self._late_after:
            self._waiting.append(body)
            return
        self._append([*self._waiting, body], needs_room=needs_room)

    def write_anew(self, *fields: Any) -> None:
        """Do the same, in place of every other record."""
        self._append([pack(list(fields))], is_anew=True)

    def _append(self, bodies: list[bytes], **how: bool) -> None:
        if self._fd < 0:
            raise OSError(errno.EBADF, "it is closed")
        self.database.write(self.kind, self.name, self._last, bodies, **how)
        self._last += len(bodies)
        self._waiting = []

    def remove(self) -> None:
        """Remove what is recorded; it is open until `close`."""
        if self._last:
            self.database.remove(self.kind, self.name)

    def load(self, table: Table, state: State) -> State:
        """Do what each record says, in order, and return the state. Raises as `JournalDatabase.load`."""
        return self.database.load(self.kind, self.name, table, state)


_FLOCK: Final = "hhqqi4x"
"""A `struct flock` of the kernel."""


def _byte(kind: str, name: str) -> bytes:
    """Return what is to be locked for a journal."""
    byte = int.from_bytes(hashlib.sha256(f"{kind} {name}".encode()).digest()[:7], "big")
    return struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
