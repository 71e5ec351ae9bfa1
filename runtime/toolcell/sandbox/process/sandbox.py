"""One sandbox of the process backend: its limits, its measurements and its end."""

from __future__ import annotations

import functools
import os
import resource
import select
import signal
from collections.abc import Mapping
from contextlib import suppress
from math import ceil

import anyio
import psutil

from toolcell.config import Limits
from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.backend import FROZEN_BYTES, Exit, Sample
from toolcell.sandbox.interpreter import ADDRESS_SLACK_BYTES
from toolcell.sandbox.process.cgroup import Cgroup
from toolcell.sandbox.process.process_watch import TreeWatch
from toolcell.sandbox.process.zygote import SandboxProcess
from toolcell.sandbox.stream import SocketStream, read_available
from toolcell_bridge.isolation.rlimits import RlimitPlan

END_S = 5.0
"""How long a killed sandbox may take to be reaped. The kernel does it in well under a millisecond."""

LOWERED = ("RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_NPROC", "RLIMIT_NOFILE")
"""Limits of a running sandbox that are lowered to those of its run."""

NPROC_FACTOR = 2
"""RLIMIT_NPROC is this many times the cgroup's limit, so that the cgroup refuses first: it counts refusals. The kernel
counts every fork in progress for RLIMIT_NPROC, also those about to be refused, so a fork bomb is briefly far above."""


def rlimits_for(limits: Limits, has_cgroup: bool) -> RlimitPlan:
    """Choose the per-process limits that enforce `limits` as far as rlimits can."""
    return RlimitPlan(
        cpu_s=ceil(limits.cpu_s) + 1,
        address_space_bytes=limits.memory_bytes + ADDRESS_SLACK_BYTES,
        processes=limits.processes * (NPROC_FACTOR if has_cgroup else 1),
        open_files=limits.open_files,
        file_size_bytes=limits.disk_bytes,
    )


class ProcessSandbox:
    """One forked child of the zygote."""

    def __init__(
        self,
        child: SandboxProcess,
        stream: SocketStream,
        output: tuple[int, int],
        limits: Limits,
        ident: str,
        required: frozenset[str],
        cgroup: Cgroup | None,
        cgroup_kind: str,
    ) -> None:
        self._child = child
        self._output = output
        self._closed = False
        self.id = ident
        self.stream = stream
        self.limits = limits
        self.layers: Mapping[str, str] = {}
        self.backend = "process"
        self._required = required
        self._end = select.poll()
        self._sample = Sample()
        self._tree: TreeWatch | None = None
        self._cgroup, self._cgroup_kind = cgroup, cgroup_kind

    def watch_end(self) -> None:
        """Start to watch for its end. Call it when its pidfd is known."""
        self._end.register(self._child.pidfd, select.POLLIN)

    def accept(self, layers: Mapping[str, str]) -> None:
        """Record the layers named in Hello.

        Raises:
            SandboxUnavailable: a required layer is not live.
        """
        live = layers.keys() | ({"cgroup"} if self._cgroup is not None else set())
        missing = sorted(self._required - live)
        if missing:
            raise SandboxUnavailable(
                f"required isolation is not live: {', '.join(missing)}; `toolcell doctor` says why and how to get it"
            )
        self.layers = dict(layers)
        if self._cgroup is not None:
            self.layers["cgroup"] = self._cgroup_kind
        else:
            with suppress(psutil.Error, OSError):
                self._tree = TreeWatch(self.pid, self.limits.memory_bytes)

    @functools.cached_property
    def pid(self) -> int:
        """Its process id in our namespace. Valid until the zygote reports that it was reaped."""
        with open(f"/proc/self/fdinfo/{self._child.pidfd}", encoding="ascii") as info:
            return next(int(line.split()[1]) for line in info if line.startswith("Pid:"))

    def is_alive(self) -> bool:
        """Whether it still runs. Its pidfd becomes readable when it ends, before the zygote reports it."""
        return self._child.end is None and self._child.problem is None and not self._end.poll(0)

    async def prepare(self, limits: Limits) -> None:
        """Lower its limits to those of its run, from outside."""
        if limits is self.limits:
            return
        if self._cgroup is not None:
            self._cgroup.set_limits(limits.memory_bytes, limits.processes)
        elif self._tree is not None:
            self._tree.memory_bytes = limits.memory_bytes
        for name, value in rlimits_for(limits, self._cgroup is not None).rows():
            if name in LOWERED:
                resource.prlimit(self.pid, getattr(resource, name), (value, value))

    def read_output(self) -> tuple[bytes, bytes]:
        """Read what was written raw to descriptors 1 and 2 so far, without waiting."""
        return read_available(self._output[0]), read_available(self._output[1])

    def sample(self, *, brief: bool = False, last: bool = False) -> Sample:
        """Measure it now, by its cgroup or its process tree."""
        if self._cgroup is None:
            return self._tree.look(everything=last) if self._tree is not None else self._sample
        try:
            if brief:
                cpu_s, peak_memory_bytes = self._cgroup.consumed()
                before = self._sample
                self._sample = Sample(
                    cpu_s or 0.0,
                    peak_memory_bytes or 0,
                    before.processes,
                    before.peak_processes,
                    before.memory_kills,
                    before.refused_processes,
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

    def kill(self) -> None:
        """Kill every process inside at once: the child is init of its pid namespace."""
        if self._child.pidfd >= 0 and self._child.end is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._child.pidfd, signal.SIGKILL)

    def freeze(self) -> bool:
        """Stop its only process; False when it may have more than one.

        A stop signal from outside also stops the init of a pid namespace. A fork in progress is already counted when
        the signal is sent, or fails because of it; so the count includes everything that can still run.
        """
        if self._cgroup is None or self._child.pidfd < 0 or self._child.end is not None:
            return False
        if self._sample.peak_memory_bytes > FROZEN_BYTES:
            return False
        self.stream.rest()
        try:
            signal.pidfd_send_signal(self._child.pidfd, signal.SIGSTOP)
            return self._cgroup.count_processes() == 1
        except OSError:
            return False

    async def ended(self) -> Exit:
        """Wait until its main process has ended, at most a few seconds; returns how it ended."""
        with anyio.move_on_after(END_S, shield=True):
            await self._child.wait_ended()
        end = self._child.end
        if end is None:
            return Exit()
        code = os.waitstatus_to_exitcode(end.status)
        return Exit(-code if code < 0 else None, code if code >= 0 else None, end.cpu_s, end.peak_memory_bytes)

    async def destroy(self) -> None:
        """Kill every process inside and free every resource. Safe to call twice.

        Cancellation: shielded, and bounded: a cgroup that will not empty is left to `ProcessBackend.close`.
        """
        self.kill()
        self.stream.close()
        await self.ended()
        if not self._closed:
            self._closed = True
            if self._cgroup is not None and not self._cgroup.remove():
                with anyio.move_on_after(END_S, shield=True):
                    await self._empty(self._cgroup)
            for descriptor in (*self._output, self._child.pidfd):
                if descriptor >= 0:
                    os.close(descriptor)

    @staticmethod
    async def _empty(cgroup: Cgroup) -> None:
        """Remove a cgroup whose processes were killed; the kernel needs a moment to remove them."""
        wait_s = 0.001
        while not cgroup.remove():
            cgroup.kill()
            await anyio.sleep(wait_s)
            wait_s = min(2 * wait_s, 0.1)
