"""Threads that wait for plain functions: what a function finds there, and what becomes of what it returns or raises.

Each test runs with functions that the loop waits for, and with functions whose answers wake it.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from toolcell.support import waiting_threads
from toolcell.support.waiting_threads import WaitingThreads
from toolcell.tools import RunContext, ToolRegistry, abandoned_threads
from tools.toolkit import PATIENCE_S

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio", "uvloop"], indirect=True)]

place: contextvars.ContextVar[str] = contextvars.ContextVar("place", default="nowhere")


@pytest.fixture(params=[waiting_threads.QUICK_S, 0.05, 0.0], ids=["as ever", "waits", "is woken"], autouse=True)
def _quick_s(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_threads, "QUICK_S", request.param)


async def test_a_function_returns_or_raises_to_whoever_waits() -> None:
    threads = WaitingThreads()

    def raises(error: BaseException) -> Callable[[], None]:
        def function() -> None:
            raise error

        return function

    assert await threads.run(lambda: 42) == 42
    for error in (ValueError("no"), SystemExit(3), ZeroDivisionError()):
        with pytest.raises(type(error)) as found:
            await threads.run(raises(error))
        assert found.value is error
    with pytest.raises(RuntimeError, match="StopIteration"):
        await threads.run(raises(StopIteration(1)))
    with pytest.raises(asyncio.CancelledError):
        await threads.run(raises(asyncio.CancelledError()))
    assert await threads.run(lambda: "still there") == "still there"


async def test_context_variables_are_read_and_changes_stay_in_the_function() -> None:
    threads = WaitingThreads()
    place.set("here")

    def move() -> str:
        was = place.get()
        place.set("elsewhere")
        return was

    assert [await threads.run(move) for _ in range(3)] == ["here"] * 3
    assert place.get() == "here"


async def test_a_function_reaches_the_loop_and_may_run_one_of_its_own() -> None:
    threads = WaitingThreads()
    event = anyio.Event()

    def function() -> int:
        anyio.from_thread.run_sync(event.set)
        anyio.from_thread.run(anyio.sleep, 0)
        return anyio.run(own)

    async def own() -> int:
        return await anyio.to_thread.run_sync(lambda: 7)

    assert await threads.run(function) == 7
    assert event.is_set()


async def test_a_function_can_ask_whether_its_call_was_cancelled() -> None:
    registry, started, seen = ToolRegistry(), anyio.Event(), threading.Event()

    @registry.tool
    def patient() -> None:
        """Wait until the call is cancelled."""
        anyio.from_thread.run_sync(started.set)
        try:
            while True:
                anyio.from_thread.check_cancelled()
                time.sleep(0.001)
        finally:
            seen.set()

    run = RunContext()
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: registry.dispatch("patient", {}, context=run))
        await started.wait()
        run.cancel("enough")
    assert await anyio.to_thread.run_sync(seen.wait, PATIENCE_S)
    with anyio.fail_after(PATIENCE_S):
        while abandoned_threads():
            await anyio.sleep(0.001)


async def test_functions_that_wait_for_each_other_all_have_a_thread() -> None:
    threads, meeting = WaitingThreads(), threading.Barrier(20, timeout=PATIENCE_S)
    async with anyio.create_task_group() as group:
        for _ in range(20):
            group.start_soon(threads.run, meeting.wait)


async def test_each_of_many_functions_returns_to_its_own_caller() -> None:
    threads, chance = WaitingThreads(), random.Random(1)
    returned: dict[int, int] = {}

    async def call(number: int, pause_s: float) -> None:
        def function() -> int:
            if pause_s:
                time.sleep(pause_s)
            return number

        returned[number] = await threads.run(function)

    async with anyio.create_task_group() as group:
        for number in range(300):
            group.start_soon(call, number, chance.choice([0, 0, 0, 0.0001, 0.001]))
    assert returned == {number: number for number in range(300)}


async def test_a_cancelled_wait_ends_at_once_and_the_function_goes_on() -> None:
    threads, released, ended = WaitingThreads(), threading.Event(), threading.Event()
    started = anyio.Event()

    def function() -> None:
        anyio.from_thread.run_sync(started.set)
        released.wait(PATIENCE_S)
        ended.set()

    async with anyio.create_task_group() as group:
        group.start_soon(threads.run, function)
        await started.wait()
        group.cancel_scope.cancel()
    assert not ended.is_set()
    released.set()
    assert await anyio.to_thread.run_sync(ended.wait, PATIENCE_S)
    assert await threads.run(lambda: "works on") == "works on"


async def test_a_function_whose_call_is_cancelled_before_is_not_started() -> None:
    threads, started = WaitingThreads(), list[int]()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await threads.run(lambda: started.append(1))
    assert started == []


async def test_a_thread_that_is_idle_ends_and_another_one_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_threads, "IDLE_S", 0.01)
    threads = WaitingThreads()
    found = await threads.run(threading.current_thread)
    assert found.daemon
    with anyio.fail_after(PATIENCE_S):
        while found.is_alive():
            await anyio.sleep(0.001)
    assert await threads.run(lambda: "again") == "again"


async def test_a_thread_that_cannot_start_is_an_error_and_the_next_one_may(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = WaitingThreads()
    with monkeypatch.context() as patch:

        def fails(*_args: Any, **_options: Any) -> None:
            raise MemoryError("no memory for another thread")

        patch.setattr("toolcell.support.daemon_threads.start", fails)
        with pytest.raises(MemoryError):
            await threads.run(lambda: 1)
    assert await threads.run(lambda: 2) == 2
