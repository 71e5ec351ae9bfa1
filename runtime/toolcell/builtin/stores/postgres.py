"""`PostgresStore`: everything in one schema of a PostgreSQL database."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from toolcell.builtin.stores.database import Transaction
from toolcell.builtin.stores.filters import Where
from toolcell.builtin.stores.postgres_pool import PostgresPool
from toolcell.builtin.stores.sql_agenda import SqlStore
from toolcell.builtin.stores.sql_documents import Dialect
from toolcell.builtin.stores.vectors import Hit
from toolcell.errors import UsageError
from toolcell.support.checks import check_kind, check_seconds

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
