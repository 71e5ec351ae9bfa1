"""What is kept of a tenant's runs on disk is bounded, in bytes and number, while the service runs; others go on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import journals
from service_host import client_of, registry
from toolcell import AuditLog, RecordConfig, Runtime
from toolcell.config import KIB
from toolcell.errors import QuotaExceeded, UsageError
from toolcell.service import ServiceConfig, TenantConfig, create_app
from toolcell.service.principal import Scope
from toolcell.service.tokens import TokenDatabase

pytestmark = [pytest.mark.isolation]

ROOM = 128 * KIB
ROOM_FOR_HALF = RecordConfig(continue_bytes=ROOM // 2)
PLAN = [{"tool": "pay", "args": {"amount": 1}}]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[tuple[TestClient, str, str, Path]]:
    with contextlib.closing(TokenDatabase(tmp_path / "tokens.db")) as store:
        hostile, polite = (store.create(name, tuple(Scope)).text for name in ("hostile", "polite"))
    config = ServiceConfig(
        state=tmp_path / "state",
        tokens=tmp_path / "tokens.db",
        tenants={"hostile": TenantConfig(record_config=RecordConfig(continue_bytes=ROOM))},
    )
    with client_of(create_app(config, registry=registry())) as client:
        yield client, hostile, polite, tmp_path / "state" / "tenants" / "hostile" / "runs.db"


def test_a_tenant_that_fills_its_room_is_told_so_and_no_other_notices(
    world: tuple[TestClient, str, str, Path],
) -> None:
    client, hostile, polite, folder = world

    def ask(token: str, method: str, path: str, **options: Any) -> Any:
        return client.request(method, path, headers={"authorization": f"Bearer {token}"}, **options)

    def suspended(token: str) -> Any:
        text = "call_tool('pay', amount=1) #" + "x" * 20_000
        return ask(token, "POST", "/v1/execute", json={"code": text})

    answers = [suspended(hostile) for _ in range(10)]
    refused = [each for each in answers if each.status_code != 200 or each.json()["outcome"] != "suspended"]
    assert 1 <= len(refused) <= 9
    assert (refused[-1].status_code, refused[-1].json()["code"]) == (429, "quota_exceeded"), refused[-1].text
    assert {each.status_code for each in refused} <= {422, 429}  # 422: there was room to begin, and none to wait
    assert "decide about what waits" in refused[-1].json()["detail"]
    assert str(folder) not in refused[-1].text
    assert journals.rows(folder, "SELECT sum(length(body)) FROM kept")[0][0] <= ROOM
    assert suspended(polite).json()["outcome"] == "suspended"

    waiting = ask(hostile, "GET", "/v1/suspended").json()["suspended"]
    assert waiting
    for each in waiting:
        deny = {"decisions": {each["calls"][0]["id"]: {"decision": "deny"}}}
        assert ask(hostile, "POST", f"/v1/suspended/{each['run_id']}/decide", json=deny).status_code == 200
    assert suspended(hostile).json()["outcome"] == "suspended"


async def fill(runtime: Runtime) -> None:
    """Have plans wait until there is no room: the last may begin, and find none to wait."""
    with pytest.raises((QuotaExceeded, UsageError), match="there may be"):
        while True:
            assert (await runtime.execute_plan(PLAN, on_approval="suspend")).suspension is not None


@pytest.mark.anyio
async def test_drafts_sessions_and_plans_have_the_same_room(tmp_path: Path) -> None:
    folder = tmp_path / "runs.db"
    async with Runtime(registry(), record=AuditLog(folder, config=ROOM_FOR_HALF)) as runtime:
        await fill(runtime)
        for _ in range(20):
            draft = await runtime.execute_code("call_tool('pay', amount=1)", dry_run=True)
            assert draft.effects  # in memory, where there is no room on disk
        kept = journals.rows(folder, "SELECT count(*), sum(length(body)) FROM kept")
        assert kept[0][1] <= ROOM // 2
        with pytest.raises(QuotaExceeded, match="there may be"):
            await runtime.execute_plan(PLAN, on_approval="suspend")
        with pytest.raises(Exception, match="there may be"):
            async with runtime.session("one") as session:
                await session.execute_code("1 #" + "x" * ROOM)
        assert journals.rows(folder, "SELECT sum(length(body)) FROM kept")[0][0] <= ROOM // 2


@pytest.mark.anyio
async def test_what_is_old_makes_room_while_the_runtime_is_open(tmp_path: Path) -> None:
    folder = tmp_path / "runs.db"
    async with Runtime(registry(), record=AuditLog(folder, config=ROOM_FOR_HALF)) as runtime:
        await fill(runtime)
        journals.make_old(folder)
        for _ in range(8):
            assert (await runtime.execute_plan(PLAN, on_approval="suspend")).suspension is not None
        assert len(runtime.suspended_runs()) <= 8
