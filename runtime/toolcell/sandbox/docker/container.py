"""Follow and control containers: one stream of events reports how they end, and a `Container` controls each of them.

A container removes itself when it ends, so a question to the daemon afterwards would come too late. This module knows
no guest.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

import anyio
import anyio.from_thread
import anyio.lowlevel

from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.backend import Exit
from toolcell.sandbox.docker.attach import AttachedStream
from toolcell.sandbox.docker.client import Conflict, EngineClient
from toolcell.sandbox.docker.hardening import OWN_PROCESSES, Blueprint
from toolcell.sandbox.docker.usage import UsageReader, find_cgroup
from toolcell.support import daemon_threads
from toolcell.support.change_event import ChangeEvent
from toolcell_bridge.guest.errors import ASK_SIGNAL
from toolcell_bridge.guest.interrupts import INTERRUPT_SIGNAL

EVENT_NAMES = ["die", "died", "kill", "oom", "destroy", "remove"]
"""Events that matter here. Podman has its own names for two of them."""

END_S = 5.0
"""How long a killed container may take to be reported dead, and then removed."""

MEMORY_EVENT_S = 0.5
"""How long the "oom" event may take to arrive after a container died of SIGKILL."""

SIGNALLED = 128
SIGKILL = 9
ENDING = frozenset({"9", "15", "SIGKILL", "SIGTERM"})
"""Signals of `docker kill` and `docker stop`, as events name them."""


class ContainerState:
    """What the events have reported about one container so far."""

    def __init__(self) -> None:
        self.is_dead = False
        self.is_removed = False
        self.is_unobserved = False
        """The stream of events broke: no event will arrive."""
        self.exit_code: int | None = None
        self.memory_kills = 0
        self.is_killed = False
        """Somebody had the daemon kill or stop it: this host, or another one."""
        self._changed = ChangeEvent()

    def notify(self) -> None:
        """Wake every task that waits for a change."""
        self._changed.notify()

    async def wait_for(self, is_reached: Callable[[ContainerState], bool], within_s: float) -> bool:
        """Wait until `is_reached` holds. Return False when it does not in time, or when no event will arrive."""
        with anyio.move_on_after(within_s):
            while not is_reached(self) and not self.is_unobserved:
                await self._changed.wait()
        return is_reached(self)

    def record_event(self, action: str, attributes: dict[str, Any]) -> None:
        """Record one event."""
        match action:
            case "oom":
                self.memory_kills += 1
            case "kill":
                self.is_killed = self.is_killed or str(attributes.get("signal")) in ENDING
            case "die" | "died":
                self.is_dead = True
                code = attributes.get("exitCode", attributes.get("containerExitCode"))
                with suppress(TypeError, ValueError):
                    self.exit_code = int(code) if code is not None else None
            case "destroy" | "remove":
                self.is_dead = self.is_removed = True
        self.notify()


class Events:
    """The daemon's stream of events, read by a thread. Call `listen` again after the daemon was away."""

    def __init__(self, client: EngineClient, labels: dict[str, str]) -> None:
        self._client = client
        self._filters = {"type": ["container"], "event": EVENT_NAMES, "label": [f"{k}={v}" for k, v in labels.items()]}
        self._states: dict[str, ContainerState] = {}
        self._stream: Any = None
        self._opening = anyio.Lock()
        self.is_listening = False

    def follow(self, container: str) -> ContainerState:
        """Begin to record the events of a container. Call it before the container is started."""
        state = self._states.setdefault(container, ContainerState())
        state.is_unobserved = not self.is_listening
        return state

    def forget(self, container: str) -> None:
        """Stop recording the events of a container."""
        self._states.pop(container, None)

    async def listen(self) -> None:
        """Open the stream, unless it is open.

        Raises:
            SandboxUnavailable: the daemon is gone.
        """
        async with self._opening:
            if self.is_listening:
                return
            stream = await self._client.call(self._client.api.events, filters=self._filters, decode=True)
            self._stream, self.is_listening = stream, True
        token = anyio.lowlevel.current_token()
        daemon_threads.start(self._read, stream, token, name="toolcell-events")

    def _read(self, stream: Any, token: Any) -> None:
        with suppress(Exception):  # any error means that the stream has ended; the event loop may be gone as well
            try:
                for event in stream:
                    anyio.from_thread.run_sync(self._handle_event, event, token=token)
            finally:
                stream._response.close()
                anyio.from_thread.run_sync(self._mark_broken, stream, token=token)

    def _handle_event(self, event: dict[str, Any]) -> None:
        actor = event.get("Actor") or {}
        state = self._states.get(str(actor.get("ID") or event.get("id") or ""))
        if state is not None:
            state.record_event(str(event.get("Action") or event.get("status") or ""), actor.get("Attributes") or {})

    def _mark_broken(self, stream: Any) -> None:
        if stream is self._stream:
            self.is_listening = False
            for state in self._states.values():
                state.is_unobserved = True
                state.notify()

    async def aclose(self) -> None:
        """Close the stream; its thread ends."""
        stream, self._stream, self.is_listening = self._stream, None, False
        if stream is not None:
            with suppress(SandboxUnavailable):
                await self._client.call(stream.close)


