"""One sandbox of the process backend: its limits, its measurements and its end."""

from __future__ import annotations

import functools
import os
import resource
import select
import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from toolcell.config import MIB, Limits
from toolcell.sandbox.backend import INTERRUPTED_S, Exit, Sample, Sandbox
from toolcell.sandbox.interpreter import plan_rlimits
from toolcell.sandbox.process.cgroup import MOST_KEPT_AHEAD, REMEMBERED_BYTES, Cgroup
from toolcell.sandbox.process.cgroup_manager import CgroupManager
from toolcell.sandbox.process.namespaced_zygote import NamespacedProcess
from toolcell.sandbox.process.signals import GONE, signal_all, tree_of
from toolcell.sandbox.shortages import check_layers
from toolcell.sandbox.stream import SocketStream, read_available
from toolcell.support import daemon_threads, event_loop
from toolcell_bridge.guest.errors import ASK_SIGNAL
from toolcell_bridge.guest.interrupts import INTERRUPT_SIGNAL
from toolcell_bridge.isolation.rlimits import RlimitPlan

if TYPE_CHECKING:
    from toolcell.sandbox.process.process_watch import TreeWatch

END_S = 5.0
"""How long a killed sandbox may take to be reaped. The kernel does it in well under a millisecond."""

REPORT_STEPS, REPORT_STEP_S = 20, 0.1
"""How long the zygote may take to report the end of a sandbox that is dead. In steps: when this process itself stands
still for a while, that is one of them."""

THREADS = 4
"""That make the kernel forget names at the same time."""

FROZEN_BYTES = 32 * MIB
"""Most memory that a sandbox may have used and still be frozen."""

LOWERED = ("RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_NPROC", "RLIMIT_NOFILE")
"""Limits of a running sandbox that are lowered to those of its run."""

NPROC_FACTOR = 2
"""RLIMIT_NPROC is this many times the cgroup's limit, so that the cgroup refuses first: it counts refusals. The kernel
counts every fork in progress for RLIMIT_NPROC, also those about to be refused, so a fork bomb is briefly far above."""


def rlimits_for(limits: Limits, has_cgroup: bool, *, executes: bool = False) -> RlimitPlan:
    """Choose the per-process limits of a sandbox. `executes`: its script may execute programs."""
    processes = limits.processes * (NPROC_FACTOR if has_cgroup else 1)
    return plan_rlimits(limits, processes, is_counted=has_cgroup, executes=executes)


