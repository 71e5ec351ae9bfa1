"""The process backend of `Policy(profile="container")`: it needs no namespace, no mount and no privilege.

Sandboxes are isolated by what a process can apply to itself: Landlock with its scopes, seccomp, rlimits, no_new_privs
and the loss of all capabilities. They share the process ids, the network devices and the file system of their host's
container. Landlock and seccomp keep them from these; tests/PROMISES.md says what is left.
"""

from __future__ import annotations

import functools
import itertools
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import anyio
import msgpack

from toolcell.config import Limits, Policy
from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.backend import INTERRUPTED_S, Backend, Exit, Sample, Sandbox
from toolcell.sandbox.interpreter import hashing, plan_rlimits, start
from toolcell.sandbox.process import root_filesystem
from toolcell.sandbox.process.process_watch import signal_all, tree_of
from toolcell.sandbox.process.root_filesystem import InPlace
from toolcell.sandbox.process.zygote import ENVIRONMENT, ForkedSandbox, ZygoteHandle, Zygotes, exit_of
from toolcell.sandbox.shortages import check_layers, unavailable
from toolcell.sandbox.stream import SocketStream, open_pipe, read_available
from toolcell_bridge.entry.process_usage import ProcessUsage, process_row
from toolcell_bridge.entry.supervisor_protocol import ASK, FREEZE, INTERRUPT, KILL, THAW
from toolcell_bridge.guest.lint_profiles import PRELOAD
from toolcell_bridge.isolation.rlimits import RlimitPlan

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
        self.changed.notify()

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
        if os.statvfs(place.home).f_flag & os.ST_NOEXEC:  # nothing in it can be executed or mapped as executable
            raise SandboxUnavailable(NO_EXEC.format(place.home))
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
                child.changed.notify()
            case {"failed": _, "why": why}:
                child.fail(why)
            case {"lowered": _}:
                child.is_lowered = True
                child.changed.notify()
            case {"ended": _, "status": status, "why": why, "cpu_s": cpu_s, "peak_memory_bytes": peak}:
                del self._children[number]
                child.take_end(exit_of(max(0, status), cpu_s, peak, why))  # -1: it was not among those reaped

    def _mark_dead(self, why: str) -> None:
        self._left += self._children.values()
        super()._mark_dead(why)

    def note_exit(self, child: ContainedProcess) -> None:
        """Take note that a sandbox has ended whose end was not reported. Nothing happens while its supervisor runs."""
        if child.supervisor and ((row := process_row(child.supervisor)) is None or row[0] in (b"Z", b"X")):
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


# One sandbox of the profile `container`: its limits, its measurements and its end.
#
# Sandboxes are measured by their process trees: no cgroup can be had there.

END_S = 5.0
"""How long a killed sandbox may take to be reaped and its files to be removed."""

REPORT_S = 1.0
"""An end is reported within milliseconds, unless the zygote is stopped. Then the supervisor is looked at this often."""

SHARED_ID_PROCESSES = 16_384
"""RLIMIT_NPROC. The kernel counts a user id over the whole machine, and other containers have the same one, so this
limit must not be the one that refuses. The watch ends a sandbox with too many; this one bounds what comes before."""


def rlimits_for(limits: Limits) -> RlimitPlan:
    return plan_rlimits(limits, SHARED_ID_PROCESSES, is_counted=False)


