"""`toolcell mcp --http`: who may connect, what each client has for itself, and what is left when one vanishes."""

from __future__ import annotations

import http.client
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import httpx2
import mcp_types as types
import pytest
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.server.auth.settings import AuthSettings
from pydantic import AnyHttpUrl

from rows import each_row
from toolcell import Limits, PoolConfig, Runtime, ToolRegistry, UsageError
from toolcell.mcp.http import StaticToken, http_app, parse_address, serve_http
from toolcell.mcp.server import McpServer
from toolcell.support.asgi import listening

pytestmark = [pytest.mark.anyio, pytest.mark.isolation]

TOKEN = "a-token-of-a-test-42"


@asynccontextmanager
async def serving(
    registry: ToolRegistry | None = None, token: str = "", auth: AuthSettings | None = None, **options: Any
) -> AsyncIterator[tuple[str, Runtime]]:
    async with Runtime(registry, pool=PoolConfig(warm=1), limits=Limits(wall_s=600)) as runtime:
        server = McpServer(runtime, **options)
        verifier = StaticToken(token) if token else None
        app = http_app(server, "127.0.0.1", verifier=verifier, auth=auth, origins=("https://app.example",))
        urls, ready = list[str](), anyio.Event()

        def listens(url: str) -> None:
            urls.append(url)
            ready.set()

        with closing(listening("127.0.0.1", 0)) as listener:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(serve_http, server, app, listener, listens)
                await ready.wait()
                yield urls[0], runtime
                tasks.cancel_scope.cancel()


async def post(url: str, body: str, **headers: str) -> tuple[int, dict[str, str], str]:
    """Send one request without any library of MCP. `Content_Type` is the header Content-Type."""

    def send() -> tuple[int, dict[str, str], str]:
        host, _, path = url.removeprefix("http://").partition("/")
        with closing(http.client.HTTPConnection(host)) as connection:
            sent = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
            sent |= {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request("POST" if body else "GET", f"/{path}", body or None, sent)
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()

    return await anyio.to_thread.run_sync(send)


HELLO = json.dumps(
    {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": {"name": "test", "version": "1"},
        },
    }
)


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_a_client_runs_scripts_hears_their_progress_and_is_asked(mode: Any) -> None:
    registry, told = ToolRegistry(), list[str | None]()

    @registry.tool(requires_approval=True)
    async def pay(amount: int) -> str:
        """Pay an amount of money to somebody."""
        return f"paid {amount}"

    async def ask(ctx: Any, params: Any) -> types.ElicitResult:
        return types.ElicitResult(action="accept", content={"decision": "approve"})

    async def note(progress: float, total: float | None, message: str | None) -> None:
        told.append(message)

    async with serving(registry) as (url, _), Client(url, mode=mode, elicitation_callback=ask) as client:
        code = {"code": "progress('paying'); call_tool('pay', amount=3)"}
        result = await client.call_tool("execute_code", code, progress_callback=note)

    assert result.structured_content["value"] == "paid 3"
    assert told[0] == "paying"


async def test_an_error_of_toolcell_is_an_answer_that_says_what_is_wrong() -> None:
    async with serving() as (url, _), Client(url, mode="legacy") as client:
        unknown = await client.call_tool("describe_tools", {"names": ["nope"]})
        foreign = await client.call_tool("resume", {"token": "no token", "decisions": {}})

    assert unknown.is_error and "nope" in unknown.content[0].text
    assert foreign.is_error and "not 'no token'" in foreign.content[0].text


async def test_each_mcp_session_has_a_session_of_its_own_that_ends_with_it() -> None:
    async with serving(keeps_state=True) as (url, runtime):
        async with Client(url, mode="legacy") as one, Client(url, mode="legacy") as other:
            await one.call_tool("execute_code", {"code": "x = 40"})
            kept = await one.call_tool("execute_code", {"code": "x + 2"})
            foreign = await other.call_tool("execute_code", {"code": "x + 2"})
            assert len(runtime.sessions._open) == 2
        with anyio.fail_after(60):
            while runtime.sessions._open:
                await anyio.sleep(0.01)

    assert kept.structured_content["value"] == 42
    assert "NameError" in foreign.structured_content["error"]["type"]


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_a_client_that_vanishes_ends_its_script(mode: Any) -> None:
    registry, begun, ended = ToolRegistry(), anyio.Event(), anyio.Event()

    @registry.tool
    async def wait() -> None:
        """Wait until the call is given up."""
        begun.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()

    async with serving(registry) as (url, _):
        body = {"jsonrpc": "2.0", "id": 2, "method": "tools/call"}
        call = {"name": "execute_code", "arguments": {"code": "call_tool('wait')"}}
        if mode == "legacy":
            _, headers, _ = await post(url, HELLO)
            sent = {"Mcp-Session-Id": headers["mcp-session-id"]}
            await post(url, json.dumps({"jsonrpc": "2.0", "method": "notifications/initialized"}), **sent)
        else:
            meta = {
                "io.modelcontextprotocol/protocolVersion": "2026-07-28",
                "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
                "io.modelcontextprotocol/clientCapabilities": {},
            }
            call |= {"_meta": meta}
            sent = {"MCP-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/call", "Mcp-Name": "execute_code"}
        host, _, port = url.removeprefix("http://").removesuffix("/mcp").partition(":")
        stream = await anyio.connect_tcp(host, int(port))
        data = json.dumps(body | {"params": call}).encode()
        lines = {"Host": f"{host}:{port}", "Content-Type": "application/json", "Content-Length": str(len(data))} | sent
        lines |= {"Accept": "application/json, text/event-stream"}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        await stream.send(f"POST /mcp HTTP/1.1\r\n{head}\r\n".encode() + data)
        with anyio.fail_after(60):
            await begun.wait()
            await stream.aclose()
            await ended.wait()


