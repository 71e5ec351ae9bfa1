"""`ask_user` as a tool: a question of the model to a person, only from the model itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from toolcell.tools.call import Call
from toolcell.tools.definition import ToolDefinition
from toolcell.tools.hooks import maybe_await
from toolcell.tools.options import Origin, ToolOptions
from toolcell.tools.spec import ToolSpec

AskUser = Callable[[str], str | Awaitable[str]]
"""Gets the question, gives the answer."""

ASK_TOOL = "ask_user"


def ask_user_spec(ask: AskUser) -> ToolSpec:
    """A tool that asks a person. Plans and code cannot: nobody expects questions in the middle of either."""

    async def invoke(call: Call) -> Any:
        return await maybe_await(ask(call.args["question"]))

    schema = {
        "type": "object",
        "properties": {"question": {"type": "string", "description": "What to ask."}},
        "required": ["question"],
    }
    return ToolSpec(
        definition=ToolDefinition(ASK_TOOL, "Ask the user a question and wait for the answer.", schema),
        invoke=invoke,
        # People take their time, and the question holds no worker from other tools meanwhile.
        options=ToolOptions(orchestrates=True, callable_from=frozenset({Origin.MODEL})),
        source=ask,
        requires_result=True,
    )
