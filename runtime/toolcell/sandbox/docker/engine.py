"""What a backend shares among its containers: the daemon, the image, the events, the watcher; and one such container.

Both modes launch through here, so that what is started is cleaned up in one place. Knows no guest.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import anyio
from anyio.abc import TaskGroup

from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.backend import Exit
from toolcell.sandbox.docker import reaper
from toolcell.sandbox.docker.attach import AttachedStream, attach
from toolcell.sandbox.docker.client import Client
from toolcell.sandbox.docker.events import ContainerState, Events
from toolcell.sandbox.docker.hardening import LABEL_MODE, OWN_PROCESSES, Blueprint
from toolcell.sandbox.docker.images.reference import ImageRef, ensure_image
from toolcell.sandbox.docker.usage import UsageReader, find_cgroup

END_S = 5.0
"""How long a killed container may take to be reported dead, and then removed."""

MEMORY_NEWS_S = 0.5
"""How long after a container's SIGKILL the news may take that it was the kernel's, for memory."""

SIGNALLED = 128
SIGKILL = 9


class Container:
    """One started container and the stream to its guest."""

    def __init__(self, engine: Engine, name: str, ident: str, stream: AttachedStream, fate: ContainerState) -> None:
        self._engine = engine
        self.name = name
        self.id = ident
        self.stream = stream
        self.fate = fate
        self.inspected: Mapping[str, Any] = {}
        self.meter = UsageReader(None, None)
        self.is_killed = False
        self._was_alive = False
        """When it was killed, as far as we knew. Who was dead by then died of something else."""
        self._is_destroyed = False

    async def look(self, blueprint: Blueprint) -> None:
        """Learn what it was really made with, and where it can be measured."""
        self.inspected = await self._engine.client.inspect(self.name)
        pid = int((self.inspected.get("State") or {}).get("Pid") or 0)
        cgroup = find_cgroup(pid, self.id) if self._engine.client.info.is_local and pid else None
        self.meter = UsageReader(cgroup, None if blueprint.is_gvisor else OWN_PROCESSES)

    def is_alive(self) -> bool:
        """False once its end is known."""
        return not (self.is_killed or self.fate.is_dead or self.stream.is_over)

    def kill(self) -> None:
        """Have it killed, without waiting. Safe to call at any time."""
        if self.is_killed or self.fate.is_dead:
            return
        self.is_killed, self._was_alive = True, not self.stream.is_over
        self.stream.expect_end()
        self.meter.kill()
        self._engine.soon(self._engine.client.kill, self.name)

    async def ended(self) -> Exit:
        """Wait until it has ended, at most a few seconds, and say how. Nobody else may be reading its stream."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as reading:
                reading.start_soon(self.stream.soak)
                is_dead = await self.fate.wait_for(lambda fate: fate.is_dead, END_S)
                reading.cancel_scope.cancel()
            if not is_dead:
                await self._ask()
            fate = self.fate
            if fate.exit_code == SIGNALLED + SIGKILL and not (self._was_alive or self._is_destroyed):
                await fate.wait_for(lambda fate: bool(fate.memory_kills), MEMORY_NEWS_S)
        code = fate.exit_code
        if code is None:
            return Exit()
        return Exit(signal=code - SIGNALLED) if code > SIGNALLED else Exit(code=code)

    async def _ask(self) -> None:
        with suppress(SandboxUnavailable):
            state = (await self._engine.client.inspect(self.name)).get("State") or {}
            if not state.get("Running"):
                self.fate.take("oom" if state.get("OOMKilled") else "", {})
                self.fate.take("die", {"exitCode": state.get("ExitCode")})

    async def destroy(self) -> None:
        """Kill and remove it. Safe to call twice. When this returns nothing of it is left, if the daemon answers."""
        if self._is_destroyed:
            return
        self._is_destroyed = self.is_killed = True
        with anyio.CancelScope(shield=True):
            self.stream.close()
            if not self.fate.is_removed:
                await self._engine.remove(self.name)
                # It may have been removing itself already; a daemon that does says so at once, and goes on.
                await self.fate.wait_for(lambda fate: fate.is_removed, END_S)
            self._engine.forget(self)


