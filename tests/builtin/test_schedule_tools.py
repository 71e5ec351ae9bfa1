"""`schedule_create`, `schedule_list`, `schedule_update`, `schedule_delete`: what they answer, and what they refuse."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from rows import each_row
from toolcell import ToolRegistry
from toolcell.builtin import ScheduledAction, ScheduleStore, SqliteStore
from toolcell.builtin.schedule import MAX_CALLS_BYTES, MAX_DESCRIPTION_CHARS, Schedule
from toolcell.errors import UsageError
from toolcell.flows import Flow, FlowAction
from toolcell.tools import Origin, RunContext, ToolResult

NOON = datetime(2027, 2, 1, 12, tzinfo=UTC).timestamp()  # a Monday
CALL = {"tool": "send", "params": {"to": "ada", "text": "hello"}}


class Clock:
    def __init__(self, now: float = NOON) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Desk:
    """A registry with the package and two tools to schedule."""

    def __init__(self, **options: Any) -> None:
        self.clock = Clock()
        self.store: ScheduleStore = SqliteStore(":memory:")
        self.registry = ToolRegistry()
        self.registry.add(Schedule(self.store, clock=self.clock, **options))

        @self.registry.tool
        def send(to: str, text: str = "") -> str:
            """Send a message to a person."""
            return f"{to}: {text}"

        @self.registry.tool
        def report(days: int) -> int:
            """Count what happened in so many days."""
            return days

    async def call(
        self, name: str, args: dict[str, Any] | None = None, context: RunContext | None = None, **changes: Any
    ) -> ToolResult:
        return await self.registry.dispatch(f"schedule_{name}", {**(args or {}), **changes}, context=context)

    async def create(self, description: str, context: RunContext | None = None, **changes: Any) -> ToolResult:
        args = {"description": description, "time": "08:00", "recurrence": "daily", "tools": [CALL]}
        result = await self.call("create", args | changes, context)
        self.clock.now += 1  # the oldest is listed first
        return result

    async def descriptions(self) -> list[str]:
        return [action.description for action in await self.store.list_scheduled_actions()]


@pytest.fixture
def desk() -> Desk:
    return Desk()


pytestmark = pytest.mark.anyio


@pytest.mark.conforms("S1", "S11", "S-b2")
async def test_an_action_that_is_created_is_told_and_stored(desk: Desk) -> None:
    result = await desk.create("Say hello", recurrence="weekly", day="tue", synthesis_prompt="Be short.")

    assert result.text == "Scheduled: Say hello\nSchedule: 08:00 weekly(tuesday)\nNext run: 2027-02-02 08:00"
    (action,) = await desk.store.list_scheduled_actions()
    assert result.value == {
        "id": action.id,
        "description": "Say hello",
        "schedule": "08:00 weekly(tuesday)",
        "next_run": int(NOON) + 20 * 3600,
        "next_run_local": "2027-02-02 08:00",
        "enabled": True,
        "tools": [CALL],
    }
    assert json.loads(action.tool_calls) == [CALL]
    assert (action.enabled, action.synthesis_prompt, action.created_at) == (True, "Be short.", int(NOON))


@pytest.mark.conforms("S10", "S-b6")
@each_row(
    ("options", "schedule", "next_run"),
    [
        ({}, "08:00 daily", "2027-02-02T08:00+00:00"),
        ({"tz_offset": 7}, "08:00 daily +07:00", "2027-02-02T08:00+07:00"),
        ({"tz_offset": -8}, "08:00 daily -08:00", "2027-02-01T08:00-08:00"),
        ({"timezone": "Europe/Berlin"}, "08:00 daily Europe/Berlin", "2027-02-02T08:00+01:00"),
    ],
)
async def test_times_are_local_and_stored_in_utc(options: dict[str, Any], schedule: str, next_run: str) -> None:
    desk = Desk(**options)
    result = await desk.create("Say hello")

    (action,) = await desk.store.list_scheduled_actions()
    assert action.schedule == schedule
    assert action.next_run == datetime.fromisoformat(next_run).timestamp()
    assert result.text.endswith(f"Next run: {next_run[:10]} 08:00")


@pytest.mark.conforms("S11", "S-b2")
async def test_the_list_says_what_when_and_whether(desk: Desk) -> None:
    assert (await desk.call("list")).text == "No scheduled actions."
    assert (await desk.call("list")).value == []
    await desk.create("Say hello")
    await desk.create("Report", recurrence="monthly", day="31", tools=[{"tool": "report", "params": {"days": 30}}])
    await desk.call("update", description_query="report", enabled=False)

    listed = await desk.call("list")

    assert listed.text == (
        "2 scheduled action(s):\n"
        "1. Say hello [active]\n   Schedule: 08:00 daily | Next: 2027-02-02 08:00\n"
        "2. Report [paused]\n   Schedule: 08:00 monthly(31) | Next: 2027-02-28 08:00"
    )
    assert [each["enabled"] for each in listed.value] == [True, False]


@pytest.mark.conforms("S12", "S-b6")
@pytest.mark.parametrize(
    ("change", "told", "schedule"),
    [
        ({"enabled": False}, "paused", "07:00 weekly(friday)"),
        ({"enabled": True}, "enabled", "07:00 weekly(friday)"),
        ({"time": "9:15"}, "schedule updated", "09:15 weekly(friday)"),
        ({"day": "sunday"}, "schedule updated", "07:00 weekly(sunday)"),
        ({"recurrence": "custom"}, "schedule updated", "07:00 custom(monday,wednesday,friday)"),
        ({"recurrence": "monthly", "day": "3"}, "schedule updated", "07:00 monthly(3)"),
        ({"recurrence": "weekly", "time": "10:00"}, "schedule updated", "10:00 weekly(friday)"),
        ({"enabled": False, "time": "10:00"}, "paused, schedule updated", "10:00 weekly(friday)"),
    ],
)
async def test_an_update_changes_what_it_names(desk: Desk, change: dict[str, Any], told: str, schedule: str) -> None:
    await desk.create("Say hello", time="07:00", recurrence="weekly", day="friday")

    result = await desk.call("update", description_query="HELLO", **change)

    assert result.text == f'Updated "Say hello": {told}'
    (action,) = await desk.store.list_scheduled_actions()
    assert (action.schedule, action.enabled) == (schedule, change.get("enabled", True))
    assert result.value["schedule"] == schedule
    assert action.next_run > NOON


@pytest.mark.conforms("S-b6")
async def test_a_schedule_that_is_changed_keeps_its_time_zone() -> None:
    desk = Desk(timezone="Europe/Berlin")
    await desk.create("Say hello")

    result = await desk.call("update", description_query="hello", time="09:00")

    assert (result.value["schedule"], result.value["next_run"]) == ("09:00 daily Europe/Berlin", int(NOON) + 20 * 3600)


@pytest.mark.conforms("S12")
async def test_an_update_without_changes_says_so(desk: Desk) -> None:
    await desk.create("Say hello")

    assert (await desk.call("update", description_query="hello")).text == "No changes specified."


@pytest.mark.conforms("S12", "S-b6")
async def test_what_is_not_found_or_not_clear_is_an_error_with_candidates(desk: Desk) -> None:
    await desk.create("Say hello")
    await desk.create("Say goodbye")

    unclear = await desk.call("update", description_query="say", enabled=False)
    assert unclear.is_error
    assert unclear.error is not None
    assert unclear.error.message == "Multiple matches: Say hello, Say goodbye. Be more specific."
    assert [each["description"] for each in unclear.error.details["candidates"]] == ["Say hello", "Say goodbye"]
    for name in ("update", "delete"):
        missing = await desk.call(name, description_query="lunch")
        assert missing.error is not None
        assert (missing.error.message, missing.error.code) == ('No scheduled action matching "lunch".', "not_found")
    assert all(action.enabled for action in await desk.store.list_scheduled_actions())


@pytest.mark.conforms("S-b6")
async def test_an_action_whose_name_is_a_part_of_another_can_be_named(desk: Desk) -> None:
    await desk.create("Report")
    await desk.create("Report of sales")
    twin = (await desk.create("Report of sales")).value["id"]

    assert (await desk.call("update", description_query="report", enabled=False)).text == 'Updated "Report": paused'
    assert (await desk.call("update", description_query=twin, enabled=False)).value["id"] == twin
    assert (await desk.call("delete", description_query=twin)).text == "Deleted: Report of sales"
    assert await desk.descriptions() == ["Report", "Report of sales"]


@pytest.mark.conforms("S12")
async def test_delete_takes_one_several_or_all(desk: Desk) -> None:
    for name in ("Say hello", "Say goodbye", "Report", "Clean up", "Tidy up"):
        await desk.create(name)

    one = await desk.call("delete", description_query="report")
    several = await desk.call("delete", description_query="say")
    every = await desk.call("delete", description_query="*")

    assert one.text == "Deleted: Report"
    assert several.text == "Deleted 2 scheduled action(s): Say hello, Say goodbye"
    assert every.text == "Deleted all 2 scheduled action(s)."
    assert [len(each.value["deleted"]) for each in (one, several, every)] == [1, 2, 2]
    assert (await desk.call("delete", description_query="*")).text == "Deleted all 0 scheduled action(s)."


@pytest.mark.conforms("S-b6")
@pytest.mark.parametrize("query", ["", " ", "\n\t", "%", "_", "%%", "S%o", "\\%", "' OR 1=1 --", "\0", "**"])
@pytest.mark.parametrize("name", ["update", "delete"])
async def test_no_query_means_every_action_but_the_star(desk: Desk, name: str, query: str) -> None:
    await desk.create("Say hello")

    result = await desk.call(name, description_query=query)

    assert result.is_error
    assert await desk.descriptions() == ["Say hello"]


@pytest.mark.conforms("S-b6")
@pytest.mark.parametrize(("query", "left"), [("100%", ["a_b", "axb"]), ("A_B", ["100% done", "axb"])])
async def test_signs_of_a_pattern_stand_for_themselves(desk: Desk, query: str, left: list[str]) -> None:
    for name in ("100% done", "a_b", "axb"):
        await desk.create(name)

    await desk.call("delete", description_query=query)

    assert await desk.descriptions() == left


@pytest.mark.conforms("S-b6")
@each_row(
    ("changes", "said"),
    [
        ({"description": " \n"}, "description is required"),
        ({"description": "x" * (MAX_DESCRIPTION_CHARS + 1)}, f"may have {MAX_DESCRIPTION_CHARS}"),
        ({"description": "*"}, "stands for all"),
        ({"description": "a\0b"}, "NUL"),
        ({"time": "25:00"}, "25:00"),
        ({"time": "tomorrow"}, "HH:MM"),
        ({"recurrence": "hourly"}, "hourly"),
        ({"day": "monday"}, "takes no day"),
        ({"recurrence": "weekly", "day": "1"}, "no day of the week"),
        ({"recurrence": "monthly", "day": "32"}, "1 to 31"),
        ({"tools": []}, "tools are required"),
        ({"tools": [{}]}, "no tool that can be scheduled"),
        ({"tools": [{"tool": "sned"}]}, "did you mean `send`"),
        ({"tools": [{"tool": "schedule_create"}]}, "no tool that can be scheduled"),
        ({"tools": [{"tool": "send", "params": {}}]}, "missing required property"),
        ({"tools": [{"tool": "report", "params": {"days": "many"}}]}, "must be integer"),
        ({"tools": [CALL] * 51}, "more than 50"),
        ({"tools": [{"tool": "send", "params": {"to": "x" * MAX_CALLS_BYTES}}]}, "bytes of JSON"),
        ({"tools": [{"tool": "send", "params": {"to": "a\0b"}}]}, "NUL"),
        ({"synthesis_prompt": "x" * 4_001}, "more than 4000"),
    ],
)
async def test_what_cannot_be_scheduled_is_refused_now_and_not_at_night(
    desk: Desk, changes: dict[str, Any], said: str
) -> None:
    result = await desk.create(**{"description": "Say hello"} | changes)

    assert result.is_error
    assert said in result.text
    assert await desk.store.list_scheduled_actions() == []


@pytest.mark.conforms("S-b6")
async def test_a_tool_that_its_author_may_not_call_cannot_be_scheduled_either(desk: Desk) -> None:
    desk.registry.blacklist("send", origins=[Origin.MODEL])
    by_model = await desk.create("Say hello")
    desk.registry.unblacklist("send")
    desk.registry.blacklist("send", origins=[Origin.PLAN])
    by_plan = await desk.create("Say hello")

    assert "no tool that can be scheduled is called 'send'; there are: report" in by_model.text
    assert by_plan.is_error


@pytest.mark.parametrize("action", ["deny", "ask"])
async def test_a_run_cannot_schedule_what_it_may_not_send(desk: Desk, action: FlowAction) -> None:
    desk.registry.policy.add_flow(Flow("private", "public", action))
    desk.registry.add(desk.registry.get("send")[0], name="post", sends="public")

    @desk.registry.tool(reads="private")
    def read_diary() -> str:
        """Read what is nobody else's business."""
        return "secret"

    post = {"tool": "post", "params": {"to": "everybody", "text": "secret"}}
    run = RunContext()
    before = await desk.create("Post early", context=run, tools=[post])
    await desk.registry.dispatch("read_diary", {}, context=run)
    after = await desk.create("Post it", context=run, tools=[post])
    private = await desk.create("Send it", context=run)

    assert not before.is_error
    assert after.error is not None
    assert (after.error.code, "has read" in after.error.message) == ("not_permitted", True)
    assert not private.is_error
    assert await desk.descriptions() == ["Post early", "Send it"]


