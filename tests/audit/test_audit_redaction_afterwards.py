"""Content is removed from recorded runs: it is gone from the disk, and what is left still verifies."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from audit.ledger import Ledger
from audit.test_audit_commands import invoke
from toolcell.audit import indexing, keys, receipt, records, redaction
from toolcell.audit.format import Frame, encode_frame, segment_path, split_segment
from toolcell.audit.query import BROKEN, VERIFIED, Index
from toolcell.audit.removable import REMOVABLE
from toolcell.audit.verify import BAD_REDACTION
from toolcell.cli import exits
from toolcell.errors import UsageError
from toolcell.results import ErrorInfo, ExecutionResult, LogEntry, Logs, Outcome, OutputFile
from toolcell.support import packing
from toolcell.tools import RunContext

PLANTED = {part: f"planted-{part}" for part in REMOVABLE}
FAILURE = "planted-failure"


@pytest.fixture
def filled(ledger: Ledger) -> Ledger:
    """Three runs; the second has something planted in every part that can be removed."""
    signer = keys.own_signer()
    assert isinstance(signer, keys.HmacKey)
    ledger.key = signer
    with ledger.opened() as recorder:
        ledger.run(recorder, "before = 1")
        record = ledger.begin(
            recorder, f"x = '{PLANTED['source']}'", inputs={"a": PLANTED["inputs"]},
            files=[("notes.txt", PLANTED["files"].encode())],
            context=RunContext(run_id="aaaa", user_id=PLANTED["who"]),
        )  # fmt: skip
        ledger.call(record, "search", {"query": PLANTED["args"]}, 1)
        ledger.call(record, "search", {"query": PLANTED["results"]}, 2)
        ledger.call(record, "fail", {"text": FAILURE}, 3)
        logs = Logs((LogEntry("stdout", PLANTED["output"]),), 14)
        error = ErrorInfo("ValueError", PLANTED["error"], line=1)
        files = (OutputFile(f"{PLANTED['files']}.csv", "text/csv", 1, b"x", "c0ffee"),)
        record.end(ExecutionResult("aaaa", Outcome.ERROR, PLANTED["value"], True, logs, files, error))
        ledger.run(recorder, "after = 1", context=RunContext(run_id="cccc"))
    return ledger


def redact(ledger: Ledger, *parts: str, calls: tuple[int, ...] = (), run: str = "aaaa") -> int:
    with Index(ledger.directory, [ledger.key]) as index, ledger.log() as log:
        index.refresh()
        return len(redaction.redact(log, index, index.find(run), parts, calls=calls, by="ada", reason="asked"))


def trusts(ledger: Ledger) -> list[str]:
    with Index(ledger.directory, [ledger.key]) as index:
        index.refresh()
        return [run.trust for run in index.runs()]


def frames(path: Path) -> list[Frame]:
    return [piece for piece in split_segment(path.read_bytes()) if isinstance(piece, Frame)]


@pytest.mark.parametrize("part", REMOVABLE)
def test_each_part_is_gone_from_the_disk_and_everything_still_verifies(filled: Ledger, part: str) -> None:
    """The arguments come back in the tool's answers, so those of both are removed together."""
    trusts(filled)  # the index has read it
    parts = {"args", "results"} if part in ("args", "results") else {part}
    redact(filled, *parts)
    (index_file,) = indexing.default_index_dir().iterdir()
    for data in (filled.bytes_on_disk(), index_file.read_bytes()):
        assert not [each for each in parts if PLANTED[each].encode() in data]
    for other in set(REMOVABLE) - parts:
        assert PLANTED[other].encode() in filled.bytes_on_disk()

    assert trusts(filled) == [VERIFIED] * 3
    assert filled.verify(strict=True).ok
    with Index(filled.directory, [filled.key]) as index:
        index.refresh()
        made = receipt.export(index, index.find("aaaa"))
    assert receipt.check(made, [filled.key]).problems == ()
    assert not [each for each in parts if PLANTED[each] in json.dumps(made)]


