"""Raw non-blocking sockets under asyncio, uvloop and trio.

Bytes move with one system call when they can; only a wait goes through the event loop. Knows no messages.
"""

from __future__ import annotations

import socket

import anyio

READ_BYTES = 64 * 1024
"""Also bounds how long a flood of tiny frames keeps the event loop: some ten milliseconds to decode."""


class SocketStream:
    """The host's end of one bridge."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._writing: anyio.Event | None = None
        self.sent_bytes = 0
        self.received_bytes = 0

    async def receive(self) -> bytes:
        """Return the next bytes, or b"" when the other end is gone."""
        while True:
            try:
                data = self._sock.recv(READ_BYTES)
            except BlockingIOError:
                try:
                    await anyio.wait_readable(self._sock)
                except (anyio.ClosedResourceError, OSError, ValueError):
                    return b""
                continue
            except OSError:
                return b""
            self.received_bytes += len(data)
            return data

    async def send(self, data: bytes) -> None:
        """Write all of `data`, after whatever is being written already.

        A peer that does not read makes this wait, and only this: the caller's deadline ends it.
        """
        while self._writing is not None:
            await self._writing.wait()
        self.sent_bytes += len(data)
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

    def close(self) -> None:
        """Close the socket; a waiting `receive` returns b""."""
        if self._sock.fileno() >= 0:
            anyio.notify_closing(self._sock)
            self._sock.close()
