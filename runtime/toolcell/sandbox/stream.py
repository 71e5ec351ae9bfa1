"""Raw non-blocking sockets under asyncio, uvloop and trio.

Bytes move with one system call when they can; only a wait goes through the event loop, and under asyncio through a
reader that stays registered (7 us a wait against 20 through anyio, measured). Knows no messages.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time

import anyio

READ_BYTES = 64 * 1024
"""Also bounds how long a flood of tiny frames keeps the event loop: some ten milliseconds to decode."""

PIPE_READS = 16

sched_yield = getattr(os, "sched_yield", lambda: None)

SPIN_S = 100e-6
"""How long to look again before going to sleep, while the peer has been answering about as fast as this.

Waking a process that sleeps on another processor costs 40 to 75 us in a virtual machine, more than a whole round trip
between two that are awake; and it finds its caches cold."""

MISSES = 4
"""Looks in vain after which most waits sleep at once. One in so many still looks: a peer may have become quick."""

_awake: set[SocketStream] = set()
"""Streams whose guest is at work. With more than one, looking again would keep the event loop from the others."""


class SocketStream:
    """The host's end of one bridge."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._writing: anyio.Event | None = None
        self._readable = _Readable(sock)
        self._misses = 0
        self.sent_bytes = 0
        self.received_bytes = 0

    async def receive(self) -> bytes:
        """Return the next bytes, or b"" when the other end is gone."""
        until = 0.0
        while True:
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
                if not await self._readable.wait():
                    return b""
                continue
            except OSError:
                return b""
            if until > 0:
                self._misses = 0
            self.received_bytes += len(data)
            return data

    def _look_until(self, now: float) -> float:
        """When to give up and sleep; negative for at once."""
        if not self.sent_bytes or len(_awake) > 1:
            return -1.0
        if self._misses >= MISSES:
            self._misses += 1
            if self._misses % MISSES:
                return -1.0
        return now + SPIN_S

    async def send(self, data: bytes) -> None:
        """Write all of `data`, after whatever is being written already.

        A peer that does not read makes this wait, and only this: the caller's deadline ends it.
        """
        while self._writing is not None:
            await self._writing.wait()
        self.sent_bytes += len(data)
        _awake.add(self)
        sent = self._write(data)
        if sent == len(data):
            return
        self._writing = anyio.Event()
        try:
            view = memoryview(data)
            while sent < len(data):
                await anyio.wait_writable(self._sock)
                sent += self._write(view[sent:])
        except (anyio.ClosedResourceError, ValueError):
            return
        finally:
            self._writing.set()
            self._writing = None

    def _write(self, data: bytes | memoryview) -> int:
        """Bytes taken; all of them when the peer is gone, since nobody will ever read the rest."""
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)

    def rest(self) -> None:
        """Its guest will say nothing more."""
        _awake.discard(self)

    def close(self) -> None:
        """Close the socket; a waiting `receive` returns b""."""
        _awake.discard(self)
        if self._sock.fileno() >= 0:
            self._readable.close()
            anyio.notify_closing(self._sock)
            self._sock.close()


class _Readable:
    """Waits until a socket can be read, for one waiter at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[bool] | None = None
        self._is_registered = False

    async def wait(self) -> bool:
        """Wait; False when the socket is closed meanwhile."""
        if self._loop is None:
            try:
                self._loop = asyncio.get_running_loop()
            except RuntimeError:  # trio's
                return await self._wait_elsewhere()
        if self._sock.fileno() < 0:
            return False
        if not self._is_registered:
            try:
                # By number: asyncio formats what it is given into an error message of its own, each time.
                self._loop.add_reader(self._sock.fileno(), self._notice)
            except NotImplementedError:  # the proactor loop of Windows
                return await self._wait_elsewhere()
            self._is_registered = True
        waiter: asyncio.Future[bool] = self._loop.create_future()
        self._waiter = waiter
        try:
            return await waiter
        finally:
            self._waiter = None

    async def _wait_elsewhere(self) -> bool:
        try:
            await anyio.wait_readable(self._sock)
        except (anyio.ClosedResourceError, OSError, ValueError):
            return False
        return True

    def _notice(self) -> None:
        if self._waiter is None:
            # Nobody listens: stay silent until somebody does, or the loop would spin on unread bytes.
            self._unregister()
        elif not self._waiter.done():
            self._waiter.set_result(True)

    def _unregister(self) -> None:
        if self._is_registered and self._loop is not None:
            self._is_registered = False
            self._loop.remove_reader(self._sock.fileno())

    def close(self) -> None:
        """Stop waiting, before the socket is closed and its number passes to another."""
        self._unregister()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(False)


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
