"""Everything that outlives a process, on a record in an SQLite file and in a PostgreSQL database."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import anyio
import pytest

from record_places import drop, record_url, rows
from service_host import client_of, registry
from toolcell import Outcome, PoolConfig, RunContext, Runtime, ToolRegistry
from toolcell.audit import (
    AuditLog,
    Filter,
    Index,
    RecordConfig,
    Report,
    Trust,
    keys,
    load_verifier,
    receipt,
    removals,
    verify,
)
from toolcell.audit.chain_check import BAD_SIGNATURE, BROKEN_LINK, CUT_OFF, EDITED, MISSING, NOT_AN_EVENT
from toolcell.audit.text_search import Search
from toolcell.audit.verification import BAD_BLOB, CHAIN_MISSING, VIEW_DIFFERS
from toolcell.control.replays import replay
from toolcell.errors import ResumeError, UsageError
from toolcell.service import ServiceConfig, TenantConfig
from toolcell.service.app import create_app
from toolcell.tools import Approve, Edit

pytestmark = [pytest.mark.isolation, pytest.mark.anyio, pytest.mark.timeout(300)]

Place = Path | str
LOOKS: ContextVar[bool] = ContextVar("looks", default=False)
"""The test itself looks at a record."""


@contextmanager
def looking() -> Iterator[None]:
    token = LOOKS.set(True)
    try:
        yield
    finally:
        LOOKS.reset(token)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """An empty record. In PostgreSQL, no statement may be executed in the thread of an event loop."""
    if request.param == "sqlite":
        yield tmp_path / "runs.db"
        return
    import psycopg

    execute = psycopg.Connection.execute

    def elsewhere(self: Any, *args: Any, **options: Any) -> Any:
        with suppress(RuntimeError):
            asyncio.get_running_loop()
            assert LOOKS.get(), f"the event loop waits for the server: {args[0]}"
        return execute(self, *args, **options)

    url = record_url(request.getfixturevalue("postgres_server"))
    with monkeypatch.context() as patch:
        patch.setattr(psycopg.Connection, "execute", elsewhere)
        yield url
    drop(url)


class Bank:
    """Tools that note what they did."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.tools = ToolRegistry()

        @self.tools.tool(requires_approval=True, revert=lambda args, result: self.made.append("reverted"))
        def pay(euros: int) -> str:
            """Send money to somebody."""
            self.made.append(euros)
            return f"paid {euros}"

        @self.tools.tool
        def note(text: str) -> str:
            """Write a text into a list."""
            self.made.append(text)
            return text.upper()

    def at(self, place: Place | AuditLog, **options: Any) -> Runtime:
        return Runtime(self.tools, record=place, pool=PoolConfig(warm=1), **options)


@pytest.fixture
def bank() -> Bank:
    return Bank()


def checked(place: Place, **options: Any) -> Report:
    with looking():
        return verify(place, [load_verifier(keys.default_key_path())], **options)


@contextmanager
def index_of(place: Place) -> Iterator[Index]:
    with looking(), Index(place, [load_verifier(keys.default_key_path())]) as index:
        yield index


async def test_a_suspended_run_goes_on_in_another_runtime_once_as_it_was_edited(place: Place, bank: Bank) -> None:
    async with bank.at(place) as runtime:
        ann = RunContext(user_id="ann", run_id="month-end")
        script = "call_tool('note', text='begun'); call_tool('pay', euros=5)"
        result = await runtime.execute_code(script, on_approval="suspend", context=ann)
        assert result.suspension is not None
        token, (call,) = result.suspension.to_json(), result.suspension.calls
    async with bank.at(place) as runtime, bank.at(place) as other:
        (waits,) = await asyncio.to_thread(runtime.suspended_runs)
        assert (waits.run_id, waits.calls[0].args) == ("month-end", {"euros": 5})
        result = await runtime.resume(token, {call.id: Edit({"euros": 1})}, context=RunContext(user_id="bob"))
        with pytest.raises(ResumeError):
            await other.resume(token, {call.id: Approve()})
        assert not await asyncio.to_thread(other.suspended_runs)
    assert (result.value, bank.made) == ("paid 1", ["begun", 1])
    with index_of(place) as index:
        first, second = index.runs()
        assert [each.trust for each in (first, second)] == [Trust.VERIFIED, Trust.VERIFIED]
        assert (second.relation, second.parent, second.decided_by) == ("resumes", "month-end", "bob")
        assert [each.id for each in index.runs(Filter(decided_by="bob", tool="p?y", text="ANN"))] == [second.id]
        called = index.load(second).calls[-1]
        assert (called.args, called.facts["made"], called.value) == ({"euros": 5}, {"euros": 1}, "paid 1")
    assert checked(place, strict=True).ok


