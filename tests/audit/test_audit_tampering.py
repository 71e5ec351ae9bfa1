"""Every change to a log is found, with its place. An unchanged log gives no alarm. One test per row of docs/audit-evidence.md.

Whoever tampers may write the log's directory, and has neither the key nor the heads kept elsewhere.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from audit.ledger import Ledger
from toolcell.audit import chain_check, records, verification
from toolcell.audit.chain_check import ChainCheck
from toolcell.audit.format import (
    GENESIS,
    MAGIC,
    PRUNE_FILE,
    Frame,
    chain_directories,
    create_log,
    encode_frame,
    read_log_id,
    segment_files,
    segment_path,
    split_segment,
)
from toolcell.audit.keys import HmacKey
from toolcell.audit.signatures import Head
from toolcell.audit.writer import ChainWriter
from toolcell.support import packing

pytestmark = pytest.mark.quick

RUNS = 50
SMALL = {"segment_bytes": 4096}


@dataclass(frozen=True)
class Written:
    """The only segment of a closed log, taken apart."""

    ledger: Ledger
    data: bytes
    pieces: list[Frame]
    states: list[ChainCheck]
    """What a checker knows before each record."""

    def end_of(self, index: int) -> int:
        return self.pieces[index].end

    def before(self, index: int) -> ChainCheck:
        """A checker that has seen every record before this one."""
        return self.states[index].copy()

    def raw(self, index: int) -> bytes:
        """One record as it lies in the file."""
        return self.data[self.pieces[index].offset : self.pieces[index].end]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    ledger = Ledger(tmp_path_factory.mktemp("tampering") / "log")
    ledger.fill(RUNS, heads=tmp_path_factory.mktemp("heads"))
    (path,) = ledger.segments()
    data = path.read_bytes()
    pieces = [piece for piece in split_segment(data) if isinstance(piece, Frame)]
    check = ChainCheck(read_log_id(ledger.directory), path.parent.name, {ledger.key.key_id: ledger.key}, segment=1)
    states = []
    for index, piece in enumerate(pieces):
        states.append(check.copy())
        check.check_piece(piece, is_first=index == 0)
    check.finish()
    assert not check.findings
    assert check.runs == RUNS
    return Written(ledger, data, pieces, states)


def findings_from(check: ChainCheck, data: bytes, is_first: bool, records_enough: int = 3) -> list[chain_check.Finding]:
    """What a checker finds in the rest of a segment; the first few records tell."""
    for index, piece in enumerate(split_segment(data, 0)):
        check.check_piece(piece, is_first=is_first and index == 0)
        if index > records_enough and check.findings:
            break
    check.finish()
    return check.findings


def test_a_clean_log_raises_no_alarm(written: Written) -> None:
    report = verification.verify(written.ledger.directory, [written.ledger.key], heads=[head_of(written)])

    assert report.ok
    assert report.notes == []
    assert report.chains[0].is_closed
    assert report.chains[0].unsigned == 0


def head_of(written: Written) -> Head:
    last = written.pieces[-1]
    record = records.parse(last.body)
    name = written.ledger.chain().name
    return Head.sign(read_log_id(written.ledger.directory), name, record.seq, last.record_hash, 5, written.ledger.key)


@pytest.mark.slow
def test_every_byte_of_a_log_of_fifty_runs_matters(written: Written) -> None:
    """Each byte is flipped in turn; what comes before it was found good already, so it is not read again."""
    missed = []
    for index, piece in enumerate(written.pieces):
        raw, rest = bytearray(written.raw(index)), written.data[piece.end :]
        following = rest[: 4 * len(raw) + 2000]
        for at in range(len(raw)):
            raw[at] ^= 0xFF
            found = findings_from(written.before(index), bytes(raw) + following, index == 0, records_enough=-1)
            if not found or found[0].offset != 0 or found[0].seq not in (None, index + 1):
                missed.append((index, at, found[:1]))
            raw[at] ^= 0xFF
    for at in range(len(MAGIC)):
        changed = bytearray(written.data)
        changed[at] ^= 0x01
        check = written.states[0].copy()
        check.check_segment(1, bytes(changed))
        assert check.findings

    assert missed == []
    assert len(written.data) > 30_000


def test_a_few_bytes_flipped_in_the_file_itself_are_found_too(written: Written, tmp_path: Path) -> None:
    """The same through `verify`, from the disk."""
    for at in range(7, len(written.data), len(written.data) // 40):
        changed = bytearray(written.data)
        changed[at] ^= 0x10
        report = tampered(written, tmp_path / str(at), bytes(changed))
        assert not report.ok, at


def tampered(written: Written, directory: Path, data: bytes, heads: list[Head] | None = None) -> verification.Report:
    shutil.copytree(written.ledger.directory, directory)
    (chain,) = chain_directories(directory)
    segment_path(chain, 1).write_bytes(data)
    return verification.verify(directory, [written.ledger.key], heads=heads or [])


def test_every_record_taken_out_is_missed(written: Written) -> None:
    for index in range(len(written.pieces) - 1):
        rest = written.data[written.end_of(index) :]
        found = findings_from(written.before(index), rest[:5000], is_first=index == 0)
        kinds = {finding.kind for finding in found}
        assert chain_check.MISSING in kinds, index
        assert next(f for f in found if f.kind == chain_check.MISSING).seq == index + 1


def test_the_last_record_taken_out_is_missed_by_the_head(written: Written, tmp_path: Path) -> None:
    cut = written.data[: written.pieces[-1].offset]

    assert tampered(written, tmp_path / "without", cut).ok  # nothing in the log itself can tell
    report = tampered(written, tmp_path / "with", cut, [head_of(written)])
    assert [finding.kind for finding in report.findings] == [chain_check.CUT_OFF]
    assert report.findings[0].seq == len(written.pieces)


def test_every_two_records_swapped_are_found(written: Written) -> None:
    """All neighbours, and each record with one further on."""
    count = len(written.pieces)
    pairs = [(first, first + 1) for first in range(count - 1)]
    pairs += [(first, (first * 7 + 13) % count) for first in range(count)]
    for first, second in pairs:
        first, second = sorted((first, second))
        if first == second:
            continue
        between = written.data[written.end_of(first) : written.pieces[second].offset]
        data = written.raw(second) + between + written.raw(first) + written.data[written.end_of(second) :]
        found = findings_from(written.before(first), data[:6000], is_first=first == 0)
        assert {chain_check.MISSING, chain_check.REORDERED} & {finding.kind for finding in found}, (first, second)


def test_a_swap_is_called_a_swap(written: Written) -> None:
    data = written.raw(11) + written.raw(10) + written.data[written.end_of(11) :]
    found = findings_from(written.before(10), data, is_first=False, records_enough=10**6)

    assert [(finding.kind, finding.seq) for finding in found] == [(chain_check.REORDERED, 11)]


@pytest.mark.parametrize("index", [0, 5, 100, -1])
def test_a_record_that_is_there_twice_is_found(written: Written, index: int) -> None:
    index %= len(written.pieces)
    data = written.raw(index) * 2 + written.data[written.end_of(index) :]
    found = findings_from(written.before(index), data, is_first=index == 0, records_enough=10**6)

    assert {finding.kind for finding in found} <= {chain_check.DUPLICATED, chain_check.WRONG_SEGMENT}
    assert found[0].seq == index + 1


def test_a_tail_that_was_copied_to_the_end_is_found(written: Written) -> None:
    at = len(written.pieces) - 8
    found = findings_from(written.before(at), written.data[written.pieces[at].offset :] * 2, False, 10**6)

    assert {finding.kind for finding in found} == {chain_check.DUPLICATED}
    assert len(found) == 8


def test_a_record_from_elsewhere_is_found(written: Written, tmp_path: Path) -> None:
    other = Ledger(tmp_path / "log")
    other.fill(2)
    foreign = [piece for piece in split_segment(other.segments()[0].read_bytes()) if isinstance(piece, Frame)]
    piece = foreign[6]
    data = encode_frame(piece.previous_hash, piece.body)[0] + written.data[written.end_of(6) :]
    found = findings_from(written.before(6), data, is_first=False)

    assert found[0].kind == chain_check.BROKEN_LINK
    assert found[0].seq == 7


def rewritten(written: Written, index: int, change: Callable[[bytes], bytes]) -> bytes:
    """Change a record and compute every later hash again: an attacker without the key can do no more."""
    data, last_hash = written.data[: written.pieces[index].offset], written.pieces[index].previous_hash
    for number, piece in enumerate(written.pieces[index:], start=index):
        body = change(piece.body) if number == index else piece.body
        framed, last_hash = encode_frame(last_hash, body)
        data += framed
    return data


def with_another_tool(written: Written) -> bytes:
    """The log as if its eleventh run had called something else."""
    kinds = [records.parse(piece.body).kind for piece in written.pieces]
    calls = [index for index, kind in enumerate(kinds) if kind == records.CALL_STARTED]
    return rewritten(written, calls[10], lambda body: body.replace(b"search", b"delete"))


def test_a_chain_written_anew_without_the_key_does_not_fit_its_signatures(written: Written, tmp_path: Path) -> None:
    report = tampered(written, tmp_path / "log", with_another_tool(written))

    assert {finding.kind for finding in report.findings} == {chain_check.BAD_SIGNATURE}
    assert report.chains[0].signed_seq < len(written.pieces) - 100


def test_a_chain_written_anew_and_cut_off_before_its_signatures_is_missed_by_the_head(
    written: Written, tmp_path: Path
) -> None:
    """Without a head this is a log whose writer was killed: the report says that nothing of it is signed."""
    data = with_another_tool(written)
    pieces = [piece for piece in split_segment(data) if isinstance(piece, Frame)]
    kinds = [records.parse(piece.body).kind for piece in pieces]
    cut = data[: pieces[kinds.index(records.CHECKPOINT)].offset]
    without = tampered(written, tmp_path / "without", cut)
    report = tampered(written, tmp_path / "with", cut, [head_of(written)])

    assert [finding.kind for finding in report.findings] == [chain_check.CUT_OFF]
    assert without.ok
    assert without.chains[0].unsigned == without.chains[0].records
    assert "not closed" in " ".join(without.notes)


def test_a_history_that_the_keys_holder_wrote_anew_is_found_by_a_head_kept_elsewhere(
    written: Written, tmp_path: Path
) -> None:
    resigned = signed_again(written, with_another_tool(written))

    assert tampered(written, tmp_path / "without", resigned).ok
    report = tampered(written, tmp_path / "with", resigned, [head_of(written)])
    assert [finding.kind for finding in report.findings] == [chain_check.BROKEN_LINK]


def signed_again(written: Written, data: bytes) -> bytes:
    """What whoever has the key can do: write history anew, and sign it."""
    from toolcell.audit.signatures import checkpoint_statement

    log, chain, key = read_log_id(written.ledger.directory), written.ledger.chain().name, written.ledger.key
    made, last_hash = data[: len(MAGIC)], GENESIS
    for piece in split_segment(data):
        assert isinstance(piece, Frame)
        body, record = piece.body, records.parse(piece.body)
        if record.kind == records.CHECKPOINT:
            reason = record.fields["reason"]
            statement = checkpoint_statement(log, chain, record.seq, record.at_ns, last_hash, reason)
            content = packing.pack_fields((reason, key.key_id, key.sign(statement)))
            body = records.encode_body(record.seq, record.at_ns, record.run, record.kind, content)
        framed, last_hash = encode_frame(last_hash, body)
        made += framed
    return made


def test_the_wrong_key_verifies_nothing_and_is_named(written: Written) -> None:
    report = verification.verify(written.ledger.directory, [HmacKey.generate()], heads=[])

    assert {finding.kind for finding in report.findings} == {chain_check.UNKNOWN_KEY}
    assert written.ledger.key.key_id in report.findings[0].message
    assert report.chains[0].signed_seq == 0


def test_a_key_of_the_same_name_with_another_secret_verifies_nothing(written: Written) -> None:
    impostor = HmacKey.generate()
    impostor.key_id = written.ledger.key.key_id
    report = verification.verify(written.ledger.directory, [impostor], heads=[])

    assert {finding.kind for finding in report.findings} == {chain_check.BAD_SIGNATURE}


def test_a_head_that_was_changed_is_found(written: Written) -> None:
    head = head_of(written)
    forged = Head(head.log, head.chain, head.seq - 5, head.record_hash, head.at_ns, head.key, head.signature)
    report = verification.verify(written.ledger.directory, [written.ledger.key], heads=[forged])

    assert [finding.kind for finding in report.findings] == [chain_check.BAD_HEAD]


def test_a_head_that_needs_a_key_that_was_not_given_is_not_called_forged(written: Written) -> None:
    writer, other = written.ledger.key, HmacKey.generate()
    head = head_of(written)
    foreign = Head.sign(head.log, head.chain, head.seq, head.record_hash, head.at_ns, other)
    report = verification.verify(written.ledger.directory, [writer], heads=[foreign])

    assert [finding.kind for finding in report.findings] == [chain_check.UNKNOWN_KEY]
    assert f"key {other.key_id} (hmac-sha256), which was not given" in report.findings[0].message
    assert not report.is_unchecked


def test_a_key_that_was_not_given_is_asked_for_once_per_chain(written: Written) -> None:
    report = verification.verify(written.ledger.directory, [HmacKey.generate()], heads=[head_of(written)])

    assert [finding.kind for finding in report.findings] == [chain_check.UNKNOWN_KEY]
    assert report.is_unchecked
    assert report.to_dict()["checked"] is False


def test_a_chain_that_was_not_closed_is_a_finding_when_that_is_asked_for(written: Written, tmp_path: Path) -> None:
    directory = tmp_path / "log"
    assert tampered(written, directory, written.data[:-10]).ok
    report = verification.verify(directory, [written.ledger.key], heads=[], strict=True)

    assert [finding.kind for finding in report.findings] == [verification.NOT_CLOSED]
    assert "is not closed (its writer was killed, or its end was cut off)" in report.findings[0].message
    assert report.findings[0].message.endswith("; all records in it are signed")
    assert verification.verify(written.ledger.directory, [written.ledger.key], heads=[], strict=True).ok


def test_a_torn_end_is_a_note_and_not_an_alarm_unless_the_head_knows_better(written: Written, tmp_path: Path) -> None:
    torn = written.data[:-10]
    report = tampered(written, tmp_path / "a", torn)

    assert report.ok
    assert "cut short" in report.notes[0]
    assert not tampered(written, tmp_path / "b", torn, [head_of(written)]).ok


# Whole segments and chains


@pytest.fixture
def segmented(ledger: Ledger) -> Ledger:
    ledger.fill(40, settings=SMALL)
    assert len(ledger.segments()) >= 5
    return ledger


def test_two_segments_that_changed_places_are_found(segmented: Ledger) -> None:
    one, other = segment_path(segmented.chain(), 2), segment_path(segmented.chain(), 3)
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    found = segmented.verify(heads=[]).findings

    wrong = [finding.segment for finding in found if finding.kind == chain_check.WRONG_SEGMENT]
    assert wrong == [2, 3]


@pytest.mark.parametrize("number", [1, 2, -2, -1])
def test_a_segment_that_was_taken_away_is_found_without_a_head(segmented: Ledger, number: int) -> None:
    numbers = list(segment_files(segmented.chain()))
    gone = numbers[number] if number < 0 else number
    segment_path(segmented.chain(), gone).unlink()
    found = segmented.verify(heads=[]).findings

    assert any(finding.segment == gone for finding in found)


def test_a_segment_of_another_chain_is_found(segmented: Ledger, tmp_path: Path) -> None:
    other = Ledger(tmp_path / "other")
    other.key = segmented.key
    other.fill(40, settings=SMALL)
    shutil.copy(segment_path(other.chain(), 3), segment_path(segmented.chain(), 3))

    assert chain_check.WRONG_SEGMENT in {finding.kind for finding in segmented.verify(heads=[]).findings}


def test_a_segment_whose_end_was_cut_off_is_found(segmented: Ledger) -> None:
    path = segment_path(segmented.chain(), 2)
    os.truncate(path, path.stat().st_size - 20)
    kinds = {finding.kind for finding in segmented.verify(heads=[]).findings}

    assert {chain_check.MISSING, chain_check.CUT_OFF} & kinds


def test_a_chain_that_was_taken_away_is_missed_by_its_head(segmented: Ledger) -> None:
    name = segmented.chain().name
    shutil.rmtree(segmented.chain())
    found = segmented.verify().findings

    assert [(finding.kind, finding.chain) for finding in found] == [(verification.CHAIN_MISSING, name)]


def test_a_chain_under_another_name_is_found(segmented: Ledger) -> None:
    segmented.chain().rename(segmented.directory / "0123456789ab")

    assert not segmented.verify(heads=[]).ok


def test_a_forged_prune_record_is_found(segmented: Ledger) -> None:
    with segmented.log(settings={**SMALL, "keep_bytes": 8000}) as log:
        log.prune()
    assert segmented.verify().ok
    pruned = segmented.chain() / PRUNE_FILE
    real = pruned.read_text()
    for changed in (real.replace('"seq": ', '"seq": 1'), real.replace('"last_segment": ', '"last_segment": 1'), "{}"):
        pruned.write_text(changed)
        assert verification.BAD_PRUNE_RECORD in {finding.kind for finding in segmented.verify(heads=[]).findings}
    pruned.unlink()
    assert chain_check.WRONG_SEGMENT in {finding.kind for finding in segmented.verify(heads=[]).findings}


def test_a_prune_record_whose_key_was_not_given_is_not_called_forged(segmented: Ledger) -> None:
    with segmented.log(settings={**SMALL, "keep_bytes": 8000}) as log:
        log.prune()
    report = segmented.verify(keys=[HmacKey.generate()], heads=[])

    assert {finding.kind for finding in report.findings} == {chain_check.UNKNOWN_KEY}
    assert report.is_unchecked


def test_a_segment_removed_beyond_the_prune_record_is_found(segmented: Ledger) -> None:
    with segmented.log(settings={**SMALL, "keep_bytes": 12_000}) as log:
        log.prune()
    first = min(segment_files(segmented.chain()))
    segment_path(segmented.chain(), first).unlink()

    assert not segmented.verify(heads=[]).ok


def test_a_record_the_writer_never_writes_is_found_even_when_signed(ledger: Ledger) -> None:
    """Not canonical: bytes that decode to a record, but that this program would have written otherwise."""
    ledger.fill(1)
    log = create_log(ledger.directory)
    chain = ChainWriter.open(ledger.directory, log, ledger.key)
    chain.append_packed(records.CALL_ENDED, 5, b"\x96\xcc" + packing.pack_fields((1, "ok", 5, None, None, {}))[1:], 1)
    chain.checkpoint("closed")
    chain.release()

    assert {finding.kind for finding in ledger.verify(heads=[]).findings} == {chain_check.NOT_CANONICAL}


def test_nothing_a_guest_says_can_pass_for_a_record(ledger: Ledger) -> None:
    """Logs, arguments, values and names made of whole frames, headers and magic numbers."""
    ledger.fill(1)
    forged = ledger.segments()[0].read_bytes().decode("latin-1")
    with ledger.opened() as recorder:
        calls = [("search", {"query": forged, forged[:200]: forged}), (forged[:100], {})]
        ledger.run(recorder, f"# {forged!r}", calls, printed=forged, value=[forged], inputs={"x": forged})
    report = ledger.verify()

    assert report.ok
    assert report.chains[0].runs == 2
    run = ledger.the_run()
    assert run.end["logs"] == [["stdout", forged]]
    assert run.calls[0].args["query"] == forged


def test_a_finding_says_where(written: Written, tmp_path: Path) -> None:
    piece = written.pieces[30]
    changed = bytearray(written.data)
    changed[piece.offset + 60] ^= 1
    report = tampered(written, tmp_path / "log", bytes(changed))
    (finding,) = report.findings

    assert finding.to_dict() == {
        "kind": chain_check.EDITED,
        "chain": written.ledger.chain().name,
        "segment": 1,
        "seq": 31,
        "offset": piece.offset,
        "message": finding.message,
    }
    assert "record 31" in finding.message
