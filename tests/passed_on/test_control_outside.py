"""The main claims about approval, journals, repair, dry runs and reverts, on public names only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from passed_on.office import Office
from toolcell import (
    ExecutionResult,
    Flow,
    Outcome,
    Policy,
    PoolConfig,
    ResumeError,
    SyncRuntime,
    ToolError,
    ToolRegistry,
    UsageError,
)
from toolcell.control import AlreadyMade, Approve, Deny, Edit

pytestmark = [pytest.mark.quick, pytest.mark.isolation]


class Shop:
    """Tools with effects, of each kind that control tells apart."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.undone: list[str] = []
        self.price = 7
        self.registry = registry = ToolRegistry()

        def unbuy(args: Any, _result: Any) -> None:
            if args["what"] == "stuck":
                raise ToolError("it is gone")
            self.undone.append(args["what"])

        @registry.tool(revert=unbuy)
        async def buy(what: str, note: str = "") -> str:
            """Buy something that can be given back."""
            self.made.append(f"buy {what}{note}")
            return f"order-{what}"

        @registry.tool(requires_approval=True)
        async def pay(euros: int) -> str:
            """Pay, when a person agrees to it."""
            self.made.append(f"pay {euros}")
            return f"paid {euros}"

        @registry.tool(read_only=True)
        async def look() -> int:
            """Look up the price, which changes."""
            self.made.append("look")
            return self.price

        @registry.tool
        async def fail() -> str:
            """Do half of the work, and fail."""
            self.made.append("fail")
            raise ToolError("half done")


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("control") / "journals"


@pytest.fixture(scope="module")
def runtime(folder: Path) -> Iterator[SyncRuntime]:
    with SyncRuntime(pool=PoolConfig(warm=1), record=folder / "runs.db") as runtime:
        yield runtime


def suspended(runtime: SyncRuntime, shop: Shop, source: str, **options: Any) -> ExecutionResult:
    result = runtime.execute_code(source, tools=shop.registry, on_approval="suspend", **options)
    assert result.outcome is Outcome.SUSPENDED and result.suspension is not None
    return result


def token(result: ExecutionResult) -> str:
    assert result.suspension is not None
    return result.suspension.to_json()


PAY = "call_tool('buy', what='a')\nset_result(call_tool('pay', euros=3))"


@pytest.mark.parametrize(
    ("decision", "made", "value"),
    [
        (Approve(), "pay 3", "paid 3"),
        (Edit({"euros": 2}), "pay 2", "paid 2"),
        (Deny("too much"), None, None),
    ],
    ids=["approved", "edited", "denied"],
)
def test_a_call_that_waits_is_made_as_was_decided(
    runtime: SyncRuntime, shop: Shop, decision: Any, made: str | None, value: str | None
) -> None:
    waiting = suspended(runtime, shop, PAY)
    assert waiting.suspension is not None
    (call,) = waiting.suspension.calls
    assert (call.tool, dict(call.args), call.line) == ("pay", {"euros": 3}, 2)

    result = runtime.resume(token(waiting), {call.id: decision}, tools=shop.registry)

    assert shop.made == ["buy a", *([made] if made else [])]
    assert result.value == value and (result.ok or "too much" in str(result.error))


def test_calls_made_together_wait_together_and_one_without_a_decision_waits_again(
    runtime: SyncRuntime, shop: Shop
) -> None:
    source = "call_tools_parallel([('pay', {'euros': 1}), ('buy', {'what': 'a'}), ('pay', {'euros': 2})])"
    waiting = suspended(runtime, shop, source)
    assert waiting.suspension is not None
    first, second = waiting.suspension.calls
    assert shop.made == ["buy a"]
    again = runtime.resume(token(waiting), {first.id: Approve()}, tools=shop.registry)
    assert again.suspension is not None and [call.id for call in again.suspension.calls] == [second.id]
    result = runtime.resume(token(again), {second.id: Approve()}, tools=shop.registry)

    assert result.value == ["paid 1", "order-a", "paid 2"] and sorted(shop.made) == ["buy a", "pay 1", "pay 2"]


def changed(text: str) -> str:
    """Return a token with one letter changed in its middle."""
    middle = len(text) // 2
    return text[:middle] + ("a" if text[middle] != "a" else "b") + text[middle + 1 :]


@pytest.mark.parametrize("wrong", [changed, lambda text: text[:-9], lambda text: "{}", lambda text: "no such run"])
def test_a_token_that_is_not_ours_resumes_nothing(
    runtime: SyncRuntime, shop: Shop, wrong: Callable[[str], str]
) -> None:
    waiting = suspended(runtime, shop, PAY)
    with pytest.raises(ResumeError):
        runtime.resume(wrong(token(waiting)), {"call_2": Approve()}, tools=shop.registry)
    assert shop.made == ["buy a"]
    assert runtime.resume(token(waiting), {"call_2": Approve()}, tools=shop.registry).ok
    with pytest.raises(ResumeError):
        runtime.resume(token(waiting), {"call_2": Approve()}, tools=shop.registry)
    assert shop.made == ["buy a", "pay 3"]


