"""TCP connections for httpcore on which requests are answered within bounds, also before they are sent whole."""

from __future__ import annotations

import os
import select
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream, SocketAttribute
from anyio.streams.tls import TLSAttribute, TLSStream

from toolcell.errors import MissingPackage

try:
    import httpcore as httpcore  # for the modules beside this one
    import httpx as httpx
except ModuleNotFoundError as exc:
    raise MissingPackage("requests to the network need httpx: pip install 'toolcell[egress]'") from exc

MAX_HEAD_BYTES: Final = 256 * 1024
"""Heads of an answer, including those of status 1xx before it: a server may send any number of them."""
MAX_HEAD_LINES: Final = 2048
"""Most lines of them. Each header takes 10 microseconds, and all of an answer are read in one step."""
_HEAD_PIECE_BYTES: Final = 2048
"""Of a head that are read at once: other tasks go on in between, and few lines of the body are among them."""

_INFO: Final[dict[str, Any]] = {
    "ssl_object": TLSAttribute.ssl_object,
    "client_addr": SocketAttribute.local_address,
    "server_addr": SocketAttribute.remote_address,
    "socket": SocketAttribute.raw_socket,
}


class TcpStream(ByteStream):
    """A connection whose received bytes can be read also when the other side has hung up on what is being sent.

    Transports of asyncio drop them then, and with them the answer to a body that is too long.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @classmethod
    async def connect(cls, address: str, port: int) -> TcpStream:
        """Connect to an address.

        Raises:
            OSError: there is no connection.
        """
        sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                sock.connect((address, port))
            except BlockingIOError:
                await anyio.wait_writable(sock)
            if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(code, os.strerror(code))
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        await anyio.lowlevel.checkpoint()
        while True:
            try:
                if data := self._sock.recv(max_bytes):
                    return data
            except BlockingIOError:
                await anyio.wait_readable(self._sock)
            except OSError as exc:
                raise anyio.BrokenResourceError from exc
            else:
                raise anyio.EndOfStream

    async def send(self, item: bytes) -> None:
        await anyio.lowlevel.checkpoint()
        view = memoryview(item)
        while view:
            try:
                view = view[self._sock.send(view) :]
            except BlockingIOError:
                await anyio.wait_writable(self._sock)
            except OSError as exc:
                raise anyio.BrokenResourceError from exc

    async def send_eof(self) -> None:
        self._sock.shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        if self._sock.fileno() >= 0:
            anyio.notify_closing(self._sock)
            self._sock.close()

    @property
    def extra_attributes(self) -> Any:
        return {
            SocketAttribute.raw_socket: lambda: self._sock,
            SocketAttribute.local_address: self._sock.getsockname,
            SocketAttribute.remote_address: self._sock.getpeername,
        }


@contextmanager
def _failures(timeout: type[Exception], other: type[Exception]) -> Iterator[None]:
    """Turn failures into those of httpcore."""
    try:
        yield
    except TimeoutError as exc:
        raise timeout(exc) from exc
    except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream) as exc:
        raise other(exc) from exc


class AnswerStream(httpcore.AsyncNetworkStream):
    """A connection, in the clear or in TLS, for one request after another."""

    def __init__(self, inner: ByteStream, on_close: Callable[[], object]) -> None:
        self._inner, self._on_close = inner, on_close
        self._head_left: tuple[int, int] | None = None
        """Bytes and lines that may come before the answer; None from then on."""

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Return the next bytes of an answer; none at the end."""
        most = max_bytes if self._head_left is None else _HEAD_PIECE_BYTES
        with _failures(httpcore.ReadTimeout, httpcore.ReadError), anyio.fail_after(timeout):
            try:
                data = await self._inner.receive(most)
            except anyio.EndOfStream:
                return b""
        if self._head_left is not None:
            size, lines = self._head_left
            self._head_left = size - len(data), lines - data.count(b"\n")
            if min(self._head_left) < 0:
                bounds = f"{MAX_HEAD_BYTES} bytes and {MAX_HEAD_LINES} lines"
                raise httpcore.RemoteProtocolError(f"no answer within {bounds} of headers")
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._head_left = MAX_HEAD_BYTES, MAX_HEAD_LINES
        with _failures(httpcore.WriteTimeout, httpcore.WriteError), anyio.fail_after(timeout):
            await self._inner.send(buffer)

    def end_head(self) -> None:
        """Take the rest as the body of an answer."""
        self._head_left = None

    async def aclose(self) -> None:
        self._on_close()
        await self._inner.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> AnswerStream:
        try:
            with _failures(httpcore.ConnectTimeout, httpcore.ConnectError), anyio.fail_after(timeout):
                tls = await TLSStream.wrap(
                    self._inner, hostname=server_hostname, ssl_context=ssl_context, standard_compatible=False
                )
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.aclose()
            raise
        return AnswerStream(tls, self._on_close)

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":
            looked_at = select.poll()
            looked_at.register(self._inner.extra(SocketAttribute.raw_socket), select.POLLIN)
            return bool(looked_at.poll(0))
        return self._inner.extra(_INFO[info], None) if info in _INFO else None
