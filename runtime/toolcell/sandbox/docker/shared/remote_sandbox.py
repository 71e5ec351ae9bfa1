"""One sandbox among many of a container, as its host sees it: what was reported, and its bridge where it is carried.

Holds what was received and not yet taken; the multiplexer bounds it. Waiting is the container's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import anyio

from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.backend import Exit
from toolcell.sandbox.docker.shared.direct_channel import DirectChannel
from toolcell_bridge.entry.shared_protocol import CHANNEL_STRIDE, CHANNELS
from toolcell_bridge.wire.mux import Mux

START_S = 10.0
"""One fork. A container that takes longer is not going to."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What the container says that a sandbox has used."""

    cpu_s: float = 0.0
    memory_bytes: int = 0
    processes: int = 1


@dataclass(slots=True)
class SandboxLine:
    """Received bytes of one channel that nobody has taken yet. The multiplexer bounds them."""

    data: bytearray = field(default_factory=bytearray)
    is_over: bool = False


class Carrier(Protocol):
    """What a place needs of its container."""

    mux: Mux

    async def wait_for(self, is_reached: Callable[[], bool]) -> None:
        """Wait until it is, or the container is gone."""
        ...

    async def send(self, frames: bytes) -> None:
        """Write to the container."""
        ...

    def post(self, frames: bytes) -> None:
        """As `send`, without waiting."""
        ...


class RemoteSandbox:
    """One sandbox as its container reports it; and its bridge, as a `ByteStream`."""

    def __init__(self, container: Carrier, number: int) -> None:
        self._container = container
        self.number = number
        self.lines = [SandboxLine() for _ in range(CHANNELS)]
        self.measured = Measured()
        self.peak = Measured()
        self.has_started = False
        self.is_lowered = True
        self.ends: list[int] = []
        self.direct: DirectChannel | None = None
        self.problem: str | None = None
        self.end: Exit | None = None
        self.sent_bytes = 0
        self.received_bytes = 0
        self._writing: anyio.Event | None = None

    @property
    def is_over(self) -> bool:
        """Its end is known, or its container's."""
        return self.end is not None or self.problem is not None

    async def receive(self) -> bytes:
        """Return the bridge's next bytes, or b"" when the sandbox is gone."""
        line = self.lines[0]
        if not line.data:
            await self._container.wait_for(lambda: bool(line.data) or line.is_over)
        data = bytes(line.data)
        line.data.clear()
        self.received_bytes += len(data)
        if data and (credit := self._container.mux.took(self.number * CHANNEL_STRIDE, len(data))):
            await self._container.send(credit)
        return data

    async def send(self, data: bytes) -> None:
        """Write all of `data`, after whatever is being written already. A guest that does not read delays only this."""
        while self._writing is not None:
            await self._writing.wait()
        self.sent_bytes += len(data)
        mux, channel = self._container.mux, self.number * CHANNEL_STRIDE
        if len(data) <= mux.room(channel):
            await self._container.send(mux.data(channel, data))
            return
        self._writing = anyio.Event()
        try:
            view = memoryview(data)
            while view and not self.lines[0].is_over:
                room = mux.room(channel)
                if room:
                    piece, view = view[:room], view[room:]
                    await self._container.send(mux.data(channel, piece))
                else:
                    await self._container.wait_for(lambda: mux.room(channel) > 0 or self.lines[0].is_over)
        finally:
            self._writing.set()
            self._writing = None

    def take_raw(self, descriptor: int) -> bytes:
        """Take what was written raw to descriptor 1 or 2 so far, without waiting."""
        line = self.lines[descriptor]
        data = bytes(line.data)
        line.data.clear()
        if data:
            self._container.post(self._container.mux.took(self.number * CHANNEL_STRIDE + descriptor, len(data)))
        return data

    async def wait_started(self) -> None:
        """Wait until it has been forked.

        Raises:
            SandboxUnavailable: it could not be.
        """
        with anyio.move_on_after(START_S):
            await self._container.wait_for(lambda: self.has_started or self.is_over)
        if not self.has_started or self.problem is not None:
            raise SandboxUnavailable(f"the container could not start a sandbox: {self.problem or 'it does not answer'}")

    async def wait_lowered(self) -> None:
        """Wait until its ceilings are what was last asked for."""
        await self._container.wait_for(lambda: self.is_lowered or self.is_over)

    async def wait_ended(self) -> None:
        """Wait until every process of it has been killed and reaped and its files are gone, or its container is."""
        await self._container.wait_for(lambda: self.is_over)
