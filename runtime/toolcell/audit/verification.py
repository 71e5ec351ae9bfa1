"""Verify a record: find edits, deletions, reorderings, copies, cut-off ends, forged prunes and wrong keys.

A table in docs/audit-evidence.md says which changes can be found, which cannot, and why.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from itertools import islice, zip_longest
from typing import Any, Final

from toolcell.audit import records, store
from toolcell.audit.chain_check import UNKNOWN_KEY, ChainCheck, EventContent, Finding, by_seq
from toolcell.audit.databases import Place, database_of
from toolcell.audit.keys import Verifier, by_id
from toolcell.audit.shapes import MAX_INTEGER
from toolcell.audit.signatures import CHECKPOINT_COLUMNS, Head, head_of
from toolcell.support.packing import bytes_digest

CHAIN_MISSING = "chain_missing"
NOT_CLOSED = "not_closed"
WRONG_LOG = "wrong_record"
BAD_HEAD = "bad_head"
DAMAGED = "damaged"
BAD_BLOB = "bad_blob"
VIEW_DIFFERS = "view_differs"

STEP: Final = 1000
"""Events between two reports of progress, and rows that are compared at once."""

OnEvent = Callable[[str, EventContent], object]
"""Gets the chain of an event, and what it says."""


def ignored(count: int) -> None:
    """Take no notice of progress."""


@dataclass(frozen=True, slots=True)
class ChainReport:
    """What checking one chain found."""

    chain: str
    events: int
    runs: int
    checkpoints: int
    last_seq: int
    signed_seq: int
    """A valid signature covers every event up to this one."""
    is_closed: bool
    """Its writer closed it."""

    @property
    def unsigned(self) -> int:
        """Events after the last valid signature. Their hashes are right, but anybody could have written them."""
        return self.last_seq - self.signed_seq

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self) | {"unsigned": self.unsigned}


@dataclass(slots=True)
class Report:
    """What verifying a record found."""

    log: str
    """Id of the record."""
    chains: list[ChainReport] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Remarks on things that are not wrong."""

    @property
    def ok(self) -> bool:
        """True when nothing was found."""
        return not self.findings

    @property
    def is_unchecked(self) -> bool:
        """True when no signature could be checked because keys are missing, and nothing else was found."""
        return (
            bool(self.findings)
            and {finding.kind for finding in self.findings} == {UNKNOWN_KEY}
            and not any(chain.signed_seq for chain in self.chains)
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "ok": self.ok,
            "checked": not self.is_unchecked,
            "log": self.log,
            "findings": [asdict(finding) for finding in self.findings],
            "chains": [chain.to_dict() for chain in self.chains],
            "notes": self.notes,
        }


def verify(
    path: Place,
    verifiers: Iterable[Verifier],
    *,
    heads: Iterable[Head] | None = None,
    strict: bool = False,
    on_events: Callable[[int], object] = ignored,
) -> Report:
    """Check a whole record with the keys it may be signed with.

    `heads` give the length that its chains had; the default is the heads that its writers saved on this machine. With
    `strict`, a chain that its writer did not close is a finding instead of a note. `on_events` is told how many events
    were checked.

    Raises:
        AuditError: there is no record in `path`, or it cannot be read.
    """
    database, keys = database_of(path), by_id(verifiers)
    with closing(database.open_read_only()) as db, database.translated():
        db.execute("BEGIN")  # one state of it, while writers go on
        report = Report(store.record_id(db))
        wanted = list(Head.saved(report.log) if heads is None else heads)
        damage = [Finding(DAMAGED, "", None, message) for message in database.damage(db)]
        tables = list[Finding]()
        report.findings += damage
        try:
            with closing(_Views()) as views:
                found = check_chains(db, report.log, keys, on_events, views.add)
                checks = {check.chain: check for check in found}
                _compare(db, report, checks, wanted, keys)
                if not damage:
                    tables = [*_check_blobs(db), *views.compare(db)]
        except database.errors:
            if not damage:
                raise
            return report  # the pages themselves are damaged
    for check in checks.values():
        _add_chain(report, check, strict)
    report.findings += tables
    if not wanted:
        report.notes.append("no heads were given: an end cut off after a checkpoint would not be found")
    return report


