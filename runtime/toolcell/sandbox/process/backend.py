"""The process backend: sandboxes as isolated processes, the default on Linux.

It starts a zygote, and for each sandbox makes descriptors and a cgroup and requests a fork.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

import anyio
import msgpack
from anyio.abc import TaskGroup

from toolcell.config import Limits, Policy
from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.backend import Backend
from toolcell.sandbox.interpreter import imported_ahead
from toolcell.sandbox.process import cgroup_manager, programs, root_filesystem
from toolcell.sandbox.process.cgroup_manager import Cgroup, CgroupManager, NoLocation
from toolcell.sandbox.process.namespaced_sandbox import ProcessSandbox, rlimits_for
from toolcell.sandbox.process.namespaced_zygote import NamespacedZygote, next_slot
from toolcell.sandbox.shortages import check_layers, describe, unavailable
from toolcell.sandbox.stream import SocketStream, open_pipe
from toolcell_bridge.guest.lint_profiles import PRELOAD


class ProcessBackend(Backend):
    """Starts sandboxes by forking a zygote."""

    name: ClassVar[str] = "process"
    isolates: ClassVar[bool] = True
    descriptors_per_sandbox: ClassVar[int] = 4

    def __init__(
        self,
        *,
        policy: Policy | None = None,
        packages: Path | None = None,
        preload: Sequence[str] = (),
        python: str | None = None,
        program: str = "",
    ) -> None:
        """`program`: the only one that scripts may execute, as they see it. With `Policy(shell=True)` they may many."""
        self.policy: Policy = policy or Policy()
        self._program, self._executes = program, self.policy.shell or bool(program)
        self._packages = packages
        self.preload = tuple(preload)
        self.python = python
        self._environment = (programs.ENVIRONMENT if self.policy.shell else {}) | self.policy.environment()
        self.absent: Mapping[str, str] = {}
        """Layers that this kernel does not have and the policy does not require, and why. Known once it is open."""
        self._zygote: NamespacedZygote | None = None
        self._spawned: NamespacedZygote | None = None
        """Not waited for yet."""
        self._tasks: TaskGroup | None = None
        self._count = itertools.count(1)
        self._cgroups: CgroupManager | NoLocation | None = None
        self._replacement: _Replacement | None = None
        self._settings: tuple[Limits, bytes] | None = None
        """What was last asked of the zygote: nearly all sandboxes of a runtime have the same limits."""

    @property
    def unsupported(self) -> Mapping[str, str]:
        """Limits that cannot be held on this machine, with the reason and what to do. Known once it is open."""
        manager = self._cgroups
        if isinstance(manager, CgroupManager):
            why = "the cgroup hierarchy has no cpu controller that this process may use"
            return {} if manager.processors is not None else {"cpu_cores": f"{why}; mount it, or leave cpu_cores out"}
        return {"cpu_cores": f"there is no cgroup: {manager.reason}; {manager.fix}"} if manager is not None else {}

    def spawn(self) -> None:
        """Start the zygote's process and do not wait for it: the first half of `open`, without an event loop.

        Raises:
            OSError: the machine is short of something; nothing was started.
            SandboxUnavailable: there is no interpreter for guests, or the launcher died.
        """
        self._cgroups, self._settings = cgroup_manager.discover(), None
        if isinstance(self._cgroups, CgroupManager):
            self._cgroups.reap_orphans()
        self._spawned = self._spawn_zygote()

    async def open(self) -> None:
        """Start the zygote, or wait for the one of `spawn`.

        Raises:
            SandboxUnavailable: isolation cannot be set up here; the message says why and what to do.
        """
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        try:
            if self._spawned is None:
                self.spawn()
            self._zygote = await self._start_zygote()
        except BaseException as exc:
            self._close_cgroups()
            self._tasks.cancel_scope.cancel()
            await self._tasks.__aexit__(None, None, None)
            self._tasks = None
            if isinstance(exc, OSError):
                raise unavailable(exc) from exc
            raise

    def _spawn_zygote(self) -> NamespacedZygote:
        # Always in the guest package, so that a run may choose a lint profile. Preloaded only if every run has one.
        extras = ("RestrictedPython",)
        preload = (*PRELOAD[self.policy.lint], *self.preload)
        manager = self._cgroups
        where = manager.directories if isinstance(manager, CgroupManager) else ((), "")
        root = root_filesystem.build(self._packages, extras, self.python, self.policy.shell)
        return NamespacedZygote.spawn(
            root,
            (preload, imported_ahead(self._packages)),
            next_slot(),
            self.policy.hash_seed,
            where,
            programs=[self._program, root.loader] if self._program else [] if self.policy.shell else None,
        )

    async def _start_zygote(self) -> NamespacedZygote:
        zygote, self._spawned = self._spawned or self._spawn_zygote(), None
        ready = await zygote.wait_ready()
        try:
            manager = self._cgroups
            lacks = {**ready["lacks"], **({"cgroup": manager.reason} if isinstance(manager, NoLocation) else {})}
            has_cgroup = isinstance(manager, CgroupManager)
            check_layers(self.policy.require, {*ready["layers"], *(["cgroup"] if has_cgroup else [])}, lacks)
            if zygote.problems:
                problems = "; ".join(f"{name}: {why}" for name, why in zygote.problems.items())
                raise SandboxUnavailable(f"preloading failed: {problems}")
        except SandboxUnavailable:
            zygote.kill()
            raise
        self.absent = ready["lacks"]
        assert self._tasks is not None
        self._tasks.start_soon(zygote.listen)
        return zygote

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

    async def _living_zygote(self) -> NamespacedZygote:
        if self._zygote is None or self._tasks is None:
            raise SandboxUnavailable("the process backend is not open")
        self._zygote.check()
        if self._zygote.is_dead:
            if self._replacement is None:
                # In a task of its own: a start that is given up does not take the new zygote with it.
                self._replacement = _Replacement()
                self._tasks.start_soon(self._replace_zygote, self._zygote, self._replacement)
            replacement = self._replacement
            await replacement.done.wait()
            if replacement.problem is not None:
                raise SandboxUnavailable(str(replacement.problem)) from replacement.problem
        return self._zygote

    async def _replace_zygote(self, dead: NamespacedZygote, replacement: _Replacement) -> None:
        try:
            await dead.aclose()
            started = await self._start_zygote()
            if self._zygote is dead:
                self._zygote = started
            else:  # the backend was closed meanwhile
                started.kill()
        except OSError as exc:
            replacement.problem = unavailable(exc)
        except SandboxUnavailable as exc:
            replacement.problem = exc
        finally:
            self._replacement = None
            replacement.done.set()

    async def _fork_one(self, zygote: NamespacedZygote, limits: Limits) -> ProcessSandbox:
        """Make what a sandbox needs, and request it. Descriptors: four here, until it is destroyed."""
        with ExitStack() as theirs, ExitStack() as ours:
            bridge, guest_bridge = socket.socketpair()
            ours.enter_context(bridge)
            theirs.enter_context(guest_bridge)
            out, guest_out = open_pipe(ours, theirs)
            err, guest_err = open_pipe(ours, theirs)
            written = [guest_out, guest_err]
            ident = f"p{next(self._count)}"
            cgroup = self._make_cgroup(ident, limits)
            if cgroup is not None:
                ours.callback(cgroup.remove)
                entries = list[int]()
                theirs.callback(_close_all, entries)
                for entry in cgroup.entries:
                    entries.append(os.open(entry, os.O_WRONLY | os.O_CLOEXEC))
                written += entries
            if self._settings is None or self._settings[0] is not limits:
                self._settings = limits, self._pack_settings(limits, cgroup is not None)
            manager = self._cgroups if isinstance(self._cgroups, CgroupManager) else None
            child = await zygote.fork(self._settings[1], [guest_bridge.fileno(), *written])
            sandbox = ProcessSandbox(
                child,
                SocketStream(bridge),
                output=(out, err),
                limits=limits,
                ident=ident,
                required=self.policy.require,
                cgroup=cgroup,
                cgroups=manager,
            )
            ours.pop_all()
        try:
            await zygote.wait_started(child)
            sandbox.watch_end()
        except BaseException:
            await sandbox.destroy()
            raise
        return sandbox

    def _pack_settings(self, limits: Limits, has_cgroup: bool) -> bytes:
        settings = {
            "disk_bytes": limits.disk_bytes,
            "inodes": limits.inodes,
            "frame_bytes": limits.frame_bytes,
            "environment": self._environment,
            "rlimits": asdict(rlimits_for(limits, has_cgroup, executes=self._executes)),
        }
        packed: bytes = msgpack.packb(settings)
        return packed

    def _make_cgroup(self, name: str, limits: Limits) -> Cgroup | None:
        if not isinstance(self._cgroups, CgroupManager):
            return None
        try:
            return self._cgroups.create(name, limits.memory_bytes, limits.processes, limits.cpu_cores)
        except OSError as exc:
            raise SandboxUnavailable(
                f"a cgroup for the sandbox could not be made: {describe(exc.errno, str(exc))}"
            ) from exc

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


def _close_all(descriptors: list[int]) -> None:
    for each in descriptors:
        os.close(each)


class _Replacement:
    """The start of a zygote in place of a dead one, for every start that waits for it."""

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.problem: SandboxUnavailable | None = None
