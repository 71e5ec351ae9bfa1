"""`RequestLog`: one line of JSON for each request: who asked for what, and how it ended.

Bodies, queries, headers and paths as they came are not in it, so no secret of theirs is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolcell.calls.run_state import new_id
from toolcell.support.exact_json import json_text
from toolcell.support.log import logger_of

logger = logger_of("toolcell.service.request_log")
"""INFO; WARNING for a credential that was refused."""

PROBES: Final = ("/healthz", "/readyz")
"""Not in the log while they are answered with 200."""
MAX_CHARS: Final = 300
"""Of one text in a line."""

_facts: ContextVar[dict[str, Any] | None] = ContextVar("toolcell_request", default=None)


def note(**facts: Any) -> None:
    """Add to the line of the request that is carried out here."""
    if (found := _facts.get()) is not None:
        found.update(facts)


@contextmanager
def one_line(**facts: Any) -> Iterator[None]:
    """Write the line of a request when the block ends. `note` adds to it."""
    began, facts = time.perf_counter(), {"id": new_id(), **facts}
    token = _facts.set(facts)
    try:
        yield
    finally:
        _facts.reset(token)
        _write(facts, time.perf_counter() - began)


def _write(facts: dict[str, Any], took_s: float) -> None:
    level = logging.WARNING if "refused" in facts else logging.INFO
    if not logger.isEnabledFor(level) or (facts["route"] in PROBES and facts["status"] == 200):
        return
    line = {"at": datetime.now(UTC).isoformat(timespec="milliseconds"), **facts, "duration_s": round(took_s, 4)}
    shown = {name: each[:MAX_CHARS] if isinstance(each, str) else each for name, each in line.items()}
    logger.log(level, "%s", json_text(shown, is_ascii=True))


class RequestLog:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp, route_of: Callable[[Scope], str | None]) -> None:
        """`route_of` returns the template of a request's path, such as `/v1/runs/{run_id}`."""
        self._app, self._route_of = app, route_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and write its line at its end."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return

        async def noting(message: Message) -> None:
            match message["type"]:
                case "http.response.start" | "websocket.http.response.start":
                    note(status=message["status"])
                case "websocket.accept":
                    note(status=101)
            await send(message)

        client = scope["client"][0] if scope.get("client") else None
        method = scope.get("method", "GET")
        with one_line(client=client, method=method, route=self._route_of(scope), status=None):
            await self._app(scope, receive, noting)
