"""`FakeBackend`: sandboxes without walls, for the tests of code that uses a Runtime.

Given a guest to play, it plays it in this process: fast, the same every time, on any platform. Given none, it runs
scripts for real, each in a process of its own and with nothing around it: only for scripts you wrote yourself.
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
from toolcell.sandbox.backend import Exit, Sample, Sandbox
from toolcell.sandbox.process.process_watch import TreeWatch
from toolcell.sandbox.stream import SocketStream, read_available
from toolcell.testing.scripted import Guest, ScriptedSandbox

END_S = 5.0
SPARE_ADDRESSES_BYTES = 2 * GIB
"""Threads and the allocator reserve far more than they use."""


class FakeSandbox:
    """One process of its own, in a folder of its own, behind nothing."""

    def __init__(self, ident: str, limits: Limits, environment: Mapping[str, str]) -> None:
        self.id = ident
        self.limits = limits
        self.backend = "fake"
        self.layers: Mapping[str, str] = {}
        self._workspace = tempfile.mkdtemp(prefix="toolcell-fake-")
        ours, theirs = socket.socketpair()
        out, err = os.pipe(), os.pipe()
        try:
            self._process = self._start(theirs, (out[1], err[1]), environment)
        except BaseException:
            ours.close()
            for descriptor in (out[0], err[0]):
                os.close(descriptor)
            shutil.rmtree(self._workspace, ignore_errors=True)
            raise
        finally:
            theirs.close()
            for descriptor in (out[1], err[1]):
                os.close(descriptor)
        self._output = (out[0], err[0])
        for descriptor in self._output:
            os.set_blocking(descriptor, False)
        self.stream = SocketStream(ours)
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
            cwd=self._workspace,
            env={"LANG": "C.UTF-8", "HOME": self._workspace, "TMPDIR": self._workspace, "PATH": "", "TZ": "UTC",
                 "PYTHONPATH": str(Path(toolcell_bridge.__file__).parents[1]), **environment},
            start_new_session=True,
        )  # fmt: skip

    def accept(self, layers: Mapping[str, str]) -> None:
        """There are none but the rlimits it set itself."""
        self.layers = dict(layers)
        with suppress(psutil.Error, OSError):
            self._tree = TreeWatch(self._process.pid, self.limits.memory_bytes)

    def is_alive(self) -> bool:
        """False once it has ended."""
        return not self._is_closed and self._process.poll() is None

    async def prepare(self, limits: Limits) -> None:
        """Lower what can be lowered from outside; the rest is for the watch to see."""
        if self._tree is not None:
            self._tree.memory_bytes = limits.memory_bytes
        if sys.platform == "linux" and limits is not self.limits:
            import resource

            with suppress(ProcessLookupError):
                resource.prlimit(self._process.pid, resource.RLIMIT_NOFILE, (limits.open_files, limits.open_files))

    def read_output(self) -> tuple[bytes, bytes]:
        """Take what was written raw to descriptors 1 and 2 so far, without waiting."""
        if self._is_closed:
            return b"", b""
        return read_available(self._output[0]), read_available(self._output[1])

    def sample(self, *, brief: bool = False, last: bool = False) -> Sample:
        """Measure its processes, as far as looking at them can."""
        return self._tree.look(everything=last) if self._tree is not None else Sample()

    def kill(self) -> None:
        """Kill it and the processes below it; one that left its family escapes, which is what walls are for."""
        if self._process.returncode is not None:
            return
        family: list[psutil.Process] = []
        with suppress(psutil.Error):
            family = psutil.Process(self._process.pid).children(recursive=True)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in family:
            with suppress(psutil.Error):
                process.kill()

    def freeze(self) -> bool:
        """It is destroyed right after its run."""
        return False

    async def ended(self) -> Exit:
        """Wait until it has ended, at most a few seconds, and say how."""
        with anyio.move_on_after(END_S, shield=True):
            while self._process.poll() is None:  # noqa: ASYNC110 - the end of a process sets no event
                await anyio.sleep(0.001)
        code = self._process.returncode
        if code is None:
            return Exit()
        return Exit(-code if code < 0 else None, code if code >= 0 else None)

    async def destroy(self) -> None:
        """Kill it, and remove its folder. Safe to call twice."""
        self.kill()
        self.stream.close()
        await self.ended()
        if not self._is_closed:
            self._is_closed = True
            for descriptor in self._output:
                os.close(descriptor)
            shutil.rmtree(self._workspace, ignore_errors=True)


class FakeBackend:
    """Sandboxes that isolate nothing; a Runtime takes it only with `allow_unisolated=True`."""

    name: ClassVar[str] = "fake"
    isolates: ClassVar[bool] = False
    lacks: ClassVar[Mapping[str, str]] = {
        "walls": "it has none",
        "limits.disk": "its workspace is an ordinary folder",
        "limits.inodes": "its workspace is an ordinary folder",
        "single_use.tmp": "its /tmp is the machine's",
        "single_use.processes": "nothing holds a process that leaves its family",
    }

    def __init__(
        self,
        guest: Guest | None = None,
        *,
        layers: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`guest`: what to play instead of running scripts. `layers`: what the played guest claims in its Hello."""
        self._guest = guest
        self._layers = dict(layers or {})
        self._environment = dict(environment or {})
        self._count = itertools.count(1)
        self._living: set[FakeSandbox] = set()
        self._is_open = False
        self.played: list[ScriptedSandbox] = []
        """Sandboxes that played the guest, with what each was asked; oldest first."""

    async def open(self) -> None:
        """Get ready; there is nothing to get ready.

        Raises:
            SandboxUnavailable: scripts are to run for real, and this platform has no processes to run them in.
        """
        if self._guest is None and os.name != "posix":
            raise SandboxUnavailable("a FakeBackend runs scripts on POSIX systems only; give it a guest to play")
        self._is_open = True

    async def start(self, limits: Limits) -> Sandbox:
        """Start one.

        Raises:
            SandboxUnavailable: it is not open, or the process could not be started.
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
        """End everything it started. Safe to call twice."""
        self._is_open = False
        with anyio.CancelScope(shield=True):
            while self._living:
                await self._living.pop().destroy()
        for played in self.played:
            await played.destroy()