class ContainerOwner(Protocol):
    """What a container needs of the engine that started it."""

    client: EngineClient

    def run_in_background(self, function: Callable[..., Awaitable[Any]], *args: Any) -> None:
        """Run it in the background and ignore that the daemon is gone."""
        ...

    async def remove(self, name: str) -> None:
        """Remove a container now, or when the daemon is back."""
        ...

    def forget(self, container: Container) -> None:
        """Forget a container that has been destroyed."""
        ...


class Container:
    """One started container and the stream to its guest."""

    def __init__(
        self, owner: ContainerOwner, name: str, ident: str, stream: AttachedStream, state: ContainerState
    ) -> None:
        self._owner = owner
        self.name = name
        self.id = ident
        self.stream = stream
        self.state = state
        self.inspected: Mapping[str, Any] = {}
        self.usage = UsageReader(None, None)
        self.is_killed = self.is_paused = False
        self._was_alive = False
        """The container was alive, as far as the host knew, when `kill` was called. Else something else killed it."""
        self._is_destroyed = False

    async def inspect(self, blueprint: Blueprint) -> None:
        """Ask the daemon what the container was really made with, and find out where its usage can be measured."""
        self.inspected = await self._owner.client.inspect(self.name)
        pid = int((self.inspected.get("State") or {}).get("Pid") or 0)
        cgroup = find_cgroup(pid, self.id) if self._owner.client.info.is_local and pid else None
        self.usage = UsageReader(cgroup, None if blueprint.is_gvisor else OWN_PROCESSES)

    def is_alive(self) -> bool:
        """Return False once the container's end is known."""
        return not (self.is_killed or self.state.is_dead or self.stream.is_over)

    def kill(self) -> None:
        """Kill the container without waiting. Safe to call at any time."""
        if self.is_killed or self.state.is_dead:
            return
        self.is_killed, self._was_alive = True, self._was_alive or not self.stream.is_over
        self.stream.expect_end()
        self.usage.kill()
        self._owner.run_in_background(self._owner.client.kill, self.name)

    def ask_line(self) -> None:
        """Have the script write which line it is at. The daemon takes some milliseconds to pass that on."""
        self._owner.run_in_background(self._owner.client.kill, self.name, ASK_SIGNAL)

    def interrupt(self) -> None:
        """Interrupt the script of a session. The daemon takes some milliseconds to pass that on."""
        self._owner.run_in_background(self._owner.client.kill, self.name, INTERRUPT_SIGNAL)

    async def pause(self) -> bool:
        """Stop every process inside until `unpause`; False when the daemon cannot. May be called again."""
        if not self.is_paused:
            self.is_paused = True
            try:
                await self._owner.client.call(self._owner.client.api.pause, self.name)
            except SandboxUnavailable:
                self.is_paused = False
        return self.is_paused

    async def unpause(self) -> None:
        """Let everything inside run again. A container that cannot is killed."""
        self.is_paused = False
        try:
            await self._owner.client.call(self._owner.client.api.unpause, self.name)
        except Conflict:  # it was not paused
            return
        except SandboxUnavailable:
            self.kill()

    def kill_now(self) -> None:
        """Kill the container from another thread. `kill` is called later, in the event loop."""
        if self.is_killed or self.state.is_dead:
            return
        self._was_alive = not self.stream.is_over
        self.usage.read()  # its cgroup is gone when the event loop looks
        if not self.usage.kill():
            # In a thread of its own: a daemon that is slow must not delay the deadlines of other containers.
            kill = self._owner.client.kill_now
            daemon_threads.start(kill, self.name, name="toolcell-kill")

    async def ended(self) -> Exit:
        """Wait, at most a few seconds, until the container has ended; return how. Nothing else may read its stream."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as reading:
                reading.start_soon(self.stream.drain)
                is_dead = await self.state.wait_for(lambda state: state.is_dead, END_S)
                reading.cancel_scope.cancel()
            if not is_dead:
                await self._ask_daemon()
            state = self.state
            if state.exit_code == SIGNALLED + SIGKILL and not (self._was_alive or self._is_destroyed):
                await state.wait_for(lambda state: bool(state.memory_kills), MEMORY_EVENT_S)
        code = state.exit_code
        if state.is_killed and not (self._was_alive or self._is_destroyed):
            return Exit(problem="somebody killed or stopped its container")
        if code is None:
            return Exit(problem="the engine reports no end of its container")
        return Exit(signal=code - SIGNALLED) if code > SIGNALLED else Exit(code=code)

    async def _ask_daemon(self) -> None:
        with suppress(SandboxUnavailable):
            found = (await self._owner.client.inspect(self.name)).get("State") or {}
            if not found.get("Running"):
                self.state.record_event("oom" if found.get("OOMKilled") else "", {})
                self.state.record_event("die", {"exitCode": found.get("ExitCode")})

    async def destroy(self) -> None:
        """Kill and remove the container. Safe to call twice. Nothing is left of it, if the daemon answers."""
        if self._is_destroyed:
            return
        self._is_destroyed = self.is_killed = True
        with anyio.CancelScope(shield=True):
            self.stream.close()
            if not self.state.is_removed:
                await self._owner.remove(self.name)
                # When the container is removing itself already, the daemon answers at once and continues.
                await self.state.wait_for(lambda state: state.is_removed, END_S)
            self._owner.forget(self)
