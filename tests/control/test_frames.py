"""What a failed script tells about its variables, and how an agent mends its script with it."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from control.conftest import Effects
from rows import each_row
from toolcell import Agent, Outcome, PoolConfig, RunContext, Runtime, Secrets, SyncRuntime, UsageError
from toolcell.agents.providers.scripted import ScriptedModel, calls

pytestmark = pytest.mark.isolation

SCRIPT = """
class Loud:
    def __repr__(self):
        call_tool('write', text='from a repr')
def inner(rows, api_key):
    loud, huge, number = Loud(), list(range(10**6)), 10**5000
    text = 'x' * 10_000
    return rows['missing']
def outer():
    rows = {'a': [1, {'b': {'c': {'d': 1}}}]}
    inner(rows, 'hunter2')
outer()
"""


def test_frames_show_plain_variables_in_short_and_call_no_repr(opened: SyncRuntime, effects: Effects) -> None:
    result = opened.execute_code(SCRIPT, tools=effects.registry)

    assert result.outcome is Outcome.ERROR and result.error is not None
    assert [(frame.line, frame.function) for frame in result.error.frames] == [
        (12, "<module>"),
        (11, "outer"),
        (8, "inner"),
    ]
    inner = result.error.frames[-1].locals
    assert inner["loud"] == "<Loud>" and inner["api_key"] == "[redacted]"
    assert inner["huge"] == "[0, 1, 2, 3, 4, 5, 6, 7, ...]"
    assert "'a'" in inner["rows"] and "..." in inner["rows"]
    assert "ValueError" in inner["number"] and len(inner["text"]) < 200
    assert not effects.made
    assert result.to_dict()["error"]["frames"][0]["function"] == "<module>"


def test_frames_are_bounded_however_deep_and_wide_the_script_is(opened: SyncRuntime) -> None:
    source = "def f(n):\n    " + "\n    ".join(f"v{i} = 'y' * 500" for i in range(60)) + "\n    return f(n + 1)\nf(0)"
    error = opened.execute_code(source).error

    assert error is not None and error.type == "RecursionError"
    assert len(error.frames) <= 10 and all(len(frame.locals) <= 20 for frame in error.frames)
    assert len(str(error.frames)) < 20_000


def test_secrets_of_the_run_are_in_no_variable(opened: SyncRuntime) -> None:
    context = RunContext(secrets=Secrets({"K": "sesame-open"}))
    result = opened.execute_code("x = ['sesame-open']\ny = 'say sesame-open'\n1/0", context=context)

    assert result.error is not None
    assert result.error.frames[-1].locals == {"x": "['[redacted]']", "y": "'say [redacted]'"}
    assert "sesame-open" not in str(result.error)


@each_row(
    "claimed",
    [
        "text",
        [1, None, {"line": "x", "function": 7, "locals": [1]}],
        [{"line": 1, "function": "f" * 999, "locals": {"a" * 999: "b" * 9999, "c": 1}}] * 99,
    ],
)
def test_frames_that_a_hostile_guest_claims_are_checked(claimed: Any) -> None:
    from toolcell.run.outcome import FRAMES, error_info

    frames = error_info({"type": "E", "message": "m", "frames": claimed}).frames
    assert len(frames) <= FRAMES
    assert len(str(frames)) < 10_000 + 1000 * FRAMES


@pytest.mark.quick
def test_an_agent_mends_its_script_without_making_a_call_twice(effects: Effects) -> None:
    broken = "rows = call_tool('read', name='r')\ncall_tool('write', text='a')\ncall_tool('write', text='b')\nrows['x']"
    mended = "rows = call_tool('read', name='r')\ncall_tool('write', text='a')\nrows[1]"
    provider = ScriptedModel([code(broken), code(mended), code("call_tool('write', text='a')"), "done"])

    async def main() -> Agent:
        async with Runtime(effects.registry, pool=PoolConfig(warm=1)) as runtime:
            agent = Agent(provider, tools=effects.registry, code_execution=runtime, repair=True)
            await agent.run("do it")
            return agent

    agent = anyio.run(main)
    told = [str(message["content"]) for message in agent.messages if message["role"] == "tool"]
    assert "variables where it failed:\n  rows = ['r', 1]" in told[0]
    assert "not made again: read (1), write (1)" in told[1]
    assert "still in effect: write (1)" in told[1]
    assert effects.of("write") == [
        ["write", "a"],
        ["write", "b"],
        ["write", "a"],
    ]  # the third came after one that worked
    assert effects.of("read") == [["read", "r"]]


def code(source: str) -> Any:
    return calls(("execute_code", {"code": source}))


def test_repair_needs_a_runtime() -> None:
    with pytest.raises(UsageError, match="repair=True needs code_execution"):
        Agent(ScriptedModel([]), repair=True)
