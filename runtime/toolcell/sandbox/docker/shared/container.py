"""One container that holds many sandboxes: their streams over its one attached stream, and what it reports of them.

Everything that comes from the container is checked by the multiplexer and here; a container that breaks the rules is
killed, and its sandboxes with it. Knows neither limits' meaning nor what a sandbox is used for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import msgpack

from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.backend import Exit
from toolcell.sandbox.docker.engine import Container, Engine
from toolcell.sandbox.docker.shared.direct_channel import DirectProxy
from toolcell.sandbox.docker.shared.remote_sandbox import START_S, Measured, RemoteSandbox
from toolcell_bridge.entry.shared_protocol import CHANNEL_STRIDE, CHANNELS
from toolcell_bridge.wire.errors import RemoteProtocolError
from toolcell_bridge.wire.mux import Control, Data, Mux, Room, StreamEnded

READY_S = 60.0
"""From start to ready: preloading large packages from a cold disk takes seconds, never minutes."""

MEASURE_EVERY_S = 0.05

LAST_WORDS = 4096


class ForkedContainer:
    """A running container. Whoever waits reads for everybody; `listen` waits when nobody else does."""

    def __init__(self, container: Container, engine: Engine) -> None:
        self.container = container
        self._engine = engine
        self._places: dict[int, RemoteSandbox] = {}
        self._next = 1
        self._relay_pid = 0
        self._relay: DirectProxy | None = None
        self._is_measuring = False
        self._measures = 0
        self._is_read = False
        self._waiting: dict[anyio.Event, Callable[[], bool]] = {}
        self._last_words = b""
        self._asked_s = 0.0
        self.mux = Mux()
        self.slots = 0
        """How many sandboxes it can hold at once; fewer when one could not be cleared."""
        self.is_scoped = False
        self.problem: str | None = None

    @property
    def free(self) -> int:
        """How many more sandboxes it can take now."""
        return 0 if self.problem is not None or not self.container.is_alive() else self.slots - len(self._places)

    @property
    def is_empty(self) -> bool:
        """Nothing lives in it."""
        return not self._places

    async def wait_ready(self, settings: bytes, *, is_direct: bool) -> None:
        """Tell it what to be and wait until it has preloaded. `is_direct`: look for a way around its relay.

        Raises:
            SandboxUnavailable: it cannot be that, with its own words.
        """
        await self.send(settings)
        with anyio.move_on_after(READY_S):
            await self.wait_for(lambda: self.slots > 0)
        if self.problem is not None or not self.slots:
            raise SandboxUnavailable(self.problem or f"a container was not ready within {READY_S:g} s")
        init_pid = int((self.container.inspected.get("State") or {}).get("Pid") or 0)
        if is_direct and self._engine.client.info.is_local and init_pid and self._relay_pid:
            self._relay = DirectProxy.find(init_pid, self._relay_pid)

    async def listen(self) -> None:
        """Take what comes until it is gone, so that an end is known before somebody asks."""
        await self.wait_for(lambda: False)

    async def wait_for(self, is_reached: Callable[[], bool]) -> None:
        """Wait until `is_reached`, or the container is gone.

        One of those who wait is the reader. It spares the others' tasks, and in most cases, where only one waits, a
        turn of the event loop for each message.
        """
        try:
            while not is_reached() and self.problem is None:
                if self._is_read:
                    await self._wait_for_news(is_reached)
                    continue
                self._is_read = True
                try:
                    await self._read()
                    while not is_reached() and self.problem is None:
                        # Whoever was told now acts before we look, or spin, for more.
                        await anyio.lowlevel.checkpoint()
                        await self._read()
                finally:
                    self._is_read = False
        finally:
            if not self._is_read and self._waiting:
                next(iter(self._waiting)).set()  # the next reader

    async def _wait_for_news(self, is_reached: Callable[[], bool]) -> None:
        news = anyio.Event()
        self._waiting[news] = is_reached
        try:
            await news.wait()
        finally:
            del self._waiting[news]

    def _tell(self) -> None:
        for news, is_reached in self._waiting.items():
            if self.problem is not None or is_reached():
                news.set()

    async def _read(self) -> None:
        """Take what comes next; notices the container's end."""
        stream = self.container.stream
        try:
            data = await stream.receive()
            raw = stream.take_output()
            if raw:
                self._last_words = (self._last_words + raw)[-LAST_WORDS:]
            if data:
                self._take(data)
                self._tell()
                return
            problem = "the container has ended"
        except (RemoteProtocolError, ValueError, TypeError, KeyError, ArithmeticError) as exc:
            problem = f"the container sent nonsense: {exc}"
            self.container.kill()
        words = self._last_words.decode("utf-8", "replace").strip()
        self._bury(words if words and not self.slots else problem)

    def _take(self, data: bytes) -> None:
        for event in self.mux.receive_data(data):
            match event:
                case Data(channel, piece):
                    place = self._places.get(channel // CHANNEL_STRIDE)
                    if place is not None:
                        place.lines[channel % CHANNEL_STRIDE].data += piece
                case StreamEnded(channel):
                    place = self._places.get(channel // CHANNEL_STRIDE)
                    if place is not None:
                        place.lines[channel % CHANNEL_STRIDE].is_over = True
                case Room():
                    pass
                case Control(body):
                    self._hear(msgpack.unpackb(body, strict_map_key=False))

    def _hear(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"started": int(number)} if 0 < number < self._next:
                self._told(number, has_started=True)
            case {"failed": int(number), "why": str(why)} if 0 < number < self._next:
                self._told(number, problem=why)
            case {"lines": int(number), "ends": [int(), int(), int(), int()] as ends} if 0 < number < self._next:
                self._told(number, ends=ends)
            case {"relay": int(pid)} if self._relay_pid == 0:
                self._relay_pid = pid
            case {"lowered": int(number)} if 0 < number < self._next:
                self._told(number, is_lowered=True)
            case {"ended": int(number), "status": int(status), "is_clean": bool(is_clean)}:
                self.slots -= not is_clean
                self._told(number, end=_exit(status, float(message["cpu_s"]), int(message["peak_memory_bytes"])))
            case {"measured": dict(rows)}:
                self._measures += 1
                for number, row in rows.items():
                    if number in self._places:
                        self._note(self._places[number], *row)
            case {"ready": int(slots), "is_scoped": bool(is_scoped)} if not self.slots:
                self.slots, self.is_scoped = slots, is_scoped
            case _:
                raise RemoteProtocolError(f"control message {str(message)[:200]}")

    def _told(self, number: int, **news: object) -> None:
        """Note what was said of a sandbox, unless nobody is interested any more."""
        place = self._places.get(number)
        if place is not None:
            for name, value in news.items():
                setattr(place, name, value)

    @staticmethod
    def _note(place: RemoteSandbox, cpu_s: float, memory_bytes: int, processes: int) -> None:
        place.measured = now = Measured(float(cpu_s), int(memory_bytes), max(1, int(processes)))
        peak = place.peak
        place.peak = Measured(
            max(peak.cpu_s, now.cpu_s), max(peak.memory_bytes, now.memory_bytes), max(peak.processes, now.processes)
        )

    def _bury(self, problem: str) -> None:
        self.problem = self.problem or problem
        for place in self._places.values():
            if place.end is None:
                place.problem = place.problem or problem
            for line in place.lines:
                line.is_over = True
        self._tell()

    async def send(self, frames: bytes) -> None:
        """Write to the container; returns silently when it is gone."""
        await self.container.stream.send(frames)

    def post(self, frames: bytes) -> None:
        """As `send`, without waiting."""
        if frames and self.problem is None:
            self._engine.soon(self.send, frames)

    def _control(self, message: Mapping[str, Any]) -> bytes:
        return self.mux.control(msgpack.packb(message))

    async def open(self, rlimits: Mapping[str, int]) -> RemoteSandbox:
        """Ask for one sandbox; `RemoteSandbox.wait_started` tells whether there is one."""
        number, self._next = self._next, self._next + 1
        place = self._places[number] = RemoteSandbox(self, number)
        for line in range(CHANNELS):
            self.mux.open(number * CHANNEL_STRIDE + line)
        message = {"open": number, "rlimits": dict(rlimits), "direct": self._relay is not None}
        await self.send(self._control(message))
        if self._relay is not None:
            await self._take_lines(place, self._relay)
        return place

    async def _take_lines(self, place: RemoteSandbox, relay: DirectProxy) -> None:
        with anyio.move_on_after(START_S):
            await self.wait_for(lambda: bool(place.ends) or place.is_over)
        place.direct = relay.take(place.ends) if place.ends else None
        if place.direct is None:
            self._relay = None
            relay.close()
            await self.send(self._control({"carry": place.number}))
        else:
            await self.send(self._control({"taken": place.number}))

    async def lower(self, place: RemoteSandbox, rlimits: Mapping[str, int]) -> None:
        """Lower ceilings of a sandbox; returns when it is done, or the sandbox gone."""
        place.is_lowered = False
        await self.send(self._control({"lower": place.number, "rlimits": dict(rlimits)}))
        await place.wait_lowered()

    def kill(self, place: RemoteSandbox) -> None:
        """Have every process of a sandbox killed, without waiting; its end says when it is done."""
        if not place.is_over:
            self.post(self._control({"kill": place.number}))

    def measure(self) -> None:
        """Have all sandboxes measured, unless they just were. The figures come later."""
        now = time.monotonic()
        if not self._is_measuring and now - self._asked_s >= MEASURE_EVERY_S and self.problem is None:
            self._asked_s, self._is_measuring = now, True
            self._engine.soon(self._measure_all)

    async def _measure_all(self) -> None:
        before = self._measures
        try:
            await self.send(self._control({"measure": True}))
            with anyio.move_on_after(START_S):
                await self.wait_for(lambda: self._measures > before)
        finally:
            self._is_measuring = False

    def forget(self, place: RemoteSandbox) -> None:
        """Nothing more of a sandbox is wanted. Its place is free once the container said that it ended."""
        if self._places.pop(place.number, None) is not None:
            for line in range(CHANNELS):
                self.mux.close(place.number * CHANNEL_STRIDE + line)
            for line_ in place.lines:
                line_.is_over = True
            if place.direct is not None:
                place.direct.close()
            self.post(self._control({"close": place.number}))
            self._tell()

    async def aclose(self) -> None:
        """Remove the container and with it every sandbox. Safe to call twice."""
        self._bury("the container was removed")
        for place in self._places.values():
            if place.direct is not None:
                place.direct.close()
        if self._relay is not None:
            self._relay.close()
        with suppress(SandboxUnavailable):
            await self.container.destroy()


def _exit(status: int, cpu_s: float, peak_memory_bytes: int) -> Exit:
    """`status`: as wait() has it; -1 when the first process was not among those reaped."""
    if status < 0:
        return Exit(cpu_s=cpu_s, peak_memory_bytes=peak_memory_bytes)
    signal, code = status & 0x7F, status >> 8 & 0xFF
    return Exit(signal or None, None if signal else code, cpu_s, peak_memory_bytes)
