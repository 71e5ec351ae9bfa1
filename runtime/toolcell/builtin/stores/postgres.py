"""`PostgresStore`: everything in one schema of a PostgreSQL database."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from toolcell.builtin.stores.database import Database, Transaction
from toolcell.builtin.stores.filters import Where
from toolcell.builtin.stores.schema import MIGRATIONS, VERSION
from toolcell.builtin.stores.sql_agenda import SqlStore
from toolcell.builtin.stores.sql_documents import Dialect
from toolcell.builtin.stores.vectors import Hit
from toolcell.errors import StoreError, UsageError
from toolcell.support.checks import check_kind, check_seconds
from toolcell.support.lazy import needed

# Connections to one PostgreSQL database, used on worker threads, so that a store works on every event loop.
#
# Writers wait for one another (an advisory lock): `seq` then grows in the order in which changes become visible.


LOCK: Final = 0x746C6363
"""Number of the advisory lock, together with the schema's name."""
MAX_IDLE: Final = 4
"""Connections that are kept for the next call."""
_TYPES: Final = {"seq": "BIGSERIAL PRIMARY KEY", "blob": "BYTEA", "integer": "BIGINT"}
_WORDS: Final = (
    "CREATE TABLE chunk_words (seq BIGINT PRIMARY KEY REFERENCES chunks (seq) ON DELETE CASCADE, words TSVECTOR)",
    "CREATE INDEX chunk_words_words ON chunk_words USING gin (words)",
)

T = TypeVar("T")


