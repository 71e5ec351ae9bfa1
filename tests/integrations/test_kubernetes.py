"""Sandboxes in pods, over a fake API server: the contract of backends, what is lost, and what is refused.

The client of agent-sandbox is the real one. Pods are processes of this machine, but for the tests with an engine.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from builtin.webkit import page, serve
from egress.package_index import opened
from integrations.conftest import EXAMPLES, needs
from kubernetes_pool import pool_of
from toolcell import (
    KubernetesBackend,
    Limits,
    Outcome,
    Policy,
    PoolConfig,
    Runtime,
    SandboxUnavailable,
    SyncRuntime,
    ToolRegistry,
    UsageError,
)
from toolcell.config import CONTAINER_LAYERS, MIB
from toolcell.egress import Allow, Egress
from toolcell.sandbox.docker.images.reference import SERVICE_IMAGE
from toolcell.sandbox.kubernetes import backend as backend_module
from toolcell.sandbox.kubernetes import cluster as cluster_module
from toolcell.sandbox.node import sandbox as node_sandbox_module
from toolcell.sandbox.node.stream import HELD_BYTES, NodeStream
from toolcell.tools import Approve
from wheels import make_wheel

needs("k8s_agent_sandbox")

from integrations.fake_kubernetes import TOKEN, DockerKubelet, FakeKubernetes, ProcessKubelet  # noqa: E402

pytestmark = [pytest.mark.framework, pytest.mark.isolation, pytest.mark.timeout(600)]  # a whole contract is one test

SOON_S = 60.0
FLOOD = """
import os, stat, time
from toolcell_bridge.wire.codec import encode
from toolcell_bridge.wire.messages import CallTool

def is_socket(descriptor):
    try: return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError: return False

