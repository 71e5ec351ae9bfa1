"""How many functions the host calls for one run and for one tool call. Counts do not depend on the machine's speed."""

from __future__ import annotations

import anyio
import pytest
from benchmarks.count_calls import CallCounter, Calls, measure, steady_runtime
from benchmarks.count_calls import registry as few_tools
from benchmarks.sessions import count

from toolcell import Limits, ToolRegistry
from toolcell.run.run import Script
from toolcell_bridge.wire import codec
from toolcell_bridge.wire.framing import HEADER_BYTES

pytestmark = pytest.mark.isolation

OF_A_CALL = Calls(102, 90)
"""Of one whose answer is there when the host looks again. A little more, for other versions of Python and of the libraries."""
OF_A_RUN = Calls(340, 240)
"""Loose: its ends wait for one another, so the event loop turns more often on a busy machine."""
OWN_BOUNDS = {"run without calls": Calls(222, 156), "one more tool call": Calls(102, 82)}
"""Calls of toolcell's own functions. How often the event loop turns meanwhile depends on the machine: a call during which the
host always sleeps has 97, one whose answers are there before has 79. Where there is no cgroup, the files of a process
are read instead, which are more."""


@pytest.mark.slow
@pytest.mark.parametrize("looks", [True, False], ids=["looks again", "sleeps"])
def test_a_run_and_a_tool_call_take_few_function_calls(looks: bool) -> None:
    counted = anyio.run(measure, 5, looks)
    of_a_run, of_a_call = counted["run without calls"], counted["one more tool call"]

    for name, calls in counted.items():
        assert calls.own_python <= OWN_BOUNDS[name].python, name
        assert calls.own_c <= OWN_BOUNDS[name].c, name
    assert of_a_run.python <= OF_A_RUN.python and of_a_run.c <= OF_A_RUN.c, of_a_run
    assert not looks or (of_a_call.python <= OF_A_CALL.python and of_a_call.c <= OF_A_CALL.c), of_a_call


IN_A_SESSION = Calls(430, 400)


def test_a_script_of_a_session_measures_its_sandbox_at_its_start_and_end_and_takes_few_function_calls() -> None:
    calls, counter = anyio.run(count)

    measured = sum(number for code, number in counter.python.items() if code.co_qualname == "ProcessSandbox.sample")
    assert measured == 2
    assert calls.python <= IN_A_SESSION.python
    assert calls.c <= IN_A_SESSION.c


def looked_at(registry: ToolRegistry, number: int) -> float:
    """Return how many Python functions it takes to register one more tool."""

    async def look(query: str, limit: int = 10, tags: list[str] | None = None) -> dict[str, int]:
        """Look for something and return how often it was found where."""
        return {}

    look.__name__ = f"tool_{number}"
    counter = CallCounter()
    counter.start()
    registry.tool(look)
    return counter.stop().python


def test_registering_a_tool_takes_few_function_calls_however_many_there_are() -> None:
    registry = ToolRegistry()
    calls = [looked_at(registry, number) for number in range(500)]

    assert max(calls[1:]) <= 640  # weighing its schema before it is compiled is some of them


def test_what_is_sent_with_a_script_has_as_many_elements_with_many_tools_as_with_few() -> None:
    registry = ToolRegistry()
    elements = list[int]()
    for number in range(100):
        looked_at(registry, number)
        message = Script(source="", limits=Limits()).message(1, tools=registry.names_text())
        elements.append(codec.MESSAGES.decode_counted(codec.MESSAGES.encode(message)[HEADER_BYTES:])[1])

    assert len({*elements}) == 1
    assert registry.names_text() is registry.snapshot().names_text()
    assert registry.names_text().split() == registry.names() == [f"tool_{number}" for number in range(100)]


STEPS = 50


async def plan_calls() -> CallCounter:
    """Count the calls of a plan of steps that do not wait."""
    steps = [{"tool": "add", "args": {"a": number, "b": 1}} for number in range(STEPS)]
    async with steady_runtime(few_tools(), looks=True) as runtime:
        await runtime.execute_plan(steps)
        counter = CallCounter()
        counter.start()
        rows = await runtime.execute_plan(steps)
        counter.stop()
    assert [row["result"] for row in rows] == [number + 1 for number in range(STEPS)]
    return counter


def test_steps_of_a_plan_that_do_not_wait_share_one_task() -> None:
    counter = anyio.run(plan_calls)

    assert counter.python.total() <= 120 * STEPS
    assert not [code for code in counter.python if code.co_qualname == "TaskGroup.start_soon"]
