"""The zygote of the process backend: import everything once, then fork one isolated child per sandbox.

It runs as pid 1 of its own pid namespace, inside the root the launcher built: when it dies the kernel kills every
sandbox below it. It talks to the host over a SEQPACKET socket that no sandbox keeps. It never reads a byte that guest
code wrote, and never runs guest code.

Host to zygote: msgpack {"id", "outer_id", "settings", "descriptors"} with that many descriptors [bridge, stdout,
stderr, cgroup.procs...] attached. The settings are packed by themselves: nearly all requests have the same.
Zygote to host: {"ready", "layers", "lacks", ...} once; {"started": id} with a pidfd attached; {"failed": id, "why",
"errno"}; {"exited": id, "status", "cpu_s", "peak_memory_bytes"}.
"""

from __future__ import annotations

import _socket
import array
import errno
import gc
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import msgpack

from toolcell_bridge.entry import immortal_heap, page_copies, preparation
from toolcell_bridge.entry.fork_handlers import HANDLERS
from toolcell_bridge.entry.forked_guest import WARM_UPS, ForkedGuest
from toolcell_bridge.entry.immortal_heap import ImmortalHeap
from toolcell_bridge.entry.preparation import (
    BRIDGE,
    COMMON_MODULES,
    ENVIRONMENT,
    move_up,
    occupy_descriptors,
    preload,
    reseed,
    set_environment,
)
from toolcell_bridge.guest import errors, own_signals
from toolcell_bridge.isolation.apply import IsolationPlan, SandboxIsolation
from toolcell_bridge.isolation.guest_paths import SCRATCH, WRITABLE
from toolcell_bridge.isolation.rlimits import RlimitPlan, RlimitRows, numbered
from toolcell_bridge.isolation.root import DEVICES
from toolcell_bridge.isolation.syscalls import (
    CLONE_NEWPID,
    MNT_DETACH,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    mount,
    setns,
    umount2,
    unshare,
)
from toolcell_bridge.wire.frozen import frozen

REQUEST_BYTES = 64 * 1024
MAX_DESCRIPTORS = 8

IDLE_S = 0.005
"""After so long without an event it loads the next module that scripts may want."""

READ = ("/etc",)
READ_EXEC = ("/usr", "/lib", "/lib64", "/packages", "/toolcell", "/programs")

GUEST_MODULES = (
    "toolcell_bridge.guest.determinism",
    "toolcell_bridge.guest.script_end",
    "toolcell_bridge.guest.interrupts",
    "toolcell_bridge.guest.frames",
    "toolcell_bridge.guest.tool_names",
)
"""Of sessions and of scripts that fail. Loaded when the zygote is idle: a sandbox that loads them itself has a copy,
and its script waits for it."""


@frozen
class SandboxSettings:
    """What all sandboxes have that are requested with the same settings."""

    guest: ForkedGuest
    disk_bytes: int
    inodes: int
    rlimits: RlimitRows
    processors: int | None


