"""The database of a record: its tables, how it is opened, and what each event adds to the tables that are looked up.

The events are the record. `run` and `call` are views of them, kept in the same transaction, for queries and for people;
`verify` compares them with the events, and what is shown of a run is read from its events. This module knows no keys.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from toolcell.audit import records
from toolcell.audit.records import StoredEvent, event_of
from toolcell.audit.shapes import RELATIONS
from toolcell.audit.titles import title_of
from toolcell.errors import AuditError, StoreError, UsageError
from toolcell.support.sqlite import check_files_beside, check_folder, connect, transaction

APPLICATION_ID: Final = 0x746F6F6C
VERSION: Final = 1
PAGE_BYTES: Final = 2048
"""An event changes some pages a little, and each is written as a whole: small ones take less time."""
LOCK_S: Final = 10.0
"""How long a write waits for that of another process."""
UNFINISHED: Final = "unfinished"

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

VIEWS: Final = {
    "run": "writer, n",
    "call": "writer, run, number",
    "request": "writer, run, number, host, secret",
}
"""The tables that events make, and the order of their rows."""

PLAIN_ROWS: Final = (
    "CREATE TEMP VIEW plain_run AS SELECT * FROM run WHERE typeof(started) = 'integer' "
    "AND typeof(outcome) = 'text' AND typeof(wall_s) IN ('real', 'null')",
    "CREATE TEMP VIEW plain_call AS SELECT call.*, started FROM call JOIN plain_run ON plain_run.writer = call.writer "
    "AND plain_run.n = call.run WHERE typeof(tool) = 'text' AND typeof(status) = 'text' "
    "AND typeof(code) IN ('text', 'null') AND typeof(duration_us) IN ('integer', 'null')",
    "CREATE TEMP VIEW plain_request AS SELECT * FROM request WHERE typeof(host) = 'text' AND typeof(secret) = 'text'",
)
"""What is counted: a row that another program made may hold values of any type."""

EVENT_COLUMNS: Final = ", ".join(records.COLUMNS)
_SQL_TYPES: Final = {str: "text", int: "integer", bytes: "blob"}
IS_TYPED: Final = " AND ".join(f"typeof({name}) = '{_SQL_TYPES[kind]}'" for name, kind in records.COLUMNS.items())
"""A condition on an event that is true where each column has the type that a writer gives it."""


class BadInput(UsageError, AuditError):
    """A named file or directory is missing, unreadable, unwritable or of the wrong kind. No change was found in it."""


# Opening


def open_writable(path: Path, *, is_synced: bool = False) -> sqlite3.Connection:
    """Open a record to write, and make it if there is none. A write does not wait for another process.

    Raises:
        BadInput: it cannot be made, is another file, or others may write beside it.
    """

    def prepare(db: sqlite3.Connection) -> None:
        db.execute(f"PRAGMA busy_timeout = {LOCK_S * 1000:.0f}")
        if not _is_ours(db):
            db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            with transaction(db):
                if not _is_ours(db):
                    _make_tables(db, path)
        _check_schema(db, path)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA secure_delete = ON")  # what a run needed to go on is not in the file when it is over
        db.execute("PRAGMA wal_autocheckpoint = 0")  # the thread that signs moves pages: it may wait for the disk
        # A commit is in the kernel's hands, so it survives a kill; the thread that signs brings it to the disk.
        db.execute(f"PRAGMA synchronous = {'FULL' if is_synced else 'OFF'}")
        db.execute("PRAGMA busy_timeout = 0")

    if path.is_dir():
        raise BadInput(f"{path} is a folder, and a record is a file: name one, such as {path / 'runs.db'}")
    try:
        return connect(path, prepare)
    except (StoreError, OSError, sqlite3.Error, UnicodeDecodeError) as exc:
        raise BadInput(f"cannot write the record {path}: {_why_unwritable(path, exc)}") from exc


def _why_unwritable(path: Path, exc: Exception) -> str:
    folder = path.absolute().parent
    with suppress(OSError):
        if os.statvfs(folder).f_flag & os.ST_RDONLY:
            return "its file system is read-only"
        if folder.is_dir() and not os.access(folder, os.W_OK):
            return f"no file can be made in {folder}, and SQLite needs two beside it"
    return why(exc)


def open_read_only(path: Path) -> sqlite3.Connection:
    """Open a record to read. Nothing is written, also not beside it.

    Raises:
        BadInput: there is none, we may not read it, or others may write beside it.
    """
    try:
        if not path.is_file():
            raise BadInput(f"there is no record {path}{_is_a_folder(path)}")
        check_folder(path.absolute())
        check_files_beside(path)
        quoted = str(path.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
        # Where no file can be made beside it, none is written either: SQLite need not look for changes.
        is_fixed = not os.access(path.absolute().parent, os.W_OK) and not Path(f"{path}-wal").exists()
        mode = "mode=ro&immutable=1" if is_fixed else "mode=ro"
        db = sqlite3.connect(f"file:{quoted}?{mode}", uri=True, isolation_level=None, check_same_thread=False)
        db.text_factory = text
        try:
            db.execute("PRAGMA trusted_schema = OFF")
            db.execute(f"PRAGMA busy_timeout = {LOCK_S * 1000:.0f}")
            if not _is_ours(db):
                raise BadInput(f"{path} is not a record of toolcell's")
            _check_schema(db, path)
        except BaseException:
            db.close()
            raise
        return db
    except (StoreError, OSError, sqlite3.Error, UnicodeDecodeError) as exc:
        raise BadInput(f"cannot read the record {path}: {why(exc)}") from exc


def text(stored: bytes) -> str:
    """Decode text, which need not be UTF-8 where another program wrote it."""
    return stored.decode("utf-8", "replace")


def _is_a_folder(path: Path) -> str:
    if not path.is_dir():
        return ""
    found = next(iter(sorted(path.glob("*.db"))), None)
    return "; it is a folder" if found is None else f"; a service keeps one for each tenant: take {found}"


def _is_ours(db: sqlite3.Connection) -> bool:
    return bool(db.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID)


def _make_tables(db: sqlite3.Connection, path: Path) -> None:
    if db.execute("SELECT 1 FROM sqlite_master").fetchone() or 0 < path.stat().st_size < 512:
        raise BadInput(f"{path} is another database, or none; nothing was changed, give another path")
    for statement in TABLES:
        db.execute(statement)
    db.execute("INSERT INTO about VALUES ('record', ?), ('tokens', ?)", (os.urandom(16).hex(), os.urandom(32).hex()))
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {VERSION}")


def _check_schema(db: sqlite3.Connection, path: Path) -> None:
    """Check that the tables are those that are made here: a view or a trigger would answer and write something else."""
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version > VERSION:
        raise BadInput(f"the record {path} has version {version}, and this toolcell knows {VERSION}; use a newer one")
    found = {
        text for (text,) in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT GLOB 'x_*'")
    }
    if found != set(TABLES):
        extra = next(iter(found ^ set(TABLES)))
        raise AuditError(f"the tables of the record {path} are not those that toolcell makes: {extra!r:.100}")


def record_id(db: sqlite3.Connection) -> str:
    """Return the id that the record was given when it was made.

    Raises:
        AuditError: it is not there.
    """
    row = db.execute("SELECT value FROM about WHERE key = 'record'").fetchone()
    if row is None or type(row[0]) is not str or len(row[0]) != 32 or set(row[0]) - set("0123456789abcdef"):
        raise AuditError("the record's id is damaged")
    return str(row[0])


def token_key(db: sqlite3.Connection) -> bytes:
    """Return the key that signs the tokens of suspended runs.

    Raises:
        AuditError: it is not there.
    """
    row = db.execute("SELECT value FROM about WHERE key = 'tokens'").fetchone()
    with suppress(TypeError, ValueError):
        if len(key := bytes.fromhex(row[0])) == 32:
            return key
    raise AuditError("the record's key of tokens is damaged")


def read_log_id(path: Path) -> str:
    """Return the id of a record.

    Raises:
        BadInput: there is no record there, or we may not read it.
        AuditError: it is damaged.
    """
    with closing(open_read_only(path)) as db, translated(path):
        return record_id(db)


_REASONS: Final = {
    "SQLITE_BUSY": f"another process has locked it for more than {LOCK_S:g} s",
    "SQLITE_LOCKED": f"another process has locked it for more than {LOCK_S:g} s",
    "SQLITE_FULL": "the disk is full",
    "SQLITE_READONLY": "it is read-only",
    "SQLITE_CANTOPEN": "it cannot be opened",
    "SQLITE_NOTADB": "it is not a database",
    "SQLITE_CORRUPT": "the file is damaged",
    "SQLITE_IOERR": "the disk cannot be read or written",
}


def why(exc: Exception) -> str:
    """Say in words why SQLite or the system refused."""
    if isinstance(exc, UnicodeDecodeError):  # a message of SQLite's names what it found in the file
        return "the file is damaged"
    name = getattr(exc, "sqlite_errorname", "") or ""
    reason = next((text for prefix, text in _REASONS.items() if name.startswith(prefix)), "")
    return reason or (exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc))


@contextmanager
def translated(path: Path, doing: str = "read") -> Iterator[None]:
    """Turn errors of SQLite into `AuditError`."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as exc:
        raise AuditError(f"cannot {doing} the record {path}: {why(exc)}") from exc


