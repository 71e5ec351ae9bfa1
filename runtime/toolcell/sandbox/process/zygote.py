"""The host's handle on one zygote process: starting it, asking it for sandboxes, hearing of their ends.

Knows the control protocol and descriptors; knows no limits' meaning and nothing of runs.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import anyio
import msgpack

from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.interpreter import ONE_THREAD, hashing
from toolcell.sandbox.process.root_filesystem import RootFilesystem
from toolcell_bridge.entry.launcher import CGROUPS_ARE_MINE

READY_S = 60.0
"""A zygote that has not said it is ready by then is given up: preloading large packages from a cold disk takes
seconds, never minutes."""

END_S = 5.0
"""A zygote whose control socket is closed ends within milliseconds; after this long it is killed."""

MESSAGE_BYTES = 64 * 1024

ENVIRONMENT = {
    "LANG": "C.UTF-8",
    **ONE_THREAD,
    # Huge pages for the heap: a fork then copies a page table entry per 2 MiB. A third less time per sandbox with
    # numpy and pandas loaded (measured).
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "PYTHONMALLOC": "pymalloc",
}
"""Of the zygote while it preloads; a guest starts with a cleared environment."""


@dataclass(frozen=True, slots=True)
class IdBlock:
    """A block of ids outside, for the sandboxes of one zygote."""

    first: int
    count: int


def id_block(slot: int) -> IdBlock | None:
    """Ids that own nothing here, or None for an ordinary user, who has only his own.

    Far above what systems hand out to people and containers, 64 Ki apart per zygote. In a user namespace with
    fewer ids, the top of what there is.
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
        return IdBlock(0x70000000 + slot % 4096 * 65536, 65536)
    if count > 2 * 65536:
        return IdBlock(first + count - 65536, 65536)
    return IdBlock(first + count - 1, 1)


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """What the zygote reports of a sandbox's end."""

    status: int
    cpu_s: float
    peak_memory_bytes: int