class Zygote:
    """Serves fork requests from `control` until it closes."""

    def __init__(self, control: socket.socket, proc: int, own_ids: bool, executes: bool, programs: list[str]) -> None:
        """`programs`: the only files that scripts may execute; none named, they are all that they can read."""
        self._control = control
        self._proc = proc
        self._own_pid_namespace = os.open("self/ns/pid", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
        self._children: dict[int, tuple[int, int]] = {}
        """By pidfd: its pid, and the number of its request."""
        self._settings: SandboxSettings | None = None
        self._packed_settings = b""
        """As they were received."""
        self._guest_of: object = None
        """Which settings the guest is made for."""
        # Reserves the descriptor: each child has its own bridge there.
        placeholder = socket.socket(socket.AF_UNIX)
        self._bridge = socket.socket(fileno=os.dup2(placeholder.fileno(), BRIDGE, inheritable=False))
        self._to_load = [*COMMON_MODULES, *GUEST_MODULES]
        self._forks = 0
        self._is_repeatable = "PYTHONHASHSEED" in os.environ
        self._warm_ups = WARM_UPS
        self._pages: page_copies.Pages = {}
        """What every child needs."""
        self._heap: ImmortalHeap | None = None
        """While it is made immortal."""
        self._events = select.epoll()  # before it is taken away from scripts
        existing = tuple(filter(os.path.exists, READ_EXEC))
        policy = preparation.policy_for_imports(executes=executes)
        devices = [f"/dev/{name}" for name in DEVICES]
        read, read_exec = ((*READ, *existing), programs) if programs else (READ, existing)
        self._isolation = SandboxIsolation(read, read_exec, devices, own_ids, policy)
        with preparation.without_packages():
            preparation.adapt(policy)

    def serve(self, config: dict[str, Any]) -> None:
        """Preload, report ready, and answer requests."""
        with preparation.without_packages():
            if not config["executes"]:
                errors.install_refusals()
            own_signals.install()
        with scratch():
            problems = preload(config["preload"])
            preload(config["ahead"])
        if config["preload"] or config["ahead"]:
            gc.collect()  # after our own imports nothing is garbage
        gc.freeze()
        gc.enable()  # it was off since the interpreter's start
        # Ends of children are events of their pidfds. A handler would be called also whenever the host stops one.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        errors.answer_with_line()
        layers = {"layers": [*self._isolation.layers], "lacks": self._isolation.lacks}
        self._send({"ready": True, "python": sys.version.split()[0], "problems": problems, **layers})
        control = self._control.fileno()
        self._events.register(control, select.EPOLLIN)
        while True:
            found = self._events.poll(self._patience_s())
            if not found and self._to_load:
                self._load_next()
            elif self._settings is not None and self._warm_ups:
                self._warm_up(self._settings.guest)
            for descriptor, _ in found:
                if descriptor != control:
                    self._reap(descriptor)
                elif not self._serve_one():
                    return
            if self._heap is not None and self._heap.step():
                self._heap = None
                self._settle()

    def _patience_s(self) -> float | None:
        """How long to wait for an event before the next step of what makes later sandboxes quicker.

        The first sandbox may be the only one, as for `toolcell run`: it would end later, and nobody would gain.
        """
        if self._to_load and self._children and self._forks > 1:
            return IDLE_S  # such a step can take long
        return None if self._heap is None else 0.0

    def _settle(self) -> None:
        # Frozen objects are never visited by the collector, so a child's collection does not copy their pages.
        gc.collect()
        gc.freeze()
        assert self._settings is not None
        self._pages = {}
        # Without them a sandbox rehearses. Nothing that a package has is imported here.
        with suppress(OSError, MemoryError), preparation.without_packages():
            self._pages = page_copies.find_pages(
                partial(self._settings.guest.try_out, is_repeatable=self._is_repeatable), self._proc
            )

    def _warm_up(self, guest: ForkedGuest) -> None:
        # One after each of the first events: the first sandbox does not wait for it, and a busy start does not skip it.
        guest.warm_up()
        self._warm_ups -= 1
        if not self._warm_ups:
            self._settle()

    def _load_next(self) -> None:
        with preparation.without_packages():
            importlib.import_module(self._to_load.pop(0))
        if not self._to_load:
            self._settle()
            self._heap = immortal_heap.begin()

    def _send(self, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        # Of the base class: scripts find the method of socket.socket absent, and so do we.
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        _socket.socket.sendmsg(self._control, [msgpack.packb(message)], ancillary)

    def _serve_one(self) -> bool:
        """Answer one request; False when the host is gone. Whatever goes wrong fails this request only."""
        data, descriptors, _, _ = socket.recv_fds(self._control, REQUEST_BYTES, MAX_DESCRIPTORS)
        if not data:
            return False
        request = msgpack.unpackb(data)
        try:
            if len(descriptors) != request["descriptors"]:
                # The kernel drops descriptors that find no place in our table.
                raise OSError(errno.EMFILE, "the descriptors of a sandbox were not received")
            self._start(request, descriptors)
        except (OSError, ValueError, MemoryError) as exc:
            number = errno.ENOMEM if isinstance(exc, MemoryError) else getattr(exc, "errno", None)
            self._send({"failed": request["id"], "why": str(exc), "errno": number})
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _start(self, request: dict[str, Any], descriptors: list[int]) -> None:
        """Fork a child and report it. One that cannot be reported is killed: nobody could end it."""
        if request["settings"] != self._packed_settings:
            self._take_settings(request["settings"])
        assert self._settings is not None
        pid = self._fork(self._settings, request["outer_id"], descriptors)
        self._forks += 1
        pidfd = -1
        try:
            pidfd = os.pidfd_open(pid)
            self._send({"started": request["id"]}, (pidfd,))
            self._events.register(pidfd, select.EPOLLIN)
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            if pidfd >= 0:
                os.close(pidfd)
            raise
        self._children[pidfd] = pid, request["id"]

    def _take_settings(self, packed: bytes) -> None:
        """Prepare everything that can be prepared for sandboxes with these settings.

        A child copies each page that it writes to first, at 3 us each; here the pages are already ours.
        """
        settings = msgpack.unpackb(packed)
        guest_of = settings["frame_bytes"], settings["environment"]
        if self._settings is not None and guest_of == self._guest_of:
            guest = self._settings.guest
        else:
            set_environment(settings["environment"])
            guest = ForkedGuest(self._bridge, settings["frame_bytes"])
            guest.pack_hello(self._isolation.layers)
            guest.warm_up()
            self._pages = {}  # those were of another guest
        limits = RlimitPlan(**settings["rlimits"])
        self._settings = SandboxSettings(
            guest, settings["disk_bytes"], settings["inodes"], numbered(limits), limits.processors
        )
        self._packed_settings, self._guest_of = packed, guest_of

    def _fork(self, settings: SandboxSettings, outer_id: int, descriptors: list[int]) -> int:
        reseed()
        plan = self._isolation.plan(
            outer_id, settings.disk_bytes, settings.inodes, settings.rlimits, settings.processors
        )
        try:
            unshare(CLONE_NEWPID)
            try:
                pid = HANDLERS.fork()
                if pid == 0:
                    self._become_sandbox(settings.guest, plan, descriptors)
            finally:
                setns(self._own_pid_namespace, CLONE_NEWPID)
        finally:
            self._isolation.release(plan)
        return pid

    def _become_sandbox(self, guest: ForkedGuest, plan: IsolationPlan, descriptors: list[int]) -> None:
        """The child's whole life. Never returns."""
        try:
            # First, so that whatever fails is written to its own stderr. No source can sit on a target: the zygote
            # keeps the first four numbers occupied.
            for descriptor, target in zip(descriptors, (BRIDGE, 1, 2), strict=False):
                os.dup2(descriptor, target, inheritable=target != BRIDGE)
            for cgroup in descriptors[3:]:
                os.write(cgroup, b"0")
            # In its own cgroup, which has to count them.
            is_copied = page_copies.populate(self._pages) > 0
            # Its own session. Otherwise kill(0, ...) goes to the zygote and every other sandbox.
            os.setsid()
            # Its own open file. Otherwise it shares the flags with every other sandbox.
            os.dup2(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), 0)
            self._isolation.apply(plan, self._proc, BRIDGE + 1)
            guest.serve(is_copied=is_copied)
        except BaseException as exc:
            os.write(2, f"{type(exc).__name__}: {exc}".encode())
        finally:
            os._exit(1)

    def _reap(self, pidfd: int) -> None:
        pid, number = self._children.pop(pidfd)
        self._events.unregister(pidfd)
        os.close(pidfd)
        _, status, usage = os.wait4(pid, 0)
        cpu_s, peak = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024
        self._send({"exited": number, "status": status, "cpu_s": cpu_s, "peak_memory_bytes": peak})


@contextmanager
def scratch() -> Iterator[None]:
    """Give modules that are being imported a home and a /tmp, as a script has them. matplotlib refuses without."""
    mount("tmpfs", SCRATCH, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=755,size=16m,nr_inodes=1024")
    for path in WRITABLE:
        os.mkdir(path)
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        umount2(SCRATCH, MNT_DETACH)


def main(control_fd: int, proc: int) -> None:
    """Entry point after exec: read the configuration and serve."""
    control, proc = socket.socket(fileno=move_up(control_fd)), move_up(proc)
    config = msgpack.unpackb(control.recv(REQUEST_BYTES))
    sys.path[:] = config["sys_path"]
    try:
        occupy_descriptors(BRIDGE + 1)
        Zygote(control, proc, config["own_ids"], config["executes"], config["programs"]).serve(config)
    except BaseException as exc:
        control.send(msgpack.packb({"error": f"{type(exc).__name__}: {exc}"}))
    os._exit(0)