def test_all_removes_everything_of_the_run_and_nothing_of_others(filled: Ledger) -> None:
    count = redact(filled, "all")
    left = filled.bytes_on_disk()

    assert count == 8  # the start, three calls, the end
    assert b"planted" not in left
    assert b"before = 1" in left and b"after = 1" in left
    run = filled.the_run("aaaa")
    assert (run.source, run.who, [call.tool for call in run.calls]) == (None, {}, ["search", "search", "fail"])
    assert run.outcome == "error" and run.end["error"]["type"] == "ValueError"


def test_a_signed_record_says_who_removed_what_and_when(filled: Ledger) -> None:
    old = next(each for each in filled.found() if each.record.fields.get("id") == "aaaa")
    redact(filled, "source")
    (said,) = filled.fields(records.REDACTED)

    assert (said["chain"], said["seq"], said["run"]) == (old.location.chain, old.record.seq, "aaaa")
    assert (said["by"], said["reason"], said["parts"]) == ("ada", "asked", ["source"])
    assert said["original"] == hashlib.sha256(old.frame.body).digest()
    out = invoke("show", filled.directory, "aaaa")[1]
    assert "redacted: source of record" in out and "by ada: asked" in out and "verified" in out
    assert json.loads(invoke("show", filled.directory, "aaaa", "--json")[1])["redactions"][0]["by"] == "ada"


def test_single_calls_are_redacted(filled: Ledger) -> None:
    redact(filled, "args", "results", calls=(2,))
    run = filled.the_run("aaaa")

    assert [call.args for call in run.calls] == [{"query": PLANTED["args"]}, None, {"text": FAILURE}]
    assert run.calls[1].start_extra["args_cut"] == {"why": "redacted"}
    assert run.source


def test_a_run_is_redacted_step_by_step_and_while_others_are_written(filled: Ledger) -> None:
    with filled.opened() as recorder:  # holds the chain: the redaction is recorded in another one
        filled.run(recorder, "meanwhile = 1")
        assert redact(filled, "inputs") == 1
        assert redact(filled, "source") == 1
        assert redact(filled, "source") == 0
        filled.run(recorder, "later = 1")
    run = filled.the_run("aaaa")

    assert (run.source, run.start["inputs"]) == (None, None)
    assert filled.verify(strict=True).ok
    assert trusts(filled) == [VERIFIED] * 5


def test_the_digest_that_stays_confirms_no_guess(filled: Ledger) -> None:
    """Two records with the same content have different digests: each has a salt of its own, which goes with it."""
    bodies = [each.frame.body for each in filled.found() if each.record.run]
    salts = {body[-records.SALT_BYTES :] for body in bodies}

    assert len(salts) == len(bodies)
    redact(filled, "all")
    left = filled.bytes_on_disk()
    gone = [body for body in bodies if body not in left]
    assert len(gone) == 8
    assert not [body for body in gone if body[-records.SALT_BYTES :] in left]


def test_a_record_that_somebody_without_the_key_redacted_is_found(filled: Ledger) -> None:
    path = segment_path(filled.chain(), 1)
    data = path.read_bytes()
    for frame in frames(path):
        record = records.parse(frame.body)
        if record.run and record.fields.get("id") == "aaaa":
            body = records.redact_body(frame.body, ["source"])
            assert body is not None
            path.write_bytes(data.replace(frame.body, body))
    report = filled.verify()

    assert [(each.kind, each.chain) for each in report.findings] == [(BAD_REDACTION, filled.chain().name)]
    assert trusts(filled) == [VERIFIED, BROKEN, VERIFIED]
    with Index(filled.directory, [filled.key]) as index:
        index.refresh()
        made = receipt.export(index, index.find("aaaa"))
    assert not receipt.check(made, [filled.key]).ok


def test_content_that_a_redaction_left_cannot_be_changed(filled: Ledger) -> None:
    redact(filled, "inputs")
    for path in filled.segments():
        path.write_bytes(path.read_bytes().replace(PLANTED["source"].encode(), b"PLANTED-source"))

    assert {each.kind for each in filled.verify().findings} == {BAD_REDACTION}
    assert trusts(filled)[1] == BROKEN


