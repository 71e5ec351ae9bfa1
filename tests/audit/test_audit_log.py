"""Writing the log: in order, synced to disk, by one process at a time, in segments, with old segments removed."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from audit.ledger import RUN_KINDS, Ledger
from toolcell.audit import records
from toolcell.audit.config import AuditConfig
from toolcell.audit.format import LOCK_FILE, MAGIC, Frame, chain_directories, segment_files, segment_path, split_segment
from toolcell.audit.log import AuditLog
from toolcell.audit.pruning import ClosedSegment, count_expired
from toolcell.audit.recorder import Recorder
from toolcell.audit.signatures import read_prune_record
from toolcell.audit.sinks import AuditEvent
from toolcell.errors import AuditError, UsageError
from toolcell.support.file_lock import is_locked
from toolcell.tools import Origin, RunContext

pytestmark = pytest.mark.quick

SMALL = {"segment_bytes": 4096}


# What is written


def test_a_run_is_four_kinds_of_records_in_the_order_things_happened(ledger: Ledger) -> None:
    with ledger.opened() as recorder:
        ledger.run(recorder)

    assert ledger.kinds() == RUN_KINDS
    assert [found.record.seq for found in ledger.found()] == list(range(1, len(ledger.found()) + 1))
    assert len({found.record.run for found in ledger.found() if found.record.run}) == 1


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
    assert fields["more"]["coerced"] == [{"path": "limit", "from": "3", "to": 3}]
    assert fields["more"]["effective_args"] == {"query": "x", "limit": 3}


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
        with recorder.observe(RunContext(user_id="ada", thread_id="t1")) as context:
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
        with recorder.observe(RunContext()) as context:
            await ledger.registry.dispatch("execute_plan", steps, call_id="c1", origin=Origin.MODEL, context=context)

    with ledger.opened() as recorder:
        anyio.run(work, recorder)
    calls = ledger.the_run().calls

    assert {call.origin for call in calls} == {"model", "plan[0]", "plan[1]"}
    assert [call.parent for call in calls] == [None, 1, 1]


def test_an_observer_of_the_callers_own_sees_every_call_too(ledger: Ledger) -> None:
    seen: list[str] = []

    class Own:
        def call_started(self, call: Any) -> None:
            seen.append(f"start {call.name}")

        async def call_ended(self, call: Any) -> None:
            seen.append(f"end {call.name}")

    with ledger.opened() as recorder:
        ledger.run(recorder, context=RunContext(observer=Own()))

    assert seen == ["start search", "end search"]
    assert ledger.kinds() == RUN_KINDS


def test_a_run_within_a_run_is_recorded_once_and_still_seen_by_the_callers_observer(ledger: Ledger) -> None:
    seen: list[str] = []

    class Own:
        def call_started(self, call: Any) -> None:
            seen.append(call.name)

        def call_ended(self, call: Any) -> None:
            pass

    with ledger.opened() as recorder, recorder.observe(RunContext(observer=Own())) as above:
        ledger.run(recorder, context=above.within(parent_call_id="c1"))

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


def test_what_runs_have_in_common_is_written_once_per_segment(ledger: Ledger) -> None:
    ledger.fill(40, settings=SMALL)
    for path in ledger.segments():
        kinds = [
            records.parse(piece.body).kind for piece in split_segment(path.read_bytes()) if isinstance(piece, Frame)
        ]
        assert kinds.count(records.SETTINGS) <= 1
        if records.RUN_STARTED in kinds:
            assert records.SETTINGS in kinds and records.TOOLS in kinds

    assert len(ledger.segments()) > 3


def test_a_run_that_needs_no_sandbox_may_fail(ledger: Ledger) -> None:
    with ledger.opened() as recorder, pytest.raises(ZeroDivisionError), recorder.observe(RunContext()):
        _ = 1 / 0
    run = ledger.the_run()

    assert run.outcome == "aborted"
    assert run.end["error"]["type"] == "ZeroDivisionError"


# To the disk


@pytest.mark.parametrize(("policy", "least"), [("never", 0), ("checkpoint", 1), ("always", 5)])
def test_the_fsync_policy_says_when_the_disk_is_waited_for(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, policy: Any, least: int
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with ledger.opened(config=AuditConfig(fsync=policy)) as recorder:
        ledger.run(recorder)
        if policy == "always":
            assert len(synced) >= 6  # tools, settings, and the run's four

    assert len(synced) >= least
    assert bool(synced) is (policy != "never")


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
    """Whether the last record on the disk is a signature."""
    return ledger.found()[-1].record.kind == records.CHECKPOINT


def waits_to_be_woken() -> bool:
    """Whether the thread that signs waits for a record, however long that takes."""
    (thread,) = [each for each in threading.enumerate() if each.name == "toolcell-audit"]
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code is not threading.Event.wait.__code__:
        frame = frame.f_back
    return frame is not None and frame.f_locals["timeout"] is None


def test_records_are_signed_soon_without_being_asked_also_after_a_quiet_time(ledger: Ledger) -> None:
    def signed() -> list[str]:
        return [fields["reason"] for fields in ledger.fields(records.CHECKPOINT)]

    with ledger.opened(settings={"checkpoint_s": 0.01}) as recorder:
        for _ in range(3):
            before = len(signed())
            ledger.run(recorder)
            anyio.run(until, lambda before=before: len(signed()) > before)
            anyio.run(until, waits_to_be_woken)

    assert set(signed()[:3]) == {"time"}


def test_after_so_many_records_one_is_signed_at_once(ledger: Ledger) -> None:
    with ledger.opened(settings={"checkpoint_s": 3600, "checkpoint_records": 20}) as recorder:

        async def until_signed() -> None:
            with anyio.fail_after(60):
                while "records" not in [fields["reason"] for fields in ledger.fields(records.CHECKPOINT)]:
                    await anyio.to_thread.run_sync(lambda: recorder.log.append(records.RUN_STARTED, 0, ("x",) * 15))

        anyio.run(until_signed)


def test_files_are_for_their_owner_alone(ledger: Ledger) -> None:
    ledger.fill(1)

    assert stat.S_IMODE(ledger.directory.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in ledger.segments())


class FullDisk:
    """Takes so many bytes, and then none."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._write = os.write

    def write(self, descriptor: int, data: bytes) -> int:
        taken = self._write(descriptor, data[: self.room])
        self.room -= taken
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        return taken


