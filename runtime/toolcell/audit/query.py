"""Query a log, and say of each run how far it can be trusted.

The index finds runs; what is shown of one is read from its records. Trust is decided from links and signatures.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from toolcell.audit.filters import NEWEST_FIRST, Filter, conditions
from toolcell.audit.format import read_log_id, segment_path
from toolcell.audit.indexing import Indexer, open_index
from toolcell.audit.keys import Verifier, by_id
from toolcell.audit.reader import (
    UNFINISHED,
    Damage,
    RecordedRun,
    RecordLocation,
    StoredRecord,
    assemble,
    jsonable,
    read_at,
)
from toolcell.audit.signatures import checkpoint_statement
from toolcell.errors import AuditError, UsageError

VERIFIED: Final = "verified"
"""A valid signature covers all records of the run."""
UNSIGNED: Final = "unsigned"
"""No signature covers its end yet: it was written just now, its writer was killed, or somebody else wrote it."""
UNVERIFIED: Final = "unverified"
"""It is signed with a key that was not given."""
BROKEN: Final = "broken"
"""Its records are not what was signed, or some are missing, or stand in another place."""

TRUSTS: Final = (VERIFIED, UNSIGNED, UNVERIFIED, BROKEN)

REDACTION_FIELDS: Final = ("seq", "parts", "by", "reason", "original")
"""What is shown of a record that says what was removed."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run in a list."""

    id: str
    """Unique in the log: as given when it was recorded, or chain:seq where several runs were recorded with one id."""
    chain: str
    seq: int
    kind: str
    started_ns: int
    ended_ns: int | None
    outcome: str
    sha256: str | None
    user: str
    session: str
    title: str
    """What the script says that it does, after `#`, or the first thing that it does."""
    calls: int
    failed: int
    wall_s: float | None
    cpu_s: float | None
    peak_memory_bytes: int | None
    trust: str
    """verified, unsigned, unverified or broken."""
    redacted: int = 0
    """Records of the run from which something was removed later."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {_COLUMN_OF.get(name, name): getattr(self, name) for name in self.__slots__}


_COLUMN_OF: Final = {"kind": "sort"}
"""Attribute to the name of its column and JSON key, where they differ."""

_COLUMNS: Final = (
    *(_COLUMN_OF.get(name, name) for name in RunSummary.__dataclass_fields__ if name not in ("trust", "redacted")),
    "stretch",
    "last_seq",
    "is_split",
)


_PLACE: Final = re.compile(r"([0-9a-f]{12}):([0-9]{1,18})")
"""Chain and seq of a run's first record. No other run can be there, whatever ids are recorded."""


