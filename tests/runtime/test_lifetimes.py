"""Opening and closing: from any task, in one event loop and one process, once each, and with runs under way."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
from collections import Counter

import anyio
import anyio.lowlevel
import psutil
import pytest

from toolcell import Limits, PoolConfig, Runtime, SandboxUnavailable, SyncRuntime, ToolRegistry, UsageError
from toolcell.sandbox.backend import Sandbox
from toolcell.testing import FakeBackend, Hang

from .conftest import eventually, open_descriptors

pytestmark = [pytest.mark.quick, pytest.mark.every_loop, pytest.mark.isolation]

SLEEP = "print('started', flush=True)\nimport time\ntime.sleep(60)"
RUNS = 24
CAP = 16


def fake() -> Runtime:
    return Runtime(backend=FakeBackend([]), pool=PoolConfig(warm=0), allow_unisolated=True)


@pytest.mark.anyio
async def test_a_runtime_opens_in_one_task_is_used_in_another_and_closes_in_a_third() -> None:
    runtime = Runtime(pool=PoolConfig(warm=1))
    values: list[object] = []

    async def use() -> None:
        values.append((await runtime.execute_code("set_result(1)")).value)

    for step in (runtime.open, use, runtime.close, runtime.open, use, runtime.close):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(step)

    assert values == [1, 1]


@pytest.mark.anyio
async def test_the_caller_may_leave_a_cancel_scope_between_opening_and_closing() -> None:
    runtime = Runtime(pool=PoolConfig(warm=1))
    with anyio.move_on_after(30) as scope:
        await runtime.open()
        scope.cancel()
        await anyio.lowlevel.checkpoint()
    assert scope.cancelled_caught

    assert (await runtime.execute_code("set_result(2)")).value == 2
    await runtime.close()


@pytest.mark.anyio
async def test_closing_twice_and_closing_what_was_never_opened_do_nothing() -> None:
    runtime = fake()
    await runtime.close()
    await runtime.open()
    with pytest.raises(UsageError, match="already open"):
        await runtime.open()
    await runtime.close()
    await runtime.close()


@pytest.mark.anyio
async def test_a_runtime_that_could_not_open_says_why_and_opens_later() -> None:
    class Failing(FakeBackend):
        fails = True

        async def open(self) -> None:
            if self.fails:
                raise SandboxUnavailable("not today")
            await super().open()

    backend = Failing([])
    runtime = Runtime(backend=backend, pool=PoolConfig(warm=0), allow_unisolated=True)
    with pytest.raises(SandboxUnavailable, match="not today"):
        await runtime.open()
    with pytest.raises(UsageError, match="not open"):
        await runtime.execute_code("1")
    Failing.fails = False
    await runtime.open()
    await runtime.close()


@pytest.mark.anyio
async def test_opening_that_is_cancelled_leaves_nothing() -> None:
    before = set(psutil.Process().children(recursive=True))
    runtime = Runtime()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runtime.open)
        await eventually(lambda: bool(set(psutil.Process().children()) - before), within_s=30)
        tasks.cancel_scope.cancel()

    assert set(psutil.Process().children(recursive=True)) - before == set()
    with pytest.raises(UsageError, match="not open"):
        await runtime.execute_code("1")


@pytest.mark.slow
@pytest.mark.anyio
async def test_closing_with_runs_under_way_ends_each_of_them_clearly_and_leaves_nothing_open() -> None:
    async with Runtime(pool=PoolConfig(warm=0)) as first:
        await first.execute_code("1")  # from here on the process keeps two folders of the cache open
    gc.collect()
    descriptors, started, ends = open_descriptors(), 0, []
    runtime = Runtime(pool=PoolConfig(warm=0, cap=CAP))

    def on_log(stream: str, text: str) -> None:
        nonlocal started
        started += 1

    async def one() -> None:
        try:
            ends.append(str((await runtime.execute_code(SLEEP, on_log=on_log)).outcome))
        except SandboxUnavailable as exc:
            ends.append(str(exc))

    await runtime.open()
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for _ in range(RUNS):
                tasks.start_soon(one)
            await eventually(lambda: started == CAP, within_s=30)
            await runtime.close()

    unserved = "the Runtime was closed before the run had a sandbox; no code ran"
    assert Counter(ends) == {"cancelled": CAP, unserved: RUNS - CAP}
    gc.collect()
    assert open_descriptors() <= descriptors


@pytest.mark.anyio
async def test_runs_that_wait_for_a_sandbox_begin_no_more_once_the_runtime_closes() -> None:
    ends = list[str]()
    runtime = Runtime(backend=FakeBackend([Hang()]), pool=PoolConfig(warm=0, cap=1), allow_unisolated=True)

    async def one() -> None:
        try:
            ends.append(str((await runtime.execute_code("1")).outcome))
        except SandboxUnavailable:
            ends.append("not begun")

    await runtime.open()
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for _ in range(6):
                tasks.start_soon(one)
            await anyio.wait_all_tasks_blocked()
            await runtime.close()

    assert Counter(ends) == {"cancelled": 1, "not begun": 5}


@pytest.mark.anyio
async def test_a_start_of_a_backend_that_raises_fails_its_run_and_no_other() -> None:
    problems = [OSError(28, "No space left on device"), MemoryError(), ZeroDivisionError("a bug of the backend")]

    class Raising(FakeBackend):
        async def start(self, limits: Limits) -> Sandbox:
            if problems:
                raise problems.pop(0)
            return await super().start(limits)

    async with Runtime(backend=Raising([]), pool=PoolConfig(warm=0), allow_unisolated=True) as runtime:
        with pytest.raises(ZeroDivisionError, match="a bug of the backend"):
            await runtime.execute_code("1")
        assert problems == []
        await runtime.execute_code("1")


def test_another_event_loop_is_refused_at_once() -> None:
    runtime = fake()
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(runtime.open())
        for use in (runtime.close, lambda: runtime.execute_code("1")):
            with pytest.raises(UsageError, match="another event loop"):
                asyncio.run(use())  # type: ignore[arg-type]
        loop.run_until_complete(runtime.close())
    finally:
        loop.close()


def test_an_event_loop_that_ends_closes_what_nobody_closed() -> None:
    before = set(psutil.Process().children(recursive=True))
    runtime = Runtime(pool=PoolConfig(warm=0))
    asyncio.run(runtime.open())

    assert set(psutil.Process().children(recursive=True)) - before == set()
    with pytest.raises(UsageError, match="not open"):
        asyncio.run(runtime.execute_code("1"))


def program(source: str) -> str:
    """Run a program to its end and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(source)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True])
