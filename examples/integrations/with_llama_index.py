"""An agent of LlamaIndex writes Python, which calls LlamaIndex tools: one turn in the place of three.

The model is LlamaIndex's mock, so this needs no key; with `OpenAI("gpt-5")` in its place, the rest stays as it is.
"""

import asyncio
from typing import Any

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, ToolCallBlock
from llama_index.core.llms.mock import MockFunctionCallingLLM
from llama_index.core.tools import FunctionTool

from toolcell import Runtime, ToolRegistry
from toolcell.integrations.llama_index import CodeInterpreterToolSpec


def weather(city: str) -> dict[str, Any]:
    """Return the weather of a city."""
    return {"city": city, "celsius": {"Oslo": 21, "Bergen": 17}[city]}


def compare(warm: str, cold: str, by: int) -> str:
    """Return a sentence that compares two cities."""
    return f"{warm} is {by} degrees warmer than {cold}."


SCRIPT = """
oslo, bergen = call_tools_parallel([("weather", {"city": "Oslo"}), ("weather", {"city": "Bergen"})])
tools.compare(warm="Oslo", cold="Bergen", by=oslo["celsius"] - bergen["celsius"])
"""


def answer(messages: Any, **options: Any) -> ChatMessage:
    """Write the script, and then repeat what came of it."""
    if messages[-1].role == "tool":
        return ChatMessage(role="assistant", content=messages[-1].content)
    call = ToolCallBlock(tool_call_id="call-1", tool_name="code_interpreter", tool_kwargs={"code": SCRIPT})
    return ChatMessage(role="assistant", blocks=[call])


async def main() -> None:
    async with Runtime(ToolRegistry()) as runtime:
        given = [FunctionTool.from_defaults(weather), FunctionTool.from_defaults(compare)]
        spec = CodeInterpreterToolSpec(runtime, tools=given)
        llm = MockFunctionCallingLLM(response_generator=answer)
        agent = FunctionAgent(tools=spec.to_tool_list(), llm=llm, streaming=False)
        print(await agent.run("Where is it warmer?"))


asyncio.run(main())
