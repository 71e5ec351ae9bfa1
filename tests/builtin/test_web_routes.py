"""The tools of the web and of tables by every route: code in a sandbox, a plan, a model's loop, the blocking runtime."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from builtin.routes import by_code, by_model, by_plan
from builtin.webkit import Names, local, page, serve
from rows import each_row
from toolcell import Allow, Egress, Runtime, SyncRuntime
from toolcell.builtin import DataTools, HashEmbeddings, Http, WebSearch
from toolcell.tools import ToolRegistry

pytestmark = pytest.mark.anyio

SECRET = "s3cret-token-0123456789"
ROWS = [{"city": "Rome", "n": "10"}, {"city": "Oslo", "n": 9}]


def answer(request: httpx.Request) -> httpx.Response:
    """Brave, a page, and a server that says what it was sent."""
    if request.url.host == "api.search.brave.com":
        hit = {"title": "Doc", "url": "https://docs.test/", "description": "Tables of the wild"}
        return httpx.Response(200, json={"web": {"results": [hit]}})
    if request.url.path == "/missing":
        return httpx.Response(404)
    return httpx.Response(200, json={"sent": request.headers.get("authorization", "nothing")})


@pytest.fixture
def registry(tmp_path: Path) -> ToolRegistry:
    (tmp_path / "rows.csv").write_text("city,n\nRome,10\nOslo,9\n")
    transport = httpx.MockTransport(answer)
    rule = Allow("docs.test", secrets={"Authorization": "Bearer {KEY}"})
    policy = local(egress=Egress(rule, secrets={"KEY": SECRET}))
    return ToolRegistry(
        [
            Http(policy, transport=transport),
            WebSearch(HashEmbeddings(), "brave-key-1", policy=local(), transport=transport),
            DataTools(tmp_path),
        ]
    )


@pytest.fixture(scope="module")
async def runtime() -> AsyncIterator[Runtime]:
    async with Runtime() as opened:
        yield opened


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("http_fetch", {"url": "https://docs.test/x"}),
    ("web_search", {"query": "tables of the wild", "limit": 2}),
    ("data_parse", {"content": "a;b\n1;2"}),
    ("data_parse", {"path": "rows.csv", "limit": 1}),
    ("data_filter", {"records": ROWS, "where": [{"column": "n", "op": ">", "value": 9}]}),
    ("data_aggregate", {"path": "rows.csv", "metrics": [{"column": "n", "op": "sum"}]}),
    ("data_transform", {"records": ROWS, "sort_by": "n", "limit": 1}),
]


@pytest.mark.isolation
@pytest.mark.conforms("S1", "S-b2", "S6", "S7", "S13", "S14", "S15", "S16")
async def test_every_tool_gives_code_a_value_by_every_route(runtime: Runtime, registry: ToolRegistry) -> None:
    for name, args in CALLS:
        direct = await registry.execute(name, args)
        assert not direct.is_error, direct.message
        assert await by_code(runtime, registry, name, args) == {"value": direct.value}
        assert await by_plan(registry, name, args) == {"value": direct.value}
        assert await by_model(registry, name, args) == direct.text
    fetched = await registry.execute("http_fetch", {"url": "https://docs.test/x"})
    assert json.loads(fetched.value["body"]) == {"sent": "Bearer {KEY}"}


@pytest.mark.isolation
@pytest.mark.conforms("S-b5")
@each_row(
    ("args", "message"),
    [
        ({"url": "file:///etc/passwd"}, "only http:// and https:// URLs"),
        ({"url": "http://169.254.169.254/"}, "no rule is about this host"),
        ({"url": "https://docs.test/missing"}, "HTTP 404 from https://docs.test/missing"),
        ({"url": "https://docs.test/\ud800"}, ""),
    ],
    ids=["file", "metadata", "404", "surrogate"],
)
async def test_what_is_refused_is_refused_by_every_route(
    runtime: Runtime, registry: ToolRegistry, args: dict[str, Any], message: str
) -> None:
    if message:
        for refused in (
            await by_code(runtime, registry, "http_fetch", args),
            await by_plan(registry, "http_fetch", args),
        ):
            assert message in refused["error"]
    assert message in await by_model(registry, "http_fetch", args)
    assert (await registry.execute("http_fetch", args)).is_error


@pytest.mark.isolation
async def test_a_credential_is_in_no_record_of_a_run(registry: ToolRegistry, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with Runtime(registry, record=log) as audited:
        result = await audited.execute_code("set_result(call_tool('http_fetch', url='https://docs.test/x'))")
    assert result.value["status"] == 200
    files = [*log.parent.glob(f"{log.name}*")]
    assert any(b"http_fetch" in path.read_bytes() for path in files)
    assert not any(SECRET.encode() in path.read_bytes() for path in files)
    assert SECRET not in repr(result)


@pytest.mark.isolation
def test_the_blocking_runtime_makes_the_same_calls(registry: ToolRegistry) -> None:
    """Two runtimes one after the other: nothing is kept that belongs to an event loop."""
    for _ in range(2):
        with SyncRuntime(registry) as runtime:
            result = runtime.execute_code(
                "rows = tools.data_parse(path='rows.csv')['records']\n"
                "set_result([tools.http_fetch(url='https://docs.test/')['status'], len(rows)])"
            )
            assert result.value == [200, 2], result.error


@pytest.mark.isolation
async def test_a_script_reads_a_page_through_real_sockets_and_evaluates_its_table() -> None:
    async with serve({"/data.csv": page("n,x\n1,5\n2,7\n", "text/csv")}) as site:
        http = Http(local(), resolver=Names(site_test=[["127.0.0.1"]]))
        async with Runtime(ToolRegistry([http, DataTools()])) as opened:
            source = f"""
table = tools.data_parse(content=tools.http_fetch(url={site.url("/data.csv")!r})["body"])
set_result(tools.data_aggregate(records=table["records"], metrics=[{{"column": "x", "op": "sum"}}])["groups"])
"""
            result = await opened.execute_code(source)
        assert result.value == [{"sum_x": 12}], result.error
