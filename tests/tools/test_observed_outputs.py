"""Types of results that tools do not declare: seen in results, marked in stubs, in nothing that a run depends on."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from rows import each_row
from toolcell import SyncRuntime
from toolcell.agents import Agent
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.compat import register_or_replace
from toolcell.control.type_check import described, stubs_of
from toolcell.errors import UsageError
from toolcell.journal.identity import registry_digest, tool_digests
from toolcell.tools import Origin, RunContext, ToolRegistry
from toolcell.tools.observed_output import MAX_FIELDS, MAX_RESULTS, MAX_VISITED, ObservedOutput
from toolcell.tools.stubs import OBSERVED
from tools.toolkit import FakeRuntime

pytestmark = pytest.mark.anyio
ANYTHING: dict[str, Any] = {"type": "object", "properties": {"value": {}}}


def registry_of(observe: bool = True) -> ToolRegistry:
    registry = ToolRegistry(observe_outputs=observe)
    registry.register("echo", "Answers with what it was given", ANYTHING, lambda args: args["value"])
    registry.register("other", "Answers with what it was given", ANYTHING, lambda args: args["value"])
    return registry


async def see(registry: ToolRegistry, *values: Any, **options: Any) -> ToolRegistry:
    for value in values:
        await registry.dispatch("echo", {"value": value}, **options)
    return registry


def line(registry: ToolRegistry) -> str:
    return registry.describe_tools(["echo"], detail="signatures").partition("->")[2].partition("  #")[0].strip()


def of(*values: Any) -> Any:
    seen = ObservedOutput()
    for value in values:
        seen.add(value)
    return {key: each for key, each in (seen.schema() or {}).items() if key != OBSERVED}


STRING, WHOLE = {"type": "string"}, {"type": "integer"}


@each_row(
    ("values", "schema"),
    [
        (["a", "b"], STRING),
        ([1, 2.5], {"type": "number"}),
        ([True, 1], {"anyOf": [{"type": "boolean"}, WHOLE]}),
        ([None, "a"], {"anyOf": [{"type": "null"}, STRING]}),
        ([b"a", b""], {"type": "string", "contentEncoding": "base64"}),
        ([[], [1], [2]], {"type": "array", "items": WHOLE}),
        ([[], []], {"type": "array"}),
        (
            [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}, {"a": 3}],
            {"type": "object", "properties": {"a": WHOLE, "b": STRING}, "required": ["a"]},
        ),
        (
            [{"a": 1, "ada@example.com": 1}, {"a": 2, "bob": 1}],
            {"type": "object", "properties": {"a": WHOLE}, "required": ["a"]},
        ),
        ([{"x" * 65: 1}] * 2, {"type": "object"}),
        ([{str(key): 1 for key in range(MAX_FIELDS + 1)}] * 2, {"type": "object"}),
        (["a"], {}),
    ],
)
def test_a_type_is_that_of_everything_that_was_seen(values: list[Any], schema: dict[str, Any]) -> None:
    assert of(*values) == schema


def test_what_is_kept_and_looked_at_is_bounded() -> None:
    deep: Any = 1
    for _ in range(50):
        deep = {"in": [deep]}
    wide = [{f"key{number}_{other}": number for other in range(20)} for number in range(10_000)]
    seen = ObservedOutput()
    for number in range(MAX_RESULTS * 2):
        seen.add([deep, wide, number])

    schema = seen.schema()
    assert schema is not None and schema[OBSERVED] == MAX_RESULTS
    assert len(repr(schema)) < 20_000
    visited = ObservedOutput()
    visited.add([1] * (MAX_VISITED * 2) + ["late"])
    visited.add([1])
    assert visited.schema() == {"type": "array", "items": WHOLE, OBSERVED: 2}


async def test_stubs_have_the_observed_type_and_say_so() -> None:
    registry = await see(registry_of(), *[[{"title": "x", "score": 1.5}]] * 3)
    registry.enable_code_execution(FakeRuntime(nothing))

    module = registry.to_python()
    [told] = [each.description for each in registry.definitions() if each.name == "execute_code"]

    for text in (module, told):
        assert "-> list[EchoResult]:  # returns as observed in 3 results" in text
        assert "class EchoResult(TypedDict):\n    title: str\n    score: float" in text
    assert line(registry) == "list[dict[str, Any]] (observed)"
    assert "def other(*, value: Any = None) -> Any:\n" in module
    ast.parse(module)


async def nothing(call_tool: Any) -> Any:
    return None


async def test_nothing_is_observed_unless_it_is_asked_for() -> None:
    assert line(await see(registry_of(False), "a", "b")) == "Any"
    with pytest.raises(UsageError, match="observe_outputs must be bool"):
        ToolRegistry(observe_outputs="yes")


async def test_failures_declared_types_and_dry_runs_are_not_observed() -> None:
    registry = registry_of()

    @registry.tool
    def count() -> int:
        """Count everything that there is."""
        return 3

    @registry.tool
    def fail() -> Any:
        """Fail with an exception, always."""
        raise ValueError("no")

    for _ in range(3):
        await registry.dispatch("count", {})
        await registry.dispatch("fail", {})
    with SyncRuntime(registry) as runtime:
        runtime.execute_code("for _ in range(3): call_tool('echo', value='x')", dry_run=True)

    assert "def count() -> int:\n" in registry.to_python()
    assert registry.to_python().count("observed") == 0


@each_row("origin", list(Origin))
async def test_calls_from_everywhere_are_observed_under_every_name_of_a_tool(origin: Origin) -> None:
    registry = registry_of()
    registry.alias("echo2", "echo")
    run = RunContext()

    await see(registry, "a", origin=origin, context=run)
    await registry.snapshot().subset(["echo2"]).dispatch("echo2", {"value": "b"}, origin=origin, context=run)

    assert line(registry) == "str (observed)"
    assert "echo2(value: Any = None) -> str (observed)" in registry.describe_tools(["echo2"], detail="signatures")


async def test_what_replaces_a_tool_starts_afresh() -> None:
    registry = await see(registry_of(), 1, 2)
    register_or_replace(registry, "echo", "Answers with something else", ANYTHING, lambda args: "x")
    assert line(registry) == "Any"


@pytest.mark.isolation
async def test_a_run_an_identity_and_a_check_of_types_do_not_depend_on_what_was_observed() -> None:
    registry = registry_of()
    before = registry.snapshot()
    digest, checked, mcp = registry_digest(tool_digests(registry)), stubs_of(described(registry)), registry.to_mcp()

    await see(registry, {"a": 1}, {"a": 2})
    after = registry.snapshot()
    await see(registry, "now", "something", "else")

    assert (line(before), line(after)) == ("Any", "dict[str, Any] (observed)")
    assert line(registry) == "dict[str, Any] | str (observed)"
    for each in (registry, after):
        assert (registry_digest(tool_digests(each)), stubs_of(described(each)), each.to_mcp()) == (digest, checked, mcp)
        assert each.returns("echo") is None


@pytest.mark.isolation
def test_what_a_script_is_told_does_not_depend_on_what_was_observed() -> None:
    registry = registry_of()
    script = "set_result([call_tool('echo', value=1), list_tools('echo', detail='full')])"
    with SyncRuntime(registry) as runtime:
        told = [runtime.execute_code(script).value[1] for _ in range(4)]

    assert len(set(told)) == 1 and "observed" not in told[0]
    assert line(registry) == "int (observed)"


async def test_an_agent_s_model_is_told_from_the_next_run_on() -> None:
    registry = registry_of()
    twice = calls(("echo", {"value": "a"}), ("echo", {"value": "b"}))
    model = ScriptedModel([twice, "done", "done"])
    agent = Agent(model, tools=registry, code_execution=FakeRuntime(nothing))

    await agent.run("Go on")
    await agent.run("Go on")

    told = [
        next(each.description for each in request.tools if each.name == "execute_code") for request in model.requests
    ]
    assert ["as observed in 2 results" in text for text in told] == [False, False, True]
