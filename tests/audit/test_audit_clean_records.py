"""The quick way over records that are as they should be: it finds exactly what looking at each record finds."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from audit.adversary.test_poisoned_records import HOSTILE, packed
from audit.ledger import Ledger
from audit.record_examples import EXAMPLES
from toolcell.audit import chain_check, records
from toolcell.audit.chain_check import ChainCheck
from toolcell.audit.clean_records import CleanRecords, pass_clean
from toolcell.audit.format import GENESIS, MAGIC, Frame, encode_frame, read_log_id, split_segment
from toolcell.audit.keys import HmacKey

KEY = HmacKey(bytes(32))
SALT = bytes(records.SALT_BYTES)
CHAIN = "0" * 12
EDITS = ("flip", "cut", "add", "drop", "twice", "swap")


class Segment:
    """The only segment of a closed log, and its records as they lie in it."""

    def __init__(self, log: str, chain: str, data: bytes, pieces: list[bytes]) -> None:
        self.log, self.chain, self.data, self.pieces = log, chain, data, pieces


@pytest.fixture(scope="module")
def segment(tmp_path_factory: pytest.TempPathFactory) -> Segment:
    ledger = Ledger(tmp_path_factory.mktemp("clean") / "log")
    ledger.key = KEY
    ledger.fill(12, heads=tmp_path_factory.mktemp("heads"), settings={"checkpoint_records": 7})
    (path,) = ledger.segments()
    data = path.read_bytes()
    pieces = [data[each.offset : each.end] for each in split_segment(data) if isinstance(each, Frame)]
    return Segment(read_log_id(ledger.directory), path.parent.name, data, pieces)


def checked(log: str, chain: str, segments: list[bytes], is_quick: bool) -> dict[str, Any]:
    """Everything that a check knows at its end."""

    def pass_nothing(data: bytes, offset: int, seq: int, last_hash: bytes) -> CleanRecords:
        return CleanRecords(offset, [], 0)

    with pytest.MonkeyPatch.context() as patch:
        if not is_quick:
            patch.setattr(chain_check, "pass_clean", pass_nothing)
        check = ChainCheck(log, chain, {KEY.key_id: KEY}, watched=dict.fromkeys((5, 30, 10_000)))
        for number, data in enumerate(segments, start=1):
            check.check_segment(number, data)
        check.finish()
    return {each.name: getattr(check, each.name) for each in fields(check)}


def assert_same(log: str, chain: str, *segments: bytes) -> list[str]:
    """Compare both ways; return what was found."""
    quick, slow = (checked(log, chain, [*segments], is_quick) for is_quick in (True, False))
    assert quick == slow
    return [each.kind for each in quick["findings"]]


def test_most_records_of_a_log_are_passed_quickly(segment: Segment) -> None:
    log, chain, data = segment.log, segment.chain, segment.data
    passed, check = 0, ChainCheck(log, chain, {KEY.key_id: KEY})
    for offset in (each.offset for each in split_segment(data) if isinstance(each, Frame)):
        before = next((each for each in split_segment(data) if isinstance(each, Frame) and each.end == offset), None)
        seq = records.parse(before.body).seq if before is not None else 0
        passed += bool(pass_clean(data, offset, seq, before.record_hash if before is not None else GENESIS).hashes)
    check.check_segment(1, data)

    assert not check.findings and check.runs == 12
    assert passed == 48  # all records of runs
    assert assert_same(log, chain, data) == []


@given(edits=st.lists(st.tuples(st.sampled_from(EDITS), st.integers(0), st.integers(0, 255)), max_size=4))
def test_damaged_logs_are_found_damaged_in_the_same_way(segment: Segment, edits: list[tuple[str, int, int]]) -> None:
    log, chain, pieces = segment.log, segment.chain, [*segment.pieces]
    for what, where, byte in edits:
        at = where % len(pieces)
        one = bytearray(pieces[at])
        match what:
            case "flip" if one:
                one[where // len(pieces) % max(1, len(one))] ^= byte
            case "cut":
                del one[where // len(pieces) % max(1, len(one)) :]
            case "add":
                one += bytes([byte]) * (byte % 90)
            case "drop":
                one.clear()
            case "twice":
                one *= 2
            case "swap":
                pieces[at - 1], one = bytes(one), bytearray(pieces[at - 1])
        pieces[at] = bytes(one)
    data = MAGIC + b"".join(pieces)
    half = MAGIC + b"".join(pieces[: len(pieces) // 2])
    assert_same(log, chain, data)
    assert_same(log, chain, half, MAGIC + b"".join(pieces[len(pieces) // 2 :]))


def chained(contents: list[tuple[str, int, bytes]], skipped: int = 0) -> bytes:
    """A segment of records that are linked as they should be."""
    data, previous = MAGIC, GENESIS
    first = packed((3, "log", CHAIN, 1, {}))
    for seq, (kind, run, content) in enumerate([(records.SEGMENT, 0, first), *contents], start=1):
        seq += skipped if seq > 1 else 0
        salt = SALT if kind in records.RUN_KINDS else b""
        framed, previous = encode_frame(previous, records.encode_body(seq, 5, run, kind, content, salt))
        data += framed
    return data


@pytest.mark.parametrize("kind", sorted(records.RUN_KINDS))
def test_records_that_no_writer_writes_are_found_in_the_same_way(kind: str) -> None:
    found = set()
    for index in range(len(EXAMPLES[kind])):
        for value in HOSTILE:
            content = [*EXAMPLES[kind]]
            content[index] = value
            run = 2 if kind == records.RUN_STARTED else 1
            data = chained([(kind, run, packed(tuple(content))), (kind, 3, packed(tuple(EXAMPLES[kind])))])
            found |= {*assert_same("log", CHAIN, data)}
    assert chain_check.NOT_A_RECORD in found
    for content_bytes in (
        b"",
        b"\xc0",
        packed(tuple(EXAMPLES[kind]))[:-1],
        packed(tuple(EXAMPLES[kind])) + b"\0",
        packed((1,)),
    ):
        assert_same("log", CHAIN, chained([(kind, 2, content_bytes)]))
    for run, skipped in ((2, 0), (9, 0), (2, 1), (3, 1)):  # a run of another number, and a record that is missing
        assert_same("log", CHAIN, chained([(kind, run, packed(tuple(EXAMPLES[kind])))], skipped))
    wide = packed(tuple(EXAMPLES[kind]))
    assert assert_same("log", CHAIN, chained([(kind, 2, b"\xdc" + (wide[0] & 15).to_bytes(2, "big") + wide[1:])])) == [
        chain_check.NOT_CANONICAL
    ]
