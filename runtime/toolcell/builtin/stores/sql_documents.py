"""Documents, chunks and messages in a SQL database. The methods' rules are those of `protocols`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

from toolcell.builtin.stores.database import Database, Transaction, marks
from toolcell.builtin.stores.filters import Where, where
from toolcell.builtin.stores.protocols import DocumentStore, KeywordStore, MessageStore
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
from toolcell.builtin.stores.rows import R, columns, from_row, quoted, to_row, vector_bytes
from toolcell.builtin.stores.vectors import CHUNKS, MESSAGES, Hit, VectorIndex
from toolcell.errors import UsageError
from toolcell.support.vocabulary import query_words, words

CHUNK_COLUMNS: Final = quoted(columns(Chunk, "embedding"))
MESSAGE_COLUMNS: Final = quoted(columns(Message, "embedding"))
DOCUMENT_COLUMNS: Final = quoted(columns(Document))


class Dialect(Protocol):
    """What differs between databases."""

    text_collation: str
    """After a column: compare texts by code point."""

    def metadata(self, key: str, sign: str, value: Any) -> Where:
        """Return how one metadata key is compared with one value; see `MetadataSql`."""

    def add_words(self, transaction: Transaction, rows: Iterable[tuple[int, str]]) -> None:
        """Index the words of chunks that are stored: their `seq` and words."""

    def drop_words(self, transaction: Transaction, document_id: str) -> None:
        """Take the words of a document's chunks out of the index, before the chunks are deleted."""

    def by_words(self, transaction: Transaction, wanted: Sequence[str], top_k: int, allowed: Where) -> list[Hit]:
        """Return the chunks that hold some of these words, the best first. `allowed`: a query for the `seq`s among
        which they must be; empty for all."""


def check_chunks(document: Document, chunks: Sequence[Chunk], taken: Iterable[str]) -> None:
    """Refuse chunks that do not make up a document. `taken` are ids of it that the store has already.

    Raises:
        UsageError: a chunk belongs elsewhere, has a parent that is not among them, or an id is used twice.
    """
    known: set[str] = set()
    repeated = [*taken]
    for chunk in chunks:
        repeated += [chunk.id] if chunk.id in known else []
        known.add(chunk.id)
    if repeated:
        raise UsageError(f"the id {repeated[0]!r} is taken; leave it out to get a new one")
    for chunk in chunks:
        if chunk.document_id != document.id:
            raise UsageError(f"chunk {chunk.id!r} has document_id {chunk.document_id!r}, not {document.id!r}")
        if chunk.parent_id and chunk.parent_id not in known:
            raise UsageError(f"chunk {chunk.id!r} has a parent {chunk.parent_id!r} that is not a chunk of its document")


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


class SqlPart:
    """What every capability of a store in SQL has."""

    _database: Database
    _dialect: Dialect

    async def _records(self, kind: type[R], sql: str, parameters: Sequence[Any], *without: str) -> list[R]:
        """Return the records of a query for all columns of a kind but `without`."""
        rows = await self._database.read(lambda transaction: transaction.rows(sql, parameters))
        return [from_row(kind, row, *without) for row in rows]

    async def _change(self, sql: str, parameters: Sequence[Any]) -> bool:
        return bool(await self._database.write(lambda transaction: transaction.run(sql, parameters)))


