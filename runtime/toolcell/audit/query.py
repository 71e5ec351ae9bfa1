"""Query a log: an SQLite index of its runs and calls, and of where their records are.

The index is no evidence: everything in it comes from the log, and it can be rebuilt at any time. `refresh` reads only
what was added to the log since the last time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from toolcell.audit import records
from toolcell.audit.format import INDEX_FILE, MAGIC, chain_directories, read_log_id, segment_files, segment_path
from toolcell.audit.reader import (
    Damage,
    RecordedRun,
    RecordLocation,
    StoredRecord,
    assemble,
    read_at,
    read_segment,
)
from toolcell.errors import AuditError, UsageError

VERSION: Final = 1
"""Of the tables. An index of another version is rebuilt."""

_TABLES: Final = """
CREATE TABLE progress (chain TEXT, segment INTEGER, bytes INTEGER, PRIMARY KEY (chain, segment));
CREATE TABLE places (chain TEXT, run INTEGER, segment INTEGER, offset INTEGER);
CREATE INDEX places_by_run ON places (chain, run);
CREATE TABLE common (chain TEXT, digest TEXT, segment INTEGER, offset INTEGER, PRIMARY KEY (chain, digest));
CREATE TABLE runs (
    chain TEXT, seq INTEGER, id TEXT, sort TEXT, started_ns INTEGER, ended_ns INTEGER, outcome TEXT, sha256 TEXT,
    user TEXT, session TEXT, title TEXT, calls INTEGER, failed INTEGER, wall_s REAL, cpu_s REAL,
    peak_memory_bytes INTEGER, PRIMARY KEY (chain, seq)
);
CREATE INDEX runs_by_id ON runs (id);
CREATE INDEX runs_by_time ON runs (started_ns);
CREATE TABLE calls (
    chain TEXT, run INTEGER, number INTEGER, tool TEXT, origin TEXT, status TEXT, code TEXT, duration_us INTEGER,
    PRIMARY KEY (chain, run, number)
);
CREATE INDEX calls_by_tool ON calls (tool);
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT);
"""

TITLE_CHARS: Final = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Selects runs. A field that is None selects all."""

    since_ns: int | None = None
    until_ns: int | None = None
    outcome: str | None = None
    tool: str | None = None
    """Name or glob of a tool that the run called."""
    sha256: str | None = None
    """Beginning of the script's digest."""
    session: str | None = None
    """Thread, chat or channel that the run belongs to, or its parent run."""
    user: str | None = None
    limit: int | None = 50
    """Select only this many of the newest runs."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run in a list."""

    id: str
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
    """First line of the script that is not an import."""
    calls: int
    failed: int
    wall_s: float | None
    cpu_s: float | None
    peak_memory_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {_COLUMN_OF.get(name, name): getattr(self, name) for name in self.__slots__}


_COLUMN_OF: Final = {"kind": "sort"}
"""Attribute to the name of its column and JSON key, where they differ."""

_COLUMNS: Final = tuple(_COLUMN_OF.get(name, name) for name in RunSummary.__dataclass_fields__)


