"""`tools.github.create_issue(...)`: tools of a namespace in scripts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from toolcell import PoolConfig, SyncRuntime, ToolRegistry

pytestmark = [pytest.mark.quick, pytest.mark.isolation]


@pytest.fixture(scope="module")
def runtime() -> Iterator[SyncRuntime]:
    registry = ToolRegistry()
    for name in ("github.create_issue", "github.class", "github.sub-space.list", "plain"):
        registry.register(name, f"Answers with the name {name}", None, lambda args, name=name: [name, args])
    with SyncRuntime(registry, pool=PoolConfig(warm=1)) as opened:
        yield opened


def test_every_way_to_call_a_tool_reaches_those_in_namespaces(runtime: SyncRuntime) -> None:
    script = """
import asyncio
calls = [
    call_tool("github.create_issue", a=1),
    call_tool("github__create_issue", {"a": 1}),
    tools.github.create_issue(a=1),
    tools["github.create_issue"](a=1),
    tools["github"]["create_issue"](a=1),
    *call_tools_parallel([("github.create_issue", {"a": 1})]),
    await call_tool_async("github.create_issue", a=1),
]
named = [tools.github.class_(), tools.github.sub_space.list(), tools.plain()]
set_result([calls, [name for name, _ in named], dir(tools), dir(tools.github)])
"""
    result = runtime.execute_code(script)

    assert result.ok, result.error
    calls, named, at_top, inside = result.value
    assert calls == [["github.create_issue", {"a": 1}]] * 7
    assert named == ["github.class", "github.sub-space.list", "plain"]
    assert {"github", "plain", "github.create_issue"} <= set(at_top)
    assert {"create_issue", "class", "sub-space"} <= set(inside)


@pytest.mark.parametrize("script", ["tools.github.create_isue(a=1)", "call_tool('github.create_isue', a=1)"])
def test_a_misspelt_name_is_told_with_the_one_that_is_meant(runtime: SyncRuntime, script: str) -> None:
    result = runtime.execute_code(script)

    assert result.error is not None
    assert "create_issue" in result.error.message


def test_a_rule_about_a_namespace_holds_for_scripts(runtime: SyncRuntime) -> None:
    registry = ToolRegistry()
    registry.register("github.delete", "Deletes what there is", None, lambda args: "deleted")
    registry.blacklist("github.*")

    result = runtime.execute_code("call_tool('github__delete')", tools=registry)

    assert result.error is not None
    assert "not permitted" in result.error.message
