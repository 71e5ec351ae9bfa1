"""An open connection to a container engine, and everything that one backend has there: image, events, containers.

Both modes launch their containers here, so that everything started is also cleaned up here. This module knows no guest.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import anyio
from anyio.abc import TaskGroup

from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.docker import reaper
from toolcell.sandbox.docker.attach import AttachedStream, attach
from toolcell.sandbox.docker.client import EngineClient
from toolcell.sandbox.docker.container import END_S, Container, ContainerState, Events
from toolcell.sandbox.docker.hardening import LABEL_MODE, Blueprint
from toolcell.sandbox.docker.images.packages import ensure_image
from toolcell.sandbox.docker.images.reference import ImageRef
from toolcell.support import daemon_threads


class Engine:
    """An open connection to a daemon, and everything this backend has there."""

    def __init__(
        self, client: EngineClient, image: ImageRef, watcher: reaper.Watcher, tasks: TaskGroup, key: str
    ) -> None:
        self.client = client
        self.image = image
        self.key = key
        self._watcher = watcher
        self._tasks = tasks
        self._events = Events(client, {reaper.LABEL_BACKEND: key})
        self._living: set[Container] = set()
        self._unremoved: set[str] = set()
        """Names of containers that could not be removed because the daemon was away."""
        self._labels = {reaper.LABEL_BACKEND: key, reaper.LABEL_HOST: str(reaper.own_identity())}

    @classmethod
    async def open(
        cls, *, docker_host: str | None, image: str | None, packages: Sequence[str], runtime: str | None
    ) -> Engine:
        """Connect to the daemon, find the image, remove the containers of dead hosts, and begin to listen.

        Raises:
            SandboxUnavailable: there is no daemon, image or runtime of that name; the message says what to do.
        """
        client = await EngineClient.connect(docker_host)
        try:
            if runtime is not None and client.info.runtimes and runtime not in client.info.runtimes:
                known = ", ".join(client.info.runtimes)
                raise SandboxUnavailable(f"the daemon has no runtime {runtime!r} (it has {known}); see docs/docker.md")
            found = await daemon_threads.run_sync(ensure_image, client, image, tuple(packages))
            key = uuid.uuid4().hex
            watcher = await daemon_threads.run_sync(reaper.Watcher.spawn, key, docker_host)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await client.aclose()
            raise
        tasks = anyio.create_task_group()
        await tasks.__aenter__()
        engine = cls(client, found, watcher, tasks, key)
        try:
            await engine._remove_orphans()
            await engine._events.listen()
        except BaseException:
            await engine.aclose()
            raise
        return engine

    @property
    def watcher_pid(self) -> int:
        """Process id of the watcher, which removes the containers when this process is killed."""
        return self._watcher.pid

    async def _remove_orphans(self) -> None:
        me = reaper.own_identity()
        found = await self.client.list({reaper.LABEL_HOST: None})
        for container in reaper.orphans(found, me, is_local=self.client.info.is_local):
            await self.client.remove(container)

    def labels(self, mode: str) -> dict[str, str]:
        """Return the labels of every container of this backend."""
        return {**self._labels, LABEL_MODE: mode}

    def run_in_background(self, function: Callable[..., Awaitable[Any]], *args: Any) -> None:
        """Run `function` in the background and ignore that the daemon is gone."""
        self._tasks.start_soon(self._run_quietly, function, *args)

    async def _run_quietly(self, function: Callable[..., Awaitable[Any]], *args: Any) -> None:
        with suppress(SandboxUnavailable):
            await function(*args)

    async def launch(self, config: Mapping[str, Any], blueprint: Blueprint, *, end_marker: bytes = b"") -> Container:
        """Create, attach, start and inspect a container.

        Cancellation: what was made is removed.

        Raises:
            SandboxUnavailable: nothing of the container is left.
        """
        await self._events.listen()
        for unremoved in tuple(self._unremoved):
            self.run_in_background(self.remove, unremoved)
        name = f"toolcell-{uuid.uuid4().hex[:16]}"
        stream: AttachedStream | None = None
        state: ContainerState | None = None
        ident = ""
        try:
            ident = await self.client.create(config, name)
            state = self._events.follow(ident)
            stream = await attach(self.client, ident, end_marker=end_marker)
            container = Container(self, name, ident, stream, state)
            await self.client.start(ident)
            await container.inspect(blueprint)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._undo_launch(name, ident, stream, state)
            raise
        self._living.add(container)
        return container

    async def _undo_launch(
        self, name: str, ident: str, stream: AttachedStream | None, state: ContainerState | None
    ) -> None:
        if stream is not None:
            stream.close()
        # By name: the daemon may have created the container although its answer did not arrive.
        await self.remove(name)
        if state is not None and name not in self._unremoved:
            await state.wait_for(lambda state: state.is_removed, END_S)
        self._events.forget(ident)

    async def remove(self, name: str) -> None:
        """Remove a container now, or when the daemon is back."""
        try:
            await self.client.remove(name)
            self._unremoved.discard(name)
        except SandboxUnavailable:
            self._unremoved.add(name)

    def forget(self, container: Container) -> None:
        """Forget a container that has been destroyed."""
        self._living.discard(container)
        self._events.forget(container.id)

    async def aclose(self) -> None:
        """Remove every container of this backend. Safe to call twice.

        Cancellation: shielded; bounded by the timeout of the daemon's answers.
        """
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as destroying:
                for container in tuple(self._living):
                    destroying.start_soon(container.destroy)
            for name in tuple(self._unremoved):
                await self.remove(name)
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)
        with anyio.CancelScope(shield=True):
            await self._events.aclose()
            await self.client.aclose()
            if self._unremoved:
                # The daemon is away. The watcher waits for it longer than a caller would.
                self._watcher.detach()
            else:
                await daemon_threads.run_sync(self._watcher.dismiss)