class ProcessSandbox(Sandbox):
    """One forked child of the zygote."""

    def __init__(
        self,
        child: NamespacedProcess,
        stream: SocketStream,
        output: tuple[int, int],
        limits: Limits,
        ident: str,
        required: frozenset[str],
        cgroup: Cgroup | None,
        cgroups: CgroupManager | None,
    ) -> None:
        self._child = child
        self._output = output
        self._closed = False
        """Its descriptors are closed."""
        self.id = ident
        self.stream: SocketStream = stream
        self.limits = limits
        self.layers: Mapping[str, str] = {}
        self.backend = "process"
        self._required = required
        self._end = select.poll()
        self._sample = Sample()
        self._tree: TreeWatch | None = None
        self._cgroup, self._cgroups = cgroup, cgroups
        self._scope_type = event_loop.scope_type()

    @property
    def outside_layers(self) -> Mapping[str, str]:
        """Layers that it has from outside, of which its guest does not tell."""
        return {"cgroup": self._cgroups.description} if self._cgroups is not None else {}

    def watch_end(self) -> None:
        """Start to watch for its end. Call it when its pidfd is known."""
        self._end.register(self._child.pidfd, select.POLLIN)

    def accept(self, layers: Mapping[str, str]) -> None:
        """Record the layers named in Hello.

        Raises:
            SandboxUnavailable: a required layer is not live.
        """
        check_layers(self._required, layers.keys() | ({"cgroup"} if self._cgroup is not None else set()), {})
        self.layers = {**layers, **self.outside_layers}
        if self._cgroups is None:
            from toolcell.sandbox.process.process_watch import TreeWatch

            # Without a cgroup the watch is what bounds memory: a start that cannot have one fails.
            with suppress(*GONE):
                self._tree = TreeWatch(self.pid, self.limits.memory_bytes)
        elif self._cgroup is not None:
            # What the end of a run reads is opened now, while nobody waits.
            self._cgroup.keep_open(True, most=MOST_KEPT_AHEAD)
            self.sample(brief=True)

    @functools.cached_property
    def pid(self) -> int:
        """Its process id in our namespace. Valid until the zygote reports that it was reaped."""
        with open(f"/proc/self/fdinfo/{self._child.pidfd}", encoding="ascii") as info:
            return next(int(line.split()[1]) for line in info if line.startswith("Pid:"))

    def is_alive(self) -> bool:
        """Whether it still runs. Its pidfd becomes readable when it ends, before the zygote reports it."""
        child = self._child
        return not child.is_over and not self._closed and not self._end.poll(0)

    async def prepare(self, limits: Limits) -> None:
        """Lower its limits to those of its run, from outside."""
        if limits is self.limits or self._closed:
            return
        if self._cgroup is not None and self._cgroups is not None:
            self._cgroup.set_limits(limits.memory_bytes, limits.processes)
            if limits.cpu_cores != self.limits.cpu_cores:
                self._cgroups.set_processors(self._cgroup, limits.cpu_cores)
        elif self._tree is not None:
            self._tree.memory_bytes = limits.memory_bytes
        for name, value in rlimits_for(limits, self._cgroup is not None).rows():
            if name in LOWERED:
                resource.prlimit(self.pid, getattr(resource, name), (value, value))

    def read_output(self) -> tuple[bytes, bytes]:
        """Read what was written raw to descriptors 1 and 2 so far, without waiting."""
        if self._closed:  # the numbers may be those of another sandbox's bridge
            return b"", b""
        return read_available(self._output[0]), read_available(self._output[1])

    def sample(self, *, brief: bool = False, last: bool = False) -> Sample:
        """Measure it now, by its cgroup or its process tree."""
        if self._cgroup is None:
            return self._tree.look() if self._tree is not None else self._sample
        try:
            if brief:
                cpu_s, peak_memory_bytes = self._cgroup.consumed()
                before = self._sample
                self._sample = Sample(
                    cpu_s or 0.0,
                    peak_memory_bytes or 0,
                    processes=before.processes,
                    peak_processes=before.peak_processes,
                    memory_kills=before.memory_kills,
                    refused_processes=self._cgroup.count_refused(),
                )
                return self._sample
            usage = self._cgroup.usage()
        except OSError:
            return self._sample
        self._sample = Sample(
            cpu_s=usage.cpu_s or 0.0,
            peak_memory_bytes=usage.peak_memory_bytes or 0,
            processes=usage.current_processes,
            peak_processes=max(usage.peak_processes or usage.current_processes, self._sample.peak_processes),
            memory_kills=usage.oom_kills,
            refused_processes=usage.processes_refused,
        )
        return self._sample

    def measure_often(self, is_often: bool) -> None:
        """Make measurements cheaper, at the cost of some descriptors while few sandboxes ask for it; until `pause`."""
        if self._cgroup is not None:
            self._cgroup.keep_open(is_often)

    def kill(self) -> None:
        """Kill every process inside at once: the child is init of its pid namespace."""
        if self._can_be_signalled():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._child.pidfd, signal.SIGKILL)

    kill_now = kill

    def _can_be_signalled(self) -> bool:
        # A destroyed one has no pidfd any more: its number may be that of another sandbox.
        return self._child.pidfd >= 0 and self._child.end is None and not self._closed

    def ask_line(self) -> bool:
        """Have the main thread of the script write its frames to descriptor 2."""
        self._signal(ASK_SIGNAL)
        return True

    interrupted_s = INTERRUPTED_S

    def interrupt(self) -> None:
        """Interrupt the script of a session."""
        self._signal(INTERRUPT_SIGNAL)

    def _signal(self, number: int) -> None:
        if self._can_be_signalled():
            with suppress(OSError):
                signal.pidfd_send_signal(self._child.pidfd, number)

    def cpu_now(self) -> float | None:
        """Return the CPU seconds that its process tree has used. Any thread may call it."""
        if self._cgroup is None:
            return self._tree.look().cpu_s if self._tree is not None else None
        try:
            return self._cgroup.consumed()[0]
        except OSError:
            return None

    async def pause(self) -> bool:
        """Stop every process inside until `unpause` or the end; False when some may go on.

        Signals stop also a process whose host dies: its zygote ends with the host, and the kernel kills what is below.
        """
        self.stream.expect_nothing()
        self.measure_often(False)
        return self._stop_all(True)

    async def unpause(self) -> None:
        """Let everything run again."""
        self._stop_all(False)

    def freeze(self) -> bool:
        """Stop everything inside. False when something may go on, and when the next run may need the memory."""
        if self._cgroup is None or self._sample.peak_memory_bytes > FROZEN_BYTES:
            return False
        self.stream.expect_nothing()
        return self._stop_all(True)

    def _stop_all(self, is_paused: bool) -> bool:
        cgroup, number = self._cgroup, signal.SIGSTOP if is_paused else signal.SIGCONT
        if not self._can_be_signalled():
            return False
        try:
            if cgroup is not None and cgroup.freeze(is_paused):
                return True
            signal.pidfd_send_signal(self._child.pidfd, number)  # a fork in progress is counted already, or fails
            if cgroup is None:
                return signal_all(lambda: tree_of(self.pid), number)
            return cgroup.count_processes() == 1 or signal_all(cgroup.pids, number)
        except OSError:
            return False

    async def ended(self) -> Exit:
        """Wait until its main process has ended, at most a few seconds; returns how it ended."""
        child = self._child
        if child.pidfd < 0:
            return Exit(problem=child.problem or "it was never started")
        with self._scope_type(shield=True):
            for _ in range(REPORT_STEPS):
                if await child.wait_ended(REPORT_STEP_S):
                    break
            if self.is_alive():
                await child.wait_ended(END_S)
        return child.end or Exit(problem=child.problem or "its zygote did not report how it ended")

    async def destroy(self) -> None:
        """Kill every process inside and free every resource. Safe to call twice.

        Cancellation: shielded, and bounded: a cgroup that will not empty is left to `ProcessBackend.close`.
        """
        self.kill()
        self.stream.close()
        await self.ended()
        if not self._closed:
            self._closed = True
            if self._cgroup is not None:
                await self._remove(self._cgroup)
            for descriptor in (*self._output, self._child.pidfd):
                if descriptor >= 0:
                    os.close(descriptor)

    async def _remove(self, cgroup: Cgroup) -> None:
        if self._sample.peak_memory_bytes > REMEMBERED_BYTES:
            # Without memory or processes there is no thread for it. The names stay until memory is short.
            with anyio.CancelScope(shield=True), suppress(OSError, RuntimeError, MemoryError):
                await daemon_threads.run_sync(cgroup.drop_names, limiter=_forgetting())
        if not cgroup.remove():
            with anyio.move_on_after(END_S, shield=True):
                await self._empty(cgroup)

    @staticmethod
    async def _empty(cgroup: Cgroup) -> None:
        """Remove a cgroup whose processes were killed; the kernel needs a moment to remove them."""
        wait_s = 0.001
        while not cgroup.remove():
            cgroup.kill()
            await anyio.sleep(wait_s)
            wait_s = min(2 * wait_s, 0.1)


_forgets: anyio.lowlevel.RunVar[anyio.CapacityLimiter] = anyio.lowlevel.RunVar("toolcell_forgetting_names")


def _forgetting() -> anyio.CapacityLimiter:
    """Return what bounds the threads that drop names. The default limiter is the program's, which may use it up."""
    try:
        return _forgets.get()
    except LookupError:
        _forgets.set(made := anyio.CapacityLimiter(THREADS))
        return made
