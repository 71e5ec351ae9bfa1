"""Servers that end again and again: when they are started again, when they are given up, and how they come back."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from rows import each_row
from toolcell.errors import McpServerError, UsageError
from toolcell.mcp.client import FIRST_PAUSE_S, LONGEST_PAUSE_S, McpClient, Restarts
from toolcell.tools import ToolRegistry

from .conftest import RAW, a_tool, raw, until

pytestmark = pytest.mark.anyio

WHEN_TOLD = """
import os, sys
flag, *command = sys.argv[1:]
if not os.path.exists(flag):
    sys.exit("the database is locked")
os.execv(command[0], command)
"""


async def test_pauses_double_and_are_short_again_after_an_answer() -> None:
    restarts = Restarts(1000, 1.0)
    pauses = [restarts.pause_after("x", now * 100.0) for now in range(12)]
    restarts.note_answer()

    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert max(pauses) == pauses[-1] == LONGEST_PAUSE_S
    assert restarts.pause_after("x", 9999.0) == FIRST_PAUSE_S


async def test_a_server_is_given_up_after_so_many_ends_within_the_window_only() -> None:
    fast, slow, never = Restarts(3, 10.0), Restarts(3, 10.0), Restarts(0, 10.0)
    quick = [fast.pause_after(f"end {now}", now) for now in range(4)]
    spread = [slow.pause_after("x", now * 4.0) for now in range(20)]

    assert quick[-1] == never.pause_after("x", 0.0) == math.inf and math.inf not in quick[:-1]
    assert fast.is_given_up and "4 times within 10 s; the last time: end 3" in fast.why
    assert math.inf not in spread and not slow.is_given_up
    assert [fast.may_try(now) for now in (4.0, 13.0, 14.0, 15.0, 25.0)] == [False, False, True, False, True]


@each_row("options", [{"max_restarts": -1}, {"max_restarts": 1.5}, {"restart_window_s": "x"}])
async def test_numbers_of_restarts_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        await ToolRegistry().add_mcp_server("x", command=["x"], **options)


async def given_up(registry: ToolRegistry, flag: Path, **options: Any) -> McpClient:
    """Connect with a server that only starts while `flag` is there, and end it once and for all."""
    flag.touch()
    server = [*RAW, raw(pages=[[a_tool()]], dies=True)[-1]]
    command = [sys.executable, "-I", "-S", "-c", WHEN_TOLD, str(flag), *server]
    client: McpClient = await registry.add_mcp_server("d", command=command, max_restarts=2, **options)
    flag.unlink()
    lost = await registry.dispatch("d.t", {})
    assert lost.error is not None and lost.error.code == "unavailable"
    await until(lambda: client.state == "given_up")
    return client


async def test_calls_of_a_server_that_was_given_up_fail_at_once_and_it_can_come_back(tmp_path: Path) -> None:
    registry, flag = ToolRegistry(), tmp_path / "flag"
    client = await given_up(registry, flag)
    refused = await registry.dispatch("d.t", {})
    with pytest.raises(McpServerError, match="the database is locked"):
        await client.reconnect()
    flag.touch()
    await client.reconnect()
    state, listed = client.state, registry.list()
    await registry.close()

    assert refused.error is not None
    assert (refused.error.code, refused.error.retryable) == ("unavailable", False)
    assert "given up" in refused.message and "the database is locked" in refused.message
    assert "the call was not made" in refused.message
    assert any("it is given up" in str(each) for each in client.problems)
    assert (state, listed, client.state) == ("connected", ["d.t"], "closed")
    assert registry.mcp_servers() == {}


async def test_a_call_after_the_window_has_a_given_up_server_tried_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, flag = ToolRegistry(), tmp_path / "flag"
    client = await given_up(registry, flag)
    flag.touch()
    await registry.dispatch("d.t", {})
    assert client.state == "given_up"
    monkeypatch.setattr(client._restarts, "_window_s", -1.0)  # it is over
    refused = await registry.dispatch("d.t", {})
    await until(lambda: client.state == "connected")
    await registry.close()

    assert refused.error is not None and "given up" in refused.message


async def test_a_closed_client_cannot_be_reconnected() -> None:
    registry = ToolRegistry()
    client = await registry.add_mcp_server("d", command=raw(pages=[[a_tool()]]))
    await registry.close()

    with pytest.raises(UsageError, match="not open"):
        await client.reconnect()
