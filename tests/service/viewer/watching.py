"""A browser and a server for tests of the viewer, each in a thread of its own, away from the tests' event loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import trio  # noqa: F401 - loaded before there are threads: two that load it at once find half of it
import uvicorn
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from starlette.types import ASGIApp

from audit.ledger import Ledger
from machine import CHROMIUM
from toolcell.service.log_reader import LogReader
from toolcell.service.viewer.app import create_viewer
from toolcell.service.viewer.visitors import OneLog
from toolcell.support.asgi import HttpServer, listening

Returned = TypeVar("Returned")

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
LIGHT = {"viewport": {"width": 1280, "height": 860}}
DARK = {**LIGHT, "color_scheme": "dark"}
SMALL = {"viewport": {"width": 360, "height": 740}}


class Chromium:
    """One browser. What is done with it is done in its thread: playwright keeps an event loop there."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="playwright")
        self._playwright: Any = None
        self._browser: Browser | None = None

    def __enter__(self) -> Chromium:
        self._thread.submit(self._start).result(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.submit(self._stop).result(60)
        self._thread.shutdown()

    def _start(self) -> None:
        self._playwright = sync_playwright().start()
        expect.set_options(timeout=20_000)
        self._browser = self._playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))

    def _stop(self) -> None:
        if self._browser is not None:
            self._browser.close()
        self._playwright.stop()

    def do(self, work: Callable[[Page], Returned], **options: Any) -> Returned:
        """Do something with a page of a new context, and return what it returned."""
        return self._thread.submit(self._do, work, options).result(300)

    def _do(self, work: Callable[[Page], Returned], options: dict[str, Any]) -> Returned:
        assert self._browser is not None
        context: BrowserContext = self._browser.new_context(**options)
        context.set_default_timeout(20_000)
        try:
            return work(context.new_page())
        finally:
            context.close()


@contextmanager
def served(make: Callable[[int], ASGIApp]) -> Iterator[str]:
    """Serve an application that is made for its port; yield its address."""
    listener = listening("127.0.0.1", 0)
    port = listener.getsockname()[1]
    config = uvicorn.Config(
        make(port), lifespan="on", log_config=None, access_log=False, proxy_headers=False, timeout_graceful_shutdown=1
    )
    server = HttpServer(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(60)
        listener.close()
        assert not thread.is_alive()


@contextmanager
def watched(ledger: Ledger) -> Iterator[tuple[str, str]]:
    """Serve the viewer of a log; yield its address, and the path with the token."""
    log = LogReader(ledger.path, [ledger.key])
    hosts: list[OneLog] = []

    def make(port: int) -> ASGIApp:
        hosts.append(OneLog(log, port))
        return create_viewer(hosts[0], [f"127.0.0.1:{port}"])

    try:
        with served(make) as base:
            yield base, f"{base}/?token={hosts[0].token}"
    finally:
        log.close_now()


def new_ledger(path: Path) -> Ledger:
    """An empty log."""
    return Ledger(path / "runs.db")
