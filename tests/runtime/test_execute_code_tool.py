"""`execute_code` as a model's tool, over a real sandbox."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from toolcell import Limits, Outcome, Runtime, ToolRegistry
from toolcell.sandbox.backend import Backend, Sandbox
from toolcell.sandbox.process.backend import ProcessBackend

from .conftest import make_registry

pytestmark = [pytest.mark.quick, pytest.mark.isolation, pytest.mark.anyio]

EX_10 = (
    "results = call_tool('web_search', {'query': 'Go frameworks'})\n"
    "filtered = [r for r in results if r.get('score', 0) > 0.8]\n"
    "set_result({'top_results': filtered})"
)


@asynccontextmanager
async def coding() -> AsyncIterator[ToolRegistry]:
    registry = make_registry()
    async with Runtime(registry, limits=Limits(wall_s=5)) as runtime:
        registry.enable_code_execution(runtime)
        yield registry


@pytest.mark.conforms("Q1", "Q2", "A-b4")
async def test_it_is_offered_only_once_enabled_and_takes_the_source_as_code() -> None:
    assert "execute_code" not in make_registry().names()
    unknown = await make_registry().dispatch("execute_code", {"code": "1"})
    assert "unknown tool: execute_code" in unknown.text
    async with coding() as registry:
        (definition,) = [each for each in registry.definitions() if each.name == "execute_code"]
        assert definition.parameters["properties"]["code"]["type"] == "string"
        assert definition.parameters["required"] == ["code"]


@pytest.mark.conforms("Q3", "Q4", "Q5", "EX-10")
async def test_the_documented_example_runs_as_a_tool_call() -> None:
    async with coding() as registry:
        result = await registry.dispatch("execute_code", json.dumps({"code": EX_10}))

    assert json.loads(result.text) == {"top_results": [{"title": "a", "score": 0.9}]}
    assert result.value == {"top_results": [{"title": "a", "score": 0.9}]}


@pytest.mark.conforms("Q5")
async def test_the_text_says_when_nothing_was_set_and_appends_the_logs() -> None:
    async with coding() as registry:
        empty = await registry.dispatch("execute_code", {"code": "x = 1"})
        logged = await registry.dispatch("execute_code", {"code": "print('hello')\nset_result(1)"})

    assert empty.text == "(no result set — use set_result(data) to return structured output)"
    assert logged.text == "1\n\nlogs:\nhello"


@pytest.mark.conforms("Q6", "Q23")
async def test_failures_are_error_results_with_logs() -> None:
    async with coding() as registry:
        failed = await registry.dispatch("execute_code", {"code": "print('so far')\n1/0"})
        blank = await registry.dispatch("execute_code", {"code": "  "})
        bad = await registry.dispatch("execute_code", "{bad json")

    assert failed.is_error
    assert "ZeroDivisionError: division by zero" in failed.text
    assert failed.text.endswith("\n\nlogs:\nso far")
    assert "execute_code requires non-empty code" in blank.text
    assert bad.text.startswith("invalid execute_code args: ")


@pytest.mark.slow
async def test_the_model_reads_which_limit_an_exception_of_its_script_ran_into() -> None:
    async with coding() as registry:
        memory = await registry.dispatch("execute_code", {"code": "bytearray(1 << 40)"})
        processes = await registry.dispatch("execute_code", {"code": "import os\nwhile True: os.fork()"})

    assert f"MemoryError\nthe run's limit memory_bytes is {Limits().memory_bytes}, and " in memory.text
    if os.geteuid() == 0:  # where nothing counts the processes, only the system's own message is known
        assert f"\nthe run's limit processes is {Limits().processes}, and " in processes.text


@pytest.mark.conforms("Q7", "T2")
async def test_a_runner_takes_a_request_and_gives_output_logs_and_error() -> None:
    async with Runtime(make_registry()) as runtime:
        result = await runtime.execute_code(
            "print('log')\nset_result(call_tool('echo', q=1))", limits=Limits(wall_s=3), files=[("in.txt", "x")]
        )

    assert (result.outcome, result.value, result.logs.text, result.error) == (Outcome.OK, 1, "log\n", None)
    assert json.loads(result.to_json())["outcome"] == "ok"


@pytest.mark.conforms("Q8", "B16")
async def test_returned_files_are_files_of_the_tools_result() -> None:
    async with coding() as registry:
        result = await registry.dispatch(
            "execute_code", {"code": "open('a.csv','w').write('1')\nset_result('ok', files=['a.csv', 'gone.txt'])"}
        )

    assert [(file.name, file.media_type, file.data) for file in result.files] == [("a.csv", "text/csv", b"1")]
    assert "gone.txt: missing" in result.text


@pytest.mark.conforms("Q9")
async def test_scripts_call_sub_agents_like_any_tool() -> None:
    from toolcell.agents import Agent
    from toolcell.agents.providers.scripted import ScriptedModel

    helper = Agent(ScriptedModel(["forty-two"]), tools=[]).as_tool("agent_helper", "Answers hard questions for others.")
    registry = ToolRegistry()
    registry.add(helper)
    async with Runtime(registry) as runtime:
        result = await runtime.execute_code("set_result(call_tool('agent_helper', {'task': 'what is it?'}))")

    assert result.value == "forty-two", result.error


@pytest.mark.conforms("Q10", "EX-11")
async def test_recursion_is_refused_and_the_script_goes_on() -> None:
    async with coding() as registry:
        registry.enable_plan_execution()
        code = (
            "said = []\nfor name in ('execute_code', 'execute_plan'):\n"
            "    try: call_tool(name, {})\n    except ToolError as e: said.append(str(e))\nset_result(said)"
        )
        result = await registry.dispatch("execute_code", {"code": code})

    assert not result.is_error
    assert all("cannot be called from within execute_code" in each for each in result.value)


@pytest.mark.conforms("Q29")
async def test_the_process_backend_is_a_backend() -> None:
    backend: Backend = ProcessBackend()
    await backend.open()
    try:
        sandbox: Sandbox = await backend.start(Limits())
        await sandbox.destroy()
        await sandbox.destroy()
    finally:
        await backend.close()
        await backend.close()


async def test_a_script_reads_what_an_exception_says_only_where_its_tool_allows_it() -> None:
    registry = ToolRegistry()

    def query(sql: str) -> str:
        """Run a query on the database."""
        raise LookupError("no such column: nmae")

    def guarded(sql: str) -> str:
        """Run a query on the other database."""
        raise LookupError("no such column: nmae")

    registry.add(query, expose_errors=True)
    registry.add(guarded)
    async with Runtime(registry) as runtime:
        code = (
            "said = []\nfor tool in (tools.query, tools.guarded):\n"
            "    try: tool('x')\n    except ToolError as e: said.append([e.code, str(e)])\nset_result(said)"
        )
        result = await runtime.execute_code(code)

    assert result.value == [
        ["tool_error", "Tool 'query' failed: LookupError: no such column: nmae"],
        ["exception", "Tool 'guarded' failed: the tool raised LookupError"],
    ]


async def test_a_chart_that_a_script_draws_is_an_image_for_the_model() -> None:
    async with coding() as registry:
        code = "open('c.png', 'wb').write(b'\\x89PNG\\r\\n\\x1a\\n')\nset_result('drawn', files=['c.png'])"
        result = await registry.dispatch("execute_code", {"code": code})

    assert result.text == '"drawn"\n\nfiles returned: c.png (image/png, 8 bytes)'
    assert [image.media_type for image in result.images] == ["image/png"]
