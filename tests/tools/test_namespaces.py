"""Names with dots: how a provider, a plan, a policy and a stub write them, and which names cannot stand together."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest

from rows import each_row
from toolcell import SyncRuntime
from toolcell.agents import Agent
from toolcell.agents.providers.scripted import ScriptedModel
from toolcell.calls.definition import MAX_NAME_CHARS, TakenNames
from toolcell.errors import RegistrationError
from toolcell.tools import Origin, ToolRegistry
from toolcell_bridge.guest.tool_names import name_meant
from toolcell_bridge.guest.tools import GUEST_NAMES

from .toolkit import QUERY_SCHEMA, FakeRuntime

pytestmark = [pytest.mark.quick, pytest.mark.anyio]


async def nothing(call_tool: Any) -> Any:
    return None


def registry_of_names(*names: str) -> ToolRegistry:
    registry = ToolRegistry()
    for name in names:
        registry.register(name, f"Answers with the name {name}", QUERY_SCHEMA, lambda args, name=name: name)
    return registry


@each_row("called", ["github.create_issue", "github__create_issue"])
@each_row("origin", list(Origin))
async def test_a_tool_in_a_namespace_is_called_from_everywhere_by_either_name(called: str, origin: Origin) -> None:
    registry = registry_of_names("github.create_issue")

    result = await registry.dispatch(called, {"query": "x"}, origin=origin)

    assert (result.output, result.meta.tool) == ("github.create_issue", "github.create_issue")


async def test_a_plan_calls_tools_in_namespaces() -> None:
    registry = registry_of_names("a.b.c", "a.d")
    steps = [{"tool": "a.b.c", "args": {"query": "x"}}, {"tool": "a__d", "args": {"query": "x"}}]

    result = await registry.run_plan({"steps": steps}, registry.new_run())

    assert [(row["tool"], row["result"]) for row in result.value] == [("a.b.c", "a.b.c"), ("a.d", "a.d")]


NAMES = {"git-hub.create_issue": "git-hub__create_issue", "1st.x": "_1st__x", "2nd": "_2nd", "-x": "_-x", "_y": "_y"}


@each_row("name", NAMES)
async def test_providers_are_given_names_that_they_take(name: str) -> None:
    registry, given = registry_of_names(name), NAMES[name]
    (definition,) = registry.definitions()

    assert definition.to_openai()["function"]["name"] == given
    assert definition.to_anthropic()["name"] == given
    assert definition.to_mcp()["name"] == name
    assert (await registry.dispatch(given, {"query": "x"})).meta.tool == name
    assert name_meant(given, registry.names()) == name
    with pytest.raises(RegistrationError):
        registry_of_names(name, name.replace("-", "_"), given)


@each_row("pattern", ["github.*", "github.create_issue", "*issue"])
@each_row("called", ["github.create_issue", "github__create_issue"])
async def test_rules_about_a_namespace_hold_for_either_name(pattern: str, called: str) -> None:
    registry = registry_of_names("github.create_issue", "other")
    registry.blacklist(pattern)

    result = await registry.dispatch(called, {"query": "x"})

    assert result.error is not None
    assert result.error.code == "not_permitted"
    assert registry.names() == ["other"]


async def test_a_registered_name_with_two_underscores_means_itself() -> None:
    assert (await registry_of_names("a__b").dispatch("a__b", {"query": "x"})).output == "a__b"
    assert (await registry_of_names("x.a__b").dispatch("x__a__b", {"query": "x"})).output == "x.a__b"


ALIKE = [
    ("github.create_issue", "github__create_issue"),
    ("search", "Search"),
    ("find-docs", "find_docs"),
    ("a.class", "a.class_"),
    ("A.b", "a.B"),
    ("github", "github.create_issue"),
    ("github.issues.list", "github.issues"),
]


@each_row("names", [*ALIKE, *((b, a) for a, b in ALIKE)])
def test_names_that_can_be_taken_for_one_another_are_refused(names: tuple[str, str]) -> None:
    first, second = names
    registry = registry_of_names(first)

    with pytest.raises(RegistrationError) as caught:
        registry.register(second, "A second tool of that name", QUERY_SCHEMA, lambda args: None)
    assert first in str(caught.value)
    assert second in str(caught.value)
    assert registry.list() == [first]
    with pytest.raises(RegistrationError, match="rename one of them"):
        registry.merged(registry_of_names(second))


def test_two_names_of_one_tool_may_be_alike() -> None:
    registry = registry_of_names("find-docs")
    registry.alias("find_docs", "find-docs")

    assert registry.list() == ["find-docs", "find_docs"]


@each_row("name", [".a", "a.", "a..b", "a.b c", "toolcell.list_tools", "Toolcell.x", "a." + "b" * 62])
def test_a_dot_stands_between_two_parts(name: str) -> None:
    with pytest.raises(RegistrationError, match=r"a name must match|is taken"):
        registry_of_names(name)


def test_a_name_may_be_as_long_as_providers_take_it() -> None:
    name = "a." + "b" * (MAX_NAME_CHARS - 3)

    (definition,) = registry_of_names(name).definitions()

    assert len(definition.to_openai()["function"]["name"]) == MAX_NAME_CHARS


def test_stubs_write_a_namespace_as_a_class() -> None:
    record: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    registry = registry_of_names("plain", "git.hub.class", "git.log")
    registry.register("git.push", "Takes a record of its own", {"type": "object", "properties": {"r": record}}, len)

    tree = ast.parse(registry.to_python())

    found = dict(walk(tree.body))
    assert list(found) == ["plain", "git", "git.hub", "git.hub.class_", "git.log", "git.push", "GitPushR"]
    assert isinstance(found["git.push"], ast.FunctionDef)
    assert [ast.unparse(each) for each in found["git.push"].decorator_list] == ["staticmethod"]


def walk(body: list[ast.stmt], prefix: str = "") -> list[tuple[str, ast.stmt]]:
    found: list[tuple[str, ast.stmt]] = []
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.append((prefix + node.name, node))
            if isinstance(node, ast.ClassDef):
                found += walk(node.body, f"{prefix}{node.name}.")
    return found


@each_row("name", ["__class__", "__init__", "a.__dict__", "__a__.b"])
def test_a_name_that_python_gives_a_meaning_is_refused(name: str) -> None:
    with pytest.raises(RegistrationError, match="means something else in Python; rename it"):
        registry_of_names(name)


@each_row("name", ["execute_plan", "execute_code", "search_tools"])
def test_a_tool_of_a_program_is_not_replaced_by_one_that_is_enabled(name: str) -> None:
    registry = registry_of_names(name)
    runtime = FakeRuntime(nothing)
    enable: dict[str, Callable[[ToolRegistry], None]] = {
        "execute_plan": lambda each: each.enable_plan_execution(),
        "execute_code": lambda each: each.enable_code_execution(runtime),
        "search_tools": lambda each: each.enable_tool_search(),
    }
    with pytest.raises(RegistrationError, match=f"tool '{name}': toolcell's own tool of that name would hide it"):
        enable[name](registry)

    fresh = ToolRegistry()
    enable[name](fresh)
    enable[name](fresh)  # a second time, with other options, replaces the first
    with pytest.raises(RegistrationError, match="already registered"):
        fresh.register(name, "A tool of that name", QUERY_SCHEMA, lambda args: "")


async def test_an_agent_does_not_replace_a_tool_of_the_program() -> None:
    for name, options in (("execute_code", {"code_execution": FakeRuntime(nothing)}), ("ask_user", {"ask_user": str})):
        agent = Agent(ScriptedModel(["done"]), tools=registry_of_names(name), **options)  # type: ignore[arg-type]
        with pytest.raises(RegistrationError, match="rename it"):
            await agent.run("Hello")


@pytest.mark.isolation
def test_names_of_the_guest_s_functions_keywords_and_digits_are_tools_like_any_other() -> None:
    names = [*sorted(GUEST_NAMES), "class", "None", "match", "1st", "print", "a.lambda", "b.list_tools", "__x", "c._y"]
    script = f"""
