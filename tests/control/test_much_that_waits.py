"""Much that a script leaves for a person to look at is digested, signed and written in a thread; an MCP client gets a part of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from mcp.client.client import Client

from service.client_serving import serving
from toolcell import Outcome, Runtime, ToolRegistry, results
from toolcell.control import Draft, kept_drafts
from toolcell.journal import store
from toolcell.mcp import content
from toolcell.mcp.server import McpServer
from toolcell.service.viewer import waiting_page
from toolcell.sessions.journal import SessionJournal

pytestmark = [pytest.mark.anyio, pytest.mark.isolation]

MUCH, LITTLE = 600_000, 10
CALLS = "call_tools_parallel([('{}', {{'text': 'x' * {}}})] * 3)"


def writing() -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool
    async def note(text: str) -> str:
        """Write something down for later."""
        return "ok"

    @registry.tool(requires_approval=True)
    async def send(text: str) -> str:
        """Send something to somebody else."""
        return "sent"

    return registry


@pytest.fixture
def in_loop(monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[str]]:
    """Return what the event loop's thread has done of the work since it was asked last."""
    found = set[str]()

    def noted(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def work(*args: Any, **given: Any) -> Any:
            is_long = name != "note_step" or args[1].size() > MUCH
            if is_long and threading.current_thread() is threading.main_thread():
                found.add(name)
            return plain(*args, **given)

        monkeypatch.setattr(owner, name, work)

    for owner, name in (
        (kept_drafts, "keep_draft"),
        (store, "make_token"),
        (SessionJournal, "note_step"),
        (waiting_page, "_arguments_shown"),
        (results, "effects_digest"),
    ):
        noted(owner, name)

    def taken() -> set[str]:
        done = set(found)
        found.clear()
        return done

    return taken


async def test_much_is_written_and_signed_in_a_thread(tmp_path: Path, in_loop: Callable[[], set[str]]) -> None:
    async with Runtime(writing(), record=tmp_path / "runs.db") as runtime:
        draft = await runtime.execute_code(CALLS.format("note", MUCH), dry_run=True)
        assert draft.draft_id and len(draft.effects) == 3
        waits = await runtime.execute_code(CALLS.format("send", MUCH), on_approval="suspend")
        assert waits.suspension is not None and len(waits.suspension.calls) == 3
        async with runtime.session("one") as session:
            assert (await session.execute_code(f"n = 5\n{CALLS.format('note', MUCH)}")).ok
            draft = await session.execute_code(CALLS.format("note", MUCH), dry_run=True)
            assert draft.draft_id
        async with runtime.session("one", restore=True) as session:
            assert (await session.execute_code("n")).value == 5
        plan = [{"tool": "note", "args": {"text": "x" * MUCH}}] * 3
        assert len(await runtime.execute_plan(plan, dry_run=Draft())) == 3
    assert in_loop() == set()


async def test_the_page_of_what_waits_is_made_in_a_thread(tmp_path: Path, in_loop: Callable[[], set[str]]) -> None:
    async with (
        serving(tmp_path / "state", writing()) as (url, _),
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        body = {"code": CALLS.format("send", MUCH), "on_approval": "suspend"}
        assert (await client.post("/v1/execute", json=body)).json()["outcome"] == "suspended"
        assert (await client.get("/waiting")).status_code == 200
    assert in_loop() == set()


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_an_mcp_client_is_told_that_it_cannot_decide_about_so_much(mode: Any) -> None:
    async with (
        Runtime(writing()) as runtime,
        McpServer(runtime, has_one_client=True, exposes_tools=True) as server,
        Client(server.server, mode=mode) as client,
    ):
        much = await client.call_tool("execute_code", {"code": CALLS.format("send", MUCH)})
        plain = await client.call_tool("send", {"text": "x" * content.TOO_MUCH_BYTES})
        little = await client.call_tool("execute_code", {"code": CALLS.format("send", LITTLE)})
    for each in (much, plain):
        assert each.is_error and len(each.model_dump_json()) < 2_000
        assert f"more than {content.TOO_MUCH_BYTES} bytes of JSON" in each.content[0].text
    assert little.structured_content is not None and little.structured_content["outcome"] == Outcome.SUSPENDED
