"""Google ADK: an agent writes code that calls a tool of ADK and one of a registry. The model is a scripted one."""

import asyncio
from collections.abc import AsyncGenerator

from google.adk.agents import LlmAgent
from google.adk.models import BaseLlm, LlmRequest, LlmResponse
from google.adk.runners import InMemoryRunner
from google.genai import types

from toolcell import ToolRegistry
from toolcell.integrations.google_adk import ToolcellCodeExecutor

registry = ToolRegistry()


@registry.tool
def population(city: str) -> int:
    """Return the number of people who live in a city."""
    return {"Bern": 134_000, "Basel": 173_000}[city]


async def area(city: str) -> float:
    """Return the area of a city in square kilometres."""
    return {"Bern": 51.6, "Basel": 23.9}[city]


class Scripted(BaseLlm):
    texts: list[str]

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        yield LlmResponse(content=types.Content(role="model", parts=[types.Part(text=self.texts.pop(0))]))


CODE = "print(round(tools.population('Bern') / tools.area('Bern')), 'people per km²')"


async def main() -> None:
    model = Scripted(model="scripted", texts=[f"```python\n{CODE}\n```", "That is Bern's density."])
    with ToolcellCodeExecutor(registry=registry, tools=[area], timeout_seconds=30) as executor:
        # A function, because ADK looks for {placeholders} in a text.
        agent = LlmAgent(
            name="coder", model=model, code_executor=executor, instruction=lambda context: executor.instructions
        )
        runner = InMemoryRunner(agent, app_name="cities")
        session = await runner.session_service.create_session(app_name="cities", user_id="ada")
        question = types.Content(role="user", parts=[types.Part(text="How densely populated is Bern?")])
        async for event in runner.run_async(user_id="ada", session_id=session.id, new_message=question):
            for part in event.content.parts:
                print(part.text or part.executable_code or part.code_execution_result.output)


asyncio.run(main())
