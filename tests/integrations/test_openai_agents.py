"""The tool for the OpenAI Agents SDK, in the SDK's own loop, with the SDK's scripted model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest

from integrations.conftest import needs, run_example
from integrations.refusing_tools import check_refusals, refusing_registry
from toolcell import Limits, Runtime, ToolRegistry

needs("agents.tool_context")

from agents.exceptions import UserError  # noqa: E402
from agents.testing import ScriptedModel, assistant_message, function_call  # noqa: E402
from agents.tool_context import ToolContext  # noqa: E402

from agents import (  # noqa: E402
    Agent,
    RunConfig,
    RunContextWrapper,
    Runner,
    RunState,
    ToolGuardrailFunctionOutput,
    ToolInputGuardrailData,
    ToolOutputGuardrailData,
    function_tool,
    tool_input_guardrail,
    tool_output_guardrail,
)
from toolcell.integrations.openai_agents import CodeExecutionError, code_execution_tool  # noqa: E402

pytestmark = [pytest.mark.framework, pytest.mark.isolation, pytest.mark.anyio]

QUIET = RunConfig(tracing_disabled=True)


World = dict[str, Any]
"""What the tools see and do."""


def new_world() -> World:
    return {"user": "ann", "sent": []}


@function_tool
def weather(context: RunContextWrapper[World], city: str, days: int = 1) -> dict[str, Any]:
    """Return the weather of a city."""
    return {"city": city, "days": days, "for": context.context["user"], "temp": 20}


@function_tool(needs_approval=True)
async def send(context: ToolContext[World], to: str, text: str) -> str:
    """Send a message to somebody."""
    context.context["sent"].append([to, text])
    return "sent"


def scripts(*sources: str) -> ScriptedModel:
    """A model that has these scripts run, one a turn, and then is done."""
    calls = [[function_call("execute_code", {"code": each}, call_id=f"c{n}")] for n, each in enumerate(sources)]
    return ScriptedModel([*calls, [assistant_message("done")]])


def agent_of(tool: Any, *sources: str) -> Agent[World]:
    return Agent(name="agent", model=scripts(*sources), tools=[tool])


def outputs(result: Any) -> list[Any]:
    return [item.output for item in result.new_items if item.type == "tool_call_output_item"]


async def run(agent: Agent[World], what: Any = "Do it.", world: World | None = None) -> Any:
    return await Runner.run(agent, what, context=world or new_world(), run_config=QUIET)


async def test_the_agents_loop_runs_code_that_calls_two_tools() -> None:
    registry, seen = ToolRegistry(), list[str]()
    registry.before_call(lambda call: seen.append(call.name))

    @registry.tool
    def double(n: int) -> int:
        """Double a whole number."""
        return 2 * n

    async with Runtime(registry) as runtime:
        agent = agent_of(
            code_execution_tool(runtime, tools=[weather]),
            "w = call_tool('weather', city='Oslo', days='2')\nset_result([w, call_tool('double', n=w['temp'])])",
        )
        result = await run(agent)
    assert result.final_output == "done"
    assert outputs(result) == ['[{"city": "Oslo", "days": 2, "for": "ann", "temp": 20}, 40]']
    assert seen == ["weather", "double"]
    assert len(registry) == 1


async def test_scripts_of_one_response_run_beside_each_other_also_when_they_wait_for_approval() -> None:
    meet = asyncio.Barrier(2)

    @function_tool
    async def wait_for_the_other() -> str:
        """Wait until another script calls this."""
        await asyncio.wait_for(meet.wait(), 60)
        return "met"

    source = "met = call_tool('wait_for_the_other')\n[met, call_tool('send', to={!r}, text=met)]"
    calls = [function_call("execute_code", {"code": source.format(each)}, call_id=each) for each in ("ann", "bob")]
    world = new_world()
    async with Runtime() as runtime:
        tool = code_execution_tool(runtime, tools=[wait_for_the_other, send])
        agent = Agent(name="agent", model=ScriptedModel([calls, [assistant_message("done")]]), tools=[tool])
        result = await run(agent, world=world)
        state = result.to_state()
        assert len(result.interruptions) == 2
        for each in result.interruptions:
            state.approve(each)
        result = await Runner.run(agent, state, run_config=QUIET)
    assert sorted(world["sent"]) == [["ann", "met"], ["bob", "met"]]
    assert outputs(result) == ['["met", "sent"]'] * 2


async def test_pictures_are_shown_to_the_model() -> None:
    async with Runtime() as runtime:
        agent = agent_of(code_execution_tool(runtime), "{'chart': b'\\x89PNG\\r\\n\\x1a\\n'}")
        result = await run(agent)
    [[text, image]] = outputs(result)
    assert text.text == '{"chart": "(image/png, 8 bytes)"}'
    assert image.image_url == "data:image/png;base64,iVBORw0KGgo="


async def test_what_the_model_is_told_names_the_tools_and_takes_code() -> None:
    runtime = Runtime(ToolRegistry())
    tool = code_execution_tool(runtime, tools=[weather, send])
    assert tool.name == "execute_code" and tool.params_json_schema["required"] == ["code"]
    assert "def weather(" in tool.description and "def send(" in tool.description
    named = code_execution_tool(runtime, name_override="python", description_override="Run Python here.")
    assert (named.name, named.description) == ("python", "Run Python here.")


TWO_MESSAGES = """
w = call_tool('weather', city='Oslo')
first = call_tool('send', to='ann', text=str(w['temp']))
try:
    second = call_tool('send', to='bob', text='x')
