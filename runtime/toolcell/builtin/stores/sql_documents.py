"""Documents, chunks and messages in a SQL database."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

from toolcell.builtin.stores.database import Database, Transaction, marks
from toolcell.builtin.stores.filters import Where, where
from toolcell.builtin.stores.records import (
    Chunk,
    ChunkFilter,
    Document,
    Message,
    Scored,
    Vector,
    check_top_k,
    check_vector,
)
from toolcell.builtin.stores.rows import columns, from_row, quoted, to_row, vector_bytes
from toolcell.builtin.stores.rules import check_chunks, check_provider
from toolcell.builtin.stores.vectors import Hit, VectorIndex
from toolcell.support.vocabulary import query_words

T = TypeVar("T")

CHUNK_COLUMNS: Final = quoted(columns(Chunk, "embedding"))
MESSAGE_COLUMNS: Final = quoted(columns(Message, "embedding"))
DOCUMENT_COLUMNS: Final = quoted(columns(Document))


class Dialect(Protocol):
    """What differs between databases."""

    text_collation: str
    """After a column: compare texts by code point."""

    def metadata(self, key: str, sign: str, value: Any) -> Where:
        """Return how one metadata key is compared with one value; see `MetadataSql`."""

    def add_words(self, transaction: Transaction, document_id: str, chunks: Sequence[Chunk]) -> None:
        """Index the words of chunks that are stored."""

    def drop_words(self, transaction: Transaction, document_id: str) -> None:
        """Take the words of a document's chunks out of the index, before the chunks are deleted."""

    def by_words(
        self, transaction: Transaction, wanted: Sequence[str], top_k: int, condition: Where | None
    ) -> list[Hit]:
        """Return the chunks that hold some of these words, the best first."""


class Indexes(Protocol):
    """The vector indexes of a store, chosen when it is opened."""

    chunks: VectorIndex
    messages: VectorIndex


def check_dimensions(transaction: Transaction, vectors: Sequence[Vector | None]) -> int:
    """Check vectors against those that are stored, and return how many numbers they have; 0 when there are none.

    Raises:
        UsageError: one has another number.
    """
    found = transaction.rows("SELECT value FROM settings WHERE name = 'dimensions'")
    known = int(found[0][0]) if found else None
    for vector in vectors:
        if vector is not None:
            check_vector("an embedding", vector, known)
            known = len(vector)
    return known or 0


def put_setting(transaction: Transaction, name: str, value: str) -> None:
    """Set a setting."""
    transaction.run(
        "INSERT INTO settings (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
        (name, value),
    )


def remember_dimensions(transaction: Transaction, vectors: Sequence[Vector | None]) -> None:
    """Check vectors that are to be stored. The first one decides for all."""
    if dimensions := check_dimensions(transaction, vectors):
        transaction.run(
            "INSERT INTO settings (name, value) VALUES ('dimensions', ?) ON CONFLICT (name) DO NOTHING",
            (str(dimensions),),
        )


def count_deletion(transaction: Transaction, table: str) -> None:
    """Tell every index of the table that rows are gone."""
    transaction.run(
        "INSERT INTO settings (name, value) VALUES (?, '1') ON CONFLICT (name)"
        " DO UPDATE SET value = CAST(CAST(settings.value AS INTEGER) + 1 AS TEXT)",
        (f"{table}.deletions",),
    )


