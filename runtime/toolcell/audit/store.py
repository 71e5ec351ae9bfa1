"""The database of a record: its tables, how it is opened, and what each event adds to the tables that are looked up.

The events are the record. `run` and `call` are views of them, kept in the same transaction, for queries and for people;
`verify` compares them with the events, and what is shown of a run is read from its events. This module knows no keys.
"""

from __future__ import annotations

import hashlib
import math
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Final, Protocol

from toolcell.audit import records
from toolcell.audit.records import StoredEvent, event_of
from toolcell.audit.shapes import RELATIONS
from toolcell.audit.titles import title_of
from toolcell.errors import AuditError, BadInput
from toolcell.results import UNFINISHED

VERSION: Final = 1
LOCK_S: Final = 10.0
"""How long a write waits for that of another process."""
ABORTED: Final = "aborted"

TABLES: Final = (
    "CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID",
    "CREATE TABLE event (id INTEGER PRIMARY KEY, writer TEXT, n INTEGER, run INTEGER, kind TEXT, at INTEGER, "
    "salt BLOB, body BLOB, prev BLOB, hash BLOB, UNIQUE (writer, n))",
    "CREATE INDEX event_by_run ON event (writer, run, n)",
    "CREATE TABLE blob (sha256 TEXT PRIMARY KEY, bytes BLOB, used INTEGER) WITHOUT ROWID",
    "CREATE TABLE run (writer TEXT, n INTEGER, id TEXT, kind TEXT, started INTEGER, ended INTEGER, outcome TEXT, "
    "sha256 TEXT, user TEXT, session TEXT, title TEXT, calls INTEGER, failed INTEGER, wall_s REAL, cpu_s REAL, "
    "peak_memory_bytes INTEGER, relation TEXT, parent TEXT, decided_by TEXT, PRIMARY KEY (writer, n)) WITHOUT ROWID",
    "CREATE INDEX run_by_id ON run (id)",
    "CREATE INDEX run_by_time ON run (started, n, writer, outcome)",
    "CREATE INDEX run_by_parent ON run (parent) WHERE parent IS NOT NULL",
    "CREATE TABLE call (writer TEXT, run INTEGER, number INTEGER, tool TEXT, origin TEXT, status TEXT, code TEXT, "
    "duration_us INTEGER, decided_by TEXT, PRIMARY KEY (writer, run, number)) WITHOUT ROWID",
    "CREATE INDEX call_by_decision ON call (decided_by) WHERE decided_by IS NOT NULL",
    "CREATE TABLE request (writer TEXT, run INTEGER, number INTEGER, host TEXT, secret TEXT, "
    "PRIMARY KEY (writer, run, number, host, secret)) WITHOUT ROWID",
    "CREATE INDEX request_by_host ON request (host)",
    "CREATE INDEX request_by_secret ON request (secret)",
    "CREATE TABLE kept (kind TEXT, name TEXT, n INTEGER, at INTEGER, body BLOB, PRIMARY KEY (kind, name, n)) "
    "WITHOUT ROWID",
    "CREATE TABLE checkpoint (writer TEXT, n INTEGER, hash BLOB, at INTEGER, reason TEXT, key_id TEXT, "
    "signature BLOB, PRIMARY KEY (writer, n, reason)) WITHOUT ROWID",
)

TABLE_NAMES: Final = tuple(each.split()[2] for each in TABLES if each.startswith("CREATE TABLE"))

VIEWS: Final = {
    "run": "writer, n",
    "call": "writer, run, number",
    "request": "writer, run, number, host, secret",
}
"""The tables that events make, and the order of their rows."""

EVENT_COLUMNS: Final = ", ".join(records.COLUMNS)


