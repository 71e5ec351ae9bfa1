"""Search by vectors over a table of a database: all vectors in memory, compared one and all with numpy.

Rows of the table have a `seq` that only grows. Two numbers tell whether the memory is up to date: the last `seq`, and
how often rows were deleted. So every process finds at once what another one has stored and deleted.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from toolcell.builtin.stores.database import Transaction
from toolcell.builtin.stores.filters import Where
from toolcell.support.embeddings import score_of
from toolcell.support.lazy import needed


class Hit(NamedTuple):
    seq: int
    score: float


class IndexState(NamedTuple):
    """How far an index has followed its table."""

    last: int = 0
    deletions: int = 0


class VectorTable(NamedTuple):
    """A table whose rows have vectors."""

    name: str
    condition: str
    """Which rows are searched."""
    select: str
    """All `seq`s that a filter allows, up to its condition. Empty when the table has no filters."""

    def state(self, transaction: Transaction) -> IndexState:
        deletions = "SELECT coalesce(max(CAST(value AS INTEGER)), 0) FROM settings WHERE name = ?"
        sql = f"SELECT (SELECT coalesce(max(seq), 0) FROM {self.name}), ({deletions})"
        return IndexState(*transaction.rows(sql, (f"{self.name}.deletions",))[0])

    def allowed(self, condition: Where) -> Where:
        """Return a query for the `seq`s that a filter allows."""
        return Where(f"{self.select} AND {condition.sql}", condition.parameters)


CHUNKS = VectorTable(
    "chunks",
    "is_parent = 0 AND embedding IS NOT NULL",
    "SELECT c.seq FROM chunks c JOIN documents d ON d.id = c.document_id WHERE c.is_parent = 0",
)
MESSAGES = VectorTable("messages", "embedding IS NOT NULL", "")


class VectorIndex:
    """Finds the rows of one table whose vectors are nearest. It follows the table when it searches.

    Units: 4 bytes for each number of each vector: 100 MB for 100,000 vectors of 256.
    """

    def __init__(self, table: VectorTable) -> None:
        self._table = table
        self._lock = threading.Lock()
        self._state = IndexState()
        self._seqs: Any = None
        self._unit: Any = None
        """The vectors, each divided by its length. Arrays are replaced, never changed: a search may go on with one."""

    def nearest(self, transaction: Transaction, vector: bytes, top_k: int, condition: Where | None) -> list[Hit]:
        numpy = needed("numpy", "search by vectors")
        with self._lock:
            self._follow(numpy, transaction)
            seqs, unit = self._seqs, self._unit
        query = numpy.frombuffer(vector, dtype="<f4")
        length = float(numpy.linalg.norm(query))
        if unit is None or not length:
            return []
        scores = unit @ (query / length)
        if condition is not None:
            allowed = self._table.allowed(condition)
            is_allowed = numpy.isin(seqs, [row[0] for row in transaction.rows(allowed.sql, allowed.parameters)])
            scores, seqs = scores[is_allowed], seqs[is_allowed]
        if top_k < len(scores):
            best = numpy.argpartition(-scores, top_k - 1)[:top_k]
            scores, seqs = scores[best], seqs[best]
        order = numpy.lexsort((seqs, -scores))
        return [Hit(int(seqs[at]), score_of(float(scores[at]))) for at in order]

    def _follow(self, numpy: Any, transaction: Transaction) -> None:
        """Take in what the table has had since; nothing when another thread's later transaction was here before."""
        state, known = self._table.state(transaction), self._state
        if state.deletions > known.deletions and self._unit is not None:
            kept = transaction.rows(f"SELECT seq FROM {self._table.name} WHERE {self._table.condition}")
            is_kept = numpy.isin(self._seqs, [row[0] for row in kept])
            self._seqs, self._unit = self._seqs[is_kept], self._unit[is_kept]
        if state.last > known.last:
            self._append(numpy, transaction, known.last)
        self._state = IndexState(*map(max, state, known))

    def _append(self, numpy: Any, transaction: Transaction, last: int) -> None:
        table = self._table
        sql = f"SELECT seq, embedding FROM {table.name} WHERE {table.condition} AND seq > ? ORDER BY seq"
        if not (found := transaction.rows(sql, (last,))):
            return
        new = numpy.frombuffer(b"".join(bytes(row[1]) for row in found), dtype="<f4").reshape(len(found), -1)
        lengths = numpy.linalg.norm(new, axis=1)
        is_used = lengths > 0  # a vector of zeros has no direction
        seqs = numpy.array([row[0] for row in found], dtype="i8")[is_used]
        unit = new[is_used] / lengths[is_used, None]
        if self._unit is not None:
            seqs, unit = numpy.concatenate([self._seqs, seqs]), numpy.concatenate([self._unit, unit])
        self._seqs, self._unit = seqs, unit
