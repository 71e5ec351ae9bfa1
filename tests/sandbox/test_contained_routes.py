"""`Policy(profile="container")` on every route: code, plans, batches, agents and packages."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from toolcell import Limits, Outcome, Policy, PoolConfig, Runtime, ToolRegistry
from toolcell.agents import Agent
from toolcell.agents.providers.scripted import ScriptedModel, calls

from .forty_packages import USUAL

pytestmark = [pytest.mark.anyio, pytest.mark.contained]


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    async def double(number: int) -> int:
        """Return twice the number that was given."""
        return 2 * number

    policy, limits = Policy(profile="container"), Limits(memory_bytes=1 << 30)
    registry = ToolRegistry([double])
    registry.enable_plan_execution()
    async with Runtime(registry, policy=policy, limits=limits, packages=USUAL, pool=PoolConfig(warm=1)) as runtime:
        yield runtime


CODE = """
import numpy as np
first = call_tool('double', number=2)
rest = call_tools_parallel([{'tool': 'double', 'args': {'number': n}} for n in (3, 4)])
set_result(int(np.array([first, *rest]).sum()))
"""


@pytest.mark.slow
async def test_code_plans_batches_and_agents_use_the_same_isolation(runtime: Runtime) -> None:
    result = await runtime.execute_code(CODE)
    assert (result.outcome, result.value) == (Outcome.OK, 18), result.error
    assert set(result.isolation.layers) >= {"landlock", "seccomp", "capabilities"}
    assert "user" not in result.isolation.layers

    rows = await runtime.execute_plan(
        [{"id": "a", "tool": "double", "args": {"number": 5}}, {"tool": "double", "args": {"number": {"$ref": "a"}}}]
    )
    assert [row["status"] for row in rows] == ["ok", "ok"], rows

    runtime.registry.enable_code_execution(runtime)
    escape = "open('/etc/passwd')"
    batch = [("execute_code", {"code": CODE}), ("execute_code", {"code": escape}), ("double", {"number": 8})]
    good, refused, doubled = await runtime.registry.execute_batch(batch)
    assert (good.value, doubled.value) == (18, 16)
    assert "PermissionError" in refused.text

    model = ScriptedModel([calls(("execute_code", {"code": CODE})), "It is 18."])
    run = await Agent(model, tools=runtime.registry, code_execution=runtime).run("Add them up.")
    assert run.content == "It is 18."
    assert "18" in next(message["content"] for message in run.messages if message["role"] == "tool")
