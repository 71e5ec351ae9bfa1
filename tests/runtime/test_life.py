"""The life of a runtime: opening, closing, cancelling and dying. Afterwards nothing is left."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

import anyio
import psutil
import pytest

from toolcell import (
    Limits,
    Outcome,
    Policy,
    PoolConfig,
    Runtime,
    SyncRuntime,
    ToolRegistry,
    UsageError,
)
from toolcell.sandbox.backend import Sandbox
from toolcell.support import loop_thread
from toolcell.testing import FakeBackend

from .conftest import eventually, open_descriptors

pytestmark = [pytest.mark.quick, pytest.mark.isolation]

SLOW_S = 0.5

OWN = Limits(memory_bytes=1 << 30)
"""More than a sandbox of the pool has: one is started for the run, once."""

SLEEP = "set_result('early')\nprint('started')\nimport time\ntime.sleep(60)"


def guests() -> list[psutil.Process]:
    """Zygotes, launchers and sandboxes below this process."""
    return psutil.Process().children(recursive=True)


def test_ctrl_c_while_a_loop_starts_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts = iter([KeyboardInterrupt()])

    class Started(Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            found = super().result(timeout)
            for interrupt in interrupts:
                raise interrupt
            return found

    monkeypatch.setattr(loop_thread, "Future", Started)
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        SyncRuntime().open()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.slow
@pytest.mark.anyio
async def test_nothing_is_left_when_a_runtime_closes(sync_runtime: SyncRuntime) -> None:
    shared = sync_runtime.runtime.pool
    assert shared is not None
    await eventually(lambda: bool(shared.idle) and not (shared.busy or shared.starting))  # else it adds to our own
    before, descriptors = set(guests()), open_descriptors()

    async with Runtime() as runtime:
        await runtime.execute_code("1")
        assert len(set(guests()) - before) >= 2

    assert set(guests()) - before == set()
    gc.collect()
    assert open_descriptors() <= descriptors + 1


@pytest.mark.anyio
async def test_a_cancelled_run_is_killed_and_the_cancellation_goes_on(registry: ToolRegistry) -> None:
    async with Runtime(registry, pool=PoolConfig(warm=0)) as runtime:
        started = anyio.Event()
        with anyio.move_on_after(20) as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: runtime.execute_code(SLEEP, on_log=lambda *_: started.set()))
                await started.wait()
                tasks.cancel_scope.cancel()
        assert not scope.cancelled_caught
        await eventually(lambda: sandboxes_of(runtime) == 0)
        assert (await runtime.execute_code("set_result(2)")).value == 2


def sandboxes_of(runtime: Runtime) -> int:
    """Sandboxes that are busy or warm."""
    pool = runtime.pool
    assert pool is not None
    return len(pool.idle) + pool.busy + pool.starting


@pytest.mark.anyio
async def test_a_run_cancelled_by_event_keeps_what_it_had_done(registry: ToolRegistry) -> None:
    async with Runtime(registry) as runtime:
        cancel = anyio.Event()
        result = await runtime.execute_code(
            "call_tool('echo', q=1)\n" + SLEEP, cancel=cancel, on_log=lambda *_: cancel.set()
        )

    assert result.outcome is Outcome.CANCELLED
    assert (result.value, result.logs.text, len(result.calls)) == ("early", "started\n", 1)


@pytest.mark.anyio
async def test_runs_are_concurrent_and_do_not_see_each_other(registry: ToolRegistry) -> None:
    async with Runtime(registry, pool=PoolConfig(warm=2, cap=6)) as runtime:
        values: dict[int, object] = {}

        async def one(index: int) -> None:
            script = f"import os\nopen('mine', 'w').write('{index}')\nx = call_tool('echo', q={index})\nset_result([x, open('mine').read(), len(os.listdir('.'))])"
            values[index] = (await runtime.execute_code(script)).value

        async with anyio.create_task_group() as tasks:
            for index in range(12):
                tasks.start_soon(one, index)

    assert values == {index: [index, str(index), 1] for index in range(12)}


@pytest.mark.anyio
async def test_the_callers_own_exception_comes_out_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        async with Runtime(pool=PoolConfig(warm=0)):
            raise ZeroDivisionError


@pytest.mark.anyio
async def test_a_closed_or_unopened_runtime_says_so() -> None:
    runtime = Runtime()
    with pytest.raises(UsageError, match="not open"):
        await runtime.execute_code("1")
    async with runtime:
        with pytest.raises(UsageError, match="already open"):
            await runtime.open()
    with pytest.raises(UsageError, match="not open"):
        await runtime.execute_code("1")


@pytest.mark.slow
@pytest.mark.conforms("T3")
def test_without_a_cgroup_the_monitor_and_rlimits_bound_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from toolcell.sandbox.process import cgroup_manager

    monkeypatch.setattr(cgroup_manager, "discover", lambda: cgroup_manager.NoLocation("none here", "get one"))
    limits = Limits(memory_bytes=64 << 20, processes=12, wall_s=8, cpu_s=0.5)
    with SyncRuntime(limits=limits) as runtime:
        memory = runtime.execute_code("x = []\nwhile True: x.append(bytes(1 << 20))")
        processes = runtime.execute_code("import os\nwhile True: os.fork()")
        cpu = runtime.execute_code("while True: pass")
        fine = runtime.execute_code("set_result(1)")

    assert memory.outcome is Outcome.MEMORY_LIMIT
    assert memory.error is not None
    assert "limit 67108864" in memory.error.message
    assert processes.outcome in (Outcome.ERROR, Outcome.CPU_LIMIT, Outcome.PROCESS_LIMIT)
    assert cpu.outcome is Outcome.CPU_LIMIT
    assert fine.value == 1
    assert "cgroup" not in fine.isolation.layers
    assert cpu.usage.cpu_s >= 0.4


@pytest.mark.conforms("T3")
@pytest.mark.parametrize(
    ("source", "limits", "outcome", "reason"),
    [
        (
            "import os, time\nfor _ in range(3): os.fork()\nx = bytearray(30 << 20)\n"
            "for i in range(0, len(x), 4096): x[i] = 1\ntime.sleep(30)",
            Limits(memory_bytes=128 << 20, processes=12, wall_s=15),
            Outcome.MEMORY_LIMIT,
            "bytes of memory, limit 134217728 bytes",
        ),
        (
            "import os\nfor _ in range(2): os.fork()\nwhile True: pass",
            Limits(cpu_s=1.0, processes=12, wall_s=15),
            Outcome.CPU_LIMIT,
            "limit 1 s",
        ),
    ],
    ids=["memory", "cpu"],
)
def test_without_a_cgroup_all_processes_of_a_run_are_measured_together(
    source: str, limits: Limits, outcome: Outcome, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from toolcell.sandbox.process import cgroup_manager

    monkeypatch.setattr(cgroup_manager, "discover", lambda: cgroup_manager.NoLocation("none here", "get one"))
    with SyncRuntime(limits=limits) as runtime:
        before = set(guests())
        result = runtime.execute_code(source)

    assert result.outcome is outcome, result.error
    assert result.error is not None
    assert reason in result.error.message
    assert not alive(list(set(guests()) - before))


@pytest.mark.conforms("T3")
def test_without_a_cgroup_memory_that_processes_share_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from toolcell.sandbox.process import cgroup_manager

    monkeypatch.setattr(cgroup_manager, "discover", lambda: cgroup_manager.NoLocation("none here", "get one"))
    source = """
