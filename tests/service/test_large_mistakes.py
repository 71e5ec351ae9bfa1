"""A body that is wrong in a great many places costs its reader about what a right one of its size costs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import anyio
import pytest

from hostile.loop_silence import watched
from rows import each_row
from toolcell import Limits, Runtime, ToolRegistry
from toolcell.config import MAX_DECISIONS, MAX_PLAN_STEPS, check_decisions
from toolcell.errors import UsageError
from toolcell.run import RunOptions
from toolcell.service.bodies import MAX_ERRORS, parsed_body
from toolcell.service.problems import Problem
from toolcell.service.routes.models import DecideRequest, ExecuteRequest, PlanRequest
from toolcell.service.socket.arguments import Arguments

MANY = 60_000
SILENT_S = 0.03
"""A thread has the interpreter for 5 ms, and a step of reading or freeing takes about as long. The parser is no Python whose
calls can be counted, so the least of some measurements counts: other work only adds to it."""


def members(count: int) -> dict[str, int]:
    return {f"x{number}": 0 for number in range(count)}


WRONG: dict[str, tuple[Any, dict[str, Any]]] = {
    "unknown members": (ExecuteRequest, {"code": "1", **members(MANY)}),
    "unknown limits": (ExecuteRequest, {"code": "1", "limits": {f"wall_{number}": 0 for number in range(MANY)}}),
    "unknown members of files": (
        ExecuteRequest,
        {"code": "1", "files": [{"name": "a", "text": "", **members(MANY // 256)} for _ in range(256)]},
    ),
    "unknown members of decisions": (
        DecideRequest,
        {"decisions": {f"c{n}": {"decision": "edit", **members(6)} for n in range(MANY // 6)}},
    ),
    "decisions that are none": (DecideRequest, {"decisions": members(MANY)}),
    "steps that are none": (PlanRequest, {"steps": [1] * MANY}),
    "names that are none": (ExecuteRequest, {"code": "1", "tools": [1] * MANY}),
    "an object for a text": (ExecuteRequest, {"code": members(MANY)}),
}


def parsed(model: Any, body: bytes) -> Any:
    return anyio.run(parsed_body, model, body, nullcontext())


def cpu_s(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


@pytest.mark.parametrize("kind", WRONG)
def test_a_body_with_many_mistakes_costs_a_few_times_what_a_right_one_of_its_size_costs(kind: str) -> None:
    model, wrong = WRONG[kind]
    body = json.dumps(wrong).encode()
    right = json.dumps({"code": "1", "inputs": members(len(body) // 12)}).encode()
    refused = list[Problem]()

    def refuse() -> None:
        with pytest.raises(Problem) as problem:
            parsed(model, body)
        refused.append(problem.value)

    bound = 6 * min(cpu_s(lambda: parsed(ExecuteRequest, right)) for _ in range(2)) + 0.01
    assert any(cpu_s(refuse) < bound for _ in range(3))
    assert refused[0].status == 422 and len(refused[0].extra.get("errors", ())) <= MAX_ERRORS


LARGE: dict[str, tuple[Any, Callable[[], dict[str, Any]]]] = {
    "unknown members": (ExecuteRequest, lambda: {"code": "1", **members(5 * MANY)}),
    "unknown limits": (ExecuteRequest, lambda: {"code": "1", "limits": members(5 * MANY)}),
    "decisions": (DecideRequest, lambda: {"decisions": members(5 * MANY)}),
    "inputs": (ExecuteRequest, lambda: {"code": "1", "inputs": members(5 * MANY)}),
    "rows": (ExecuteRequest, lambda: {"code": "1", "inputs": {"rows": [{"a": n, "b": "x"} for n in range(3 * MANY)]}}),
    "steps": (PlanRequest, lambda: {"steps": [{"tool": "x", "args": {"a": 1}}] * (2 * MANY)}),
}


@each_row("kind", LARGE)
def test_the_event_loop_turns_while_a_large_body_is_read(kind: str) -> None:
    model, make = LARGE[kind]
    body = json.dumps(make()).encode()

    async def read() -> None:
        with suppress(Problem):
            await parsed_body(model, body, nullcontext())

    assert any(anyio.run(watched, read()).silent_s < SILENT_S for _ in range(3))


def test_no_caller_of_a_service_decides_about_more_calls_at_once_than_http_takes() -> None:
    for count in (MAX_DECISIONS, MAX_DECISIONS + 1):
        given = Arguments({"decisions": {f"call_{number}": {"kind": "approve"} for number in range(count)}})
        with nullcontext() if count == MAX_DECISIONS else pytest.raises(UsageError, match="10001 decisions, limit"):
            assert len(given.decisions() or ()) == count
    with pytest.raises(UsageError, match="10001 ids to approve, limit 10000; give the draft's digest"):
        check_decisions([*map(str, range(MAX_DECISIONS + 1))])


DEEP = "x/" * 2_000_000 + "x"
FILES: dict[str, list[tuple[str, bytes]]] = {
    "a name with many folders": [(DEEP, b"")],
    "many names with folders": [(f"{DEEP[:970]}{number}", b"") for number in range(4_000)],
    "many names": [(f"x{number}", b"") for number in range(10 * MANY)],
}


@each_row("kind", FILES)
def test_names_of_input_files_are_checked_in_linear_time(kind: str) -> None:
    def check() -> None:
        with suppress(UsageError):
            RunOptions(files=FILES[kind]).guest_files(Limits())

    assert min(cpu_s(check) for _ in range(3)) < 0.2


def test_limits_name_a_few_of_many_unknown_names_and_say_how_many_there_are() -> None:
    with pytest.raises(UsageError, match=r"wall_0.*did you mean wall_s\?.* and 59995 more$") as refused:
        Limits(**{f"wall_{number}": 0 for number in range(MANY)})
    assert len(str(refused.value)) < 3_000


def test_a_plan_of_too_many_steps_is_refused_before_they_are_looked_at() -> None:
    steps = [{"tool": f"unknown_tool_{number}", "args": {}} for number in range(MANY)]

    async def refused(given: Any) -> str:
        async with Runtime(ToolRegistry()) as runtime:
            with pytest.raises(UsageError) as problem:
                await runtime.execute_plan(given)
        return str(problem.value)

    assert f"{MAX_PLAN_STEPS} steps, got {MANY}" in anyio.run(refused, steps)
    assert f"{MAX_PLAN_STEPS} steps, got more than {MAX_PLAN_STEPS}" in anyio.run(refused, iter(steps))
