"""Records that are chained as they should be and hold what no writer writes. Every reader goes on."""

from __future__ import annotations

import io
import json
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from audit.ledger import Ledger
from audit.record_examples import EXAMPLES
from rows import each_row
from toolcell.audit import records
from toolcell.audit.filters import Filter
from toolcell.audit.query import Index
from toolcell.audit.receipt import check, export, read
from toolcell.audit.signatures import Head
from toolcell.audit.store import EVENT_COLUMNS
from toolcell.cli import audit_terminal
from toolcell.errors import AuditError, ToolcellError
from toolcell.service.viewer.figures import run_figures
from toolcell.support import packing

STAND_IN, BIG_INT = 2, 1


def nested(depth: int, inside: Any = 1) -> Any:
    for _ in range(depth):
        inside = [inside]
    return inside


HOSTILE: list[Any] = [
    None, -1, 2**64 - 1, float("nan"), "", "\x1b[2J\x00", "9" * 5000, b"\xff", [], {1: 2}, {"\ud800": "\ud800"},
    [None] * 4, nested(500), {"args_cut": 1, "value_cut": {}, "coerced": 1, "more": None},
    {"wall_s": "x", "line": "y"}, msgpack.ExtType(BIG_INT, b"9" * 4000), msgpack.ExtType(9, b""),
    msgpack.ExtType(STAND_IN, msgpack.packb(["type", "text"])), msgpack.ExtType(STAND_IN, msgpack.packb([1])),
    msgpack.ExtType(STAND_IN, msgpack.packb(["type", msgpack.ExtType(STAND_IN, msgpack.packb(["a", "b"]))])),
]  # fmt: skip


def packed(fields: tuple[Any, ...]) -> bytes:
    return bytes(msgpack.Packer(unicode_errors="surrogatepass").pack(fields))


class Forger:
    """Appends events to the newest chain of a record, each linked to the one before it, with their rows."""

    def __init__(self, ledger: Ledger) -> None:
        last = ledger.found()[-1]
        self._ledger, self._chain, self.seq, self._hash = ledger, last.chain, last.seq, last.record_hash
        self._rows: list[tuple[Any, ...]] = []

    def add(self, kind: str, content: bytes, *, run: int | None = None, seq: int | None = None, at: int = 5) -> int:
        self.seq = self.seq + 1 if seq is None else seq
        run, salt = self.seq if run is None else run, bytes(16)
        digest = records.event_digest(self._chain, self.seq, run, kind, at, salt + content)
        before, self._hash = self._hash, records.hash_digest(self._hash, run, digest)
        self._rows.append((self._chain, self.seq, run, kind, at, salt, content, before, self._hash))
        return self.seq

    def write(self) -> None:
        with closing(sqlite3.connect(self._ledger.path)) as db:
            db.executemany(f"INSERT INTO event ({EVENT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", self._rows)
            runs = ((self._chain, row[1]) for row in self._rows if row[3] == records.RUN_STARTED)
            db.executemany("INSERT INTO run (writer, n, id, kind, started, outcome, calls, failed) "
                           "VALUES (?, ?, 'id', 'code', 5, 'unfinished', 0, 0)", runs)  # fmt: skip
            db.commit()


def poison(forger: Forger, kind: str) -> None:
    """Add an event for each field of a kind and each hostile value, each in a run of its own; of those that are refused
    alike, when they are decoded, one for each field.
    """
    for index in range(len(EXAMPLES[kind])):
        refused = False
        for value in HOSTILE:
            fields = list(EXAMPLES[kind])
            fields[index] = value
            try:
                records.fields_of(kind, packed(tuple(fields)))
            except ValueError:
                if refused:
                    continue
                refused = True
            run = 0
            if kind in (records.CALL_STARTED, records.CALL_ENDED, records.RUN_ENDED):
                run = forger.add(records.RUN_STARTED, packed(EXAMPLES[records.RUN_STARTED]))
            if kind == records.CALL_ENDED:
                forger.add(records.CALL_STARTED, packed(EXAMPLES[records.CALL_STARTED]), run=run)
            forger.add(kind, packed(tuple(fields)), run=None if kind == records.RUN_STARTED else run)


def read_everything(ledger: Ledger) -> int:
    """Use every reader; return how many runs there are."""
    console = Console(file=io.StringIO(), width=100)
    with Index(ledger.path, [ledger.key]) as index:
        runs = index.runs(Filter(limit=None))
        audit_terminal.show_list(runs, console)
        audit_terminal.show_stats(index.stats(), console)
        audit_terminal.show_hosts(index.hosts(), console)
        json.dumps([[run.to_dict() for run in runs], index.stats(), index.hosts()])
        for summary in runs:
            try:
                run = index.load(summary)
            except AuditError:
                continue
            json.dumps(run.to_dict())
            audit_terminal.show_run(run, console, summary.trust)
            try:
                run.runtime_options()
            except ToolcellError:
                pass
        for summary in runs[:3]:
            with suppress(AuditError):
                export(index, summary)
    audit_terminal.show_report(ledger.verify(), console)
    return len(runs)


