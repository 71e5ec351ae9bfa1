"""Group A: tool definitions, and what the model sees of them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
import subprocess
import sys
import threading
import types
import warnings
from typing import Annotated, Any, NamedTuple

import pytest
from pydantic import WithJsonSchema

from rows import each_row
from toolcell import tool
from toolcell.agents import Agent
from toolcell.agents.providers.scripted import ScriptedModel
from toolcell.calls.options import Origin
from toolcell.calls.type_schema import read_docstring
from toolcell.errors import RegistrationError
from toolcell.tools import (
    AgentTool,
    Tool,
    ToolContext,
    ToolDefinition,
    ToolDescriptionWarning,
    ToolOptions,
    ToolRegistry,
    ToolResult,
    ToolSpec,
)

pytestmark = [pytest.mark.quick, pytest.mark.anyio]


EMPTY: dict[str, Any] = {"type": "object", "properties": {}}


@pytest.mark.conforms("A4", "A5", "E1", "EX-13", "EX-15")
async def test_both_shapes_of_tool_objects_live_in_one_registry() -> None:
    class Single:
        name = "single"
        description = "A tool with one function."
        parameters = EMPTY

        async def execute(self, ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
            return ToolResult.ok("one")

    class Several:
        def definitions(self) -> list[ToolDefinition]:
            return [
                ToolDefinition("first", "The first one of two.", EMPTY),
                ToolDefinition("second", "The second one of two.", EMPTY),
            ]

        def execute(self, ctx: ToolContext, name: str, args: dict[str, Any]) -> ToolResult:
            return ToolResult.ok(name)

    registry = ToolRegistry([Single(), Several()])

    assert registry.list() == ["single", "first", "second"]
    assert [(await registry.execute(name)).text for name in registry] == ["one", "first", "second"]


@pytest.mark.conforms("A8", "A9", "A7", "EX-28", "EX-30")
async def test_builder_types_are_those_of_json_schema_and_the_order_is_kept() -> None:
    built = Tool("all", "A parameter of every type there is.")
    for number, kind in enumerate(("string", "integer", "number", "boolean", "array", "object")):
        built = built.param(f"p{number}", kind, kind) if number % 2 else built.param_opt(f"p{number}", kind, kind)
    definition = built.call(lambda args: f"{args['p1']} and {args.get('p0', 'nothing')}").definition
    registry = ToolRegistry([built])

    assert (await registry.execute("all", {"p1": 1, "p3": True, "p5": {}})).text == "1 and nothing"
    assert '"p1"' in (await registry.execute("all", {"p3": True, "p5": {}})).message

    assert definition.parameters["required"] == ["p1", "p3", "p5"]
    assert [part["type"] for part in definition.parameters["properties"].values()] == [
        "string",
        "integer",
        "number",
        "boolean",
        "array",
        "object",
    ]
    with pytest.raises(RegistrationError, match=r"'bare'.*'strng'"):
        Tool("bare", "A tool without a function.").param("x", "strng", "")
    with pytest.raises(RegistrationError, match="comes last"):
        built.param("late", "string", "too late")
    with pytest.raises(RegistrationError, match="no function"):
        ToolRegistry([Tool("bare", "A tool without a function.")])


@pytest.mark.conforms("A10", "A12")
async def test_a_record_gets_its_call_id_unchanged_and_its_label_stays_out_of_the_model() -> None:
    seen: list[Any] = []

    async def execute(ctx: ToolContext, call_id: str, args: dict[str, Any], on_update: Any) -> ToolResult:
        seen.append((ctx.call_id, call_id, args, callable(on_update)))
        return ToolResult.ok("done")

    record = AgentTool(ToolDefinition("act", "Do what has to be done.", EMPTY), execute, label="Acting…", mode="")
    registry = ToolRegistry([record])
    model = ScriptedModel(
        [{"content": "", "tool_calls": [{"id": "toolu_01 odd/id", "name": "act", "arguments": "{}"}]}, "done"]
    )

    await Agent(model, tools=registry).run("go")

    assert seen == [("toolu_01 odd/id", "toolu_01 odd/id", {}, True)]
    assert "Acting" not in repr([request.tools for request in model.requests])
    assert registry.to_mcp()[0]["title"] == "Acting…"


@pytest.mark.conforms("A11", "T4")
def test_the_core_works_with_no_built_in_tool_and_no_model_sdk() -> None:
    script = (
        "import sys, anyio, toolcell.tools as t, toolcell.agents\n"
        "r = t.ToolRegistry(); r.enable_plan_execution()\n"
        "print(anyio.run(r.execute, 'execute_plan', {'steps': [{'tool': 'x', 'args': {}}]}).value[0]['status'])\n"
        "loaded = [m for m in sys.modules if m.startswith(('toolcell.builtin', 'openai', 'anthropic', 'docker'))]\n"
        "print(loaded)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert ran.stdout.split() == ["error", "[]"]


@pytest.mark.conforms("A15", "EX-14", "A14")
async def test_tools_given_with_a_run_replace_the_agents_own_and_enabled_ones_come_after() -> None:
    async def usual() -> str:
        """The tool the agent usually has."""
        return "usual"

    async def special() -> str:
        """The tool of this run alone."""
        return "special"

    model = ScriptedModel(["one", "two"])
    agent = Agent(model, tools=[usual], plan_execution=True, ask_user=lambda question: "yes")

    await agent.run("a", tools=[special])
    await agent.run("b")

    assert model.requests[0].tool_names == ["special", "execute_plan", "ask_user"]
    assert model.requests[1].tool_names == ["usual", "execute_plan", "ask_user"]


BAD = [
    (ToolDefinition("no spaces", "A name with a space in it", EMPTY), "name must match"),
    (ToolDefinition("x" * 65, "A name that is too long", EMPTY), "name must match"),
    (ToolDefinition("", "A tool without a name", EMPTY), "name must match"),
    (ToolDefinition("mute", "  ", EMPTY), "description is empty"),
    (ToolDefinition("list", "Parameters that are a list", {"type": "array"}), '"type": "object"'),
    (
        ToolDefinition("odd", "A type that does not exist", {"type": "object", "properties": {"x": {"type": "strng"}}}),
        "invalid schema",
    ),
    (ToolDefinition("gap", "Requires what is not there", {**EMPTY, "required": ["ghost"]}), "'ghost' is required"),
    (
        ToolDefinition("far", "Refers to another document", {"type": "object", "$ref": "https://example.com/s"}),
        "invalid schema",
    ),
]


@pytest.mark.conforms("A-b1", "C18")
@each_row(("definition", "reason"), BAD, ids=lambda value: getattr(value, "name", None))
def test_a_bad_definition_is_refused_when_it_is_registered(definition: ToolDefinition, reason: str) -> None:
    registry = ToolRegistry()

    with pytest.raises(RegistrationError) as caught:
        registry.add(AgentTool(definition, lambda args: ToolResult.ok("")))

    assert reason in str(caught.value)
    assert repr(definition.name) in str(caught.value)
    assert registry.is_empty()


@pytest.mark.conforms("A-b2")
async def test_plain_functions_become_tools_and_synchronous_ones_leave_the_loop_alone() -> None:
    loop_thread = threading.get_ident()
    registry = ToolRegistry()

    @registry.tool
    def blocking(city: str, units: str = "celsius") -> str:
        """Get the weather of a city.

        Args:
            city: City name
        """
        assert threading.get_ident() != loop_thread
        return f"{city} in {units}"

    @registry.tool(name="quick", blocking=False)
    def inline() -> bool:
        """Answer without a thread of its own."""
        return threading.get_ident() == loop_thread

    @tool
    async def later(text: str) -> str:
        """Say it again, only later."""
        return text

    registry.add(later)
    parameters = registry.definitions()[0].parameters

    assert (await registry.execute("blocking", {"city": "Rome"})).text == "Rome in celsius"
    assert (await registry.execute("quick")).value is True
    assert (await registry.execute("later", {"text": "hi"})).text == await later("hi") == "hi"
    assert registry.definitions()[0].description == "Get the weather of a city."
    assert parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "City name"},
            "units": {"type": "string", "default": "celsius"},
        },
        "required": ["city"],
        "additionalProperties": False,
    }


@pytest.mark.conforms("A-b3")
def test_a_description_nobody_can_choose_by_is_warned_about() -> None:
    with pytest.warns(ToolDescriptionWarning, match=r"'vague'.*shorter than 15"):
        ToolRegistry().register("vague", "Search.", EMPTY, lambda args: "")


def test_of_a_strangers_tools_no_warning_is_made_which_python_would_keep() -> None:
    spec = ToolSpec(
        definition=ToolDefinition("vague", "Search.", EMPTY),
        invoke=lambda context: ToolResult.ok(""),
        options=ToolOptions(),
        source=None,
        is_foreign=True,
    )
    with warnings.catch_warnings(record=True) as made:
        ToolRegistry().add(types.SimpleNamespace(to_specs=lambda: [spec]))

    assert not made


@pytest.mark.conforms("A-b4")
async def test_traits_decide_who_is_told_of_a_tool_and_who_may_call_it() -> None:
    registry = ToolRegistry()

    @registry.tool(
        read_only=True, idempotent=True, timeout_s=5, max_result_bytes=100, callable_from={Origin.MODEL, Origin.PLAN}
    )
    async def look() -> str:
        """Look without touching anything."""
        return "seen"

    @registry.tool(requires_approval=True, callable_from={Origin.CODE})
    async def touch() -> str:
        """Touch something in the workspace."""
        return "touched"

    entry = registry.registered("look")
    assert entry is not None
    assert (entry.options.read_only, entry.options.timeout_s, entry.options.max_result_bytes) == (True, 5, 100)
    assert {origin: registry.names(origin) for origin in (Origin.MODEL, Origin.PLAN, Origin.CODE)} == {
        Origin.MODEL: ["look"],
        Origin.PLAN: ["look"],
        Origin.CODE: ["touch"],
    }
    refused = await registry.dispatch("look", {}, origin=Origin.CODE)
    direct = await registry.dispatch("touch", {}, origin=Origin.MODEL)
    assert refused.text == "look cannot be called from within execute_code"
    assert direct.text == "touch cannot be called by a model directly"
    assert registry.to_mcp()[0]["annotations"]["readOnlyHint"] is True
    with pytest.raises(RegistrationError, match="no option is called 'retries'"):
        registry.tool(look, name="again", retries=3)  # type: ignore[call-overload]


@pytest.mark.conforms("A-b5")
def test_nothing_handed_out_can_change_what_the_registry_knows() -> None:
    mine: dict[str, Any] = {"type": "object", "properties": {"q": {"type": "string"}}}
    registry = ToolRegistry()
    registry.register("search", "Search the web for things", mine, lambda args: "")

    mine["properties"]["sneaked"] = {"type": "string"}
    registry.definitions()[0].parameters["properties"].clear()
    registry.to_provider_defs()[0]["function"]["parameters"].clear()
    registry.schemas()[0]["input_schema"]["properties"]["q"]["type"] = "integer"

    assert registry.definitions()[0].parameters == {"type": "object", "properties": {"q": {"type": "string"}}}
    with pytest.raises(AttributeError):
        registry.definitions()[0].name = "other"
    with pytest.raises(dataclasses.FrozenInstanceError):
        ToolOptions().read_only = True  # type: ignore[misc]


def test_a_definition_is_no_data() -> None:
    definition = ToolDefinition("search", "Search the web for things", EMPTY)

    assert not dataclasses.is_dataclass(definition)
    assert pickle.loads(pickle.dumps(definition)) == copy.deepcopy(definition) == definition
    with pytest.raises(AttributeError, match="a ToolDefinition does not change"):
        definition.name = "other"


@pytest.mark.conforms("A-b4")
def test_an_object_says_what_is_known_of_each_of_its_functions() -> None:
    class Files:
        options = types.MappingProxyType(
            {"read": ToolOptions(read_only=True), "write": ToolOptions(requires_approval=True)}
        )

        def definitions(self) -> list[ToolDefinition]:
            return [
                ToolDefinition(name, f"Can {name} the files there are", EMPTY) for name in ("read", "write", "list")
            ]

        async def execute(self, ctx: ToolContext, name: str, args: dict[str, Any]) -> ToolResult:
            return ToolResult.ok(name)

    registry = ToolRegistry([Files()])
    known = {name: entry.options for name in registry if (entry := registry.registered(name)) is not None}

    assert (known["read"].read_only, known["write"].requires_approval, known["list"]) == (True, True, ToolOptions())


def add_up(a: int, b: int) -> int:
    """Add two numbers that somebody gave."""
    return a + b


class Doubling:
    def __call__(self, number: int) -> int:
        """Double a number that somebody gave."""
        return 2 * number


def test_a_partial_and_an_object_that_is_called_are_described_by_what_they_call() -> None:
    registry = ToolRegistry()
    registry.add(functools.partial(add_up, 1))
    registry.add(Doubling(), name="double")

    told = [(each.description, each.parameters["properties"]) for each in registry.definitions()]
    assert told == [
        ("Add two numbers that somebody gave.", {"b": {"type": "integer"}}),
        ("Double a number that somebody gave.", {"number": {"type": "integer"}}),
    ]
    assert registry.execute_sync("add_up", {"b": "2"}).value == 3


GOOGLE = """Pay somebody.