class Index:
    """The index of one log. Use it in a `with` block and in one thread. `verifiers` are the keys that it trusts.

    With `in_memory` nothing is written anywhere; the whole log is read each time.
    """

    def __init__(self, directory: str | Path, verifiers: Iterable[Verifier] = (), *, in_memory: bool = False) -> None:
        self.directory = Path(directory)
        self._log = read_log_id(self.directory)
        self._verifiers = by_id(verifiers)
        self._db = open_index(self.directory, self._log, in_memory=in_memory)
        self._indexer = Indexer(self._db, self.directory)
        self._signed: dict[tuple[str, int], tuple[int, int, int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the index."""
        self._db.close()

    @property
    def verifiers(self) -> list[Verifier]:
        """The keys that it trusts."""
        return [*self._verifiers.values()]

    @property
    def damage(self) -> Damage:
        """Counts the records that could not be read."""
        return self._indexer.damage

    @property
    def changed(self) -> list[str]:
        """Chains that are no longer what they were when this user read the log before."""
        return [*self._indexer.changed]

    def rebuild(self) -> None:
        """Empty the index and read the whole log."""
        self._signed.clear()
        self._indexer.rebuild()

    def refresh(self) -> None:
        """Read what was added to the log since the last time, and again what was changed."""
        self._signed.clear()
        self._indexer.refresh()

    # Trust

    def _trust(self, chain: str, stretch: int, last_seq: int) -> str:
        """Return the trust in the records of a stretch up to one."""
        if (chain, stretch) not in self._signed:
            self._signed[chain, stretch] = self._check_signatures(chain, stretch)
        valid, forged, unchecked = self._signed[chain, stretch]
        if last_seq <= valid:
            return VERIFIED
        if last_seq <= forged:
            return BROKEN
        return UNVERIFIED if last_seq <= unchecked else UNSIGNED

    def _check_signatures(self, chain: str, stretch: int) -> tuple[int, int, int]:
        """Return the last seq with a valid signature, and of a forged one and one of an unknown key behind it."""
        forged = unchecked = 0
        rows = self._db.execute(
            "SELECT seq, at_ns, previous, reason, key, signature FROM signatures "
            "WHERE chain = ? AND stretch = ? ORDER BY seq DESC",
            (chain, stretch),
        )
        for seq, at_ns, previous_hash, reason, key, signature in rows:
            verifier = self._verifiers.get(key)
            if verifier is None:
                unchecked = max(unchecked, seq)
                continue
            statement = checkpoint_statement(self._log, chain, seq, at_ns, previous_hash, reason)
            if verifier.is_valid(statement, signature):
                return seq, forged, unchecked
            forged = max(forged, seq)
        return 0, forged, unchecked

    def _summary(self, row: tuple[Any, ...]) -> RunSummary:
        *shown, stretch, last_seq, is_split = row
        trust = BROKEN if is_split else self._trust(shown[1], stretch, last_seq)
        is_signed = trust in (VERIFIED, UNVERIFIED) and shown[6] != UNFINISHED
        if trust != BROKEN and not is_signed and self._is_followed(shown[1], stretch):
            trust = BROKEN  # what followed it was changed or removed
        redacted = self._db.execute(
            "SELECT seq, original, remains FROM redacted WHERE chain = ? AND run = ?", (shown[1], shown[2])
        ).fetchall()
        for each in redacted:
            trust = self._weaker(trust, self._trust_in_redaction(shown[1], *each))
        if self._is_id_shared(shown[0]):
            shown[0] = f"{shown[1]}:{shown[2]}"
        return RunSummary(*(*shown, trust, len(redacted)))

    def _is_id_shared(self, id: str) -> bool:
        """True when several runs were recorded under this id: then each is known by its place in the log."""
        return len(self._db.execute("SELECT 1 FROM runs WHERE id = ? LIMIT 2", (id,)).fetchall()) > 1

    @staticmethod
    def _weaker(one: str, other: str) -> str:
        return max(one, other, key=TRUSTS.index)

    def _trust_in_redaction(self, chain: str, seq: int, original: bytes, left: bytes) -> str:
        """Return the trust in the newest record that says this record was redacted; broken without one."""
        rows = self._db.execute(
            "SELECT chain, stretch, seq, original, remains FROM redactions WHERE target = ? AND target_seq = ? "
            "ORDER BY at_ns DESC",
            (chain, seq),
        )
        newest: dict[str, list[Any]] = {}
        for at_chain, stretch, at_seq, *said in rows.fetchall():
            newest.setdefault(self._trust(at_chain, stretch, at_seq), said)
        matching = [trust for trust in (VERIFIED, UNVERIFIED) if newest.get(trust) == [original, left]]
        return matching[0] if matching else BROKEN

    def _is_followed(self, chain: str, stretch: int) -> bool:
        later = "SELECT 1 FROM stretches WHERE chain = ? AND number > ?"
        return self._db.execute(later, (chain, stretch)).fetchone() is not None

    # Queries

    def select(self, query: str, values: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query of ours over the index's tables."""
        return self._db.execute(query, tuple(values)).fetchall()

    def runs(self, wanted: Filter | None = None) -> list[RunSummary]:
        """Return the runs that a filter selects, oldest first."""
        wanted = wanted or Filter()
        return list(itertools.islice(self._newest_first(wanted), wanted.limit))[::-1]

    def _newest_first(self, wanted: Filter) -> Iterator[RunSummary]:
        where, values = conditions(wanted)
        limit = f" LIMIT {int(wanted.limit)}" if wanted.limit is not None and wanted.trust is None else ""
        query = f"SELECT {', '.join(_COLUMNS)} FROM runs WHERE {where} ORDER BY {NEWEST_FIRST}{limit}"
        for row in self._db.execute(query, values).fetchall():
            summary = self._summary(row)
            if wanted.trust in (None, summary.trust):
                yield summary

    def count(self, wanted: Filter) -> int:
        """Return how many runs a filter selects, whatever its limit."""
        if wanted.trust is not None:
            return sum(1 for _ in self._newest_first(wanted))
        where, values = conditions(wanted)
        (count,) = self._db.execute(f"SELECT count(*) FROM runs WHERE {where}", values).fetchone()
        return int(count)

    def find(self, id: str, *, is_whole: bool = False) -> RunSummary:
        """Find a run by its id or the beginning of its id, or as chain:seq; `last` is the newest run.

        `is_whole`: take a whole id or a place alone. Who asks for others must not find their runs by trying.

        Raises:
            UsageError: no run has this id, or several do.
        """
        if id == "last" and not is_whole and (newest := self.runs(Filter(limit=1))):
            return newest[0]
        query = f"SELECT {', '.join(_COLUMNS)} FROM runs WHERE "
        place = _PLACE.fullmatch(id)
        exact = self._db.execute(f"{query} chain = ? AND seq = ?", place.groups()).fetchall() if place else []
        exact = exact or self._db.execute(f"{query} id = ? ORDER BY started_ns", (id,)).fetchall()
        found = exact
        if not exact and not is_whole:
            found = self._db.execute(f"{query} substr(id, 1, ?) = ?", (len(id), id)).fetchmany(10)
        if not found or not id:
            raise UsageError(f"no run {id!r} in {self.directory}; `toolcell audit list {self.directory}` shows them")
        summaries = [self._summary(row) for row in found]
        if len(exact) > 1:  # anybody who can write there can add a run with an id that is taken
            best = min(TRUSTS.index(each.trust) for each in summaries)
            summaries = [each for each in summaries if each.trust == TRUSTS[best]]
        if len(summaries) > 1:
            named = ", ".join(f"{run.id} ({run.trust})" for run in summaries[:10])
            raise UsageError(f"several runs {'have the id' if exact else 'begin with'} {id!r}: {named}")
        return summaries[0]

    def load(self, summary: RunSummary) -> RecordedRun:
        """Read everything recorded of a run.

        Raises:
            AuditError: its first record cannot be read.
        """
        found = self.records_of(summary)
        shared = {}
        for digest in shared_digests(found):
            stored = self.shared_record(summary, digest)
            shared[digest] = stored.record.fields if stored is not None else {}
        run = assemble(found, shared)
        if run is None:
            raise AuditError(f"the first record of run {summary.id} cannot be read; run `toolcell audit verify`")
        return replace(run, id=summary.id)

    def records_of(self, summary: RunSummary) -> list[StoredRecord]:
        """Return the records of a run, in order."""
        query = "SELECT segment, offset, hash FROM places WHERE chain = ? AND run = ? ORDER BY segment, offset"
        rows = self._db.execute(query, (summary.chain, summary.seq)).fetchall()
        return [read_at(self.directory, RecordLocation(summary.chain, *place), digest) for *place, digest in rows]

    def redactions_of(self, summary: RunSummary) -> list[dict[str, Any]]:
        """Return as plain data who removed what of a run, and when: `at_ns` and `REDACTION_FIELDS`."""
        return [
            {"at_ns": each.record.at_ns, **jsonable({name: each.record.fields[name] for name in REDACTION_FIELDS})}
            for each in self.redaction_records(summary)
        ]

    def redaction_records(self, summary: RunSummary) -> list[StoredRecord]:
        """Return the records of redactions of a run, oldest first: who removed what, and when. One for each record."""
        rows = self._db.execute(
            "SELECT redactions.chain, segment, offset, hash, stretch, redactions.seq FROM redactions "
            "JOIN redacted ON target = redacted.chain AND target_seq = redacted.seq "
            "AND redactions.original = redacted.original AND redactions.remains = redacted.remains "
            "WHERE redacted.chain = ? AND run = ? ORDER BY at_ns",
            (summary.chain, summary.seq),
        ).fetchall()
        return [
            read_at(self.directory, RecordLocation(*place), digest)
            for *place, digest, stretch, seq in rows
            if self._trust(place[0], stretch, seq) in (VERIFIED, UNVERIFIED)
        ]

    def shared_record(self, summary: RunSummary, digest: str) -> StoredRecord | None:
        """Return the record of the settings or tools with this digest that a run was recorded with.

        None when it was pruned, or can be trusted less than the run.
        """
        rows = self._db.execute(
            "SELECT segment, offset, hash, common.stretch, common.seq FROM common "
            "JOIN runs ON runs.chain = common.chain AND runs.seq = ? "
            "WHERE common.chain = ? AND digest = ? ORDER BY common.seq > runs.seq, abs(common.seq - runs.seq)",
            (summary.seq, summary.chain, digest.encode("utf-8", "backslashreplace").decode()),
        )
        for segment, offset, record_hash, stretch, seq in rows.fetchall():
            is_weaker = summary.trust == VERIFIED and self._trust(summary.chain, stretch, seq) != VERIFIED
            if not is_weaker and segment_path(self.directory / summary.chain, segment).exists():
                return read_at(self.directory, RecordLocation(summary.chain, segment, offset), record_hash)
        return None

    def stats(self, wanted: Filter | None = None) -> dict[str, Any]:
        """Shape: {"runs", "trust", "outcomes", "days": {name: n}, "tools": [...], "wall_s", "cpu_s", "scripts"}."""
        where, values = conditions(wanted or Filter())
        chosen = f"FROM runs WHERE {where}"
        total, wall_s, cpu_s, scripts = self._db.execute(
            f"SELECT count(*), total(wall_s), total(cpu_s), count(DISTINCT sha256) {chosen}", values
        ).fetchone()
        outcomes = dict(self._db.execute(f"SELECT outcome, count(*) {chosen} GROUP BY outcome ORDER BY 2 DESC", values))
        trusts = Counter(
            self._summary(row).trust
            for row in self._db.execute(f"SELECT {', '.join(_COLUMNS)} {chosen}", values).fetchall()
        )
        day = "coalesce(date(started_ns / 1000000000, 'unixepoch'), '?')"
        days = dict(self._db.execute(f"SELECT {day}, count(*) {chosen} GROUP BY 1 ORDER BY 1", values))
        rows = self._db.execute(
            f"SELECT tool, status, duration_us FROM calls JOIN (SELECT chain AS c, seq AS s {chosen}) "
            "ON chain = c AND run = s ORDER BY tool, duration_us",
            values,
        )
        return {
            "runs": total,
            "scripts": scripts,
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "trust": {name: trusts[name] for name in TRUSTS if trusts[name]},
            "outcomes": outcomes,
            "days": days,
            "tools": tool_table(rows),
        }


def shared_digests(found: list[StoredRecord]) -> list[str]:
    """Return the digests of the settings and tools that a run's first record names."""
    fields = found[0].record.fields if found else {}
    return [digest for name in ("terms", "tools") if (digest := fields.get(name))]


def tool_table(rows: Iterable[tuple[str, str, int | None]]) -> list[dict[str, Any]]:
    """Count the calls of each tool: how many, how many failed, and how long they took.

    Shape: [{"tool", "calls", "failed", "p50_ms", "p95_ms", "total_s"}], most called first."""
    by_tool: dict[str, list[tuple[str, int | None]]] = {}
    for tool, status, duration_us in rows:
        by_tool.setdefault(tool, []).append((status, duration_us))
    table = []
    for tool, calls in by_tool.items():
        durations = [each for _, each in calls if each is not None] or [0]
        table.append(
            {
                "tool": tool,
                "calls": len(calls),
                "failed": sum(status not in ("ok", "pending") for status, _ in calls),
                "p50_ms": durations[len(durations) // 2] / 1000,
                "p95_ms": durations[min(len(durations) - 1, len(durations) * 95 // 100)] / 1000,
                "total_s": sum(durations) / 1e6,
            }
        )
    return sorted(table, key=lambda row: (-row["calls"], row["tool"]))
