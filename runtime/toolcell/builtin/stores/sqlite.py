"""`SqliteStore`: everything in one file, which several processes may use at once, or in memory."""

from __future__ import annotations

import importlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args

from toolcell.builtin.stores.database import Rows, Transaction
from toolcell.builtin.stores.filters import Where
from toolcell.builtin.stores.records import Chunk
from toolcell.builtin.stores.schema import MIGRATIONS
from toolcell.builtin.stores.sql_agenda import SqlSchedules, SqlSkills
from toolcell.builtin.stores.sql_documents import SqlDocuments
from toolcell.builtin.stores.vectors import CHUNKS, MESSAGES, Hit, IndexSql, ScanIndex, TableIndex, VectorIndex
from toolcell.errors import StoreError
from toolcell.support import daemon_threads
from toolcell.support.checks import check_one_of, check_path, check_seconds
from toolcell.support.log import logger_of
from toolcell.support.sqlite import SqliteDatabase
from toolcell.support.vocabulary import words

# One SQLite file of the stores: their tables in it, and transactions on worker threads.


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


logger = logger_of("toolcell.tools.store")

Vectors = Literal["auto", "sqlite-vec", "numpy"]

VEC_SQL: Final = IndexSql(
    create="CREATE VIRTUAL TABLE IF NOT EXISTS {name} USING vec0"
    " (seq integer primary key, embedding float[{dimensions}] distance_metric=cosine)",
    insert="INSERT INTO {name} (seq, embedding) VALUES (?, ?)",
    search="SELECT seq, distance FROM {name} WHERE embedding MATCH ? AND k = {top_k} {condition} ORDER BY distance",
    encode=bytes,
)
"""Source: https://alexgarcia.xyz/sqlite-vec/features/knn.html."""


class SqliteStore(SqlDocuments, SqlSchedules, SqlSkills):
    """A store with every capability, in one file with its write-ahead log beside it; `:memory:` keeps it in memory.

    Words are found by FTS5. Vectors are found by sqlite-vec where it can be loaded, and otherwise by a scan with numpy
    that keeps them in memory; `vectors_by` says which, and why, once the store is open. Both give the same answers.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, vectors: Vectors = "auto", lock_timeout_s: float = 10.0
    ) -> None:
        check_path("SqliteStore(path)", path)
        check_one_of("SqliteStore(vectors)", vectors, get_args(Vectors))
        check_seconds("SqliteStore(lock_timeout_s)", lock_timeout_s)
        self.vectors_by = ""
        """How vectors are searched: `sqlite-vec ...` or `numpy scan (...)`. Empty until the store is open."""
        self._wanted = vectors
        self._chosen: _Indexes | None = None
        self._choosing = threading.Lock()
        self._dialect = SqliteDialect()
        self._database = SqliteFile(Path(path), lock_timeout_s, self._prepare)
        self.path = self._database.path

    def __repr__(self) -> str:
        return f"SqliteStore({str(self.path)!r}, vectors by {self.vectors_by or 'not open'})"

    async def init(self) -> None:
        """Open the file, make it if there is none, and bring its tables up to date."""
        await self._database.read(lambda _: None)

    async def close(self) -> None:
        """Let go of the file. A later call opens it again; what was in memory is gone."""
        await self._database.close()

    def _indexes(self) -> _Indexes:
        assert self._chosen is not None
        return self._chosen

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Load sqlite-vec into a connection, and choose the indexes with the first one."""
        with self._choosing:
            self._choose(connection)

    def _choose(self, connection: sqlite3.Connection) -> None:
        if self._chosen is not None and not self._chosen.is_vec:
            return
        why = "asked for" if self._wanted == "numpy" else _load_vec(connection)
        if why and self._wanted == "sqlite-vec":
            raise StoreError(f"the store {self.path} cannot use sqlite-vec: {why}; or leave out vectors='sqlite-vec'")
        if self._chosen is None:
            self._chosen = _Indexes(is_vec=not why)
            version = "" if why else connection.execute("SELECT vec_version()").fetchone()[0]
            self.vectors_by = f"numpy scan ({why})" if why else f"sqlite-vec {version}"
            logger.info("store %s: vectors by %s", self.path, self.vectors_by)


class _Indexes:
    def __init__(self, is_vec: bool) -> None:
        self.is_vec = is_vec
        self.chunks: VectorIndex = TableIndex(CHUNKS, VEC_SQL, "vec") if is_vec else ScanIndex(CHUNKS)
        self.messages: VectorIndex = TableIndex(MESSAGES, VEC_SQL, "vec") if is_vec else ScanIndex(MESSAGES)


def _load_vec(connection: sqlite3.Connection) -> str:
    """Load sqlite-vec, or return why that cannot be."""
    try:
        sqlite_vec = importlib.import_module("sqlite_vec")
    except ImportError:
        return "sqlite-vec is not installed: pip install 'toolcell[builtin]'"
    if not hasattr(connection, "enable_load_extension"):
        return "this Python's sqlite3 cannot load extensions"
    try:
        connection.enable_load_extension(True)
        sqlite_vec.load(connection)
    except sqlite3.Error as exc:
        return f"sqlite-vec cannot be loaded: {exc}"
    finally:
        connection.enable_load_extension(False)
    return ""


_KINDS: Final = {bool: "('true', 'false')", int: "('integer', 'real')", float: "('integer', 'real')", str: "('text')"}
"""Source: https://sqlite.org/json1.html#jtype."""


class SqliteDialect:
    """What is SQLite's own."""

    text_collation = ""

    def metadata(self, key: str, sign: str, value: Any) -> Where:
        """Return how one metadata key is compared with one value."""
        kind = _KINDS[type(value)]
        sql = (
            f"EXISTS (SELECT 1 FROM json_each(c.metadata) j WHERE j.key = ? AND j.type IN {kind} AND j.value {sign} ?)"
        )
        return Where(sql, (key, int(value) if value is True or value is False else value))

    def add_words(self, transaction: Transaction, document_id: str, chunks: Sequence[Chunk]) -> None:
        """Index the words of chunks that are stored."""
        seqs: dict[str, int] = dict(
            transaction.rows("SELECT id, seq FROM chunks WHERE document_id = ?", (document_id,))
        )
        transaction.run_many(
            "INSERT INTO chunk_words (rowid, words) VALUES (?, ?)",
            ((seqs[chunk.id], " ".join(words(chunk.content))) for chunk in chunks),
        )

    def drop_words(self, transaction: Transaction, document_id: str) -> None:
        """Take the words of a document's chunks out of the index."""
        transaction.run(
            "DELETE FROM chunk_words WHERE rowid IN (SELECT seq FROM chunks WHERE document_id = ?)", (document_id,)
        )

    def by_words(
        self, transaction: Transaction, wanted: Sequence[str], top_k: int, condition: Where | None
    ) -> list[Hit]:
        """Return the chunks that hold some of these words, the best first."""
        query = " OR ".join(f'"{word}"' for word in wanted)
        allowed = CHUNKS.allowed(condition) if condition is not None else Where("", ())
        limit = f"AND rowid IN ({allowed.sql})" if condition is not None else ""
        found = transaction.rows(
            f"SELECT rowid, rank FROM chunk_words WHERE chunk_words MATCH ? {limit} ORDER BY rank LIMIT ?",
            (query, *allowed.parameters, top_k),
        )
        return [Hit(seq, max(0.0, -rank) / (1.0 + max(0.0, -rank))) for seq, rank in found]
