"""One guest for the life of a container, over the container's standard input and output."""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
from typing import TYPE_CHECKING, Any, cast

from toolcell_bridge import __version__
from toolcell_bridge.entry import preparation
from toolcell_bridge.entry.preparation import ERRORS, INPUT, OUTPUT, preload_all, set_environment
from toolcell_bridge.guest import errors
from toolcell_bridge.guest.channel import Channel
from toolcell_bridge.guest.interrupts import INTERRUPT_SIGNAL
from toolcell_bridge.guest.rehearsal import Rehearsal
from toolcell_bridge.guest.runner import Runner
from toolcell_bridge.isolation import capabilities
from toolcell_bridge.isolation.apply_in_container import ContainerIsolation, make_writable_directories
from toolcell_bridge.isolation.guest_paths import WORKSPACE
from toolcell_bridge.isolation.rlimits import RlimitPlan
from toolcell_bridge.wire.connection import Connection
from toolcell_bridge.wire.messages import PROTOCOL_VERSION, Done, Hello, Message

if TYPE_CHECKING:
    import socket

SIGNALLED = 128
"""An exit code above it is the signal that ended a process, as in shells and inits."""

WARM_UPS = 12
"""Rehearsals before Hello: the interpreter specialises code that has run about that often."""

MSG_DONTWAIT = 0x40


class PipePair:
    """Two pipes with the methods of one stream socket that the guest's channel uses."""

    def __init__(self, receives: int, sends: int) -> None:
        self._receives, self._sends = receives, sends
        self._ready = select.poll()
        self._ready.register(receives, select.POLLIN)

    def fileno(self) -> int:
        """Descriptor to wait on for reading; -1 once closed."""
        return self._receives

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Read up to `size` bytes; b"" when the host has hung up.

        Raises:
            BlockingIOError: MSG_DONTWAIT, and there is nothing to read.
        """
        if self._receives < 0:
            raise OSError(errno.EBADF, "the bridge is closed")
        if flags & MSG_DONTWAIT and not self._ready.poll(0):
            raise BlockingIOError(errno.EAGAIN, "nothing to read")
        return os.read(self._receives, size)

    def recv_into(self, room: memoryview, size: int = 0, flags: int = 0) -> int:
        """Read into memory; return how much was read. Raises what `recv` does."""
        if self._receives < 0:
            raise OSError(errno.EBADF, "the bridge is closed")
        if flags & MSG_DONTWAIT and not self._ready.poll(0):
            raise BlockingIOError(errno.EAGAIN, "nothing to read")
        return os.readv(self._receives, [room])

    def sendall(self, data: bytes | bytearray | memoryview) -> None:
        """Write all of `data`.

        Raises:
            OSError: the host is gone, or this end is closed.
        """
        if self._sends < 0:
            raise OSError(errno.EBADF, "the bridge is closed")
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._sends, rest) :]

    def close(self) -> None:
        """Close both. Safe to call twice."""
        for descriptor in {self._receives, self._sends} - {-1}:
            os.close(descriptor)
        self._receives = self._sends = -1


class MarkingChannel(Channel):
    """A channel that writes an end marker to standard error before each Done.

    The host finds the marker and then has all raw output of the run.
    """

    def __init__(self, pipes: PipePair, frame_bytes: int, end_marker: bytes) -> None:
        super().__init__(cast("socket.socket", pipes), Connection.guest(max_frame_bytes=frame_bytes))
        self._end_marker = end_marker

    def send(self, *messages: Message) -> None:
        """Send `messages` in one write, after the end marker if one of them is Done."""
        if self._end_marker and any(type(message) is Done for message in messages):
            try:
                os.write(ERRORS, self._end_marker)
            except OSError:
                pass  # the script closed it, so there is no output to wait for
        super().send(*messages)


def serve(settings: dict[str, Any]) -> None:
    """Prepare, apply isolation, and run scripts until the host hangs up."""
    if not settings.get("executes", False):
        errors.install_refusals()
    errors.answer_with_line()
    policy = preparation.policy_for_imports(executes=settings.get("executes", False))
    preparation.adapt(policy)
    preload_all(settings["preload"])
    set_environment(settings["environment"])
    frame_bytes: int = settings["frame_bytes"]
    rehearsal = Rehearsal(frame_bytes)
    for _ in range(WARM_UPS):
        rehearsal.run()
    channel = MarkingChannel(PipePair(INPUT, OUTPUT), frame_bytes, settings.get("end_marker", b""))
    runner = Runner(channel, WORKSPACE)
    writable = make_writable_directories()
    continue_in_guarded_child(INPUT)
    layers = ContainerIsolation.prepare(policy).apply(RlimitPlan(**settings["rlimits"]), writable, ERRORS + 1)
    rehearsal.run()
    channel.stay_here()
    channel.send(Hello(PROTOCOL_VERSION, __version__, sys.version.split()[0], layers))
    runner.serve()


def continue_in_guarded_child(bridge: int) -> None:
    """Fork and return in the child. The parent exits when the child exits, or at once when the host hangs up.

    Without the parent, a script that never reads its bridge would outlive its host. The script cannot touch the
    parent: where Landlock scopes signals they do not reach it, and when it dies the container's init ends everything.
    """
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return
    capabilities.set_undumpable()
    for number in (errors.ASK_SIGNAL, INTERRUPT_SIGNAL):
        signal.signal(number, lambda given, _: os.kill(child, given))  # the daemon signals this process
    os.close(OUTPUT)
    watched = select.poll()
    watched.register(bridge, 0)  # poll always reports a hang-up; the data belongs to the child
    watched.register(woken, select.POLLIN)
    while all(descriptor != bridge for descriptor, _ in watched.poll()):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else SIGNALLED - code)
        os.read(woken, 4096)
    os._exit(0)
