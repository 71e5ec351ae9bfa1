"""An agent of LangChain writes Python, which calls LangChain tools: one turn in the place of three.

The model is LangChain's scripted one, so this needs no key; with `"anthropic:claude-sonnet-4-5"` in its place, the rest
stays as it is.
"""

import asyncio
from typing import Any

from langchain.agents import create_agent
from langchain.tools import tool
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage

from toolcell import Runtime, ToolRegistry
from toolcell.integrations.langchain import code_execution_tool


@tool
def weather(city: str) -> dict[str, Any]:
    """Return the weather of a city."""
    return {"city": city, "celsius": {"Oslo": 21, "Bergen": 17}[city]}


@tool
def compare(warm: str, cold: str, by: int) -> str:
    """Return a sentence that compares two cities."""
    return f"{warm} is {by} degrees warmer than {cold}."


SCRIPT = """
oslo, bergen = call_tools_parallel([("weather", {"city": "Oslo"}), ("weather", {"city": "Bergen"})])
tools.compare(warm="Oslo", cold="Bergen", by=oslo["celsius"] - bergen["celsius"])
"""


class ScriptedModel(GenericFakeChatModel):
    """Writes the script, and then repeats what came of it."""

    def bind_tools(self, tools: Any, **options: Any) -> Any:
        return self


MODEL = ScriptedModel(
    messages=iter(
        [
            AIMessage("", tool_calls=[{"name": "execute_code", "args": {"code": SCRIPT}, "id": "call-1"}]),
            AIMessage("Oslo is 4 degrees warmer than Bergen."),
        ]
    )
)


async def main() -> None:
    async with Runtime(ToolRegistry()) as runtime:
        agent = create_agent(MODEL, tools=[code_execution_tool(runtime, tools=[weather, compare])])
        result = await agent.ainvoke({"messages": [("user", "Where is it warmer?")]})
        *_, answer, last = result["messages"]
        assert answer.text == '"Oslo is 4 degrees warmer than Bergen."', answer.text
        print(last.text)


asyncio.run(main())
