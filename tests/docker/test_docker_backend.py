"""A Runtime with the Docker backend, beyond the contract of all backends (`tests/contract/`)."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from toolcell import (
    ExecutionResult,
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
from toolcell.sandbox.docker import DockerBackend
from toolcell.sandbox.docker.attach import pump_through_socket
from toolcell.sandbox.docker.images.reference import ImageRef

from .docker_sandboxes import LIMITS, MIB, certificate, greeted, opened

pytestmark = pytest.mark.docker


Run = Callable[..., ExecutionResult]


def tools() -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool
    async def echo(q: Any) -> Any:
        """Return the argument as it was given, whatever it is."""
        return q

    @registry.tool
    async def wait(seconds: float) -> float:
        """Wait for so many seconds and return them."""
        await anyio.sleep(seconds)
        return seconds

    return registry


@pytest.fixture(scope="module")
def run(docker_image: ImageRef) -> Iterator[Run]:
    backend = DockerBackend(docker_image.id)
    with SyncRuntime(tools(), backend=backend, limits=LIMITS, pool=PoolConfig(warm=2)) as runtime:
        yield runtime.execute_code


def test_the_script_finds_the_same_places_as_in_a_process(run: Run) -> None:
    script = """
import os, sys, tempfile
open("/work/a", "w").write("1")
with tempfile.NamedTemporaryFile() as file: place = os.path.realpath(file.name).rpartition("/")[0]
set_result([os.getcwd(), sorted(os.listdir(".")), place, OUTPUT_DIR, dict(os.environ), sys.path[0] != ""])
"""
    result = run(script, files=[("data/in.txt", b"x")])

    assert result.outcome is Outcome.OK, result.error
    cwd, listed, place, output, environment, _ = result.value
    assert (cwd, listed, place, output) == ("/sandbox/work", ["a", "data"], "/sandbox/tmp", "/sandbox/work")
    assert environment == {"HOME": "/sandbox/work", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "PATH": "", "TZ": "UTC"}


def test_raw_output_at_the_very_end_arrives(run: Run) -> None:
    for number in range(6):
        result = run(f"import os\nprint('line')\nos.write(1, b'one ')\nos.write(2, b'two {number}')")

        assert result.logs.stdout == "line\n"
        assert result.logs.stderr == f"one two {number}"


def test_a_script_that_closed_its_output_still_ends(run: Run) -> None:
    result = run("import os\nos.closerange(0, 3)\nos.close(5)\nset_result('still here')")

    assert (result.outcome, result.value) == (Outcome.OK, "still here")


def test_semaphores_and_threads_work(run: Run) -> None:
    script = """
