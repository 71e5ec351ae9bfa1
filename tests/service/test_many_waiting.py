"""Listing what waits, where there is very much: journals are read once, in a thread, and others are answered meanwhile."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from rows import each_row
from service.client_serving import serving
from service_host import registry
from toolcell import RunContext, Runtime
from toolcell.journal.database import JournalDatabase
from toolcell.journal.store import JournalStore
from toolcell.service import Client
from toolcell.service.tenants import TenantJournals
from toolcell.tools import Approve

pytestmark = [pytest.mark.isolation, pytest.mark.anyio]

PLAN = {"steps": [{"tool": "pay", "args": {"amount": 1}}]}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads in which journals were read, by the name of each, in order."""
    found, load = list[str](), JournalStore.read

    def loaded(self: JournalStore, ident: str) -> Any:
        found.append(threading.current_thread().name)
        return load(self, ident)

    monkeypatch.setattr(JournalStore, "read", loaded)
    return found


async def test_a_journal_is_read_once_for_all_lists(tmp_path: Path, reads: list[str]) -> None:
    async with Runtime(registry(), record=tmp_path / "journals") as runtime:
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


@each_row("route", ["list", "show", "decide", "viewer", "websocket"])
async def test_others_are_answered_while_what_waits_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    answered, is_reading, load = threading.Event(), threading.Event(), JournalStore.look

    def slow(self: JournalStore, ident: str) -> Any:
        is_reading.set()
        assert answered.wait(60), "nobody was answered while the journals were read"
        return load(self, ident)

    monkeypatch.setattr(JournalStore, "look", slow)
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


async def test_of_a_run_that_waits_a_page_holds_neither_inputs_nor_files(tmp_path: Path) -> None:
    source, context = "call_tool('pay', amount=1)", RunContext(run_id="r", user_id="ada")
    async with Runtime(registry(), record=tmp_path / "journals") as runtime:
        result = await runtime.execute_code(
            source, inputs={"a": "x"}, files={"f": b"x"}, on_approval="suspend", context=context
        )
        assert result.suspension is not None, result
        found = await TenantJournals(runtime).header_of(result.suspension.run_id)
    assert (found["source"], found["user_id"]) == (source, "ada") and not {"inputs", "files"} & found.keys()


async def test_no_journal_is_read_by_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_in, records = set[str](), JournalDatabase.records

    def read(self: JournalDatabase, kind: str, name: str, *rest: Any, **options: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            read_in.add(name)
        return records(self, kind, name, *rest, **options)

    def listed(self: JournalDatabase, kind: str) -> Any:
        if threading.current_thread() is threading.main_thread():
            read_in.add(kind)
        return each(self, kind)

    each = JournalDatabase.last_of_each
    async with Runtime(registry(), record=tmp_path / "journals") as runtime:
        monkeypatch.setattr(JournalDatabase, "records", read)
        monkeypatch.setattr(JournalDatabase, "last_of_each", listed)
        waits = await runtime.execute_code("call_tool('pay', amount=1)", on_approval="suspend")
        assert waits.suspension is not None
        decisions = {each.id: Approve() for each in waits.suspension.calls}
        assert (await runtime.resume(waits.suspension, decisions)).ok
        rows = await runtime.execute_plan(PLAN["steps"], on_approval="suspend")
        assert rows.suspension is not None
        await runtime.resume(rows.suspension, {each.id: Approve() for each in rows.suspension.calls})
        draft = await runtime.execute_code("call_tool('pay', amount=2)", dry_run=True)
        assert draft.draft_id and (await runtime.commit(draft.draft_id, approve="all")).ok
        async with runtime.session("one") as session:
            waits = await session.execute_code("call_tool('pay', amount=1)", on_approval="suspend")
            assert waits.suspension is not None
            await session.resume(waits.suspension, {each.id: Approve() for each in waits.suspension.calls})
        async with runtime.session("one", restore=True) as session:
            assert (await session.execute_code("1")).ok
        assert await runtime.sessions.keeps("one") and not await runtime.sessions.keeps("../one")
    assert read_in == set()


async def test_sessions_are_listed_in_a_thread_and_one_is_found_without_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed_in, kept = list[bool](), Runtime.kept_sessions

    def listing(self: Runtime) -> list[str]:
        listed_in.append(threading.current_thread() is threading.main_thread())
        return kept(self)

    monkeypatch.setattr(Runtime, "kept_sessions", listing)
    async with (
        serving(tmp_path / "state", registry()) as (url, _),
        httpx.AsyncClient(base_url=url, timeout=60) as client,
        Client(url) as remote,
    ):
        assert (await client.post("/v1/sessions", json={"name": "one"})).status_code == 201
        assert (await client.post("/v1/sessions/one/execute", json={"code": "1"})).status_code == 200
        assert (await client.post("/v1/sessions/none/execute", json={"code": "1"})).status_code == 404
        assert not listed_in
        assert len((await client.get("/v1/sessions")).json()["sessions"]) == 1
        assert await remote.kept_sessions() == ["one"]
    assert listed_in == [False, False]
