"""Scripts of a tenant send requests where its own table allows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from builtin.webkit import page, serve
from toolcell import UsageError
from toolcell.service import Client, ServiceConfig, TenantConfig
from toolcell.service.tenants import Tenants

from .client_serving import serving

pytestmark = [pytest.mark.isolation, pytest.mark.anyio]

SEND = """
try:
    set_result(call_tool("http", method="GET", url=URL)["body"].decode())
except ToolError as exc:
    set_result(exc.code)
"""


async def test_a_tenant_sends_requests_where_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITE_KEY", "k-0123456789")
    async with serve({"/a": page("k-0123456789")}) as site:
        here = f"http://127.0.0.1:{site.port}"
        tenant = TenantConfig(allow=(f"{here}/a",), allow_secrets=("http://127.0.0.1=X-Key: {SITE_KEY}",))
        async with serving(tmp_path, None, defaults=tenant) as (url, _), Client(url) as client:
            answers = [(await client.execute_code(SEND, inputs={"URL": here + path})).value for path in ("/a", "/b")]

    assert answers == ["{SITE_KEY}", "EgressRefused"]
    assert "X-Key: k-0123456789" in site.requests[0]


async def test_without_rules_a_tenant_sends_none(tmp_path: Path) -> None:
    async with serving(tmp_path, None) as (url, _), Client(url) as client:
        result = await client.execute_code(SEND, inputs={"URL": "https://example.com/"})

    assert result.value == "unknown_tool"


def test_a_rule_that_is_wrong_is_found_at_the_start(tmp_path: Path) -> None:
    config = ServiceConfig(state=tmp_path, tenants={"acme": TenantConfig(allow=("*",))})

    with pytest.raises(UsageError, match="tenant acme: Allow takes a host"):
        Tenants(config, None, lambda name, runtime: None).load()
