"""Types of scripts are checked on every route on which a script arrives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mcp.client.client import Client
from typer.testing import CliRunner

from rows import each_row
from toolcell import Outcome, Policy, RunContext, Runtime, SyncRuntime, ToolRegistry
from toolcell.cli import build, exits
from toolcell.config import CheckTypes
from toolcell.mcp.server import McpServer
from toolcell.testing import FakeBackend

pytest.importorskip("ty", reason="needs ty: pip install 'toolcell[types]'")
pytestmark = [pytest.mark.anyio, pytest.mark.isolation]

HIDDEN = 'if len(OUTPUT_DIR) > 9_999:\n    tools.look_up(wrod="x")\nset_result(40 + 2)'
"""Wrong in a branch that no run takes."""

TOOLS = '''
def look_up(word: str) -> str:
    """Look a word up in the dictionary."""
    return word
'''


def dictionary() -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool
    def look_up(word: str) -> str:
        """Look a word up in the dictionary."""
        return word

    return registry


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(build(arguments), list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_command_line_warns_on_stderr_refuses_or_does_not_look(tmp_path: Path) -> None:
    (tmp_path / "tools_of_types.py").write_text(TOOLS)
    run = ("run", "-c", HIDDEN, "--tools", str(tmp_path / "tools_of_types.py"))

    assert invoke(*run) == invoke(*run, "--check-types", "off") == (exits.OK, "42\n", "")
    status, out, err = invoke(*run, "--check-types", "warn")
    assert (status, out) == (exits.OK, "42\n") and "types: line 2: " in err and "wrod" in err
    status, out, err = invoke(*run, "--check-types", "refuse")
    assert status == exits.BY_OUTCOME[Outcome.DENIED] and "42" not in out
    assert "wrod" in err and "the script was not run" in err
    status, out, _ = invoke(*run, "--check-types", "warn", "--json")
    assert [each["line"] for each in json.loads(out)["type_findings"]] == [2, 2]
    assert invoke(*run, "--check-types", "maybe")[0] == exits.USAGE


@each_row(
    ("of_server", "offered"),
    [
        (None, ["off", "warn", "refuse"]),
        ("warn", ["warn", "refuse"]),
        ("refuse", ["refuse"]),
    ],
)
async def test_an_mcp_client_may_have_a_script_checked_more_strictly_and_not_less(
    of_server: CheckTypes | None, offered: list[str]
) -> None:
    async with (
        Runtime(dictionary(), check_types=of_server) as runtime,
        McpServer(runtime, has_one_client=True) as server,
        Client(server.server) as client,
    ):
        [tool] = [each for each in (await client.list_tools()).tools if each.name == "execute_code"]
        assert tool.input_schema["properties"]["check_types"]["enum"] == offered
        answers = {}
        for given in (None, "off", "warn", "refuse"):
            options = {"check_types": given} if given else {}
            answers[given or of_server or "off", given] = await client.call_tool(
                "execute_code", {"code": HIDDEN, **options}
            )

    for (degree, given), answer in answers.items():
        said = "".join(getattr(part, "text", "") for part in answer.content)
        if given is not None and given not in offered:
            assert answer.is_error and "invalid arguments" in said and "check_types" in said
        elif degree == "refuse":
            assert answer.structured_content["outcome"] == "denied" and "wrod" in said
        else:
            assert answer.structured_content["value"] == 42
            assert ("wrod" in said) == ("type_findings" in answer.structured_content) == (degree == "warn")


async def test_an_mcp_session_knows_the_names_of_its_earlier_scripts() -> None:
    async with (
        Runtime(dictionary(), check_types=True) as runtime,
        McpServer(runtime, has_one_client=True, keeps_state=True) as server,
        Client(server.server) as client,
    ):
        await client.call_tool("execute_code", {"code": "x = 40"})
        known = await client.call_tool("execute_code", {"code": "x + 2"})
        wrong = await client.call_tool("execute_code", {"code": "y + 2"})
    assert known.structured_content["value"] == 42
    assert wrong.structured_content["outcome"] == "denied"


def test_blocking_runs_sessions_and_plans_are_checked_too() -> None:
    registry = dictionary()
    with SyncRuntime(registry, policy=Policy(check_types=True)) as runtime:
        registry.enable_code_execution(runtime.runtime)
        assert runtime.execute_code(HIDDEN).outcome is Outcome.DENIED
        assert runtime.execute_code(HIDDEN, check_types="warn").type_findings
        with runtime.session() as session:
            assert session.execute_code(HIDDEN).outcome is Outcome.DENIED
            session.execute_code("x = 40")
            assert session.execute_code("x + 2").value == 42
        step: Any = {"tool": "execute_code", "args": {"code": HIDDEN}}
        [row] = runtime.execute_plan([step])
        assert "wrod" in str(row)


async def test_a_stream_ends_with_the_findings_and_prints_nothing_of_a_script_that_was_refused() -> None:
    async with Runtime(dictionary()) as runtime:
        for degree, outcome in (("warn", Outcome.OK), ("refuse", Outcome.DENIED)):
            events = [event async for event in runtime.stream(f"print(1)\n{HIDDEN}", check_types=degree)]
            result = events[-1].result  # type: ignore[union-attr]
            assert result.outcome is outcome and len(result.type_findings) == 2
            assert (len(events) > 1) == result.ok


async def test_the_checker_has_its_own_sandbox_whatever_backend_runs_the_scripts() -> None:
    """Docker's is a backend like any other; this one isolates nothing, so no check is made that nobody asked for."""
    async with Runtime(dictionary(), backend=FakeBackend(), allow_unisolated=True) as runtime:
        refused = await runtime.execute_code(HIDDEN, check_types="refuse")
        unasked = await runtime.execute_code(HIDDEN, context=RunContext(check_types="warn"))
        asked = await runtime.execute_code(HIDDEN, check_types="warn")

    assert refused.outcome is Outcome.DENIED
    assert [len(each.type_findings) for each in (refused, unasked, asked)] == [2, 0, 2]
