"""`ZygoteHandle`: the host's handle on one zygote process, whichever isolation its sandboxes have.

It sends requests, reads reports, and watches whether the zygote answers: one that is stopped or stuck is killed.
`backend` and `contained_backend` say how theirs is started, and what its reports mean.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, Generic, TypeVar

import anyio
import msgpack
from anyio.abc import TaskGroup

from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.backend import Exit
from toolcell.sandbox.interpreter import FEW_ARENAS, ONE_THREAD
from toolcell.sandbox.shortages import IsolationRefused, unavailable
from toolcell.sandbox.stream import POLL_S, call_when_readable, wait_readable, wait_writable
from toolcell.support import event_loop
from toolcell.support.event_loop import ChangeEvent
from toolcell_bridge.entry.launcher import FAILED

READY_S = 60.0
"""A zygote that has not reported ready by then is killed: preloading large packages from a cold disk takes seconds,
never minutes."""

ANSWER_S = 10.0
"""A zygote answers a request within milliseconds. One that has not answered for this long, nor for a third of what a
start may take, is stopped or stuck; it is killed, and the next start gets another."""

END_S = 5.0
"""A zygote whose control socket is closed ends within milliseconds; after this long it is killed."""

GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ESHUTDOWN, errno.EBADF)
"""What a send says when nobody is at the other end. Every other error is a shortage and fails one request."""

MESSAGE_BYTES = 64 * 1024

ENVIRONMENT = {
    "LANG": "C.UTF-8",
    **ONE_THREAD,
    **FEW_ARENAS,
    # Huge pages for the heap: a fork then copies a page table entry per 2 MiB. A third less time per sandbox with
    # numpy and pandas loaded (measured).
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "PYTHONMALLOC": "pymalloc",
}
"""Environment of the zygote while it preloads. A guest gets another environment."""


class ForkedSandbox:
    """One sandbox, as reported by its zygote."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.has_started = False
        self.is_lowered = True
        """It has the rlimits that were last asked for."""
        self.problem = ""
        """Why it was not started, or why nobody will report its end."""
        self.end: Exit | None = None
        self.changed = ChangeEvent()

    @property
    def is_over(self) -> bool:
        """Its end is known, or nobody can report it any more."""
        return self.end is not None or bool(self.problem)

    def fail(self, problem: str) -> None:
        """Record why nobody will report its end."""
        self.problem = problem or "for a reason that was not told"
        self.changed.notify()


def exit_of(status: int, cpu_s: float, peak_memory_bytes: int, problem: str = "") -> Exit:
    """Return how a process ended whose wait status was reported; -1: it was not among those reaped.

    Not `os.waitstatus_to_exitcode`: a host may get any number.
    """
    if status < 0:
        return Exit(cpu_s=cpu_s, peak_memory_bytes=peak_memory_bytes, problem=problem)
    number, code = status & 0x7F, status >> 8 & 0xFF
    return Exit(number or None, None if number else code, cpu_s, peak_memory_bytes, problem)


Child = TypeVar("Child", bound=ForkedSandbox)


