"""An `Egress` holds for the requests to an MCP server: where they go, with which secrets."""

from __future__ import annotations

from typing import Any

import pytest

from builtin.webkit import Names
from rows import each_row
from toolcell import Allow, Egress, ToolRegistry, UsageError
from toolcell.errors import McpServerError

from .plain_http import Answer, PlainServer, as_json

pytestmark = pytest.mark.anyio

TOKEN = "tok-51fa0c9d7e/+Z"


def rules(url: str, **more: Any) -> Egress:
    """Rules about a server on loopback, by the name mcp.test."""
    port = int(url.rpartition(":")[2])
    given = {"methods": ["*"], "private": ["127.0.0.1"], "secrets": {"Authorization": "Bearer {TOKEN}"}, **more}
    names = Names(mcp_test=[["127.0.0.1"]], inside_test=[["10.0.0.7"]])
    rule = Allow("http://mcp.test", ports=[port], **given)
    return Egress(rule, Allow("inside.test", methods=["*"]), secrets={"TOKEN": TOKEN}, resolver=names)


async def test_a_server_gets_the_secret_of_its_rule_and_its_answers_are_without_it() -> None:
    hosts: list[tuple[str, str]] = []

    def refuse(method: str, headers: dict[str, str], message: Any) -> Answer | None:
        hosts.append((headers["host"], headers.get("authorization", "")))
        if message is None or message.get("method") != "tools/call":
            return None
        said = [{"type": "text", "text": f"you sent {headers['authorization']}"}]
        return as_json(200, {"jsonrpc": "2.0", "id": message["id"], "result": {"content": said}})

    registry = ToolRegistry()
    async with PlainServer(refuse).serve() as url:
        port = url.rpartition(":")[2]
        place = f"http://mcp.test:{port}/mcp"
        client = await registry.add_mcp_server("s", url=place, egress=rules(url), approve="none")
        result = await registry.dispatch("s.t", {})
        await client.close()

    assert result.text == "you sent Bearer {TOKEN}"
    assert set(hosts) == {(f"mcp.test:{port}", f"Bearer {TOKEN}")}


@each_row(
    ("place", "more", "said"),
    [
        ("http://other.test:PORT/mcp", {}, "no rule is about this host"),
        ("http://mcp.test:PORT/else", {"paths": ["/mcp"]}, "the path is not allowed"),
        ("http://mcp.test:PORT/mcp", {"methods": ["GET"]}, "the method POST is not allowed"),
        ("http://mcp.test:PORT/mcp", {"private": []}, "the address of mcp.test (127.0.0.1) is refused"),
        ("http://mcp.test:PORT/mcp", {"approval": "POST"}, "somebody has to approve it"),
        ("https://inside.test/mcp", {}, "the address of inside.test (10.0.0.7) is refused"),
    ],
)
async def test_what_no_rule_allows_is_not_sent_and_the_error_says_so(
    place: str, more: dict[str, Any], said: str
) -> None:
    server = PlainServer()
    async with server.serve() as url:
        with pytest.raises(McpServerError) as refused:
            await ToolRegistry().add_mcp_server(
                "s", url=place.replace("PORT", url.rpartition(":")[2]), egress=rules(url, **more)
            )

    assert said in str(refused.value)
    assert server.lines == []


async def test_rules_are_for_servers_at_a_url() -> None:
    with pytest.raises(UsageError, match="egress is for url="):
        await ToolRegistry().add_mcp_server("s", command=["server"], egress=Egress())
    with pytest.raises(UsageError, match="egress must be Egress"):
        await ToolRegistry().add_mcp_server("s", url="https://a.test", egress=Allow("a.test"))
