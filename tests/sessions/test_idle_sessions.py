"""An idle session is paused: nothing in its sandbox runs until its next script, and a pause outlives nobody."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from toolcell import Policy, PoolConfig, Runtime, SyncRuntime, ToolRegistry
from toolcell.sandbox.process import process_watch
from toolcell.sandbox.process.backend import ProcessSandbox
from toolcell.sandbox.process.cgroup import MOST_KEPT, CgroupFiles, KeptFiles, V2Cgroup
from toolcell.sandbox.process.process_watch import signal_all, tree_of
from toolcell.sessions import Session, state

HIDES = """
import os, threading, toolcell_bridge.guest.script_end as leftovers
leftovers.end_leftovers = lambda end_s: ([], [])
def spin():
    while True: pass
threading.Thread(target=spin, daemon=True).start()
if os.fork() == 0: spin()
"""


async def until_stopped(number: int) -> None:
    """Wait until so many processes below this one are stopped."""
    with anyio.fail_after(60):
        while len(stopped()) < number:
            await anyio.sleep(0.01)
    assert len(stopped()) == number


of_other_tests = set[psutil.Process]()
"""Processes that were there before: a notebook of the tests before may be paused."""


@pytest.fixture(autouse=True)
def _of_other_tests() -> None:
    of_other_tests.clear()
    of_other_tests.update(psutil.Process().children(recursive=True))


def stopped() -> list[int]:
    found = set(psutil.Process().children(recursive=True)) - of_other_tests
    return [each.pid for each in found if each.is_running() and status(each) == psutil.STATUS_STOPPED]


def status(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD


@pytest.mark.isolation
@pytest.mark.parametrize("route", ["cgroup", "no cgroup", pytest.param("container", marks=pytest.mark.contained)])
async def test_a_paused_session_runs_nothing_until_its_next_script(
    anyio_backend: str, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy(profile="container") if route == "container" else Policy()
    async with Runtime(pool=PoolConfig(warm=0), policy=policy) as runtime, runtime.session() as session:
        assert (await session.execute_code("x = 41" + HIDES)).ok
        if route == "no cgroup":
            assert session._state.connection is not None
            sandbox: Any = session._state.connection.sandbox
            while not isinstance(sandbox, ProcessSandbox):
                sandbox = sandbox._sandbox
            monkeypatch.setattr(sandbox, "_cgroup", None)
        assert await session.pause()
        await until_stopped(2)
        assert await session.pause() and session.is_paused
        before = cpu_s(paused := stopped())
        await anyio.sleep(0.05)
        assert cpu_s(paused) == before
        monkeypatch.undo()

        result = await session.execute_code("x + 1")
        assert (result.value, session.is_paused, stopped()) == (42, False, [])
        await session.pause()
        await until_stopped(2)
        await session.close()
        assert not any(map(psutil.pid_exists, paused))


def cpu_s(pids: list[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


@pytest.mark.isolation
async def test_a_session_is_paused_after_a_while_without_a_script_and_put_down_after_idle_s(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "PAUSE_S", 0.0)
    async with Runtime(pool=PoolConfig(warm=0)) as runtime:
        async with runtime.session() as session, runtime.session() as other:
            await session.execute_code("x = 41")
            await until_stopped(2)
            assert session.is_paused and other.is_paused
            assert (await session.execute_code("x + 1")).value == 42
            await until_stopped(2)
            async with await session.fork() as copy:
                assert (await copy.execute_code("x")).value == 41
            await session.reset()
            assert (await session.execute_code("'x' in globals()")).value is False
        async with runtime.session(idle_s=0.05) as session:
            await session.execute_code("x = 1")
            with anyio.fail_after(60):
                while session.is_live:
                    await anyio.sleep(0.01)
            assert not session.is_paused and not await session.pause()
            assert (await session.execute_code("x")).value == 1


@pytest.mark.isolation
async def test_nothing_of_a_sandbox_is_held_when_its_session_is_put_down(anyio_backend: str) -> None:
    async with Runtime(pool=PoolConfig(warm=0)) as runtime, runtime.session() as session:
        assert (await session.execute_code("x = 41")).ok
        meter = weakref.ref(session._state._meter)
        await session._state.put_down()
        gc.collect()
        assert meter() is None
        assert (await session.execute_code("x + 1")).value == 42


@pytest.mark.isolation
async def test_nobody_looks_at_a_session_that_idles_until_it_is_time(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, look_at = list[float](), Session.look_at.fget  # type: ignore[attr-defined]

    def counted(session: Session) -> float:
        looks.append(look_at(session))
        return looks[-1]

    monkeypatch.setattr(state, "PAUSE_S", 0.0)
    monkeypatch.setattr(Session, "look_at", property(counted))
    async with Runtime(pool=PoolConfig(warm=0)) as runtime, runtime.session() as session, runtime.session():
        await session.execute_code("x = 41")
        await until_stopped(2)
        looks.clear()
        for _ in range(1000):
            await anyio.lowlevel.checkpoint()
        assert len(looks) < 20


@pytest.mark.isolation
def test_a_paused_session_ends_with_a_host_that_is_killed() -> None:
    source = (
        "import sys, psutil\nfrom toolcell import PoolConfig, SyncRuntime\n"
        "with SyncRuntime(pool=PoolConfig(warm=0)) as runtime, runtime.session() as session:\n"
        "    session.pause()\n"
        "    print(*[each.pid for each in psutil.Process().children(recursive=True)], flush=True)\n    sys.stdin.read()"
    )
    host = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with host:
        assert host.stdout is not None
        below = [psutil.Process(int(pid)) for pid in host.stdout.readline().split()]
        until = time.monotonic() + 60
        while psutil.STATUS_STOPPED not in map(status, below):  # a signal takes a moment on a busy machine
            assert time.monotonic() < until
            time.sleep(0.01)
        host.kill()
        assert not psutil.wait_procs(below, timeout=60)[1]


@pytest.mark.isolation
def test_sessions_of_a_blocking_runtime_can_be_paused() -> None:
    with SyncRuntime(pool=PoolConfig(warm=0)) as runtime, runtime.session() as session:
        session.execute_code("x = 1")
        assert session.pause() and session.session.is_paused
        assert session.execute_code("x").value == 1


@pytest.fixture
def tree() -> Iterator[subprocess.Popen[bytes]]:
    """A process with two others below it."""
    command = "sh -c 'sleep 600 & echo; wait' & wait"
    with subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        for pid in tree_of(process.pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("has_children", [True, False], ids=["listed", "searched for"])
def test_a_signal_reaches_every_process_of_a_tree(
    tree: subprocess.Popen[bytes], has_children: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_watch, "HAS_CHILDREN", has_children)
    pids = tree_of(tree.pid)
    assert len({*pids}) == 3 and pids[0] == tree.pid and tree_of(2**22 + 1) == [2**22 + 1]
    assert signal_all(lambda: tree_of(tree.pid), signal.SIGSTOP)
    for pid in pids:
        assert os.waitpid(pid, os.WUNTRACED)[1] if pid == tree.pid else True
    assert signal_all(lambda: [*pids, 2**22 + 1], signal.SIGCONT)


def test_signals_to_processes_that_never_stop_coming_end() -> None:
    numbers = iter(range(2**22 + 1, 2**23))

    assert not signal_all(lambda: {next(numbers)}, signal.SIGSTOP)


def test_a_unified_cgroup_is_frozen_by_the_kernel_and_an_old_kernel_says_that_it_cannot(tmp_path: Path) -> None:
    cgroup = V2Cgroup("s1", str(tmp_path), CgroupFiles())
    assert not cgroup.freeze(True)
    file = tmp_path / "cgroup.freeze"
    file.write_text("0\n")

    assert cgroup.freeze(True) and file.read_text()[0] == "1"
    assert cgroup.freeze(False) and file.read_text()[0] == "0"


def test_files_that_stay_open_are_read_as_they_are_now_and_closed_with_their_cgroup(tmp_path: Path) -> None:
    (tmp_path / "pids.current").write_text("3\n")
    before, others = len(os.listdir("/proc/self/fd")), KeptFiles.in_use
    cgroups = [V2Cgroup(f"s{number}", str(tmp_path), CgroupFiles()) for number in range(MOST_KEPT + 2)]
    for cgroup in cgroups:
        cgroup.keep_open(True)
        assert cgroup.count_processes() == 3
    (tmp_path / "pids.current").write_text("4\n")

    assert {cgroup.count_processes() for cgroup in cgroups} == {4}
    assert len(os.listdir("/proc/self/fd")) == before + MOST_KEPT - others
    for cgroup in cgroups:
        cgroup.keep_open(False)
        cgroup.keep_open(False)
    assert len(os.listdir("/proc/self/fd")) == before and KeptFiles.in_use == others


def test_a_session_does_not_idle_while_its_second_script_runs() -> None:
    registry, seen = ToolRegistry(), list[float | None]()

    @registry.tool
    def look() -> None:
        """Look whether the session idles."""
        seen.append(session.session.idle_since)

    with SyncRuntime(registry) as runtime, runtime.session() as session:
        for _ in range(2):
            assert session.execute_code("call_tool('look')").ok
        assert session.session.idle_since is not None

    assert seen == [None, None]
