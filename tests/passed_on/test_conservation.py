"""What a run takes is given back and accounted for, however it ends: descriptors, processes, records, quotas, time."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from passed_on.office import Office
from passed_on.processes import own_children
from rows import each_row
from toolcell import ExecutionResult, Limits, Outcome, PoolConfig, Quota, QuotaExceeded, Quotas, RunContext, Runtime
from toolcell.audit import Index, RecordedRun

pytestmark = [pytest.mark.quick, pytest.mark.anyio, pytest.mark.isolation]

WORK = "call_tool('write', text='a')\nsum(range(200_000))\n"


class Unwilling(Exception):
    """What a callback of a careless program raises."""


def refuse(*_given: Any) -> None:
    raise Unwilling


async def run(runtime: Runtime, code: str = "", **options: Any) -> ExecutionResult:
    return await runtime.execute_code(WORK + code, context=RunContext(user_id="ann"), **options)


async def cancelled(runtime: Runtime) -> ExecutionResult:
    cancel = anyio.Event()
    return await run(
        runtime, "progress(1)\nimport time\ntime.sleep(600)", cancel=cancel, on_progress=lambda _: cancel.set()
    )


async def given_up(runtime: Runtime) -> None:
    """The caller's own task is cancelled."""
    with anyio.CancelScope() as scope:
        await run(runtime, "progress(1)\nimport time\ntime.sleep(600)", on_progress=lambda _: scope.cancel())


async def lost(runtime: Runtime) -> ExecutionResult:
    """The parent of all sandboxes dies."""

    def kill(_value: object) -> None:
        for child in own_children():
            with suppress(psutil.Error):
                if child.children():
                    child.kill()

    return await run(runtime, "progress(1)\nimport time\ntime.sleep(600)", on_progress=kill)


async def callback_raises(runtime: Runtime) -> None:
    with suppress(Unwilling):
        await run(runtime, "progress(1)\nimport time\ntime.sleep(600)", on_progress=refuse)


async def printing_callback_raises(runtime: Runtime) -> None:
    with suppress(Unwilling):
        await run(runtime, "print('x', flush=True)\nimport time\ntime.sleep(600)", on_log=refuse)


async def session(runtime: Runtime) -> ExecutionResult:
    async with runtime.session() as one:
        return await one.execute_code(WORK, context=RunContext(user_id="ann"))


Ending = Callable[[Runtime], Awaitable[ExecutionResult | None]]

ENDINGS: dict[str, tuple[Ending, str]] = {
    "ok": (run, "ok"),
    "error": (lambda runtime: run(runtime, "1/0"), "error"),
    "does not compile": (lambda runtime: run(runtime, "("), "error"),
    "timeout": (lambda runtime: run(runtime, "import time\ntime.sleep(600)", limits=Limits(wall_s=0.3)), "timeout"),
    "cpu_limit": (lambda runtime: run(runtime, "while True: pass", limits=Limits(cpu_s=0.2)), "cpu_limit"),
    "killed": (lambda runtime: run(runtime, "import ctypes\nctypes.string_at(0)"), "killed"),
    "call_limit": (
        lambda runtime: run(runtime, "call_tool('write', text='b')", limits=Limits(tool_calls=1)),
        "call_limit",
    ),
    "denied": (lambda runtime: run(runtime, "import os\nos.system('x')", lint="strict"), "denied"),
    "cancelled": (cancelled, "cancelled"),
    "given up": (given_up, "cancelled"),
    "lost": (lost, "lost"),
    "progress callback raises": (callback_raises, "error"),
    "log callback raises": (printing_callback_raises, "error"),
    "session": (session, "ok"),
}


def descriptors() -> Counter[str]:
    """Return what this process has open."""
    gc.collect()
    found = Counter[str]()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found[os.readlink(f"/proc/self/fd/{name}").split(":")[0]] += 1
    return found


def recorded(folder: Path) -> list[RecordedRun]:
    with Index(folder / "runs.db") as index:
        return [index.load(summary) for summary in index.runs()]


