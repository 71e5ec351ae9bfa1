"""Google ADK's agent with its own runner and a scripted model, on toolcell's code executor."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from integrations.cities import area, audited_calls, nothing_left_behind, registry_of_cities
from integrations.conftest import needs, run_example
from toolcell import Limits, SyncRuntime, ToolRegistry
from toolcell.errors import RegistrationError, UsageError
from toolcell.tools import Approve, Hook

needs("google.adk")

from google.adk.agents import LlmAgent  # noqa: E402
from google.adk.code_executors.code_execution_utils import CodeExecutionInput, CodeExecutionResult, File  # noqa: E402
from google.adk.models import BaseLlm, LlmRequest, LlmResponse  # noqa: E402
from google.adk.runners import InMemoryRunner  # noqa: E402
from google.adk.tools import FunctionTool, ToolContext  # noqa: E402
from google.genai import types  # noqa: E402

from toolcell.integrations import base  # noqa: E402
from toolcell.integrations.google_adk import ToolcellCodeExecutor  # noqa: E402

pytestmark = [pytest.mark.framework, pytest.mark.isolation, pytest.mark.anyio]

DENSITY = "density = tools.population('Bern') / tools.area('Bern')\nprint(density)"


class Scripted(BaseLlm):
    """Answers with the next of its texts."""

    texts: list[str]
    asked: list[Any]

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        self.asked.append(llm_request.model_copy(deep=True))
        yield LlmResponse(content=types.Content(role="model", parts=[types.Part(text=self.texts.pop(0))]))


@contextmanager
def executor(seen: list[str] | None = None, **options: Any) -> Iterator[ToolcellCodeExecutor]:
    registry = registry_of_cities([] if seen is None else seen)
    options = {"registry": registry, "limits": Limits(wall_s=60), "tools": [area]} | options
    with nothing_left_behind(), ToolcellCodeExecutor(**options) as opened:
        yield opened


def block(code: str) -> str:
    return f"```python\n{code}\n```"


async def answers(opened: ToolcellCodeExecutor, *texts: str) -> tuple[list[Any], Scripted]:
    """Run an agent whose model says these texts; return its events."""
    model = Scripted(model="scripted", texts=[*texts], asked=[])
    agent = LlmAgent(name="coder", model=model, code_executor=opened, instruction=lambda _: opened.instructions)
    runner = InMemoryRunner(agent, app_name="app")
    session = await runner.session_service.create_session(app_name="app", user_id="ada")
    message = types.Content(role="user", parts=[types.Part(text="density of Bern?")])
    events = runner.run_async(user_id="ada", session_id=session.id, new_message=message)
    return [event async for event in events], model


def told(events: list[Any]) -> list[Any]:
    parts = [part for event in events for part in (event.content.parts if event.content else [])]
    return [part.code_execution_result for part in parts if part.code_execution_result]


def run(opened: ToolcellCodeExecutor, code: str, **options: Any) -> CodeExecutionResult:
    return opened.execute_code(None, CodeExecutionInput(code, **options))  # type: ignore[arg-type]


async def test_an_agent_writes_code_that_calls_two_tools_and_keeps_its_names(tmp_path: Path) -> None:
    seen: list[str] = []
    with executor(seen, record=tmp_path / "runs.db") as opened:
        events, model = await answers(opened, block(DENSITY), block("round(density)"), "2597 people per km²")
    first, second = told(events)
    assert first.outcome is types.Outcome.OUTCOME_OK and "2596.8" in first.output and "2597" in second.output
    assert events[-1].content.parts[0].text == "2597 people per km²"
    assert seen == ["population", "area"] == audited_calls(tmp_path)
    said = str(model.asked[0].config.system_instruction)
    assert "def population" in said and "def area" in said and "```python" in said


async def test_the_model_is_told_what_failed_and_tries_again() -> None:
    with executor() as opened:
        events, model = await answers(opened, block("tools.area('nowhere')"), block("tools.area('Bern')"), "51.6")
    failed, mended = told(events)
    assert (
        failed.outcome is types.Outcome.OUTCOME_FAILED
        and "Tool 'area' failed: the tool raised KeyError" in failed.output
    )
    assert mended.outcome is types.Outcome.OUTCOME_OK and "51.6" in mended.output
    assert "KeyError" in str(model.asked[1].contents)


async def test_files_come_from_adks_session_and_go_to_its_artifacts() -> None:
    code = "from pathlib import Path\nPath('a.txt').write_text('Bern')\nset_result('written', files=['a.txt'])"
    with executor() as opened:
        events, _ = await answers(opened, block(code), "done")
        given = [File("in.csv", "YSxiCjEsMgo="), File("raw.bin", b"\xff"), File("plain.txt", "not base64!")]
        result = run(
            opened, "[open(n, 'rb').read().hex() for n in ('in.csv', 'raw.bin', 'plain.txt')]", input_files=given
        )
    assert [event.actions.artifact_delta for event in events if event.actions.artifact_delta] == [{"a.txt": 0}]
    assert bytes.fromhex("612c620a312c320a").decode() == "a,b\n1,2\n" and '"612c620a312c320a", "ff"' in result.stdout


async def test_a_tool_gets_adks_context() -> None:
    users: list[str] = []

    async def who(tool_context: ToolContext) -> str:
        """Return the name of the user of this conversation."""
        users.append(tool_context._invocation_context.user_id)
        return users[-1]

    with executor(tools=[who]) as opened:
        events, _ = await answers(opened, block("tools.who()"), "done")
    assert users == ["ada"] and "ada" in told(events)[0].output


@pytest.mark.parametrize("is_approved", [False, True])
async def test_a_tool_that_needs_confirmation_needs_an_approval_hook(is_approved: bool) -> None:
    dropped: list[str] = []

    def drop(city: str) -> str:
        """Remove a city from the list of cities."""
        dropped.append(city)
        return f"dropped {city}"

    registry = ToolRegistry()
    if is_approved:
        registry.add_hook(Hook(before=lambda call: Approve()))
    with executor(registry=registry, tools=[FunctionTool(drop, require_confirmation=True)]) as opened:
        events, _ = await answers(opened, block("tools.drop(city='Bern')"), "done")
    assert dropped == (["Bern"] if is_approved else [])
    assert ("dropped Bern" if is_approved else "needs approval") in told(events)[0].output


FAILURES = [
    ("1 / 0", 1, "line 1, in <module>\n    1 / 0\n    ~~^~~\nZeroDivisionError"),
    ("if:", 1, "SyntaxError"),
    ("tools.area(town='Bern')", 1, "town"),
    ("call_tool('secret')", 1, "ToolError"),
    ("import sys\nsys.exit(7)", 7, "exit code 7"),
    ("import os\nos._exit(3)", 3, "ended without a word"),
]


def test_what_fails_is_in_stderr_and_what_warns_is_not() -> None:
    with executor() as opened:
        for code, exit_code, says in FAILURES:
            result = run(opened, f"print('so far')\n{code}", execution_id="one")
            assert result.exit_code == exit_code and says.replace("line 1", "line 2") in result.stderr
        result = run(opened, "import sys\nprint('careful', file=sys.stderr)\n42", execution_id="one")
        assert (result.stdout, result.stderr, result.exit_code) == ("42\ncareful\n", "", 0)


def test_a_picture_in_the_result_is_an_output_file() -> None:
    with executor() as opened:
        result = run(opened, "{'chart': b'\\x89PNG\\r\\n\\x1a\\n'}", execution_id="one")
        assert result.stdout == '{"chart": "(image/png, 8 bytes)"}\n'
        assert [(each.name, each.mime_type) for each in result.output_files] == [("result-1.png", "image/png")]


def test_timeout_seconds_bounds_each_block_and_the_state_stays() -> None:
    with executor(timeout_seconds=2) as opened:
        run(opened, "x = 1", execution_id="one")
        late = run(opened, "while True: pass", execution_id="one")
        assert late.exit_code == 124 and "timed out after 2 s" in late.stderr
        assert run(opened, "x", execution_id="one").stdout == "1\n"


def test_state_belongs_to_an_adk_session_or_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MAX_SESSIONS", 2)
    with executor() as opened:
        for number, name in enumerate(["one", "two"]):
            run(opened, f"x = {number}", execution_id=name)
        assert run(opened, "x", execution_id="one").stdout == "0\n"
        run(opened, "x = 2", execution_id="three")
        assert run(opened, "x", execution_id="one").stdout == "0\n"
        assert "NameError" in run(opened, "x", execution_id="two").stderr  # it was idle longest
    with executor(stateful=False) as opened:
        run(opened, "x = 1", execution_id="one")
        assert "NameError" in run(opened, "x", execution_id="one").stderr
        assert "starts afresh" in opened.instructions


async def test_close_ends_the_code_of_an_agent_that_was_cancelled() -> None:
    begun = threading.Event()

    def begin() -> str:
        """Note that the script has begun."""
        begun.set()
        return "begun"

    with executor(tools=[begin], limits=Limits(wall_s=600, cpu_s=600)) as opened:
        task = asyncio.create_task(answers(opened, block("tools.begin()\nwhile True: pass"), "done"))
        assert await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    with pytest.raises(UsageError, match="was closed"):
        run(opened, "1")


def test_wrong_tools_and_settings_are_refused_when_they_are_given() -> None:
    with pytest.raises(UsageError, match="BaseTool or a function, not 'area'"):
        ToolcellCodeExecutor(tools=["area"])  # type: ignore[list-item]
    with pytest.raises(RegistrationError, match="area"):
        ToolcellCodeExecutor(tools=[area, area])
    with pytest.raises(UsageError, match="not open"):
        run(ToolcellCodeExecutor(SyncRuntime()), "1")
    with pytest.raises(UsageError, match="no argument 'timeout'"):
        ToolcellCodeExecutor(timeout=3)


def test_closing_twice_leaves_the_programs_runtime_open() -> None:
    with nothing_left_behind(), SyncRuntime(registry_of_cities([])) as runtime:
        opened = ToolcellCodeExecutor(runtime, tools=[area])
        assert run(opened, "tools.population('Bern')", execution_id="one").stdout == "134000\n"
        opened.close()
        opened.close()
        assert runtime.execute_code("1").value == 1


def test_the_example_runs() -> None:
    assert "2597 people per km²" in run_example("with_google_adk.py")
