"""What runs, sessions, drafts and maps need to go on: rows of the record's database, beside its events.

They hold exact values, which an event may have cut or redacted, and are removed when nothing can go on any more. They
are written with the next event, or in a moment.
"""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from toolcell.audit import store
from toolcell.audit.log import AuditLog
from toolcell.errors import AuditError, ResumeError
from toolcell.support import daemon_threads
from toolcell.support.packing import pack, unpack
from toolcell.support.sqlite import transaction

MAP, SESSION, RUN, DRAFT, STATE, USED = GO_ON = "map", "session", "run", "draft", "state", "used"
REQUEST = "request"
"""Kinds of journals. A state is that of a session, by value, in pieces; a used token has one empty record; a request is
one of a service that has an idempotency key, and is forgotten by `RequestKeys`."""

OF: Final[Mapping[str, Mapping[str, str]]] = {RUN: {MAP: "-", SESSION: "."}, STATE: {SESSION: "."}}
"""A journal of these kinds is kept as long as one of another kind, whose name is the first part of its own: without it
an item of a map would look like one that never began, and a session could not be rebuilt."""

_IS: Final = "kind = ? AND name = ?"
PIECE_BYTES: Final = 1 << 20

COUNT_S: Final = 1.0
"""How old a count of the bytes that are kept may be."""

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
    apply: Callable[..., None] | str
    """Called with the state and the fields; or the attribute of the state that the only field is."""


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
    if isinstance(kind.apply, str):
        setattr(state, kind.apply, *fields)
    else:
        kind.apply(state, *fields)


