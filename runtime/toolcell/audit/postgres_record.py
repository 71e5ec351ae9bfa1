"""A record in one schema of a PostgreSQL database, which several hosts share."""

from __future__ import annotations

import math
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import lru_cache
from typing import Any, Final, cast

from toolcell.audit.sqlite_record import make_tables
from toolcell.audit.store import LOCK_S, TABLE_NAMES, TABLES, VERSION, Lock, RecordDatabase, lock_number, storable
from toolcell.errors import AuditError, BadInput, UsageError
from toolcell.support.lazy import needed

SCHEMA: Final = "toolcell_record"
"""Where the tables are, unless the URL says `?schema=NAME`."""
NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")
MAKE_LOCK: Final = 0x746F6F6C
"""Number of the advisory lock under which tables are made, together with the schema's name."""
ROWS_AT_ONCE: Final = 1000
"""Rows that a scan of the record fetches in one piece, at most. The first piece is one row, and each next one up to
four times as many."""
FETCH_BYTES: Final = 512 * 1024
"""What is wanted in one piece, as far as the rows before tell."""

HOLDERS: Final = (
    "FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND classid::bigint = ? AND objid::bigint = ? "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
"""Who has an advisory lock, or waits for it, by the halves of its number."""

RECONNECT_S: Final = 0.1
"""Between two attempts to reach the server."""

SETTINGS: Final[dict[str, object]] = {
    "application_name": "toolcell",
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
"""Of a connection, where the URL does not say otherwise: one that a network has lost is noticed in 30 s, in ms."""
SERVER_SETTINGS: Final = {
    "tcp_keepalives_idle": "keepalives_idle",
    "tcp_keepalives_interval": "keepalives_interval",
    "tcp_keepalives_count": "keepalives_count",
    "tcp_user_timeout": "tcp_user_timeout",
}
"""The same at the server's end, so that it soon frees the locks of a host that is gone."""

TYPES: Final = (
    (r"\bid INTEGER PRIMARY KEY", "id BIGSERIAL PRIMARY KEY"),
    (r"\bINTEGER\b", "BIGINT"),
    (r"\bBLOB\b", "BYTEA"),
    (r"\bREAL\b", "DOUBLE PRECISION"),
    (r"\bTEXT\b", 'TEXT COLLATE "C"'),
    (r"\) WITHOUT ROWID", ")"),
)
"""What a column is declared as, where SQLite's declaration means something else."""

COLUMN_TYPES: Final = {"TEXT": "text", "INTEGER": "bigint", "BLOB": "bytea", "REAL": "double precision"}

DIFFERENCES: Final = (
    (r"%", "%%"),
    (r"(?<!')\?", "%s"),
    (r"\buser\b", '"user"'),
    (r"\bchar\(10\)", "chr(10)"),
    (r"\binstr\(", "pg_catalog.position("),
    (r"AS BLOB\)", "AS BYTEA)"),
    (r"X'([0-9A-F]+)'", r"'\\x\1'::bytea"),
    (r"typeof\((\w+)\) = '\w+'", r"\1 IS NOT NULL"),
    (r"typeof\((\w+)\) != '\w+'", r"\1 IS NULL"),
    (
        r"date\((\w+) / 1000000000, 'unixepoch'\)",
        r"to_char(to_timestamp(\1 / 1000000000) AT TIME ZONE 'UTC', 'YYYY-MM-DD')",
    ),
)
"""What is written otherwise than in SQLite. Every statement is one of ours, and goes through this table once."""

PLAIN_ROWS: Final = (
    "WITH plain_run AS (SELECT * FROM run WHERE started IS NOT NULL AND outcome IS NOT NULL), "
    "plain_call AS (SELECT call.*, started FROM call JOIN plain_run ON plain_run.writer = call.writer "
    "AND plain_run.n = call.run WHERE tool IS NOT NULL AND status IS NOT NULL), "
    "plain_request AS (SELECT * FROM request) "
)
"""What is counted. The columns have types, so no other program puts values of another one there."""


@lru_cache(maxsize=1024)
def translated(sql: str) -> str:
    """Return a statement of ours in PostgreSQL's SQL."""
    sql = _replaced(sql, DIFFERENCES)
    return PLAIN_ROWS + sql if "plain_" in sql else sql


def _replaced(sql: str, differences: Iterable[tuple[str, str]]) -> str:
    for pattern, text in differences:
        sql = re.sub(pattern, text, sql)
    return sql


class PostgresConnection:
    """A connection that takes the SQL of the record as SQLite does. One thread at a time uses it."""

    def __init__(self, psycopg: Any, connect: Callable[[], Any], *, is_reader: bool) -> None:
        self._psycopg, self._connect, self._is_reader = psycopg, connect, is_reader
        self._mark = 0
        """Number of an advisory lock that only this connection takes, so that the server's end of it can be found."""
        self.lost_marks: list[int] = []
        """Those of connections that were lost, which the server may still have."""
        self._connection = self._connected()
        self._scans = 0
        self._text_factory: Any = None

    def _connected(self) -> Any:
        connection = self._connect()
        if not self._is_reader:
            self._mark = int.from_bytes(os.urandom(7), "big")
            connection.execute("SELECT pg_advisory_lock(%s)", (self._mark,))
        return connection

    @property
    def text_factory(self) -> Any:
        """`bytearray` where text is wanted as it is stored."""
        return self._text_factory

    @text_factory.setter
    def text_factory(self, factory: Any) -> None:
        self._text_factory = factory
        own = self._psycopg.types.string.TextLoader
        self._connection.adapters.register_loader("text", _bytes_loader(self._psycopg) if factory is bytearray else own)

    @property
    def in_transaction(self) -> bool:
        """True between BEGIN and COMMIT."""
        status = self._psycopg.pq.TransactionStatus  # that of a lost connection is UNKNOWN
        return self._connection.info.transaction_status in (status.ACTIVE, status.INTRANS, status.INERROR)

    @property
    def is_lost(self) -> bool:
        """The server, or the way to it, is gone."""
        return bool(self._connection.closed)

    def pipeline(self) -> AbstractContextManager[object]:
        """Send the statements of a block without waiting for each answer."""
        pipeline: AbstractContextManager[object] = self._connection.pipeline()
        return pipeline

    def execute(self, sql: str, values: Any = (), /) -> Any:
        """Execute a statement, and return its cursor. What a reader selects in a transaction comes in pieces."""
        is_scan = self._is_reader and self.in_transaction and sql.lstrip().startswith(("SELECT", "WITH"))
        try:
            return self._execute(sql, values, is_scan)
        except self._psycopg.OperationalError:
            if not (self._is_reader and self.is_lost) or is_scan:
                raise
            self._connection = self._connect()  # nothing was under way: the server was started again
            self.text_factory = self._text_factory
            return self._execute(sql, values, is_scan)

    def _execute(self, sql: str, values: Any, is_scan: bool) -> Any:
        text, given = translated(sql), [storable(each) for each in values]
        if not is_scan:
            return self._connection.execute(text, given)
        self._scans += 1
        return _Scan(self._connection, f"scan_{self._scans}", text, given)

    def reconnect(self) -> None:
        """Connect again."""
        self._connection.close()
        if self._mark:
            self.lost_marks.append(self._mark)
            self._mark = 0
        self._connection = self._connected()

    def executemany(self, sql: str, rows: Any, /) -> Any:
        """Execute a statement for each row of values."""
        cursor = self._connection.cursor()
        cursor.executemany(translated(sql), [[storable(each) for each in row] for row in rows])
        return cursor

    def close(self) -> None:
        """Close it."""
        self._connection.close()


def _bytes_loader(psycopg: Any) -> Any:
    class BytesLoader(psycopg.adapt.Loader):  # type: ignore[misc]
        def load(self, data: Any) -> bytearray:
            return bytearray(data)

    return BytesLoader


class _Scan:
    """The rows of one query, which the server gives in pieces. It is asked when the first of them is wanted."""

    def __init__(self, connection: Any, name: str, text: str, values: list[Any]) -> None:
        self._connection, self._name, self._text, self._values = connection, name, text, values
        self._is_open = self._is_over = False

    def fetchmany(self, count: int) -> list[tuple[Any, ...]]:
        if self._is_over:
            return []
        if not self._is_open:
            self._connection.execute(f"DECLARE {self._name} NO SCROLL CURSOR FOR {self._text}", self._values)
            self._is_open = True
        rows: list[tuple[Any, ...]] = self._connection.execute(f"FETCH {count} FROM {self._name}").fetchall()
        if len(rows) < count:
            self.close()
        return rows

    def fetchone(self) -> tuple[Any, ...] | None:
        """Return the first row; the others are not wanted."""
        row: tuple[Any, ...] | None = self._connection.execute(self._text, self._values).fetchone()
        return row

    def fetchall(self) -> list[tuple[Any, ...]]:
        return [*self]

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        count = 1
        while rows := self.fetchmany(count):
            yield from rows
            size = sum(len(each) for row in rows for each in row if type(each) in (bytes, str))
            count = max(1, min(4 * count, ROWS_AT_ONCE, count * FETCH_BYTES // max(size, 1)))

    def close(self) -> None:
        self._is_over = True
        if self._is_open:
            self._is_open = False
            self._connection.execute(f"CLOSE {self._name}")


class _NameLock(Lock):
    """An advisory lock of the connection that writes: with that connection it is lost."""

    def __init__(self, record: PostgresRecord, kind: str, name: str) -> None:
        super().__init__()
        self.kind, self.name = kind, name
        self.number = lock_number(f"{record.schema} {kind} {name}")
        self.is_held = False
        """It is ours, and is locked again where the server does not know of it."""
        self.is_taken = False
        """The server knows of it."""
        self.must_check = False
        """The server has forgotten it: somebody else may have written to the journal meanwhile."""
        self._record = record

    def release(self) -> None:
        self._record.release(self)


class PostgresRecord(RecordDatabase):
    """A record in a schema of a database. Every write waits for the server, so a thread writes.

    What was sent with a connection that is lost may be written or not: the log finds out from its chain.
    """

    is_waiting = True

    def __init__(self, url: str) -> None:
        self._psycopg = needed("psycopg", "a record in PostgreSQL", "postgres")
        self.errors = (self._psycopg.Error,)
        url, self.schema = _without_schema(url)
        self._settings = SETTINGS | _settings_of(self._psycopg, url)
        of = {name: str(self._settings.get(name) or "") for name in ("user", "host", "port", "dbname")}
        at = f"{of['user']}@" if of["user"] else ""
        host = "" if of["host"].startswith("/") else of["host"]
        port = f":{of['port']}" if of["port"] else ""
        more = [f"host={of['host']}"] if of["host"] != host else []
        more += [f"schema={self.schema}"] if self.schema != SCHEMA else []
        self.place = f"postgresql://{at}{host}{port}/{of['dbname']}{'?' if more else ''}{'&'.join(more)}"
        self.turn = threading.RLock()
        self._writer: PostgresConnection | None = None
        self._names = threading.Lock()
        self._locks: dict[tuple[str, str], _NameLock] = {}
        """Those that are held here. `_names` is held for a look at it."""
        self._problem = ""
        """Why nothing may be written any more."""
        self._failed: tuple[float, Exception] = (-math.inf, Exception())
        """When somebody last gave up to reach the server, and why."""

    # Opening

    def open_writable(self, *, is_synced: bool = False) -> PostgresConnection:
        """Connect to write, and make schema and tables if there are none. A commit is on the server's disk."""
        self._problem = ""
        self._writer = self._opened(is_reader=False)
        return self._writer

    def open_read_only(self) -> PostgresConnection:
        """Connect to read."""
        return self._opened(is_reader=True)

    def _opened(self, *, is_reader: bool) -> PostgresConnection:
        first: list[object] = []

        def connect() -> Any:
            connection = self._psycopg.connect(**self._settings, autocommit=True)
            try:
                self._prepare(connection, may_make=not is_reader and not first, is_reader=is_reader)
                found = connection.execute("SELECT value FROM about WHERE key = 'record'").fetchone()
                if first and found != first[0]:
                    raise AuditError(f"{self.place} has another record now than the one that was opened; open it again")
            except BaseException:
                connection.close()
                raise
            first[:] = [found]
            return connection

        try:
            return PostgresConnection(self._psycopg, connect, is_reader=is_reader)
        except self._psycopg.Error as exc:
            verb = "read" if is_reader else "write"
            raise BadInput(f"cannot {verb} the record {self.place}: {self.why(exc)}{self._cure(exc)}") from exc

    def _cure(self, exc: Exception) -> str:
        if isinstance(exc, self._psycopg.errors.InsufficientPrivilege):
            return (
                f"; have the owner of the database run CREATE SCHEMA {self.schema} AUTHORIZATION <this user>, or to "
                f"read: GRANT USAGE ON SCHEMA {self.schema}, GRANT SELECT ON ALL TABLES IN SCHEMA {self.schema}"
            )
        if isinstance(exc, self._psycopg.OperationalError):
            return "; check host, port, user, password and database of the URL, and that the server runs"
        return ""

    def _prepare(self, connection: Any, *, is_reader: bool, may_make: bool) -> None:
        connection.execute("SET client_encoding = 'UTF8'")
        connection.execute("SET client_min_messages = warning")
        connection.execute(f"SET lock_timeout = {LOCK_S * 1000:.0f}")
        connection.execute(f'SET search_path TO "{self.schema}", pg_temp')
        wanted = [(name, str(self._settings[client])) for name, client in SERVER_SETTINGS.items()]
        query = f"""
            SELECT set_config(pg_settings.name, value, false) FROM pg_catalog.pg_settings
            JOIN (VALUES {", ".join(["(%s, %s)"] * len(wanted))}) AS wanted (name, value) USING (name)
        """
        connection.execute(query, [each for pair in wanted for each in pair])
        if is_reader:
            connection.execute("SET default_transaction_read_only = on")
            connection.execute("SET default_transaction_isolation = 'repeatable read'")
        elif may_make and "about" not in self._tables(connection):
            with connection.transaction():
                connection.execute("SELECT pg_advisory_xact_lock(%s, hashtext(%s))", (MAKE_LOCK, self.schema))
                if not (found := self._tables(connection)):
                    self._make_tables(connection)
                elif "about" not in found:
                    raise BadInput(
                        f"the schema {self.schema} of {self.place} has other tables; nothing was changed, name another "
                        "one: ?schema=NAME"
                    )
        self._check_schema(connection)

    def _tables(self, connection: Any) -> dict[str, tuple[Any, ...]]:
        """Return what can be selected from in the schema, by name: its kind, and whether something else answers or
        writes when it is used."""
        query = (
            "SELECT relname, relkind, relrowsecurity OR EXISTS (SELECT 1 FROM pg_catalog.pg_rewrite WHERE ev_class = "
            "pg_class.oid) OR EXISTS (SELECT 1 FROM pg_catalog.pg_trigger WHERE tgrelid = pg_class.oid) FROM pg_class "
            "WHERE relkind IN ('r', 'v', 'm', 'f', 'p') AND relnamespace = "
            "(SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = %s)"
        )
        return {name: (kind, is_odd) for name, kind, is_odd in connection.execute(query, (self.schema,))}

    def _make_tables(self, connection: Any) -> None:
        if (encoding := connection.info.parameter_status("server_encoding")) != "UTF8":
            raise BadInput(f"the database {self.place} stores text as {encoding}; make one with ENCODING 'UTF8'")
        connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{self.schema}"')
        for statement in TABLES:
            connection.execute(translated(_replaced(statement, TYPES)))
        connection.execute(
            "INSERT INTO about VALUES ('record', %s), ('tokens', %s), ('version', %s)",
            (os.urandom(16).hex(), os.urandom(32).hex(), str(VERSION)),
        )

    def _check_schema(self, connection: Any) -> None:
        """Check that the tables are plain ones: a view, a rule or a trigger would answer or write another row."""
        found = self._tables(connection)
        if "about" not in found:
            raise BadInput(f"there is no record in {self.place}")
        version = connection.execute("SELECT value FROM about WHERE key = 'version'").fetchone()
        self.check_version(int(version[0]) if version is not None and version[0].isdigit() else VERSION + 1)
        for name in sorted({*TABLE_NAMES, *(each for each in found if not each.startswith("x_"))}):
            if name not in TABLE_NAMES or found.get(name) != ("r", False):
                raise AuditError(f"the tables of the record {self.place} are not those that toolcell makes: {name!r}")
        columns = {
            (each.split()[2], name, COLUMN_TYPES[kind])
            for each in TABLES
            for name, kind in re.findall(r"\b(\w+) (TEXT|INTEGER|BLOB|REAL)\b", each)
        }
        query = "SELECT table_name, column_name, data_type FROM information_schema.columns WHERE table_schema = %s"
        there = {each for each in connection.execute(query, (self.schema,)).fetchall() if each[0] in TABLE_NAMES}
        if there != columns:
            other = sorted(there ^ columns)[0]
            raise AuditError(f"the tables of the record {self.place} are not those that toolcell makes: {other}")

    # Writing

    def begin_write(self, db: Any, wait_s: float) -> bool:
        """Begin a transaction, as soon as the server is there."""
        if not wait_s:
            return False

        def begin() -> None:
            with self._names:
                missing = [each for each in self._locks.values() if each.is_held and not each.is_taken]
            for lock in missing:
                if not self._take(db, lock) and not lock.may_be_lost:
                    self._give_up(lock)
            db.execute("BEGIN")

        self._patiently(db, begin, wait_s)
        return True

    def _patiently(self, db: PostgresConnection, work: Callable[[], object], wait_s: float) -> None:
        """Do something with the connection that writes; connect again where that was lost before it began."""
        until = time.monotonic() + wait_s
        while True:
            if self._problem:
                raise AuditError(f"cannot write the record {self.place}: {self._problem}")
            failed_s, why = self._failed
            if db.is_lost and failed_s > until - LOCK_S and time.monotonic() >= until - RECONNECT_S:
                raise type(why)(*why.args)  # while we waited for our turn, somebody found out
            try:
                if db.is_lost:
                    db.reconnect()
                    self._forget_taken()
                self._take_again(db, until)
                work()
            except self._psycopg.OperationalError as exc:
                if not (db.is_lost or isinstance(exc, self._no_server)):
                    raise
                if time.monotonic() >= until:
                    self._failed = time.monotonic(), exc
                    raise
                time.sleep(RECONNECT_S)
            else:
                return

    @property
    def _no_server(self) -> tuple[type[Exception], ...]:
        errors = self._psycopg.errors
        return (errors.AdminShutdown, errors.CrashShutdown, errors.CannotConnectNow)

    def batch(self, db: Any) -> AbstractContextManager[object]:
        """Send the statements of a block without waiting for each answer."""
        return cast("PostgresConnection", db).pipeline()

    def is_unsure(self, exc: BaseException) -> bool:
        """The server, or the way to it, went away; or an event is there already, which one that was lost wrote."""
        if isinstance(why := exc.__cause__, self._psycopg.errors.UniqueViolation):
            return bool(why.diag.table_name == "event")
        return isinstance(why, self.errors) and self._writer is not None and self._writer.is_lost

    def close(self, db: Any) -> None:
        """Close the connection, and its locks with it."""
        self.forget_connections()
        db.close()

    def forget_connections(self) -> None:
        """Use the connection that writes no longer: it is closed, or that of the parent of this process."""
        self._abandoned, self._writer = self._writer, None
        self._names, self._locks = threading.Lock(), {}

    # Reading

    def state(self, db: Any) -> object:
        """Return what differs once somebody has written, also in another database of the server."""
        return db.execute("SELECT pg_current_snapshot()::text").fetchone()[0]

    def copy_to(self, db: Any, copy: sqlite3.Connection) -> None:
        """Copy every row to a new SQLite file, as they are at one moment."""
        make_tables(copy)
        db.execute("BEGIN")
        for table in TABLE_NAMES:
            columns = len(copy.execute(f"SELECT * FROM {table} LIMIT 0").description)
            rows = db.execute(f"SELECT * FROM {table}")
            copy.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * columns)})", rows)
        copy.commit()
        db.execute("COMMIT")

    def why(self, exc: Exception) -> str:
        """Say in words why the server refused."""
        errors = self._psycopg.errors
        reasons = (
            (errors.LockNotAvailable, f"another process has locked it for more than {LOCK_S:g} s"),
            (errors.DiskFull, "the disk of the server is full"),
            (errors.ReadOnlySqlTransaction, "the server is read-only"),
        )
        return next((text for kind, text in reasons if isinstance(exc, kind)), "") or " ".join(str(exc).split())[:500]

    # Locks

    def lock(self, kind: str, name: str, *, is_unknown: bool = False) -> Lock:
        """Lock a name. One that nobody else knows is locked with the next write."""
        lock, until = _NameLock(self, kind, name), time.monotonic() + LOCK_S
        lock.is_held = is_unknown
        with self._names:
            if (kind, name) in self._locks:
                raise BlockingIOError(f"{kind} {name} is open here")
            self._locks[kind, name] = lock
        if is_unknown:
            return lock
        try:
            with self.turn:
                if (db := self._writer) is None:
                    raise OSError(f"the record {self.place} is not open")
                found: list[bool] = []
                self._patiently(db, lambda: found.append(self._take(db, lock)), max(0.001, until - time.monotonic()))
                if not found[-1]:
                    raise BlockingIOError(f"{kind} {name} is open elsewhere")
                lock.is_held = True
        except BaseException as exc:
            with self._names:
                self._locks.pop((kind, name), None)
            if isinstance(exc, AuditError):
                raise OSError(str(exc)) from exc
            if isinstance(exc, self._psycopg.Error):
                raise OSError(f"{self.place}: {self.why(exc)}") from exc
            raise
        return lock

    def _take(self, db: PostgresConnection, lock: _NameLock) -> bool:
        """Lock a name, if it is not locked by this connection."""
        if not lock.is_taken:
            lock.is_taken = bool(db.execute("SELECT pg_try_advisory_lock(?)", (lock.number,)).fetchone()[0])
        return lock.is_taken

    def _forget_taken(self) -> None:
        """Note that the server has forgotten every lock with the connection."""
        with self._names:
            locks = [*self._locks.values()]
        for lock in locks:
            lock.must_check, lock.is_taken = lock.must_check or lock.is_taken, False

    def _take_again(self, db: PostgresConnection, until: float) -> None:
        """Lock again what was locked, and check that nobody has written to those journals meanwhile."""
        while db.lost_marks:
            # The server's end of a connection that a network has lost still has our locks, and may still be writing.
            if db.execute(f"SELECT pg_terminate_backend(pid) {HOLDERS}", _halves(db.lost_marks[0])).fetchone() is None:
                db.lost_marks.pop(0)
            elif time.monotonic() >= until:
                raise AuditError(
                    f"cannot write the record {self.place} now: the server has not ended a connection that was lost"
                )
            else:
                time.sleep(RECONNECT_S)
        with self._names:
            locks = [each for each in self._locks.values() if each.must_check]
        for lock in locks:
            while not self._is_back(db, lock):  # somebody may only look whether it is open
                if time.monotonic() >= until:
                    raise AuditError(
                        f"cannot write the record {self.place} now: the connection was lost, and another process has "
                        f"opened {lock.kind} {lock.name} meanwhile"
                    )
                time.sleep(RECONNECT_S)

    def _is_back(self, db: PostgresConnection, lock: _NameLock) -> bool:
        """Lock a name again. False: somebody else has it, but has written nothing. One that may be lost is not waited
        for."""
        query = "SELECT n, at FROM kept WHERE kind = ? AND name = ? ORDER BY n DESC LIMIT 1"
        is_taken = self._take(db, lock)
        last = db.execute(query, (lock.kind, lock.name)).fetchone() or (0, 0)
        is_written = last in lock.attempted
        is_ours = is_written or lock.written in (None, last[0])
        if lock.may_be_lost and not (is_taken or is_written or lock.has_begun):
            is_ours = False  # whoever has it may be beginning the same request
        if not is_ours and not lock.may_be_lost:
            self._give_up(lock)
        lock.is_lost = not is_ours
        lock.is_held, lock.must_check = is_ours, is_ours and not is_taken
        return is_taken or lock.may_be_lost

    def _give_up(self, lock: _NameLock) -> None:
        self._problem = (
            f"the connection was lost, and {lock.kind} {lock.name} was taken up by another process meanwhile; open the "
            "Runtime again"
        )
        raise AuditError(f"cannot write the record {self.place}: {self._problem}")

    def release(self, lock: _NameLock) -> None:
        """Let others have a name."""
        with self._names:
            self._locks.pop((lock.kind, lock.name), None)
        with self.turn, suppress(*self.errors):  # a lost connection holds none
            if lock.is_taken and self._writer is not None and not self._writer.is_lost:
                self._writer.execute("SELECT pg_advisory_unlock(?)", (lock.number,))

    def is_locked(self, kind: str, name: str, db: Any) -> bool:
        """Return whether somebody has locked a name."""
        with self._names:
            if (kind, name) in self._locks:
                return True
        number = _NameLock(self, kind, name).number
        return bool(db.execute(f"SELECT 1 {HOLDERS}", _halves(number)).fetchone())


def _halves(number: int) -> tuple[int, int]:
    return number >> 32, number & 0xFFFFFFFF


# URLs


def _without_schema(url: str) -> tuple[str, str]:
    """Return a URL without `?schema=NAME`, and the name.

    Raises:
        UsageError: the name cannot be one.
    """
    base, _, query = url.partition("?")
    given = [each for each in query.split("&") if each]
    schemas = [each.removeprefix("schema=") for each in given if each.startswith("schema=")]
    schema = schemas[-1] if schemas else SCHEMA
    if not NAME.fullmatch(schema) or schema.startswith("pg_"):
        raise UsageError(f"record=: ?schema={schema!r:.80} must match {NAME.pattern}")
    rest = "&".join(each for each in given if not each.startswith("schema="))
    return (f"{base}?{rest}" if rest else base), schema


def _settings_of(psycopg: Any, url: str) -> dict[str, Any]:
    """Return what a URL says. No error names it: a password may be anywhere in one that is wrong.

    Raises:
        UsageError: it is not a URL as libpq takes it.
    """
    base = url.partition("?")[0].partition("://")[2]
    try:
        found: dict[str, Any] = psycopg.conninfo.conninfo_to_dict(url)
    except psycopg.Error:
        found = {"port": "?"}
    is_plain = base.count("@") <= 1 and "@" not in base.partition("/")[2] and "#" not in base
    if not is_plain or (not str(found.get("port", "")).replace(",", "").isdigit() and found.get("port")):
        raise UsageError(
            "record=: this is not the URL of a PostgreSQL database; write postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
            ", and a special character of the password as %40 (for @), %2F (/), %3A (:), %23 (#), %3F (?) or %25 (%)"
        )
    return found
