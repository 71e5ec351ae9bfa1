"""What an attacker with the directory and this code tries on the commands that read and search."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from audit.adversary.test_forged_history import append_record, forge_run
from audit.ledger import Ledger
from audit.removed_content import overwrite, redact, said_of, without_source
from audit.test_audit_commands import invoke
from toolcell.audit import chain_check, indexing, receipt, records
from toolcell.audit.filters import Filter
from toolcell.audit.format import (
    GENESIS,
    LOCK_FILE,
    LOG_FILE,
    MAGIC,
    PRUNE_FILE,
    Frame,
    encode_frame,
    hash_record,
    read_log_id,
    segment_path,
    split_segment,
)
from toolcell.audit.keys import HmacKey
from toolcell.audit.query import BROKEN, UNSIGNED, VERIFIED, Index
from toolcell.audit.reader import RecordedRun
from toolcell.audit.run_diff import compare_runs
from toolcell.audit.signatures import Head, checkpoint_statement, default_heads_dir
from toolcell.audit.verification import BAD_PRUNE_RECORD, WRONG_LOG
from toolcell.cli import audit_terminal, exits
from toolcell.errors import AuditError
from toolcell.support import packing
from toolcell.tools import RunContext


def frames(path: Path) -> list[Frame]:
    return [piece for piece in split_segment(path.read_bytes()) if isinstance(piece, Frame)]


def listed(ledger: Ledger, **wanted: Any) -> list[tuple[str, str]]:
    with Index(ledger.directory, [ledger.key]) as index:
        index.refresh()
        return [(run.id, run.trust) for run in index.runs(Filter(**wanted))]


def test_a_segment_zero_is_none(ledger: Ledger) -> None:
    """No writer makes one. It was listed, verified by nobody, and made the genuine runs look broken."""
    ledger.fill(2)
    before = listed(ledger)
    shutil.copy(segment_path(ledger.chain(), 1), ledger.chain() / "00000000.log")

    assert listed(ledger) == before
    assert {trust for _, trust in before} == {VERIFIED}


@pytest.mark.parametrize("name", [PRUNE_FILE, LOCK_FILE, LOG_FILE])
@pytest.mark.parametrize("kind", ["pipe", "endless", "directory"])
def test_no_file_of_the_log_is_waited_for_or_read_without_end(ledger: Ledger, name: str, kind: str) -> None:
    ledger.fill(1)
    path = (ledger.directory if name == LOG_FILE else ledger.chain()) / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    done: list[object] = []

    def read() -> None:
        for work in (ledger.verify, lambda: listed(ledger), lambda: ledger.fill(1)):
            try:
                done.append(work())
            except AuditError as exc:
                done.append(exc)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(20)

    assert len(done) == 3
    if name == LOG_FILE:
        assert all(isinstance(each, AuditError) for each in done)
    else:
        assert not [each for each in done if isinstance(each, AuditError)]  # also a writer goes on, in another chain
    if name == PRUNE_FILE:
        assert {finding.kind for finding in done[0].findings} == {BAD_PRUNE_RECORD}  # type: ignore[attr-defined]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every directory")
def test_a_chain_that_cannot_be_read_hides_no_other(ledger: Ledger) -> None:
    ledger.fill(1)
    other = ledger.directory / "0123456789ab"
    other.mkdir(mode=0)
    ledger.fill(1)
    try:
        assert len(listed(ledger)) == 2
        assert chain_check.UNREADABLE in {finding.kind for finding in ledger.verify().findings}
    finally:
        other.chmod(0o700)


def test_records_that_are_exchanged_while_they_are_read_are_not_shown(ledger: Ledger) -> None:
    """Between the look at the signatures and the look at the records: every hash of the forged record fits itself."""
    ledger.fill(1)
    path = segment_path(ledger.chain(), 1)
    with Index(ledger.directory, [ledger.key]) as index:
        index.refresh()
        (summary,) = index.runs()
        data = path.read_bytes()
        for frame in frames(path):
            if b"set_result(0)" in frame.body:
                body = frame.body.replace(b"set_result(0)", b"set_result(9)")
                forged, _ = encode_frame(frame.previous_hash, body)
                path.write_bytes(data[: frame.offset] + forged + data[frame.end :])

        assert summary.trust == VERIFIED
        for work in (lambda: index.load(summary), lambda: receipt.export(index, summary)):
            with pytest.raises(AuditError, match="no intact record"):
                work()


def test_a_run_with_an_id_that_is_taken_does_not_hide_the_genuine_one(ledger: Ledger) -> None:
    with ledger.opened() as recorder:
        ledger.run(recorder, "genuine = 1", context=RunContext(run_id="forged"))
    forge_run(ledger, ledger.chain(), "set_result('forged')")
    with Index(ledger.directory, [ledger.key]) as index:
        index.refresh()

        assert [run.trust for run in index.runs()].count(UNSIGNED) == 1
        assert index.load(index.find("forged")).source == "genuine = 1"


def test_a_flood_of_runs_from_the_future_hides_nothing_from_who_asks_for_verified_ones(ledger: Ledger) -> None:
    ledger.fill(2)
    for _ in range(4):
        forge_run(ledger, ledger.chain())

    assert [trust for _, trust in listed(ledger, trust=VERIFIED, limit=2)] == [VERIFIED] * 2
    assert [trust for _, trust in listed(ledger, trust=UNSIGNED, limit=3)] == [UNSIGNED] * 3
    with Index(ledger.directory, [ledger.key]) as index:
        index.refresh()
        assert (index.count(Filter(trust=VERIFIED)), index.count(Filter(trust=UNSIGNED))) == (2, 4)
    assert invoke("list", ledger.directory, "--trust", "good")[0] == exits.USAGE
    assert invoke("list", ledger.directory, "--trust", UNSIGNED)[0] == exits.OK


@pytest.mark.parametrize("blank", [" ", "\u00a0", "\u2003", "\u3000", "\u2800", "\t", "\u3164"])
def test_an_id_cannot_look_like_other_columns(ledger: Ledger, blank: str) -> None:
    ledger.fill(1)
    forge_run(ledger, ledger.chain())
    path = segment_path(ledger.chain(), 1)
    template = next(each.record.fields for each in ledger.found() if each.record.fields.get("id") == "forged")
    name = blank.join(("cafe", "ok", "verified", "3.12345678"))
    append_record(path, records.RUN_STARTED, tuple((template | {"id": name}).values()))
    out = Console(file=io.StringIO(), width=200)
    with Index(ledger.directory, [ledger.key]) as index:
        index.refresh()
        audit_terminal.show_list(index.runs(), out)
    text = out.file.getvalue()  # type: ignore[attr-defined]

    assert "cafe?ok?verified?3.123" in text
    assert text.count("verified") == 2  # the genuine one, and the name


def test_events_go_on_behind_a_run_that_cannot_be_read(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger.fill(2)
    load = Index.load

    def fails_once(self: Index, summary: Any) -> RecordedRun:
        if summary.title == "set_result(0)":
            raise AuditError("gone")
        return load(self, summary)

    monkeypatch.setattr(Index, "load", fails_once)
    for shape in ("jsonl", "ecs"):
        lines = [json.loads(line) for line in invoke("events", ledger.directory, "--format", shape)[1].splitlines()]

        assert lines[0]["event"]["action"] == "run-unreadable" and lines[0]["trust"] == BROKEN
        assert len(lines) == 4


def test_runs_with_files_of_one_name_are_compared() -> None:
    rows = [["a", None, 1, None, None], ["a", "text/plain", 1, "00", None]]
    run = RecordedRun("id", "c", 1, "code", 1, {}, end={"outcome": "ok", "files": rows})

    assert compare_runs(run, run) == []


def test_a_signature_of_an_unknown_key_does_not_put_off_a_genuine_redaction(ledger: Ledger) -> None:
    """An attacker adds a chain of his own that says that the record was redacted in another way."""
    with ledger.opened() as recorder:
        ledger.run(recorder, "x = 'planted'", context=RunContext(run_id="aaaa"))
    (path,) = ledger.segments()
    with ledger.log() as log:
        redact(log, path, "aaaa")
    (said,) = ledger.fields(records.REDACTED)
    with ledger.log(key=HmacKey.generate()) as log:
        log.append(records.REDACTED, 0, tuple((said | {"left": bytes(32)}).values()))

    assert listed(ledger) == [("aaaa", VERIFIED)]


def test_a_redacted_run_is_never_verified_by_an_unknown_key(ledger: Ledger) -> None:
    with ledger.opened() as recorder:
        ledger.run(recorder, "x = 'planted'", context=RunContext(run_id="aaaa"))
    (path,) = ledger.segments()
    said = said_of(path, "aaaa")
    overwrite(path, "aaaa")
    with ledger.log(key=HmacKey.generate()) as log:
        log.append(records.REDACTED, 0, said)

    assert [trust for _, trust in listed(ledger)] not in ([VERIFIED], [])
    assert "bad_redaction" in {finding.kind for finding in ledger.verify().findings}


def write_anew(ledger: Ledger, change: Callable[[bytes], bytes]) -> None:
    """Write the only segment with other bodies, and sign it with the genuine key."""
    path = segment_path(ledger.chain(), 1)
    log, last_hash, data = read_log_id(ledger.directory), GENESIS, MAGIC
    for piece in frames(path):
        record, body = records.parse(piece.body), change(piece.body)
        if record.kind == records.CHECKPOINT:
            reason = record.fields["reason"]
            statement = checkpoint_statement(log, path.parent.name, record.seq, record.at_ns, last_hash, reason)
            content = packing.pack_fields((reason, ledger.key.key_id, ledger.key.sign(statement)))
            body = records.encode_body(record.seq, record.at_ns, record.run, record.kind, content)
        framed, last_hash = encode_frame(last_hash, body)
        data += framed
    path.write_bytes(data)


def test_a_log_whose_records_have_no_salt_is_read_and_continued(ledger: Ledger) -> None:
    """All logs before format 3."""
    with ledger.opened() as recorder:
        source = f"x = 'planted {'x' * 60}'"
        ledger.run(recorder, source, context=RunContext(run_id="aaaa"))

    def unsalted(body: bytes) -> bytes:
        record = records.parse(body)
        return records.encode_body(record.seq, record.at_ns, record.run, record.kind, record.content)

    write_anew(ledger, unsalted)
    shutil.rmtree(default_heads_dir())
    ledger.fill(1)
    assert not [each for each in ledger.found()[:8] if each.frame.body[24] & 0xC0]
    assert ledger.verify(strict=True).ok
    assert {trust for _, trust in listed(ledger)} == {VERIFIED}
    assert len(ledger.segments()) == 1  # the next writer went on in it


def test_heads_that_were_handed_elsewhere_contradict_a_log_that_was_put_back_replaced_or_written_anew(
    ledger: Ledger, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever has the log, this machine's heads and the key. A place that fails is logged, and recording goes on."""
    heads: list[Head] = []

    def keep(head: Head) -> None:
        heads.append(head)
        raise OSError("no room there")

    ledger.fill(1, on_checkpoint=keep)
    older = tmp_path / "older"
    shutil.copytree(ledger.directory, older)
    ledger.fill(1, on_checkpoint=keep)
    assert "did not reach on_checkpoint" in caplog.text
    assert ledger.verify(heads=heads, strict=True).ok

    def found() -> set[str]:
        shutil.rmtree(default_heads_dir(), ignore_errors=True)
        assert ledger.verify(strict=True).ok  # by itself it is perfect
        return {finding.kind for finding in ledger.verify(heads=heads).findings}

    write_anew(ledger, lambda body: body.replace(b"set_result(0)", b"set_result(9)"))
    assert found() == {chain_check.BROKEN_LINK}
    shutil.rmtree(ledger.directory)
    shutil.copytree(older, ledger.directory)
    assert found() == {chain_check.CUT_OFF}
    shutil.rmtree(ledger.directory)
    ledger.fill(2)
    assert found() == {WRONG_LOG}