@pytest.mark.parametrize("room", [0, 1, 100, 200])
def test_no_record_no_effect_when_the_disk_is_full(ledger: Ledger, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    made: list[str] = []

    @ledger.registry.tool
    async def act(name: str) -> str:
        """Do something that can be seen afterwards."""
        made.append(name)
        return name

    with ledger.opened(settings={"checkpoint_s": 3600}) as recorder:
        record = ledger.begin(recorder)
        ledger.call(record, "act", {"name": "before"}, 1)
        monkeypatch.setattr(os, "write", FullDisk(room).write)
        with pytest.raises(AuditError, match=r"disk is full|No space left"):
            ledger.call(record, "act", {"name": "while full " * 20}, 2)
        monkeypatch.undo()
        ledger.call(record, "act", {"name": "after"}, 3)

    assert made == ["before", "after"]
    assert ledger.verify().ok


def test_a_disk_that_is_full_when_a_segment_ends_costs_no_record(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = ledger.log(settings={**SMALL, "checkpoint_s": 3600}).open()
    recorder = Recorder(log)
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        if data == MAGIC:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(AuditError, match="No space left"):
        for _ in range(100):
            ledger.run(recorder)
    monkeypatch.undo()
    with pytest.raises(AuditError, match="open it again"):
        ledger.run(recorder)
    with pytest.raises(AuditError):
        log.close()
    written = len(ledger.found())
    ledger.fill(1)

    assert len(ledger.found()) > written
    assert [fields["number"] for fields in ledger.fields(records.SEGMENT)] == [1, 2]
    assert ledger.verify().ok


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
        assert failed.wait(5)
        monkeypatch.setattr(ledger.key, "sign", sign)
        ledger.run(recorder)
        anyio.run(until, lambda: is_signed(ledger))  # the thread that signs is still there

    assert "could not be signed" in caplog.text
    assert ledger.verify().ok
    assert ledger.verify().chains[0].unsigned == 0


def away(data: bytes) -> bytes:
    """Sign, where the key service cannot be reached."""
    raise ConnectionError("the key service is away")


def test_a_segment_that_is_full_while_its_key_is_away_goes_on_until_it_is_back(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with ledger.opened(settings={"segment_bytes": 16384, "checkpoint_s": 3600}) as recorder:
        before = len(ledger.segments())
        with monkeypatch.context() as patch:
            patch.setattr(ledger.key, "sign", away)
            for _ in range(50):
                ledger.run(recorder)
        assert len(ledger.segments()) == before
        assert "not ended when it was full" in caplog.text
        assert caplog.text.count("the key service is away") < 25  # it is not asked at every record
        for _ in range(20):
            ledger.run(recorder)
        assert len(ledger.segments()) > before

    assert ledger.verify().ok
    assert ledger.verify().chains[0].unsigned == 0


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
    assert unsigned == {0, 8}  # the next writer does not sign what this one could not


def test_a_log_without_a_name_is_not_the_current_directory() -> None:
    with pytest.raises(UsageError, match="needs a name"):
        AuditLog("")


def test_what_cannot_sign_is_no_key(ledger: Ledger) -> None:
    with pytest.raises(UsageError, match=r"key must be a file's path or sign by itself \(a Signer\), not int"):
        ledger.log(key=7).open()


def test_a_signature_after_which_something_failed_is_followed_by_another(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is on the disk, but nobody was told: neither flushed, nor is its head kept."""
    failed, kept, duplicate = threading.Event(), list[int](), os.dup

    def refuse(descriptor: int) -> int:
        if threading.current_thread().name != "toolcell-audit":
            return duplicate(descriptor)
        failed.set()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("toolcell.audit.log.save_head", lambda where, head: kept.append(head.seq))
    with ledger.opened(settings={"checkpoint_s": 0.01}) as recorder, monkeypatch.context() as patch:
        anyio.run(until, lambda: bool(kept))
        patch.setattr(os, "dup", refuse)
        ledger.run(recorder)
        assert failed.wait(5)
        before = ledger.found()[-1].record.seq
        patch.undo()
        anyio.run(until, lambda: kept[-1] >= before)


def test_after_a_disk_failed_nothing_more_is_taken(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a failed flush left on the disk is not known, so no later record may claim to be safe."""
    failed = threading.Event()

    def fsync(descriptor: int) -> None:
        failed.set()
        raise OSError(errno.EIO, "Input/output error")

    log = ledger.log(config=AuditConfig(checkpoint_s=0.01)).open()
    ledger.run(Recorder(log))
    monkeypatch.setattr(os, "fsync", fsync)

    async def until_refused() -> None:
        with anyio.fail_after(60):
            while True:
                log.append(records.CALL_STARTED, 1, (1, "c", None, "x", "code", 1, {}, {}))
                await anyio.sleep(0.001)

    with pytest.raises(AuditError, match="did not reach the disk"):
        anyio.run(until_refused)
    assert failed.is_set()
    monkeypatch.undo()
    anyio.run(until, lambda: is_signed(ledger))  # what was taken until then is signed all the same
    log.close()


# By whom


def test_a_log_is_opened_once(ledger: Ledger) -> None:
    with ledger.log() as log, pytest.raises(UsageError, match="already open"):
        log.open()


def test_a_closed_log_takes_nothing(ledger: Ledger) -> None:
    with ledger.log() as log:
        pass
    log.close()

    with pytest.raises(AuditError, match="it is closed"):
        log.append(records.RUN_STARTED, 0, ("x",))


def test_two_writers_in_one_directory_write_a_chain_each_and_are_read_as_one(ledger: Ledger) -> None:
    with ledger.opened() as one, ledger.opened() as other:
        for number in range(3):
            ledger.run(one, f"a = {number}")
            ledger.run(other, f"b = {number}")
        assert one.log.chain != other.log.chain
    sources = [fields["source"] for fields in ledger.fields(records.RUN_STARTED)]

    assert sources == ["a = 0", "b = 0", "a = 1", "b = 1", "a = 2", "b = 2"]
    assert len(chain_directories(ledger.directory)) == 2
    assert ledger.verify().ok


def test_a_later_writer_goes_on_where_an_earlier_one_ended(ledger: Ledger) -> None:
    for _ in range(3):
        ledger.fill(1)

    assert len(chain_directories(ledger.directory)) == len(ledger.segments()) == 1
    assert len(ledger.fields(records.OPENED)) == 3
    assert ledger.verify().ok


def test_a_damaged_chain_is_left_alone_as_evidence(ledger: Ledger) -> None:
    ledger.fill(1)
    (path,) = ledger.segments()
    damaged = path.read_bytes()[:-1] + b"\x00"
    path.write_bytes(damaged)
    ledger.fill(1)

    assert path.read_bytes() == damaged
    assert len(chain_directories(ledger.directory)) == 2


@pytest.mark.parametrize("cut", [1, 40, 100])
def test_an_end_that_was_torn_off_stays_and_the_next_writer_says_so(ledger: Ledger, cut: int) -> None:
    ledger.fill(1, heads=ledger.directory.parent / "heads")
    (path,) = ledger.segments()
    path.write_bytes(path.read_bytes()[:-cut])
    torn = path.read_bytes()
    ledger.fill(1)
    (left,) = [fields["left"] for fields in ledger.fields(records.OPENED) if fields["left"]]

    assert path.read_bytes() == torn
    assert left[0][0] == path.parent.name
    assert "cut short" in left[0][3]
    assert ledger.verify(heads=[]).ok


@pytest.mark.parametrize("size", [0, 3, len(MAGIC)])
def test_a_writer_killed_while_it_made_a_segment_is_no_problem_for_the_next(ledger: Ledger, size: int) -> None:
    ledger.fill(1)
    segment_path(ledger.chain(), 2).write_bytes(MAGIC[:size])
    assert ledger.verify().ok
    ledger.fill(1)

    assert [fields["number"] for fields in ledger.fields(records.SEGMENT)] == [1, 2]
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


# Segments and forgetting


def test_segments_follow_one_another_and_verify_as_one_chain(ledger: Ledger) -> None:
    ledger.fill(60, settings=SMALL)
    report = ledger.verify()

    assert report.ok
    assert report.chains[0].segments > 5
    assert report.chains[0].runs == 60
    assert "rotated" in [fields["reason"] for fields in ledger.fields(records.CHECKPOINT)]


def test_old_segments_are_removed_by_size_and_the_rest_verifies(ledger: Ledger) -> None:
    ledger.fill(60, settings={**SMALL, "keep_bytes": 12_000})
    ledger.fill(1, settings={**SMALL, "keep_bytes": 12_000})
    with ledger.log(settings={**SMALL, "keep_bytes": 12_000}) as log:
        log.prune()
    report = ledger.verify()
    pruned = read_prune_record(ledger.chain())

    assert report.ok
    assert pruned is not None
    assert pruned.last_segment == min(segment_files(ledger.chain())) - 1
    assert sum(path.stat().st_size for path in ledger.segments()) < 20_000
    assert "removed by retention" in " ".join(report.notes)
    assert ledger.fields(records.PRUNED)
    ledger.fill(3, settings=SMALL)
    assert ledger.verify().ok


def test_pruning_continues_from_its_own_prune_record(ledger: Ledger) -> None:
    settings = {**SMALL, "keep_bytes": 0}
    for _ in range(3):
        ledger.fill(12, settings=SMALL)
        with ledger.log(settings=settings) as log:
            assert log.prune() > 0
        assert ledger.verify().ok

    assert len(ledger.fields(records.PRUNED)) >= 1


def test_the_record_of_a_removal_is_signed_soon_too(ledger: Ledger) -> None:
    ledger.fill(12, settings=SMALL)
    with ledger.log(settings={**SMALL, "keep_bytes": 0, "checkpoint_s": 0.01}) as log:
        anyio.run(until, lambda: is_signed(ledger))
        assert log.prune() > 0
        anyio.run(until, lambda: is_signed(ledger))


def test_segments_left_behind_by_a_killed_pruning_are_removed_next_time(ledger: Ledger) -> None:
    ledger.fill(30, settings=SMALL)
    first = segment_path(ledger.chain(), 1)
    kept = first.read_bytes()
    with ledger.log(settings={**SMALL, "keep_bytes": 0}) as log:
        log.prune()
    first.write_bytes(kept)
    assert ledger.verify().ok
    with ledger.log(settings={**SMALL, "keep_bytes": 0}) as log:
        log.prune()

    assert not first.exists()


def test_nothing_is_forgotten_unless_asked(ledger: Ledger) -> None:
    ledger.fill(30, settings=SMALL)
    with ledger.log(settings=SMALL) as log:
        assert log.prune() == 0

    assert 1 in segment_files(ledger.chain())


HOUR_NS = 3600 * 10**9
AGES = [ClosedSegment(number, 100, hours * HOUR_NS, number, b"", b"") for number, hours in ((1, 0), (2, 5), (3, 9))]


@pytest.mark.parametrize(
    ("settings", "newest_bytes", "expected"),
    [
        ({}, 100, 0),
        ({"keep_bytes": 400}, 100, 0),
        ({"keep_bytes": 399}, 100, 1),
        ({"keep_bytes": 250}, 100, 2),
        ({"keep_bytes": 0}, 100, 3),
        ({"keep_s": 6 * 3600}, 100, 1),
        ({"keep_s": 1800}, 100, 3),
        ({"keep_s": 6 * 3600, "keep_bytes": 250}, 100, 2),
    ],
)
def test_which_segments_have_to_go(settings: dict[str, Any], newest_bytes: int, expected: int) -> None:
    assert count_expired(AGES, newest_bytes, AuditConfig(**settings), 10 * HOUR_NS) == expected


# Sinks


def test_a_sink_gets_what_was_written_as_it_was_written(ledger: Ledger) -> None:
    events: list[AuditEvent] = []
    with ledger.opened(sinks=[events.append], secrets=["s3cr3t-thing"]) as recorder:
        ledger.run(recorder, calls=[("search", {"query": "s3cr3t-thing"})])
    told = [event for event in events if event.run and event.kind in RUN_KINDS]

    assert [event.kind for event in told] == RUN_KINDS
    assert "s3cr3t-thing" not in json.dumps([dict(event.fields) for event in told], default=str)
    assert [event.seq for event in told] == [f.record.seq for f in ledger.found() if f.record.run]


def test_a_sink_that_fails_holds_nothing_up(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    def sink(event: AuditEvent) -> None:
        raise RuntimeError("no")

    with ledger.opened(sinks=[sink]) as recorder:
        ledger.run(recorder)

    assert ledger.kinds() == RUN_KINDS
    assert "an audit sink failed" in caplog.text


def test_a_lock_is_known_to_be_held_only_while_it_is(ledger: Ledger) -> None:
    with ledger.log() as log:
        assert is_locked(ledger.directory / log.chain / LOCK_FILE)
    assert not is_locked(ledger.chain() / LOCK_FILE)
