"""Send a person to a login page, and wait on loopback for their browser to come back with the code (RFC 8252)."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import webbrowser
from urllib.parse import parse_qs, urlsplit

from toolcell.errors import McpServerError
from toolcell.support import daemon_threads

PATH = "/callback"
MAX_REQUEST_LINE_BYTES = 16 * 1024
REQUEST_S = 10.0
MAX_CONNECTIONS = 32
"""At once; a login needs one."""

_PAGE = (
    b"HTTP/1.1 %s\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: %d\r\nCache-Control: no-store\r\n"
    b"X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n%s"
)


class Loopback:
    """A server on 127.0.0.1 that takes one answer: the one whose `state` is that of the login."""

    def __init__(self, name: str, open_browser: bool) -> None:
        self._name, self._open_browser = name, open_browser
        self._server: asyncio.Server | None = None
        self._state = ""
        self._answer: asyncio.Future[str] | None = None
        self._connections = 0

    async def listen(self, port: int) -> str:
        """Listen, on a free port for 0, and return the redirect URI.

        Raises:
            OSError: the port is taken.
        """
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=MAX_REQUEST_LINE_BYTES)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}{PATH}"

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def ask(self, url: str) -> str:
        """Show `url` to the person, and return the URL that their browser came back to."""
        self._state = parse_qs(urlsplit(url).query).get("state", [""])[0]
        self._answer = asyncio.get_running_loop().create_future()
        sys.stderr.write(f"Log in at the MCP server {self._name}: open this page in a browser:\n\n  {url}\n\n")
        sys.stderr.flush()
        if self._open_browser and _has_browser():
            daemon_threads.start(lambda: webbrowser.open(url), name="toolcell-browser")
        return await self._answer

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections <= MAX_CONNECTIONS:
                async with asyncio.timeout(REQUEST_S):
                    await self._answer_browser(await reader.readline(), writer)
        except (OSError, ValueError, TimeoutError):
            pass
        finally:
            self._connections -= 1
            writer.close()

    async def _answer_browser(self, line: bytes, writer: asyncio.StreamWriter) -> None:
        method, _, rest = line.decode("ascii", "replace").partition(" ")
        target = rest.rpartition(" ")[0]
        state = parse_qs(urlsplit(target).query).get("state", [""])[0]
        # Any web page can make a browser send a request here; only the login page knows the state.
        is_ours = bool(self._state) and secrets.compare_digest(state.encode(), self._state.encode())
        if method != "GET" or urlsplit(target).path != PATH or not is_ours:
            status, text = b"400 Bad Request", b"This is not the answer of the login that is waited for.\n"
        else:
            status, text = b"200 OK", b"toolcell has got the answer of the login. You can close this window.\n"
        writer.write(_PAGE % (status, len(text), text))
        await writer.drain()
        if is_ours and self._answer is not None and not self._answer.done():
            self._answer.set_result(f"http://127.0.0.1{target}")


def _has_browser() -> bool:
    """Return whether a browser would open a window: in a terminal alone, it would take the terminal."""
    if sys.platform in ("win32", "darwin"):
        return True
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))


def read_answer(url: str) -> tuple[str, str | None, str | None]:
    """Return code, state and issuer of the URL that a browser came back to.

    Raises:
        McpServerError: the login was refused, or there is no code.
    """
    query = parse_qs(urlsplit(url).query)

    def first(name: str) -> str | None:
        return next(iter(query.get(name, ())), None)

    if (error := first("error")) is not None:
        raise McpServerError(f"the login was refused: {error[:80]}")
    code = first("code")
    if not code:
        raise McpServerError("the login came back without a code")
    return code, first("state"), first("iss")
