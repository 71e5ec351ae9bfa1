"""Errors are the server's own words: whatever their code, over HTTP with the status, and none of them ends a server."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from rows import each_row
from toolcell.calls.result import Status
from toolcell.errors import McpServerError
from toolcell.mcp.client import McpClient
from toolcell.mcp.http_bounds import MAX_MESSAGE_BYTES
from toolcell.mcp.transports import proxy_for
from toolcell.tools import ToolRegistry

from .conftest import a_tool, raw
from .plain_http import Answer, PlainServer, as_json

pytestmark = [pytest.mark.quick, pytest.mark.anyio]


@asynccontextmanager
async def connected(registry: ToolRegistry, **options: Any) -> AsyncIterator[McpClient]:
    client = await registry.add_mcp_server("s", approve="none", **options)
    try:
        yield client
    finally:
        await client.close()


CODES = [-32000, -32001, -32002, -32404, -32603, -1_000_001, 7]


@pytest.mark.slow
@each_row("code", CODES)
async def test_an_error_of_any_code_is_the_servers_and_the_server_stays(code: int) -> None:
    registry = ToolRegistry()
    error = {"code": code, "message": "the index is being rebuilt"}
    command = raw(pages=[[a_tool()]], error=error, error_at="tools/call")
    async with connected(registry, command=command) as client:
        for _ in range(12):
            result = await registry.dispatch("s.t", {})
            assert (result.status, result.message) == (Status.ERROR, "MCP server s: the index is being rebuilt")
        assert (client.state, client.restarts) == ("connected", 0)


@pytest.mark.slow
@each_row("code", CODES)
@each_row("method", ["initialize", "tools/list"])
async def test_an_error_at_the_beginning_is_told_in_the_servers_words(method: str, code: int) -> None:
    command = raw(pages=[[a_tool()]], error={"code": code, "message": "no licence"}, error_at=method)
    with pytest.raises(McpServerError, match="MCP server s: no licence"):
        await ToolRegistry().add_mcp_server("s", command=command)


async def test_a_slow_call_beside_such_an_error_ends_as_it_would() -> None:
    registry = ToolRegistry()
    command = raw(
        pages=[[a_tool()]], error={"code": -32000, "message": "no"}, error_at="tools/call", first_is_slow=True
    )
    results = {}

    async def call(name: str) -> None:
        results[name] = await registry.dispatch("s.t", {})

    async with connected(registry, command=command), anyio.create_task_group() as tasks:
        tasks.start_soon(call, "slow")
        await anyio.sleep(0.05)
        tasks.start_soon(call, "refused")

    assert (results["slow"].text, results["refused"].message) == ("done", "MCP server s: no")


@each_row(
    "gone", [(404, "Session not found"), (410, "Gone"), (400, "Bad Request: No valid session ID provided")], ids=str
)
async def test_a_server_that_has_forgotten_the_session_gets_a_new_one_and_the_call_once(gone: tuple[int, str]) -> None:
    server, registry = PlainServer(), ToolRegistry()
    server.gone = gone
    async with server.serve() as url, connected(registry, url=url) as client:
        assert (await registry.dispatch("s.t", {})).text == "done"
        for session in ("two", "three"):
            server.session = session
            results = []

            async def call(results: list[str] = results) -> None:
                results.append((await registry.dispatch("s.t", {})).text)

            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(call)
            assert results == ["done"] * 3
        assert server.calls == ["one", *["two"] * 3, *["three"] * 3]
        assert client.state == "connected"


async def test_a_call_that_comes_while_a_new_session_begins_waits_for_it() -> None:
    server, registry, begins, results = PlainServer(), ToolRegistry(), threading.Event(), list[str]()

    def begun(method: str, headers: Any, message: Any) -> None:
        if isinstance(message, dict) and message.get("method") == "initialize":
            begins.set()

    async def late() -> None:
        while not begins.is_set():  # the server has a thread of its own
            await anyio.lowlevel.checkpoint()
        results.append((await registry.dispatch("s.t", {})).text)

    async with server.serve() as url, connected(registry, url=url):
        server.session, server.refuse = "two", begun
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(late)
            results.append((await registry.dispatch("s.t", {})).text)
    assert results == ["done"] * 2


async def test_a_server_that_forgets_every_session_at_once_fails_the_call_and_hangs_nobody() -> None:
    server, registry = PlainServer(), ToolRegistry()
    async with server.serve() as url, connected(registry, url=url):
        server.refuse = lambda method, headers, message: (
            as_json(404, {}) if isinstance(message, dict) and message.get("method") == "tools/call" else None
        )
        with anyio.fail_after(60):
            result = await registry.dispatch("s.t", {})
        assert "the server has forgotten the session, again and again" in result.message


@each_row("padding", [0, 5_000])
async def test_a_refused_request_that_speaks_of_a_session_is_made_once_and_its_session_stays(padding: int) -> None:
    server, registry = PlainServer(), ToolRegistry()
    async with server.serve() as url, connected(registry, url=url) as client:
        asked = []

        def refuse(method: str, headers: Any, message: Any) -> Any:
            if not isinstance(message, dict) or message.get("method") != "tools/call":
                return None
            asked.append(message["id"])
            error = {"code": -32602, "message": "argument session_id must be a UUID" + " " * padding}
            return as_json(400, {"jsonrpc": "2.0", "id": message["id"], "error": error})

        server.refuse = refuse
        result = await registry.dispatch("s.t", {})
        assert "session_id must be a UUID" in result.message
        assert len(asked) == 1 and client.state == "connected"


REFUSALS: dict[str, tuple[Answer, str]] = {
    "unauthorized": ((401, {"content-type": "text/plain"}, b"no key"), "HTTP 401 Unauthorized: no key"),
    "forbidden": (as_json(403, {"error": {"message": "not yours"}}), "HTTP 403 Forbidden: not yours"),
    "not allowed": ((405, {}, b""), "HTTP 405 Method Not Allowed"),
    "too many": (as_json(429, {"detail": "slow down"}), "HTTP 429 Too Many Requests: slow down"),
    "a string": (as_json(429, "come back tomorrow"), "HTTP 429 Too Many Requests: come back tomorrow"),
    "a list": (as_json(400, ["a"]), "HTTP 400 Bad Request"),
    "another mistake": (as_json(400, {"error": "no such page"}), "HTTP 400 Bad Request: no such page"),
    "broken": ((500, {"content-type": "text/html"}, b"<h1>oops"), "HTTP 500 Internal Server Error"),
    "away": ((503, {}, b""), "HTTP 503 Service Unavailable"),
    "unknown": ((599, {}, b"\xff"), "HTTP 599"),
}


def refusing(method: str, answer: Answer) -> Callable[..., Answer | None]:
    return lambda verb, headers, message: (
        answer if isinstance(message, dict) and message.get("method") == method else None
    )


@pytest.mark.slow
@each_row("name", REFUSALS)
async def test_a_refusal_over_http_says_its_status(name: str) -> None:
    answer, said = REFUSALS[name]
    async with PlainServer(refusing("initialize", answer)).serve() as url:
        with pytest.raises(McpServerError, match=f"MCP server s: {said}"):
            await ToolRegistry().add_mcp_server("s", url=url)
    registry = ToolRegistry()
    server = PlainServer(refusing("tools/call", answer))
    async with server.serve() as url, connected(registry, url=url):
        assert said in (await registry.dispatch("s.t", {})).message


UNUSABLE: dict[str, tuple[Answer, str]] = {
    "large": (
        (200, {"content-type": "application/json"}, b" " * (MAX_MESSAGE_BYTES + 1)),
        "of more than 8388608 bytes",
    ),
    "compressed": ((200, {"content-type": "application/json", "content-encoding": "gzip"}, b"x"), "compresses"),
}


@each_row("name", UNUSABLE)
async def test_an_answer_that_ends_the_connection_fails_its_call_with_the_reason(name: str) -> None:
    answer, said = UNUSABLE[name]
    registry = ToolRegistry()
    async with PlainServer(refusing("tools/call", answer)).serve() as url, connected(registry, url=url):
        assert said in (await registry.dispatch("s.t", {})).message


async def test_a_stream_that_nobody_waits_for_explains_no_later_loss() -> None:
    streamed = anyio.Event()

    def refuse(verb: str, headers: dict[str, str], message: Any) -> Answer | None:
        if verb == "GET":
            streamed.set()
            return 200, {"content-type": "text/event-stream", "content-encoding": "gzip"}, b"x"
        if isinstance(message, dict) and message.get("method") == "tools/call" and message["params"].get("arguments"):
            raise ConnectionError
        return None

    registry = ToolRegistry()
    async with PlainServer(refuse).serve() as url, connected(registry, url=url):
        with anyio.fail_after(60):
            await streamed.wait()
        assert (await registry.dispatch("s.t", {})).output == "done"
        assert "the connection was lost" in (await registry.dispatch("s.t", {"fails": 1})).message


LOST: dict[str, tuple[Answer, str]] = {
    "a stream that is cut": (
        (200, {"content-type": "text/event-stream"}, b'event: message\ndata: {"jsonr'),
        "ended without a response",
    ),
    "a bad gateway": ((502, {}, b""), "HTTP 502 Bad Gateway"),
    "a gateway that is away": ((503, {}, b""), "HTTP 503 Service Unavailable"),
    "a gateway that waits no longer": ((504, {}, b""), "HTTP 504 Gateway Timeout"),
    "nothing": ((200, {"content-type": "application/json"}, b""), "its answer is empty"),
    "nothing of any type": ((200, {}, b""), "its answer is empty"),
    "a page": ((200, {"content-type": "text/html"}, b"<h1>hi"), "not JSON"),
    "something made": ((201, {"content-type": "text/plain"}, b"made"), "HTTP 201, and its answer is 'text/plain'"),
    "no content": ((204, {}, b""), "HTTP 204, and its answer is empty"),
    "nothing new": ((304, {}, b""), "HTTP 304, and its answer is empty"),
    "accepted": ((202, {}, b""), "202 Accepted"),
    "an error without words": (as_json(200, {"jsonrpc": "2.0", "error": {"code": 7}}), "not a message of JSON-RPC 2.0"),
    "an event of text": (
        (200, {"content-type": "text/event-stream"}, b"data: hello\n\n"),
        "not a message of JSON-RPC 2.0",
    ),
    "half a message": ((200, {"content-type": "application/json"}, b'{"jsonrpc"'), "not a message of JSON-RPC 2.0"),
}


@pytest.mark.slow
@each_row("name", LOST)
@each_row("reads", [True, False])
async def test_a_call_whose_answer_is_lost_is_made_again_if_it_reads_and_told_as_unknown_if_it_writes(
    name: str, reads: bool
) -> None:
    answer, said = LOST[name]
    left = [answer] * 3

    def refuse(method: str, headers: dict[str, str], message: Any) -> Answer | None:
        match isinstance(message, dict) and message.get("method"):
            case "tools/list":
                tool = a_tool() | {"annotations": {"readOnlyHint": reads}}
                return as_json(200, {"jsonrpc": "2.0", "id": message["id"], "result": {"tools": [tool]}})
            case "tools/call" if left:
                return left.pop()
        return None

    registry = ToolRegistry()
    server = PlainServer(refuse)
    async with server.serve() as url, connected(registry, url=url) as client:
        result = await registry.dispatch("s.t", {})
        assert said in result.message and "validation error" not in result.message
        assert result.error is not None and (result.error.code, result.error.retryable) == ("unavailable", reads)
        assert ("whether the call was carried out is not known" in result.message) is not reads
        assert len(left) == (1 if reads else 2)
        if reads:  # the next call loses one answer, and gets the second
            assert (await registry.dispatch("s.t", {})).text == "done"
        assert (client.state, client.restarts) == ("connected", 0)


async def test_a_list_goes_on_after_an_empty_cursor_and_leaves_out_tools_that_are_tasks() -> None:
    def refuse(method: str, headers: dict[str, str], message: Any) -> Answer | None:
        if not isinstance(message, dict) or message.get("method") != "tools/list":
            return None
        is_first = "cursor" not in (message.get("params") or {})
        tools = (
            [{**a_tool(), "name": "first"}]
            if is_first
            else [
                {**a_tool(), "name": "second"},
                {**a_tool(), "name": "job", "execution": {"taskSupport": "required"}},
            ]
        )
        result = {"tools": tools} | ({"nextCursor": ""} if is_first else {})
        return as_json(200, {"jsonrpc": "2.0", "id": message["id"], "result": result})

    registry = ToolRegistry()
    async with PlainServer(refuse).serve() as url, connected(registry, url=url) as client:
        assert sorted(client.tool_names) == ["s.first", "s.second"]
        [problem] = client.problems
        assert problem.tool == "job" and "as a task" in problem.message


async def test_a_server_of_the_older_transport_is_named_as_one() -> None:
    def old(verb: str, headers: dict[str, str], message: Any) -> Answer | None:
        if verb == "GET":
            return 200, {"content-type": "text/event-stream"}, b"event: endpoint\ndata: /messages?id=1\n\n"
        return 405, {}, b""

    async with PlainServer(old).serve() as url:
        with pytest.raises(McpServerError, match=r"HTTP 405 .* it speaks the older HTTP\+SSE transport"):
            await ToolRegistry().add_mcp_server("s", url=url)


async def test_requests_go_through_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    proxy, registry = PlainServer(), ToolRegistry()
    async with proxy.serve() as url:
        monkeypatch.setenv("http_proxy", url)
        async with connected(registry, url="http://tools.example/mcp"):
            assert (await registry.dispatch("s.t", {})).text == "done"
        assert proxy.lines[0] == "POST http://tools.example/mcp HTTP/1.1"
        monkeypatch.setenv("no_proxy", "tools.example,10.0.0.1")
        with pytest.raises(McpServerError):
            await ToolRegistry().add_mcp_server("s", url="http://tools.example/mcp")


def test_a_proxy_is_chosen_as_other_clients_choose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx2

    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", "inside.example, 127.0.0.1")
    assert proxy_for(httpx2.URL("https://a.example/")) == "http://proxy.example:3128"
    assert proxy_for(httpx2.URL("http://a.example/")) is None
    assert proxy_for(httpx2.URL("https://a.inside.example/")) is None
    assert proxy_for(httpx2.URL("https://127.0.0.1:8/")) is None
    monkeypatch.setenv(
        "NO_PROXY", "10.0.0.0/8 fd00::/8,ports.example:8443,127.0.0.2:8080,[::1]:80,.dot.example,secure.example:443"
    )
    for url, is_direct in {
        "https://10.1.2.3/": True,
        "https://11.1.2.3/": False,
        "https://[fd00::7]/": True,
        "https://[fe80::7]/": False,
        "https://ports.example:8443/": True,
        "https://ports.example/": False,
        "https://secure.example/": True,
        "https://127.0.0.2:8080/": True,
        "https://127.0.0.2/": False,
        "https://a.dot.example/": True,
    }.items():
        assert (proxy_for(httpx2.URL(url)) is None) == is_direct, url
    monkeypatch.setenv("ALL_PROXY", "http://all.example")
    assert proxy_for(httpx2.URL("http://a.example/")) == "http://all.example"
