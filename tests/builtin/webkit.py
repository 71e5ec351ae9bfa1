"""A web of our own for tests: a server on loopback, and a resolver that says where names lead."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.abc

from toolcell.builtin.web.policy import WebPolicy
from toolcell.tools import ToolRegistry, ToolResult

Page = bytes | Callable[[anyio.abc.ByteStream], Awaitable[None]]

LOOPBACK = ("127.0.0.1/32", "::1/128")


def page(
    body: bytes | str, content_type: str = "text/html; charset=utf-8", status: str = "200 OK", *more: str
) -> bytes:
    """A whole HTTP answer."""
    content = body.encode() if isinstance(body, str) else body
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {content_type}", f"Content-Length: {len(content)}", *more]
    return "\r\n".join([*lines, "", ""]).encode() + content


def redirect(to: str, status: str = "302 Found") -> bytes:
    return page("", "text/plain", status, f"Location: {to}")


class Site:
    """Answers by path; keeps what it was asked."""

    def __init__(self, pages: Mapping[str, Page], port: int) -> None:
        self.pages = dict(pages)
        self.port = port
        self.requests: list[str] = []

    def url(self, path: str = "/", host: str = "site.test") -> str:
        return f"http://{host}:{self.port}{path}"

    @property
    def paths(self) -> list[str]:
        return [request.split(" ")[1] for request in self.requests]

    async def answer(self, stream: anyio.abc.ByteStream) -> None:
        async with stream:
            try:
                head = b""
                while b"\r\n\r\n" not in head:
                    head += await stream.receive()
                self.requests.append(head.decode(errors="replace"))
                found = self.pages.get(head.split(b" ")[1].decode(), page("not here", status="404 Not Found"))
                if isinstance(found, bytes):
                    await stream.send(found)
                else:
                    await found(stream)
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                return


@asynccontextmanager
async def serve(pages: Mapping[str, Page]) -> AsyncIterator[Site]:
    """Serve on a free port of loopback until the block ends."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
    site = Site(pages, listener.extra(anyio.abc.SocketAttribute.local_port))
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, site.answer)
        yield site
        tasks.cancel_scope.cancel()


class Names:
    """A resolver of ours. A name with several answers gives them one after the other, the last one for ever."""

    def __init__(self, **answers: Sequence[Sequence[str]]) -> None:
        self.answers = {name.replace("_", "."): [list(each) for each in given] for name, given in answers.items()}
        self.asked: list[str] = []

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        if host not in self.answers:
            raise OSError(f"no such name: {host}")
        answers = self.answers[host]
        return answers.pop(0) if len(answers) > 1 else answers[0]


def local(**changes: Any) -> WebPolicy:
    """A policy under which the server on loopback can be reached."""
    return WebPolicy(**{"private": LOOPBACK, "ports": None, "interval_s": 0.0, "robots": False, **changes})


async def call(tool: Any, name: str, **args: Any) -> ToolResult:
    """Call one tool of a package."""
    return await ToolRegistry([tool]).execute(name, args)


async def stream_of(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    """The body of an answer, in these pieces."""
    for each in pieces:
        yield each
