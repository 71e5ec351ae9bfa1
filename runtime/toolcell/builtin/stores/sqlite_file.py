"""One SQLite file: opening and checking it, bringing it up to date, and transactions on worker threads."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from toolcell.builtin.stores.database import Rows, Transaction
from toolcell.builtin.stores.schema import MIGRATIONS, VERSION
from toolcell.errors import StoreError
from toolcell.support import connect, daemon_threads, transaction

APPLICATION_ID: Final = 0x746C6363
"""`tlcc`. Source: https://sqlite.org/pragma.html#pragma_application_id."""
_HEADER: Final = b"SQLite format 3\0"
_APPLICATION_ID_AT: Final = 68
"""Source: https://sqlite.org/fileformat2.html#the_database_header; big-endian, 4 bytes."""
_TYPES: Final = {"seq": "INTEGER PRIMARY KEY AUTOINCREMENT", "blob": "BLOB", "integer": "INTEGER"}
WORDS_TABLE: Final = "CREATE VIRTUAL TABLE chunk_words USING fts5 (words, tokenize = 'unicode61 remove_diacritics 0')"

IN_MEMORY: Final = Path(":memory:")
"""A database of this process, gone when it is closed."""

T = TypeVar("T")


class SqliteTransaction:
    """Statements of one transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> Rows:
        """Return all rows of a query."""
        return self._connection.execute(sql, parameters).fetchall()

    def run(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Make a change, and return how many rows it changed."""
        return self._connection.execute(sql, parameters).rowcount

    def run_many(self, sql: str, parameters: Iterable[Sequence[Any]]) -> None:
        """Make one change for each row of parameters."""
        self._connection.executemany(sql, parameters)


class SqliteFile:
    """A database of ours: two connections, one to read and one to write, each used by one thread at a time.

    A database in memory has one connection for both.
    """

    def __init__(self, path: Path, lock_timeout_s: float, prepare: Callable[[sqlite3.Connection], None]) -> None:
        self._path = path
        self._lock_timeout_s = lock_timeout_s
        self._prepare = prepare
        """Called with each new connection, after the file is known to be ours."""
        self._is_in_memory = path == IN_MEMORY
        write = threading.Lock()
        self._locks = {"read": write if self._is_in_memory else threading.Lock(), "write": write}
        self._open: dict[str, sqlite3.Connection] = {}
        self._process = os.getpid()

    async def read(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` on one state of the database."""
        return await daemon_threads.run_sync(self._in_transaction, "read", "BEGIN", work)

    async def write(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` alone: no other process writes meanwhile."""
        return await daemon_threads.run_sync(self._in_transaction, "write", "BEGIN IMMEDIATE", work)

    async def close(self) -> None:
        """Let go of the file."""
        await daemon_threads.run_sync(self._close)

    def _close(self) -> None:
        for use, lock in self._locks.items():
            with lock:
                if (connection := self._open.pop(use, None)) is not None:
                    connection.close()

    def _in_transaction(self, use: str, begin: str, work: Callable[[Transaction], T]) -> T:
        with self._locks[use], translated(self._path, self._lock_timeout_s):
            connection = self._connection(use)
            with transaction(connection, begin):
                return work(SqliteTransaction(connection))

    def _connection(self, use: str) -> sqlite3.Connection:
        if self._is_in_memory:
            use = "write"
        elif self._process != os.getpid():  # a forked process must not use its parent's connections, nor close them
            self._abandoned, self._open, self._process = self._open, {}, os.getpid()
        if use not in self._open:
            self._open[use] = self._connect()
        return self._open[use]

    def _connect(self) -> sqlite3.Connection:
        if not self._is_in_memory:
            check_ours(self._path)
        return connect(self._path, self._lock_timeout_s, self._prepare_ours)

    def _prepare_ours(self, connection: sqlite3.Connection) -> None:
        _migrate(connection, self._path)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")  # a run that has begun must survive a loss of power
        connection.execute("PRAGMA foreign_keys = ON")
        self._prepare(connection)


def check_ours(path: Path) -> None:
    """Refuse a file that is no store of ours, before SQLite touches it. Creates it, for the owner alone, if need be.

    Raises:
        StoreError: it is another file, or it cannot be read or made.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0), 0o600)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # a pipe would be waited for without an end
                raise _foreign(path, "it is no regular file")
            header = file.read(_APPLICATION_ID_AT + 4)
    except OSError as exc:
        raise StoreError(
            f"the store {path} cannot be opened: {exc.strerror}; give the path of a file in a directory that exists"
        ) from exc
    if header and not header.startswith(_HEADER):
        raise _foreign(path, "it is no SQLite database")
    found = int.from_bytes(header[_APPLICATION_ID_AT:], "big")
    if found not in (0, APPLICATION_ID):
        raise _foreign(path, f"its application_id is {found:#x}")


def _foreign(path: Path, why: str) -> StoreError:
    return StoreError(f"{path} is not a store of toolcell: {why}. Nothing was changed; give another path")


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Make the tables, or bring those of an older version up to date, in one transaction.

    Invariant: a file that is not ours is not written to, also when another process makes it meanwhile.
    """
    if _version(connection) == (APPLICATION_ID, VERSION):
        return
    with transaction(connection):
        application, version = _version(connection)
        if not application and connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise _foreign(path, "it has tables and no application_id")
        if version > VERSION:
            raise StoreError(
                f"the store {path} has version {version}, and this toolcell knows {VERSION}; use a newer toolcell",
                reason="the store was written by a newer version",
            )
        for statements in MIGRATIONS[version:]:
            for statement in statements:
                connection.execute(statement.format(**_TYPES))
        if version < 1:
            connection.execute(WORDS_TABLE)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {VERSION}")


def _version(connection: sqlite3.Connection) -> tuple[int, int]:
    with (
        closing(connection.execute("PRAGMA application_id")) as one,
        closing(connection.execute("PRAGMA user_version")) as other,
    ):
        return one.fetchone()[0], other.fetchone()[0]


_REASONS: Final = {
    "SQLITE_BUSY": ("is locked by another process, for more than {timeout:g} s", "the store is in use", True),
    "SQLITE_LOCKED": ("is locked by another process, for more than {timeout:g} s", "the store is in use", True),
    "SQLITE_FULL": ("cannot grow: the disk is full", "the store is full", False),
    "SQLITE_READONLY": ("is read-only", "the store is read-only", False),
    "SQLITE_CANTOPEN": ("cannot be opened", "the store cannot be opened", False),
    "SQLITE_NOTADB": ("is not a database, or it is encrypted", "the store is damaged", False),
    "SQLITE_CORRUPT": ("is damaged; restore it from a copy", "the store is damaged", False),
    "SQLITE_IOERR": ("cannot be read or written", "the store cannot be read or written", False),
}
"""Shape: what the error says after the path, what a model reads, whether to try again. By the name of SQLite's error
code, where the longer names of its kind begin with it."""


@contextmanager
def translated(path: Path, lock_timeout_s: float) -> Iterator[None]:
    """Turn the errors of SQLite into ours.

    Raises:
        StoreError: SQLite failed; says why.
    """
    try:
        yield
    except sqlite3.Error as exc:
        name = getattr(exc, "sqlite_errorname", "")
        said, reason, retryable = next(
            (row for prefix, row in _REASONS.items() if name.startswith(prefix)), ("failed", "", False)
        )
        message = f"the store {path} {said.format(timeout=lock_timeout_s)}: {exc}"
        raise StoreError(message, reason=reason, retryable=retryable) from exc