import os, time
x = bytearray(40 << 20)
for i in range(0, len(x), 4096): x[i] = 1
for _ in range(3): os.fork()
print('forked')
time.sleep(0.5)
"""
    with SyncRuntime(limits=Limits(memory_bytes=128 << 20, processes=12, wall_s=20)) as runtime:
        result = runtime.execute_code(source)

    assert result.outcome is Outcome.OK, result.error
    assert 6 <= result.usage.peak_processes <= 8  # a busy machine may sample before the last fork
    assert 40 << 20 < result.usage.peak_memory_bytes < 128 << 20


@pytest.mark.parametrize("profile", ["full", pytest.param("container", marks=pytest.mark.contained)])
def test_without_a_cgroup_scripts_of_a_millisecond_count(
    profile: Literal["full", "container"], monkeypatch: pytest.MonkeyPatch
) -> None:
    from toolcell.sandbox.process import cgroup_manager

    monkeypatch.setattr(cgroup_manager, "discover", lambda: cgroup_manager.NoLocation("none here", "get one"))
    source = "import time\nbegan = time.process_time()\nwhile time.process_time() < began + 0.001: pass"
    with SyncRuntime(policy=Policy(profile=profile)) as runtime:
        alone = [runtime.execute_code(source).usage.cpu_s for _ in range(3)]
        with runtime.session("brief") as session:
            together = [session.execute_code(source).usage.cpu_s for _ in range(20)]
            used_cpu_s = session.session.used_cpu_s

    assert min(alone) >= 0.001 and min(together) >= 0.001
    assert used_cpu_s >= sum(together)


def test_a_script_that_stops_itself_goes_on_as_nobody_could_let_it_go_on() -> None:
    source = """
