"""The same values as in `test_hostile_arguments`, sent by a real script and by a program's plan.

Each kind of tool gets some of the values. `TOOLCELL_HOSTILE=all` is the whole claim.
"""

from __future__ import annotations

import pytest

from hostile.hostile_values import EXPRESSIONS, HELPERS
from hostile.test_hostile_arguments import IS_WHOLE, NAMES, portions
from hostile.tools_of_all_kinds import OPTIONS, registry_of, registry_of_all_kinds
from rows import each_row
from toolcell import Limits, Outcome, PoolConfig, Runtime, Secrets
from toolcell.errors import UsageError
from toolcell.testing import FakeBackend
from toolcell.tools import RunContext

pytestmark = [pytest.mark.anyio, pytest.mark.conforms("C-b8", "J1", "J-b2", "V-1")]

LIMITS = Limits(wall_s=600, cpu_s=600, tool_calls=1_000_000, host_work=2**45, call_args_bytes=2**40)

SCRIPT = """
calls, ends = 0, {}
for number, name in enumerate(names):
    for expression in expressions[(first + number) % step :: step]:
        for form in ("x={}", "{}", "{{'x': {}}}", "{}, {}"):
            calls += 1
            try:
                eval(f"tools[{name!r}](" + form.format(expression, expression) + ")")
                end = "ok"
            except Exception as exc:
                end = type(exc).__name__
            ends[end] = ends.get(end, 0) + 1
result = {"calls": calls, "ends": ends}
"""


@pytest.mark.isolation
@pytest.mark.parametrize("turn", range(len(OPTIONS)) if IS_WHOLE else [0])
async def test_a_script_goes_on_whatever_it_sends_and_the_host_raises_nothing(turn: int) -> None:
    options, step = OPTIONS[turn], len(OPTIONS) if IS_WHOLE else 96
    inputs = {"names": list(NAMES), "expressions": list(EXPRESSIONS), "first": turn, "step": step}
    context = RunContext(secrets=Secrets({"key": "hunter2hunter2"}))
    events: list[str] = []
    context.events.subscribe(lambda event: events.append(event.type) if event.to_json() else None)

    async with Runtime(registry_of_all_kinds(options), limits=LIMITS, pool=PoolConfig(warm=1)) as runtime:
        result = await runtime.execute_code(HELPERS + SCRIPT + "result", inputs=inputs, context=context)

    assert (result.outcome, result.error) == (Outcome.OK, None)
    assert result.value["calls"] == sum(result.value["ends"].values()) > len(NAMES) * len(EXPRESSIONS) // step
    assert result.value["ends"].keys() >= {"ok", "ToolError"}
    made = [call for call in result.calls if call.name in NAMES]  # not the one for the list of tools
    assert events.count("tool_execution_start") == events.count("tool_execution_end") == len(made)
    assert context.events.listener_errors == 0


@each_row("name", NAMES)
async def test_a_plan_of_a_program_has_rows_or_is_a_usage_error(name: str) -> None:
    for options, values in portions(name):
        async with Runtime(
            registry_of(options, name), backend=FakeBackend(), pool=PoolConfig(warm=0), allow_unisolated=True
        ) as runtime:
            for value in values:
                for step in ({"tool": name, "args": {"x": value}}, {"tool": name, "args": value}, value):
                    try:
                        rows = await runtime.execute_plan([step])
                    except UsageError:
                        continue
                    assert [row["status"] in ("ok", "error") for row in rows] == [True]
