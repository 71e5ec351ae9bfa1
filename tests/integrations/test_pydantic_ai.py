"""pydantic-ai in code mode: its own agent loop, with a FunctionModel that writes what the test wrote."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from .conftest import audited_calls, needs, run_example

needs("pydantic_ai")

from pydantic_ai import (  # noqa: E402
    Agent,
    DeferredToolRequests,
    DeferredToolResults,
    FunctionToolset,
    ModelRetry,
    Tool,
    ToolDenied,
    UnexpectedModelBehavior,
)
from pydantic_ai.capabilities import HandleDeferredToolCalls  # noqa: E402
from pydantic_ai.exceptions import ApprovalRequired, UserError  # noqa: E402
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart  # noqa: E402
from pydantic_ai.models.function import AgentInfo, FunctionModel  # noqa: E402

from toolcell import Limits, Runtime, ToolRegistry  # noqa: E402
from toolcell.errors import UsageError  # noqa: E402
from toolcell.integrations.pydantic_ai import CodeMode, CodeModeToolset  # noqa: E402

pytestmark = [pytest.mark.framework, pytest.mark.isolation, pytest.mark.anyio]


class Scripted:
    """A model that writes one script after another, then says what the last one returned."""

    def __init__(self, *scripts: str) -> None:
        self.scripts, self.shown, self.offered = list(scripts), list[Any](), dict[str, str]()
        self.model = FunctionModel(self.answer)

    def answer(self, messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        self.offered = {each.name: each.description or "" for each in info.function_tools}
        self.shown.append(messages[-1].parts[-1].content)
        if self.scripts:
            return ModelResponse([ToolCallPart("run_code", {"code": self.scripts.pop(0)})])
        return ModelResponse([TextPart(str(self.shown[-1]))])


def price(item: str, count: int = 1) -> float:
    """Return what so many of an item cost."""
    if item == "ghost":
        raise ModelRetry("there is no ghost in stock")
    return {"apple": 0.5, "pear": 0.75}[item] * count


async def order(item: str, count: int) -> dict[str, Any]:
    """Order so many of an item."""
    return {"ordered": item, "count": count}


NEEDS_APPROVAL = Tool(order, requires_approval=True)


@pytest.fixture
def registry() -> ToolRegistry:
    return ToolRegistry()


@pytest.fixture
async def runtime(registry: ToolRegistry, tmp_path: Path) -> AsyncIterator[Runtime]:
    async with Runtime(registry, record=tmp_path / "audit" / "runs.db", limits=Limits(wall_s=60)) as opened:
        yield opened


async def test_an_agent_writes_code_that_calls_two_tools_under_hooks_and_audit(
    runtime: Runtime, registry: ToolRegistry, tmp_path: Path
) -> None:
    seen = list[tuple[str, Any]]()
    registry.before_call(lambda call: seen.append((call.name, dict(call.args))))
    said = Scripted("cost = tools.price('apple', 4)\nprint('cost', cost)\ntools.order(item='apple', count=4)")
    agent = Agent(said.model, tools=[price, order], capabilities=[CodeMode(runtime)])
    await agent.run("Buy apples.")

    assert said.shown[-1] == {"output": "cost 2.0\n", "result": {"ordered": "apple", "count": 4}}
    assert list(said.offered) == ["run_code"] and "def price(*, item: str, count: int" in said.offered["run_code"]
    assert seen == [("price", {"item": "apple", "count": 4}), ("order", {"item": "apple", "count": 4})]
    await runtime.close()
    assert audited_calls(tmp_path / "audit") == ["price", "order"]


async def test_failures_are_retries_that_tell_the_model_what_went_wrong(runtime: Runtime) -> None:
    said = Scripted("x = 1\n1 / 0", "tools.price('apple', 'many')", "tools.price('ghost')", "tools.price('pear', 2)")
    agent = Agent(said.model, tools=[price], capabilities=[CodeMode(runtime)])
    assert (await agent.run("Try.")).output == "1.5"
    assert "ZeroDivisionError" in said.shown[1] and "line 2" in said.shown[1]
    assert "count" in said.shown[2] and "integer" in said.shown[2]
    assert "there is no ghost in stock" in said.shown[3] and "price (error)" in said.shown[3]


async def test_a_model_that_never_mends_its_script_ends_the_run_as_any_tool_would(runtime: Runtime) -> None:
    said = Scripted(*["1 / 0"] * 3)
    agent = Agent(said.model, capabilities=[CodeMode(runtime, max_retries=1)])
    with pytest.raises(UnexpectedModelBehavior, match="run_code"):
        await agent.run("Try.")


async def test_a_timeout_is_a_retry() -> None:
    said = Scripted("while True: pass", "'done'")
    agent = Agent(said.model, capabilities=[CodeMode(limits=Limits(wall_s=0.5))])
    assert (await agent.run("Try.")).output == "done"
    assert "timed out" in said.shown[1] or "wall_s" in said.shown[1]


async def test_a_tool_that_the_rules_deny_fails_in_the_script(runtime: Runtime, registry: ToolRegistry) -> None:
    registry.policy.blacklist("order")
    said = Scripted(
        "try:\n    call_tool('order', item='a', count=1)\nexcept ToolError as exc:\n    said = str(exc)\nsaid"
    )
    await Agent(said.model, tools=[order], capabilities=[CodeMode(runtime)]).run("Try.")
    assert "not permitted" in said.shown[-1]


async def test_an_exception_that_is_not_for_the_model_ends_the_agents_run(runtime: Runtime) -> None:
    def broken() -> str:
        """Fail as nobody planned."""
        raise ZeroDivisionError("the database is gone")

    said = Scripted("try:\n    tools.broken()\nexcept BaseException:\n    pass")
    with pytest.raises(ZeroDivisionError, match="the database is gone"):
        await Agent(said.model, tools=[broken], capabilities=[CodeMode(runtime)]).run("Try.")
    assert (await runtime.execute_code("1 + 1")).value == 2


BUY = "before = tools.price('apple')\nprint('once')\ndone = tools.order(item='apple', count=2)\n[before, done]"


async def test_a_call_that_needs_approval_defers_run_code_and_the_script_goes_on(runtime: Runtime) -> None:
    priced = list[str]()

    def price(item: str) -> float:
        """Return what an item costs."""
        priced.append(item)
        return 0.5

    said = Scripted(BUY)
    tools = [price, NEEDS_APPROVAL]
    agent = Agent(said.model, output_type=[str, DeferredToolRequests], tools=tools, capabilities=[CodeMode(runtime)])
    asked = await agent.run("Buy.")
    assert isinstance(asked.output, DeferredToolRequests)
    [call] = asked.output.approvals
    [waiting] = asked.output.metadata[call.tool_call_id]["calls"]
    assert (call.tool_name, waiting["tool"], waiting["args"], waiting["line"]) == (
        "run_code",
        "order",
        {"item": "apple", "count": 2},
        3,
    )
    other = Agent(said.model, output_type=[str, DeferredToolRequests], tools=tools, capabilities=[CodeMode(runtime)])
    results = DeferredToolResults(approvals={call.tool_call_id: True}, metadata=asked.output.metadata)
    await other.run(message_history=asked.all_messages(), deferred_tool_results=results)
    assert said.shown[-1] == {"output": "once\n", "result": [0.5, {"ordered": "apple", "count": 2}]}
    assert priced == ["apple"], "a call that was made is not made again"

    again = await other.run(message_history=asked.all_messages(), deferred_tool_results=results)
    assert "the script cannot go on" in again.output


async def test_single_calls_can_be_denied_and_so_can_the_whole_script(runtime: Runtime) -> None:
    script = "try:\n    tools.order(item='a', count=1)\nexcept ToolError as exc:\n    said = str(exc)\nsaid"
    said = Scripted(script, script)
    agent = Agent(
        said.model, output_type=[str, DeferredToolRequests], tools=[NEEDS_APPROVAL], capabilities=[CodeMode(runtime)]
    )
    asked = await agent.run("Buy.")
    [call] = asked.output.approvals
    about = asked.output.metadata[call.tool_call_id]
    decided = {"decisions": {about["calls"][0]["id"]: "too dear"}}
    results = DeferredToolResults(approvals={call.tool_call_id: True}, metadata={call.tool_call_id: decided})
    asked = await agent.run(message_history=asked.all_messages(), deferred_tool_results=results)
    assert "too dear" in said.shown[-1]

    [call] = asked.output.approvals
    results = DeferredToolResults(approvals={call.tool_call_id: ToolDenied("not today")})
    done = await agent.run(message_history=asked.all_messages(), deferred_tool_results=results)
    assert done.output == "not today"


async def test_a_handler_of_deferred_calls_approves_inline(runtime: Runtime) -> None:
    asked = list[Any]()

    def handler(ctx: Any, requests: DeferredToolRequests) -> DeferredToolResults:
        asked.extend(call["args"] for about in requests.metadata.values() for call in about["calls"])
        return requests.build_results(approve_all=True)

    said = Scripted("tools.order(item='apple', count=2)")
    capabilities = [CodeMode(runtime), HandleDeferredToolCalls(handler=handler)]
    await Agent(said.model, tools=[NEEDS_APPROVAL], capabilities=capabilities).run("Buy.")
    assert asked == [{"item": "apple", "count": 2}]
    assert said.shown[-1] == {"ordered": "apple", "count": 2}


async def test_a_tool_that_asks_while_it_runs_is_told_to_the_script_as_it_is(runtime: Runtime) -> None:
    def late() -> str:
        """Ask for approval when it is too late."""
        raise ApprovalRequired

    said = Scripted("try:\n    tools.late()\nexcept ToolError as exc:\n    said = str(exc)\nsaid")
    await Agent(said.model, tools=[late], capabilities=[CodeMode(runtime)]).run("Try.")
    assert "requires_approval=True" in said.shown[-1]


async def test_the_tools_that_are_not_selected_stay_the_models_own(runtime: Runtime) -> None:
    said = Scripted("sorted(each['name'] for each in list_tools())")
    agent = Agent(said.model, tools=[price, order], capabilities=[CodeMode(runtime, tools=["price"])])
    await agent.run("Look.")
    assert sorted(said.offered) == ["order", "run_code"]
    assert said.shown[-1] == ["price"]

    def run_code() -> str:
        """Have the name of code mode's own tool."""
        return ""

    with pytest.raises(UserError, match="run_code"):
        await Agent(said.model, tools=[run_code], capabilities=[CodeMode(runtime, tools=["price"])]).run("Look.")


