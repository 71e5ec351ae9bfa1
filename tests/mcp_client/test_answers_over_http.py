"""Answers of a server over HTTP that are written to keep the event loop of its client, as JSON and as events."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from hostile.loop_silence import watched
from rows import each_row
from toolcell.mcp.structure import MAX_ELEMENTS
from toolcell.tools import ToolRegistry

from .conftest import until
from .plain_http import Answer, PlainServer

pytestmark = [pytest.mark.anyio]

SILENCE_S = 0.05
TYPES = ["application/json", "text/event-stream"]
FLOATS = b"[" + b",".join([b"1.2345678901234567e-300"] * (MAX_ELEMENTS - 2_000)) + b"]"
ANSWERS: dict[str, tuple[bytes, bytes]] = {
    "no UTF-8": (b'{"content": [{"type": "text", "text": "', b"x" * 7_000_000 + b'\xff"}]}'),
    "half characters": (b'{"content": [{"type": "text", "text": "', rb"\ud800" + rb"\\" * 3_500_000 + b'"}]}'),
    "numbers": (b'{"content": [], "structuredContent": {"a": ', FLOATS + b"}}"),
    "byte by byte": (b'{"content": [{"type": "text", "text": "', b"x" * 20_000 + b'"}]}'),
}


def answering(answer: Any) -> PlainServer:
    def refuse(method: str, headers: dict[str, str], message: Any) -> Answer | None:
        found: Answer | None = answer(message) if method == "POST" and "method" in message else None
        return found

    return PlainServer(refuse)


def of_type(kind: str, *messages: bytes) -> Answer:
    if kind == "application/json":
        return 200, {"content-type": kind}, messages[0]
    return 200, {"content-type": kind}, b"".join(b"data: " + each + b"\n\n" for each in messages)


@each_row("kind", TYPES)
@each_row("name", ANSWERS)
async def test_no_answer_keeps_the_event_loop(name: str, kind: str) -> None:
    def answer(message: Any) -> Answer | None:
        if message["method"] != "tools/call":
            return None
        status, headers, body = of_type(
            kind, b'{"jsonrpc": "2.0", "id": %d, "result": ' % message["id"] + b"".join(ANSWERS[name]) + b"}"
        )
        if name == "byte by byte":
            headers["transfer-encoding"] = "chunked"
            body = b"".join(b"1\r\n%c\r\n" % each for each in body) + b"0\r\n\r\n"
        return status, headers, body

    registry = ToolRegistry()
    async with answering(answer).serve() as url:
        await registry.add_mcp_server("s", url=url)
        seen = [await watched(registry.dispatch("s.t", {})) for _ in range(3)]  # a neighbour may have taken our caches
        await registry.close()

    assert not seen[0].outcome.is_error, seen[0].outcome.message
    assert min(each.silent_s for each in seen) < SILENCE_S


async def test_a_question_of_too_many_elements_is_answered_with_an_error() -> None:
    question = b'{"jsonrpc": "2.0", "id": 77, "method": "ping", "params": {"a": [' + b"0," * MAX_ELEMENTS + b"0]}}"
    answered: list[Any] = []

    def refuse(method: str, headers: dict[str, str], message: Any) -> Answer | None:
        if method == "POST" and "error" in message:
            answered.append(message)
        if method != "POST" or message.get("method") != "tools/call":
            return None
        done = (
            b'{"jsonrpc": "2.0", "id": %d, "result": {"content": [{"type": "text", "text": "done"}]}}' % message["id"]
        )
        return of_type("text/event-stream", question, done)

    registry = ToolRegistry()
    async with PlainServer(refuse).serve() as url:
        await registry.add_mcp_server("s", url=url)
        assert (await registry.dispatch("s.t", {})).text == "done"
        with anyio.fail_after(60):
            await until(lambda: bool(answered))
        await registry.close()

    assert answered[0]["id"] == 77 and f"more than {MAX_ELEMENTS}" in answered[0]["error"]["message"]
