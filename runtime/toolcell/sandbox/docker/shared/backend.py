"""Many sandboxes in one container: for callers that trust their scripts alike and need answers below a millisecond.

The sandboxes are kept apart by what an unprivileged process can apply: Landlock with its signal scope, seccomp,
rlimits, and a tmpfs for each. What they share is listed in `SHARED` and in the layers of each sandbox. A container
serves one backend, so sandboxes of different Runtimes never meet in one container.
"""

from __future__ import annotations

import itertools
import os
import socket
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import anyio
import anyio.lowlevel
import msgpack

from toolcell.config import MIB, Limits, Policy, fits
from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.backend import BELOW, Exit, Sample
from toolcell.sandbox.docker.container import SIGKILL, Container, Engine
from toolcell.sandbox.docker.hardening import (
    SCRATCH,
    SHARED_MEMORY,
    Blueprint,
    container_config,
    daemon_layers,
    live_layers,
    rlimits_for,
    settings_frame,
)
from toolcell.sandbox.forked import ForkedSandbox, SandboxChannel, SupervisedSandbox, SupervisorChannel, exit_of
from toolcell_bridge.entry.shared_protocol import CHANNEL_STRIDE, CHANNELS, KILL
from toolcell_bridge.isolation.syscalls import syscall
from toolcell_bridge.wire.errors import RemoteProtocolError
from toolcell_bridge.wire.mux import Control, Data, Mux, Room, StreamEnded

# One container that holds many sandboxes: it carries their streams over its one attached stream, and their reports.
#
# Everything that comes from the container is checked, by the multiplexer and here. A container that breaks the
# protocol is killed, and its sandboxes with it.

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


SLOTS = 16
"""Sandboxes that one container holds at once. When all slots are taken, another container is started."""

OWN_PROCESSES = 4
"""The container's init, proxy and zygote, and one process that is just being forked."""

FILES_PER_SLOT = 16
"""Descriptors that the proxy and the zygote hold for each sandbox, with room to spare."""

OWN_FILES = 256
OWN_BYTES = 256 * MIB
"""Memory of the interpreter, of preloaded modules, and of the kernel's own data for the container."""

LINK_SHARED_MEMORY = f"import os; os.symlink({SCRATCH + '/shm'!r}, {SHARED_MEMORY!r})"
"""Code that makes the link in /dev. The image cannot contain it, because the container has a /dev of its own, which
belongs to root. It runs once, as a root without any capability, before anything else is in the container."""

CONTAINER_ENDED = "its container ended: somebody or the engine killed it"

OUT_OF_MEMORY = "its container ran out of memory, which other sandboxes in it held"

KILL_S = 5.0
"""How long the container may take to report that a killed sandbox is gone. One system call kills a sandbox."""

SHARED: Mapping[str, str] = {
    "pid": "the container's, shared; signals kept apart by Landlock",
    "mount": "read-only image, sized tmpfs of its own",
    "ipc": "none of the kernel's; shared memory in its own tmpfs",
    "cgroup": "the container's, shared: memory, processes, cpu of all its sandboxes together",
}
"""Details of layers that this mode has once for a whole container."""


def slot_paths(count: int) -> list[str]:
    """Return where the file systems of the sandboxes are mounted."""
    return [f"{SCRATCH}/slot{number}" for number in range(count)]


def shared_container_config(blueprint: Blueprint, limits: Limits, slots: int, processors: int) -> dict[str, Any]:
    """Return the body that creates a container for `slots` sandboxes: as for a single one, with room for all.

    The ceilings of the container are the sum over its sandboxes, so a sandbox within its limits cannot starve another.
    """
    config = container_config(blueprint, limits)
    memory_bytes = slots * (limits.memory_bytes + limits.disk_bytes) + OWN_BYTES
    tmpfs = "rw,noexec,nosuid,nodev,size={},nr_inodes={},mode=1777,uid=0,gid=0"
    host = config["HostConfig"] | {
        # The daemon's /dev/shm would be shared by all sandboxes. A link leads each sandbox to its own.
        "IpcMode": "none",
        "Memory": memory_bytes,
        "MemorySwap": memory_bytes,
        # Each sandbox has a supervisor beside its own processes.
        "PidsLimit": slots * (limits.processes + 1) + OWN_PROCESSES,
        "NanoCpus": int(min(blueprint.cpus * slots, processors) * 1e9),
        # They belong to root, so that no sandbox can change their mode or times. Only root can list them.
        "Tmpfs": {path: tmpfs.format(limits.disk_bytes, limits.inodes) for path in slot_paths(slots)},
        "Ulimits": [
            row | {"Soft": files, "Hard": files} if row["Name"] == "nofile" else row
            for row in config["HostConfig"]["Ulimits"]
            for files in [max(limits.open_files, OWN_FILES + FILES_PER_SLOT * slots)]
        ],
    }
    host.pop("ShmSize", None)
    return config | {"HostConfig": host}


