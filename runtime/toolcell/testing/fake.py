"""`FakeBackend`: sandboxes without isolation, for tests of code that uses a Runtime.

With a scripted guest it plays messages in this process: fast, repeatable, on any platform. Without one it runs each
script in a process without isolation, so use it only for scripts that you wrote yourself.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import ClassVar

import anyio
import psutil

import toolcell_bridge
from toolcell.config import GIB, Limits
from toolcell.errors import SandboxUnavailable
from toolcell.sandbox import Backend, Exit, Sample, Sandbox, SocketStream, read_available
from toolcell.sandbox.process import TreeWatch
from toolcell.testing.scripted import Guest, ScriptedSandbox

END_S = 5.0
SPARE_ADDRESSES_BYTES = 4 * GIB
"""Address space beyond the memory limit: threads and the allocator reserve far more than they use."""


class FakeSandbox(Sandbox):
    """A process with a folder of its own and without isolation."""

    def __init__(self, ident: str, limits: Limits, environment: Mapping[str, str]) -> None:
        self.id = ident
        self.limits = limits
        self.backend = "fake"
        self.layers: Mapping[str, str] = {}
        self.workspace = tempfile.mkdtemp(prefix="toolcell-fake-")
        ours, theirs = socket.socketpair()
        out, err = os.pipe(), os.pipe()
        try:
            self.process = self._start(theirs, (out[1], err[1]), environment)
        except BaseException:
            ours.close()
            for descriptor in (out[0], err[0]):
                os.close(descriptor)
            shutil.rmtree(self.workspace, ignore_errors=True)
            raise
        finally:
            theirs.close()
            for descriptor in (out[1], err[1]):
                os.close(descriptor)
        self._output = (out[0], err[0])
        for descriptor in self._output:
            os.set_blocking(descriptor, False)
        self.stream: SocketStream = SocketStream(ours)
        self._tree: TreeWatch | None = None
        self._is_closed = False

    def _start(
        self, bridge: socket.socket, output: tuple[int, int], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        limits = self.limits
        return subprocess.Popen(
            [
                *(sys.executable, "-P", "-s", "-B", "-m", "toolcell_bridge.entry.plain"),
                *(str(bridge.fileno()), str(limits.frame_bytes)),
                f"NOFILE={limits.open_files}",
                f"CPU={ceil(limits.cpu_s) + 1}",
                f"AS={limits.memory_bytes + SPARE_ADDRESSES_BYTES}",
                "CORE=0",
            ],
            pass_fds=[bridge.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output[0],
            stderr=output[1],
            cwd=self.workspace,
            env={
                "LANG": "C.UTF-8",
                "HOME": self.workspace,
                "TMPDIR": self.workspace,
                "PATH": "",
                "TZ": "UTC",
                "PYTHONPATH": str(Path(toolcell_bridge.__file__).parents[1]),
                **environment,
            },
            start_new_session=True,
        )

    def accept(self, layers: Mapping[str, str]) -> None:
        """Take the layers named in Hello: only the rlimits that the guest set itself."""
        self.layers = dict(layers)
        with suppress(OSError):
            self._tree = TreeWatch(self.process.pid, self.limits.memory_bytes)

    def is_alive(self) -> bool:
        return not self._is_closed and self.process.poll() is None

    async def prepare(self, limits: Limits) -> None:
        """Lower the limits that can be lowered from outside. The run's monitor enforces the others."""
        if self._tree is not None:
            self._tree.memory_bytes = limits.memory_bytes
        if sys.platform == "linux" and limits is not self.limits:
            import resource

            with suppress(ProcessLookupError):
                resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (limits.open_files, limits.open_files))

    def read_output(self) -> tuple[bytes, bytes]:
        if self._is_closed:
            return b"", b""
        return read_available(self._output[0]), read_available(self._output[1])

    def sample(self, *, brief: bool = False, last: bool = False) -> Sample:
        """Measure the tree of processes, on Linux."""
        return self._tree.look() if self._tree is not None else Sample()

    def kill(self) -> None:
        """Kill the process and its descendants. A daemonized descendant escapes: only isolation could prevent that."""
        if self.process.returncode is not None:
            return
        descendants: list[psutil.Process] = []
        with suppress(psutil.Error):
            descendants = psutil.Process(self.process.pid).children(recursive=True)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for process in descendants:
            with suppress(psutil.Error):
                process.kill()

    kill_now = kill

    def cpu_now(self) -> float | None:
        """Measure the tree of processes, on Linux. Any thread may call it."""
        return self._tree.look().cpu_s if self._tree is not None else None

    async def ended(self) -> Exit:
        with anyio.move_on_after(END_S, shield=True):
            while self.process.poll() is None:  # noqa: ASYNC110 - the end of a process sets no event
                await anyio.sleep(0.001)
        code = self.process.returncode
        if code is None:
            return Exit()
        return Exit(-code if code < 0 else None, code if code >= 0 else None)

    async def destroy(self) -> None:
        self.kill()
        self.stream.close()
        await self.ended()
        if not self._is_closed:
            self._is_closed = True
            for descriptor in self._output:
                os.close(descriptor)
            shutil.rmtree(self.workspace, ignore_errors=True)


class FakeBackend(Backend):
    """Starts sandboxes without isolation; a Runtime accepts it only with `allow_unisolated=True`."""

    name: ClassVar[str] = "fake"
    isolates: ClassVar[bool] = False
    lacks: ClassVar[Mapping[str, str]] = {
        "isolation": "it isolates nothing",
        "limits.disk": "its workspace is an ordinary folder",
        "limits.inodes": "its workspace is an ordinary folder",
        "single_use.tmp": "its /tmp is the machine's",
        "single_use.processes": "it cannot find a process that leaves its process tree",
    }

    def __init__(
        self,
        guest: Guest | None = None,
        *,
        layers: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Describe the sandboxes.

        Args:
            guest: messages to play instead of running scripts, or a function of the run that returns them.
            layers: layers that the scripted guest claims in its Hello.
            environment: extra environment variables of the processes that run scripts.
        """
        self._guest = guest
        self._layers = dict(layers or {})
        self._environment = dict(environment or {})
        self._count = itertools.count(1)
        self._living: set[FakeSandbox] = set()
        self._is_open = False
        self.played: list[ScriptedSandbox] = []
        """Sandboxes that played the guest, oldest first."""

    async def open(self) -> None:
        """Allow `start`.

        Raises:
            SandboxUnavailable: there is no scripted guest, and scripts cannot run on this platform.
        """
        if self._guest is None and os.name != "posix":
            raise SandboxUnavailable("a FakeBackend runs scripts on POSIX systems only; give it a guest to play")
        self._is_open = True

    async def start(self, limits: Limits) -> Sandbox:
        """Start one sandbox.

        Raises:
            SandboxUnavailable: the backend is not open, or the process could not be started.
        """
        if not self._is_open:
            raise SandboxUnavailable("the fake backend is not open")
        ident = f"f{next(self._count)}"
        if self._guest is not None:
            self.played.append(ScriptedSandbox(ident, limits, self._guest, self._layers))
            return self.played[-1]
        try:
            sandbox = FakeSandbox(ident, limits, self._environment)
        except OSError as exc:
            raise SandboxUnavailable(f"a process for the guest could not be started: {exc}") from exc
        self._living = {each for each in self._living if each.is_alive()} | {sandbox}
        return sandbox

    async def close(self) -> None:
        """End every sandbox. Safe to call twice."""
        self._is_open = False
        with anyio.CancelScope(shield=True):
            while self._living:
                await self._living.pop().destroy()
        for sandbox in self.played:
            await sandbox.destroy()
