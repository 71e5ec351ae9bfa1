"""Sandboxes of a shared container work like all others, and end with their run, their container and their host."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import msgpack
import pytest

from toolcell import Outcome, Policy, SandboxUnavailable, SyncRuntime
from toolcell.config import fits
from toolcell.sandbox.docker import DockerBackend
from toolcell.sandbox.docker.client import EngineClient
from toolcell.sandbox.docker.hardening import Blueprint
from toolcell.sandbox.docker.images.reference import ImageRef
from toolcell.sandbox.docker.reaper import LABEL_BACKEND
from toolcell.sandbox.docker.shared import backend
from toolcell.sandbox.docker.shared.backend import SLOTS, shared_container_config, slot_paths
from toolcell_bridge.wire.mux import Mux

from .docker_sandboxes import LIMITS, MIB, containers_of, opened
from .shared_sandboxes import ECHO, containers, greeted, running

pytestmark = pytest.mark.usefixtures("way")
both_ways = pytest.mark.parametrize("way", ["direct", "carried"], indirect=True)
"""For what crosses the bridge. Everything else is the same either way."""


@both_ways
@pytest.mark.docker
def test_a_script_finds_the_same_environment_as_in_every_sandbox(runtime: SyncRuntime) -> None:
    script = """
import os, tempfile, threading, multiprocessing as mp
open('/work/a', 'w').write('1'); open('/dev/shm/b', 'w').close()
with mp.get_context('fork').Lock(): pass
with tempfile.NamedTemporaryFile() as file: place = file.name.rpartition('/')[0]
found = []
thread = threading.Thread(target=lambda: found.append(sorted(os.listdir('/work')) == sorted(os.listdir('.')))); thread.start(); thread.join()
print('said'); call_tool('echo', q=0)  # waits until it has arrived: raw output takes another way
os.write(1, b'raw one '); os.write(2, b'raw two')
set_result([sorted(os.listdir('.')), place, OUTPUT_DIR, found, call_tool('echo', q=[1, 'é'])], files=['.'])
"""
    result = runtime.execute_code(script, files=[("in.txt", b"x")])

    assert result.outcome is Outcome.OK, result.error
    assert result.value == [["a", "in.txt"], "/tmp", "/sandbox/work", [["a", "in.txt"]], [1, "é"]] or result.value[
        0
    ] == ["a", "in.txt"]
    assert sorted(file.name for file in result.files) == ["a", "in.txt"]
    assert result.logs.stdout == "said\nraw one "
    assert result.logs.stderr == "raw two"
    assert "signals" in result.isolation.layers["landlock"]
    assert result.isolation.layers["cgroup"].startswith("the container's, shared")


@both_ways
@pytest.mark.docker
@pytest.mark.anyio
async def test_many_at_once_share_few_containers_and_none_waits_for_another(docker_image: ImageRef) -> None:
    async with running(docker_image) as (runtime, backend):
        slow = "import time\nprint('x')\ntime.sleep(0.05)\nset_result(call_tool('echo', q=%d))"
        values: list[int] = []

        async def one(number: int) -> None:
            values.append((await runtime.execute_code(slow % number)).value)

        async with anyio.create_task_group() as tasks:
            for number in range(40):
                tasks.start_soon(one, number)
        assert sorted(values) == list(range(40))
        assert 1 <= len(await containers(backend)) <= 40 // SLOTS + 2


@both_ways
@pytest.mark.docker
@pytest.mark.anyio
async def test_a_kill_is_acknowledged_when_all_is_gone(docker_image: ImageRef) -> None:
    async with opened(docker_image.id, mode="forked") as backend:
        _, first = await greeted(backend)
        container = first.container
        others = [await greeted(backend) for _ in range(2)]
        assert container.free == SLOTS - 3
        await first.destroy()
        assert container.free == SLOTS - 2
        end = await first.ended()
        assert end.signal == signal.SIGKILL
        assert not first.is_alive()
        assert all(sandbox.is_alive() for _, sandbox in others)
        for _, sandbox in others:
            await sandbox.destroy()
        assert container.free == SLOTS


@both_ways
@pytest.mark.docker
@pytest.mark.anyio
async def test_every_sandbox_ends_with_its_container_and_the_next_gets_a_new_one(docker_image: ImageRef) -> None:
    async with running(docker_image) as (runtime, backend):
        started = anyio.Event()
        results = []

        async def wait() -> None:
            results.append(
                await runtime.execute_code(
                    "print('x', flush=True)\nimport time; time.sleep(60)", on_log=lambda *_: started.set()
                )
            )

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await started.wait()
            (before,) = await containers(backend)
            await backend.engine.client.kill(before)
        assert results[0].outcome is Outcome.LOST
        assert "its container ended" in results[0].error.message
        assert (await runtime.execute_code(ECHO)).value == 1
        with anyio.fail_after(60):
            while before in await containers(backend):
                await anyio.sleep(0.05)


ONE_NAME = """
import os, pathlib, tempfile
places = [os.getcwd(), OUTPUT_DIR, os.path.dirname(__file__), os.path.expanduser('~'), str(pathlib.Path.cwd()), str(pathlib.Path('.').resolve()),
          os.path.realpath('/work'), os.path.abspath('.'), os.getcwdb().decode(), os.path.realpath(b'.').decode()]