class SharedSandbox(SupervisedSandbox):
    """One guest of a shared container."""

    def __init__(
        self, container: SharedContainer, remote: RemoteSandbox, limits: Limits, ident: str, required: frozenset[str]
    ) -> None:
        super().__init__(remote, remote.channel, ident=ident, limits=limits, required=required)
        self.container = container
        self._remote = remote
        self._memory_kills_before = container.container.usage.read().memory_kills
        self._memory_kills = self._memory_kills_then = 0
        self._memory_bytes = limits.memory_bytes
        self.backend = "docker"

    @property
    def container_id(self) -> str:
        """Id of the shared container, for `docker inspect`."""
        return self.container.container.id

    def accept(self, layers: Mapping[str, str]) -> None:
        """Take the layers named in Hello; refuse to run when a required layer is missing."""
        from_daemon = daemon_layers(self.container.container.inspected)
        shared = SHARED if self.container.is_scoped else {**SHARED, "pid": "the container's, shared; signals pass"}
        from_daemon |= {name: detail for name, detail in shared.items() if name in from_daemon}
        self.layers = live_layers(self.required, from_daemon, layers)

    def is_alive(self) -> bool:
        """Return False once the end of the sandbox is known."""
        return self.container.container.is_alive() and super().is_alive()

    async def prepare(self, limits: Limits) -> None:
        """Lower the rlimits of the guest to those of the next run. The run's monitor enforces the other limits."""
        self._memory_bytes = limits.memory_bytes
        if limits is not self.limits:
            await self.container.lower(self._remote, asdict(rlimits_for(limits)))

    def sample(self, *, brief: bool = False, last: bool = False) -> Sample:
        """Return what the container last reported; ask for a new report unless `brief`."""
        remote = self._remote
        if not brief and not remote.is_over:
            self.container.measure()
        end = remote.end or Exit()
        return Sample(
            cpu_s=max(remote.peak.cpu_s, end.cpu_s),
            peak_memory_bytes=remote.peak.memory_bytes,
            processes=remote.usage.processes,
            peak_processes=remote.peak.processes,
            memory_kills=self._memory_kills,
        )

    def kill(self) -> None:
        """Kill every process of the sandbox, without waiting. `ended` waits for the end."""
        if not self.is_killed:  # what the kernel killed before, and not afterwards
            self.is_killed, self._memory_kills_then = True, self.container.container.usage.read().memory_kills
        if not self.channel.send_control(KILL):
            self.container.kill(self._remote)

    def cpu_now(self) -> float | None:
        """Return None: the container's reports arrive in the event loop."""
        return None

    async def pause(self) -> bool:
        """Have the supervisor stop every process until `unpause`; False where others could let them go on."""
        return self.container.is_scoped and await super().pause()

    async def ended(self) -> Exit:
        """Wait, at most a few seconds, until the sandbox has ended; return how."""
        with anyio.move_on_after(KILL_S, shield=True):
            await self._remote.wait_ended()
        end = self._remote.end
        if end is None:
            return Exit(problem="" if self.container.container.is_alive() else CONTAINER_ENDED)
        if end.signal == SIGKILL:
            # A guest may not send it. What came before the host's kill was the kernel's, for the container's memory.
            usage = self.container.container.usage
            kills = self._memory_kills_then if self.is_killed else usage.read().memory_kills
            self._memory_kills = max(0, kills - self._memory_kills_before)
            if self._memory_kills and end.peak_memory_bytes < BELOW * self._memory_bytes:
                self._memory_kills = 0
                return Exit(cpu_s=end.cpu_s, problem=OUT_OF_MEMORY)
            if self._memory_kills:
                return end
        # The reported peak leaves out pages shared with the parent. The kernel's figure in `end` includes them.
        return replace(end, peak_memory_bytes=self._remote.peak.memory_bytes)

    async def destroy(self) -> None:
        """Kill every process of the sandbox and remove its files. Safe to call twice."""
        self.kill()
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(KILL_S):
                await self._remote.wait_ended()
            self.container.forget(self._remote)
            if not self._remote.is_over:
                # The container did not report the end in time. Removing the container ends the sandbox for certain.
                await self.container.aclose()


