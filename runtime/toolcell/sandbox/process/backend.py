"""The process backend: sandboxes as isolated processes, the default on Linux.

It starts a zygote, and for each sandbox makes descriptors and a cgroup and requests a fork.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

import anyio
from anyio.abc import TaskGroup

from toolcell.config import Limits, Policy
from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.process import cgroup_manager, root_filesystem
from toolcell.sandbox.process.cgroup_manager import Cgroup, CgroupManager, NoLocation
from toolcell.sandbox.process.sandbox import ProcessSandbox, rlimits_for
from toolcell.sandbox.process.zygote import ZygoteProcess
from toolcell.sandbox.stream import SocketStream
from toolcell_bridge.guest.lint import PRELOAD

_id_blocks = itertools.count(os.getpid())
"""Numbers for the id blocks of zygotes. They start at our pid, so that two hosts seldom choose the same block."""


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
        self._cgroups: CgroupManager | NoLocation | None = None
        self._starting: anyio.Lock | None = None

    async def open(self) -> None:
        """Start the zygote.

        Raises:
            SandboxUnavailable: isolation cannot be set up here; the message says why and what to do.
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
        # Always in the guest package, so that a run may choose a lint profile. Preloaded only if every run has one.
        extras = ("RestrictedPython",)
        preload = (*PRELOAD[self._policy.lint], *self._preload)
        manager = self._cgroups
        where = manager.directories if isinstance(manager, CgroupManager) else ((), "")
        zygote = ZygoteProcess.spawn(
            root_filesystem.build(self._packages, extras, self._python),
            preload,
            next(_id_blocks),
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
        # The zygote died, and every sandbox of it. Start a new one.
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
        """Remove every cgroup; False when a process in one does not die."""
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
