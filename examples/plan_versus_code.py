"""Shows one task done call by call, as a plan, and as code, with the model samplings and the time of each."""

import json
import time
from collections.abc import Sequence
from typing import Any

import anyio

from toolcell import Runtime
from toolcell.agents import Agent
from toolcell.testing import ScriptedModel, calls
from toolcell.tools import ToolRegistry

TOOL_S, SAMPLING_S = 0.05, 0.1
ITEMS = ["tea", "coffee", "water", "juice"]
registry = ToolRegistry()


@registry.tool(read_only=True)
async def price(item: str) -> dict[str, object]:
    """Look up the price of an item."""
    await anyio.sleep(TOOL_S)
    return {"item": item, "euros": len(item)}


class SlowModel(ScriptedModel):
    """Answers as slowly as a small model."""

    async def chat(self, *request: Any) -> Any:
        await anyio.sleep(SAMPLING_S)
        return await super().chat(*request)


SCRIPT = f"""
prices = call_tools_parallel([('price', {{'item': item}}) for item in {ITEMS!r}])
set_result(max(prices, key=lambda each: each['euros']))
"""
STEPS = [{"tool": "price", "args": {"item": item}} for item in ITEMS]


async def measure(name: str, agent: Agent, model: ScriptedModel) -> None:
    started = time.perf_counter()
    run = await agent.run("Which item costs most?")
    taken = time.perf_counter() - started
    read = [message["content"] for message in run.messages if message["role"] == "tool"][-1]
    last = json.loads(read)
    print(f"{name:13} {model.samplings} samplings, {taken:.2f} s; the model read last: {json.dumps(last)[:60]}")


async def main() -> None:
    def model(*lines: Any) -> SlowModel:
        return SlowModel([*lines, "coffee"])

    def one_by_one() -> Sequence[Any]:
        return [calls(("price", {"item": item})) for item in ITEMS]

    async with Runtime(registry) as runtime:
        single, planned = model(*one_by_one()), model(calls(("execute_plan", {"steps": STEPS})))
        coded = model(calls(("execute_code", {"code": SCRIPT})))
        await measure("call by call", Agent(single, tools=registry), single)
        await measure("as a plan", Agent(planned, tools=registry, plan_execution=True), planned)
        await measure("as code", Agent(coded, tools=registry, code_execution=runtime), coded)


anyio.run(main)
