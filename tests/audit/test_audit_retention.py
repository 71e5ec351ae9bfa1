"""What is no longer kept goes, with a signed checkpoint in its place, and what stays says why."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path

import anyio
import pytest

from audit.ledger import Ledger
from audit.test_audit_commands import invoke
from audit.test_audit_log import until
from rows import each_row
from toolcell.audit import HmacKey, log, records
from toolcell.audit.chain_check import PUT_BACK
from toolcell.audit.store import EVENT_COLUMNS
from toolcell.cli import exits

HOUR_S = 3600


@pytest.fixture
def aged(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """Two chains of runs of ten hours ago, and one of now."""
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() - 10 * HOUR_S * 10**9)
    for _ in range(2):
        ledger.fill(3)
    monkeypatch.setattr(time, "time_ns", real)
    ledger.fill(2)
    return ledger


def test_old_runs_go_and_the_rest_verifies(aged: Ledger) -> None:
    with aged.log(settings={"keep_s": HOUR_S}) as log:
        gone = [each for each in log.prune() if each.count]
        assert [(each.reason, each.is_whole) for each in gone] == [("age", True)] * 2
    report = aged.verify(strict=True)

    assert report.ok, report.findings
    assert "removed by retention" in " ".join(report.notes)
    assert len(aged.trusts()) == 2
    assert [(fields["count"], fields["reason"]) for fields in aged.fields(records.PRUNED)] == [(13, "age")] * 2
    assert not aged.rows("SELECT * FROM run WHERE writer NOT IN (SELECT writer FROM event)")
    aged.fill(1)
    assert aged.verify(strict=True).ok


def test_a_record_that_is_open_forgets_by_itself_also_when_it_is_quiet(aged: Ledger) -> None:
    with aged.log(settings={"keep_s": 0.05, "checkpoint_s": 0.01}):
        anyio.run(until, lambda: not aged.trusts())
    assert aged.verify(strict=True).ok


def test_by_size_the_oldest_go_first(ledger: Ledger) -> None:
    for _ in range(3):
        ledger.fill(5)
    newest = list(ledger.trusts())[-5:]
    ((size,),) = ledger.rows("SELECT sum(length(body) + 200) FROM event")
    with ledger.log(settings={"keep_bytes": size // 2}) as log:
        log.prune()
    left = list(ledger.trusts())

    assert left[-5:] == newest
    assert len(left) < 10
    assert ledger.verify(strict=True).ok
    assert {fields["reason"] for fields in ledger.fields(records.PRUNED)} == {"size"}


def test_what_is_not_removed_is_not_read_and_what_is_goes_a_slice_at_a_time(
    aged: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    young = aged.found()[-1].chain
    aged.rows("UPDATE event SET at = at + 1 WHERE writer = ? AND n = 3", young)
    monkeypatch.setattr(log, "PRUNE_EVENTS", 4)
    with aged.log(settings={"keep_s": HOUR_S}) as pruning:
        told = {each.chain: each for each in pruning.prune()}
    assert [each.count for each in told.values()] == [13, 13, 0, 0]
    assert told[young].reason == "its oldest event is young enough"
    assert [fields["count"] for fields in aged.fields(records.PRUNED)] == [5, 5, 4, 4, 4, 4]
    aged.rows("UPDATE event SET at = at - 1 WHERE writer = ? AND n = 3", young)
    assert aged.verify(strict=True).ok


def test_a_run_under_way_stays_and_so_does_what_does_not_verify(aged: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time_ns
    with ExitStack() as stack:
        with monkeypatch.context() as patch:
            patch.setattr(time, "time_ns", lambda: real() - 10 * HOUR_S * 10**9)
            recorder = stack.enter_context(aged.opened())
            record = aged.begin(recorder)
            recorder.log.checkpoint()
        first = aged.found()[0].chain
        aged.rows("UPDATE event SET at = at + 1 WHERE writer = ? AND n = 2", first)
        with aged.log(settings={"keep_s": HOUR_S}) as log:
            told = {each.chain: each for each in log.prune()}
            assert (told[first].count, told[first].seq) == (0, 0) and "does not verify" in told[first].reason
            assert told[recorder.log.chain].count == 1  # that the log was opened, and not the start of the run
        aged.call(record, "search", {"query": "x"}, 1)
        record.end_calls()
    aged.rows("UPDATE event SET at = at - 1 WHERE writer = ? AND n = 2", first)
    assert aged.verify(strict=True).ok
    assert [run.outcome for run in [aged.the_run()]] == ["ok"]


def test_no_time_or_size_of_a_file_and_no_other_key_makes_anything_expire(aged: Ledger) -> None:
    before = aged.rows("SELECT count(*) FROM run")
    with aged.log(settings={"keep_s": HOUR_S}, key=HmacKey.generate()) as log:
        assert not [each for each in log.prune() if each.count]
    with aged.log() as log:
        assert not [each for each in log.prune() if each.count]
    assert aged.rows("SELECT count(*) FROM run") == before


def test_events_that_retention_removed_and_somebody_put_back_are_found(aged: Ledger) -> None:
    chain = aged.found()[0].chain
    kept = aged.rows(f"SELECT {EVENT_COLUMNS} FROM event WHERE writer = ?", chain)
    pruned_before = aged.rows("SELECT * FROM checkpoint WHERE writer = ?", chain)
    with aged.log(settings={"keep_s": HOUR_S}) as log:
        log.prune()
    for row in kept:
        aged.rows(f"INSERT INTO event ({EVENT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", *row)
    assert PUT_BACK in {finding.kind for finding in aged.verify().findings}
    aged.rows("DELETE FROM checkpoint WHERE writer = ?", chain)  # and the checkpoint that stood for them is taken away
    for row in pruned_before:
        aged.rows("INSERT INTO checkpoint VALUES (?, ?, ?, ?, ?, ?, ?)", *row)
    assert PUT_BACK in {finding.kind for finding in aged.verify().findings}


def test_prune_as_a_command_says_what_went_and_what_stays(aged: Ledger, tmp_path: Path) -> None:
    (tmp_path / "key").touch(mode=0o600)
    (tmp_path / "key").write_text(aged.key.to_text())
    words = ("prune", aged.path, "--older-than", "1h", "--sign", tmp_path / "key", "--key", tmp_path / "key")
    before = aged.path.read_bytes()
    status, out, err = invoke(*words, "--dry-run")
    assert status == exits.OK and "26 events would be removed" in err and "stays: its oldest event is young" in out
    assert aged.path.read_bytes() == before
    plain = json.loads(invoke(*words, "--json")[1])
    assert [each["events"] for each in plain] == [13, 13, 0]
    assert aged.verify().ok
    assert invoke("prune", aged.path)[0] == exits.USAGE


@each_row("is_there", [False, True])
@each_row("more", [(), ("--dry-run",)])
def test_prune_with_a_key_that_it_cannot_sign_with_is_a_wrong_call(
    aged: Ledger, tmp_path: Path, is_there: bool, more: tuple[str, ...]
) -> None:
    if is_there:
        (tmp_path / "key").write_text("no key")
        (tmp_path / "key").chmod(0o600)
    status, _, said = invoke("prune", aged.path, "--older-than", "1h", "--sign", tmp_path / "key", *more)
    assert status == exits.USAGE and f"{tmp_path / 'key'}" in said and "checks signatures" not in said
