"""Any script that is suspended everywhere and carried on does what it does in one go."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control.conftest import Effects
from control.test_suspension import approving
from toolcell import Outcome, SyncRuntime
from toolcell.tools import Approve, Deny

pytestmark = [pytest.mark.isolation, pytest.mark.slow]

EXAMPLES = int(os.environ.get("CONTROL_EXAMPLES", "30"))

TEXT = st.sampled_from(["a", "ü\n", "b'\"", ""])
STEPS = st.one_of(
    st.builds("seen.append(call_tool('pay', to={!r}, euros={}))".format, TEXT, st.integers(-3, 3)),
    st.builds("seen.append(call_tool('write', text={!r}))".format, TEXT),
    st.builds("seen.append(call_tool('read', name={!r}))".format, TEXT),
    st.builds("seen += [str(r) for r in call_tools_parallel([('pay', {{'to': {!r}}}), ('read', {{'name': 'p'}}), ('pay', {{'to': 'z'}})], return_exceptions=True)]".format, TEXT),
    st.builds("try:\n    call_tool('{}', text={!r})\nexcept ToolError as e:\n    seen.append([e.code, str(e), e.details])".format, st.sampled_from(["fail", "crash", "nothing"]), TEXT),
    st.sampled_from([
        "import random, uuid, time, datetime\nseen.append([random.random(), str(uuid.uuid4()), time.time(), str(datetime.datetime.now())])",
        "seen.append(list({'x', 'y', str(len(seen)), 'zz'}))",
        "print(len(seen), seen[-1:])",
        "open('kept.txt', 'a').write(str(len(seen)))\nseen.append(open('kept.txt').read())",
        "seen.append(sorted(tool['name'] for tool in list_tools()))",
        "seen.append([search_tools('write a text', detail='names'), list_tools('pay', detail='full')])",
        "import asyncio\nasync def both():\n    return await asyncio.gather(call_tool_async('pay', to='g'), call_tool_async('read', name='g'))\nseen += await both()",
        "import time\ntime.sleep(0.001)",
    ]),
)  # fmt: skip
ENDS = st.sampled_from(
    ["set_result(seen)", "seen", "raise ValueError(len(seen))", "import sys\nset_result(seen)\nsys.exit(3)"]
)
SCRIPTS = st.builds(
    lambda steps, end: "\n".join(["seen = []", *steps, end]), st.lists(STEPS, min_size=1, max_size=7), ENDS
)


def what_it_left(result: Any) -> Any:
    error = result.error and (result.error.type, result.error.message, result.error.line)
    calls = sorted((call.name, str(call.args), call.status, call.line) for call in result.calls)
    return result.outcome, result.value, error, result.logs.stdout, calls


@given(source=SCRIPTS)
@settings(max_examples=EXAMPLES, derandomize=EXAMPLES <= 30)
def test_a_script_that_is_suspended_everywhere_equals_one_that_runs_through(
    opened: SyncRuntime, durable: SyncRuntime, source: str
) -> None:
    direct, parted = Effects(), Effects()
    straight = durable.execute_code(source, tools=approving(direct), seed=1, clock=1e9)
    result = durable.execute_code(source, tools=parted.registry, on_approval="suspend", seed=1, clock=1e9)
    while result.outcome is Outcome.SUSPENDED:
        assert result.suspension is not None
        decisions = {call.id: Approve() for call in result.suspension.calls}
        result = durable.resume(result.suspension.to_json(), decisions, tools=parted.registry)

    assert sorted(map(str, parted.of("pay") + parted.of("write"))) == sorted(
        map(str, direct.of("pay") + direct.of("write"))
    )
    if (
        "async" not in source and "parallel" not in source
    ):  # where calls overlap, what a read sees depends on its moment
        assert what_it_left(result) == what_it_left(straight)
        assert parted.made == direct.made
    assert result.outcome is straight.outcome


def test_denied_calls_are_denied_again_when_the_run_is_carried_on(opened: SyncRuntime, effects: Effects) -> None:
    source = "seen = []\nfor to in 'abcd':\n    try:\n        seen.append(call_tool('pay', to=to))\n    except ToolError as error:\n        seen.append(str(error))\nseen"
    result = opened.execute_code(source, tools=effects.registry, on_approval="suspend")
    for decision in (Deny("first"), Approve(), Deny(), Approve()):
        assert result.suspension is not None
        result = opened.resume(result.suspension, {result.suspension.calls[0].id: decision}, tools=effects.registry)

    assert result.value == [
        "Tool 'pay' failed: first",
        "paid b 1",
        "Tool 'pay' failed: a person refused this call of pay",
        "paid d 1",
    ]