# Reading


def events(db: sqlite3.Connection, where: str, *values: Any) -> Iterator[StoredEvent]:
    """Yield the events that a condition of ours selects, in order.

    Raises:
        ValueError: a row holds what no writer writes.
    """
    query = f"SELECT {EVENT_COLUMNS} FROM event WHERE {where} ORDER BY writer, n"
    for row in db.execute(query, values):
        yield event_of(row)


# Writing: what an event adds to the tables that are looked up


INSERT_EVENT: Final = f"INSERT INTO event ({EVENT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"

Row = tuple[str, tuple[Any, ...]]
"""A statement and its values, of which some may have to become `storable`."""


def rows_of(chain: str, seq: int, run: int, kind: str, at_ns: int, fields: Mapping[str, Any]) -> tuple[Row, ...]:
    """Return what an event changes in `run` and `call`. The same events give the same rows, whoever reads them."""
    make = ROWS.get(kind)
    return make(chain, run, at_ns, fields) if make is not None else ()


def _run_started(chain: str, run: int, at_ns: int, fields: Mapping[str, Any]) -> tuple[Row, ...]:
    who = fields["who"]
    sessions = [who.get(name) for name in ("thread", "chat", "channel", "session")]
    session = next((str(each) for each in sessions if each), "") or _parent_run(fields["id"], who)
    relation = next((name for name in RELATIONS if name in who), None)
    row = (
        chain, run, fields["id"], fields["sort"], at_ns, UNFINISHED, fields["sha256"], str(who.get("user", "")),
        session, title_of(fields["source"]), relation, who.get(relation), who.get("decided_by"),
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


def _call_started(chain: str, run: int, at_ns: int, fields: Mapping[str, Any]) -> tuple[Row, ...]:
    more = fields["more"] or {}
    decided_by = (more.get("decided") or {}).get("by")
    row = (chain, run, fields["number"], fields["tool"], fields["origin"], UNFINISHED, decided_by)
    sent = tuple(
        (_INSERT_REQUEST, (chain, run, fields["number"], host, secret))
        for host in more.get("hosts") or ()
        for secret in more.get("secret_names") or ("",)
    )
    return ((_INSERT_CALL, row), *sent)


_INSERT_CALL: Final = (
    "INSERT INTO call (writer, run, number, tool, origin, status, decided_by) VALUES (?, ?, ?, ?, ?, ?, ?)"
)
_INSERT_REQUEST: Final = "INSERT OR IGNORE INTO request VALUES (?, ?, ?, ?, ?)"


def _call_ended(chain: str, run: int, at_ns: int, fields: Mapping[str, Any]) -> tuple[Row, ...]:
    return ((_END_CALL, (fields["status"], fields["code"], fields["duration_us"], chain, run, fields["number"])),)


_END_CALL: Final = "UPDATE call SET status = ?, code = ?, duration_us = ? WHERE writer = ? AND run = ? AND number = ?"


def _run_ended(chain: str, run: int, at_ns: int, fields: Mapping[str, Any]) -> tuple[Row, ...]:
    usage = fields["usage"]
    measured = (usage.get("wall_s"), usage.get("cpu_s"), usage.get("peak_memory_bytes"))
    values = (at_ns, fields["outcome"], *fields["calls"], *measured, chain, run)
    return ((_END_RUN, values),)


_END_RUN: Final = f"UPDATE run SET {', '.join(f'{name} = ?' for name in _ENDED)} WHERE writer = ? AND n = ?"

ROWS: Final = {
    records.RUN_STARTED: _run_started,
    records.CALL_STARTED: _call_started,
    records.CALL_ENDED: _call_ended,
    records.RUN_ENDED: _run_ended,
}
"""Kinds of events that change `run` or `call`, and what."""


def execute(db: sqlite3.Connection, rows: Iterable[Row]) -> None:
    """Execute statements."""
    for statement, values in rows:
        try:
            db.execute(statement, values)
        except UnicodeEncodeError:
            db.execute(statement, tuple(map(storable, values)))


def storable(value: Any) -> Any:
    """Return a value that SQLite can store: half of a surrogate pair is escaped."""
    if not isinstance(value, str) or value.isascii():
        return value
    return value.encode("utf-8", "backslashreplace").decode()


def _parent_run(id: str, who: Mapping[str, Any]) -> str:
    run = str(who.get("run", ""))
    return run if run != id else ""


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
