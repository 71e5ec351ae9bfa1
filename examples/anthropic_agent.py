"""Shows an agent of Anthropic's SDK that writes code. It reads ANTHROPIC_API_KEY and ANTHROPIC_BASE_URL.

Needs `pip install '.[anthropic]'`.
"""

import os

import anyio

from toolcell import Runtime, ToolRegistry
from toolcell.agents import Agent, AnthropicProvider

registry = ToolRegistry()


@registry.tool(read_only=True)
async def population(country: str) -> int:
    """Return how many people live in a country."""
    return {"Norway": 5_600_000, "Italy": 58_900_000}[country]


async def main() -> None:
    if "ANTHROPIC_API_KEY" not in os.environ:
        print("set ANTHROPIC_API_KEY to run this example")
        return
    async with AnthropicProvider() as provider, Runtime(registry) as runtime:
        agent = Agent(provider, model="claude-sonnet-4-5", tools=registry, code_execution=runtime)
        run = await agent.run("How many more people live in Italy than in Norway? Write code.")
    print(run.content)
    print([(step.name, step.output) for step in run.steps])


anyio.run(main)
