"""The warm parent of the sandboxes of one container: imports everything once, forks a warden and a guest for each.

Never holds a byte that a guest wrote: all its memory is in every guest it forks. Control messages to the host:
{"ready": slots, ...} once; {"started": n} or {"failed": n, "why"}; {"ended": n, "status", "cpu_s",
"peak_memory_bytes", "is_clean"}; {"lowered": n}; {"measured": {n: [cpu_s, memory_bytes, processes]}}.
"""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import msgpack

from toolcell_bridge import __version__
from toolcell_bridge.entry import container, supervisor
from toolcell_bridge.entry.process_usage import ProcessUsage
from toolcell_bridge.entry.shared_protocol import KILL
from toolcell_bridge.entry.supervisor import BRIDGE, SCOPES_SINCE, Lines, SandboxSlot
from toolcell_bridge.entry.zygote import EXTRAS, WARM_UPS, reseed_numpy, unlock_sqlite
from toolcell_bridge.guest import explanations, output
from toolcell_bridge.guest.channel import Channel
from toolcell_bridge.guest.rehearsal import Rehearsal
from toolcell_bridge.guest.runner import Runner
from toolcell_bridge.isolation.apply import WORKSPACE
from toolcell_bridge.isolation.apply_in_container import ContainerIsolation
from toolcell_bridge.isolation.capabilities import set_undumpable
from toolcell_bridge.isolation.rlimits import RlimitPlan
from toolcell_bridge.wire.connection import Connection
from toolcell_bridge.wire.messages import PROTOCOL_VERSION, Hello

SETTLE_S = 0.002
SETTLE_LOOKS = 100

REQUEST_BYTES = 64 * 1024
REPORT_BYTES = 4096
MOST_LINES = 4

LOWERED = (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_NOFILE)
"""Ceilings of a running guest that follow the limits of the run it is handed to."""


class NotAlone(OSError):
    """This kernel cannot keep sandboxes of one container from signalling each other."""


@dataclass(frozen=True, slots=True)
class SlotDirectory:
    """Where one sandbox at a time has its files."""

    path: str
    room: tuple[int, int] | None
    """Free blocks and inodes while nobody uses it; None when it is not a file system of its own."""


@dataclass(slots=True)
class SupervisedGuest:
    """One sandbox that lives."""

    number: int
    slot: SlotDirectory
    warden: int
    control: socket.socket
    guest: int = 0
    """Process id, once the warden has told it."""


