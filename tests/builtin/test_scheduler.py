"""`Scheduler`: what is due is made at most once, what was missed is decided, what is not known is said."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import anyio
import pytest

from rows import each_row
from toolcell import Runtime, SyncRuntime
from toolcell.builtin import SqliteStore
from toolcell.builtin.scheduler import Scheduler, SchedulerConfig
from toolcell.builtin.stores.records import ScheduledAction, ScheduledRun
from toolcell.errors import Misconfigured, StoreError, ToolAbort, UsageError
from toolcell.tools import RunContext

pytestmark = pytest.mark.anyio

MORNING = 1_801_468_800  # 2027-02-01 08:00 UTC
DAY = 86_400
CALL = json.dumps([{"tool": "send", "params": {"to": "ada"}}])


class Clock:
    def __init__(self, now: float = MORNING) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Plans:
    """Stands in for a runtime: notes each plan, then does what it is told."""

    def __init__(self) -> None:
        self.made: list[tuple[list[Any], RunContext]] = []
        self.rows: list[dict[str, Any]] = [{"step": 0, "tool": "send", "status": "ok", "result": "sent"}]
        self.fails: BaseException | None = None
        self.begun = anyio.Event()
        self.may_end: anyio.Event | None = None
        self.inside = self.most = 0

    def check_open(self) -> None:
        return None

    async def execute_plan(self, steps: Sequence[Mapping[str, Any]], *, context: RunContext) -> list[dict[str, Any]]:
        self.made.append((list(steps), context))
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.begun.set()
        try:
            if self.may_end is not None:
                await self.may_end.wait()
            for _ in range(20):  # so that others get as far
                await anyio.lowlevel.checkpoint()
        finally:
            self.inside -= 1
        if self.fails is not None:
            raise self.fails
        return self.rows


class Desk:
    def __init__(self, store: Any = None, **config: Any) -> None:
        self.clock = Clock()
        self.store: Any = store or SqliteStore(":memory:")
        self.plans = Plans()
        self.config = SchedulerConfig(**config)
        self.scheduler = self.another()

    def another(self, **options: Any) -> Scheduler:
        return Scheduler(self.plans, self.store, self.config, clock=self.clock, **options)

    async def add(self, schedule: str = "08:00 daily", **fields: Any) -> ScheduledAction:
        given: dict[str, Any] = {"description": "Say hello", "tool_calls": CALL, "next_run": MORNING}
        action = ScheduledAction(schedule=schedule, **given | fields)
        await self.store.create_scheduled_action(action)
        return action

    async def now(self, action: ScheduledAction) -> ScheduledAction:
        return next(each for each in await self.store.list_scheduled_actions() if each.id == action.id)


@pytest.fixture
def desk() -> Desk:
    return Desk()


async def test_a_due_action_is_made_and_gets_its_next_time(desk: Desk) -> None:
    action = await desk.add()
    await desk.add(next_run=MORNING + 1)

    (run,) = await desk.scheduler.run_due()

    ((steps, context),) = desk.plans.made
    assert steps == [{"tool": "send", "args": {"to": "ada"}}]
    assert context.custom["scheduled_action"] == action.id
    assert (run.id, run.action_id, run.due_at, run.status) == (context.run_id, action.id, MORNING, "done")
    assert json.loads(run.detail) == [{"tool": "send", "status": "ok", "result": "sent"}]
    assert [(each.id, each.status, each.detail) for each in await desk.store.list_runs()] == [
        (run.id, "done", run.detail)
    ]
    assert (await desk.now(action)).next_run == MORNING + DAY
    assert await desk.scheduler.run_due() == []


async def test_an_action_that_is_made_once_is_paused_afterwards(desk: Desk) -> None:
    action = await desk.add("08:00 once")

    await desk.scheduler.run_due()
    desk.clock.now += 7 * DAY
    await desk.scheduler.run_due()

    assert len(desk.plans.made) == 1
    assert not (await desk.now(action)).enabled


async def test_several_schedulers_make_each_action_once() -> None:
    desk = Desk(concurrency=3)
    actions = [await desk.add(description=f"number {index}") for index in range(40)]
    schedulers = [desk.another() for _ in range(4)]
    ended: list[ScheduledRun] = []

    async def work(scheduler: Scheduler) -> None:
        ended.extend(await scheduler.run_due())

    async with anyio.create_task_group() as group:
        for scheduler in schedulers:
            group.start_soon(work, scheduler)

    assert sorted(run.action_id for run in ended) == sorted(action.id for action in actions)
    assert len({run.owner for run in ended}) > 1
    assert len(desk.plans.made) == len(actions)
    assert desk.plans.most <= 12


async def test_no_more_actions_than_there_are_places_are_made_at_once() -> None:
    desk = Desk(concurrency=2)
    desk.plans.may_end = anyio.Event()
    for _ in range(6):
        await desk.add()

    async with anyio.create_task_group() as group:
        group.start_soon(desk.scheduler.run_due)
        with anyio.fail_after(60):
            while desk.plans.inside < 2:
                await anyio.sleep(0.001)
        await anyio.wait_all_tasks_blocked()
        desk.plans.may_end.set()

    assert desk.plans.most == 2
    assert len(desk.plans.made) == 6


@each_row(("late_s", "made"), [(60, 1), (61, 0), (3 * DAY, 0)])
async def test_a_late_action_is_left_out_where_the_policy_says_so(late_s: int, made: int) -> None:
    desk = Desk(missed="skip", grace_s=60)
    action = await desk.add()
    desk.clock.now += late_s

    (run,) = await desk.scheduler.run_due()

    assert len(desk.plans.made) == made
    assert run.status == ("done" if made else "missed")
    assert desk.clock.now < (await desk.now(action)).next_run <= desk.clock.now + DAY


async def test_an_action_that_was_missed_many_times_is_made_once(desk: Desk) -> None:
    action = await desk.add()
    desk.clock.now += 30 * DAY + 5

    await desk.scheduler.run_due()
    await desk.scheduler.run_due()

    assert len(desk.plans.made) == 1
    assert (await desk.now(action)).next_run == MORNING + 31 * DAY


async def test_jitter_is_the_same_for_every_scheduler_and_within_its_bound() -> None:
    desk = Desk(jitter_s=100)
    actions = [await desk.add(description=str(index)) for index in range(50)]
    delays = [desk.scheduler.delay_of(action) for action in actions]

    assert delays == [desk.another().delay_of(action) for action in actions]
    assert all(0 <= delay < 100 for delay in delays)
    assert max(delays) - min(delays) > 50
    desk.clock.now += 50
    early = {run.action_id for run in await desk.scheduler.run_due()}
    assert early == {action.id for action, delay in zip(actions, delays, strict=True) if delay <= 50}
    desk.clock.now += 50
    assert len(await desk.scheduler.run_due()) == 50 - len(early)


@each_row("change", ["pause", "delete", "move"])
async def test_an_action_that_is_changed_before_it_begins_is_not_made(change: str) -> None:
    class Changed(SqliteStore):
        async def begin_run(self, run: ScheduledRun) -> bool:
            begun = await super().begin_run(run)
            (action,) = await self.list_scheduled_actions()
            if change == "pause":
                await self.update_scheduled_action(replace(action, enabled=False))
            elif change == "delete":
                await self.delete_scheduled_action(run.action_id)
            else:
                await self.reschedule(action.id, action.next_run, MORNING + 2 * DAY, True)
            return begun

    desk = Desk(Changed(":memory:"))
    await desk.add()

    (run,) = await desk.scheduler.run_due()

    assert not desk.plans.made
    assert run.status == "missed"
    assert [(each.enabled, each.next_run) for each in await desk.store.list_scheduled_actions()] == {
        "pause": [(False, MORNING)],
        "delete": [],
        "move": [(True, MORNING + 2 * DAY)],
    }[change]


async def test_a_run_whose_process_died_is_reported_once_and_not_made_again(desk: Desk) -> None:
    action = await desk.add()
    dead = ScheduledRun(action_id=action.id, due_at=MORNING, owner="dead", lease_until=MORNING + 60)
    assert await desk.store.begin_run(dead)  # it died before it could give the action its next time

    assert await desk.scheduler.run_due() == []
    assert (await desk.now(action)).next_run == MORNING  # its process may still be at it
    desk.clock.now += 61
    (run,) = await desk.scheduler.run_due()
    assert (run.id, run.status) == (dead.id, "in_doubt")
    assert not desk.plans.made
    assert (await desk.now(action)).next_run == MORNING + DAY
    assert await desk.another().run_due() == []
    assert [each.status for each in await desk.store.list_runs()] == ["in_doubt"]

    desk.clock.now = MORNING + DAY
    assert [each.status for each in await desk.scheduler.run_due()] == ["done"]


async def test_a_long_run_keeps_its_lease() -> None:
    extended = anyio.Event()

    class Noted(SqliteStore):
        async def extend_run(self, run_id: str, lease_until: int) -> bool:
            is_ours = await super().extend_run(run_id, lease_until)
            if lease_until > MORNING + 100:
                extended.set()
            return is_ours

    desk = Desk(Noted(":memory:"), lease_s=0.003)
    desk.plans.may_end = anyio.Event()
    await desk.add()
    async with anyio.create_task_group() as group:
        group.start_soon(desk.scheduler.run_due)
        await desk.plans.begun.wait()
        desk.clock.now += 100
        await extended.wait()
        assert await desk.another().run_due() == []
        desk.plans.may_end.set()

    assert [run.status for run in await desk.store.list_runs()] == ["done"]


async def test_a_run_that_is_cut_short_is_in_doubt(desk: Desk) -> None:
    await desk.add()
    desk.plans.may_end = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(desk.scheduler.run)
        await desk.plans.begun.wait()
        group.cancel_scope.cancel()

    (run,) = await desk.store.list_runs()
    assert (run.status, run.detail) == ("in_doubt", "cut short: the scheduler was stopped")


async def test_a_scheduler_that_is_to_stop_ends_what_it_began_and_begins_nothing() -> None:
    desk = Desk(concurrency=1, poll_s=3600)
    await desk.add(description="one")
    await desk.add(description="two")
    desk.plans.may_end, stop = anyio.Event(), anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(desk.scheduler.run, stop)
        await desk.plans.begun.wait()
        stop.set()
        desk.plans.may_end.set()

    assert [run.status for run in await desk.store.list_runs()] == ["done"]
    assert len(await desk.store.get_due_scheduled_actions(MORNING)) == 1


@pytest.mark.parametrize(
    ("fails", "status"), [(UsageError("no such plan"), "failed"), (ToolAbort("enough"), "in_doubt")]
)
async def test_a_plan_that_cannot_run_ends_its_run_and_not_the_scheduler(
    desk: Desk, fails: BaseException, status: str
) -> None:
    await desk.add()
    desk.plans.fails = fails

    (run,) = await desk.scheduler.run_due()

    assert run.status == status
    assert str(fails) in run.detail


async def test_a_call_that_fails_makes_its_run_failed_with_the_error(desk: Desk) -> None:
    await desk.add()
    desk.plans.rows = [*desk.plans.rows, {"step": 1, "tool": "send", "status": "error", "error": "x" * 10_000}]

    (run,) = await desk.scheduler.run_due()

    assert run.status == "failed"
    told = json.loads(run.detail)
    assert [each["status"] for each in told] == ["ok", "error"]
    assert len(told[1]["error"]) <= 2_000


@each_row("wrong", [{"schedule": "whenever"}, {"tool_calls": "{"}, {"tool_calls": '[{"params": 1}]'}])
async def test_an_action_that_cannot_be_read_is_paused_with_the_reason(desk: Desk, wrong: dict[str, str]) -> None:
    action = await desk.add(**{"schedule": "08:00 daily"} | wrong)

    (run,) = await desk.scheduler.run_due()

    assert run.status == "failed"
    assert next(iter(wrong.values())) in run.detail
    assert not (await desk.now(action)).enabled
    assert await desk.scheduler.run_due() == []


async def test_results_are_delivered_and_a_listener_that_fails_stops_nothing(desk: Desk) -> None:
    got: list[Any] = []

    def deliver(run: ScheduledRun, action: ScheduledAction | None, rows: list[dict[str, Any]]) -> None:
        got.append((action.description if action is not None else run.owner, run.status, rows))
        raise RuntimeError("nobody is at home")

    await desk.store.begin_run(ScheduledRun(action_id="gone", due_at=1, owner="dead", lease_until=2))
    await desk.add(description="one")
    await desk.add(description="two")
    runs = await desk.another(on_run=deliver, context_of=lambda action: RunContext(user_id="ada")).run_due()

    assert [run.status for run in runs] == ["in_doubt", "done", "done"]
    assert sorted(each[:2] for each in got) == [("dead", "in_doubt"), ("one", "done"), ("two", "done")]
    assert [each[2] for each in got] == [[], desk.plans.rows, desk.plans.rows]
    assert {context.user_id for _, context in desk.plans.made} == {"ada"}


async def test_a_store_that_fails_for_a_while_does_not_stop_the_scheduler() -> None:
    class Shaky(SqliteStore):
        failures = 2

        async def get_due_scheduled_actions(self, now: int) -> list[ScheduledAction]:
            if self.failures:
                self.failures -= 1
                raise StoreError("locked")
            return await super().get_due_scheduled_actions(now)

    desk = Desk(Shaky(":memory:"), poll_s=0.001)
    await desk.add()
    async with anyio.create_task_group() as group:
        group.start_soon(desk.scheduler.run)
        await desk.plans.begun.wait()
        while not [run for run in await desk.store.list_runs() if run.status == "done"]:
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()

    assert desk.store.failures == 0
    with pytest.raises(StoreError):
        desk.store.failures = 1
        await desk.scheduler.run_due()


async def test_actions_that_become_due_while_another_is_made_do_not_wait_for_it() -> None:
    desk = Desk(poll_s=0.001)
    desk.plans.may_end = anyio.Event()
    await desk.add()
    async with anyio.create_task_group() as group:
        group.start_soon(desk.scheduler.run)
        await desk.plans.begun.wait()
        await desk.add(description="later")
        while desk.plans.inside < 2:
            await anyio.sleep(0.001)
        group.cancel_scope.cancel()


@each_row(
    "wrong",
    [{"missed": "never"}, {"grace_s": -1}, {"lease_s": 0}, {"poll_s": 0}, {"poll_s": float("inf")}, {"concurrency": 0}],
)
async def test_a_setting_that_cannot_work_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        SchedulerConfig(**wrong)


async def test_a_runtime_that_is_not_open_begins_no_action_which_stays_due(desk: Desk) -> None:
    action = await desk.add()
    runtime = Runtime()
    scheduler = Scheduler(runtime, desk.store, clock=desk.clock)

    for begin in (scheduler.run_due, scheduler.run):
        with pytest.raises(Misconfigured, match="not open"):
            await begin()

    assert await desk.store.list_runs() == []
    assert (await desk.now(action)).next_run == MORNING


async def test_a_runtime_that_closes_while_a_scheduler_runs_begins_no_further_action(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    class Closing(Plans):
        def check_open(self) -> None:
            if self.made:
                raise Misconfigured("this Runtime is not open")

    desk.plans = Closing()
    first, second = await desk.add(), await desk.add()
    desk.config = SchedulerConfig(concurrency=1)

    (run,) = await desk.another().run_due()

    left = second if run.action_id == first.id else first
    assert (await desk.now(left)).next_run == MORNING
    assert [each.action_id for each in await desk.store.list_runs()] == [run.action_id]
    assert "this Runtime is not open" in caplog.text


@each_row(
    ("given", "message"),
    [
        ({"runtime": SqliteStore(":memory:")}, "takes a Runtime and a store, not "),
        ({"runtime": SyncRuntime()}, "a SyncRuntime will not do"),
        (
            {"store": "agent.db"},
            r"Scheduler\(store\) must be of the kind ScheduleStore, such as SqliteStore\(path\), not 'agent.db'",
        ),
        ({"store": SqliteStore}, r"must be of the kind ScheduleStore"),
        ({"config": {"missed": "skip"}}, r"Scheduler\(config\) must be SchedulerConfig or None"),
        ({"on_run": "print"}, r"Scheduler\(on_run\) must be a function, not 'print'"),
        ({"context_of": RunContext()}, r"Scheduler\(context_of\) must be a function"),
    ],
)
def test_a_scheduler_refuses_arguments_of_another_kind(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Scheduler(**{"runtime": Plans(), "store": SqliteStore(":memory:")} | given)
