"""Many sandboxes in one container: moves bytes between the multiplexer on the container's pipes and the guests.

Two processes. This one carries the guests' bytes and never forks, so that nothing of one guest's is in the memory of
another; the forker, which forks, never sees a byte of theirs. Neither interprets them. When either ends the container
does, and with it every sandbox.

Control messages are msgpack maps. Host to container: {"open": n, "rlimits": {...}, "direct": bool}, {"carry": n},
{"taken": n}, {"close": n} for us; {"kill": n}, {"lower": n, "rlimits": {...}}, {"measure": True} for the forker. Ours:
{"relay": pid} once, {"lines": n, "ends": [descriptors]}; the others are the forker's, passed on.
Sandbox n has the channels 4n (bridge), 4n+1 and 4n+2 (what it writes raw to descriptors 1 and 2).

A host on this machine with the right to may take our ends of a sandbox's lines out of this process, which is what
"direct" asks for: nothing is carried then. It says "taken" when it has, "carry" when it could not. The last of these
ends is the leash of the sandbox's warden, see there; while we have it nothing is written to it.
"""

from __future__ import annotations

import gc
import os
import select
import socket
from collections.abc import Callable
from time import perf_counter
from typing import Any, NoReturn

import msgpack

from toolcell_bridge.entry import container
from toolcell_bridge.entry.shared_protocol import CHANNEL_STRIDE, CHANNELS
from toolcell_bridge.entry.supervisor import FIRST_FREE, above
from toolcell_bridge.isolation.capabilities import set_undumpable
from toolcell_bridge.wire.mux import CHUNK_BYTES, Control, Data, Mux, Room

READ_BYTES = 4 * CHUNK_BYTES

SPIN_S = 100e-6
"""How long to look again before sleeping, while there has been something to carry just now: being woken takes 40 to
75 us in a virtual machine, most of what carrying a message costs."""

REPORT_BYTES = 64 * 1024


class GuestDescriptors:
    """Our ends of one sandbox's bridge and raw output."""

    __slots__ = ("ends", "is_waiting", "leash", "number", "unsent")

    def __init__(self, number: int, ends: list[int]) -> None:
        self.number = number
        *self.ends, self.leash = ends  # in the order of its channels; -1 once closed
        self.is_waiting = [False] * CHANNELS  # not read, because the channel has no room
        self.unsent = bytearray()  # for a bridge that is not read fast enough; never more than a window

    def interest(self, line: int) -> int:
        """What to wait for."""
        return (0 if self.is_waiting[line] else select.EPOLLIN) | (select.EPOLLOUT if self.unsent and line == 0 else 0)