def test_a_forked_child_is_refused_at_once_and_does_its_parent_no_harm(is_async: bool) -> None:
    source = """
        import asyncio, os
        from toolcell import Runtime, SyncRuntime, UsageError
        async def main():
            async with Runtime() as runtime:
                child = os.fork()
                if child == 0:
                    for use in (lambda: runtime.execute_code("1"), runtime.close):
                        try:
                            await use()
                        except UsageError as exc:
                            print("forked child" in str(exc), flush=True)
                    os._exit(0)
                os.waitpid(child, 0)
                print((await runtime.execute_code("set_result(5)")).value)
        asyncio.run(main())
    """
    if not is_async:
        for old, new in (
            ("async ", ""),
            ("await ", ""),
            ("Runtime() as", "SyncRuntime() as"),
            ("asyncio.run(main())", "main()"),
        ):
            source = source.replace(old, new)

    assert program(source) == "True\nTrue\n5\n"


@pytest.mark.slow
def test_a_sync_runtime_that_nobody_closed_lets_the_process_end_and_leaves_nothing() -> None:
    printed = program("""
        import atexit, psutil
        from toolcell import SyncRuntime
        atexit.register(lambda: print(len(psutil.Process().children(recursive=True))))
        runtime = SyncRuntime()
        runtime.open()
        print(runtime.execute_code("set_result(1)").value)
    """)

    assert printed == "1\n0\n"


@pytest.mark.slow
def test_a_sync_runtime_that_is_not_used_any_more_is_closed() -> None:
    before = set(psutil.Process().children(recursive=True))
    runtime = SyncRuntime(pool=PoolConfig(warm=0))
    runtime.open()
    assert set(psutil.Process().children(recursive=True)) - before
    del runtime
    gc.collect()

    assert set(psutil.Process().children(recursive=True)) - before == set()


def test_a_sync_runtime_works_inside_a_running_event_loop_as_in_a_notebook() -> None:
    async def cell() -> object:
        with SyncRuntime(pool=PoolConfig(warm=0)) as runtime:
            return runtime.execute_code("set_result(8)").value

    assert asyncio.run(cell()) == 8


def test_a_sync_runtime_called_from_its_own_event_loop_is_refused_instead_of_hanging() -> None:
    registry = ToolRegistry()

    @registry.tool
    async def again() -> str:
        """Run another script from an async tool."""
        try:
            return str(runtime.execute_code("1"))
        except UsageError as exc:
            return str(exc)

    with SyncRuntime(registry, pool=PoolConfig(warm=0)) as runtime:
        assert "own event loop" in runtime.execute_code("set_result(call_tool('again'))").value


@pytest.mark.slow
def test_ctrl_c_during_a_run_ends_the_run_and_the_sync_runtime_goes_on() -> None:
    printed = program(f"""
        import os, signal
        from toolcell import SyncRuntime
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is started to ignore it
        with SyncRuntime() as runtime:
            try:
                runtime.execute_code({SLEEP!r}, on_log=lambda *_: os.kill(os.getpid(), signal.SIGINT))
            except KeyboardInterrupt:
                print("interrupted")
            print(runtime.execute_code("set_result(9)").value)
    """)

    assert printed == "interrupted\n9\n"


@pytest.mark.parametrize("source", ["call_tool('stop')", "call_tools_parallel([('stop', {})] * 3)"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_keyboard_interrupt_in_a_tool_is_a_keyboard_interrupt(source: str, is_async: bool) -> None:
    def stop() -> None:
        """Stop the whole program, as a debugger does."""
        raise KeyboardInterrupt("stop")

    async def stop_later() -> None:
        """Stop the whole program, as a debugger does."""
        await anyio.lowlevel.checkpoint()
        stop()

    registry = ToolRegistry()
    registry.tool(name="stop")(stop_later if is_async else stop)
    with SyncRuntime(registry, pool=PoolConfig(warm=0)) as runtime:
        with pytest.raises(KeyboardInterrupt, match="stop"):
            runtime.execute_code(source)
        assert runtime.execute_code("set_result(7)").value == 7