async def test_as_a_toolset_it_has_the_runtimes_own_tools_and_those_it_wraps(
    runtime: Runtime, registry: ToolRegistry
) -> None:
    @registry.tool
    def host() -> str:
        """Return the name of the host."""
        return "host"

    said = Scripted("tools.host()")
    await Agent(said.model, toolsets=[CodeModeToolset(runtime=runtime)]).run("Ask.")
    assert said.shown[-1] == "host"
    said = Scripted("[tools.host(), tools.price('pear')]")
    wrapped = CodeModeToolset(FunctionToolset([price]), runtime)
    await Agent(said.model, tools=[order], toolsets=[wrapped]).run("Ask.")
    assert said.shown[-1] == ["host", 0.75] and sorted(said.offered) == ["order", "run_code"]


async def test_images_come_with_the_answer(runtime: Runtime) -> None:
    for script, said in {
        "open('a.dat', 'wb').write(PNG)\nset_result('made', files=['a.dat'])": "made",
        "{'made': PNG}": "{'made': '(image/png, 8 bytes)'}",
    }.items():
        model = Scripted("PNG = b'\\x89PNG\\r\\n\\x1a\\n'\n" + script)
        run = await Agent(model.model, capabilities=[CodeMode(runtime)]).run("Draw.")
        assert "data=b'\\x89PNG\\r\\n\\x1a\\n', media_type='image/png'" in repr(run.all_messages())
        assert said in repr(run.all_messages())