class SqlDocuments(SqlPart, DocumentStore, KeywordStore, MessageStore):
    """The capabilities `DocumentStore`, `KeywordStore` and `MessageStore` over a database."""

    def _forget_vectors(self) -> None:
        self._chunk_vectors, self._message_vectors = VectorIndex(CHUNKS), VectorIndex(MESSAGES)

    async def use_embeddings(self, name: str, dimensions: int) -> None:
        def known(transaction: Transaction) -> tuple[str, int] | None:
            sql = "SELECT name, value FROM settings WHERE name IN ('dimensions', 'embeddings')"
            found: dict[str, str] = dict(transaction.rows(sql))
            if "dimensions" not in found:
                return None
            other, numbers = found.get("embeddings", ""), int(found["dimensions"])  # stored before one was named: ""
            if (other or name, numbers) != (name, dimensions):
                raise UsageError(
                    f"this store's vectors have {numbers} numbers and come from {other or 'another provider'!r}, and "
                    f"{name!r} makes vectors of {dimensions}; use that provider, or a new store"
                )
            return other, numbers

        def work(transaction: Transaction) -> None:
            if known(transaction) != (name, dimensions):
                values = [("dimensions", str(dimensions)), ("embeddings", name)]
                conflict = "ON CONFLICT (name) DO UPDATE SET value = excluded.value"
                transaction.run_many(f"INSERT INTO settings (name, value) VALUES (?, ?) {conflict}", values)

        if await self._database.read(known) != (name, dimensions):
            await self._database.write(work)

    async def store_document(self, document: Document, chunks: Sequence[Chunk]) -> str:
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
        sql = "SELECT seq, content FROM chunks WHERE document_id = ? AND is_parent = 0"
        rows = transaction.rows(sql, (document.id,))
        self._dialect.add_words(transaction, ((seq, " ".join(words(content))) for seq, content in rows))
        return document.id

    async def get_document(self, document_id: str) -> Document | None:
        sql = f"SELECT {DOCUMENT_COLUMNS} FROM documents WHERE id = ?"
        return next(iter(await self._records(Document, sql, (document_id,))), None)

    async def list_documents(self, limit: int = 100, after: str = "") -> list[Document]:
        id_ = f"id{self._dialect.text_collation}"
        sql = f"SELECT {DOCUMENT_COLUMNS} FROM documents WHERE {id_} > ? ORDER BY {id_} LIMIT ?"
        return await self._records(Document, sql, (after, limit))

    async def delete_document(self, document_id: str) -> bool:
        def work(transaction: Transaction) -> bool:
            self._dialect.drop_words(transaction, document_id)
            if is_there := bool(transaction.run("DELETE FROM documents WHERE id = ?", (document_id,))):
                count_deletion(transaction, "chunks")
            return is_there

        return await self._database.write(work)

    async def search_chunks(self, embedding: Vector, top_k: int, *filters: ChunkFilter) -> list[Scored[Chunk]]:
        check_top_k(top_k)
        condition = self._condition(filters)

        def work(transaction: Transaction) -> list[Scored[Chunk]]:
            check_dimensions(transaction, [embedding])
            hits = self._chunk_vectors.nearest(transaction, vector_bytes(embedding), top_k, condition)
            return _scored(transaction, Chunk, "chunks", hits)

        return await self._database.read(work)

    async def search_chunks_keyword(self, query: str, top_k: int, *filters: ChunkFilter) -> list[Scored[Chunk]]:
        check_top_k(top_k)
        condition, wanted = self._condition(filters), query_words(query)
        allowed = CHUNKS.allowed(condition) if condition is not None else Where("", ())

        def work(transaction: Transaction) -> list[Scored[Chunk]]:
            hits = self._dialect.by_words(transaction, wanted, top_k, allowed)
            return _scored(transaction, Chunk, "chunks", hits)

        return await self._database.read(work) if wanted else []

    async def get_chunks_by_ids(self, ids: Sequence[str]) -> list[Chunk]:
        sql = f"SELECT {CHUNK_COLUMNS} FROM chunks WHERE id IN ({{}})"
        rows = await self._database.read(lambda transaction: _rows_in(transaction, sql, list(dict.fromkeys(ids))))
        found = {chunk.id: chunk for chunk in (from_row(Chunk, row, "embedding") for row in rows)}
        return [found[id_] for id_ in ids if id_ in found]

    def _condition(self, filters: Sequence[ChunkFilter]) -> Where | None:
        return where(filters, self._dialect.metadata, self._dialect.text_collation)

    # Messages

    async def store_message(self, message: Message) -> None:
        def work(transaction: Transaction) -> None:
            remember_dimensions(transaction, [message.embedding])
            if transaction.run("DELETE FROM messages WHERE id = ?", (message.id,)):
                count_deletion(transaction, "messages")
            transaction.run(f"INSERT INTO messages ({quoted(columns(Message))}) VALUES ({marks(7)})", to_row(message))

        await self._database.write(work)

    async def list_messages(self, thread_id: str, limit: int = 100) -> list[Message]:
        id_ = f"id{self._dialect.text_collation}"
        sql = f"SELECT {MESSAGE_COLUMNS} FROM messages WHERE thread_id = ? ORDER BY created_at DESC, {id_} DESC LIMIT ?"
        return (await self._records(Message, sql, (thread_id, limit), "embedding"))[::-1]

    async def search_messages(self, embedding: Vector, top_k: int) -> list[Scored[Message]]:
        check_top_k(top_k)

        def work(transaction: Transaction) -> list[Scored[Message]]:
            check_dimensions(transaction, [embedding])
            hits = self._message_vectors.nearest(transaction, vector_bytes(embedding), top_k, None)
            return _scored(transaction, Message, "messages", hits)

        return await self._database.read(work)


MOST_MARKS: Final = 500
"""Parameters of one query. SQLite takes 999 at least."""


def _rows_in(transaction: Transaction, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return the rows of a query with a list of any length."""
    rows: list[tuple[Any, ...]] = []
    for at in range(0, len(values), MOST_MARKS):
        part = values[at : at + MOST_MARKS]
        rows += transaction.rows(sql.format(marks(len(part))), part)
    return rows


def _scored(transaction: Transaction, kind: type[R], table: str, hits: Sequence[Hit]) -> list[Scored[R]]:
    """Return the records of the rows that a search found, without their embeddings."""
    sql = f"SELECT seq, {quoted(columns(kind, 'embedding'))} FROM {table} WHERE seq IN ({{}})"
    rows = {row[0]: row[1:] for row in _rows_in(transaction, sql, [hit.seq for hit in hits])}
    return [Scored(from_row(kind, rows[hit.seq], "embedding"), hit.score) for hit in hits if hit.seq in rows]