class SharedContainers:
    """The shared containers of one backend. It starts sandboxes in them."""

    def __init__(
        self,
        engine: Engine,
        blueprint: Blueprint,
        policy: Policy,
        preload: Sequence[str],
        required: frozenset[str],
    ) -> None:
        self._engine, self._blueprint = engine, blueprint
        self._policy, self._preload, self._required = policy, tuple(preload), required
        self._processors = 0
        self._containers: list[tuple[Limits, SharedContainer]] = []
        self._starting = anyio.Lock()
        self._count = itertools.count(1)

    async def start(self, limits: Limits) -> SharedSandbox:
        """Fork one sandbox, in a container that has room for it.

        Raises:
            SandboxUnavailable: nothing was started and nothing needs cleaning up.
        """
        async with self._starting:
            container = self._with_room(limits) or await self._launch(limits)
            remote = await container.open(asdict(rlimits_for(limits)))
        try:
            await remote.wait_started()
        except BaseException:
            container.forget(remote)
            raise
        return SharedSandbox(container, remote, limits, f"f{next(self._count)}", self._required)

    def _with_room(self, limits: Limits) -> SharedContainer | None:
        for made_for, container in tuple(self._containers):
            counted = made_for.model_copy(update={"cpu_s": limits.cpu_s})  # CPU time is counted for each sandbox
            if container.problem is not None:
                self._containers.remove((made_for, container))
                self._engine.run_in_background(container.aclose)
            elif container.free > 0 and fits(limits, counted):
                return container
            elif container.is_empty:
                # It was made for limits that no run asks for any more, or it has lost all its slots.
                self._containers.remove((made_for, container))
                self._engine.run_in_background(container.aclose)
        return None

    async def _launch(self, limits: Limits) -> SharedContainer:
        client = self._engine.client
        if not self._processors:
            self._processors = max(1, int((await client.call(client.api.info)).get("NCPU") or 1))
        config = shared_container_config(self._blueprint, limits, SLOTS, self._processors)
        launched = await self._engine.launch(config, self._blueprint)
        container = SharedContainer(launched, self._engine, own_bytes=OWN_BYTES, disk_bytes=limits.disk_bytes)
        settings = settings_frame(
            limits,
            self._policy,
            self._preload,
            rlimits_for(limits),
            slots=slot_paths(SLOTS),
            unscoped="landlock" not in self._required,
        )
        try:
            await self._link_shared_memory(container.container.id)
            await container.wait_ready(settings)
        except BaseException:
            await container.aclose()
            raise
        self._engine.run_in_background(container.read_in_background)
        self._containers.append((limits, container))
        return container

    async def _link_shared_memory(self, container: str) -> None:
        call, api = self._engine.client.call, self._engine.client.api
        command = ["python3", "-I", "-S", "-c", LINK_SHARED_MEMORY]
        made = await call(api.exec_create, container, command, user="0:0")
        output = await call(api.exec_start, made["Id"])
        if (await call(api.exec_inspect, made["Id"])).get("ExitCode"):
            raise SandboxUnavailable(f"a container could not be set up: {output.decode('utf-8', 'replace')[-500:]}")

    async def aclose(self) -> None:
        """Remove every container. Safe to call twice."""
        containers, self._containers = self._containers, []
        for _, container in containers:
            await container.aclose()
