"""Sandboxes on a cluster of three Ray nodes on this machine: the contract of backends, and every kind of loss."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from integrations.conftest import needs, run_example
from integrations.ray_caller import RUNS
from toolcell import (
    Limits,
    Outcome,
    PoolConfig,
    RunContext,
    Runtime,
    SandboxUnavailable,
    ToolRegistry,
    UsageError,
)
from toolcell.config import Policy
from toolcell.sandbox.docker.reaper import LABEL_HOST
from toolcell.sandbox.node.server import NodeAddress, missing_layers
from toolcell.sandbox.process.child_probe import Probe
from toolcell.sandbox.ray.backend import WATCH_S, RayBackend
from toolcell.testing import check_backend
from toolcell.tools import Approve

needs("ray")

import ray  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

pytestmark = [pytest.mark.framework, pytest.mark.isolation, pytest.mark.timeout(600)]

NODES = 3
SOON_S = 60.0
STORE_BYTES = 80 << 20
SLEEP = "print('on')\nimport time\ntime.sleep(120)"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    store: dict[str, Any] = {"num_cpus": 1, "object_store_memory": STORE_BYTES}
    found = Cluster(initialize_head=True, head_node_args={**store, "include_dashboard": False})
    for _ in range(NODES - 1):
        found.add_node(**store, resources={"special": 1})
    ray.init(address=found.address, log_to_driver=False)
    try:
        yield found
    finally:
        ray.shutdown()
        found.shutdown()


def actors() -> list[psutil.Process]:
    """The processes of the actors on the nodes of this test's own cluster."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "ray::NodeActor" in "".join(each.cmdline()):
                found.append(each)
    return found


def trees() -> set[psutil.Process]:
    """The same, with everything below them: zygotes and sandboxes."""
    found = set(actors())
    for each in list(found):
        with suppress(psutil.Error):
            found.update(each.children(recursive=True))
    return found


def nothing_is_left() -> None:
    """Ray ends the actors' own processes a moment after it was asked to."""
    wait_until(lambda: not trees(), "processes are left on the nodes")


