"""The tool spec for LlamaIndex, in LlamaIndex's own agents, with LlamaIndex's mock model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from integrations.conftest import needs, run_example
from integrations.refusing_tools import check_refusals, refusing_registry
from toolcell import Limits, Runtime, ToolRegistry
from toolcell.errors import UsageError

needs("llama_index.core")

from llama_index.core.agent.workflow import CodeActAgent, FunctionAgent, ToolCallResult  # noqa: E402
from llama_index.core.base.llms.types import ChatMessage, ToolCallBlock  # noqa: E402
from llama_index.core.llms.mock import MockFunctionCallingLLM  # noqa: E402
from llama_index.core.tools import FunctionTool  # noqa: E402
from llama_index.core.workflow import Context  # noqa: E402
from workflows.errors import WorkflowCancelledByUser  # noqa: E402

from toolcell.integrations.llama_index import CodeInterpreterError, CodeInterpreterToolSpec  # noqa: E402

pytestmark = [pytest.mark.framework, pytest.mark.isolation, pytest.mark.anyio]


def weather(city: str, days: int = 1) -> dict[str, Any]:
    """Return the weather of a city."""
    return {"city": city, "days": days, "temp": 20}


async def count(ctx: Any, word: str) -> int:
    """Count the words that were asked about."""
    words = [*await ctx.store.get("words", default=[]), word]
    await ctx.store.set("words", words)
    return len(words)


count.__annotations__["ctx"] = Context


def broken() -> str:
    """Raise something unexpected."""
    raise KeyError("secret place")


def tool(function: Callable[..., Any]) -> FunctionTool:
    if asyncio.iscoroutinefunction(function):
        return FunctionTool.from_defaults(async_fn=function)
    return FunctionTool.from_defaults(function)


def calling(*sources: str) -> MockFunctionCallingLLM:
    """A model that has these scripts run, one a turn, and then is done."""
    left = [*sources]

    def answer(messages: Any, **options: Any) -> ChatMessage:
        if not left:
            return ChatMessage(role="assistant", content="done")
        call = ToolCallBlock(
            tool_call_id=f"c{len(left)}", tool_name="code_interpreter", tool_kwargs={"code": left.pop(0)}
        )
        return ChatMessage(role="assistant", blocks=[call])

    return MockFunctionCallingLLM(response_generator=answer)


def writing(*sources: str) -> MockFunctionCallingLLM:
    """A model that writes these codes in its answers, one a turn, and then is done."""
    left = [f"<execute>\n{each}\n</execute>" for each in sources]

    def answer(messages: Any, **options: Any) -> ChatMessage:
        return ChatMessage(role="assistant", content=left.pop(0) if left else "done")

    return MockFunctionCallingLLM(response_generator=answer)


async def run(agent: Any) -> tuple[str, list[Any]]:
    """Return the agent's answer, and what each call of a tool gave."""
    handler = agent.run("Do it.")
    outputs = [event.tool_output async for event in handler.stream_events() if isinstance(event, ToolCallResult)]
    return str(await handler), outputs


def agent_of(spec: CodeInterpreterToolSpec, *sources: str) -> FunctionAgent:
    return FunctionAgent(tools=spec.to_tool_list(), llm=calling(*sources), streaming=False)


async def test_the_agents_loop_runs_code_that_calls_two_tools() -> None:
    registry, seen = ToolRegistry(), list[str]()
    registry.before_call(lambda call: seen.append(call.name))

    @registry.tool
    def double(n: int) -> int:
        """Double a whole number."""
        return 2 * n

    async with Runtime(registry) as runtime:
        spec = CodeInterpreterToolSpec(runtime, tools=[tool(weather)])
        source = "w = call_tool('weather', city='Oslo', days='2')\nset_result([w, call_tool('double', n=w['temp'])])"
        said, (output,) = await run(agent_of(spec, source))
    assert said == "done" and not output.is_error
    assert output.content == '[{"city": "Oslo", "days": 2, "temp": 20}, 40]'
    assert seen == ["weather", "double"]


async def test_pictures_are_shown_to_the_model() -> None:
    async with Runtime() as runtime:
        spec = CodeInterpreterToolSpec(runtime)
        _, (output,) = await run(agent_of(spec, "{'chart': b'\\x89PNG\\r\\n\\x1a\\n'}"))
    text, image = output.blocks
    assert text.text == '{"chart": "(image/png, 8 bytes)"}'
    assert image.image_mimetype == "image/png"


