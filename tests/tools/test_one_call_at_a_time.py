"""A setting that calls are made one at a time holds for every call of a run, whoever makes it."""

from __future__ import annotations

from typing import Any

import pytest

from toolcell import Agent, PoolConfig, Runtime, ToolRegistry
from toolcell.testing import ScriptedModel, calls
from tools.toolkit import Crowd

pytestmark = [pytest.mark.quick, pytest.mark.anyio]

NAMES = ["act", "other", "act"]
SCRIPT = f"call_tools_parallel({NAMES!r})"
FLAT = [{"tool": name, "args": {}} for name in NAMES]
LINKED = [{"tool": "act", "id": "first"}, *({"tool": name, "depends_on": ["first"]} for name in NAMES)]

SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int]] = {
    "a registry": ({"sequential": True}, {}, {}, 1),
    "a tool": ({}, {"mode": "sequential"}, {}, 1),
    "an agent": ({}, {}, {"parallel_tools": False}, 1),
    "nobody": ({}, {}, {}, 2),
}
"""Settings of the registry, of one of its tools and of the agent; and whether any calls overlap."""


@pytest.mark.slow
@pytest.mark.conforms("F6", "F9", "F12")
async def test_calls_overlap_on_no_route_where_a_registry_a_tool_or_an_agent_says_so() -> None:
    overlaps: dict[tuple[str, str], int] = {}
    for who, (settings, options, of_agent, _) in SETTINGS.items():
        crowd = Crowd()

        async def visit() -> str:
            await crowd.visit()  # noqa: B023
            return "done"

        registry = ToolRegistry(**settings)
        registry.add(visit, name="act", description="Be somewhere for a while.", **options)
        registry.add(visit, name="other", description="Be somewhere for a while.")
        async with Runtime(registry, pool=PoolConfig(warm=0)) as runtime:
            turns = {
                "batch": calls(*((name, {}) for name in NAMES)),
                "script": calls(("execute_code", {"code": SCRIPT})),
                "plan": calls(("execute_plan", {"steps": FLAT})),
                "plan with links": calls(("execute_plan", {"steps": LINKED})),
            }
            for route, turn in turns.items():
                crowd.most = crowd.visits = 0
                model = ScriptedModel([turn, "done"])
                agent = Agent(model, tools=registry, plan_execution=True, code_execution=runtime, **of_agent)
                await agent.run("go")
                assert crowd.visits >= len(NAMES)
                overlaps[who, route] = min(crowd.most, 2)
            if who == "an agent":
                continue
            crowd.most = 0
            assert (await runtime.execute_code(SCRIPT)).ok
            overlaps[who, "runtime's script"] = min(crowd.most, 2)
            crowd.most = 0
            await runtime.execute_plan(LINKED)
            overlaps[who, "runtime's plan"] = min(crowd.most, 2)

    assert overlaps == {(who, route): SETTINGS[who][3] for who, route in overlaps}
