"""Query a record, and say of each run how far it can be trusted.

The tables of runs and calls find runs; what is shown of one is read from its events, and trust is decided from their
hashes and signatures.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Final, Self

from toolcell.audit import events, records, store
from toolcell.audit.databases import Place, database_of
from toolcell.audit.filters import NEWEST_FIRST, Filter, conditions
from toolcell.audit.keys import Verifier, by_id
from toolcell.audit.reader import LinkedRun, RecordedRun, assemble
from toolcell.audit.records import StoredEvent, hash_digest
from toolcell.audit.shapes import BLOB_SHAPES
from toolcell.audit.signatures import CHECKPOINT_COLUMNS, PRUNED, Head, head_of
from toolcell.audit.store import ABORTED
from toolcell.errors import AuditError, BadInput, StoreError, UsageError
from toolcell.results import UNFINISHED, Outcome, standing_of
from toolcell.support.packing import bytes_digest, unpack
from toolcell.support.sqlite import check_files_beside, check_folder


class Trust(StrEnum):
    """Whether the events of a run are what was signed; from the best to the worst."""

    VERIFIED = "verified"
    """A valid signature covers all events of the run."""
    UNSIGNED = "unsigned"
    """No signature covers its end yet: it was written just now, its writer was killed, or somebody else wrote it."""
    UNVERIFIED = "unverified"
    """It is signed with a key that was not given."""
    BROKEN = "broken"
    """Its events are not what was signed, or some are missing, or stand in another place."""

    @property
    def text(self) -> str:
        """What it means, for people."""
        return TRUST_TEXTS[self]


TRUST_TEXTS: Final[Mapping[Trust, str]] = {
    Trust.VERIFIED: "A valid signature covers all records of this run.",
    Trust.UNSIGNED: "No signature covers the end of this run yet.",
    Trust.UNVERIFIED: "The key that signed this run was not given, so nothing was checked.",
    Trust.BROKEN: "The records of this run are not what was signed.",
}


MAX_FAMILY: Final = 100
"""Runs that go on from each other, of which a list is made."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run in a list."""

    OUTCOMES: ClassVar = (*map(str, Outcome), ABORTED, UNFINISHED)
    """All that a run may have."""

    id: str
    """Unique in the record: as given, or chain:seq where several runs were recorded with one id."""
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
    relation: str | None
    """How it goes on from another run: resumes, repairs, commits, reverts or repeats."""
    parent: str | None
    """Id of that run."""
    decided_by: str | None
    """Who had it go on."""
    trust: str
    """verified, unsigned, unverified or broken."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {_JSON_KEYS.get(name, name): getattr(self, name) for name in self.__slots__}


_JSON_KEYS: Final = {"kind": "sort"}
_COLUMNS: Final = (
    "id, writer, n, kind, started, ended, outcome, sha256, user, session, title, calls, failed, wall_s, cpu_s, "
    "peak_memory_bytes, relation, parent, decided_by"
)

_TYPES: Final[dict[str, tuple[type, Any]]] = dict.fromkeys(_COLUMNS.split(", "), (str, "")) | {
    "n": (int, 0), "started": (int, 0), "ended": (int, None), "sha256": (str, None), "calls": (int, 0),
    "failed": (int, 0), "wall_s": (float, None), "cpu_s": (float, None), "peak_memory_bytes": (int, None),
    "relation": (str, None), "parent": (str, None), "decided_by": (str, None),
}  # fmt: skip
"""Column to its type, and what is shown where another program put something else there."""

_PLACE: Final = re.compile(r"([0-9a-f]{12}):([0-9]{1,18})")
"""Chain and seq of a run's first event. No other run can be there, whatever ids are recorded."""