except ToolError as exc:
    second = str(exc)
[first, second]
"""


@pytest.mark.parametrize("is_kept", [False, True], ids=["in memory", "as json"])
async def test_calls_that_need_approval_interrupt_the_agents_run_and_nothing_is_done_twice(is_kept: bool) -> None:
    registry, made, world = ToolRegistry(), list[str](), new_world()
    registry.before_call(lambda call: made.append(call.name))
    async with Runtime(registry) as runtime:
        agent = agent_of(code_execution_tool(runtime, tools=[weather, send]), TWO_MESSAGES)

        async def state_of(result: Any) -> Any:
            state = result.to_state()
            return await RunState.from_json(agent, state.to_json()) if is_kept else state

        result = await run(agent, world=world)
        assert [(each.name, each.arguments) for each in result.interruptions] == [
            ("send", '{"to": "ann", "text": "20"}')
        ]
        assert world["sent"] == []
        state = await state_of(result)
        state.approve(state.get_interruptions()[0])
        result = await run(agent, state, world)
        assert [each.arguments for each in result.interruptions] == ['{"to": "bob", "text": "x"}']
        state = await state_of(result)
        state.reject(state.get_interruptions()[0], rejection_message="not to bob")
        result = await run(agent, state, world)
    assert result.final_output == "done"
    assert outputs(result) == ["""["sent", "Tool 'send' failed: not to bob"]"""]
    assert world["sent"] == [["ann", "20"]]
    assert made.count("weather") == 1


async def test_calls_made_in_parallel_are_asked_about_together() -> None:
    world = new_world()
    source = "call_tools_parallel([('send', {'to': each, 'text': ''}) for each in 'abc'])"
    async with Runtime(ToolRegistry()) as runtime:
        agent = agent_of(code_execution_tool(runtime, tools=[send]), source)
        result = await run(agent, world=world)
        assert len(result.interruptions) == 3
        state = result.to_state()
        for each in state.get_interruptions():
            state.approve(each)
        result = await run(agent, state, world)
    assert sorted(to for to, _ in world["sent"]) == ["a", "b", "c"]
    assert outputs(result) == ['["sent", "sent", "sent"]']


async def test_the_tools_own_rule_decides_which_calls_need_approval() -> None:
    async def is_far(context: RunContextWrapper[World], args: dict[str, Any], call_id: str) -> bool:
        return bool(args["to"] != context.context["user"])

    @function_tool(needs_approval=is_far)
    def tell(to: str) -> str:
        """Tell somebody something."""
        return f"told {to}"

    async with Runtime(ToolRegistry()) as runtime:
        agent = agent_of(code_execution_tool(runtime, tools=[tell]), "[tools.tell(to='ann'), tools.tell(to='bob')]")
        result = await run(agent)
        assert [each.arguments for each in result.interruptions] == ['{"to": "bob"}']
        state = result.to_state()
        state.approve(state.get_interruptions()[0])
        assert outputs(await run(agent, state)) == ['["told ann", "told bob"]']


@pytest.mark.parametrize("on_approval", ["ask", "deny"])
async def test_without_interruptions_a_call_that_needs_approval_is_refused(on_approval: Any) -> None:
    world = new_world()
    async with Runtime(ToolRegistry()) as runtime:
        tool = code_execution_tool(runtime, tools=[send], on_approval=on_approval)
        result = await run(agent_of(tool, "call_tool('send', to='a', text='')"), world=world)
    assert not result.interruptions and world["sent"] == []
    assert "Tool 'send' failed" in outputs(result)[0] and "approv" in outputs(result)[0]


async def test_the_tool_itself_may_need_approval() -> None:
    async with Runtime(ToolRegistry()) as runtime:
        agent = agent_of(code_execution_tool(runtime, needs_approval=True), "1 + 1")
        result = await run(agent)
        assert [each.name for each in result.interruptions] == ["execute_code"]
        state = result.to_state()
        state.approve(state.get_interruptions()[0])
        assert outputs(await run(agent, state)) == ["2"]


async def test_with_a_session_names_stay_and_so_they_do_over_an_approval() -> None:
    world = new_world()
    async with Runtime(ToolRegistry()) as runtime, runtime.session() as session:
        agent = agent_of(
            code_execution_tool(session, tools=[send]),
            "x = 40",
            "y = call_tool('send', to='a', text=str(x))",
            "[x + 2, y]",
        )
        result = await run(agent, world=world)
        state = result.to_state()
        state.approve(state.get_interruptions()[0])
        result = await run(agent, state, world)
    assert outputs(result)[-1] == '[42, "sent"]'
    assert world["sent"] == [["a", "40"]]


@function_tool
def broken() -> str:
    """Raise something."""
    raise KeyError("secret place")


@function_tool(failure_error_function=lambda context, error: f"cannot: {type(error).__name__}")
def worded() -> str:
    """Raise something that the tool has words for."""
    raise KeyError("secret place")


@function_tool(is_enabled=lambda context, agent: context.context["user"] == "bob")
def of_bob() -> str:
    """Give what is for Bob only."""
    return "bob's"


FAILURES: list[tuple[str, str]] = [
    ("print('so far')\n1 / 0", "ZeroDivisionError"),
    ("while True: pass", "timed out after 3 s"),
    ("   ", "there is no code to run"),
    ("call_tool('denied')", "Tool 'denied' failed"),
    ("call_tool('broken')", "Tool 'broken' failed"),
    ("call_tool('worded')", "cannot: KeyError"),
    ("call_tool('of_bob')", "is not enabled"),
    ("call_tool('weather')", "city"),
    ("call_tool('nowhere')", "nowhere"),
    ("call_tool('aborts')", "no further"),
]


@pytest.mark.parametrize(("source", "said"), FAILURES, ids=[source[:24] for source, _ in FAILURES])
async def test_a_failure_is_the_tools_output_and_the_agent_goes_on(source: str, said: str) -> None:
    async with Runtime(refusing_registry(), limits=Limits(wall_s=3)) as runtime:
        tool = code_execution_tool(runtime, tools=[weather, broken, worded, of_bob])
        result = await run(agent_of(tool, source))
    assert said in outputs(result)[0], outputs(result)
    assert "secret place" not in outputs(result)[0]
    assert result.final_output == "done"


async def test_without_a_failure_function_a_failure_ends_the_agents_run() -> None:
    async with Runtime(ToolRegistry()) as runtime:
        tool = code_execution_tool(runtime, failure_error_function=None)
        with pytest.raises(UserError, match="ZeroDivisionError") as caught:
            await run(agent_of(tool, "1 / 0"))
    assert isinstance(caught.value.__cause__, CodeExecutionError)


async def test_a_runtime_that_is_not_open_is_the_programs_mistake() -> None:
    with pytest.raises(UserError, match="not open"):
        await run(agent_of(code_execution_tool(Runtime(ToolRegistry())), "1"))


async def test_guardrails_of_a_tool_hold_in_scripts() -> None:
    @tool_input_guardrail
    def no_paris(data: ToolInputGuardrailData) -> ToolGuardrailFunctionOutput:
        if "Paris" in data.context.tool_arguments:
            return ToolGuardrailFunctionOutput.reject_content("not in Paris")
        return ToolGuardrailFunctionOutput.allow()

    @tool_output_guardrail
    def no_snow(data: ToolOutputGuardrailData) -> ToolGuardrailFunctionOutput:
        if data.output == "snow":
            return ToolGuardrailFunctionOutput.reject_content("we say nothing of snow")
        if data.output == "hail":
            return ToolGuardrailFunctionOutput.raise_exception()
        return ToolGuardrailFunctionOutput.allow()

    asked: list[str] = []

    @function_tool(tool_input_guardrails=[no_paris], tool_output_guardrails=[no_snow])
    def sky(city: str) -> str:
        """Return what comes from the sky."""
        asked.append(city)
        return {"Oslo": "snow", "Bergen": "rain"}.get(city, "hail")

    source = """
