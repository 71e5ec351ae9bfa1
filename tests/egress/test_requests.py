"""Scripts send requests with the calls that their libraries make; the host sends them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from anyio.abc import ByteStream

from builtin.webkit import Site, page, serve
from egress.doors import SEND
from toolcell import Limits, Runtime, ToolRegistry
from toolcell.egress import Allow, Egress
from toolcell.results import ExecutionResult

pytestmark = [pytest.mark.quick, pytest.mark.isolation, pytest.mark.anyio]

TOKEN = "tok-51fa0c9d7e"


@asynccontextmanager
async def site_and_runtime(pages: dict[str, Any], /, **rule: Any) -> AsyncIterator[tuple[Site, Runtime]]:
    """A site on loopback, and a runtime whose scripts may send requests there."""
    async with serve(pages) as site:
        rule = {"ports": [site.port], **rule}
        egress = Egress(Allow("http://127.0.0.1", **rule), secrets={"TOKEN": TOKEN})
        async with Runtime(ToolRegistry(), egress=egress) as runtime:
            yield site, runtime


async def run(runtime: Runtime, site: Site, script: str, **options: Any) -> ExecutionResult:
    return (
        await runtime.execute_code(SEND, **options)
        if not script
        else await runtime.execute_code(f"{SEND}\nsite = {site.url(host='127.0.0.1')!r}\n{script}", **options)
    )


async def test_a_script_sends_a_request_and_gets_its_answer() -> None:
    pages = {"/x?y=1": page("hello", "text/plain", "203 Fine", "X-A: 1", "X-A: 2")}
    async with site_and_runtime(pages, headers=["X-B"]) as (site, runtime):
        result = await run(runtime, site, "set_result(send(site + 'x?y=1#part', headers=[['X-B', '3']]))")

    assert result.value == {
        "status": 203,
        "reason": "Fine",
        "version": "1.1",
        "headers": [["Content-Type", "text/plain"], ["X-A", "1"], ["X-A", "2"], ["Content-Length", "5"]],
        "body": b"hello",
        "rest": None,
    }
    assert site.requests == [f"GET /x?y=1 HTTP/1.1\r\nHost: 127.0.0.1:{site.port}\r\nX-B: 3\r\n\r\n"]
    assert [call.name for call in result.calls] == ["http"]


async def test_the_tools_of_requests_are_told_to_nobody() -> None:
    async with site_and_runtime({}) as (site, runtime):
        result = await run(runtime, site, "set_result([list_tools(), dir(tools), send(site)['status']])")

    assert result.value == [[], [], 404]


async def test_without_an_egress_there_is_no_such_tool() -> None:
    async with Runtime(ToolRegistry()) as runtime:
        result = await runtime.execute_code(SEND + "set_result(send('https://example.com/'))")

    assert result.value["failed"] == "unknown_tool"


@pytest.mark.slow
async def test_a_long_answer_is_read_in_parts() -> None:
    text = "".join(map(str, range(200_000)))
    script = """
answer = send(site)
parts = [answer["body"]]
while parts[-1]:
    parts.append(call_tool("http_read", rest=answer["rest"], size=300_000))
set_result([max(map(len, parts)), b"".join(parts).decode()])
"""
    async with site_and_runtime({"/": page(text)}) as (site, runtime):
        result = await run(runtime, site, script)

    longest, body = result.value
    assert longest <= 256 * 1024
    assert body == text
    assert [call.name for call in result.calls] == ["http"]


@pytest.mark.slow
async def test_a_body_is_uploaded_in_parts() -> None:
    script = """
name = None
for part in (b"a" * 200_000, b"b" * 5_000_000):
    for start in range(0, len(part), 200_000):
        name = call_tool("http_upload", upload=name, data=part[start:start + 200_000])
set_result(send(site, "POST", upload=name)["status"])
"""
    async with site_and_runtime({}, methods=["POST"]) as (site, runtime):

        async def take(stream: ByteStream) -> None:
            left = 5_200_000 - len(site.requests[0].partition("\r\n\r\n")[2])
            while left:
                left -= len(await stream.receive())
            await stream.send(page("taken"))

        site.pages["/"] = take
        result = await run(runtime, site, script)

    assert result.value == 200, result.error
    assert "Content-Length: 5200000" in site.requests[0]
    (call,) = result.calls
    assert call.args["upload"].endswith(", 5200000 bytes"), json.dumps(call.args, default=repr)


async def test_the_requests_and_bytes_of_a_run_are_bounded() -> None:
    async with site_and_runtime({"/": page("x" * 600)}) as (site, runtime):
        few = await run(
            runtime, site, "set_result([send(site) for _ in range(3)][-1])", limits=Limits(egress_requests=2)
        )
        small = await run(
            runtime, site, "set_result([send(site) for _ in range(2)][-1])", limits=Limits(egress_bytes=1000)
        )

    assert few.value["failed"] == small.value["failed"] == "EgressLimit"
    assert "egress_requests" in few.value["message"]
    assert "egress_bytes" in small.value["message"]


async def test_a_secret_is_sent_by_the_host_and_never_seen_by_the_script() -> None:
    async with serve({}) as site:
        site.pages["/"] = page(f"you sent {TOKEN}", "text/plain", "200 OK", f"X-Sent: Bearer {TOKEN}")
        rule = Allow("http://127.0.0.1", ports=[site.port], secrets={"Authorization": "Bearer {TOKEN}"})
        async with Runtime(egress=Egress(rule, secrets={"TOKEN": TOKEN})) as runtime:
            result = await run(runtime, site, "set_result(send(site))")

    assert f"Authorization: Bearer {TOKEN}" in site.requests[0]
    assert result.value["body"] == b"you sent {TOKEN}"
    assert ["X-Sent", "Bearer {TOKEN}"] in result.value["headers"]
    assert TOKEN not in repr(result)
