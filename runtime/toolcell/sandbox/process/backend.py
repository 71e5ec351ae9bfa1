"""Sandboxes as isolated processes: the backend that a Runtime uses by default on Linux.

Puts together a zygote, descriptors and a cgroup per sandbox. Enforcement is the kernel's; this file says how much.
"""

from __future__ import annotations

import functools
import itertools
import os
import resource
import select
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import ClassVar

import anyio
import psutil
from anyio.abc import TaskGroup

from toolcell.config import Limits, Policy
from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.backend import FROZEN_BYTES, Exit, Sample
from toolcell.sandbox.interpreter import ADDRESS_SLACK_BYTES
from toolcell.sandbox.process import cgroup_manager, root_filesystem
from toolcell.sandbox.process.cgroup_manager import Cgroup, CgroupManager, NoPlace
from toolcell.sandbox.process.process_watch import TreeWatch
from toolcell.sandbox.process.zygote import SandboxProcess, ZygoteProcess
from toolcell.sandbox.stream import SocketStream, read_available
from toolcell_bridge.guest.lint import PRELOAD
from toolcell_bridge.isolation.rlimits import RlimitPlan

END_S = 5.0
"""How long a killed sandbox may take to be reaped. The kernel does it in well under a millisecond."""

_slots = itertools.count(os.getpid())


LOWERED = ("RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_NPROC", "RLIMIT_NOFILE")
"""Ceilings of a running sandbox that follow the limits of the run it is handed to."""

NPROC_FACTOR = 2
"""RLIMIT_NPROC over the cgroup's ceiling, so that it is the cgroup that refuses: it counts refusals. The kernel counts
every fork under way for RLIMIT_NPROC, also those about to be refused, so a storm is briefly far above the ceiling."""


