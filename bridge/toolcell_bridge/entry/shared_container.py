"""Many sandboxes in one container: move bytes between the multiplexer on the container's pipes and the guests.

There are two processes. The proxy, in this file, moves the guests' bytes and never forks, so no guest's bytes are in
the memory of another. The zygote forks and never sees their bytes. Neither interprets them. When either ends, the
container ends, and with it every sandbox.

Control messages are msgpack maps. Host to proxy: {"open": n, "rlimits": {...}, "direct": bool}, {"carry": n},
{"taken": n}, {"close": n}. Host to zygote: {"kill": n}, {"lower": n, "rlimits": {...}}, {"measure": True}. Proxy to
host: {"proxy": pid} once, {"descriptors": n, "ends": [numbers]}; it passes on what the zygote sends.
Sandbox n has the channels 4n (bridge), 4n+1 and 4n+2 (raw writes to descriptors 1 and 2).

A host on this machine may have the right to take the proxy's ends of a sandbox's bridge and pipes. "direct" asks for
that: the proxy then moves nothing. The host sends "taken" when it has them and "carry" when it could not take them.
The last end is the control pipe of the sandbox's supervisor; the proxy never writes to it.
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

from toolcell_bridge.entry.preparation import FIRST_FREE, INPUT, OUTPUT, move_up, occupy_descriptors
from toolcell_bridge.entry.shared_protocol import CHANNEL_STRIDE, CHANNELS
from toolcell_bridge.isolation.capabilities import set_undumpable
from toolcell_bridge.wire.mux import CHUNK_BYTES, Control, Data, Mux, Room

READ_BYTES = 4 * CHUNK_BYTES

SPIN_S = 100e-6
"""How long to poll before sleeping when there was traffic just now. Being woken takes 40 to 75 us in a virtual machine,
most of the cost of moving a message."""

REPORT_BYTES = 64 * 1024


class GuestDescriptors:
    """The proxy's ends of one sandbox's bridge, raw output and control pipe."""

    __slots__ = ("control", "ends", "is_waiting", "number", "unsent")

    def __init__(self, number: int, ends: list[int]) -> None:
        self.number = number
        *self.ends, self.control = ends  # in the order of its channels; -1 once closed
        self.is_waiting = [False] * CHANNELS  # not read, because the channel has no room
        self.unsent = bytearray()  # for a bridge that is not read fast enough; never more than a window

    def interest(self, index: int) -> int:
        """Return the events to wait for on one end."""
        reads = 0 if self.is_waiting[index] else select.EPOLLIN
        return reads | (select.EPOLLOUT if self.unsent and index == 0 else 0)


class GuestProxy:
    """Serves the host until it hangs up."""

    def __init__(self, receives: int, sends: int, zygote: socket.socket) -> None:
        os.set_blocking(sends, False)
        self._input, self._output, self._zygote = receives, sends, zygote
        self._mux = Mux()
        self._guests: dict[int, GuestDescriptors] = {}
        self._handlers: dict[int, Callable[[], None]] = {}
        self._poll = select.epoll()
        self._out = bytearray()
        self._was_busy = False

    def serve(self) -> None:
        """Move bytes until the host or the zygote hangs up."""
        self._out += self._mux.control(msgpack.packb({"proxy": os.getpid()}))
        self._watch(self._input, self._read_host)
        self._watch(self._zygote.fileno(), self._read_zygote)
        try:
            while True:
                self._flush()
                for descriptor, _ in self._wait():
                    handler = self._handlers.get(descriptor)  # an earlier event may have removed it
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
        if self._was_busy:
            while perf_counter() - began < SPIN_S:
                os.sched_yield()
                events = poll(0)
                if events:
                    return events
        events = poll()
        self._was_busy = perf_counter() - began < 3 * SPIN_S
        return events

    def _watch(self, descriptor: int, handler: Callable[[], None]) -> None:
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, select.EPOLLIN)

    # The host.

    def _flush(self) -> None:
        """Write to the host. While it accepts nothing, no guest is read, so the buffer holds one round at most."""
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
                self._handle_control(event.body)

    def _handle_control(self, body: bytes) -> None:
        match msgpack.unpackb(body):
            case {"open": number, "direct": is_direct}:
                self._open(number, body, is_direct)
            case {"carry": number}:
                self._carry(self._guests[number])
            case {"taken": number} | {"close": number}:
                self._close(number)
            case _:
                self._zygote.send(body)

    def _read_zygote(self) -> None:
        body = self._zygote.recv(REPORT_BYTES)
        if not body:
            raise EOFError("the zygote is gone")
        self._out += self._mux.control(body)

    # To the guests.

    def _to_guest(self, channel: int, piece: bytes) -> None:
        guest = self._guests.get(channel // CHANNEL_STRIDE)
        if guest is None or channel % CHANNEL_STRIDE or guest.ends[0] < 0:
            return
        if guest.unsent:
            guest.unsent += piece
            return
        sent = _write(guest.ends[0], piece)
        self._out += self._mux.credit_for(channel, sent)
        if sent < len(piece):
            guest.unsent += piece[sent:]
            self._poll.modify(guest.ends[0], guest.interest(0))

    def _send_rest(self, guest: GuestDescriptors) -> None:
        sent = _write(guest.ends[0], guest.unsent)
        del guest.unsent[:sent]
        self._out += self._mux.credit_for(guest.number * CHANNEL_STRIDE, sent)
        if not guest.unsent:
            self._poll.modify(guest.ends[0], guest.interest(0))

    # From the guests.

    def _read_bridge(self, guest: GuestDescriptors) -> None:
        if guest.unsent:
            self._send_rest(guest)
        data = None if guest.is_waiting[0] else self._take(guest, 0)
        # Raw output written before these bytes must not arrive after them.
        self._read_raw(guest, 1)
        self._read_raw(guest, 2)
        if data is not None:
            self._forward(guest, 0, data)

    def _read_raw(self, guest: GuestDescriptors, index: int) -> None:
        if guest.ends[index] >= 0 and not guest.is_waiting[index]:
            data = self._take(guest, index)
            if data is not None:
                self._forward(guest, index, data)

    def _take(self, guest: GuestDescriptors, index: int) -> bytes | None:
        """Read one end: bytes, b"" when it is closed, None when there is nothing now."""
        room = self._mux.room(guest.number * CHANNEL_STRIDE + index)
        if room == 0:
            guest.is_waiting[index] = True
            self._poll.modify(guest.ends[index], guest.interest(index))
            return None
        try:
            return os.read(guest.ends[index], min(room, CHUNK_BYTES))
        except BlockingIOError:
            return None
        except OSError:  # the other end was closed with unread bytes in it
            return b""

    def _forward(self, guest: GuestDescriptors, index: int, data: bytes) -> None:
        channel = guest.number * CHANNEL_STRIDE + index
        if data:
            self._out += self._mux.data(channel, data)
        else:
            self._out += self._mux.end(channel)
            self._drop(guest, index)

    def _resume(self, channel: int) -> None:
        guest, index = self._guests.get(channel // CHANNEL_STRIDE), channel % CHANNEL_STRIDE
        if guest is not None and guest.is_waiting[index] and guest.ends[index] >= 0:
            guest.is_waiting[index] = False
            self._poll.modify(guest.ends[index], guest.interest(index))

    # Opening and closing.

    def _open(self, number: int, body: bytes, is_direct: bool) -> None:
        for index in range(CHANNELS):
            self._mux.open(number * CHANNEL_STRIDE + index)
        try:
            ends, theirs = make_descriptors()
        except OSError as exc:  # out of descriptors
            self._out += self._mux.control(msgpack.packb({"failed": number, "why": str(exc)}))
            return
        try:
            socket.send_fds(self._zygote, [body], theirs)
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        guest = self._guests[number] = GuestDescriptors(number, ends)
        if is_direct:
            self._out += self._mux.control(msgpack.packb({"descriptors": number, "ends": ends}))
        else:
            self._carry(guest)

    def _carry(self, guest: GuestDescriptors) -> None:
        self._watch(guest.ends[0], lambda: self._read_bridge(guest))
        self._watch(guest.ends[1], lambda: self._read_raw(guest, 1))
        self._watch(guest.ends[2], lambda: self._read_raw(guest, 2))

    def _close(self, number: int) -> None:
        """Forget a sandbox: the host closed it, or took its descriptors."""
        guest = self._guests.pop(number, None)
        if guest is not None:
            os.close(guest.control)
        for index in range(CHANNELS):
            if guest is not None:
                self._drop(guest, index)
            self._mux.close(number * CHANNEL_STRIDE + index)

    def _drop(self, guest: GuestDescriptors, index: int) -> None:
        descriptor, guest.ends[index] = guest.ends[index], -1
        if descriptor >= 0:
            if self._handlers.pop(descriptor, None) is not None:
                self._poll.unregister(descriptor)
            os.close(descriptor)
        if index == 0:
            guest.unsent.clear()


def make_descriptors() -> tuple[list[int], list[int]]:
    """Make a bridge, two output pipes and a control pipe; returns the proxy's ends and the sandbox's ends.

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
    """Write and return the number of bytes accepted; all of them when nobody will ever read them."""
    try:
        return os.write(descriptor, data)
    except BlockingIOError:
        return 0
    except OSError:
        return len(data)


