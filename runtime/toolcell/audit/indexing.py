"""Fill the SQLite index of a log: its runs and calls, where their records are, and how far they are linked and signed.

The index lies in the user's cache, not in the log's directory: whoever can write there cannot change it, and reading
a log writes nothing into it. It is kept with the digest of every byte that it was made from. When those bytes are no
longer the same, the chain is read again.

    $XDG_CACHE_HOME/toolcell/audit-index/<digest of log and directory>.sqlite       mode 0600

A stretch is a part of a chain in which each record names the one before it. A valid signature in a stretch is over all
records of the stretch before it.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from pathlib import Path
from typing import Any, Final

import platformdirs

from toolcell.audit import records
from toolcell.audit.format import GENESIS, MAGIC, begun_segments, chain_directories, read_segment_file
from toolcell.audit.reader import UNFINISHED, Damage, StoredRecord, split_records
from toolcell.audit.titles import title_of
from toolcell.errors import AuditError, StoreError
from toolcell.support.packing import text_digest
from toolcell.support.sqlite import connect, transaction

VERSION: Final = 8
"""Version of the tables. An index of another version is rebuilt."""

_TABLES: Final = """
CREATE TABLE progress (chain TEXT, segment INTEGER, bytes INTEGER, sha256 BLOB, PRIMARY KEY (chain, segment));
CREATE TABLE stretches (chain TEXT, number INTEGER, seq INTEGER, hash BLOB, PRIMARY KEY (chain, number));
CREATE TABLE signatures (
    chain TEXT, stretch INTEGER, seq INTEGER, at_ns INTEGER, previous BLOB, reason TEXT, key TEXT, signature BLOB
);
CREATE INDEX signatures_by_stretch ON signatures (chain, stretch, seq);
CREATE TABLE places (chain TEXT, run INTEGER, segment INTEGER, offset INTEGER, hash BLOB);
CREATE INDEX places_by_run ON places (chain, run);
CREATE TABLE common (
    chain TEXT, digest TEXT, segment INTEGER, offset INTEGER, hash BLOB, stretch INTEGER, seq INTEGER
);
CREATE INDEX common_by_digest ON common (chain, digest);
CREATE TABLE runs (
    chain TEXT, seq INTEGER, id TEXT, sort TEXT, started_ns INTEGER, ended_ns INTEGER, outcome TEXT, sha256 TEXT,
    user TEXT, session TEXT, title TEXT, calls INTEGER, failed INTEGER, wall_s REAL, cpu_s REAL,
    peak_memory_bytes INTEGER, stretch INTEGER, last_seq INTEGER, is_split INTEGER, PRIMARY KEY (chain, seq)
);
CREATE INDEX runs_by_id ON runs (id);
CREATE INDEX runs_by_time ON runs (started_ns, seq, chain);
CREATE INDEX runs_by_outcome ON runs (outcome, started_ns, seq, chain);
CREATE TABLE calls (
    chain TEXT, run INTEGER, number INTEGER, tool TEXT, origin TEXT, status TEXT, code TEXT, duration_us INTEGER,
    PRIMARY KEY (chain, run, number)
);
CREATE INDEX calls_by_tool ON calls (tool);
CREATE TABLE redacted (chain TEXT, run INTEGER, seq INTEGER, original BLOB, remains BLOB);
CREATE INDEX redacted_by_run ON redacted (chain, run);
CREATE TABLE redactions (
    chain TEXT, stretch INTEGER, seq INTEGER, at_ns INTEGER, segment INTEGER, offset INTEGER, hash BLOB,
    target TEXT, target_seq INTEGER, original BLOB, remains BLOB
);
CREATE INDEX redactions_by_target ON redactions (target, target_seq);
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT);
"""
_BY_CHAIN: Final = (
    "progress",
    "stretches",
    "signatures",
    "places",
    "common",
    "runs",
    "calls",
    "redacted",
    "redactions",
)


def default_index_dir() -> Path:
    """Return audit-index in the user's cache directory: ~/.cache/toolcell on Linux, or $XDG_CACHE_HOME's."""
    return platformdirs.user_cache_path("toolcell", appauthor=False) / "audit-index"


# The file


def open_index(directory: Path, log: str, *, in_memory: bool = False) -> sqlite3.Connection:
    """Open the index of a log. One that is damaged is made again; where none can be kept, it is in memory."""
    about = {"version": str(VERSION), "log": log}
    if in_memory:
        return _connect(Path(":memory:"), about)
    name = hashlib.sha256(f"{log}\n{os.path.realpath(directory)}".encode("utf-8", "surrogatepass")).hexdigest()
    path = default_index_dir() / f"{name[:32]}.sqlite"
    for _ in range(2):
        try:
            return _connect(path, about)
        except (OSError, StoreError):
            break
        except sqlite3.Error:  # damaged, or of another version
            path.unlink(missing_ok=True)
    return _connect(Path(":memory:"), about)


def _connect(path: Path, about: dict[str, str]) -> sqlite3.Connection:
    def prepare(db: sqlite3.Connection) -> None:
        with transaction(db):
            if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'about'").fetchone():
                for statement in _TABLES.split(";"):
                    db.execute(statement)
                db.executemany("INSERT INTO about VALUES (?, ?)", about.items())
        if dict(db.execute("SELECT key, value FROM about")) != about:
            raise sqlite3.DatabaseError("of another version or another log")
        db.execute("PRAGMA synchronous = OFF")
        db.execute("PRAGMA secure_delete = ON")  # what was redacted in the log is not left in free pages

    return connect(path, prepare)


# Its content


class Indexer:
    """Brings the index of a log up to date."""

    def __init__(self, db: sqlite3.Connection, directory: Path) -> None:
        self._db = db
        self._directory = directory
        self.damage = Damage()
        """Counts the records that could not be read."""
        self.changed: dict[str, None] = {}
        """Chains that are no longer what they were when they were read before, in order."""
        self._stretch: tuple[int, int, bytes] = (0, 0, GENESIS)
        """Number of the open stretch, and seq and hash of its last record."""

    def rebuild(self) -> None:
        """Empty the index and read the whole log."""
        with transaction(self._db):
            for table in _BY_CHAIN:
                self._db.execute(f"DELETE FROM {table}")
        self.refresh()

    def refresh(self) -> None:
        """Read what was added to the log since the last time, and again what was changed."""
        present = chain_directories(self._directory)
        with transaction(self._db):
            known = [name for (name,) in self._db.execute("SELECT DISTINCT chain FROM progress")]
            for name in set(known) - {path.name for path in present}:
                self._forget(name)
        for path in present:
            with transaction(self._db):
                try:
                    found = begun_segments(path)
                except AuditError:
                    self.damage.pieces += 1
                    continue
                self._delete_pruned(path.name, min(found, default=0))
                if not self._is_continued(path.name, found):
                    self._forget(path.name)
                    self._is_continued(path.name, found)
                self._save_stretch(path.name)

    def _forget(self, chain: str) -> None:
        for table in _BY_CHAIN:
            self._db.execute(f"DELETE FROM {table} WHERE chain = ?", (chain,))
        self.changed[chain] = None

    def _is_continued(self, chain: str, found: dict[int, Path]) -> bool:
        """Read what is new in a chain. False: what was read before is no longer there."""
        newest = "SELECT number, seq, hash FROM stretches WHERE chain = ? ORDER BY number DESC LIMIT 1"
        self._stretch = self._db.execute(newest, (chain,)).fetchone() or (0, 0, GENESIS)
        rows = self._db.execute("SELECT segment, bytes, sha256 FROM progress WHERE chain = ?", (chain,))
        known = {segment: (size, digest) for segment, size, digest in rows}
        pieces = self.damage.pieces
        is_continued = not known.keys() - found.keys() and all(
            self._is_read(chain, number, path, *known.get(number, (0, b""))) for number, path in found.items()
        )
        if not is_continued:
            self.damage.pieces = pieces
        return is_continued

    def _is_read(self, chain: str, number: int, path: Path, start: int, digest: bytes) -> bool:
        """Read what is new in a segment. False: its beginning is not what was read before."""
        try:
            data = read_segment_file(path)
        except AuditError:
            self.damage.pieces += 1
            return not start
        own = hashlib.sha256(memoryview(data)[:start])
        if start and (start > len(data) or own.digest() != digest):
            return False
        end = start or len(MAGIC)
        if start < len(data):
            for stored in split_records(data, chain, number, end, self.damage):
                self._add(stored)
                end = stored.frame.end
        end = min(end, len(data))
        own.update(memoryview(data)[start:end])
        if end > start:
            self._db.execute("INSERT OR REPLACE INTO progress VALUES (?, ?, ?, ?)", (chain, number, end, own.digest()))
        return True

    def _delete_pruned(self, chain: str, first: int) -> None:
        """Delete the runs that lost records to pruning."""
        old = (chain, first)
        gone = self._db.execute("SELECT DISTINCT run FROM places WHERE chain = ? AND segment < ?", old).fetchall()
        for (run,) in gone:
            self._db.execute("DELETE FROM runs WHERE chain = ? AND seq = ?", (chain, run))
            self._db.execute("DELETE FROM calls WHERE chain = ? AND run = ?", (chain, run))
            self._db.execute("DELETE FROM places WHERE chain = ? AND run = ?", (chain, run))
            self._db.execute("DELETE FROM redacted WHERE chain = ? AND run = ?", (chain, run))
        self._db.execute("DELETE FROM common WHERE chain = ? AND segment < ?", old)
        self._db.execute("DELETE FROM redactions WHERE chain = ? AND segment < ?", old)
        self._db.execute("DELETE FROM progress WHERE chain = ? AND segment < ?", old)

    def _save_stretch(self, chain: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO stretches VALUES (?, ?, ?, ?)", (chain, *self._stretch))

    def _add(self, stored: StoredRecord) -> None:
        record, location = stored.record, stored.location
        number, seq, last_hash = self._stretch
        if (record.seq, stored.frame.previous_hash) != (seq + 1, last_hash):
            self._save_stretch(location.chain)
            number += 1
        self._stretch = (number, record.seq, stored.frame.record_hash)
        at = (location.segment, location.offset, stored.frame.record_hash)
        if record.kind in (records.TOOLS, records.SETTINGS):
            row = (location.chain, record.fields["digest"], *at, number, record.seq)
            self._insert("INSERT INTO common", *row)
        elif record.kind == records.CHECKPOINT:
            signed = (record.seq, record.at_ns, stored.frame.previous_hash, *record.fields.values())
            self._insert("INSERT INTO signatures", location.chain, number, *signed)
        elif record.kind == records.REDACTED:
            what = [record.fields[name] for name in ("chain", "seq", "original", "left")]
            place = (location.chain, number, record.seq, record.at_ns, *at)
            self._insert("INSERT INTO redactions", *place, *what)
        elif record.run and record.kind in self._ADD:
            self._insert("INSERT INTO places", location.chain, record.run, *at)
            if record.original:
                remains = hashlib.sha256(stored.frame.body).digest()
                self._insert("INSERT INTO redacted", location.chain, record.run, record.seq, record.original, remains)
            self._ADD[record.kind](self, location.chain, record.run, record.at_ns, record.fields)
            self._db.execute(
                "UPDATE runs SET last_seq = max(last_seq, ?), is_split = is_split OR stretch != ? "
                "WHERE chain = ? AND seq = ?",
                (record.seq, number, location.chain, record.run),
            )

    def _insert(self, start: str, *values: Any) -> None:
        row = tuple(map(_storable, values))
        self._db.execute(f"{start} VALUES ({', '.join('?' * len(row))})", row)

    def _add_run_started(self, chain: str, run: int, at_ns: int, fields: dict[str, Any]) -> None:
        who = fields["who"]
        sessions = [who.get(name) for name in ("thread", "chat", "channel", "session")]
        session = next((str(each) for each in sessions if each), "") or _parent_run(fields["id"], who)
        self._insert(
            "INSERT OR IGNORE INTO runs",  # the first stays: a second record with its number is in another stretch
            chain, run, fields["id"], fields["sort"], at_ns, None, UNFINISHED, fields["sha256"],
            str(who.get("user", "")), session, title_of(fields["source"]), 0, 0, None, None, None, self._stretch[0],
            run, 0,
        )  # fmt: skip
        self._db.execute(  # a record of the run that comes before its start is somebody else's
            "UPDATE runs SET is_split = 1 WHERE chain = ? AND seq = ? "
            "AND (SELECT count(*) FROM places WHERE chain = ? AND run = ?) > 1",
            (chain, run, chain, run),
        )

    def _add_call_started(self, chain: str, run: int, at_ns: int, fields: dict[str, Any]) -> None:
        named = (fields["number"], fields["tool"], fields["origin"])
        self._insert("INSERT OR REPLACE INTO calls", chain, run, *named, UNFINISHED, None, None)
        self._db.execute("UPDATE runs SET calls = calls + 1 WHERE chain = ? AND seq = ?", (chain, run))

    def _add_call_ended(self, chain: str, run: int, at_ns: int, fields: dict[str, Any]) -> None:
        row = (fields["status"], fields["code"], fields["duration_us"], chain, run, fields["number"])
        self._db.execute(
            "UPDATE calls SET status = ?, code = ?, duration_us = ? WHERE chain = ? AND run = ? AND number = ?",
            tuple(map(_storable, row)),
        )
        failed = fields["status"] not in ("ok", "pending")
        self._db.execute("UPDATE runs SET failed = failed + ? WHERE chain = ? AND seq = ?", (failed, chain, run))

    def _add_run_ended(self, chain: str, run: int, at_ns: int, fields: dict[str, Any]) -> None:
        usage = fields["usage"]
        measured = (usage.get("wall_s"), usage.get("cpu_s"), usage.get("peak_memory_bytes"))
        self._db.execute(
            "UPDATE runs SET ended_ns = ?, outcome = ?, wall_s = ?, cpu_s = ?, peak_memory_bytes = ? "
            "WHERE chain = ? AND seq = ?",
            (at_ns, _storable(fields["outcome"]), *measured, chain, run),
        )
        if source := (fields["more"] or {}).get("source"):  # of a script that came in parts
            told = (text_digest(source), _storable(title_of(source)), chain, run)
            self._db.execute("UPDATE runs SET sha256 = ?, title = ? WHERE chain = ? AND seq = ?", told)

    _ADD: Final = {
        records.RUN_STARTED: _add_run_started,
        records.CALL_STARTED: _add_call_started,
        records.CALL_ENDED: _add_call_ended,
        records.RUN_ENDED: _add_run_ended,
    }


def _storable(value: Any) -> Any:
    """Return a value that SQLite can store: half of a surrogate pair is escaped."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _parent_run(id: str, who: dict[str, Any]) -> str:
    run = str(who.get("run", ""))
    return run if run != id else ""
