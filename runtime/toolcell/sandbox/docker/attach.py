"""The bridge of a guest in a container: one attached stream that carries its stdin, stdout and stderr.

Standard output carries the bridge. Standard error carries what the script writes raw to descriptors 1 and 2. A plain
socket moves bytes without a thread; a connection that is not a plain socket (TLS, ssh) gets a thread that pumps it.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from toolcell.sandbox.stream import SocketStream
from toolcell.support import daemon_threads
from toolcell.support.event_loop import ChangeEvent

if TYPE_CHECKING:
    from toolcell.sandbox.docker.client import EngineClient


from dataclasses import dataclass, field

# Split an attached container's bytes into its two streams, and find the end markers in standard error.


HEADER_BYTES = 8
STDOUT = 1
STDERR = 2
DAEMON = 3
"""Messages of the daemon itself about the stream."""

DONE_HEAD = b"\x93\x18"
"""The first bytes of a `Done` message: an array of three, then the tag."""

LENGTH_BYTES = 4


class BrokenStream(Exception):
    """The bytes are not a multiplexed stream: the daemon, or a proxy before it, is broken."""


@dataclass(slots=True)
class Demultiplexer:
    """Parse the format of Docker's attach: [stream, 0, 0, 0, length as 4 bytes big-endian], then `length` bytes."""

    _header: bytearray = field(default_factory=bytearray)
    _stream: int = 0
    _left: int = 0

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Take received bytes; return (stream, piece) in order. A piece need not be a whole write.

        Raises:
            BrokenStream: a header is invalid.
        """
        pieces: list[tuple[int, bytes]] = []
        at = 0
        while at < len(data):
            if self._left:
                piece = data[at : at + self._left]
                at += len(piece)
                self._left -= len(piece)
                pieces.append((self._stream, piece))
                continue
            missing = HEADER_BYTES - len(self._header)
            self._header += data[at : at + missing]
            at += missing
            if len(self._header) == HEADER_BYTES:
                self._read_header()
        return pieces

    def _read_header(self) -> None:
        header = bytes(self._header)
        self._header.clear()
        self._stream, self._left = header[0], int.from_bytes(header[4:], "big")
        if self._stream not in (STDOUT, STDERR, DAEMON) or header[1:4] != b"\0\0\0":
            raise BrokenStream(f"header {header.hex()}")


@dataclass(slots=True)
class DoneCounter:
    """Counts the `Done` frames in the bytes of a bridge. It validates nothing: the connection does that."""

    done: int = 0
    left: int = 0
    """Bytes that the frame under way still has."""
    _head: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> None:
        at, size = 0, len(data)
        while at < size:
            if self.left:
                step = min(self.left, size - at)
                at += step
                self.left -= step
                continue
            want = LENGTH_BYTES + len(DONE_HEAD) - len(self._head)
            self._head += data[at : at + want]
            at += want
            if len(self._head) == LENGTH_BYTES + len(DONE_HEAD):
                self._begin()

    def _begin(self) -> None:
        length = int.from_bytes(self._head[:LENGTH_BYTES], "big")
        self.done += self._head[LENGTH_BYTES:] == DONE_HEAD
        self.left = max(0, length - len(DONE_HEAD))
        self._head.clear()


@dataclass(slots=True)
class MarkedOutput:
    """Bytes of standard error, without the end markers."""

    end_marker: bytes
    """Empty when the guest writes no markers."""

    markers: int = 0
    """End markers found so far."""

    _data: bytearray = field(default_factory=bytearray)

    def __len__(self) -> int:
        return len(self._data)

    def feed(self, data: bytes) -> None:
        searched = max(0, len(self._data) - len(self.end_marker))
        self._data += data
        while self.end_marker and (at := self._data.find(self.end_marker, searched)) >= 0:
            del self._data[at : at + len(self.end_marker)]
            self.markers += 1
            searched = at

    def take(self, *, is_last: bool = False) -> bytes:
        """Take what has arrived, except for what may be the beginning of an end marker. `is_last`: take that too."""
        sizes = range(0) if is_last else range(len(self.end_marker) - 1, 0, -1)
        keep = next((size for size in sizes if self._data.endswith(self.end_marker[:size])), 0)
        end = len(self._data) - keep
        taken = bytes(self._data[:end])
        del self._data[:end]
        return taken


OUTPUT_BYTES = 4 << 20
"""Most raw output held for `take_output`. Beyond it nothing more is read, and the guest waits in its write()."""

END_MARKER_S = 0.5
"""How long the last frame of a run is held back for the raw output that was written before it. Normally both arrive
together. A script that broke its own standard error makes its run end this much later."""

DRAINED_BYTES = 16 << 20
"""Most bridge bytes that `drain` keeps of a killed container; the rest is read and dropped."""

PIECE_BYTES = 16 * 1024
"""Most that `receive` returns at once. Decoding this many of the smallest frames takes a few milliseconds."""

PUMP_BYTES = 64 * 1024


async def attach(client: EngineClient, container: str, *, end_marker: bytes = b"") -> AttachedStream:
    """Attach to a created container. Call it before the container is started, so that no output is missed.

    Raises:
        SandboxUnavailable: the daemon refused.
    """
    return AttachedStream(await client.call(_attach_now, client, container), end_marker=end_marker)


def _attach_now(client: EngineClient, container: str) -> socket.socket:
    wanted = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
    found: Any = client.api.attach_socket(container, params=wanted)
    response = getattr(found, "_response", None)
    if not isinstance(found, socket.SocketIO):  # TLS, or SSH
        return pump_through_socket(found, response)
    # A duplicate of our own: the SDK's objects would close the original when they are collected.
    plain = socket.socket(fileno=os.dup(found.fileno()))
    if response is not None:
        response.close()
    found.close()
    return plain


class AttachedStream:
    """The host's end of one attached container: a `ByteStream` that carries the bridge."""

    def __init__(self, sock: socket.socket, *, end_marker: bytes = b"") -> None:
        self._sock = sock
        self._connection = SocketStream(sock)
        self._demultiplexer = Demultiplexer()
        self._done_frames = DoneCounter()
        self._output = MarkedOutput(end_marker)
        self._bridge = bytearray()
        self._inside_bytes = 0
        """So many bytes of it, from the first on, are of one frame: there is nothing to decode in them yet."""
        self._has_room = ChangeEvent()
        self._is_ending = False
        self._is_full = False
        self._is_over = False
        self.sent_bytes = self.received_bytes = 0

    @property
    def is_over(self) -> bool:
        """The container has ended, or the daemon is gone."""
        return self._is_over

    async def receive(self) -> bytes:
        while not self._bridge and not self._is_over:
            await self._read()
        if self._lacks_end_marker():
            with anyio.move_on_after(END_MARKER_S):
                while self._lacks_end_marker() and not self._is_over:
                    await self._read()
            self._output.markers = self._done_frames.done
        size = max(PIECE_BYTES, self._inside_bytes)
        if len(self._bridge) >= PIECE_BYTES:
            # The daemon always has more to read, unlike a guest's own socket. Without this checkpoint a flood of tiny
            # frames would keep the event loop from deadlines and other runs. It comes before bytes are taken, so that
            # a cancellation loses none.
            await anyio.lowlevel.checkpoint()
        data = bytes(memoryview(self._bridge)[:size])
        del self._bridge[:size]
        self._inside_bytes = 0
        return data

    def _lacks_end_marker(self) -> bool:
        return bool(self._output.end_marker) and self._done_frames.done > self._output.markers

    async def _read(self) -> None:
        """Read once from the connection and sort the bytes by stream."""
        while len(self._output) > OUTPUT_BYTES and not self._is_ending:
            await self._has_room.wait()
        try:
            data = await self._connection.receive()
            pieces = self._demultiplexer.feed(data)
        except BrokenStream:
            self.close()
            data, pieces = b"", []
        self._is_over = not data
        for stream, piece in pieces:
            if stream == STDOUT:
                self.received_bytes += len(piece)
                if not self._is_full:
                    if self._inside_bytes == len(self._bridge) and self._done_frames.left >= len(piece):
                        self._inside_bytes += len(piece)
                    self._done_frames.feed(piece)
                    self._bridge += piece
            else:
                self._output.feed(piece)
        if not self._bridge and not self._is_over:
            # A flood of raw output alone must not keep the event loop from deadlines and other runs.
            await anyio.lowlevel.checkpoint()

    async def send(self, data: bytes | memoryview) -> None:
        self.sent_bytes += len(data)
        await self._connection.send(data)

    def take_output(self) -> bytes:
        """Take the raw output received so far, without waiting."""
        data = self._output.take(is_last=self._is_over)
        self._has_room.notify()
        return data

    def expect_end(self) -> None:
        """Lift the limit on raw output: the container has been killed, so little is still on its way."""
        self._is_ending = True
        self._has_room.notify()

    async def drain(self) -> None:
        """Read to the end of the stream; `receive` returns the bytes afterwards.

        The daemon cannot end a container while bytes of its guest are stuck on the way to us.
        """
        self.expect_end()
        await self.read_on()

    async def read_on(self) -> None:
        """Read to the end of the stream, for raw output that somebody takes meanwhile."""
        while not self._is_over:
            await self._read()
            self._is_full = len(self._bridge) > DRAINED_BYTES
            await anyio.lowlevel.checkpoint()  # sorting a flood of tiny frames is slow, and other runs wait

    def close(self) -> None:
        self.expect_end()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._connection.close()