def serve(settings: dict[str, Any]) -> None:
    """Entry point, with the bridge already on private descriptors. Returns when the host has hung up."""
    receives, sends = move_up(INPUT), move_up(OUTPUT)
    occupy_descriptors(FIRST_FREE - 1)
    ours, theirs = (socket.socket(fileno=move_up(sock.detach())) for sock in _control_pair())
    if os.fork() == 0:
        for descriptor in (receives, sends, ours.fileno()):
            os.close(descriptor)
        _become_zygote(settings, theirs)
    theirs.close()
    set_undumpable()
    gc.freeze()
    gc.disable()  # nothing here makes cycles
    GuestProxy(receives, sends, ours).serve()


def _control_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _become_zygote(settings: dict[str, Any], control: socket.socket) -> NoReturn:
    try:
        # Imported here, after the fork: the proxy does not need it.
        from toolcell_bridge.entry import preparation
        from toolcell_bridge.entry.contained_zygote import FixedDirectories, SharedZygote, prepare
        from toolcell_bridge.isolation.apply_in_container import ContainerIsolation

        prepare(settings)
        isolation = ContainerIsolation.prepare(preparation.policy_for_imports(), is_shared=True)
        SharedZygote(settings, control, isolation, FixedDirectories(settings["slots"])).serve()
    except BaseException as exc:
        os.write(2, f"{type(exc).__name__}: {exc}\n".encode())
    finally:
        os._exit(1)
