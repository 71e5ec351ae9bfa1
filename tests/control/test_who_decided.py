"""The record tells of every run that goes on from another one: from which, for whom, and who decided what and why."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from audit.test_audit_commands import invoke
from control.conftest import Effects
from rows import each_row
from toolcell import PoolConfig, RunContext, SyncRuntime
from toolcell.audit import AuditLog, Filter, Index, RecordConfig, RecordedRun, ToolContent
from toolcell.tools import Approve, Deny, Edit, Hook, Rewrite, approval_hook

pytestmark = pytest.mark.isolation

ANN, BOB = RunContext(user_id="ann", thread_id="t-ann"), RunContext(user_id="bob", thread_id="t-bob")
SCRIPT: Final = "call_tool('write', text='a')\ncall_tool('pay', to='acme', euros=5000)\nset_result(1)"
MADE: Final = {"to": "acme", "euros": 1}


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


@pytest.fixture
def runtime(record: Path, effects: Effects, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SyncRuntime]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    effects.registry.enable_plan_execution()
    with SyncRuntime(effects.registry, record=record, pool=PoolConfig(warm=1)) as opened:
        yield opened


def runs(record: Path) -> list[RecordedRun]:
    with Index(record) as index:
        return [index.load(each) for each in index.runs(Filter(limit=None))]


def resumed_script(runtime: SyncRuntime, decision: Any) -> None:
    waiting = runtime.execute_code(SCRIPT, on_approval="suspend", context=ANN).suspension
    assert waiting is not None
    runtime.resume(waiting, {waiting.calls[0].id: decision}, context=BOB)


def resumed_plan(runtime: SyncRuntime, decision: Any) -> None:
    steps = [{"tool": "write", "args": {"text": "a"}}, {"tool": "pay", "args": {"to": "acme", "euros": 5000}}]
    waiting = runtime.execute_plan(steps, on_approval="suspend", context=ANN).suspension
    assert waiting is not None
    runtime.resume(waiting, {waiting.calls[0].id: decision}, context=BOB)


def resumed_in_a_session(runtime: SyncRuntime, decision: Any) -> None:
    with runtime.session() as session:
        waiting = session.execute_code(SCRIPT, on_approval="suspend", context=ANN).suspension
        assert waiting is not None
        session.resume(waiting, {waiting.calls[0].id: decision}, context=BOB)


ROUTES: Final[dict[str, Callable[[SyncRuntime, Any], None]]] = {
    "script": resumed_script,
    "plan": resumed_plan,
    "session": resumed_in_a_session,
}


@pytest.mark.parametrize("route", ROUTES)
def test_a_run_that_waited_and_the_one_that_goes_on_name_each_other_and_who_decided(
    runtime: SyncRuntime, record: Path, effects: Effects, route: str
) -> None:
    ROUTES[route](runtime, Edit({"to": "acme", "euros": 1}, reason="too much"))
    waited, resumed = (each for each in runs(record) if each.calls)

    assert effects.of("pay") == [["pay", "acme", 1]]
    assert (waited.outcome, waited.who["user"], resumed.who["user"]) == ("suspended", "ann", "ann")
    assert (resumed.who["resumes"], resumed.who["decided_by"], resumed.who["thread"]) == (waited.id, "bob", "t-ann")
    assert [each.id for each in waited.family] == [each.id for each in resumed.family] == [waited.id, resumed.id]
    (asked,) = waited.end["more"]["waits"]
    assert (asked["tool"], asked["args"]) == ("pay", {"to": "acme", "euros": 5000})
    (decided,) = resumed.start["more"]["decisions"]
    known = {name: decided[name] for name in ("call", "tool", "decision", "by", "reason", "args", "digest")}
    assert known == {
        "call": asked["call"], "tool": "pay", "decision": "edit", "by": "bob", "reason": "too much", "args": MADE,
        "digest": asked["digest"],
    }  # fmt: skip
    assert waited.started_ns < decided["at_ns"] < resumed.ended_ns
    written, paid = (next(each for each in resumed.calls if each.tool == tool) for tool in ("write", "pay"))
    assert written.start_extra["answered_from"] == waited.id
    assert (paid.args["euros"], paid.start_extra["made"]) == (5000, MADE)
    assert paid.start_extra["decided"] == {"decision": "edit", "by": "bob", "reason": "too much"}
    shown = invoke("show", record, resumed.id, "--full")[1]
    for text in ('"euros": 5000', '"euros": 1', "edit by bob: too much", f"answered from run {waited.id}"):
        assert text in shown
    for wanted in ("bob", "ann"):
        listed = json.loads(invoke("list", record, "--decided-by", wanted, "--json")[1])
        assert [each["id"] for each in listed] == ([resumed.id] if wanted == "bob" else [])


@each_row(
    ("decision", "kind", "by", "reason"),
    [
        (Approve(), "approve", "bob", None),
        (Approve("budget 7", by="carol"), "approve", "carol", "budget 7"),
        (Deny("not today"), "deny", "bob", "not today"),
    ],
    ids=["approved", "approved by another", "denied"],
)
def test_each_decision_is_recorded_with_who_and_why(
    runtime: SyncRuntime, record: Path, decision: Any, kind: str, by: str, reason: str | None
) -> None:
    resumed_script(runtime, decision)
    resumed = runs(record)[-1]
    (told,) = resumed.start["more"]["decisions"]

    assert (told["decision"], told["by"], told.get("reason")) == (kind, by, reason)
    assert resumed.calls[1].start_extra["decided"]["by"] == by
    assert (resumed.calls[1].verdict == "allowed") is (kind == "approve")


def test_a_run_that_waits_twice_has_each_answer_from_the_run_that_got_it(
    runtime: SyncRuntime, record: Path, effects: Effects
) -> None:
    source = f"{SCRIPT}\ncall_tool('pay', to='b')"
    waiting = runtime.execute_code(source, on_approval="suspend", context=ANN).suspension
    assert waiting is not None
    again = runtime.resume(waiting, {waiting.calls[0].id: Approve()}, context=BOB).suspension
    assert again is not None
    runtime.resume(again, {again.calls[0].id: Approve()}, context=RunContext(user_id="carol"))
    first, second, third = runs(record)

    assert [each.who.get("resumes") for each in (first, second, third)] == [None, first.id, second.id]
    assert [each.who.get("decided_by") for each in (first, second, third)] == [None, "bob", "carol"]
    assert [call.start_extra.get("answered_from") for call in third.calls] == [first.id, second.id, None]
    assert [each.id for each in first.family] == [first.id, second.id, third.id]


def test_commits_reverts_and_repairs_keep_the_user_and_name_their_run_and_who_had_them_made(
    runtime: SyncRuntime, record: Path
) -> None:
    drafted = runtime.execute_code(
        "call_tool('write', text='a')\ncall_tool('write', text='b')", dry_run=True, context=ANN
    )
    done = runtime.commit(drafted, ["effect-1"], context=BOB)
    runtime.revert(done, context=RunContext(user_id="carol"))
    broken = runtime.execute_code("call_tool('write', text='c')\n1/0", context=ANN)
    runtime.execute_code("call_tool('write', text='c')", repairs=broken, context=BOB)
    draft, commit, revert, failed, mended = runs(record)

    assert [(each.kind, each.who["user"]) for each in (draft, commit, revert)] == [
        ("code", "ann"), ("commit", "ann"), ("revert", "ann")
    ]  # fmt: skip
    assert (commit.who["commits"], commit.who["decided_by"]) == (draft.id, "bob")
    assert (revert.who["reverts"], revert.who["decided_by"]) == (commit.id, "carol")
    assert [(each["call"], each["decision"], each["by"]) for each in commit.start["more"]["decisions"]] == [
        ("effect-1", "approve", "bob"), ("effect-2", "deny", "bob")
    ]  # fmt: skip
    assert mended.who["repairs"] == failed.id
    assert mended.calls[0].start_extra["answered_from"] == failed.id
    assert [each.id for each in commit.family] == [draft.id, commit.id, revert.id]


def test_what_hooks_decided_and_rewrote_is_recorded_with_their_names(
    record: Path, effects: Effects, tmp_path: Path
) -> None:
    def payee(call: Any) -> Rewrite:
        return Rewrite(call.args | {"to": "other"})

    effects.registry.add_hook(Hook(before=payee, name="payees"))
    effects.registry.add_hook(approval_hook(lambda call: Edit(call.args | {"euros": 1}, "too much", by="dan")))
    with SyncRuntime(effects.registry, record=record, pool=PoolConfig(warm=1)) as runtime:
        runtime.execute_code("call_tool('pay', to='acme', euros=5000)")
    (call,) = runs(record)[0].calls

    assert effects.of("pay") == [["pay", "other", 1]]
    assert (call.args, call.start_extra["made"]) == ({"to": "acme", "euros": 5000}, {"to": "other", "euros": 1})
    assert call.start_extra["rewritten_by"] == ["payees"]
    assert call.start_extra["decided"] == {"decision": "edit", "by": "dan", "reason": "too much"}
    assert len(json.loads(invoke("list", record, "--decided-by", "dan", "--json")[1])) == 1


def test_arguments_of_a_tool_that_are_not_recorded_are_not_in_decisions_or_what_waits(
    tmp_path: Path, effects: Effects
) -> None:
    config = RecordConfig(tools={"pay": ToolContent(args="digest", results="omit")})
    log = AuditLog(tmp_path / "runs.db", config=config)
    with SyncRuntime(effects.registry, record=log, pool=PoolConfig(warm=1)) as runtime:
        resumed_script(runtime, Edit({"to": "planted-payee", "euros": 31337}))
    waited, resumed = runs(log.path)

    assert waited.end["more"]["waits"][0]["args_cut"]["why"] == "digest"
    assert resumed.start["more"]["decisions"][0]["args_cut"]["why"] == "digest"
    stored = b"".join(path.read_bytes() for path in tmp_path.glob("runs.db*"))
    assert b"planted-payee" not in stored


def test_a_repair_that_does_not_run_names_the_run_that_it_repairs(runtime: SyncRuntime, record: Path) -> None:
    failed = runtime.execute_code("call_tool('write', text='a')\n1 / 0")
    refused = runtime.execute_code("call_tool('unknown')", repairs=failed, preflight=True)
    assert refused.outcome == "denied"
    assert [run.who.get("repairs") for run in runs(record)] == [None, failed.run_id]