def check_chains(
    db: store.Connection,
    log: str,
    keys: Mapping[str, Verifier],
    on_events: Callable[[int], object] = ignored,
    on_event: OnEvent | None = None,
) -> Iterator[ChainCheck]:
    """Yield the finished check of each chain.

    `on_events` is told how many events were checked; `on_event` gets each that a writer could have written.
    """
    rows = db.execute(f"SELECT {CHECKPOINT_COLUMNS} FROM checkpoint").fetchall()
    checkpoints = [head for row in rows if (head := head_of(log, row)) is not None]
    named = [
        text for (text,) in db.execute("SELECT writer FROM event GROUP BY writer ORDER BY min(id)") if type(text) is str
    ]
    names = dict.fromkeys([*named, *(head.chain for head in checkpoints)])
    own: dict[str, list[Head]] = {}
    for head in checkpoints:
        own.setdefault(head.chain, []).append(head)
    for name in names:
        check = ChainCheck(name, keys, by_seq(own.get(name, ())))
        check_events(db, check, on_events, on_event)
        check.finish()
        yield check
    strays = db.execute("SELECT count(*) FROM event WHERE typeof(writer) != 'text'").fetchone()[0]
    if strays or len(checkpoints) < len(rows):
        stray = ChainCheck("", keys, {})
        stray.find("not_an_event", None, f"{strays + len(rows) - len(checkpoints)} rows have columns of another type")
        yield stray


def check_events(
    db: store.Connection,
    check: ChainCheck,
    on_events: Callable[[int], object] = ignored,
    on_event: OnEvent | None = None,
    upto: int = MAX_INTEGER,
) -> None:
    """Check the events of a chain from its first to number `upto`."""
    check.begin()
    query = f"SELECT {records.SCANNED} FROM event WHERE writer = ? AND n <= ? ORDER BY n"
    covered_seq, before = check.covered_seq, db.text_factory
    db.text_factory = bytearray  # a column holds whatever somebody put there, and to decode it would take long
    try:
        rows = iter(db.execute(query, (check.chain, upto)))
        seen = -1
        while seen != check.events:
            seen = check.events
            for event in check.add(islice(rows, STEP), covered_seq):
                if on_event is not None:
                    on_event(check.chain, event)
            on_events(check.events - seen)
    finally:
        db.text_factory = before


def _check_blobs(db: store.Connection) -> Iterator[Finding]:
    for digest, content in db.execute("SELECT sha256, bytes FROM blob"):
        if type(content) is not bytes or bytes_digest(content) != digest:
            yield Finding(BAD_BLOB, "", None, f"the blob {digest!r:.80} is not what was written")


class _Views:
    """The tables that are looked up, made of the events alone. SQLite keeps what is large of them in a file."""

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None)
        self._db.execute("PRAGMA journal_mode = OFF")
        for statement in store.TABLES:
            if statement.startswith(tuple(f"CREATE TABLE {name} " for name in store.VIEWS)):
                self._db.execute(statement)
        self._db.execute("BEGIN")
        self._rows: dict[str, list[Any]] = {}
        """Statement to the rows that it is to be executed with."""
        self._begun: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        """Calls of which the start is among the rows, and nothing is written yet, by what finds them."""
        self._left = STEP

    def add(self, chain: str, event: EventContent) -> None:
        try:
            for statement, row in store.rows_of(chain, *event):
                if statement is store.INSERT_CALL:
                    self._begun.setdefault(row[:3], row)
                    continue
                if statement is store.END_CALL and (begun := self._begun.pop(row[3:], None)) is not None:
                    # Nearly every call: to insert the whole row takes half as long as to change it afterwards.
                    statement, row = store.INSERT_WHOLE_CALL, (*begun[:5], *row[:3], begun[6])
                self._rows.setdefault(statement, []).append(row)
        except (ValueError, TypeError, AttributeError, LookupError):
            pass  # who has the key wrote what no run has
        self._left -= 1
        if not self._left:
            self._write()

    def _write(self) -> None:
        self._rows[store.INSERT_CALL] = [*self._begun.values()]
        # INSERT comes before UPDATE, and of two calls with one number the first: it began before it had an end.
        for statement in sorted(self._rows, key=lambda text: (text != store.INSERT_WHOLE_CALL, text)):
            rows = self._rows[statement]
            try:
                self._db.executemany(statement, map(store.all_storable, rows))
            except (sqlite3.Error, OverflowError):  # what no run can have is reported with its chain
                for row in rows:
                    with suppress(sqlite3.Error, OverflowError):
                        self._db.execute(statement, store.all_storable(row))
        self._rows.clear()
        self._begun.clear()
        self._left = STEP

    def compare(self, db: store.Connection) -> Iterator[Finding]:
        """Find differences between the tables of a record and these."""
        self._write()
        before, db.text_factory = db.text_factory, str  # as bytes, a text would be equal to a blob
        try:
            for table, key in store.VIEWS.items():
                query = f"SELECT * FROM {table} ORDER BY {key}"
                ours, theirs = self._db.execute(query), db.execute(query)
                while (one := ours.fetchmany(STEP)) == (two := _plain_rows(theirs)) and one:
                    pass
                if one != two:
                    mine, other = next(pair for pair in zip_longest(one, two) if pair[0] != pair[1])
                    message = f"the table {table} is not what the events say: {other!r:.100}"
                    yield Finding(VIEW_DIFFERS, str((mine or other)[0]), None, message)
        finally:
            db.text_factory = before

    def close(self) -> None:
        self._db.close()


