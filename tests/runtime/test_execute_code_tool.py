"""`execute_code` as a model's tool, over a real sandbox."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from toolcell import Limits, Runtime, ToolRegistry

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


@pytest.mark.conforms("Q3", "Q4", "Q5", "EX-10")
async def test_the_documented_example_runs_as_a_tool_call() -> None:
    async with coding() as registry:
        result = await registry.dispatch("execute_code", json.dumps({"code": EX_10}))

    assert json.loads(result.text) == {"top_results": [{"title": "a", "score": 0.9}]}
    assert result.value == {"top_results": [{"title": "a", "score": 0.9}]}


@pytest.mark.slow
async def test_the_model_reads_which_limit_an_exception_of_its_script_ran_into() -> None:
    async with coding() as registry:
        memory = await registry.dispatch("execute_code", {"code": "bytearray(1 << 40)"})
        processes = await registry.dispatch("execute_code", {"code": "import os\nwhile True: os.fork()"})

    assert f"MemoryError\nthe run's limit memory_bytes is {Limits().memory_bytes}, and " in memory.text
    if os.geteuid() == 0:  # where nothing counts the processes, only the system's own message is known
        assert f"\nthe run's limit processes is {Limits().processes}, and " in processes.text


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
