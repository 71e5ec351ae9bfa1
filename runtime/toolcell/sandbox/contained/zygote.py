"""The host's handle on the zygote of the profile `container`: start it, request sandboxes, read its reports."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import anyio
import msgpack

from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.asked_zygote import AskedZygote
from toolcell.sandbox.backend import Exit
from toolcell.sandbox.interpreter import START, hashing
from toolcell.sandbox.process.root_filesystem import InPlace
from toolcell.sandbox.process.signals import signal_all, tree_of
from toolcell.sandbox.process.zygote import END_S, ENVIRONMENT, READY_S
from toolcell.sandbox.shortages import unavailable
from toolcell.sandbox.stream import wait_readable, wait_writable
from toolcell_bridge.entry.process_usage import ProcessUsage, process_row

REPORT_BYTES = 4096

PREFIX = "toolcell-"

NO_EXEC = (
    "the interpreter's copy {} is on a file system that is mounted noexec; set XDG_CACHE_HOME to another directory, or "
    "mount this one with exec (docker run --tmpfs /tmp:exec)"
)

NO_PLACE = (
    "no directory for the files of sandboxes could be made: {}; set TMPDIR to a directory that can be written, such as "
    "an emptyDir or a tmpfs"
)


FORCED_TIMES = 8
"""How often the processes of a sandbox that goes on forking are looked for."""


class ContainedProcess:
    """One sandbox, as reported by its zygote."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.supervisor = 0
        """Process id, while it is alive."""
        self._supervisor = 0
        self._pidfd = -1
        """Of the supervisor, until its end was reported or forced."""
        self.problem = ""
        self.end: Exit | None = None
        self.is_lowered = True
        self.changed = anyio.Event()

    @property
    def is_over(self) -> bool:
        """Its end is known, or nobody can report it any more."""
        return self.end is not None or bool(self.problem)

    def update(self, **changes: object) -> None:
        """Set attributes, and wake everybody who waits for a change."""
        for name, value in changes.items():
            setattr(self, name, value)
        if self.end is not None:
            self._forget_supervisor()
        self.changed.set()
        self.changed = anyio.Event()

    def hold_supervisor(self, pid: int, zygote: int) -> None:
        """Take hold of its supervisor, a child of the zygote: its number alone may pass to another process."""
        try:
            self._supervisor, self._pidfd = pid, os.pidfd_open(pid)
        except OSError:  # it has ended, or this kernel has none, as gVisor
            return
        if (row := process_row(pid)) is None or int(row[1]) != zygote:
            self._forget_supervisor()

    def _forget_supervisor(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    @property
    def is_stopped(self) -> bool:
        """Another process of this user has stopped its supervisor, which ends nothing now."""
        row = process_row(self._supervisor) if self._pidfd >= 0 else None
        return row is not None and row[0] in (b"T", b"t")

    def end_by_force(self) -> None:
        """Kill a supervisor that does not do its work, after everything below it. Without one nothing happens."""
        if self._pidfd < 0:
            return
        pid = self._supervisor
        with suppress(ProcessLookupError):
            # It is the parent of every orphan below it for as long as it lives. Stopped, it lives on until we are done.
            signal.pidfd_send_signal(self._pidfd, signal.SIGSTOP)
            for _ in range(FORCED_TIMES):
                if _has_ended(self._pidfd) or signal_all(lambda: tree_of(pid) - {pid}, signal.SIGKILL):
                    break
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._forget_supervisor()


class ContainedZygote(AskedZygote):
    """A running zygote. `listen` must run as long as it is used."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, base: str) -> None:
        self._process, self._control, self._base = process, control, base
        self._children: dict[int, ContainedProcess] = {}
        self._asked: dict[int, float] = {}
        """When each sandbox was asked about that it has not reported anything of since, oldest first."""
        self._left: list[ContainedProcess] = []
        """Sandboxes whose ends nobody reported before the zygote was gone."""
        self._next = 0
        self.is_dead = False

    @classmethod
    def spawn(cls, place: InPlace, settings: Mapping[str, Any], hash_seed: int | None) -> ContainedZygote:
        """Start it and send it its settings, without waiting.

        Raises:
            SandboxUnavailable: it could not be started; nothing is left of it.
        """
        _check_executable(place)
        try:
            base = tempfile.mkdtemp(prefix=PREFIX)
        except OSError as exc:
            raise SandboxUnavailable(NO_PLACE.format(exc)) from exc
        code = f"{START}; sys.path[:] = {list(place.sys_path)!r}; " \
               "from toolcell_bridge.entry.contained_zygote import main; main(int(sys.argv[1]))"  # fmt: skip
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                process = subprocess.Popen(
                    [*place.command, "-P", "-s", "-S", "-B", "-c", code, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE, cwd="/", start_new_session=True,
                    env=ENVIRONMENT | hashing(hash_seed) | {"PYTHONHOME": place.home},
                )  # fmt: skip
        except OSError as exc:
            ours.close()
            os.rmdir(base)
            raise unavailable(exc) from exc
        ours.setblocking(False)
        zygote = cls(process, ours, base)
        readable, paths = list(place.readable), list(place.sys_path)
        try:
            ours.send(msgpack.packb({**settings, "base": base, "readable": readable, "sys_path": paths}))
        except OSError as exc:
            zygote.kill()
            raise SandboxUnavailable(f"the zygote did not take its settings: {exc}") from exc
        return zygote

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def wait_ready(self) -> None:
        """Wait until it has preloaded and can fork.

        Raises:
            SandboxUnavailable: it reported an error or died; nothing of it is left.

        Cancellation: nothing of it is left.
        """
        message: dict[str, Any] = {}
        try:
            with anyio.move_on_after(READY_S):
                message = await self._receive()
            if "ready" in message:
                return
            why = message.get("error") or self._read_error()
            raise SandboxUnavailable(f"isolation could not be set up: {why}; `toolcell doctor` says what is missing")
        except BaseException:
            self.kill()
            raise

    def _read_error(self) -> str:
        assert self._process.stderr is not None
        ready, _, _ = select.select([self._process.stderr], [], [], 1.0)
        text = os.read(self._process.stderr.fileno(), 4096).decode("utf-8", "replace").strip() if ready else ""
        return text or f"the zygote was not ready after {READY_S:g} s"

    async def _receive(self) -> dict[str, Any]:
        """Return the next report; an empty one when it is gone."""
        while True:
            try:
                data = self._control.recv(REPORT_BYTES)
            except BlockingIOError:
                await wait_readable(self._control)
                continue
            except OSError:
                return {}
            return msgpack.unpackb(data) if data else {}

    async def listen(self, usage: ProcessUsage) -> None:
        """Handle its reports until it is gone."""
        try:
            while message := await self._receive():
                if "error" in message:
                    break
                self._handle(message, usage)
        finally:
            self._mark_dead("the zygote is gone")

    def _handle(self, message: Mapping[str, Any], usage: ProcessUsage) -> None:
        match message:
            case {"started": number, "supervisor": pid}:
                usage.begin(number, self.pid)
                if (child := self._children.get(number)) is not None:
                    child.hold_supervisor(pid, self.pid)
                self._update(number, supervisor=pid)
            case {"failed": number, "why": why}:
                self._update(number, problem=why)
            case {"lowered": number}:
                self._update(number, is_lowered=True)
            case {"ended": number, "status": status, "why": why}:
                code = 0 if status < 0 else os.waitstatus_to_exitcode(status)
                cpu_s, peak_bytes = message["cpu_s"], message["peak_memory_bytes"]
                ended_by, exit_code = (-code, None) if code < 0 else (None, code)
                self._update(number, supervisor=0, end=Exit(ended_by, exit_code, cpu_s, peak_bytes, why))
                self._children.pop(number, None)

    def _update(self, number: int, **changes: object) -> None:
        self._asked.pop(number, None)
        child = self._children.get(number)
        if child is not None:
            child.update(**changes)

    def _mark_dead(self, why: str) -> None:
        self.is_dead = True
        for child in self._children.values():
            child.update(supervisor=0, problem=why)
        self._left += self._children.values()
        self._children.clear()
        self._asked.clear()

    def note_exit(self, child: ContainedProcess) -> None:
        """Take note that a sandbox has ended whose end was not reported. Nothing happens while its supervisor runs."""
        if child.supervisor and not _is_running(child.supervisor):
            self._children.pop(child.number, None)
            child.update(supervisor=0, problem="the zygote did not report its end; was it stopped?")

    async def fork(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> ContainedProcess:
        """Request a sandbox and wait until it has been forked. `descriptors` are the caller's to close.

        Raises:
            SandboxUnavailable: it could not be forked; says why.

        Cancellation: the sandbox ends when the caller closes its ends of the descriptors.
        """
        self._next += 1
        child = self._children[self._next] = ContainedProcess(self._next)
        try:
            self._asked[child.number] = time.monotonic()
            await self._send({**request, "open": child.number}, descriptors)
            while not child.supervisor and not child.is_over:
                await self._wait(child.changed.wait)
        except OSError as exc:
            self._children.pop(child.number, None)
            self._asked.pop(child.number, None)
            raise unavailable(exc) from exc
        if child.problem:
            raise SandboxUnavailable(f"the zygote could not start a sandbox: {child.problem}")
        return child

    async def lower(self, child: ContainedProcess, rlimits: Mapping[str, int]) -> None:
        """Lower the rlimits of a sandbox. Return when that is done, or the sandbox is gone."""
        child.is_lowered = False
        self._asked[child.number] = time.monotonic()
        await self._send({"lower": child.number, "rlimits": dict(rlimits)})
        while not child.is_lowered and not child.is_over:
            await self._wait(child.changed.wait)

    async def _send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        data = msgpack.packb(message)
        while not self.is_dead:
            try:
                socket.send_fds(self._control, [data], descriptors)
                return
            except BlockingIOError:
                await self._wait(lambda: wait_writable(self._control))

    async def aclose(self) -> None:
        """End it and with it every sandbox it forked. Safe to call twice.

        Cancellation: shielded, and bounded: what does not exit by itself is killed.
        """
        with anyio.CancelScope(shield=True):
            with suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)
            with anyio.move_on_after(END_S):
                while self._process.poll() is None:  # noqa: ASYNC110 - the end of a process sets no event
                    await anyio.sleep(0.002)
            self.kill()

    def kill(self) -> None:
        """Kill it at once, without an event loop. Safe to call twice."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(END_S)
        self._control.close()
        if self._process.stderr is not None:
            self._process.stderr.close()
        self._mark_dead("the zygote was closed")
        while self._left:
            self._left.pop().end_by_force()
        shutil.rmtree(self._base, ignore_errors=True)


def _has_ended(pidfd: int) -> bool:
    waiting = select.poll()
    waiting.register(pidfd, select.POLLIN)
    return bool(waiting.poll(0))


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def _check_executable(place: InPlace) -> None:
    """Refuse a cache from which nothing can be executed or mapped as executable.

    Raises:
        SandboxUnavailable: says what to do.
    """
    if os.statvfs(place.home).f_flag & os.ST_NOEXEC:
        raise SandboxUnavailable(NO_EXEC.format(place.home))