class PostgresPool(Database):
    """A few connections to one database and schema."""

    def __init__(self, conninfo: str, schema: str, lock_timeout_s: float) -> None:
        self._psycopg = needed("psycopg", "PostgresStore", "postgres")
        self._conninfo = conninfo
        self._schema = schema
        self._lock_timeout_s = lock_timeout_s
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._idle: list[Any] = []
        self._is_ready = False
        self._closings = 0
        """How often the pool was closed: a connection that was lent before is not kept."""
        self._process = os.getpid()

    def disconnect(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
            self._closings += 1
        for connection in idle:
            connection.close()

    def in_transaction(self, work: Callable[[Transaction], T], is_write: bool) -> T:
        with self._translated(), self._borrowed() as connection, connection.transaction():
            if is_write:
                self._take_lock(connection)
            else:
                connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            return work(Transaction(connection, "%s"))

    def _take_lock(self, connection: Any) -> None:
        connection.execute("SELECT pg_advisory_xact_lock(%s, hashtext(%s))", (LOCK, self._schema))

    @contextmanager
    def _borrowed(self) -> Iterator[Any]:
        closings = self._closings
        connection = self._take()
        try:
            yield connection
        finally:
            with self._lock:
                is_kept = (
                    not (connection.closed or connection.broken)
                    and len(self._idle) < MAX_IDLE
                    and closings == self._closings
                    and connection.info.transaction_status == self._psycopg.pq.TransactionStatus.IDLE
                )
                if is_kept:
                    self._idle.append(connection)
            if not is_kept:
                connection.close()

    def _take(self) -> Any:
        with self._lock:
            if self._process != os.getpid():  # a forked process must not use its parent's connections, nor close them
                self._abandoned, self._idle, self._process = self._idle, [], os.getpid()
            while self._idle:
                connection = self._idle.pop()
                if self._is_alive(connection):
                    return connection
        return self._connect()

    def _is_alive(self, connection: Any) -> bool:
        """Tell whether the server has closed a connection that lay idle."""
        try:
            connection.execute("")
        except self._psycopg.Error:
            connection.close()
        return not connection.closed

    def _connect(self) -> Any:
        connection = self._psycopg.connect(self._conninfo, autocommit=True, connect_timeout=10)
        try:
            name = self._psycopg.sql.Identifier(self._schema)
            timeout_ms = max(1, int(self._lock_timeout_s * 1000))
            connection.execute(f"SET lock_timeout = {timeout_ms}")
            connection.execute("SET client_min_messages = warning")
            connection.execute(self._psycopg.sql.SQL("SET search_path TO {}, public").format(name))
            with self._opening:
                if not self._is_ready:
                    with connection.transaction():
                        self._migrate(connection, name)
                    self._is_ready = True
        except BaseException:
            connection.close()
            raise
        return connection

    def _migrate(self, connection: Any, name: Any) -> None:
        self._take_lock(connection)
        schema = f"PostgreSQL schema {self._schema!r}"
        exists = connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (self._schema,)).fetchone()
        if not exists:
            connection.execute(self._psycopg.sql.SQL("CREATE SCHEMA {}").format(name))
        tables = "SELECT tablename FROM pg_tables WHERE schemaname = %s"
        found = {row[0] for row in connection.execute(tables, (self._schema,)).fetchall()}
        version = 0
        if "toolcell_version" in found:
            version = connection.execute("SELECT version FROM toolcell_version").fetchone()[0]
        elif found:
            raise StoreError(
                f"the {schema} is not a store of toolcell: it has other tables. Nothing was changed; give schema= "
                "another name"
            )
        if version > VERSION:
            raise StoreError(
                f"the {schema} has version {version}, and this toolcell knows {VERSION}; use a newer toolcell",
                reason="the store was written by a newer version",
            )
        if version < 1:
            connection.execute("CREATE TABLE toolcell_version (version INTEGER NOT NULL)")
            connection.execute("INSERT INTO toolcell_version VALUES (0)")
        for statements in (*MIGRATIONS[version:], *([_WORDS] if version < 1 else [])):
            for statement in statements:
                connection.execute(statement.format(**_TYPES))
        if version != VERSION:
            connection.execute("UPDATE toolcell_version SET version = %s", (VERSION,))

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn the errors of psycopg into ours. The address is left out: it may hold a password."""
        try:
            yield
        except self._psycopg.Error as exc:
            errors, locked_s = self._psycopg.errors, f"{self._lock_timeout_s:g} s"
            reasons = (
                (errors.LockNotAvailable, f"is locked, for more than {locked_s}", "the store is in use", True),
                (errors.DiskFull, "cannot grow: the disk is full", "the store is full", False),
                (errors.ReadOnlySqlTransaction, "is read-only", "the store is read-only", False),
                (self._psycopg.OperationalError, "cannot be reached", "the store cannot be reached", True),
                (Exception, "failed", "", False),
            )
            said, reason, again = next(row[1:] for row in reasons if isinstance(exc, row[0]))
            message = f"the PostgreSQL store (schema {self._schema!r}) {said}: {exc}"
            raise StoreError(message, reason=reason, retryable=again) from exc


_NAME = re.compile(r"[a-z_][a-z0-9_]{0,47}")
WORDS_CHARS: Final = 200_000
"""Characters of one chunk, what the index of words sees. Source: a tsvector holds less than 1 MB."""


class PostgresStore(SqlStore):
    """A store with every capability, in one schema of a database that several machines may share.

    Words are found by PostgreSQL's full text search. Vectors are found by a scan with numpy that keeps them in memory.
    """

    def __init__(self, conninfo: str, *, schema: str = "toolcell", lock_timeout_s: float = 10.0) -> None:
        """`conninfo` is a URL `postgresql://...` or `key=value` pairs, as libpq takes it."""
        check_kind("PostgresStore(conninfo)", conninfo, str)
        check_seconds("PostgresStore(lock_timeout_s)", lock_timeout_s)
        check_kind("PostgresStore(schema)", schema, str)
        if not _NAME.fullmatch(schema):
            raise UsageError(f"PostgresStore(schema) must match {_NAME.pattern}, not {schema!r}")
        self.schema = schema
        super().__init__(PostgresPool(conninfo, schema, lock_timeout_s), PostgresDialect())

    def __repr__(self) -> str:
        return f"PostgresStore(schema={self.schema!r})"


_KINDS: Final = (
    (bool, "boolean", "boolean"),
    (str, "string", "text"),
    (int, "number", "numeric"),
    (float, "number", "numeric"),
)


class PostgresDialect(Dialect):
    text_collation = ' COLLATE "C"'

    def metadata(self, key: str, sign: str, value: Any) -> Where:
        _, kind, cast = next(row for row in _KINDS if isinstance(value, row[0]))
        collation = self.text_collation if kind == "string" else ""
        actual = "c.metadata::jsonb -> ?::text"
        sql = (
            f"CASE WHEN jsonb_typeof({actual}) = '{kind}'"
            f" THEN (c.metadata::jsonb ->> ?::text)::{cast}{collation} {sign} ?::{cast} ELSE false END"
        )
        return Where(sql, (key, key, value))

    def add_words(self, transaction: Transaction, rows: Iterable[tuple[int, str]]) -> None:
        sql = "INSERT INTO chunk_words (seq, words) VALUES (?, to_tsvector('simple', ?))"
        transaction.run_many(sql, ((seq, text[:WORDS_CHARS]) for seq, text in rows))

    def drop_words(self, transaction: Transaction, document_id: str) -> None:
        """Do nothing: they go with their chunks."""

    def by_words(self, transaction: Transaction, wanted: Sequence[str], top_k: int, allowed: Where) -> list[Hit]:
        limit = f"AND seq IN ({allowed.sql})" if allowed.sql else ""
        found = transaction.rows(
            f"SELECT seq, {_RANK} AS score FROM chunk_words, to_tsquery('simple', ?) AS query"
            f" WHERE words @@ query {limit} ORDER BY score DESC, seq LIMIT ?",
            (" | ".join(f"'{word}'" for word in wanted), *allowed.parameters, top_k),
        )
        return [Hit(seq, float(score)) for seq, score in found]


_RANK: Final = "ts_rank(words, query, 1 + 32)"
"""1: longer chunks count less; 32: the rank as a score in [0, 1).

Source: https://www.postgresql.org/docs/15/textsearch-controls.html#TEXTSEARCH-RANKING.
"""