async def test_the_runs_that_go_on_from_each_other_are_found_from_each_of_them(place: Place, bank: Bank) -> None:
    async with bank.at(place) as runtime:
        runs, before = list[str](), None
        for script in ("1 / 0", "2 / 0", "3"):
            before = await runtime.execute_code(script, repairs=before)
            runs.append(before.run_id)
        alone = (await runtime.execute_code("4")).run_id
    with index_of(place) as index:
        found = {each.id: [one.id for one in index.family(each)] for each in index.runs()}
    assert found == dict.fromkeys(runs, runs) | {alone: []}


KILLED = """
import os, sys
import anyio
from toolcell import RunContext, Runtime, ToolRegistry

tools = ToolRegistry()

@tools.tool
def note(text: str) -> str:
    '''Write a text into a list.'''
    if text == 'end':
        os._exit(9)
    return text.upper()

@tools.tool(requires_approval=True, revert=lambda args, result: None)
def pay(euros: int) -> str:
    '''Send money to somebody.'''
    return ''

async def main():
    async with Runtime(tools, record=sys.argv[1]) as runtime:
        script = "call_tool('note', text='begun') + call_tool('note', text='end')"
        await runtime.execute_code(script, on_approval="suspend", context=RunContext(run_id='killed'))

anyio.run(main)
"""


async def test_a_run_whose_host_was_killed_in_a_call_is_carried_on_and_the_call_is_in_doubt(
    place: Place, bank: Bank
) -> None:
    done = await anyio.run_process([sys.executable, "-c", KILLED, str(place)], check=False)
    assert done.returncode == 9, done.stderr
    async with bank.at(place) as runtime:
        assert await asyncio.to_thread(runtime.interrupted_runs) == ["killed"]
        states = [each["state"] for each in await asyncio.to_thread(runtime.calls_of_interrupted, "killed") or ()]
        assert states == ["answered", "in doubt"]
        result = await runtime.resume("killed", {})
        assert result.suspension is not None
        assert ["in doubt" in call.reason for call in result.suspension.calls] == [True]
        result = await runtime.resume(result.suspension, {result.suspension.calls[0].id: Approve()})
    assert (result.value, bank.made) == ("BEGUNEND", ["end"])
    assert checked(place).ok


async def test_a_repair_makes_no_call_twice_and_a_replay_makes_none(place: Place, bank: Bank) -> None:
    async with bank.at(place) as runtime:
        failed = await runtime.execute_code("call_tool('note', text='a')\n1 / 0")
        mended = await runtime.execute_code("call_tool('note', text='a') + call_tool('note', text='b')", repairs=failed)
    assert (mended.value, bank.made) == ("AB", ["a", "b"])
    with index_of(place) as index:
        run = index.load(index.find("last"))
        assert run.calls[0].facts["answered_from"] == index.runs()[0].id
    async with Runtime(ToolRegistry(), pool=PoolConfig(warm=1)) as runtime:
        assert (await replay(runtime, run)).ok


async def test_a_session_is_restored_from_its_state_by_value_and_forgotten(place: Place, bank: Bank) -> None:
    async with bank.at(place) as runtime, runtime.session("customer") as session:
        await session.execute_code("x = 40; log = call_tool('note', text='a')")
        fork = await session.fork()
        await fork.close()
    async with bank.at(place) as runtime:
        assert await asyncio.to_thread(runtime.kept_sessions) == ["customer"]
        async with runtime.session("customer", restore=True) as session:
            assert (await session.execute_code("[x + 2, log]")).value == [42, "A"]
            waits = await session.execute_code("call_tool('pay', euros=x)", on_approval="suspend")
            assert waits.suspension is not None
        async with runtime.session("customer", restore=True) as session:
            await session.abandon()
            await session.reset()
            assert (await session.execute_code("'x' in globals()")).value is False
        await asyncio.to_thread(runtime.forget_session, "customer")
        assert not await asyncio.to_thread(runtime.kept_sessions)
    assert bank.made == ["a"]
    assert not await asyncio.to_thread(rows, place, "SELECT * FROM kept")