def test_a_run_is_resumed_with_the_tools_it_began_with(runtime: SyncRuntime, shop: Shop) -> None:
    waiting = suspended(runtime, shop, PAY)
    with pytest.raises(ResumeError):
        runtime.resume(token(waiting), {"call_2": Approve()}, tools=Office().registry)
    assert shop.made == ["buy a"]


def test_another_runtime_knows_what_waits_and_what_was_interrupted(
    runtime: SyncRuntime, folder: Path, shop: Shop
) -> None:
    waiting = suspended(runtime, shop, PAY)
    assert waiting.suspension is not None
    with SyncRuntime(pool=PoolConfig(warm=0), record=folder / "runs.db") as other:
        found = [each for each in other.suspended_runs() if each.run_id == waiting.suspension.run_id]
        result = other.resume(found[0].to_json(), {"call_2": Approve()}, tools=shop.registry)
    assert result.value == "paid 3" and shop.made == ["buy a", "pay 3"]


def test_a_run_that_was_killed_is_carried_on_without_making_a_call_twice(runtime: SyncRuntime, shop: Shop) -> None:
    """It gets the same answers, and so it dies once more."""
    asked = list[bool]()

    @shop.registry.tool
    async def may_live() -> bool:
        """Say whether the script is to live on."""
        asked.append(True)
        return False

    source = (
        "call_tool('buy', what='a')\nif not call_tool('may_live'):\n    import ctypes; ctypes.string_at(0)\n'alive'"
    )
    killed = runtime.execute_code(source, tools=shop.registry)
    assert killed.outcome is Outcome.KILLED and killed.journal_id in runtime.interrupted_runs()
    again = runtime.resume(killed.journal_id, tools=shop.registry)

    assert again.outcome is Outcome.KILLED and shop.made == ["buy a"] and asked == [True]


# Repair


def test_a_mended_script_makes_no_write_twice_and_says_what_it_took_over(runtime: SyncRuntime, shop: Shop) -> None:
    broken = runtime.execute_code("call_tool('buy', what='a')\ncall_tool('buy', what='b')\n1/0", tools=shop.registry)
    mended = "x = call_tool('buy', what='a')\nset_result([x, call_tool('buy', what='c')])"
    result = runtime.execute_code(mended, tools=shop.registry, repairs=broken)

    assert result.value == ["order-a", "order-c"] and shop.made == ["buy a", "buy b", "buy c"]
    assert result.repair is not None
    rows = [
        [call.args["what"] for call in each]
        for each in (result.repair.reused, result.repair.new, result.repair.orphaned)
    ]
    assert rows == [["a"], ["c"], ["b"]]


def test_a_write_that_failed_is_not_made_again_and_reads_only_if_asked_for(runtime: SyncRuntime, shop: Shop) -> None:
    broken = runtime.execute_code("call_tool('look')\ncall_tool('fail')", tools=shop.registry)
    shop.price = 8
    mended = "x = call_tool('look')\ntry: call_tool('fail')\nexcept ToolError as exc: y = str(exc)\n[x, y]"
    result = runtime.execute_code(mended, tools=shop.registry, repairs=broken)
    fresh = runtime.execute_code(mended, tools=shop.registry, repairs=result, refresh="reads")

    assert result.value[0] == 7 and "half done" in result.value[1] and fresh.value[0] == 8
    assert shop.made == ["look", "fail", "look"]


# Dry run, commit, revert


def test_a_dry_run_reads_and_its_commit_makes_what_was_approved_in_order(runtime: SyncRuntime, shop: Shop) -> None:
    source = "p = call_tool('look')\na = call_tool('buy', what='a')\nb = call_tool('buy', what=a)\ncall_tool('pay', euros=p)\nb"
    dry = runtime.execute_code(source, tools=shop.registry, dry_run=True)
    assert shop.made == ["look"] and [effect.tool for effect in dry.effects] == ["buy", "buy", "pay"]
    assert dry.effects[1].depends_on == ("effect-1",)
    with pytest.raises(UsageError):
        runtime.commit(dry, approve=["effect-2"], tools=shop.registry)
    result = runtime.commit(dry, approve=["effect-1", "effect-2"], tools=shop.registry)

    assert shop.made == ["look", "buy a", "buy order-a"] and result.value == "order-order-a"
    assert [each.status for each in result.effects] == ["made", "made", "not approved"]
    with pytest.raises(UsageError, match="committed"):
        runtime.commit(dry, tools=shop.registry)