class Connection(Protocol):
    """An open database. It takes the SQL of SQLite, with `?` for each value, and leaves transactions to us."""

    text_factory: Any
    """`text`, `bytearray` where text is wanted as it is stored, or `str` where a blob is not to be taken for text."""

    @property
    def in_transaction(self) -> bool:
        """True between BEGIN and COMMIT."""

    def execute(self, sql: str, values: Any = ..., /) -> Any:
        """Execute a statement, and return its cursor."""

    def executemany(self, sql: str, rows: Any, /) -> Any:
        """Execute a statement for each row of values."""

    def close(self) -> None:
        """Close it."""


class Lock(ABC):
    """Held on the name of a journal, which nobody else can have open then."""

    def __init__(self) -> None:
        self.written: int | None = None
        """Number of the last record of the journal; None: it is not known yet."""
        self.attempted: set[tuple[int, int]] = set()
        """Number and time of that record if a later write was committed, of which that is not known."""
        self.may_be_lost = False
        """The record can still be written without it."""
        self.has_begun = False
        """Of one that may be lost: its first record is written, so somebody else who has it only looks."""
        self.is_lost = False
        """Then somebody else has written to the journal."""

    @abstractmethod
    def release(self) -> None:
        """Let others have it."""


class RecordDatabase(ABC):
    """Where one record is, and everything in which SQLite and PostgreSQL differ."""

    place: str
    """Names the database in messages. No password is in it."""
    file: Path | None = None
    """None: it is on a server."""
    errors: tuple[type[Exception], ...]
    """What its connections raise. `why` has words for them."""
    is_waiting = False
    """A write has to wait just now, for another process or a server: a thread writes, and not the event loop."""
    turn: AbstractContextManager[object]
    """Held by the thread that writes; the log gives its own."""

    @abstractmethod
    def open_writable(self, *, is_synced: bool = False) -> Connection:
        """Open it to write, and make the tables if there are none.

        Raises:
            BadInput: they cannot be made, it is another database, or others may write beside it.
        """

    def id(self) -> str:
        """Return the id of the record.

        Raises:
            BadInput: there is no record there, or we may not read it.
            AuditError: it is damaged.
        """
        with closing(self.open_read_only()) as db, self.translated():
            return record_id(db)

    @abstractmethod
    def open_read_only(self) -> Connection:
        """Open it to read.

        Raises:
            BadInput: there is no record, we may not read it, or others may write beside it.
        """

    @abstractmethod
    def begin_write(self, db: Any, wait_s: float) -> bool:
        """Begin a transaction. False: that would have to wait for another process, and `wait_s` is 0."""

    def batch(self, db: Any) -> AbstractContextManager[object]:
        """Send the statements of a block together, where each would have to wait for its answer."""
        return _AT_ONCE

    def __str__(self) -> str:
        return self.place

    def is_unsure(self, exc: BaseException) -> bool:
        """What could not be written may be there all the same: the connection broke meanwhile."""
        return False

    def check_present(self) -> None:  # noqa: B027 - a server says so itself
        """Check that what is written can be found.

        Raises:
            AuditError: the file was removed or replaced.
        """

    def sync(self) -> None:  # noqa: B027 - a server has it on its disk
        """Wait until what was written is on disk. Raises `OSError`."""

    def compact(self) -> None:  # noqa: B027 - a server does it by itself
        """Tidy up after many writes."""

    @abstractmethod
    def close(self, db: Any) -> None:
        """Close a connection that wrote."""

    def forget_connections(self) -> None:  # noqa: B027 - of a file, none is kept here
        """Use no connection of the parent of this process."""

    def damage(self, db: Any) -> Iterator[str]:
        """Yield what the database itself finds wrong with its files; a server checks them itself."""
        return iter(())

    def most_bytes(self, db: Any) -> float:
        """Return a number that the bytes of all rows are not above; infinity where that is not known."""
        return math.inf

    @abstractmethod
    def state(self, db: Any) -> object:
        """Return what differs once somebody has written."""

    @abstractmethod
    def copy_to(self, db: Any, copy: sqlite3.Connection) -> None:
        """Copy everything to a new SQLite file."""

    @abstractmethod
    def why(self, exc: Exception) -> str:
        """Say in words why the database or the system refused."""

    @abstractmethod
    def lock(self, kind: str, name: str, *, is_unknown: bool = False) -> Lock:
        """Lock the name of a journal. `is_unknown`: nobody else knows it.

        Raises:
            BlockingIOError: it is locked, here or elsewhere.
            OSError: that cannot be found out.
        """

    @abstractmethod
    def is_locked(self, kind: str, name: str, db: Any) -> bool:
        """Return whether somebody has locked a name. `db` may read."""

    def check_version(self, version: int) -> None:
        """Check the version of the tables.

        Raises:
            BadInput: a newer program made them.
        """
        if version > VERSION:
            raise BadInput(
                f"the record {self.place} has version {version}, and this toolcell knows {VERSION}; use a newer one"
            )

    @contextmanager
    def translated(self, doing: str = "read") -> Iterator[None]:
        """Turn errors of the database into `AuditError`."""
        try:
            yield
        except self.errors as exc:
            raise AuditError(f"cannot {doing} the record {self.place}: {self.why(exc)}") from exc