class Index:
    """The index of one log. Use it in a `with` block and in one thread."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._log = read_log_id(self.directory)
        self.damage = Damage()
        """Counts the records that could not be read."""
        self._db = self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the index."""
        self._db.close()

    def _open(self) -> sqlite3.Connection:
        path = self.directory / INDEX_FILE
        try:
            return self._connect(str(path))
        except sqlite3.DatabaseError:
            pass
        try:  # damaged, of another version or another log
            path.unlink(missing_ok=True)
            return self._connect(str(path))
        except (OSError, sqlite3.Error):  # we may only read the log
            return self._connect(":memory:")

    def _connect(self, path: str) -> sqlite3.Connection:
        db = sqlite3.connect(path, timeout=10, isolation_level=None)
        try:
            if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'about'").fetchone():
                with _transaction(db):
                    for statement in _TABLES.split(";"):
                        db.execute(statement)
                    about = {"version": str(VERSION), "log": self._log}
                    db.executemany("INSERT INTO about VALUES (?, ?)", about.items())
            if dict(db.execute("SELECT key, value FROM about")) != {"version": str(VERSION), "log": self._log}:
                raise sqlite3.DatabaseError("of another version or another log")
            db.execute("PRAGMA synchronous = OFF")
            db.execute("UPDATE about SET value = value WHERE key = 'log'")  # fails when the file is read-only
        except sqlite3.Error:
            db.close()
            raise
        return db

    # Keeping up with the log

    def rebuild(self) -> None:
        """Empty the index and read the whole log."""
        with _transaction(self._db):
            for table in ("progress", "places", "common", "runs", "calls"):
                self._db.execute(f"DELETE FROM {table}")
        self.refresh()

    def refresh(self) -> None:
        """Read what was added to the log since the last time."""
        for chain in chain_directories(self.directory):
            found = segment_files(chain)
            with _transaction(self._db):
                self._delete_pruned(chain.name, min(found, default=0))
                for number, path in found.items():
                    self._read(chain.name, number, path)

    def _read(self, chain: str, number: int, path: Path) -> None:
        known = self._db.execute(
            "SELECT bytes FROM progress WHERE chain = ? AND segment = ?", (chain, number)
        ).fetchone()
        start = known[0] if known else len(MAGIC)
        if path.stat().st_size <= start:
            return
        end = start
        for stored in read_segment(path, chain, number, start, self.damage):
            self._add(stored)
            end = stored.frame.end
        self._db.execute("INSERT OR REPLACE INTO progress VALUES (?, ?, ?)", (chain, number, end))

    def _delete_pruned(self, chain: str, first: int) -> None:
        """Delete the runs that lost records to pruning."""
        old = (chain, first)
        gone = self._db.execute("SELECT DISTINCT run FROM places WHERE chain = ? AND segment < ?", old).fetchall()
        for (run,) in gone:
            self._db.execute("DELETE FROM runs WHERE chain = ? AND seq = ?", (chain, run))
            self._db.execute("DELETE FROM calls WHERE chain = ? AND run = ?", (chain, run))
            self._db.execute("DELETE FROM places WHERE chain = ? AND run = ?", (chain, run))
        self._db.execute("DELETE FROM progress WHERE chain = ? AND segment < ?", old)

    def _add(self, stored: StoredRecord) -> None:
        record, location = stored.record, stored.location
        if record.kind in (records.TOOLS, records.SETTINGS):
            row = (location.chain, record.fields["digest"], location.segment, location.offset)
            self._db.execute("INSERT OR REPLACE INTO common VALUES (?, ?, ?, ?)", row)
        elif record.run:
            row = (location.chain, record.run, location.segment, location.offset)
            self._db.execute("INSERT INTO places VALUES (?, ?, ?, ?)", row)
            getattr(self, f"_add_{record.kind}")(location.chain, record.run, record.at_ns, record.fields)

    def _add_run_started(self, chain: str, run: int, at_ns: int, fields: dict[str, Any]) -> None:
        who = fields["who"] or {}
        sessions = [who.get(name) for name in ("thread", "chat", "channel")]
        session = next((str(each) for each in sessions if each), "") or _parent_run(fields["id"], who)
        row = (
            chain, run, fields["id"], fields["sort"], at_ns, None, "unfinished", fields["sha256"], who.get("user", ""),
            session, title_of(fields), 0, 0, None, None, None,
        )  # fmt: skip
        self._db.execute(f"INSERT OR REPLACE INTO runs VALUES ({', '.join('?' * len(row))})", row)

    def _add_call_started(self, chain: str, run: int, at_ns: int, fields: dict[str, Any]) -> None:
        row = (chain, run, fields["number"], fields["tool"], fields["origin"], "unfinished", None, None)
        self._db.execute("INSERT OR REPLACE INTO calls VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        self._db.execute("UPDATE runs SET calls = calls + 1 WHERE chain = ? AND seq = ?", (chain, run))

    def _add_call_ended(self, chain: str, run: int, at_ns: int, fields: dict[str, Any]) -> None:
        row = (fields["status"], fields["code"], fields["duration_us"], chain, run, fields["number"])
        self._db.execute(
            "UPDATE calls SET status = ?, code = ?, duration_us = ? WHERE chain = ? AND run = ? AND number = ?", row
        )
        failed = fields["status"] not in ("ok", "pending")
        self._db.execute("UPDATE runs SET failed = failed + ? WHERE chain = ? AND seq = ?", (failed, chain, run))

    def _add_run_ended(self, chain: str, run: int, at_ns: int, fields: dict[str, Any]) -> None:
        usage = fields["usage"] or {}
        measured = (usage.get("wall_s"), usage.get("cpu_s"), usage.get("peak_memory_bytes"))
        self._db.execute(
            "UPDATE runs SET ended_ns = ?, outcome = ?, wall_s = ?, cpu_s = ?, peak_memory_bytes = ? "
            "WHERE chain = ? AND seq = ?",
            (at_ns, fields["outcome"], *measured, chain, run),
        )

    # Queries

    def runs(self, wanted: Filter | None = None) -> list[RunSummary]:
        """Return the runs that a filter selects, oldest first."""
        wanted = wanted or Filter()
        where, values = _conditions(wanted)
        limit = "" if wanted.limit is None else f" LIMIT {int(wanted.limit)}"
        query = f"SELECT {', '.join(_COLUMNS)} FROM runs WHERE {where} ORDER BY started_ns DESC, seq DESC{limit}"
        return [RunSummary(*row) for row in self._db.execute(query, values)][::-1]

    def find(self, id: str) -> RunSummary:
        """Find a run by its id or the beginning of its id; `last` is the newest run.

        Raises:
            UsageError: no run has this id, or several do.
        """
        if id == "last" and (newest := self.runs(Filter(limit=1))):
            return newest[0]
        query = f"SELECT {', '.join(_COLUMNS)} FROM runs WHERE "
        exact = self._db.execute(f"{query} id = ?", (id,)).fetchall()
        found = exact or self._db.execute(f"{query} substr(id, 1, ?) = ?", (len(id), id)).fetchmany(10)
        if not found or not id:
            raise UsageError(f"no run {id!r} in {self.directory}; `toolcell audit list {self.directory}` shows them")
        if len(found) > 1:
            raise UsageError(f"several runs begin with {id!r}: {', '.join(RunSummary(*row).id for row in found)}")
        return RunSummary(*found[0])

    def load(self, summary: RunSummary) -> RecordedRun:
        """Read everything recorded of a run.

        Raises:
            AuditError: its first record cannot be read.
        """
        found = self.records_of(summary)
        shared = {}
        for digest in shared_digests(found):
            stored = self.shared_record(summary.chain, digest)
            shared[digest] = stored.record.fields if stored is not None else {}
        run = assemble(found, shared)
        if run is None:
            raise AuditError(f"the first record of run {summary.id} cannot be read; run `toolcell audit verify`")
        return run

    def records_of(self, summary: RunSummary) -> list[StoredRecord]:
        """Return the records of a run, in order."""
        query = "SELECT segment, offset FROM places WHERE chain = ? AND run = ? ORDER BY segment, offset"
        rows = self._db.execute(query, (summary.chain, summary.seq)).fetchall()
        return [read_at(self.directory, RecordLocation(summary.chain, *row)) for row in rows]

    def shared_record(self, chain: str, digest: str) -> StoredRecord | None:
        """Return the record of the settings or tools with this digest; None when it was pruned."""
        query = "SELECT segment, offset FROM common WHERE chain = ? AND digest = ?"
        row = self._db.execute(query, (chain, digest)).fetchone()
        if row is None or not segment_path(self.directory / chain, row[0]).exists():
            return None
        return read_at(self.directory, RecordLocation(chain, *row))

    def stats(self, wanted: Filter | None = None) -> dict[str, Any]:
        """Shape: {"runs", "outcomes": {name: n}, "tools": [...], "days": {date: n}, "wall_s", "cpu_s", "scripts"}."""
        where, values = _conditions(wanted or Filter())
        chosen = f"FROM runs WHERE {where}"
        total, wall_s, cpu_s, scripts = self._db.execute(
            f"SELECT count(*), total(wall_s), total(cpu_s), count(DISTINCT sha256) {chosen}", values
        ).fetchone()
        outcomes = dict(self._db.execute(f"SELECT outcome, count(*) {chosen} GROUP BY outcome ORDER BY 2 DESC", values))
        day = "date(started_ns / 1000000000, 'unixepoch')"
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
            "outcomes": outcomes,
            "days": days,
            "tools": _tool_table(rows),
        }


