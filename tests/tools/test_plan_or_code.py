"""Group R: the choice between a plan and code, descriptions for the model, typed stubs, results of code as text."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolcell.agents import Agent
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.config import Policy
from toolcell.errors import SandboxUnavailable, UsageError
from toolcell.results import ErrorInfo, ExecutionResult, LogEntry, Logs, Outcome, OutputFile, ToolCallRecord
from toolcell.tools import CodeRuntime, ToolDefinition, ToolRegistry
from toolcell.tools.code import CodeTool
from toolcell.tools.stubs import python_stubs
from tools.toolkit import FakeRuntime, Meeting

pytestmark = pytest.mark.anyio


async def nothing(call_tool: Any) -> Any:
    return None


def searching() -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool
    async def web_search(query: str, limit: int = 10, tags: list[str] | None = None) -> list[dict[str, object]]:
        """Search the web for current information.

        Args:
            query: what to look for
        """
        return [{"title": query, "score": len(query) / 10}]

    return registry


@pytest.mark.conforms("R1", "R2", "R4", "EX-9", "P15")
async def test_a_plan_fans_out_and_code_computes_with_results_for_the_same_two_samplings() -> None:
    meeting = Meeting(3)
    registry = ToolRegistry()

    @registry.tool
    async def price(item: str) -> int:
        """Look up the price of an item."""
        await meeting.join()
        return len(item)

    items = ["tea", "coffee", "water"]

    async def script(call_tool: Any) -> Any:
        return max([await call_tool("price", {"item": item}) for item in items])

    steps = [{"tool": "price", "args": {"item": item}} for item in items]
    planned = ScriptedModel([calls(("execute_plan", {"steps": steps})), "coffee"])
    coded = ScriptedModel([calls(("execute_code", {"code": "..."})), "coffee"])

    await Agent(planned, tools=registry, plan_execution=True).run("Which is dearest?")
    await Agent(coded, tools=registry, code_execution=FakeRuntime(script)).run("Which is dearest?")

    assert meeting.most == 3
    assert [row["result"] for row in json.loads(planned.requests[1].messages[-1]["content"])] == [3, 6, 5]
    assert coded.requests[1].messages[-1]["content"] == "6"
    assert planned.samplings == coded.samplings == 2


@pytest.mark.conforms("R5", "R-b1", "A15")
def test_descriptions_say_when_to_use_which_and_mention_only_what_is_on_offer() -> None:
    def told(plan: bool, code: bool) -> dict[str, str]:
        registry = searching()
        if plan:
            registry.enable_plan_execution()
        if code:
            registry.enable_code_execution(FakeRuntime(nothing))
        return {each.name: each.description for each in registry.definitions()}

    plan, code, both = told(True, False), told(False, True), told(True, True)

    assert "execute_code" not in plan["execute_plan"]
    assert "execute_plan" not in code["execute_code"]
    assert "use execute_code instead" in both["execute_plan"]
    assert "execute_plan is simpler" in both["execute_code"]
    assert "costs a turn each" in plan["execute_plan"]
    assert "def web_search(*, query: str, limit: int = 10" in code["execute_code"]
    assert "call_tool(name, args)" in code["execute_code"]


@pytest.mark.conforms("R-b1", "M-b3")
def test_the_description_of_code_offers_only_what_code_may_call() -> None:
    registry = searching()
    registry.register("shell_exec", "Run a command in a shell", {"type": "object", "properties": {}}, lambda args: "")
    registry.blacklist("shell_*", origins=["code"])  # type: ignore[list-item]
    registry.enable_code_execution(FakeRuntime(nothing))
    [code] = [each.description for each in registry.definitions() if each.name == "execute_code"]

    assert "shell_exec" not in code


@pytest.mark.conforms("R-b1")
def test_stubs_are_typed_python_with_records_and_choices() -> None:
    schema = {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to look for.\nBe specific."},
            "mode": {"enum": ["brief", "detailed"], "default": "brief"},
            "where": {
                "type": "object",
                "properties": {"site": {"type": "string"}, "lang": {"type": "object", "properties": {"code": {}}}},
                "required": ["site"],
            },
            "ids": {"type": "array", "items": {"type": ["integer", "null"]}},
            "from": {"type": "string"},
        },
        "required": ["query"],
    }
    stub = python_stubs([(ToolDefinition("find-docs", 'Find """documents""".', schema), {"type": "array"})])

    ast.parse(stub)
    assert stub == (
        "class FindDocsWhereLang(TypedDict):\n"
        "    code: NotRequired[Any]\n"
        "\n\n"
        "class FindDocsWhere(TypedDict):\n"
        "    site: str\n"
        "    lang: NotRequired[FindDocsWhereLang]\n"
        "\n\n"
        "def find_docs(\n"
        "    *,\n"
        "    query: str,\n"
        "    mode: Literal['brief', 'detailed'] = 'brief',\n"
        "    where: FindDocsWhere | None = None,\n"
        "    ids: list[int | None] | None = None,\n"
        "    **others: Any,\n"
        ") -> list[Any]:\n"
        '    """Find \\"\\"\\"documents\\"\\"\\".\n'
        "\n"
        "    Call it as call_tool('find-docs', {...}).\n"
        "\n"
        "    Args:\n"
        "        query: What to look for. Be specific.\n"
        '    """'
    )


