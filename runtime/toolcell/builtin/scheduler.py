"""`Scheduler`: make the calls of scheduled actions when they are due, at most once each, from any number of processes.

An action that is due goes through these steps. A store does each of them as a whole or not at all.

1. `begin_run`: the run of this action and due time is written down. Only one process can do it.
2. `reschedule`: the action gets its next due time, unless it was paused, changed or deleted in the meantime.
3. `execute_plan`: the calls are made. Meanwhile the lease of the run is extended again and again.
4. `end_run`: what came of it is written down.

A process that dies after step 1 leaves a run whose lease ends. Another process then reports that run as in doubt:
its calls were made, or not, or in part. They are not made again.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import anyio
from anyio.abc import TaskGroup

from toolcell.builtin.recurrence import Recurrence, check_dates, parse_recurrence
from toolcell.builtin.schedule import planned_calls
from toolcell.builtin.stores.protocols import STORES, ScheduleStore
from toolcell.builtin.stores.records import RunStatus, ScheduledAction, ScheduledRun
from toolcell.calls.concurrency import maybe_await
from toolcell.calls.result import to_json
from toolcell.errors import StoreError, UsageError
from toolcell.support.checks import brief, check_count, check_does, check_kind, check_one_of, check_seconds
from toolcell.support.log import logger_of
from toolcell.support.text import cut_text
from toolcell.tools import RunContext

logger = logger_of("toolcell.schedule")

MissedPolicy = Literal["run_once", "skip"]
Rows = list[dict[str, Any]]

MAX_ROW_CHARS = 2_000
"""Most characters of one result in the history."""
STALE_RUNS = 100
"""Runs of an action that are looked through for the one of a due time."""
LEASE_EXTENSIONS = 3
"""How often a lease is extended before it would end."""
STORE_S = 10.0
"""What the store may take to note the end of a run that was cancelled."""


class PlanRuntime(Protocol):
    """What a scheduler needs of a `Runtime`."""

    async def execute_plan(self, steps: Sequence[Mapping[str, Any]], *, context: RunContext) -> Rows:
        """Make the calls, and return one row for each."""
        ...

    def check_open(self) -> None:
        """Raise while it can make no call: an action that was begun then would be missed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    missed: MissedPolicy = "run_once"
    """What is done about an action that is late by more than `grace_s`, because nothing was running when it was due:
    `run_once` makes it now, once, however many due times have passed; `skip` waits for the next due time."""
    grace_s: float = 60.0
    jitter_s: float = 0.0
    """An action is made up to so many seconds late: always as many for the same action and due time."""
    lease_s: float = 60.0
    """A run whose lease was not extended for so long is in doubt."""
    poll_s: float = 5.0
    """How often the store is asked what is due."""
    concurrency: int = 4
    """Actions that are made at once."""

    def __post_init__(self) -> None:
        check_one_of("missed", self.missed, ("run_once", "skip"))
        for name in ("grace_s", "jitter_s", "lease_s", "poll_s"):
            check_seconds(name, getattr(self, name))
        for name in ("lease_s", "poll_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name} must be a finite number of seconds above 0, not {getattr(self, name)}")
        check_count("concurrency", self.concurrency, 1)


OnRun = Callable[[ScheduledRun, ScheduledAction | None, Rows], Awaitable[None] | None]
"""Called with each run that this scheduler ended or found in doubt: the place to deliver results.

The rows are those of its plan; there are none of a run that was missed or is in doubt. The action is None of a run that
another process began.
"""


