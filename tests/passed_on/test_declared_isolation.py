"""What `result.isolation` declares is what the kernel says of the sandbox's process, measured from outside and inside."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from passed_on.processes import own_children
from toolcell import ExecutionResult, Policy, PoolConfig, Runtime, ToolRegistry

pytestmark = [pytest.mark.quick, pytest.mark.anyio, pytest.mark.isolation]

NAMESPACES = {
    "user": "user",
    "pid": "pid",
    "mount": "mnt",
    "net": "net",
    "ipc": "ipc",
    "uts": "uts",
    "cgroup_ns": "cgroup",
}
"""Layers of a result, with the kernel's names for them."""

OWN = frozenset({"pid", "mount", "ipc"})
"""Those in which sandboxes are apart from one another, too. The others are apart from the host."""

INSIDE = """
import os, socket
call_tool("look")
try:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(("192.0.2.1", 9))
    connected = True
except OSError:
    connected = False
namespaces = {}
if os.path.exists("/proc"):
    for kind in ("user", "pid", "mnt", "net", "ipc", "uts", "cgroup"):
        namespaces[kind] = os.readlink("/proc/self/ns/" + kind)
set_result({
    "pid": os.getpid(), "uid": os.getuid(), "host": socket.gethostname(), "connected": connected, "namespaces": namespaces
})
"""


@dataclass
class Process:
    """What the kernel says of a process."""

    namespaces: dict[str, str]
    """By the kernel's names; none where only the process itself and root may read them."""
    status: dict[str, str]

    @classmethod
    def of(cls, pid: int) -> Process:
        folder = Path("/proc") / str(pid)
        try:
            namespaces = {name: str((folder / "ns" / name).readlink()) for name in NAMESPACES.values()}
        except PermissionError:
            namespaces = {}
        lines = (folder / "status").read_text().splitlines()
        return cls(namespaces, {name: text.strip() for name, _, text in (line.partition(":") for line in lines)})


async def two_sandboxes(**options: Any) -> tuple[list[ExecutionResult], list[Process]]:
    """Run two scripts at once, and measure the processes below this one while both wait for a tool."""
    registry, both, looked = ToolRegistry(), anyio.Event(), list[Process]()
    waiting = 0

    @registry.tool
    async def look() -> None:
        """Wait until both scripts have called this."""
        nonlocal waiting
        waiting += 1
        if waiting == 2:
            looked.extend(Process.of(each.pid) for each in own_children() if not each.children())
            both.set()
        await both.wait()

    results: list[ExecutionResult] = []
    async with Runtime(registry, pool=PoolConfig(warm=0), **options) as runtime, anyio.create_task_group() as tasks:

        async def run() -> None:
            results.append(await runtime.execute_code(INSIDE))

        tasks.start_soon(run)
        tasks.start_soon(run)
    return results, looked


@pytest.mark.parametrize("profile", ["full", pytest.param("container", marks=pytest.mark.contained)])
async def test_each_layer_that_is_declared_is_there(profile: Any) -> None:
    host = Process.of(psutil.Process().pid)

    results, sandboxes = await two_sandboxes(policy=Policy(profile=profile))

    assert len(sandboxes) == 2
    for result in results:
        assert result.ok, result.error
        layers = result.isolation.layers
        assert layers.keys() >= Policy(profile=profile).require
        for sandbox in sandboxes:
            namespaces = sandbox.namespaces or result.value["namespaces"]
            for layer, name in NAMESPACES.items():
                is_apart = namespaces[name] != host.namespaces[name]
                assert is_apart == (layer in layers), layer
            assert (sandbox.status["Seccomp"] == "2") == ("seccomp" in layers)
            assert (sandbox.status["NoNewPrivs"] == "1") == ("no_new_privs" in layers)
            is_bounded = "capabilities" in layers and "bounding set kept" not in layers["capabilities"]
            assert (int(sandbox.status["CapBnd"], 16) == 0) == is_bounded
            assert not any(int(sandbox.status[name], 16) for name in ("CapEff", "CapPrm", "CapInh", "CapAmb"))
    one, other = sandboxes
    for layer in OWN & results[0].isolation.layers.keys():
        assert one.namespaces[NAMESPACES[layer]] != other.namespaces[NAMESPACES[layer]], layer


async def test_a_script_sees_from_inside_what_its_result_declares() -> None:
    results, _ = await two_sandboxes()

    for result in results:
        assert result.ok, result.error
        assert result.value["pid"] < 10 and "pid" in result.isolation.layers
        assert result.value["uid"] != 0 and "user" in result.isolation.layers
        assert result.value["host"] != os.uname().nodename and "uts" in result.isolation.layers
        assert not result.value["connected"] and "net" in result.isolation.layers
