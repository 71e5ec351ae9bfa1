"""An attacker puts things into the log's directory that are not segments. Every reader goes on and says what it found."""

from __future__ import annotations

import os
import threading
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from audit.adversary.test_poisoned_records import Forger, packed
from audit.ledger import Ledger
from toolcell.audit import chain_check, indexing, records
from toolcell.audit import verification as verifying
from toolcell.audit.chain_check import MAX_FINDINGS
from toolcell.audit.format import (
    MAGIC,
    MAX_SEGMENT_BYTES,
    OVERHEAD_BYTES,
    read_segment_file,
    segment_path,
    split_segment,
)
from toolcell.audit.keys import by_id
from toolcell.audit.query import Index
from toolcell.audit.verification import check_chain, verify
from toolcell.errors import AuditError
from toolcell.journal.frames import HEADER, INVERT

SMALL: dict[str, Any] = {"segment_bytes": 4096}


def put(kind: str, path: Path) -> None:
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "endless":
            path.symlink_to("/dev/zero")
        case "link":
            (path.parent.parent.parent / "elsewhere").write_bytes(MAGIC)
            path.symlink_to(path.parent.parent.parent / "elsewhere")
        case "directory":
            path.mkdir()
        case "huge":
            with open(path, "wb") as file:
                file.truncate(1 << 40)


@pytest.mark.parametrize("kind", ["fifo", "endless", "link", "directory", "huge"])
def test_what_is_no_file_is_neither_opened_nor_waited_for(ledger: Ledger, kind: str) -> None:
    ledger.fill(2)
    chain = ledger.chain()
    put(kind, segment_path(chain, 2))
    report = ledger.verify()
    ledger.fill(1)  # a writer begins another chain beside it

    assert chain_check.UNREADABLE in {finding.kind for finding in report.findings}
    assert report.chains[0].runs == 2  # what is before it is still checked
    with pytest.raises(AuditError, match=r"00000002\.log"):
        ledger.found()