class SandboxProcess:
    """One forked sandbox as its zygote knows it."""

    def __init__(self) -> None:
        self.pidfd = -1
        self.problem: str | None = None
        self.end: ProcessExit | None = None
        self.changed = anyio.Event()

    def _tell(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()

    async def wait_started(self) -> None:
        """Wait for its pidfd.

        Raises:
            SandboxUnavailable: it could not be forked.
        """
        while self.pidfd < 0:
            if self.problem is not None:
                raise SandboxUnavailable(f"the zygote could not start a sandbox: {self.problem}")
            await self.changed.wait()

    async def wait_ended(self) -> None:
        """Wait until it has been reaped, or its zygote is gone."""
        while self.end is None and self.problem is None:
            await self.changed.wait()


class ZygoteProcess:
    """A running zygote. Use `start` to make one; `listen` must run for as long as it is used."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, id_count: int) -> None:
        self._process = process
        self._control = control
        self._children: dict[int, SandboxProcess] = {}
        self._next = 0
        self.id_count = id_count
        self.python = ""
        self.problems: Mapping[str, str] = {}
        self.is_dead = False
        self._listens = False
        self._deaf = anyio.Event()

    @classmethod
    def spawn(
        cls,
        view: RootFilesystem,
        preload: Sequence[str],
        slot: int,
        hash_seed: int | None,
        cgroups: tuple[Sequence[str], str],
    ) -> ZygoteProcess:
        """Start the launcher and hand it the plan. Quick; `wait_ready` does the waiting.

        `cgroups`: base directories, and our folder in each, which the launcher removes when everything has died.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        block = id_block(slot)
        try:
            with theirs:
                process = subprocess.Popen(
                    [view.executable, "-I", "-S", "-B", view.launcher,
                     str(theirs.fileno())],
                    pass_fds=[theirs.fileno()], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE, env={"LANG": "C.UTF-8"}, cwd="/", start_new_session=True,
                )  # fmt: skip
        except OSError as exc:
            ours.close()
            raise SandboxUnavailable(f"the launcher could not be started: {exc}") from exc
        environment = ENVIRONMENT | hashing(hash_seed)
        code = f"import sys; sys.path[:] = {list(view.sys_path)!r}; from toolcell_bridge.entry.zygote import main; " \
               "main(int(sys.argv[1]), int(sys.argv[2]))"  # fmt: skip
        plan = {
            "root": asdict(view.root),
            "ids": None if block is None else [block.first, block.count],
            "cgroups": list(cgroups[0]),
            "cgroup_folder": cgroups[1],
            "environment": environment,
            "arguments": [view.interpreter, "-P", "-s", "-S", "-B", "-c", code],
        }
        zygote = cls(process, ours, 1 if block is None else block.count)
        ours.setblocking(False)
        try:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 512 * 1024)
            ours.send(json.dumps(plan).encode())
            config = {"preload": list(preload), "sys_path": list(view.sys_path), "own_ids": zygote.id_count > 1}
            ours.send(msgpack.packb(config))
        except OSError as exc:
            zygote.kill()
            raise SandboxUnavailable(f"the launcher did not take its plan: {exc}") from exc
        return zygote

    async def wait_ready(self) -> None:
        """Wait until it has preloaded and can fork.

        Raises:
            SandboxUnavailable: it reported an error or died; everything of it is gone.

        Cancellation: everything of it is gone.
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
            errors = message.get("error") or self._last_words()
            self.kill()
            raise SandboxUnavailable(f"isolation could not be set up: {errors}")
        self.python = message["python"]
        self.problems = message["problems"]

    def _last_words(self) -> str:
        """What the launcher or the dynamic loader wrote before it died."""
        assert self._process.stderr is not None
        ready, _, _ = select.select([self._process.stderr], [], [], 1.0)
        text = os.read(self._process.stderr.fileno(), 4096).decode("utf-8", "replace").strip() if ready else ""
        return text or f"the zygote ended with status {self._process.poll()} before it was ready"

    async def _receive(self) -> tuple[dict[str, Any], list[int]]:
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 4)
            except BlockingIOError:
                try:
                    await anyio.wait_readable(self._control)
                except (anyio.ClosedResourceError, ValueError, OSError):
                    return {}, []
                continue
            except OSError:
                return {}, []
            if not data:
                return {}, []
            # The launcher, which has no msgpack, reports in JSON; both begin differently.
            return (json.loads(data) if data[:1] == b"{" else msgpack.unpackb(data)), descriptors

    async def listen(self) -> None:
        """Take its reports until it is gone."""
        self._listens = True
        try:
            await self._listen()
        finally:
            # Cancelled with whatever it was opened in: nobody would hear of a child's end, so nobody must wait for it.
            self._bury("nobody listens to the zygote any more")
            self._deaf.set()

    async def _listen(self) -> None:
        while True:
            message, descriptors = await self._receive()
            if not message or "error" in message:
                self._bury(message.get("error", "the zygote is gone"))
                return
            if "started" in message:
                child = self._children.get(message["started"])
                if child is None:
                    for descriptor in descriptors:
                        os.close(descriptor)
                    continue
                child.pidfd = descriptors[0]
            elif "failed" in message:
                child = self._children.pop(message["failed"], SandboxProcess())
                child.problem = message["why"]
            else:
                child = self._children.pop(message["exited"], SandboxProcess())
                child.end = ProcessExit(message["status"], message["cpu_s"], message["peak_memory_bytes"])
            child._tell()

    def _bury(self, why: str) -> None:
        self.is_dead = True
        for child in self._children.values():
            child.problem = why
            child._tell()
        self._children.clear()

    async def fork(self, request: dict[str, Any], descriptors: Sequence[int]) -> SandboxProcess:
        """Ask for a sandbox; `descriptors` are sent along and stay ours to close."""
        self._next += 1
        child = self._children[self._next] = SandboxProcess()
        # Id 0 is the zygote's own, where there is more than one.
        outer_id = 0 if self.id_count == 1 else 1 + self._next % (self.id_count - 1)
        data = msgpack.packb(request | {"id": self._next, "outer_id": outer_id})
        while not self.is_dead:
            try:
                socket.send_fds(self._control, [data], descriptors)
            except BlockingIOError:
                await anyio.wait_writable(self._control)
            except OSError as exc:
                self._bury(f"the zygote is gone: {exc}")
            else:
                return child
        child.problem = child.problem or "the zygote is gone"
        return child

    async def aclose(self, remove_cgroups: Callable[[], bool] = lambda: True) -> None:
        """End it and with it every sandbox it forked. Safe to call twice.

        `remove_cgroups` runs once its control socket has closed; what it cannot remove stays the launcher's business.
        Cancellation: shielded, and bounded: what does not end by itself is killed.
        """
        with anyio.CancelScope(shield=True):
            if self._control.fileno() >= 0:
                with suppress(OSError):
                    self._control.shutdown(socket.SHUT_RDWR)
                if self._listens:
                    # Its number must stay taken until nobody waits on it: one that is reused too soon would lose its
                    # registration to the waiter that is only just waking up.
                    await self._deaf.wait()
            if not remove_cgroups():
                self._close_descriptors()
                self._bury("the zygote was closed")
                return
            self._keep_cgroups()
            self._close_descriptors()
            with anyio.move_on_after(END_S):
                while self._process.poll() is None:  # noqa: ASYNC110 - the end of a process sets no event
                    await anyio.sleep(0.002)
            self.kill()

    def _keep_cgroups(self) -> None:
        """Tell the launcher that there is nothing for it to remove."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(OSError):
                os.write(self._process.stdin.fileno(), CGROUPS_ARE_MINE)

    def kill(self) -> None:
        """End it at once, without an event loop's help. Safe to call twice."""
        self._close_descriptors()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(END_S)
        self._bury("the zygote was closed")

    def _close_descriptors(self) -> None:
        self._control.close()
        for pipe in (self._process.stdin, self._process.stderr):
            if pipe is not None:
                pipe.close()