class JournalDatabase:
    """The rows of one record. Each method that uses them raises `OSError` if they cannot be read or written."""

    def __init__(self, log: AuditLog) -> None:
        self.log, self.config, self.database = log, log.config, log.database
        self.file = self.database.file
        self.place = str(self.file or self.database.place)
        """Names the record in messages."""
        self._lock = threading.Lock()
        self._db: store.Connection | None = None
        """Reads, so that nobody who reads waits for a writer."""
        self._process = os.getpid()
        self._used = (0, -math.inf)
        """Bytes that are kept, and when they were counted."""
        self._counting: threading.Thread | None = None

    def open(self) -> bytes:
        """Remove what is kept no longer, and return the key of the tokens."""
        self.forget_old()
        if self.config.continue_bytes is not None:
            self._count_again()
        with self.reading() as db:
            return store.token_key(db)

    def close(self) -> None:
        """Let go of the database. A later look opens it again."""
        if self._counting is not None:
            self._counting.join()
        with self._lock:
            if self._db is not None and self._process == os.getpid():
                self._db.close()
            self._db = None

    @contextmanager
    def reading(self, is_written: bool = False) -> Iterator[store.Connection]:
        """Yield the connection. `is_written`: what is looked for waits for no write of this process."""
        with self._lock, self._translated():
            if self.log.is_open and not is_written:
                self.log.flush(wait=self.is_remote)  # then we see what we wrote
            if self._db is None or self._process != os.getpid():  # a parent's connection is not even closed
                self._abandoned, self._process = self._db, os.getpid()
                self._db = self.database.open_read_only()
            yield self._db

    @contextmanager
    def reading_alone(self) -> Iterator[store.Connection]:
        """Yield a new connection, for a look that takes long: nobody waits for it."""
        self.settle()
        with self._translated(), closing(self.database.open_read_only()) as db:
            yield db

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except AuditError as exc:
            raise OSError(str(exc)) from exc
        except self.database.errors as exc:
            raise OSError(f"{self.place}: {self.database.why(exc)}") from exc

    @property
    def folder(self) -> Path | None:
        """Where temporary files are made that belong to it."""
        return self.file.parent if self.file is not None else None

    @property
    def is_remote(self) -> bool:
        """A server has it: whoever reads or waits does so in a thread."""
        return self.file is None

    def settle(self, wait: bool = True) -> bool:
        """Write what waits to be written. False: another process must be waited for, and `wait` is false."""
        with self._translated():
            return self.log.flush(wait=wait)

    # Journals

    def last(self, kind: str, name: str, is_written: bool = False) -> int:
        """Return the number of the last record of a journal; 0 if there is none. `is_written`: as for `reading`."""
        with self.reading(is_written) as db:
            (last,) = db.execute(f"SELECT max(n) FROM kept WHERE {_IS}", (kind, name)).fetchone()
        return int(last or 0)

    def last_of_each(self, kind: str) -> dict[str, tuple[int, int]]:
        """Return number and time of the last record of each journal of a kind, by its name, in the order of names."""
        with self.reading() as db:
            rows = db.execute(
                "SELECT name, max(n), max(at) FROM kept WHERE kind = ? GROUP BY name ORDER BY name", (kind,)
            )
            return {name: (n, at) for name, n, at in rows}

    def records(self, kind: str, name: str) -> Iterator[bytes]:
        """Yield the records of a journal. A MiB is read at a time, and others wait meanwhile."""
        query = f"SELECT n, body FROM kept WHERE {_IS} AND n > ? ORDER BY n"
        after, is_over = 0, False
        while not is_over:
            found, size = [], 0
            with (
                self.reading() as db,
                transaction(db, "BEGIN"),
                closing(db.execute(query, (kind, name, after))) as rows,
            ):
                is_over = True
                for n, body in rows:
                    found.append(body)
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
        with self.reading() as db:
            found = db.execute(f"SELECT body FROM kept WHERE {_IS} AND n = ?", (kind, name, n)).fetchone()
        if found is None:
            raise ValueError("a record is not there any more")
        record: list[Any] = unpack(found[0])
        return record

    def load(self, kind: str, name: str, table: Table, state: State) -> State:
        """Do what each record of a journal says, in order, and return the state.

        Raises:
            Damaged: a record cannot be read, or means nothing.
        """
        try:
            for body in self.records(kind, name):
                apply_record(table, state, unpack(body))
        except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as exc:
            raise Damaged(f"{type(exc).__name__}: {exc}") from exc
        return state

    def is_open(self, kind: str, name: str) -> bool:
        """Return whether somebody has a journal open, here or in another process."""
        self.settle(wait=self.is_remote)
        with self.reading(is_written=True) as db:
            return self.database.is_locked(kind, name, db)

    def write(
        self,
        kind: str,
        name: str,
        after: int,
        bodies: Collection[bytes],
        *,
        lock: store.Lock | None = None,
        is_anew: bool = False,
        needs_room: bool = True,
    ) -> None:
        """Append records, all of them or none. `after`: number of the last one. `lock`: of the journal.

        `is_anew`: in place of all others.
        `needs_room`: False for what ends something, and so makes room.

        Raises:
            OSError: EDQUOT: there is no room for them.
        """
        now_ns = time.time_ns()
        rows = [(kind, name, n, now_ns, body) for n, body in enumerate(bodies, after + 1)]
        if needs_room:
            self.check_room(sum(map(len, bodies)))
        try:  # a context manager would take longer than the rest
            if is_anew:
                self.log.keep(_REMOVE, [(kind, name)])
            self.log.keep(_INSERT, rows, lock=lock, last=(after + len(rows), now_ns))
        except AuditError as exc:
            raise OSError(str(exc)) from exc

    def remove(self, kind: str, name: str, size: int = 0, lock: store.Lock | None = None) -> None:
        """Remove a journal, if it is there. `size`: its bytes, as far as they are known. Each is written over."""
        with self._translated():
            self.log.keep(_REMOVE, [(kind, name)], removes_bytes=size, lock=lock)

    def copy(self, kind: str, name: str, new: str) -> None:
        """Write the records of a journal under another name.

        Raises:
            OSError: EDQUOT: there is no room for them; or there are none.
        """
        with self.reading() as db:
            (size,) = db.execute(f"SELECT sum(length(body)) FROM kept WHERE {_IS}", (kind, name)).fetchone()
        if size is None:
            raise OSError(errno.ENOENT, f"nothing is kept of {kind} {name}")
        self.check_room(int(size))
        with self._translated():
            self.log.keep(_COPY, [(new, kind, name)], removes_bytes=PIECE_BYTES)

    def use_once(self, token: str) -> bool:
        """Note that a token is used. False: it was before."""
        insert = "INSERT INTO kept VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
        row = (USED, token, 1, time.time_ns(), b"")
        with self._translated():
            return bool(self.log.change(lambda db: db.execute(insert, row).rowcount) == 1)

    def change_each(self, statement: str, rows: Collection[tuple[Any, ...]]) -> None:
        """Execute a statement with each of these values, in one transaction, after what waits to be written. Waits."""
        with self._translated():
            self.log.change(lambda db: db.executemany(statement, rows))

    # What is kept

    def check_room(self, size: int) -> None:
        """Check that there is room for so many bytes.

        Raises:
            OSError: EDQUOT: there is not.
        """
        most = self.config.continue_bytes
        if most is None or self._count(size) <= most:
            return
        if not self.is_remote:
            self.forget_old()
            self._used = (0, -math.inf)
        if (used := self._count(size)) > most:
            used -= size
            self._used = (used if self.is_remote else 0, -math.inf)  # it is not written
            raise OSError(
                errno.EDQUOT,
                f"{used} bytes are kept of runs, drafts, sessions and answers to idempotency keys, and there may be "
                f"{most} (RecordConfig.continue_bytes); decide about what waits, forget sessions, or raise it",
            )

    def _count(self, size: int) -> int:
        """Return the bytes that are kept, with these; or a larger number that is allowed as well: those of the file.
        They are counted now and then, by a thread where a server is asked, and between with what we add."""
        if time.monotonic() - self._used[1] > COUNT_S:
            if not self.is_remote:
                self._count_again(size)
            elif self._counting is None or not self._counting.is_alive():
                self._counting = daemon_threads.start(self._count_later, name="toolcell-record-size")
        used, counted_s = self._used
        self._used = used + size, counted_s
        return used + size

    def _count_again(self, size: int = 0) -> None:
        counted_s = time.monotonic()
        with self.reading() as db:
            used = self.database.most_bytes(db)
            if used + size > (self.config.continue_bytes or 0):
                # Which keys were used must be known: only the answers to their requests take room.
                query = "SELECT coalesce(sum(length(body)), 0) FROM kept WHERE kind != ? OR n >= 3"
                used = db.execute(query, (REQUEST,)).fetchone()[0]
        self._used = int(used), counted_s

    def _count_later(self) -> None:
        with suppress(OSError):  # it is counted again in a moment
            self._count_again()
            if self._used[0] > (self.config.continue_bytes or 0):
                self.forget_old()
                self._count_again()

    def forget_old(self) -> None:
        """Remove what nobody uses and nothing was written to for longer than it is kept; `RequestKeys` removes keys."""
        now = time.time()
        which = f"FROM kept WHERE kind IN ({', '.join('?' * len(GO_ON))})"  # of requests there may be very many
        query = f"SELECT kind, name, max(at) {which} GROUP BY kind, name HAVING max(at) < ? ORDER BY kind, name"
        before = int((now - self.config.continue_s) * 1e9)
        with self.reading() as db:
            old = db.execute(query, (*GO_ON, before)).fetchall()
        for kind, name, at in sorted(old, key=lambda row: GO_ON.index(row[0])):
            is_valid = kind == USED and at >= (now - self.config.token_s) * 1e9
            if is_valid or any(self.last(owner, name.rpartition(end)[0]) for owner, end in OF.get(kind, {}).items()):
                continue
            with suppress(UnderWay), closing(OpenJournal(self, kind, name)) as journal:
                journal.remove()

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
                self.settle()
        except OSError:
            self.remove(STATE, name)
            raise
        return name

    def remove_scripts(self, session: OpenJournal, *, even_waiting: bool = False) -> None:
        """Remove the runs of the scripts of a session that are over; `even_waiting`: all of them."""
        begins = b"" if even_waiting else ENDS
        self._remove_of(session, _REMOVE_SCRIPTS, len(begins), begins)

    def remove_states(self, session: OpenJournal, but: tuple[str, str] = ("", "")) -> None:
        """Remove the states of a session, all of them but two."""
        self._remove_of(session, _REMOVE_STATES, *but)

    def _remove_of(self, session: OpenJournal, statement: str, *values: object) -> None:
        row = (f"{session.name}.", f"{session.name}/", *values)
        with self._translated():  # a thread writes: there may be many bytes
            self.log.keep(statement, [row], removes_bytes=PIECE_BYTES, lock=session.lock, last=(session.last, 0))


