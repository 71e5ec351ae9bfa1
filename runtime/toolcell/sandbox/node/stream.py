"""`NodeStream`: the caller's end of the connection to one sandbox on a node. It is the `ByteStream` of the bridge.

Frames about the sandbox are taken as they pass; so what the node measured before the guest's last word is known when
that word is received.
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import anyio
import msgpack

from toolcell.errors import SandboxUnavailable
from toolcell.sandbox.backend import Exit, Sample
from toolcell.sandbox.node import connection
from toolcell.sandbox.node.connection import FrameBuffer, SecureChannel, context_of_caller, frame, keep_alive, proof
from toolcell.sandbox.node.server import NodeAddress
from toolcell.sandbox.stream import SocketStream, wait_writable
from toolcell.support.event_loop import ChangeEvent

CONNECT_S: Final = 10.0
ANSWER_S: Final = 0.5
"""How long the event loop waits for a last measurement, which is asked for when a script has failed."""

HELD_BYTES: Final = 1 << 20
"""Bridge bytes that are kept while nobody receives."""

FULL_S: Final = 0.05
"""How often somebody looks who waits for another than the bridge's bytes while enough of these are kept."""

PIECE_BYTES: Final = 1 << 18


class WrongKey(ConnectionError):
    """Another program listens there than the one that made the key."""


