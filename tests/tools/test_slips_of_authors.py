"""Slips of those who write tools and hooks: they end one call, or are refused where they are written."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import pytest

from rows import each_row
from toolcell import Agent, Outcome, PoolConfig, Runtime
from toolcell.calls.call import Block, Hook, Override, Rewrite, Substitute
from toolcell.errors import RegistrationError, ToolError, UsageError
from toolcell.testing import FakeBackend, ScriptedCall, ScriptedModel
from toolcell.tools import Feature, Origin, RunContext, ToolContext, ToolRegistry, ToolResult
from toolcell_bridge.wire.messages import Done, Log

pytestmark = [pytest.mark.anyio, pytest.mark.conforms("J1", "J-b2", "V-1")]


class Panic(BaseException):
    """What an extension written in Rust raises when it panics is no `Exception` either."""


class NastyError(Exception):
    """Not even its text can be had."""

    def __str__(self) -> str:
        raise RuntimeError("even my text fails")


def fail_with(exc: BaseException) -> Any:
    raise exc


RESULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "a number as text": (lambda: ToolResult.ok(42), "Text(text) must be str, not 42"),  # type: ignore[arg-type]
    "odd keys": (lambda: ToolResult.of({(1, 2): 3}), "a key is tuple"),
    "an exception as message": (lambda: ToolResult.fail(ValueError("no such row")), "no such row"),  # type: ignore[arg-type]
    "a number as message": (lambda: fail_with(ToolError(404)), "404"),  # type: ignore[arg-type]
    "an empty message": (lambda: fail_with(ToolError("")), "tool_error"),
    "no message": (lambda: ToolResult.fail(None), "tool_error"),  # type: ignore[arg-type]
    "details that are not a mapping": (lambda: fail_with(ToolError("no such row", details="x")), "no such row"),  # type: ignore[arg-type]
    "an error that is ok": (lambda: ToolResult.fail("x", status="ok"), "must have no error"),  # type: ignore[arg-type]
    "an unknown status": (lambda: ToolResult(status="fine"), "must be one of"),  # type: ignore[arg-type]
    "an integer without end": (lambda: 10**5000, "64 bits"),
    "a value": (lambda: fail_with(ValueError("boom")), "raised ValueError: boom"),
    "no memory": (lambda: fail_with(MemoryError()), "raised MemoryError"),
    "recursion": (lambda: fail_with(RecursionError()), "raised RecursionError"),
    "the system": (lambda: fail_with(OSError(2, "no such file")), "raised FileNotFoundError"),
    "a text that cannot be had": (lambda: fail_with(NastyError()), "raised NastyError"),
    "leaving": (lambda: sys.exit(3), "SystemExit"),
    "a class of its own": (lambda: fail_with(Panic("in Rust")), "Panic: in Rust"),
    "closing a generator": (lambda: fail_with(GeneratorExit()), "GeneratorExit"),
    "nothing more to iterate over": (lambda: next(iter([])), "StopIteration"),
    "a cancellation that nobody sent": (lambda: fail_with(asyncio.CancelledError()), "CancelledError"),
    "a group": (lambda: fail_with(BaseExceptionGroup("g", [ValueError(), Panic()])), "BaseExceptionGroup"),
}


@pytest.mark.conforms("EX-23", "J7", "V-2")
@each_row("slip", RESULTS)
async def test_a_slip_in_a_tool_ends_its_call_alone(slip: str) -> None:
    make, said = RESULTS[slip]
    registry = ToolRegistry()

    async def at_once(args: Any) -> Any:
        return make()

    async def later(args: Any) -> Any:
        await anyio.lowlevel.checkpoint()
        return make()

    registry.register("threaded", "Answer with a slip of its author", None, lambda args: make())
    registry.register("direct", "Answer with a slip of its author", None, lambda args: make(), blocking=False)
    registry.register("at_once", "Answer with a slip of its author", None, at_once)
    registry.register("later", "Answer with a slip of its author", None, later)
    registry.register("good", "Answer as it should be done", None, lambda args: "fine")

    *bad, good = await registry.execute_batch(
        [(name, {}) for name in ("threaded", "direct", "at_once", "later", "good")]
    )

    assert all(result.is_error and said in result.text for result in bad)
    assert good.text == "fine"


@dataclass
class Own:
    """A type of a tool's own that cannot be made."""

    slip: str

    def __post_init__(self) -> None:
        RESULTS[self.slip][0]()


