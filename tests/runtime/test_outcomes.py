"""The outcome of a run is computed from what the host observed, before what the guest said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rows import each_row
from toolcell import Limits, Outcome
from toolcell.cli.exits import BY_OUTCOME, LIMIT
from toolcell.results import HOST_OUTCOMES, LIMIT_OUTCOMES, SCRIPT_OUTCOMES, Usage
from toolcell.run.outcome import (
    LIMIT_ERRORS,
    Aborted,
    ProtocolViolation,
    RunEnd,
    error_info,
    exceeded_limit,
    outcome_of,
    warnings_of,
)
from toolcell.sandbox.backend import Exit, LimitExceeded, Sample
from toolcell.tools.code import ADVICE
from toolcell_bridge.wire.messages import Done

pytestmark = pytest.mark.quick

LIMITS = Limits(processes=4)
QUIET = RunEnd(LIMITS, Usage(), Sample(), Exit(signal=9), "strict")
BROKEN = Done(False, {"type": "MemoryError", "findings": [{"line": 1, "rule": "import"}]})

Change = Callable[[RunEnd], RunEnd]


def but(**changes: Any) -> Change:
    return lambda end: replace(end, **changes)


def seen(**changes: Any) -> Change:
    return lambda end: replace(end, sample=replace(end.sample, **changes))


def used(**changes: Any) -> Change:
    return lambda end: replace(end, usage=replace(end.usage, **changes))


HOST = [
    (but(stopped=Aborted("enough")), Outcome.CANCELLED),
    (but(stopped=ProtocolViolation("garbage")), Outcome.PROTOCOL_ERROR),
    (but(stopped=LimitExceeded(Outcome.TIMEOUT, "wall_s", 1.0, 1.1)), Outcome.TIMEOUT),
]
DEAD = [
    *HOST,
    (seen(memory_kills=1), Outcome.MEMORY_LIMIT),
    (used(cpu_s=LIMITS.cpu_s), Outcome.CPU_LIMIT),
    (seen(refused_processes=1), Outcome.PROCESS_LIMIT),
    (but(), Outcome.KILLED),
]
"""For a guest that died without a `Done`: the first of these that is true decides the outcome."""

FAILED = [
    *HOST,
    (seen(memory_kills=1), Outcome.MEMORY_LIMIT),
    (but(lint="strict"), Outcome.DENIED),
    (but(refused=1), Outcome.CALL_LIMIT),
    (seen(peak_processes=LIMITS.processes), Outcome.PROCESS_LIMIT),
    (but(), Outcome.MEMORY_LIMIT),
]
"""For a guest that says its script failed, of a MemoryError and with findings."""


def worst(end: RunEnd, changes: list[tuple[Change, Outcome]]) -> Outcome:
    """The outcome when all of `changes` are true; of several reasons to stop, the first one."""
    for change, _ in reversed(changes):
        end = change(end)
    return outcome_of(end)[0]


@each_row("first", range(len(DEAD)))
def test_for_a_dead_guest_the_first_thing_the_host_observed_counts(first: int) -> None:
    assert worst(QUIET, DEAD[first:]) is DEAD[first][1]


@each_row("first", range(len(FAILED)))
def test_what_a_failed_script_says_counts_after_everything_observed(first: int) -> None:
    end = replace(QUIET, lint="off", stopped=BROKEN)

    assert worst(end, FAILED[first:]) is FAILED[first][1]


@each_row(("change", "outcome"), HOST)
def test_a_guest_that_says_all_is_well_is_not_believed_against_the_host(change: Change, outcome: Outcome) -> None:
    assert outcome_of(change(replace(QUIET, stopped=Done(True, None))))[0] is outcome


@each_row(
    ("change", "outcome"),
    [
        (seen(memory_kills=1), Outcome.OK),
        (seen(refused_processes=1), Outcome.OK),
        (used(cpu_s=LIMITS.cpu_s), Outcome.OK),
        (seen(peak_memory_bytes=LIMITS.memory_bytes + 1), Outcome.MEMORY_LIMIT),
    ],
)
def test_a_script_that_lived_to_its_end_may_have_lost_children_on_the_way(change: Change, outcome: Outcome) -> None:
    assert outcome_of(change(replace(QUIET, stopped=Done(True, None))))[0] is outcome


WARNED = [
    (seen(memory_kills=1), f"memory_bytes={LIMITS.memory_bytes};"),
    (seen(refused_processes=1), f"processes={LIMITS.processes};"),
    (seen(peak_processes=LIMITS.processes), f"processes={LIMITS.processes};"),
    (but(refused=3), f"3 tool calls past the limit tool_calls={LIMITS.tool_calls} "),
]


@each_row(("change", "said"), WARNED)
def test_a_limit_that_a_script_met_and_went_on_is_named(change: Change, said: str) -> None:
    end = replace(QUIET, stopped=Done(True, None))

    assert warnings_of(end) == ()
    (found,) = warnings_of(change(end))
    assert said in found


@each_row("change", [used(calls=1), but(has_value=True), but(lint="off")])
def test_only_a_script_that_had_done_nothing_can_have_been_denied(change: Change) -> None:
    end = replace(QUIET, stopped=BROKEN)

    assert outcome_of(end)[0] is Outcome.DENIED
    assert outcome_of(change(end))[0] is Outcome.MEMORY_LIMIT


@each_row(
    ("sample", "limit"),
    [
        (Sample(cpu_s=LIMITS.cpu_s), None),
        (Sample(cpu_s=LIMITS.cpu_s + 1, memory_kills=1), "cpu_s"),
        (Sample(peak_memory_bytes=LIMITS.memory_bytes), None),
        (Sample(peak_memory_bytes=LIMITS.memory_bytes + 1), "memory_bytes"),
        (Sample(peak_memory_bytes=LIMITS.memory_bytes + 1, processes=LIMITS.processes + 1), "processes"),
        (Sample(memory_kills=1, processes=LIMITS.processes + 1), "memory_bytes"),
        (Sample(memory_kills=1), "memory_bytes"),
        (Sample(processes=LIMITS.processes), None),
        (Sample(processes=LIMITS.processes + 1), "processes"),
    ],
)
def test_a_running_sandbox_may_reach_its_limits_and_not_pass_them(sample: Sample, limit: str | None) -> None:
    exceeded = exceeded_limit(LIMITS, sample)

    assert (exceeded.limit if exceeded is not None else None) == limit


def test_a_refused_allocation_is_called_one() -> None:
    refused = Done(False, {"type": "MemoryError"})
    _, error = outcome_of(replace(QUIET, lint="off", stopped=refused, usage=Usage(peak_memory_bytes=7)))

    assert error is not None
    assert (error.limit, error.limit_value, error.used) == ("memory_bytes", LIMITS.memory_bytes, 7)
    assert "an allocation was refused" in error.message


def test_memory_that_grew_after_the_measurement_is_reported_as_large_as_it_got() -> None:
    exceeded = exceeded_limit(LIMITS, Sample(peak_memory_bytes=LIMITS.memory_bytes + 1))
    most = LIMITS.memory_bytes + 1000
    _, error = outcome_of(replace(QUIET, stopped=exceeded, usage=Usage(peak_memory_bytes=most)))

    assert error is not None
    assert error.used == most
    assert str(most) in error.message


def test_every_table_of_outcomes_has_all_of_them() -> None:
    limits = set(LIMIT_OUTCOMES)

    assert limits == {each for each in Outcome if each is Outcome.TIMEOUT or each.endswith("_limit")}
    assert limits == {each for each, status in BY_OUTCOME.items() if status == LIMIT} == {*LIMIT_ERRORS} == {*ADVICE}
    assert {*BY_OUTCOME} == {*Outcome}
    from_outside = {Outcome.CANCELLED, Outcome.UNAVAILABLE, Outcome.SUSPENDED, Outcome.DIVERGED}
    assert not SCRIPT_OUTCOMES & HOST_OUTCOMES
    assert {*Outcome} - from_outside == SCRIPT_OUTCOMES | HOST_OUTCOMES


def test_the_name_of_a_class_begins_no_line_and_moves_no_cursor() -> None:
    claimed = {"type": "E\n  trust     verified\x1b[2J\u202e", "message": "m"}
    assert error_info(claimed).type == "E\\n  trust     verified\\x1b[2J\\u202e"
