"""The zygote of the profile `container`: how it is started, and what its reports mean."""

from __future__ import annotations

import itertools
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgpack

from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.backend import Exit
from toolcell.sandbox.interpreter import hashing, start
from toolcell.sandbox.process.process_watch import signal_all, tree_of
from toolcell.sandbox.process.root_filesystem import InPlace
from toolcell.sandbox.process.zygote import ENVIRONMENT, ForkedSandbox, ZygoteHandle, exit_of
from toolcell.sandbox.shortages import unavailable
from toolcell_bridge.entry.process_usage import ProcessUsage, process_row

REPORTS = ("started", "failed", "lowered", "ended")

PREFIX = "toolcell-"

NO_EXEC = (
    "the interpreter's copy {} is on a file system that is mounted noexec; set XDG_CACHE_HOME to another directory, or "
    "mount this one with exec (docker run --tmpfs /tmp:exec)"
)

NO_PLACE = (
    "no directory for the files of sandboxes could be made: {}; set TMPDIR to a directory that can be written, such as "
    "an emptyDir or a tmpfs"
)


_numbers = itertools.count(1)
"""Of the sandboxes of all zygotes of this process: a backend measures those of several together."""

FORCED_TIMES = 8
"""How often the processes of a sandbox that goes on forking are looked for."""


class ContainedProcess(ForkedSandbox):
    """One sandbox and its supervisor."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.supervisor = 0
        """Process id, while it is alive."""
        self._supervisor = 0
        self._pidfd = -1
        """Pidfd of the supervisor, until its end was reported or forced."""

    def fail(self, problem: str) -> None:
        """Record why nobody will report its end."""
        self.supervisor = 0
        super().fail(problem)

    def take_end(self, end: Exit) -> None:
        """Record how it ended: nothing is left of it."""
        self.supervisor, self.end = 0, end
        self._forget_supervisor()
        self.notify()

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
                with suppress(OSError):  # no descriptor is left
                    if _has_ended(self._pidfd) or signal_all(lambda: tree_of(pid)[1:], signal.SIGKILL):
                        break
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._forget_supervisor()


class ContainedZygote(ZygoteHandle[ContainedProcess]):
    """A zygote without namespaces. Use `spawn` to make one."""

    def __init__(
        self, process: subprocess.Popen[bytes], control: socket.socket, base: str, usage: ProcessUsage
    ) -> None:
        super().__init__(process, control)
        self._base, self._usage = base, usage
        self._left: list[ContainedProcess] = []
        """Sandboxes whose ends nobody reported before the zygote was gone."""

    @classmethod
    def spawn(
        cls, place: InPlace, settings: Mapping[str, Any], hash_seed: int | None, usage: ProcessUsage
    ) -> ContainedZygote:
        """Start it and send it its settings, without waiting.

        Raises:
            SandboxUnavailable: it could not be started; nothing is left of it.
        """
        _check_executable(place)
        try:
            base = tempfile.mkdtemp(prefix=PREFIX)
        except OSError as exc:
            raise SandboxUnavailable(NO_PLACE.format(exc)) from exc
        code = (
            f"{start(place.sys_path)}; from toolcell_bridge.entry.contained_zygote import main; main(int(sys.argv[1]))"
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                process = subprocess.Popen(
                    [*place.command, "-P", "-s", "-S", "-B", "-c", code, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    cwd="/",
                    start_new_session=True,
                    env=ENVIRONMENT | hashing(hash_seed) | {"PYTHONHOME": place.home},
                )
        except OSError as exc:
            ours.close()
            os.rmdir(base)
            raise unavailable(exc) from exc
        ours.setblocking(False)
        zygote = cls(process, ours, base, usage)
        readable, paths = list(place.readable), list(place.sys_path)
        zygote.send_first(msgpack.packb({**settings, "base": base, "readable": readable, "sys_path": paths}))
        return zygote

    def _handle(self, message: Mapping[str, Any], descriptors: list[int]) -> None:
        number = next(message[kind] for kind in REPORTS if kind in message)
        self._unanswered.pop(number, None)
        if (child := self._children.get(number)) is None:
            return
        match message:
            case {"started": _, "supervisor": pid}:
                self._usage.begin(number, self.pid)
                child.hold_supervisor(pid, self.pid)
                child.supervisor, child.has_started = pid, True
                child.notify()
            case {"failed": _, "why": why}:
                child.fail(why)
            case {"lowered": _}:
                child.is_lowered = True
                child.notify()
            case {"ended": _, "status": status, "why": why, "cpu_s": cpu_s, "peak_memory_bytes": peak}:
                del self._children[number]
                child.take_end(exit_of(max(0, status), cpu_s, peak, why))  # -1: it was not among those reaped

    def _mark_dead(self, why: str) -> None:
        self._left += self._children.values()
        super()._mark_dead(why)

    def note_exit(self, child: ContainedProcess) -> None:
        """Take note that a sandbox has ended whose end was not reported. Nothing happens while its supervisor runs."""
        if child.supervisor and not _is_running(child.supervisor):
            self._children.pop(child.number, None)
            child.fail("the zygote did not report its end; was it stopped?")

    async def fork(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> ContainedProcess:
        """Request a sandbox and wait until it has been forked. `descriptors` are the caller's to close.

        Raises:
            SandboxUnavailable: it could not be forked; says why.

        Cancellation: the sandbox ends when the caller closes its ends of the descriptors.
        """
        child = ContainedProcess(next(_numbers))
        await self._request(child, {"open": child.number, **request}, descriptors)
        await self.wait_started(child)
        return child

    async def lower(self, child: ContainedProcess, rlimits: Mapping[str, int]) -> None:
        """Lower the rlimits of a sandbox. Return when that is done, or the sandbox is gone."""
        if child.is_over:
            return
        child.is_lowered = False
        await self._request(child, {"lower": child.number, "rlimits": dict(rlimits)})
        while not child.is_lowered and not child.is_over:
            await self.wait_for(child.changed.wait)

    def _kill_process(self) -> None:
        """Kill it after everything below it. Stopped, it makes nothing new and adopts what loses its parent."""
        self._process.send_signal(signal.SIGSTOP)
        with suppress(OSError):  # no descriptor is left
            signal_all(lambda: tree_of(self.pid)[1:], signal.SIGKILL)
        super()._kill_process()

    def abort(self) -> None:
        """Kill it at once, and what its sandboxes have left when somebody else has killed it."""
        super().abort()
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
