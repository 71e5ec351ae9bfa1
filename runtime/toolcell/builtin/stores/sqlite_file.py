"""One SQLite file of the stores: their tables in it, and transactions on worker threads."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from toolcell.builtin.stores.database import Rows, Transaction
from toolcell.builtin.stores.schema import MIGRATIONS
from toolcell.support import daemon_threads
from toolcell.support.sqlite import SqliteDatabase

APPLICATION_ID: Final = 0x746C6363
"""`tlcc`. Source: https://sqlite.org/pragma.html#pragma_application_id."""
_TYPES: Final = {"seq": "INTEGER PRIMARY KEY AUTOINCREMENT", "blob": "BLOB", "integer": "INTEGER"}
_WORDS: Final = "CREATE VIRTUAL TABLE chunk_words USING fts5 (words, tokenize = 'unicode61 remove_diacritics 0')"

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
    """The `Database` of a `SqliteStore`."""

    def __init__(self, path: Path, lock_timeout_s: float, prepare: Callable[[sqlite3.Connection], None]) -> None:
        first, *later = ([statement.format(**_TYPES) for statement in step] for step in MIGRATIONS)
        self._database = SqliteDatabase(
            path,
            [[*first, _WORDS], *later],
            application_id=APPLICATION_ID,
            lock_timeout_s=lock_timeout_s,
            prepare=prepare,
        )
        self.path = self._database.path

    async def read(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` on one state of the database."""
        return await daemon_threads.run_sync(self._read, work)

    async def write(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` alone: no other process writes meanwhile."""
        return await daemon_threads.run_sync(self._write, work)

    async def close(self) -> None:
        """Let go of the file."""
        await daemon_threads.run_sync(self._database.close)

    def _read(self, work: Callable[[Transaction], T]) -> T:
        with self._database.reading() as connection:
            return work(SqliteTransaction(connection))

    def _write(self, work: Callable[[Transaction], T]) -> T:
        with self._database.writing() as connection:
            return work(SqliteTransaction(connection))
