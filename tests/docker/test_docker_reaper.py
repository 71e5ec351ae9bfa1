"""Containers of a killed host are removed, whenever it was killed, also if its watcher was killed too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from rows import each_row
from toolcell.sandbox.docker.client import EngineClient
from toolcell.sandbox.docker.images.reference import ImageRef
from toolcell.sandbox.docker.reaper import (
    LABEL_BACKEND,
    LABEL_HOST,
    HostIdentity,
    Watcher,
    is_dead,
    orphans,
    own_identity,
    start_time,
)

from .docker_sandboxes import containers_of, opened

ME = HostIdentity("machine", "boot", 11, 100, 5000)
RUNNING = {100: 5000, 200: 6000}


def host(**changes: Any) -> HostIdentity:
    fields = {"machine": "machine", "boot": "boot", "pid_namespace": 11, "pid": 200, "started": 6000} | changes
    return HostIdentity(**fields)


@each_row(
    ("other", "is_local", "dead"),
    [
        (ME, True, False),
        (host(), True, False),
        (host(pid=300), True, True),
        (host(started=6001), True, True),  # its pid passed to another
        (host(pid=300), False, True),  # a remote daemon, but our own process table tells
        (host(boot="earlier"), True, True),
        (host(boot="earlier"), False, False),  # a remote daemon's other hosts may be clones of this machine
        (host(boot="earlier", machine="other"), True, False),
        (host(boot="earlier", machine=""), True, False),
        (host(pid_namespace=12, pid=300), True, False),  # processes of another container are not visible here
        (host(boot=""), True, False),
    ],
)
def test_only_a_host_that_is_certainly_gone_counts_as_dead(other: HostIdentity, is_local: bool, dead: bool) -> None:
    assert is_dead(other, ME, is_local=is_local, started=RUNNING.get) is dead


def test_no_host_counts_as_dead_when_this_process_cannot_identify_itself() -> None:
    blind = HostIdentity("", "", 0, 100, 0)

    assert not is_dead(host(pid=300), blind, is_local=True, started=RUNNING.get)


def test_an_identity_survives_being_a_label() -> None:
    me = own_identity()

    assert HostIdentity.parse(str(me)) == me
    assert (me.pid, me.started) == (os.getpid(), start_time(os.getpid()))
    for text in ("", "a:b:c", "a:b:1:2:x", "a:b:1:2:3:4"):
        assert HostIdentity.parse(text) is None


def test_containers_of_others_are_never_orphans() -> None:
    listed = [
        {"Id": "ours", "Labels": {LABEL_HOST: str(host(pid=300))}},
        {"Id": "living", "Labels": {LABEL_HOST: str(host())}},
        {"Id": "stranger", "Labels": {"app": "web"}},
        {"Id": "garbled", "Labels": {LABEL_HOST: "x"}},
        {"Id": "bare", "Labels": None},
    ]
    assert orphans(listed, ME, is_local=True, started=RUNNING.get) == ["ours"]


HOST = """
import asyncio, os, sys
from toolcell import Limits, PoolConfig, Runtime
from toolcell.sandbox.docker import DockerBackend

async def main():
    backend = DockerBackend(sys.argv[1])
    pool = PoolConfig(warm=2 if sys.argv[2] == "running" else 6)
    async with Runtime(backend=backend, pool=pool, limits=Limits(wall_s=600, cpu_s=600)) as runtime:
        print(backend.engine.key, backend.engine._watcher.pid, flush=True)
        if sys.argv[2] == "running":
            say = lambda stream, text: print("running", flush=True)
            await asyncio.gather(*(runtime.execute_code(script, on_log=say) for script in (
                "print('x', flush=True)\\nimport time; time.sleep(600)", "print('x', flush=True)\\nwhile True: pass")))
        await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    client = await EngineClient.connect()
    yield client
    await client.aclose()


class Host:
    """A process with a Runtime over containers."""

    def __init__(self, image: str, what: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOST, image, what], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.key, watcher = self.line().split()
        self.watcher = int(watcher)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()


def a_process() -> subprocess.Popen[bytes]:
    """Start a host that waits until its stdin is closed."""
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)