class NodeStream:
    """Frames over one socket."""

    def __init__(self, sock: socket.socket, where: str, tls: SecureChannel | None = None) -> None:
        self._sock = sock
        self._tls = tls
        self._behind = b""
        """Rest of a frame that the network had no room for: the next one waits for it."""
        self._socket = SocketStream(sock)
        self._socket.is_looked_at = False  # an answer has two networks to cross
        self._where = where
        self._frames = FrameBuffer()
        self._bridge = bytearray()
        self._unacknowledged = 0
        self._is_receiving = False
        self._news = ChangeEvent()
        self._writing: anyio.Lock = anyio.Lock()
        self.is_over = False
        """No frame will follow."""
        self._has_ended = False
        """Its end was asked for."""
        self.was_asked = False
        """The script was asked for its line: its answer is looked for without waiting."""
        self.started: str | None = None
        self.outside_layers: dict[str, str] = {}
        """Isolation that the sandbox has from outside."""
        self.prepared: str | None = None
        self.problem = ""
        self.exit: Exit | None = None
        self.last = Sample()
        self._answers = 0
        """Measurements that were asked for, and came."""
        self.raw = (bytearray(), bytearray())
        self.sent_bytes = 0
        self.received_bytes = 0

    @classmethod
    async def connect(cls, address: NodeAddress) -> NodeStream:
        """Connect with a node, and prove the key to each other.

        Raises:
            OSError: the node is not there, or not the one with the key.
        """
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            keep_alive(sock)
            with suppress(BlockingIOError):
                sock.connect((address.host, address.port))
            with anyio.fail_after(CONNECT_S):
                await wait_writable(sock)
                if problem := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(problem, os.strerror(problem))
                tls = None
                if address.certificate:
                    tls = SecureChannel(context_of_caller(address.certificate), is_node=False)
                return await cls.over(sock, f"the node at {address.host}:{address.port}", address.key, tls)
        except BaseException:
            sock.close()
            raise

    @classmethod
    async def over(cls, sock: socket.socket, where: str, key: bytes, tls: SecureChannel | None = None) -> NodeStream:
        """Prove the key to each other on a connection that is there. `where`: what messages call the node.

        An error, and a cancellation, close the connection.

        Raises:
            OSError: the node is not there any more, or not the one with the key.
        """
        stream = cls(sock, where, tls)
        try:
            await stream._prove(key)
        except BaseException:
            stream.close()  # and not the socket alone, which the event loop reads
            raise
        return stream

    async def _prove(self, key: bytes) -> None:
        early = b"" if self._tls is None else await self._shake_hands(self._tls)
        theirs, ours = await self._exactly(connection.NONCE_BYTES, early), os.urandom(connection.NONCE_BYTES)
        await self._socket.send(self._sealed(ours + proof(key, b"caller", theirs, ours)))
        if not hmac.compare_digest(await self._exactly(connection.PROOF_BYTES), proof(key, b"node", theirs, ours)):
            raise WrongKey(f"{self._where} does not have the key that it was given")

    async def _shake_hands(self, tls: SecureChannel) -> bytes:
        """Agree on keys with the node. Returns what it has said since."""
        answer, said = tls.take(b"")
        while not tls.is_ready:
            await self._socket.send(answer)
            answer, said = tls.take(await self._received())
        await self._socket.send(answer)
        return said

    async def _received(self) -> bytes:
        if data := await self._socket.receive():
            return data
        raise ConnectionError(f"{self._where} ended the connection")

    async def _exactly(self, count: int, got: bytes = b"") -> bytes:
        while len(got) < count:
            got += self._opened(await self._received())
        return got

    def _opened(self, data: bytes) -> bytes:
        return data if self._tls is None else self._tls.take(data)[1]

    def _sealed(self, data: bytes) -> bytes:
        """Return the bytes to send now: what was left behind, and `data`."""
        behind, self._behind = self._behind, b""
        return behind + (data if self._tls is None else self._tls.seal(data))

    # Frames

    def _feed(self, data: bytes) -> None:
        try:
            for kind, body in self._frames.frames(self._opened(data)):
                self._take(kind, body)
        except (ValueError, TypeError, ssl.SSLError, msgpack.UnpackException) as exc:
            self.problem, data = f"{self._where} sent what is not a frame: {exc}", b""
        if not data:
            self.is_over = True
        self._news.notify()

    def _take(self, kind: bytes, body: bytes) -> None:
        if kind == connection.BRIDGE:
            if len(self._bridge) < HELD_BYTES or not self._has_ended:
                self._bridge += body
        elif kind == connection.USAGE:
            is_answer, out, err, *usage = msgpack.unpackb(body)
            self.raw[0].extend(out)
            self.raw[1].extend(err)
            if usage:
                self.last = Sample(*usage)
            self._answers += is_answer
        elif kind == connection.ACKNOWLEDGED:
            self._unacknowledged -= int.from_bytes(body, "big")
        elif kind == connection.END:
            self.exit = Exit(*msgpack.unpackb(body))
            self.is_over = True
        elif kind == connection.STARTED:
            self.started, self.outside_layers = msgpack.unpackb(body)
        elif kind == connection.FAILED:
            self.problem, self.is_over = body.decode(), True
        elif kind == connection.PREPARED:
            self.prepared = body.decode()

    def look(self) -> None:
        """Take what has arrived, without waiting. While somebody receives, that one takes it."""
        if self._is_receiving and not self.was_asked:
            return
        while not self.is_over and len(self._bridge) < HELD_BYTES:
            if (data := self._socket.receive_now()) is None:
                return
            self._feed(data)

    async def wait(self, is_reached: Callable[[], bool]) -> None:
        """Wait until `is_reached` holds, or no frame will follow.

        The bridge's bytes are kept meanwhile, up to `HELD_BYTES`. Then the guest waits, as with a local one, until
        somebody receives; what comes after `end` is dropped.
        """
        while not is_reached() and not self.is_over:
            if self._is_receiving:
                await self._news.wait()
                continue
            if len(self._bridge) >= HELD_BYTES and not self._has_ended:
                with anyio.move_on_after(FULL_S):  # the end may be asked for in another thread
                    await self._news.wait()
                continue
            self._is_receiving = True
            try:
                self._feed(await self._socket.receive())
            finally:
                self._is_receiving = False
                self._news.notify()  # somebody else who waits goes on with this

    def ask(self) -> Sample:
        """Return a measurement that is made now. The event loop waits for it, a network's way to the node and back."""
        until, wanted = time.monotonic() + ANSWER_S, self._answers + 1
        self.look()
        if self.post(connection.SAMPLE):
            while self._answers < wanted and not self.is_over and (left := until - time.monotonic()) > 0:
                if len(self._bridge) >= HELD_BYTES:
                    break  # the answer is behind more than is kept
                select.select([self._sock], [], [], left)
                if (data := self._socket.receive_now()) is not None:
                    self._feed(data)
        return self.last

    def post(self, kind: bytes, body: bytes = b"") -> bool:
        """Send a short frame without waiting; False when that cannot be done now."""
        if self.is_over or self._behind or self._writing.locked():
            return False
        data, sent = self._sealed(frame(kind, body)), 0
        with suppress(OSError):
            sent = self._sock.send(data)
        self._behind = data[sent:]
        return not self._behind

    async def send_frame(self, kind: bytes, body: bytes = b"") -> None:
        async with self._writing:
            await self._socket.send(self._sealed(frame(kind, body)))

    # The bridge

    async def receive(self) -> bytes:
        if not self._bridge:
            await self.wait(lambda: bool(self._bridge))
        data = bytes(self._bridge)
        self._bridge.clear()
        if len(data) >= HELD_BYTES:
            self._news.notify()  # who waits for something else may read again
        self.received_bytes += len(data)
        return data

    async def send(self, data: bytes | memoryview) -> None:
        self.sent_bytes += len(data)
        async with self._writing:
            for at in range(0, len(data), PIECE_BYTES):
                piece = data[at : at + PIECE_BYTES] if len(data) > PIECE_BYTES else data
                self._unacknowledged += len(piece)
                if self._unacknowledged > connection.WINDOW_BYTES:
                    await self.wait(lambda: self._unacknowledged <= connection.WINDOW_BYTES)
                if self.is_over:
                    return
                await self._socket.send(self._sealed(frame(connection.BRIDGE, piece)))

    # The end

    def end(self) -> None:
        """Have the node kill the sandbox. Any thread may call it, at any time."""
        self._has_ended = True
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def lost(self) -> str:
        """Say why nobody knows how the sandbox ended."""
        return self.problem or f"{self._where} is gone, or cannot be reached"

    def expect_nothing(self) -> None:
        """Take note that the guest sends nothing more."""
        self._socket.expect_nothing()

    def close(self) -> None:
        self.is_over = True
        self._socket.close()
        self._news.notify()


async def start(stream: NodeStream, limits: bytes, settings: bytes = b"") -> None:
    """Start a sandbox over a new connection. `limits` and `settings` are packed. An error closes the connection.

    Raises:
        SandboxUnavailable: the node cannot start one, and says why.
        OSError: the node is gone.
    """
    try:
        if settings:
            await stream.send_frame(connection.SETTINGS, settings)
        await stream.send_frame(connection.START, limits)
        await stream.wait(lambda: stream.started is not None)
        if stream.started is None:
            if stream.problem:
                raise SandboxUnavailable(stream.problem)
            raise ConnectionError(stream.lost())
    except BaseException:
        stream.close()
        raise
