"""AG2: an agent writes code that calls a tool of AG2 and one of a registry. The model is AG2's scripted one."""

import asyncio
import json

from ag2 import Agent
from ag2.events import ToolCallEvent, ToolResultEvent
from ag2.testing import TestConfig
from ag2.tools import SandboxCodeTool, tool

from toolcell import ToolRegistry
from toolcell.integrations.ag2 import ToolcellEnvironment

registry = ToolRegistry()


@registry.tool
def population(city: str) -> int:
    """Return the number of people who live in a city."""
    return {"Bern": 134_000, "Basel": 173_000}[city]


@tool
async def area(city: str) -> float:
    """Return the area of a city in square kilometres."""
    return {"Bern": 51.6, "Basel": 23.9}[city]


CODE = "print(round(tools.population('Bern') / tools.area(city='Bern')), 'people per km²')"
scripted = TestConfig(ToolCallEvent("run_code", arguments=json.dumps({"code": CODE, "language": "python"})), "Done.")


async def main() -> None:
    async with ToolcellEnvironment(registry=registry, tools=[area]) as environment:
        code_tool = SandboxCodeTool(environment, description=environment.description)
        agent = Agent("coder", config=scripted, tools=[code_tool])
        reply = await agent.ask("How densely populated is Bern?")
        for event in await reply.context.stream.history.get_events():
            if isinstance(event, ToolResultEvent):
                print("code:", event.result.parts[0].content)
        print("agent:", reply.body)


asyncio.run(main())