def test_a_commit_whose_reads_have_changed_makes_nothing(runtime: SyncRuntime, shop: Shop) -> None:
    dry = runtime.execute_code("call_tool('look')\ncall_tool('buy', what='a')", tools=shop.registry, dry_run=True)
    shop.price = 9
    with pytest.raises(UsageError, match="another result now"):
        runtime.commit(dry, recheck=True, tools=shop.registry)
    assert "buy a" not in shop.made


def test_a_script_cannot_look_into_what_was_not_made(runtime: SyncRuntime, shop: Shop) -> None:
    source = (
        "a = call_tool('buy', what='a')\ntry:\n    a == 'x'\nexcept Exception:\n    pass\ncall_tool('buy', what='b')"
    )
    dry = runtime.execute_code(source, tools=shop.registry, dry_run=True)
    assert dry.outcome is Outcome.ERROR and [effect.args["what"] for effect in dry.effects] == ["a"]


def test_a_draft_is_committed_by_its_id_elsewhere(runtime: SyncRuntime, folder: Path, shop: Shop) -> None:
    dry = runtime.execute_code("call_tool('buy', what='a')", tools=shop.registry, dry_run=True)
    with SyncRuntime(pool=PoolConfig(warm=0), record=folder / "runs.db") as other:
        assert other.commit(dry.draft_id, tools=shop.registry).ok
    assert shop.made == ["buy a"]


def test_reverts_go_back_in_order_and_stop_at_what_cannot_be_undone(runtime: SyncRuntime, shop: Shop) -> None:
    source = "for what in ('a', 'stuck', 'b'): call_tool('buy', what=what)"
    result = runtime.execute_code(source, tools=shop.registry)
    undone = runtime.revert(result)

    assert [(call.args["what"], call.status) for call in undone.calls] == [
        ("b", "reverted"),
        ("stuck", "failed"),
        ("a", "not reverted"),
    ]
    assert shop.undone == ["b"] and runtime.revert(result).ok and shop.undone == ["b", "a"]


# Before the run, and between


def test_a_preflight_names_what_a_script_would_call_and_calls_nothing(runtime: SyncRuntime, shop: Shop) -> None:
    source = "call_tool('buy', what='a')\ncall_tool('by', what='a')\ncall_tool('pay')"
    planned = runtime.preflight(source, tools=shop.registry)
    refused = runtime.execute_code(source, tools=shop.registry, preflight=True)

    assert [(call.tool, call.line, bool(call.problem)) for call in planned.calls] == [
        ("buy", 1, False),
        ("by", 2, True),
        ("pay", 3, True),
    ]
    assert refused.outcome is Outcome.DENIED and shop.made == []


def test_a_flow_that_asks_suspends_the_call_that_would_send(office: Office) -> None:
    policy = Policy(flows=(Flow("private", "public", "ask"),))
    with SyncRuntime(office.registry, pool=PoolConfig(warm=0), policy=policy) as runtime:
        waiting = runtime.execute_code("call_tool('mail')\ncall_tool('post', text='x')", on_approval="suspend")
        assert waiting.suspension is not None
        (call,) = waiting.suspension.calls
        assert call.tool == "post" and 'has read "private"' in call.reason and office.made == ["mail"]
        assert runtime.resume(waiting.suspension, {call.id: Approve()}).ok
    assert office.made == ["mail", "post x"]


def test_plans_wait_as_scripts_do(runtime: SyncRuntime, shop: Shop) -> None:
    steps = [
        {"id": "a", "tool": "buy", "args": {"what": "a"}},
        {"id": "p", "tool": "pay", "args": {"euros": 3}},
        {"id": "b", "tool": "buy", "args": {"what": {"$ref": "p"}}},
    ]
    rows = runtime.execute_plan(steps, tools=shop.registry, on_approval="suspend")
    assert [row["status"] for row in rows] == ["ok", "waiting", "waiting"] and rows.suspension is not None
    result = runtime.resume(rows.suspension.to_json(), {rows.suspension.calls[0].id: Approve()}, tools=shop.registry)
    assert [row["status"] for row in result.value] == ["ok"] * 3 and shop.made == ["buy a", "pay 3", "buy paid 3"]


@pytest.mark.slow
def test_what_was_made_elsewhere_is_taken_as_made(runtime: SyncRuntime, shop: Shop) -> None:
    waiting = suspended(runtime, shop, PAY)
    with pytest.raises(UsageError):
        runtime.resume(token(waiting), {"call_2": AlreadyMade("x")}, tools=shop.registry)
    assert shop.made == ["buy a"]