import os, signal
stopping = [signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU]
for number in (*stopping, signal.SIGSTOP): os.kill(os.getpid(), number)
signal.pthread_sigmask(signal.SIG_BLOCK, stopping)
for number in stopping: os.kill(os.getpid(), number)
signal.pthread_sigmask(signal.SIG_UNBLOCK, stopping)
set_result("went on")
"""
    with SyncRuntime() as runtime:
        assert runtime.execute_code(source).value == "went on"


TREE = """
import os, signal, threading
for _ in range(2):
    if os.fork() == 0: signal.pause()
threading.Thread(target=signal.pause, daemon=True).start()
print("ready", flush=True)
input()
os.killpg(0, signal.SIGKILL)
"""


@pytest.mark.conforms("T3")
def test_the_watch_counts_the_processes_and_threads_of_a_whole_tree() -> None:
    from toolcell.sandbox.process.process_watch import TreeWatch

    command = [sys.executable, "-c", TREE]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as tree:
        assert tree.stdout is not None
        assert tree.stdout.readline() == "ready\n"
        watch = TreeWatch(tree.pid, memory_bytes=1 << 40)
        during = watch.look()
        tree.communicate("end\n")
        after = watch.look()

    assert (during.processes, during.peak_processes, after.peak_processes) == (4, 4, 4)


SHARED = """
import os, sys
held = bytearray(os.urandom(1)) * (40 << 20)
for _ in range(3):
    if not os.fork():
        sys.stdin.readline()
        os._exit(0)
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.mark.conforms("T3")
def test_above_the_limit_the_watch_counts_memory_that_processes_share_once() -> None:
    from toolcell.sandbox.process.process_watch import TreeWatch

    command = [sys.executable, "-c", f"input()\n{SHARED}"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as tree:
        assert tree.stdin is not None and tree.stdout is not None
        generous, strict = TreeWatch(tree.pid, memory_bytes=1 << 40), TreeWatch(tree.pid, memory_bytes=100 << 20)
        tree.stdin.write("go\n")
        tree.stdin.flush()
        assert tree.stdout.readline() == "ready\n"
        summed, shared = generous.look().peak_memory_bytes, strict.look().peak_memory_bytes
        tree.communicate("end\n" * 4)

    assert summed > 120 << 20
    assert 40 << 20 < shared < 80 << 20


@pytest.mark.anyio
@pytest.mark.parametrize("profile", ["full", "container"])
async def test_a_start_whose_zygote_dies_meanwhile_is_made_by_another_one(
    profile: Literal["full", "container"],
) -> None:
    """The zygote is stopped, so that it has been asked and has not answered when it dies."""
    before, values = guests(), list[Any]()
    async with Runtime(policy=Policy(profile=profile), pool=PoolConfig(warm=0)) as runtime:

        async def run() -> None:
            values.append((await runtime.execute_code("'from another one'", limits=OWN)).value)

        await run()
        zygote = [each for each in guests() if each not in before]
        for process in zygote:
            process.suspend()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await anyio.wait_all_tasks_blocked()
            for process in zygote:
                process.kill()
        assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in zygote)
    assert values == ["from another one"] * 2


def test_a_warm_sandbox_that_dies_is_not_handed_out(registry: ToolRegistry) -> None:
    with SyncRuntime(registry, pool=PoolConfig(warm=1)) as runtime:
        runtime.execute_code("1")
        pool = runtime.runtime.pool
        assert pool is not None
        assert until(lambda: bool(pool.idle))
        for connection in pool.idle:
            connection.sandbox.kill()
            assert until(lambda sandbox=connection.sandbox: not sandbox.is_alive())  # type: ignore[misc]
        assert runtime.execute_code("set_result(3)").value == 3


@pytest.mark.conforms("Q-b25")
@pytest.mark.anyio
async def test_a_warm_sandbox_shortens_the_start_and_the_result_says_how_long_it_took() -> None:
    class SlowBackend(FakeBackend):
        async def start(self, limits: Limits) -> Sandbox:
            await anyio.sleep(SLOW_S)
            return await super().start(limits)

    async def start_s(warm: int) -> float:
        backend, pool = SlowBackend([]), PoolConfig(warm=warm)
        async with Runtime(backend=backend, pool=pool, allow_unisolated=True) as runtime:
            await eventually(lambda: runtime.pool is not None and len(runtime.pool.idle) == warm)
            return (await runtime.execute_code("1")).usage.start_s

    assert await start_s(0) >= 0.9 * SLOW_S  # a timer of uvloop may be a little early
    assert await start_s(1) < 0.9 * SLOW_S