@pytest.mark.parametrize("holes", [True, False])
def test_a_segment_of_nothing_costs_the_next_writer_and_readers_nothing(
    ledger: Ledger, holes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = MAX_SEGMENT_BYTES if holes else 32 << 20
    ledger.fill(2)
    path = segment_path(ledger.chain(), 1)
    was = path.stat().st_size
    with open(path, "r+b") as file:
        file.seek(0, os.SEEK_END)
        if not holes:
            file.write(bytes(size - was))
        file.truncate(size)
    tracemalloc.start()
    began = time.monotonic()
    ledger.fill(1)  # a writer begins another chain beside it
    took_s, (_, peak) = time.monotonic() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert took_s < 3 and peak < 16 << 20
    if holes:
        with pytest.raises(AuditError, match="holes of"):
            read_segment_file(path)


@pytest.mark.parametrize(
    "name", ["0000000\N{ARABIC-INDIC DIGIT TWO}.log", "00000002.log.bak", "2.log", "000000002.log"]
)
def test_a_file_that_is_not_named_like_a_segment_is_none(ledger: Ledger, name: str) -> None:
    ledger.fill(1)
    before = ledger.found()
    (ledger.chain() / name).write_bytes(segment_path(ledger.chain(), 1).read_bytes())

    assert ledger.found() == before
    assert ledger.verify().ok


def test_a_segment_far_behind_the_others_is_one_finding(ledger: Ledger) -> None:
    ledger.fill(1)
    segment_path(ledger.chain(), 99_999_999).write_bytes(b"")
    (finding,) = ledger.verify().findings

    assert finding.message == "segments 2 to 99999998 are not there"


def test_to_search_behind_garbage_costs_what_the_garbage_has_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers that each claim the rest of the segment would be hashed to its end, one after another."""
    hashed = 0

    def counting(previous_hash: bytes, body: bytes) -> bytes:
        nonlocal hashed
        hashed += len(body)
        return b""

    monkeypatch.setattr("toolcell.audit.format.hash_record", counting)
    costs = []
    for count in (1000, 2000, 4000):
        total = HEADER.size * count + OVERHEAD_BYTES
        sizes = [total - HEADER.size * index - OVERHEAD_BYTES for index in range(count)]
        data = b"\xff" + b"".join(HEADER.pack(size, size ^ INVERT) for size in sizes) + bytes(OVERHEAD_BYTES)
        hashed = 0
        list(split_segment(data, 0))
        costs.append(hashed / len(data))

    assert max(costs) < 10


def test_records_added_by_the_thousand_are_counted_and_not_all_kept(ledger: Ledger) -> None:
    """Anybody can chain records to a log: what a reader keeps of them must not grow with them."""
    ledger.fill(1)
    forger = Forger(ledger.segments()[0])
    for number in range(2 * MAX_FINDINGS):
        forger.add(records.RUN_ENDED, b"\x90")
        forger.add(records.CHECKPOINT, packed(("time", f"{number:016x}", b"")))
    forger.write()
    report = ledger.verify()
    counts = Counter(each.kind for each in report.findings)

    assert counts[chain_check.NOT_A_RECORD] == counts[chain_check.UNKNOWN_KEY] == MAX_FINDINGS
    assert f"{MAX_FINDINGS} more findings of kind not_a_record are not listed" in " ".join(report.notes)
    assert not report.is_unchecked


ABOUT_LOG = {
    records.REDACTED: ("0" * 12, 1, "run", b"o" * 32, b"l" * 32, ["args"], "eve", "r" * 60, {}),
    records.OPENED: ("host", 1, "1", "3", "0" * 16, "hmac", [["0" * 12, 1, b"h" * 32, "left"]], {}),
}


@pytest.mark.parametrize("kind", ABOUT_LOG)
def test_unsigned_records_about_the_log_are_kept_to_a_number_and_the_rest_is_one_finding(
    ledger: Ledger, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody can add records of redactions: what a check keeps of them must not grow with them."""
    monkeypatch.setattr(chain_check, "MAX_UNSIGNED", 20)
    ledger.fill(1)
    forger = Forger(ledger.segments()[0])
    for _ in range(50):
        forger.add(kind, packed(ABOUT_LOG[kind]))
    forger.write()
    report = ledger.verify()
    (finding,) = (each for each in report.findings if each.kind == chain_check.PASSED_OVER)
    check = check_chain(ledger.chain(), report.log, by_id([ledger.key]))
    kept = [*check.redactions, *check.left]

    assert finding.message.startswith("30 records about the log itself were not looked at")
    assert len(kept) <= 20 + 2  # and what the writer signed


def test_large_unsigned_records_about_the_log_are_not_kept(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_check, "MAX_UNSIGNED_BYTES", 5000)
    ledger.fill(1)
    forger = Forger(ledger.segments()[0])
    for _ in range(3):
        forger.add(records.REDACTED, packed((*ABOUT_LOG[records.REDACTED][:-2], "r" * 4000, {})))
    forger.write()

    assert [each.kind for each in ledger.verify().findings] == [chain_check.PASSED_OVER]


def test_as_many_records_about_the_log_as_there_are_may_be_signed(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain_check, "MAX_UNSIGNED", 5)
    for _ in range(12):  # each opening is a record, and is signed
        ledger.fill(1)

    assert ledger.verify().ok


def test_a_link_in_place_of_a_chain_is_neither_read_nor_written_through(ledger: Ledger, tmp_path: Path) -> None:
    ledger.fill(1)
    chain, elsewhere = ledger.chain(), tmp_path / "elsewhere"
    chain.rename(elsewhere)
    (elsewhere / "lock").unlink()
    chain.symlink_to(elsewhere)
    ledger.fill(1)

    assert not (elsewhere / "lock").exists()
    assert {each.kind for each in ledger.verify().findings} == {"chain_missing"}


def test_a_log_that_is_written_rotated_and_pruned_meanwhile_raises_no_alarm(ledger: Ledger) -> None:
    checks = int(os.environ.get("AUDIT_CHECKS", "30"))
    settings = {**SMALL, "keep_bytes": 30_000, "checkpoint_s": 0.01}
    ledger.fill(1)
    stop = threading.Event()

    def write() -> None:
        with ledger.opened(settings=settings) as recorder:
            while not stop.is_set():
                ledger.run(recorder)

    def newest() -> int:
        return max(int(path.stem) for path in ledger.segments())

    writer = threading.Thread(target=write)
    writer.start()
    alarms: list[object] = []
    try:
        while (checks := checks - 1) >= 0 or newest() <= 3:
            alarms += verify(ledger.directory, [ledger.key]).findings
            assert writer.is_alive()
    finally:
        stop.set()
        writer.join()

    assert alarms == []


@pytest.mark.parametrize("reader", [verifying, indexing], ids=["verify", "list"])
def test_a_rotation_between_listing_and_reading_raises_no_alarm(
    reader: ModuleType, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.fill(9, settings=SMALL)
    first, second, *rest = ledger.segments()
    written = {path: path.read_bytes() for path in (first, second)}
    for path in rest:
        path.unlink()
    *_, rotated = split_segment(written[first])
    first.write_bytes(written[first][: rotated.offset])  # as the writer leaves them: the next file is there
    second.write_bytes(b"")

    def read_slowly(path: Path) -> bytes:
        data = read_segment_file(path)
        for each, whole in written.items():
            each.write_bytes(whole)
        return data

    monkeypatch.setattr(reader, "read_segment_file", read_slowly)
    with Index(ledger.directory, [ledger.key]) as index:
        for _ in range(2):
            index.refresh()
        runs = index.runs()
    report = ledger.verify()

    assert {finding.kind for finding in report.findings} <= {chain_check.CUT_OFF}  # the rest of it was removed
    assert "broken" not in {run.trust for run in runs}
