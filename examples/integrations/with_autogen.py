"""AutoGen: an agent writes code that calls a function and a tool of a registry. The model is AutoGen's scripted one."""

import asyncio

from autogen_agentchat.agents import ApprovalRequest, ApprovalResponse, CodeExecutorAgent
from autogen_ext.models.replay import ReplayChatCompletionClient

from toolcell import ToolRegistry
from toolcell.integrations.autogen import ToolcellSessionCodeExecutor

registry = ToolRegistry()


@registry.tool
def population(city: str) -> int:
    """Return the number of people who live in a city."""
    return {"Bern": 134_000, "Basel": 173_000}[city]


async def area(city: str) -> float:
    """Return the area of a city in square kilometres."""
    return {"Bern": 51.6, "Basel": 23.9}[city]


def approve(request: ApprovalRequest) -> ApprovalResponse:
    return ApprovalResponse(approved=True, reason="it runs in a sandbox")


scripted = ReplayChatCompletionClient(
    [
        "```python\nprint(round(tools.population('Bern') / tools.area('Bern')), 'people per km²')\n```",
        "Bern has 2597 people per km².",
    ]
)


async def main() -> None:
    async with ToolcellSessionCodeExecutor(registry=registry, tools=[area]) as executor:
        agent = CodeExecutorAgent(
            "coder", executor, model_client=scripted, system_message=executor.instructions, approval_func=approve
        )
        async for event in agent.run_stream(task="How densely populated is Bern?"):
            print(f"{type(event).__name__}: {event.to_text() if hasattr(event, 'to_text') else event.stop_reason}")


asyncio.run(main())
