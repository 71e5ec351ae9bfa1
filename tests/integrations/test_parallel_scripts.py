"""Two scripts of one response of a model, in each framework's own loop: both run, and each has its own answer.

A framework whose models write one program in a response has two programs at once instead. `.ci/frameworks` runs
them; elsewhere those of the frameworks that are installed run.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import toolcell.integrations
from integrations.cities import area, registry_of_cities
from integrations.conftest import INSTALLED
from private_names import missing_private_names
from toolcell import Limits, Runtime, SyncRuntime

pytestmark = [pytest.mark.framework, pytest.mark.isolation, pytest.mark.anyio]

CITIES = ("Bern", "Basel")
SCRIPTS = [f"here = {city!r}\n[here, tools.population(here), tools.area(here)]" for city in CITIES]
ANSWERS = [["Bern", 134_000, 51.6], ["Basel", 173_000, 23.9]]
"""`population` is a tool of the program's registry, `area` one of the framework."""

PRINTED = [f"{script.replace('[here', 'print([here')})" for script in SCRIPTS]
"""For frameworks whose models read what was printed."""

OPTIONS: dict[str, Any] = {"limits": Limits(wall_s=60)}


def as_data(text: Any) -> Any:
    """Read the list in what a model is told."""
    said = str(text)
    return json.loads(said[said.index("[") : said.rindex("]") + 1].replace("'", '"'))


async def langchain() -> list[Any]:
    from langchain.agents import create_agent
    from langchain.tools import tool
    from langchain_core.messages import AIMessage

    from integrations.langchain_agents import ScriptedModel, answers
    from toolcell.integrations.langchain import code_execution_tool

    calls = [{"name": "execute_code", "args": {"code": each}, "id": f"c{n}"} for n, each in enumerate(SCRIPTS)]
    model = ScriptedModel(messages=iter([AIMessage("", tool_calls=calls), AIMessage("done")]), seen=[])
    async with Runtime(registry_of_cities([]), **OPTIONS) as runtime:
        agent = create_agent(model, tools=[code_execution_tool(runtime, tools=[tool(area)])])
        return [as_data(each.content) for each in answers(await agent.ainvoke({"messages": [("user", "Go.")]}))]


async def deepagents() -> list[Any]:
    from langchain.agents import create_agent
    from langchain.tools import tool
    from langchain_core.messages import AIMessage

    from integrations.langchain_agents import ScriptedModel, answers
    from toolcell.integrations.deepagents import CodeInterpreterMiddleware

    async with Runtime(registry_of_cities([]), **OPTIONS) as runtime:
        middleware = CodeInterpreterMiddleware(runtime, ptc=["area"])
        [offered] = middleware.tools
        calls = [{"name": offered.name, "args": {"code": each}, "id": f"c{n}"} for n, each in enumerate(SCRIPTS)]
        model = ScriptedModel(messages=iter([AIMessage("", tool_calls=calls), AIMessage("done")]), seen=[])
        agent = create_agent(model, tools=[tool(area)], middleware=[middleware])
        return [as_data(each.content) for each in answers(await agent.ainvoke({"messages": [("user", "Go.")]}))]


async def openai_agents() -> list[Any]:
    from agents.testing import ScriptedModel, assistant_message, function_call

    from agents import Agent, RunConfig, Runner, function_tool
    from toolcell.integrations.openai_agents import code_execution_tool

    calls = [function_call("execute_code", {"code": each}, call_id=f"c{n}") for n, each in enumerate(SCRIPTS)]
    async with Runtime(registry_of_cities([]), **OPTIONS) as runtime:
        tools: list[Any] = [code_execution_tool(runtime, tools=[function_tool(area)])]
        agent = Agent(name="coder", model=ScriptedModel([calls, [assistant_message("done")]]), tools=tools)
        result = await Runner.run(agent, "Go.", run_config=RunConfig(tracing_disabled=True))
        return [as_data(each.output) for each in result.new_items if each.type == "tool_call_output_item"]


async def llama_index() -> list[Any]:
    from llama_index.core.agent.workflow import FunctionAgent, ToolCallResult
    from llama_index.core.base.llms.types import ChatMessage, ToolCallBlock
    from llama_index.core.llms.mock import MockFunctionCallingLLM
    from llama_index.core.tools import FunctionTool

    from toolcell.integrations.llama_index import CodeInterpreterToolSpec

    calls = [
        ToolCallBlock(tool_call_id=f"c{n}", tool_name="code_interpreter", tool_kwargs={"code": each})
        for n, each in enumerate(SCRIPTS)
    ]
    replies = [ChatMessage(role="assistant", blocks=calls), ChatMessage(role="assistant", content="done")]
    async with Runtime(registry_of_cities([]), **OPTIONS) as runtime:
        spec = CodeInterpreterToolSpec(runtime, tools=[FunctionTool.from_defaults(area)])
        model = MockFunctionCallingLLM(response_generator=lambda messages, **options: replies.pop(0))
        handler = FunctionAgent(tools=spec.to_tool_list(), llm=model, streaming=False).run("Go.")
        events = [event async for event in handler.stream_events() if isinstance(event, ToolCallResult)]
        await handler
        return [as_data(each.tool_output.content) for each in sorted(events, key=lambda each: str(each.tool_id))]


