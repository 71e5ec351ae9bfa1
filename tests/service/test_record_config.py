"""Each tenant's table says what its record keeps, redacts and removes, and with which key it is signed."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from audit.test_audit_commands import invoke
from service_host import client_of
from toolcell import ToolRegistry
from toolcell.service import ServiceConfig, create_app
from toolcell.service.principal import Scope
from toolcell.service.tokens import TokenDatabase

pytestmark = [pytest.mark.isolation]

SETTINGS = """
tokens = "tokens.db"
state = "state"

[defaults]
record = "records"

[tenants.large.record_config]
value_bytes = 200_000
redact_patterns = ["order-[0-9]+"]
key = "large.key"

[tenants.small]
"""


def registry() -> ToolRegistry:
    found = ToolRegistry()

    @found.tool
    def big() -> str:
        """Return a text that is longer than what a record keeps without being told to."""
        return "order-4711 " + "x" * 100_000

    return found


def test_each_tenant_has_its_own_settings_of_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("service.toml").write_text(SETTINGS)
    assert invoke("keygen", "large.key", "--hmac")[0] == 0
    with contextlib.closing(TokenDatabase("tokens.db")) as store:
        tokens = {name: store.create(name, tuple(Scope)).text for name in ("large", "small")}
    records: dict[str, Any] = {}
    replays: dict[str, bool] = {}
    with client_of(create_app(ServiceConfig.from_toml("service.toml"), registry=registry())) as client:
        for name, token in tokens.items():
            headers = {"authorization": f"Bearer {token}"}
            done = client.post("/v1/execute", json={"code": "len(call_tool('big'))"}, headers=headers).json()
            records[name] = client.get(f"/v1/runs/{done['run_id']}", headers=headers).json()
            again = client.post(f"/v1/runs/{done['run_id']}/replay", json={}, headers=headers).json()
            replays[name] = again["ok"]

    assert replays == {"large": True, "small": False}
    assert records["small"]["calls"][0]["value_cut"]["bytes"] > 100_000
    kept = records["large"]["calls"][0]["value"]
    assert len(kept) > 100_000 and "order-4711" not in kept
    assert invoke("verify", "records/large.db", "--key", "large.key")[0] == 0
    assert invoke("verify", "records/small.db", "--key", "state/tenants/small/audit.key")[0] == 0
