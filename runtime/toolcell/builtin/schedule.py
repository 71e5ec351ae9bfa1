"""`schedule_create`, `schedule_list`, `schedule_update` and `schedule_delete`: tool calls that are to be made later.

These tools only write to the store. A `Scheduler` makes the calls; `recurrence` says when.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import TypedDict

from toolcell.builtin.package import ToolPackage, offered, required_text
from toolcell.builtin.recurrence import (
    UTC,
    Frequency,
    Recurrence,
    check_dates,
    offset_zone,
    parse_recurrence,
    recurrence_of,
    zone_of,
)
from toolcell.builtin.stores.protocols import STORES, ScheduleStore
from toolcell.builtin.stores.records import ScheduledAction, check_text
from toolcell.calls.arguments import InvalidArguments
from toolcell.calls.call import CallingRegistry
from toolcell.calls.values import list_names
from toolcell.config import MAX_PLAN_STEPS
from toolcell.errors import ToolError, UsageError
from toolcell.flows import flow_of
from toolcell.support.checks import check_count, check_does, did_you_mean
from toolcell.support.text import one_line
from toolcell.tools import (
    Call,
    ErrorCode,
    Origin,
    ToolContext,
    ToolDefinition,
    ToolRegistry,
    ToolResult,
)

MAX_DESCRIPTION_CHARS = 500
MAX_PROMPT_CHARS = 4_000
MAX_CALLS_BYTES = 64 * 1024
"""Most bytes of the calls of one action, as JSON."""
MAX_ACTIONS = 1_000
MAX_CANDIDATES = 20
ALL = "*"
AMBIGUOUS = "ambiguous"
NOT_FOUND = "not_found"

ACTION_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "description": {"type": "string"},
        "schedule": {"type": "string"},
        "next_run": {"type": "integer", "description": "Unix seconds."},
        "next_run_local": {"type": "string", "description": "YYYY-MM-DD HH:MM in the schedule's time zone."},
        "enabled": {"type": "boolean"},
        "tools": {"type": "array", "items": {"type": "object"}},
    },
}


class ScheduledCall(TypedDict, total=False):
    """One tool call of an action."""

    tool: str
    """Name of the tool to call."""
    params: dict[str, Any]
    """Its arguments."""


class Schedule(ToolPackage):
    """Tools with which a model schedules tool calls; a `Scheduler` makes them."""

    package = "schedule"
    needs = ("Store",)
    extra = "builtin"

    def __init__(
        self,
        store: ScheduleStore,
        tz_offset: int = 0,
        *,
        timezone: str | None = None,
        max_actions: int = MAX_ACTIONS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Times are local: `tz_offset` hours ahead of UTC, or in the IANA zone `timezone`, such as Europe/Berlin.

        Raises:
            UsageError: there is no such offset or zone, `store` is none, or python-dateutil is not installed.
        """
        check_dates()
        check_does("Schedule(store)", store, ScheduleStore, STORES)
        check_count("max_actions", max_actions, 1)
        if timezone is not None and tz_offset:
            raise UsageError(f"give tz_offset={tz_offset} or timezone={timezone!r}, not both")
        self._store = store
        self._zone = offset_zone(tz_offset) if timezone is None else timezone
        zone_of(self._zone)
        self._max_actions = max_actions
        self._clock = clock

    @offered(returns=ACTION_SCHEMA)
    async def schedule_create(
        self,
        description: str,
        time: str,
        recurrence: Frequency,
        tools: list[ScheduledCall],
        ctx: ToolContext,
        day: str = "",
        synthesis_prompt: str = "",
    ) -> ToolResult:
        """Schedule tool calls for later, once or again and again. Check schedule_list first to avoid doubles.

        Args:
            description: What is done, in one line; it identifies the action later.
            time: Local time of day as HH:MM, for example 08:00.
            recurrence: How often: once, daily, custom (several days of the week), weekly, or monthly.
            tools: The tool calls to make, each {"tool": name, "params": arguments}. They are made in parallel.
            day: weekly: a day such as monday; custom: days such as monday,friday; monthly: a day from 1 to 31.
            synthesis_prompt: What to do with the results when they are there.
        """
        description = _described(description)
        _check_prompt(synthesis_prompt)
        rule = _checked(lambda: recurrence_of(recurrence, time=time, day=day, zone=self._zone))
        calls = await _checked_calls(tools, ctx)
        if len(await self._store.list_scheduled_actions()) >= self._max_actions:
            raise ToolError(f"there are {self._max_actions} scheduled actions, the most there may be; delete one")
        action = ScheduledAction(
            description=description,
            schedule=str(rule),
            tool_calls=calls,
            synthesis_prompt=synthesis_prompt,
            next_run=rule.next_after(self._clock()),
            created_at=int(self._clock()),
        )
        await self._store.create_scheduled_action(action)
        local = rule.local(action.next_run)
        return ToolResult.ok(
            f"Scheduled: {description}\nSchedule: {action.schedule}\nNext run: {local}", value=as_value(action)
        )

    @offered(read_only=True, returns={"type": "array", "items": ACTION_SCHEMA})
    async def schedule_list(self) -> ToolResult:
        """List the scheduled actions: what each does, when, and whether it is active or paused."""
        actions = await self._store.list_scheduled_actions()
        if not actions:
            return ToolResult.ok("No scheduled actions.", value=[])
        lines = [f"{len(actions)} scheduled action(s):"]
        for number, action in enumerate(actions, 1):
            state = "active" if action.enabled else "paused"
            lines.append(f"{number}. {action.description} [{state}]")
            lines.append(f"   Schedule: {action.schedule} | Next: {local_time(action)}")
        return ToolResult.ok("\n".join(lines), value=[as_value(action) for action in actions])

    @offered(returns=ACTION_SCHEMA)
    async def schedule_update(
        self,
        description_query: str,
        enabled: bool | None = None,
        time: str = "",
        recurrence: Frequency | None = None,
        day: str = "",
    ) -> ToolResult:
        """Pause or resume one scheduled action, or change when it is made. What is left out stays as it is.

        Args:
            description_query: A part of the action's description that no other action has, or its id.
            enabled: False pauses the action, true resumes it.
            time: A new local time of day as HH:MM.
            recurrence: How often from now on: once, daily, custom, weekly, or monthly.
            day: New day or days, as in schedule_create.
        """
        action = _the_one(await self._find_actions(description_query), description_query)
        changes = []
        changed = action
        if enabled is not None and enabled != action.enabled:
            changed = replace(changed, enabled=enabled)
        if enabled is not None:
            changes.append("enabled" if enabled else "paused")
        if time.strip() or recurrence is not None or day.strip():
            rule = _checked(lambda: _new_rule(action.schedule, time, recurrence, day))
            changed = replace(changed, schedule=str(rule), next_run=rule.next_after(self._clock()))
            changes.append("schedule updated")
        elif changed.enabled and not action.enabled and action.next_run <= self._clock():
            rule = _checked(lambda: parse_recurrence(action.schedule))  # what was due while it was paused stays unmade
            changed = replace(changed, next_run=rule.next_after(self._clock()))
        if not changes:
            return ToolResult.ok("No changes specified.", value=as_value(action))
        if not await self._store.update_scheduled_action(changed):
            raise _none(description_query, [])
        return ToolResult.ok(f'Updated "{action.description}": {", ".join(changes)}', value=as_value(changed))

    @offered(returns={"type": "object", "properties": {"deleted": {"type": "array", "items": ACTION_SCHEMA}}})
    async def schedule_delete(self, description_query: str) -> ToolResult:
        """Delete every scheduled action whose description holds a text, or all of them.

        Args:
            description_query: A part of the description, the id of one action, or * for all.
        """
        if description_query.strip() == ALL:
            every = await self._store.list_scheduled_actions()
            count = await self._store.delete_all_scheduled_actions()
            return ToolResult.ok(f"Deleted all {count} scheduled action(s).", value={"deleted": _values(every)})
        found = await self._find_actions(description_query)
        if not found:
            raise _none(description_query, await self._store.list_scheduled_actions())
        gone = [action for action in found if await self._store.delete_scheduled_action(action.id)]
        names = ", ".join(action.description for action in gone)
        text = f"Deleted: {names}" if len(gone) == 1 else f"Deleted {len(gone)} scheduled action(s): {names}"
        return ToolResult.ok(text, value={"deleted": _values(gone)})

    async def _find_actions(self, query: str) -> list[ScheduledAction]:
        if not query.strip():
            raise ToolError("description_query is required: a part of the action's description", code=_INVALID)
        _checked(lambda: check_text("description_query", query))
        every = await self._store.list_scheduled_actions()
        return [each for each in every if each.id == query.strip()] or (
            await self._store.find_scheduled_actions_by_description(query.strip())
        )


