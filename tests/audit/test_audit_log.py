"""Writing a record: in order, signed, synced to disk, by several writers."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import stat
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from audit.ledger import RUN_KINDS, Ledger
from toolcell import PoolConfig, Runtime, SyncRuntime, ToolRegistry
from toolcell.audit import records, store
from toolcell.audit.config import RecordConfig
from toolcell.audit.log import AuditLog
from toolcell.audit.recorder import Recorder
from toolcell.audit.sinks import AuditEvent
from toolcell.errors import AuditError, BadInput, UsageError
from toolcell.tools import Feature, Origin, RunContext

pytestmark = pytest.mark.quick

# What is written


def test_a_run_is_four_kinds_of_records_in_the_order_things_happened(ledger: Ledger) -> None:
    with ledger.opened() as recorder:
        ledger.run(recorder)

    assert ledger.kinds() == RUN_KINDS
    assert [found.seq for found in ledger.found()] == list(range(1, len(ledger.found()) + 1))
    assert len({found.run for found in ledger.found() if found.run}) == 1


@pytest.mark.conforms("Q-b26", "H-b4")
def test_a_call_is_on_disk_before_its_tool_runs_and_its_end_before_its_answer(ledger: Ledger) -> None:
    seen: list[list[str]] = []

    @ledger.registry.tool
    async def look() -> str:
        """See what the log holds while the tool runs."""
        seen.append(ledger.kinds())
        return "looked"

    with ledger.opened() as recorder:
        record = ledger.begin(recorder)
        assert ledger.kinds() == RUN_KINDS[:1]
        ledger.call(record, "look", {}, 1)
        assert ledger.kinds() == RUN_KINDS[:3]

    assert seen == [RUN_KINDS[:2]]


@pytest.mark.conforms("C-b11")
def test_what_was_mended_in_arguments_is_recorded(ledger: Ledger) -> None:
    with ledger.opened() as recorder:
        ledger.run(recorder, calls=[("search", {"query": "x", "limit": "3"})])
    fields = ledger.fields(records.CALL_STARTED)[0]

    assert fields["args"] == {"query": "x", "limit": "3"}
    assert fields["more"]["corrected"] == [{"path": "limit", "from": "3", "to": 3}]
    assert fields["more"]["made"] == {"query": "x", "limit": 3}


def test_a_refused_call_is_recorded_with_the_reason(ledger: Ledger) -> None:
    ledger.registry.blacklist("fail")
    with ledger.opened() as recorder:
        ledger.run(recorder, calls=[("fail", {"text": "x"}), ("nothing", {}), ("search", {})])
    blocked, unknown, invalid = ledger.the_run().calls

    assert blocked.verdict == "blocked"
    assert "not permitted" in blocked.start_extra["why"]
    assert (unknown.code, invalid.code) == ("unknown_tool", "invalid_arguments")
    assert unknown.verdict == invalid.verdict == "error"


def test_a_tool_that_calls_a_tool_is_its_parent(ledger: Ledger) -> None:
    with ledger.opened() as recorder:
        ledger.run(recorder, calls=[("outer", {"query": "x"}), ("search", {"query": "y"})])
    outer, inner, next_one = ledger.the_run().calls

    assert [call.tool for call in (outer, inner, next_one)] == ["outer", "search", "search"]
    assert (outer.parent, inner.parent, next_one.parent) == (None, 1, None)
    assert (outer.line, inner.line) == (1, None)


@pytest.mark.parametrize("origin", list(Origin))
def test_every_origin_is_recorded(ledger: Ledger, origin: Origin) -> None:
    async def work(recorder: Recorder) -> None:
        async with recorder.observe(RunContext(user_id="ada", thread_id="t1")) as context:
            await ledger.registry.dispatch("search", {"query": "x"}, call_id="c1", origin=origin, context=context)

    with ledger.opened() as recorder:
        anyio.run(work, recorder)
    run = ledger.the_run()

    assert run.kind == "calls"
    assert run.calls[0].origin == str(origin)
    assert run.who == {"run": run.id, "user": "ada", "thread": "t1"}


@pytest.mark.conforms("R-b2", "P-b5")
def test_steps_of_a_plan_are_recorded_with_their_place(ledger: Ledger) -> None:
    ledger.registry.enable_plan_execution()
    steps = {"steps": [{"tool": "search", "args": {"query": "a"}}, {"tool": "search", "args": {"query": "b"}}]}

    async def work(recorder: Recorder) -> None:
        async with recorder.observe(RunContext()) as context:
            await ledger.registry.dispatch("execute_plan", steps, call_id="c1", origin=Origin.MODEL, context=context)

    with ledger.opened() as recorder:
        anyio.run(work, recorder)
    calls = ledger.the_run().calls

    assert {call.origin for call in calls} == {"model", "plan[0]", "plan[1]"}
    assert [call.parent for call in calls] == [None, 1, 1]


def test_a_run_within_a_run_is_recorded_once_and_still_seen_by_the_callers_observer(ledger: Ledger) -> None:
    seen: list[str] = []

    class Own(Feature):
        def call_started(self, call: Any) -> None:
            seen.append(call.name)

        def call_ended(self, call: Any) -> None:
            pass

    async def work(recorder: Recorder) -> None:
        async with recorder.observe(RunContext().having(Own())) as above:
            await anyio.to_thread.run_sync(partial(ledger.run, recorder, context=above.within(parent_call_id="c1")))

    with ledger.opened() as recorder:
        anyio.run(work, recorder)

    assert seen == ["search"]
    assert ledger.kinds().count(records.CALL_STARTED) == 1
    assert ledger.fields(records.RUN_STARTED)[1]["who"]["parent_call"] == "c1"


def test_runs_that_share_an_id_can_be_told_apart(ledger: Ledger) -> None:
    context = RunContext(run_id="shared")
    with ledger.opened() as recorder:
        for _ in range(3):
            ledger.run(recorder, context=context)
    ids = [fields["id"] for fields in ledger.fields(records.RUN_STARTED)]

    assert ids[0] == "shared"
    assert len(set(ids)) == 3
    assert all(id.startswith("shared.") for id in ids[1:])


def test_a_run_that_needs_no_sandbox_may_fail(ledger: Ledger) -> None:
    async def work(recorder: Recorder) -> None:
        async with recorder.observe(RunContext()):
            _ = 1 / 0

    with ledger.opened() as recorder, pytest.raises(ZeroDivisionError):
        anyio.run(work, recorder)
    run = ledger.the_run()

    assert run.outcome == "aborted"
    assert run.end["error"]["type"] == "ZeroDivisionError"


# To the disk


def test_a_checkpoint_covers_everything_before_it(ledger: Ledger) -> None:
    with ledger.log() as log:
        ledger.run(Recorder(log))
        head = log.checkpoint()
        report = ledger.verify(heads=[head])

    assert report.ok
    assert report.chains[0].signed_seq == head.seq


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(60):
        while not condition():
            await anyio.sleep(0.005)


def is_signed(ledger: Ledger) -> bool:
    """Whether a checkpoint covers the newest event."""
    ((unsigned,),) = ledger.rows(
        "SELECT count(*) FROM event WHERE n > (SELECT coalesce(max(n), 0) FROM checkpoint WHERE writer = event.writer)"
    )
    return not unsigned


def waits_to_be_woken() -> bool:
    """Whether the thread that signs waits for a record, however long that takes."""
    (thread,) = [each for each in threading.enumerate() if each.name == "toolcell-record"]
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code is not threading.Event.wait.__code__:
        frame = frame.f_back
    return frame is not None and frame.f_locals["timeout"] is None


def test_events_are_signed_soon_without_being_asked_also_after_a_quiet_time(ledger: Ledger) -> None:
    with ledger.opened(settings={"checkpoint_s": 0.01}) as recorder:
        for _ in range(3):
            ledger.run(recorder)
            anyio.run(until, lambda: is_signed(ledger))
            anyio.run(until, waits_to_be_woken)

    assert {reason for (reason,) in ledger.rows("SELECT reason FROM checkpoint")} == {"time", "closed"}


def test_after_so_many_events_one_is_signed_at_once(ledger: Ledger) -> None:
    with ledger.opened(settings={"checkpoint_s": 3600, "checkpoint_records": 20}) as recorder:
        for _ in range(10):
            ledger.run(recorder)
        anyio.run(until, lambda: bool(ledger.rows("SELECT n FROM checkpoint WHERE n > 20")))


@pytest.mark.parametrize(("policy", "is_synced"), [("never", False), ("checkpoint", True), ("always", True)])
def test_the_fsync_policy_says_when_the_disk_is_waited_for(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, policy: Any, is_synced: bool
) -> None:
    synced: list[int] = []
    with ledger.opened(config=RecordConfig(fsync=policy)) as recorder:
        monkeypatch.setattr(os, "fsync", synced.append)
        ledger.run(recorder)
        recorder.log.checkpoint()
        assert bool(synced) is is_synced
        before = len(os.listdir("/dev/fd"))
        for _ in range(99):
            recorder.log.database.sync()
        assert len(os.listdir("/dev/fd")) < before + 50


def test_files_are_for_their_owner_alone_and_nobody_else_may_put_files_beside_them(ledger: Ledger) -> None:
    """SQLite believes a -wal that somebody planted."""
    with ledger.opened() as recorder:
        ledger.run(recorder)
        found = [*ledger.path.parent.iterdir()]
        assert {path.name for path in found} >= {"runs.db", "runs.db-wal"}
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in found)
    assert stat.S_IMODE(ledger.path.parent.stat().st_mode) == 0o700
    ledger.path.parent.chmod(0o777)
    for use in (lambda: ledger.fill(1), ledger.trusts, ledger.verify):
        with pytest.raises(BadInput, match="others may put files beside"):
            use()


@pytest.mark.parametrize(("spoil", "why"), [("unlink", "it was removed"), ("replace", "another file was put in")])
def test_a_file_that_is_removed_or_replaced_stops_what_would_not_be_recorded(
    ledger: Ledger, spoil: str, why: str
) -> None:
    with ledger.opened(settings={"checkpoint_s": 3600}) as recorder:
        record = ledger.begin(recorder)
        ledger.path.rename(ledger.path.with_name("moved"))
        if spoil == "replace":
            ledger.path.touch(mode=0o600)
        with pytest.raises(AuditError, match=why):
            ledger.call(record, "search", {"query": "x"}, 1)
        ledger.path.with_name("moved").rename(ledger.path)
        ledger.call(record, "search", {"query": "x"}, 2)
    assert ledger.verify().ok


@pytest.mark.anyio
@pytest.mark.parametrize("moment", ["start", "call", "end"])
async def test_while_another_process_has_locked_the_file_the_run_waits_and_the_loop_does_not(
    ledger: Ledger, anyio_backend: str, moment: str
) -> None:
    with ledger.opened(settings={"checkpoint_s": 3600}) as recorder:
        other = sqlite3.connect(ledger.path, isolation_level=None)
        is_over = anyio.Event()

        def reach(place: str) -> None:
            if place == moment:
                other.execute("BEGIN IMMEDIATE")

        async def work() -> None:
            reach("start")
            async with recorder.observe(RunContext()) as context:
                reach("call")
                await ledger.registry.dispatch("search", {"query": "x"}, call_id="call_1", context=context)
                reach("end")
            is_over.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            while not other.in_transaction:
                await anyio.lowlevel.checkpoint()
            for _ in range(20):  # the loop turns, and nothing comes about that is not recorded
                await anyio.lowlevel.checkpoint()
            assert not is_over.is_set()
            other.execute("ROLLBACK")
        other.close()
    assert [call.status for call in ledger.the_run().calls] == ["ok"]


@pytest.mark.isolation
@pytest.mark.anyio
async def test_a_runtime_opens_and_closes_while_another_process_has_locked_the_file_and_the_loop_goes_on(
    tmp_path: Path,
) -> None:
    runtime = Runtime(ToolRegistry(), record=tmp_path / "runs.db", pool=PoolConfig(warm=0))
    async with runtime:
        assert (await runtime.execute_code("1")).ok
    other = sqlite3.connect(tmp_path / "runs.db", isolation_level=None)
    for move in (runtime.open, runtime.close):
        other.execute("BEGIN IMMEDIATE")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(move)
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            other.execute("ROLLBACK")  # nobody else does it
    other.close()
    assert not runtime.is_open


def test_a_file_that_stays_locked_refuses_the_call_and_what_comes_later_is_recorded(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "LOCK_S", 0.05)
    with ledger.opened(settings={"checkpoint_s": 3600}) as recorder:
        record = ledger.begin(recorder)
        other = sqlite3.connect(ledger.path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(AuditError, match=r"runs\.db: another process has locked it for more than"):
            ledger.call(record, "search", {"query": "x"}, 1)
        other.execute("ROLLBACK")
        other.close()
        ledger.call(record, "search", {"query": "y"}, 2)
    assert [call.args for call in ledger.the_run().calls] == [{"query": "y"}]
    assert ledger.verify().ok


@pytest.mark.parametrize("is_given_up", [False, True])
def test_what_threads_want_to_write_while_the_file_is_locked_is_written_together_or_not_at_all(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, is_given_up: bool
) -> None:
    monkeypatch.setattr(store, "LOCK_S", 0.2 if is_given_up else 60)
    with ledger.opened(settings={"checkpoint_s": 3600}) as recorder:
        record = ledger.begin(recorder)
        other = sqlite3.connect(ledger.path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        refused = list[str]()

        def call(number: int) -> None:
            try:
                ledger.call(record, "search", {"query": str(number)}, number)
            except AuditError as exc:
                refused.append(str(exc))

        threads = [threading.Thread(target=call, args=(number,)) for number in range(1, 6)]
        for thread in threads:
            thread.start()
        if not is_given_up:
            anyio.run(until, lambda: len(recorder.log._queue) == 5)
            other.execute("ROLLBACK")
        for thread in threads:
            thread.join()
        other.close()
        ledger.call(record, "search", {"query": "after"}, 6)
    queries = [call.args["query"] for call in ledger.the_run().calls]
    assert sorted(queries) == (["after"] if is_given_up else [*"12345", "after"])
    assert [len(refused), "has locked it for more than" in "".join(refused)] == (
        [5, True] if is_given_up else [0, False]
    )
    assert ledger.verify().ok


def test_an_end_is_written_with_the_next_event_or_in_a_moment(ledger: Ledger) -> None:
    began_ns = time.time_ns()
    with ledger.opened(settings={"checkpoint_s": 3600}) as recorder:
        recorder.log.checkpoint()
        anyio.run(until, waits_to_be_woken)
        signed = ledger.rows("SELECT n FROM checkpoint")
        record = ledger.begin(recorder)
        record.writes_ends_later = True
        for number in (1, 2):
            ledger.call(record, "search", {"query": "x"}, number)
            record.write_ends()
        anyio.run(until, lambda: ledger.kinds().count(records.CALL_ENDED) == 2)
    assert ledger.kinds() == [*RUN_KINDS[:3], *RUN_KINDS[1:3]]
    assert ledger.rows("SELECT n FROM checkpoint WHERE reason != 'closed'") == signed  # no other was due
    for call in ledger.the_run().calls:
        assert began_ns <= ledger.the_run().started_ns <= call.started_ns <= (call.ended_ns or 0) <= time.time_ns()
    assert ledger.verify().ok


def test_after_a_disk_failed_nothing_more_is_taken(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a failed flush left on the disk is not known, so no later event may claim to be safe."""

    def fsync(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    log = ledger.log(config=RecordConfig(checkpoint_s=3600)).open()
    ledger.run(Recorder(log))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(AuditError, match="did not reach the disk"):
            log.checkpoint()
    with pytest.raises(AuditError, match="did not reach the disk"):
        ledger.run(Recorder(log))
    with pytest.raises(AuditError, match="did not reach the disk"):
        log.close()
    ledger.fill(1)
    assert ledger.verify().ok


def test_what_runs_have_in_common_is_written_once(ledger: Ledger) -> None:
    ledger.fill(5)
    ledger.fill(5)
    assert len({(fields["tools"], fields["terms"]) for fields in ledger.fields(records.RUN_STARTED)}) == 1
    assert ledger.rows("SELECT count(*) FROM blob") == [(2,)]
    assert ledger.the_run().limits and ledger.the_run().definitions


@pytest.mark.parametrize("problem", [AuditError("not just now"), ConnectionError("the key service is away")])
def test_what_could_not_be_signed_at_once_is_signed_later(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, problem: Exception
) -> None:
    failed = threading.Event()
    sign = ledger.key.sign

    def refuse(data: bytes) -> bytes:
        failed.set()
        raise problem

    with ledger.opened(settings={"checkpoint_s": 0.01}) as recorder:
        monkeypatch.setattr(ledger.key, "sign", refuse)
        ledger.run(recorder)
        assert failed.wait(60)
        monkeypatch.setattr(ledger.key, "sign", sign)
        ledger.run(recorder)
        anyio.run(until, lambda: is_signed(ledger))  # the thread that signs is still there

    assert "could not be signed" in caplog.text
    assert ledger.verify().ok
    assert ledger.verify().chains[0].unsigned == 0


def away(data: bytes) -> bytes:
    """Sign, where the key service cannot be reached."""
    raise ConnectionError("the key service is away")


def test_a_key_that_is_away_when_its_log_is_closed_is_named(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    log = ledger.log(settings={"checkpoint_s": 3600}).open()
    ledger.run(Recorder(log))
    with monkeypatch.context() as patch:
        patch.setattr(ledger.key, "sign", away)
        with pytest.raises(AuditError, match=f"the key {ledger.key.key_id} did not sign: ConnectionError"):
            log.checkpoint()
        with pytest.raises(AuditError, match="the key service is away"):
            log.close()
    ledger.fill(1)
    unsigned = {chain.unsigned for chain in ledger.verify().chains}

    assert ledger.verify().ok
    assert unsigned == {0, 5}  # the next writer does not sign what this one could not


def test_a_record_stays_where_it_is_when_the_program_changes_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with SyncRuntime(record="runs.db") as runtime:
        monkeypatch.chdir(tmp_path / "other")
        result = runtime.execute_code("set_result(1)", context=RunContext(run_id="one"))

    assert result.value == 1
    assert (tmp_path / "runs.db-lock").exists() and not [*(tmp_path / "other").iterdir()]


def test_a_log_without_a_name_is_not_the_current_directory() -> None:
    with pytest.raises(UsageError, match="needs a name"):
        AuditLog("")


def test_what_cannot_sign_is_no_key(ledger: Ledger) -> None:
    with pytest.raises(UsageError, match=r"key must be a file's path or sign by itself \(a Signer\), not int"):
        ledger.log(key=7).open()


# By whom


def test_a_log_is_opened_once(ledger: Ledger) -> None:
    with ledger.log() as log, pytest.raises(UsageError, match="already open"):
        log.open()


def test_a_closed_log_takes_nothing(ledger: Ledger) -> None:
    with ledger.log() as log:
        pass
    log.close()

    for write in (log.append, partial(log.append_later, redactor=log.redactor, at_ns=1)):
        with pytest.raises(AuditError, match="it is closed"):
            write(records.RUN_STARTED, 0, ("x",))


def test_two_writers_of_one_record_write_a_chain_each_and_are_read_as_one(ledger: Ledger) -> None:
    with ledger.opened() as one, ledger.opened() as other:
        for number in range(3):
            ledger.run(one, f"a = {number}")
            ledger.run(other, f"b = {number}")
        assert one.log.chain != other.log.chain
    sources = [fields["source"] for fields in ledger.fields(records.RUN_STARTED)]

    assert sources == ["a = 0", "b = 0", "a = 1", "b = 1", "a = 2", "b = 2"]
    assert len({event.chain for event in ledger.found()}) == 2
    assert ledger.verify().ok


def test_several_threads_write_one_chain(ledger: Ledger) -> None:
    with ledger.opened() as recorder:
        threads = [threading.Thread(target=lambda: [ledger.run(recorder) for _ in range(5)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert ledger.kinds().count(records.RUN_ENDED) == 20
    assert ledger.verify().ok


# Sinks


def test_a_sink_gets_what_was_written_as_it_was_written(ledger: Ledger) -> None:
    events: list[AuditEvent] = []
    with ledger.opened(sinks=[events.append], secrets=["s3cr3t-thing"]) as recorder:
        ledger.run(recorder, calls=[("search", {"query": "s3cr3t-thing"})])
    told = [event for event in events if event.run and event.kind in RUN_KINDS]

    assert [event.kind for event in told] == RUN_KINDS
    assert "s3cr3t-thing" not in json.dumps([dict(event.fields) for event in told], default=str)
    assert [event.seq for event in told] == [event.seq for event in ledger.found() if event.run]


def test_a_sink_that_fails_holds_nothing_up(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    def sink(event: AuditEvent) -> None:
        raise RuntimeError("no")

    with ledger.opened(sinks=[sink]) as recorder:
        ledger.run(recorder)

    assert ledger.kinds() == RUN_KINDS
    assert "an audit sink failed" in caplog.text


def test_a_flush_waits_until_another_thread_has_done_what_comes_after_its_write(tmp_path: Path) -> None:
    has_begun, may_end, is_flushed = threading.Event(), threading.Event(), threading.Event()

    def then() -> None:
        has_begun.set()
        may_end.wait(60)

    def flush() -> None:
        log.flush(wait=True)
        is_flushed.set()

    with AuditLog(tmp_path / "runs.db") as log:
        log.keep("INSERT INTO kept VALUES (?, ?, ?, ?, ?)", (), then)
        threads = [threading.Thread(target=partial(log.flush, wait=True)), threading.Thread(target=flush)]
        threads[0].start()
        assert has_begun.wait(60)
        threads[1].start()
        assert not is_flushed.wait(0.2)
        may_end.set()
        for each in threads:
            each.join(60)
        assert is_flushed.is_set()