async def gone(client: EngineClient, key: str, within_s: float = 60) -> bool:
    with anyio.move_on_after(within_s):
        while await containers_of(client, LABEL_BACKEND, key):
            await anyio.sleep(0.1)
        return True
    return False


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.docker
@pytest.mark.anyio
@pytest.mark.parametrize("stopped", [False, True], ids=["all run", "its watcher is stopped"])
async def test_nothing_is_left_of_a_host_that_was_killed_while_scripts_ran(
    client: EngineClient, docker_image: ImageRef, stopped: bool
) -> None:
    host = Host(docker_image.id, "running")
    assert [host.line(), host.line()] == ["running", "running"]
    assert len(await containers_of(client, LABEL_BACKEND, host.key)) >= 2
    if stopped:
        os.kill(host.watcher, signal.SIGSTOP)

    host.kill()

    assert await gone(client, host.key)
    with anyio.fail_after(60):
        while is_running(host.watcher):
            await anyio.sleep(0.1)
    assert await containers_of(client, LABEL_BACKEND, host.key) == []


@pytest.mark.docker
@pytest.mark.anyio
@pytest.mark.parametrize("pause_s", [0.0, 0.05, 0.3])
async def test_nothing_is_left_of_a_host_that_was_killed_while_it_made_containers(
    client: EngineClient, docker_image: ImageRef, pause_s: float
) -> None:
    host = Host(docker_image.id, "creating")
    await anyio.sleep(pause_s)

    host.kill()

    with anyio.fail_after(60):
        while is_running(host.watcher):
            await anyio.sleep(0.1)
    assert await containers_of(client, LABEL_BACKEND, host.key) == []


@pytest.mark.docker
@pytest.mark.anyio
async def test_guests_end_with_their_host_even_without_a_watcher(client: EngineClient, docker_image: ImageRef) -> None:
    host = Host(docker_image.id, "running")
    assert [host.line(), host.line()] == ["running", "running"]
    os.kill(host.watcher, signal.SIGKILL)

    host.kill()

    with anyio.fail_after(60):
        while any(each["State"] == "running" for each in await client.list({LABEL_BACKEND: host.key})):
            await anyio.sleep(0.1)
    # A container that was just being created has no guest that ends it: the next host removes it.
    for left in await containers_of(client, LABEL_BACKEND, host.key):
        await client.remove(left)


@pytest.mark.docker
@pytest.mark.anyio
async def test_the_next_host_removes_what_a_dead_host_never_started(
    client: EngineClient, docker_image: ImageRef
) -> None:
    dead = own_identity()
    dead = HostIdentity(dead.machine, dead.boot, dead.pid_namespace, dead.pid, dead.started + 1)
    living = await anyio.to_thread.run_sync(a_process)
    alive = HostIdentity(dead.machine, dead.boot, dead.pid_namespace, living.pid, start_time(living.pid) or 0)
    made = {}
    try:
        for name, owner in (("dead", dead), ("alive", alive)):
            config = {"Image": docker_image.id, "Labels": {LABEL_HOST: str(owner), LABEL_BACKEND: "test-of-reaping"}}
            made[name] = await client.create(config, f"toolcell-test-{name}-{os.getpid()}")

        async with opened(docker_image.id):
            left = await containers_of(client, LABEL_BACKEND, "test-of-reaping")

        assert made["dead"] not in left
        assert made["alive"] in left
    finally:
        for container in made.values():
            await client.remove(container)
        assert living.stdin is not None
        living.stdin.close()
        living.wait(60)


@pytest.mark.docker
@pytest.mark.anyio
async def test_a_watcher_that_is_dismissed_removes_nothing(client: EngineClient, docker_image: ImageRef) -> None:
    key = f"test-of-dismissal-{os.getpid()}"
    container = await client.create({"Image": docker_image.id, "Labels": {LABEL_BACKEND: key}}, f"toolcell-{key}")
    try:
        watcher = Watcher.spawn(key, None)
        watcher.dismiss()
        watcher.dismiss()

        assert not is_running(watcher.pid)
        assert await containers_of(client, LABEL_BACKEND, key) == [container]
    finally:
        await client.remove(container)
