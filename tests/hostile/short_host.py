"""A host that runs short of something. The first argument names the shortage, the second the backend.

It prints one JSON document: what became of each run. tests/hostile/test_shortages.py starts it.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import psutil

from toolcell import Limits, PoolConfig, Runtime, ToolcellError, ToolRegistry
from toolcell.sandbox.process import zygote as zygote_handle
from toolcell.sandbox.process.backend import ProcessBackend

COLD = PoolConfig(warm=0)
OWN = Limits(disk_bytes=1 << 20)
"""Other limits than those of the pool. The run starts a sandbox of its own and hears of the first failure."""

ASKS = "call_tool('wait')\nset_result(1)"
SLEEPS = "print('started', flush=True)\nimport time\ntime.sleep(60)"


async def attempt(runtime: Runtime, source: str = "set_result(1)", **options: Any) -> str:
    """Run a script and return how it ended, or the error."""
    try:
        result = await runtime.execute_code(source, **options)
    except ToolcellError as exc:
        return f"{exc.code}: {exc}"
    return "ok" if result.ok else f"{result.outcome}: {result.error and result.error.message}"


class Beside:
    """A run that is under way while something is short: it must not notice."""

    def __init__(self) -> None:
        self.registry = ToolRegistry()
        self.release = anyio.Event()
        self.waits = anyio.Event()
        self.registry.register("wait", "Wait for the end of the shortage", None, self._wait)
        self.ended = ""

    async def _wait(self, args: dict[str, Any]) -> int:
        self.waits.set()
        await self.release.wait()
        return 1

    async def run(self, runtime: Runtime) -> None:
        self.ended = await attempt(runtime, ASKS, limits=Limits(wall_s=300))


async def beside_a_run(
    during: Callable[[Runtime], Awaitable[list[str]]], pool: PoolConfig = COLD, backend: str = "process"
) -> dict[str, Any]:
    """Return what became of the runs while something was short, of one beside them, and of one afterwards."""
    beside = Beside()
    async with Runtime(beside.registry, backend=backend, pool=pool) as runtime, anyio.create_task_group() as tasks:
        tasks.start_soon(beside.run, runtime)
        await beside.waits.wait()
        seen = await during(runtime)
        after = await attempt(runtime)
        beside.release.set()
    return {"during": seen, "after": after, "beside": beside.ended}


@contextmanager
def only_descriptors(count: int) -> Iterator[None]:
    """Leave this process room for so many descriptors."""
    held: list[int] = []
    try:
        with suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        for descriptor in held[len(held) - count :]:
            os.close(descriptor)
        del held[len(held) - count :]
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)


async def descriptors(backend: str) -> dict[str, Any]:
    """However many descriptors are missing, and at whichever step of a start."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))

    async def during(runtime: Runtime) -> list[str]:
        seen = []
        for count in range(16):
            with only_descriptors(count):
                seen.append(await attempt(runtime, limits=OWN))
        return seen

    return await beside_a_run(during, PoolConfig(warm=0, cap=8), backend)


async def unreceived(backend: str) -> dict[str, Any]:
    """The table is full just when the zygote's answer arrives: the kernel drops the descriptor in it."""
    receive = socket.recv_fds

    def full(*arguments: Any) -> Any:
        with only_descriptors(0):
            return receive(*arguments)

    async def during(runtime: Runtime) -> list[str]:
        socket.recv_fds = full
        try:
            return [await attempt(runtime, limits=OWN)]
        finally:
            socket.recv_fds = receive

    resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
    return await beside_a_run(during, PoolConfig(warm=0, cap=8))