@pytest.mark.conforms("S-b6")
async def test_an_action_that_goes_on_after_a_pause_does_not_make_up_for_it(desk: Desk) -> None:
    await desk.create("Say hello")
    await desk.call("update", description_query="hello", enabled=False)
    desk.clock.now += 7 * 86_400

    result = await desk.call("update", description_query="hello", enabled=True)

    assert result.value["next_run_local"] == "2027-02-09 08:00"


async def test_a_row_that_somebody_else_wrote_is_listed_all_the_same(desk: Desk) -> None:
    await desk.store.create_scheduled_action(
        ScheduledAction(description="odd", schedule="whenever", tool_calls="{", next_run=10**15)
    )

    listed = await desk.call("list")

    assert "1. odd [active]\n   Schedule: whenever | Next: 1000000000000000 unix seconds" in listed.text
    assert listed.value[0]["tools"] == []
    assert (await desk.call("update", description_query="odd", day="3")).is_error
    assert (await desk.call("update", description_query="odd", time="09:00")).is_error


async def test_there_are_at_most_so_many_actions() -> None:
    desk = Desk(max_actions=2)
    results = [await desk.create(f"number {index}") for index in range(3)]

    assert [result.is_error for result in results] == [False, False, True]
    assert "the most there may be" in results[2].text


@each_row("options", [{"tz_offset": 15}, {"timezone": "Mars"}, {"tz_offset": 1, "timezone": "UTC"}, {"max_actions": 0}])
async def test_a_package_that_cannot_work_is_refused_when_it_is_made(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Desk(**options)


async def test_without_the_library_of_dates_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'toolcell\[builtin\]'"):
        Schedule(SqliteStore(":memory:"))