async def test_cancelling_the_agent_ends_the_script_and_leaves_no_sandbox(runtime: Runtime) -> None:
    begun = anyio.Event()

    async def block() -> str:
        """Wait for ever."""
        begun.set()
        await asyncio.Event().wait()
        return ""

    agent = Agent(Scripted("tools.block()").model, tools=[block], capabilities=[CodeMode(runtime)])
    task = asyncio.create_task(agent.run("Wait."))
    with anyio.fail_after(60):
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert runtime.pool is not None
        while runtime.pool.busy:
            await anyio.sleep(0.01)


async def test_a_runtime_of_its_own_is_open_while_agents_run_and_closed_after() -> None:
    mode = CodeMode(limits=Limits(wall_s=60))
    runs = [Agent(Scripted("6 * 7").model, capabilities=[mode]).run("Compute.") for _ in range(2)]
    assert [run.output for run in await asyncio.gather(*runs)] == ["42", "42"]
    with pytest.raises(Exception, match="open"):
        mode._toolset._owner.runtime.check_open()


def test_the_example_runs() -> None:
    assert "Done: ['2 x apple', '2 x pear']" in run_example("with_pydantic_ai.py")


def test_what_is_no_toolset_is_refused_with_the_way_to_make_one() -> None:
    def double(number: int) -> int:
        return 2 * number

    with pytest.raises(UsageError, match=r"FunctionToolset\(\[function\]\)"):
        CodeModeToolset(double)  # type: ignore[arg-type]