@each_row("slip", [slip for slip, (make, _) in RESULTS.items() if "fail_with" in make.__code__.co_names])
async def test_a_slip_in_a_tools_own_type_ends_its_call_alone(slip: str) -> None:
    async def take(own: Own) -> str:
        """Take something of a type of its own."""
        return "taken"

    async def good() -> str:
        """Answer as it should be done."""
        return "fine"

    bad, right = await ToolRegistry([take, good]).execute_batch([("take", {"own": {"slip": slip}}), ("good", {})])

    assert bad.is_error
    assert right.text == "fine"


async def contained_failure(*args: Any) -> None:
    """Have a task of a group fail while the group waits for another one, and contain that."""

    async def fail() -> None:
        raise ValueError("in a task of the group")

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(60))
            group.create_task(fail())
    except* ValueError:
        pass


@pytest.mark.parametrize("place", ["tool", "hook", "middleware", "on_log"])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_failed_task_group_of_an_author_does_not_cancel_the_run(place: str) -> None:
    registry = ToolRegistry()

    async def work() -> str:
        """Wait for a moment, and be done."""
        if place == "tool":
            await contained_failure()
        await anyio.lowlevel.checkpoint()
        return "done"

    async def around(call: Any, proceed: Any) -> ToolResult:
        await contained_failure()
        result: ToolResult = await proceed()
        return result

    registry.add(work)
    if place == "hook":
        registry.add_hook(before=contained_failure)
    if place == "middleware":
        registry.add_middleware(around)
    guest = [Log(1, "begun"), ScriptedCall("work"), ScriptedCall("work"), Done(True, None)]
    backend = FakeBackend(guest)
    async with Runtime(registry, backend=backend, pool=PoolConfig(warm=1), allow_unisolated=True) as runtime:
        result = await runtime.execute_code("play", on_log=contained_failure if place == "on_log" else None)

    assert (result.outcome, [call.status for call in result.calls]) == (Outcome.OK, ["ok", "ok"])
    assert requests_to_cancel() == 0


def requests_to_cancel() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_failed_task_group_of_a_provider_leaves_no_request_to_cancel() -> None:
    class Model(ScriptedModel):
        async def chat(self, *args: Any, **options: Any) -> Any:
            await contained_failure()
            return await super().chat(*args, **options)

    result = await Agent(Model(["the answer"]), model="m").run("a question")

    assert (result.content, requests_to_cancel()) == ("the answer", 0)


def acting() -> ToolRegistry:
    registry = ToolRegistry()
    registry.register("act", "Do something that others look at", None, lambda args: "done")
    return registry


@pytest.mark.conforms("G-b3")
@each_row(
    ("when", "answer"),
    [
        ("before", lambda: Substitute("text")),  # type: ignore[arg-type]
        ("before", lambda: Block(5)),  # type: ignore[arg-type]
        ("before", lambda: Rewrite(3)),  # type: ignore[arg-type]
        ("before", lambda: True),
        ("after", lambda: Override(5)),  # type: ignore[arg-type]
        *((when, slip) for when in ("before", "after") for slip in (lambda: sys.exit(1), lambda: fail_with(Panic()))),
    ],
)
async def test_a_slip_in_a_hook_blocks_its_call_or_costs_the_result(when: str, answer: Callable[[], Any]) -> None:
    registry = acting()
    registry.add_hook(**{when: lambda *_: answer()})

    result = await registry.execute("act")

    assert result.error is not None and result.error.code == "hook_error"
    assert (str(result.status) == "blocked", "done" in result.text) == (when == "before", False)


async def test_an_observer_that_leaves_refuses_its_call() -> None:
    class Leaving(Feature):
        def call_started(self, call: Any) -> None:
            sys.exit(3)

    result = await acting().dispatch("act", {}, context=RunContext().having(Leaving()))

    assert result.error is not None
    assert result.error.code == "unavailable"


