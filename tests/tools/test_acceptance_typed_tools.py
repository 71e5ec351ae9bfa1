"""The examples of typed tools: pictures, early ends and order."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest

from rows import each_row
from toolcell.agents import Agent
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.tools import (
    Block,
    Call,
    Image,
    Override,
    Text,
    ToolRegistry,
    ToolResult,
)
from tools.toolkit import Meeting, recorded

pytestmark = pytest.mark.anyio


@pytest.mark.conforms("EX-21", "B3", "B4", "B5")
@each_row("can_see", [True, False])
async def test_details_stay_with_the_events_and_images_reach_models_that_can_see(can_see: bool) -> None:
    picture = Image(b"\x89PNG\r\n\x1a\n", "image/png")

    async def query() -> ToolResult:
        """Count the rows and draw them."""
        return ToolResult(parts=(Text("drawn"), picture), details={"rows": 3})

    model = ScriptedModel([calls(("query", {})), "done"], supports_images=can_see)
    agent = Agent(model, tools=[query])
    log = recorded(agent.events)

    await agent.run("go")

    [end] = [event for event in log if event.type == "tool_execution_end"]
    assert end.result is not None
    assert end.result.details == {"rows": 3}
    assert "rows" not in json.dumps([request.messages for request in model.requests])
    answer = model.requests[1].messages[-1]
    if can_see:
        assert answer["images"] == [{"media_type": "image/png", "data": "iVBORw0KGgo="}]
    else:
        assert "images" not in answer
        assert "(tool image omitted: model does not support images)" in answer["content"]


@pytest.mark.conforms("EX-22", "F13", "F14", "O13", "V-17")
async def test_a_run_stops_early_only_when_every_call_of_a_batch_wants_it() -> None:
    async def stop() -> ToolResult:
        """Say that this is enough."""
        return ToolResult.ok("enough", terminate=True)

    async def go_on() -> ToolResult:
        """Say that there is more."""
        return ToolResult.ok("more")

    async def samplings(*names: str) -> tuple[int, str]:
        registry = ToolRegistry([stop, go_on])
        registry.add_hook(before=lambda call: Block("no") if call.name == "go_on" and len(names) == 3 else None)
        model = ScriptedModel([calls(*[(name, {}) for name in names]), "done"])
        run = await Agent(model, tools=registry).run("go")
        return model.samplings, run.stop_reason

    assert await samplings("stop", "stop") == (1, "terminated")
    assert await samplings("stop", "go_on") == (2, "final")
    assert await samplings("stop", "go_on", "stop") == (2, "final")


def ordered_agent(log: list[str], running: list[int], meeting: Meeting | None, **agent: Any) -> Agent:
    def tool(name: str) -> Any:
        async def run() -> str:
            running[0] += 1
            running[1] = max(running)
            if meeting is not None:
                await meeting.join()
            await anyio.lowlevel.checkpoint()
            running[0] -= 1
            return name

        run.__name__, run.__doc__ = name, "A tool that takes a while."
        return run

    in_hook = [0]

    async def hook(what: str, call: Call) -> None:
        in_hook[0] += 1
        assert in_hook[0] == 1, "hooks overlap"
        await anyio.lowlevel.checkpoint()
        log.append(f"{what} {call.name}")
        in_hook[0] -= 1

    async def after(call: Call, result: ToolResult) -> Override | None:
        await hook("after", call)
        return None

    model = ScriptedModel([calls(("A", {}), ("B", {}), ("C", {})), "done"])
    registry = ToolRegistry([tool("A"), tool("B"), tool("C")])
    registry.add_hook(before=lambda call: hook("before", call), after=after)
    made = Agent(model, tools=registry, **agent)

    def note(event: Any) -> None:
        kind = {"tool_execution_start": "start", "tool_execution_end": "end"}.get(event.type)
        if kind:
            log.append(f"{kind} {event.tool}")
        elif event.type == "message_end" and event.call_id:
            log.append(f"msg {event.data['message']['content']}")

    made.subscribe(note)
    return made


@pytest.mark.conforms("EX-26", "F7", "G8", "H1", "H3", "H6")
async def test_around_overlapping_tools_everything_happens_in_source_order() -> None:
    log: list[str] = []

    await ordered_agent(log, [0, 0], Meeting(3)).run("go")

    assert log == [
        *(f"{what} {name}" for name in "ABC" for what in ("start", "before")),
        *(f"{what} {name}" for name in "ABC" for what in ("after", "end", "msg")),
    ]


@pytest.mark.conforms("EX-26", "F6", "F9", "F12", "EX-32")
@each_row("how", ["loop", "tool"])
async def test_in_sequence_each_call_lives_its_whole_life_before_the_next(how: str) -> None:
    log, running = list[str](), [0, 0]
    agent = ordered_agent(log, running, None, parallel_tools=how != "loop")
    if how == "tool":

        async def B() -> str:
            """Take over the place of the other B."""
            return "B"

        agent.registry.add(B, replace=True, mode="sequential")

    await agent.run("go")

    assert log == [f"{what} {name}" for name in "ABC" for what in ("start", "before", "after", "end", "msg")]
    assert running[1] == 1
