"""`toolcell schedule`: list scheduled actions and their runs, and make what is due."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import anyio
import typer

from toolcell.builtin.schedule import as_value, local_time
from toolcell.builtin.scheduler import MissedPolicy, Scheduler, SchedulerConfig
from toolcell.builtin.stores.protocols import ScheduleStore
from toolcell.builtin.stores.records import RunStatus, ScheduledAction, ScheduledRun
from toolcell.cli import exits
from toolcell.cli.builtin import BuiltinFlags, StorePlace, open_store, opened_dependencies
from toolcell.cli.execution import Watch, run_watched
from toolcell.cli.flags import AsJson, group
from toolcell.cli.run import RuntimeFlags
from toolcell.cli.terminal import print_json, safe, stderr, stdout, table
from toolcell.config import Limits
from toolcell.errors import UsageError
from toolcell.support.text import one_line

SUMMARY = """Tool calls at certain times.

A model or a script schedules them with the built-in package schedule. `toolcell schedule run` runs the actions that are
due, in any number of processes: each runs at most once per due time.
"""
MAX_DETAIL_CHARS = 100

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SchedulerFlags:
    """Flags for `SchedulerConfig`."""

    missed: Annotated[
        MissedPolicy, typer.Option("--missed", metavar="run_once|skip", help="What to do about an action that is late.")
    ] = "run_once"
    grace_s: Annotated[float, typer.Option("--grace-s", help="Seconds that an action may be late.")] = 60.0
    jitter_s: Annotated[float, typer.Option("--jitter-s", help="Delay each run by up to this many seconds.")] = 0.0
    lease_s: Annotated[
        float, typer.Option("--lease-s", help="Seconds after which a dead process's run is in doubt.")
    ] = 60.0
    poll_s: Annotated[float, typer.Option("--poll-s", help="Seconds between two looks at the store.")] = 5.0
    concurrency: Annotated[int, typer.Option("--concurrency", help="Actions that run at once.")] = 4

    def config(self) -> SchedulerConfig:
        """Return the settings.

        Raises:
            UsageError: a value is out of range.
        """
        return SchedulerConfig(**asdict(self))


def list_actions(store: StorePlace = None, as_json: AsJson = False) -> None:
    """List the scheduled actions: when, what, and whether they are active. Times are local to each schedule."""
    actions = _ask(store, lambda opened: opened.list_scheduled_actions())
    if as_json:
        print_json([as_value(action) for action in actions])
        return
    if not actions:
        stderr().print("no scheduled actions")
        return
    shown = table("next", "state", "schedule", "description")
    for action in sorted(actions, key=lambda each: (not each.enabled, each.next_run)):
        state = safe("active", "green") if action.enabled else safe("paused", "dim")
        shown.add_row(safe(local_time(action)), state, safe(action.schedule), safe(one_line(action.description)))
    stdout().print(shown)


def history(
    store: StorePlace = None,
    *,
    status: Annotated[RunStatus | None, typer.Option("--status", help="Only runs with this status.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="Show at most this many.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List runs of due actions, the latest first. A run has the same id in the audit log."""
    runs = _ask(store, lambda opened: opened.list_runs(status=status or "", limit=limit))
    if as_json:
        print_json([asdict(each) for each in runs])
        return
    shown = table("due (UTC)", "status", "run", "detail")
    for each in runs:
        told = safe(one_line(short_detail(each.detail), MAX_DETAIL_CHARS))
        shown.add_row(_utc(each.due_at), _status(each), safe(each.id), told)
    stdout().print(shown)


def run(
    once: Annotated[bool, typer.Option("--once", help="Run the actions that are due now, and end.")] = False,
    *,
    scheduling: SchedulerFlags,
    settings: RuntimeFlags,
    builtins: BuiltinFlags,
    limits: Limits,
    as_json: Annotated[bool, typer.Option("--json", help="Write one line of JSON for each run.")] = False,
) -> None:
    """Run scheduled actions when they are due, with the tools of --tools and --builtin.

    Ctrl-C waits for current runs; a second one ends them, and they are then in doubt. With --once the exit status is 1
    if a run failed or is in doubt.
    """
    config = scheduling.config()
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        options = settings.options(builtins) | {"limits": limits}
    if options["registry"] is None:
        raise UsageError("no tools to call: give them with --tools FILE or --builtin PACKAGE")
    store, out = open_store(builtins.store), sys.stdout
    shown: list[ScheduledRun] = []

    def show(made: ScheduledRun, action: ScheduledAction | None, rows: Any) -> None:
        shown.append(made)
        what = action.description if action is not None else ""
        if as_json:
            out.write(json.dumps(asdict(made) | {"description": what}) + "\n")
            out.flush()
        else:
            told = safe(one_line(what or f"action {made.action_id}", MAX_DETAIL_CHARS))
            stdout().print(safe(_utc(made.ended_at)), _status(made), told, soft_wrap=True)

    async def work(watch: Watch) -> None:
        from toolcell.runtime import Runtime

        async with opened_dependencies(), Runtime(**options) as runtime:
            scheduler = Scheduler(runtime, store, config, on_run=show)
            watch.doing = "running"
            await (scheduler.run_due() if once else scheduler.run(watch.cancel))

    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():  # tools may print too
        run_watched(work)
    if once and any(made.status in ("failed", "in_doubt") for made in shown):
        raise typer.Exit(exits.FAILED)


def short_detail(detail: str) -> str:
    """Return the results in a run's detail as text; a detail that is something else stays as it is."""
    try:
        rows = json.loads(detail)
        return "; ".join(f"{row['tool']}: {row.get('error') or row.get('result')}" for row in rows)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return detail


def _ask(place: str | None, question: Callable[[ScheduleStore], Awaitable[T]]) -> T:
    """Open a store for one question."""

    async def ask() -> T:
        async with opened_dependencies():
            return await question(open_store(place, must_exist=True))

    return anyio.run(ask)


_STYLES = {"done": "green", "failed": "red", "in_doubt": "yellow", "missed": "yellow"}


def _status(made: ScheduledRun) -> Any:
    return safe(made.status, _STYLES.get(made.status, ""))


def _utc(moment: int) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M:%S")


register = group(SUMMARY, {"list": list_actions, "history": history, "run": run})