class SqlDocuments:
    """The capabilities `DocumentStore`, `KeywordStore` and `MessageStore` over a database."""

    _database: Database
    _dialect: Dialect

    def _indexes(self) -> Indexes:
        raise NotImplementedError

    async def use_embeddings(self, name: str, dimensions: int) -> None:
        """Remember which provider makes this store's vectors, or check that it is the one that did."""

        def known(transaction: Transaction) -> tuple[str, int] | None:
            sql = "SELECT name, value FROM settings WHERE name IN ('dimensions', 'embeddings')"
            found: dict[str, str] = dict(transaction.rows(sql))
            pair = (found.get("embeddings", ""), int(found["dimensions"])) if "dimensions" in found else None
            check_provider(pair, name, dimensions)
            return pair

        def work(transaction: Transaction) -> None:
            if known(transaction) != (name, dimensions):
                put_setting(transaction, "dimensions", str(dimensions))
                put_setting(transaction, "embeddings", name)

        if await self._database.read(known) != (name, dimensions):
            await self._database.write(work)

    async def store_document(self, document: Document, chunks: Sequence[Chunk]) -> str:
        """Store a document with all its chunks, and return its id, or that of the one with the same content."""
        return await self._database.write(lambda transaction: self._store(transaction, document, chunks))

    def _store(self, transaction: Transaction, document: Document, chunks: Sequence[Chunk]) -> str:
        if known := transaction.rows("SELECT id FROM documents WHERE digest = ?", (document.digest,)):
            return str(known[0][0])
        taken = transaction.rows("SELECT id FROM documents WHERE id = ?", (document.id,))
        taken += _rows_in(transaction, "SELECT id FROM chunks WHERE id IN ({})", [chunk.id for chunk in chunks])
        check_chunks(document, chunks, [row[0] for row in taken])
        remember_dimensions(transaction, [chunk.embedding for chunk in chunks])
        transaction.run(
            f"INSERT INTO documents ({DOCUMENT_COLUMNS}, digest) VALUES ({marks(6)})",
            (*to_row(document), document.digest),
        )
        parents = {chunk.parent_id for chunk in chunks if chunk.parent_id}
        transaction.run_many(
            f"INSERT INTO chunks ({quoted(columns(Chunk))}, is_parent) VALUES ({marks(8)})",
            ((*to_row(chunk), int(chunk.id in parents)) for chunk in chunks),
        )
        self._dialect.add_words(transaction, document.id, [chunk for chunk in chunks if chunk.id not in parents])
        self._indexes().chunks.catch_up(transaction)
        return document.id

    async def get_document(self, document_id: str) -> Document | None:
        """Return the document, or None."""
        sql = f"SELECT {DOCUMENT_COLUMNS} FROM documents WHERE id = ?"
        found = await self._database.read(lambda transaction: transaction.rows(sql, (document_id,)))
        return from_row(Document, found[0]) if found else None

    async def list_documents(self, limit: int = 100, after: str = "") -> list[Document]:
        """Return documents in the order of their ids."""
        id_ = f"id{self._dialect.text_collation}"
        sql = f"SELECT {DOCUMENT_COLUMNS} FROM documents WHERE {id_} > ? ORDER BY {id_} LIMIT ?"
        found = await self._database.read(lambda transaction: transaction.rows(sql, (after, limit)))
        return [from_row(Document, row) for row in found]

    async def delete_document(self, document_id: str) -> bool:
        """Delete a document with its chunks."""

        def work(transaction: Transaction) -> bool:
            self._dialect.drop_words(transaction, document_id)
            if not transaction.run("DELETE FROM documents WHERE id = ?", (document_id,)):
                return False
            count_deletion(transaction, "chunks")
            self._indexes().chunks.catch_up(transaction)
            return True

        return await self._database.write(work)

    async def search_chunks(self, embedding: Vector, top_k: int, *filters: ChunkFilter) -> list[Scored[Chunk]]:
        """Return the chunks whose vectors are nearest."""
        check_top_k(top_k)
        condition = self._condition(filters)

        def work(transaction: Transaction) -> list[Scored[Chunk]]:
            check_dimensions(transaction, [embedding])
            hits = self._indexes().chunks.nearest(transaction, vector_bytes(embedding), top_k, condition)
            return self._chunks_of(transaction, hits)

        return await self._up_to_date("chunks", work)

    async def search_chunks_keyword(self, query: str, top_k: int, *filters: ChunkFilter) -> list[Scored[Chunk]]:
        """Return the chunks that hold words of `query`."""
        check_top_k(top_k)
        condition, wanted = self._condition(filters), query_words(query)
        if not wanted:
            return []

        def work(transaction: Transaction) -> list[Scored[Chunk]]:
            return self._chunks_of(transaction, self._dialect.by_words(transaction, wanted, top_k, condition))

        return await self._database.read(work)

    async def get_chunks_by_ids(self, ids: Sequence[str]) -> list[Chunk]:
        """Return the chunks that exist, in the order of `ids`."""
        sql = f"SELECT {CHUNK_COLUMNS} FROM chunks WHERE id IN ({{}})"
        rows = await self._database.read(lambda transaction: _rows_in(transaction, sql, list(dict.fromkeys(ids))))
        found = {chunk.id: chunk for chunk in (from_row(Chunk, row, "embedding") for row in rows)}
        return [found[id_] for id_ in ids if id_ in found]

    def _condition(self, filters: Sequence[ChunkFilter]) -> Where | None:
        return where(filters, self._dialect.metadata, self._dialect.text_collation)

    def _chunks_of(self, transaction: Transaction, hits: Sequence[Hit]) -> list[Scored[Chunk]]:
        sql = f"SELECT seq, {CHUNK_COLUMNS} FROM chunks WHERE seq IN ({{}})"
        rows = {row[0]: row[1:] for row in _rows_in(transaction, sql, [hit.seq for hit in hits])}
        return [Scored(from_row(Chunk, rows[hit.seq], "embedding"), hit.score) for hit in hits if hit.seq in rows]

    async def _up_to_date(self, table: str, work: Callable[[Transaction], list[T]]) -> list[T]:
        """Search, after bringing the index up to date where another process has left it behind."""

        def if_up_to_date(transaction: Transaction) -> list[T] | None:
            index: VectorIndex = getattr(self._indexes(), table)
            return None if index.is_behind(transaction) else work(transaction)

        def caught_up(transaction: Transaction) -> list[T]:
            index: VectorIndex = getattr(self._indexes(), table)
            index.catch_up(transaction)
            return work(transaction)

        found = await self._database.read(if_up_to_date)
        return await self._database.write(caught_up) if found is None else found

    # Messages

    async def store_message(self, message: Message) -> None:
        """Store a message. One of the same id is replaced."""

        def work(transaction: Transaction) -> None:
            remember_dimensions(transaction, [message.embedding])
            if transaction.run("DELETE FROM messages WHERE id = ?", (message.id,)):
                count_deletion(transaction, "messages")
            transaction.run(f"INSERT INTO messages ({quoted(columns(Message))}) VALUES ({marks(7)})", to_row(message))
            self._indexes().messages.catch_up(transaction)

        await self._database.write(work)

    async def list_messages(self, thread_id: str, limit: int = 100) -> list[Message]:
        """Return the last messages of a thread, the oldest first."""
        id_ = f"id{self._dialect.text_collation}"
        sql = f"SELECT {MESSAGE_COLUMNS} FROM messages WHERE thread_id = ? ORDER BY created_at DESC, {id_} DESC LIMIT ?"
        rows = await self._database.read(lambda transaction: transaction.rows(sql, (thread_id, limit)))
        return [from_row(Message, row, "embedding") for row in reversed(rows)]

    async def search_messages(self, embedding: Vector, top_k: int) -> list[Scored[Message]]:
        """Return the messages whose vectors are nearest."""
        check_top_k(top_k)
        sql = f"SELECT seq, {MESSAGE_COLUMNS} FROM messages WHERE seq IN ({{}})"

        def work(transaction: Transaction) -> list[Scored[Message]]:
            check_dimensions(transaction, [embedding])
            hits = self._indexes().messages.nearest(transaction, vector_bytes(embedding), top_k, None)
            rows = {row[0]: row[1:] for row in _rows_in(transaction, sql, [hit.seq for hit in hits])}
            return [Scored(from_row(Message, rows[hit.seq], "embedding"), hit.score) for hit in hits if hit.seq in rows]

        return await self._up_to_date("messages", work)


MOST_MARKS: Final = 500
"""Parameters of one query. SQLite takes 999 at least."""


def _rows_in(transaction: Transaction, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return the rows of a query with a list of any length."""
    rows: list[tuple[Any, ...]] = []
    for at in range(0, len(values), MOST_MARKS):
        part = values[at : at + MOST_MARKS]
        rows += transaction.rows(sql.format(marks(len(part))), part)
    return rows
