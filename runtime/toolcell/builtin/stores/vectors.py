"""Search by vectors over a table of a database: a scan in memory, or an index that the database keeps beside the table.

Rows of the table have a `seq` that only grows. Two numbers tell whether an index is up to date: the last `seq`, and how
often rows were deleted. So processes with different indexes can share one database.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from toolcell.builtin.stores.database import Transaction
from toolcell.builtin.stores.filters import Where
from toolcell.errors import UsageError
from toolcell.support.embeddings import score_of


class Hit(NamedTuple):
    """A row that a search found."""

    seq: int
    score: float


_NUMBER = "(SELECT coalesce(max(CAST(value AS INTEGER)), 0) FROM settings WHERE name = ?)"


class IndexState(NamedTuple):
    """How far an index has followed its table."""

    last: int = 0
    deletions: int = 0
    dimensions: int = 0


class VectorTable(NamedTuple):
    """A table whose rows have vectors."""

    name: str
    condition: str
    """Which rows are searched."""
    select: str
    """All `seq`s that a filter allows, up to its condition. Empty when the table has no filters."""

    def state(self, transaction: Transaction) -> IndexState:
        """Return the state of the table."""
        found = transaction.rows(
            f"SELECT (SELECT coalesce(max(seq), 0) FROM {self.name}), {_NUMBER}, {_NUMBER}",
            (f"{self.name}.deletions", "dimensions"),
        )
        return IndexState(*found[0])

    def allowed(self, condition: Where) -> Where:
        """Return a query for the `seq`s that a filter allows."""
        return Where(f"{self.select} AND {condition.sql}", condition.parameters)


CHUNKS = VectorTable(
    "chunks",
    "is_parent = 0 AND embedding IS NOT NULL",
    "SELECT c.seq FROM chunks c JOIN documents d ON d.id = c.document_id WHERE c.is_parent = 0",
)
MESSAGES = VectorTable("messages", "embedding IS NOT NULL", "")


class VectorIndex(Protocol):
    """Finds the rows of one table whose vectors are nearest."""

    def is_behind(self, transaction: Transaction) -> bool:
        """True when `catch_up` has to be called in a transaction that may write."""

    def catch_up(self, transaction: Transaction) -> None:
        """Follow the table."""

    def nearest(self, transaction: Transaction, vector: bytes, top_k: int, condition: Where | None) -> list[Hit]:
        """Return the nearest rows, the best first."""


class ScanIndex:
    """All vectors in memory, compared one and all with numpy. Follows the table by itself, in any transaction.

    Units: 4 bytes for each number of each vector: 100 MB for 100,000 vectors of 256.
    """

    def __init__(self, table: VectorTable) -> None:
        self._table = table
        self._numpy: Any = None
        self._lock = threading.Lock()
        self._state = IndexState()
        self._seqs: Any = None
        self._unit: Any = None
        self._used = 0

    def is_behind(self, transaction: Transaction) -> bool:
        """Return False: it follows when it searches."""
        return False

    def catch_up(self, transaction: Transaction) -> None:
        """Do nothing."""

    def nearest(self, transaction: Transaction, vector: bytes, top_k: int, condition: Where | None) -> list[Hit]:
        """Return the nearest rows, the best first."""
        with self._lock:
            self._follow(transaction)
            return self._search(transaction, vector, top_k, condition)

    def _follow(self, transaction: Transaction) -> None:
        if self._numpy is None:
            self._numpy = import_numpy()
        state = self._table.state(transaction)
        if state.deletions != self._state.deletions:
            self._drop(transaction)
        if state.last != self._state.last:
            self._append(transaction, self._state.last)
        self._state = state

    def _drop(self, transaction: Transaction) -> None:
        """Forget the rows that are gone."""
        if not self._used:
            return
        kept = transaction.rows(f"SELECT seq FROM {self._table.name} WHERE {self._table.condition}")
        is_kept = self._numpy.isin(self._seqs[: self._used], [row[0] for row in kept])
        count = int(is_kept.sum())
        self._unit[:count] = self._unit[: self._used][is_kept]
        self._seqs[:count] = self._seqs[: self._used][is_kept]
        self._used = count

    def _append(self, transaction: Transaction, last: int) -> None:
        numpy = self._numpy
        found = transaction.rows(
            f"SELECT seq, embedding FROM {self._table.name} WHERE {self._table.condition} AND seq > ? ORDER BY seq",
            (last,),
        )
        if not found:
            return
        new = numpy.frombuffer(b"".join(bytes(row[1]) for row in found), dtype="<f4").reshape(len(found), -1)
        lengths = numpy.linalg.norm(new, axis=1)
        is_used = lengths > 0  # a vector of zeros has no direction
        if not (count := int(is_used.sum())):
            return
        self._room(count, new.shape[1])
        until = self._used + count
        numpy.divide(new[is_used], lengths[is_used, None], out=self._unit[self._used : until])
        self._seqs[self._used : until] = numpy.array([row[0] for row in found], dtype="i8")[is_used]
        self._used = until

    def _room(self, more: int, dimensions: int) -> None:
        """Make the arrays longer, by half at least, so that many small documents do not copy them each time."""
        numpy, have = self._numpy, 0 if self._unit is None else len(self._unit)
        if self._used + more <= have:
            return
        size = max(self._used + more, have + have // 2, 64)
        unit, seqs = numpy.zeros((size, dimensions), dtype="f4"), numpy.zeros(size, dtype="i8")
        if self._used:
            unit[: self._used], seqs[: self._used] = self._unit[: self._used], self._seqs[: self._used]
        self._unit, self._seqs = unit, seqs

    def _search(self, transaction: Transaction, vector: bytes, top_k: int, condition: Where | None) -> list[Hit]:
        numpy = self._numpy
        query = numpy.frombuffer(vector, dtype="<f4")
        length = float(numpy.linalg.norm(query))
        if not self._used or not length:
            return []
        scores, seqs = self._unit[: self._used] @ (query / length), self._seqs[: self._used]
        if condition is not None:
            query_of = self._table.allowed(condition)
            allowed = [row[0] for row in transaction.rows(query_of.sql, query_of.parameters)]
            is_allowed = numpy.isin(seqs, allowed)
            scores, seqs = scores[is_allowed], seqs[is_allowed]
        if top_k < len(scores):
            best = numpy.argpartition(-scores, top_k - 1)[:top_k]
            scores, seqs = scores[best], seqs[best]
        order = numpy.lexsort((seqs, -scores))
        return [Hit(int(seqs[at]), score_of(float(scores[at]))) for at in order]


def import_numpy() -> Any:
    """Return numpy.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return importlib.import_module("numpy")
    except ImportError:
        raise UsageError("search by vectors needs numpy; pip install 'toolcell[builtin]'") from None


