"""Hears from the daemon how containers end: one stream of events for all containers of a backend.

A container removes itself when it ends, so asking afterwards would be too late. Knows ids and what happened to them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel

from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.docker.client import Client

WANTED = ["die", "died", "oom", "destroy", "remove"]
"""Podman's names for two of them beside Docker's."""


class ContainerState:
    """What has become of one container so far."""

    def __init__(self) -> None:
        self.is_dead = False
        self.is_removed = False
        self.is_untold = False
        """The stream of events broke: nobody will tell."""
        self.exit_code: int | None = None
        self.memory_kills = 0
        self._changed = anyio.Event()

    def tell(self) -> None:
        """Wake whoever waits."""
        self._changed.set()
        self._changed = anyio.Event()

    async def wait_for(self, reached: Callable[[ContainerState], bool], within_s: float) -> bool:
        """Wait until `reached` holds; False when it did not in time, or nobody tells any more."""
        with anyio.move_on_after(within_s):
            while not reached(self) and not self.is_untold:
                await self._changed.wait()
        return reached(self)

    def take(self, action: str, attributes: dict[str, Any]) -> None:
        """Note one event."""
        match action:
            case "oom":
                self.memory_kills += 1
            case "die" | "died":
                self.is_dead = True
                code = attributes.get("exitCode", attributes.get("containerExitCode"))
                with suppress(TypeError, ValueError):
                    self.exit_code = int(code) if code is not None else None
            case "destroy" | "remove":
                self.is_dead = self.is_removed = True
        self.tell()


class Events:
    """The stream and its listening thread. `listen` again after the daemon was away."""

    def __init__(self, client: Client, labels: dict[str, str]) -> None:
        self._client = client
        self._filters = {"type": ["container"], "event": WANTED, "label": [f"{k}={v}" for k, v in labels.items()]}
        self._fates: dict[str, ContainerState] = {}
        self._stream: Any = None
        self._opening = anyio.Lock()
        self.is_listening = False

    def follow(self, container: str) -> ContainerState:
        """Begin to note what becomes of a container; before it is started."""
        fate = self._fates.setdefault(container, ContainerState())
        fate.is_untold = not self.is_listening
        return fate

    def forget(self, container: str) -> None:
        """It is gone and nobody asks any more."""
        self._fates.pop(container, None)

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
        threading.Thread(target=self._follow, args=(stream, token), name="toolcell-events", daemon=True).start()

    def _follow(self, stream: Any, token: Any) -> None:
        with suppress(Exception):  # however it ends, it has ended; the event loop may be gone as well
            try:
                for event in stream:
                    anyio.from_thread.run_sync(self._take, event, token=token)
            finally:
                stream._response.close()
                anyio.from_thread.run_sync(self._lost, stream, token=token)

    def _take(self, event: dict[str, Any]) -> None:
        actor = event.get("Actor") or {}
        fate = self._fates.get(str(actor.get("ID") or event.get("id") or ""))
        if fate is not None:
            fate.take(str(event.get("Action") or event.get("status") or ""), actor.get("Attributes") or {})

    def _lost(self, stream: Any) -> None:
        if stream is self._stream:
            self.is_listening = False
            for fate in self._fates.values():
                fate.is_untold = True
                fate.tell()

    async def aclose(self) -> None:
        """Close the stream; its thread ends."""
        stream, self._stream, self.is_listening = self._stream, None, False
        if stream is not None:
            with suppress(SandboxUnavailable):
                await self._client.call(stream.close)
