"""Group D: tools that rewrite their raw arguments."""

from __future__ import annotations

from typing import Any

import pytest

from rows import each_row
from toolcell.tools import ToolRegistry
from tools.toolkit import FakeRuntime, recorded

pytestmark = [pytest.mark.quick, pytest.mark.anyio]


def with_prepare(prepare: Any, log: list[str] | None = None) -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool(prepare=prepare)
    async def page(limit: int) -> int:
        """Return the limit it was given."""
        if log is not None:
            log.append(f"execute {limit}")
        return limit

    return registry


@pytest.mark.conforms("D1", "D4", "EX-20", "D2")
async def test_preparation_comes_after_the_start_and_before_validation_hooks_and_the_tool() -> None:
    log: list[str] = []

    def prepare(args: dict[str, Any]) -> dict[str, Any]:
        log.append(f"prepare {args}")
        return {"limit": str(args.get("max", 0))}

    registry = with_prepare(prepare, log)
    registry.events.subscribe(lambda event: log.append(f"{event.type.removeprefix('tool_execution_')} {event.args}"))
    registry.add_hook(before=lambda call: log.append(f"before {call.args}"))

    await registry.execute("page", {"max": 5})

    assert log == [
        "start {'max': 5}",
        "prepare {'max': 5}",
        "before {'limit': 5}",
        "execute 5",
        "finished None",
        "end {'limit': 5}",
    ]


@pytest.mark.conforms("D3")
async def test_without_a_preparation_arguments_stay_as_they_are() -> None:
    assert (await with_prepare(None).execute("page", {"limit": 3})).value == 3


@pytest.mark.conforms("D-b1")
async def test_preparation_works_on_a_copy_however_deep_it_changes_things() -> None:
    def prepare(args: dict[str, Any]) -> dict[str, Any]:
        args["deep"]["list"].append(1)
        args["deep"]["more"] = True
        return {"limit": len(args["deep"]["list"])}

    received = {"deep": {"list": [1]}}
    registry = with_prepare(prepare)
    log = recorded(registry.events)

    assert (await registry.execute("page", received)).value == 2
    assert received == {"deep": {"list": [1]}}
    assert log[0].args == {"deep": {"list": [1]}}


def raising(args: dict[str, Any]) -> dict[str, Any]:
    raise KeyError("limit")


@pytest.mark.conforms("D-b2")
@each_row("prepare", [raising, lambda args: None, lambda args: [args], lambda args: "x"])
async def test_a_preparation_that_fails_fails_its_call_alone(prepare: Any) -> None:
    registry = with_prepare(prepare)

    @registry.tool
    async def other() -> str:
        """Another call in the same batch."""
        return "fine"

    bad, good = await registry.execute_batch([("page", {"limit": 1}), ("other", {})])

    assert bad.error is not None
    assert bad.error.code == "prepare_failed"
    assert good.text == "fine"


@pytest.mark.conforms("D-b3")
@each_row("asynchronous", [True, False])
async def test_preparation_may_be_async_and_runs_once_on_every_path(asynchronous: bool) -> None:
    prepared: list[Any] = []

    def prepare(args: dict[str, Any]) -> dict[str, Any]:
        prepared.append(args)
        return {"limit": 4}

    async def prepare_async(args: dict[str, Any]) -> dict[str, Any]:
        return prepare(args)

    async def script(call_tool: Any) -> Any:
        return await call_tool("page", {"max": 4})

    registry = with_prepare(prepare_async if asynchronous else prepare)
    registry.enable_plan_execution()
    registry.enable_code_execution(FakeRuntime(script))

    direct = await registry.execute("page", '{"max": 4}')
    plan = await registry.execute("execute_plan", {"steps": [{"tool": "page", "args": {"max": 4}}]})
    code = await registry.execute("execute_code", {"code": "..."})

    assert direct.value == plan.value[0]["result"] == code.value == 4
    assert prepared == [{"max": 4}] * 3


@pytest.mark.conforms("D4", "M-b1")
async def test_nothing_of_a_forbidden_tool_runs_not_even_its_preparation() -> None:
    prepared: list[Any] = []
    registry = with_prepare(prepared.append)
    registry.blacklist("page")

    result = await registry.execute("page", {"limit": 1})

    assert result.text == 'tool "page" is not permitted'
    assert prepared == []