_INVALID = ErrorCode.INVALID_ARGUMENTS


def planned_calls(tool_calls: str) -> list[dict[str, Any]]:
    """Return the calls of an action as the steps of a plan.

    Shape: [{"tool": ..., "params": {...}}] as JSON in; [{"tool": ..., "args": {...}}] out.

    Raises:
        UsageError: it is no such JSON.
    """
    try:
        calls = json.loads(tool_calls)
        return [{"tool": str(call["tool"]), "args": dict(call.get("params") or {})} for call in calls]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise UsageError(f"tool_calls {one_line(tool_calls, 80)!r} is not a JSON list of tools: {exc}") from exc


def as_value(action: ScheduledAction) -> dict[str, Any]:
    try:
        tools = planned_calls(action.tool_calls)
    except UsageError:
        tools = []
    return {
        "id": action.id,
        "description": action.description,
        "schedule": action.schedule,
        "next_run": action.next_run,
        "next_run_local": local_time(action),
        "enabled": action.enabled,
        "tools": [{"tool": each["tool"], "params": each["args"]} for each in tools],
    }


def local_time(action: ScheduledAction) -> str:
    """Shape: "2026-11-23 08:00" in the zone of the action's schedule, or in UTC when the schedule cannot be read."""
    try:
        rule = parse_recurrence(action.schedule)
    except UsageError:
        rule = Recurrence(0, 0, "once", zone=UTC)
    try:
        return rule.local(action.next_run)
    except (ValueError, OverflowError, OSError):
        return f"{action.next_run} unix seconds"