def test_content_that_comes_back_is_found(filled: Ledger) -> None:
    """Somebody with a backup, or a crash before the content was removed."""
    path = segment_path(filled.chain(), 1)
    before = path.read_bytes()
    redact(filled, "source")
    path.write_bytes(before + path.read_bytes()[len(before) :])
    (finding,) = filled.verify().findings

    assert finding.kind == BAD_REDACTION and "ada" in finding.message
    assert redact(filled, "source") == 1  # and the same again mends it
    assert filled.verify().ok


def test_an_older_redaction_that_left_more_does_not_come_back(filled: Ledger) -> None:
    redact(filled, "inputs")
    path = segment_path(filled.chain(), 1)
    before = path.read_bytes()
    redact(filled, "source")
    path.write_bytes(before + path.read_bytes()[len(before) :])

    assert {each.kind for each in filled.verify().findings} == {BAD_REDACTION}
    assert trusts(filled)[1] == BROKEN


def test_a_forged_record_of_a_redaction_permits_nothing(filled: Ledger) -> None:
    from audit.adversary.test_forged_history import append_record

    path = segment_path(filled.chain(), 1)
    frame = next(each for each in frames(path) if records.parse(each.body).fields.get("id") == "aaaa")
    body = records.redact_body(frame.body, ["source"])
    assert body is not None
    path.write_bytes(path.read_bytes().replace(frame.body, body))
    seq, original, left = records.parse(frame.body).seq, hashlib.sha256(frame.body).digest(), hashlib.sha256(body)
    fields = (path.parent.name, seq, "aaaa", original, left.digest(), ["source"], "ada", "", {})
    append_record(path, records.REDACTED, fields)

    assert BAD_REDACTION in {each.kind for each in filled.verify().findings}
    assert trusts(filled)[1] == BROKEN


@pytest.mark.parametrize("kind", [records.CHECKPOINT, records.OPENED, records.SETTINGS])
def test_only_records_of_runs_can_be_redacted(filled: Ledger, kind: str) -> None:
    stored = next(each for each in filled.found() if each.record.kind == kind)
    with pytest.raises(ValueError, match="no parts"):
        records.redact_body(stored.frame.body, ["source"]) if kind else None
    body = bytearray(stored.frame.body.ljust(80, b"\0"))
    body[24] |= 0xC0
    with pytest.raises(ValueError, match="unknown kind"):
        records.parse(bytes(body))


def test_nothing_can_be_hidden_behind_what_is_left(filled: Ledger) -> None:
    stored = next(each for each in filled.found() if each.record.fields.get("id") == "aaaa")
    body = records.redact_body(stored.frame.body, ["source"])
    assert body is not None and len(body) == len(stored.frame.body)
    assert records.parse(body).original
    with pytest.raises(ValueError, match="left behind"):
        records.parse(body[:-1] + b"x")
    for end in range(len(body)):
        try:
            records.parse(body[:end])
        except ValueError:
            continue
        assert not body[end:].strip(b"\0")


def test_records_without_a_salt_are_read_and_redacted_where_there_is_room(filled: Ledger) -> None:
    """Format 2, in which all logs were written before."""
    long, short = ({"text": "x" * size} for size in (100, 3))
    for args, is_possible in ((long, True), (short, False)):
        content = packing.pack_fields((1, "c", None, "t", "code", 1, args, {}))
        body = records.encode_body(5, 5, 1, records.CALL_STARTED, content)
        left = records.redact_body(body, ["args"])

        assert records.parse(body).fields["args"] == args
        assert (left is not None) == is_possible
        if left is not None:
            before, own = encode_frame(bytes(32), body)
            assert encode_frame(bytes(32), left)[1] == own and len(before)