_INSERT: Final = (
    "INSERT INTO kept VALUES (?, ?, ?, ?, ?) ON CONFLICT (kind, name, n) "
    "DO UPDATE SET at = excluded.at, body = excluded.body"
)
_REMOVE: Final = "DELETE FROM kept WHERE kind = ? AND name = ?"
_COPY: Final = "INSERT INTO kept SELECT kind, ?, n, at, body FROM kept WHERE kind = ? AND name = ?"
_REMOVE_STATES: Final = f"DELETE FROM kept WHERE kind = '{STATE}' AND name > ? AND name < ? AND name NOT IN (?, ?)"
ENDED: Final = "ended"
ENDS: Final = pack([ENDED, ""])[:-1]
"""The last record of a run that is over begins so."""
_REMOVE_SCRIPTS: Final = (
    f"DELETE FROM kept WHERE kind = '{RUN}' AND name IN (SELECT name FROM kept WHERE kind = '{RUN}' AND name > ? "
    "AND name < ? AND substr(body, 1, ?) = ?)"
)


class OpenJournal:
    """One journal. Only one process, and one object of it, has it open at a time; a kill closes it."""

    def __init__(
        self,
        database: JournalDatabase,
        kind: str,
        name: str,
        *,
        late_after: Collection[str] = (),
        is_unknown: bool = False,
    ) -> None:
        """`late_after`: records of these kinds wait in memory for the first of another kind, and most runs have none.
        `is_unknown`: nobody else knows the name, so the first record is early enough to open it.

        Raises:
            UnderWay: it is open already.
            OSError: it cannot be opened.
        """
        self.database, self.kind, self.name = database, kind, name
        self._late_after = frozenset(late_after)
        self._waiting: list[bytes] = []
        self._bytes = 0
        """Written since it was opened."""
        self.last = 0
        """Number of the last record."""
        self._is_closed = False
        self._lock: store.Lock | None = None
        if not is_unknown:
            self._open()

    def _open(self, is_unknown: bool = False) -> None:
        database = self.database
        try:
            try:
                lock = database.database.lock(self.kind, self.name, is_unknown=is_unknown)
            except BlockingIOError:
                database.settle(wait=database.is_remote)  # it may be closed, and not everything written
                lock = database.database.lock(self.kind, self.name, is_unknown=is_unknown)
        except BlockingIOError as exc:
            raise UnderWay(f"{self.kind} {self.name} is under way; it can be resumed when it has ended") from exc
        try:
            if not (is_unknown and database.is_remote):
                # Whoever had it open let go when everything was written.
                self.last = database.last(self.kind, self.name, is_written=True)
            lock.written = self.last
            lock.may_be_lost = self.kind == REQUEST
        except BaseException:
            lock.release()
            raise
        self._lock = lock

    @property
    def lock(self) -> store.Lock | None:
        """What keeps others out, while it is open."""
        return self._lock

    @property
    def is_new(self) -> bool:
        """Nothing is recorded in it."""
        return not self.last

    def close(self) -> None:
        """Close it, so that others may open it once everything is written. Safe to call twice."""
        self._is_closed = True
        if self._lock is None:
            return
        release, self._lock = self._lock.release, None
        try:
            self.database.log.keep(_INSERT, (), release)
        except AuditError:  # nothing more is written
            release()
        else:
            if self.kind != RUN:  # the end of a run is an event, and written at once
                with suppress(OSError):
                    self.database.settle(wait=False)

    def write(self, *fields: Any, needs_room: bool = True) -> None:
        """Append one record: its kind, and its fields. `needs_room`: as for `JournalDatabase.write`.

        Raises:
            OSError: it could not be written, and no part of it is recorded.
        """
        body = pack(list(fields))
        if not self.last and fields[0] in self._late_after:
            self._waiting.append(body)
            return
        self._append([*self._waiting, body], needs_room=needs_room)

    def write_each(self, records: Collection[tuple[Any, ...]]) -> None:
        """Append records, all of them or none."""
        self._append([pack(list(each)) for each in records])

    def write_anew(self, *fields: Any) -> None:
        """Do the same, in place of every other record."""
        self._append([pack(list(fields))], is_anew=True)

    def _append(self, bodies: list[bytes], **how: bool) -> None:
        if self._is_closed:
            raise OSError(errno.EBADF, "it is closed")
        if self._lock is None:
            self._open(is_unknown=True)
        self.database.write(self.kind, self.name, self.last, bodies, lock=self._lock, **how)
        self.last += len(bodies)
        self._bytes += sum(map(len, bodies))
        self._waiting = []

    def remove(self) -> None:
        """Remove what is recorded; it is open until `close`."""
        if self.last:
            self.database.remove(self.kind, self.name, self._bytes, self._lock)
            self.last = 0
