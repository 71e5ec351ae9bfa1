"""Agents of LangChain whose model is a script, and tools for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from langchain.tools import InjectedState, InjectedToolCallId, ToolRuntime, tool
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import ToolException

SENT: list[tuple[str, str]] = []
"""What `send` has sent since the test began."""


class ScriptedModel(GenericFakeChatModel):
    """LangChain's scripted model, which takes tools and keeps what it is told."""

    seen: list[Any] = []  # noqa: RUF012

    def bind_tools(self, tools: Sequence[Any], **options: Any) -> Any:
        return self

    def _generate(self, messages: list[Any], *args: Any, **options: Any) -> Any:
        self.seen.append(messages)
        return super()._generate(messages, *args, **options)


def model(*sources: str, name: str = "execute_code") -> ScriptedModel:
    """A model that has these scripts run, one a turn, and then is done."""
    calls = [
        AIMessage("", tool_calls=[{"name": name, "args": {"code": each}, "id": f"c{number}"}])
        for number, each in enumerate(sources)
    ]
    return ScriptedModel(messages=iter([*calls, AIMessage("done")]), seen=[])


def answers(result: Any) -> list[ToolMessage]:
    """The messages of the tool in an agent's result."""
    return [each for each in result["messages"] if isinstance(each, ToolMessage)]


@tool
def weather(city: str, runtime: ToolRuntime, days: int = 1) -> dict[str, Any]:
    """Return the weather of a city."""
    return {"city": city, "days": days, "temp": 20, "messages": len(runtime.state["messages"])}


@tool
async def send(
    to: str, text: str, state: Annotated[dict[str, Any], InjectedState], ident: Annotated[str, InjectedToolCallId]
) -> str:
    """Send a message to somebody."""
    assert ident and state["messages"]
    SENT.append((to, text))
    return "sent"


@tool
def broken() -> str:
    """Raise something unexpected."""
    raise KeyError("secret place")


@tool
def worded() -> str:
    """Raise something that is meant for the model."""
    raise ToolException("no such thing here")
