"""What can never work is refused when it is registered, in one line that names it and the cure."""

from __future__ import annotations

import math
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar

import pydantic
import pytest

import toolcell
from rows import each_row
from toolcell import (
    Agent,
    OpenAIProvider,
    RegistrationError,
    RunContext,
    Runtime,
    ToolContext,
    ToolRegistry,
    ToolResult,
    UsageError,
)
from toolcell.agents import ToolLoopConfig, run_tool_loop
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.results import ExecutionResult
from toolcell.support.checks import closest
from toolcell.tools import AgentTool, Budget, Tool, ToolDefinition, ToolDescriptionWarning, ToolOptions

pytestmark = pytest.mark.quick

DEFINITION = ToolDefinition("act", "Do something for the test.")


def act(x: int) -> int:
    """Return the number that is given."""
    return x


def prose(args: "all of it") -> str:  # type: ignore[syntax]  # noqa: F722
    """Take what somebody describes in words."""
    return str(args)


def early(item: Later) -> str:  # type: ignore[name-defined]  # noqa: F821
    """Take what is defined below."""
    return str(item)


class Outer(pydantic.BaseModel):
    items: list[Later] = []  # type: ignore[name-defined]  # noqa: F821


def nested(outer: Outer) -> str:
    """Take what has something in it that is defined below."""
    return str(outer)


def aliased(city: Annotated[str, pydantic.Field(alias="location")]) -> str:
    """Return the weather of a city."""
    return city


def generate(n: int) -> Iterator[int]:
    """Yield numbers that nobody takes."""
    yield n


async def generate_async(n: int) -> AsyncIterator[int]:
    """Yield numbers that nobody takes."""
    yield n


def bare_ctx(ctx, x: int) -> int:  # type: ignore[no-untyped-def]
    """Take a context that is not declared."""
    return x


def unresolved(x: Nowhere) -> int:  # type: ignore[name-defined]  # noqa: F821
    """Take what does not exist."""
    return 1


def locked(lock: threading.Event) -> int:
    """Take what is not data."""
    return 1


