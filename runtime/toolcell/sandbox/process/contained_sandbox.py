"""One sandbox of the profile `container`: its limits, its measurements and its end.

Sandboxes are measured by their process trees: no cgroup can be had there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import asdict

import anyio

from toolcell.config import Limits
from toolcell.sandbox.backend import Exit, Sample
from toolcell.sandbox.forked import SupervisedSandbox, SupervisorChannel
from toolcell.sandbox.interpreter import plan_rlimits
from toolcell.sandbox.process.contained_zygote import ContainedProcess, ContainedZygote
from toolcell.sandbox.shortages import check_layers
from toolcell_bridge.entry.process_usage import ProcessUsage
from toolcell_bridge.isolation.rlimits import RlimitPlan

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


class ContainedSandbox(SupervisedSandbox):
    """One guest and its supervisor."""

    def __init__(
        self,
        child: ContainedProcess,
        zygote: ContainedZygote,
        channel: SupervisorChannel,
        usage: ContainedUsage,
        limits: Limits,
        required: frozenset[str],
    ) -> None:
        super().__init__(child, channel, ident=f"c{child.number}", limits=limits, required=required)
        self._child, self._zygote, self._channel, self._usage = child, zygote, channel, usage
        self._sample = Sample()
        self.backend = "process"

    def accept(self, layers: Mapping[str, str]) -> None:
        """Record the layers named in Hello.

        Raises:
            SandboxUnavailable: a required layer is not live.
        """
        check_layers(self.required, layers, {})
        self.layers = dict(layers)

    async def prepare(self, limits: Limits) -> None:
        """Lower its rlimits to those of its run. The run's monitor enforces the other limits."""
        if limits is not self.limits:
            await self._zygote.lower(self._child, asdict(rlimits_for(limits)))

    def sample(self, *, brief: bool = False, last: bool = False) -> Sample:
        """Measure its process tree now."""
        row = self._usage.measure(self._child.number, self._child.supervisor, is_end=brief or last)
        if row is not None:
            cpu_s, memory_bytes, processes, _ = row
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
                    if self.is_killed and child.is_stopped:
                        child.end_by_force()
                    self._zygote.note_exit(child)
        return child.end or Exit(problem=child.problem or "its supervisor did not report how it ended")

    async def destroy(self) -> None:
        """Kill every process inside, remove its files and free every resource. Safe to call twice.

        Cancellation: shielded, and bounded: a zygote that does not report the end is killed with all its sandboxes.
        """
        self.kill()
        await self.ended()
        self._channel.close()
        self._usage.forget(self._child.number)
        if self._child.end is None:
            self._child.end_by_force()
        if not self._child.is_over:
            self._zygote.abort()


FRESH_S = 0.02
"""A measurement of all sandboxes is used again for this long: it reads every process of the container."""


class ContainedUsage:
    """The latest measurement of every sandbox of one backend. Any thread may ask for it."""

    def __init__(self) -> None:
        self.process_usage = ProcessUsage()
        self._supervisors: dict[int, int] = {}
        self._rows: dict[int, tuple[float, int, int, int]] = {}
        self._measured_at_s = 0.0
        self._lock = threading.Lock()

    def measure(self, number: int, supervisor: int, *, is_end: bool = False) -> tuple[float, int, int, int] | None:
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
