"""Types of a script are checked before it runs, in a sandbox of its own."""

from __future__ import annotations

import ast
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from toolcell import Outcome, Policy, Runtime, SyncRuntime, ToolRegistry, UsageError
from toolcell.control.in_type_check import direct_calls
from toolcell.control.type_check import SCRIPT, TypeChecker, read_findings
from toolcell.sandbox.process import type_checker

pytest.importorskip("ty", reason="needs ty: pip install 'toolcell[types]'")
pytestmark = pytest.mark.anyio

HIT = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
made: list[str] = []


def searching() -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool(name="web.search", returns={"type": "array", "items": HIT})
    def search(query: str, limit: int = 10, tags: list[float] | None = None, mode: str = "a") -> Any:
        """Search the web for pages."""
        made.append(query)
        return [{"title": query}]

    return registry


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """One runtime serves all tests of this file, so they share an event loop."""
    return "asyncio"


@pytest.fixture(scope="module")
async def runtime() -> AsyncIterator[Runtime]:
    async with Runtime(searching(), policy=Policy(check_types=True)) as opened:
        yield opened


async def test_a_wrong_argument_name_type_and_use_of_a_result_are_three_findings_before_any_call(
    runtime: Runtime,
) -> None:
    made.clear()
    source = (
        'tools.web.search(query="first")\n'
        'tools.web.search(query="x", limmit=3)\n'
        'call_tool("web.search", {"query": "x", "limit": "many"})\n'
        'for hit in await call_tool_async("web.search", query="x"):\n'
        '    print(hit["titel"])\n'
    )

    result = await runtime.execute_code(source)

    assert (result.outcome, made) == (Outcome.DENIED, [])
    assert result.error is not None
    assert [each["line"] for each in result.error.findings] == [2, 3, 5]
    for word in ("line 2: ", "limmit", "Expected `int`", "titel", "the script was not run"):
        assert word in result.error.message


RIGHT = (
    'tools.web.search("x", 3)',
    'tools.web.search({"query": "x"})',
    'given = {"query": "x", "limit": 2}\ntools.web.search(given)\ncall_tool("web.search", given)',
    'whole = [1, 2]\ncall_tool("web.search", query="x", tags=whole)',
    'for mode in ["a", "b"]:\n    tools.web.search(query="x", mode=mode)',
    'call_tool("web.search", {"query": ("x"), "limit": int("3")},\n)[0]["title"].upper()',
    'call_tool("web.search", {"query": "x"}, raw=True).upper()',
    "await call_tool_async('web.search', query=text)",
    'import numpy\nname = "web.search"\ncall_tool(name, query="x")\ntools["web"].search(query="x")',
    "set_result([OUTPUT_DIR, input_files, rows[0], list_tools()])",
)


async def test_scripts_that_a_sandbox_takes_have_no_findings(runtime: Runtime) -> None:
    registry = runtime.registry.snapshot()
    for source in RIGHT:
        refused = await runtime._type_checker.refusal("run", source, registry, {"rows": [1], "text": "x"})
        assert refused is None, (source, refused)


async def test_a_script_that_is_no_python_is_left_to_its_run(runtime: Runtime) -> None:
    result = await runtime.execute_code("a b")
    assert (result.outcome, result.error.type if result.error else "") == (Outcome.ERROR, "SyntaxError")


@pytest.mark.parametrize("source", ["(" * 50_000, "-" * 300_000 + "1", "x = '\ud800'", "\0", "a" + ".b" * 100_000])
async def test_a_hostile_text_ends_nothing_but_its_own_check(runtime: Runtime, source: str) -> None:
    result = await runtime.execute_code(source)
    assert result.outcome in (Outcome.ERROR, Outcome.DENIED, Outcome.MEMORY_LIMIT)
    assert (await runtime.execute_code("1 + 1")).value == 2


async def test_the_checker_cannot_read_a_file_of_the_host(runtime: Runtime, tmp_path: Path) -> None:
    secret = tmp_path / "secret.py"
    secret.write_text("value: int = 1\n")
    opened = await runtime._type_checker._open()

    result = await opened.execute_code(
        "import os, socket, subprocess\n"
        "ran = subprocess.run(['/packages/bin/ty', 'check', path], capture_output=True, text=True,"
        " env={'LD_LIBRARY_PATH': '/packages/lib'})\n"
        "try:\n    socket.create_connection(('127.0.0.1', 22), 1)\n    net = ''\n"
        "except OSError as exc:\n    net = type(exc).__name__\n"
        "set_result([os.path.exists(path), ran.returncode, os.listdir('/packages'), os.access('/packages', os.W_OK), net])",
        inputs={"path": str(secret)},
    )

    assert result.ok, result.error
    exists, code, names, writes, net = result.value
    assert (exists, sorted(names), writes) == (False, ["bin", "lib"], False)
    assert code != 0
    assert net


async def test_what_was_not_asked_for_is_not_checked_and_a_call_decides_before_the_policy(runtime: Runtime) -> None:
    wrong = 'tools.web.search(limmit="x")'
    assert (await runtime.execute_code(wrong, check_types=False)).outcome is Outcome.ERROR
    with pytest.raises(UsageError, match="check_types"):
        await runtime.execute_code("1", check_types="warn")  # type: ignore[arg-type]


async def test_a_models_script_and_a_stream_are_checked_too(runtime: Runtime) -> None:
    registry = searching()
    registry.enable_code_execution(runtime)

    answered = await registry.execute("execute_code", {"code": "tools.web.search(limmit=1)"})
    events = [event async for event in runtime.stream("tools.web.search(limmit=1)")]

    assert "limmit" in answered.text
    assert events[-1].result.outcome is Outcome.DENIED  # type: ignore[union-attr]


def test_a_blocking_runtime_checks_too() -> None:
    with SyncRuntime(searching()) as runtime:
        result = runtime.execute_code("tools.web.search(limmit=1)", check_types=True)
    assert result.outcome is Outcome.DENIED


async def test_without_ty_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ty", None)
    with pytest.raises(UsageError, match=r"pip install 'toolcell\[types\]'"):
        type_checker.build()


@pytest.mark.parametrize(
    "rows", [None, 3, [None], [["1", "r", "m"]], [[1, "r"]], [[1, "r", 2]], {"line": 1}, [[[], {}, ()]]]
)
def test_findings_that_are_none_are_left_out(rows: Any) -> None:
    assert read_findings(rows) == ()


def test_calls_are_rewritten_line_by_line() -> None:
    source = 'x = call_tool(\n    "a.b",  # which\n    {"q": "ü",\n     "n": 1},\n)\nbad\n'

    text = direct_calls(source, {"a.b": "a.b"})

    assert text.splitlines()[-1] == "bad"
    assert len(text.splitlines()) == 6
    [call] = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    assert ast.unparse(call) == "tools.a.b(q='ü', n=1)"


def test_the_text_of_the_checker_is_a_script() -> None:
    ast.parse(SCRIPT)
    assert TypeChecker.__doc__