async def test_a_draft_is_committed_in_another_runtime_once(place: Place, bank: Bank) -> None:
    async with bank.at(place) as runtime:
        draft = await runtime.execute_code("call_tool('pay', euros=7); call_tool('note', text='b')", dry_run=True)
        assert [effect.args for effect in draft.effects] == [{"euros": 7}, {"text": "b"}]
    async with bank.at(place) as runtime:
        result = await runtime.commit(draft.draft_id, approve=["effect-1"])
        with pytest.raises(UsageError):
            await runtime.commit(draft.draft_id, approve="all")
        await runtime.revert(result)
    assert bank.made == [7, "reverted"]
    assert checked(place).ok


async def test_a_map_is_carried_on_where_it_stopped(place: Place, bank: Bank) -> None:
    script, inputs = "call_tool('note', text=t)", [{"t": each} for each in "abcd"]
    async with bank.at(place) as runtime:
        async for item in runtime.map(script, inputs, map_id="letters", concurrency=1):
            if item.index == 1:
                break
    before = len(bank.made)
    async with bank.at(place) as runtime:
        items = [item async for item in runtime.map(script, inputs, map_id="letters", resume=True)]
    assert [item.value for item in items] == ["A", "B", "C", "D"]
    assert [item.is_recorded for item in items][:2] == [True, True]
    assert sorted(bank.made) == ["a", "b", "c", "d"], before


def test_what_waits_in_a_service_is_listed_and_decided_after_a_restart(place: Place, tmp_path: Path) -> None:
    config = ServiceConfig(state=tmp_path / "state", defaults=TenantConfig(record=place, pool=PoolConfig(warm=1)))
    url = f"{place.rpartition('&')[0]}&schema=tenant_default" if isinstance(place, str) else ""
    try:
        with client_of(create_app(config, registry=registry())) as client:
            body = {"code": "call_tool('pay', amount=3)", "on_approval": "suspend"}
            assert client.post("/v1/execute", json=body).json()["outcome"] == "suspended"
        with client_of(create_app(config, registry=registry())) as client:
            (waits,) = client.get("/v1/suspended").json()["suspended"]
            call = waits["calls"][0]["id"]
            told = client.post(
                f"/v1/suspended/{waits['run_id']}/decide", json={"decisions": {call: {"decision": "approve"}}}
            )
            assert told.json()["value"] == "paid 3", told.text
            assert not client.get("/v1/suspended").json()["suspended"]
            assert client.get(f"/v1/runs/{waits['run_id']}").json()["outcome"] == "suspended"
    finally:
        if url:
            drop(url)


WRITER = """
import sys
import anyio
from toolcell import RunContext, ToolRegistry
from toolcell.audit import AuditLog, Recorder

tools = ToolRegistry()

@tools.tool
def note(text: str) -> str:
    '''Write a text into a list.'''
    return text

async def one(recorder, name):
    async with recorder.observe(RunContext(run_id=name)) as context:
        await tools.dispatch('note', {'text': name}, context=context)

async def main():
    with AuditLog(sys.argv[1]) as log:
        for n in range(4):
            async with anyio.create_task_group() as group:
                for part in range(8):
                    group.start_soon(one, Recorder(log), f'{sys.argv[2]}-{n}-{part}')

anyio.run(main)
"""


def test_three_processes_write_at_once_and_every_chain_verifies(place: Place) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(place), str(n)]) for n in range(3)]
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]
    report = checked(place, strict=True)
    assert report.ok, report.findings
    assert (len(report.chains), sum(chain.runs for chain in report.chains)) == (3, 96)
    assert rows(place, "SELECT tool, count(*) FROM call GROUP BY 1") == [("note", 96)]


@pytest.fixture
def filled(place: Place, bank: Bank) -> Place:
    """Three runs in two chains."""

    async def fill(count: int) -> None:
        async with bank.at(place) as runtime:
            for n in range(count):
                await runtime.execute_code(f"call_tool('note', text='x{n}')", context=RunContext(user_id="a\0\ud800"))

    asyncio.run(fill(2))
    asyncio.run(fill(1))
    return place


