"""What a tool returns, in every form of tool, is what each reader of its result gets."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic
import pytest

from tool_routes import ROUTES, answer_by
from toolcell import Agent, Limits, PoolConfig, Runtime, ToolContext, ToolDefinition, ToolRegistry, ToolResult
from toolcell.audit.query import Index
from toolcell.compat import Err, Ok
from toolcell.testing import ScriptedModel, calls
from toolcell.tools import AgentTool, Tool

pytestmark = [pytest.mark.quick, pytest.mark.anyio]

NOTHING: dict[str, Any] = {"type": "object", "properties": {}}

VALUES: dict[str, tuple[Any, Any, str]] = {
    "empty text": ("", "", ""),
    "text": ("a b", "a b", "a b"),
    "number as text": ("3", "3", "3"),
    "null as text": ("null", "null", "null"),
    "zero": (0, 0, "0"),
    "false": (False, False, "false"),
    "half": (0.5, 0.5, "0.5"),
    "empty list": ([], [], "[]"),
    "empty dict": ({}, {}, "{}"),
    "empty texts": (["", None], ["", None], '["", null]'),
    "null inside": ({"a": None, "": 0}, {"a": None, "": 0}, '{"a": null, "": 0}'),
    "object as text": ('{"a": ""}', {"a": ""}, '{"a": ""}'),
    "list as text": ("[]", [], "[]"),
}
"""What a tool returns, what scripts, plans and programs get, and what a model reads."""


class Simple:
    """A tool with one function."""

    description, parameters = "Return the value.", NOTHING

    def __init__(self, name: str, value: Any) -> None:
        self.name, self._value = name, value

    def execute(self, ctx: ToolContext, args: dict[str, Any]) -> Any:
        return self._value


class Several:
    """A tool with functions."""

    def __init__(self, name: str, value: Any) -> None:
        self._name, self._value = name, value

    def definitions(self) -> list[ToolDefinition]:
        return [ToolDefinition(self._name, "Return the value.", NOTHING)]

    async def execute(self, ctx: ToolContext, name: str, args: dict[str, Any]) -> Any:
        return self._value


def add_function(registry: ToolRegistry, name: str, value: Any) -> None:
    def function() -> Any:
        return value

    registry.add(function, name=name, description="Return the value.")


def add_async(registry: ToolRegistry, name: str, value: Any) -> None:
    async def function() -> Any:
        return value

    registry.add(function, name=name, description="Return the value.")


def add_annotated(registry: ToolRegistry, name: str, value: Any) -> None:
    def function():  # type: ignore[no-untyped-def]
        return value

    function.__annotations__["return"] = type(value)
    registry.add(function, name=name, description="Return the value.")


def add_ok(registry: ToolRegistry, name: str, value: Any) -> None:
    def function() -> Any:
        return Ok(value) if type(value) is str else value

    function.__annotations__["return"] = Ok | Err
    registry.add(function, name=name, description="Return the value.")


def add_record(registry: ToolRegistry, name: str, value: Any) -> None:
    registry.add(AgentTool(ToolDefinition(name, "Return the value.", NOTHING), execute=lambda: value))


def as_ok(value: Any) -> ToolResult:
    return ToolResult.ok(value) if isinstance(value, str) else ToolResult.of(value)


FORMS: dict[str, Callable[[ToolRegistry, str, Any], object]] = {
    "function": add_function,
    "async": add_async,
    "annotated": add_annotated,
    "record": add_record,
    "simple": lambda registry, name, value: registry.add(Simple(name, value)),
    "several": lambda registry, name, value: registry.add(Several(name, value)),
    "registered": lambda registry, name, value: registry.register(
        name, "Return the value.", NOTHING, lambda args: value
    ),
    "built": lambda registry, name, value: registry.add(Tool(name, "Return the value.").call(lambda args: value)),
    "result": lambda registry, name, value: add_async(registry, name, as_ok(value)),
    "ok": add_ok,
    "user": lambda registry, name, value: add_async(
        registry, name, dataclasses.replace(as_ok(value), for_user=as_ok(value).text)
    ),
}

SERVER = """
import json, sys
values = json.loads(sys.argv[1])
WRAPPER = {"type": "object", "properties": {"result": {}}, "required": ["result"], "x-fastmcp-wrap-result": True}
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    params = asked.get("params") or {}
    if asked["method"] == "initialize":
        said = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}}
        said["serverInfo"] = {"name": "values", "version": "1"}
    elif asked["method"] == "tools/list":
        wrapped = {"description": "Return the value.", "inputSchema": {"type": "object"}, "outputSchema": WRAPPER}
        said = {"tools": [{"name": name, **wrapped} for name in values]}
    elif asked["method"] != "tools/call":
        error = {"code": -32601, "message": "there is no such method"}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "error": error}), flush=True)
        continue
    else:
        value = values[params["name"]]
        text = value if isinstance(value, str) else json.dumps(value)
        said = {"content": [{"type": "text", "text": text}], "structuredContent": {"result": value}}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": said}), flush=True)
