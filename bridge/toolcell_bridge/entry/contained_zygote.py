"""The zygote of places that allow no namespaces: the profile `container`.

It imports everything once, then forks a supervisor and a guest for each sandbox. It never holds a byte that a guest
wrote, because every guest it forks inherits its memory. Messages to the host: {"ready": True, ...} once;
{"started": n, "supervisor": pid} or {"failed": n, "why"}; {"ended": n, "status", "cpu_s", "peak_memory_bytes",
"is_clean", "why"}; {"lowered": n}.

Without a pid namespace nothing ends with it by itself, so it adopts every orphan and ends what it leaves. A sandbox
without a mount namespace has its files in a directory of its own.
"""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

import msgpack

from toolcell_bridge import __version__
from toolcell_bridge.entry import immortal_heap, preparation, supervisor
from toolcell_bridge.entry.fork_handlers import HANDLERS
from toolcell_bridge.entry.forked_guest import WARM_UPS, ForkedGuest
from toolcell_bridge.entry.preparation import (
    BRIDGE,
    COMMON_MODULES,
    FIRST_FREE,
    move_up,
    occupy_descriptors,
    preload_all,
    reseed,
    set_environment,
)
from toolcell_bridge.entry.process_usage import children_of, descendants
from toolcell_bridge.entry.supervisor import (
    KILL_INTERVAL_S,
    KILL_PASSES,
    FileRoom,
    GuestStreams,
    SandboxSlot,
    adopt_orphans,
    empty,
)
from toolcell_bridge.guest import errors
from toolcell_bridge.isolation import landlock
from toolcell_bridge.isolation.apply_in_container import ContainerIsolation, beside_other_files
from toolcell_bridge.isolation.capabilities import set_undumpable
from toolcell_bridge.isolation.rlimits import RlimitPlan
from toolcell_bridge.isolation.syscalls import PR_SET_PDEATHSIG, prctl

SETTINGS_BYTES = 256 * 1024

NEEDS_LANDLOCK = "the profile container needs Landlock (Linux 5.13), which keeps files from a sandbox: {}"

SUPERVISORS_S = 2.0
"""How long the supervisors may take to end their sandboxes."""

END_PASSES = 1000
END_INTERVAL_S = 0.005


def main(control_fd: int) -> None:
    """Entry point: read the settings and serve until the host hangs up. Never returns."""
    prctl(PR_SET_PDEATHSIG, signal.SIGCONT)  # if it is stopped when the host is killed, it goes on, to clean up
    control = socket.socket(fileno=move_up(control_fd))
    settings = msgpack.unpackb(control.recv(SETTINGS_BYTES))
    sys.path[:] = settings["sys_path"]
    base: str = settings["base"]
    try:
        adopt_orphans(is_needed=not settings.get("unscoped"))
        occupy_descriptors(FIRST_FREE - 1)
        prepare(settings)
        policy = beside_other_files(preparation.policy_for_imports())
        readable = [(path, landlock.READ) for path in settings["readable"]]
        isolation = ContainerIsolation.prepare(policy, readable, is_shared=not settings.get("unscoped"))
        if not isolation.abi and not settings.get("unscoped"):
            raise OSError(NEEDS_LANDLOCK.format(isolation.lacks["landlock"]))
        zygote = ContainedZygote(settings, control, isolation, base)
        gc.enable()  # it was off since the interpreter's start
        zygote.serve({"layers": probe_layers(isolation, base), "lacks": isolation.lacks})
        zygote.release()
    except BaseException as exc:
        with suppress(OSError):
            control.send(msgpack.packb({"error": f"{type(exc).__name__}: {exc}"}))
    finally:
        # Only when nothing is alive: a script could put a link in the way of what is removed.
        if _end_all() and empty(base):
            os.rmdir(base)
        os._exit(0)


PROBE_LIMITS = RlimitPlan(cpu_s=60, address_space_bytes=1 << 40, processes=16, open_files=1024, file_size_bytes=1 << 20)
"""Limits of a process that only tries which layers can be had."""


