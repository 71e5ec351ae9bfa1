"""The process backend of `Policy(profile="container")`: it needs no namespace, no mount and no privilege.

Sandboxes are isolated by what a process can apply to itself: Landlock with its scopes, seccomp, rlimits, no_new_privs
and the loss of all capabilities. They share the process ids, the network devices and the file system of their host's
container. Landlock and seccomp keep them from these; tests/PROMISES.md says what is left.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

import anyio
from anyio.abc import TaskGroup

from toolcell.config import Limits, Policy
from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.backend import Backend
from toolcell.sandbox.forked import SupervisorChannel
from toolcell.sandbox.process import root_filesystem
from toolcell.sandbox.process.contained_sandbox import ContainedSandbox, ContainedUsage, rlimits_for
from toolcell.sandbox.process.contained_zygote import ContainedZygote
from toolcell.sandbox.shortages import check_layers
from toolcell.sandbox.stream import open_pipe
from toolcell_bridge.guest.lint_profiles import PRELOAD


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
        channel = SupervisorChannel(bridge, (out, err), control)
        return ContainedSandbox(
            child, zygote, channel=channel, usage=self._usage, limits=limits, required=self.policy.require
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