"""


async def add_elsewhere(registry: ToolRegistry, scripts: Runtime) -> None:
    """Add the forms whose tools run elsewhere: those of an MCP server, and saved scripts."""
    values = {f"mcp_{place}": value for place, (value, _, _) in enumerate(VALUES.values())}
    await registry.add_mcp_server("far", command=[sys.executable, "-c", SERVER, json.dumps(values)], approve="none")
    for name in values:
        registry.alias(name, f"far.{name}")
    for place, (value, _, _) in enumerate(VALUES.values()):
        source = f"set_result({value!r})"
        registry.save_script(f"saved_{place}", source, description="Return the value.", runtime=scripts)


SCRIPT = """
def ask(name):
    value, text = call_tool(name), call_tool(name, raw=True)
    (parallel,) = call_tools_parallel([(name, {})])
    return [value, text, parallel, getattr(tools, name)()]

set_result({name: ask(name) for name in names})
"""


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@pytest.mark.slow
@pytest.mark.conforms("A2", "A-b3", "EX-16", "A13")
async def test_every_reader_gets_what_the_tool_returned_whatever_the_form_of_the_tool(tmp_path: Path) -> None:
    async with Runtime(pool=PoolConfig(warm=1)) as scripts:
        registry = ToolRegistry(max_batch=None)
        await add_elsewhere(registry, scripts)
        try:
            await check_readers(registry, tmp_path / "runs.db")
        finally:
            await registry.close()


async def check_readers(registry: ToolRegistry, log: Path) -> None:
    expected, said = dict[str, Any](), dict[str, str]()
    for form, add in FORMS.items():
        for place, (value, data, text) in enumerate(VALUES.values()):
            add(registry, name := f"{form}_{place}", value)
            said[name] = text
            declares_text = form == "annotated" and isinstance(value, str)
            expected[name] = value if declares_text else data
    for place, (value, _, text) in enumerate(VALUES.values()):  # text that is sent as a value stays text
        expected |= {f"mcp_{place}": value, f"saved_{place}": value}
        said |= {f"mcp_{place}": text, f"saved_{place}": json.dumps(value)}  # as from execute_code
    ended, told = dict[str, Any](), dict[str, str]()

    def hear(event: Any) -> None:
        if event.type == "tool_execution_end":
            ended[event.tool] = event.result.guest_value()

    registry.events.subscribe(hear)
    programs = {name: await registry.execute(name) for name in expected}
    batch = dict(zip(expected, await registry.execute_batch([(name, {}) for name in expected]), strict=True))
    model = ScriptedModel([calls(*((name, {}) for name in expected)), "done"])
    agent = Agent(model, tools=registry, on_user=lambda text, result: told.update({result.meta.tool: text}))
    conversation = (await agent.run("go")).messages
    read = dict(zip(expected, (each["content"] for each in conversation[2:-1]), strict=True))
    async with Runtime(registry, pool=PoolConfig(warm=0), record=log, limits=Limits(wall_s=300)) as runtime:
        run = await runtime.execute_code(SCRIPT, inputs={"names": [*expected]})
        again = await runtime.execute_code(SCRIPT, inputs={"names": [*expected]}, repairs=run)
        rows = dict[str, Any]()
        for first in range(0, len(expected), 50):
            names = [*expected][first : first + 50]
            steps = await runtime.execute_plan([{"tool": name, "args": {}} for name in names])
            rows |= dict(zip(names, (step["result"] for step in steps), strict=True))

    with Index(log) as index:
        recorded = {call.tool: call.value for call in index.load(index.find(run.run_id)).calls}
    readers = {
        "record": recorded,
        "program": {name: result.guest_value() for name, result in programs.items()},
        "batch": {name: result.guest_value() for name, result in batch.items()},
        "event": ended,
        "plan": rows,
        "script": {name: got[0] for name, got in run.value.items()},
        "parallel": {name: got[2] for name, got in run.value.items()},
        "repair": {name: got[0] for name, got in again.value.items()},
        "function": {name: got[3] for name, got in run.value.items()},
    }
    texts = {
        "program": {name: result.text for name, result in programs.items()},
        "model": read,
    }
    wrong = [
        (reader, name, got, expected[name])
        for reader, of_reader in readers.items()
        for name, got in of_reader.items()
        if got != expected[name] or type(got) is not type(expected[name])
    ]
    wrong += [
        (reader, name, got, said[name]) for reader, of in texts.items() for name, got in of.items() if got != said[name]
    ]
    wrong += [
        ("raw", name, got[1], as_text(expected[name]))
        for name, got in run.value.items()
        if got[1] != as_text(expected[name])
    ]
    assert wrong == []
    shown = {name: text for name, text in said.items() if name.startswith("user_") and text}
    assert told == shown
    assert again.repair is not None
    assert not again.repair.new
    assert {len(each) for each in (*readers.values(), *texts.values())} == {len(expected)}


ARGUMENTS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "nothing": ({"name": "a"}, ["a", 10, None, "x", {"a": 3, "b": None}]),
    "nulls": (
        {"name": "a", "limit": None, "other": None, "text": None, "inner": {"a": None, "b": None}},
        ["a", None, None, "x", {"a": None, "b": None}],
    ),
    "empty": ({"name": "", "limit": 0, "other": [], "text": "", "inner": {}}, ["", 0, [], "", {"a": 3, "b": None}]),
}
"""What is sent, and what arrives."""


class Query(pydantic.BaseModel):
    """What a search is given, as a model."""

    text: str
    ratio: float = 0.5


@dataclasses.dataclass
class Search:
    """The same as a dataclass."""

    text: str
    ratio: float = 0.5


def searching(kind: Any, form: str) -> Any:
    """Return a tool in one of the forms that take all arguments at once, which declares what it takes."""

    def act(args: Any, mine: str = form) -> str:
        return f"{mine} {args!r}"

    act.__annotations__["args"] = kind
    definition = ToolDefinition.from_model(form, "Return the arguments.", kind)
    if form == "record":
        return AgentTool(definition, execute=act)
    if form == "built":
        return Tool(form, "Return the arguments.").param("text", "string", "What to look for.").call(act)
    execute = (lambda self, ctx, name, args: act(args)) if form == "several" else (lambda self, ctx, args: act(args))
    execute.__annotations__["args"] = kind
    members = {"name": form, "description": definition.description, "parameters": definition.parameters}
    several = {"definitions": lambda self: [definition]} if form == "several" else members
    return type(form, (), {"execute": execute, **several})()


@pytest.mark.conforms("A2")
async def test_a_tool_gets_the_types_that_it_declares_on_every_route() -> None:
    def act(on: bool, ratio: float, some: list[float], either: int | float | None = None) -> str:
        """Return the arguments."""
        return repr((on, ratio, some, either))

    registry = ToolRegistry([act])
    sent = {"on": "False", "ratio": 1, "some": [1, 2.5], "either": 3}
    got = {route: await answer_by(route, registry, "act", sent) for route in ROUTES}
    for route, answer in got.items():
        assert "(False, 1.0, [1.0, 2.5], 3)" in str(answer), route
    for twice in (json.dumps(json.dumps(sent)), json.dumps(json.dumps(json.dumps(sent)))):
        model = ScriptedModel([calls(("act", twice)), "done"])
        assert (await registry.execute("act", twice)).text == "(False, 1.0, [1.0, 2.5], 3)"
        assert (await Agent(model, tools=registry).run("go")).messages[2]["content"] == "(False, 1.0, [1.0, 2.5], 3)"
    assert "must be an object, not str" in (await registry.execute("act", '"one"')).text

    for kind in (Query, Search):
        for form in ("record", "built", "simple", "several"):
            answer = await ToolRegistry([searching(kind, form)]).execute(form, {"text": "x"})
            assert answer.text == f"{form} {kind(text='x')!r}", form


class Inner(pydantic.BaseModel):
    """Has defaults of its own."""

    a: int | None = 3
    b: int | None = None


@pytest.mark.slow
@pytest.mark.conforms("A2")
async def test_a_tool_gets_the_nulls_and_the_empty_values_that_were_sent_on_every_route() -> None:
    def act(
        name: str, limit: int | None = 10, other: list[int] | None = None, text: str = "x", inner: Inner | None = None
    ) -> list[Any]:
        """Return the arguments."""
        return [name, limit, other, text, (inner or Inner()).model_dump()]

    registry = ToolRegistry([act])
    schema = registry.definitions()[0].parameters
    assert schema["properties"]["limit"] == {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": 10}
    assert schema["properties"]["other"] == {"items": {"type": "integer"}, "type": "array"}
    got = {
        (route, case): await answer_by(route, registry, "act", args)
        for route in ROUTES
        for case, (args, _) in ARGUMENTS.items()
        if case == "nulls" or route == "direct"
    }

    for (route, case), answer in got.items():
        assert json.dumps(ARGUMENTS[case][1]) in json.dumps(answer).replace("\\", ""), (route, case)