def probe_layers(isolation: ContainerIsolation, base: str) -> list[str]:
    """Isolate a child that ends at once; returns the layers that it had.

    Raises:
        RuntimeError: a layer could not be applied.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.dup2(writer, BRIDGE)
            told: dict[str, Any] = {"layers": [*isolation.apply(PROBE_LIMITS, (base,), BRIDGE + 1)]}
        except BaseException as exc:
            told = {"error": f"{type(exc).__name__}: {exc}"}
        try:
            os.write(BRIDGE, msgpack.packb(told))
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        report = msgpack.unpackb(pipe.read() or msgpack.packb({"error": "a process that was isolated ended at once"}))
    os.waitpid(pid, 0)
    if "error" in report:
        raise RuntimeError(report["error"])
    return list(report["layers"])


def _end_all() -> bool:
    """Wait for the supervisors, which end when their host does, and kill whatever is left; True when nothing is."""
    signal.set_wakeup_fd(-1)
    for number in range(END_PASSES):
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        if number * END_INTERVAL_S > SUPERVISORS_S:
            for pid in descendants(os.getpid()):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        select.select((), (), (), END_INTERVAL_S)
    return False


REQUEST_BYTES = 64 * 1024
REPORT_BYTES = 4096
MAX_DESCRIPTORS = 4

LOWERED = (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_NOFILE)
"""Limits of a running guest that are lowered to those of its run."""


SUPERVISOR_GONE = "another process of this user killed its supervisor"


@dataclass(slots=True)
class SupervisedGuest:
    """One running sandbox."""

    number: int
    directory: str
    supervisor: int
    """Process id."""
    socket: socket.socket
    """The connection to the supervisor."""
    guest: int = 0
    """Process id, once the supervisor has reported it."""


class ContainedZygote:
    """Serves requests from `control` until it closes."""

    def __init__(
        self, settings: dict[str, Any], control: socket.socket, isolation: ContainerIsolation, base: str
    ) -> None:
        """`base`: the directory below which each sandbox gets one of its own."""
        self._adopts = not settings.get("unscoped")
        """This process is the parent of what a supervisor leaves."""
        self._control = control
        self._base = base
        self._isolation = isolation
        self._children: dict[int, SupervisedGuest] = {}
        self._by_socket: dict[int, SupervisedGuest] = {}
        self._poll = select.poll()
        self._wake, alarm = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)
        frame_bytes: int = settings["frame_bytes"]
        self._guest = ForkedGuest(_reserve_bridge(), frame_bytes)
        for _ in range(WARM_UPS):
            self._guest.warm_up()
        set_undumpable()

    def serve(self, facts: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Report ready, with these `facts`, then serve requests until the host is gone."""
        for descriptor in (self._control.fileno(), self._wake):
            self._poll.register(descriptor, select.POLLIN)
        # Frozen objects are never visited by the collector, so a guest's collection does not copy their pages.
        gc.collect()
        gc.freeze()
        self._send({"ready": True, "python": sys.version.split()[0], "guest": __version__, **facts})
        heap = immortal_heap.begin()
        while True:
            if heap is not None and heap.step():
                heap = None
            for descriptor, _ in self._poll.poll(None if heap is None else 0):
                if descriptor == self._wake:
                    self._reap()
                elif descriptor == self._control.fileno():
                    if not self._serve_one():
                        return
                elif (child := self._by_socket.get(descriptor)) is not None:
                    self._handle_report(child, socket.MSG_DONTWAIT)

    def release(self) -> None:
        """Hang up on the supervisors, which then end their sandboxes."""
        for child in self._children.values():
            child.socket.close()

    def _send(self, message: dict[str, Any]) -> None:
        self._control.send(msgpack.packb(message))

    def _serve_one(self) -> bool:
        """Serve one request; False when the host is gone."""
        body, descriptors, _, _ = socket.recv_fds(self._control, REQUEST_BYTES, MAX_DESCRIPTORS)
        if not body:
            return False
        message: dict[str, Any] = msgpack.unpackb(body)
        match message:
            case {"open": number, "rlimits": plan}:
                bridge, out, err, control = descriptors
                self._open(number, RlimitPlan(**plan), FileRoom(**message["room"]), (bridge, out, err), control)
            case {"lower": number, "rlimits": plan}:
                child = self._children.get(number)
                while child is not None and not child.guest:
                    self._handle_report(child)  # its supervisor reports it first
                if child is not None:
                    supervisor.lower_limits(child.guest, RlimitPlan(**plan), LOWERED)
                self._send({"lowered": number})
            case other:
                raise ValueError(f"unknown request {other!r}")
        return True

    def _open(self, number: int, plan: RlimitPlan, room: FileRoom, streams: GuestStreams, control: int) -> None:
        try:
            directory = f"{self._base}/{number}"
            os.mkdir(directory, 0o700)
            try:
                child = self._fork(number, directory, plan, room, streams, control)
            except OSError:
                os.rmdir(directory)
                raise
        except OSError as exc:
            self._send({"failed": number, "why": str(exc)})
            return
        finally:
            for descriptor in (*streams, control):
                os.close(descriptor)
        self._children[number] = self._by_socket[child.socket.fileno()] = child
        self._send({"started": number, "supervisor": child.supervisor})
        self._poll.register(child.socket, select.POLLIN)

    def _fork(
        self,
        number: int,
        directory: str,
        plan: RlimitPlan,
        room: FileRoom,
        streams: GuestStreams,
        control: int,
    ) -> SupervisedGuest:
        reseed()
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            try:
                pid = HANDLERS.fork()
            except OSError:
                ours.close()
                raise
            if pid == 0:
                slot = SandboxSlot(
                    directory=directory,
                    zygote=its.fileno(),
                    control=control,
                    streams=streams,
                    rlimits=plan,
                    room=room,
                )
                supervisor.supervise(slot, self._isolation, self._run_guest)
        return SupervisedGuest(number, directory, pid, ours)

    def _run_guest(self, layers: dict[str, str], workspace: str) -> NoReturn:
        """Send Hello, and run scripts until the host hangs up. Isolation is already applied."""
        # The container's passwd cannot be read, so getpass.getuser() needs a name.
        os.environ.update(HOME=workspace, TMPDIR=os.path.join(os.path.dirname(workspace), "tmp"), USER="sandbox")
        self._guest.pack_hello(layers)
        self._guest.serve(workspace)

    def _handle_report(self, child: SupervisedGuest, flags: int = 0) -> None:
        try:
            data = child.socket.recv(REPORT_BYTES, flags)
        except BlockingIOError:  # it was handled before, out of turn
            return
        except ConnectionResetError:  # it exited without reading a kill request; its report is there all the same
            data = child.socket.recv(REPORT_BYTES)
        report = msgpack.unpackb(data) if data else {}
        if "pid" in report:
            child.guest = report["pid"]
            return
        if "ended" not in report:
            if not self._adopts:
                # Without a supervisor nothing holds its sandbox back, so the zygote must end.
                raise RuntimeError(f"the supervisor of sandbox {child.number} is gone")
            self._end_orphans()
            report = {"ended": -1, "cpu_s": 0.0, "peak_memory_bytes": 0, "is_clean": False, "why": SUPERVISOR_GONE}
        self._poll.unregister(child.socket)
        del self._children[child.number], self._by_socket[child.socket.fileno()]
        child.socket.close()
        if report["is_clean"]:  # otherwise it is left to the host, which removes `base`
            os.rmdir(child.directory)
        self._send(report | {"ended": child.number, "status": report["ended"]})

    def _end_orphans(self) -> None:
        """Kill what a supervisor has left. It became this process's: every other child is a supervisor.

        Raises:
            RuntimeError: it forks faster than its processes can be found.
        """
        own = {child.supervisor for child in self._children.values()}
        for _ in range(KILL_PASSES):
            orphans = [pid for pid in children_of(os.getpid()) if pid not in own]
            if not orphans:
                return
            for pid in [below for orphan in orphans for below in (orphan, *descendants(orphan))]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            select.select((), (), (), KILL_INTERVAL_S)
            for pid in orphans:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        raise RuntimeError("a sandbox without a supervisor forks faster than its processes can be found")

    def _reap(self) -> None:
        os.read(self._wake, 4096)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _reserve_bridge() -> socket.socket:
    """Occupy the descriptor at which every guest has its own bridge."""
    pair = socket.socketpair()
    bridge = socket.socket(fileno=os.dup2(pair[0].fileno(), BRIDGE, inheritable=False))
    for end in pair:
        end.close()
    return bridge


def prepare(settings: dict[str, Any]) -> None:
    """Import what scripts need and replace the container's environment.

    Raises:
        ImportError: something to be preloaded does not load.
    """
    policy = preparation.policy_for_imports()
    with preparation.without_packages():
        HANDLERS.collect()
        errors.install_refusals()
        errors.answer_with_line()
        preparation.adapt(policy)
        preload_all(COMMON_MODULES)
    preload_all(settings["preload"])
    set_environment(settings["environment"])
