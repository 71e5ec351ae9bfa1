"""Runs whose content an older version removed in place: they still verify, and nobody without the key can do the same."""

from __future__ import annotations

import json

import pytest

from audit.adversary.test_forged_history import append_record
from audit.ledger import Ledger
from audit.removed_content import overwrite, redact, said_of, start_of, without_source
from audit.test_audit_commands import invoke
from toolcell.audit import keys, receipt, records
from toolcell.audit.format import segment_path
from toolcell.audit.query import BROKEN, VERIFIED, Index
from toolcell.audit.verification import BAD_REDACTION
from toolcell.cli import exits
from toolcell.tools import RunContext

PLANTED = "x = 'planted-source'"


@pytest.fixture
def filled(ledger: Ledger) -> Ledger:
    """Three runs, of which the second is `aaaa`."""
    signer = keys.own_signer()
    assert isinstance(signer, keys.HmacKey)
    ledger.key = signer
    with ledger.opened() as recorder:
        ledger.run(recorder, "before = 1")
        ledger.run(recorder, PLANTED, context=RunContext(run_id="aaaa"))
        ledger.run(recorder, "after = 1", context=RunContext(run_id="cccc"))
    return ledger


def remove(ledger: Ledger) -> None:
    path = segment_path(ledger.chain(), 1)
    with ledger.log() as log:
        redact(log, path, "aaaa")


def trusts(ledger: Ledger) -> list[str]:
    with Index(ledger.directory, [ledger.key]) as index:
        index.refresh()
        return [run.trust for run in index.runs()]


def exported(ledger: Ledger) -> receipt.ReceiptCheck:
    with Index(ledger.directory, [ledger.key]) as index:
        index.refresh()
        return receipt.check(receipt.export(index, index.find("aaaa")), [ledger.key])


def test_a_run_without_its_removed_script_verifies_is_shown_and_exported(filled: Ledger) -> None:
    remove(filled)

    assert trusts(filled) == [VERIFIED] * 3
    assert filled.verify(strict=True).ok
    assert exported(filled).problems == ()
    assert filled.the_run("aaaa").source is None
    out = invoke("show", filled.directory, "aaaa")[1]
    assert "redacted: source of record" in out and "by ada: asked" in out and "verified" in out
    assert json.loads(invoke("show", filled.directory, "aaaa", "--json")[1])["redactions"][0]["by"] == "ada"
    status, out, err = invoke("grep", filled.directory, "planted")
    assert (status, out) == (exits.FAILED, "") and "not recorded in full" in err


def test_content_that_somebody_without_the_key_removed_is_found(filled: Ledger) -> None:
    overwrite(segment_path(filled.chain(), 1), "aaaa")

    assert [(each.kind, each.chain) for each in filled.verify().findings] == [(BAD_REDACTION, filled.chain().name)]
    assert trusts(filled) == [VERIFIED, BROKEN, VERIFIED]
    assert not exported(filled).ok


def test_what_a_removal_left_cannot_be_changed(filled: Ledger) -> None:
    remove(filled)
    path = segment_path(filled.chain(), 1)
    left = start_of(path, "aaaa").body
    path.write_bytes(path.read_bytes().replace(left, left.replace(b"code", b"plan")))

    assert {each.kind for each in filled.verify().findings} == {BAD_REDACTION}
    assert trusts(filled)[1] == BROKEN


def test_content_that_comes_back_is_found(filled: Ledger) -> None:
    path = segment_path(filled.chain(), 1)
    before = path.read_bytes()
    remove(filled)
    path.write_bytes(before + path.read_bytes()[len(before) :])
    (finding,) = filled.verify().findings

    assert finding.kind == BAD_REDACTION and "ada" in finding.message


def test_a_forged_record_of_a_removal_permits_nothing(filled: Ledger) -> None:
    path = segment_path(filled.chain(), 1)
    said = said_of(path, "aaaa")
    overwrite(path, "aaaa")
    append_record(path, records.REDACTED, said)

    assert BAD_REDACTION in {each.kind for each in filled.verify().findings}
    assert trusts(filled)[1] == BROKEN


@pytest.mark.parametrize("kind", [records.CHECKPOINT, records.OPENED, records.SETTINGS])
def test_only_records_of_runs_can_lack_content(filled: Ledger, kind: str) -> None:
    stored = next(each for each in filled.found() if each.record.kind == kind)
    body = bytearray(stored.frame.body.ljust(80, b"\0"))
    body[24] |= 0xC0
    with pytest.raises(ValueError, match="unknown kind"):
        records.parse(bytes(body))


def test_nothing_can_be_hidden_behind_what_is_left(filled: Ledger) -> None:
    body = without_source(start_of(segment_path(filled.chain(), 1), "aaaa").body)
    assert records.parse(body).original
    with pytest.raises(ValueError, match="left behind"):
        records.parse(body[:-1] + b"x")
    for end in range(len(body)):
        try:
            records.parse(body[:end])
        except ValueError:
            continue
        assert not body[end:].strip(b"\0")


def test_records_of_one_content_have_different_digests(filled: Ledger) -> None:
    """Each has a salt of its own, so that what stays in a receipt or a removed record confirms no guess."""
    bodies = [each.frame.body for each in filled.found() if each.record.run]

    assert len({body[-records.SALT_BYTES :] for body in bodies}) == len(bodies)


@pytest.mark.parametrize("is_signed", [True, False])
def test_a_record_without_content_is_pruned_only_if_its_removal_is_signed(ledger: Ledger, is_signed: bool) -> None:
    ledger.fill(1)
    with ledger.opened(settings={"segment_bytes": 4096}) as recorder:
        ledger.run(recorder, PLANTED, context=RunContext(run_id="aaaa"))
        for _ in range(8):
            ledger.run(recorder, "x = 1" * 100, [])
    path = next(each for each in ledger.segments() if PLANTED.encode() in each.read_bytes())
    if is_signed:
        with ledger.opened(), ledger.log() as log:  # so that the removal is recorded in another chain
            redact(log, path, "aaaa")
    else:
        overwrite(path, "aaaa")
    with ledger.log(settings={"segment_bytes": 4096, "keep_bytes": 0}) as log:
        assert log.chain == path.parent.name
        log.prune()

    assert path.exists() != is_signed


def test_a_record_of_a_removal_is_kept_as_long_as_what_it_is_about(ledger: Ledger) -> None:
    with ledger.opened() as recorder:  # in another chain, which nobody continues while this one is written
        ledger.run(recorder, PLANTED, context=RunContext(run_id="aaaa"))
        recorder.log.checkpoint()
        (first,) = ledger.segments()
        with ledger.log() as log:
            redact(log, first, "aaaa")
        (second,) = [path for path in ledger.directory.iterdir() if path.is_dir() and path.name != recorder.log.chain]
        with ledger.log(settings={"segment_bytes": 4096, "keep_bytes": 0}) as log:
            assert log.chain == second.name
            for _ in range(30):
                log.append(records.TOOLS, 0, ("digest", [["x" * 500, None, None]], {}))
            log.prune()
    assert segment_path(second, 1).exists()
    assert ledger.verify().ok


@pytest.mark.isolation
def test_a_replay_says_what_was_removed(filled: Ledger) -> None:
    remove(filled)
    status, _, err = invoke("replay", filled.directory, "aaaa")

    assert status == exits.USAGE
    assert "was redacted; give it with --source" in err