def _values(actions: Sequence[ScheduledAction]) -> list[dict[str, Any]]:
    return [as_value(action) for action in actions]


def _checked(make: Callable[[], Any]) -> Any:
    """Return what `make` returns; what it finds wrong is an answer to the model."""
    try:
        return make()
    except UsageError as exc:
        raise ToolError(str(exc), code=_INVALID) from exc


def _described(description: str) -> str:
    text = " ".join(description.split())
    _checked(lambda: check_text("description", text))
    if text == ALL:
        raise ToolError(f"description {ALL!r} stands for all actions; say what is done", code=_INVALID)
    return required_text("description", text, MAX_DESCRIPTION_CHARS)


def _check_prompt(text: str) -> None:
    _checked(lambda: check_text("synthesis_prompt", text))
    if len(text) > MAX_PROMPT_CHARS:
        raise ToolError(f"synthesis_prompt has {len(text)} characters, more than {MAX_PROMPT_CHARS}", code=_INVALID)


async def _checked_calls(tools: Sequence[ScheduledCall], ctx: ToolContext) -> str:
    """Return the calls as JSON. Each must be one that its author may make now, and that a plan may make later."""
    if not tools:
        raise ToolError('tools are required: a list of {"tool": name, "params": {...}}', code=_INVALID)
    if len(tools) > MAX_PLAN_STEPS:
        raise ToolError(
            f"{len(tools)} tool calls are more than {MAX_PLAN_STEPS}; schedule several actions", code=_INVALID
        )
    registry = ctx.call.registry
    later = set(registry.names(Origin.PLAN))
    known = {
        each.name: each
        for each in registry.definitions(ctx.origin)
        if each.name in later and not each.name.startswith("schedule_")
    }
    calls = [await _checked_call(call, registry, known) for call in tools]
    for name in dict.fromkeys(call["tool"] for call in calls):
        _check_rules(name, ctx.call)
    text = json.dumps(calls, ensure_ascii=False, allow_nan=False)
    if len(text.encode()) > MAX_CALLS_BYTES:
        raise ToolError(f"the calls are {len(text.encode())} bytes of JSON, more than {MAX_CALLS_BYTES}", code=_INVALID)
    _checked(lambda: check_text("tools", text.replace("\\u0000", "\0")))
    return text


