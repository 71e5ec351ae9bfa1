"""`PostgresStore`: everything in one schema of a PostgreSQL database."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Any, Final

from toolcell.builtin.stores.database import Transaction
from toolcell.builtin.stores.filters import Where
from toolcell.builtin.stores.postgres_pool import PostgresPool
from toolcell.builtin.stores.records import Chunk
from toolcell.builtin.stores.sql_agenda import SqlSchedules, SqlSkills
from toolcell.builtin.stores.sql_documents import SqlDocuments
from toolcell.builtin.stores.vectors import CHUNKS, MESSAGES, Hit, IndexSql, ScanIndex, TableIndex, VectorIndex
from toolcell.errors import UsageError
from toolcell.support.checks import check_kind, check_seconds
from toolcell.support.log import logger_of
from toolcell.support.vocabulary import words

logger = logger_of("toolcell.tools.store")

_NAME = re.compile(r"[a-z_][a-z0-9_]{0,47}")
WORDS_CHARS: Final = 200_000
"""Characters of one chunk, what the index of words sees. Source: a tsvector holds less than 1 MB."""


def _floats(data: bytes) -> str:
    return "[" + ",".join(f"{each:.9g}" for each in struct.unpack(f"<{len(data) // 4}f", data)) + "]"


PGVECTOR_SQL: Final = IndexSql(
    create="CREATE TABLE IF NOT EXISTS {name} (seq BIGINT PRIMARY KEY, embedding vector NOT NULL)",
    insert="INSERT INTO {name} (seq, embedding) VALUES (?, ?::text::vector)",
    search="SELECT seq, embedding <=> ?::text::vector AS distance FROM {name} WHERE true {condition}"
    " ORDER BY distance LIMIT {top_k}",
    encode=_floats,
)
"""Without an approximate index: every answer is exact. Source: https://github.com/pgvector/pgvector#distances."""


class PostgresStore(SqlDocuments, SqlSchedules, SqlSkills):
    """A store with every capability, in one schema of a database that several machines may share.

    Words are found by PostgreSQL's full text search. Vectors are found by pgvector where the server has the extension,
    and otherwise by a scan with numpy that keeps them in memory; `vectors_by` says which, once the store is open.
    """

    def __init__(self, conninfo: str, *, schema: str = "toolcell", lock_timeout_s: float = 10.0) -> None:
        """`conninfo` is a URL `postgresql://...` or `key=value` pairs, as libpq takes it."""
        check_kind("PostgresStore(conninfo)", conninfo, str)
        check_seconds("PostgresStore(lock_timeout_s)", lock_timeout_s)
        check_kind("PostgresStore(schema)", schema, str)
        if not _NAME.fullmatch(schema):
            raise UsageError(f"PostgresStore(schema) must match {_NAME.pattern}, not {schema!r}")
        self.schema = schema
        self.vectors_by = ""
        """How vectors are searched: `pgvector ...` or `numpy scan (...)`. Empty until the store is open."""
        self._chosen: _Indexes | None = None
        self._dialect = PostgresDialect()
        self._database = PostgresPool(conninfo, schema, lock_timeout_s, self._prepare)

    def __repr__(self) -> str:
        return f"PostgresStore(schema={self.schema!r}, vectors by {self.vectors_by or 'not open'})"

    async def init(self) -> None:
        """Connect, and make the tables or bring them up to date."""
        await self._database.read(lambda _: None)

    async def close(self) -> None:
        """Close the connections. A later call connects again."""
        await self._database.close()

    def _indexes(self) -> _Indexes:
        assert self._chosen is not None
        return self._chosen

    def _prepare(self, transaction: Transaction) -> None:
        """Choose how vectors are searched."""
        version = _has_pgvector(transaction)
        self._chosen = _Indexes(has_pgvector=bool(version))
        self.vectors_by = f"pgvector {version}" if version else "numpy scan (the server has no pgvector)"
        logger.info("PostgreSQL store, schema %s: vectors by %s", self.schema, self.vectors_by)


def _has_pgvector(transaction: Transaction) -> str:
    """Return the version of pgvector in this database, made there if the server has it and lets us; or nothing."""
    installed = "SELECT extversion FROM pg_extension WHERE extname = 'vector'"
    found = transaction.rows(installed)
    if not found and transaction.rows("SELECT 1 FROM pg_available_extensions WHERE name = 'vector'"):
        transaction.run(
            "DO $$ BEGIN CREATE EXTENSION IF NOT EXISTS vector SCHEMA public;"
            " EXCEPTION WHEN insufficient_privilege THEN NULL; END $$"
        )
        found = transaction.rows(installed)
    return str(found[0][0]) if found else ""


class _Indexes:
    def __init__(self, has_pgvector: bool) -> None:
        self.chunks: VectorIndex = _index(CHUNKS, has_pgvector)
        self.messages: VectorIndex = _index(MESSAGES, has_pgvector)


def _index(table: Any, has_pgvector: bool) -> VectorIndex:
    return TableIndex(table, PGVECTOR_SQL, "pgvector") if has_pgvector else ScanIndex(table)


_KINDS: Final = (
    (bool, "boolean", "boolean"),
    (str, "string", "text"),
    (int, "number", "numeric"),
    (float, "number", "numeric"),
)


class PostgresDialect:
    """What is PostgreSQL's own."""

    text_collation = ' COLLATE "C"'

    def metadata(self, key: str, sign: str, value: Any) -> Where:
        """Return how one metadata key is compared with one value."""
        _, kind, cast = next(row for row in _KINDS if isinstance(value, row[0]))
        collation = self.text_collation if kind == "string" else ""
        actual = "c.metadata::jsonb -> ?::text"
        sql = (
            f"CASE WHEN jsonb_typeof({actual}) = '{kind}'"
            f" THEN (c.metadata::jsonb ->> ?::text)::{cast}{collation} {sign} ?::{cast} ELSE false END"
        )
        return Where(sql, (key, key, value))

    def add_words(self, transaction: Transaction, document_id: str, chunks: Sequence[Chunk]) -> None:
        """Index the words of chunks that are stored."""
        seqs: dict[str, int] = dict(
            transaction.rows("SELECT id, seq FROM chunks WHERE document_id = ?", (document_id,))
        )
        transaction.run_many(
            "INSERT INTO chunk_words (seq, words) VALUES (?, to_tsvector('simple', ?))",
            ((seqs[chunk.id], " ".join(words(chunk.content))[:WORDS_CHARS]) for chunk in chunks),
        )

    def drop_words(self, transaction: Transaction, document_id: str) -> None:
        """Do nothing: they go with their chunks."""

    def by_words(
        self, transaction: Transaction, wanted: Sequence[str], top_k: int, condition: Where | None
    ) -> list[Hit]:
        """Return the chunks that hold some of these words, the best first."""
        query = " | ".join(f"'{word}'" for word in wanted)
        allowed = CHUNKS.allowed(condition) if condition is not None else Where("", ())
        limit = f"AND seq IN ({allowed.sql})" if condition is not None else ""
        found = transaction.rows(
            f"SELECT seq, {_RANK} AS score FROM chunk_words, to_tsquery('simple', ?) AS query"
            f" WHERE words @@ query {limit} ORDER BY score DESC, seq LIMIT ?",
            (query, *allowed.parameters, top_k),
        )
        return [Hit(seq, float(score)) for seq, score in found]


_RANK: Final = "ts_rank(words, query, 1 + 32)"
"""1: longer chunks count less; 32: the rank as a score in [0, 1).

Source: https://www.postgresql.org/docs/15/textsearch-controls.html#TEXTSEARCH-RANKING.
"""
