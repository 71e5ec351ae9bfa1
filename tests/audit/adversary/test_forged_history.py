"""An attacker writes the log's directory at will and has neither the key nor the heads. What he adds stays unsigned."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from audit.ledger import Ledger
from toolcell.audit import chain_check, receipt, records, verification
from toolcell.audit.format import (
    GENESIS,
    MAGIC,
    Frame,
    chain_directories,
    encode_frame,
    read_log_id,
    segment_files,
    segment_path,
    split_segment,
)
from toolcell.audit.keys import HmacKey
from toolcell.audit.query import Index
from toolcell.audit.signatures import default_heads_dir, saved_heads
from toolcell.audit.verification import Report
from toolcell.errors import AuditError
from toolcell.support import packing

pytestmark = pytest.mark.quick


def last_frame(path: Path) -> Frame:
    return [piece for piece in split_segment(path.read_bytes()) if isinstance(piece, Frame)][-1]


def forge_run(ledger: Ledger, chain: Path, source: str = "set_result('forged')") -> None:
    """Append a run to a chain, linked as its writer links them, and without the key."""
    path = list(segment_files(chain).values())[-1]
    template = next(each for each in ledger.found() if each.record.kind == records.RUN_STARTED).record.fields
    start = tuple((template | {"id": "forged", "source": source}).values())
    append_record(path, records.RUN_STARTED, start)
    append_record(path, records.RUN_ENDED, ("ok", None, False, None, [], [0, 0, False], [], None, {}, [0, 0], {}))


def append_record(path: Path, kind: str, fields: tuple[Any, ...]) -> None:
    """Append one record that fits the one before it."""
    last = last_frame(path)
    before = records.parse(last.body)
    seq = before.seq + 1
    run = seq if kind == records.RUN_STARTED else before.run
    framed, _ = encode_frame(last.record_hash, records.encode_body(seq, 1, run, kind, packing.pack_fields(fields)))
    with open(path, "ab") as file:
        file.write(framed)


def rebuild_without_signatures(chain: Path) -> None:
    """Write a chain anew from its beginning: every record but the checkpoints, with hashes that fit."""
    (path,) = segment_files(chain).values()
    last_hash, data, seq = GENESIS, MAGIC, 0
    for piece in split_segment(path.read_bytes()):
        assert isinstance(piece, Frame)
        record = records.parse(piece.body)
        if record.kind != records.CHECKPOINT:
            seq += 1
            run = seq if record.kind == records.RUN_STARTED else record.run
            content = record.content.replace(b"set_result", b"SET_RESULT")
            framed, last_hash = encode_frame(
                last_hash, records.encode_body(seq, record.at_ns, run, record.kind, content)
            )
            data += framed
    path.write_bytes(data)


def kinds(report: Report) -> set[str]:
    return {finding.kind for finding in report.findings}


def test_a_run_appended_behind_the_end_is_never_signed(ledger: Ledger) -> None:
    ledger.fill(2)
    old_heads = saved_heads(read_log_id(ledger.directory))
    chain = ledger.chain()
    end = records.parse(last_frame(segment_path(chain, 1)).body).seq
    forge_run(ledger, chain)
    ledger.fill(1)  # a genuine run of a genuine writer
    report = ledger.verify(strict=True, heads=old_heads)

    assert kinds(report) == {verification.NOT_CLOSED}
    assert [(each.chain, each.unsigned, each.signed_seq) for each in report.chains if each.unsigned] == [
        (chain.name, 2, end)
    ]
    with Index(ledger.directory) as index, pytest.raises(AuditError, match="no checkpoint covers run forged"):
        index.refresh()
        receipt.export(index, index.find("forged"))


def test_a_chain_rebuilt_without_signatures_is_never_signed(ledger: Ledger) -> None:
    ledger.fill(2)
    chain = ledger.chain()
    rebuild_without_signatures(chain)
    shutil.rmtree(default_heads_dir())  # the attacker waits for a machine that knows no heads
    ledger.fill(1)
    report = ledger.verify(strict=True)

    assert verification.NOT_CLOSED in kinds(report)
    assert {each.chain: each.signed_seq for each in report.chains}[chain.name] == 0


def test_the_writer_records_which_chain_it_left_and_where_that_ended(ledger: Ledger) -> None:
    ledger.fill(1)
    chain = ledger.chain()
    forge_run(ledger, chain)
    last = last_frame(segment_path(chain, 1))
    ledger.fill(1)
    (left,) = [fields["left"] for fields in ledger.fields(records.OPENED) if fields["left"]]

    assert left == [[chain.name, records.parse(last.body).seq, last.record_hash, "its last record is not signed"]]
    assert any("left it: its last record is not signed" in note for note in ledger.verify().notes)


@pytest.mark.parametrize("attack", ["more", "other", "fewer", "gone"])
def test_a_chain_that_was_left_cannot_change_any_more(ledger: Ledger, attack: str) -> None:
    ledger.fill(1)
    chain = ledger.chain()
    path = segment_path(chain, 1)
    forge_run(ledger, chain)
    before = path.read_bytes()
    ledger.fill(1)
    assert ledger.verify().ok
    match attack:
        case "more":
            forge_run(ledger, chain)
        case "other":
            path.write_bytes(before[: last_frame(path).offset])
            append_record(
                path, records.RUN_ENDED, ("ok", None, False, None, [], [0, 0, False], [], None, {}, [9, 0], {})
            )
        case "fewer":
            path.write_bytes(before[: last_frame(path).offset])
        case "gone":
            shutil.rmtree(chain)
    expected = {
        "more": verification.ADDED,
        "other": verification.ADDED,
        "fewer": chain_check.CUT_OFF,
        "gone": verification.CHAIN_MISSING,
    }

    assert kinds(ledger.verify(heads=[])) == {expected[attack]}


def test_another_key_begins_another_chain(ledger: Ledger) -> None:
    ledger.fill(1)
    first = ledger.key
    ledger.key = HmacKey.generate()
    ledger.fill(1)

    assert len(chain_directories(ledger.directory)) == 2
    assert ledger.verify(keys=[first, ledger.key], strict=True).ok


def test_a_signature_of_another_chain_does_not_sign_this_one(ledger: Ledger, tmp_path: Path) -> None:
    """The last record of a chain copied behind the end of another: a signature, and not of this chain."""
    ledger.fill(1)
    chain = ledger.chain()
    other = Ledger(tmp_path / "other")
    other.key = ledger.key
    other.fill(1)
    forge_run(ledger, chain)
    path = segment_path(chain, 1)
    last, foreign = last_frame(path), records.parse(last_frame(segment_path(other.chain(), 1)).body)
    seq = records.parse(last.body).seq + 1
    framed, _ = encode_frame(
        last.record_hash, records.encode_body(seq, foreign.at_ns, 0, records.CHECKPOINT, foreign.content)
    )
    path.write_bytes(path.read_bytes() + framed)
    ledger.fill(1)

    assert [entry[3] for fields in ledger.fields(records.OPENED) for entry in fields["left"]] == [
        "its last signature is forged"
    ]
    assert chain_check.BAD_SIGNATURE in kinds(ledger.verify())


# Rollback


def test_a_log_that_was_rolled_back_is_not_continued_and_stays_found(ledger: Ledger, tmp_path: Path) -> None:
    ledger.fill(1)
    shutil.copytree(ledger.directory, tmp_path / "old")
    ledger.fill(3)
    shutil.rmtree(ledger.directory)
    shutil.copytree(tmp_path / "old", ledger.directory)
    chain = ledger.chain()
    for _ in range(2):  # the next runs do not erase the evidence
        ledger.fill(1)
        report = ledger.verify()
        assert kinds(report) == {chain_check.CUT_OFF}
        assert {finding.chain for finding in report.findings} == {chain.name}
    (left,) = [fields["left"] for fields in ledger.fields(records.OPENED) if fields["left"]]

    assert "its end was cut off" in left[0][3]
    assert any("left it: it ends at record" in note for note in report.notes)


def test_a_chain_that_is_gone_when_the_next_writer_opens_is_recorded(ledger: Ledger) -> None:
    ledger.fill(1)
    chain = ledger.chain()
    shutil.rmtree(chain)
    ledger.fill(1)
    shutil.rmtree(default_heads_dir())
    report = ledger.verify()

    assert kinds(report) == {verification.CHAIN_MISSING}
    assert report.findings[0].chain == chain.name


def test_a_log_replaced_by_another_is_found_by_a_head_that_was_kept(ledger: Ledger) -> None:
    ledger.fill(2)
    kept = saved_heads(read_log_id(ledger.directory))
    shutil.rmtree(ledger.directory)
    ledger.fill(1)
    report = ledger.verify(heads=kept, strict=True)

    assert kinds(report) == {verification.WRONG_LOG}
    assert "it was replaced" in report.findings[0].message


# Pruning


SMALL: dict[str, Any] = {"segment_bytes": 4096}


def test_file_times_and_sizes_make_nothing_expire(ledger: Ledger) -> None:
    ledger.fill(30, settings=SMALL)
    files = segment_files(ledger.chain())
    for path in files.values():
        os.utime(path, (0, 0))
    with ledger.log(settings={**SMALL, "keep_s": 3600}) as log:
        assert log.prune() == 0

    assert set(files) <= set(segment_files(ledger.chain()))


@pytest.mark.parametrize("offset", [100, -100])
def test_what_does_not_verify_is_never_removed(ledger: Ledger, offset: int) -> None:
    """A segment that was edited is evidence: it stays, and all that comes after it."""
    ledger.fill(30, settings=SMALL)
    edited = segment_path(ledger.chain(), 3)
    data = bytearray(edited.read_bytes())
    data[offset] ^= 1
    edited.write_bytes(data)
    with ledger.log(settings={**SMALL, "keep_bytes": 0}) as log:
        log.prune()

    assert min(segment_files(ledger.chain())) == 3
    assert edited.read_bytes() == data


def test_a_forged_prune_record_removes_nothing(ledger: Ledger) -> None:
    ledger.fill(30, settings=SMALL)
    with ledger.log(settings={**SMALL, "keep_bytes": 20_000}) as log:
        assert log.prune() > 0
    chain = ledger.chain()
    before = set(segment_files(chain))
    prune_record = chain / "stub.json"
    prune_record.write_text(prune_record.read_text().replace('"last_segment": ', '"last_segment": 1'))
    with ledger.log(settings={**SMALL, "keep_bytes": 0}) as log:
        assert log.prune() == 0

    assert before <= set(segment_files(chain))