bridge = next(filter(is_socket, range(3, 64)))
os.set_blocking(bridge, True)
os.write(bridge, encode(CallTool(901, "big", {}, 1)))
time.sleep(0.7)
os.write(bridge, encode(CallTool(902, "look", {}, 1)))
time.sleep(0.3)
while True: os.write(bridge, bytes(1 << 20))
"""
SLEEP = "print('on')\nimport time\ntime.sleep(120)"
WITHOUT_LANDLOCK = Policy(profile="container", require=CONTAINER_LAYERS - {"landlock"})

RIGHTS = (
    "get sandboxwarmpools",
    "create sandboxclaims",
    "get sandboxclaims",
    "get sandboxes",
    "get pods",
    "get pods/exec",
)

registry = ToolRegistry()


@registry.tool(read_only=True)
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def pool(**settings: Any) -> list[dict[str, Any]]:
    return pool_of(SERVICE_IMAGE, **{"replicas": 1, **settings})


@pytest.fixture
def cluster() -> Iterator[FakeKubernetes]:
    with FakeKubernetes(ProcessKubelet()) as found:
        yield found
    assert not found.kubelet.running()


@pytest.fixture
def filled(cluster: FakeKubernetes) -> FakeKubernetes:
    cluster.apply(*pool())
    return cluster


def runtime_of(cluster: FakeKubernetes, egress: Egress | None = None, **options: Any) -> Runtime:
    backend = KubernetesBackend(kubeconfig=cluster.kubeconfig, **options)
    return Runtime(registry, backend=backend, pool=PoolConfig(warm=1), egress=egress)


async def eventually(is_reached: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + SOON_S
    while not is_reached():
        assert time.monotonic() < until, what
        await anyio.sleep(0.02)


async def refusal_of(cluster: FakeKubernetes, limits: Limits | None = None, **options: Any) -> str:
    """Why nothing can be run."""
    with pytest.raises(SandboxUnavailable) as refused:
        async with Runtime(
            backend=KubernetesBackend(kubeconfig=cluster.kubeconfig, **options), limits=limits or Limits()
        ) as runtime:
            result = await runtime.execute_code("1")
            assert result.outcome is Outcome.UNAVAILABLE, result.outcome
            assert result.error is not None
            raise SandboxUnavailable(result.error.message)
    assert cluster.all("sandboxclaims") == []
    return str(refused.value)


def test_the_backend_meets_the_contract_in_pods(cluster: FakeKubernetes) -> None:
    cluster.apply(*pool(sandboxes=8))
    caller = Path(__file__).parent / "kubernetes_caller.py"
    command = [sys.executable, str(caller), cluster.kubeconfig, "contract", json.dumps({"sandboxes_per_pod": 8})]

    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)

    assert "0 failed" in done.stdout, done.stdout + done.stderr
    assert " 4 skipped" in done.stdout, done.stdout
    assert cluster.all("sandboxclaims") == []


@pytest.mark.anyio
async def test_a_pod_is_for_one_sandbox_and_goes_with_it(filled: FakeKubernetes) -> None:
    def gone() -> set[str]:
        return {each for each in filled.log if each.startswith("delete sandboxclaims")}  # one that just starts: twice

    async with runtime_of(filled) as runtime:
        results = [await runtime.execute_code("call_tool('add', a=2, b=3)") for _ in range(3)]

        assert [each.value for each in results] == [5, 5, 5]
        layers = results[0].isolation.layers
        assert {"pid", "mount", "ipc", "uts", "cgroup", *CONTAINER_LAYERS} <= set(layers)
        assert "832 MiB" in layers["cgroup"]
        await eventually(lambda: len(gone()) >= 3, "pods are kept whose sandbox is over")
    made = [each for each in filled.log if each.startswith("create sandboxclaims")]
    assert len(made) == len(gone()) >= 3
    entered = {each for each in filled.log if each.startswith("get pods/exec")}
    assert 3 <= len(entered) <= len(made)  # a spare may be claimed and not entered when the runtime closes
    assert filled.all("sandboxclaims") == []


@pytest.mark.anyio
@pytest.mark.parametrize("options", [{}, {"sandboxes_per_pod": 8}], ids=["alone", "shared"])
async def test_a_script_in_a_pod_installs_what_pip_found_on_the_callers_machine(
    cluster: FakeKubernetes, options: dict[str, Any], tmp_path: Path
) -> None:
    cluster.apply(*pool(sandboxes=8))
    wheel = make_wheel(tmp_path, "tiny", "1.0", {"tiny/__init__.py": "VALUE = 7", "tiny/long": "x" * 600_000})
    backend = KubernetesBackend(kubeconfig=cluster.kubeconfig, **options)
    async with opened([wheel], "tiny", backend=backend, pool=PoolConfig(warm=0)) as (_, runtime):
        result = await runtime.execute_code("install_package('tiny')\nimport tiny\ntiny.VALUE")

    assert result.value == 7, result.error
    assert result.isolation.backend == "kubernetes"


@pytest.mark.anyio
async def test_one_pod_holds_as_many_sandboxes_as_it_may(cluster: FakeKubernetes) -> None:
    cluster.apply(*pool(sandboxes=2))
    tools, seen = ToolRegistry(), anyio.Event()

    @tools.tool
    async def hold() -> None:
        """Return when the pods have been counted."""
        await seen.wait()

    backend = KubernetesBackend(kubeconfig=cluster.kubeconfig, sandboxes_per_pod=2)
    limits = Limits(wall_s=2 * SOON_S)
    async with (
        Runtime(tools, backend=backend, limits=limits, pool=PoolConfig(warm=0)) as runtime,
        anyio.create_task_group() as all,
    ):
        for _ in range(3):
            all.start_soon(runtime.execute_code, "call_tool('hold')")
        await eventually(lambda: sorted(backend.pods.values()) == [1, 2], "three sandboxes are not in two pods")
        seen.set()
    assert cluster.all("sandboxclaims") == []


@pytest.mark.anyio
async def test_a_pod_sends_requests_through_the_caller(filled: FakeKubernetes) -> None:
    async with serve({"/a": page("you sent tok-51fa0c9d7e", "text/plain")}) as site:
        rule = Allow("http://127.0.0.1", ports=[site.port], secrets={"X-Key": "{TOKEN}"})
        egress = Egress(rule, secrets={"TOKEN": "tok-51fa0c9d7e"})
        script = "import urllib.request\nset_result(urllib.request.urlopen(url).read().decode())"
        async with runtime_of(filled, egress=egress) as runtime, runtime.session() as session:
            for run in (runtime.execute_code, session.execute_code):
                result = await run(script, inputs={"url": site.url("/a", "127.0.0.1")})
                assert result.value == "you sent {TOKEN}", result.error
            refused = await runtime.execute_code(script, inputs={"url": "http://elsewhere.test/"})

    assert "no rule is about this host" in str(refused.error)
    assert all("X-Key: tok-51fa0c9d7e" in request for request in site.requests)
    assert len(site.requests) == 2


def test_any_event_loop_may_be_the_callers(filled: FakeKubernetes) -> None:
    async def main() -> Any:
        async with runtime_of(filled) as runtime, runtime.session() as session:
            await session.execute_code("x = 40")
            return (await session.execute_code("x + call_tool('add', a=1, b=1)")).value

    assert [anyio.run(main, backend=library) for library in ("asyncio", "trio")] == [42, 42]
    with SyncRuntime(registry, backend=KubernetesBackend(kubeconfig=filled.kubeconfig)) as runtime:
        assert [each.value for each in runtime.map("n * 2", [{"n": 1}, {"n": 2}])] == [2, 4]


@pytest.mark.anyio
async def test_a_script_reaches_neither_the_server_of_its_pod_nor_what_that_tells(filled: FakeKubernetes) -> None:
    attack = """