def test_the_hosts_user_can_mislead_the_index_and_not_who_reads_without_one(ledger: Ledger) -> None:
    ledger.fill(1)
    forge_run(ledger, ledger.chain())
    assert sorted(trust for _, trust in listed(ledger)) == [UNSIGNED, VERIFIED]
    (file,) = indexing.default_index_dir().iterdir()
    with sqlite3.connect(file) as db:
        db.execute("UPDATE runs SET last_seq = 1, ended_ns = 1")
    with Index(ledger.directory, [ledger.key], in_memory=True) as index:
        index.refresh()

        assert sorted(run.trust for run in index.runs()) == [UNSIGNED, VERIFIED]


@pytest.mark.parametrize("is_linked", [True, False])
def test_a_receipt_with_a_redaction_that_an_unknown_key_signed_is_not_right(ledger: Ledger, is_linked: bool) -> None:
    """The old digest stands for the body, so the genuine signature still fits the forged record."""
    ledger.fill(1)
    with Index(ledger.directory, [ledger.key]) as index:
        index.refresh()
        made = receipt.export(index, index.find("last"))
    step = next(each for each in made["ways"][-1]["records"] if "body" in each)
    body = base64.b64decode(step["body"])
    forged = without_source(body)
    record = records.parse(forged)
    fields = (
        made["chain"],
        record.seq,
        "id",
        record.original,
        hashlib.sha256(forged).digest(),
        ["source"],
        "ada",
        "",
        {},
    )
    other = HmacKey.generate()
    redacted = records.encode_body(2, 5, 0, records.REDACTED, packing.pack_fields(fields))
    before = hash_record(bytes(32), redacted) if is_linked else bytes(32)
    statement = checkpoint_statement(made["log"], "0123456789ab", 3, 5, before, "closed")
    content = packing.pack_fields(("closed", other.key_id, other.sign(statement)))
    steps = [redacted, records.encode_body(3, 5, 0, records.CHECKPOINT, content)]
    shown = [{"body": base64.b64encode(each).decode()} for each in steps]
    made["redactions"] = [{"chain": "0123456789ab", "before": bytes(32).hex(), "first_seq": 2, "records": shown}]
    step["body"] = base64.b64encode(forged).decode()
    made["run"]["start"] |= {"source": None, "sha256": None, "more": {"source_cut": {"why": "redacted"}}}

    assert not receipt.check(made, [ledger.key]).ok
    assert not receipt.check(made, [ledger.key, HmacKey.generate()]).ok