class Engine:
    """An open connection to a daemon, and everything this backend has there."""

    def __init__(self, client: Client, image: ImageRef, watcher: reaper.Watcher, tasks: TaskGroup, key: str) -> None:
        self.client = client
        self.image = image
        self.key = key
        self._watcher = watcher
        self._tasks = tasks
        self._events = Events(client, {reaper.LABEL_BACKEND: key})
        self._living: set[Container] = set()
        self._left: set[str] = set()
        self._labels = {reaper.LABEL_BACKEND: key, reaper.LABEL_HOST: str(reaper.own_identity())}

    @classmethod
    async def open(
        cls, *, docker_host: str | None, image: str | None, packages: Sequence[str], runtime: str | None
    ) -> Engine:
        """Reach the daemon, find the image, remove what dead hosts left, and begin to watch.

        Raises:
            SandboxUnavailable: there is no daemon, no image or no such runtime; says what to do.
        """
        client = await Client.connect(docker_host)
        try:
            if runtime is not None and client.info.runtimes and runtime not in client.info.runtimes:
                known = ", ".join(client.info.runtimes)
                raise SandboxUnavailable(f"the daemon has no runtime {runtime!r} (it has {known}); see docs/docker.md")
            found = await anyio.to_thread.run_sync(ensure_image, client, image, tuple(packages))
            key = uuid.uuid4().hex
            watcher = await anyio.to_thread.run_sync(reaper.Watcher.spawn, key, docker_host)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await client.aclose()
            raise
        tasks = anyio.create_task_group()
        await tasks.__aenter__()
        engine = cls(client, found, watcher, tasks, key)
        try:
            await engine._reap()
            await engine._events.listen()
        except BaseException:
            await engine.aclose()
            raise
        return engine

    async def _reap(self) -> None:
        me = reaper.own_identity()
        found = await self.client.list({reaper.LABEL_HOST: None})
        for container in reaper.orphans(found, me, is_local=self.client.info.is_local):
            await self.client.remove(container)

    def labels(self, mode: str) -> dict[str, str]:
        """What every container of this backend carries."""
        return {**self._labels, LABEL_MODE: mode}

    def soon(self, function: Callable[..., Awaitable[Any]], *args: Any) -> None:
        """Do it in the background; what a daemon that is gone could not do is forgotten."""
        self._tasks.start_soon(self._quietly, function, *args)

    async def _quietly(self, function: Callable[..., Awaitable[Any]], *args: Any) -> None:
        with suppress(SandboxUnavailable):
            await function(*args)

    async def launch(self, config: Mapping[str, Any], blueprint: Blueprint, *, fence: bytes = b"") -> Container:
        """Create, attach, start, inspect.

        Cancellation: what was made is removed.

        Raises:
            SandboxUnavailable: nothing is left of it.
        """
        await self._events.listen()
        for left in tuple(self._left):
            self.soon(self.remove, left)
        name = f"toolcell-{uuid.uuid4().hex[:16]}"
        stream: AttachedStream | None = None
        fate: ContainerState | None = None
        ident = ""
        try:
            ident = await self.client.create(config, name)
            fate = self._events.follow(ident)
            stream = await attach(self.client, ident, fence=fence)
            container = Container(self, name, ident, stream, fate)
            await self.client.start(ident)
            await container.look(blueprint)
        except BaseException:
            with anyio.CancelScope(shield=True):
                if stream is not None:
                    stream.close()
                # By name: the daemon may have made it although its answer did not come.
                await self.remove(name)
                if fate is not None and name not in self._left:
                    await fate.wait_for(lambda fate: fate.is_removed, END_S)
                self._events.forget(ident)
            raise
        self._living.add(container)
        return container

    async def remove(self, name: str) -> None:
        """Remove a container now, or when the daemon is back."""
        try:
            await self.client.remove(name)
            self._left.discard(name)
        except SandboxUnavailable:
            self._left.add(name)

    def forget(self, container: Container) -> None:
        """It has been destroyed."""
        self._living.discard(container)
        self._events.forget(container.id)

    async def aclose(self) -> None:
        """Remove every container of this backend. Safe to call twice.

        Cancellation: shielded; bounded by the daemon's answers.
        """
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as ending:
                for container in tuple(self._living):
                    ending.start_soon(container.destroy)
            for name in tuple(self._left):
                await self.remove(name)
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)
        with anyio.CancelScope(shield=True):
            await self._events.aclose()
            await self.client.aclose()
            if self._left:
                # The daemon is away; the watcher waits for it longer than a caller would.
                self._watcher.leave_it()
            else:
                await anyio.to_thread.run_sync(self._watcher.dismiss)