found = []
for city in ['Paris', 'Oslo', 'Bergen', 'Graz']:
    try:
        found.append(tools.sky(city=city))
    except ToolError as exc:
        found.append(str(exc))
found
"""
    async with Runtime(ToolRegistry()) as runtime:
        result = await run(agent_of(code_execution_tool(runtime, tools=[sky]), source))
    said = outputs(result)[0]
    assert "not in Paris" in said and "we say nothing of snow" in said and '"rain"' in said
    assert "hail" not in said
    assert asked == ["Oslo", "Bergen", "Graz"]


async def test_cancelling_the_agent_ends_the_script_and_leaves_nothing(tmp_path: Path) -> None:
    started = asyncio.Event()

    @function_tool
    async def wait() -> str:
        """Wait until somebody cancels it."""
        started.set()
        await asyncio.Event().wait()
        return ""

    before = {each.pid for each in psutil.Process().children(recursive=True)}
    async with Runtime(ToolRegistry(), record=tmp_path / "runs.db") as runtime:
        running = asyncio.create_task(run(agent_of(code_execution_tool(runtime, tools=[wait]), "call_tool('wait')")))
        await asyncio.wait_for(started.wait(), 60)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (await runtime.execute_code("6 * 7")).value == 42
    assert {each.pid for each in psutil.Process().children(recursive=True)} <= before


async def test_the_audit_log_has_the_calls_of_the_sdks_tools(tmp_path: Path) -> None:
    async with Runtime(ToolRegistry(), record=tmp_path / "runs.db") as runtime:
        await run(agent_of(code_execution_tool(runtime, tools=[weather]), "call_tool('weather', city='Oslo')"))
    recorded = "".join(path.read_bytes().decode("utf-8", "replace") for path in tmp_path.rglob("*") if path.is_file())
    assert "weather" in recorded and "Oslo" in recorded


def test_wrong_arguments_are_refused() -> None:
    check_refusals(code_execution_tool, weather, on_approval="never")


def test_the_example_prints_what_it_says() -> None:
    assert run_example("with_openai_agents.py") == EXAMPLE


EXAMPLE = """\
approved: send_reminder {"customer": "Ann", "amount": 200.5}
Ann was reminded of 200.5.
"""