schemas = st.recursive(
    st.sampled_from(
        [{"type": kind} for kind in ("string", "integer", "number", "boolean", "null")]
        + [{}, True, {"const": 1.5}, {"enum": ["a", None, 2]}, {"enum": [[1], {}]}, {"type": "strng"}]
    ),
    lambda inner: (
        st.builds(lambda item: {"type": "array", "items": item}, inner)
        | st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, max_size=3))
        | st.builds(
            lambda parts: {"type": "object", "properties": parts},
            st.dictionaries(st.text(min_size=1, max_size=4), inner, max_size=3),
        )
        | st.builds(lambda part: {"type": "object", "additionalProperties": part}, inner)
    ),
    max_leaves=8,
)


@pytest.mark.conforms("R-b1")
@given(
    properties=st.dictionaries(st.text(min_size=1, max_size=6), schemas, max_size=4),
    description=st.text(max_size=40),
    name=st.from_regex(r"[A-Za-z0-9_-]{1,10}", fullmatch=True),
)
def test_any_schema_gives_a_stub_that_is_python(properties: dict[str, Any], description: str, name: str) -> None:
    described = {
        key: {**part, "description": description} if isinstance(part, dict) else part
        for key, part in properties.items()
    }
    schema = {"type": "object", "properties": described, "required": list(properties)[:1]}

    tree = ast.parse(python_stubs([(ToolDefinition(name, description, schema), None)]))

    assert isinstance(tree.body[-1], ast.FunctionDef)


def test_a_record_that_is_used_twice_is_one_class_in_a_stub() -> None:
    point = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
    line = {"type": "object", "properties": {"points": {"type": "array", "items": point}}}
    schema = {"type": "object", "properties": {"a": point, "b": {**point, "description": "the other"}, "line": line}}

    stub = python_stubs([(ToolDefinition("distance", "Measure how far it is.", schema), point)])

    assert stub.count("(TypedDict)") == 2
    assert [line.strip() for line in stub.splitlines() if "Distance" in line] == [
        "class DistanceA(TypedDict):",
        "class DistanceLine(TypedDict):",
        "points: NotRequired[list[DistanceA]]",
        "a: DistanceA | None = None,",
        "b: DistanceA | None = None,",
        "line: DistanceLine | None = None,",
        ") -> DistanceA:",
    ]


def test_a_whole_registry_is_one_module_of_stubs() -> None:
    registry = searching()
    registry.enable_plan_execution()

    module = ast.parse(registry.to_python())

    assert [node.name for node in module.body if isinstance(node, ast.FunctionDef)] == ["web_search"]
    assert python_stubs([]) == ""


# What came of a script, in words


def ended(outcome: Outcome = Outcome.OK, **fields: Any) -> ExecutionResult:
    return ExecutionResult("run", outcome, **fields)


LOGS = Logs((LogEntry("stdout", "step 1\n"), LogEntry("stderr", "[toolcell] careful\n")))


@pytest.mark.conforms("Q5", "R6")
def test_success_is_the_result_as_json_and_then_the_logs() -> None:
    assert CodeTool.result(ended(value={"a": 1}, has_value=True)).text == '{"a": 1}'
    assert CodeTool.result(ended(value=None, has_value=True)).text == "null"
    assert CodeTool.result(ended()).text == "(no result set — use set_result(data) to return structured output)"
    assert (
        CodeTool.result(ended(value=[1], has_value=True, logs=LOGS)).text == "[1]\n\nlogs:\nstep 1\n[toolcell] careful"
    )
    said = ended(logs=LOGS, warnings=("careful", "step 1", "care"))
    assert CodeTool.result(said).text.endswith(
        "output)\n\nwarning: step 1\n\nwarning: care\n\nlogs:\nstep 1\n[toolcell] careful"
    )
    assert "\n\nwarning: careful\n\nwarning: step 1" in CodeTool.result(said, with_logs=False).text