@each_row("kind", sorted(EXAMPLES))
def test_a_record_with_a_field_of_any_kind_stops_no_reader(ledger: Ledger, kind: str) -> None:
    ledger.fill(1)
    forger = Forger(ledger)
    poison(forger, kind)
    forger.add(records.RUN_STARTED, packed(EXAMPLES[records.RUN_STARTED]))
    forger.write()

    assert read_everything(ledger) > 1
    ledger.fill(1)  # a later writer begins a chain of its own
    assert ledger.the_run().outcome == "ok"


def test_a_row_with_a_column_of_any_type_stops_no_reader(ledger: Ledger) -> None:
    """Whoever can write the file can do it with any program."""
    odd = ["NULL", "'x'", "x'ff'", "CAST(x'ff' AS TEXT)", "-1", "9223372036854775807", "9e999", "1.5", "''"]
    ledger.fill(1)
    (chain,) = ledger.rows("SELECT DISTINCT writer FROM event")[0]
    added = 0
    for table, count in (("run", 19), ("call", 9), ("request", 5)):
        for column in range(count):
            for value in odd:
                added += 1
                row = [f"'{chain}'", str(1000 + added), *("NULL" for _ in range(count - 2))]
                row[column] = value
                ledger.rows(f"INSERT OR IGNORE INTO {table} VALUES ({', '.join(row)})")

    assert read_everything(ledger) > 1
    with Index(ledger.path, [ledger.key]) as index:
        assert [run.outcome for run in index.runs(Filter(limit=None, trust="verified"))] == ["ok"]
        run_figures(index, "all")


@each_row(("seq", "at"), [(2**63 - 1, 5), (2**62, 2**63 - 1), (2**62, -1)])
def test_huge_numbers_stop_neither_readers_nor_writers(ledger: Ledger, seq: int, at: int) -> None:
    ledger.fill(1)
    forger = Forger(ledger)
    forger.add(records.RUN_STARTED, packed(EXAMPLES[records.RUN_STARTED]), seq=seq, at=at)
    forger.write()
    ledger.fill(1)

    assert not ledger.verify().ok
    with Index(ledger.path) as index:
        assert {run.outcome for run in index.runs()} <= {"ok", "unfinished"}


hostile = st.sampled_from(HOSTILE)


@given(changes=st.dictionaries(st.integers(0, 14), hostile, min_size=1), kind=st.sampled_from(sorted(EXAMPLES)))
def test_any_mixture_of_fields_is_a_record_or_refused(changes: dict[int, Any], kind: str) -> None:
    fields = list(EXAMPLES[kind])
    for index, value in changes.items():
        fields[index % len(fields)] = value
    try:
        found = records.fields_of(kind, packed(tuple(fields)))
    except ValueError:
        return
    assert (*found,) == records.FIELDS[kind]


DEEP = "[" * 200_000


@each_row("text", [DEEP, '{"a":' * 200_000, "", "1" * 10_000, "\ud800", "{}", "[1]", "[[]]", "null"])
def test_json_of_any_depth_is_refused_in_every_file(ledger: Ledger, tmp_path: Path, text: str) -> None:
    ledger.fill(1)
    file = tmp_path / "hostile.json"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    for reader in (read, Head.load):
        with pytest.raises(AuditError):
            reader(file)


def test_a_receipt_of_any_shape_is_not_right(ledger: Ledger) -> None:
    ledger.fill(1)
    with Index(ledger.path) as index:
        receipt = export(index, index.find("last"))
    plain = [None, 1, "", "x", [], {}, [[]], nested(900), {"records": [{}]}, 2**70, "\ud800"]
    for name in ("run", "events", "head", "before", "first_seq", "blobs"):
        for value in plain:
            assert not check(receipt | {name: value}, [ledger.key]).ok


def test_extensions_inside_one_another_are_not_decoded_one_by_one() -> None:
    """Each layer would be copied once more: 100 layers of 10 MB are a gigabyte."""
    data = msgpack.packb(["a", "b"])
    for _ in range(100):
        data = msgpack.packb(["type", msgpack.ExtType(STAND_IN, data)])

    with pytest.raises(ValueError, match="inside another"):
        packing.unpack(data)
