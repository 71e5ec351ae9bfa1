"""One container that holds many sandboxes: it carries their streams over its one attached stream, and their reports.

Everything that comes from the container is checked, by the multiplexer and here. A container that breaks the protocol
is killed, and its sandboxes with it.
"""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel
import msgpack

from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.docker.container import Container, Engine
from toolcell.sandbox.forked import ForkedSandbox, SandboxChannel, SupervisorChannel, exit_of
from toolcell_bridge.entry.shared_protocol import CHANNEL_STRIDE, CHANNELS
from toolcell_bridge.isolation.syscalls import syscall
from toolcell_bridge.wire.errors import RemoteProtocolError
from toolcell_bridge.wire.mux import Control, Data, Mux, Room, StreamEnded

# One sandbox of a shared container as its host sees it: what the container reported, and the ways to its guest.

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


class CarriedChannel:
    """The way to a guest over its container's one stream. Also the `ByteStream` of its bridge.

    It holds received bytes that have not been taken yet; the multiplexer bounds them.
    """

    reaches_supervisor = False

    def __init__(self, container: SharedContainer, number: int) -> None:
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

    def __init__(self, container: SharedContainer, number: int) -> None:
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


# Take a sandbox's descriptors out of its container's proxy, so that no process stands between host and guest.


FILE_TYPES = [stat.S_IFSOCK, stat.S_IFIFO, stat.S_IFIFO, stat.S_IFIFO]
"""Types of a bridge, of raw output on descriptors 1 and 2, and of the control pipe of the sandbox's supervisor."""


class DirectProxy:
    """The proxy process of one container, as the host sees it."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd

    @classmethod
    def find(cls, init_pid: int, inner_pid: int) -> DirectProxy | None:
        """Find the child of a container's first process that is `inner_pid` inside; None when it is not visible."""
        try:
            with open(f"/proc/{init_pid}/task/{init_pid}/children", encoding="ascii") as file:
                children = [int(pid) for pid in file.read().split()]
            for pid in children or [init_pid]:
                pidfd = os.pidfd_open(pid)
                # Compared after the pidfd was opened, so that both belong to the same process.
                if _inner_pid(pid) == inner_pid:
                    return cls(pidfd)
                os.close(pidfd)
        except (OSError, ValueError, AttributeError):
            return None
        return None

    def take(self, descriptors: Sequence[int]) -> SupervisorChannel | None:
        """Copy a sandbox's descriptors out of the proxy; None when the host may not, or they are something else."""
        taken: list[int] = []
        try:
            for number in descriptors:
                taken.append(syscall("pidfd_getfd", self._pidfd, number, 0))
                os.set_inheritable(taken[-1], False)
            types = [stat.S_IFMT(os.fstat(descriptor).st_mode) for descriptor in taken]
            if types == FILE_TYPES:
                bridge = socket.socket(fileno=taken[0])
                if (bridge.family, bridge.type) == (socket.AF_UNIX, socket.SOCK_STREAM):
                    for descriptor in taken[1:]:
                        os.set_blocking(descriptor, False)
                    return SupervisorChannel(bridge, taken[1:3], taken[3])
                bridge.detach()
        except OSError:
            pass
        for descriptor in taken:
            os.close(descriptor)
        return None

    def close(self) -> None:
        """Close the pidfd. Safe to call twice."""
        if self._pidfd >= 0:
            with suppress(OSError):
                os.close(self._pidfd)
            self._pidfd = -1


def _inner_pid(pid: int) -> int:
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        return next((int(line.split()[-1]) for line in file if line.startswith("NSpid:")), 0)


READY_S = 60.0
"""From start to ready. Preloading large packages from a cold disk takes seconds, never minutes."""

MEASURE_EVERY_S = 0.05

NEARLY = 0.75
"""The part of its memory from which on a container is nearly full."""

LAST_OUTPUT_BYTES = 4096
"""Raw output kept to explain why a container did not get ready."""


