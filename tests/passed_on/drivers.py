"""Every way in which calls of tools come about, each as a function that carries out an `Order`.

Only public names are used: the files behind them may move.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from mcp.client.client import Client

from passed_on.office import Calls, Office, Order, source
from toolcell import Agent, PoolConfig, Runtime, UsageError
from toolcell.mcp.server import McpServer
from toolcell.run.streaming import ProgressReported, RunFinished
from toolcell.testing import ScriptedModel, calls
from toolcell.tools import Approve


@dataclass
class Came:
    """What came of an order."""

    result: Any
    rows: list[Any]
    """What each call gave to who made it: `ok` or `failed`, and a value or a text."""
    revert: Callable[[], Awaitable[Any]] | None = None
    runs: tuple[Any, ...] = ()
    """Results of all runs on the way."""
    model: list[ScriptedModel] = field(default_factory=list)
    """Models that took part, with what they were sent."""
    undone: Any = None
    """What `revert` returned, or the error with which it refused."""


Driver = Callable[[Office, Order], Awaitable[Came]]


@asynccontextmanager
async def opened(office: Office, order: Order, **options: Any) -> AsyncIterator[Runtime]:
    """A runtime for one order."""
    given = {"pool": PoolConfig(warm=0), **order.runtime, **options}
    async with Runtime(office.registry, **given) as runtime:
        yield runtime


def of_script(runtime: Runtime, result: Any, *before: Any) -> Came:
    rows = result.value if isinstance(result.value, list) else []
    return Came(result, rows, lambda: runtime.revert(result), (*before, result))


def waiting(result: Any) -> Any:
    """Return what a run waits for."""
    assert result.suspension is not None, result
    return result.suspension


def approved(result: Any) -> dict[str, Approve]:
    return {call.id: Approve() for call in waiting(result).calls}


async def script(office: Office, order: Order) -> Came:
    async with opened(office, order) as runtime:
        text = source(order.calls, order.code)
        result = await runtime.execute_code(text, context=order.run(), **order.bounds(), **order.handlers)
        return await ended(order, of_script(runtime, result))


async def saved_script(office: Office, order: Order) -> Came:
    office.registry.save_script("inner", source(order.calls, order.code))
    async with opened(office, order) as runtime:
        options = {**order.bounds(), **order.handlers}
        result = await runtime.execute_code("tools.inner()", context=order.run(), **options)
        return await ended(order, of_script(runtime, result))


async def saved_script_twice(office: Office, order: Order) -> Came:
    """A saved script that calls a saved script."""
    office.registry.save_script("innermost", source(order.calls, order.code))
    office.registry.save_script("inner", "tools.innermost()")
    async with opened(office, order) as runtime:
        options = {**order.bounds(), **order.handlers}
        result = await runtime.execute_code("tools.inner()", context=order.run(), **options)
        return await ended(order, of_script(runtime, result))


async def plan(office: Office, order: Order) -> Came:
    """A plan: its steps one after the other; Python runs in a saved script."""
    wanted = _with_code(office, order, order.calls)
    async with opened(office, order) as runtime:
        rows = await runtime.execute_plan(steps(wanted), context=order.run(limits=order.limits))
        return await ended(order, Came(rows, of_steps(rows), lambda: runtime.revert(rows), (rows,)))


def steps(wanted: Calls) -> list[dict[str, Any]]:
    """Return steps of a plan, one after the other."""
    rows = []
    for index, (name, args) in enumerate(wanted):
        after = [f"s{index - 1}"] if index else []
        rows.append({"id": f"s{index}", "tool": name, "args": dict(args), "depends_on": after})
    return rows


def of_steps(rows: Any) -> list[Any]:
    return [["ok" if row["status"] == "ok" else "failed", row.get("result", row.get("error"))] for row in rows]


def _with_code(office: Office, order: Order, wanted: Calls) -> Calls:
    """Add the call of a saved script to calls, if Python is to run."""
    if not order.code:
        return wanted
    office.registry.save_script("inner", order.code)
    return [*wanted, ("inner", {})]


def replies(wanted: Calls) -> list[Any]:
    """Return what a model says to make calls, one in each turn."""
    return [*(calls((name, args)) for name, args in wanted), "done"]


def of_messages(messages: Any) -> list[Any]:
    return [["said", message["content"]] for message in messages if message["role"] == "tool"]


async def agent(office: Office, order: Order) -> Came:
    """Calls that an agent's model makes."""
    return await _agents_run(office, order, replies(_with_code(office, order, order.calls)))


async def agents_script(office: Office, order: Order) -> Came:
    """A script that an agent's model writes."""
    return await _agents_run(office, order, replies([("execute_code", {"code": source(order.calls, order.code)})]))


async def agents_plan(office: Office, order: Order) -> Came:
    """A plan that an agent's model writes."""
    wanted = _with_code(office, order, order.calls)
    return await _agents_run(office, order, replies([("execute_plan", {"steps": steps(wanted)})]), plan_execution=True)