class Forker:
    """Serves requests from `control` until it closes."""

    def __init__(self, settings: dict[str, Any], control: socket.socket) -> None:
        self._control = control
        self._slots = [SlotDirectory(path, room_in(path)) for path in settings["slots"]]
        self._walls = ContainerIsolation.prepare()
        self._is_scoped = self._walls.abi >= SCOPES_SINCE
        if not self._is_scoped and not settings.get("unscoped"):
            raise NotAlone(
                f"Landlock ABI {self._walls.abi}: below {SCOPES_SINCE} a sandbox can signal the others of its "
                'container; use mode="single", or a policy that does not require landlock'
            )
        self._children: dict[int, SupervisedGuest] = {}
        self._by_control: dict[int, SupervisedGuest] = {}
        self._usage = ProcessUsage()
        self._poll = select.poll()
        self._wake, alarm = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)
        frame_bytes: int = settings["frame_bytes"]
        self._rehearsal = Rehearsal(frame_bytes)
        self._channel = Channel(_stand_in(), Connection.guest(max_frame_bytes=frame_bytes))
        for _ in range(WARM_UPS):
            self._rehearsal.run()
        set_undumpable()

    def serve(self) -> None:
        """Say ready, then fork as asked until the relay is gone."""
        for descriptor in (self._control.fileno(), self._wake):
            self._poll.register(descriptor, select.POLLIN)
        # Frozen objects are never visited by the collector, so a guest's collection does not copy their pages.
        gc.collect()
        gc.freeze()
        ready = {"ready": len(self._slots), "python": sys.version.split()[0], "guest": __version__}
        self._say(ready | {"is_scoped": self._is_scoped})
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._wake:
                    self._reap()
                elif descriptor == self._control.fileno():
                    if not self._serve_one():
                        return
                elif (child := self._by_control.get(descriptor)) is not None:
                    self._hear(child, socket.MSG_DONTWAIT)

    def _say(self, message: dict[str, Any]) -> None:
        self._control.send(msgpack.packb(message))

    def _serve_one(self) -> bool:
        """Act on one request; False when the relay is gone."""
        body, descriptors, _, _ = socket.recv_fds(self._control, REQUEST_BYTES, MOST_LINES)
        if not body:
            return False
        match msgpack.unpackb(body):
            case {"open": number, "rlimits": plan}:
                bridge, out, err, leash = descriptors
                self._open(number, RlimitPlan(**plan), (bridge, out, err), leash)
            case {"kill": number}:
                child = self._children.get(number)
                if child is not None:
                    with suppress(OSError):
                        child.control.send(KILL, socket.MSG_DONTWAIT)
            case {"lower": number, "rlimits": plan}:
                child = self._children.get(number)
                while child is not None and not child.guest:
                    self._hear(child)  # the first thing that its warden says, about now
                if child is not None:
                    supervisor.lower(child.guest, RlimitPlan(**plan), LOWERED)
                self._say({"lowered": number})
            case {"measure": _}:
                wardens = {child.warden: number for number, child in self._children.items()}
                self._say({"measured": self._usage.measure(wardens)})
            case other:
                raise ValueError(f"the host said {other!r}")
        return True

    def _open(self, number: int, plan: RlimitPlan, lines: Lines, leash: int) -> None:
        try:
            slot = self._settled_slot()
            child = self._fork(number, slot, plan, lines, leash)
        except OSError as exc:
            self._say({"failed": number, "why": str(exc)})
            return
        finally:
            for descriptor in (*lines, leash):
                os.close(descriptor)
        self._slots.remove(slot)
        self._children[number] = self._by_control[child.control.fileno()] = child
        self._usage.begin(number)
        self._say({"started": number})
        self._poll.register(child.control, select.POLLIN)

    def _settled_slot(self) -> SlotDirectory:
        """The slot that has been free for longest and has all its room.

        The kernel lets go of the inodes in a dead guest's Landlock domain some milliseconds after the guest.

        Raises:
            OSError: there is none.
        """
        for _ in range(SETTLE_LOOKS):
            for slot in self._slots:
                if room_in(slot.path) == slot.room:
                    return slot
            if not self._slots:
                break
            select.select((), (), (), SETTLE_S)
        raise OSError("no slot is free")

    def _fork(self, number: int, slot: SlotDirectory, plan: RlimitPlan, lines: Lines, leash: int) -> SupervisedGuest:
        reseed_numpy()
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            try:
                pid = os.fork()
            except OSError:
                ours.close()
                raise
            if pid == 0:
                seat = SandboxSlot(slot.path, its.fileno(), leash, lines, plan, self._is_scoped)
                supervisor.guard(seat, self._walls, self._be_guest)
        return SupervisedGuest(number, slot, pid, ours)

    def _be_guest(self, layers: dict[str, str], workspace: str) -> NoReturn:
        """Inside the walls: rehearse, say Hello, run scripts until the host hangs up."""
        if os.path.realpath(WORKSPACE) == workspace:
            workspace = WORKSPACE  # the name that it has in every sandbox; an image without our links has none
        runner = Runner(self._channel, workspace)
        self._rehearsal.run()
        output.capture(self._channel)
        self._channel.stay_here()
        self._channel.send(Hello(PROTOCOL_VERSION, __version__, sys.version.split()[0], layers))
        runner.serve()
        os._exit(0)  # no atexit hooks, no threads joined, nothing of the script's run again

    def _hear(self, child: SupervisedGuest, flags: int = 0) -> None:
        try:
            data = child.control.recv(REPORT_BYTES, flags)
        except BlockingIOError:  # it was heard already, out of turn
            return
        except ConnectionResetError:  # it left without reading a request to end; its report is there all the same
            data = child.control.recv(REPORT_BYTES)
        report = msgpack.unpackb(data) if data else {}
        if "pid" in report:
            child.guest = report["pid"]
            return
        if "ended" not in report:
            # It held its sandbox together; without it nothing in this container is certain.
            raise RuntimeError(f"the warden of sandbox {child.number} is gone")
        self._poll.unregister(child.control)
        del self._children[child.number], self._by_control[child.control.fileno()]
        child.control.close()
        if report["is_clean"]:
            self._slots.append(child.slot)
        self._say(report | {"ended": child.number, "status": report["ended"]})

    def _reap(self) -> None:
        os.read(self._wake, 4096)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _stand_in() -> socket.socket:
    """A socket that stands for a number: every guest has its own bridge there."""
    pair = socket.socketpair()
    bridge = socket.socket(fileno=os.dup2(pair[0].fileno(), BRIDGE, inheritable=False))
    for end in pair:
        end.close()
    return bridge


def room_in(path: str) -> tuple[int, int] | None:
    """Free blocks and inodes of the file system mounted at `path`; None when none is."""
    if not os.path.ismount(path):
        return None
    room = os.statvfs(path)
    return room.f_bfree, room.f_ffree


def get_ready(settings: dict[str, Any]) -> None:
    """Import what scripts will want, and leave nothing of the container's environment.

    Raises:
        ImportError: something to be preloaded does not load.
    """
    explanations.explain()
    container.preload([*EXTRAS, *settings["preload"]])
    unlock_sqlite()
    container.set_environment(settings["environment"])
