"""AG2's agent with its own loop and AG2's test model, on toolcell's code environment."""

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
from toolcell.errors import RegistrationError, ToolError, UsageError

needs("ag2")

from ag2 import Agent, Context  # noqa: E402
from ag2.context import ConversationContext  # noqa: E402
from ag2.events import ToolCallEvent, ToolResultEvent  # noqa: E402
from ag2.stream import MemoryStream  # noqa: E402
from ag2.testing import TestConfig  # noqa: E402
from ag2.tools import SandboxCodeTool, tool  # noqa: E402
from ag2.tools.code import CodeEnvironment, CodeRunResult  # noqa: E402

from toolcell.integrations import base  # noqa: E402
from toolcell.integrations.ag2 import ToolcellEnvironment  # noqa: E402

pytestmark = [pytest.mark.framework, pytest.mark.isolation, pytest.mark.anyio]

DENSITY = "density = tools.population('Bern') / tools.area(city='Bern')\nprint(density)"


@asynccontextmanager
async def environment(seen: list[str], **options: Any) -> AsyncIterator[ToolcellEnvironment]:
    options = {"registry": registry_of_cities(seen), "limits": Limits(wall_s=60), "tools": [area]} | options
    with nothing_left_behind():
        async with ToolcellEnvironment(**options) as opened:
            yield opened


def asks(*codes: str) -> TestConfig:
    turns = [ToolCallEvent("run_code", arguments=json.dumps({"code": code, "language": "python"})) for code in codes]
    return TestConfig(*turns, "done")


def coder(opened: ToolcellEnvironment, config: TestConfig) -> Agent[Any]:
    return Agent("coder", config=config, tools=[SandboxCodeTool(opened, description=opened.description)])


async def results(reply: Any) -> list[str]:
    events = await reply.context.stream.history.get_events()
    return [each.result.parts[0].content for each in events if isinstance(each, ToolResultEvent)]


async def test_an_agent_writes_code_that_calls_two_tools_and_keeps_its_names(tmp_path: Path) -> None:
    seen: list[str] = []
    async with environment(seen, record=tmp_path / "runs.db") as opened:
        assert isinstance(opened, CodeEnvironment)
        reply = await coder(opened, asks(DENSITY, "round(density)")).ask("density of Bern?")
        told = await results(reply)
    assert told[0].startswith("2596.8") and told[1] == "2597"
    assert reply.body == "done"
    assert seen == ["population", "area"] == audited_calls(tmp_path)


async def test_the_model_is_told_of_the_tools_and_what_failed() -> None:
    async with environment([]) as opened:
        agent = coder(opened, asks("tools.area(city='nowhere')"))
        [schema] = await agent.tools[0].schemas(ConversationContext(MemoryStream()))
        assert (
            "def population" in schema.function.description
            and "call_tool('name', {...})" in schema.function.description
        )
        [told] = await results(await agent.ask("?"))
    assert "ToolError: Tool 'area' failed: KeyError: 'nowhere'" in told and told.endswith("[exit code: 1]")


async def test_a_failed_tool_is_named_with_its_class_once() -> None:
    @tool
    def refuse() -> str:
        """Refuse to answer."""
        raise ToolError("not today")

    async with environment([], tools=[refuse]) as opened:
        [told] = await results(await coder(opened, asks("tools.refuse()")).ask("?"))
    assert "ToolError: Tool 'refuse' failed: not today" in told


async def test_each_conversation_has_a_session_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MAX_SESSIONS", 2)
    one, two, three = (ConversationContext(MemoryStream()) for _ in range(3))
    async with environment([]) as opened:
        for number, context in enumerate([one, two]):
            await opened.run(f"x = {number}", "python", context=context)
        assert (await opened.run("x", "python", context=one)).output == "0"
        await opened.run("x = 2", "python", context=three)
        assert (await opened.run("x", "python", context=one)).output == "0"
        assert "NameError" in (await opened.run("x", "python", context=two)).output  # it was idle longest
        assert "NameError" in (await opened.run("x", "python")).output


async def test_a_tools_middleware_and_context_are_ags_own() -> None:
    asked: list[str] = []

    async def watch(call_next: Any, event: Any, context: Any) -> Any:
        asked.append(event.arguments)
        return await call_next(event, context)

    @tool(middleware=[watch])
    def greet(name: str, ctx: Context) -> dict[str, str]:
        """Greet somebody in the language of the conversation."""
        return {"text": f"{ctx.variables['hello']} {name}"}

    context = ConversationContext(MemoryStream(), variables={"hello": "Grüezi"})
    async with environment([], tools=[greet]) as opened:
        result = await opened.run("tools.greet(name='Ada')['text']", "python", context=context)
    assert result == CodeRunResult("Grüezi Ada", 0)
    assert asked == ['{"name": "Ada"}']


FAILURES = [
    ("1 / 0", 1, "ZeroDivisionError"),
    ("if:", 1, "SyntaxError"),
    ("print('so far')\ntools.area(town='Bern')", 1, "so far\nTraceback"),
    ("call_tool('secret')", 1, "ToolError"),
    ("import sys\nsys.exit(7)", 7, "exit code 7"),
    ("tools.population('nowhere')", 1, "the tool raised KeyError"),
]


async def test_what_fails_has_an_exit_code_and_says_why() -> None:
    async with environment([]) as opened:
        for code, exit_code, says in FAILURES:
            result = await opened.run(code, "python")
            assert result.exit_code == exit_code and says in result.output


async def test_a_timeout_has_the_exit_code_of_timeout_and_other_languages_are_refused() -> None:
    async with environment([], limits=Limits(wall_s=2)) as opened:
        late = await opened.run("while True: pass", "python")
        assert late.exit_code == 124 and "timed out after 2 s" in late.output
        assert (await opened.run("ls", "bash")).exit_code == 2
        assert opened.supported_languages == ("python",)


async def test_cancelling_the_agent_ends_its_code() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    @tool
    async def wait() -> str:
        """Wait until somebody cancels this."""
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    async with environment([], tools=[wait]) as opened:
        task = asyncio.create_task(coder(opened, asks("tools.wait()")).ask("?"))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await ended.wait()
        assert (await opened.run("1 + 1", "python")).output == "2"


async def test_wrong_tools_are_refused_when_they_are_given() -> None:
    with pytest.raises(UsageError, match="FunctionTool or a function, not 'area'"):
        ToolcellEnvironment(tools=["area"])  # type: ignore[list-item]
    with pytest.raises(RegistrationError, match="population"):
        ToolcellEnvironment(registry=registry_of_cities([]), tools=[tool(area, name="population")])


async def test_closing_twice_leaves_the_programs_runtime_open() -> None:
    with nothing_left_behind():
        async with Runtime(registry_of_cities([])) as runtime:
            opened = ToolcellEnvironment(runtime, tools=[area])
            assert (await opened.run(DENSITY, "python")).exit_code == 0
            await opened.aclose()
            await opened.aclose()
            assert (await runtime.execute_code("1")).value == 1


async def test_the_example_runs() -> None:
    assert "2597 people per km²" in run_example("with_ag2.py")