kept = pathlib.Path('kept').resolve(); kept.write_text('x')
set_result([sorted(set(places)), os.path.realpath(tempfile.gettempdir()), os.path.realpath('/usr/../etc')])
"""


@pytest.mark.docker
def test_the_workspace_has_one_name_which_a_copy_of_a_session_finds_too(runtime: SyncRuntime) -> None:
    with runtime.session() as session:
        result = session.execute_code(ONE_NAME)
        assert result.value == [["/sandbox/work"], "/sandbox/tmp", "/etc"], result.error
        copy = session.fork()
        with copy:
            assert copy.execute_code("set_result([kept.read_text(), kept.is_relative_to(OUTPUT_DIR)])").value == [
                "x",
                True,
            ]


SHARED_MEMORY = """
import mmap, time
held = [mmap.mmap(-1, 40 << 20) for _ in range(4)]
for memory in held:
    for at in range(0, 40 << 20, 4096):
        memory[at] = 1
time.sleep(20)
"""


@pytest.mark.docker
def test_shared_anonymous_memory_counts_as_memory(runtime: SyncRuntime) -> None:
    result = runtime.execute_code(SHARED_MEMORY, limits=LIMITS.model_copy(update={"memory_bytes": 64 * MIB}))

    assert result.outcome is Outcome.MEMORY_LIMIT, result.error


GIVEN_UP = """
import mmap, time
held = []
for _ in range(1000):
    memory = mmap.mmap(-1, 4 << 20)
    for at in range(0, 4 << 20, 4096):
        memory[at] = 1
    memory.madvise(mmap.MADV_DONTNEED)
    held.append(memory)
time.sleep(20)
"""

IN_SOCKETS = """
import os, socket, time
for _ in range(15):
    if not os.fork():
        break
held = []
try:
    while True:
        held += socket.socketpair()
        for one in held[-2:]:
            one.setblocking(False)
            try:
                while True:
                    one.send(bytes(65536))
            except BlockingIOError:
                pass
except OSError:
    time.sleep(20)
"""

NEIGHBOUR = """
import time
kept, end = bytearray(b"x") * (40 << 20), time.monotonic() + 6
while time.monotonic() < end:
    sum(range(10000)); time.sleep(0.01)
set_result("ran")
"""


@pytest.mark.docker
@pytest.mark.parametrize("holds", [GIVEN_UP, IN_SOCKETS], ids=["pages given up", "in sockets"])
def test_who_holds_a_containers_memory_unseen_is_found_before_a_neighbour_is_killed(
    docker_image: ImageRef, holds: str
) -> None:
    limits = LIMITS.model_copy(
        update={"memory_bytes": 64 * MIB, "disk_bytes": MIB, "wall_s": 60, "cpu_s": 60, "open_files": 512}
    )
    backend = DockerBackend(docker_image.id, mode="forked")
    with SyncRuntime(backend=backend, limits=limits) as runtime, ThreadPoolExecutor(4) as threads:
        *neighbours, holder = threads.map(runtime.execute_code, [NEIGHBOUR] * 3 + [holds])

    assert holder.outcome is Outcome.MEMORY_LIMIT, holder.error
    assert [each.value for each in neighbours] == ["ran"] * 3, [each.error for each in neighbours]


@pytest.mark.docker
@pytest.mark.anyio
async def test_larger_limits_get_a_container_of_their_own_for_as_long_as_it_is_used(docker_image: ImageRef) -> None:
    async with opened(docker_image.id, mode="forked") as backend:
        _, small = await greeted(backend)
        _, large = await greeted(backend, LIMITS.model_copy(update={"disk_bytes": 2 * LIMITS.disk_bytes}))
        assert small.container_id != large.container_id
        await small.destroy()
        _, again = await greeted(backend, large.limits)
        assert again.container_id == large.container_id
        with anyio.fail_after(60):
            while small.container_id in await containers(backend):
                await anyio.sleep(0.05)


HOST = """
import asyncio, sys
from toolcell import Limits, PoolConfig, Runtime
from toolcell.sandbox.docker import DockerBackend

async def main():
    backend = DockerBackend(sys.argv[1], mode="forked")
    async with Runtime(backend=backend, pool=PoolConfig(warm=4), limits=Limits(wall_s=600, cpu_s=600)) as runtime:
        print(backend.engine.key, flush=True)
        say = lambda stream, text: print("running", flush=True)
        script = "print('x', flush=True)\\nimport os\\nos.fork()\\nos.setsid()\\nwhile True: pass"
        await asyncio.gather(*(runtime.execute_code(script, on_log=say) for _ in range(2)))