Args:
    to: Who gets it.
    amount (int): How much,
        in cents.

Keyword Args:
    note: What for.

Returns:
    The number of the receipt.

Note:
    Log in first.
"""
NUMPY = """Pay somebody.

Parameters
----------
to, note : str
    Some text.

Other Parameters
----------------
amount : int
    How much.

Notes
-----
Log in first.
"""
SPHINX = """Pay somebody.

:param to: Who gets it.
:type to: str
:keyword note: What
    for.
:returns: The number of the receipt.
"""


def test_what_a_docstring_says_of_parameters_is_theirs_and_all_else_is_the_tools() -> None:
    registry = ToolRegistry()
    for name, docstring in (("google", GOOGLE), ("numpy", NUMPY), ("sphinx", SPHINX)):

        def pay(to: str, amount: int, *, note: str = "", **more: str) -> str:
            return to

        pay.__doc__ = docstring
        registry.add(pay, name=name)

    told = {each.name: each for each in registry.definitions()}
    assert [[part.get("description") for part in told[name].parameters["properties"].values()] for name in told] == [
        ["Who gets it.", "How much, in cents.", "What for."],
        ["Some text.", "How much.", "Some text."],
        ["Who gets it.", None, "What for."],
    ]
    assert [each.description for each in told.values()] == [
        "Pay somebody.\n\nReturns:\n    The number of the receipt.\n\nNote:\n    Log in first.",
        "Pay somebody.\n\nNotes\n-----\nLog in first.",
        "Pay somebody.\n\n:returns: The number of the receipt.",
    ]


@each_row(
    ("docstring", "prose", "described"),
    [
        ("Pay.\n\nKeyword Args:\n\nNothing.\n", None, {}),
        ("Pay.\n\nArgs:\n    to: Who.\n    to whom\n", None, {}),
        ("Pay.\n\nParameters\n----------\nto : str\n    Who.\nOnly once!\n", "Pay.\n\nOnly once!", {"to": "Who."}),
        ("Pay.\n\nArgs:\n    to: Who.\n\n        Or not.\n\n:param amount: Much.", "Pay.\n\nArgs:\n    to: Who.\n\n        Or not.",
         {"amount": "Much."}),
        ("Pay.\n\nParameters\n----------\nto : str\n    Who.\n\nArgs:\n    amount: Much.\n",
         "Pay.\n\nArgs:\n    amount: Much.", {"to": "Who."}),
        ("Pay.\n\nArgs:\n    to: Who.\n    cc: Of more.\n", "Pay.\n\n    cc: Of more.", {"to": "Who."}),
        ("Pay.\n\nArgs:\n    to: Who.\n    cc: Who.\n", "Pay.\n\n    cc: Who.", {"to": "Who."}),
        ("Pay.\n\n:type to: str\n:param to: Who.\n:type of it: mind it\n", "Pay.\n\n:type of it: mind it", {"to": "Who."}),
        ("Pay.\n\nArgs:\n    to (str):\n", None, {}),
    ],
)  # fmt: skip
def test_what_no_parameter_has_of_a_docstring_stays_in_the_description(
    docstring: str, prose: str | None, described: dict[str, str]
) -> None:
    def pay(to: str, amount: int, **more: str) -> None: ...

    pay.__doc__ = docstring
    assert read_docstring(pay) == (docstring.strip() if prose is None else prose, described)


class Place(NamedTuple):
    lat: float
    lon_deg: float = 0.0


@each_row("model", ["", "gpt-5", "gemini-2.5-pro"])
def test_the_fields_of_a_named_tuple_are_named_to_models(model: str) -> None:
    def go(to: Place) -> str:
        """Go to a place on the map."""
        return str(to)

    registry = ToolRegistry([go])
    [definition] = registry.definitions()
    told: Any = definition.to_openai(model)["function"]["parameters"] if model else definition.parameters
    part = told["properties"]["to"]
    fields = part["items"]["anyOf"] if model else part["prefixItems"]
    assert [each["description"] for each in fields] == ["lat", "lon_deg"]


def test_parts_of_an_array_may_be_true_for_any_value() -> None:
    registry = ToolRegistry()

    @registry.tool
    def take(pair: Annotated[Any, WithJsonSchema({"prefixItems": [True, {"title": "Count"}]})]) -> None:
        """Take a pair of anything and a count."""

    pair = registry.definitions()[0].parameters["properties"]["pair"]
    assert pair == {"prefixItems": [True, {"description": "Count"}]}