class SharedContainer:
    """A running container. One of the waiting tasks reads for all; when no task waits, `read_in_background` does."""

    def __init__(self, container: Container, engine: Engine, *, own_bytes: int, disk_bytes: int) -> None:
        """`own_bytes`: what it needs for itself. `disk_bytes`: what each sandbox may hold in files."""
        self.container = container
        self._engine = engine
        self._sandboxes: dict[int, RemoteSandbox] = {}
        self._next = 1
        self._proxy_pid = 0
        self._proxy: DirectProxy | None = None
        self._is_measuring = False
        self._measurements = 0
        self._is_reading = False
        self._waiting: dict[anyio.Event, Callable[[], bool]] = {}
        self._last_output = b""
        self._measured_at_s = 0.0
        self._own_bytes, self._disk_bytes = own_bytes, disk_bytes
        self._suspect = 0
        self.mux = Mux()
        self.slots = 0
        """How many sandboxes the container can hold at once. A slot that cannot be emptied is lost."""
        self.is_scoped = False
        """The kernel keeps signals of one sandbox from the others."""
        self.problem: str | None = None

    @property
    def free(self) -> int:
        """How many more sandboxes the container can take now."""
        return 0 if self.problem is not None or not self.container.is_alive() else self.slots - len(self._sandboxes)

    @property
    def is_empty(self) -> bool:
        """No sandbox lives in the container."""
        return not self._sandboxes

    async def wait_ready(self, settings: bytes) -> None:
        """Send the settings and wait until the container has preloaded.

        Raises:
            SandboxUnavailable: the container did not get ready; repeats its own message.
        """
        await self.send(settings)
        with anyio.move_on_after(READY_S):
            await self.wait_for(lambda: self.slots > 0)
        if self.problem is not None or not self.slots:
            raise SandboxUnavailable(self.problem or f"a container was not ready within {READY_S:g} s")
        init_pid = int((self.container.inspected.get("State") or {}).get("Pid") or 0)
        if self._engine.client.info.is_local and init_pid and self._proxy_pid:
            self._proxy = DirectProxy.find(init_pid, self._proxy_pid)

    # Reading.

    async def read_in_background(self) -> None:
        """Read until the container is gone, so that the end of a sandbox is known before a caller asks."""
        await self.wait_for(lambda: False)

    async def wait_for(self, is_reached: Callable[[], bool]) -> None:
        """Wait until `is_reached` holds, or the container is gone.

        One of the waiting tasks reads for all. So no task is needed only for reading, and when a single task waits,
        each message costs one turn of the event loop less.
        """
        try:
            while not is_reached() and self.problem is None:
                if self._is_reading:
                    await self._wait_for_change(is_reached)
                    continue
                self._is_reading = True
                try:
                    await self._read()
                    while not is_reached() and self.problem is None:
                        # A task that was notified runs before this one reads, or spins, for more.
                        await anyio.lowlevel.checkpoint()
                        await self._read()
                finally:
                    self._is_reading = False
        finally:
            if not self._is_reading and self._waiting:
                next(iter(self._waiting)).set()  # this task becomes the next reader

    async def _wait_for_change(self, is_reached: Callable[[], bool]) -> None:
        change = anyio.Event()
        self._waiting[change] = is_reached
        try:
            await change.wait()
        finally:
            del self._waiting[change]

    def _notify(self) -> None:
        for change, is_reached in self._waiting.items():
            if self.problem is not None or is_reached():
                change.set()

    async def _read(self) -> None:
        """Read once and handle what arrived; mark the container dead when it has ended."""
        stream = self.container.stream
        try:
            data = await stream.receive()
            raw = stream.take_output()
            if raw:
                self._last_output = (self._last_output + raw)[-LAST_OUTPUT_BYTES:]
            if data:
                self._receive(data)
                self._notify()
                return
            problem = "the container has ended"
        except (RemoteProtocolError, ValueError, TypeError, KeyError, ArithmeticError) as exc:
            problem = f"the container sent nonsense: {exc}"
            self.container.kill()
        output = self._last_output.decode("utf-8", "replace").strip()
        self._mark_dead(output if output and not self.slots else problem)

    def _receive(self, data: bytes) -> None:
        for event in self.mux.receive_data(data):
            match event:
                case Data(channel, piece):
                    if (sandbox := self._sandboxes.get(channel // CHANNEL_STRIDE)) is not None:
                        sandbox.carried.received[channel % CHANNEL_STRIDE].data += piece
                case StreamEnded(channel):
                    if (sandbox := self._sandboxes.get(channel // CHANNEL_STRIDE)) is not None:
                        sandbox.carried.received[channel % CHANNEL_STRIDE].is_over = True
                case Room():
                    pass
                case Control(body):
                    self._handle_message(msgpack.unpackb(body, strict_map_key=False))

    def _handle_message(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"started": int(number)} if 0 < number < self._next:
                self._sandbox(number).has_started = True
            case {"failed": int(number), "why": str(why)} if 0 < number < self._next:
                self._sandbox(number).fail(why)
            case {"descriptors": int(number), "ends": [int(), int(), int(), int()] as ends} if 0 < number < self._next:
                self._sandbox(number).proxy_descriptors = ends
            case {"proxy": int(pid)} if self._proxy_pid == 0:
                self._proxy_pid = pid
            case {"lowered": int(number)} if 0 < number < self._next:
                self._sandbox(number).is_lowered = True
            case {"ended": int(number), "status": int(status), "is_clean": bool(is_clean)}:
                self.slots -= not is_clean
                end = exit_of(status, float(message["cpu_s"]), int(message["peak_memory_bytes"]))
                self._sandbox(number).end = end
            case {"measured": dict(rows)}:
                self._measurements += 1
                unseen = self._unseen(rows)
                for number, (cpu_s, memory_bytes, processes, _) in rows.items():
                    if number in self._sandboxes:
                        memory_bytes += unseen.get(number, 0)
                        self._sandboxes[number].record_usage(cpu_s, memory_bytes, processes)
            case {"ready": int(slots), "is_scoped": bool(is_scoped)} if not self.slots:
                self.slots, self.is_scoped = slots, is_scoped
            case _:
                raise RemoteProtocolError(f"control message {str(message)[:200]}")

    def _unseen(self, rows: Mapping[int, tuple[float, int, int, int]]) -> dict[int, int]:
        """Return what the container holds and no process shows, for the sandbox that could hold most of it.

        Only where the container is nearly full, and twice in a row: the kernel would soon kill whoever shows most,
        which is a neighbour.
        """
        used = self.container.usage.held()
        shown = sum(memory_bytes for _, memory_bytes, _, _ in rows.values())
        unseen = used - shown - self._own_bytes - len(rows) * self._disk_bytes
        before, self._suspect = self._suspect, 0
        if rows and unseen > 0 and used > NEARLY * self.container.inspected["HostConfig"]["Memory"]:
            self._suspect = max(rows, key=lambda number: rows[number][3])
        return {before: unseen} if before and before == self._suspect else {}

    def _sandbox(self, number: int) -> RemoteSandbox:
        """Return a sandbox; one that nobody looks at, if it has been forgotten."""
        return self._sandboxes.get(number) or RemoteSandbox(self, number)

    def _mark_dead(self, problem: str) -> None:
        self.problem = self.problem or problem
        for sandbox in self._sandboxes.values():
            sandbox.mark_dead(problem)
        self._notify()

    # Writing.

    async def send(self, frames: bytes) -> None:
        """Write to the container. Return silently when it is gone."""
        await self.container.stream.send(frames)

    def post(self, frames: bytes) -> None:
        """Write to the container without waiting."""
        if frames and self.problem is None:
            self._engine.run_in_background(self.send, frames)

    def _control(self, message: Mapping[str, Any]) -> bytes:
        return self.mux.control(msgpack.packb(message))

    async def open(self, rlimits: Mapping[str, int]) -> RemoteSandbox:
        """Ask for one sandbox. `RemoteSandbox.wait_started` reports whether it was forked."""
        number, self._next = self._next, self._next + 1
        sandbox = self._sandboxes[number] = RemoteSandbox(self, number)
        for channel in range(CHANNELS):
            self.mux.open(number * CHANNEL_STRIDE + channel)
        message = {"open": number, "rlimits": dict(rlimits), "direct": self._proxy is not None}
        await self.send(self._control(message))
        if self._proxy is not None:
            await self._open_direct_channel(sandbox, self._proxy)
        return sandbox

    async def _open_direct_channel(self, sandbox: RemoteSandbox, proxy: DirectProxy) -> None:
        with anyio.move_on_after(START_S):
            await self.wait_for(lambda: bool(sandbox.proxy_descriptors) or sandbox.is_over)
        direct = proxy.take(sandbox.proxy_descriptors) if sandbox.proxy_descriptors else None
        if direct is None:
            self._proxy = None
            proxy.close()
            await self.send(self._control({"carry": sandbox.number}))
        else:
            sandbox.channel = direct
            await self.send(self._control({"taken": sandbox.number}))

    async def lower(self, sandbox: RemoteSandbox, rlimits: Mapping[str, int]) -> None:
        """Lower the rlimits of a sandbox. Return when that is done, or the sandbox is gone."""
        sandbox.is_lowered = False
        await self.send(self._control({"lower": sandbox.number, "rlimits": dict(rlimits)}))
        await sandbox.wait_lowered()

    def kill(self, sandbox: RemoteSandbox) -> None:
        """Kill every process of a sandbox without waiting. The container reports its end when that is done."""
        if not sandbox.is_over:
            self.post(self._control({"kill": sandbox.number}))

    def measure(self) -> None:
        """Ask for the usage of all sandboxes, unless that was done just now. The figures arrive later."""
        now = time.monotonic()
        if not self._is_measuring and now - self._measured_at_s >= MEASURE_EVERY_S and self.problem is None:
            self._measured_at_s, self._is_measuring = now, True
            self._engine.run_in_background(self._measure_all)

    async def _measure_all(self) -> None:
        before = self._measurements
        try:
            await self.send(self._control({"measure": True}))
            with anyio.move_on_after(START_S):
                await self.wait_for(lambda: self._measurements > before)
        finally:
            self._is_measuring = False

    # Ends.

    def forget(self, sandbox: RemoteSandbox) -> None:
        """Take no more reports and bytes of a sandbox. Its slot is free once the container has reported its end."""
        if self._sandboxes.pop(sandbox.number, None) is not None:
            for channel in range(CHANNELS):
                self.mux.close(sandbox.number * CHANNEL_STRIDE + channel)
            sandbox.carried.close()
            sandbox.channel.close()
            self.post(self._control({"close": sandbox.number}))
            self._notify()

    async def aclose(self) -> None:
        """Remove the container and every sandbox in it. Safe to call twice."""
        self._mark_dead("the container was removed")
        for sandbox in self._sandboxes.values():
            sandbox.channel.close()
        if self._proxy is not None:
            self._proxy.close()
        with suppress(SandboxUnavailable):
            await self.container.destroy()