class Act:
    """One function, written as an object."""

    name = "act"
    description = "Do something for the test."
    parameters: ClassVar[dict[str, Any]] = {"type": "object"}

    def execute(self, ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
        return ToolResult.ok("done")

    def method(self, x: int) -> int:
        """Return the number that is given."""
        return x


class WithoutContext(Act):
    def execute(self, args: dict[str, Any]) -> ToolResult:  # type: ignore[override]
        return ToolResult.ok("done")


class Several:
    """Several functions."""

    def definitions(self) -> Any:
        return [DEFINITION]

    def execute(self, ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
        return ToolResult.ok("done")


class NoDefinitions(Several):
    def definitions(self) -> Any:
        return ["act"]


class DictOptions(Act):
    options: ClassVar[dict[str, Any]] = {"timeout_s": 3}


def added(tool: Any, **options: Any) -> Callable[[], object]:
    return lambda: ToolRegistry().add(tool, **options)


class Half:
    """Runs code, and says nothing of its sandboxes."""

    async def execute_code(self, source: str, /, **options: Any) -> ExecutionResult:
        raise NotImplementedError


def registered(*tool: Any) -> Callable[[], object]:
    return lambda: ToolRegistry().register(*tool)


MISTAKES: dict[str, tuple[Callable[[], object], str, str]] = {
    "a revert without parameters": (added(act, revert=lambda: 1), "<lambda>", "revert(args, result)"),
    "a generator": (added(generate), "'generate'", "return a list"),
    "an async generator": (added(generate_async), "'generate_async'", "return a list"),
    "a generator of one dict": (registered("act", "Do it all at once.", None, generate), "'act'", "return a list"),
    "a context without annotation": (added(bare_ctx), "'ctx'", "write ctx: ToolContext"),
    "a method of no object": (added(Act.method), "'self'", "registry.add(thing.method)"),
    "a class": (added(Act), "Act is a class", "write Act(...)"),
    "execute without ctx": (added(WithoutContext()), "'act'", "must take (ctx, args)"),
    "execute without name": (added(Several()), "'act'", "must take (ctx, name, args)"),
    "definitions that are none": (added(NoDefinitions()), "NoDefinitions.definitions()", "a list of ToolDefinition"),
    "a dict for options": (added(DictOptions()), "{'timeout_s': 3}", "must be ToolOptions"),
    "a name": (added("act"), "'act'", "write @registry.tool"),
    "a list": (added([act]), "[<function act", "ToolRegistry([...])"),
    "a dict": (added({"name": "act"}), "{'name': 'act'}", "registry.register(name,"),
    "an instance of anything": (added(threading.Event()), "threading.Event", "write a function"),
    "a lambda without a name": (added(lambda x: x), "<lambda>", "a name must match"),
    "no docstring": (added(lambda x: x, name="act"), "'act'", "the description is empty"),
    "a type that does not exist": (added(unresolved), "unresolved", "'Nowhere' is not defined"),
    "a type that is not data": (added(locked), "'lock'", "no JSON Schema"),
    "positional parameters": (added(len), "'obj'", "tools are called by name"),
    "a builtin that says nothing": (added(dict.fromkeys), "fromkeys", "by name"),
    "a name as the decorator's argument": (lambda: ToolRegistry().tool("act"), "'act'", "tool(name='act')"),  # type: ignore[type-var]
    "an option misspelt": (added(act, time_s=3), "'time_s'", "did you mean timeout_s?"),
    "a negative timeout": (added(act, timeout_s=-3), "-3", "at least 0"),
    "text for a flag": (added(act, read_only="yes"), "'yes'", "must be bool"),
    "a function that takes nothing": (registered("act", "Do it again.", None, lambda: 1), "'act'", "must take (args)"),
    "no function": (registered("act", "Do it again.", None, "act"), "'act'", "a tool is a function"),
    "a function for a schema": (registered("act", "Do it again.", act, act), "'act'", "parameters are not JSON"),
    "a schema that is no JSON": (
        registered("act", "Do it again.", {"type": "object", "properties": {"x": {"default": math.nan}}}, act),
        "'act'", "parameters are not JSON",
    ),
    "no such type": (lambda: Tool("act", "Do it.").param("x", "str", "a text"), "'str'", "string, integer"),
    "a builder that is not ended": (added(Tool("act", "Do it again, please.")), "'act'", "end with .call(function)"),
    "a tool twice": (lambda: ToolRegistry([act, act]), "'act'", "replace=True"),
    "a name for many functions": (added(type("Two", (Several,), {
        "definitions": lambda self: [DEFINITION, ToolDefinition("b", "Do something else here.")],
        "execute": lambda self, ctx, name, args: None,
    })(), name="x"), "name=", "this one has 2"),
    "names in a list": (lambda: ToolRegistry([act]).blacklist(["act"]), "['act']", "one by one"),  # type: ignore[arg-type]
    "an unknown origin": (lambda: ToolRegistry([act]).blacklist("act", origins=["script"]), "'script'", "'code'"),  # type: ignore[list-item]
    "one name for a subset": (lambda: ToolRegistry([act]).subset("act"), "'act'", "subset(['act'])"),
    "a subset of nothing": (lambda: ToolRegistry([act]).subset(["acts"]), "acts", "no such tools"),
    "a function for a hook": (lambda: ToolRegistry().add_hook(act), "function act", "before=..."),  # type: ignore[arg-type]
    "the class Runtime": (lambda: ToolRegistry().enable_code_execution(Runtime), "Runtime", "write Runtime(...)"),  # type: ignore[arg-type]
    "a runtime of half the members": (lambda: ToolRegistry().enable_code_execution(Half()), "its Half", "class Half(CodeRuntime)"),  # type: ignore[arg-type]
    "a model's name": (lambda: Agent("gpt-4o"), "'gpt-4o'", "such as OpenAIProvider()"),  # type: ignore[arg-type]
    "a name for an agent": (lambda: Agent("helper", "Be brief.", ScriptedModel([])), "not 3", "Agent(provider) takes"),  # type: ignore[misc, arg-type]
    "a provider's class": (lambda: Agent(ScriptedModel), "ScriptedModel", "write ScriptedModel(...)"),  # type: ignore[arg-type]
    "an option that an SDK does not know": (lambda: OpenAIProvider(key="x"), "'key'", "OpenAIProvider(api_key=...)"),
    "one function for an agent": (lambda: Agent(ScriptedModel([]), tools=act), "act", "write [...] around it"),  # type: ignore[arg-type]
    "no iterations": (lambda: Agent(ScriptedModel([]), max_iterations=-1), "-1", "at least 0"),
    "a number for a budget": (lambda: Agent(ScriptedModel([]), budget=100), "100", "Budget(tokens=...)"),
    "a number for retries": (lambda: Agent(ScriptedModel([]), retry=3), "3", "RetryPolicy(attempts=...)"),
    "a negative budget": (lambda: Budget(tool_calls=-1), "-1", "at least 0"),
    "a dict for secrets": (lambda: RunContext(secrets={"a": "b"}), "{'a': 'b'}", "Secrets({...})"),  # type: ignore[arg-type]
    "no Draft": (lambda: RunContext().having(True), "True", "Draft()"),  # type: ignore[arg-type]
    "no deadline": (lambda: RunContext(deadline=None), "None", "anyio.current_time()"),  # type: ignore[arg-type]
    "text for a loop's tools": (lambda: ToolLoopConfig(provider=ScriptedModel([]), tools="act"), "'act'", "a list of tools"),
    "a setting that no loop has": (lambda: ToolLoopConfig(provider=ScriptedModel([]), modle="x"), "'modle'", "model?"),  # type: ignore[call-arg]
    "JSON for a definition": (lambda: ToolDefinition("act", "Do it.", '{"type": "object"}'), '"object"', "json.loads"),  # type: ignore[arg-type]
    "a class for a definition": (lambda: ToolDefinition("act", "Do it.", ToolOptions), "ToolOptions", "from_model("),  # type: ignore[arg-type]
    "a schema for a definition": (lambda: ToolDefinition("act", "Do it.", schema={}), "'schema'", "parameters?"),  # type: ignore[call-arg]
    "words for a type": (added(prose), "prose", "annotations cannot be resolved"),
    "a type that comes later": (added(early), "'Later'", "before the tool is registered"),
    "a model of what comes later": (added(nested), "Outer", "register the tool after that"),
    "an alias of a parameter": (added(aliased), "'city'", "rename it"),
    "a schema beside a function": (added(act, schema={}), "schema", "register(name, description, schema, function)"),
    "no definition in a record": (lambda: AgentTool(name="act"), "'name'", "it has definition"),  # type: ignore[call-arg]
    "arguments that no record gives": (added(AgentTool(DEFINITION, execute=lambda a: a)), "['a']", "it may take: ctx"),
}  # fmt: skip


def assert_one_line(said: str, value: str, cure: str) -> None:
    assert value in said
    assert cure in said
    assert "\n" not in said
    assert len(said) < 500


@each_row("name", [name for name in MISTAKES if "an SDK" not in name or find_spec("openai")])
def test_what_can_never_work_is_refused_with_value_and_cure(name: str) -> None:
    make, value, cure = MISTAKES[name]
    with pytest.raises(UsageError) as caught:
        make()
    assert_one_line(str(caught.value), value, cure)


CALLS: dict[str, tuple[Callable[[ToolRegistry], Any], str, str]] = {
    "a function for a name": (lambda registry: registry.execute(act, {"x": 1}), "act", "the name"),  # type: ignore[arg-type]
    "a dict for a context": (lambda registry: registry.execute("act", {"x": 1}, context={}), "{}", "RunContext("),  # type: ignore[arg-type]
    "a name for a batch": (lambda registry: registry.execute_batch(["act"]), "'act'", '("name", {...})'),
    "arguments under another name": (
        lambda registry: registry.execute_batch([{"tool": "act", "parameters": {"x": 1}}]),
        "parameters",
        '("name", {...})',
    ),
    "a dict for a batch": (lambda registry: registry.execute_batch({"act": {}}), "'act'", '("name", {...})'),
    "no prompt": (lambda registry: Agent(ScriptedModel([])).run(None), "None", "user('...')"),  # type: ignore[arg-type]
    "texts for a prompt": (lambda registry: Agent(ScriptedModel([])).run(["hi"]), "'hi'", "user('...')"),  # type: ignore[list-item]
    "one message": (lambda registry: Agent(ScriptedModel([])).run({"role": "user"}), "'user'", "user('...')"),  # type: ignore[arg-type]
    "a provider for a loop": (
        lambda registry: run_tool_loop(ScriptedModel([]), []),
        "ScriptedModel",
        "ToolLoopConfig(",
    ),  # type: ignore[arg-type]
}


@pytest.mark.anyio
async def test_calls_that_can_never_work_are_refused_with_value_and_cure() -> None:
    registry = ToolRegistry([act])
    for make, value, cure in CALLS.values():
        with pytest.raises(UsageError) as caught:
            await make(registry)
        assert_one_line(str(caught.value), value, cure)


@pytest.mark.anyio
async def test_every_way_of_registering_takes_the_same_options() -> None:
    built = Tool("act", "Do something for the test.").param_opt("x", "integer", "a number").call(lambda args: "done")
    options: dict[str, Any] = {"timeout_s": 3, "read_only": True, "prepare": lambda args: {"x": 7}}
    ways: dict[str, Callable[[ToolRegistry], object]] = {
        "decorator": lambda registry: registry.tool(name="act", **options)(act),
        "add": lambda registry: registry.add(act, name="act", **options),
        "register": lambda registry: registry.register("act", "Do it again, please.", None, lambda args: 1, **options),
        "builder": lambda registry: registry.add(built, **options),
        "object": lambda registry: registry.add(Act(), **options),
        "record": lambda registry: registry.add(toolcell.tool(act), **options),
        "renamed": lambda registry: registry.add(lambda x: x, name="act", description="Do it like this.", **options),
    }
    for way, register in ways.items():
        registry = ToolRegistry()
        seen: list[Any] = []
        registry.before_call(lambda call, seen=seen: seen.append(call.args))  # type: ignore[misc]
        register(registry)
        tool = registry.state.tools["act"]
        assert tool.options == ToolOptions(timeout_s=3, read_only=True, returns=tool.options.returns), way
        await registry.execute("act", {})
        assert seen == [{"x": 7}], way


@pytest.mark.anyio
async def test_one_call_may_be_made_for_somebody() -> None:
    registry = ToolRegistry()

    @registry.tool
    def who(ctx: ToolContext | None = None) -> str:
        """Say who it is that asks."""
        assert ctx is not None
        return ctx.user_id

    assert registry.definitions()[0].parameters["properties"] == {}
    assert (await registry.execute("who", context=RunContext(user_id="ada"))).text == "ada"


def test_one_origin_may_be_written_as_text_in_a_rule() -> None:
    registry = ToolRegistry([act])
    registry.blacklist("act", origins="code")

    assert registry.names() == ["act"]
    assert registry.to_python() == ""


def test_a_short_description_is_warned_about_at_the_line_that_registers() -> None:
    for register in (
        lambda: ToolRegistry([toolcell.tool(act, description="Act.")]),
        lambda: ToolRegistry().add(act, description="Act."),
        lambda: Agent(ScriptedModel([]), tools=[toolcell.tool(act, description="Act.")]),
        lambda: Runtime([toolcell.tool(act, description="Act.")]),
    ):
        with pytest.warns(ToolDescriptionWarning) as caught:
            register()
        assert caught[0].filename == __file__


@each_row("const", [10**30, "\ud800"])
def test_a_schema_that_no_script_can_be_told_is_refused(const: object) -> None:
    parameters = {"type": "object", "properties": {"a": {"const": const}}}
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(40):
        deep = {"type": "object", "properties": {"a": deep}}
    registry = ToolRegistry()

    with pytest.raises(RegistrationError, match="tool 'act': scripts cannot be told about it"):
        registry.register("act", "Do something for the test.", parameters, lambda args: 1)
    with pytest.raises(RegistrationError, match="tool 'act': scripts cannot be told about it"):
        registry.register("act", "Do something for the test.", deep, lambda args: 1)
    assert registry.list() == []


def test_a_function_of_a_dict_may_have_any_annotations() -> None:
    registry = ToolRegistry()
    registry.register("say", "Say what is given to it.", {"type": "object"}, prose)
    assert registry.execute_sync("say", {}).text == "{}"


def test_refused_registrations_register_nothing() -> None:
    registry = ToolRegistry()
    with pytest.raises(RegistrationError):
        registry.add(generate)
    assert registry.is_empty()


@each_row(
    ("name", "known", "meant"),
    [
        ("=", ["==", "!=", ">", "<", ">=", "<=", "contains", "in"], "=="),
        (">", ["==", "!=", "<=", ">="], ">="),
        ("serch", ["list", "research", "search"], "search"),
        ("x", ["list", "search"], None),
        ("", ["list"], None),
    ],
)
def test_of_names_that_are_equally_alike_the_one_that_begins_so_is_suggested(
    name: str, known: list[str], meant: str | None
) -> None:
    assert closest(name, known) == meant


class Halfway:
    """Has parameters and `execute`, and is not a tool yet."""

    parameters: ClassVar[dict[str, Any]] = {"type": "object"}

    async def execute(self, ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
        return ToolResult.ok("done")


class Spelt(Halfway):
    name, description = "spelt", "Say how it is spelt elsewhere."

    def SetContext(self, channel: str, chat_id: str) -> None:
        raise AssertionError


class GoLike:
    def Definitions(self) -> list[ToolDefinition]:
        return [DEFINITION]


@each_row(
    ("tool", "message"),
    [
        (Halfway(), "it has parameters and execute, but no name and no description"),
        (Spelt(), "Spelt.SetContext is called set_context here"),
        (GoLike(), "GoLike.Definitions is called definitions here"),
    ],
)
def test_an_object_that_is_nearly_a_tool_is_told_what_is_missing(tool: Any, message: str) -> None:
    with pytest.raises(RegistrationError, match=message):
        ToolRegistry([tool])


def test_calls_of_a_scripted_model_are_pairs() -> None:
    for wrong in (["ab", {"x": 1}], ["act"], [("act",)]):
        with pytest.raises(UsageError, match=r'such as calls\(\("search"'):
            calls(*wrong)  # type: ignore[arg-type]


def test_a_class_inside_of_a_tool_is_not_a_method_that_is_spelt_otherwise() -> None:
    class Doubler:
        """Double a number for the test."""

        class Parameters:
            """What it takes."""

        def __call__(self, n: int) -> int:
            """Double a number for the test."""
            return 2 * n

    registry = ToolRegistry()
    registry.add(Doubler(), name="double")
    assert registry.has("double")


def test_an_agent_names_its_registry_for_what_only_that_has() -> None:
    agent: Any = Agent(ScriptedModel([]))

    with pytest.raises(AttributeError, match=r"'add_hook'; write agent\.registry\.add_hook$"):
        _ = agent.add_hook
    with pytest.raises(AttributeError, match=r"'add_hooks'$"):
        _ = agent.add_hooks