async def pydantic_ai() -> list[Any]:
    from pydantic_ai import Agent
    from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
    from pydantic_ai.models.function import FunctionModel

    from toolcell.integrations.pydantic_ai import CodeMode

    def answer(messages: Any, info: Any) -> ModelResponse:
        if len(messages) == 1:
            return ModelResponse([ToolCallPart("run_code", {"code": each}) for each in SCRIPTS])
        seen.extend(each.content for each in messages[-1].parts)
        return ModelResponse([TextPart("done")])

    seen = list[Any]()
    async with Runtime(registry_of_cities([]), **OPTIONS) as runtime:
        agent = Agent(FunctionModel(answer), tools=[area], capabilities=[CodeMode(runtime)])
        await agent.run("Go.")
    return seen


async def fastmcp() -> list[Any]:
    from fastmcp import Client, FastMCP
    from fastmcp.experimental.transforms.code_mode import CodeMode

    from toolcell.integrations.fastmcp import ToolcellSandboxProvider

    scripts = [
        f"here = {city!r}\nkm2 = await call_tool('area', {{'city': here}})\nreturn [here, km2['result']]"
        for city in CITIES
    ]
    answers: dict[str, Any] = {}
    mcp = FastMCP("cities", transforms=[CodeMode(sandbox_provider=ToolcellSandboxProvider(**OPTIONS))])
    mcp.tool(area)

    async def ask(script: str) -> None:
        [content] = (await client.call_tool("execute", {"code": script})).content
        found = json.loads(content.text)
        answers[script] = [found[0], dict(zip(CITIES, (134_000, 173_000), strict=True))[found[0]], found[1]]

    async with Client(mcp) as client, anyio.create_task_group() as tasks:
        for script in scripts:
            tasks.start_soon(ask, script)
    return [answers[each] for each in scripts]


async def smolagents() -> list[Any]:
    from smolagents import tool

    from toolcell.integrations.smolagents import ToolcellPythonExecutor

    @tool
    def km2(city: str) -> float:
        """Return the area of a city in square kilometres.

        Args:
            city: Its name.
        """
        return area(city)

    def run(executor: Any, script: str) -> Any:
        return executor(script.replace("tools.area", "km2").replace("[here", "result = [here") + "\nresult").output

    with SyncRuntime(registry_of_cities([]), **OPTIONS) as runtime, ToolcellPythonExecutor(runtime=runtime) as executor:
        executor.send_tools({"km2": km2})
        return await at_once(*(lambda script=each: run(executor, script) for each in SCRIPTS))


async def autogen() -> list[Any]:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_core import FunctionCall
    from autogen_core.models import CreateResult, ModelFamily, ModelInfo, RequestUsage
    from autogen_ext.models.replay import ReplayChatCompletionClient
    from autogen_ext.tools.code_execution import PythonCodeExecutionTool

    from toolcell.integrations.autogen import ToolcellSessionCodeExecutor

    calls = [FunctionCall(f"c{n}", json.dumps({"code": each}), "CodeExecutor") for n, each in enumerate(PRINTED)]
    usage = RequestUsage(prompt_tokens=0, completion_tokens=0)
    asked = CreateResult(finish_reason="function_calls", content=calls, usage=usage, cached=False)
    can = {"vision": False, "function_calling": True, "json_output": False, "structured_output": False}
    model = ReplayChatCompletionClient([asked], model_info=ModelInfo(family=ModelFamily.UNKNOWN, **can))
    async with ToolcellSessionCodeExecutor(registry=registry_of_cities([]), tools=[area], **OPTIONS) as executor:
        result = await AssistantAgent("coder", model, tools=[PythonCodeExecutionTool(executor)]).run(task="Go.")
    [told] = [each.content for each in result.messages if type(each).__name__ == "ToolCallExecutionEvent"]
    return [as_data(each.content) for each in told]


async def ag2() -> list[Any]:
    from ag2 import Agent
    from ag2.events import ToolCallEvent, ToolResultEvent
    from ag2.testing import TestConfig
    from ag2.tools import SandboxCodeTool

    from toolcell.integrations.ag2 import ToolcellEnvironment

    calls = [ToolCallEvent("run_code", arguments=json.dumps({"code": each, "language": "python"})) for each in PRINTED]
    async with ToolcellEnvironment(registry=registry_of_cities([]), tools=[area], **OPTIONS) as environment:
        agent = Agent("coder", config=TestConfig(calls, "done"), tools=[SandboxCodeTool(environment)])
        events = await (await agent.ask("Go.")).context.stream.history.get_events()
    found = {each.parent_id: each.result.parts[0].content for each in events if isinstance(each, ToolResultEvent)}
    return [as_data(found[each.id]) for each in calls]