def rlimits_for(limits: Limits, has_cgroup: bool) -> RlimitPlan:
    """Per-process ceilings that hold a sandbox to `limits` as far as rlimits can."""
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
        """Begin to notice its end; once its pidfd is known."""
        self._end.register(self._child.pidfd, select.POLLIN)

    def accept(self, layers: Mapping[str, str]) -> None:
        """Take the layers named in Hello; refuse to run without a required one."""
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
        """Its process id as this process sees it; valid while it is not reaped, which the zygote reports."""
        with open(f"/proc/self/fdinfo/{self._child.pidfd}", encoding="ascii") as info:
            return next(int(line.split()[1]) for line in info if line.startswith("Pid:"))

    def is_alive(self) -> bool:
        """False once it has ended, reported or not: its pidfd turns readable then."""
        return self._child.end is None and self._child.problem is None and not self._end.poll(0)

    async def prepare(self, limits: Limits) -> None:
        """Lower its limits to those of the run it is handed to, from outside."""
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
        """Take what was written raw to descriptors 1 and 2 so far, without waiting."""
        return read_available(self._output[0]), read_available(self._output[1])

    def sample(self, *, brief: bool = False, last: bool = False) -> Sample:
        """Measure it now, from its cgroup."""
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
        """Stop its one process where it is; False when it cannot be said to have only one.

        A stop sent from outside holds for the first process of a pid namespace too. A fork that was under way has
        been counted when the signal is on its way, or fails for it; so the count is of what can still run.
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
        """Wait until its main process has ended, at most a few seconds, and say how."""
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
        """Everything inside has been killed; the kernel takes a moment to count it out."""
        wait_s = 0.001
        while not cgroup.remove():
            cgroup.kill()
            await anyio.sleep(wait_s)
            wait_s = min(2 * wait_s, 0.1)


class ProcessBackend:
    """Starts sandboxes by forking a zygote."""

    name: ClassVar[str] = "process"
    isolates: ClassVar[bool] = True

    def __init__(
        self,
        *,
        policy: Policy | None = None,
        packages: Path | None = None,
        preload: Sequence[str] = (),
        python: str | None = None,
    ) -> None:
        self._policy = policy or Policy()
        self._packages = packages
        self._preload = tuple(preload)
        self._python = python
        self._environment = self._policy.environment()
        self._zygote: ZygoteProcess | None = None
        self._tasks: TaskGroup | None = None
        self._count = itertools.count(1)
        self._cgroups: CgroupManager | NoPlace | None = None
        self._starting: anyio.Lock | None = None

    async def open(self) -> None:
        """Start the zygote.

        Raises:
            SandboxUnavailable: a wall cannot be built here; says which and what to do.
        """
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._cgroups = cgroup_manager.discover()
        if isinstance(self._cgroups, CgroupManager):
            self._cgroups.reap_orphans(within_s=1.0)
        self._starting = anyio.Lock()
        try:
            await self._start_zygote()
        except BaseException:
            self._close_cgroups()
            self._tasks.cancel_scope.cancel()
            await self._tasks.__aexit__(None, None, None)
            self._tasks = None
            raise

    async def _start_zygote(self) -> None:
        # Always there, so that one run may ask for a profile; imported ahead of time only when every run has one.
        extras = ("RestrictedPython",)
        preload = (*PRELOAD[self._policy.lint], *self._preload)
        manager = self._cgroups
        where = manager.directories if isinstance(manager, CgroupManager) else ((), "")
        zygote = ZygoteProcess.spawn(
            root_filesystem.build(self._packages, extras, self._python),
            preload,
            next(_slots),
            self._policy.hash_seed,
            where,
        )
        await zygote.wait_ready()
        if zygote.problems:
            zygote.kill()
            problems = "; ".join(f"{name}: {why}" for name, why in zygote.problems.items())
            raise SandboxUnavailable(f"preloading failed: {problems}")
        assert self._tasks is not None
        self._tasks.start_soon(zygote.listen)
        self._zygote = zygote

    async def start(self, limits: Limits) -> ProcessSandbox:
        """Fork one sandbox.

        Raises:
            SandboxUnavailable: nothing was started and nothing needs cleaning up.
        """
        try:
            return await self._fork_one(await self._living_zygote(), limits)
        except SandboxUnavailable:
            if self._zygote is None or not self._zygote.is_dead:
                raise
        # It died under us; every sandbox it had is gone with it, and a new one starts clean.
        return await self._fork_one(await self._living_zygote(), limits)

    async def _living_zygote(self) -> ZygoteProcess:
        if self._zygote is None or self._starting is None:
            raise SandboxUnavailable("the process backend is not open")
        async with self._starting:
            if self._zygote.is_dead:
                await self._zygote.aclose()
                await self._start_zygote()
        return self._zygote

    async def _fork_one(self, zygote: ZygoteProcess, limits: Limits) -> ProcessSandbox:
        bridge, guest_bridge = socket.socketpair()
        out, guest_out = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        err, guest_err = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for descriptor in (guest_out, guest_err):
            os.set_blocking(descriptor, True)
        ident = f"p{next(self._count)}"
        cgroup = self._make_cgroup(ident, limits)
        kind = self._cgroups.description if isinstance(self._cgroups, CgroupManager) else ""
        entries = [os.open(entry, os.O_WRONLY | os.O_CLOEXEC) for entry in cgroup.entries] if cgroup else []
        request = {
            "disk_bytes": limits.disk_bytes,
            "inodes": limits.inodes,
            "frame_bytes": limits.frame_bytes,
            "environment": self._environment,
            "rlimits": asdict(rlimits_for(limits, cgroup is not None)),
        }
        try:
            child = await zygote.fork(request, [guest_bridge.fileno(), guest_out, guest_err, *entries])
        finally:
            guest_bridge.close()
            for descriptor in (guest_out, guest_err, *entries):
                os.close(descriptor)
        sandbox = ProcessSandbox(
            child, SocketStream(bridge), (out, err), limits, ident, self._policy.require, cgroup, kind
        )
        try:
            await child.wait_started()
            sandbox.watch_end()
        except BaseException:
            await sandbox.destroy()
            raise
        return sandbox

    def _make_cgroup(self, name: str, limits: Limits) -> Cgroup | None:
        if not isinstance(self._cgroups, CgroupManager):
            return None
        try:
            return self._cgroups.create(name, limits.memory_bytes, limits.processes)
        except OSError as exc:
            raise SandboxUnavailable(f"a cgroup for the sandbox could not be made: {exc}") from exc

    def _close_cgroups(self) -> bool:
        """Remove all of them; False when something in one would not die."""
        manager, self._cgroups = self._cgroups, None
        return manager.close() if isinstance(manager, CgroupManager) else True

    async def close(self) -> None:
        """End the zygote and everything below it."""
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            await zygote.aclose(self._close_cgroups)
        self._close_cgroups()
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()
            await self._tasks.__aexit__(None, None, None)
            self._tasks = None
