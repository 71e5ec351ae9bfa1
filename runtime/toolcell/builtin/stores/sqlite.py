"""`SqliteStore`: everything in one file, which several processes may use at once, or in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from toolcell.builtin.stores.database import Database, Transaction
from toolcell.builtin.stores.filters import Where
from toolcell.builtin.stores.schema import MIGRATIONS
from toolcell.builtin.stores.sql_agenda import SqlStore
from toolcell.builtin.stores.sql_documents import Dialect
from toolcell.builtin.stores.vectors import Hit
from toolcell.support.checks import check_path, check_seconds
from toolcell.support.sqlite import SqliteDatabase

APPLICATION_ID: Final = 0x746C6363
"""`tlcc`. Source: https://sqlite.org/pragma.html#pragma_application_id."""
_TYPES: Final = {"seq": "INTEGER PRIMARY KEY AUTOINCREMENT", "blob": "BLOB", "integer": "INTEGER"}
_WORDS: Final = "CREATE VIRTUAL TABLE chunk_words USING fts5 (words, tokenize = 'unicode61 remove_diacritics 0')"

T = TypeVar("T")


class SqliteFile(Database):
    """The `Database` of a `SqliteStore`."""

    def __init__(self, path: Path, lock_timeout_s: float) -> None:
        first, *later = ([statement.format(**_TYPES) for statement in step] for step in MIGRATIONS)
        steps = [[*first, _WORDS], *later]
        self._database = SqliteDatabase(path, steps, application_id=APPLICATION_ID, lock_timeout_s=lock_timeout_s)
        self.path = self._database.path

    def disconnect(self) -> None:
        self._database.close()

    def in_transaction(self, work: Callable[[Transaction], T], is_write: bool) -> T:
        with self._database.writing() if is_write else self._database.reading() as connection:
            return work(Transaction(connection))


class SqliteStore(SqlStore):
    """A store with every capability, in one file with its write-ahead log beside it; `:memory:` keeps it in memory.

    Words are found by FTS5. Vectors are found by a scan with numpy that keeps them in memory.
    """

    def __init__(self, path: str | os.PathLike[str], *, lock_timeout_s: float = 10.0) -> None:
        check_path("SqliteStore(path)", path)
        check_seconds("SqliteStore(lock_timeout_s)", lock_timeout_s)
        file = SqliteFile(Path(path), lock_timeout_s)
        super().__init__(file, SqliteDialect())
        self.path = file.path

    def __repr__(self) -> str:
        return f"SqliteStore({str(self.path)!r})"


_KINDS: Final = {bool: "('true', 'false')", int: "('integer', 'real')", float: "('integer', 'real')", str: "('text')"}
"""Source: https://sqlite.org/json1.html#jtype."""


class SqliteDialect(Dialect):
    text_collation = ""

    def metadata(self, key: str, sign: str, value: Any) -> Where:
        kind = _KINDS[type(value)]
        sql = (
            f"EXISTS (SELECT 1 FROM json_each(c.metadata) j WHERE j.key = ? AND j.type IN {kind} AND j.value {sign} ?)"
        )
        return Where(sql, (key, int(value) if value is True or value is False else value))

    def add_words(self, transaction: Transaction, rows: Iterable[tuple[int, str]]) -> None:
        transaction.run_many("INSERT INTO chunk_words (rowid, words) VALUES (?, ?)", rows)

    def drop_words(self, transaction: Transaction, document_id: str) -> None:
        transaction.run(
            "DELETE FROM chunk_words WHERE rowid IN (SELECT seq FROM chunks WHERE document_id = ?)", (document_id,)
        )

    def by_words(self, transaction: Transaction, wanted: Sequence[str], top_k: int, allowed: Where) -> list[Hit]:
        limit = f"AND rowid IN ({allowed.sql})" if allowed.sql else ""
        found = transaction.rows(
            f"SELECT rowid, rank FROM chunk_words WHERE chunk_words MATCH ? {limit} ORDER BY rank LIMIT ?",
            (" OR ".join(f'"{word}"' for word in wanted), *allowed.parameters, top_k),
        )
        return [Hit(seq, max(0.0, -rank) / (1.0 + max(0.0, -rank))) for seq, rank in found]
