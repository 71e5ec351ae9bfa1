"""Retention: which events of a record are no longer kept, decided from signed events and never from a file's time.

A signed checkpoint stands for what was removed from the beginning of a chain, so the rest still verifies. What does not
verify is not removed: nobody without the key can make a record forget.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from toolcell.audit import records, signatures, store
from toolcell.audit.chain_check import ChainCheck
from toolcell.audit.config import RecordConfig
from toolcell.audit.keys import Verifier, by_id
from toolcell.audit.signatures import Head
from toolcell.audit.verification import check_chains

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

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"chain": self.chain, "events": self.count, "last_seq": self.seq, "newest_ns": self.newest_ns,
                "reason": self.reason}  # fmt: skip


def removals(path: Path, config: RecordConfig, keys: Iterable[Verifier]) -> list[Removal]:
    """Return what pruning with these settings would do to each chain. Removes nothing.

    Raises:
        AuditError: there is no record, or it cannot be read.
    """
    with closing(store.open_read_only(path)) as db, store.translated(path):
        db.execute("BEGIN")
        return list(plan(db, config, keys, time.time_ns()))


def plan(db: sqlite3.Connection, config: RecordConfig, keys: Iterable[Verifier], now_ns: int) -> Iterator[Removal]:
    """Yield what would go of each chain, and why the others stay whole. Removes nothing."""
    before_ns = now_ns - round(config.keep_s * 1e9) if config.keep_s is not None else -1
    last_id = _last_id_too_many(db, config.keep_bytes)
    log = store.record_id(db)
    for check in check_chains(db, log, by_id(keys)):
        if check.chain and check.first_seq <= check.seq:
            yield _removal(db, check, before_ns, last_id, now_ns)


def _last_id_too_many(db: sqlite3.Connection, keep_bytes: int | None) -> int:
    """Return the id of the newest event that is behind the bytes that are kept; 0 when all of them fit."""
    if keep_bytes is None:
        return 0
    total = 0
    for id, size in db.execute("SELECT id, length(body) FROM event ORDER BY id DESC"):
        total += size + OVERHEAD_BYTES
        if total > keep_bytes:
            return int(id)
    return 0


def _removal(db: sqlite3.Connection, check: ChainCheck, before_ns: int, last_id: int, now_ns: int) -> Removal:
    def stays(why: str) -> Removal:
        return Removal(check.chain, 0, check.first_seq - 1, b"", 0, why)

    if check.findings:
        return stays(f"it does not verify: {check.findings[0].message}")
    rows = db.execute("SELECT id, n, run, kind, at, hash FROM event WHERE writer = ? ORDER BY n", (check.chain,))
    found = rows.fetchall()
    open_runs: set[int] = set()
    ended = {run for _, _, run, kind, _, _ in found if kind == records.RUN_ENDED}
    last_of = {run: n for _, n, run, _, _, _ in found if run}
    is_given_up = before_ns >= 0 and found[-1][4] < before_ns - GIVEN_UP_NS
    best: tuple[int, bytes, int] | None = None
    why = "its oldest event is young enough"
    for id, n, run, kind, at_ns, record_hash in found:
        is_old, is_too_much = at_ns < before_ns, id <= last_id
        if not (is_old or is_too_much):
            break
        if n > check.signed_seq:
            why = "its newest events are not signed yet"
            break
        if kind == records.RUN_STARTED:
            open_runs.add(run)
        if run and run in open_runs and last_of[run] == n and (run in ended or is_given_up):
            open_runs.discard(run)
        if not open_runs:
            best = (n, record_hash, at_ns)
        else:
            why = f"run {check.chain}:{min(open_runs)} is under way, or has newer events"
    if best is None:
        return stays(why)
    n, record_hash, at_ns = best
    reason = "age" if at_ns < before_ns else "size"
    return Removal(check.chain, n - check.first_seq + 1, n, record_hash, at_ns, reason, is_whole=n == check.seq)


def remove(db: sqlite3.Connection, removal: Removal, head: Head) -> None:
    """Remove the events, and put the signed checkpoint that stands for them. Inside a transaction."""
    gone = (removal.chain, removal.seq)
    db.execute("DELETE FROM event WHERE writer = ? AND n <= ?", gone)
    db.execute("DELETE FROM run WHERE writer = ? AND n <= ?", gone)
    db.execute("DELETE FROM call WHERE writer = ? AND run <= ?", gone)
    db.execute("DELETE FROM request WHERE writer = ? AND run <= ?", gone)
    db.execute("DELETE FROM checkpoint WHERE writer = ? AND n <= ?", gone)
    db.execute(signatures.INSERT_CHECKPOINT, signatures.checkpoint_row(head))


def remove_blobs(db: sqlite3.Connection, now_ns: int) -> None:
    """Remove the blobs that were last used before the oldest run that is left."""
    oldest = db.execute("SELECT min(started) FROM run").fetchone()[0]
    before_ns = now_ns if oldest is None else oldest
    db.execute("DELETE FROM blob WHERE used < ?", (before_ns - 2 * 3600 * 10**9,))
