"""Plans that wait for decisions: the other steps run, nothing runs twice, and any process carries the plan on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from control.conftest import Effects
from lives import printed_by_lives
from rows import each_row
from toolcell import ExecutionResult, Outcome, PoolConfig, ResumeError, SyncRuntime, ToolRegistry, UsageError
from toolcell.control import PlanRows
from toolcell.tools import Approve, Deny, Edit

pytestmark = pytest.mark.isolation

STEPS = [
    {"id": "read", "tool": "read", "args": {"name": "price"}},
    {"id": "ada", "tool": "pay", "args": {"to": "ada", "euros": {"$ref": "read.1"}}},
    {"id": "bob", "tool": "pay", "args": {"to": "bob"}},
    {"id": "note", "tool": "write", "args": {"text": {"$ref": "ada"}}},
    {"id": "bad", "tool": "fail", "args": {"text": "no"}},
]


@pytest.fixture(params=["memory", "disk"])
def runtime(request: pytest.FixtureRequest) -> SyncRuntime:
    found: SyncRuntime = request.getfixturevalue("opened" if request.param == "memory" else "durable")
    return found


def begin(runtime: SyncRuntime, effects: Effects, steps: Any = STEPS) -> PlanRows:
    return runtime.execute_plan(steps, tools=effects.registry, on_approval="suspend")


def resume(runtime: SyncRuntime, effects: Effects, token: Any, **decisions: Any) -> ExecutionResult:
    given = {f"plan_{name}": each for name, each in decisions.items()}
    return runtime.resume(token, given, tools=effects.registry)


def statuses(rows: Any) -> list[str]:
    return [row["status"] for row in rows]


@pytest.mark.quick
def test_steps_that_need_approval_wait_together_and_the_others_run_once(runtime: SyncRuntime, effects: Effects) -> None:
    rows = begin(runtime, effects)

    assert statuses(rows) == ["ok", "waiting", "waiting", "waiting", "error"]
    assert rows[3]["error"] == "needs step ada, which waits for a decision"
    assert rows.suspension is not None
    assert [(call.id, call.args) for call in rows.suspension.calls] == [
        ("plan_step_1", {"to": "ada", "euros": rows[0]["result"][1]}),
        ("plan_step_2", {"to": "bob", "euros": 1}),
    ]
    assert not effects.of("pay")

    second = resume(runtime, effects, rows.suspension.to_json(), step_1=Edit({"to": "ada", "euros": "7"}))

    assert second.outcome is Outcome.SUSPENDED and second.suspension is not None
    assert statuses(second.value) == ["ok", "ok", "waiting", "ok", "error"]
    assert "pay (plan_step_2)" in str(second.error)

    done = resume(runtime, effects, second.suspension, step_2=Deny("not to bob"))

    assert done.ok and statuses(done.value) == ["ok", "ok", "error", "ok", "error"]
    assert "not to bob" in done.value[2]["error"]
    assert done.value[0] == rows[0] and done.value[4] == rows[4]
    made = [["fail", "no"], ["pay", "ada", 7], ["read", "price"], ["write", "paid ada 7"]]
    assert sorted(effects.made) == made


def test_a_plan_whose_steps_are_approved_ends_as_one_that_never_waited(runtime: SyncRuntime, effects: Effects) -> None:
    rows = begin(runtime, effects, STEPS[:4])
    assert rows.suspension is not None
    done = resume(runtime, effects, rows.suspension, step_1=Approve(), step_2=Approve())

    direct = Effects()
    tool = direct.registry.registered("pay")
    assert tool is not None
    direct.registry.add(tool.spec, requires_approval=False, replace=True)
    never_waited = runtime.execute_plan(STEPS[:4], tools=direct.registry)
    assert done.value[:3] == never_waited[:3]
    assert {**done.value[3], "result": ...} == {**never_waited[3], "result": ...}  # a count; bob may be paid meanwhile


def test_used_foreign_and_changed_tokens_of_a_plan_are_refused(
    runtime: SyncRuntime, effects: Effects, tmp_path: Path
) -> None:
    rows = begin(runtime, effects, STEPS[2:3])
    assert rows.suspension is not None
    token = rows.suspension.to_json()
    with pytest.raises(UsageError, match="no call plan_step_9 waits"):
        resume(runtime, effects, token, step_9=Approve())
    with pytest.raises(ResumeError, match="other tools"):
        runtime.resume(token, {}, tools=ToolRegistry())
    with pytest.raises(ResumeError, match="changed, or was signed elsewhere"):
        resume(runtime, effects, token.replace("bob", "eve"), step_0=Approve())
    other = SyncRuntime(pool=PoolConfig(warm=0), record=tmp_path / "other")
    with other, pytest.raises(ResumeError, match="signed elsewhere"):
        resume(other, effects, token, step_0=Approve())

    assert resume(runtime, effects, token, step_0=Approve()).ok
    with pytest.raises(ResumeError, match=r"used already|has ended"):
        resume(runtime, effects, token, step_0=Approve())
    assert len(effects.of("pay")) == 1


def test_a_plan_denies_what_needs_approval_when_told_so(opened: SyncRuntime, effects: Effects) -> None:
    (row,) = opened.execute_plan(STEPS[2:3], tools=effects.registry, on_approval="deny")

    assert row["status"] == "error" and "on_approval='deny'" in row["error"]
    with pytest.raises(UsageError, match="on_approval must be"):
        opened.execute_plan(STEPS[2:3], tools=effects.registry, on_approval="later")


def test_a_plan_that_cannot_run_leaves_nothing_to_carry_on(durable: SyncRuntime, effects: Effects) -> None:
    before = durable.interrupted_runs()
    with pytest.raises(UsageError, match="not a step's id"):
        begin(durable, effects, [{"id": "a", "tool": "read", "args": {"name": {"$ref": "b"}}}])

    assert durable.interrupted_runs() == before


def test_what_a_plan_made_can_be_reverted_before_and_after_it_waited(opened: SyncRuntime) -> None:
    registry, there = ToolRegistry(), list[str]()

    def remove(args: Any, _result: Any) -> None:
        there.remove(args["name"])

    @registry.tool(revert=remove)
    async def create(name: str) -> str:
        """Create a file of that name."""
        there.append(name)
        return name

    registry.add(create, name="hide", requires_approval=True, revert=remove)
    steps = [{"tool": "create", "args": {"name": "a"}}, {"tool": "hide", "args": {"name": "b"}}]
    rows = opened.execute_plan(steps, tools=registry, on_approval="suspend")
    assert rows.suspension is not None
    done = opened.resume(rows.suspension, {"plan_step_1": Approve()}, tools=registry)
    assert there == ["a", "b"]

    undone = opened.revert(done)

    assert undone.ok and [call.args["name"] for call in undone.calls] == ["b", "a"]
    assert not there
    opened.execute_plan(steps[:1], tools=registry)
    assert opened.revert(opened.execute_plan(steps[:1], tools=registry)).ok and there == ["a"]


HOST = """
def live(folder, moment):
    ledger = folder / 'ledger'
    registry, note = ToolRegistry(), noting(ledger, moment)

    @registry.tool
    def write(text: str) -> str:
        '''Write a text into the ledger.'''
        note(text)
        return text + text

    @registry.tool(requires_approval=True)
    def pay(to: str) -> str:
        '''Write a payment into the ledger.'''
        note(to)
        return to + to

    steps = [
        {'id': 'a', 'tool': 'write', 'args': {'text': 'a'}},
        {'id': 'b', 'tool': 'pay', 'args': {'to': 'b'}, 'depends_on': ['a']},
        {'id': 'c', 'tool': 'write', 'args': {'text': {'$ref': 'b'}}},
    ]

    def decide(call):
        if call.reason == 'needs approval': return Approve()
        (text,) = call.args.values()
        return AlreadyMade(text + text) if text in ledger.read_text().split() else Approve()

    with SyncRuntime(registry, record=folder / 'runs', pool=PoolConfig(warm=0)) as runtime:
        if (waiting := runtime.suspended_runs()):
            calls = waiting[0].calls
            result = runtime.resume(waiting[0].to_json(), {call.id: decide(call) for call in calls})
        elif (ids := runtime.interrupted_runs()):
            result = runtime.resume(ids[0])
        else:
            result = runtime.execute_plan(steps, on_approval='suspend')
        return 10 if result.suspension else 0
"""


@each_row("moment", ["before a", "after a", "before b", "after b"])
def test_a_plan_whose_host_is_killed_makes_every_effect_once(tmp_path: Path, moment: str) -> None:
    (tmp_path / "ledger").touch()
    printed_by_lives(HOST, tmp_path, moment)

    assert (tmp_path / "ledger").read_text().split() == ["a", "b", "bb"]
