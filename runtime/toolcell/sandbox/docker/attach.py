"""The bridge of a containered guest: one attached stream that carries its stdin, stdout and stderr.

Standard output is the bridge; standard error is whatever was written raw to descriptors 1 and 2. Works on plain
sockets, which move bytes without a thread; a connection that is no plain socket (TLS, ssh) gets one to pump it.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from toolcell.sandbox.docker.demultiplex import STDOUT, BrokenStream, Demultiplexer, DoneCounter, FencedOutput
from toolcell.sandbox.stream import SocketStream

if TYPE_CHECKING:
    from toolcell.sandbox.docker.client import Client

OUTPUT_BYTES = 4 << 20
"""Raw output held for `take_output`. Beyond it nothing more is read, and the guest waits in its write()."""

FENCE_S = 0.5
"""How long the last word of a run is held back for the raw output that was written before it. Normally both come
together; a script that broke its own standard error makes its run end this much later."""

SOAKED_BYTES = 16 << 20
"""What is kept of all that a killed container's guest had still said; the rest is read and dropped."""

PIECE_BYTES = 16 * 1024
"""Most that is handed on at once: of the smallest frames, a few milliseconds' worth."""

PUMP_BYTES = 64 * 1024


async def attach(client: Client, container: str, *, fence: bytes = b"") -> AttachedStream:
    """Attach to a created container, before it is started, so that nothing it says is missed.

    Raises:
        SandboxUnavailable: the daemon would not.
    """
    return AttachedStream(await client.call(_attach_now, client, container), fence=fence)


def _attach_now(client: Client, container: str) -> socket.socket:
    wanted = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
    found: Any = client.api.attach_socket(container, params=wanted)
    response = getattr(found, "_response", None)
    inner = getattr(found, "_sock", found)
    if type(inner) is not socket.socket:
        return pumped(inner, response)
    plain = inner.dup()
    # Ours from here on: the SDK's objects around it would close it whenever they are collected.
    if response is not None:
        response.close()
    found.close()
    return plain


class AttachedStream:
    """The host's end of one attached container: a `ByteStream` whose bytes are the bridge's."""

    def __init__(self, sock: socket.socket, *, fence: bytes = b"") -> None:
        self._sock = sock
        self._raw = SocketStream(sock)
        self._parts = Demultiplexer()
        self._frames = DoneCounter()
        self._output = FencedOutput(fence)
        self._held = bytearray()
        self._room = anyio.Event()
        self._is_ending = False
        self._is_full = False
        self._is_over = False
        self.received_bytes = 0

    @property
    def sent_bytes(self) -> int:
        """Bytes of the bridge sent so far."""
        return self._raw.sent_bytes

    @sent_bytes.setter
    def sent_bytes(self, value: int) -> None:
        self._raw.sent_bytes = value

    @property
    def is_over(self) -> bool:
        """The other end was found gone: the container has ended, or the daemon."""
        return self._is_over

    async def receive(self) -> bytes:
        """Return the bridge's next bytes, or b"" when the container or the daemon is gone."""
        while not self._held and not self._is_over:
            await self._read()
        if self._waits_for_fence():
            with anyio.move_on_after(FENCE_S):
                while self._waits_for_fence() and not self._is_over:
                    await self._read()
            self._output.fences = self._frames.done
        if len(self._held) >= PIECE_BYTES:
            # The daemon, unlike a guest's own socket, always has more at hand: without this a flood of tiny frames
            # would keep the event loop from deadlines and from other runs. Before anything is taken: cancelled here,
            # nothing is lost.
            await anyio.lowlevel.checkpoint()
        data = bytes(self._held[:PIECE_BYTES])
        del self._held[:PIECE_BYTES]
        return data

    def _waits_for_fence(self) -> bool:
        return bool(self._output.fence) and self._frames.done > self._output.fences

    async def _read(self) -> None:
        """Take one piece off the connection."""
        while len(self._output) > OUTPUT_BYTES and not self._is_ending:
            self._room = anyio.Event()
            await self._room.wait()
        try:
            data = await self._raw.receive()
            pieces = self._parts.feed(data)
        except BrokenStream:
            self.close()
            data, pieces = b"", []
        self._is_over = not data
        for stream, piece in pieces:
            if stream == STDOUT:
                self.received_bytes += len(piece)
                if not self._is_full:
                    self._frames.feed(piece)
                    self._held += piece
            else:
                self._output.feed(piece)
        if not self._held and not self._is_over:
            # Raw output alone must not keep the event loop from deadlines and others.
            await anyio.lowlevel.checkpoint()

    async def send(self, data: bytes) -> None:
        """Write all of `data`; returns silently when the other end is gone, `receive` will tell."""
        await self._raw.send(data)

    def take_output(self) -> bytes:
        """Take the raw output that has been received so far, without waiting."""
        data = self._output.take(is_last=self._is_over)
        self._room.set()
        return data

    def expect_end(self) -> None:
        """Read on however much raw output there is: the container has been killed, what is on its way is little."""
        self._is_ending = True
        self._room.set()

    async def soak(self) -> None:
        """Read to the end into what `receive` returns afterwards.

        A daemon cannot end a container while what its guest says is stuck on the way to us.
        """
        self.expect_end()
        while not self._is_over:
            await self._read()
            self._is_full = len(self._held) > SOAKED_BYTES
            await anyio.lowlevel.checkpoint()  # a flood of tiny frames is slow to take apart, and others are waiting

    def close(self) -> None:
        """Close the connection; a waiting `receive` returns b""."""
        self.expect_end()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._raw.close()