@each_row("exc", [SystemExit(3), ValueError("no disk"), Panic()], ids=repr)
async def test_a_call_that_was_made_has_its_result_although_its_end_is_not_recorded(exc: BaseException) -> None:
    class Failing(Feature):
        async def call_ended(self, call: Any) -> None:
            raise exc

    results = await acting().execute_batch([("act", {})] * 2, context=RunContext().having(Failing()))

    assert [result.text for result in results] == ["done", "done"]


@pytest.mark.conforms("A-b1")
@each_row(
    "settings",
    [
        {"max_workers": 0},
        {"timeout_s": -1},
        {"timeout_s": float("nan")},
        {"max_batch": 0},
        {"coercion": "fast"},
        {"extras": "maybe"},
        {"sequential": "yes"},
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused_and_named(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(settings))):
        ToolRegistry(**settings)


@pytest.mark.conforms("A-b1")
@each_row(
    "options",
    [
        {"max_concurrency": 0},
        {"mode": "serial"},
        {"callable_from": "codes"},
        {"timeout_s": "x"},
        {"blocking": None},
        {"max_result_bytes": -1},
        {"coercion": "fast"},
    ],
    ids=str,
)
def test_a_wrong_option_is_refused_and_named(options: dict[str, Any]) -> None:
    with pytest.raises(RegistrationError, match=next(iter(options))):
        ToolRegistry().register("act", "Do what its options say", None, lambda args: "done", **options)


@pytest.mark.conforms("G-b3")
@each_row("option", ["before", "after", "on_error"])
def test_a_wrong_hook_is_refused(option: str) -> None:
    with pytest.raises(UsageError, match=option):
        Hook(**{option: "ignore"})  # type: ignore[arg-type]


@pytest.mark.parametrize("origin", [Origin.MODEL, Origin.CODE])
async def test_arguments_that_contain_themselves_are_logged(caplog: pytest.LogCaptureFixture, origin: Origin) -> None:
    registry = ToolRegistry()
    registry.register("act", "Do something with anything", None, lambda args: "done", validate=False)
    registry.register("strict", "Do something with anything", {"type": "object"}, lambda args: "done")
    circle: dict[str, Any] = {}
    circle["x"] = [circle]

    with caplog.at_level(logging.INFO, "toolcell.tools"):
        results = [await registry.dispatch(name, {"x": circle}, origin=origin) for name in ("act", "strict", "none")]

    assert [result.is_error for result in results[1:]] == [True, True]
    assert caplog.text


class Swapped:
    name, description = "swapped", "Takes its arguments in another order."
    parameters: ClassVar[dict[str, Any]] = {"type": "object", "properties": {"a": {"type": "integer"}}}


def order(execute: Any) -> Any:
    return type("Swapped", (Swapped,), {"execute": execute})()


async def args_first(self: Any, args: dict[str, Any], ctx: ToolContext) -> ToolResult:
    return ToolResult.of([ctx.tool, args["a"]])


async def args_first_by_name(self: Any, arguments: Any, context: Any) -> ToolResult:
    return ToolResult.of([context.tool, arguments["a"]])


async def only_the_annotation_says_it(self: Any, what: Any, who: ToolContext) -> ToolResult:
    return ToolResult.of([who.tool, what["a"]])


async def names_of_their_own(self: Any, c: Any, a: Any) -> ToolResult:
    return ToolResult.of([c.tool, a["a"]])


async def as_documented(self: Any, ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    return ToolResult.of([ctx.tool, args["a"]])


@pytest.mark.anyio
@pytest.mark.conforms("A1", "A4")
@each_row("execute", [args_first, args_first_by_name, only_the_annotation_says_it, names_of_their_own, as_documented])
async def test_execute_gets_its_context_and_arguments_by_name(execute: Any) -> None:
    result = await ToolRegistry([order(execute)]).execute("swapped", {"a": 7})
    assert result.value == ["swapped", 7]


@pytest.mark.conforms("A1", "A4")
def test_an_execute_that_asks_for_something_else_is_refused_by_name() -> None:
    async def execute(self: Any, args: Any, input: Any) -> ToolResult:
        return ToolResult.ok("")

    with pytest.raises(RegistrationError, match=r"'swapped': execute must take \(ctx, args\)"):
        ToolRegistry([order(execute)])
