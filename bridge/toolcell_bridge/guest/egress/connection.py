"""One HTTP/1.1 connection without a socket: bytes of requests in, calls of the host, bytes of answers out.

Nothing is sent or received here. Each operation is a generator of `HostCall`; whoever drives it makes the calls and
sends their answers in, so that blocking and asyncio libraries share the code.
"""

from __future__ import annotations

import enum
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

from toolcell_bridge.wire.messages import HTTP, HTTP_READ, HTTP_UPLOAD, PART_BYTES

HEAD_BYTES: Final = 256 * 1024
"""First bytes of the head of a request, at most."""

HEX_DIGITS: Final = b"0123456789abcdefABCDEF"

DEFAULT_PORTS: Final = {"http": 80, "https": 443}

ONLY_HTTP: Final = "the host of a sandbox makes HTTP/1.1 requests, and nothing else: "


class Cause(enum.Enum):
    """Why a request failed. Each library has an exception for each."""

    CONNECT = "there was no connection, or it was not allowed"
    CERTIFICATE = "the certificate of the other side is not valid"
    TIMEOUT = "the other side took too long"
    PROTOCOL = "the other side sent no valid answer"
    RESET = "the other side broke the connection"
    BROKEN = "the connection ended before the answer did"


CAUSES: Final = {
    "EgressRefused": Cause.CONNECT,
    "EgressConnectError": Cause.CONNECT,
    "EgressCertificateError": Cause.CERTIFICATE,
    "EgressTimeout": Cause.TIMEOUT,
    "EgressProtocolError": Cause.PROTOCOL,
    "EgressConnectionReset": Cause.RESET,
    "EgressLimit": Cause.BROKEN,
}
"""By the code of the call that failed. Any other code: the host refused the call."""


