"""A pydantic-ai agent in code mode: its model writes one script that calls both tools, and one call needs approval.

The model here is a function, so no key is needed. pip install '.[pydantic-ai]'
"""

import asyncio

from pydantic_ai import Agent, DeferredToolRequests, DeferredToolResults
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from toolcell import Runtime
from toolcell.integrations.pydantic_ai import CodeMode

SCRIPT = """
cheap = [name for name in ("apple", "pear", "plum") if tools.price(item=name) < 1]
[tools.order(item=name, count=2) for name in cheap]
"""


def model(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    last = messages[-1].parts[-1]
    if last.part_kind != "tool-return":
        return ModelResponse([ToolCallPart("run_code", {"code": SCRIPT})])
    return ModelResponse([TextPart(f"Done: {last.content}")])


async def main() -> None:
    async with Runtime() as runtime:
        agent = Agent(FunctionModel(model), output_type=[str, DeferredToolRequests], capabilities=[CodeMode(runtime)])

        @agent.tool_plain
        def price(item: str) -> float:
            """Return what an item costs."""
            return {"apple": 0.5, "pear": 0.75, "plum": 2.25}[item]

        @agent.tool_plain(requires_approval=True)
        def order(item: str, count: int) -> str:
            """Order so many of an item."""
            return f"{count} x {item}"

        run = await agent.run("Order two of each fruit that costs less than 1.")
        while isinstance(run.output, DeferredToolRequests):
            for about in run.output.metadata.values():
                print("waits for approval:", [(call["tool"], call["args"]) for call in about["calls"]])
            approvals = {call.tool_call_id: True for call in run.output.approvals}
            results = DeferredToolResults(approvals=approvals, metadata=run.output.metadata)
            run = await agent.run(message_history=run.all_messages(), deferred_tool_results=results)
        print(run.output)


asyncio.run(main())
