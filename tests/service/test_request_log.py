"""The request log of the service: one line of JSON for each request and each refused credential, and no secrets."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import pytest
from typer.testing import CliRunner

from service.client_serving import serving
from service_host import Served, until
from toolcell.cli import build
from toolcell.errors import UsageError
from toolcell.service import Client, TenantConfig, tenants
from toolcell.service.principal import Scope
from toolcell.service.tokens import TokenDatabase

pytestmark = pytest.mark.isolation

FORGED = f"tcs_0123456789abcdef_{'a' * 43}"
SECRETS = ("hidden-in-query", "hidden-in-body", "hidden-in-path", "hidden-in-header", "a" * 43)


def lines_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    records = [each for each in caplog.records if each.name == "toolcell.service.request_log"]
    return [{"level": each.levelname, **json.loads(each.getMessage())} for each in records]


@pytest.mark.anyio
async def test_each_request_has_one_line_with_its_ids_and_without_its_secrets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "toolcell.service.request_log")
    store = TokenDatabase(tmp_path / "tokens.db")
    issued, old = (store.create("acme", [Scope.EXECUTE, Scope.READ], name="bot") for _ in range(2))
    store.revoke(old.record.id)
    store.close()
    own, forged, revoked = (f"Bearer {each}" for each in (issued.text, FORGED, old.text))
    body = {"code": "print('hidden-in-body')"}
    asked: list[tuple[str, str, str, Any]] = [
        ("POST", "/v1/execute", own, body),
        ("POST", "/v1/execute?token=hidden-in-query", own, body),
        ("GET", "/v1/runs/hidden.id", own, None),
        ("POST", "/v1/runs/r1/revert", own, {}),
        ("GET", "/v1/tools", forged, None),
        ("GET", "/v1/tools", revoked, None),
        ("GET", "/v1/tools", "", None),
        ("GET", "/hidden-in-path?key=hidden-in-query", own, None),
        ("DELETE", "/v1/tools", own, None),
        ("GET", "/login?next=hidden-in-query", "", None),
        ("GET", "/healthz", "", None),
    ]
    who = {"tenant": "acme", "subject": "bot"}
    wanted: list[dict[str, Any]] = [
        {"level": "INFO", "method": "POST", "route": "/v1/execute", "status": 200, **who},
        {"route": "/v1/execute", "status": 422, "code": "invalid_request", **who},
        {"route": "/v1/runs/{run_id}", "status": 404, "run_id": "hidden.id", **who},
        {"route": "/v1/runs/{journal_id}/revert", "status": 403, "code": "forbidden", **who},
        {"level": "WARNING", "status": 401, "refused": "this is not a token of the service"},
        {"level": "WARNING", "status": 401, "refused": f"the token {old.record.id} is revoked"},
        {"level": "WARNING", "status": 401, "code": "unauthorized"},
        {"route": None, "status": 404, "code": "not_found"},
        {"method": "DELETE", "route": "/v1/tools", "status": 405, "code": "method_not_allowed"},
        {"method": "GET", "route": "/login", "status": 200},
    ]

    async with serving(tmp_path / "state", tokens=tmp_path / "tokens.db") as (url, _):
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            for method, path, credential, content in asked:
                headers = {"Authorization": credential, "X-Own": "hidden-in-header"}
                answer = await http.request(method, path, headers=headers, json=content)
                if answer.status_code == 200 and path == "/v1/execute":
                    wanted[0]["run_id"] = answer.json()["run_id"]
        seen = lines_of(caplog)
        async with Client(url, token=issued.text) as client:
            result = await client.execute_code("print('hidden-in-body')")
            with pytest.raises(UsageError):
                await client.resume("hidden-in-body", {})
        with pytest.raises(UsageError):
            async with Client(url, token=FORGED):
                pass

    assert len(seen) == len(wanted), seen
    for line, expected in zip(seen, wanted, strict=True):
        assert line.items() >= expected.items(), (line, expected)
        assert line["at"].endswith("+00:00") and line["duration_s"] >= 0 and line["client"] == "127.0.0.1"
    assert len({each["id"] for each in seen}) == len(seen)
    of_socket = {each["route"]: each for each in lines_of(caplog)[len(seen) :]}
    expected = {"method": "SOCKET", "status": 200, "run_id": result.run_id, **who}
    assert of_socket["execute_code"].items() >= expected.items()
    assert (of_socket["resume"]["status"], of_socket["resume"]["code"]) == (None, "forbidden")
    assert of_socket["/v1/connect"]["refused"] == "this is not a token of the service"  # of the second connection
    for secret in (*SECRETS, issued.text, old.text):
        assert secret not in caplog.text


def test_the_command_writes_the_lines_and_warns_of_tenants_without_settings(
    tmp_path: Path, serve: Callable[..., Served]
) -> None:
    settings = tmp_path / "service.toml"
    settings.write_text("[tenants.acme]\nconcurrent_runs = 2\n")
    tokens = ["--tokens", str(tmp_path / "tokens.db")]

    made = [
        CliRunner().invoke(build(["tokens"]), ["tokens", "create", tenant, *tokens, "--config", str(settings)])
        for tenant in ("acme", "acne")
    ]
    served = serve("--config", str(settings), *tokens)
    answers = [
        served.client.get("/v1/tools", headers={"Authorization": f"Bearer {token}"}).status_code
        for token in (made[0].stdout.strip(), FORGED)
    ]
    assert served.end() == 0
    until(lambda: len(served.said) >= 5)

    said = [each for each in served.said if not each.startswith("{")]
    lines = [json.loads(each) for each in served.said if each.startswith("{")]
    assert "acne" in made[1].stderr and "acme" in made[1].stderr and "warning" not in made[0].stderr
    assert "acne" in said[0] and said[1].startswith("serving") and said[2].startswith("draining"), said
    assert [each["status"] for each in lines] == answers == [200, 401]


@pytest.mark.anyio
async def test_who_asks_for_readiness_has_the_first_sandbox_of_each_tenant_started(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lame = TenantConfig(mcp={"gone": {"command": ["no-such-program"]}})
    tenants = {"acme": TenantConfig(), "bolt": lame, "crow": TenantConfig(python="no-such-python")}
    store = TokenDatabase(tmp_path / "tokens.db")
    store.create("acme", [Scope.READ])
    store.close()
    async with serving(tmp_path / "state", tokens=tmp_path / "tokens.db", tenants=tenants) as (url, service):
        before = [each.name for each in service.tenants]
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            with anyio.fail_after(60):
                while (await http.get("/readyz")).status_code != 200:  # it waits, but not for ever
                    pass
        opened = [each.name for each in service.tenants]

    assert (before, opened) == ([], ["acme", "bolt"])
    assert caplog.text.count("tenant bolt goes on without one of its servers: MCP server gone: ") == 1
    assert caplog.text.count("tenant crow cannot run scripts") == 1


@pytest.mark.anyio
async def test_a_server_of_a_tenant_that_could_not_be_had_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenants, "CONNECT_AGAIN_S", 0.0)
    offered = {"name": "find", "description": "Find something", "inputSchema": {"type": "object"}}
    program = tmp_path / "server.py"
    command = [sys.executable, str(program), json.dumps({"pages": [[offered]]})]
    defaults = TenantConfig(mcp={"late": {"command": command}})
    async with serving(tmp_path / "state", defaults=defaults) as (_, service):
        tenant = await service.tenants.get("default")
        before = await tenant.runtime.execute_code("tools.late.find()")
        program.write_text((Path(__file__).parent.parent / "mcp_client" / "raw_server.py").read_text())
        with anyio.fail_after(60):
            while tenant.missing_servers:
                assert await service.tenants.get("default") is tenant
                await anyio.lowlevel.checkpoint()
        after = await tenant.runtime.execute_code("tools.late.find()")

    assert (before.ok, after.value) == (False, "done")


@pytest.mark.slow
def test_a_service_whose_log_nobody_reads_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "toolcell", "serve", "--port", "0", "--state", str(tmp_path / "state")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = process.stderr.readline().split()[1]
        with httpx.Client(base_url=url, timeout=60) as client:
            assert {client.get("/no/such/route").status_code for _ in range(600)} == {404}
        process.terminate()
        assert process.wait(60) == 0