async def _agents_run(office: Office, order: Order, said: list[Any], **options: Any) -> Came:
    async with opened(office, order) as runtime:
        model = ScriptedModel(said)
        one = Agent(model, tools=office.registry, code_execution=runtime, **options)
        result = await one.run("go", context=order.run(limits=order.limits))
        came = Came(result, of_messages(result.messages), lambda: one.revert(result), (result,), [model])
        return await ended(order, came)


async def sub_agent(office: Office, order: Order) -> Came:
    """Calls that the model of a sub-agent makes; Python runs in its script."""
    wanted = [*order.calls]
    if order.code:
        wanted.append(("execute_code", {"code": order.code}))
    async with opened(office, order) as runtime:
        inner = ScriptedModel(replies(wanted))
        outer = ScriptedModel([calls(("helper", {"task": "go"})), "done"])
        helper = Agent(inner, tools=office.registry, code_execution=runtime)
        one = Agent(outer, tools=[helper.as_tool("helper", "Does the work of the one that asks.")])
        result = await one.run("go", context=order.run(limits=order.limits))
        rows = of_messages(inner.requests[-1].messages if inner.requests else ())
        return await ended(order, Came(result, rows, lambda: one.revert(result), (result,), [outer, inner]))


async def session(office: Office, order: Order) -> Came:
    async with opened(office, order) as runtime, runtime.session(**order.bounds()) as one:
        first = await one.execute_code(source(order.first), context=order.run())
        return await _gone_on(order, runtime, one, first)


async def fork(office: Office, order: Order) -> Came:
    async with opened(office, order) as runtime, runtime.session(**order.bounds()) as one:
        first = await one.execute_code(source(order.first), context=order.run())
        async with await one.fork() as other:
            return await _gone_on(order, runtime, other, first)


async def restored_session(office: Office, order: Order) -> Came:
    """A session that goes on in another Runtime, as in another process."""
    async with (
        opened(office, order, record=order.folder / "runs.db") as runtime,
        runtime.session("kept", **order.bounds()) as one,
    ):
        first = await one.execute_code(source(order.first), context=order.run())
    async with (
        opened(office, order, record=order.folder / "runs.db") as runtime,
        runtime.session("kept", restore=True, **order.bounds()) as one,
    ):
        return await _gone_on(order, runtime, one, first, reverts=False)


async def _gone_on(order: Order, runtime: Runtime, session: Any, first: Any, *, reverts: bool = True) -> Came:
    """Run the second script of an order in a session."""
    result = await session.execute_code(source(order.then, order.code), context=order.run(), **order.handlers)
    came = of_script(runtime, result, first)
    came.rows = [*(first.value or ()), *came.rows]
    if reverts:
        came.revert = reverting(runtime, result, first)
    return await ended(order, came)


def reverting(runtime: Runtime, *results: Any) -> Callable[[], Awaitable[Any]]:
    """Return what reverts several runs, the last first."""

    async def revert() -> list[Any]:
        undone = []
        for result in results:
            try:
                undone.append(await runtime.revert(result))
            except UsageError:  # it made nothing
                continue
        return undone

    return revert


async def dry_run_and_commit(office: Office, order: Order) -> Came:
    async with opened(office, order) as runtime:
        text = source(order.calls, order.code)
        options = {**order.bounds(), **order.handlers}
        dry = await runtime.execute_code(text, dry_run=True, context=order.run(), **options)
        result = await runtime.commit(dry, approve=dry.draft_digest, context=order.run())
        rows = [["ok", each.value] if each.status == "made" else ["failed", each.error] for each in result.effects]
        dry_rows = [row for row in dry.value or () if row[0] == "failed"]
        return await ended(order, Came(result, [*dry_rows, *rows], lambda: runtime.revert(result), (dry, result)))


async def repair(office: Office, order: Order) -> Came:
    async with opened(office, order) as runtime:
        broken = await runtime.execute_code(source(order.first, middle="1/0"), context=order.run())
        assert broken.error is not None and broken.error.type == "ZeroDivisionError"
        text = source(order.first, order.code, then=order.then)
        options = {**order.bounds(), **order.handlers}
        result = await runtime.execute_code(text, repairs=broken, context=order.run(), **options)
        came = of_script(runtime, result, broken)
        came.revert = reverting(runtime, result, broken)
        return await ended(order, came)


async def resume_here(office: Office, order: Order) -> Came:
    async with opened(office, order) as runtime:
        return await _suspended_and_resumed(office, order, runtime, runtime)


async def resume_after_a_restart(office: Office, order: Order) -> Came:
    async with opened(office, order, record=order.folder / "runs.db") as before:
        token = await _suspended(order, before)
    async with opened(office, order, record=order.folder / "runs.db") as runtime:
        return await _resumed(order, runtime, token)


async def repair_resumed_after_a_restart(office: Office, order: Order) -> Came:
    """A broken script that is mended; the mended one waits, and goes on in another Runtime."""
    async with opened(office, order, record=order.folder / "runs.db") as before:
        broken = await before.execute_code(source(order.first, middle="1/0"), context=order.run())
        token = await _suspended(order, before, repairs=broken)
    async with opened(office, order, record=order.folder / "runs.db") as runtime:
        came = await _resumed(order, runtime, token)
        came.runs = (broken, *came.runs)
        return came