# Connections that are not plain sockets.


def pump_through_socket(remote: Any, response: Any = None) -> socket.socket:
    """Return a plain socket. A daemon thread pumps bytes between it and `remote`; closing the socket ends the thread.

    `response`: the SDK's response that holds the connection; it is closed with the connection.
    """
    ours, theirs = socket.socketpair()
    pump = _pump_tls if isinstance(remote, ssl.SSLSocket) else _pump_channel

    def run() -> None:
        with suppress(Exception), theirs:  # any error means that the connection has ended
            pump(remote, theirs)
        for each in (remote, response):
            with suppress(Exception):
                each.close()

    daemon_threads.start(run, name="toolcell-attach")
    return ours


def _pump_tls(remote: ssl.SSLSocket, local: socket.socket) -> None:
    """Pump both directions in one thread: OpenSSL allows only one thread per connection."""
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
    """Pump what has arrived; return False at the end of the connection."""
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
    """Pump a channel whose blocking recv and sendall two threads may use at once, such as an ssh channel."""

    def pump_out() -> None:
        with suppress(Exception):
            while data := local.recv(PUMP_BYTES):
                remote.sendall(data)
        with suppress(Exception):
            remote.close()

    daemon_threads.start(pump_out, name="toolcell-attach-out")
    while data := remote.recv(PUMP_BYTES):
        local.sendall(data)
    local.shutdown(socket.SHUT_RDWR)
