"""Retention: which events of a record are no longer kept, decided from signed events and never from a file's time.

A signed checkpoint stands for what was removed from the beginning of a chain, so the rest still verifies. What does not
verify is not removed: nobody without the key can make a record forget.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Final

from toolcell.audit import records, signatures, store
from toolcell.audit.chain_check import ChainCheck, by_seq
from toolcell.audit.config import RecordConfig
from toolcell.audit.databases import Place, database_of
from toolcell.audit.keys import Verifier, by_id
from toolcell.audit.signatures import CHECKPOINT_COLUMNS, PRUNED, Head, head_of
from toolcell.audit.verification import check_events

OVERHEAD_BYTES: Final = 200
"""Of an event, besides its body: hashes, numbers and entries of indices."""
GIVEN_UP_NS: Final = 24 * 3600 * 10**9
"""A run without an end is kept this long after the last event of its chain: its writer may be waiting for a tool."""


@dataclass(frozen=True, slots=True)
class Removal:
    """What retention does to one chain."""

    chain: str
    count: int
    """Events that go; 0 when all stay."""
    seq: int
    """Number of the last event that goes."""
    record_hash: bytes
    """Hash of the same event."""
    newest_ns: int
    """When it was written."""
    reason: str
    """age, size, or why no more goes."""
    is_whole: bool = False
    """Nothing is left of the chain."""

    def after(self, earlier: Removal) -> Removal:
        """Return both together."""
        return replace(self, count=earlier.count + self.count, reason=earlier.reason)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"chain": self.chain, "events": self.count, "last_seq": self.seq, "newest_ns": self.newest_ns,
                "reason": self.reason}  # fmt: skip


def removals(path: Place, config: RecordConfig, keys: Iterable[Verifier], most: int | None = None) -> list[Removal]:
    """Return what pruning with these settings would do to each chain. Removes nothing.

    `most`: after so many events of a chain, the end of a run is far enough.

    Raises:
        AuditError: there is no record, or it cannot be read.
    """
    database, known = database_of(path), by_id(keys)
    before_ns = time.time_ns() - round(config.keep_s * 1e9) if config.keep_s is not None else -1
    with closing(database.open_read_only()) as db, database.translated():
        db.execute("BEGIN")
        is_too_much = config.keep_bytes is not None and database.most_bytes(db) * 2 >= config.keep_bytes
        last_id = _last_id_too_many(db, config.keep_bytes) if is_too_much else 0
        found = [_removal(db, chain, before_ns, last_id, most) for chain in _chains(db)]
        return [_checked(db, removal, known) if removal.count else removal for removal in found]


def _chains(db: store.Connection) -> list[str]:
    """Return the chains of which events are there, oldest first. Looks at one event of each."""
    names = db.execute(
        "WITH RECURSIVE chain (writer) AS (SELECT min(writer) FROM event WHERE typeof(writer) = 'text' "
        "UNION ALL SELECT (SELECT min(writer) FROM event WHERE writer > chain.writer) FROM chain "
        "WHERE writer IS NOT NULL) SELECT writer FROM chain WHERE typeof(writer) = 'text' "
        "ORDER BY (SELECT id FROM event WHERE event.writer = chain.writer ORDER BY n LIMIT 1)"
    )
    return [name for (name,) in names]


def _last_id_too_many(db: store.Connection, keep_bytes: int | None) -> int:
    """Return the id of the newest event that is behind the bytes that are kept; 0 when all of them fit."""
    found = db.execute(
        "SELECT id FROM (SELECT id, sum(length(body) + ?) OVER (ORDER BY id DESC) AS total FROM event) "
        "AS sized WHERE total > ? ORDER BY id DESC LIMIT 1",
        (OVERHEAD_BYTES, keep_bytes),
    ).fetchone()
    return 0 if found is None else int(found[0])


def _removal(db: store.Connection, chain: str, before_ns: int, last_id: int, most: int | None) -> Removal:
    """Return what is old or too much, from the first event to one where no run is under way."""
    first_n, last_n = db.execute("SELECT min(n), max(n) FROM event WHERE writer = ?", (chain,)).fetchone()
    last_ns = db.execute("SELECT at FROM event WHERE writer = ? AND n = ?", (chain, last_n)).fetchone()[0]
    is_given_up = before_ns >= 0 and last_ns < before_ns - GIVEN_UP_NS
    open_until: dict[int, int] = {}
    best: tuple[int, bytes, int] | None = None
    why = "its oldest event is young enough"
    rows = db.execute("SELECT id, n, run, at, hash FROM event WHERE writer = ? ORDER BY n", (chain,))
    for id, n, run, at_ns, record_hash in rows:
        if not (at_ns < before_ns or id <= last_id):
            break
        if run and run not in open_until:
            last_of, ended = db.execute(
                "SELECT max(n), count(*) FILTER (WHERE kind = ?) FROM event WHERE writer = ? AND run = ?",
                (records.RUN_ENDED, chain, run),
            ).fetchone()
            if not ended and not is_given_up:
                why = f"run {chain}:{run} is under way"
                break
            open_until[run] = last_of
        if open_until.get(run) == n:
            del open_until[run]
        if not open_until:
            best = (n, record_hash, at_ns)
            if most is not None and n - first_n + 1 >= most:
                break
        else:
            why = f"run {chain}:{min(open_until)} has newer events"
    if best is None:
        return Removal(chain, 0, first_n - 1, b"", 0, why)
    n, record_hash, at_ns = best
    reason = "age" if at_ns < before_ns else "size"
    return Removal(chain, n - first_n + 1, n, record_hash, at_ns, reason, is_whole=n == last_n)


def _checked(db: store.Connection, removal: Removal, keys: Mapping[str, Verifier]) -> Removal:
    """Return it, or that nothing goes: what goes must verify, up to the signature that covers it."""

    def stays(why: str) -> Removal:
        return replace(removal, count=0, seq=removal.seq - removal.count, record_hash=b"", newest_ns=0, reason=why)

    rows = db.execute(f"SELECT {CHECKPOINT_COLUMNS} FROM checkpoint WHERE writer = ?", (removal.chain,))
    heads = [head for row in rows if (head := head_of(store.record_id(db), row)) is not None]
    covering = [head.seq for head in heads if head.seq >= removal.seq and head.key in keys and head.reason != PRUNED]
    if not covering:
        return stays("its newest events are not signed yet, or with a key that is not given")
    check = ChainCheck(removal.chain, keys, by_seq(heads))
    check_events(db, check, upto=min(covering))
    return stays(f"it does not verify: {check.findings[0].message}") if check.findings else removal


def remove(db: store.Connection, removal: Removal, head: Head) -> None:
    """Remove the events, and put the signed checkpoint that stands for them. Inside a transaction."""
    gone = (removal.chain, removal.seq)
    db.execute("DELETE FROM event WHERE writer = ? AND n <= ?", gone)
    db.execute("DELETE FROM run WHERE writer = ? AND n <= ?", gone)
    db.execute("DELETE FROM call WHERE writer = ? AND run <= ?", gone)
    db.execute("DELETE FROM request WHERE writer = ? AND run <= ?", gone)
    db.execute("DELETE FROM checkpoint WHERE writer = ? AND n <= ?", gone)
    db.execute(signatures.INSERT_CHECKPOINT, signatures.checkpoint_row(head))


def remove_blobs(db: store.Connection, now_ns: int) -> None:
    """Remove the blobs that were last used before the oldest run that is left."""
    oldest = db.execute("SELECT min(started) FROM run").fetchone()[0]
    before_ns = now_ns if oldest is None else oldest
    db.execute("DELETE FROM blob WHERE used < ?", (before_ns - 2 * 3600 * 10**9,))