async def _suspended(order: Order, runtime: Runtime, **options: Any) -> Any:
    text = source(order.first, order.code, middle="call_tool('agree')", then=order.then)
    options = {**options, **order.bounds()}
    result = await runtime.execute_code(text, context=order.run(), on_approval="suspend", **options)
    assert result.suspension is not None, result
    order.heard.clear()
    return result


async def _resumed(order: Order, runtime: Runtime, before: Any) -> Came:
    token = waiting(before).to_json()
    result = await runtime.resume(token, approved(before), context=order.run(), **order.handlers)
    return await ended(order, of_script(runtime, result, before))


async def _suspended_and_resumed(office: Office, order: Order, before: Runtime, after: Runtime, **options: Any) -> Came:
    return await _resumed(order, after, await _suspended(order, before, **options))


async def suspended_plan(office: Office, order: Order) -> Came:
    """A plan whose steps wait, carried on in another Runtime."""
    wanted = _with_code(office, order, [*order.first, ("agree", {}), *order.then])
    async with opened(office, order, record=order.folder / "runs.db") as before:
        context = order.run(limits=order.limits)
        waits = await before.execute_plan(steps(wanted), on_approval="suspend", context=context)
    async with opened(office, order, record=order.folder / "runs.db") as runtime:
        token = waiting(waits).to_json()
        result = await runtime.resume(token, approved(waits), context=order.run(limits=order.limits))
        return await ended(order, Came(result, of_steps(result.value), lambda: runtime.revert(result), (waits, result)))


async def suspended_agent(office: Office, order: Order) -> Came:
    """An agent that waits, and goes on."""
    wanted = [*order.first, ("agree", {}), *order.then]
    if order.code:
        wanted.append(("execute_code", {"code": order.code}))
    async with opened(office, order) as runtime:
        model = ScriptedModel(replies(wanted))
        one = Agent(model, tools=office.registry, code_execution=runtime, on_approval="suspend")
        waits = await one.run("go", context=order.run(limits=order.limits))
        context = order.run(limits=order.limits)
        result = await one.resume(waiting(waits).to_json(), approved(waits), context=context)
        came = Came(result, of_messages(result.messages), lambda: one.revert(result), (waits, result), [model])
        return await ended(order, came)


async def stream(office: Office, order: Order) -> Came:
    async with opened(office, order) as runtime:
        result = None
        async with runtime.stream(source(order.calls, order.code), context=order.run(), **order.bounds()) as events:
            async for event in events:
                if isinstance(event, ProgressReported):
                    order.heard.append(str(event.value))
                if isinstance(event, RunFinished):
                    result = event.result
        return await ended(order, of_script(runtime, result))


async def mapped(office: Office, order: Order) -> Came:
    """`Runtime.map` over one input."""
    async with opened(office, order) as runtime:
        options = {"context": order.run(), **order.bounds()}
        text = source(order.calls, order.code)
        items = [item async for item in runtime.map(text, [{"number": 1}], options=options)]
        return await ended(order, of_script(runtime, items[0].result))


async def mcp(office: Office, order: Order) -> Came:
    """A client of `toolcell mcp`."""

    async def note(progress: float, total: float | None, message: str | None) -> None:
        order.heard.append(message or "")

    given: dict[str, Any] = {"code": source(order.calls, order.code)}
    if order.limits is not None:
        given["limits"] = {name: getattr(order.limits, name) for name in ("memory_bytes", "tool_calls")}
    async with (
        opened(office, order) as runtime,
        McpServer(runtime, has_one_client=True) as server,
        Client(server.server) as client,
    ):
        answer = await client.call_tool("execute_code", given, progress_callback=note)
        plain: Mapping[str, Any] = answer.structured_content or {}
        rows = plain.get("value")
        return Came(answer.model_dump_json(), rows if isinstance(rows, list) else [], None, (json.dumps(plain),))


async def ended(order: Order, came: Came) -> Came:
    """Revert what was made while its Runtime is open, if the order says so."""
    if order.reverts and came.revert is not None:
        try:
            came.undone = await came.revert()
        except UsageError as exc:
            came.undone = exc
    return came


ROUTES: dict[str, Driver] = {
    "script": script,
    "saved script": saved_script,
    "saved script in a saved script": saved_script_twice,
    "plan": plan,
    "agent": agent,
    "agent's script": agents_script,
    "agent's plan": agents_plan,
    "sub-agent": sub_agent,
    "session": session,
    "fork": fork,
    "restored session": restored_session,
    "dry run and commit": dry_run_and_commit,
    "repair": repair,
    "resume here": resume_here,
    "resume after a restart": resume_after_a_restart,
    "repair resumed after a restart": repair_resumed_after_a_restart,
    "suspended plan after a restart": suspended_plan,
    "suspended agent": suspended_agent,
    "stream": stream,
    "map": mapped,
    "MCP": mcp,
}
"""Every way, by its name in the tables of tests."""
