"""`toolcell mcp --http` and `toolcell serve` while strangers hold connections: who has a request is answered."""

from __future__ import annotations

import asyncio
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from pathlib import Path

import httpx
import pytest

from rows import each_row
from toolcell import Runtime
from toolcell.mcp.http import http_app, serve_http
from toolcell.mcp.server import McpServer
from toolcell.mcp.structure import MAX_ELEMENTS, TOO_MANY_CHECKED
from toolcell.support.asgi import listening
from toolcell.support.http_protocol import HttpLimits

pytestmark = [pytest.mark.isolation]

SILENT = 1100
"""More than the usual `ulimit -n`."""

PING = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
HEADERS = {"accept": "application/json, text/event-stream", "mcp-protocol-version": "2025-06-18"}


@contextmanager
def many_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[1], 65_536), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def command(folder: Path, *words: str) -> Iterator[int]:
    """Run a command that serves, with the usual limit of files, and yield its port."""
    limited = ["prlimit", "--nofile=1024:1024", sys.executable, "-m", "toolcell", *words]
    environment = {"XDG_STATE_HOME": str(folder), "XDG_CACHE_HOME": str(folder), "PATH": "/usr/bin:/bin"}
    with subprocess.Popen(limited, stderr=subprocess.PIPE, text=True, env=environment, cwd=folder) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if found := re.search(r"serving http://127\.0\.0\.1:(\d+)", line):
                    yield int(found[1])
                    break
        finally:
            process.kill()


@pytest.mark.parametrize("words", [("mcp", "--http", "127.0.0.1:0"), ("serve", "--port", "0", "--warm", "0")])
def test_silent_strangers_keep_nobody_out(tmp_path: Path, words: tuple[str, ...]) -> None:
    path = "/mcp" if words[0] == "mcp" else "/readyz"
    with many_files(), command(tmp_path, *words) as port, ExitStack() as stack:
        base = f"http://127.0.0.1:{port}"
        there_before, newcomer = (stack.enter_context(httpx.Client(base_url=base, timeout=20)) for _ in range(2))

        def ask(client: httpx.Client) -> int:
            if path == "/mcp":
                return client.post(path, json=PING, headers=HEADERS).status_code
            return client.get(path).status_code

        while (usual := ask(there_before)) == 503:  # it is not ready yet
            time.sleep(0.05)
        for _ in range(SILENT):
            stranger = stack.enter_context(socket.socket())
            stranger.settimeout(5)
            stranger.connect(("127.0.0.1", port))
        began = time.monotonic()
        assert ask(newcomer) == usual
        assert ask(there_before) == usual
        assert time.monotonic() - began < 5


@asynccontextmanager
async def serving(limits: HttpLimits) -> AsyncIterator[int]:
    server, ready = McpServer(Runtime()), asyncio.Event()
    with closing(listening("127.0.0.1", 0)) as listener:
        app = http_app(server, "127.0.0.1")
        task = asyncio.create_task(serve_http(server, app, listener, lambda url: ready.set(), limits))
        await ready.wait()
        yield listener.getsockname()[1]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


HEAD = b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


@pytest.mark.anyio
@each_row("sent", [b"", b"POST /mc", HEAD, HEAD + b"Content-Length: 100\r\n\r\n{"])
async def test_half_a_request_to_an_mcp_server_is_given_up(sent: bytes) -> None:
    async with serving(HttpLimits(head_s=0.1, body_s=0.1)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        async with asyncio.timeout(20):
            assert await reader.read() == b""
        writer.close()


@pytest.mark.anyio
async def test_bodies_on_their_way_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolcell.mcp.http.RECEIVING_BYTES", 1 << 20)
    body, size = b"{" + b" " * 300_000, 400_000

    async with serving(HttpLimits(body_s=600)) as port:
        made = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        for _, writer in made:
            writer.write(HEAD + f"Accept: text/event-stream\r\nContent-Length: {size}\r\n\r\n".encode() + body)
        async with asyncio.timeout(20):
            answers = [asyncio.create_task(reader.readline()) for reader, _ in made]
            done, waiting = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        assert all(each.result().startswith(b"HTTP/1.1 503") for each in done)
        assert waiting
        for each in waiting:
            each.cancel()
        for _, writer in made:
            writer.close()


@pytest.mark.anyio
async def test_a_body_of_very_many_elements_is_refused_before_it_is_parsed() -> None:
    lists = ",".join(["[]"] * (MAX_ELEMENTS + 1))
    many = f'{{"jsonrpc": "2.0", "id": 1, "method": "ping", "params": {{"x": [{lists}]}}}}'
    text = '{"jsonrpc": "2.0", "id": 1, "method": "ping", "params": {"x": "%s"}}' % ("[,{" * MAX_ELEMENTS)

    async with serving(HttpLimits()) as port, httpx.AsyncClient(timeout=60) as client:
        headers = HEADERS | {"content-type": "application/json"}
        found = [
            await client.post(f"http://127.0.0.1:{port}/mcp", content=body, headers=headers) for body in (many, text)
        ]
    assert found[0].status_code == 413 and f"more than {MAX_ELEMENTS} lists, dicts" in found[0].text
    assert found[1].status_code != 413  # what stands in a text is not a structure


WRONG = {str(number): 0 for number in range(20_000)}
CLIENT = {"io.modelcontextprotocol/clientInfo": {"name": "t", "version": "1", "icons": [0] * 20_000}}


@pytest.mark.anyio
@each_row(
    "params",
    [
        {"name": "execute_code", "requestState": "x", "inputResponses": WRONG},
        {"name": "execute_code", "requestState": "x", "inputResponses": {"data": {"roots": [0] * 20_000}}},
        {"name": "search_tools", "_meta": CLIENT},
    ],
)
async def test_a_body_of_wrong_items_is_refused_before_a_model_checks_each(params: dict[str, object]) -> None:
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}

    async with serving(HttpLimits()) as port, httpx.AsyncClient(timeout=60) as client:
        found = await client.post(f"http://127.0.0.1:{port}/mcp", json=body, headers=HEADERS)
    assert (found.status_code, found.text) == (413, f"the message cannot be read: {TOO_MANY_CHECKED}")


@pytest.mark.anyio
async def test_a_large_body_that_is_no_message_is_refused_before_it_is_written_out() -> None:
    items = ",".join(['{"a": 1}'] * (MAX_ELEMENTS // 8))
    body = f'{{"jsonrpc": "2.0", "id": 1, "params": [{items}]}}'

    async with serving(HttpLimits()) as port, httpx.AsyncClient(timeout=60) as client:
        headers = HEADERS | {"content-type": "application/json"}
        url = f"http://127.0.0.1:{port}/mcp"
        found = [await client.post(url, content=each, headers=headers) for each in (body, body[:-1])]
    assert [(each.status_code, each.text) for each in found] == [
        (400, "the body is not a message of JSON-RPC 2.0"),
        (400, f"the body is not JSON: EOF while parsing an object at line 1 column {len(body) - 1}"),
    ]


@pytest.mark.anyio
async def test_of_too_many_silent_connections_the_oldest_makes_room() -> None:
    async with serving(HttpLimits(head_s=600, connections=3)) as port:
        made = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        async with asyncio.timeout(20):
            with pytest.raises(ConnectionResetError):
                assert await made[0][0].read() == b""
                raise ConnectionResetError
            for reader, writer in made[1:]:  # the others are still served
                writer.write(b"GET /nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                assert (await reader.readline()).startswith(b"HTTP/1.1 404")
        for _, writer in made:
            writer.close()