class EgressFailed(Exception):
    """A request failed. Each library gets an exception of its own in place of this one."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(message)
        self.cause, self.message = cause, message


@dataclass(frozen=True, slots=True)
class HostCall:
    """A call that the host is to make."""

    tool: str
    args: dict[str, Any]


T = TypeVar("T")
Steps: TypeAlias = Generator[HostCall, Any, T]
"""Yields calls, is sent their answers, has `EgressFailed` thrown in for those that fail, and returns a result."""


class _Stage(enum.Enum):
    """What the library writes next."""

    HEAD = enum.auto()
    BODY = enum.auto()
    CHUNK_SIZE = enum.auto()
    CHUNK_END = enum.auto()
    TRAILER = enum.auto()
    COMPLETE = enum.auto()
    """Nothing: the request is complete, and not sent yet."""
    ANSWERED = enum.auto()
    """The next request, when it has read the answer."""


class HttpConnection:
    """A connection to one host and port, for one request after another."""

    def __init__(self, host: str, port: int) -> None:
        self.scheme = "http"
        """"https" from the moment on at which a library would begin with TLS."""
        self.peer = host.strip("[]"), port
        self.is_ended = False
        """The other side has closed the connection: after this answer, or in it."""
        self._stage = _Stage.HEAD
        self._written = bytearray()
        self._method, self._target = "", ""
        self._headers: list[list[str]] = []
        self._left = 0
        """Bytes of the body, or of its chunk, that are not written yet."""
        self._is_chunked = False
        self._body = bytearray()
        self._upload: str | None = None
        self._answer = bytearray()
        """Bytes of the answer that the library has not read yet."""
        self._rest: str | None = None
        """Name under which the host has more of the answer."""

    @property
    def is_complete(self) -> bool:
        """A request is complete and not sent yet."""
        return self._stage is _Stage.COMPLETE

    @property
    def has_answer(self) -> bool:
        """There is something to read, or there will be."""
        return bool(self._answer) or self._rest is not None or self.is_complete

    @property
    def is_readable(self) -> bool:
        """There is something to read without asking the host, or the connection has ended."""
        return bool(self._answer) or self.is_ended

    # What the library writes.

    def write(self, data: bytes | bytearray | memoryview) -> Steps[None]:
        """Take bytes of a request. Long bodies are uploaded in parts.

        Raises:
            EgressFailed: they are not a request that the host can make, or an upload failed.
        """
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PART_BYTES):
            self._written += view[start : start + PART_BYTES]
            while self._written and (yield from self._step()):
                pass

    def _step(self) -> Steps[bool]:
        """Take the next piece of a request. Returns whether there was a whole one."""
        match self._stage:
            case _Stage.HEAD:
                return self._take_head()
            case _Stage.BODY:
                size = min(self._left, len(self._written))
                yield from self._take_body(size)
                self._left -= size
                if not self._left:
                    self._stage = _Stage.CHUNK_END if self._is_chunked else _Stage.COMPLETE
                return True
            case _Stage.ANSWERED:
                self._stage, self._upload = _Stage.HEAD, None
                self._answer.clear()
                self._body.clear()
                return True
            case _Stage.COMPLETE:
                raise EgressFailed(Cause.BROKEN, ONLY_HTTP + "the request before has no answer yet")
        line = self._take_line()
        if line is not None:
            self._take_framing(line)
        return line is not None

    def _take_line(self) -> bytes | None:
        end = self._written.find(b"\r\n")
        if end < 0:
            return None
        line = bytes(self._written[:end])
        del self._written[: end + 2]
        return line

    def _take_framing(self, line: bytes) -> None:
        """Take a line of the chunked encoding."""
        if self._stage is _Stage.CHUNK_END:
            self._stage = _Stage.CHUNK_SIZE
        elif self._stage is _Stage.TRAILER:
            self._stage = _Stage.TRAILER if line else _Stage.COMPLETE
        else:
            size = line.partition(b";")[0].strip()
            if not size or size.strip(HEX_DIGITS):
                raise EgressFailed(Cause.BROKEN, f"{ONLY_HTTP}{line[:40]!r} is not the size of a chunk")
            self._left = int(size, 16)
            self._stage = _Stage.BODY if self._left else _Stage.TRAILER

    def _take_body(self, size: int) -> Steps[None]:
        """Keep bytes of the body. What is kept is uploaded when it and these are too long for one call."""
        if self._body and len(self._body) + size > PART_BYTES:
            yield from self._upload_body()
        self._body += memoryview(self._written)[:size]
        del self._written[:size]

    def _upload_body(self) -> Steps[None]:
        self._upload = yield HostCall(HTTP_UPLOAD, {"upload": self._upload, "data": bytes(self._body)})
        self._body.clear()

    def _take_head(self) -> bool:
        end = self._written.find(b"\r\n\r\n")
        if end < 0:
            if len(self._written) > HEAD_BYTES:
                raise EgressFailed(Cause.BROKEN, f"{ONLY_HTTP}the head of a request has at most {HEAD_BYTES} bytes")
            return False
        first, *lines = bytes(self._written[:end]).split(b"\r\n")
        del self._written[: end + 4]
        self._method, self._target = _request_line(first)
        self._headers = [_header(line) for line in lines]
        named = {name.lower(): value for name, value in self._headers}
        if "upgrade" in named:
            raise EgressFailed(Cause.CONNECT, f"{ONLY_HTTP}not {named['upgrade']}, as `Upgrade:` asks")
        if named.get("expect", "").lower() == "100-continue":
            self._headers = [each for each in self._headers if each[0].lower() != "expect"]
            self._answer += b"HTTP/1.1 100 Continue\r\n\r\n"
        self._is_chunked = "chunked" in named.get("transfer-encoding", "").lower()
        length = named.get("content-length", "0")
        self._left = int(length) if length.isascii() and length.isdigit() else 0
        if self._is_chunked:
            self._stage = _Stage.CHUNK_SIZE
        else:
            self._stage = _Stage.BODY if self._left else _Stage.COMPLETE
        return True

    # What the library reads.

    def ask(self, timeout_s: float | None) -> Steps[None]:
        """Have the host make the request that is complete, up to the head of its answer.

        Raises:
            EgressFailed: the request failed.
        """
        if self._upload is not None and self._body:
            yield from self._upload_body()
        args = {
            "method": self._method,
            "url": self._url(),
            "headers": self._headers,
            "body": bytes(self._body),
            "upload": self._upload,
            "timeout_s": timeout_s,
        }
        self._stage = _Stage.ANSWERED
        self._body.clear()
        self._answer.clear()
        self._begin_answer((yield HostCall(HTTP, args)))

    def _url(self) -> str:
        host, port = self.peer
        place = f"[{host}]" if ":" in host else host
        if port != DEFAULT_PORTS[self.scheme]:
            place = f"{place}:{port}"
        return f"{self.scheme}://{place}{self._target}"

    def _begin_answer(self, answer: dict[str, Any]) -> None:
        status, headers = answer["status"], [*answer["headers"]]
        has_body = self._method != "HEAD" and status >= 200 and status not in (204, 304)
        is_framed = any(name.lower() == "content-length" for name, _ in headers)
        self._answer_is_chunked = has_body and not is_framed and answer["version"] != "1.0"
        if self._answer_is_chunked:
            headers.append(["Transfer-Encoding", "chunked"])
        first = f"HTTP/{answer['version']} {status} {answer['reason']}"
        lines = [first, *(f"{name}: {value}" for name, value in headers), "", ""]
        self._answer += "\r\n".join(lines).encode("latin-1", "replace")
        if has_body:
            self._answer_is_framed = is_framed or self._answer_is_chunked
            self.is_ended = not self._answer_is_framed
            self._rest = answer["rest"]
            self._add(answer["body"])

    def _add(self, part: bytes) -> None:
        """Add a part of the body to the answer; it is the last one when the host has no more."""
        if not self._answer_is_chunked:
            self._answer += part
            return
        if part:
            self._answer += b"%x\r\n%b\r\n" % (len(part), part)
        if self._rest is None:
            self._answer += b"0\r\n\r\n"

    def take(self, size: int) -> bytes:
        """Return bytes of the answer that are here; none when they must be asked for."""
        data = bytes(self._answer[:size])
        del self._answer[:size]
        return data

    def read(self, size: int, timeout_s: float | None = None) -> Steps[bytes]:
        """Return the next bytes of the answer: at least one, at most `size`. Nothing at the end of the connection.

        Raises:
            EgressFailed: the request failed, or is not complete.
        """
        if not self._answer and self.is_complete:
            yield from self.ask(timeout_s)
        while not self._answer and self._rest is not None:
            yield from self._read_rest()
        if not self._answer and self._stage not in (_Stage.HEAD, _Stage.ANSWERED):
            raise EgressFailed(Cause.BROKEN, "the request is not complete, so there is no answer")
        return self.take(size)

    def _read_rest(self) -> Steps[None]:
        rest, self._rest = self._rest, None
        try:
            part = yield HostCall(HTTP_READ, {"rest": rest, "size": PART_BYTES})
        except EgressFailed as exc:
            self.is_ended = True
            if exc.cause is Cause.PROTOCOL and self._answer_is_framed:
                return  # the library finds that bytes are missing, and says so in its own words
            cause = exc.cause if exc.cause in (Cause.TIMEOUT, Cause.RESET) else Cause.BROKEN
            raise EgressFailed(cause, exc.message) from None
        self._rest = rest if part else None
        self._add(part)

    def close(self) -> HostCall | None:
        """Forget the answer. Returns the call that drops what the host still has of it."""
        rest, self._rest = self._rest, None
        self.is_ended = True
        self._answer.clear()
        return None if rest is None else HostCall(HTTP_READ, {"rest": rest, "size": 0})


def _request_line(line: bytes) -> tuple[str, str]:
    """Return method and target.

    Raises:
        EgressFailed: it asks for what the host does not do.
    """
    method, _, rest = line.partition(b" ")
    target, _, version = rest.rpartition(b" ")
    if not version.startswith(b"HTTP/1."):
        raise EgressFailed(Cause.CONNECT, f"{ONLY_HTTP}not {line[:40]!r}, as HTTP/2 and other protocols begin")
    if method == b"CONNECT" or not target.startswith(b"/"):
        raise EgressFailed(Cause.CONNECT, ONLY_HTTP + "leave out proxies and their environment variables")
    return method.decode("latin-1"), target.decode("latin-1")


def _header(line: bytes) -> list[str]:
    name, colon, value = line.partition(b":")
    if not colon or not name or name != name.strip():
        raise EgressFailed(Cause.BROKEN, f"{ONLY_HTTP}{line[:40]!r} is not a header")
    return [name.decode("latin-1"), value.strip(b" \t").decode("latin-1")]
