"""What people write who know other libraries is answered with what to write here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from toolcell import ToolRegistry, ToolResult, UsageError
from toolcell.agents import Agent
from toolcell.agents.providers.scripted import ScriptedModel
from toolcell.tools import MODEL, Status

pytestmark = pytest.mark.anyio


def agent(**options: Any) -> Agent:
    return Agent(ScriptedModel(["done"]), **options)


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "a text as error": (lambda: ToolResult(error="no"), r"ToolResult\.fail\('no'\)"),  # type: ignore[arg-type]
    "error()": (lambda: ToolResult.error("no"), r"write ToolResult\.fail\(text\)"),  # type: ignore[operator, misc]
    "silent()": (lambda: ToolResult.silent("no"), r"write ToolResult\.silenced\(text\)"),  # type: ignore[operator]
    "sequential=": (lambda: agent(sequential=True), "parallel_tools=False"),
    "blacklist=": (lambda: agent(blacklist=["x"]), r"agent\.blacklist\("),
    "error_style=": (lambda: agent(error_style="anything"), "error_style must be one of 'plain'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_name_of_another_library_is_answered_with_ours(name: str) -> None:
    make, says = MISTAKES[name]
    with pytest.raises(UsageError, match=says):
        make()


def test_results_have_no_error_and_are_not_silent_unless_they_say_so() -> None:
    assert (ToolResult.ok("x").error, ToolResult.ok("x").silent) == (None, False)
    assert ToolResult.fail("x").error is not None and ToolResult.silenced("x").silent


@pytest.mark.parametrize(("origin", "refused"), [(None, 0), (MODEL, 36)])
async def test_the_most_calls_of_one_response_are_a_models_and_not_the_programs(origin: Any, refused: int) -> None:
    registry = ToolRegistry()

    @registry.tool
    async def double(x: int) -> int:
        """Return twice the number that is given."""
        return 2 * x

    results = await registry.execute_batch([("double", {"x": x}) for x in range(100)], origin=origin)

    assert [result.status for result in results].count(Status.BLOCKED) == refused


async def test_a_call_that_nobody_approved_says_what_decides_about_it() -> None:
    registry = ToolRegistry()

    @registry.tool(requires_approval=True)
    async def pay(euros: int) -> str:
        """Pay so many euros to whoever has asked."""
        return f"paid {euros}"

    refused = await registry.dispatch("pay", {"euros": 1})
    assert "approval_hook(...)" in refused.message and 'on_approval="suspend"' in refused.message
