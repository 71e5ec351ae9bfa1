"""`FakeBackend` with a scripted guest: every way a run can end, without a process, on every event loop."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from toolcell import Limits, Outcome, Runtime, SandboxUnavailable, SyncRuntime, ToolRegistry, UsageError
from toolcell.sandbox.backend import Sample
from toolcell.testing import Die, FakeBackend, Hang, RawOutput, ScriptedCall, ScriptedModel, calls
from toolcell_bridge.wire.messages import (
    CallTool,
    Done,
    FilePart,
    Log,
    Progress,
    Result,
    RunScript,
    ToolFail,
    ToolReturn,
)

pytestmark = [
    pytest.mark.quick,
    pytest.mark.every_loop,
    pytest.mark.anyio,
]


def registry() -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool
    async def double(n: int) -> int:
        """Return twice the number."""
        return 2 * n

    return registry


async def played(guest: Any, **options: Any) -> Any:
    limits = Limits(wall_s=options.pop("wall_s", 5), output_flood_bytes=1 << 20)
    async with Runtime(registry(), backend=FakeBackend(guest), limits=limits, allow_unisolated=True) as runtime:
        return await runtime.execute_code(options.pop("source", "any text"), **options)


async def test_a_list_of_messages_is_played_for_every_run() -> None:
    steps = [Log(1, "hello\n"), Progress(1), Result({"a": 1}, ["f"]), FilePart("f", "text/plain", b"data", True)]
    seen: list[object] = []
    result = await played(steps, on_progress=seen.append)

    assert (result.outcome, result.value, result.logs.stdout, seen) == (Outcome.OK, {"a": 1}, "hello\n", [1])
    assert [(file.name, file.data) for file in result.files] == [("f", b"data")]


async def test_a_generator_receives_the_answers_of_its_calls() -> None:
    def guest(run: RunScript) -> Generator[Any, ToolReturn | ToolFail | None, None]:
        first = yield ScriptedCall("double", {"n": run.inputs["n"]}, line=3)
        second = yield ScriptedCall("nothing_like_it")
        assert isinstance(first, ToolReturn)
        assert isinstance(second, ToolFail)
        yield Result([first.value, second.code], [])

    result = await played(guest, inputs={"n": 21})

    assert (result.outcome, result.value[0]) == (Outcome.OK, 42)
    assert [(call.name, call.line, call.status) for call in result.calls] == [
        ("double", 3, "ok"),
        ("nothing_like_it", None, "error"),
    ]


@pytest.mark.parametrize(
    ("steps", "outcome"),
    [
        pytest.param([Done(False, {"type": "ValueError", "message": "no"})], Outcome.ERROR, id="error"),
        pytest.param([Hang()], Outcome.TIMEOUT, id="hang"),
        pytest.param([Die(11)], Outcome.KILLED, id="signal"),
        pytest.param([Die(None, 3)], Outcome.KILLED, id="exit"),
        pytest.param([Sample(memory_kills=1), Die()], Outcome.MEMORY_LIMIT, id="memory"),
        pytest.param([Sample(cpu_s=1e9), Die()], Outcome.CPU_LIMIT, id="cpu"),
        pytest.param([Sample(refused_processes=1), Die()], Outcome.PROCESS_LIMIT, id="processes"),
        pytest.param([b"garbage" * 10], Outcome.PROTOCOL_ERROR, id="garbage"),
        pytest.param([CallTool(5, "double", {"n": 1}, None), b"\xff" * 8], Outcome.PROTOCOL_ERROR, id="after a call"),
        pytest.param([Log(1, "x" * 1000)] * 3000, Outcome.OUTPUT_LIMIT, id="flood"),
    ],
)
async def test_every_end_of_a_run_can_be_played(steps: list[Any], outcome: Outcome) -> None:
    result = await played([Result("early", []), *steps], wall_s=1 if outcome is Outcome.TIMEOUT else 20)

    assert result.outcome is outcome
    assert result.value == "early"


async def test_raw_output_is_captured() -> None:
    result = await played([RawOutput(b"out", b"err")])

    assert (result.logs.stdout, result.logs.stderr) == ("out", "err")


async def test_the_runs_and_files_of_the_guest_are_recorded() -> None:
    backend = FakeBackend([], layers={"moat": "full"})
    async with Runtime(registry(), backend=backend, allow_unisolated=True) as runtime:
        result = await runtime.execute_code("print(1)", inputs={"x": 1}, files=[("a/b", b"data")])
    asked = [(run.source, run.inputs, sandbox.files) for sandbox in backend.played for run in sandbox.runs]

    assert asked == [("print(1)", {"x": 1}, {"a/b": b"data"})]
    assert result.isolation.layers == {"moat": "full"}


@pytest.mark.parametrize("guest", [None, []])
async def test_a_runtime_refuses_an_unisolated_backend_unless_allowed(guest: Any) -> None:
    with pytest.raises(UsageError, match="allow_unisolated=True"):
        async with Runtime(backend=FakeBackend(guest)):
            raise AssertionError("it was opened")


async def test_a_fake_that_is_not_open_starts_nothing() -> None:
    with pytest.raises(SandboxUnavailable, match="not open"):
        await FakeBackend([]).start(Limits())


async def test_a_fake_works_with_a_sync_runtime() -> None:
    with SyncRuntime(backend=FakeBackend([Result(1, [])]), allow_unisolated=True) as runtime:
        assert runtime.execute_code("1").value == 1


async def test_the_scripted_model_is_exported_for_tests_of_agents() -> None:
    model = ScriptedModel([calls(("double", {"n": 2})), "four"])

    assert (await model.chat([], [], "m", {})).tool_calls[0].name == "double"
    assert (await model.chat([], [], "m", {})).content == "four"