async def test_only_the_right_token_host_and_origin_get_in() -> None:
    async with serving(token=TOKEN) as (url, _):
        right = f"Bearer {TOKEN}"
        statuses = [
            (await post(url, HELLO))[0],
            (await post(url, HELLO, Authorization="Bearer wrong"))[0],
            (await post(url, HELLO, Authorization="Bearer ungültig"))[0],
            (await post(url, HELLO, Authorization=right))[0],
            (await post(url, HELLO, Authorization=right, Origin="https://evil.example"))[0],
            (await post(url, HELLO, Authorization=right, Origin="https://app.example"))[0],
            (await post(url, HELLO, Authorization=right, Host="evil.example"))[0],
            (await post(url, HELLO, Authorization=right, Host="127.0.0.1:8000@evil.example"))[0],
            (await post(url, HELLO, Authorization=right, Host="127.0.0.1:80.evil.example"))[0],
            (await post(url, "{", Authorization=right))[0],
        ]
        client = httpx2.AsyncClient(headers={"Authorization": right})
        async with client, Client(streamable_http_client(url, http_client=client)) as connected:
            result = await connected.call_tool("execute_code", {"code": "6 * 7"})

    assert statuses == [401, 401, 401, 200, 403, 200, 421, 421, 421, 400]
    assert result.structured_content["value"] == 42


async def test_pages_of_allowed_origins_may_ask_and_read_and_compressed_bodies_are_refused_by_name() -> None:
    async with serving(token=TOKEN) as (url, _):
        asked = {"Origin": "https://app.example", "Access_Control_Request_Method": "POST"}
        asked["Access_Control_Request_Headers"] = "authorization,content-type,mcp-session-id"
        async with httpx2.AsyncClient() as client:
            sent = {name.replace("_", "-"): value for name, value in asked.items()}
            preflight = await client.options(url, headers=sent)
            elsewhere = await client.options(url, headers=sent | {"Origin": "https://evil.example"})
        right = {"Authorization": f"Bearer {TOKEN}"}
        status, headers, _ = await post(url, HELLO, **right, Origin="https://app.example")
        refused = await post(url, HELLO, **right, Content_Encoding="gzip")
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, "https://app.example")
    assert "mcp-session-id" in preflight.headers["access-control-allow-headers"]
    assert elsewhere.status_code == 400 and "access-control-allow-origin" not in elsewhere.headers
    assert (status, headers["access-control-allow-origin"]) == (200, "https://app.example")
    assert "mcp-session-id" in headers["access-control-expose-headers"]
    assert refused[0] == 415 and "'gzip'" in refused[2]


async def test_a_client_that_wants_to_resume_a_stream_gets_a_new_one() -> None:
    async with serving() as (url, _):
        _, headers, _ = await post(url, HELLO)
        wanted = {"Accept": "text/event-stream", "Mcp-Session-Id": headers["mcp-session-id"], "Last-Event-ID": "5"}
        async with httpx2.AsyncClient() as client, client.stream("GET", url, headers=wanted) as answer:
            assert answer.status_code == 200


async def test_clients_find_who_issues_tokens() -> None:
    auth = AuthSettings(
        issuer_url=AnyHttpUrl("https://issuer.example"),
        resource_server_url=AnyHttpUrl("https://code.example/mcp"),
        validate_token_resource=False,
    )
    async with serving(token=TOKEN, auth=auth) as (url, _):
        _, headers, _ = await post(url, HELLO)
        _, _, found = await post(url.replace("/mcp", "/.well-known/oauth-protected-resource/mcp"), "")

    assert "resource_metadata=" in headers["www-authenticate"]
    assert json.loads(found)["authorization_servers"] == ["https://issuer.example/"]


@each_row(
    ("wrong", "said"),
    [
        (partial(parse_address, "8000"), "want HOST:PORT"),
        (partial(parse_address, "host:99999"), "want HOST:PORT"),
        (partial(parse_address, "http://host:80"), "want HOST:PORT"),
        (partial(StaticToken, "short"), "16 are the least"),
        (partial(listening, "192.0.2.1", 1), "cannot listen on 192.0.2.1:1"),
        (lambda: http_app(McpServer(Runtime()), "0.0.0.0"), "a bearer token is needed there: --token-file"),
    ],
    ids=["port alone", "port too large", "url", "token", "address", "no token"],
)
def test_what_is_wrong_with_a_server_is_said(wrong: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        wrong()
    assert parse_address("[::1]:80") == ("::1", 80)