class Index:
    """Reads one record. Use it in a `with` block and in one thread. `verifiers` are the keys that it trusts."""

    def __init__(self, path: Place, verifiers: Iterable[Verifier] = ()) -> None:
        self._database = database_of(path)
        self.place = self._database.place
        """Names the record in messages."""
        self._verifiers = by_id(verifiers)
        self._db = self._database.open_read_only()
        with self._database.translated():
            self.log = store.record_id(self._db)
            """Id of the record."""
        self._walked: dict[str, tuple[int, int]] = {}
        """Chain to the last stretch of events that were found to be what was signed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the record."""
        self._db.close()

    def copy_to(self, path: Path) -> None:
        """Copy the whole record to a new SQLite file that only its owner may read, also while others write to it.

        Raises:
            BadInput: the file exists or cannot be written, or others may put files beside it.
            AuditError: the record is damaged, or another process keeps it locked.
        """
        try:
            check_folder(path.absolute())
            check_files_beside(path)
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except (StoreError, OSError) as exc:
            why = exc.strerror if isinstance(exc, OSError) and exc.strerror else exc
            raise BadInput(f"cannot write {path}: {why}") from exc
        try:
            with self._database.translated("copy"), closing(sqlite3.connect(path)) as copy:
                self._database.copy_to(self._db, copy)
        except BaseException:
            path.unlink()
            raise

    def state(self) -> object:
        """Return what differs once somebody has written to the record."""
        with self._database.translated():
            return self._database.state(self._db)

    def refresh(self) -> None:
        """Look at every event again: whoever can write the file may have changed one."""
        self._walked.clear()

    # Trust

    def _trust(self, chain: str, first: int, last: int) -> str:
        walked = self._walked.get(chain)
        if walked is not None and walked[0] <= first and last <= walked[1]:
            return Trust.VERIFIED
        rows = self._db.execute(
            f"SELECT {CHECKPOINT_COLUMNS} FROM checkpoint WHERE writer = ? AND n >= ? AND reason != ? ORDER BY n",
            (chain, last, PRUNED),
        )
        unknown: Head | None = None
        for row in rows:
            head = head_of(self.log, row)
            verifier = self._verifiers.get(head.key) if head is not None else None
            if head is None or (verifier is not None and not head.is_signed_by(verifier)):
                return Trust.BROKEN
            if verifier is None:
                unknown = unknown or head
                continue
            if not self._is_linked(chain, first, head):
                return Trust.BROKEN
            self._walked[chain] = (first, head.seq)
            return Trust.VERIFIED
        if unknown is not None:
            return Trust.UNVERIFIED if self._is_linked(chain, first, unknown) else Trust.BROKEN
        return Trust.UNSIGNED if self._is_linked(chain, first, None) else Trust.BROKEN

    def _is_linked(self, chain: str, first: int, head: Head | None) -> bool:
        """True when each event from one on names the one before it, up to that of a head or to the last."""
        values: tuple[Any, ...] = (chain, first)
        upto = ""
        if head is not None:
            upto, values = "AND n <= ?", (*values, head.seq)
        query = f"SELECT {store.EVENT_COLUMNS} FROM event WHERE writer = ? AND n >= ? {upto} ORDER BY n"
        last: StoredEvent | None = None
        try:
            for row in self._db.execute(query, values):
                event = records.event_of(row)
                expected = (last.seq + 1, last.record_hash) if last is not None else (first, event.previous_hash)
                own = hash_digest(event.previous_hash, event.run, event.digest)
                if (event.seq, event.previous_hash) != expected or own != event.record_hash:
                    return False
                last = event
        except ValueError:
            return False
        if last is None:
            return False
        return head is None or (last.seq, last.record_hash) == (head.seq, head.record_hash)

    def _summary(self, row: tuple[Any, ...]) -> RunSummary:
        """Return what the events of a run say: the row of the table only found it."""
        _, chain, seq, *_ = row
        last = self._db.execute("SELECT min(n), max(n), count(*) FROM event WHERE writer = ? AND run = ?", (chain, seq))
        first_n, last_n, count = last.fetchone()
        if first_n != seq or not count:
            return RunSummary(*(*_typed(row), Trust.BROKEN))
        trust = self._trust(chain, seq, last_n)
        try:
            row, is_same = self._told(row, chain, seq, last_n)
        except ValueError:
            row, is_same = _typed(row), False
        if not is_same:
            trust = Trust.BROKEN
        id = row[0]
        if len(self._db.execute("SELECT 1 FROM run WHERE id = ? LIMIT 2", (id,)).fetchall()) > 1:
            id = f"{chain}:{seq}"
        return RunSummary(*(id, *row[1:], trust))

    def _told(self, row: tuple[Any, ...], chain: str, seq: int, last_n: int) -> tuple[tuple[Any, ...], bool]:
        """Return the row as the first and last event say it is, and whether the table says the same."""
        found = store.events(self._db, "writer = ? AND n IN (?, ?)", chain, seq, last_n)
        changes = [
            change
            for event in found
            if event.kind in (records.RUN_STARTED, records.RUN_ENDED)
            for change in store.rows_of(chain, event.run, event.kind, event.at_ns, [*event.fields.values()])
        ]
        told = store.told_run(changes)
        if told["outcome"] == UNFINISHED:  # the calls of a run under way are counted in the table alone
            calls = self._db.execute(
                "SELECT count(*), count(*) FILTER (WHERE status NOT IN ('ok', 'pending', ?)) FROM call "
                "WHERE writer = ? AND run = ?",
                (UNFINISHED, chain, seq),
            ).fetchone()
            told |= {"calls": calls[0], "failed": calls[1]}
            row = (*row[:11], calls[0], calls[1], *row[13:])
        said = tuple(told[name] for name in _COLUMNS.split(", "))
        return said, said == row

    # Queries

    def select(self, query: str, values: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query of ours over `run`, `call`, `plain_run` and `plain_call`."""
        with self._database.translated():
            found: list[tuple[Any, ...]] = self._db.execute(query, tuple(values)).fetchall()
        return found

    def runs(self, wanted: Filter | None = None) -> list[RunSummary]:
        """Return the runs that a filter selects, oldest first."""
        wanted = wanted or Filter()
        where, values = conditions(wanted)
        limit = f" LIMIT {int(wanted.limit)}" if wanted.limit is not None and wanted.trust is None else ""
        with self._database.translated():
            rows = self._db.execute(f"SELECT {_COLUMNS} FROM run WHERE {where} ORDER BY {NEWEST_FIRST}{limit}", values)
            if wanted.trust is None:
                return [self._summary(row) for row in reversed(rows.fetchall())]
            found = (summary for row in rows if (summary := self._summary(row)).trust == wanted.trust)
            return [*islice(found, wanted.limit)][::-1]

    def count(self, wanted: Filter) -> int:
        """Return how many runs a filter selects, whatever its limit."""
        if wanted.trust is not None:
            return len(self.runs(replace(wanted, limit=None)))
        where, values = conditions(wanted)
        return int(self.select(f"SELECT count(*) FROM run WHERE {where}", values)[0][0])

    def find(self, id: str, *, is_whole: bool = False) -> RunSummary:
        """Find a run by its id or the beginning of its id, or as chain:seq; `last` is the newest run.

        `is_whole`: take a whole id or a place alone. Who asks for others must not find their runs by trying.

        Raises:
            UsageError: no run has this id, or several do.
        """
        if id == "last" and not is_whole and (newest := self.runs(Filter(limit=1))):
            return newest[0]
        query = f"SELECT {_COLUMNS} FROM run WHERE "
        place = _PLACE.fullmatch(id)
        exact = self.select(f"{query} writer = ? AND n = ?", place.groups()) if place else []
        exact = exact or self.select(f"{query} id = ? ORDER BY started", (store.storable(id),))
        found = exact
        if not exact and not is_whole:
            found = self.select(f"{query} substr(id, 1, ?) = ? LIMIT 10", (len(id), store.storable(id)))
        if not found or not id:
            raise UsageError(f"no run {id!r} in {self.place}; `toolcell audit list {self.place}` shows them")
        with self._database.translated():
            summaries = [self._summary(row) for row in found]
        if len(exact) > 1:  # anybody who can write there can add a run with an id that is taken
            best = min([*Trust].index(Trust(each.trust)) for each in summaries)
            summaries = [each for each in summaries if each.trust == [*Trust][best]]
        if len(summaries) > 1:
            named = ", ".join(f"{run.id} ({run.trust})" for run in summaries[:10])
            raise UsageError(f"several runs {'have the id' if exact else 'begin with'} {id!r}: {named}")
        return summaries[0]

    def load(self, summary: RunSummary) -> RecordedRun:
        """Read everything recorded of a run.

        Raises:
            AuditError: its first event cannot be read.
        """
        with readable(summary):
            found = self.events_of(summary)
            run = assemble(found, {digest: self._shared(name, digest) for name, digest in shared_digests(found)})
        if run is None:
            raise AuditError(f"the first event of run {summary.id} cannot be read; run `toolcell audit verify`")
        return replace(run, id=summary.id, family=self.family(summary))

    def event_lines(self, summary: RunSummary, shape: events.Shape = "jsonl") -> Iterator[str]:
        """Yield a run as lines of JSON for another system: its start, each call, and its end if there is one. A run
        that cannot be read has one line that says so."""
        try:
            run = self.load(summary)
        except AuditError as exc:
            yield events.unreadable_line(summary.id, summary.chain, summary.seq, summary.started_ns, str(exc))
        else:
            yield from events.event_lines(run, summary.title, summary.trust, shape)

    def family(self, summary: RunSummary) -> tuple[LinkedRun, ...]:
        """Return the runs that go on from each other, this one among them, the oldest first; none if it is alone."""
        columns = "id, writer, n, started, outcome, user, relation, parent, decided_by"
        wanted, looked = [summary.id, summary.parent or ""], set[str]()
        found: dict[tuple[str, int], LinkedRun] = {}
        with self._database.translated():
            while wanted and len(found) < MAX_FAMILY:
                id = wanted.pop()
                if not id or id in looked:
                    continue
                looked.add(id)
                query = f"SELECT {columns} FROM run WHERE id = ? OR parent = ? ORDER BY started LIMIT {MAX_FAMILY}"
                for row in self._db.execute(query, (store.storable(id),) * 2):
                    if all(type(each) in (str, int, NoneType) for each in row):
                        found[row[1:3]] = LinkedRun(*row)
                        wanted += [row[0], row[7]]
        if len(found) < 2:
            return ()
        return tuple(sorted(found.values(), key=lambda each: (each.started_ns, each.seq)))

    def events_of(self, summary: RunSummary) -> list[StoredEvent]:
        """Return the events of a run, in order.

        Raises:
            AuditError: one is not what its hash says.
            ValueError: a row is no event.
        """
        with self._database.translated():
            found = list(store.events(self._db, "writer = ? AND run = ?", summary.chain, summary.seq))
        if damaged := next((event for event in found if not event.is_intact), None):
            raise AuditError(f"event {damaged.seq} of run {summary.id} was changed; run `toolcell audit verify`")
        return found

    def events_between(self, chain: str, first: int, last: int) -> Iterator[StoredEvent]:
        """Yield the events of a chain from one number to another.

        Raises:
            ValueError: a row is no event.
        """
        with self._database.translated():
            yield from store.events(self._db, "writer = ? AND n BETWEEN ? AND ?", chain, first, last)

    def head_after(self, chain: str, seq: int) -> Head | None:
        """Return the first checkpoint of an event or one after it."""
        query = f"SELECT {CHECKPOINT_COLUMNS} FROM checkpoint WHERE writer = ? AND n >= ? AND reason != ? ORDER BY n"
        with self._database.translated():
            rows = self._db.execute(query, (chain, seq, PRUNED))
            return next((head for row in rows if (head := head_of(self.log, row)) is not None), None)

    def blob(self, digest: str) -> bytes | None:
        """Return what many runs share; None where it was pruned, or is not what the digest says."""
        with self._database.translated():
            row = self._db.execute("SELECT bytes FROM blob WHERE sha256 = ?", (digest,)).fetchone()
        is_right = row is not None and type(row[0]) is bytes and bytes_digest(row[0]) == digest
        return row[0] if is_right else None

    def _shared(self, name: str, digest: str) -> dict[str, Any]:
        content = self.blob(digest)
        return {} if content is None else shared_fields(name, content)

    def stats(self, wanted: Filter | None = None) -> dict[str, Any]:
        """Shape: {"runs", "trust", "outcomes", "days": {name: n}, "tools": [...], "wall_s", "cpu_s", "scripts"}."""
        wanted = wanted or Filter()
        where, values = conditions(wanted)
        chosen = f"FROM plain_run AS run WHERE {where}"
        counted = "count(*), coalesce(sum(wall_s), 0.0), coalesce(sum(cpu_s), 0.0), count(DISTINCT sha256)"
        [(total, wall_s, cpu_s, scripts)] = self.select(f"SELECT {counted} {chosen}", values)
        outcomes = dict(self.select(f"SELECT outcome, count(*) {chosen} GROUP BY outcome ORDER BY 2 DESC", values))
        trusts = Counter(each.trust for each in self.runs(replace(wanted, limit=None)))
        day = "coalesce(date(started / 1000000000, 'unixepoch'), '?')"
        days = dict(self.select(f"SELECT {day}, count(*) {chosen} GROUP BY 1 ORDER BY 1", values))
        rows = self.select(
            f"SELECT tool, status, duration_us FROM plain_call JOIN (SELECT writer AS w, n AS s {chosen}) AS found "
            "ON writer = w AND run = s ORDER BY tool, duration_us",
            values,
        )
        return {
            "runs": total,
            "scripts": scripts,
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "trust": {name: trusts[name] for name in Trust if trusts[name]},
            "outcomes": outcomes,
            "days": days,
            "tools": tool_table(rows),
        }

    def hosts(self, wanted: Filter | None = None) -> list[dict[str, Any]]:
        """Count requests by host. Shape: [{"host", "requests", "runs", "failed", "secrets": [names], "last_ns"}]."""
        where, values = conditions(wanted or Filter(limit=None))
        query = f"""
            SELECT host, secret, request.writer, request.run, request.number, status, started
            FROM plain_request AS request
            JOIN plain_call AS call USING (writer, run, number)
            WHERE (writer, run) IN (SELECT writer, n FROM run WHERE {where})
        """
        found: dict[str, dict[str, Any]] = {}
        for host, secret, writer, run, number, status, started in self.select(query, values):
            row = found.setdefault(
                host, {"requests": set(), "runs": set(), "failed": set(), "secrets": set(), "last": 0}
            )
            row["requests"].add((writer, run, number))
            row["runs"].add((writer, run))
            row["failed"] |= {(writer, run, number)} if standing_of(status) == "bad" else set()
            row["secrets"] |= {secret} if secret else set()
            row["last"] = max(row["last"], started)
        return [
            {
                "host": host,
                **{name: len(row[name]) for name in ("requests", "runs", "failed")},
                "secrets": sorted(row["secrets"]),
                "last_ns": row["last"],
            }
            for host, row in sorted(found.items(), key=lambda each: (-len(each[1]["requests"]), each[0]))
        ]

    def tool_table(self, since_ns: int = 0) -> list[dict[str, Any]]:
        """Count the calls of each tool since then; the rows of `tool_table`, most called first."""
        query = "SELECT tool, status, duration_us FROM plain_call WHERE started >= ? ORDER BY tool, duration_us"
        return tool_table(self.select(query, [since_ns]))


@contextmanager
def readable(summary: RunSummary) -> Iterator[None]:
    """Turn what no writer writes into an `AuditError` that names the run."""
    try:
        yield
    except ValueError as exc:
        raise AuditError(f"run {summary.id} cannot be read: {exc}; run `toolcell audit verify`") from exc


def _typed(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        each if type(each) is wanted else default for each, (wanted, default) in zip(row, _TYPES.values(), strict=True)
    )


def shared_digests(found: list[StoredEvent]) -> list[tuple[str, str]]:
    """Return the names and digests of the settings and tools that a run's first event names.

    Raises:
        ValueError: its body is not one that toolcell writes.
    """
    fields = found[0].fields if found and found[0].kind == records.RUN_STARTED else {}
    return [(name, digest) for name in BLOB_SHAPES if (digest := fields.get(name))]


def shared_fields(name: str, content: bytes) -> dict[str, Any]:
    """Return settings or tools by name.

    Raises:
        ValueError: no writer writes such a blob.
    """
    values, shapes = unpack(content), BLOB_SHAPES[name]
    if type(values) not in (list, tuple) or len(values) != len(shapes):
        raise ValueError(f"the blob of {name} is not a list of its fields")
    if wrong := next((key for (key, fits), each in zip(shapes.items(), values, strict=True) if not fits(each)), None):
        raise ValueError(f"the {wrong} of the blob of {name} has another shape")
    return dict(zip(shapes, values, strict=True))


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
                "failed": sum(standing_of(status) == "bad" for status, _ in calls),
                "p50_ms": durations[len(durations) // 2] / 1000,
                "p95_ms": durations[min(len(durations) - 1, len(durations) * 95 // 100)] / 1000,
                "total_s": sum(durations) / 1e6,
            }
        )
    return sorted(table, key=lambda row: (-row["calls"], row["tool"]))