class ContainedSandbox(Sandbox):
    """One guest and its supervisor."""

    def __init__(
        self,
        child: ContainedProcess,
        zygote: ContainedZygote,
        *,
        bridge: socket.socket,
        raw_output: Sequence[int],
        control_pipe: int,
        usage: ContainedUsage,
        limits: Limits,
        required: frozenset[str],
    ) -> None:
        self._child, self._zygote, self._usage = child, zygote, usage
        self._raw_output, self._control_pipe = tuple(raw_output), control_pipe
        self._hangup = select.poll()
        self._hangup.register(bridge, select.POLLRDHUP)
        self._is_closed = False
        self._closing = threading.Lock()
        self._sample = Sample()
        self._required = required
        self._is_killed = False
        self.id = f"c{child.number}"
        self.stream: SocketStream = SocketStream(bridge)
        self.limits = limits
        self.layers: Mapping[str, str] = {}
        self.backend = "process"

    def accept(self, layers: Mapping[str, str]) -> None:
        """Record the layers named in Hello.

        Raises:
            SandboxUnavailable: a required layer is not live.
        """
        check_layers(self._required, layers, {})
        self.layers = dict(layers)

    def is_alive(self) -> bool:
        return not (self._child.is_over or self._is_killed or self._is_closed or self._hangup.poll(0))

    async def prepare(self, limits: Limits) -> None:
        """Lower its rlimits to those of its run. The run's monitor enforces the other limits."""
        if limits is not self.limits:
            await self._zygote.lower(self._child, asdict(rlimits_for(limits)))

    def read_output(self) -> tuple[bytes, bytes]:
        if self._is_closed:
            return b"", b""
        return read_available(self._raw_output[0]), read_available(self._raw_output[1])

    def _tell(self, word: bytes) -> bool:
        """Write to the supervisor's control pipe. Return False when the supervisor is gone."""
        self.stream.expect_nothing()
        try:
            return not self._is_closed and os.write(self._control_pipe, word) > 0
        except OSError:
            return False

    def kill(self) -> None:
        """Have the supervisor kill every process inside, without waiting."""
        self._is_killed = True
        self._tell(KILL)

    def kill_now(self) -> None:
        """Have the supervisor kill it, from another thread."""
        with self._closing, suppress(OSError):
            if not self._is_closed:
                os.write(self._control_pipe, KILL)

    def ask_line(self) -> bool:
        """Have the supervisor ask the script which line it is at."""
        return self._tell(ASK)

    interrupted_s = INTERRUPTED_S

    def interrupt(self) -> None:
        """Have the supervisor interrupt the script of a session."""
        self._tell(INTERRUPT)

    async def pause(self) -> bool:
        """Have the supervisor stop every process inside until `unpause` or the end."""
        return self.is_alive() and self._tell(FREEZE)

    async def unpause(self) -> None:
        self._tell(THAW)

    def sample(self, *, brief: bool = False, last: bool = False) -> Sample:
        row = self._usage.measure(self._child.number, self._child.supervisor, is_end=brief or last)
        if row is not None:
            cpu_s, memory_bytes, processes = row
            before = self._sample
            self._sample = Sample(
                max(before.cpu_s, cpu_s),
                max(before.peak_memory_bytes, memory_bytes),
                max(1, processes),
                max(before.peak_processes, processes),
            )
        return self._sample

    def cpu_now(self) -> float | None:
        """Return the CPU seconds that its process tree has used. Any thread may call it."""
        row = self._usage.measure(self._child.number, self._child.supervisor)
        return row[0] if row is not None else None

    async def ended(self) -> Exit:
        child = self._child
        with anyio.move_on_after(END_S, shield=True):
            while not child.is_over:
                with anyio.move_on_after(REPORT_S) as scope:
                    await child.changed.wait()
                if scope.cancelled_caught:
                    if self._is_killed and child.is_stopped:
                        child.end_by_force()
                    self._zygote.note_exit(child)
        return child.end or Exit(problem=child.problem or "its supervisor did not report how it ended")

    async def destroy(self) -> None:
        """Kill every process inside, remove its files and free every resource. Safe to call twice.

        Cancellation: shielded, and bounded: a zygote that does not report the end is killed with all its sandboxes.
        """
        self.kill()
        await self.ended()
        self._close()
        self._usage.forget(self._child.number)
        if self._child.end is None:
            self._child.end_by_force()
        if not self._child.is_over:
            self._zygote.abort()

    def _close(self) -> None:
        """Close all descriptors, which ends the sandbox."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            self.stream.close()
            for descriptor in (*self._raw_output, self._control_pipe):
                os.close(descriptor)


FRESH_S = 0.02
"""A measurement of all sandboxes is used again for this long: it reads every process of the container."""


class ContainedUsage:
    """The latest measurement of every sandbox of one backend. Any thread may ask for it."""

    def __init__(self) -> None:
        self.process_usage = ProcessUsage()
        self._supervisors: dict[int, int] = {}
        self._rows: dict[int, tuple[float, int, int]] = {}
        self._measured_at_s = 0.0
        self._lock = threading.Lock()

    def measure(self, number: int, supervisor: int, *, is_end: bool = False) -> tuple[float, int, int] | None:
        """Return what `ProcessUsage.measure` does for a sandbox; None when it has ended.

        `supervisor`: the process id of its supervisor; 0 when that has ended. `is_end`: a script has ended, and what
        was measured when it began does not do.
        """
        with self._lock:
            if not supervisor:
                return None
            is_known = self._supervisors.get(supervisor) == number
            self._supervisors[supervisor] = number
            if is_end or not is_known or time.monotonic() - self._measured_at_s >= FRESH_S:
                self._rows = self.process_usage.measure(self._supervisors)
                self._measured_at_s = time.monotonic()
            return self._rows.get(number)

    def forget(self, number: int) -> None:
        with self._lock:
            self._supervisors = {pid: each for pid, each in self._supervisors.items() if each != number}
            self.process_usage.forget(number)


class ContainedBackend(Backend):
    """Starts sandboxes by forking a zygote that has no namespaces of its own."""

    name: ClassVar[str] = "process"
    isolates: ClassVar[bool] = True
    descriptors_per_sandbox: ClassVar[int] = 5
    unsupported: ClassVar[Mapping[str, str]] = {
        "cpu_cores": 'profile="container" has no cgroup to bound processors; bound those of the container'
    }

    def __init__(
        self,
        *,
        policy: Policy | None = None,
        packages: Path | None = None,
        preload: Sequence[str] = (),
        python: str | None = None,
        frame_bytes: int | None = None,
        is_alone: bool = False,
    ) -> None:
        """`frame_bytes`: of the first runs; None: the default of `Limits`. `is_alone`: nothing else is in this
        container, so a policy may do without Landlock, as gVisor has none."""
        self.policy: Policy = policy or Policy(profile="container")
        self._packages, self.preload, self.python = packages, tuple(preload), python
        self._frame_bytes = frame_bytes or Limits().frame_bytes
        self._unscoped = is_alone and "landlock" not in self.policy.require
        self._usage = ContainedUsage()
        self._zygotes = Zygotes(self._start_zygote)

    async def open(self) -> None:
        """Get ready to start sandboxes.

        Raises:
            SandboxUnavailable: this machine cannot; says why.
        """
        await self._zygotes.open()
        try:
            await self._zygotes.living(self._frame_bytes)
        except BaseException:
            await self.close()
            raise

    async def start(self, limits: Limits) -> ContainedSandbox:
        """Fork one sandbox.

        Raises:
            SandboxUnavailable: nothing was started and nothing needs cleaning up.
        """
        return await self._zygotes.fork(functools.partial(self._fork_one, limits), limits.frame_bytes)

    async def _fork_one(self, limits: Limits, zygote: ContainedZygote) -> ContainedSandbox:
        with ExitStack() as theirs, ExitStack() as ours:
            bridge, guest_bridge = socket.socketpair()
            ours.enter_context(bridge)
            theirs.enter_context(guest_bridge)
            out, guest_out = open_pipe(ours, theirs)
            err, guest_err = open_pipe(ours, theirs)
            guest_control, control = open_pipe(theirs, ours)
            request = {
                "rlimits": asdict(rlimits_for(limits)),
                "room": {"disk_bytes": limits.disk_bytes, "inodes": limits.inodes},
            }
            child = await zygote.fork(request, [guest_bridge.fileno(), guest_out, guest_err, guest_control])
            ours.pop_all()
        return ContainedSandbox(
            child,
            zygote,
            bridge=bridge,
            raw_output=(out, err),
            control_pipe=control,
            usage=self._usage,
            limits=limits,
            required=self.policy.require,
        )

    async def _start_zygote(self, frame_bytes: int) -> ContainedZygote:
        settings = {
            "frame_bytes": frame_bytes,
            "environment": self.policy.environment(),
            "preload": [*PRELOAD[self.policy.lint], *self.preload],
            "unscoped": self._unscoped,
        }
        place = root_filesystem.in_place(self._packages, ("RestrictedPython",), self.python)
        zygote = ContainedZygote.spawn(place, settings, self.policy.hash_seed, self._usage.process_usage)
        ready = await zygote.wait_ready()
        try:
            check_layers(self.policy.require, ready["layers"], ready["lacks"])
        except SandboxUnavailable:
            zygote.kill()
            raise
        zygote.start_s = self.start_s
        return zygote

    async def close(self) -> None:
        await self._zygotes.close(ContainedZygote.aclose)