class Scheduler:
    """Runs due actions of a store through a runtime, with its policies, quotas and audit log."""

    def __init__(
        self,
        runtime: PlanRuntime,
        store: ScheduleStore,
        config: SchedulerConfig | None = None,
        *,
        on_run: OnRun | None = None,
        context_of: Callable[[ScheduledAction], RunContext] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`context_of`: for whom an action is made, such as `RunContext(user_id=...)`; its `run_id` is replaced.

        Raises:
            UsageError: an argument is of another kind.
        """
        check_dates()
        if not inspect.iscoroutinefunction(getattr(runtime, "execute_plan", None)):
            raise UsageError(f"Scheduler takes a Runtime and a store, not {brief(runtime)}; a SyncRuntime will not do")
        check_does("Scheduler(store)", store, ScheduleStore, STORES)
        check_kind("Scheduler(config)", config, SchedulerConfig, type(None))
        for name, function in (("on_run", on_run), ("context_of", context_of)):
            if function is not None and not callable(function):
                raise UsageError(f"Scheduler({name}) must be a function, not {brief(function)}")
        self._runtime = runtime
        self._store = store
        self.config = config or SchedulerConfig()
        self._on_run = on_run
        self._context_of = context_of
        self._clock = clock
        self.owner = f"{socket.gethostname()[:60]}:{os.getpid()}:{os.urandom(4).hex()}"
        """This scheduler, in the history."""

    async def run(self, stop: anyio.Event | None = None) -> None:
        """Run actions as they become due, until cancelled, or until `stop` is set and current runs have ended.

        A store that cannot be reached is tried again; what became due meanwhile is then late.

        Raises:
            Misconfigured: the runtime is not open.

        Cancellation: runs under way are cut short and written down as in doubt.
        """
        self._runtime.check_open()
        stop = stop or anyio.Event()
        places = anyio.CapacityLimiter(self.config.concurrency)
        async with anyio.create_task_group() as group:
            while not stop.is_set():
                try:
                    ready = await self._ready([])
                except StoreError as exc:
                    logger.warning("cannot read what is due, trying again in %g s: %s", self.config.poll_s, exc)
                else:
                    await self._start(ready, group, places, [], stop)
                with anyio.move_on_after(self.config.poll_s):
                    await stop.wait()

    async def run_due(self) -> list[ScheduledRun]:
        """Run everything that is due now, and return the runs, including those found in doubt.

        Raises:
            StoreError: the store cannot be read.
            Misconfigured: the runtime is not open.

        Cancellation: as of `run`.
        """
        self._runtime.check_open()
        ended: list[ScheduledRun] = []
        ready = await self._ready(ended)
        async with anyio.create_task_group() as group:
            await self._start(ready, group, anyio.CapacityLimiter(self.config.concurrency), ended, anyio.Event())
        return ended

    async def _ready(self, ended: list[ScheduledRun]) -> list[ScheduledAction]:
        """Return the actions to make now. Runs whose process has died are added to `ended`."""
        now = int(self._clock())
        for run in await self._store.expire_runs(now):
            logger.warning("run %s of action %s is in doubt: %s has died or hangs", run.id, run.action_id, run.owner)
            ended.append(run)
            await self._deliver(run, None, [])
        due = await self._store.get_due_scheduled_actions(now)
        return [action for action in due if action.next_run + self.delay_of(action) <= now]

    async def _start(
        self,
        ready: Sequence[ScheduledAction],
        group: TaskGroup,
        places: anyio.CapacityLimiter,
        ended: list[ScheduledRun],
        stop: anyio.Event,
    ) -> None:
        for action in ready:
            place = object()
            await places.acquire_on_behalf_of(place)
            if stop.is_set():
                places.release_on_behalf_of(place)
                return
            group.start_soon(self._take_place, action, places, place, ended)

    async def _take_place(
        self, action: ScheduledAction, places: anyio.CapacityLimiter, place: object, ended: list[ScheduledRun]
    ) -> None:
        try:
            run = await self._take(action)
        except (StoreError, UsageError) as exc:  # it stays due, or its lease ends
            logger.warning("action %s could not be begun or ended: %s", action.id, exc)
        else:
            if run is not None:
                ended.append(run)
        finally:
            places.release_on_behalf_of(place)

    def delay_of(self, action: ScheduledAction) -> float:
        """Return the jitter of an action's next due time, in seconds: the same in every process."""
        digest = hashlib.sha256(f"{action.id}:{action.next_run}".encode()).digest()
        return self.config.jitter_s * int.from_bytes(digest[:6], "big") / 2**48

    # One action

    async def _take(self, action: ScheduledAction) -> ScheduledRun | None:
        """Make an action if no other process does; None when one does or did."""
        self._runtime.check_open()
        now = int(self._clock())
        run = ScheduledRun(
            action_id=action.id,
            due_at=action.next_run,
            owner=self.owner,
            lease_until=now + math.ceil(self.config.lease_s),
            started_at=now,
        )
        if not await self._store.begin_run(run):
            await self._move_on(action, now)
            return None
        try:
            rule = parse_recurrence(action.schedule)
            steps = planned_calls(action.tool_calls)
        except UsageError as exc:
            await self._store.reschedule(action.id, action.next_run, action.next_run, False)
            return await self._end(action, run, "failed", f"paused: {exc}")
        if not await self._reschedule(action, rule, now):
            return await self._end(action, run, "missed", "paused, changed or deleted before it began")
        late_s = now - action.next_run - self.delay_of(action)
        if self.config.missed == "skip" and late_s > self.config.grace_s:
            return await self._end(action, run, "missed", f"{late_s:.0f} s late")
        return await self._make(action, run, steps)

    async def _reschedule(self, action: ScheduledAction, rule: Recurrence, now: int) -> bool:
        """Give an action its next due time. One that is made once stays, paused."""
        if rule.frequency == "once":
            return await self._store.reschedule(action.id, action.next_run, action.next_run, False)
        next_run = rule.next_after(max(now, action.next_run))
        return await self._store.reschedule(action.id, action.next_run, next_run, True)

    async def _move_on(self, action: ScheduledAction, now: int) -> None:
        """Give an action its next due time when the run of this one is over, and its process died before it could."""
        runs = await self._store.list_runs(action.id, limit=STALE_RUNS)
        if any(run.due_at == action.next_run and run.status != "running" for run in runs):
            try:
                await self._reschedule(action, parse_recurrence(action.schedule), now)
            except UsageError:
                await self._store.reschedule(action.id, action.next_run, action.next_run, False)

    async def _make(self, action: ScheduledAction, run: ScheduledRun, steps: Rows) -> ScheduledRun:
        context = self._context_of(action) if self._context_of is not None else RunContext()
        context = context.child(run_id=run.id, custom={**context.custom, "scheduled_action": action.id})
        rows: Rows = []
        status: RunStatus = "in_doubt"
        detail = "cut short: the scheduler was stopped"
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._keep_lease, run)
                try:
                    rows = await self._runtime.execute_plan(steps, context=context)
                    status, detail = status_of(rows), detail_of(rows)
                except UsageError as exc:  # nothing was made
                    status, detail = "failed", str(exc)
                except Exception as exc:  # a tool ended the run, or the audit log could not be written
                    logger.warning("action %s was cut short", action.id, exc_info=exc)
                    detail = f"cut short: {type(exc).__name__}: {exc}"
                group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(STORE_S):
                ended = await self._note_end(run, status, detail)
        await self._deliver(ended, action, rows)
        return ended

    async def _keep_lease(self, run: ScheduledRun) -> None:
        while True:
            await anyio.sleep(self.config.lease_s / LEASE_EXTENSIONS)
            try:
                if not await self._store.extend_run(run.id, int(self._clock()) + math.ceil(self.config.lease_s)):
                    logger.warning("run %s was reported as in doubt while it was being made", run.id)
                    return
            except StoreError as exc:
                logger.warning("the lease of run %s could not be extended: %s", run.id, exc)

    async def _end(self, action: ScheduledAction, run: ScheduledRun, status: RunStatus, detail: str) -> ScheduledRun:
        """End a run without making its calls."""
        ended = await self._note_end(run, status, detail)
        await self._deliver(ended, action, [])
        return ended

    async def _note_end(self, run: ScheduledRun, status: RunStatus, detail: str) -> ScheduledRun:
        ended_at = int(self._clock())
        detail = detail.replace("\0", "\\0").encode("utf-8", "replace").decode()
        if not await self._store.end_run(run.id, status, ended_at, detail):
            logger.warning("run %s had been reported as in doubt before it ended: %s", run.id, status)
            status = "in_doubt"
        return replace(run, status=status, ended_at=ended_at, detail=detail)

    async def _deliver(self, run: ScheduledRun, action: ScheduledAction | None, rows: Rows) -> None:
        if self._on_run is None:
            return
        try:
            await maybe_await(self._on_run(run, action, rows))
        except Exception:
            logger.exception("on_run failed for action %s", run.action_id)


def status_of(rows: Rows) -> RunStatus:
    """Return how a run ended: `done` when every call succeeded."""
    return "done" if all(row.get("status") == "ok" for row in rows) else "failed"


def detail_of(rows: Rows) -> str:
    """Return the rows of a plan for the history.

    Shape: JSON of [{"tool", "status", "result" or "error": text}]. Long texts are cut.
    """
    told = []
    for row in rows:
        key = "error" if "error" in row else "result"
        content = row.get(key)
        text = content if isinstance(content, str) else to_json(content)
        told.append({"tool": row.get("tool"), "status": row.get("status"), key: cut_text(text, MAX_ROW_CHARS)[0]})
    return json.dumps(told, ensure_ascii=False)