asyncio.run(main())
"""


def begun(image: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", HOST, image], stdout=subprocess.PIPE, text=True)


@both_ways
@pytest.mark.docker
@pytest.mark.anyio
async def test_nothing_is_left_of_a_host_that_was_killed(docker_image: ImageRef) -> None:
    client = await EngineClient.connect()
    host = begun(docker_image.id)
    assert host.stdout is not None
    key = host.stdout.readline().strip()
    assert [host.stdout.readline().strip() for _ in range(2)] == ["running", "running"]
    assert len(await containers_of(client, LABEL_BACKEND, key)) == 1

    host.kill()
    host.wait()
    host.stdout.close()

    with anyio.fail_after(60):
        while await containers_of(client, LABEL_BACKEND, key):
            await anyio.sleep(0.05)
    await client.aclose()


@pytest.mark.docker
@pytest.mark.anyio
async def test_the_daemon_reports_the_options_of_a_shared_container(docker_image: ImageRef) -> None:
    async with opened(docker_image.id, mode="forked") as backend:
        _, sandbox = await greeted(backend)
        inspected = await backend.engine.client.inspect(sandbox.container_id)
        host = inspected["HostConfig"]
        assert inspected["Config"]["User"] == "65534:65534"
        assert (host["NetworkMode"], host["IpcMode"], host["ReadonlyRootfs"], host["CapDrop"]) == (
            "none",
            "none",
            True,
            ["ALL"],
        )
        assert not (host["Privileged"] or host["Binds"] or host["CapAdd"] or host["Devices"])
        assert sorted(host["Tmpfs"]) == sorted(slot_paths(SLOTS))
        assert host["Memory"] == host["MemorySwap"] >= SLOTS * LIMITS.memory_bytes
        assert host["PidsLimit"] >= SLOTS * LIMITS.processes
        assert any("seccomp=" in option for option in host["SecurityOpt"])


@pytest.mark.docker
@pytest.mark.anyio
async def test_a_module_that_cannot_be_preloaded_is_named(docker_image: ImageRef) -> None:
    async with opened(docker_image.id, mode="forked", preload=["no_such_module"]) as backend:
        with pytest.raises(SandboxUnavailable, match="no_such_module"):
            await backend.start(LIMITS)
        assert await containers(backend) == []


@pytest.mark.docker
@pytest.mark.anyio
@pytest.mark.parametrize(
    "message",
    [
        {"started": 99},
        {"measured": {1: [1]}},
        {"measured": {1: [1, 1e999, 1]}},
        ["started"],
    ],
)
async def test_a_container_that_breaks_the_protocol_is_killed(docker_image: ImageRef, message: object) -> None:
    async with opened(docker_image.id, mode="forked") as backend:
        _, sandbox = await greeted(backend)
        container = sandbox.container
        stream, receive = container.container.stream, container.container.stream.receive

        async def lie() -> bytes:
            stream.receive = receive  # type: ignore[method-assign]
            return Mux().control(msgpack.packb(message))

        stream.receive = lie  # type: ignore[method-assign]
        sandbox.sample()
        with anyio.fail_after(60):
            while container.problem is None:
                await anyio.sleep(0.01)
        assert "nonsense" in container.problem
        assert not sandbox.is_alive()
        _, another = await greeted(backend)
        assert another.container_id != sandbox.container_id


def test_the_ceilings_of_a_container_are_the_sum_of_its_sandboxes() -> None:
    blueprint = Blueprint("image", mode="forked", cpus=0.5)
    host = shared_container_config(blueprint, LIMITS, 4, 8)["HostConfig"]

    assert host["Memory"] == host["MemorySwap"] == 4 * (LIMITS.memory_bytes + LIMITS.disk_bytes) + backend.OWN_BYTES
    assert host["PidsLimit"] == 4 * (LIMITS.processes + 1) + backend.OWN_PROCESSES
    assert host["NanoCpus"] == 2_000_000_000
    assert shared_container_config(blueprint, LIMITS, 4, 1)["HostConfig"]["NanoCpus"] == 1_000_000_000
    assert all(f"size={LIMITS.disk_bytes},nr_inodes={LIMITS.inodes}" in options for options in host["Tmpfs"].values())
    assert "/dev/shm" not in host["Tmpfs"]


@pytest.mark.parametrize(
    ("changes", "is_held"),
    [
        ({}, True),
        ({"wall_s": 99.0, "cpu_s": 1.0, "cpu_cores": 1.0}, True),
        ({"cpu_s": 99.0}, False),
        ({"memory_bytes": 64 * MIB, "processes": 1, "open_files": 16}, True),
        ({"memory_bytes": 256 * MIB}, False),
        ({"processes": 41}, False),
        ({"disk_bytes": 4 * MIB}, False),
        ({"inodes": 65}, False),
        ({"frame_bytes": 4096}, False),
    ],
)
def test_a_sandbox_goes_only_where_its_limits_fit(changes: dict[str, Any], is_held: bool) -> None:
    assert fits(LIMITS.model_copy(update=changes), LIMITS) is is_held


@pytest.mark.docker
@pytest.mark.anyio
async def test_a_policy_with_a_missing_layer_starts_nothing(docker_image: ImageRef) -> None:
    policy = Policy(require=frozenset({"user"}))
    async with opened(docker_image.id, mode="forked", policy=policy) as backend:
        with pytest.raises(SandboxUnavailable, match="user"):
            await greeted(backend)