async def dspy() -> list[Any]:
    from toolcell.integrations.dspy import interpreter_factory

    def run(make: Any, script: str) -> Any:
        with make() as interpreter:
            interpreter.tools["area"] = area
            return as_data(interpreter.execute(script.replace("tools.", "")))

    with SyncRuntime(registry_of_cities([]), **OPTIONS) as runtime:
        make = interpreter_factory(runtime)
        return await at_once(*(lambda script=each: run(make, script) for each in PRINTED))


async def google_adk() -> list[Any]:
    from integrations.test_google_adk import answers, block, executor, told

    with executor() as opened:
        runs = await asyncio.gather(*(answers(opened, block(each), "done") for each in PRINTED))
    return [as_data(each.output) for events, _ in runs for each in told(events)]


async def inspect_ai() -> list[Any]:
    from inspect_ai import Task, eval_async
    from inspect_ai.dataset import Sample
    from inspect_ai.model import ChatMessageAssistant, ChatMessageTool, ModelOutput, ModelUsage, get_model
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import ToolCall

    from integrations.test_inspect_ai import area as square_kilometres
    from toolcell.integrations.inspect_ai import toolcell_python

    calls = [ToolCall(id=f"c{n}", function="python", arguments={"code": each}) for n, each in enumerate(PRINTED)]
    asked = ModelOutput.from_message(ChatMessageAssistant(content="", tool_calls=calls))
    outputs = [asked, ModelOutput.from_content("mockllm/model", "done")]
    for each in outputs:
        each.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)  # else it would be counted
    model = get_model("mockllm/model", custom_outputs=outputs)
    options = {"registry": registry_of_cities([]), **OPTIONS}
    python = toolcell_python(tools=[square_kilometres()], options=options)
    task = Task(dataset=[Sample(input="Go.")], solver=[use_tools(python), generate()])
    async with anyio.TemporaryDirectory() as folder:
        [log] = await eval_async(task, model=model, log_dir=folder)
        assert log.samples is not None, log.error
        return [as_data(each.text) for each in log.samples[0].messages if isinstance(each, ChatMessageTool)]


async def at_once(*functions: Callable[[], Any]) -> list[Any]:
    """Call functions in threads of their own."""
    return [*await asyncio.gather(*(anyio.to_thread.run_sync(each) for each in functions))]


ADAPTERS: dict[str, tuple[str, Callable[[], Awaitable[list[Any]]]]] = {
    "ag2": ("ag2", ag2),
    "autogen": ("autogen_core", autogen),
    "deepagents": ("deepagents", deepagents),
    "dspy": ("dspy", dspy),
    "fastmcp": ("fastmcp", fastmcp),
    "google_adk": ("google.adk", google_adk),
    "inspect_ai": ("inspect_ai", inspect_ai),
    "langchain": ("langchain.agents", langchain),
    "llama_index": ("llama_index.core", llama_index),
    "openai_agents": ("agents.testing", openai_agents),
    "pydantic_ai": ("pydantic_ai", pydantic_ai),
    "smolagents": ("smolagents", smolagents),
}
"""By adapter: a module of its framework, and what runs both scripts."""
WITHOUT_RESPONSES = {"base", "inspect_program", "inspect_sandbox", "ipython", "ray_data"}
"""Modules in which no model's response asks for scripts."""


def test_the_installed_frameworks_have_the_private_names_that_are_used() -> None:
    assert missing_private_names() == []


def test_every_adapter_has_a_row() -> None:
    folder = Path(toolcell.integrations.__file__).parent
    assert {each.stem for each in folder.glob("[a-z]*.py")} - WITHOUT_RESPONSES == {*ADAPTERS}


def is_here(adapter: str) -> bool:
    """Whether the framework is installed. What `.ci/frameworks` has installed has to be."""
    try:
        return adapter.replace("_", "-") in INSTALLED or find_spec(ADAPTERS[adapter][0]) is not None
    except ModuleNotFoundError:
        return False


if rows := [each for each in ADAPTERS if is_here(each)]:

    @pytest.mark.filterwarnings("ignore:No approval function", "ignore:Unclosed <MemoryObject")
    @pytest.mark.parametrize("adapter", rows)
    async def test_two_scripts_of_one_response_both_run_and_have_their_own_answers(adapter: str) -> None:
        assert await ADAPTERS[adapter][1]() == ANSWERS