async def test_a_tool_gets_the_context_of_the_agents_workflow() -> None:
    async with Runtime() as runtime:
        spec = CodeInterpreterToolSpec(runtime, tools=[tool(count)])
        _, (output,) = await run(agent_of(spec, "[tools.count(word='a'), tools.count(word='b')]"))
        assert output.content == "[1, 2]"
        with pytest.raises(Exception, match="needs the context of a workflow"):
            await spec.code_interpreter("tools.count(word='a')")


async def test_what_the_model_is_told_names_the_tools_and_takes_code() -> None:
    (made,) = CodeInterpreterToolSpec(Runtime(), tools=[tool(weather)]).to_tool_list()
    assert made.metadata.name == "code_interpreter" and "def weather(" in made.metadata.description
    assert made.metadata.get_parameters_dict()["required"] == ["code"]


async def test_with_a_session_names_stay() -> None:
    async with Runtime() as runtime, runtime.session() as session:
        _, outputs = await run(agent_of(CodeInterpreterToolSpec(session), "x = 40", "x + 2"))
    assert outputs[1].content == "42"


async def test_a_code_act_agent_calls_tools_as_functions_and_keeps_names() -> None:
    given = [tool(weather), tool(broken)]
    codes = (
        "w = weather('Oslo', days=2)",
        "print(w['temp'] + weather('Bergen')['days'])",
        "broken()",
        "weather('a', 1, 2)",
    )
    async with Runtime() as runtime, runtime.session() as session:
        spec = CodeInterpreterToolSpec(session, tools=given)
        agent = CodeActAgent(code_execute_fn=spec.execute, tools=list(given), llm=writing(*codes), streaming=False)
        said, outputs = await run(agent)
    assert said == "done"
    assert outputs[1].content == "21\n"
    assert outputs[2].is_error and "Tool 'broken' failed" in outputs[2].content
    assert outputs[3].is_error and "takes 2 arguments, and 3 were given" in outputs[3].content


async def test_a_code_act_agent_needs_a_session() -> None:
    async with Runtime() as runtime:
        with pytest.raises(UsageError, match=r"CodeInterpreterToolSpec\(session\)"):
            await CodeInterpreterToolSpec(runtime).execute("1")


async def test_functions_of_tools_are_there_again_after_the_sandbox_was_lost() -> None:
    async with Runtime() as runtime, runtime.session(restore="empty") as session:
        spec = CodeInterpreterToolSpec(session, tools=[tool(weather)])
        assert await spec.execute("print(weather('Oslo')['temp'])") == "20\n"
        with pytest.raises(CodeInterpreterError):
            await spec.execute("import os\nos._exit(3)")
        assert await spec.execute("print(weather('Oslo')['temp'])") == "20\n"


FAILURES: list[tuple[str, str]] = [
    ("print('so far')\n1 / 0", "ZeroDivisionError"),
    ("while True: pass", "timed out after 3 s"),
    ("   ", "there is no code to run"),
    ("call_tool('denied')", "Tool 'denied' failed"),
    ("call_tool('careful')", "approv"),
    ("call_tool('broken')", "Tool 'broken' failed"),
    ("call_tool('weather')", "city"),
    ("call_tool('aborts')", "no further"),
]


@pytest.mark.parametrize(("source", "said"), FAILURES, ids=[source[:24] for source, _ in FAILURES])
async def test_a_failure_is_an_output_with_is_error_and_the_agent_goes_on(source: str, said: str) -> None:
    async with Runtime(refusing_registry(), limits=Limits(wall_s=3)) as runtime:
        spec = CodeInterpreterToolSpec(runtime, tools=[tool(weather), tool(broken)])
        answer, (output,) = await run(agent_of(spec, source))
    assert output.is_error and said in output.content, output
    assert "secret place" not in output.content
    assert answer == "done"


async def test_cancelling_the_agent_ends_the_script_and_leaves_nothing() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def wait() -> str:
        """Wait until somebody cancels it."""
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    before = {each.pid for each in psutil.Process().children(recursive=True)}
    async with Runtime() as runtime:
        spec = CodeInterpreterToolSpec(runtime, tools=[tool(wait)])
        handler = agent_of(spec, "call_tool('wait')").run("Do it.")
        await asyncio.wait_for(started.wait(), 60)
        await handler.cancel_run()
        await asyncio.wait_for(ended.wait(), 60)
        with pytest.raises((asyncio.CancelledError, WorkflowCancelledByUser)):
            await handler
        assert (await runtime.execute_code("6 * 7")).value == 42
    assert {each.pid for each in psutil.Process().children(recursive=True)} <= before


def test_wrong_arguments_are_refused() -> None:
    check_refusals(CodeInterpreterToolSpec, tool(weather))


def test_the_example_prints_what_it_says() -> None:
    assert run_example("with_llama_index.py") == '"Oslo is 4 degrees warmer than Bergen."\n'
