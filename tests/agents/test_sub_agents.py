"""Agents as tools of other agents."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from rows import each_row
from toolcell import OpenAIProvider, Runtime, UsageError
from toolcell.agents import Agent, Network, ProviderError, RetryPolicy
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.calls.result import TokenUsage
from toolcell.calls.run_state import RunState
from toolcell.tools import Block, Budget, Call, File, RunContext, Status, ToolContext, ToolRegistry, ToolResult
from tools.toolkit import PATIENCE_S, Meeting, recorded

pytestmark = [pytest.mark.quick, pytest.mark.anyio]

ONCE = RetryPolicy(attempts=1)


def answering(*lines: Any, **options: Any) -> Agent:
    return Agent(ScriptedModel(lines), **options)


@pytest.mark.conforms("N1", "N2")
def test_an_agent_registers_like_any_tool_with_one_required_task() -> None:
    registry = ToolRegistry([answering("x").as_tool("aide", "Helps with everything there is.")])

    [definition] = registry.definitions()
    assert (definition.name, definition.description) == ("aide", "Helps with everything there is.")
    assert definition.parameters["required"] == ["task"]
    assert list(definition.parameters["properties"]) == ["task"]


@pytest.mark.conforms("V-15")
def test_a_sub_agent_is_added_as_a_tool_or_by_name_description_and_agent() -> None:
    as_tool, by_name = answering("x"), answering("x")

    as_tool.add_subagent(answering("42").as_tool("aide", "Helps with everything there is."))
    by_name.add_subagent("aide", "Helps with everything there is.", answering("42"))

    assert as_tool.definitions() == by_name.definitions()


@pytest.mark.conforms("N3")
async def test_its_answer_is_the_result_and_a_missing_task_is_named() -> None:
    registry = ToolRegistry([answering("42").as_tool("aide", "Helps with everything there is.")])

    assert (await registry.execute("aide", {"task": "go"})).text == "42"
    assert '"task"' in (await registry.execute("aide", {})).text


@pytest.mark.conforms("N4")
async def test_one_agent_serves_several_calls_at_once_without_remembering_any() -> None:
    meeting = Meeting(3)

    async def meet() -> str:
        """Meet the other conversations."""
        await meeting.join()
        return "met"

    def line(request: Any) -> Any:
        tasks = [message["content"] for message in request.messages if message["role"] == "user"]
        assert len(tasks) == 1
        return calls(("meet", {})) if request.messages[-1]["role"] == "user" else f"did {tasks[0]}"

    aide = Agent(ScriptedModel([line], repeat=True), tools=[meet], system_prompt="You help.")
    registry = ToolRegistry([aide.as_tool("aide", "Helps with everything there is.")])

    results = await registry.execute_batch([("aide", {"task": str(number)}) for number in range(3)])

    assert [result.text for result in results] == ["did 0", "did 1", "did 2"]
    assert aide.messages == []


@pytest.mark.conforms("N5")
@each_row("why", ["provider", "cap", "budget"])
async def test_an_agent_without_an_answer_is_an_error_result(why: str) -> None:
    async def look() -> str:
        """Look at something again."""
        return "seen"

    inner = Agent(
        ScriptedModel([ConnectionError("no network")] if why == "provider" else [calls(("look", {}))], repeat=True),
        tools=[look],
        retry=ONCE,
        max_iterations=2,
    )
    registry = ToolRegistry([inner.as_tool("aide", "Helps with everything there is.")])
    run = RunContext(state=RunState(budget=Budget(tokens=0))) if why == "budget" else RunContext()

    result = await registry.dispatch("aide", {"task": "go"}, context=run)

    assert result.is_error
    assert result.message.startswith("Sub-agent failed: ")
    assert {"provider": "LLM call failed", "cap": "Max steps 2 exceeded", "budget": "token budget of 0"}[why] in (
        result.message
    )


@pytest.mark.conforms("N6")
async def test_a_networks_members_are_sorted_tools_whose_results_and_events_reach_the_caller() -> None:
    async def whose(ctx: ToolContext) -> ToolResult:
        """Return the user of this run."""
        return ToolResult.ok(f"{ctx.user_id} {len(ctx.run.attachments)}", files=(File("a.txt", b""),))

    usage = {"input_tokens": 10, "output_tokens": 1}
    worker = Agent(
        ScriptedModel([{**calls_dict("whose"), "usage": usage}, {"content": "done", "usage": usage}]),
        tools=[whose],
        name="worker",
    )
    idle = answering("nothing to do")
    model = ScriptedModel([calls(("agent_worker", {"task": "go"}), ("agent_wroker", {"task": "go"})), "finished"])
    network = Network(model, {"worker": ("Works on things all day.", worker), "idle": ("Does nothing all day.", idle)})
    log = recorded(network.events)
    run = RunContext(user_id="ada", attachments=(File("given.txt", b""),), events=network.events)

    result = await network.run("go", context=run)

    assert model.requests[0].tool_names == ["agent_idle", "agent_worker"]
    answers = [message["content"] for message in result.messages if message["role"] == "tool"]
    assert answers[0] == "done"
    assert 'unknown agent "wroker"' in answers[1]
    assert result.usage.total == 22
    assert [file.name for file in result.files] == ["a.txt"]
    assert result.steps[0].usage == TokenUsage(20, 2)
    told = [(event.type, event.data["agent"]) for event in log if event.type.startswith("agent_")]
    assert told == [("agent_start", ""), ("agent_start", "worker"), ("agent_end", "worker"), ("agent_end", "")]
    whose_end = [event for event in log if event.tool == "whose" and event.type.endswith("_end")]
    assert whose_end[0].result is not None
    assert whose_end[0].result.text == "ada 1"


def calls_dict(name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": "{}"}
    return {"content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


@pytest.mark.conforms("N7")
async def test_an_empty_final_answer_is_replaced_by_the_last_members() -> None:
    model = ScriptedModel([calls(("agent_a", {"task": "x"})), calls(("agent_b", {"task": "y"})), ""])
    network = Network(model, {name: ("One of the members.", answering(f"{name} says so")) for name in ("a", "b")})

    assert (await network.run("go")).content == "b says so"


@pytest.mark.conforms("N-b1")
async def test_an_agent_cannot_call_itself_in_a_circle() -> None:
    a = Agent(ScriptedModel([calls(("b", {"task": "x"})), lambda request: request.messages[-1]["content"]]))
    b = Agent(ScriptedModel([calls(("a", {"task": "x"})), lambda request: request.messages[-1]["content"]]))
    a.add_subagent("b", "The other of the two agents.", b)
    b.add_subagent("a", "The first of the two agents.", a)
    registry = ToolRegistry([a.as_tool("a", "The first of the two agents.")])

    result = await registry.execute("a", {"task": "go"})

    assert "a is already working further up; agents cannot call themselves in a circle" in result.text


@pytest.mark.conforms("N-b1")
async def test_an_agent_that_was_run_itself_cannot_be_called_by_the_agents_below_it() -> None:
    last_message = lambda request: request.messages[-1]["content"]  # noqa: E731
    a_model = ScriptedModel([calls(("b", {"task": "x"})), last_message])
    b_model = ScriptedModel([calls(("a", {"task": "x"})), last_message])
    a, b = Agent(a_model), Agent(b_model)
    a.add_subagent("b", "The other of the two agents.", b)
    b.add_subagent("a", "The first of the two agents.", a)

    run = await a.run("go")

    assert "a is already working further up" in run.content
    assert (a_model.samplings, b_model.samplings) == (2, 2)


@pytest.mark.conforms("N-b1", "O-b5")
async def test_agents_share_one_budget_of_calls_and_tokens_and_one_deadline() -> None:
    async def look() -> str:
        """Look at something again."""
        return "seen"

    def with_usage(*lines: Any) -> ScriptedModel:
        return ScriptedModel(
            [
                {**line, "usage": {"input_tokens": 40, "output_tokens": 10}} if isinstance(line, dict) else line
                for line in lines
            ]
        )

    inner = Agent(with_usage(calls_dict("look"), calls_dict("look"), {"content": "inner"}), tools=[look])
    outer_model = ScriptedModel([calls(("aide", {"task": "go"})), lambda request: request.messages[-1]["content"]])
    outer = Agent(outer_model)
    outer.add_subagent("aide", "Helps with everything there is.", inner)

    few_calls = await outer.run("go", context=RunContext(state=RunState(budget=Budget(tool_calls=2))))
    inner.reset()
    few_tokens = Budget(tokens=60)
    again = Agent(ScriptedModel([calls(("aide", {"task": "go"})), "never asked"]))
    again.add_subagent(
        "aide",
        "Helps with everything there is.",
        Agent(with_usage(calls_dict("look"), calls_dict("look"), {"content": "inner"}), tools=[look]),
    )
    run = await again.run("go", context=RunContext(state=RunState(budget=few_tokens)))

    assert few_calls.content == "inner"
    assert few_tokens.used.total == 100
    assert (run.stop_reason, run.error) == ("budget", "token budget of 60 is used up")
    assert "token budget of 60 is used up" in run.messages[-1]["content"]

    class Thinker(ScriptedModel):
        async def chat(self, *_: Any, **__: Any) -> Any:
            await anyio.sleep_forever()
            raise AssertionError

    late = Agent(ScriptedModel([calls(("aide", {"task": "go"})), "never asked"]))
    late.add_subagent("aide", "Helps with everything there is.", Agent(Thinker([]), wall_s=600.0))
    with anyio.fail_after(60):
        ended = await late.run("go", context=RunContext(deadline=anyio.current_time() + 0.05))
    assert ended.stop_reason == "budget"


@pytest.mark.conforms("N-b1", "F-b5")
async def test_cancelling_the_outer_run_ends_the_inner_one() -> None:
    meeting, left = Meeting(2), list[str]()

    async def hang() -> str:
        """Wait for ever and never return."""
        try:
            await meeting.join()
            await anyio.sleep_forever()
        finally:
            left.append("left")
        return ""

    inner = Agent(ScriptedModel([calls(("hang", {}))]), tools=[hang])
    outer = Agent(ScriptedModel([calls(("aide", {"task": "go"}))]))
    outer.add_subagent("aide", "Helps with everything there is.", inner)
    results: list[Any] = []

    async def run() -> None:
        results.append(await outer.run("go"))

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            await meeting.join()
            outer.cancel("the user left")

    assert left == ["left"]
    [result] = results
    assert (result.stop_reason, result.error) == ("cancelled", "the user left")
    assert result.messages[-1]["content"] == "the user left"


@pytest.mark.conforms("N-b2")
async def test_only_the_answer_reaches_the_caller_and_the_trace_stays_in_the_details() -> None:
    async def secretive() -> ToolResult:
        """Stop the inner run quietly."""
        return ToolResult(parts=(), for_user="not for the caller's user", silent=True, terminate=True)

    shown: list[str] = []
    inner = Agent(ScriptedModel([calls(("secretive", {}), content="inner answer")]), tools=[secretive])
    outer = Agent(
        ScriptedModel([calls(("aide", {"task": "go"})), "outer answer"]),
        on_user=lambda text, result: shown.append(text),
    )
    outer.add_subagent("aide", "Helps with everything there is.", inner)
    log = recorded(outer.events)

    run = await outer.run("go")

    [end] = [event for event in log if event.tool == "aide" and event.type.endswith("_end")]
    assert end.result is not None
    assert (end.result.text, end.result.status) == ("inner answer", Status.OK)
    assert (end.result.terminate, end.result.silent, end.result.for_user) == (False, False, None)
    assert end.result.details["stop_reason"] == "terminated"
    assert [step["name"] for step in end.result.details["steps"]] == ["secretive"]
    assert (run.content, shown) == ("outer answer", [])
    assert "secretive" not in str(run.messages)


@pytest.mark.conforms("N-b3", "G-b2")
async def test_an_agent_has_its_own_tools_and_its_callers_hooks_and_rules() -> None:
    ran, seen = list[str](), list[str]()

    def tool(name: str) -> Any:
        async def run() -> str:
            ran.append(name)
            return name

        run.__name__, run.__doc__ = name, "A tool that is only counted."
        return run

    inner_model = ScriptedModel([calls(("mine", {}), ("shell", {}), ("guarded", {})), "done"])
    inner = Agent(inner_model, tools=[tool("mine"), tool("shell"), tool("guarded")])
    outer = Agent(ScriptedModel([calls(("aide", {"task": "go"})), "done"]), tools=[tool("outer_only")])
    outer.add_subagent("aide", "Helps with everything there is.", inner)
    outer.blacklist("shell")

    @outer.registry.before_call
    def look(call: Call) -> Block | None:
        seen.append(call.name)
        return Block("guarded") if call.name == "guarded" else None

    await outer.run("go")

    assert ran == ["mine"]
    assert seen == ["aide", "mine", "guarded"]
    assert inner_model.requests[0].tool_names == ["mine", "guarded"]
    assert "outer_only" not in inner_model.requests[0].tool_names


async def test_a_refused_key_of_a_sub_agent_is_the_developers_error_through_every_level() -> None:
    refused = [ProviderError("no such key", status=401)] * 3

    def lead(*tools: Any, name: str, args: Any) -> Agent:
        return answering(calls((name, args)), "never said", tools=tools)

    aide = answering(*refused).as_tool("aide", "Helps with everything there is.")
    middle = lead(aide, name="aide", args={"task": "go"}).as_tool("middle", "Passes everything on to the aide.")
    plan = {"steps": [{"tool": "middle", "args": {"task": "go"}}, {"tool": "middle", "args": {"task": "stay"}}]}
    top = answering(calls(("execute_plan", plan)), "never said", tools=[middle], plan_execution=True)

    with pytest.raises(UsageError, match=r"no such key.*check the provider's key"):
        await top.run("go")
    with pytest.raises(UsageError, match="no such key"):
        await ToolRegistry([aide]).execute("aide", {"task": "go"})


@pytest.mark.conforms("N4")
async def test_a_sub_agent_without_a_model_has_that_of_the_agent_above_if_they_have_the_same_kind_of_provider() -> None:
    class Other(ScriptedModel):
        pass

    models = [ScriptedModel(["a"]), ScriptedModel(["b"]), Other(["c"])]
    named = ["", "own", ""]
    aides = [
        Agent(model, model=name).as_tool(f"aide_{place}", "Helps with everything there is.")
        for place, (model, name) in enumerate(zip(models, named, strict=True))
    ]
    middle = answering(calls(*((aide.name, {"task": "go"}) for aide in aides)), "said", tools=aides)
    top = answering(
        calls(("middle", {"task": "go"})), "done", model="m", tools=[middle.as_tool("middle", "Helps with all of it.")]
    )

    assert (await top.run("go")).content == "done"
    assert [model.requests[0].model for model in models] == ["m", "own", ""]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("openai") is None, reason="needs the package openai")
async def test_a_provider_that_is_asked_without_a_models_name_is_the_developers_error() -> None:
    with pytest.raises(
        UsageError, match=r"OpenAIProvider needs the name of a model: write Agent\(provider, model=\.\.\.\)"
    ):
        await Agent(OpenAIProvider(api_key="none")).run("go")


@each_row("status", [400, 500])
async def test_other_failures_of_a_sub_agents_provider_stay_its_result(status: int) -> None:
    aide = answering(ProviderError("not now", status=status), retry=ONCE).as_tool("aide", "Helps with everything.")

    result = await answering(calls(("aide", {"task": "go"})), "sorry", tools=[aide]).run("go")

    assert result.content == "sorry"


async def test_a_runtime_that_is_not_open_is_the_developers_error() -> None:
    agent = answering(calls(("execute_code", {"code": "1"})), "never said", code_execution=Runtime())

    with pytest.raises(UsageError, match="not open"):
        await agent.run("go")
