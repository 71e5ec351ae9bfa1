"""Whoever reads a result reads the same: as the after hooks want it, without secrets, within its bounds."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from rows import each_row
from toolcell import PoolConfig, Runtime, Secrets
from toolcell.agents import Agent
from toolcell.agents.providers.provider import ModelResponse
from toolcell.agents.providers.scripted import ScriptedModel
from toolcell.calls.arguments import ToolCall
from toolcell.calls.run_state import JobTable, RunState
from toolcell.errors import ToolError
from toolcell.testing import FakeBackend, ScriptedCall
from toolcell.tools import (
    File,
    Image,
    Origin,
    Override,
    RunContext,
    Text,
    ToolContext,
    ToolRegistry,
    ToolResult,
)
from toolcell_bridge.wire.columns import Column
from toolcell_bridge.wire.messages import Result, RunScript, ToolReturn
from toolcell_bridge.wire.tables import Array
from wire.table_examples import text as words

pytestmark = [pytest.mark.quick, pytest.mark.anyio]

SSN = "078-05-1120"
HIDDEN = "[hidden by a hook]"


async def as_data() -> Any:
    """Return a person as data."""
    return {"name": "Ann", "ssn": SSN}


async def as_text() -> Any:
    """Return a person as text."""
    return f"Ann {SSN}"


async def as_file() -> Any:
    """Return a person as a file, with words for the user."""
    return ToolResult.ok(f"Ann {SSN}", files=[File("a.txt", SSN.encode())], for_user=SSN)


async def as_error() -> Any:
    """Fail, and say too much about it."""
    raise ToolError(f"no {SSN}", details={"ssn": SSN})


async def as_crash() -> Any:
    """Break, and say too much about it."""
    raise ValueError(f"no {SSN}")


async def as_job(ctx: ToolContext) -> Any:
    """Return a person later."""

    async def work() -> ToolResult:
        return ToolResult.of({"ssn": SSN})

    return ctx.start_job(work)


async def as_callback(ctx: ToolContext) -> Any:
    """Return a person later, through the callback."""
    callback = ctx.callback
    assert callback is not None

    def later() -> None:
        callback(ToolResult.of({"ssn": SSN}))

    anyio.lowlevel.current_token()
    await anyio.to_thread.run_sync(later)
    return ToolResult.async_("on it")


TOOLS: list[Callable[..., Any]] = [as_data, as_text, as_file, as_error, as_crash, as_job, as_callback]


def hiding() -> tuple[ToolRegistry, list[str]]:
    """A registry whose after hook hides everything, and the tools it has seen."""
    seen: list[str] = []
    registry = ToolRegistry(TOOLS)

    def hide(call: Any, result: ToolResult) -> Override | None:
        if call.name == "execute_plan" or result.status == "pending":
            return None
        seen.append(call.name)
        return Override(content=HIDDEN)

    registry.add_hook(after=hide)
    registry.enable_plan_execution()
    return registry, seen


@asynccontextmanager
async def run_with_jobs() -> AsyncIterator[RunContext]:
    async with JobTable() as jobs:
        yield RunContext(state=RunState(jobs=jobs))


def guest(run: RunScript) -> Generator[Any, Any, None]:
    answer = yield ScriptedCall(run.source)
    yield Result(answer.value if isinstance(answer, ToolReturn) else [answer.message, answer.details], [])


async def read_by_program(registry: ToolRegistry, name: str, run: RunContext) -> Any:
    result = await registry.dispatch(name, {}, context=run, origin=Origin.CODE)
    return [result.to_dict(), result.text, result.guest_value(), [file.data for file in result.files]]


async def read_in_batch(registry: ToolRegistry, name: str, run: RunContext) -> Any:
    results = await registry.execute_batch([(name, {}), (name, {})], context=run, origin=Origin.PLAN)
    return [[result.to_dict(), result.guest_value()] for result in results]


async def read_in_plan(registry: ToolRegistry, name: str, run: RunContext) -> Any:
    result = await registry.dispatch("execute_plan", {"steps": [{"tool": name, "args": {}}]}, context=run)
    return [result.to_dict(), result.files]


async def read_by_runtime_plan(registry: ToolRegistry, name: str, run: RunContext) -> Any:
    async with Runtime(registry, backend=FakeBackend(guest), pool=PoolConfig(warm=1), allow_unisolated=True) as runtime:
        return await runtime.execute_plan([{"tool": name, "args": {}}], context=run)


async def read_by_script(registry: ToolRegistry, name: str, run: RunContext) -> Any:
    async with Runtime(registry, backend=FakeBackend(guest), pool=PoolConfig(warm=1), allow_unisolated=True) as runtime:
        return (await runtime.execute_code(name, context=run)).to_dict()


async def read_by_model(registry: ToolRegistry, name: str, run: RunContext) -> Any:
    model = ScriptedModel([ModelResponse("", (ToolCall("1", name, "{}"),), "tool_calls"), "done"])
    agent = Agent(model, tools=registry)
    result = await agent.run("go", context=run)
    return [result.messages, [repr(step) for step in result.steps]]


READERS = [read_by_program, read_in_batch, read_in_plan, read_by_runtime_plan, read_by_script, read_by_model]


@pytest.mark.conforms("G4", "G5", "G-b2")
@each_row("tool", [tool.__name__ for tool in TOOLS])
@each_row("read", READERS)
async def test_what_an_after_hook_writes_is_what_every_reader_gets(read: Any, tool: str) -> None:
    registry, seen = hiding()
    events: list[str] = []
    async with run_with_jobs() as run:
        run.events.subscribe(lambda event: events.append(event.to_json()))
        got = await read(registry, tool, run)
        jobs = run.state.jobs
        assert jobs is not None
        got = [got, [(await job.wait()).to_dict() for job in jobs.list()]]

    everything = repr(got) + "".join(event for event in events if "tool_execution_finished" not in event)
    assert SSN not in everything
    assert HIDDEN in everything
    assert seen == [tool] * (2 if read is read_in_batch else 1)


@pytest.mark.conforms("G5", "H-b4")
async def test_what_an_after_hook_writes_is_what_the_audit_log_holds(tmp_path: pathlib.Path) -> None:
    registry, _ = hiding()
    async with Runtime(
        registry,
        backend=FakeBackend(guest),
        pool=PoolConfig(warm=1),
        allow_unisolated=True,
        record=tmp_path / "runs.db",
    ) as runtime:
        for tool in (as_data, as_text, as_file, as_error):
            await runtime.execute_code(tool.__name__)

    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert SSN.encode() not in written
    assert HIDDEN.encode() in written


@pytest.mark.conforms("G4", "L2")
async def test_the_final_result_that_a_callback_passes_on_is_as_the_hooks_want_it() -> None:
    registry, _ = hiding()
    passed_on: list[Any] = []

    async def take(run: RunContext, result: ToolResult) -> None:
        passed_on.append(result.text)

    async def later(ctx: ToolContext) -> Any:
        """Answer later, to whoever waits for that."""
        assert ctx.callback is not None
        await ctx.callback(ToolResult.of({"ssn": SSN}))
        return ToolResult.async_("on it")

    registry.add(later)
    await registry.dispatch("later", {}, context=RunContext(on_complete=take))

    assert passed_on == [HIDDEN]


# Secrets

SECRET = "sk-hunter2hunter2"
NOT_SHOWN = ": a secret is in it, so it is not shown"


@dataclasses.dataclass
class Notes:
    """What a tool notes for a user interface."""

    request: str


LEAKS: dict[str, Callable[[], Any]] = {
    "text": lambda: f"key {SECRET}",
    "data": lambda: {SECRET: [SECRET, (SECRET,)]},
    "details": lambda: ToolResult.ok("x", details={"header": [SECRET]}),
    "details that are an object": lambda: ToolResult.ok("x", details=Notes(SECRET)),
    "details of an error": lambda: ToolResult.fail("x", details=[SECRET], facts={"header": {SECRET: SECRET}}),
    "an error": lambda: ToolResult.fail(f"401 for {SECRET}", output=SECRET),
    "words for the user": lambda: ToolResult.user(SECRET),
    "parts": lambda: ToolResult(
        parts=(Text(SECRET), Image(SECRET.encode(), "image/png"), File(SECRET, SECRET.encode())),
        files=(File(SECRET, SECRET.encode()),),
    ),
    "an exception": lambda: 1 / int(f"{SECRET}"),
}


@pytest.mark.conforms("B-b5", "H-b4")
@each_row("how", ["alone", "job"])
@each_row("leak", LEAKS)
async def test_a_secret_is_in_no_field_of_a_result_and_in_no_event(leak: str, how: str) -> None:
    events: list[str] = []
    registry = ToolRegistry(repeat_hint=1)

    @registry.tool
    async def act(key: Any, ctx: ToolContext) -> Any:
        """Say something about a key."""
        ctx.update(f"with {SECRET}", details={"key": SECRET})
        ctx.emit("own", key=SECRET)

        async def work() -> Any:
            return ToolResult.of(made) if not isinstance(made := LEAKS[leak](), ToolResult) else made

        return LEAKS[leak]() if how == "alone" else ctx.start_job(work)

    async with JobTable() as jobs:
        run = RunContext(state=RunState(jobs=jobs), secrets=Secrets({"KEY": SECRET}))
        run.events.subscribe(lambda event: events.append(event.to_json()))
        results = [await registry.dispatch("act", {"key": {SECRET: [SECRET]}}, context=run, origin=Origin.CODE)]
        results += [await job.wait() for job in jobs.list()]

    kinds = {json.loads(event)["type"] for event in events}
    assert kinds >= {"tool_execution_start", "tool_execution_update", "tool_execution_end", "own"}
    assert [event for event in events if SECRET in event] == []
    fields = [each.name for each in dataclasses.fields(ToolResult) if each.name != "exc"]
    shown = [(result.to_dict(), result.text, *(getattr(result, name) for name in fields)) for result in results]
    assert SECRET not in repr(shown)


@pytest.mark.conforms("B-b5")
async def test_a_secret_is_in_no_table_of_a_result_or_of_an_event() -> None:
    codes = Column("category", 9_000, bytes(9_000), detail=(words(SECRET + "x" * 9_000), False))
    tables = {
        "whole": [Array("numpy", [1], words("harmless")), Array("numpy", [1], words("harmless"))],
        "cell": [Array("numpy", [2], words(f"a {SECRET}", "b")), ["a [redacted]", "b"]],
        "missing": [Array("numpy.ma", [1], words(SECRET, valid=b"\0")), [None]],
        "large": [Array("numpy", [9_000], codes), f"<Array of category, shape (9000,)>{NOT_SHOWN}"],
    }
    for given, expected in tables.values():
        events: list[str] = []
        registry = ToolRegistry()

        @registry.tool
        def act(ctx: ToolContext) -> Any:
            """Return a table, and tell of it."""
            ctx.emit("own", key=given)  # noqa: B023
            return ToolResult(value=given, has_value=True)  # noqa: B023

        run = RunContext(secrets=Secrets({"KEY": SECRET}))
        run.events.subscribe(lambda event: events.append(event.to_json()))  # noqa: B023
        result = await registry.dispatch("act", {}, context=run, origin=Origin.CODE)
        assert result.value == expected
        assert [event for event in events if SECRET in event] == []


@pytest.mark.conforms("B-b5", "B-b6")
async def test_a_secret_is_not_cut_in_two_by_the_bounds_of_a_result() -> None:
    registry = ToolRegistry()
    run = RunContext(secrets=Secrets({"KEY": SECRET}))
    registry.register(
        "act", "Say much with a key in it", None, lambda args: "x" * 190 + SECRET + "y" * 500, max_result_bytes=300
    )

    text = (await registry.dispatch("act", {}, context=run)).text

    assert "hunter" not in text
    assert "sk-" not in text


# Bounds

LIMIT = 200

LARGE: dict[str, Callable[[], Any]] = {
    "text": lambda: "é" * 150,
    "wide text": lambda: "\U0001f600" * 60,
    "several texts": lambda: ToolResult(parts=(Text("x" + "é" * 150), Text("y"))),  # of which the last one fits
    "an error": lambda: ToolResult.fail("é" * 500),
    "an error with output": lambda: ToolResult.fail("é" * 90, output="é" * 90),
    "an error with details": lambda: ToolResult.fail("x", facts={"rows": ["é" * 50] * 10}),
    "words for the user": lambda: ToolResult.user("é" * 500),
    "data": lambda: {"x": "é" * 150},
    "bytes": lambda: b"x" * 300,
    "a file": lambda: ToolResult.ok("x", files=[File("a", b"x" * 300)]),
}


@pytest.mark.conforms("A-b4", "B-b6")
@each_row("case", LARGE)
async def test_the_bound_of_a_result_counts_bytes_and_covers_everything_that_is_read(case: str) -> None:
    registry = ToolRegistry()
    registry.register("act", "Say more than is allowed", None, lambda args: LARGE[case](), max_result_bytes=LIMIT)

    result = await registry.execute("act")

    assert len(result.whole_text.encode()) <= LIMIT + 1  # a line break between error and output
    assert len((result.user_text or "").encode()) <= LIMIT
    assert len(json.dumps(result.error.to_dict()["details"] if result.error else {})) <= LIMIT
    assert sum(len(file.data) for file in result.files) <= LIMIT
    assert result.meta.truncated or (result.error is not None and result.error.code == "too_large")


@pytest.mark.conforms("A-b4")
async def test_what_fits_in_bytes_is_not_cut() -> None:
    registry = ToolRegistry()
    registry.register("act", "Say as much as is allowed", None, lambda args: "é" * 100, max_result_bytes=LIMIT)

    result = await registry.execute("act")

    assert (result.text, result.meta.truncated) == ("é" * 100, False)
