"""`SocketStream`: a non-blocking socket under asyncio, uvloop and trio.

Bytes move with one system call when they can, and only a wait goes through the event loop. Under asyncio the socket
stays registered with the loop for as long as it is open, because registering it for each wait costs more than the wait.
`open_pipe` makes what carries raw output.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress

import anyio

from toolcell.support.event_loop import TimeSlice, shared_slice

READ_BYTES = 64 * 1024
"""Also bounds how long a flood of tiny frames keeps the event loop: some ten milliseconds to decode."""

ROOM_BYTES = 1 << 20
"""Size of the kernel's buffer for longer messages. With the usual 208 KiB, 100 MB take 600 waits in place of 200,
and a fifth more CPU time."""

AF_UNIX = getattr(socket, "AF_UNIX", None)  # elsewhere the kernel finds the right size

PIPE_READS = 16

sched_yield = getattr(os, "sched_yield", lambda: None)

SPIN_S = 100e-6
"""How long to look again before sleeping, while the peer has been answering about as fast as this.

Waking a process that sleeps on another processor costs 40 to 75 us in a virtual machine: more than a whole round
trip between two that are awake, and it finds its caches cold."""

MISSES = 4
"""Looks in vain after which most waits sleep at once. One in so many still looks: a peer may have become quick."""

POLL_S = 0.01
"""How often a socket is looked at while the kernel has no room to watch it."""

_awake: set[SocketStream] = set()
"""Streams whose guest is at work. With more than one, looking again would keep the event loop from the others."""


class SocketStream:
    """The host's end of one bridge. One task receives at a time."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._writing: anyio.Event | None = None
        self._misses = 0
        self._has_answered = False
        """The peer has sent something since it was sent something."""
        self.is_looked_at = True
        """Whether a wait looks again before it sleeps. In vain where the peer waits for somebody else first."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_registered = False
        self._turn: TimeSlice | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._has_room = False
        self._early = b""
        """Read by the event loop, and not yet received."""
        self.sent_bytes = 0
        self.received_bytes = 0

    async def receive(self) -> bytes:
        """Return the next bytes, or b"" when the other end is gone."""
        until = 0.0
        while not self._early:
            try:
                data = self._sock.recv(READ_BYTES)
            except BlockingIOError:
                now = time.perf_counter()
                until = until or self._look_until(now)
                if now < until:
                    sched_yield()
                    continue
                if until > 0:
                    self._misses += 1
                    until = -1.0
                await self._wait_readable()
                continue
            except OSError:
                return b""
            if until > 0:
                self._misses = 0
            break
        else:
            data, self._early = self._early, b""
        self._has_answered = self.sent_bytes > 0
        self.received_bytes += len(data)
        return data

    def receive_now(self) -> bytes | None:
        """Return what has arrived, without waiting: None when nothing has, b"" when the other end is gone."""
        data, self._early = self._early, b""
        if not data:
            try:
                data = self._sock.recv(READ_BYTES)
            except BlockingIOError:
                return None
            except OSError:
                return b""
        self.received_bytes += len(data)
        return data

    def has_unread(self) -> bool:
        """Whether something that was sent has not been received."""
        try:
            return bool(self._early or self._sock.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def _look_until(self, now: float) -> float:
        """Return when to give up and sleep; negative for at once."""
        if not (self.is_looked_at and self._has_answered) or len(_awake) > 1:
            return -1.0
        if self._misses >= MISSES:
            self._misses += 1
            if self._misses % MISSES:
                return -1.0
        return now + SPIN_S

    async def _wait_readable(self) -> None:
        """Wait until there is something to read, or the socket is closed."""
        if not self._is_registered and not self._register():
            await wait_readable(self._sock)
            return
        assert self._loop is not None
        assert self._turn is not None
        self._waiter = self._loop.create_future()
        self._turn.pause()
        try:
            await self._waiter
        finally:
            self._waiter = None
        self._turn.resume()

    def _register(self) -> bool:
        """Have the event loop read the socket; False where it cannot."""
        self._loop = call_when_readable(self._sock, self._on_readable)
        self._is_registered = self._loop is not None
        self._turn = self._turn or shared_slice()
        return self._is_registered

    def _unregister(self) -> None:
        if self._is_registered and self._loop is not None:
            self._is_registered = False
            self._loop.remove_reader(self._sock.fileno())

    def _on_readable(self) -> None:
        """Read ahead, at most one piece: then the guest has to wait until somebody receives."""
        if self._early:
            self._unregister()
            return
        try:
            self._early = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            pass
        if not self._early:
            self._unregister()  # the other end is gone, and would be reported for ever
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def send(self, data: bytes | memoryview) -> None:
        """Write all of `data`, after whatever is being written already.

        A peer that does not read makes this wait, and only this: the caller's deadline ends it.
        """
        while self._writing is not None:
            await self._writing.wait()
        self.sent_bytes += len(data)
        _awake.add(self)
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # the peer is gone, and nobody will ever read this
        if sent < len(data):
            if len(data) > ROOM_BYTES and not self._has_room and self._sock.family == AF_UNIX:
                self._has_room = True
                with suppress(OSError):
                    self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ROOM_BYTES)
            await self._send_rest(memoryview(data)[sent:])

    async def _send_rest(self, data: memoryview) -> None:
        self._writing = anyio.Event()
        try:
            while data:
                await wait_writable(self._sock)
                try:
                    data = data[self._sock.send(data) :]
                except BlockingIOError:
                    continue
        except OSError:
            return
        finally:
            self._writing.set()
            self._writing = None

    def expect_nothing(self) -> None:
        """Take note that the guest sends nothing more."""
        _awake.discard(self)

    def close(self) -> None:
        """Close the socket; a waiting `receive` returns b""."""
        _awake.discard(self)
        if self._sock.fileno() < 0:
            return
        if self._writing is not None or not self._is_registered:
            anyio.notify_closing(self._sock)
        self._unregister()  # before the number of the socket passes to another
        self._early = b""
        self._sock.close()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def call_when_readable(sock: socket.socket, call: Callable[[], None]) -> asyncio.AbstractEventLoop | None:
    """Have the event loop call a function whenever the socket is readable, until `remove_reader`, and return the loop.

    None where it cannot: trio, the proactor loop of Windows, a full table of watches.
    """
    try:
        loop = asyncio.get_running_loop()
        # By number: asyncio formats what it is given into an error message of its own, each time.
        loop.add_reader(sock.fileno(), call)
    except (RuntimeError, NotImplementedError, ValueError, OSError):
        return None
    return loop


async def wait_readable(sock: socket.socket) -> None:
    """Wait until there may be something to read, or the socket is closed."""
    await _wait(anyio.wait_readable, sock)


async def wait_writable(sock: socket.socket) -> None:
    """Wait until there may be room to write, or the socket is closed."""
    await _wait(anyio.wait_writable, sock)


async def _wait(wait: Callable[[socket.socket], Awaitable[None]], sock: socket.socket) -> None:
    try:
        await wait(sock)
    except (anyio.ClosedResourceError, ValueError):
        return
    except anyio.BusyResourceError:  # another task waits for the same
        await anyio.sleep(POLL_S)
    except OSError as exc:
        # The table of watches belongs to all processes of a user, so a stranger can fill it. Go on without it.
        if exc.errno in (errno.ENOSPC, errno.ENOMEM):
            await anyio.sleep(POLL_S)


def read_available(descriptor: int) -> bytes:
    """Read what a non-blocking pipe holds now, at most about a megabyte. A closed pipe holds nothing."""
    pieces: list[bytes] = []
    for _ in range(PIPE_READS):
        try:
            piece = os.read(descriptor, READ_BYTES)
        except OSError:
            break
        if not piece:
            break
        pieces.append(piece)
    return b"".join(pieces)


def open_pipe(readers: ExitStack, writers: ExitStack) -> tuple[int, int]:
    """Open a pipe whose ends belong to two sides, and return (reading end, writing end). Reading never blocks."""
    read, write = os.pipe2(os.O_CLOEXEC)
    readers.callback(os.close, read)
    writers.callback(os.close, write)
    os.set_blocking(read, False)
    return read, write
