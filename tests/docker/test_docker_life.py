"""Life of a container: cancelled at any moment, dead in the pool, killed from outside, without its daemon."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest

from toolcell import Outcome, PoolConfig, Runtime, SandboxUnavailable
from toolcell.sandbox.docker import DockerBackend
from toolcell.sandbox.docker.client import EngineClient
from toolcell.sandbox.docker.container import DockerSandbox, Engine
from toolcell.sandbox.docker.images.reference import ImageRef
from toolcell.sandbox.docker.reaper import LABEL_BACKEND

from .docker_sandboxes import LIMITS, containers_of, greeted, opened

pytestmark = pytest.mark.docker


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    client = await EngineClient.connect()
    yield client
    await client.aclose()


async def nothing_left(client: EngineClient, key: str) -> bool:
    return await containers_of(client, LABEL_BACKEND, key) == []


@pytest.mark.anyio
async def test_closing_a_runtime_leaves_nothing(client: EngineClient, docker_image: ImageRef) -> None:
    backend = DockerBackend(docker_image.id)
    async with Runtime(backend=backend, limits=LIMITS, pool=PoolConfig(warm=2)) as runtime:
        key = backend.engine.key
        result = await runtime.execute_code("set_result(1)")
        assert result.outcome is Outcome.OK, result.error
        assert not await nothing_left(client, key)

    assert await nothing_left(client, key)
    await backend.close()


@pytest.mark.anyio
@pytest.mark.parametrize("pause_s", [0.0, 0.02, 0.1, 0.3])
async def test_a_start_that_is_cancelled_leaves_nothing(
    client: EngineClient, docker_image: ImageRef, pause_s: float
) -> None:
    async with opened(docker_image.id) as backend:
        key = backend.engine.key
        with anyio.move_on_after(pause_s):
            sandbox = await backend.start(LIMITS)
            await sandbox.destroy()

        assert await nothing_left(client, key)


@pytest.mark.anyio
async def test_a_run_that_is_cancelled_ends_its_container(client: EngineClient, docker_image: ImageRef) -> None:
    backend = DockerBackend(docker_image.id)
    async with Runtime(backend=backend, limits=LIMITS, pool=PoolConfig(warm=0)) as runtime:
        started = anyio.Event()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:

                async def run() -> None:
                    script = "print('x', flush=True)\nwhile True: pass"
                    await runtime.execute_code(script, on_log=lambda *_: started.set())

                tasks.start_soon(run)
                await started.wait()
                scope.cancel()
        with anyio.fail_after(60):
            while not await nothing_left(client, backend.engine.key):
                await anyio.sleep(0.02)
        result = await runtime.execute_code("set_result('next')")
        assert result.value == "next"


@pytest.mark.anyio
async def test_a_cancelled_run_keeps_its_output(docker_image: ImageRef) -> None:
    stop = anyio.Event()
    backend = DockerBackend(docker_image.id)
    async with Runtime(backend=backend, limits=LIMITS, pool=PoolConfig(warm=0)) as runtime:
        script = "print('said', flush=True)\nimport time; time.sleep(60)"
        result = await runtime.execute_code(script, cancel=stop, on_log=lambda *_: stop.set())

    assert result.outcome is Outcome.CANCELLED
    assert result.logs.text == "said\n"


@pytest.mark.anyio
async def test_a_run_whose_container_somebody_kills_is_lost(client: EngineClient, docker_image: ImageRef) -> None:
    backend = DockerBackend(docker_image.id)
    async with Runtime(backend=backend, limits=LIMITS, pool=PoolConfig(warm=0)) as runtime:
        started = anyio.Event()
        results = []
        async with anyio.create_task_group() as tasks:

            async def run() -> None:
                script = "print('x', flush=True)\nimport time; time.sleep(60)"
                results.append(await runtime.execute_code(script, on_log=lambda *_: started.set()))

            tasks.start_soon(run)
            await started.wait()
            for container in await containers_of(client, LABEL_BACKEND, backend.engine.key):
                await client.kill(container)

    assert results[0].outcome is Outcome.LOST
    assert "killed or stopped" in results[0].error.message


@pytest.mark.anyio
async def test_a_container_that_dies_in_the_pool_is_never_handed_out(
    client: EngineClient, docker_image: ImageRef
) -> None:
    backend = DockerBackend(docker_image.id)
    async with Runtime(backend=backend, limits=LIMITS, pool=PoolConfig(warm=1)) as runtime:
        assert (await runtime.execute_code("set_result(1)")).value == 1
        pool = runtime.pool
        assert pool is not None
        with anyio.fail_after(60):
            while not pool.idle:
                await anyio.sleep(0.02)
        (dead, *_) = pool.idle
        assert isinstance(dead.sandbox, DockerSandbox)
        await client.remove(dead.sandbox.container_id)
        with anyio.fail_after(60):
            while dead.is_usable:
                await anyio.sleep(0.01)

        result = await runtime.execute_code("set_result(2)")

    assert (result.outcome, result.value) == (Outcome.OK, 2)


@pytest.mark.anyio
async def test_destroying_twice_and_killing_the_dead_do_nothing(client: EngineClient, docker_image: ImageRef) -> None:
    async with opened(docker_image.id) as backend, greeted(backend) as (_, sandbox):
        assert sandbox.is_alive()
        sandbox.kill()
        sandbox.kill()
        end = await sandbox.ended()
        assert end.signal == 9
        assert not sandbox.is_alive()
        await sandbox.destroy()
        await sandbox.destroy()
        sandbox.kill()
        assert await nothing_left(client, backend.engine.key)


@pytest.mark.anyio
async def test_two_runs_of_one_sandbox_each_keep_their_raw_output(docker_image: ImageRef) -> None:
    backend = DockerBackend(docker_image.id)
    async with (
        Runtime(backend=backend, limits=LIMITS, pool=PoolConfig(warm=0)) as runtime,
        runtime.session() as session,
    ):
        for number in (1, 2):
            result = await session.execute_code(f"import os\nos.write(1, b'raw {number}')")
            assert (result.outcome, result.logs.stderr) == (Outcome.OK, f"raw {number}")


@pytest.mark.anyio
async def test_a_daemon_that_refuses_in_the_middle_of_a_start_leaves_nothing(
    client: EngineClient, docker_image: ImageRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(docker_image.id) as backend:

        async def refuse(container: str) -> None:
            raise SandboxUnavailable("the Docker daemon says: no space left on device")

        for step in ("start", "inspect"):
            with monkeypatch.context() as patch:
                patch.setattr(backend.engine.client, step, refuse)
                with pytest.raises(SandboxUnavailable, match="no space left"):
                    await backend.start(LIMITS)
            assert await nothing_left(client, backend.engine.key)
        async with greeted(backend) as (_, sandbox):
            assert sandbox.is_alive()


@pytest.mark.anyio
async def test_many_runs_at_once_leave_nothing(client: EngineClient, docker_image: ImageRef) -> None:
    backend = DockerBackend(docker_image.id)
    values = []
    async with Runtime(backend=backend, limits=LIMITS, pool=PoolConfig(warm=2, cap=6)) as runtime:
        key = backend.engine.key
        async with anyio.create_task_group() as tasks:

            async def run(number: int) -> None:
                result = await runtime.execute_code(f"set_result({number})")
                values.append((result.outcome, result.value))

            for number in range(12):
                tasks.start_soon(run, number)

    assert sorted(values) == [(Outcome.OK, number) for number in range(12)]
    assert await nothing_left(client, key)


# A daemon of our own, which a test can kill.


class Daemon:
    """A second dockerd with its own data, containerd and network: without a bridge it would remove the first one's docker0."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.address = f"unix://{folder}/d.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        f = self._folder
        self._process = subprocess.Popen(
            ["unshare", "--net", "dockerd", "-H", self.address, "--data-root", f"{f}/data", "--exec-root", f"{f}/exec", "--pidfile",
             f"{f}/d.pid", "--bridge", "none", "--iptables=false", "--ip-forward=false", "--ip-masq=false",
             "--containerd-namespace", f"toolcell-{os.getpid()}", "--containerd-plugins-namespace",
             f"toolcell-plugins-{os.getpid()}"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(60)
        # Its containerd dies too, and the files that containerd leaves would stop the next one from starting.
        for name in ("d.pid", "exec/containerd/containerd.pid", "exec/containerd/containerd.sock"):
            (self._folder / name).unlink(missing_ok=True)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(60)


async def reached(address: str) -> EngineClient:
    with anyio.fail_after(60):
        while True:
            try:
                return await EngineClient.connect(address)
            except SandboxUnavailable:
                await anyio.sleep(0.1)


@pytest.fixture
def own_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        pytest.skip("starting a daemon of our own needs root and dockerd")
    # Short: the path of a socket has at most about a hundred characters.
    folder = Path(f"/tmp/toolcell-daemon-{os.getpid()}")
    folder.mkdir(mode=0o700)
    daemon = Daemon(folder)
    daemon.start()
    yield daemon
    daemon.stop()
    # A daemon bind-mounts its data directory onto itself, and a killed daemon leaves the mount.
    for mounted in ("data", "data"):
        subprocess.run(["umount", "-l", folder / mounted], check=False, capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_daemon_that_dies_ends_its_runs_and_one_that_comes_back_serves_again(
    client: EngineClient, docker_image: ImageRef, own_daemon: Daemon
) -> None:
    theirs = await reached(own_daemon.address)
    image = await client.call(client.api.get_image, docker_image.id)
    await theirs.call(theirs.api.load_image, b"".join(image))
    await theirs.aclose()
    backend = DockerBackend(docker_image.id, docker_host=own_daemon.address)
    results = []
    async with Runtime(backend=backend, limits=LIMITS, pool=PoolConfig(warm=0)) as runtime:
        started = anyio.Event()
        async with anyio.create_task_group() as tasks:

            async def run() -> None:
                script = "print('said', flush=True)\nimport time; time.sleep(60)"
                results.append(await runtime.execute_code(script, on_log=lambda *_: started.set()))

            tasks.start_soon(run)
            await started.wait()
            own_daemon.kill()
        assert results[0].outcome is Outcome.LOST
        assert results[0].logs.text == "said\n"
        with pytest.raises(SandboxUnavailable, match="no Docker daemon answers"):
            await runtime.execute_code("set_result(1)")

        own_daemon.start()
        theirs = await reached(own_daemon.address)
        result = await runtime.execute_code("set_result('again')")
        assert result.value == "again"
        key = backend.engine.key
    assert isinstance(key, str)
    with anyio.fail_after(60):
        while await containers_of(theirs, LABEL_BACKEND, key):
            await anyio.sleep(0.1)
    await theirs.aclose()


def test_the_engine_is_only_there_while_it_is_open(docker_image: ImageRef) -> None:
    with pytest.raises(SandboxUnavailable, match="not open"):
        assert isinstance(DockerBackend(docker_image.id).engine, Engine)