def _plain_rows(rows: Any) -> list[tuple[Any, ...]]:
    """Return the next rows, or one that says why they are none that a writer writes."""
    try:
        found: list[tuple[Any, ...]] = rows.fetchmany(STEP)
    except sqlite3.OperationalError as exc:
        if "decode" not in str(exc):
            raise
        return [("", str(exc))]
    return found


def _compare(
    db: store.Connection,
    report: Report,
    checks: Mapping[str, ChainCheck],
    heads: Iterable[Head],
    keys: Mapping[str, Verifier],
) -> None:
    """Compare the chains with heads, and with what signed events say of each other's chains."""

    def stored_hash(chain: str, seq: int) -> bytes | None:
        row = db.execute("SELECT hash FROM event WHERE writer = ? AND n = ?", (chain, seq)).fetchone()
        return None if row is None else row[0]

    for head in heads:
        verifier, check = keys.get(head.key), checks.get(head.chain)
        if head.log != report.log:
            message = f"the head at event {head.seq} is of record {head.log}, and this is {report.log}: it was replaced"
            report.findings.append(Finding(WRONG_LOG, head.chain, head.seq, message))
        elif verifier is None:
            (check or ChainCheck(head.chain, keys, {})).report_missing_key(head)
        elif not head.is_signed_by(verifier):
            message = f"the head at event {head.seq} was not signed like this for this record with key {head.key}"
            report.findings.append(Finding(BAD_HEAD, head.chain, head.seq, message))
        elif check is None:
            message = f"chain {head.chain} is not there; it had got to event {head.seq}"
            report.findings.append(Finding(CHAIN_MISSING, head.chain, head.seq, message))
        else:
            check.check_head(head, stored_hash)
    for check in checks.values():
        if check.after is not None and check.after[0] <= check.signed_seq:
            _, name, seq, record_hash = check.after
            said = f"so says chain {check.chain}, which was begun then"
            if (other := checks.get(name)) is None:
                message = f"chain {name} is not there; it had got to event {seq}; {said}"
                report.findings.append(Finding(CHAIN_MISSING, name, seq, message))
            else:
                other.check_head(Head("", name, seq, record_hash, 0, "", "", b""), stored_hash, said)
        for at, name, seq in check.prunings:
            other = checks.get(name)
            if at <= check.signed_seq and other is not None and other.first_seq <= seq:
                message = (
                    f"chain {check.chain} says that events up to {seq} were removed by retention, and they are there"
                )
                report.findings.append(Finding("put_back", name, seq, message))


def _add_chain(report: Report, check: ChainCheck, strict: bool) -> None:
    chain = ChainReport(
        check.chain,
        events=check.events,
        runs=check.runs,
        checkpoints=sum(map(len, check.checkpoints.values())),
        last_seq=check.seq,
        signed_seq=check.signed_seq,
        is_closed=check.is_closed,
    )
    report.chains.append(chain)
    report.findings.extend(check.findings)
    report.notes.extend(f"chain {check.chain}: {note}" for note in check.notes)
    is_gone = check.first_seq > check.seq
    if not chain.is_closed and not is_gone and not check.findings:
        signed = f"{chain.unsigned} events at its end are not" if chain.unsigned else "all events in it are"
        message = f"chain {check.chain} is not closed (it is being written, or its writer was killed); {signed} signed"
        if strict:
            report.findings.append(Finding(NOT_CLOSED, check.chain, check.seq, message))
        else:
            report.notes.append(message)