import keyword
found = [call_tool(name, query="x") for name in {names!r}]
assert call_tool("_1st", "x") == "1st"
found += [tools[name](query="x") for name in {names!r} if "." not in name]
found += [tools.class_(query="x"), tools.None_(query="x"), tools._1st(query="x"), tools.print(query="x")]
found += [tools.call_tool(query="x"), tools.a.lambda_(query="x"), tools.b.list_tools(query="x"), tools.c._y(query="x")]
set_result([found, [each["name"] for each in list_tools()], callable(print), search_tools("class", detail="names")])"""
    registry = registry_of_names(*names)
    with SyncRuntime(registry) as runtime:
        found, listed, is_callable, searched = runtime.execute_code(script).value

    plain = [name for name in names if "." not in name]
    said = ["class", "None", "1st", "print", "call_tool", "a.lambda", "b.list_tools", "c._y"]
    assert (found, listed, is_callable, searched) == ([*names, *plain, *said], names, True, "class")
    ast.parse(registry.to_python())


def test_registering_one_tool_looks_at_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = list[str]()
    plain = TakenNames._note

    def note(self: TakenNames, name: str) -> None:
        looked_at.append(name)
        plain(self, name)

    monkeypatch.setattr(TakenNames, "_note", note)
    registry = ToolRegistry()
    for number in range(100):
        registry.register(f"n.tool_{number}", "Return what it is given, always.", QUERY_SCHEMA, lambda args: args)
    registry.unregister("n.tool_7")
    registry.register("n.tool_7", "Return what it is given, always.", QUERY_SCHEMA, lambda args: args)

    assert len(looked_at) <= 100 + 100 + 1


def test_a_refused_name_leaves_no_trace_for_later_ones() -> None:
    registry = ToolRegistry()
    registry.register("one.two", "Return what it is given, always.", QUERY_SCHEMA, lambda args: args)
    for wrong in ("one", "One.Two", "ONE"):
        with pytest.raises(RegistrationError):
            registry.register(wrong, "Return what it is given, always.", QUERY_SCHEMA, lambda args: args)
    assert registry.unregister("one.two")
    registry.register("one", "Return what it is given, always.", QUERY_SCHEMA, lambda args: args)
    with pytest.raises(RegistrationError):
        registry.register("one.two", "Return what it is given, always.", QUERY_SCHEMA, lambda args: args)
