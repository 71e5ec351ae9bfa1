"""A deep agent writes Python, which calls its own tools. Sending waits for a person; names stay in the thread.

The model is LangChain's scripted one, so this needs no key; with `"anthropic:claude-sonnet-4-5"` in its place, the rest
stays as it is.
"""

import asyncio
from typing import Any

from deepagents import create_deep_agent
from langchain.tools import tool
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from toolcell import Runtime, ToolRegistry
from toolcell.integrations.deepagents import CodeInterpreterMiddleware


@tool
def search(query: str) -> list[str]:
    """Return the titles of reports about something."""
    return [f"{query}: summer", f"{query}: winter"]


@tool
def send(to: str, text: str) -> str:
    """Send a text to somebody."""
    return f"sent to {to}"


FIRST = 'titles = tools.search(query="tides")\ntools.write_file(file_path="/titles.txt", content="\\n".join(titles))'
SECOND = 'tools.send(to="ann", text=titles[0])'


class ScriptedModel(GenericFakeChatModel):
    """Writes the two scripts, and then says that it is done."""

    def bind_tools(self, tools: Any, **options: Any) -> Any:
        return self


def script(number: int, code: str) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": "execute_code", "args": {"code": code}, "id": f"call-{number}"}])


MODEL = ScriptedModel(messages=iter([script(1, FIRST), script(2, SECOND), AIMessage("Ann has the first title.")]))


async def main() -> None:
    async with Runtime(ToolRegistry()) as runtime:
        interpreter = CodeInterpreterMiddleware(
            runtime, ptc=["search", "send", "write_file"], interrupt_on={"send": True}
        )
        agent = create_deep_agent(
            model=MODEL, tools=[search, send], middleware=[interpreter], checkpointer=InMemorySaver()
        )
        thread: Any = {"configurable": {"thread_id": "tides"}}
        result = await agent.ainvoke({"messages": [("user", "Send Ann a title.")]}, thread)
        (waits,) = result["__interrupt__"][0].value["action_requests"]
        print("approved:", waits["name"], waits["args"])
        result = await agent.ainvoke(Command(resume={"decisions": [{"type": "approve"}]}), thread)
        print("files:", *result["files"])
        print(result["messages"][-1].text)


asyncio.run(main())
