"""One sandbox of a shared container as its host sees it: what the container reported, and the ways to its guest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import anyio

from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.forked import ForkedSandbox, SandboxChannel
from toolcell_bridge.entry.shared_protocol import CHANNEL_STRIDE, CHANNELS
from toolcell_bridge.wire.mux import Mux

START_S = 10.0
"""How long one fork may take. A container that takes longer does not answer at all."""


@dataclass(frozen=True, slots=True)
class SandboxUsage:
    """What a sandbox has used, as its container reports it."""

    cpu_s: float = 0.0
    memory_bytes: int = 0
    processes: int = 1


@dataclass(slots=True)
class ReceivedBytes:
    """Received bytes of one channel that have not been taken yet. The multiplexer bounds them."""

    data: bytearray = field(default_factory=bytearray)
    is_over: bool = False

    def take(self) -> bytes:
        """Take all bytes that have arrived."""
        taken = bytes(self.data)
        self.data.clear()
        return taken


class SandboxCarrier(Protocol):
    """What a sandbox needs of its container."""

    mux: Mux

    async def wait_for(self, is_reached: Callable[[], bool]) -> None:
        """Wait until `is_reached` holds, or the container is gone."""
        ...

    async def send(self, frames: bytes) -> None:
        """Write to the container."""
        ...

    def post(self, frames: bytes) -> None:
        """Write to the container without waiting."""
        ...


class CarriedChannel:
    """The way to a guest over its container's one stream. Also the `ByteStream` of its bridge.

    It holds received bytes that have not been taken yet; the multiplexer bounds them.
    """

    reaches_supervisor = False

    def __init__(self, container: SandboxCarrier, number: int) -> None:
        self._container, self._number = container, number
        self.received = [ReceivedBytes() for _ in range(CHANNELS)]
        self.sent_bytes = 0
        self.received_bytes = 0
        self._writing: anyio.Event | None = None

    @property
    def stream(self) -> CarriedChannel:
        """The bridge."""
        return self

    def has_hung_up(self) -> bool:
        """Return False: the container reports the end of the sandbox."""
        return False

    def send_control(self, word: bytes) -> bool:
        """Return False: the proxy does not write to a supervisor."""
        return False

    def kill_now(self) -> None:
        """Do nothing: other threads must not write to the container's stream."""

    def close(self) -> None:
        """Record that no byte will follow."""
        for each in self.received:
            each.is_over = True

    async def receive(self) -> bytes:
        """Return the bridge's next bytes, or b"" when the sandbox is gone."""
        bridge = self.received[0]
        if not bridge.data:
            await self._container.wait_for(lambda: bool(bridge.data) or bridge.is_over)
        data = bridge.take()
        self.received_bytes += len(data)
        if data and (credit := self._container.mux.credit_for(self._number * CHANNEL_STRIDE, len(data))):
            await self._container.send(credit)
        return data

    async def send(self, data: bytes | memoryview) -> None:
        """Write all of `data`, after a write that is in progress. A guest that does not read delays only this call."""
        while self._writing is not None:
            await self._writing.wait()
        self.sent_bytes += len(data)
        mux, channel = self._container.mux, self._number * CHANNEL_STRIDE
        if len(data) <= mux.room(channel):
            await self._container.send(mux.data(channel, data))
            return
        self._writing = anyio.Event()
        try:
            remaining = memoryview(data)
            while remaining and not self.received[0].is_over:
                room = mux.room(channel)
                if room:
                    piece, remaining = remaining[:room], remaining[room:]
                    await self._container.send(mux.data(channel, piece))
                else:
                    await self._container.wait_for(lambda: mux.room(channel) > 0 or self.received[0].is_over)
        finally:
            self._writing.set()
            self._writing = None

    def read_raw(self) -> tuple[bytes, bytes]:
        """Take the raw output on descriptors 1 and 2 so far, without waiting."""
        return self._take_raw(1), self._take_raw(2)

    def _take_raw(self, descriptor: int) -> bytes:
        data = self.received[descriptor].take()
        if data:
            self._container.post(self._container.mux.credit_for(self._number * CHANNEL_STRIDE + descriptor, len(data)))
        return data


class RemoteSandbox(ForkedSandbox):
    """One sandbox as its container reports it."""

    def __init__(self, container: SandboxCarrier, number: int) -> None:
        super().__init__(number)
        self._container = container
        self.carried = CarriedChannel(container, number)
        self.channel: SandboxChannel = self.carried
        """A direct one where the host can take the descriptors of the sandbox."""
        self.usage = SandboxUsage()
        self.peak = SandboxUsage()
        self.proxy_descriptors: list[int] = []
        """Numbers that this sandbox's descriptors have in the proxy, once the proxy has reported them."""

    def record_usage(self, cpu_s: float, memory_bytes: int, processes: int) -> None:
        """Record what the container measured."""
        self.usage = now = SandboxUsage(float(cpu_s), int(memory_bytes), max(1, int(processes)))
        peak = self.peak
        self.peak = SandboxUsage(
            max(peak.cpu_s, now.cpu_s), max(peak.memory_bytes, now.memory_bytes), max(peak.processes, now.processes)
        )

    def mark_dead(self, problem: str) -> None:
        """Record that the container is gone: no byte and no report will follow."""
        if self.end is None:
            self.fail(self.problem or problem)
        self.carried.close()

    async def wait_started(self) -> None:
        """Wait until the sandbox has been forked.

        Raises:
            SandboxUnavailable: it could not be forked.
        """
        with anyio.move_on_after(START_S):
            await self._container.wait_for(lambda: self.has_started or self.is_over)
        if not self.has_started or self.problem:
            raise SandboxUnavailable(f"the container could not start a sandbox: {self.problem or 'it does not answer'}")

    async def wait_lowered(self) -> None:
        """Wait until the sandbox has the rlimits that were last asked for."""
        await self._container.wait_for(lambda: self.is_lowered or self.is_over)

    async def wait_ended(self) -> None:
        """Wait until every process is reaped and every file is removed, or the container is gone."""
        await self._container.wait_for(lambda: self.is_over)
