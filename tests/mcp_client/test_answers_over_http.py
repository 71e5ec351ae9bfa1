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


WITH_OTHER_IDS: dict[str, tuple[bytes, str]] = {
    "an error without an id": (
        b'{"jsonrpc": "2.0", "id": null, "error": {"code": -32600, "message": "no such page"}}',
        "no such page",
    ),
    "a result for another": (
        b'{"jsonrpc": "2.0", "id": 99, "result": {"content": [], "isError": true}}',
        "reports an error",
    ),
    "no message": (b'{"jsonrpc"', "not a message of JSON-RPC 2.0"),
}


@each_row("route", ["body", "stream", "rest of a stream"])
@each_row("name", WITH_OTHER_IDS)
async def test_what_answers_a_request_ends_its_call_whatever_id_it_names_and_a_question_keeps_its_own(
    name: str, route: str
) -> None:
    content, said = WITH_OTHER_IDS[name]
    question = b'{"jsonrpc": "2.0", "id": 77, "method": "ping"}'
    answered: list[Any] = []

    def refuse(method: str, headers: dict[str, str], message: Any) -> Answer | None:
        if method == "POST" and "method" not in message:
            answered.append(message["id"])
        if headers.get("last-event-id") == "first":
            return of_type("text/event-stream", question, content)
        if method != "POST" or message.get("method") != "tools/call":
            return None
        if route == "rest of a stream":
            return 200, {"content-type": "text/event-stream"}, b"id: first\nretry: 1\ndata:\n\n"
        return of_type(*(("text/event-stream", question) if route == "stream" else ("application/json",)), content)

    registry = ToolRegistry()
    async with PlainServer(refuse).serve() as url:
        await registry.add_mcp_server("s", url=url)
        with anyio.fail_after(20):
            result = await registry.dispatch("s.t", {})
            await until(lambda: answered == ([] if route == "body" else [77]))
        await registry.close()

    assert result.is_error and said in result.message


NO_ANSWERS = {
    "a notification": (b'{"jsonrpc": "2.0", "method": "x"}', []),
    "a question": (b'{"jsonrpc": "2.0", "id": 77, "method": "ping"}', [77]),
    "one of too many elements": (
        b'{"jsonrpc": "2.0", "id": 77, "method": "ping", "params": {"a": [' + b"0," * MAX_ELEMENTS + b"0]}}",
        [77],
    ),
}


@each_row("name", NO_ANSWERS)
async def test_a_body_that_is_no_answer_ends_its_call(name: str) -> None:
    content, expected = NO_ANSWERS[name]
    answered: list[Any] = []

    def refuse(method: str, headers: dict[str, str], message: Any) -> Answer | None:
        if method == "POST" and "method" not in message:
            answered.append(message["id"])
        if method != "POST" or message.get("method") != "tools/call":
            return None
        return of_type("application/json", content)

    registry = ToolRegistry()
    async with PlainServer(refuse).serve() as url:
        await registry.add_mcp_server("s", url=url)
        with anyio.fail_after(20):
            result = await registry.dispatch("s.t", {})
            await until(lambda: answered == expected)
        await registry.close()

    assert result.is_error and "not a message of JSON-RPC 2.0" in result.message


async def test_a_byte_order_mark_is_none_of_the_text_only_where_a_stream_begins() -> None:
    mark, events = b"\xef\xbb\xbf", list[bytes]()

    def answer(message: Any) -> Answer | None:
        if message["method"] != "tools/call":
            return None
        text = b'{"jsonrpc": "2.0", "id": 0, "result": {"content": [{"type": "text", "text": "%s"}]}}'
        body = b"".join(each + b"data: " + text % str(n).encode() + b"\n\n" for n, each in enumerate(events))
        return 200, {"content-type": "text/event-stream"}, body

    registry = ToolRegistry()
    async with answering(answer).serve() as url:
        await registry.add_mcp_server("s", url=url)
        for events[:], text in ([mark, b""], "0"), ([b": begins\n\n" + mark, b""], "1"):
            assert (await registry.dispatch("s.t", {})).text == text
        await registry.close()
