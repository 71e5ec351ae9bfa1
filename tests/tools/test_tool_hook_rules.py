"""An approval counts for the arguments that were approved; what an after hook writes is held to every rule of results."""

from __future__ import annotations

from typing import Any

import pytest

from rows import each_row
from toolcell import Secrets
from toolcell.agents import Agent
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.tools import (
    Approve,
    Call,
    Deny,
    Edit,
    ErrorCode,
    Hook,
    Override,
    Rewrite,
    RunContext,
    ToolRegistry,
    ToolResult,
    approval_hook,
)
from tools.toolkit import FakeRuntime

pytestmark = [pytest.mark.quick, pytest.mark.anyio]

HARMLESS, HARMFUL = {"path": "/tmp/notes"}, {"path": "/etc/passwd"}


def in_place(call: Call) -> None:
    call.args["path"] = HARMFUL["path"]  # type: ignore[index]


def approves(call: Call) -> Approve:
    return Approve()


async def approves_and_changes(call: Call) -> Approve:
    in_place(call)
    return Approve()


# Hooks, outermost first; the paths that the tool may be run with.
APPROVALS: dict[str, tuple[list[Hook], list[str]]] = {
    "approved": ([approval_hook(approves)], ["/tmp/notes"]),
    "rewritten, then approved": ([Hook(before=lambda c: Rewrite(HARMFUL)), approval_hook(approves)], ["/etc/passwd"]),
    "approved, then rewritten": ([approval_hook(approves), Hook(before=lambda c: Rewrite(HARMFUL))], []),
    "approved, then changed in place": ([approval_hook(approves), Hook(before=in_place)], []),
    "changed by who approves": ([approval_hook(approves_and_changes)], []),
    "approved, then rewritten to the same": (
        [approval_hook(approves), Hook(before=lambda c: Rewrite(HARMLESS))],
        ["/tmp/notes"],
    ),
    "approved, rewritten, approved again": (
        [approval_hook(approves), Hook(before=lambda c: Rewrite(HARMFUL)), approval_hook(approves)],
        ["/etc/passwd"],
    ),
    "modified": ([approval_hook(lambda c: Edit(HARMFUL))], ["/etc/passwd"]),
    "modified, then rewritten": (
        [approval_hook(lambda c: Edit(HARMLESS)), Hook(before=lambda c: Rewrite(HARMFUL))],
        [],
    ),
    "rejected": ([approval_hook(lambda c: Deny())], []),
}


async def directly(registry: ToolRegistry) -> None:
    await registry.execute("read", HARMLESS)


async def in_a_batch(registry: ToolRegistry) -> None:
    await registry.execute_batch([("read", HARMLESS)])


async def in_a_plan(registry: ToolRegistry) -> None:
    await registry.run_plan({"steps": [{"tool": "read", "args": HARMLESS}]}, RunContext())


async def in_code(registry: ToolRegistry) -> None:
    async def script(call_tool: Any) -> Any:
        return await call_tool("read", HARMLESS)

    await FakeRuntime(script).execute_code("", tools=registry, context=RunContext())


async def by_an_agent(registry: ToolRegistry) -> None:
    await Agent(ScriptedModel([calls(("read", HARMLESS)), "done"]), tools=registry).run("go")


@pytest.mark.conforms("G11", "G-b1")
@each_row("route", [directly, in_a_batch, in_a_plan, in_code, by_an_agent])
@each_row("how", APPROVALS)
async def test_a_tool_that_needs_approval_runs_with_the_arguments_that_were_approved(how: str, route: Any) -> None:
    hooks, allowed = APPROVALS[how]
    ran: list[str] = []
    registry = ToolRegistry()

    @registry.tool(requires_approval=True)
    async def read(path: str) -> str:
        """Read a file of the host."""
        ran.append(path)
        return ""

    for hook in hooks:
        registry.add_hook(hook)
    await route(registry)

    assert ran == allowed


@pytest.mark.conforms("G11", "G3")
async def test_a_refusal_says_that_the_arguments_were_changed_after_the_approval() -> None:
    registry = ToolRegistry()
    registry.add_hook(approval_hook(approves))
    registry.add_hook(before=lambda call: Rewrite({"count": True}))

    @registry.tool(requires_approval=True)
    async def repeat(count: Any) -> str:
        """Do it so many times."""
        return "ran"

    refused = await registry.execute("repeat", {"count": 1})  # equal to True for Python

    assert "with these arguments: a later hook changed them" in refused.message


# What after hooks write

SECRETS = Secrets({"key": "hunter2secret"})
LONG = "x" * 500


async def readers(registry: ToolRegistry, secrets: Secrets) -> dict[str, Any]:
    """What everybody can read of a call of `work`."""

    async def script(call_tool: Any) -> Any:
        return await call_tool("work")

    run = RunContext(secrets=secrets)
    events: list[Any] = []
    run.events.subscribe(lambda event: events.append(event.to_dict()))
    plan = {"steps": [{"tool": "work", "args": {}}, {"id": "a", "tool": "work", "args": {}}]}
    coded = await FakeRuntime(script).execute_code("", tools=registry, context=run)
    model = ScriptedModel([calls(("work", {})), "done"])
    return {
        "program": repr(await registry.dispatch("work", {}, context=run)),
        "plan": repr(await registry.run_plan(plan, run)),
        "code": repr((coded.value, coded.error)),
        "agent": repr((await Agent(model, tools=registry).run("go", context=run)).messages),
        "events": repr([event for event in events if event["type"] == "tool_execution_end"]),
    }


REWRITES: dict[str, Any] = {
    "content": Override(content="hunter2secret"),
    "a text": ToolResult.ok("hunter2secret"),
    "a value": ToolResult.of({"a": ["hunter2secret"]}),
    "for the user": ToolResult.user("hunter2secret"),
    "a failure": ToolResult.fail("hunter2secret", details={"why": "hunter2secret"}),
}


@pytest.mark.conforms("G5", "B-b5")
@each_row("what", REWRITES)
async def test_what_an_after_hook_writes_loses_the_runs_secrets(what: str) -> None:
    registry = ToolRegistry()
    registry.register("work", "Do something harmless here.", None, lambda args: "fine")
    registry.add_hook(after=lambda call, result: REWRITES[what])

    seen = await readers(registry, SECRETS)

    assert {reader: "hunter2" in text for reader, text in seen.items()} == dict.fromkeys(seen, False)


@pytest.mark.conforms("G5", "B-b6")
@each_row("change", [Override(content=LONG), ToolResult.ok(LONG), ToolResult.of([LONG])], ids=str)
async def test_what_an_after_hook_writes_is_bounded_like_what_a_tool_writes(change: Any) -> None:
    registry = ToolRegistry()
    registry.register("work", "Do something harmless here.", None, lambda args: "fine", max_result_bytes=100)
    registry.add_hook(after=lambda call, result: change)

    result = await registry.execute("work")

    assert len(result.text) <= 100
    assert result.meta.truncated or (result.error is not None and result.error.code == ErrorCode.TOO_LARGE)