class ZygoteHandle(ABC, Generic[Child]):
    """A running zygote. `listen` must run as long as it is used."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process, self._control = process, control
        self._children: dict[int, Child] = {}
        self._unanswered: dict[int, float] = {}
        """When each request was sent that has no answer yet, oldest first."""
        self.is_dead = False
        self.start_s = 0.0
        """Seconds in which a sandbox must start."""
        self._is_listening = False
        self._is_in_trouble = ChangeEvent()
        """Something else than a report has come, or it cannot be received."""
        self._stopped_listening = anyio.Event()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def answer_s(self) -> float:
        """How long it may take to answer."""
        return max(ANSWER_S, self.start_s / 3)

    async def wait_ready(self) -> Mapping[str, Any]:
        """Wait until it has preloaded and can fork; return what it says of itself.

        Raises:
            IsolationRefused: it reported an error or died; nothing of it is left.
            SandboxUnavailable: it was not ready in time; nothing of it is left.

        Cancellation: nothing of it is left.
        """
        try:
            with anyio.fail_after(READY_S):
                message, _ = await self._receive()
        except TimeoutError:
            self.kill()
            raise SandboxUnavailable(f"the zygote was not ready after {READY_S:g} s") from None
        except BaseException:
            self.kill()
            raise
        if not message.get("ready"):
            errors = message.get("error") or self._read_error()
            self.kill()
            raise IsolationRefused(f"isolation could not be set up: {errors}")
        return message

    def _read_error(self) -> str:
        """Read what the process or the dynamic loader wrote before it died."""
        assert self._process.stderr is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        ready, _, _ = select.select([self._process.stderr], [], [], 0)
        text = os.read(self._process.stderr.fileno(), 4096).decode("utf-8", "replace").strip() if ready else ""
        return text or f"the zygote ended with status {self._process.poll()} before it was ready"

    def send_first(self, data: bytes) -> None:
        """Send what it needs before it is ready. If it is gone already, `wait_ready` says why.

        Raises:
            SandboxUnavailable: it could not be sent; nothing of it is left.
        """
        try:
            self._control.send(data)
        except OSError as exc:
            if exc.errno not in GONE:
                self.kill()
                raise SandboxUnavailable(f"the zygote did not take its settings: {exc}") from exc

    # Reports

    async def _receive(self) -> tuple[dict[str, Any], list[int]]:
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                await wait_readable(self._control)
                continue
            except MemoryError:  # raised before anything was received
                await anyio.sleep(POLL_S)
                continue
            except ConnectionResetError:  # it ended with something unread; what it had sent comes next
                continue
            except OSError as exc:
                if exc.errno not in (errno.ENOMEM, errno.ENOBUFS):
                    return {}, []
                await anyio.sleep(POLL_S)
                continue
            if not data:
                return {}, []
            if data.startswith(FAILED):  # from the launcher, which has no msgpack
                return {"error": data[len(FAILED) :].decode("utf-8", "replace")}, descriptors
            return msgpack.unpackb(data), descriptors

    async def listen(self) -> None:
        self._is_listening = True
        try:
            control = self._control.fileno()
            while not self.is_dead:
                if (loop := call_when_readable(self._control, self._take_report)) is not None:
                    try:
                        await self._is_in_trouble.wait()
                    finally:
                        loop.remove_reader(control)
                if not self.is_dead:
                    self._take(*await self._receive())
        finally:
            # If this was cancelled, no end of a child will be reported any more, so nobody may wait for one.
            self._mark_dead("nobody listens to the zygote any more")
            self._stopped_listening.set()

    def _take_report(self) -> None:
        """Take what has come, called by the event loop. `listen` sees to what cannot be received."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
        except (OSError, MemoryError):
            data = b""
        if data:
            self._take(msgpack.unpackb(data), descriptors)
        if not data or self.is_dead:
            self._is_in_trouble.notify()

    def _take(self, message: Mapping[str, Any], descriptors: list[int]) -> None:
        """Handle a report, or take note that there will be none."""
        if not message or "error" in message:
            self._mark_dead(message.get("error", "the zygote is gone"))
        else:
            self._handle(message, descriptors)

    @abstractmethod
    def _handle(self, message: Mapping[str, Any], descriptors: list[int]) -> None:
        """Take one report."""

    def _mark_dead(self, why: str) -> None:
        """Take note that it is gone, and with it its children."""
        self.is_dead = True
        for child in self._children.values():
            child.fail(why)
        self._children.clear()
        self._unanswered.clear()

    def check(self) -> None:
        """Kill it, and with it its children, if it is stuck: the runs of its children end, and starts go on."""
        waited_s = time.monotonic() - next(iter(self._unanswered.values()), time.monotonic())
        if self.is_dead or waited_s < self.answer_s:
            return
        try:
            self._control.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            # Nothing has been overlooked while this process itself was busy.
            self._kill_process()
            self._mark_dead(f"the zygote did not answer for {waited_s:.0f} s and was killed; was it stopped?")
        except OSError:
            return  # `listen` finds that it is gone

    async def wait_for(self, wait: Callable[[], Awaitable[object]]) -> None:
        """Wait for something that it does, and see to it that it is not stuck."""
        with anyio.move_on_after(self.answer_s):
            await wait()
            return
        self.check()

    # Requests

    async def _request(self, child: Child, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a request about a child. Return silently when it is gone: then the child's end is known.

        Raises:
            SandboxUnavailable: the request could not be sent; names the shortage.
        """
        data = msgpack.packb(message)
        while not self.is_dead:
            try:
                socket.send_fds(self._control, [data], descriptors)
            except BlockingIOError:
                await self.wait_for(lambda: wait_writable(self._control))
            except OSError as exc:
                if exc.errno not in GONE:
                    raise unavailable(exc) from exc
                self._mark_dead(f"the zygote is gone: {exc}")
            else:
                self._children[child.number] = child
                self._unanswered[child.number] = time.monotonic()
                return
        if not child.is_over:
            child.fail("the zygote is gone")

    async def wait_started(self, child: Child) -> None:
        """Wait until a child has been forked.

        Raises:
            SandboxUnavailable: it could not be forked; says why.
        """
        while not child.has_started:
            if child.problem:
                raise SandboxUnavailable(f"the zygote could not start a sandbox: {child.problem}")
            if not await child.changed.wait(self.answer_s):
                self.check()

    # Its end

    async def aclose(self) -> None:
        """End it and with it every sandbox it forked. Safe to call twice.

        Cancellation: shielded, and bounded: what does not exit by itself is killed.
        """
        with anyio.CancelScope(shield=True):
            await self._hang_up()
            self._close_descriptors()
            await self._wait_exited()
            self.kill()

    async def _hang_up(self) -> None:
        if self._control.fileno() >= 0:
            with suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)
            if self._is_listening:
                # Keep the descriptor open until nobody waits on it. If its number were reused too soon, the waiter
                # that is just waking up would remove the new registration.
                await self._stopped_listening.wait()

    async def _wait_exited(self) -> None:
        with anyio.move_on_after(END_S):
            while self._process.poll() is None:  # noqa: ASYNC110 - the end of a process sets no event
                await anyio.sleep(0.002)

    def kill(self) -> None:
        """Kill it at once, without an event loop. Safe to call twice."""
        self._close_descriptors()
        self.abort()

    def abort(self) -> None:
        """Kill it at once while somebody listens to it. Safe to call twice."""
        if self._process.poll() is None:
            self._kill_process()
            with suppress(subprocess.TimeoutExpired):  # of a machine in distress: it ends later
                self._process.wait(END_S)
        self._mark_dead("the zygote was closed")

    def _kill_process(self) -> None:
        self._process.kill()

    def _close_descriptors(self) -> None:
        self._control.close()
        for pipe in (self._process.stdin, self._process.stderr):
            if pipe is not None:
                pipe.close()


Zygote = TypeVar("Zygote", bound=ZygoteHandle[Any])
Forked = TypeVar("Forked")


class Zygotes(Generic[Zygote]):
    """The zygotes of one backend, by the size of frames that each is made for. A dead one is replaced."""

    def __init__(self, start: Callable[[int], Awaitable[Zygote]]) -> None:
        self._start = start
        self._tasks: TaskGroup | None = None
        self._ready: dict[int, Zygote] = {}
        self._starts: dict[int, _Start[Zygote]] = {}

    async def open(self) -> None:
        self._tasks = await anyio.create_task_group().__aenter__()

    async def fork(self, fork: Callable[[Zygote], Awaitable[Forked]], frame_bytes: int = 0) -> Forked:
        """Fork a sandbox with `fork`: once more if the zygote, and with it every sandbox of it, has died.

        Raises:
            SandboxUnavailable: nothing was started.
        """
        zygote = await self.living(frame_bytes)
        try:
            return await fork(zygote)
        except SandboxUnavailable:
            if not zygote.is_dead:
                raise
        return await fork(await self.living(frame_bytes))

    async def living(self, frame_bytes: int = 0) -> Zygote:
        """Return the zygote for these frames; 0: for those of every size. Who waits for its start shares its failure.

        Raises:
            SandboxUnavailable: it cannot be started, or the backend is not open.

        Cancellation: the start goes on until the backend is closed.
        """
        if self._tasks is None:
            raise SandboxUnavailable("the process backend is not open")
        if (found := self._ready.get(frame_bytes)) is not None:
            found.check()
            if not found.is_dead:
                return found
        if (start := self._starts.get(frame_bytes)) is None:
            start = self._starts[frame_bytes] = _Start()
            self._tasks.start_soon(self._serve, frame_bytes, start)
        await start.is_over.wait()
        if isinstance(start.failure, OSError):
            raise unavailable(start.failure) from start.failure
        if start.zygote is None:
            raise start.failure
        return start.zygote

    async def _serve(self, frame_bytes: int, start: _Start[Zygote]) -> None:
        """Start a zygote in the place of a dead one, and listen to it."""
        try:
            if (dead := self._ready.pop(frame_bytes, None)) is not None:
                await dead.aclose()
            zygote = await self._start(frame_bytes)
            if self._tasks is None:  # closed meanwhile
                zygote.kill()
            else:
                start.zygote = self._ready[frame_bytes] = zygote
        except Exception as exc:
            start.failure = exc
        finally:
            del self._starts[frame_bytes]
            start.is_over.set()
        if start.zygote is not None:
            await start.zygote.listen()

    async def close(self, end: Callable[[Zygote], Awaitable[None]]) -> None:
        """End all with `end`, also when that fails for one, and those that are about to start."""
        tasks, self._tasks = self._tasks, None
        async with AsyncExitStack() as ends:
            ends.push_async_callback(event_loop.end_tasks, tasks)
            while self._ready:
                ends.push_async_callback(end, self._ready.popitem()[1])


class _Start(Generic[Zygote]):
    """The start of a zygote, for all who wait for it."""

    def __init__(self) -> None:
        self.is_over = anyio.Event()
        self.zygote: Zygote | None = None
        self.failure: Exception = SandboxUnavailable("the process backend was closed")