@pytest.mark.parametrize(
    ("parts", "why"), [(["nothing"], "called 'nothing'"), ([], "nothing was named")]
)  # fmt: skip
def test_a_wrong_part_is_refused(filled: Ledger, parts: list[str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        redact(filled, *parts)


def test_only_what_is_verified_is_redacted(filled: Ledger) -> None:
    with Index(filled.directory) as index, filled.log() as log:
        index.refresh()
        with pytest.raises(UsageError, match="unverified"):
            redaction.redact(log, index, index.find("aaaa"), ["source"])
    assert PLANTED["source"].encode() in filled.bytes_on_disk()


def test_the_command_removes_and_says_what(filled: Ledger) -> None:
    flags: list[Any] = ["redact", filled.directory, "aaaa", "-f", "source", "--by", "bob", "--reason", "GDPR"]
    status, _, err = invoke(*flags)
    again = invoke(*flags)
    out = json.loads(invoke("redact", filled.directory, "aaaa", "-f", "args", "-c", "1", "--json")[1])

    assert status == exits.OK and "run_started" in err and "source removed" in err
    assert (again[0], "not removed already" in again[2]) == (exits.USAGE, True)
    assert [each["parts"] for each in out["redacted"]] == [["args"]]
    assert {each["by"] for each in filled.fields(records.REDACTED)} >= {"bob"}
    assert invoke("verify", filled.directory)[0] == exits.OK
    assert "changed since" not in invoke("list", filled.directory)[2]


def test_free_pages_of_the_index_hold_nothing(filled: Ledger) -> None:
    trusts(filled)
    (file,) = indexing.default_index_dir().iterdir()
    assert PLANTED["source"].encode() in file.read_bytes()
    redact(filled, "source")

    assert PLANTED["source"].encode() not in file.read_bytes()
    with sqlite3.connect(file) as db:
        assert db.execute("SELECT count(*) FROM redacted").fetchone() == (1,)


def test_a_record_of_a_redaction_is_kept_as_long_as_what_it_is_about(ledger: Ledger) -> None:
    with ledger.opened() as recorder:  # in another chain, which nobody continues while this one is written
        ledger.run(recorder, "x = 'planted'", context=RunContext(run_id="aaaa"))
        recorder.log.checkpoint()
        redact(ledger, "source")
        (second,) = [path for path in ledger.directory.iterdir() if path.is_dir() and path.name != recorder.log.chain]
        with ledger.log(settings={"segment_bytes": 4096, "keep_bytes": 0}) as log:
            assert log.chain == second.name
            for _ in range(30):
                log.append(records.TOOLS, 0, ("digest", [["x" * 500, None, None]], {}))
            log.prune()
    assert segment_path(second, 1).exists()
    assert ledger.verify().ok


@pytest.mark.parametrize("is_signed", [True, False])
def test_a_redacted_record_is_pruned_only_if_its_redaction_is_signed(ledger: Ledger, is_signed: bool) -> None:
    ledger.fill(1)
    with ledger.opened(settings={"segment_bytes": 4096}) as recorder:
        ledger.run(recorder, "x = 'planted'", context=RunContext(run_id="aaaa"))
        for _ in range(8):
            ledger.run(recorder, "x = 1" * 100, [])
    path = next(each for each in ledger.segments() if b"'planted'" in each.read_bytes())
    if is_signed:
        with ledger.opened():  # so that the redaction is recorded in another chain
            redact(ledger, "source")
    else:
        frame = next(each for each in frames(path) if records.parse(each.body).fields.get("id") == "aaaa")
        body = records.redact_body(frame.body, ["source"])
        assert body is not None
        path.write_bytes(path.read_bytes().replace(frame.body, body))
    with ledger.log(settings={"segment_bytes": 4096, "keep_bytes": 0}) as log:
        assert log.chain == path.parent.name
        log.prune()

    assert path.exists() != is_signed


@pytest.mark.isolation
def test_a_replay_says_what_was_redacted(filled: Ledger) -> None:
    redact(filled, "source", "results")
    status, _, err = invoke("replay", filled.directory, "aaaa")

    assert status == exits.USAGE
    assert "was redacted; give it with --source" in err


def test_what_was_redacted_cannot_be_found_any_more(filled: Ledger) -> None:
    assert invoke("grep", filled.directory, "planted-args")[0] == exits.OK
    redact(filled, "all")
    status, out, err = invoke("grep", filled.directory, "planted")

    assert (status, out) == (exits.FAILED, "")
    assert "not recorded in full" in err
    for name in ("show", "events", "list", "diff"):
        words = {"show": ["aaaa", "--json"], "diff": ["aaaa", "cccc", "--json"]}.get(name, [])
        assert "planted" not in invoke(name, filled.directory, *words)[1], name