def shared_digests(found: list[StoredRecord]) -> list[str]:
    """Return the digests of the settings and tools that a run's first record names."""
    fields = found[0].record.fields if found else {}
    return [digest for name in ("terms", "tools") if (digest := fields.get(name))]


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def _conditions(wanted: Filter) -> tuple[str, list[Any]]:
    """Return a WHERE clause and its values. No text of a caller becomes SQL."""
    rows: tuple[tuple[str, Any], ...] = (
        ("started_ns >= ?", wanted.since_ns),
        ("started_ns < ?", wanted.until_ns),
        ("outcome = ?", wanted.outcome),
        ("user = ?", wanted.user),
        ("session = ?", wanted.session),
        ("instr(sha256, ?) = 1", wanted.sha256.lower() if wanted.sha256 is not None else None),
        (
            "EXISTS (SELECT 1 FROM calls WHERE calls.chain = runs.chain AND calls.run = runs.seq AND tool GLOB ?)",
            wanted.tool,
        ),
    )
    chosen = [(text, value) for text, value in rows if value is not None]
    return " AND ".join(["1", *(text for text, _ in chosen)]), [value for _, value in chosen]


def _tool_table(rows: Iterable[tuple[str, str, int | None]]) -> list[dict[str, Any]]:
    """Shape: [{"tool", "calls", "failed", "p50_ms", "p95_ms", "total_s"}], most called first."""
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


def _parent_run(id: str, who: dict[str, Any]) -> str:
    run = str(who.get("run", ""))
    return run if run != id else ""


def title_of(fields: dict[str, Any]) -> str:
    """Return the first line of a script that is neither empty nor an import."""
    lines = (line.strip() for line in (fields["source"] or "").split("\n"))
    return next((line[:TITLE_CHARS] for line in lines if line and not line.startswith(("import ", "from "))), "")