_AT_ONCE: Final = nullcontext()


def lock_number(name: str) -> int:
    """Return the number that is locked for a name, of 56 bits."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def text(stored: bytes) -> str:
    """Decode text, which need not be UTF-8 where another program wrote it."""
    return stored.decode("utf-8", "replace")


def record_id(db: Connection) -> str:
    """Return the id that the record was given when it was made.

    Raises:
        AuditError: it is not there.
    """
    row = db.execute("SELECT value FROM about WHERE key = 'record'").fetchone()
    if row is None or type(row[0]) is not str or len(row[0]) != 32 or set(row[0]) - set("0123456789abcdef"):
        raise AuditError("the record's id is damaged")
    return str(row[0])


def token_key(db: Connection) -> bytes:
    """Return the key that signs the tokens of suspended runs.

    Raises:
        AuditError: it is not there.
    """
    row = db.execute("SELECT value FROM about WHERE key = 'tokens'").fetchone()
    with suppress(TypeError, ValueError):
        if len(key := bytes.fromhex(row[0])) == 32:
            return key
    raise AuditError("the record's key of tokens is damaged")


# Reading


def events(db: Connection, where: str, *values: Any) -> Iterator[StoredEvent]:
    """Yield the events that a condition of ours selects, in order.

    Raises:
        ValueError: a row holds what no writer writes.
    """
    for row in db.execute(f"SELECT {EVENT_COLUMNS} FROM event WHERE {where} ORDER BY writer, n", values):
        yield event_of(row)


# Writing: what an event adds to the tables that are looked up


INSERT_EVENT: Final = f"INSERT INTO event ({EVENT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"

Row = tuple[str, tuple[Any, ...]]
"""A statement and its values, which become `storable`."""


def rows_of(chain: str, run: int, kind: str, at_ns: int, values: Sequence[Any]) -> tuple[Row, ...]:
    """Return what an event changes in `run`, `call` and `request`. `values`: of its fields, as `shapes` lists them.

    The same events give the same rows, whoever reads them.
    """
    make = ROWS.get(kind)
    return make(chain, run, at_ns, values) if make is not None else ()


def _run_started(chain: str, run: int, at_ns: int, values: Sequence[Any]) -> tuple[Row, ...]:
    id, sort, source, sha256, *_, who, _ = values
    sessions = [who.get(name) for name in ("thread", "chat", "channel", "session")]
    above = str(who.get("run", ""))
    session = next((str(each) for each in sessions if each), above if above != id else "")
    relation = next((name for name in RELATIONS if name in who), None)
    row = (
        chain, run, id, sort, at_ns, UNFINISHED, sha256, str(who.get("user", "")), session, title_of(source), relation,
        who.get(relation), who.get("decided_by"),
    )  # fmt: skip
    return ((_INSERT_RUN, row),)


_BEGUN: Final = (
    "writer", "n", "id", "kind", "started", "outcome", "sha256", "user", "session", "title", "relation", "parent",
    "decided_by",
)  # fmt: skip
_ENDED: Final = ("ended", "outcome", "calls", "failed", "wall_s", "cpu_s", "peak_memory_bytes")
"""Columns of a run that its first event gives, and its last."""

_INSERT_RUN: Final = (
    f"INSERT INTO run ({', '.join(_BEGUN)}, calls, failed) VALUES ({', '.join('?' * len(_BEGUN))}, 0, 0)"
)


def _call_started(chain: str, run: int, at_ns: int, values: Sequence[Any]) -> tuple[Row, ...]:
    number, _, _, tool, origin, *_, more = values
    if not more:
        return ((INSERT_CALL, (chain, run, number, tool, origin, UNFINISHED, None)),)
    row = (chain, run, number, tool, origin, UNFINISHED, (more.get("decided") or {}).get("by"))
    sent = tuple(
        (_INSERT_REQUEST, (chain, run, number, host, secret))
        for host in more.get("hosts") or ()
        for secret in more.get("secret_names") or ("",)
    )
    return ((INSERT_CALL, row), *sent)


INSERT_CALL: Final = (
    "INSERT INTO call (writer, run, number, tool, origin, status, decided_by) VALUES (?, ?, ?, ?, ?, ?, ?)"
)
INSERT_WHOLE_CALL: Final = "INSERT INTO call VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
_INSERT_REQUEST: Final = "INSERT INTO request VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"


def _call_ended(chain: str, run: int, at_ns: int, values: Sequence[Any]) -> tuple[Row, ...]:
    number, status, duration_us, _, code, _ = values
    return ((END_CALL, (status, code, duration_us, chain, run, number)),)


END_CALL: Final = "UPDATE call SET status = ?, code = ?, duration_us = ? WHERE writer = ? AND run = ? AND number = ?"


def _run_ended(chain: str, run: int, at_ns: int, values: Sequence[Any]) -> tuple[Row, ...]:
    outcome, *_, usage, calls, _ = values
    measured = (usage.get("wall_s"), usage.get("cpu_s"), usage.get("peak_memory_bytes"))
    return ((_END_RUN, (at_ns, outcome, *calls, *measured, chain, run)),)


_END_RUN: Final = f"UPDATE run SET {', '.join(f'{name} = ?' for name in _ENDED)} WHERE writer = ? AND n = ?"

ROWS: Final = {
    records.RUN_STARTED: _run_started,
    records.CALL_STARTED: _call_started,
    records.CALL_ENDED: _call_ended,
    records.RUN_ENDED: _run_ended,
}
"""Kinds of events that change `run` or `call`, and what."""


def execute(db: Connection, rows: Iterable[Row]) -> None:
    """Execute statements."""
    for statement, values in rows:
        db.execute(statement, all_storable(values))


def all_storable(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return values that every database can store. Nearly all are, and to make a tuple of them takes longer."""
    for each in values:
        if type(each) is str and not each.isprintable():
            return tuple(map(storable, values))
    return values


def storable(value: Any) -> Any:
    """Return a value that every database can store: half of a surrogate pair and a null character are escaped."""
    if not isinstance(value, str) or value.isprintable():
        return value
    return value.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def told_run(changes: list[Row]) -> dict[str, Any]:
    """Return the row of a run that its first and last event make, by column.

    Raises:
        ValueError: they are not the events of a run.
    """
    told: dict[str, Any] = dict.fromkeys((*_BEGUN, *_ENDED))
    for statement, values in changes:
        if statement is _INSERT_RUN:
            told |= dict(zip(_BEGUN, map(storable, values), strict=True), calls=0, failed=0)
        elif statement is _END_RUN:
            told |= dict(zip(_ENDED, map(storable, values), strict=False))  # without those that find the row
    if told["n"] is None:
        raise ValueError("it does not begin with its first event")
    return told