async def many(backend: str) -> dict[str, Any]:
    """`ulimit -n 256`, the default cap, a hundred runs."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    seen: list[str] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        async with Runtime(backend=backend) as runtime, anyio.create_task_group() as tasks:

            async def one() -> None:
                seen.append(await attempt(runtime, "import time\ntime.sleep(0.2)"))

            for _ in range(100):
                tasks.start_soon(one)
    return {"during": seen, "warnings": [str(each.message) for each in said]}


async def few(backend: str) -> dict[str, Any]:
    """Not enough descriptors for one sandbox."""
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 34, used + 34))
    try:
        async with Runtime(backend=backend):
            return {"open": "ok"}
    except ToolcellError as exc:
        return {"open": f"{exc.code}: {exc}"}


async def watches(backend: str) -> dict[str, Any]:
    """The table of watches of this user is full: the kernel refuses every new one."""
    register = selectors.EpollSelector.register

    def refuse(self: Any, fileobj: Any, events: int, data: Any = None) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def during(runtime: Runtime) -> list[str]:
        selectors.EpollSelector.register = refuse  # type: ignore[method-assign]
        try:
            return [await attempt(runtime) for _ in range(3)]
        finally:
            selectors.EpollSelector.register = register  # type: ignore[method-assign]

    return await beside_a_run(during)


async def refused_sends(backend: str) -> dict[str, Any]:
    """The kernel refuses to send descriptors to the zygote: once each for want of several things."""
    send = socket.send_fds

    async def during(runtime: Runtime) -> list[str]:
        seen = []
        for number in (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM, errno.ENFILE):

            def refuse(*_: Any, number: int = number, **__: Any) -> int:
                socket.send_fds = send
                raise OSError(number, os.strerror(number))

            socket.send_fds = refuse
            seen.append(await attempt(runtime, limits=OWN))
        return seen

    return await beside_a_run(during)


async def refused_receives(backend: str) -> dict[str, Any]:
    """There is no memory to receive the zygote's answer: once as Python says it, once as the kernel does."""
    receive = socket.recv_fds

    async def during(runtime: Runtime) -> list[str]:
        seen = []
        for error in (MemoryError(), OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))):

            def refuse(*_: Any, error: Exception = error, **__: Any) -> Any:
                socket.recv_fds = receive
                raise error

            socket.recv_fds = refuse
            seen.append(await attempt(runtime, limits=OWN))
        return seen

    return await beside_a_run(during)


def zygotes() -> list[psutil.Process]:
    """Children of the launchers below this process."""
    return [child for launcher in psutil.Process().children() for child in launcher.children()]


async def zygote_descriptors(backend: str) -> dict[str, Any]:
    """The zygote's own table of descriptors is full."""

    async def during(runtime: Runtime) -> list[str]:
        (parent,) = zygotes()
        before = resource.prlimit(parent.pid, resource.RLIMIT_NOFILE)
        used = parent.num_fds()
        seen = []
        for room in range(0, 24, 3):
            resource.prlimit(parent.pid, resource.RLIMIT_NOFILE, (used + room, before[1]))
            seen.append(await attempt(runtime, limits=OWN))
        resource.prlimit(parent.pid, resource.RLIMIT_NOFILE, before)
        return seen

    return await beside_a_run(during)


async def stopped(backend: str) -> dict[str, Any]:
    """The zygote is stopped: starts end in time, and then there is another zygote."""
    async with Runtime(pool=PoolConfig(warm=0, start_s=1)) as runtime:
        await attempt(runtime)
        (parent,) = zygotes()
        parent.suspend()
        begun = time.monotonic()
        first = await attempt(runtime)
        took_s = time.monotonic() - begun
        zygote_handle.ANSWER_S = took_s / 2
        return {"during": [first], "took_s": took_s, "after": await attempt(runtime), "same": parent in zygotes()}


async def stopped_during_a_run(backend: str) -> dict[str, Any]:
    """The zygote is stopped while a script runs: nobody reports its end."""
    begun = 0.0

    def on_log(stream: str, text: str) -> None:
        zygotes()[0].suspend()

    async with Runtime(pool=COLD) as runtime:
        begun = time.monotonic()
        seen = await attempt(runtime, SLEEPS, limits=Limits(wall_s=1), on_log=on_log)
        return {"during": [seen], "took_s": time.monotonic() - begun}


def stranger() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


