"""The zygote whose sandboxes have namespaces: how it is started, and what its reports mean."""

from __future__ import annotations

import errno
import itertools
import marshal
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import anyio
import msgpack

from toolcell.sandbox.backend import Exit
from toolcell.sandbox.interpreter import hashing, start
from toolcell.sandbox.process.root_filesystem import RootFilesystem
from toolcell.sandbox.process.zygote import ENVIRONMENT, ForkedSandbox, ZygoteHandle, exit_of
from toolcell.sandbox.shortages import describe
from toolcell_bridge.entry.launcher import CGROUPS_ARE_MINE, MARSHAL_FORMAT
from toolcell_bridge.guest.own_signals import ENDED_BY
from toolcell_bridge.wire.frozen import frozen


@frozen
class IdBlock:
    """A block of ids outside, for the sandboxes of one zygote."""

    first: int
    count: int


SLOTS = 4096
"""Blocks that there are on a machine with all ids."""

_STRIDE = 1021
"""Slots between the zygotes of one host, odd: so each has another one, and none of a host with a pid close to ours."""

_zygotes = itertools.count()


def _of_first_process(end: Exit) -> Exit:
    """Return how a first process of a pid namespace ended, whose exit code may name a signal: see `own_signals`."""
    if end.code is None or not ENDED_BY < end.code <= ENDED_BY + signal.SIGRTMAX:
        return end
    return replace(end, signal=end.code - ENDED_BY, code=None)


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


class NamespacedProcess(ForkedSandbox):
    """One forked sandbox, init of a pid namespace of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.pidfd = -1
        self.is_abandoned = False
        """Nobody waits for its start any more."""

    async def wait_ended(self, within_s: float) -> bool:
        """Wait until it has been reaped or its zygote is gone, at most about so long; True when it is so."""
        if not self.is_over:
            await self.changed.wait(within_s)
        return self.is_over


class NamespacedZygote(ZygoteHandle[NamespacedProcess]):
    """A zygote in namespaces of its own. Use `spawn` to make one."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, id_count: int) -> None:
        super().__init__(process, control)
        self.id_count = id_count
        self._numbers = itertools.count(1)
        """Of its own sandboxes: from them follow user ids, which no two that live may share."""
        self.problems: Mapping[str, str] = {}

    @classmethod
    def spawn(
        cls,
        root: RootFilesystem,
        preload: tuple[Sequence[str], Sequence[str]],
        slot: int,
        hash_seed: int | None,
        cgroups: tuple[Sequence[str], str],
        programs: Sequence[str] | None = None,
    ) -> NamespacedZygote:
        """Start the launcher and send it the plan. `preload`: modules that must be importable, and may be.
        `cgroups`: base directories, and our folder in each, which the launcher removes if the host is killed.
        `programs`: all that scripts may execute; empty: whatever they can read. None: nothing.

        Raises:
            OSError: the machine is short of something; nothing was started.
            SandboxUnavailable: it could not be sent its plan.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        block = id_block(slot)
        try:
            with theirs:
                process = subprocess.Popen(
                    [root.executable, "-I", "-S", "-B", root.launcher, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    env={"LANG": "C.UTF-8"},
                    cwd="/",
                    start_new_session=True,
                )
        except OSError:
            ours.close()
            raise
        environment = ENVIRONMENT | hashing(hash_seed)
        code = (
            f"{start(root.sys_path)}; from toolcell_bridge.entry.zygote import main; "
            "main(int(sys.argv[1]), int(sys.argv[2]))"
        )
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
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 512 * 1024)
        zygote.send_first(marshal.dumps(plan, MARSHAL_FORMAT))
        config: dict[str, Any] = {"preload": [*preload[0]], "ahead": [*preload[1]], "sys_path": [*root.sys_path]}
        config |= {"executes": programs is not None, "programs": [*(programs or ())]}
        config |= {"own_ids": zygote.id_count > 1}
        zygote.send_first(msgpack.packb(config))
        return zygote

    async def wait_ready(self) -> Mapping[str, Any]:
        """Do what every zygote does, and take note of what could not be preloaded."""
        message = await super().wait_ready()
        self.problems = message["problems"]
        return message

    def _handle(self, message: Mapping[str, Any], descriptors: list[int]) -> None:
        match message:
            case {"started": number}:
                self._take_started(number, descriptors)
            case {"failed": number, "errno": shortage, "why": why}:
                self._unanswered.pop(number, None)
                if (child := self._children.pop(number, None)) is not None:
                    child.fail(describe(shortage, why))
            case {"exited": number, "status": status, "cpu_s": cpu_s, "peak_memory_bytes": peak}:
                if (child := self._children.pop(number, None)) is not None:
                    child.end = _of_first_process(exit_of(status, cpu_s, peak))
                    child.notify()

    def _take_started(self, number: int, descriptors: list[int]) -> None:
        """Give a child its pidfd. One that nobody waits for is killed."""
        self._unanswered.pop(number, None)
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
            child.pidfd, child.has_started = descriptors[0], True
            child.notify()

    async def fork(self, settings: bytes, descriptors: Sequence[int]) -> NamespacedProcess:
        """Request a sandbox. `settings`: packed. `descriptors` are sent with the request; the caller closes them.

        Raises:
            SandboxUnavailable: the request could not be sent; names the shortage.
        """
        child = NamespacedProcess(next(self._numbers))
        # Where there are several ids, 0 is the zygote's own.
        outer_id = 0 if self.id_count == 1 else 1 + child.number % (self.id_count - 1)
        request = {"id": child.number, "outer_id": outer_id, "settings": settings, "descriptors": len(descriptors)}
        await self._request(child, request, descriptors)
        return child

    async def wait_started(self, child: NamespacedProcess) -> None:
        """Do what every zygote does.

        Cancellation: the child is killed as soon as the zygote reports it.
        """
        try:
            await super().wait_started(child)
        finally:
            child.is_abandoned = not child.has_started

    async def aclose(self, remove_cgroups: Callable[[], bool] = lambda: True) -> None:
        """End it and with it every sandbox it forked. Safe to call twice.

        `remove_cgroups` runs after its control socket has closed. The launcher removes what this function cannot.
        Cancellation: shielded, and bounded: what does not exit by itself is killed.
        """
        with anyio.CancelScope(shield=True):
            await self._hang_up()
            if not remove_cgroups():
                self._close_descriptors()
                self._mark_dead("the zygote was closed")
                return
            self._report_cgroups_removed()
            self._close_descriptors()
            await self._wait_exited()
            self.kill()

    def _report_cgroups_removed(self) -> None:
        """Tell the launcher that there are no cgroups to remove."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(OSError):
                os.write(self._process.stdin.fileno(), CGROUPS_ARE_MINE)