# Connections that are no plain sockets.


def pumped(remote: Any, response: Any = None) -> socket.socket:
    """A plain socket whose other end a daemon thread carries to and from `remote`; closing it ends the thread.

    `response`: what the SDK holds the connection by; closed with it.
    """
    ours, theirs = socket.socketpair()
    pump = _pump_tls if isinstance(remote, ssl.SSLSocket) else _pump_channel

    def carry() -> None:
        with suppress(Exception), theirs:  # however a connection ends, it has ended
            pump(remote, theirs)
        for each in (remote, response):
            with suppress(Exception):
                each.close()

    threading.Thread(target=carry, name="toolcell-attach", daemon=True).start()
    return ours


def _pump_tls(remote: ssl.SSLSocket, local: socket.socket) -> None:
    """Both directions in one thread: OpenSSL allows no two in one connection."""
    remote.setblocking(False)
    watched = select.poll()
    watched.register(remote, select.POLLIN)
    watched.register(local, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in watched.poll()}
        if remote.fileno() in ready and not _from_tls(remote, local):
            return
        if local.fileno() in ready:
            data = local.recv(PUMP_BYTES)
            if not data:
                return
            _to_tls(remote, data)


def _from_tls(remote: ssl.SSLSocket, local: socket.socket) -> bool:
    """Carry what has arrived; False at its end."""
    while True:
        try:
            data = remote.recv(PUMP_BYTES)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return True
        if not data:
            return False
        local.sendall(data)
        if not remote.pending():
            return True


def _to_tls(remote: ssl.SSLSocket, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[remote.send(view) :]
        except ssl.SSLWantWriteError:
            _wait(remote, select.POLLOUT)
        except ssl.SSLWantReadError:
            _wait(remote, select.POLLIN)


def _wait(sock: socket.socket, event: int) -> None:
    ready = select.poll()
    ready.register(sock, event)
    ready.poll()


def _pump_channel(remote: Any, local: socket.socket) -> None:
    """A channel with blocking recv and sendall that two threads may use at once, such as an ssh one."""

    def outwards() -> None:
        with suppress(Exception):
            while data := local.recv(PUMP_BYTES):
                remote.sendall(data)
        with suppress(Exception):
            remote.close()

    threading.Thread(target=outwards, name="toolcell-attach-out", daemon=True).start()
    while data := remote.recv(PUMP_BYTES):
        local.sendall(data)
    local.shutdown(socket.SHUT_RDWR)
