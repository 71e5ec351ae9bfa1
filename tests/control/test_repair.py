"""A mended script gets the answers of the calls that the broken one made: no write is made twice."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from control.conftest import Effects
from toolcell import ExecutionResult, Limits, Outcome, PoolConfig, Runtime, SyncRuntime, UsageError
from toolcell.agents.agent import repairing
from toolcell.run import calls
from toolcell.tools import Approve

pytestmark = [pytest.mark.quick, pytest.mark.isolation]

BROKEN = """
rows = call_tool('read', name='rows')
a = call_tool('write', text='a')
b = call_tool('write', text='b')
raise ValueError('broken')
"""


def run(runtime: SyncRuntime, effects: Effects, source: str, **options: Any) -> ExecutionResult:
    return runtime.execute_code(source, tools=effects.registry, **options)


def names(rows: Any) -> list[tuple[str, Any]]:
    return [(row.tool, next(iter(row.args.values()))) for row in rows]


@pytest.fixture(params=["memory", "disk"])
def runtime(request: pytest.FixtureRequest) -> SyncRuntime:
    found: SyncRuntime = request.getfixturevalue("opened" if request.param == "memory" else "durable")
    return found


def test_identical_calls_are_answered_from_the_journal_and_the_report_says_which(
    runtime: SyncRuntime, effects: Effects
) -> None:
    broken = run(runtime, effects, BROKEN)
    mended = (
        "w = call_tool('write', text='a')\nnew = call_tool('write', text='c')\n[call_tool('read', name='rows'), w, new]"
    )
    fixed = run(runtime, effects, mended, repairs=broken)

    assert broken.outcome is Outcome.ERROR and fixed.ok and fixed.repair is not None
    assert fixed.value == [["rows", 1], 2, 4]
    assert names(fixed.repair.reused) == [("write", "a"), ("read", "rows")]
    assert names(fixed.repair.new) == [("write", "c")]
    assert names(fixed.repair.orphaned) == [("write", "b")]
    assert effects.of("write") == [["write", "a"], ["write", "b"], ["write", "c"]]
    assert fixed.to_dict()["repair"]["orphaned"][0]["tool"] == "write"


def test_the_second_identical_call_is_another_call(opened: SyncRuntime, effects: Effects) -> None:
    broken = run(opened, effects, "call_tool('write', text='x')\ncall_tool('write', text='x')\n1/0")
    fixed = run(opened, effects, "[call_tool('write', text='x') for _ in range(3)]", repairs=broken)

    assert fixed.value == [1, 2, 3]
    assert len(effects.made) == 3


def test_the_order_of_arguments_and_of_calls_does_not_matter(opened: SyncRuntime, effects: Effects) -> None:
    registry = effects.registry.merged()

    @registry.tool
    async def put(key: str, value: dict[str, Any]) -> str:
        """Store a value under a key."""
        effects.made.append(["put", key])
        return key

    broken = opened.execute_code(
        "call_tool('put', key='k', value={'a': 1, 'b': [2]})\ncall_tool('put', key='j', value={})\n1/0", tools=registry
    )
    fixed = opened.execute_code(
        "[call_tool('put', value={}, key='j'), call_tool('put', value={'b': [2], 'a': 1}, key='k')]",
        tools=registry,
        repairs=broken,
    )

    assert fixed.value == ["j", "k"]
    assert effects.made == [["put", "k"], ["put", "j"]]


def test_reads_are_made_again_when_asked(opened: SyncRuntime, effects: Effects) -> None:
    broken = run(opened, effects, BROKEN)
    mended = "[call_tool('read', name='rows'), call_tool('write', text='a')]"

    assert run(opened, effects, mended, repairs=broken, refresh="reads").value == [["rows", 4], 2]


FAILING = (
    "try:\n    r = call_tool({call})\nexcept ToolError as error:\n    r = [error.code, str(error), error.details]\n"
)


@pytest.mark.parametrize(
    ("call", "made"),
    [
        ("'fail', text='t'", 1),  # a write that failed may have done half of its work
        ("'pay', to='a'", 0),  # refused: nobody approves
        ("'write', text=[]", 0),  # refused: wrong arguments
        ("'nothing'", 0),
    ],
)
def test_a_write_that_failed_is_not_made_again_and_its_failure_is_the_same(
    opened: SyncRuntime, effects: Effects, call: str, made: int
) -> None:
    source = FAILING.format(call=call)
    broken = run(opened, effects, source + "set_result(r)\n1/0")
    fixed = run(opened, effects, source + "set_result(r)", repairs=broken)

    assert fixed.ok and fixed.value == broken.value
    assert len(effects.made) == made


def test_a_failed_read_is_made_again(opened: SyncRuntime, effects: Effects) -> None:
    registry = effects.registry.merged()
    state = {"is_up": False}

    @registry.tool(read_only=True)
    async def flaky() -> str:
        """Answer once the service is up."""
        if not state["is_up"]:
            raise ValueError("down")
        return "up"

    broken = opened.execute_code("call_tool('flaky')", tools=registry)
    state["is_up"] = True
    assert broken.outcome is Outcome.ERROR
    assert opened.execute_code("call_tool('flaky')", tools=registry, repairs=broken).value == "up"


def test_a_write_whose_result_is_not_known_is_not_made_again(opened: SyncRuntime, effects: Effects) -> None:
    import anyio

    registry = effects.registry.merged()

    @registry.tool
    async def slow(text: str) -> str:
        """Do the work, and answer late."""
        effects.made.append(["slow", text])
        await anyio.sleep(30)
        return text

    broken = opened.execute_code("call_tool('slow', text='a')", tools=registry, limits=Limits(wall_s=0.3))
    fixed = opened.execute_code(FAILING.format(call="'slow', text='a'") + "r", tools=registry, repairs=broken)
    again = opened.execute_code(FAILING.format(call="'slow', text='a'") + "r", tools=registry, repairs=fixed)

    assert broken.outcome is Outcome.TIMEOUT
    assert fixed.value[0] == again.value[0] == "in_doubt" and "not known whether" in fixed.value[1]
    assert effects.made == [["slow", "a"]]


def test_a_repair_can_be_repaired_and_remembers_what_the_first_run_made(runtime: SyncRuntime, effects: Effects) -> None:
    first = run(runtime, effects, BROKEN)
    second = run(runtime, effects, "call_tool('write', text='c')\n1/0", repairs=first)
    third = run(runtime, effects, "[call_tool('write', text=t) for t in 'abc']", repairs=second.journal_id)

    assert third.value == [2, 3, 4] and third.repair is not None
    assert names(third.repair.reused) == [("write", "a"), ("write", "b"), ("write", "c")]
    assert not third.repair.new and not third.repair.orphaned
    assert len(effects.of("write")) == 3


def test_a_repair_that_is_suspended_goes_on_with_what_it_took_over(runtime: SyncRuntime, effects: Effects) -> None:
    broken = run(runtime, effects, BROKEN)
    mended = "[call_tool('write', text='a'), call_tool('pay', to='x'), call_tool('write', text='b')]"
    waiting = run(runtime, effects, mended, repairs=broken, on_approval="suspend")
    assert waiting.suspension is not None
    done = runtime.resume(
        waiting.suspension, {call.id: Approve() for call in waiting.suspension.calls}, tools=effects.registry
    )

    assert done.value == [2, "paid x 1", 3] and done.repair is not None
    assert names(done.repair.orphaned) == []
    assert effects.of("write") == [["write", "a"], ["write", "b"]] and len(effects.of("pay")) == 1


def test_a_run_without_a_journal_is_named(opened: SyncRuntime, effects: Effects) -> None:
    waiting = run(opened, effects, "call_tool('pay', to='x')", on_approval="suspend")
    with pytest.raises(UsageError, match="a suspended run is resumed"):
        run(opened, effects, "1", repairs=waiting)


def test_a_call_that_waited_and_was_then_made_is_not_made_again_by_a_repair(
    opened: SyncRuntime, effects: Effects
) -> None:
    is_approved = False
    registry = effects.registry.merged()
    registry.add_hook(before=lambda call: Approve() if is_approved else None)
    waiting = opened.execute_code("call_tool('pay', to='a')\n1/0", tools=registry, on_approval="suspend")
    assert waiting.suspension is not None
    is_approved = True
    broken = opened.resume(waiting.suspension, tools=registry)
    fixed = opened.execute_code("call_tool('pay', to='a')", tools=registry, repairs=broken)

    assert fixed.value == "paid a 1" and fixed.repair is not None and len(fixed.repair.reused) == 1
    assert effects.made == [["pay", "a", 1]]


def test_a_script_that_could_not_begin_does_not_end_the_repair(effects: Effects) -> None:
    async def main() -> ExecutionResult:
        async with Runtime(effects.registry, pool=PoolConfig(warm=1)) as runtime:
            execute = repairing(runtime.journals, runtime.execute_code)
            await execute("call_tool('write', text='a')\n1/0")
            with pytest.raises(UsageError):
                await execute("1", inputs={"no name": 1})
            return await execute("call_tool('write', text='a')")

    result = anyio.run(main)
    assert result.ok and effects.made == [["write", "a"]]


@pytest.mark.slow
def test_arguments_count_for_the_size_of_the_journals_that_are_kept(effects: Effects) -> None:
    with SyncRuntime(effects.registry, pool=PoolConfig(warm=1)) as runtime:
        source = "for n in range(6):\n    call_tool('write', text=str(n) * 5_000_000)"
        results = [runtime.execute_code(source) for _ in range(3)]
        assert all(result.ok for result in results)
        with pytest.raises(UsageError, match="no journal of that run"):
            runtime.execute_code("1", repairs=results[0])
        assert runtime.execute_code("1", repairs=results[2]).ok


@pytest.mark.parametrize("kind", ["opened", "durable"])
def test_a_repair_that_is_carried_on_tells_what_its_first_part_took_over(
    kind: str, request: pytest.FixtureRequest, effects: Effects
) -> None:
    runtime: SyncRuntime = request.getfixturevalue(kind)
    broken = run(runtime, effects, "call_tool('write', text='a')\n1/0")
    source = "call_tool('write', text='a')\ncall_tool('write', text='b')\ncall_tool('pay', to='c')"
    waiting = run(runtime, effects, source, repairs=broken, on_approval="suspend")
    assert waiting.suspension is not None
    call = waiting.suspension.calls[0].id
    fixed = runtime.resume(waiting.suspension, {call: Approve()}, tools=effects.registry)

    assert fixed.ok and fixed.repair is not None
    assert names(fixed.repair.reused) == [("write", "a")]
    assert names(fixed.repair.new) == [("write", "b"), ("pay", "c")]
    assert effects.made == [["write", "a"], ["write", "b"], ["pay", "c", 1]]


@pytest.mark.slow
def test_journals_of_finished_runs_leave_memory_by_what_the_arguments_of_their_calls_take(
    effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "FINISHED_BYTES", 1_000_000)
    large = "call_tool('write', text='x' * 600_000)\n1/0"
    with SyncRuntime(pool=PoolConfig(warm=1)) as opened:
        first, small, second = (run(opened, effects, source) for source in (large, BROKEN, large))

        with pytest.raises(UsageError, match="no journal of that run"):
            run(opened, effects, "1", repairs=first)
        assert run(opened, effects, "1", repairs=small).ok and run(opened, effects, "1", repairs=second).ok
