"""`NodeConnection`: on a node, the connection of a caller to one sandbox. Closing it ends the sandbox.

The node trusts nobody who has not proved the key. It never reads what a guest sends: it passes it on.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import socket
import ssl
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final

import msgpack

from toolcell.config import Limits
from toolcell.errors import MissingPackage, SandboxUnavailable
from toolcell.sandbox.backend import Backend, Sandbox
from toolcell.sandbox.stream import SocketStream
from toolcell.support.event_loop import start_task

# `SecureChannel`: TLS 1.3 for the bytes of one connection between a caller and a node, without a socket of its own.
#
# Each node makes a certificate when it starts. Ray, or the API server of Kubernetes, passes it to the caller, who
# takes that one and no other. Who the caller is, the proof of the key tells, inside.

VALID: Final = timedelta(days=3650)
"""Longer than any actor lives. Clocks of nodes differ, so it begins a day ago."""


class SecureChannel:
    """One end. It needs `context`, and the bytes that arrive; it gives the bytes to send."""

    def __init__(self, context: ssl.SSLContext, *, is_node: bool) -> None:
        self._arrived, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._to_send, server_side=is_node)
        self.is_ready = False
        """Both ends have shaken hands."""

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """Take what has arrived. Shape: (bytes to send, what the other end said).

        Raises:
            ssl.SSLError: it is not from the other end, or not the other end that is wanted.
        """
        self._arrived.write(data)
        opened = bytearray()
        try:
            if not self.is_ready:
                self._tls.do_handshake()
                self.is_ready = True
            while piece := self._tls.read(1 << 18):
                opened += piece
        except ssl.SSLWantReadError:
            pass
        return self._to_send.read(), bytes(opened)

    def seal(self, data: bytes) -> bytes:
        """Return the bytes to send for `data`. What was sealed has to be sent, and in this order."""
        remaining = memoryview(data)
        while remaining:  # it may take one record at a time
            remaining = remaining[self._tls.write(remaining) :]
        return self._to_send.read()


@lru_cache(maxsize=1024)
def context_of_caller(certificate: str) -> ssl.SSLContext:
    """Return what accepts the node with this certificate (PEM), and no other."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate itself is known
    context.load_verify_locations(cadata=certificate)
    return context


