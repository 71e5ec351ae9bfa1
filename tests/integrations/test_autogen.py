"""AutoGen's agents with their own loops and AutoGen's scripted model, on toolcell's code executor."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from integrations.cities import area, audited_calls, nothing_left_behind, registry_of_cities
from integrations.conftest import needs, run_example
from toolcell import Limits, Runtime
from toolcell.errors import RegistrationError, SandboxUnavailable, UsageError

needs("autogen_core")

from autogen_agentchat.agents import AssistantAgent, CodeExecutorAgent  # noqa: E402
from autogen_agentchat.messages import CodeExecutionEvent  # noqa: E402
from autogen_core import CancellationToken, FunctionCall  # noqa: E402
from autogen_core.code_executor import CodeBlock, CodeExecutor, CodeResult  # noqa: E402
from autogen_core.models import CreateResult, ModelFamily, ModelInfo, RequestUsage  # noqa: E402
from autogen_core.tools import FunctionTool  # noqa: E402
from autogen_ext.models.replay import ReplayChatCompletionClient  # noqa: E402
from autogen_ext.tools.code_execution import PythonCodeExecutionTool  # noqa: E402

from toolcell.integrations.autogen import ToolcellSessionCodeExecutor  # noqa: E402

pytestmark = [
    pytest.mark.framework,
    pytest.mark.isolation,
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:No approval function"),
]

DENSITY = "density = tools.population('Bern') / tools.area('Bern')\nprint(density)"


@asynccontextmanager
async def executor(seen: list[str], **options: Any) -> AsyncIterator[ToolcellSessionCodeExecutor]:
    options = {"registry": registry_of_cities(seen), "limits": Limits(wall_s=60), "tools": [area]} | options
    with nothing_left_behind():
        async with ToolcellSessionCodeExecutor(**options) as opened:
            yield opened


async def run(opened: ToolcellSessionCodeExecutor, *codes: str, language: str = "python") -> CodeResult:
    return await opened.execute_code_blocks([CodeBlock(code, language) for code in codes], CancellationToken())


async def test_a_code_executor_agent_writes_code_that_calls_two_tools(tmp_path: Path) -> None:
    seen: list[str] = []
    async with executor(seen, record=tmp_path / "runs.db") as opened:
        assert isinstance(opened, CodeExecutor)
        model = ReplayChatCompletionClient([f"```python\n{DENSITY}\n```", "2597 people per km²"])
        agent = CodeExecutorAgent("coder", opened, model_client=model, system_message=opened.instructions)
        events = [each async for each in agent.run_stream(task="density of Bern?")]

    results = [each.result for each in events if isinstance(each, CodeExecutionEvent)]
    assert [each.exit_code for each in results] == [0] and results[0].output.startswith("2596.8")
    assert events[-1].messages[-1].content == "2597 people per km²"
    assert seen == ["population", "area"] == audited_calls(tmp_path)
    system = str(model.create_calls[0]["messages"])
    assert "def population" in system and "def area" in system and "stay from one script" in system


async def test_an_agent_mends_what_failed_and_finds_its_names_again() -> None:
    async with executor([]) as opened:
        retry = json.dumps({"reason": "wrong name", "retry": True})
        scripted = ["```python\nx = 41\ntools.area('nowhere')\n```", retry, "```python\nx + 1\n```", "It is 42."]
        info = ModelInfo(
            vision=False, function_calling=True, json_output=True, family=ModelFamily.UNKNOWN, structured_output=True
        )
        model = ReplayChatCompletionClient(scripted, model_info=info)
        agent = CodeExecutorAgent("coder", opened, model_client=model, max_retries_on_error=1)
        events = [each async for each in agent.run_stream(task="what is x?")]

    failed, mended = (each.result for each in events if isinstance(each, CodeExecutionEvent))
    assert failed.exit_code == 1 and "exited with an error" in failed.output and "KeyError: 'nowhere'" in failed.output
    assert mended == CodeResult(0, "42\n")


async def test_an_assistant_runs_code_through_autogens_own_tool() -> None:
    async with executor([]) as opened:
        call = FunctionCall(id="1", name="CodeExecutor", arguments=json.dumps({"code": DENSITY}))
        usage = RequestUsage(prompt_tokens=0, completion_tokens=0)
        asked = CreateResult(finish_reason="function_calls", content=[call], usage=usage, cached=False)
        info = ModelInfo(
            vision=False, function_calling=True, json_output=False, family=ModelFamily.UNKNOWN, structured_output=False
        )
        model = ReplayChatCompletionClient([asked], model_info=info)
        agent = AssistantAgent("assistant", model, tools=[PythonCodeExecutionTool(opened)])
        result = await agent.run(task="density of Bern?")
    assert "2596.8" in str(result.messages[-1])


FAILURES = [
    ("1 / 0", 1, "line 1, in <module>\n    1 / 0\n    ~~^~~\nZeroDivisionError"),
    ("if:", 1, "SyntaxError"),
    ("print('so far')\ntools.area(town='Bern')", 1, "so far\nTraceback"),
    ("call_tool('secret')", 1, "ToolError"),
    ("import sys\nsys.exit(7)", 7, "exit code 7"),
    ("import os\nos._exit(3)", 3, "ended without a word"),
    ("tools.population('nowhere')", 1, "the tool raised KeyError"),
]


async def test_what_fails_has_an_exit_code_and_says_why() -> None:
    async with executor([]) as opened:
        for code, exit_code, says in FAILURES:
            result = await run(opened, code, "print('not reached')")
            assert result.exit_code == exit_code and says in result.output and "not reached" not in result.output
        assert await run(opened, "1 + 1") == CodeResult(0, "2\n")


async def test_a_timeout_has_the_exit_code_of_timeout_and_keeps_the_state() -> None:
    async with executor([], limits=Limits(wall_s=2)) as opened:
        await run(opened, "x = 1")
        late = await run(opened, "while True: pass")
        assert late.exit_code == 124 and "timed out after 2 s" in late.output
        assert await run(opened, "x") == CodeResult(0, "1\n")


async def test_another_language_is_refused_and_restart_forgets() -> None:
    async with executor([]) as opened:
        result = await run(opened, "ls", language="bash")
        assert result.exit_code == 1 and "unknown language bash" in result.output
        await run(opened, "x = 1", language="Python")
        await opened.restart()
        assert "NameError" in (await run(opened, "x")).output


async def test_cancelling_the_token_interrupts_code_and_its_calls_and_keeps_the_state() -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def wait(cancellation_token: CancellationToken) -> str:
        """Wait until somebody cancels this."""
        cancellation_token.add_callback(cancelled.set)
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with executor([], tools=[FunctionTool(wait, "Wait until somebody cancels this.")]) as opened:
        await run(opened, "x = 1")
        token = CancellationToken()
        task = asyncio.create_task(opened.execute_code_blocks([CodeBlock("tools.wait()", "python")], token))
        await begun.wait()
        token.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cancelled.is_set()
        assert await run(opened, "x") == CodeResult(0, "1\n")

        model = ReplayChatCompletionClient(["```python\ntools.wait()\n```"])
        agent = CodeExecutorAgent("coder", opened, model_client=model)
        begun.clear()
        running = asyncio.create_task(agent.run(task="wait"))
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_wrong_tools_and_runtimes_are_refused_when_they_are_given() -> None:
    with pytest.raises(UsageError, match="BaseTool or a function, not 'area'"):
        ToolcellSessionCodeExecutor(tools=["area"])  # type: ignore[list-item]
    with pytest.raises(RegistrationError, match="population"):
        ToolcellSessionCodeExecutor(
            registry=registry_of_cities([]), tools=[FunctionTool(area, "Return the area of a city.", name="population")]
        )
    with pytest.raises(UsageError, match="not open"):
        await ToolcellSessionCodeExecutor(Runtime()).start()
    with pytest.raises((SandboxUnavailable, UsageError)):
        await ToolcellSessionCodeExecutor(python="/nonexistent/python").start()


async def test_it_starts_by_itself_stops_twice_and_leaves_the_programs_runtime_open() -> None:
    with nothing_left_behind():
        async with Runtime(registry_of_cities([])) as runtime:
            opened = ToolcellSessionCodeExecutor(runtime, tools=[area])
            assert (await run(opened, DENSITY)).exit_code == 0
            await opened.stop()
            await opened.stop()
            assert (await runtime.execute_code("1")).value == 1


async def test_the_example_runs() -> None:
    assert "2597 people per km²" in run_example("with_autogen.py")