import multiprocessing as mp, threading, asyncio
lock = mp.get_context("fork").Lock()
with lock: pass
found = []
threads = [threading.Thread(target=found.append, args=(n,)) for n in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
async def main(): return await asyncio.gather(*(call_tool_async("echo", q=n) for n in range(5)))
set_result([sorted(found), asyncio.run(main())])
"""
    result = run(script)

    assert result.outcome is Outcome.OK, result.error
    assert result.value == [list(range(8)), list(range(5))]


def test_shared_memory_of_a_few_megabytes_has_room(run: Run) -> None:
    script = (
        "from multiprocessing.shared_memory import SharedMemory\n"
        "memory = SharedMemory(create=True, size=8_000_000)\n"
        "memory.buf[:] = b'x' * 8_000_000; memory.close(); memory.unlink()"
    )
    result = run(script, limits=LIMITS.model_copy(update={"disk_bytes": Limits().disk_bytes}))

    assert result.outcome is Outcome.OK, result.error


def test_the_guests_own_layers_refuse_what_the_container_would_allow(run: Run) -> None:
    script = """
import os
def refused(action):
    try: return repr(action())
    except OSError as error: return type(error).__name__
set_result([refused(lambda: open("/proc/1/environ", "rb").read()), refused(lambda: os.listdir("/proc")),
            refused(lambda: os.listdir("/sys")), refused(lambda: os.execv("/usr/bin/python3", ["python3", "-c", ""])),
            refused(lambda: os.kill(os.getppid(), 0)), refused(lambda: os.kill(1, 0))])
"""
    assert run(script).value == ["PermissionError"] * 6


@pytest.mark.anyio
async def test_a_missing_preloaded_module_is_named(docker_image: ImageRef) -> None:
    backend = DockerBackend(docker_image.id, preload=["no_such_module"])
    with pytest.raises(SandboxUnavailable, match="no_such_module"):
        async with Runtime(tools(), backend=backend, pool=PoolConfig(warm=0)) as runtime:
            await runtime.execute_code("1")


@pytest.mark.anyio
async def test_policy_and_preload_reach_the_guest(docker_image: ImageRef) -> None:
    policy = Policy(env={"GREETING": "hello"}, hash_seed=7, lint="standard", seed=3)
    backend = DockerBackend(docker_image.id, policy=policy, preload=["sqlite3"])
    script = "import os, random, sys\nset_result([os.environ['GREETING'], 'sqlite3' in sys.modules, hash('x'), random.random()])"
    values = []
    for _ in range(2):
        async with Runtime(tools(), backend=backend, policy=policy, pool=PoolConfig(warm=0)) as runtime:
            result = await runtime.execute_code(script)
            assert result.outcome is Outcome.OK, result.error
            values.append(result.value)
            denied = await runtime.execute_code("eval('1')", lint="strict")
            assert denied.outcome is Outcome.DENIED
    assert values[0] == values[1]
    assert values[0][:2] == ["hello", True]


@pytest.mark.anyio
async def test_a_requirement_that_containers_do_not_meet_refuses_to_run(docker_image: ImageRef) -> None:
    backend = DockerBackend(docker_image.id, policy=Policy(require=frozenset({"user"})))

    with pytest.raises(SandboxUnavailable, match="user"):
        async with Runtime(tools(), backend=backend, pool=PoolConfig(warm=0)) as runtime:
            await runtime.execute_code("1")


@pytest.mark.anyio
async def test_there_is_no_sandbox_without_daemon_image_or_runtime(docker_image: ImageRef, tmp_path: Path) -> None:
    for backend, words in [
        (DockerBackend(docker_host=f"unix://{tmp_path}/none.sock"), "no Docker daemon answers"),
        (DockerBackend("toolcell/none:0"), "toolcell images build"),
        (DockerBackend(docker_image.id, runtime="no-such-runtime"), "no-such-runtime"),
    ]:
        with pytest.raises(SandboxUnavailable, match=words):
            await backend.open()


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UsageError, match="cpus"):
        DockerBackend(cpus=0)


@pytest.mark.anyio
async def test_the_interpreter_is_the_images() -> None:
    with pytest.raises(UsageError, match="interpreter"):
        async with Runtime(backend="docker", python="python3"):
            pass


# A daemon that the backend takes for one on another machine.


class TcpProxy:
    """A TCP port with TLS in front of the local daemon's socket."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._context = context
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), socket.socket(socket.AF_UNIX) as daemon:
            daemon.connect("/var/run/docker.sock")
            with pump_through_socket(self._context.wrap_socket(client, server_side=True)) as carrier:
                back = threading.Thread(target=self._carry, args=(daemon, carrier), daemon=True)
                back.start()
                self._carry(carrier, daemon)
                back.join()

    @staticmethod
    def _carry(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


SCRIPTS = [
    ("set_result(call_tool('echo', {'q': 1}))", Outcome.OK),
    ("rows = []\nwhile True: rows.append(bytearray(b'x') * (1 << 20))", Outcome.MEMORY_LIMIT),
    ("import ctypes; ctypes.string_at(0)", Outcome.KILLED),
    ("import time; time.sleep(60)", Outcome.TIMEOUT),
]


async def outcomes_over(image: str, docker_host: str) -> list[Outcome]:
    backend = DockerBackend(image, docker_host=docker_host)
    limits = [LIMITS.model_copy(update={"wall_s": 4 if outcome is Outcome.TIMEOUT else 20}) for _, outcome in SCRIPTS]
    async with Runtime(tools(), backend=backend, limits=LIMITS, pool=PoolConfig(warm=1)) as runtime:
        assert not backend.engine.client.info.is_local
        runs = [
            await runtime.execute_code(script, limits=each) for (script, _), each in zip(SCRIPTS, limits, strict=True)
        ]
        return [run.outcome for run in runs]


@pytest.mark.anyio
async def test_a_remote_daemon_behind_tls_gives_the_same_outcomes(
    docker_image: ImageRef, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate(tmp_path)
    (tmp_path / "ca.pem").write_bytes(cert.read_bytes())
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # would go before the daemon's own authority
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    proxy = TcpProxy(context)
    try:
        found = await outcomes_over(docker_image.id, f"tcp://127.0.0.1:{proxy.port}")
    finally:
        proxy.close()
    assert found == [outcome for _, outcome in SCRIPTS]


@pytest.mark.anyio
async def test_measurements_come_from_the_cgroup_here(docker_image: ImageRef) -> None:
    async with opened(docker_image.id) as backend, greeted(backend, Limits()) as (_, sandbox):
        sample = sandbox.sample()

    assert sample.peak_memory_bytes > MIB
    assert sample.processes == 1