@pytest.mark.slow
@each_row("ending", ENDINGS)
async def test_a_run_is_accounted_for_however_it_ends(ending: str, office: Office, tmp_path: Path) -> None:
    end, outcome = ENDINGS[ending]
    for attempt in ("once", "again", "at last"):  # threads of tests before this one open some of their own
        office.made.clear()
        quotas = Quotas(Quota(runs=100, calls=100, cpu_s=100))
        before = descriptors()
        with anyio.fail_after(60):
            async with Runtime(
                office.registry, pool=PoolConfig(warm=0), quotas=quotas, record=tmp_path / attempt / "runs.db"
            ) as runtime:
                result = await end(runtime)
        with anyio.move_on_after(5):
            while left := descriptors() - before:
                await anyio.sleep(0.1)
        if not left:
            break
    assert not left
    assert own_children() == []
    (record,) = recorded(tmp_path / attempt)
    made = len(office.made)
    assert record.end and all(call.is_finished for call in record.calls)
    assert [call.tool for call in record.calls if call.verdict == "allowed"] == ["write"] * made
    used = quotas.used("ann")
    assert used["runs"] == 1 and used.get("calls", 0) == made
    assert used["cpu_s"] > 0 or outcome == "denied"
    if result is not None:
        assert str(result.outcome) == record.outcome == outcome
        assert used["cpu_s"] == pytest.approx(result.usage.cpu_s)
        assert record.end["usage"]["cpu_s"] == pytest.approx(result.usage.cpu_s)


async def test_a_quota_is_not_evaded_by_a_callback_that_raises(office: Office) -> None:
    quotas = Quotas(Quota(cpu_s=0.001))
    async with Runtime(office.registry, pool=PoolConfig(warm=0), quotas=quotas) as runtime:
        await callback_raises(runtime)
        with pytest.raises(QuotaExceeded, match="used up: cpu_s"):
            await run(runtime)


@pytest.mark.parametrize(("given", "returned"), [(100_000, 10), (10, 100_000)])
async def test_bytes_in_the_record_are_those_that_went_this_way(given: int, returned: int, tmp_path: Path) -> None:
    async with Runtime(pool=PoolConfig(warm=0), record=tmp_path / "runs.db") as runtime:
        result = await runtime.execute_code(f"'x' * {returned}", inputs={"text": "y" * given})
    (record,) = recorded(tmp_path)

    usage = record.end["usage"]
    assert usage["sent_bytes"] == result.usage.sent_bytes >= given
    assert usage["received_bytes"] == result.usage.received_bytes >= returned
    assert (usage["sent_bytes"] > 50_000, usage["received_bytes"] > 50_000) == (given > 1000, returned > 1000)


async def test_bytes_of_a_script_of_a_session_are_its_own() -> None:
    async with Runtime(pool=PoolConfig(warm=0)) as runtime, runtime.session() as one:
        large = await one.execute_code("x = 'x' * 100_000\nx", inputs={"text": "y" * 100_000})
        small = await one.execute_code("1")

    assert min(large.usage.sent_bytes, large.usage.received_bytes) >= 100_000
    assert max(small.usage.sent_bytes, small.usage.received_bytes) < 50_000


async def test_a_host_that_waits_uses_no_processor(office: Office) -> None:
    """With sandboxes that wait, one that was paused, and a script that sleeps."""
    events = Counter[str]()
    async with Runtime(office.registry, pool=PoolConfig(warm=2)) as runtime, runtime.session() as one:
        await one.execute_code("x = 1")
        await one.pause()
        async with anyio.create_task_group() as tasks:
            begun = anyio.Event()
            script = "progress(1)\nimport time\ntime.sleep(600)"
            tasks.start_soon(partial(runtime.execute_code, script, on_progress=lambda _: begun.set()))
            await begun.wait()
            while runtime.pool is None or len(runtime.pool.idle) < 2:
                await anyio.sleep(0.01)
            cpu_s = time.process_time()
            sys.setprofile(lambda frame, event, arg: events.update([event]))
            await anyio.sleep(0.5)
            sys.setprofile(None)
            cpu_s = time.process_time() - cpu_s
            tasks.cancel_scope.cancel()

    assert events["call"] < 5_000 and cpu_s < 0.1, (events, cpu_s)


async def test_outcomes_that_are_ended_here_are_all_but_those_of_others() -> None:
    """Suspended, diverged and unavailable runs are those of other tests; limits are in tests/runtime/test_limits.py."""
    ended = {Outcome(outcome) for _, outcome in ENDINGS.values()}
    elsewhere = {"memory_limit", "output_limit", "process_limit", "host_work_limit", "protocol_error", "unavailable"}
    assert {*Outcome} - ended == {Outcome(name) for name in (*elsewhere, "suspended", "diverged")}
