"""A program whose Ray cluster loses its head or a node's network while scripts run. Prints what came of it, as JSON.

In a process of its own, because Ray ends a process that it cannot serve.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import psutil
import ray
from ray.cluster_utils import Cluster

from toolcell import Limits, PoolConfig, RayBackend, Runtime

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20}
AWAY_S = 10.0
LOST_S = 60.0
NAMESPACE = f"toolcell-{os.getpid()}"
NEAR, FAR = f"tcn{os.getpid()}", f"tcf{os.getpid()}"


async def head_is_away() -> dict[str, Any]:
    """Kill the head's server, run scripts without it, and start it again."""
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    cluster.add_node(**NODE)
    ray.init(address=cluster.address, log_to_driver=False)
    told: dict[str, Any] = {"meanwhile": [], "after": []}
    has_state = "RAY_REDIS_ADDRESS" in os.environ
    backend = RayBackend()
    async with Runtime(backend=backend, pool=PoolConfig(warm=1), limits=Limits(wall_s=120)) as runtime:

        async def long() -> None:
            result = await runtime.execute_code(f"import time\ntime.sleep({AWAY_S * 2})\n7")
            told["long"] = [str(result.outcome), result.value]

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(long)
            await anyio.sleep(1)
            cluster.head_node.kill_gcs_server()
            until = time.monotonic() + AWAY_S
            while time.monotonic() < until:
                told["meanwhile"].append((await runtime.execute_code("1 + 1")).value)
                await anyio.sleep(1)
            if has_state:
                cluster.head_node.start_gcs_server()
                for _ in range(10):
                    told["after"].append((await runtime.execute_code("1 + 1")).value)
                    await anyio.sleep(1)
        told["nodes"] = len(backend.nodes)
        if not has_state:  # Ray would wait for a minute, and end this process then
            for each in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):  # some end by themselves meanwhile
                    each.kill()
            print(json.dumps(told), flush=True)
            os._exit(0)
    ray.shutdown()
    cluster.shutdown()
    return told


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def far_network() -> Iterator[None]:
    """A network namespace with a link to this one."""
    ip("netns", "add", NAMESPACE)
    try:
        ip("link", "add", NEAR, "type", "veth", "peer", "name", FAR, "netns", NAMESPACE)
        ip("addr", "add", "10.77.0.1/24", "dev", NEAR)
        ip("link", "set", NEAR, "up")
        ip("-n", NAMESPACE, "addr", "add", "10.77.0.2/24", "dev", FAR)
        for device in (FAR, "lo"):
            ip("-n", NAMESPACE, "link", "set", device, "up")
        yield
    finally:
        found = subprocess.run(["ip", "netns", "pids", NAMESPACE], check=False, capture_output=True, text=True)
        for pid in found.stdout.split():
            subprocess.run(["kill", "-9", pid], check=False, capture_output=True)
        ip("netns", "del", NAMESPACE)


@contextmanager
def in_far_network(command: list[str]) -> Iterator[None]:
    command = ["ip", "netns", "exec", NAMESPACE, *command]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        yield
        running.terminate()


def sandboxes() -> int:
    """Processes below the zygote of the node's actor."""
    for actor in psutil.process_iter(["cmdline"]):
        if "ray::NodeActor" in "".join(actor.info["cmdline"] or []):
            for zygote in [each for child in actor.children() for each in child.children()]:
                return len(zygote.children(recursive=True))
    return -1


async def network_is_cut() -> dict[str, Any]:
    """Cut the network of the only node that is used, and mend it."""
    told: dict[str, Any] = {"lost": []}
    with ExitStack() as stack:
        stack.enter_context(far_network())
        cluster = Cluster(
            initialize_head=True, head_node_args={**NODE, "include_dashboard": False, "node_ip_address": "10.77.0.1"}
        )
        stack.callback(cluster.shutdown)
        own = Path(sys.executable).with_name("ray")
        node = [
            str(own),
            "start",
            "--block",
            f"--address={cluster.address}",
            "--node-ip-address=10.77.0.2",
            "--num-cpus=1",
            f"--object-store-memory={80 << 20}",
            '--resources={"far": 1}',
        ]
        stack.enter_context(in_far_network(node))
        ray.init(address=cluster.address, log_to_driver=False)
        stack.callback(ray.shutdown)
        with anyio.fail_after(LOST_S):
            while sum(each["Alive"] for each in ray.nodes()) < 2:
                await anyio.sleep(0.2)
        backend = RayBackend(resources={"far": 0.1})
        async with Runtime(backend=backend, pool=PoolConfig(warm=0), limits=Limits(wall_s=300)) as runtime:

            async def long(source: str) -> None:
                result = await runtime.execute_code(source)
                told["lost"].append([str(result.outcome), round(time.monotonic() - cut_at, 1)])

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(long, "import time\ntime.sleep(250)")
                tasks.start_soon(long, "import time\nfor n in range(2500):\n    print('x' * 999)\n    time.sleep(0.1)")
                await anyio.sleep(2)
                told["before"] = sandboxes()
                ip("link", "set", NEAR, "down")
                cut_at = time.monotonic()
            with anyio.fail_after(LOST_S):
                while sandboxes():
                    await anyio.sleep(0.1)
            told["empty_after_s"] = round(time.monotonic() - cut_at, 1)
            ip("link", "set", NEAR, "up")
            with anyio.fail_after(LOST_S):
                while not (result := await runtime.execute_code("1 + 1")).ok:
                    await anyio.sleep(0.5)
            told["after"] = result.value
    return told


HOST = """
from ray.cluster_utils import Cluster
print(Cluster(initialize_head=True, head_node_args={0}).address, flush=True)
input()
"""


async def cluster_is_gone() -> dict[str, Any]:
    """Kill a whole cluster, and leave the block of a Runtime that used it."""
    source = HOST.format({**NODE, "include_dashboard": False})
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", source], stdin=pipe, stdout=pipe, text=True) as host:  # noqa: ASYNC220
        assert host.stdout is not None
        address = next(line.strip() for line in host.stdout if re.fullmatch(r"\S+:\d+", line.strip()))
        async with Runtime(backend=RayBackend(address), pool=PoolConfig(warm=1)) as runtime:
            before = (await runtime.execute_code("1 + 1")).value
            own = psutil.Process(host.pid)
            for each in [*own.children(recursive=True), own]:
                with suppress(psutil.Error):
                    each.kill()
            await anyio.sleep(5)
            began = time.monotonic()
    return {"before": before, "closed_after_s": round(time.monotonic() - began, 1)}


if __name__ == "__main__":
    faulthandler.dump_traceback_later(50)  # shortly before Ray would end this process without a word of where it waits
    losses = {"head": head_is_away, "network": network_is_cut, "cluster": cluster_is_gone}
    print(json.dumps(anyio.run(losses[sys.argv[1]])))
