"""Names with dots: how a provider, a plan, a policy and a stub write them, and which names cannot stand together."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from toolcell.errors import RegistrationError
from toolcell.tools import Origin, ToolRegistry
from toolcell.tools.names import MAX_NAME_CHARS

from .toolkit import QUERY_SCHEMA

pytestmark = pytest.mark.anyio


def registry_of_names(*names: str) -> ToolRegistry:
    registry = ToolRegistry()
    for name in names:
        registry.register(name, f"Answers with the name {name}", QUERY_SCHEMA, lambda args, name=name: name)
    return registry


@pytest.mark.parametrize("called", ["github.create_issue", "github__create_issue"])
@pytest.mark.parametrize("origin", list(Origin))
async def test_a_tool_in_a_namespace_is_called_from_everywhere_by_either_name(called: str, origin: Origin) -> None:
    registry = registry_of_names("github.create_issue")

    result = await registry.dispatch(called, {"query": "x"}, origin=origin)

    assert (result.output, result.meta.tool) == ("github.create_issue", "github.create_issue")


async def test_a_plan_calls_tools_in_namespaces() -> None:
    registry = registry_of_names("a.b.c", "a.d")
    steps = [{"tool": "a.b.c", "args": {"query": "x"}}, {"tool": "a__d", "args": {"query": "x"}}]

    result = await registry.run_plan({"steps": steps}, registry.new_run())

    assert [(row["tool"], row["result"]) for row in result.value] == [("a.b.c", "a.b.c"), ("a.d", "a.d")]


def test_providers_are_given_names_that_they_take() -> None:
    (definition,) = registry_of_names("git-hub.create_issue").definitions()

    assert definition.to_openai()["function"]["name"] == "git-hub__create_issue"
    assert definition.to_anthropic()["name"] == "git-hub__create_issue"
    assert definition.to_mcp()["name"] == "git-hub.create_issue"


@pytest.mark.parametrize("pattern", ["github.*", "github.create_issue", "*issue"])
@pytest.mark.parametrize("called", ["github.create_issue", "github__create_issue"])
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


@pytest.mark.parametrize("names", [*ALIKE, *((b, a) for a, b in ALIKE)])
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


@pytest.mark.parametrize("name", [".a", "a.", "a..b", "a.b c", "toolcell.list_tools", "Toolcell.x", "a." + "b" * 62])
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
