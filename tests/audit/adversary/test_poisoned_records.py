"""Records that are chained as they should be and hold what no writer writes. Every reader goes on."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from audit.adversary.test_forged_history import last_frame
from audit.ledger import Ledger
from audit.record_examples import EXAMPLES
from toolcell.audit import records
from toolcell.audit.filters import Filter
from toolcell.audit.format import encode_frame, segment_path
from toolcell.audit.query import Index
from toolcell.audit.receipt import check, export, read
from toolcell.audit.replays import runtime_options
from toolcell.audit.signatures import load_heads, read_prune_record
from toolcell.cli import audit_terminal
from toolcell.errors import AuditError, ToolcellError
from toolcell.support import packing

STAND_IN, BIG_INT = 2, 1


def nested(depth: int, inside: Any = 1) -> Any:
    for _ in range(depth):
        inside = [inside]
    return inside


HOSTILE: list[Any] = [
    None, True, -1, 2**63, 2**64 - 1, 1e308, float("nan"), "", "\ud800", "\x1b[2J\x00", "9" * 5000, b"\xff", [], [[]],
    {}, {"why": 1}, {1: 2}, {"\ud800": "\ud800"}, [None] * 4, ["a", "b", "c", "d"], nested(60), nested(500),
    {"args_cut": 1, "value_cut": {}, "coerced": 1, "more": None}, {"wall_s": "x", "line": "y"}, {"wall_s": float("inf")},
    msgpack.ExtType(BIG_INT, b"9" * 4000), msgpack.ExtType(BIG_INT, b"x"), msgpack.ExtType(9, b""),
    msgpack.ExtType(STAND_IN, msgpack.packb(["type", "text"])), msgpack.ExtType(STAND_IN, msgpack.packb([1])),
    msgpack.ExtType(STAND_IN, msgpack.packb(["type", msgpack.ExtType(STAND_IN, msgpack.packb(["a", "b"]))])),
]  # fmt: skip


def packed(fields: tuple[Any, ...]) -> bytes:
    return bytes(msgpack.Packer(unicode_errors="surrogatepass").pack(fields))


class Forger:
    """Appends records to a segment, each linked to the one before it."""

    def __init__(self, path: Path) -> None:
        last = last_frame(path)
        self.seq, self._hash, self._path, self._data = records.parse(last.body).seq, last.record_hash, path, bytearray()

    def add(self, kind: str, content: bytes, *, run: int | None = None, seq: int | None = None, at: int = 5) -> int:
        self.seq = self.seq + 1 if seq is None else seq
        run = self.seq if run is None else run
        framed, self._hash = encode_frame(self._hash, records.encode_body(self.seq, at, run, kind, content))
        self._data += framed
        return self.seq

    def write(self) -> None:
        with open(self._path, "ab") as file:
            file.write(self._data)


def poison(forger: Forger, kind: str) -> None:
    """Add a record for each field of a kind and each hostile value, each in a run of its own."""
    for index in range(len(EXAMPLES[kind])):
        for value in HOSTILE:
            fields = list(EXAMPLES[kind])
            fields[index] = value
            run = 0
            if kind in (records.CALL_STARTED, records.CALL_ENDED, records.RUN_ENDED):
                run = forger.add(records.RUN_STARTED, packed(EXAMPLES[records.RUN_STARTED]))
            if kind == records.CALL_ENDED:
                forger.add(records.CALL_STARTED, packed(EXAMPLES[records.CALL_STARTED]), run=run)
            forger.add(kind, packed(tuple(fields)), run=None if kind == records.RUN_STARTED else run)
            if kind in (records.SETTINGS, records.TOOLS):  # of a run that names them
                forger.add(records.RUN_STARTED, packed(EXAMPLES[records.RUN_STARTED]))


def read_everything(ledger: Ledger) -> int:
    """Use every reader; return how many runs there are."""
    console = Console(file=io.StringIO(), width=100)
    with Index(ledger.directory, [ledger.key]) as index:
        index.refresh()
        runs = index.runs(Filter(limit=None))
        audit_terminal.show_list(runs, console)
        audit_terminal.show_stats(index.stats(), console)
        json.dumps([[run.to_dict() for run in runs], index.stats()])
        for summary in runs:
            try:
                run = index.load(summary)
            except AuditError:
                continue
            json.dumps(run.to_dict())
            audit_terminal.show_run(run, console, summary.trust)
            try:
                runtime_options(run)
            except ToolcellError:
                pass
        with pytest.raises(AuditError):
            export(index, runs[0])
    audit_terminal.show_report(ledger.verify(), console)
    return len(runs)


@pytest.mark.parametrize("kind", sorted(EXAMPLES))
def test_a_record_with_a_field_of_any_kind_stops_no_reader(ledger: Ledger, kind: str) -> None:
    ledger.fill(1)
    path = segment_path(ledger.chain(), 1)
    forger = Forger(path)
    poison(forger, kind)
    forger.add(records.RUN_STARTED, packed(EXAMPLES[records.RUN_STARTED]))
    forger.write()

    assert read_everything(ledger) > 1
    ledger.fill(1)  # a later writer begins a chain of its own
    assert ledger.the_run().outcome == "ok"


@pytest.mark.parametrize(("seq", "at"), [(2**64 - 1, 5), (2**63, 5), (2**63 - 1, 5), (2**62, 2**64 - 1)])
def test_huge_numbers_stop_neither_readers_nor_writers(ledger: Ledger, seq: int, at: int) -> None:
    ledger.fill(1)
    forger = Forger(segment_path(ledger.chain(), 1))
    forger.add(records.RUN_STARTED, packed(EXAMPLES[records.RUN_STARTED]), seq=seq, at=at)
    forger.write()
    ledger.fill(1)

    assert not ledger.verify().ok
    with Index(ledger.directory) as index:
        index.refresh()
        assert {run.outcome for run in index.runs()} <= {"ok", "unfinished"}


@given(body=st.binary(max_size=80), kind=st.sampled_from(sorted(EXAMPLES)))
def test_any_bytes_are_a_record_or_refused(body: bytes, kind: str) -> None:
    for data in (body, records.encode_body(1, 2, 0, kind, body)):
        try:
            record = records.parse(data)
        except ValueError:
            continue
        records.is_canonical(record)


hostile = st.sampled_from(HOSTILE)


@given(changes=st.dictionaries(st.integers(0, 14), hostile, min_size=1), kind=st.sampled_from(sorted(EXAMPLES)))
def test_any_mixture_of_fields_is_a_record_or_refused(changes: dict[int, Any], kind: str) -> None:
    fields = list(EXAMPLES[kind])
    for index, value in changes.items():
        fields[index % len(fields)] = value
    try:
        record = records.parse(records.encode_body(1, 2, 1, kind, packed(tuple(fields))))
    except ValueError:
        return
    assert (*record.fields,) == records.FIELDS[kind]


DEEP = "[" * 200_000


@pytest.mark.parametrize("text", [DEEP, '{"a":' * 200_000, "", "1" * 10_000, "\ud800", "{}", "[1]", "[[]]", "null"])
def test_json_of_any_depth_is_refused_in_every_file(ledger: Ledger, tmp_path: Path, text: str) -> None:
    ledger.fill(1)
    file = tmp_path / "hostile.json"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    (ledger.chain() / "stub.json").write_bytes(file.read_bytes())
    for reader in (read, load_heads):
        with pytest.raises(AuditError):
            reader(file)
    with pytest.raises(AuditError):
        read_prune_record(ledger.chain())

    assert not ledger.verify().ok


def test_a_receipt_of_any_shape_is_not_right(ledger: Ledger) -> None:
    ledger.fill(1)
    with Index(ledger.directory) as index:
        index.refresh()
        receipt = export(index, index.find("last"))
    plain = [None, 1, "", "x", [], {}, [[]], nested(900), {"records": [{}]}, 2**70, "\ud800"]
    for name in ("log", "chain", "run", "ways"):
        for value in plain:
            assert not check(receipt | {name: value}, [ledger.key]).ok
    for name in ("before", "first_seq", "records"):
        for value in plain:
            ways = [*receipt["ways"][:-1], receipt["ways"][-1] | {name: value}]
            assert not check(receipt | {"ways": ways}, [ledger.key]).ok


def test_extensions_inside_one_another_are_not_decoded_one_by_one() -> None:
    """Each layer would be copied once more: 100 layers of 10 MB are a gigabyte."""
    data = msgpack.packb(["a", "b"])
    for _ in range(100):
        data = msgpack.packb(["type", msgpack.ExtType(STAND_IN, data)])

    with pytest.raises(ValueError, match="inside another"):
        packing.unpack(data)
