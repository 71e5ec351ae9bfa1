"""`Policy(profile="container")` on this machine: lifetimes, limits and what it refuses. Needs no container."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.lowlevel
import psutil
import pytest

from rows import each_row
from toolcell import Limits, Outcome, Policy, PoolConfig, Runtime, SyncRuntime, ToolRegistry
from toolcell.config import CONTAINER_LAYERS, DEFAULT_LAYERS
from toolcell.errors import SandboxUnavailable, UsageError
from toolcell.sandbox.backend import Backend
from toolcell.sandbox.process import contained_backend
from toolcell.sandbox.process import zygote as zygotes
from toolcell.sandbox.process.backend import ProcessBackend
from toolcell.sandbox.process.contained_backend import ContainedBackend, ContainedSandbox, ContainedZygote
from toolcell_bridge.entry.process_usage import ProcessUsage
from toolcell_bridge.entry.supervisor import FileRoom, excess
from toolcell_bridge.isolation.apply_in_container import METADATA, beside_other_files
from toolcell_bridge.isolation.seccomp_policy import GUEST_POLICY, PACKAGES_POLICY, SeccompAction, SeccompPolicy
from toolcell_bridge.isolation.syscall_numbers import SYSCALL_NUMBERS

CONTAINER = Policy(profile="container")

HOST = """
import signal
from toolcell import Policy, PoolConfig, SyncRuntime
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
runtime = SyncRuntime(policy=Policy(profile="container"), pool=PoolConfig(warm=0)).__enter__()  # so that none is just being forked
say = lambda stream, text: print(text, flush=True)
runtime.execute_code("import os, time\\nif os.fork() == 0: os.setsid()\\nprint(os.getcwd(), flush=True)\\ntime.sleep(300)", on_log=say)
"""


def test_each_profile_requires_its_layers_unless_told_otherwise() -> None:
    assert Policy().require == DEFAULT_LAYERS
    assert CONTAINER.require == CONTAINER_LAYERS
    assert Policy(profile="container", require=frozenset({"cgroup"})).require == {"cgroup"}


def test_the_profile_is_the_process_backends() -> None:
    with pytest.raises(UsageError, match="process backend"), SyncRuntime(backend="docker", policy=CONTAINER):
        pass


@pytest.mark.quick
@pytest.mark.contained
def test_scripts_call_tools_and_results_name_the_layers() -> None:
    registry = ToolRegistry()

    @registry.tool
    def double(number: int) -> int:
        """Return twice the number."""
        return 2 * number

    with SyncRuntime(registry, policy=CONTAINER) as runtime:
        results = [runtime.execute_code(f"set_result(call_tool('double', number={n}))") for n in range(20)]

    assert [result.value for result in results] == [2 * n for n in range(20)]
    assert set(results[0].isolation.layers) == CONTAINER_LAYERS


@pytest.mark.quick
@pytest.mark.contained
def test_a_layer_that_this_profile_does_not_have_is_refused() -> None:
    policy = Policy(profile="container", require=CONTAINER_LAYERS | {"net"})
    with pytest.raises(SandboxUnavailable, match="not live: net"), SyncRuntime(policy=policy):
        pass


@pytest.mark.contained
def test_processors_cannot_be_held_and_that_is_said() -> None:
    limits = Limits(cpu_cores=1.0)
    with pytest.raises(SandboxUnavailable, match="cpu_cores"), SyncRuntime(policy=CONTAINER, limits=limits):
        pass


@pytest.mark.contained
def test_a_timeout_names_the_line_it_was_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ContainedSandbox, "answer_s", WAITED_S)  # a busy machine may take longer than a run waits
    with SyncRuntime(policy=CONTAINER) as runtime:
        result = runtime.execute_code("x = 1\nwhile True: pass", limits=Limits(wall_s=2.0))

    assert result.outcome is Outcome.TIMEOUT
    assert result.error is not None
    assert result.error.line == 2


@pytest.mark.quick
@pytest.mark.contained
def test_limits_of_a_run_hold_in_a_warm_sandbox() -> None:
    with SyncRuntime(policy=CONTAINER, pool=PoolConfig(warm=1)) as runtime:
        lowered = Limits(wall_s=0.4, open_files=32)
        files = "import os\nset_result(len([os.open('/dev/null', 0) for _ in range(100)]))"
        assert runtime.execute_code("import time; time.sleep(60)", limits=lowered).outcome is Outcome.TIMEOUT
        result = runtime.execute_code(files, limits=Limits(open_files=32))
    assert result.error is not None
    assert "Too many open files" in result.error.message


FORKS = """
import os, time
for _ in range(24):
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
time.sleep(60)
"""


@pytest.mark.contained
def test_what_a_script_shares_with_the_zygote_is_not_counted_for_each_of_its_processes() -> None:
    """Nor for a sandbox that waited while another one was measured."""
    with SyncRuntime(policy=CONTAINER, pool=PoolConfig(warm=2)) as runtime:
        for _ in range(4):
            many = runtime.execute_code(FORKS, limits=Limits(memory_bytes=64 << 20, processes=10))
            assert many.outcome is Outcome.PROCESS_LIMIT, many.error
        few = runtime.execute_code(FORKS.replace("60", "0.5").replace("24", "8"), limits=Limits(memory_bytes=64 << 20))
        assert few.ok, few.error


def below(process: psutil.Process) -> list[psutil.Process]:
    return process.children(recursive=True)


@pytest.mark.contained
@each_row(
    ("stopped", "end"),
    [
        ("zygote", "the host is killed"),
        ("supervisors and zygote", "the zygote is killed"),
        ("everything", "closed"),
        ("everything", "the host is killed"),
        ("everything", "the zygote is killed"),
    ],
)
def test_nothing_outlives_a_host_or_a_zygote(stopped: str, end: str) -> None:
    """The attack: another process of the user stops what ends a sandbox."""
    with subprocess.Popen(
        [sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as host:
        assert host.stdout is not None
        workspace = Path(host.stdout.readline().strip())
        found = below(psutil.Process(host.pid))
        (zygote,) = psutil.Process(host.pid).children()
        supervisors = zygote.children()
        assert len(found) >= 4  # zygote, supervisor, script and its child
        stops = {"zygote": [zygote], "everything": found}
        for process in stops.get(stopped, [*supervisors, zygote]):
            process.suspend()
        if "zygote" in end:
            host.send_signal(signal.SIGSTOP)  # it does nothing for them
            zygote.kill()
            _, alive = psutil.wait_procs([process for process in found if process != zygote], timeout=60)
            host.send_signal(signal.SIGCONT)
            assert alive == []
        host.send_signal(signal.SIGKILL if "host" in end else signal.SIGINT)

    _, alive = psutil.wait_procs(found, timeout=60)
    assert alive == []
    assert "zygote" in end or not workspace.parents[2].exists()


def test_a_zygote_is_killed_with_what_it_did_not_tell_of(tmp_path: Path) -> None:
    """A supervisor that was just forked has not asked for a signal at the death of its zygote."""
    zygote = subprocess.Popen(
        [sys.executable, "-c", "import os, signal\nos.fork()\nos.kill(os.getpid(), signal.SIGSTOP)"]
    )
    ours, theirs = socket.socketpair()
    with theirs:
        handle = ContainedZygote(zygote, ours, str(tmp_path / "base"), ProcessUsage())
        try:
            while not (found := below(psutil.Process(zygote.pid))) or found[0].status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)
        finally:
            handle.kill()

    _, alive = psutil.wait_procs(found, timeout=60)
    assert alive == []


WAITED_S = 60.0
"""Less than a run is made to wait here for the end of a sandbox that is not reported."""


@pytest.mark.slow
@pytest.mark.contained
async def test_a_stopped_zygote_delays_no_run_past_its_limits_and_fails_a_start_in_time(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = psutil.Process()
    before = me.children()
    monkeypatch.setattr(contained_backend, "END_S", 2 * WAITED_S)
    async with Runtime(policy=CONTAINER, pool=PoolConfig(warm=0, start_s=5)) as runtime:

        def stop(stream: str, text: str) -> None:
            for child in me.children():
                if child not in before:
                    child.suspend()

        assert await first_result(runtime) == 1
        source = "print(1, flush=True)\nimport time\ntime.sleep(600)"
        with anyio.fail_after(WAITED_S):
            result = await runtime.execute_code(source, limits=Limits(wall_s=5), on_log=stop)
        assert result.outcome is Outcome.TIMEOUT

        (zygote,) = [child for child in me.children() if child not in before]
        with pytest.raises(SandboxUnavailable, match="within 5 s"):
            await runtime.execute_code("pass")
        monkeypatch.setattr(zygotes, "ANSWER_S", 0.5)
        assert await first_result(runtime) == 1
        assert not zygote.is_running()


class Starting:
    """A zygote of which nothing is known but its start."""

    def __init__(self) -> None:
        self.is_dead = False
        self.left = 1

    def check(self) -> None: ...

    def kill(self) -> None:
        self.left = 0

    async def listen(self) -> None:
        await anyio.sleep_forever()

    async def aclose(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.kill()


@pytest.mark.quick
@pytest.mark.anyio
async def test_who_waits_for_the_same_zygote_shares_it_or_its_failure() -> None:
    starts, answers = [], []

    async def start(_: int) -> Any:
        starts.append(Starting())
        await anyio.wait_all_tasks_blocked()
        if len(starts) == 2:
            raise SandboxUnavailable("no memory")
        return starts[-1]

    async def ask() -> None:
        try:
            answers.append(await backend.living())
        except SandboxUnavailable as exc:
            answers.append(str(exc))

    backend: zygotes.Zygotes[Any] = zygotes.Zygotes(start)
    await backend.open()
    for _ in range(3):
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(ask)
        starts[-1].is_dead = True
    await backend.close(Starting.aclose)

    assert answers == [starts[0]] * 3 + ["no memory"] * 3 + [starts[2]] * 3
    assert [each.left for each in (starts[0], starts[2])] == [0, 0]


@pytest.mark.quick
@pytest.mark.every_loop
async def test_one_zygote_that_cannot_be_ended_keeps_no_other_from_it(anyio_backend: str) -> None:
    starts = [Starting(), Starting(), Starting()]

    async def start(frame_bytes: int) -> Any:
        return starts[frame_bytes]

    async def end(zygote: Any) -> None:
        await zygote.aclose()
        if zygote is starts[1]:
            raise PermissionError("no right to end it")

    backend: zygotes.Zygotes[Any] = zygotes.Zygotes(start)
    await backend.open()
    for frame_bytes in range(3):
        await backend.living(frame_bytes)
    with pytest.raises(PermissionError):
        await backend.close(end)
    assert [each.left for each in starts] == [0, 0, 0]


@pytest.mark.quick
@pytest.mark.anyio
async def test_a_failed_start_names_the_error_of_the_machine() -> None:
    shortage = OSError(errno.ENOMEM, "no memory")

    async def start(_: int) -> Any:
        raise shortage

    backend: zygotes.Zygotes[Any] = zygotes.Zygotes(start)
    await backend.open()
    with pytest.raises(SandboxUnavailable) as refused:
        await backend.living()
    await backend.close(Starting.aclose)
    assert refused.value.__cause__ is shortage


@pytest.mark.parametrize(
    "backend_type",
    [
        pytest.param(ProcessBackend, marks=pytest.mark.isolation),
        pytest.param(ContainedBackend, marks=pytest.mark.contained),
    ],
)
async def test_a_zygote_that_replaces_a_dead_one_does_not_outlive_its_backend(
    backend_type: type[ProcessBackend | ContainedBackend], anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = psutil.Process()
    before = me.children()
    backend = backend_type()
    told: list[str] = []
    receive = zygotes.ZygoteHandle._receive

    async def receive_if_ready(zygote: zygotes.ZygoteHandle[Any]) -> Any:
        return await (receive(zygote) if zygote._is_listening else anyio.sleep_forever())

    async def start() -> None:
        try:
            await (await backend.start(Limits())).destroy()
        except SandboxUnavailable as exc:
            told.append(str(exc))

    with anyio.fail_after(WAITED_S):
        async with anyio.create_task_group() as tasks:
            await backend.open()
            monkeypatch.setattr(zygotes.ZygoteHandle, "_receive", receive_if_ready)
            (first,) = [each for each in me.children() if each not in before]
            first.kill()
            while not [each for each in me.children() if each not in (first, *before)]:
                tasks.start_soon(start)
                await anyio.wait_all_tasks_blocked()
            await backend.close()
            assert not [each for each in me.children() if each not in before]
    assert "the process backend was closed" in told


@pytest.mark.anyio
async def test_who_waits_for_a_sandbox_hears_when_nobody_will_report_its_end() -> None:
    child = zygotes.ForkedSandbox(1)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child.changed.wait)
            await anyio.wait_all_tasks_blocked()
            child.fail("")
    assert child.is_over and child.problem


@pytest.mark.slow
@pytest.mark.parametrize(
    "profile",
    [
        pytest.param("full", marks=pytest.mark.isolation),
        pytest.param("container", marks=pytest.mark.contained),
        pytest.param("auto", marks=pytest.mark.contained),
    ],
)
async def test_a_zygote_may_be_as_slow_as_start_s_lets_it(
    profile: Literal["full", "container", "auto"], anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygotes, "ANSWER_S", 0.01)
    monkeypatch.setattr(Backend, "start_s", 0.0)
    me = psutil.Process()
    before = me.children()
    async with Runtime(policy=Policy(profile=profile), pool=PoolConfig(warm=0, start_s=WAITED_S)) as runtime:
        assert await first_result(runtime) == 1
        (parent,) = [each for each in me.children() if each not in before]
        stopped = [parent, *parent.children(recursive=True)]
        for process in stopped:
            with suppress(psutil.NoSuchProcess):  # the sandbox of the first run may just have ended
                process.suspend()

        async def resume() -> None:
            await anyio.sleep(0.2)
            for process in stopped:
                with suppress(psutil.NoSuchProcess):
                    process.resume()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(resume)
            assert await first_result(runtime) == 1
        assert parent.is_running() and parent.status() != psutil.STATUS_ZOMBIE


STAYING = """
import os, signal, time
for number in (signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    os.fork()
print(1, flush=True)
while True: time.sleep(60)
"""


@pytest.mark.contained
async def test_a_supervisor_that_was_stopped_outlives_no_run_and_takes_no_other_run_with_it(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: another process of the user stops what ends a sandbox."""
    me, stopped = psutil.Process(), []
    before = me.children()
    monkeypatch.setattr(contained_backend, "END_S", 2 * WAITED_S)
    async with Runtime(policy=CONTAINER, pool=PoolConfig(warm=0)) as runtime, runtime.session() as beside:
        assert (await beside.execute_code("x = 1")).ok
        (zygote,) = [child for child in me.children() if child not in before]
        others = zygote.children()

        def stop(stream: str, text: str) -> None:
            if stopped:
                return
            (supervisor,) = [child for child in zygote.children() if child not in others]
            stopped.extend([supervisor, *below(supervisor)])
            supervisor.suspend()

        with anyio.fail_after(WAITED_S):
            result = await runtime.execute_code(STAYING, limits=Limits(wall_s=5), on_log=stop)
        assert result.outcome is Outcome.TIMEOUT
        assert len(stopped) >= 3
        _, alive = psutil.wait_procs(stopped, timeout=60)
        assert alive == []
        assert (await beside.execute_code("x")).value == 1
        assert zygote.is_running() and zygote.status() != psutil.STATUS_ZOMBIE


@pytest.mark.contained
async def test_a_supervisor_that_was_killed_leaves_nothing_below_it(anyio_backend: str) -> None:
    me, found = psutil.Process(), []
    before = me.children()
    async with Runtime(policy=CONTAINER, pool=PoolConfig(warm=0)) as runtime:

        def kill(stream: str, text: str) -> None:
            if found:
                return
            (zygote,) = [child for child in me.children() if child not in before]
            (supervisor,) = zygote.children()
            found.extend([supervisor, *below(supervisor)])
            supervisor.kill()

        result = await runtime.execute_code(STAYING, limits=Limits(wall_s=20), on_log=kill)
        assert not result.ok
        _, alive = psutil.wait_procs(found, timeout=60)
        assert alive == []
        assert await first_result(runtime) == 1


async def first_result(runtime: Runtime) -> object:
    """First result of a script that is tried until it has a sandbox: another zygote may take longer than `start_s`."""
    with anyio.fail_after(60):
        while True:
            with suppress(SandboxUnavailable):
                return (await runtime.execute_code("set_result(1)")).value


@each_row("policy", [GUEST_POLICY, PACKAGES_POLICY], ids=["library", "packages"])
def test_every_call_has_one_answer_and_metadata_is_never_changed(policy: SeccompPolicy) -> None:
    beside = beside_other_files(policy)
    rows = [
        *(
            call
            for groups in (beside.allowed, beside.refused, beside.missing, beside.skipped)
            for g in groups
            for call in g.calls
        ),
        *(rule.call for rule in beside.rules),
    ]
    assert len(rows) == len(set(rows))
    for machine, numbers in SYSCALL_NUMBERS.items():
        assert {numbers[call] for call in rows if call in numbers} == set(numbers.values())
        for call in METADATA.calls:
            if call in numbers:
                assert beside.decide(machine, numbers[call], [0] * 6) is SeccompAction.SKIP
        for mode, answer in ((0o777, SeccompAction.ALLOW), (0o077, SeccompAction.EPERM), (0o300, SeccompAction.EPERM)):
            assert beside.decide(machine, numbers["mkdirat"], [0, 0, mode, 0, 0, 0]) is answer


def test_files_are_measured_without_following_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "big").write_bytes(os.urandom(1 << 20))
    home = tmp_path / "home"
    (home / "a" / "b").mkdir(parents=True)
    (home / "a" / "link").symlink_to(outside)
    room = FileRoom(disk_bytes=256 * 1024, inodes=10)

    assert excess(str(home), room) == ""
    (home / "a" / "b" / "big").write_bytes(os.urandom(1 << 20))
    assert "disk_bytes=262144" in excess(str(home), room)
    (home / "a" / "b" / "big").unlink()
    for number in range(20):
        (home / f"{number}").touch()
    assert "inodes=10" in excess(str(home), room)


def test_folders_too_deep_to_be_measured_are_too_much(tmp_path: Path) -> None:
    room, here = FileRoom(disk_bytes=1 << 30, inodes=10_000), os.getcwd()
    os.chdir(tmp_path)
    try:
        for _ in range(30):
            os.mkdir("d" * 200)
            os.chdir("d" * 200)
    finally:
        os.chdir(here)
    assert "too deep" in excess(str(tmp_path), room)