def context_of_node() -> tuple[ssl.SSLContext, str]:
    """Make a certificate. Shape: (context, certificate as PEM). Its key is in this process's memory only.

    Raises:
        MissingPackage: the package cryptography is not there.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as exc:
        raise MissingPackage("TLS to a node needs cryptography: pip install cryptography") from exc
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "toolcell node")])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = made.public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # each connection shakes hands anew
    with open(os.memfd_create("node.pem"), "wb", buffering=0) as file:  # ssl reads files only
        file.write(pem + secret)
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context, pem.decode()


# What a caller and a node say to each other on the connection of one sandbox: frames, and the proof of the shared
# key.
#
# One connection carries the bridge and everything about its sandbox, so reports and bytes arrive in the order in
# which they were sent. A caller that closes its half kills the sandbox.

HEAD: Final = struct.Struct(">cI")
"""Kind of a frame, and the length of its body."""

NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32

SETTINGS, START, ACCEPT, PREPARE, SAMPLE, SIGNAL = b"O", b"S", b"A", b"P", b"Q", b"N"
"""From the caller: how its sandboxes are made, where the node was not told before; limits; layers of the Hello; limits
of the run; a question; the name of a signal."""

STARTED, FAILED, PREPARED, USAGE, END, ACKNOWLEDGED = b"s", b"f", b"p", b"u", b"e", b"a"
"""From the node: what was started, and its layers of which the guest does not tell; why nothing was; an answer; a
measurement with raw output; how it ended, and that nothing is left of it; bytes that the guest has taken."""

BRIDGE: Final = b"B"
"""Both ways: bytes of the bridge."""

WINDOW_BYTES: Final = 1 << 20
"""Bridge bytes that a caller may send before the guest has taken some: a node keeps no more of them."""

ACKNOWLEDGE_BYTES: Final = 1 << 18

FRAME_BYTES: Final = 1 << 24
"""Longest frame. What is longer is not a frame of ours."""


def frame(kind: bytes, body: bytes | memoryview = b"") -> bytes:
    return HEAD.pack(kind, len(body)) + body


def proof(key: bytes, who: bytes, of_node: bytes, of_caller: bytes) -> bytes:
    """Return what proves that `who` has the key, in this connection only."""
    return hmac.new(key, who + of_node + of_caller, hashlib.sha256).digest()


class FrameBuffer:
    """Cuts received bytes into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def frames(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield each whole frame: kind and body.

        Raises:
            ValueError: a frame is longer than any of ours.
        """
        received = self._data
        received += data
        at = 0
        while len(received) - at >= HEAD.size:
            kind, length = HEAD.unpack_from(received, at)
            if length > FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            end = at + HEAD.size + length
            if len(received) < end:
                break
            body = bytes(memoryview(received)[at + HEAD.size : end])
            at = end
            yield kind, body
        del received[:at]


PROOF_S: Final = 10.0
"""In which a caller must prove the key."""

REPORT_S: Final = 0.05
"""Between two measurements of a sandbox that runs a script."""

FRESH_S: Final = 0.01
"""A measurement younger than this is not repeated when the guest sends something: one takes some 0.2 ms, and a script
may make a call every 0.5 ms."""

ASKED_S: Final = 0.002
ASKED_TIMES: Final = 100
"""How often raw output is looked for after the script was asked for its line."""

MOST_UNPROVED: Final = 256
"""Connections without a proof. The oldest ends when there is one more: a caller proves the key within milliseconds."""

BackendOf = Callable[[bytes], Awaitable[Backend]]


@dataclass(frozen=True, slots=True)
class NodeService:
    """What the connections of one node share."""

    backend: BackendOf
    """Returns what starts the sandbox; it gets the caller's settings, or nothing."""
    key: bytes = field(repr=False)
    tls: ssl.SSLContext | None = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    unproved: dict[NodeConnection, None] = field(default_factory=dict)
    """The oldest first."""


class NodeConnection(asyncio.Protocol):
    """One caller, one sandbox."""

    def __init__(self, service: NodeService) -> None:
        self._service = service
        self._settings = b""
        self._tls = None if service.tls is None else SecureChannel(service.tls, is_node=True)
        self._nonce = os.urandom(NONCE_BYTES)
        self._unproved = b""
        self._is_proved = False
        self._frames = FrameBuffer()
        self._sandbox: Sandbox | None = None
        self._task: asyncio.Task[None] | None = None
        self._to_guest: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._is_closed = False
        self._is_gone = False
        """Nothing is left of the sandbox that could be measured."""
        self._reported = 0.0
        self._loop = asyncio.get_running_loop()

    # The connection

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        keep_alive(transport.get_extra_info("socket"))
        if self._tls is None:
            transport.write(self._nonce)
        self._late = self._loop.call_later(PROOF_S, transport.abort)
        unproved = self._service.unproved
        unproved[self] = None
        if len(unproved) > MOST_UNPROVED:
            next(iter(unproved))._give_up()

    def _give_up(self) -> None:
        """End a connection whose caller has not proved the key, and may not any more."""
        self._service.unproved.pop(self, None)
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Check the proof; then take frames."""
        if self._tls is not None:
            was_ready = self._tls.is_ready
            try:
                answer, data = self._tls.take(data)
            except ssl.SSLError:
                self._transport.abort()
                return
            self._transport.write(answer)
            if self._tls.is_ready and not was_ready:
                self._send(self._nonce)
        if not self._is_proved:
            self._unproved += data
            if len(self._unproved) < NONCE_BYTES + PROOF_BYTES:
                return
            nonce = self._unproved[:NONCE_BYTES]
            given, data = self._unproved[NONCE_BYTES:][:PROOF_BYTES], self._unproved[NONCE_BYTES + PROOF_BYTES :]
            if not hmac.compare_digest(given, proof(self._service.key, b"caller", self._nonce, nonce)):
                self._transport.abort()
                return
            self._late.cancel()
            self._service.unproved.pop(self, None)
            self._is_proved, self._unproved = True, b""
            self._send(proof(self._service.key, b"node", self._nonce, nonce))
        try:
            for kind, body in self._frames.frames(data):
                self._take(kind, body)
        except (ValueError, TypeError, KeyError, msgpack.UnpackException):
            self._transport.abort()

    def eof_received(self) -> bool:
        """The caller wants the sandbox dead, and still wants to know how it ended."""
        if self._sandbox is not None:
            self._sandbox.kill()
        elif self._task is None:
            return False
        self._end()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody is there any more."""
        self._late.cancel()
        self._service.unproved.pop(self, None)
        if self._sandbox is not None:
            self._sandbox.kill()
        self._end()
        self._may_write.set()

    def _end(self) -> None:
        self._is_closed = True
        self._changed.set()

    def pause_writing(self) -> None:
        """The caller reads too slowly: the guest waits."""
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def _write(self, kind: bytes, body: bytes = b"") -> None:
        if not self._transport.is_closing():
            self._send(frame(kind, body))

    def _send(self, data: bytes) -> None:
        self._transport.write(data if self._tls is None else self._tls.seal(data))

    # Frames of the caller

    def _take(self, kind: bytes, body: bytes) -> None:
        sandbox = self._sandbox
        if kind == BRIDGE:
            self._to_guest.append(body)
            self._changed.set()
        elif kind == SETTINGS and self._task is None:
            self._settings = body
        elif kind == START and self._task is None:
            self._task = self._run(self._serve(Limits(**msgpack.unpackb(body))))
        elif sandbox is None:
            raise ValueError("nothing was started")
        elif kind == SAMPLE:
            self._report(last=True)
        elif kind == ACCEPT:
            with suppress(SandboxUnavailable):  # the caller knows what it requires
                sandbox.accept(msgpack.unpackb(body))
        elif kind == PREPARE:
            self._run(self._prepare(sandbox, Limits(**msgpack.unpackb(body))))
        elif kind == SIGNAL and body == b"ask_line":
            sandbox.ask_line()
            self._run(self._look_often())
        elif kind == SIGNAL and body == b"interrupt":
            sandbox.interrupt()

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return start_task(work, self._service.tasks)

    async def _prepare(self, sandbox: Sandbox, limits: Limits) -> None:
        problem = ""
        try:
            await sandbox.prepare(limits)
        except OSError as exc:
            problem = str(exc) or type(exc).__name__
        self._write(PREPARED, problem.encode())

    # The sandbox

    async def _serve(self, limits: Limits) -> None:
        """Start the sandbox, pass bytes on, and leave nothing of it."""
        try:
            sandbox = await (await self._service.backend(self._settings)).start(limits)
        except Exception as exc:
            self._write(FAILED, str(exc).encode())
            self._transport.close()
            return
        self._sandbox = sandbox
        try:
            self._write(STARTED, msgpack.packb([sandbox.id, dict(sandbox.outside_layers)]))
            if self._is_closed:
                sandbox.kill()
            helpers = [self._loop.create_task(work) for work in (self._feed(sandbox), self._watch())]
            try:
                await self._pass_on(sandbox)
            finally:
                for helper in helpers:
                    helper.cancel()
            await self._finish(sandbox)
        finally:
            self._is_gone = True
            await sandbox.destroy()
            self._transport.close()

    async def _pass_on(self, sandbox: Sandbox) -> None:
        """Pass on what the guest sends, until it is gone. Each piece comes after a measurement and raw output."""
        if isinstance(sandbox.stream, SocketStream):
            sandbox.stream.is_looked_at = False  # it says nothing before the caller's answer, which comes by this loop
        while data := await sandbox.stream.receive():
            self._report()
            self._write(BRIDGE, data)
            await self._may_write.wait()

    async def _feed(self, sandbox: Sandbox) -> None:
        taken = 0
        while not self._is_closed:
            self._changed.clear()
            while self._to_guest:
                data = self._to_guest.popleft()
                await sandbox.stream.send(data)
                taken += len(data)
                if taken >= ACKNOWLEDGE_BYTES:
                    self._write(ACKNOWLEDGED, taken.to_bytes(8, "big"))
                    taken = 0
            await self._changed.wait()

    async def _watch(self) -> None:
        while not self._is_closed:
            await asyncio.sleep(REPORT_S)
            if self._may_write.is_set():
                self._report()

    async def _look_often(self) -> None:
        for _ in range(ASKED_TIMES):
            self._report()
            await asyncio.sleep(ASKED_S)

    def _report(self, *, last: bool = False) -> None:
        """Send a measurement and raw output, if they are not the same as before."""
        sandbox, now = self._sandbox, self._loop.time()
        if sandbox is None or self._is_gone:
            return
        out, err = sandbox.read_output() if self._may_write.is_set() else (b"", b"")
        if not (last or out or err or now - self._reported >= FRESH_S):
            return
        self._reported = now
        each = sandbox.sample(last=last)
        self._write(
            USAGE,
            msgpack.packb(
                [
                    last,
                    out,
                    err,
                    each.cpu_s,
                    each.peak_memory_bytes,
                    each.processes,
                    each.peak_processes,
                    each.memory_kills,
                    each.refused_processes,
                ]
            ),
        )

    async def _finish(self, sandbox: Sandbox) -> None:
        """Tell how the sandbox ended. Nothing of it is left then."""
        self._report(last=True)
        sandbox.kill()  # as a run here does: whoever closes its bridge has nothing more to say
        end = await sandbox.ended()
        while any(output := sandbox.read_output()):
            self._write(USAGE, msgpack.packb([False, *output]))
        self._report(last=True)
        self._is_gone = True
        await sandbox.destroy()
        self._write(END, msgpack.packb([end.signal, end.code, end.cpu_s, end.peak_memory_bytes, end.problem]))


def keep_alive(sock: socket.socket) -> None:
    """Send at once, and notice a network that was cut: within about 15 seconds, and 20 with data on the way."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 2), ("TCP_USER_TIMEOUT", 20_000)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
