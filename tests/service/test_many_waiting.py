"""Listing what waits, where there is very much: journals are read once, in a thread, and others are answered meanwhile."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.client_serving import serving
from service_host import registry
from toolcell import Runtime
from toolcell.journal.store import JournalStore
from toolcell.service import Client

pytestmark = [pytest.mark.isolation, pytest.mark.anyio]

PLAN = {"steps": [{"tool": "pay", "args": {"amount": 1}}]}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads in which journals were read, by the name of each, in order."""
    found, load = list[str](), JournalStore._loaded

    def loaded(self: JournalStore, ident: str) -> Any:
        found.append(threading.current_thread().name)
        return load(self, ident)

    monkeypatch.setattr(JournalStore, "_loaded", loaded)
    return found


async def test_a_journal_is_read_once_for_all_lists(tmp_path: Path, reads: list[str]) -> None:
    async with Runtime(registry(), journal=tmp_path / "journals") as runtime:
        for _ in range(5):
            assert (await runtime.execute_plan(PLAN["steps"], on_approval="suspend")).suspension is not None
        assert [len(runtime.suspended_runs()) for _ in range(3)] == [5, 5, 5]
        assert len(reads) == 5
        first = runtime.suspended_runs()[0]
        await runtime.resume(first, {})  # it waits again, with another token
        reads.clear()
        found = {each.run_id: each for each in runtime.suspended_runs()}
        assert len(found) == 5
        assert found[first.run_id].to_json() != first.to_json()
        assert len(reads) == 1


@pytest.mark.parametrize("route", ["list", "show", "decide", "viewer", "websocket"])
async def test_others_are_answered_while_what_waits_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    answered, is_reading, load = threading.Event(), threading.Event(), JournalStore._look

    def slow(self: JournalStore, ident: str) -> Any:
        is_reading.set()
        assert answered.wait(60), "nobody was answered while the journals were read"
        return load(self, ident)

    monkeypatch.setattr(JournalStore, "_look", slow)
    async with (
        serving(tmp_path / "state", registry()) as (url, _),
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        waits = (await client.post("/v1/plan", json=PLAN)).json()["suspension"]
        body = {"decisions": {waits["calls"][0]["id"]: {"decision": "approve"}}}

        async def over_websocket() -> Any:
            async with Client(url) as remote:
                return await remote.suspended_runs()

        asks = {
            "list": lambda: client.get("/v1/suspended"),
            "show": lambda: client.get(f"/v1/suspended/{waits['run_id']}"),
            "decide": lambda: client.post(f"/v1/suspended/{waits['run_id']}/decide", json=body),
            "viewer": lambda: client.get("/waiting"),
            "websocket": over_websocket,
        }
        asking = asyncio.create_task(asks[route]())  # type: ignore[arg-type]
        while not is_reading.is_set():
            await asyncio.sleep(0.01)
        assert (await client.get("/readyz")).status_code == 200
        answered.set()
        done = await asking
    assert len(done) == 1 if route == "websocket" else done.status_code == 200