import os, socket
found = []
for name in ("address", "server.sock"):
    try: open(os.path.join(where, name), "rb").read(); found.append(name)
    except OSError as error: pass
try: socket.socket(socket.AF_UNIX).connect(os.path.join(where, "server.sock")); found.append("connected")
except OSError as error: pass
try: os.kill(server, 0); found.append("signalled")
except OSError: pass
set_result(found)
"""

    def is_up_or_gone(name: str, address: Path) -> bool:
        return address.exists() or name not in filled.kubelet.pods

    async with runtime_of(filled) as runtime:
        await runtime.execute_code("1")
        assert isinstance(filled.kubelet, ProcessKubelet)
        pods, attacked = filled.kubelet.pods, 0
        for name, (process, home, _) in [*pods.items()]:
            address = Path(home, "address")
            await eventually(partial(is_up_or_gone, name, address), "a pod has no server")
            if name not in pods:  # it was the first script's
                continue
            attacked += 1
            assert address.stat().st_mode & 0o777 == 0o600
            result = await runtime.execute_code(attack, inputs={"where": home, "server": process.pid})
            assert (result.outcome, result.value) == (Outcome.OK, []), result.error
        assert attacked


@pytest.mark.anyio
@pytest.mark.parametrize("loss", ["connection", "pod"])
async def test_a_run_whose_pod_is_lost_says_so_and_the_next_one_runs(filled: FakeKubernetes, loss: str) -> None:
    results: list[Any] = []

    async with runtime_of(filled) as runtime:
        began = anyio.Event()

        async def one() -> None:
            script = "call_tool('add', a=1, b=2)\n" + SLEEP
            results.append(await runtime.execute_code(script, on_log=lambda *_: began.set()))

        async with anyio.create_task_group() as running:
            running.start_soon(one)
            with anyio.fail_after(SOON_S):
                await began.wait()
            if loss == "connection":
                filled.cut()
            else:
                assert isinstance(filled.kubelet, ProcessKubelet)
                for process, _, _ in list(filled.kubelet.pods.values()):
                    process.kill()
        assert results[0].outcome is Outcome.LOST, results[0].error
        assert [call.name for call in results[0].calls] == ["add"]
        if loss == "pod":
            filled.objects = {key: each for key, each in filled.objects.items() if key[0] not in ("sandboxes", "pods")}
        assert (await runtime.execute_code("call_tool('add', a=1, b=2)")).value == 3


@pytest.mark.anyio
@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "idle"])
async def test_a_shared_pod_that_is_lost_is_used_no_more(cluster: FakeKubernetes, is_busy: bool) -> None:
    cluster.apply(*pool(sandboxes=2))
    backend = KubernetesBackend(kubeconfig=cluster.kubeconfig, sandboxes_per_pod=2)
    async with Runtime(registry, backend=backend, pool=PoolConfig(warm=0)) as runtime:
        await runtime.execute_code("1")
        (first,) = backend.pods
        lost: list[Any] = []
        began = anyio.Event()

        async def one() -> None:
            lost.append(await runtime.execute_code(SLEEP, on_log=lambda *_: began.set()))

        async with anyio.create_task_group() as running:
            if is_busy:
                running.start_soon(one)
                with anyio.fail_after(SOON_S):
                    await began.wait()
            assert isinstance(cluster.kubelet, ProcessKubelet)
            process = cluster.kubelet.pods[first][0]
            process.kill()
            process.wait()
            gone = {("sandboxes", "agents", first), ("pods", "agents", first)}
            cluster.objects = {key: each for key, each in cluster.objects.items() if key not in gone}
        assert [each.outcome for each in lost] == [Outcome.LOST] * is_busy

        results = [await runtime.execute_code("call_tool('add', a=1, b=2)") for _ in range(2)]

        assert [each.value for each in results] == [3, 3], results[0].error
        assert first not in backend.pods
        assert len(backend.pods) == 1
    assert cluster.all("sandboxclaims") == []


@pytest.mark.anyio
async def test_a_shared_pod_that_starts_nothing_any_more_is_left_for_another_one(
    cluster: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.apply(*pool(sandboxes=2))
    backend = KubernetesBackend(kubeconfig=cluster.kubeconfig, sandboxes_per_pod=2)
    async with Runtime(registry, backend=backend, pool=PoolConfig(warm=0)) as runtime:
        await runtime.execute_code("1")
        (first,) = backend.pods
        real, tries = backend_module.start, []

        async def start(stream: NodeStream, *args: Any) -> None:
            tries.append(stream.lost())
            if first in tries[-1]:
                stream.close()
                raise SandboxUnavailable("no space left on device")
            await real(stream, *args)

        monkeypatch.setattr(backend_module, "start", start)
        results = [await runtime.execute_code("call_tool('add', a=1, b=2)") for _ in range(3)]

        assert [each.value for each in results] == [3, 3, 3], results[0].error
        assert [first in each for each in tries] == [True, False, False, False]
        assert first not in backend.pods


@pytest.mark.anyio
async def test_places_that_become_free_are_used_while_the_cluster_has_no_other_pod(cluster: FakeKubernetes) -> None:
    cluster.apply(*pool(sandboxes=2))
    backend = KubernetesBackend(kubeconfig=cluster.kubeconfig, sandboxes_per_pod=2)
    async with Runtime(registry, backend=backend, pool=PoolConfig(warm=0, start_s=20)) as runtime:
        await runtime.execute_code("1")
        cluster.is_stuck = True
        items = [item async for item in runtime.map("import time\ntime.sleep(0.5)\nn", [{"n": n} for n in range(6)])]

        assert [item.value for item in items] == list(range(6)), items
        assert len(backend.pods) == 1
        cluster.is_stuck = False
    assert cluster.all("sandboxclaims") == []


@pytest.mark.anyio
async def test_a_claim_whose_pod_is_long_in_coming_is_renewed_too(cluster: FakeKubernetes) -> None:
    cluster.apply(*pool(replicas=0))
    cluster.is_stuck = True
    backend = KubernetesBackend(kubeconfig=cluster.kubeconfig, lease_s=10, ready_s=60)
    async with (
        Runtime(registry, backend=backend, pool=PoolConfig(warm=0, start_s=60)) as runtime,
        anyio.create_task_group() as waiting,
    ):
        waiting.start_soon(runtime.execute_code, "1")
        await anyio.sleep(13)
        assert len(cluster.all("sandboxclaims")) == 1
        waiting.cancel_scope.cancel()
    assert cluster.all("sandboxclaims") == []


@pytest.mark.anyio
async def test_a_start_that_is_given_up_while_its_claim_is_made_leaves_none(
    filled: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = filled.create

    async def slow(kind: str, body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(1.0 * (kind == "sandboxclaims"))
        return await create(kind, body)

    monkeypatch.setattr(filled, "create", slow)
    backend = KubernetesBackend(kubeconfig=filled.kubeconfig)
    async with Runtime(registry, backend=backend, pool=PoolConfig(warm=0)) as runtime:
        with anyio.move_on_after(0.3):
            await runtime.execute_code("1")
    assert [each.split()[0] for each in filled.log if "sandboxclaims " in each or each.endswith("sandboxclaims")]
    assert filled.all("sandboxclaims") == []


@pytest.mark.anyio
async def test_a_guest_that_reads_no_answer_and_floods_its_bridge_makes_the_caller_hold_little(
    filled: FakeKubernetes,
) -> None:
    tools, held = ToolRegistry(), [0]

    @tools.tool
    def big() -> str:
        """Return more than a guest takes at once."""
        return "x" * (4 << 20)

    @tools.tool
    async def look() -> int:
        """Answer at once."""
        return 1

    class Watched(NodeStream):
        def _take(self, kind: bytes, body: bytes) -> None:
            super()._take(kind, body)
            held[0] = max(held[0], len(self._bridge))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(backend_module, "NodeStream", Watched)
        backend = KubernetesBackend(kubeconfig=filled.kubeconfig)
        limits = Limits(wall_s=4.0)
        async with Runtime(tools, backend=backend, pool=PoolConfig(warm=0), limits=limits) as runtime:
            result = await runtime.execute_code(FLOOD)

    assert result.outcome is Outcome.TIMEOUT, result.error
    assert 0 < held[0] <= 3 * HELD_BYTES


@pytest.mark.anyio
async def test_a_guest_that_closes_its_bridge_is_killed_and_not_lost(filled: FakeKubernetes) -> None:
    script = "import os, time\nos.closerange(3, 64)\ntime.sleep(60)"
    async with runtime_of(filled) as runtime:
        (item,) = [item async for item in runtime.map(script, [{}], retries=2)]
    assert (item.outcome, item.attempts) == (Outcome.KILLED, 1), item.error


@pytest.mark.anyio
async def test_a_frozen_pod_holds_a_run_up_no_longer_than_its_end_may_take(
    filled: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_sandbox_module, "END_S", 3.0)
    async with runtime_of(filled) as runtime:
        await runtime.execute_code("1")
        began = anyio.Event()
        results: list[Any] = []

        async def one() -> None:
            limits = Limits(wall_s=2.0)
            results.append(await runtime.execute_code(SLEEP, limits=limits, on_log=lambda *_: began.set()))

        assert isinstance(filled.kubelet, ProcessKubelet)
        async with anyio.create_task_group() as running:
            running.start_soon(one)
            await began.wait()
            frozen = [process for process, _, _ in filled.kubelet.pods.values()]
            for process in frozen:
                process.send_signal(signal.SIGSTOP)
            with anyio.fail_after(2.0 + 2 * 3.0 - 0.5):
                while not results:
                    await anyio.sleep(0.02)
        assert results[0].outcome is Outcome.TIMEOUT
        for process in frozen:
            process.send_signal(signal.SIGCONT)


@pytest.mark.anyio
async def test_sessions_and_suspended_runs_go_on_in_another_pod_when_theirs_is_lost(
    filled: FakeKubernetes, tmp_path: Path
) -> None:
    tools, looked, paid = ToolRegistry(), list[int](), list[int]()

    @tools.tool(read_only=False)
    def look() -> int:
        """Look how much there is to pay."""
        looked.append(1)
        return 40

    @tools.tool(requires_approval=True)
    def pay(euros: int) -> int:
        """Send money to somebody."""
        paid.append(euros)
        return euros

    backend = KubernetesBackend(kubeconfig=filled.kubeconfig)
    async with (
        Runtime(tools, backend=backend, record=tmp_path / "j" / "runs.db", pool=PoolConfig(warm=0)) as runtime,
        runtime.session("kept") as session,
    ):
        await session.execute_code("x = call_tool('look')")
        waiting = await runtime.execute_code("call_tool('pay', euros=call_tool('look') + 2)", on_approval="suspend")
        assert waiting.suspension is not None, waiting.error
        assert isinstance(filled.kubelet, ProcessKubelet)
        for name in backend.pods:
            filled.kubelet.pods[name][0].kill()

        there = await session.execute_code("x + 2")
        if there.outcome is Outcome.LOST:  # it was sent before the loss was noticed
            there = await session.execute_code("x + 2")
        resumed = await runtime.resume(waiting.suspension, {waiting.suspension.calls[0].id: Approve()})
    assert (there.value, resumed.value) == (42, 42), (there.error, resumed.error)
    assert (len(looked), paid) == (2, [42])


@pytest.mark.anyio
async def test_credentials_of_a_program_are_asked_for_again_before_they_expire(
    filled: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "REFRESH_S", 0.0)
    config = yaml.safe_load(Path(filled.kubeconfig).read_text())
    answer = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}
    answer["status"] = {"token": TOKEN, "expirationTimestamp": "2020-01-01T00:00:00Z"}
    (tmp_path / "answer").write_text(json.dumps(answer))
    program = {"apiVersion": answer["apiVersion"], "command": "cat", "args": [str(tmp_path / "answer")]}
    config["users"][0]["user"] = {"exec": program}
    (tmp_path / "config").write_text(yaml.safe_dump(config))

    async with Runtime(
        registry, backend=KubernetesBackend(kubeconfig=str(tmp_path / "config")), pool=PoolConfig(warm=0)
    ) as runtime:
        assert (await runtime.execute_code("1 + 1")).value == 2
        filled.token = "the-next-token"
        with pytest.raises(SandboxUnavailable, match="credentials have expired"):
            await runtime.execute_code("1 + 1")
        answer["status"]["token"] = filled.token
        (tmp_path / "answer").write_text(json.dumps(answer))

        assert (await runtime.execute_code("1 + 1")).value == 2


def test_a_killed_caller_leaves_no_claim_and_no_pod_of_its_own(filled: FakeKubernetes) -> None:
    caller = Path(__file__).parent / "kubernetes_caller.py"
    command = [sys.executable, str(caller), filled.kubeconfig, "wait", json.dumps({"lease_s": 10})]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"on\n"
        # A claim that was made just now, for the next run, has no sandbox yet.
        claimed = {each["status"]["sandbox"]["name"] for each in filled.all("sandboxclaims") if "status" in each}
        assert claimed and claimed <= filled.kubelet.running()
        process.kill()

    until = time.monotonic() + SOON_S
    while filled.all("sandboxclaims") or claimed & filled.kubelet.running():
        assert time.monotonic() < until, "claims are left"
        time.sleep(0.1)


@pytest.mark.anyio
async def test_a_claim_that_somebody_deleted_is_named_and_the_others_are_renewed_while_their_caller_lives(
    filled: FakeKubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    async with runtime_of(filled, lease_s=10) as runtime:
        await runtime.execute_code("1")
        sandboxes = runtime.pool
        assert sandboxes is not None
        await eventually(lambda: bool(sandboxes.idle) and len(filled.all("sandboxclaims")) == 1, "no sandbox waits")
        gone = filled.all("sandboxclaims")[0]["metadata"]["name"]
        del filled.objects["sandboxclaims", "agents", gone]
        await eventually(lambda: gone in caplog.text, "nobody was told")

        assert "agent-sandbox with its extensions" not in caplog.text
        assert (await runtime.execute_code("import time\ntime.sleep(12)\ncall_tool('add', a=1, b=2)")).value == 3
        assert any(each.startswith("patch sandboxclaims") and gone not in each for each in filled.log)


@pytest.mark.anyio
async def test_a_pool_that_is_not_there_is_named_with_what_to_do(cluster: FakeKubernetes) -> None:
    said = await refusal_of(cluster, pool="tools")
    assert "no SandboxWarmPool 'tools'" in said
    assert "kubernetes/sandboxes.yaml" in said


@pytest.mark.anyio
async def test_a_right_that_is_missing_is_named(filled: FakeKubernetes) -> None:
    for right in RIGHTS:
        filled.forbidden = {right}
        said = await refusal_of(filled)
        assert "does not allow" in said, right
        assert right.split()[1] in said
        assert "kubernetes/sandboxes.yaml" in said


@pytest.mark.anyio
async def test_a_cluster_without_room_is_waited_for_as_long_as_wanted(
    cluster: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_module, "FEWEST_S", 0.5)
    cluster.is_stuck = True
    cluster.apply(*pool())
    said = await refusal_of(cluster, ready_s=1.5)
    assert "within 1.5 s" in said
    assert "Insufficient memory" in said


@pytest.mark.anyio
async def test_an_api_server_that_is_away_is_named(tmp_path: Path) -> None:
    with FakeKubernetes(ProcessKubelet()) as gone:
        config = Path(gone.kubeconfig).read_text()
    (tmp_path / "config").write_text(config)
    with pytest.raises(SandboxUnavailable, match="does not answer"):
        await KubernetesBackend(kubeconfig=str(tmp_path / "config")).open()


@pytest.mark.anyio
@pytest.mark.parametrize("text", [None, "", "no YAML: [", "words", "[1, 2]", "current-context: other\ncontexts: []\n"])
async def test_a_kubeconfig_that_leads_nowhere_is_named_with_what_to_do(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "config"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SandboxUnavailable, match=r"config leads to no cluster: .*`kubectl cluster-info`") as refused:
        await KubernetesBackend(kubeconfig=str(path)).open()
    assert "\n" not in str(refused.value)


@pytest.mark.anyio
async def test_pods_that_are_not_isolated_as_they_must_be_are_refused(cluster: FakeKubernetes) -> None:
    objects = copy.deepcopy(pool())
    spec = objects[0]["spec"]["podTemplate"]["spec"]
    spec["hostPID"], spec["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True, True
    cluster.apply(*objects)
    said = await refusal_of(cluster)
    assert "hostPID must not be set" in said
    assert "allowPrivilegeEscalation must be false" in said


@pytest.mark.anyio
async def test_a_run_that_needs_more_than_its_pod_has_is_refused(filled: FakeKubernetes) -> None:
    said = await refusal_of(filled, Limits(memory_bytes=2048 * MIB))
    assert "832 MiB" in said
    assert "resources.limits.memory" in said


def test_arguments_are_checked() -> None:
    for wrong, said in (
        ({"pool": "Big Pool"}, "pool="),
        ({"namespace": "a/b"}, "namespace="),
        ({"sandboxes_per_pod": 0}, "sandboxes_per_pod"),
        ({"lease_s": 1}, "lease_s"),
        ({"lease_s": "10"}, "lease_s"),
        ({"kubeconfig": 5}, "kubeconfig="),
        ({"policy": "container"}, "policy="),
        ({"ready_s": float("nan")}, "ready_s"),
        ({"policy": Policy()}, 'profile="container"'),
        ({"policy": WITHOUT_LANDLOCK, "sandboxes_per_pod": 2}, "Landlock"),
    ):
        with pytest.raises(UsageError, match=said):
            KubernetesBackend(**wrong)


def run_with(cluster: FakeKubernetes, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "KUBECONFIG": cluster.kubeconfig}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_the_example_runs(filled: FakeKubernetes) -> None:
    done = run_with(filled, sys.executable, str(EXAMPLES / "kubernetes_pods.py"))
    assert done.stdout.startswith("[300, 600, 700]\n"), done.stdout + done.stderr


# With an engine: pods are containers, as a kubelet makes them from the same template.


@pytest.fixture(scope="module")
def engine() -> None:
    build = [sys.executable, "-m", "toolcell", "images", "build", "--debian", "--service"]
    subprocess.run(build, check=True, timeout=600, capture_output=True)


@pytest.mark.docker
def test_the_image_of_the_service_runs_as_the_template_says(engine: None) -> None:
    kubelet = DockerKubelet()
    with FakeKubernetes(kubelet) as cluster:
        cluster.apply(*pool())

        async def main() -> Any:
            async with runtime_of(cluster) as runtime:
                look = "import os\n[os.getuid(), call_tool('add', a=1, b=2), open('f', 'w').write('x')]"
                return await runtime.execute_code(look)

        result = anyio.run(main)
        assert result.value == [10001, 3, 1], result.error
    assert kubelet.running() == set()


@pytest.mark.docker
def test_gvisor_pods_run_without_landlock(engine: None) -> None:
    info = subprocess.run(["docker", "info", "--format", "{{json .Runtimes}}"], capture_output=True, text=True)
    if "runsc" not in info.stdout:
        pytest.skip("gVisor is not registered with this engine")
    with FakeKubernetes(DockerKubelet("runsc")) as cluster:
        cluster.apply(*pool(runtime_class="gvisor"))

        async def main() -> Any:
            async with runtime_of(cluster, policy=WITHOUT_LANDLOCK) as runtime:
                return await runtime.execute_code("call_tool('add', a=1, b=2)")

        result = anyio.run(main)
        assert result.value == 3, result.error
        assert "landlock" not in result.isolation.layers
        assert "runtime class gvisor" in result.isolation.layers["pid"]
