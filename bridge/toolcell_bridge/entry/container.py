"""Entry point of the guest inside a container: `python3 -P -s -B -m toolcell_bridge.entry.container single|forked`.

Standard input and output are the bridge. The first thing on it is one frame of settings; then, in `single`, the bridge
protocol of one guest, in `forked` the multiplexer's. Whatever is written raw to descriptors 1 and 2 leaves on standard
error.
"""

from __future__ import annotations

import errno
import importlib
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from toolcell_bridge.isolation import capabilities

if TYPE_CHECKING:
    import socket

    from toolcell_bridge.guest.channel import Channel
    from toolcell_bridge.wire.messages import Message

INPUT, OUTPUT, ERRORS = 3, 4, 5
"""Where the guest keeps its pipes, out of the way of the standard three."""

FIRST_FREE = 10

SIGNALLED = 128
"""An exit code above it is the signal that ended a process, as shells and inits have it."""

MAX_SETTINGS_BYTES = 1 << 20

WARM_UPS = 12
"""Rehearsals before Hello: the interpreter specialises code that has run about that often."""

MSG_DONTWAIT = 0x40


class PipePair:
    """Two pipes that look like one stream socket, as far as the guest's channel looks."""

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
            BlockingIOError: MSG_DONTWAIT, and nothing is there.
        """
        if self._receives < 0:
            raise OSError(errno.EBADF, "the bridge is closed")
        if flags & MSG_DONTWAIT and not self._ready.poll(0):
            raise BlockingIOError(errno.EAGAIN, "nothing to read")
        return os.read(self._receives, size)

    def sendall(self, data: bytes) -> None:
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


def take_standard_streams() -> None:
    """Move the bridge to private descriptors; leave nothing of it where the script's own output goes.

    Before anything foreign is imported: a library that prints must not print into the bridge.
    """
    for source, target in ((0, INPUT), (1, OUTPUT), (2, ERRORS)):
        os.dup2(source, target, inheritable=False)
    null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)


def read_exactly(descriptor: int, size: int) -> bytes:
    """Read `size` bytes and not one more.

    Raises:
        EOFError: the host hung up first.
    """
    data = b""
    while len(data) < size:
        piece = os.read(descriptor, size - len(data))
        if not piece:
            raise EOFError("the host hung up before it had said what to do")
        data += piece
    return data


def read_settings(descriptor: int) -> dict[str, Any]:
    """The host's first frame.

    Raises:
        EOFError, ValueError: it is not one.
    """
    import msgpack

    size = int.from_bytes(read_exactly(descriptor, 4), "big")
    if not 0 < size <= MAX_SETTINGS_BYTES:
        raise ValueError(f"settings of {size} bytes announced")
    settings: dict[str, Any] = msgpack.unpackb(read_exactly(descriptor, size))
    return settings


def preload(names: Sequence[str]) -> None:
    """Import what scripts will want.

    Raises:
        ImportError: one of them does not load, whatever it raised; names it.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as exc:
            raise ImportError(f"preloading {name} failed: {type(exc).__name__}: {exc}") from exc


def set_environment(extra: dict[str, str]) -> None:
    """Leave the script nothing of the container's environment; it finds the same names as in every sandbox."""
    from toolcell_bridge.entry.zygote import ENVIRONMENT

    os.environ.clear()
    os.environ.update(ENVIRONMENT | extra)


def serve_single(settings: dict[str, Any]) -> None:
    """One guest for the life of this container."""
    from toolcell_bridge import __version__
    from toolcell_bridge.entry.zygote import unlock_sqlite
    from toolcell_bridge.guest import explanations, output
    from toolcell_bridge.guest.rehearsal import Rehearsal
    from toolcell_bridge.guest.runner import Runner
    from toolcell_bridge.isolation.apply import WORKSPACE
    from toolcell_bridge.isolation.apply_in_container import ContainerIsolation, make_places
    from toolcell_bridge.isolation.rlimits import RlimitPlan
    from toolcell_bridge.wire.messages import PROTOCOL_VERSION, Hello

    explanations.explain()
    preload(settings["preload"])
    unlock_sqlite()
    set_environment(settings["environment"])
    frame_bytes: int = settings["frame_bytes"]
    rehearsal = Rehearsal(frame_bytes)
    for _ in range(WARM_UPS):
        rehearsal.run()
    channel = fenced_channel(PipePair(INPUT, OUTPUT), frame_bytes, settings.get("end_marker", b""))
    runner = Runner(channel, WORKSPACE)
    places = make_places()
    become_guarded(INPUT)
    layers = ContainerIsolation.prepare().raise_here(RlimitPlan(**settings["rlimits"]), places, ERRORS + 1)
    rehearsal.run()
    output.capture(channel)
    channel.stay_here()
    channel.send(Hello(PROTOCOL_VERSION, __version__, sys.version.split()[0], layers))
    runner.serve()


def become_guarded(bridge: int) -> None:
    """Go on in a child; the parent ends as the child ends, or at once when the host hangs up.

    A script that never reads its bridge would outlive its host otherwise. It cannot touch this parent: where Landlock
    scopes signals they do not reach it, and when it dies the container's init ends everything.
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
    os.close(OUTPUT)
    watched = select.poll()
    watched.register(bridge, 0)  # its hanging up is reported unasked, and what it carries is not ours to read
    watched.register(woken, select.POLLIN)
    while all(descriptor != bridge for descriptor, _ in watched.poll()):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else SIGNALLED - code)
        os.read(woken, 4096)
    os._exit(0)


def fenced_channel(pipes: PipePair, frame_bytes: int, fence: bytes) -> Channel:
    """A channel that puts `fence` on standard error before each Done, so that the host can tell what came before it."""
    from toolcell_bridge.guest.channel import Channel
    from toolcell_bridge.wire.connection import Connection
    from toolcell_bridge.wire.messages import Done

    class FencedChannel(Channel):
        def send(self, *messages: Message) -> None:
            if fence and any(type(message) is Done for message in messages):
                _write_fence(fence)
            super().send(*messages)

    return FencedChannel(cast("socket.socket", pipes), Connection.guest(max_frame_bytes=frame_bytes))


def _write_fence(fence: bytes) -> None:
    try:
        os.write(ERRORS, fence)
    except OSError:  # the script closed it: then nothing it wrote is waited for
        return


def main(arguments: Sequence[str]) -> int:
    """Serve in the mode named; returns the exit code."""
    take_standard_streams()
    try:
        settings = read_settings(INPUT)
        match list(arguments):
            case ["single"]:
                serve_single(settings)
            case ["forked"]:
                from toolcell_bridge.entry import shared_container

                shared_container.serve(settings)
            case other:
                raise ValueError(f"the mode is single or forked, not {other!r}")
    except BaseException as exc:
        os.write(2, f"{type(exc).__name__}: {exc}\n".encode())
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # No atexit hooks, no threads joined: nothing of the script's is run again.
    os._exit(code)