@pytest.mark.conforms("R-b3", "Q-b25")
def test_a_script_costs_less_than_150_ms_of_processor_time_in_a_warm_sandbox(registry: ToolRegistry) -> None:
    with SyncRuntime(registry, pool=PoolConfig(warm=1)) as runtime:
        pool = runtime.runtime.pool
        assert pool is not None
        assert until(lambda: bool(pool.idle) and not pool.starting)
        began_s = time.process_time()
        result = runtime.execute_code("set_result(call_tool('echo', q=1))")
        host_s = time.process_time() - began_s

    assert result.value == 1
    assert 0 < result.usage.cpu_s + host_s < 0.15


@pytest.mark.conforms("R3")
def test_a_script_costs_one_process_and_a_plan_none(registry: ToolRegistry) -> None:
    with SyncRuntime(registry, pool=PoolConfig(warm=0)) as runtime:
        runtime.execute_code("1")
        idle = set(guests())
        during: list[set[psutil.Process]] = []
        seen = registry.merged()
        seen.register("look", "Look at the processes", None, lambda args: during.append(set(guests())))

        runtime.execute_code("call_tool('look')", tools=seen)
        in_code = during.pop()
        runtime.execute_plan([{"tool": "look", "args": {}}], tools=seen)
        in_plan = during.pop()

    assert len(in_code - idle) == 1
    assert in_plan <= idle | in_code


HOST = """
import signal, sys, anyio
from toolcell import Runtime, PoolConfig, ToolRegistry
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
registry = ToolRegistry()
@registry.tool
async def echo(q: int) -> int:
    "Return the argument unchanged."
    return q
async def main():
    async with Runtime(registry, pool=PoolConfig(warm=2)) as runtime:
        print("ready", flush=True)
        async def forever():
            while True:
                await runtime.execute_code("for i in range(20): call_tool('echo', q=i)\\nimport os\\nos.fork()")
        async with anyio.create_task_group() as tasks:
            for _ in range(3): tasks.start_soon(forever)
anyio.run(main)
"""


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    def runs(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return [process for process in processes if runs(process)]


def cgroup_folders(pid: int) -> list[Path]:
    def walk(folder: Path, depth: int) -> list[Path]:
        try:
            below = [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
        except OSError:  # others make and remove cgroups while we look
            return []
        ours = [each for each in below if each.name.startswith(f"toolcell-{pid}-")]
        return ours + [found for each in below if depth and each not in ours for found in walk(each, depth - 1)]

    return walk(Path("/sys/fs/cgroup"), 4)


def until(condition: Callable[[], bool], within_s: float = 30) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


@contextmanager
def host_that_leaves_nothing(
    folder: Path, end: signal.Signals = signal.SIGKILL
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """Start a program with runs under way, and end it afterwards with a signal. Then nothing is left of it."""
    host = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOST)],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert host.stdout is not None
    try:
        yield host, host.stdout
        below = psutil.Process(host.pid).children(recursive=True)
        host.send_signal(end)
        host.wait(60)
    finally:
        host.kill()
        host.wait()
        host.stdout.close()
    assert until(lambda: not alive(below)), alive(below)
    assert until(lambda: not cgroup_folders(host.pid)), cgroup_folders(host.pid)
    assert os.listdir(folder) == []


KILLS = int(os.environ.get("TOOLCELL_KILLS", "4"))


@pytest.mark.parametrize("moment", range(KILLS))
def test_nothing_outlives_a_host_that_is_killed(moment: int, tmp_path: Path) -> None:
    """SIGKILL at many moments of start-up and load: processes, mounts and cgroups are soon gone."""
    with host_that_leaves_nothing(tmp_path) as (_, printed):
        if moment % 4:
            printed.readline()
        until(lambda: False, within_s=moment * 7919 % 300 / 1000)


@pytest.mark.parametrize(
    ("stopped", "end"),
    [
        ("everything", signal.SIGKILL),
        ("zygote", signal.SIGKILL),
        ("launcher", signal.SIGINT),
        ("both", signal.SIGINT),
    ],
)
def test_nothing_that_was_stopped_outlives_its_host(stopped: str, end: signal.Signals, tmp_path: Path) -> None:
    with host_that_leaves_nothing(tmp_path, end) as (host, printed):
        printed.readline()
        below = psutil.Process(host.pid).children(recursive=True)
        (launcher,) = psutil.Process(host.pid).children()
        (zygote,) = launcher.children()
        both = [zygote, launcher]
        for process in {"zygote": [zygote], "launcher": [launcher], "both": both, "everything": below}[stopped]:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