class GuestProxy:
    """Serves the host until it hangs up."""

    def __init__(self, receives: int, sends: int, forker: socket.socket) -> None:
        os.set_blocking(sends, False)
        self._input, self._output, self._forker = receives, sends, forker
        self._mux = Mux()
        self._lines: dict[int, GuestDescriptors] = {}
        self._handlers: dict[int, Callable[[], None]] = {}
        self._poll = select.epoll()
        self._out = bytearray()
        self._is_quick = False

    def serve(self) -> None:
        """Carry until the host or the forker hangs up."""
        self._out += self._mux.control(msgpack.packb({"relay": os.getpid()}))
        self._watch(self._input, self._read_host)
        self._watch(self._forker.fileno(), self._read_forker)
        try:
            while True:
                self._flush()
                for descriptor, _ in self._wait():
                    handler = self._handlers.get(descriptor)  # one before it may have ended this one
                    if handler is not None:
                        handler()
        except EOFError:
            return

    def _wait(self) -> list[tuple[int, int]]:
        poll = self._poll.poll
        events = poll(0)
        if events:
            return events
        began = perf_counter()
        if self._is_quick:
            while perf_counter() - began < SPIN_S:
                os.sched_yield()
                events = poll(0)
                if events:
                    return events
        events = poll()
        self._is_quick = perf_counter() - began < 3 * SPIN_S
        return events

    def _watch(self, descriptor: int, handler: Callable[[], None]) -> None:
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, select.EPOLLIN)

    # The host.

    def _flush(self) -> None:
        """Write what is for the host. While it takes nothing no guest is read, so no more than a round piles up."""
        while self._out:
            try:
                del self._out[: os.write(self._output, self._out)]
            except BlockingIOError:
                both = select.poll()
                both.register(self._output, select.POLLOUT)
                both.register(self._input, select.POLLIN)
                if any(descriptor == self._input for descriptor, _ in both.poll()):
                    self._read_host()
            except OSError as exc:
                raise EOFError("the host is gone") from exc

    def _read_host(self) -> None:
        data = os.read(self._input, READ_BYTES)
        if not data:
            raise EOFError("the host hung up")
        for event in self._mux.receive_data(data):
            if type(event) is Data:
                self._to_guest(event.channel, event.data)
            elif type(event) is Room:
                self._resume(event.channel)
            elif type(event) is Control:
                self._obey(event.body)

    def _obey(self, body: bytes) -> None:
        match msgpack.unpackb(body):
            case {"open": number, "direct": is_direct}:
                self._open(number, body, is_direct)
            case {"carry": number}:
                self._carry(self._lines[number])
            case {"taken": number} | {"close": number}:
                self._close(number)
            case _:
                self._forker.send(body)

    def _read_forker(self) -> None:
        body = self._forker.recv(REPORT_BYTES)
        if not body:
            raise EOFError("the forker is gone")
        self._out += self._mux.control(body)

    # To the guests.

    def _to_guest(self, channel: int, piece: bytes) -> None:
        lines = self._lines.get(channel // CHANNEL_STRIDE)
        if lines is None or channel % CHANNEL_STRIDE or lines.ends[0] < 0:
            return
        if lines.unsent:
            lines.unsent += piece
            return
        sent = _write(lines.ends[0], piece)
        self._out += self._mux.took(channel, sent)
        if sent < len(piece):
            lines.unsent += piece[sent:]
            self._poll.modify(lines.ends[0], lines.interest(0))

    def _send_rest(self, lines: GuestDescriptors) -> None:
        sent = _write(lines.ends[0], lines.unsent)
        del lines.unsent[:sent]
        self._out += self._mux.took(lines.number * CHANNEL_STRIDE, sent)
        if not lines.unsent:
            self._poll.modify(lines.ends[0], lines.interest(0))

    # From the guests.

    def _read_bridge(self, lines: GuestDescriptors) -> None:
        if lines.unsent:
            self._send_rest(lines)
        data = None if lines.is_waiting[0] else self._take(lines, 0)
        # What was written raw before these bytes must not arrive after them.
        self._read_raw(lines, 1)
        self._read_raw(lines, 2)
        if data is not None:
            self._forward(lines, 0, data)

    def _read_raw(self, lines: GuestDescriptors, line: int) -> None:
        if lines.ends[line] >= 0 and not lines.is_waiting[line]:
            data = self._take(lines, line)
            if data is not None:
                self._forward(lines, line, data)

    def _take(self, lines: GuestDescriptors, line: int) -> bytes | None:
        """What a line has, b"" at its end, or None for nothing now."""
        room = self._mux.room(lines.number * CHANNEL_STRIDE + line)
        if room == 0:
            lines.is_waiting[line] = True
            self._poll.modify(lines.ends[line], lines.interest(line))
            return None
        try:
            return os.read(lines.ends[line], min(room, CHUNK_BYTES))
        except BlockingIOError:
            return None
        except OSError:  # its end was closed with our bytes unread in it
            return b""

    def _forward(self, lines: GuestDescriptors, line: int, data: bytes) -> None:
        channel = lines.number * CHANNEL_STRIDE + line
        if data:
            self._out += self._mux.data(channel, data)
        else:
            self._out += self._mux.end(channel)
            self._drop(lines, line)

    def _resume(self, channel: int) -> None:
        lines, line = self._lines.get(channel // CHANNEL_STRIDE), channel % CHANNEL_STRIDE
        if lines is not None and lines.is_waiting[line] and lines.ends[line] >= 0:
            lines.is_waiting[line] = False
            self._poll.modify(lines.ends[line], lines.interest(line))

    # Beginnings and ends.

    def _open(self, number: int, body: bytes, is_direct: bool) -> None:
        for line in range(CHANNELS):
            self._mux.open(number * CHANNEL_STRIDE + line)
        try:
            ends, theirs = make_lines()
        except OSError as exc:  # out of descriptors
            self._out += self._mux.control(msgpack.packb({"failed": number, "why": str(exc)}))
            return
        try:
            socket.send_fds(self._forker, [body], theirs)
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        lines = self._lines[number] = GuestDescriptors(number, ends)
        if is_direct:
            self._out += self._mux.control(msgpack.packb({"lines": number, "ends": ends}))
        else:
            self._carry(lines)

    def _carry(self, lines: GuestDescriptors) -> None:
        self._watch(lines.ends[0], lambda: self._read_bridge(lines))
        self._watch(lines.ends[1], lambda: self._read_raw(lines, 1))
        self._watch(lines.ends[2], lambda: self._read_raw(lines, 2))

    def _close(self, number: int) -> None:
        """The host wants to hear nothing more of a sandbox, or hears it by itself."""
        lines = self._lines.pop(number, None)
        if lines is not None:
            os.close(lines.leash)
        for line in range(CHANNELS):
            if lines is not None:
                self._drop(lines, line)
            self._mux.close(number * CHANNEL_STRIDE + line)

    def _drop(self, lines: GuestDescriptors, line: int) -> None:
        descriptor, lines.ends[line] = lines.ends[line], -1
        if descriptor >= 0:
            if self._handlers.pop(descriptor, None) is not None:
                self._poll.unregister(descriptor)
            os.close(descriptor)
        if line == 0:
            lines.unsent.clear()


def make_lines() -> tuple[list[int], list[int]]:
    """Our ends of a bridge, two pipes and a leash, and the other ends: a guest's, of the leash its warden's.

    Raises:
        OSError: nothing is left open.
    """
    ours, theirs = (sock.detach() for sock in socket.socketpair())
    made = [ours, theirs]
    try:
        for _ in range(CHANNELS - 1):
            made += os.pipe2(os.O_CLOEXEC)
        made += reversed(os.pipe2(os.O_CLOEXEC))
    except OSError:
        for descriptor in made:
            os.close(descriptor)
        raise
    for descriptor in made[::2]:
        os.set_blocking(descriptor, False)
    return made[::2], made[1::2]


def _write(descriptor: int, data: bytes | bytearray) -> int:
    """Bytes taken; all of them when nobody will ever read them."""
    try:
        return os.write(descriptor, data)
    except BlockingIOError:
        return 0
    except OSError:
        return len(data)


def serve(settings: dict[str, Any]) -> None:
    """Entry point, with the bridge already on private descriptors. Returns when the host has hung up."""
    receives, sends = above(container.INPUT), above(container.OUTPUT)
    while os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC) < FIRST_FREE - 1:
        pass
    ours, theirs = (socket.socket(fileno=above(sock.detach())) for sock in _control_pair())
    if os.fork() == 0:
        for descriptor in (receives, sends, ours.fileno()):
            os.close(descriptor)
        _become_forker(settings, theirs)
    theirs.close()
    set_undumpable()
    gc.freeze()
    gc.disable()  # nothing here makes cycles
    GuestProxy(receives, sends, ours).serve()


def _control_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _become_forker(settings: dict[str, Any], control: socket.socket) -> NoReturn:
    try:
        from toolcell_bridge.entry.shared_zygote import Forker, get_ready

        get_ready(settings)
        Forker(settings, control).serve()
    except BaseException as exc:
        os.write(2, f"{type(exc).__name__}: {exc}\n".encode())
    finally:
        os._exit(1)