async def destroyed(backend: str) -> dict[str, Any]:
    """The zygote is stopped, so it reports no end; then the number of a destroyed sandbox's pidfd is another's."""
    backend_itself = ProcessBackend()
    await backend_itself.open()
    sandbox = await backend_itself.start(Limits())
    (parent,) = zygotes()
    parent.suspend()
    await sandbox.destroy()
    with stranger() as victim:
        pidfds = [os.pidfd_open(victim.pid) for _ in range(32)]
        is_alive = sandbox.is_alive()
        sandbox.kill()
        await sandbox.destroy()
        ended, _, _ = select.select(pidfds[:1], [], [], 1)
        for pidfd in pidfds:
            os.close(pidfd)
        victim.kill()
    parent.resume()
    await backend_itself.close()
    return {"is_alive": is_alive, "victim": "killed" if ended else "untouched"}


async def killed(backend: str) -> dict[str, Any]:
    """The zygote is killed while a script runs: the run says what was lost, and the next one works."""
    async with Runtime(pool=COLD) as runtime:
        seen = await attempt(runtime, SLEEPS, on_log=lambda *_: zygotes()[0].send_signal(signal.SIGKILL))
        return {"during": [seen], "after": await attempt(runtime)}


async def killed_unnoticed(backend: str) -> dict[str, Any]:
    """The zygote has just ended, and this process learns it as it asks for a sandbox."""
    backend_itself = ProcessBackend()
    await backend_itself.open()
    (zygote,) = zygotes()
    zygote.kill()
    zygote.wait(10)  # the event loop has no turn
    sandbox = await backend_itself.start(Limits())
    is_alive = sandbox.is_alive()
    await sandbox.destroy()
    await backend_itself.close()
    return {"is_alive": is_alive}


async def address_space(backend: str) -> dict[str, Any]:
    """This process may map hardly more memory than it has, while a guest sends as much as it may."""
    large = "set_result([[number] for number in range(80_000)])"

    async def during(runtime: Runtime) -> list[str]:
        limits, seen = resource.getrlimit(resource.RLIMIT_AS), []
        for room in (0, 1 << 20, 8 << 20):
            mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (mapped + room, limits[1]))
            try:
                seen.append(await attempt(runtime, large))
            finally:
                resource.setrlimit(resource.RLIMIT_AS, limits)
        return seen

    return await beside_a_run(during)


async def mask(backend: str) -> dict[str, Any]:
    """Files that this process makes are closed to others. The cache is new, so everything is made now."""
    os.umask(int(sys.argv[3], 8))
    source = "import os\nopen('f', 'w').close()\nset_result(oct(os.stat('f').st_mode & 0o777))"
    async with Runtime(pool=COLD) as runtime:
        result = await runtime.execute_code(source)
        return {"during": ["ok" if result.ok else str(result.error)], "mode": result.value}


async def processes(backend: str) -> dict[str, Any]:
    """No further process is allowed (RLIMIT_NPROC of an ordinary user, or a pids limit)."""

    async def during(runtime: Runtime) -> list[str]:
        forbid(True)
        try:
            return [await attempt(runtime, limits=OWN)]
        finally:
            forbid(False)

    return await beside_a_run(during)


def forbid(is_forbidden: bool) -> None:
    """Forbid this process and its children to fork, or allow it again."""
    folder = sys.argv[3]
    if folder:
        with open(f"{folder}/pids.max", "w", encoding="ascii") as file:
            file.write("1" if is_forbidden else "max")
        return
    for process in [psutil.Process(), *zygotes()]:
        hard = resource.prlimit(process.pid, resource.RLIMIT_NPROC)[1]
        resource.prlimit(process.pid, resource.RLIMIT_NPROC, (1 if is_forbidden else hard, hard))


async def memory(backend: str) -> dict[str, Any]:
    """This process and its children have 256 MiB together: a script that wants more fails, and it alone."""
    hog = "x = []\nwhile True: x.append(bytearray(b'x') * (8 << 20))"

    async def during(runtime: Runtime) -> list[str]:
        return [await attempt(runtime, hog, limits=Limits(memory_bytes=1 << 30))]

    return await beside_a_run(during)


if __name__ == "__main__":
    print(json.dumps(anyio.run(globals()[sys.argv[1]], sys.argv[2])))
