"""The process backend of `Policy(profile="container")`: it needs no namespace, no mount and no privilege.

Sandboxes are isolated by what a process can apply to itself: Landlock with its scopes, seccomp, rlimits, no_new_privs
and the loss of all capabilities. They share the process ids, the network devices and the file system of their host's
container. Landlock and seccomp keep them from these; tests/PROMISES.md says what is left.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

import anyio
from anyio.abc import TaskGroup

from toolcell.config import Limits, Policy
from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.backend import INTERRUPTED_S, Backend, Exit, Sample, Sandbox
from toolcell.sandbox.interpreter import plan_rlimits
from toolcell.sandbox.process import root_filesystem
from toolcell.sandbox.process.contained_zygote import ContainedProcess, ContainedZygote
from toolcell.sandbox.shortages import check_layers
from toolcell.sandbox.stream import SocketStream, open_pipe, read_available
from toolcell_bridge.entry.process_usage import ProcessUsage
from toolcell_bridge.entry.supervisor_protocol import ASK, FREEZE, INTERRUPT, KILL, THAW
from toolcell_bridge.guest.lint_profiles import PRELOAD
from toolcell_bridge.isolation.rlimits import RlimitPlan

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
    """Choose the per-process limits of a sandbox."""
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
        """Return False once its end is known."""
        return not (self._child.is_over or self._is_killed or self._is_closed or self._hangup.poll(0))

    async def prepare(self, limits: Limits) -> None:
        """Lower its rlimits to those of its run. The run's monitor enforces the other limits."""
        if limits is not self.limits:
            await self._zygote.lower(self._child, asdict(rlimits_for(limits)))

    def read_output(self) -> tuple[bytes, bytes]:
        """Take what was written raw to descriptors 1 and 2 so far, without waiting."""
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
        """Let everything run again."""
        self._tell(THAW)

    def sample(self, *, brief: bool = False, last: bool = False) -> Sample:
        """Measure its process tree now."""
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
        """Wait until it has ended, at most a few seconds; returns how."""
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
        """Measure it no more."""
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
        self._tasks: TaskGroup | None = None
        self._zygotes: dict[int, ContainedZygote] = {}
        """By the size of frames, which a zygote is made for."""
        self._starting = anyio.Lock()

    async def open(self) -> None:
        """Get ready to start sandboxes.

        Raises:
            SandboxUnavailable: this machine cannot; says why.
        """
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        try:
            await self._living_zygote(self._frame_bytes)
        except BaseException:
            await self.close()
            raise

    async def start(self, limits: Limits) -> ContainedSandbox:
        """Fork one sandbox.

        Raises:
            SandboxUnavailable: nothing was started and nothing needs cleaning up.
        """
        zygote = await self._living_zygote(limits.frame_bytes)
        try:
            return await self._fork_one(zygote, limits)
        except SandboxUnavailable:
            if not zygote.is_dead:
                raise
        # The zygote died, and every sandbox of it. Start a new one.
        return await self._fork_one(await self._living_zygote(limits.frame_bytes), limits)

    async def _fork_one(self, zygote: ContainedZygote, limits: Limits) -> ContainedSandbox:
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

    async def _living_zygote(self, frame_bytes: int) -> ContainedZygote:
        async with self._starting:
            zygote = self._zygotes.get(frame_bytes)
            if self._tasks is None:
                raise SandboxUnavailable("the process backend is not open")
            if zygote is not None:
                zygote.check()
            if zygote is None or zygote.is_dead:
                if zygote is not None:
                    await zygote.aclose()
                zygote = await self._start_zygote(frame_bytes)
                self._zygotes[frame_bytes] = zygote
                self._tasks.start_soon(zygote.listen)
            return zygote

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
        return zygote

    async def close(self) -> None:
        """End the zygotes and everything below them. Safe to call twice."""
        zygotes, self._zygotes = list(self._zygotes.values()), {}
        for zygote in zygotes:
            await zygote.aclose()
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()
            await self._tasks.__aexit__(None, None, None)
            self._tasks = None
