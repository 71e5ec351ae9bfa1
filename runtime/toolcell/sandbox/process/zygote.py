"""The host's handle on one zygote process: start it, request sandboxes from it, read its reports."""

from __future__ import annotations

import errno
import itertools
import marshal
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import anyio
import msgpack

from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.asked_zygote import AskedZygote
from toolcell.sandbox.interpreter import ONE_THREAD, START, hashing
from toolcell.sandbox.process.root_filesystem import RootFilesystem
from toolcell.sandbox.shortages import describe, unavailable
from toolcell.sandbox.stream import POLL_S, wait_readable, wait_writable
from toolcell_bridge.entry.launcher import CGROUPS_ARE_MINE, FAILED, MARSHAL_FORMAT

READY_S = 60.0
"""A zygote that has not reported ready by then is killed: preloading large packages from a cold disk takes seconds,
never minutes."""

END_S = 5.0
"""A zygote whose control socket is closed ends within milliseconds; after this long it is killed."""

GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ESHUTDOWN, errno.EBADF)
"""What a send says when nobody is at the other end. Every other error is a shortage and fails one request."""

MESSAGE_BYTES = 64 * 1024

ENVIRONMENT = {
    "LANG": "C.UTF-8",
    **ONE_THREAD,
    # Huge pages for the heap: a fork then copies a page table entry per 2 MiB. A third less time per sandbox with
    # numpy and pandas loaded (measured).
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "PYTHONMALLOC": "pymalloc",
}
"""Of the zygote while it preloads. A guest gets another environment."""


@dataclass(frozen=True, slots=True)
class IdBlock:
    """A block of ids outside, for the sandboxes of one zygote."""

    first: int
    count: int


SLOTS = 4096
"""Blocks that there are on a machine with all ids."""

_STRIDE = 1021
"""Slots between the zygotes of one host, odd: so each has another one, and none of a host with a pid close to ours."""

_zygotes = itertools.count()


def next_slot() -> int:
    """Choose a number for the ids of one more zygote; two hosts seldom choose the same.

    Every input is read at each call: a forked child has another pid, and goes on with the count of its parent.
    """
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino  # hosts in two containers may have one pid
    except OSError:
        namespace = 0
    return (os.getpid() + _STRIDE * next(_zygotes) + 2654435761 * namespace) % SLOTS  # Knuth's multiplicative hash


def id_block(slot: int) -> IdBlock | None:
    """Choose ids that own nothing on this machine; None for an ordinary user, who has one id only.

    They are far above the ids of people and containers, 64 Ki apart per zygote. In a user namespace with fewer ids they
    are the highest ones.
    """
    if os.geteuid() != 0:
        return None
    try:
        with open("/proc/self/uid_map", encoding="ascii") as table:
            ranges = [list(map(int, line.split())) for line in table]
    except OSError:
        ranges = [[0, 0, 2**32 - 1]]
    first, _, count = max(ranges, key=lambda row: row[2])
    if first + count > 0x7FFFFFFF:
        return IdBlock(0x70000000 + slot % SLOTS * 65536, 65536)
    if count > 2 * 65536:
        return IdBlock(first + count - 65536, 65536)
    return IdBlock(first + count - 1, 1)


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """The zygote's report that a sandbox has ended."""

    status: int
    cpu_s: float
    peak_memory_bytes: int


class SandboxProcess:
    """One forked sandbox, as reported by its zygote."""

    def __init__(self) -> None:
        self.pidfd = -1
        self.problem: str | None = None
        self.end: ProcessExit | None = None
        self.is_abandoned = False
        """Nobody waits for its start any more."""
        self.changed = anyio.Event()

    def notify(self) -> None:
        """Wake everybody who waits for a change."""
        self.changed.set()
        self.changed = anyio.Event()

    def fail(self, problem: str) -> None:
        """Record why it cannot be used any more."""
        self.problem = problem
        self.notify()

    async def wait_ended(self) -> None:
        """Wait until it has been reaped or its zygote is gone."""
        while self.end is None and self.problem is None:
            await self.changed.wait()