ATTACKS: dict[str, tuple[str, set[str]]] = {
    "a time is changed": ("UPDATE event SET at = at + 1 WHERE n = 4", {EDITED}),
    "a run is changed": ("UPDATE event SET run = 0 WHERE n = 4", {NOT_AN_EVENT}),
    "a hash is changed": ("UPDATE event SET hash = prev WHERE n = 4", {EDITED, BROKEN_LINK}),
    "an event is removed": ("DELETE FROM event WHERE n = 4", {MISSING}),
    "events change places": ("UPDATE event SET n = 9 - n + 500 WHERE n IN (4, 5)", {MISSING, CUT_OFF}),
    "the end is cut off": ("DELETE FROM event WHERE n > 3", {CUT_OFF}),
    "a signature is changed": ("UPDATE checkpoint SET at = at + 1", {BAD_SIGNATURE}),
    "checkpoints are removed": ("DELETE FROM checkpoint", {MISSING}),
    "all is removed": ("DELETE FROM event; DELETE FROM checkpoint; DELETE FROM run", {CHAIN_MISSING}),
    "a blob is changed": ("UPDATE blob SET bytes = substr(bytes, 2)", {BAD_BLOB}),
    "a run is hidden": ("DELETE FROM run WHERE n = 2", {VIEW_DIFFERS}),
    "another outcome is shown": ("UPDATE run SET outcome = 'error'", {VIEW_DIFFERS}),
    "a call is counted": ("INSERT INTO call (writer, run, number) VALUES ('x', 1, 1)", {VIEW_DIFFERS}),
}


def test_rows_that_are_edited_by_sql_are_found(filled: Place) -> None:
    assert checked(filled, strict=True).ok
    with index_of(filled) as index:
        assert {run.trust for run in index.runs(Filter(user="a\\x00\\ud800"))} == {Trust.VERIFIED}
    for name, (attack, expected) in ATTACKS.items():
        restore = _saved(filled)
        for statement in attack.split(";"):
            rows(filled, statement)
        assert expected & {finding.kind for finding in checked(filled).findings}, name
        with index_of(filled) as index:
            assert not expected & {EDITED, BROKEN_LINK} or Trust.BROKEN in {run.trust for run in index.runs()}, name
        restore()
        assert checked(filled).ok, name


def _saved(place: Place) -> Callable[[], object]:
    """Return what puts every row back."""
    if isinstance(place, Path):
        whole = place.read_bytes()
        return lambda: place.write_bytes(whole)
    tables = ("event", "checkpoint", "run", "call", "blob")
    for table in tables:
        rows(place, f"DROP TABLE IF EXISTS x_{table}")
        rows(place, f"CREATE TABLE x_{table} AS SELECT * FROM {table}")

    def restore() -> None:
        for table in tables:
            rows(place, f"DELETE FROM {table}")
            rows(place, f"INSERT INTO {table} SELECT * FROM x_{table}")

    return restore


def test_a_record_is_searched_counted_exported_pruned_and_copied(filled: Place, tmp_path: Path) -> None:
    with index_of(filled) as index:
        found = [*Search().search(index, Filter(limit=None), re.compile("X1"))]
        assert [(match.where, match.run.trust) for match in found] == [
            ("value", Trust.VERIFIED),
            ("value", Trust.VERIFIED),
        ]
        patterns = ("note", "n?te", "*t*", "NOTE", "no", "n%", "n_te", "[n]ote", "no\\te", "*'")
        assert [each for each in patterns if index.runs(Filter(tool=each))] == ["note", "n?te", "*t*"]
        counted = index.stats()
        assert (counted["runs"], counted["tools"][0]["calls"]) == (3, 3)
        assert sum(counted["days"].values()) == 3
        made = receipt.export(index, index.find("last"))
        copies = tmp_path / "copies"
        copies.mkdir(mode=0o700)
        index.copy_to(copies / "copy.db")
    assert receipt.check(made, [load_verifier(keys.default_key_path())]).ok
    assert checked(copies / "copy.db", strict=True).ok
    with index_of(copies / "copy.db") as copy, index_of(filled) as index:
        assert copy.runs() == index.runs()

    config = RecordConfig(keep_s=1e-9)
    plan = removals(filled, config, [load_verifier(keys.default_key_path())])
    assert [each.reason for each in plan] == ["age", "age"]
    with AuditLog(filled, config=config) as log:
        assert sum(each.count for each in log.prune()) >= sum(each.count for each in plan)
    report = checked(filled)
    assert report.ok, report.findings
    assert not rows(filled, "SELECT * FROM run")
    with AuditLog(filled, config=RecordConfig(keep_bytes=0)) as log:
        log.prune()
    assert checked(filled).ok


async def test_what_needs_more_room_than_there_is_does_not_begin(place: Place, bank: Bank) -> None:
    log = AuditLog(place, config=RecordConfig(continue_bytes=20_000))
    async with bank.at(log) as runtime:
        script = "call_tool('pay', euros=1)  # " + "x" * 12_000
        first = await runtime.execute_code(script, on_approval="suspend")
        assert first.outcome is Outcome.SUSPENDED
        with pytest.raises(Exception, match="continue_bytes"):
            await runtime.execute_code(script, on_approval="suspend")
    assert not bank.made