@pytest.mark.conforms("Q6")
def test_failure_is_the_error_what_ran_already_and_the_logs() -> None:
    error = ErrorInfo("ZeroDivisionError", "division by zero", line=3)
    made = (ToolCallRecord("call_1", "send", {}, "ok"), ToolCallRecord("call_2", "read", {}, "error"))

    failed = CodeTool.result(ended(Outcome.ERROR, error=error, logs=LOGS, calls=made))
    late = CodeTool.result(ended(Outcome.TIMEOUT, error=ErrorInfo("wall_s", "execution timed out after 2 s")))

    assert failed.is_error
    assert failed.text == (
        "ZeroDivisionError: division by zero (line 3)\n\n"
        "tool calls already made: send (ok), read (error)\n\nlogs:\nstep 1\n[toolcell] careful"
    )
    assert late.text.startswith("execution timed out after 2 s\ndo less in one script")
    assert [result.error.code for result in (failed, late) if result.error] == ["exception", "timeout"]


@pytest.mark.conforms("Q8")
def test_a_result_set_before_a_failure_and_files_that_were_lost_are_told() -> None:
    error = ErrorInfo("ValueError", "too late")
    lost = OutputFile("big.bin", "application/octet-stream", 9, None, problem="too large (9 > 5 bytes)")
    kept = OutputFile("a.txt", "text/plain", 1, b"a")

    result = CodeTool.result(ended(Outcome.ERROR, error=error, value={"a": 1}, has_value=True, files=(lost, kept)))

    assert 'result set before the failure: {"a": 1}' in result.text
    assert "files not returned: big.bin: too large (9 > 5 bytes)" in result.text
    assert [file.name for file in result.files] == ["a.txt"]
    assert result.details["outcome"] == "error"


@pytest.mark.conforms("Q1", "Q2", "Q6")
async def test_code_is_opt_in_and_says_in_its_own_words_what_is_wrong_with_a_call() -> None:
    class Broken(CodeRuntime):
        def __init__(self, exc: Exception) -> None:
            self.exc = exc

        async def execute_code(self, source: str, /, **_: Any) -> ExecutionResult:
            raise self.exc

    registry = searching()
    unknown = await registry.execute("execute_code", {"code": "x"})
    registry.enable_code_execution(Broken(SandboxUnavailable("no user namespaces")))

    empty = await registry.execute("execute_code", {"code": "  \n"})
    broken = await registry.execute("execute_code", "{bad")
    missing = await registry.execute("execute_code", {})
    down = await registry.execute("execute_code", {"code": "x"})
    registry.enable_code_execution(Broken(UsageError("source is too large")))
    large = await registry.execute("execute_code", {"code": "x"})

    assert "unknown tool: execute_code" in unknown.text
    assert empty.text == "execute_code requires non-empty code"
    assert broken.text.startswith("invalid execute_code args: ")
    assert missing.text.startswith("invalid execute_code args: validation failed")
    assert down.text == "code execution failed: no user namespaces"
    assert large.text == "code execution failed: source is too large"
    [definition] = [each for each in registry.definitions() if each.name == "execute_code"]
    assert definition.parameters["required"] == ["code"]


@pytest.mark.conforms("Q10")
async def test_code_reaches_neither_itself_nor_a_plan_under_any_name() -> None:
    refused: list[str] = []

    async def script(call_tool: Any) -> Any:
        for name in ("execute_code", "execute_plan", "innocent"):
            try:
                await call_tool(name, {"code": "x", "steps": []})
            except Exception as exc:
                refused.append(str(exc))

    registry = searching()
    registry.enable_plan_execution()
    registry.enable_code_execution(FakeRuntime(script))
    registry.alias("innocent", "execute_code")

    await registry.execute("execute_code", {"code": "x"})

    assert refused == [
        f"{name} cannot be called from within execute_code" for name in ("execute_code", "execute_plan", "innocent")
    ]


@pytest.mark.conforms("V-10", "Q5")
async def test_what_was_printed_is_always_told_to_the_model_unless_that_is_switched_off() -> None:
    async def script(call_tool: Any) -> Any:
        return 1

    talkative, discreet = FakeRuntime(script, logs="a\x1b[31mred\u202e\n"), FakeRuntime(script, logs="secret")
    discreet.policy = Policy(logs_to_model=False)
    registry = searching()

    registry.enable_code_execution(talkative)
    told = await registry.execute("execute_code", {"code": "x"})
    registry.enable_code_execution(discreet)
    untold = await registry.execute("execute_code", {"code": "x"})

    assert told.text == "1\n\nlogs:\nared\\u202e"
    assert untold.text == "1"