def wait_until(is_reached: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + SOON_S
    while not is_reached():
        assert time.monotonic() < until, what
        time.sleep(0.05)


async def eventually(is_reached: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + SOON_S
    while not is_reached():
        assert time.monotonic() < until, what
        await anyio.sleep(0.05)


async def runs_on_every_node(runtime: Runtime, count: int, results: list[Any], tasks: Any) -> None:
    """Begin so many runs, and wait until each has printed."""
    begun = 0

    def noted(*_: object) -> None:
        nonlocal begun
        begun += 1

    async def one(number: int) -> None:
        context = RunContext(run_id=f"run-{number}")
        results.append(await runtime.execute_code(SLEEP, on_log=noted, context=context))

    for number in range(count):
        tasks.start_soon(one, number)
    await eventually(lambda: begun == count, f"{begun} of {count} runs began")


@pytest.mark.anyio
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_the_backend_meets_the_contract_on_three_nodes(cluster: Any, tls: bool) -> None:
    report = await check_backend(lambda **options: RayBackend(tls=tls, **options))

    assert report.ok, str(report)
    assert not report.skipped
    print(report.summary)


@pytest.mark.docker
@pytest.mark.anyio
async def test_containers_on_nodes_meet_the_contract(cluster: Any) -> None:
    report = await check_backend(lambda: RayBackend(sandboxes="docker", tls=True))

    assert report.ok, str(report)
    assert not report.skipped
    nothing_is_left()


def containers() -> set[str]:
    listed = subprocess.run(["docker", "ps", "-aq", "--filter", f"label={LABEL_HOST}"], capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr
    return set(listed.stdout.split())


@pytest.mark.docker
@pytest.mark.anyio
async def test_a_killed_actor_leaves_no_containers(cluster: Any) -> None:
    before, results = containers(), list[Any]()
    backend = RayBackend(sandboxes="docker")
    async with Runtime(backend=backend, pool=PoolConfig(warm=0)) as runtime:
        async with anyio.create_task_group() as tasks:
            await runs_on_every_node(runtime, NODES, results, tasks)
            assert len(containers() - before) >= NODES
            for each in actors():
                each.kill()
        assert [result.outcome for result in results] == [Outcome.LOST] * NODES
        await eventually(lambda: containers() <= before, "containers are left")
    nothing_is_left()


EXAMPLES = [
    "agent_loop", "dry_run", "files_and_limits", "first_script", "hooks_and_approval", "map_inputs",
    "mend_script", "plan_versus_code", "private_data", "repair_loop", "saved_script", "session",
]  # fmt: skip
"""Those whose output is the same every time, but for moments and the numbers of runs."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_says_the_same_when_only_its_backend_is_another(cluster: Any, name: str, tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    made = r"\b((?:Sync)?Runtime)\(((?:[^()]|\([^()]*\))*)\)"
    with_ray, changed = re.subn(
        made, lambda call: f"{call[1]}({', '.join(filter(None, (call[2], 'backend=RayBackend()')))})", path.read_text()
    )
    assert changed >= 1
    with_ray = with_ray.replace("from toolcell import ", "from toolcell import RayBackend, ", 1)
    (tmp_path / path.name).write_text(with_ray)

    def said(program: Path) -> str:
        command, environment = [sys.executable, str(program)], {**os.environ, "RAY_ADDRESS": cluster.address}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        return re.sub(r"[0-9a-f]{16,}|\d+\.\d+|\d+ ?(ms|s|MiB|bytes)\b", "N", done.stdout)

    assert said(tmp_path / path.name) == said(path)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True}), ("trio", {})], ids=["uvloop", "trio"])
async def test_tools_stay_with_the_caller_on_every_event_loop(cluster: Any, anyio_backend: Any) -> None:
    registry = ToolRegistry()

    @registry.tool(read_only=True)
    async def pid() -> int:
        """Return the process in which the tool runs."""
        return os.getpid()

    async with Runtime(registry, backend=RayBackend(), pool=PoolConfig(warm=1)) as runtime:
        result = await runtime.execute_code(
            "[call_tool('pid'), len(call_tool_text)]", inputs={"call_tool_text": "x" * 3_000_000}
        )

        assert result.value == [os.getpid(), 3_000_000]
        assert result.isolation.backend == "ray" and {"seccomp", "landlock", "pid", "net"} <= set(
            result.isolation.layers
        )


@pytest.mark.anyio
async def test_a_session_keeps_its_state_on_its_node_and_is_interrupted_there(cluster: Any) -> None:
    async with Runtime(backend=RayBackend(), pool=PoolConfig(warm=0)) as runtime, runtime.session() as session:
        assert (await session.execute_code("x = 40")).ok
        late = await session.execute_code(
            "x = 41\nwhile True: pass", limits=runtime.limits.model_copy(update={"wall_s": 0.5})
        )
        assert late.outcome is Outcome.TIMEOUT and late.error is not None and late.error.line == 2
        assert (await session.execute_code("x + 2")).value == 43


@pytest.mark.anyio
async def test_a_map_runs_on_all_nodes(cluster: Any) -> None:
    backend = RayBackend()
    async with Runtime(backend=backend, pool=PoolConfig(warm=6)) as runtime:
        items = [item async for item in runtime.map("n * n", ({"n": n} for n in range(60)), concurrency=6)]

        assert [item.value for item in items] == [n * n for n in range(60)]


@pytest.mark.anyio
async def test_sandboxes_spread_over_the_nodes_and_wait_for_a_free_place(cluster: Any) -> None:
    backend = RayBackend(sandboxes_per_node=2)
    async with Runtime(backend=backend, pool=PoolConfig(warm=0)) as runtime, anyio.create_task_group() as tasks:
        await runs_on_every_node(runtime, 2 * NODES, [], tasks)
        assert list(backend.nodes.values()) == [2] * NODES
        waiting: list[Any] = []

        async def one_more() -> None:
            waiting.append(await runtime.execute_code("1"))

        tasks.start_soon(one_more)
        with anyio.move_on_after(0.5):
            await eventually(lambda: bool(waiting), "")
        assert not waiting and list(backend.nodes.values()) == [2] * NODES
        tasks.cancel_scope.cancel()
    assert not backend.nodes
    nothing_is_left()


@pytest.mark.anyio
async def test_a_node_without_what_is_needed_is_not_used_and_is_named(cluster: Any) -> None:
    backend = RayBackend(resources={"special": 0.5})
    async with Runtime(backend=backend, pool=PoolConfig(warm=0)) as runtime:
        assert (await runtime.execute_code("1")).value == 1
        assert len(backend.nodes) == NODES - 1
        assert list(backend.unusable.values()) == ["it does not have the resources: special"]
    nowhere = RayBackend(resources={"gold": 1})
    with pytest.raises(SandboxUnavailable, match=r"no node of the Ray cluster can start sandboxes: .*resources: gold"):
        await nowhere.open()


def test_a_missing_layer_is_named_with_its_reason_and_remedy() -> None:
    probes = [
        Probe("net", True, "ok"),
        Probe("landlock", False, "ABI 0", "boot with lsm=landlock"),
        Probe("x", False, ""),
    ]

    assert missing_layers(probes, {"net", "landlock"}) == "layer landlock is not live: ABI 0; boot with lsm=landlock"
    assert missing_layers(probes, {"net"}) == ""


OPENS = """
import asyncio, json, sys
from toolcell import RayBackend
from toolcell.errors import SandboxUnavailable

async def main():
    backend = RayBackend(sys.argv[1])
    try:
        await backend.open()
        print(json.dumps([len(backend.nodes), backend.unusable]))
        await backend.close()
    except SandboxUnavailable as exc:
        print(exc)
asyncio.run(main())
"""


def test_each_node_is_named_and_nothing_is_left_there(cluster: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OPENS, cluster.address], capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(done.stdout) == [NODES, {}]
    wait_until(lambda: not _actor_processes(), "processes are left on the nodes")


def _actor_processes() -> list[str]:
    return [
        name for each in psutil.process_iter(["cmdline"]) if "ray::NodeActor" in (name := str(each.info["cmdline"]))
    ]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-host.invalid:6379", "127.0.0.1:99999999", "nonsense"])
def test_a_cluster_that_is_not_there_is_named_at_once(address: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OPENS, address], capture_output=True, text=True, timeout=60, check=True
    )
    assert f"no Ray cluster answers at {address}: " in done.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sandboxes": "vm"}, 'sandboxes must be "process" or "docker", not \'vm\''),
        ({"image": "python"}, 'image= is what containers are made of; it goes with sandboxes="docker"'),
    ],
)
def test_sandboxes_that_nodes_do_not_have_are_refused(options: Any, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        RayBackend(**options)
    assert str(caught.value) == says


def test_a_profile_that_nodes_do_not_have_is_refused() -> None:
    with pytest.raises(UsageError, match="not built for nodes"):
        RayBackend(policy=Policy(profile="container"))


@pytest.mark.anyio
async def test_a_killed_actor_loses_its_runs_and_no_others_and_its_node_is_used_again(cluster: Any) -> None:
    backend, results = RayBackend(), list[Any]()
    async with Runtime(backend=backend, pool=PoolConfig(warm=0)) as runtime, anyio.create_task_group() as tasks:
        await runs_on_every_node(runtime, 2 * NODES, results, tasks)
        victim = actors()[0]
        below = victim.children(recursive=True)
        victim.kill()
        await eventually(lambda: len(results) == 2, f"{len(results)} runs have ended")
        assert [each.outcome for each in results] == [Outcome.LOST] * 2
        assert all("is gone, or cannot be reached" in each.error.message for each in results)
        assert all(each.logs.text == "on\n" for each in results)
        await eventually(lambda: not any(each.is_running() for each in below), f"left on the node: {below}")
        assert (await runtime.execute_code("1")).value == 1  # elsewhere
        await eventually(lambda: sorted(backend.nodes.values()) == [0, 2, 2], f"nodes: {backend.nodes}")
        assert (await runtime.execute_code("1")).value == 1
        assert len(results) == 2
        tasks.cancel_scope.cancel()
    nothing_is_left()


@pytest.mark.anyio
async def test_a_lost_run_names_the_calls_that_had_begun(cluster: Any) -> None:
    registry, entered = ToolRegistry(), anyio.Event()

    @registry.tool
    async def pay(euros: int) -> int:
        """Send money to somebody."""
        entered.set()
        await anyio.sleep(1.0)
        return euros

    async with Runtime(registry, backend=RayBackend(), pool=PoolConfig(warm=0)) as runtime:
        async with anyio.create_task_group() as tasks:
            results = list[Any]()

            async def one() -> None:
                results.append(await runtime.execute_code("call_tool('pay', euros=5)"))

            tasks.start_soon(one)
            await entered.wait()
            for each in actors():
                each.kill()
        assert results[0].outcome is Outcome.LOST
        assert [(call.name, call.args) for call in results[0].calls] == [("pay", {"euros": 5})]


@pytest.mark.anyio
async def test_a_node_that_is_killed_loses_its_runs_and_is_forgotten(cluster: Any) -> None:
    added = cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, resources={"doomed": 1})
    backend, results = RayBackend(), list[Any]()
    async with Runtime(backend=backend, pool=PoolConfig(warm=0)) as runtime, anyio.create_task_group() as tasks:
        assert len(backend.nodes) == NODES + 1
        await runs_on_every_node(runtime, NODES + 1, results, tasks)
        cluster.remove_node(added, allow_graceful=False)
        await eventually(lambda: len(results) == 1, f"{len(results)} runs have ended")
        assert results[0].outcome is Outcome.LOST
        await eventually(lambda: len(backend.nodes) == NODES, f"nodes: {backend.nodes}")
        assert (await runtime.execute_code("1")).value == 1
        assert len(results) == 1
        tasks.cancel_scope.cancel()
    nothing_is_left()


@pytest.mark.anyio
async def test_sessions_and_suspended_runs_go_on_elsewhere_when_their_node_is_killed(
    cluster: Any, tmp_path: Path
) -> None:
    registry, looked, paid = ToolRegistry(), list[int](), list[int]()

    @registry.tool(read_only=False)
    def look() -> int:
        """Look how much there is to pay."""
        looked.append(1)
        return 40

    @registry.tool(requires_approval=True)
    def pay(euros: int) -> int:
        """Send money to somebody."""
        paid.append(euros)
        return euros

    new = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "resources": {"doomed": 1}}
    first, second = cluster.add_node(**new), None
    backend = RayBackend(resources={"doomed": 0.1})
    try:
        async with (
            Runtime(registry, backend=backend, record=tmp_path / "j" / "runs.db", pool=PoolConfig(warm=0)) as runtime,
            runtime.session("kept") as session,
        ):
            await session.execute_code("x = call_tool('look')")
            waiting = await runtime.execute_code("call_tool('pay', euros=call_tool('look') + 2)", on_approval="suspend")
            assert waiting.suspension is not None, waiting.error
            second = cluster.add_node(**new)
            await eventually(lambda: len(backend.nodes) == 2, f"nodes: {backend.nodes}")
            cluster.remove_node(first, allow_graceful=False)
            await eventually(lambda: len(backend.nodes) == 1, f"nodes: {backend.nodes}")

            there = await session.execute_code("x + 2")
            resumed = await runtime.resume(waiting.suspension, {waiting.suspension.calls[0].id: Approve()})
        assert (there.value, there.error) == (42, None)
        assert resumed.value == 42, resumed.error
        assert (len(looked), paid) == (2, [42])
    finally:
        if second is not None:
            cluster.remove_node(second, allow_graceful=False)


@pytest.mark.anyio
async def test_an_unusable_node_that_left_is_not_named_any_more(cluster: Any) -> None:
    backend = RayBackend(resources={"special": 0.1})
    async with Runtime(backend=backend, pool=PoolConfig(warm=0)):
        before = len(backend.unusable)
        added = cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        await eventually(lambda: len(backend.unusable) == before + 1, f"{backend.unusable}")
        cluster.remove_node(added, allow_graceful=False)
        await eventually(lambda: len(backend.unusable) == before, f"{backend.unusable}")


@pytest.mark.anyio
async def test_a_node_that_joins_is_used(cluster: Any) -> None:
    backend = RayBackend()
    async with Runtime(backend=backend, pool=PoolConfig(warm=0)) as runtime:
        added = cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        try:
            await eventually(lambda: len(backend.nodes) == NODES + 1, f"nodes: {backend.nodes}")
            assert (await runtime.execute_code("1")).value == 1
        finally:
            cluster.remove_node(added, allow_graceful=False)


def test_a_killed_caller_leaves_nothing_on_any_node(cluster: Any) -> None:
    program = Path(__file__).parent / "ray_caller.py"
    with subprocess.Popen([sys.executable, str(program), cluster.address], stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        begun = 0
        while begun < RUNS:  # Ray writes lines of its own there
            line = caller.stdout.readline()
            assert line, "the caller has ended"
            begun += line == "on\n"
        left = trees()
        assert len(left) >= 2 * NODES + RUNS
        os.kill(caller.pid, signal.SIGKILL)
    wait_until(lambda: not any(each.is_running() for each in left), f"left on the nodes: {left}")


@pytest.mark.anyio
@pytest.mark.parametrize("said", [b"", b"x" * 64, b"\0" * 4096], ids=["nothing", "no proof", "more"])
async def test_a_stranger_gets_no_sandbox_and_no_proof(cluster: Any, said: bytes) -> None:
    backend = RayBackend()
    async with Runtime(backend=backend, pool=PoolConfig(warm=0)) as runtime:
        before = len(trees())
        for node in backend._nodes.values():
            with socket.create_connection((node.address.host, node.address.port), timeout=60) as stranger:
                got = stranger.recv(32)
                stranger.sendall(said)
                if said:
                    try:
                        got += stranger.recv(64)
                    except ConnectionResetError:
                        pass
                assert len(got) == 32
        assert len(trees()) == before
        assert (await runtime.execute_code("1")).value == 1


@pytest.mark.anyio
async def test_a_node_that_has_not_got_the_key_is_not_believed(cluster: Any) -> None:
    backend = RayBackend()
    async with Runtime(backend=backend, pool=PoolConfig(warm=0)):
        for node in backend._nodes.values():
            node.address = dataclasses.replace(node.address, key=b"\0" * 32)
        with pytest.raises(SandboxUnavailable, match="it could not be reached"):
            await backend.start(Runtime().limits)


class Wire:
    """Carries the bytes of every connection to one node, and keeps them."""

    def __init__(self, address: NodeAddress) -> None:
        self._node = address
        self.seen = bytearray()

    async def __aenter__(self) -> NodeAddress:
        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(OSError):
                while data := await reader.read(65536):
                    self.seen += data
                    writer.write(data)
                    await writer.drain()
                writer.write_eof()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection(self._node.host, self._node.port)
            await asyncio.gather(pump(reader, back), pump(there, writer))
            writer.close()
            back.close()

        self._server = await asyncio.start_server(serve, "127.0.0.1", 0)
        return dataclasses.replace(self._node, host="127.0.0.1", port=self._server.sockets[0].getsockname()[1])

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()


@pytest.mark.anyio
@pytest.mark.parametrize(("tls", "anyio_backend"), [(False, "asyncio"), (True, "asyncio")], indirect=["anyio_backend"])
async def test_with_tls_nothing_of_a_run_can_be_read_on_the_way(cluster: Any, tls: bool) -> None:
    backend, registry = RayBackend(tls=tls), ToolRegistry()
    registry.tool(word)
    async with Runtime(registry, backend=backend, pool=PoolConfig(warm=0)) as runtime:
        (node, *others) = backend._nodes.values()
        for other in others:
            other.is_lost = True
        wire = Wire(node.address)
        async with wire as node.address:
            source = "print('PRINTED'); set_result(call_tool('word', {'secret': 'ARGUMENT'}) * 40_000)"
            result = await runtime.execute_code(source)
            ended = await runtime.execute_code("import time\ntime.sleep(60)", limits=Limits(wall_s=0.5))

    assert result.value == "ANSWERED" * 40_000 and ended.outcome is Outcome.TIMEOUT
    told = [text in bytes(wire.seen) for text in (b"PRINTED", b"ARGUMENT", b"ANSWERED", b"call_tool")]
    assert told == [not tls] * 4 and len(wire.seen) > 320_000


def word(secret: str) -> str:
    """Give back a word."""
    return "ANSWERED"


@pytest.mark.anyio
async def test_a_node_with_another_certificate_is_not_believed(cluster: Any) -> None:
    backend = RayBackend(tls=True)
    async with Runtime(backend=backend, pool=PoolConfig(warm=0)):
        nodes = list(backend._nodes.values())
        others = [each.address.certificate for each in nodes[1:] + nodes[:1]]
        for node, other in zip(nodes, others, strict=True):
            node.address = dataclasses.replace(node.address, certificate=other)
        with pytest.raises(SandboxUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            await backend.start(Limits())


def test_the_example_prints_what_its_page_says() -> None:
    assert "3 nodes" in run_example("ray_nodes.py")
    assert WATCH_S < SOON_S
