"""Shows an adapter for an agent framework: its tools are called from scripts, and scripts are one of its tools."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio

from toolcell import Runtime
from toolcell.integrations import framework_tool, instructions, text_for_model, tools_with


class FrameworkToolError(Exception):
    """The framework shows the text of this to the model."""


@dataclass
class FrameworkTool:
    """How the framework of this example describes a tool."""

    name: str
    description: str
    schema: dict[str, Any]
    function: Callable[..., Any]


def python_tool(runtime: Runtime, tools: Sequence[FrameworkTool]) -> FrameworkTool:
    """Return a tool of the framework that runs Python, from which its other tools can be called."""
    ours = [
        framework_tool(
            each.name,
            each.description,
            each.schema,
            lambda args, each=each: each.function(**args),
            shows=(FrameworkToolError,),
            source=each,
        )
        for each in tools
    ]
    registry = tools_with(runtime.registry, ours)

    async def execute_code(code: str) -> str:
        return text_for_model(await runtime.execute_code(code, tools=registry))

    code = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
    return FrameworkTool("execute_code", instructions(registry, runtime, keeps_state=False), code, execute_code)


def weather(city: str) -> dict[str, Any]:
    if city != "Oslo":
        raise FrameworkToolError(f"no station in {city}")
    return {"city": city, "celsius": 4}


async def main() -> None:
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    async with Runtime() as runtime:
        tool = python_tool(runtime, [FrameworkTool("weather", "Return the weather of a city.", city, weather)])
        print("weather" in tool.description)
        print(await tool.function("tools.weather(city='Oslo')['celsius'] * 9 / 5 + 32"))
        print(await tool.function("tools.weather(city='Rome')"))


if __name__ == "__main__":
    anyio.run(main)
