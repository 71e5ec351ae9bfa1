"""Shows an agent of OpenAI's SDK that writes code. It reads OPENAI_API_KEY and OPENAI_BASE_URL.

Needs `pip install '.[openai]'`.
"""

import os

import anyio

from toolcell import Runtime, ToolRegistry
from toolcell.agents import Agent, OpenAIProvider

registry = ToolRegistry()


@registry.tool(read_only=True)
async def population(country: str) -> int:
    """Return how many people live in a country."""
    return {"Norway": 5_600_000, "Italy": 58_900_000}[country]


async def main() -> None:
    if "OPENAI_API_KEY" not in os.environ:
        print("set OPENAI_API_KEY to run this example")
        return
    async with OpenAIProvider() as provider, Runtime(registry) as runtime:
        agent = Agent(provider, model="gpt-5", tools=registry, code_execution=runtime)
        run = await agent.run("How many more people live in Italy than in Norway? Write code.")
    print(run.content)
    print([(step.name, step.output) for step in run.steps])


anyio.run(main)