async def _checked_call(
    call: ScheduledCall, registry: CallingRegistry, known: dict[str, ToolDefinition]
) -> dict[str, Any]:
    name, params = call.get("tool", ""), call.get("params") or {}
    if name not in known:
        raise ToolError(
            f"no tool that can be scheduled is called {one_line(name, 80)!r}{did_you_mean(name, known)}; "
            f"there are: {list_names(known) or 'none'}",
            code=ErrorCode.UNKNOWN_TOOL,
            details={"available": sorted(known)},
        )
    try:
        await registry.check_arguments(known[name], params)
    except InvalidArguments as exc:
        raise ToolError(str(exc), code=_INVALID) from exc
    return {"tool": name, "params": params}


def _check_rules(name: str, call: Call) -> None:
    """Refuse a call that this run may not make, or not without approval, because of its rules or what it has read.

    When the call is made, in a run of its own, nobody knows any more who wanted it and what its arguments come from. Of
    a tool that makes calls itself, such as execute_code, nobody knows now which these will be.
    """
    policies = (*call.registry.policies, *call.run.scope.policies)
    if not all(policy.permits(name, origin) for policy in policies for origin in (call.origin, Origin.PLAN)):
        raise ToolError(f"{name} cannot be scheduled: this run may not call it", code=ErrorCode.NOT_PERMITTED)
    tool = call.registry.registered(name) if isinstance(call.registry, ToolRegistry) else None
    if tool is not None and tool.options.orchestrates:
        why = "which tools it will call cannot be checked now; schedule the calls themselves"
        raise ToolError(f"{name} cannot be scheduled: {why}", code=ErrorCode.NOT_PERMITTED)
    if tool is None or call.run.scope.is_shared:
        return
    flows = [flow for policy in policies for flow in policy.flows]
    if (found := flow_of(flows, tool.options.sends, call.run.state.labels.names)) is not None:
        raise ToolError(f"{name} cannot be scheduled: {found[1]}", code=ErrorCode.NOT_PERMITTED)


def _the_one(found: Sequence[ScheduledAction], query: str) -> ScheduledAction:
    """Return the only match, or the only one whose whole description is the query."""
    exact = [each for each in found if each.description.casefold() == query.strip().casefold()]
    if len(exact) == 1 or len(found) == 1:
        return (exact or found)[0]
    if not found:
        raise _none(query, [])
    names = ", ".join(each.description for each in found[:MAX_CANDIDATES])
    candidates = [{"id": each.id, "description": each.description} for each in found[:MAX_CANDIDATES]]
    raise ToolError(f"Multiple matches: {names}. Be more specific.", code=AMBIGUOUS, details={"candidates": candidates})


def _none(query: str, every: Sequence[ScheduledAction]) -> ToolError:
    candidates = [{"id": each.id, "description": each.description} for each in every[:MAX_CANDIDATES]]
    text = f'No scheduled action matching "{one_line(query, 200)}".'
    return ToolError(text, code=NOT_FOUND, details={"candidates": candidates})


def _new_rule(schedule: str, time: str, recurrence: str | None, day: str) -> Recurrence:
    """Change a schedule. Days of the old frequency count only as long as the frequency stays."""
    was = parse_recurrence(schedule)
    frequency = recurrence or was.frequency
    kept = was.days if frequency == was.frequency else ""
    return recurrence_of(frequency, time=time.strip() or was.time, day=day.strip() or kept, zone=was.zone)
