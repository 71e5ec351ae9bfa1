"""What is listed, shown and counted comes from records, and says how far each run can be trusted."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
from pathlib import Path

import pytest

from audit.adversary.test_forged_history import append_record, forge_run
from audit.ledger import Ledger
from audit.record_examples import EXAMPLES
from toolcell.audit import indexing, receipt, records
from toolcell.audit.format import Frame, encode_frame, segment_path, split_segment
from toolcell.audit.keys import HmacKey, Verifier
from toolcell.audit.query import BROKEN, UNSIGNED, UNVERIFIED, VERIFIED, Index, RunSummary
from toolcell.support import packing


def listed(ledger: Ledger, keys: list[Verifier] | None = None) -> list[RunSummary]:
    with Index(ledger.directory, [ledger.key] if keys is None else keys) as index:
        index.refresh()
        return index.runs()


def trusts(ledger: Ledger, keys: list[Verifier] | None = None) -> list[str]:
    return [run.trust for run in listed(ledger, keys)]


def frames(path: Path) -> list[Frame]:
    return [piece for piece in split_segment(path.read_bytes()) if isinstance(piece, Frame)]


def edit(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))


def test_reading_writes_nothing_into_the_logs_directory(ledger: Ledger) -> None:
    ledger.fill(2)
    before = sorted(ledger.directory.rglob("*"))
    with Index(ledger.directory) as index:
        index.refresh()
        index.stats()
        receipt.export(index, index.find("last"))

    assert sorted(ledger.directory.rglob("*")) == before


def test_the_index_is_for_its_owner_alone(ledger: Ledger) -> None:
    ledger.fill(1)
    listed(ledger)
    (file,) = indexing.default_index_dir().iterdir()

    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("change", ["directory", "file", "link"])
def test_an_index_that_others_can_write_is_not_used(ledger: Ledger, change: str) -> None:
    ledger.fill(1)
    listed(ledger)
    (file,) = indexing.default_index_dir().iterdir()
    with sqlite3.connect(file) as db:
        db.execute("UPDATE runs SET title = 'forged'")
    match change:
        case "directory":
            file.parent.chmod(0o777)
        case "file":
            file.chmod(0o666)
        case "link":
            file.rename(file.with_suffix(".other"))
            file.symlink_to(file.with_suffix(".other"))

    assert [run.title for run in listed(ledger)] == ["set_result(0)"]


def test_an_index_in_the_logs_directory_is_not_read(ledger: Ledger) -> None:
    ledger.fill(1)
    listed(ledger)
    (file,) = indexing.default_index_dir().iterdir()
    with sqlite3.connect(file) as db:
        db.execute("UPDATE runs SET title = 'forged'")
    shutil.move(file, ledger.directory / "index.sqlite")

    assert [run.title for run in listed(ledger)] == ["set_result(0)"]


def test_each_run_says_whether_it_is_signed(ledger: Ledger) -> None:
    ledger.fill(2)
    with ledger.opened(settings={"checkpoint_s": 3600}) as recorder:
        ledger.run(recorder, "set_result('new')")

        assert trusts(ledger) == [VERIFIED, VERIFIED, UNSIGNED]
    assert trusts(ledger) == [VERIFIED] * 3
    assert trusts(ledger, []) == [UNVERIFIED] * 3
    assert trusts(ledger, [HmacKey.generate()]) == [UNVERIFIED] * 3


def test_a_run_added_behind_the_end_is_never_shown_as_verified(ledger: Ledger) -> None:
    ledger.fill(2)
    forge_run(ledger, ledger.chain())
    ledger.fill(1)

    assert {run.id == "forged": run.trust for run in listed(ledger)} == {False: VERIFIED, True: UNSIGNED}


@pytest.mark.parametrize("is_indexed", [True, False])
@pytest.mark.parametrize("attack", ["edited", "removed", "moved"])
def test_a_run_whose_records_changed_is_broken(ledger: Ledger, attack: str, is_indexed: bool) -> None:
    for _ in range(3):
        ledger.fill(1)  # each is signed
    path = segment_path(ledger.chain(), 1)
    if is_indexed:
        assert trusts(ledger) == [VERIFIED] * 3
    data, found = path.read_bytes(), frames(path)
    ends = [piece for piece in found if records.parse(piece.body).kind == records.RUN_ENDED]
    end = ends[1]
    match attack:
        case "edited":
            edit(path, end.body, end.body[:-1] + bytes([end.body[-1] ^ 1]))
        case "removed":
            path.write_bytes(data[: end.offset] + data[end.end :])
        case "moved":
            path.write_bytes(data[: end.offset] + data[end.end :] + data[end.offset : end.end])
    with Index(ledger.directory, [ledger.key]) as index:
        index.refresh()

        assert [run.trust for run in index.runs()] == [VERIFIED, BROKEN, VERIFIED]
        assert index.changed == ([ledger.chain().name] if is_indexed else [])
        assert index.stats()["trust"] == {VERIFIED: 2, BROKEN: 1}


def test_what_stands_before_a_break_and_was_never_signed_is_broken(ledger: Ledger) -> None:
    ledger.fill(3)
    path = segment_path(ledger.chain(), 1)
    edit(path, b"set_result(1)", b"set_result(9)")

    assert trusts(ledger) == [BROKEN, VERIFIED]


def test_a_run_that_is_gone_is_not_listed_and_its_chain_is_named(ledger: Ledger) -> None:
    ledger.fill(2)
    chain = ledger.chain()
    assert len(listed(ledger)) == 2
    shutil.rmtree(chain)
    with Index(ledger.directory, [ledger.key]) as index:
        index.refresh()

        assert (index.runs(), index.changed) == ([], [chain.name])


def test_file_times_and_sizes_do_not_hide_a_change(ledger: Ledger) -> None:
    ledger.fill(1)
    path = segment_path(ledger.chain(), 1)
    before = path.stat()
    assert trusts(ledger) == [VERIFIED]
    edit(path, b"set_result(0)", b"set_result(9)")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    assert listed(ledger) == []  # its first record is not a record any more


def test_a_signature_that_was_forged_breaks_what_it_is_over(ledger: Ledger) -> None:
    ledger.fill(1)
    path = segment_path(ledger.chain(), 1)
    (end,) = [piece for piece in frames(path) if records.parse(piece.body).kind == records.RUN_ENDED]
    path.write_bytes(path.read_bytes()[: end.end])
    append_record(path, records.CHECKPOINT, ("closed", ledger.key.key_id, bytes(32)))

    assert trusts(ledger) == [BROKEN]


@pytest.mark.parametrize("kind", [records.TOOLS, records.SETTINGS])
def test_settings_added_later_are_not_those_of_a_verified_run(ledger: Ledger, kind: str) -> None:
    """They have the digest that the run names, and anybody could have written them."""
    ledger.fill(1)
    real = next(each for each in ledger.found() if each.record.kind == kind).record.fields
    forged = (real["digest"], *EXAMPLES[kind][1:])
    append_record(segment_path(ledger.chain(), 1), kind, forged)
    with Index(ledger.directory, [ledger.key]) as index:
        index.refresh()
        (summary,) = index.runs()
        run = index.load(summary)

    assert summary.trust == VERIFIED
    assert (run.tools if kind == records.TOOLS else run.settings) == real


@pytest.mark.parametrize("id", ["../../escape", "/tmp/escape", "..", "-o", "a/b\0c", "\ud800", "x" * 5000])
def test_a_run_id_cannot_choose_where_a_receipt_is_written(id: str) -> None:
    name = receipt.file_name(id)

    assert Path(name).name == name
    assert name[0] not in ".-"
    assert len(name.encode("ascii")) < 200


def test_names_of_ordinary_ids_stay_as_they_are() -> None:
    assert receipt.file_name("f9ca25d0.12ab") == "f9ca25d0.12ab.receipt.json"


@pytest.mark.parametrize("kind", [records.TOOLS, records.SETTINGS])
def test_settings_added_in_place_of_removed_ones_are_not_shown(ledger: Ledger, kind: str) -> None:
    ledger.fill(1)
    path = segment_path(ledger.chain(), 1)
    (real,) = [piece for piece in frames(path) if records.parse(piece.body).kind == kind]
    digest = records.parse(real.body).fields["digest"]
    data = path.read_bytes()
    path.write_bytes(data[: real.offset] + data[real.end :])
    append_record(path, kind, (digest, *EXAMPLES[kind][1:]))
    with Index(ledger.directory, [ledger.key]) as index:
        index.refresh()
        (summary,) = index.runs()
        run = index.load(summary)

    assert summary.trust == VERIFIED
    assert (run.tools if kind == records.TOOLS else run.settings) == {}


def test_a_record_with_an_old_number_behind_the_end_breaks_its_run(ledger: Ledger) -> None:
    """It says that it is before the signature, and it stands behind it."""
    ledger.fill(1)
    path = segment_path(ledger.chain(), 1)
    (start,) = [each.record for each in ledger.found() if each.record.kind == records.RUN_STARTED]
    content = packing.pack_fields(EXAMPLES[records.CALL_STARTED])
    body = records.encode_body(start.seq + 1, 5, start.run, records.CALL_STARTED, content)
    path.write_bytes(path.read_bytes() + encode_frame(frames(path)[-1].record_hash, body)[0])

    assert trusts(ledger) == [BROKEN]