class IndexSql(NamedTuple):
    """The statements of an index that the database keeps. Marks: {name}, {dimensions}, {top_k}, {condition}."""

    create: str
    insert: str
    """Takes seq and vector."""
    search: str
    """Takes the vector and what the condition takes; gives seq and distance (1 - cosine), the nearest first."""
    encode: Callable[[bytes], Any]
    """What the statements take for a vector."""


class TableIndex:
    """A table beside the table, of sqlite-vec or pgvector. Derived: a process without them need not follow it."""

    def __init__(self, table: VectorTable, sql: IndexSql, kind: str) -> None:
        self._table = table
        self._sql = sql
        self._name = f"{table.name}_{kind}"

    def is_behind(self, transaction: Transaction) -> bool:
        """True when rows were added or deleted since."""
        return self._load_state(transaction) != self._now(transaction)

    def catch_up(self, transaction: Transaction) -> None:
        """Follow the table."""
        known, now = self._load_state(transaction), self._now(transaction)
        if now == known:
            return
        if now.dimensions:
            transaction.run(self._sql.create.format(name=self._name, dimensions=now.dimensions))
            if known.last and known.deletions != now.deletions:
                self._drop(transaction)
            self._append(transaction, known.last if known.dimensions else 0)
        transaction.run(
            "INSERT INTO settings (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            (self._name, ":".join(map(str, now))),
        )

    def _drop(self, transaction: Transaction) -> None:
        kept = f"SELECT seq FROM {self._table.name} WHERE {self._table.condition}"
        gone = transaction.rows(f"SELECT seq FROM {self._name} WHERE seq NOT IN ({kept})")
        transaction.run_many(f"DELETE FROM {self._name} WHERE seq = ?", gone)

    def _append(self, transaction: Transaction, last: int) -> None:
        new = transaction.rows(
            f"SELECT seq, embedding FROM {self._table.name} WHERE {self._table.condition} AND seq > ? ORDER BY seq",
            (last,),
        )
        rows = ((seq, self._sql.encode(bytes(data))) for seq, data in new if any(data))
        transaction.run_many(self._sql.insert.format(name=self._name), rows)

    def _load_state(self, transaction: Transaction) -> IndexState:
        found = transaction.rows("SELECT value FROM settings WHERE name = ?", (self._name,))
        return IndexState(*(int(part) for part in found[0][0].split(":"))) if found else IndexState()

    def _now(self, transaction: Transaction) -> IndexState:
        return self._table.state(transaction)

    def nearest(self, transaction: Transaction, vector: bytes, top_k: int, condition: Where | None) -> list[Hit]:
        """Return the nearest rows, the best first."""
        if not any(vector) or not self._load_state(transaction).dimensions:
            return []
        allowed = self._table.allowed(condition) if condition is not None else Where("", ())
        limit = f"AND seq IN ({allowed.sql})" if condition is not None else ""
        sql = self._sql.search.format(name=self._name, top_k=int(top_k), condition=limit)
        found = transaction.rows(sql, (self._sql.encode(vector), *allowed.parameters))
        return [Hit(seq, score_of(1.0 - distance)) for seq, distance in found if distance is not None]
