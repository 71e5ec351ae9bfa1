"""`HttpSocket`: what `http.client` and urllib3 take for a connected socket."""

from __future__ import annotations

import errno
import io
import socket
from collections.abc import Callable
from typing import Any, Final

from toolcell_bridge.guest.egress.connection import Cause, EgressFailed, HttpConnection, Steps
from toolcell_bridge.guest.egress.host_calls import HostCalls

ERRNOS: Final = {
    Cause.CONNECT: errno.ECONNREFUSED,
    Cause.BROKEN: errno.ECONNABORTED,
    Cause.PROTOCOL: errno.ECONNRESET,
    Cause.RESET: errno.ECONNRESET,
}

Translate = Callable[[EgressFailed], Exception]
"""Returns what a library raises in place of a failure."""

AT_ONCE: Final = (Cause.CONNECT, Cause.CERTIFICATE, Cause.BROKEN)
"""What a library notices while it sends a request. The rest it notices when it reads."""


def socket_error(failed: EgressFailed) -> OSError:
    """Return the failure as a socket would raise it."""
    if failed.cause is Cause.TIMEOUT:
        return TimeoutError(failed.message)
    if failed.cause is Cause.CERTIFICATE:
        from ssl import SSLCertVerificationError

        return SSLCertVerificationError(1, failed.message)
    return OSError(ERRNOS[failed.cause], failed.message)  # Python chooses the subclass by the number


class HttpSocket:
    """A connection to a host and a port. Reads and writes block."""

    def __init__(
        self, calls: HostCalls, peer: tuple[str, int], timeout: Any, translate: Translate, *, asks_at_once: bool
    ) -> None:
        """`timeout`: in seconds, None, or what stands for the default of `socket`. `asks_at_once`: send a request as
        soon as it is complete. Otherwise it is sent when its answer is read: urllib3 tells only then how long it waits.
        """
        self._calls, self._translate, self._asks_at_once = calls, translate, asks_at_once
        self._http = HttpConnection(*peer)
        is_time = timeout is None or isinstance(timeout, int | float)
        self._timeout: float | None = timeout if is_time else socket.getdefaulttimeout()
        self._failed: EgressFailed | None = None
        """What is raised when the answer is read."""
        self._readers = 0
        """Files that read from here. `http.client` closes a socket whose answer is still being read."""
        self._is_closed = False

    def start_tls(self) -> None:
        """Go on as `https`. The host verifies the certificate."""
        self._http.scheme = "https"

    def _run(self, steps: Steps[Any]) -> Any:
        try:
            return self._calls.run(steps)
        except EgressFailed as exc:
            raise self._translate(exc) from None

    def sendall(self, data: Any, flags: int = 0) -> None:
        """Take bytes of a request."""
        self._check_open()
        self._run(self._http.write(data))
        if self._asks_at_once and self._http.is_complete:
            try:
                self._calls.run(self._http.ask(self._timeout))
            except EgressFailed as exc:
                if exc.cause in AT_ONCE:
                    raise self._translate(exc) from None
                self._failed = exc

    def send(self, data: Any, flags: int = 0) -> int:
        """Take bytes of a request; return how many, which is all."""
        self.sendall(data)
        return memoryview(data).nbytes

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Return the next bytes of the answer; none at its end."""
        self._check_open()
        return self._read(size)

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Fill a buffer with the next bytes of the answer; return how many."""
        data = self.recv(nbytes or memoryview(buffer).nbytes)
        memoryview(buffer).cast("B")[: len(data)] = data
        return len(data)

    def _read(self, size: int) -> bytes:
        if data := self._http.take(size):
            return data
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise self._translate(failed)
        read: bytes = self._run(self._http.read(size, self._timeout))
        return read

    def makefile(self, mode: str = "r", buffering: int | None = None, **_options: Any) -> Any:
        """Return a file that reads the answer, for the mode "rb"."""
        if mode != "rb":
            raise ValueError(f"a connection that the host makes has files of mode 'rb', not {mode!r}")
        self._readers += 1
        raw = _Reader(self)
        return raw if buffering == 0 else io.BufferedReader(raw, buffering or io.DEFAULT_BUFFER_SIZE)

    def close(self) -> None:
        """Close the connection, as soon as no file reads from it."""
        self._is_closed = True
        if not self._readers:
            self._calls.drop(self._http.close())

    def reader_closed(self) -> None:
        """A file has read enough."""
        self._readers -= 1
        if self._is_closed:
            self.close()

    def shutdown(self, how: int) -> None:
        """End the answer here."""
        self._calls.drop(self._http.close())

    def _check_open(self) -> None:
        if self._is_closed:
            raise OSError(errno.EBADF, "the connection is closed")

    @property
    def is_readable(self) -> bool:
        """There is something to read without asking the host, or the connection has ended."""
        return self._is_closed or self._http.is_readable

    def settimeout(self, timeout: float | None) -> None:
        """Set how many seconds the host waits for the other side of the next request."""
        self._timeout = None if timeout is None else float(timeout)

    def gettimeout(self) -> float | None:
        """Return it."""
        return self._timeout

    def setblocking(self, flag: bool) -> None:
        """Do nothing: reads and writes block."""

    def setsockopt(self, *_option: Any) -> None:
        """Do nothing: these are the host's."""

    def getpeername(self) -> tuple[str, int]:
        """Return host and port."""
        return self._http.peer

    def fileno(self) -> int:
        """Return -1: there is no descriptor."""
        return -1

    def selected_alpn_protocol(self) -> str | None:
        """Return what TLS would have chosen."""
        return "http/1.1" if self._http.scheme == "https" else None

    def getpeercert(self, binary_form: bool = False) -> Any:
        """Return no certificate: the host has it, and has verified it."""
        return None if binary_form else {}


class _Reader(io.RawIOBase):
    """The answer as a file."""

    def __init__(self, sock: HttpSocket) -> None:
        self._sock = sock

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._sock._read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._sock.reader_closed()
