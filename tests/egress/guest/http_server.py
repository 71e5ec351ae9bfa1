"""A local HTTP/1.1 server that answers well and badly, one way a path."""

from __future__ import annotations

import gzip
import hashlib
import json
import socket
import ssl
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

PIECES: Final = (b"first piece, ", b"second piece, ", b"last piece")
CSV: Final = b"name,count\nfigs,3\nplums,4\n"
LINES: Final = [{"line": number, "text": "x" * number} for number in range(20)]
BLOCK: Final = bytes(range(256)) * 256


class Handler(BaseHTTPRequestHandler):
    """Answers by the first part of the path."""

    protocol_version = "HTTP/1.1"
    wbufsize = 0
    disable_nagle_algorithm = True

    def handle_one_request(self) -> None:
        """Answer any method the same way."""
        self.raw_requestline = self.rfile.readline(65537)
        if self.raw_requestline and self.parse_request():
            parts = urlsplit(self.path)
            self.query = {key: values[0] for key, values in parse_qs(parts.query).items()}
            self.answer(*parts.path.strip("/").split("/"))
        else:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def body(self) -> Iterator[bytes]:
        """Read the request's body in blocks."""
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline(), 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        left = int(self.headers.get("Content-Length") or 0)
        while left > 0 and (data := self.rfile.read(min(left, 65536))):
            left -= len(data)
            yield data

    def head(self, status: int, *headers: tuple[str, str], reason: str | None = None) -> None:
        """Send the head of an answer."""
        self.send_response_only(status, reason)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()

    def whole(self, data: bytes, *headers: tuple[str, str], status: int = 200) -> None:
        """Send an answer of known length."""
        self.head(status, ("Content-Length", str(len(data))), *headers)
        if self.command != "HEAD":
            self.wfile.write(data)

    def chunk(self, data: bytes) -> None:
        """Send one chunk."""
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def answer(self, kind: str, *rest: str) -> None:
        """Send the answer of one path."""
        getattr(self, f"answer_{kind.replace('-', '_')}")(*rest)

    def answer_plain(self) -> None:
        self.whole(
            b"plain text", ("Content-Type", "text/plain"), ("X-Latin", "caf\xe9"), ("X-Twice", "1"), ("X-Twice", "2")
        )

    def answer_json(self) -> None:
        self.whole(json.dumps({"figs": 3, "names": ["é", "ß"]}).encode(), ("Content-Type", "application/json"))

    def answer_csv(self) -> None:
        self.whole(CSV, ("Content-Type", "text/csv"))

    def answer_csv_gzip(self) -> None:
        self.whole(gzip.compress(CSV), ("Content-Type", "text/csv"), ("Content-Encoding", "gzip"))

    def answer_chunked(self) -> None:
        self.head(200, ("Transfer-Encoding", "chunked"), ("Content-Type", "text/plain"))
        for piece in PIECES:
            self.chunk(piece)
        self.chunk(b"")

    def answer_compressed(self, coding: str) -> None:
        text = b"compressed " * 1000
        data = gzip.compress(text) if coding == "gzip" else zlib.compress(text)
        self.head(200, ("Transfer-Encoding", "chunked"), ("Content-Encoding", coding))
        for start in range(0, len(data), 7):
            self.chunk(data[start : start + 7])
        self.chunk(b"")

    def answer_bad_gzip(self) -> None:
        self.whole(b"this is not compressed", ("Content-Encoding", "gzip"))

    def answer_redirect(self, left: str, status: str = "302") -> None:
        for _ in self.body():
            pass
        place = f"/redirect/{int(left) - 1}/{status}" if int(left) > 1 else "/echo?redirected=1"
        self.whole(b"", ("Location", place), ("Set-Cookie", f"step{left}=done; Path=/"), status=int(status))

    def answer_echo(self) -> None:
        digest, size = hashlib.sha256(), 0
        start = b""
        for block in self.body():
            digest.update(block)
            size += len(block)
            start = (start + block)[:200]
        names = ("Content-Type", "Authorization", "Cookie", "X-Test", "Accept")
        told = {
            "method": self.command,
            "path": self.path,
            "headers": {name: self.headers[name] for name in names if name in self.headers},
            "size": size,
            "digest": digest.hexdigest(),
            "start": start.decode("latin-1"),
        }
        self.whole(json.dumps(told).encode(), ("Content-Type", "application/json"))

    def answer_set_cookie(self) -> None:
        self.whole(b"set", ("Set-Cookie", "a=1; Path=/"), ("Set-Cookie", "b=2; Path=/; HttpOnly"))

    def answer_auth(self) -> None:
        if self.headers.get("Authorization") == "Basic bWU6c2VjcmV0":
            self.whole(b"welcome")
        else:
            self.whole(b"who are you", ("WWW-Authenticate", 'Basic realm="here"'), status=401)

    def answer_status(self, status: str) -> None:
        self.whole(f"status {status}".encode(), status=int(status))

    def answer_nothing(self, status: str) -> None:
        self.head(int(status), ("ETag", '"x"'))

    def answer_until_close(self) -> None:
        self.head(200, ("Connection", "close"), ("Content-Type", "text/plain"))
        for piece in PIECES:
            self.wfile.write(piece)
        self.close_connection = True

    def answer_lines(self) -> None:
        self.head(200, ("Transfer-Encoding", "chunked"), ("Content-Type", "application/x-ndjson"))
        for line in LINES:
            self.chunk(json.dumps(line).encode() + b"\n")
            self.server.pause()  # type: ignore[attr-defined]
        self.chunk(b"")

    def answer_large(self) -> None:
        size = int(self.query["bytes"])
        self.head(200, ("Content-Length", str(size)))
        while size > 0:
            self.wfile.write(BLOCK[:size])
            size -= len(BLOCK)

    # Broken answers.

    def answer_short(self) -> None:
        self.head(200, ("Content-Length", "1000"))
        self.wfile.write(b"only this")
        self.close_connection = True

    def answer_short_chunks(self) -> None:
        self.head(200, ("Transfer-Encoding", "chunked"))
        self.chunk(b"only this")
        self.close_connection = True

    def answer_no_body(self, length: str = "1000") -> None:
        self.head(200, ("Content-Length", length) if length.isdigit() else ("Transfer-Encoding", "chunked"))
        self.server.pause()  # type: ignore[attr-defined]
        self.close_connection = True

    def answer_garbage(self) -> None:
        self.wfile.write(b"this is not HTTP\r\n\r\n")
        self.close_connection = True

    def answer_hang_up(self) -> None:
        self.close_connection = True

    def answer_reset(self, part: bytes = b"") -> None:
        self.wfile.write(part)
        self.server.pause()  # type: ignore[attr-defined]
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def answer_reset_in_body(self) -> None:
        self.answer_reset(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nabc")

    def answer_hasty(self) -> None:
        self.head(413, ("Content-Length", "8"), ("Connection", "close"))
        self.wfile.write(b"too long")
        self.close_connection = True

    def answer_slow_head(self) -> None:
        self.server.never.wait(20)  # type: ignore[attr-defined]
        self.close_connection = True

    def answer_slow_body(self) -> None:
        self.head(200, ("Content-Length", "1000"))
        self.wfile.write(b"a beginning")
        self.server.never.wait(20)  # type: ignore[attr-defined]
        self.close_connection = True


class Server(ThreadingHTTPServer):
    """Serves until its block ends."""

    daemon_threads = True

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.scheme = "http" if tls is None else "https"
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.never = threading.Event()
        """Set at the end: what waits for it, waits as long as the test."""

    def pause(self) -> None:
        """Let the other side see what was sent so far."""
        self.never.wait(0.002)

    @property
    def url(self) -> str:
        """Without a slash at its end."""
        return f"{self.scheme}://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients hang up in these tests."""


@contextmanager
def serving(tls: ssl.SSLContext | None = None) -> Iterator[Server]:
    """Serve inside the block; with HTTPS, where there are settings for it."""
    server = Server(tls)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.never.set()
        server.shutdown()
        thread.join()
        server.server_close()