class ZygoteProcess(AskedZygote):
    """A running zygote. Use `spawn` to make one; `listen` must run as long as it is used."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, id_count: int) -> None:
        self._process = process
        self._control = control
        self._children: dict[int, SandboxProcess] = {}
        self._asked: dict[int, float] = {}
        """When each request was sent that has no answer yet, oldest first."""
        self._next = 0
        self.id_count = id_count
        self.python = ""
        self.problems: Mapping[str, str] = {}
        self.is_dead = False
        self._is_listening = False
        self._stopped_listening = anyio.Event()

    @classmethod
    def spawn(
        cls,
        root: RootFilesystem,
        preload: tuple[Sequence[str], Sequence[str]],
        slot: int,
        hash_seed: int | None,
        cgroups: tuple[Sequence[str], str],
        programs: Sequence[str] | None = None,
    ) -> ZygoteProcess:
        """Start the launcher and send it the plan. `preload`: modules that must be importable, and may be.
        `cgroups`: base directories, and our folder in each, which the launcher removes if the host is killed.
        `programs`: all that scripts may execute; empty: whatever they can read. None: nothing.

        Raises:
            OSError: the machine is short of something; nothing was started.
            SandboxUnavailable: the launcher died before it had its plan.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        block = id_block(slot)
        try:
            with theirs:
                process = subprocess.Popen(
                    [root.executable, "-I", "-S", "-B", root.launcher, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE, env={"LANG": "C.UTF-8"}, cwd="/", start_new_session=True,
                )  # fmt: skip
        except OSError:
            ours.close()
            raise
        environment = ENVIRONMENT | hashing(hash_seed)
        code = f"{START}; sys.path[:] = {list(root.sys_path)!r}; from toolcell_bridge.entry.zygote import main; " \
               "main(int(sys.argv[1]), int(sys.argv[2]))"  # fmt: skip
        plan = {
            "root": asdict(root.root),
            "ids": None if block is None else [block.first, block.count],
            "cgroups": list(cgroups[0]),
            "cgroup_folder": cgroups[1],
            "environment": environment,
            "arguments": [root.interpreter, "-P", "-s", "-S", "-B", "-c", code],
        }
        zygote = cls(process, ours, 1 if block is None else block.count)
        ours.setblocking(False)
        try:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 512 * 1024)
            ours.send(marshal.dumps(plan, MARSHAL_FORMAT))
            config: dict[str, Any] = {"preload": [*preload[0]], "ahead": [*preload[1]], "sys_path": [*root.sys_path]}
            config |= {"executes": programs is not None, "programs": [*(programs or ())]}
            config |= {"own_ids": zygote.id_count > 1}
            ours.send(msgpack.packb(config))
        except OSError as exc:
            zygote.kill()
            raise SandboxUnavailable(f"the launcher did not take its plan: {exc}") from exc
        return zygote

    async def wait_ready(self) -> None:
        """Wait until it has preloaded and can fork.

        Raises:
            SandboxUnavailable: it reported an error or died; nothing of it is left.

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
            raise SandboxUnavailable(f"isolation could not be set up: {errors}; `toolcell doctor` says how to get it")
        self.python = message["python"]
        self.problems = message["problems"]

    def _read_error(self) -> str:
        """Read what the launcher or the dynamic loader wrote before it died."""
        assert self._process.stderr is not None
        ready, _, _ = select.select([self._process.stderr], [], [], 1.0)
        text = os.read(self._process.stderr.fileno(), 4096).decode("utf-8", "replace").strip() if ready else ""
        return text or f"the zygote ended with status {self._process.poll()} before it was ready"

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
        """Handle its reports until it is gone."""
        self._is_listening = True
        try:
            await self._listen()
        finally:
            # If this was cancelled, no end of a child will be reported any more, so nobody may wait for one.
            self._mark_dead("nobody listens to the zygote any more")
            self._stopped_listening.set()

    async def _listen(self) -> None:
        while True:
            message, descriptors = await self._receive()
            if not message or "error" in message:
                self._mark_dead(message.get("error", "the zygote is gone"))
                return
            if "started" in message:
                self._take_started(message["started"], descriptors)
            elif "failed" in message:
                self._asked.pop(message["failed"], None)
                child = self._children.pop(message["failed"], SandboxProcess())
                child.fail(describe(message["errno"], message["why"]))
            else:
                child = self._children.pop(message["exited"], SandboxProcess())
                child.end = ProcessExit(message["status"], message["cpu_s"], message["peak_memory_bytes"])
                child.notify()

    def _take_started(self, number: int, descriptors: list[int]) -> None:
        """Give a child its pidfd. One that nobody waits for is killed."""
        self._asked.pop(number, None)
        child = self._children.get(number)
        if child is None or child.is_abandoned:
            for descriptor in descriptors:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                os.close(descriptor)
        elif not descriptors:
            # The kernel drops a descriptor that finds no place in our table. The child ends when its bridge closes.
            del self._children[number]
            child.fail(describe(errno.EMFILE, ""))
        else:
            child.pidfd = descriptors[0]
            child.notify()

    def _mark_dead(self, why: str) -> None:
        self.is_dead = True
        for child in self._children.values():
            child.fail(why)
        self._children.clear()
        self._asked.clear()

    async def fork(self, request: dict[str, Any], descriptors: Sequence[int]) -> SandboxProcess:
        """Request a sandbox. `descriptors` are sent with the request; the caller closes them.

        Raises:
            SandboxUnavailable: the request could not be sent; names the shortage.
        """
        self._next += 1
        number, child = self._next, SandboxProcess()
        # Where there are several ids, 0 is the zygote's own.
        outer_id = 0 if self.id_count == 1 else 1 + number % (self.id_count - 1)
        data = msgpack.packb(request | {"id": number, "outer_id": outer_id, "descriptors": len(descriptors)})
        while not self.is_dead:
            try:
                socket.send_fds(self._control, [data], descriptors)
            except BlockingIOError:
                await self._wait(lambda: wait_writable(self._control))
            except OSError as exc:
                if exc.errno not in GONE:
                    raise unavailable(exc) from exc
                self._mark_dead(f"the zygote is gone: {exc}")
            else:
                self._children[number] = child
                self._asked[number] = time.monotonic()
                return child
        child.problem = "the zygote is gone"
        return child

    async def wait_started(self, child: SandboxProcess) -> None:
        """Wait for a child's pidfd.

        Raises:
            SandboxUnavailable: it could not be forked; says why.

        Cancellation: it is killed as soon as the zygote reports it.
        """
        try:
            while child.pidfd < 0:
                if child.problem is not None:
                    raise SandboxUnavailable(f"the zygote could not start a sandbox: {child.problem}")
                await self._wait(child.changed.wait)
        finally:
            child.is_abandoned = child.pidfd < 0

    async def aclose(self, remove_cgroups: Callable[[], bool] = lambda: True) -> None:
        """End it and with it every sandbox it forked. Safe to call twice.

        `remove_cgroups` runs after its control socket has closed. The launcher removes what this function cannot.
        Cancellation: shielded, and bounded: what does not exit by itself is killed.
        """
        with anyio.CancelScope(shield=True):
            if self._control.fileno() >= 0:
                with suppress(OSError):
                    self._control.shutdown(socket.SHUT_RDWR)
                if self._is_listening:
                    # Keep the descriptor open until nobody waits on it. If its number were reused too soon, the waiter
                    # that is just waking up would remove the new registration.
                    await self._stopped_listening.wait()
            if not remove_cgroups():
                self._close_descriptors()
                self._mark_dead("the zygote was closed")
                return
            self._report_cgroups_removed()
            self._close_descriptors()
            with anyio.move_on_after(END_S):
                while self._process.poll() is None:  # noqa: ASYNC110 - the end of a process sets no event
                    await anyio.sleep(0.002)
            self.kill()

    def _report_cgroups_removed(self) -> None:
        """Tell the launcher that there are no cgroups to remove."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(OSError):
                os.write(self._process.stdin.fileno(), CGROUPS_ARE_MINE)

    def kill(self) -> None:
        """Kill it at once, without an event loop. Safe to call twice."""
        self._close_descriptors()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(END_S)
        self._mark_dead("the zygote was closed")

    def _close_descriptors(self) -> None:
        self._control.close()
        for pipe in (self._process.stdin, self._process.stderr):
            if pipe is not None:
                pipe.close()
