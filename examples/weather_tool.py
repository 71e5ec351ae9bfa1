"""Shows one tool, and what a model reads after wrong arguments, a failure, coerced arguments and a success."""

import json

import anyio

from toolcell import ToolError
from toolcell.agents import Agent
from toolcell.testing import ScriptedModel, calls
from toolcell.tools import ToolRegistry

registry = ToolRegistry()
KNOWN = {"Jakarta": 28, "Oslo": -3}


@registry.tool(read_only=True)
async def get_weather(city: str, days: int = 1) -> dict[str, object]:
    """Get the weather of a city for the next days.

    Args:
        city: City name (e.g. 'Jakarta', 'New York')
        days: How many days, 1 to 7
    """
    if city not in KNOWN:
        raise ToolError(f"city not found: {city}; known cities are {', '.join(KNOWN)}")
    return {"city": city, "celsius": [KNOWN[city]] * days}


async def main() -> None:
    print("the model gets:", json.dumps(registry.to_provider_defs()[0]["function"]["parameters"]["properties"]))
    model = ScriptedModel(
        [
            calls(("get_weather", {"town": "Jakarta"})),
            calls(("get_weather", {"city": "Atlantis"})),
            calls(("get_weather", {"city": "Jakarta", "days": "2"})),
            "It will be 28 degrees in Jakarta.",
        ]
    )
    run = await Agent(model, tools=registry).run("How warm will it be in Jakarta?")
    for message in run.messages:
        for call in message.get("tool_calls", ()):
            print("calls: ", call["function"]["name"], call["function"]["arguments"])
        if message["role"] == "tool":
            print("reads: ", message["content"].partition("\n\n")[0].replace("\n", " "))
    print("answer:", run.content)


anyio.run(main)
