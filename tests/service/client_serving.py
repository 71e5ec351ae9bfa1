"""A service on a port of this machine, in the test's own event loop, and a proxy that makes its connections bad."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn

from toolcell import ToolRegistry
from toolcell.service import ServiceConfig, create_app
from toolcell.service.service import Service
from toolcell.support.asgi import HttpServer, listening, url_of


@asynccontextmanager
async def serving(
    state: Path, registry: ToolRegistry | None = None, port: int = 0, log_level: str = "critical", **settings: Any
) -> AsyncIterator[tuple[str, Service]]:
    """Yield the URL of a service, and the service."""
    service = Service(ServiceConfig(state=state, **settings), registry)
    listener = listening("127.0.0.1", port)
    config = uvicorn.Config(create_app(service), log_level=log_level, lifespan="on", timeout_graceful_shutdown=1)
    server = HttpServer(config)
    task = asyncio.create_task(server.serve([listener]))
    try:
        await until(lambda: server.started or task.done())
        yield url_of(listener), service
    finally:
        server.should_exit = True
        await task
        listener.close()


async def until(condition: Any, limit_s: float = 20.0) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)


class BadProxy:
    """Carries bytes to a port, in pieces, late, and not for long: all by a seeded generator."""

    def __init__(self, url: str, seed: int, *, cut_after: tuple[int, int] = (500, 60_000)) -> None:
        self.port = int(url.rpartition(":")[2])
        self._random = random.Random(seed)
        self._cut_after = cut_after
        self.cuts = 0
        self.is_bad = True
        self.is_closed_to_all = False
        self.is_silent = False
        self.held_bytes = 0
        """What is not carried because it is silent."""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> BadProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut_all()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut_all(self) -> None:
        """Cut every connection now."""
        for writer in list(self._writers):
            writer.transport.abort()
        self.cuts += 1

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_closed_to_all:
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        left = [self._random.randint(*self._cut_after) if self.is_bad else 1 << 40]
        pumps = [asyncio.create_task(self._pump(*each, left)) for each in ((reader, back), (there, writer))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in pumps:
                each.cancel()
            for end in (writer, back):
                end.transport.abort()
                self._writers.discard(end)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, left: list[int]) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(self._random.choice([1, 7, 100, 4096, 65536]) if self.is_bad else 65536):
                while self.is_silent:
                    self.held_bytes = len(data)
                    await asyncio.sleep(0.01)
                left[0] -= len(data)
                if left[0] < 0:
                    self.cuts += 1
                    return
                sink.write(data)
                if self.is_bad and self._random.random() < 0.05:
                    await asyncio.sleep(self._random.random() * 0.01)
                await sink.drain()
