"""One script over many inputs, every item once."""

from __future__ import annotations

from collections.abc import AsyncIterable, Collection, Iterable, Mapping, Sized
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from toolcell.control.resumption import Resumption
from toolcell.control.script_runs import ScriptRuns
from toolcell.errors import UsageError
from toolcell.journal.store import JournalStore
from toolcell.results import Outcome
from toolcell.run.options import RunKwargs, RunOptions
from toolcell.run.runs import Runs
from toolcell.support.checks import brief, check_count, check_kind, check_one_of

if TYPE_CHECKING:
    from toolcell.control.map_stream import OnError, RunMap

OF_ONE_RUN: Final = frozenset({"cancel", "dry_run", "inputs", "on_log", "on_progress", "refresh", "repairs"})
"""Options of `execute_code` that the runs of a map do not have together."""
OPTIONS: Final = RunKwargs.__annotations__.keys() - OF_ONE_RUN


def start_map(
    runs: Runs,
    journals: JournalStore,
    scripts: ScriptRuns,
    resumption: Resumption,
    source: str,
    inputs: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]],
    *,
    concurrency: int,
    ordered: bool,
    retries: int,
    retry_on: Collection[Outcome | str] | None,
    on_error: OnError,
    map_id: str | None,
    resume: bool,
    progress: bool,
    total: int | None,
    options: Mapping[str, Any] | None,
) -> RunMap:
    """Run a script once for each of many inputs; see `Runtime.map`."""
    from toolcell.control.map_progress import MapProgress
    from toolcell.control.map_runs import ItemRuns
    from toolcell.control.map_stream import MapPump, RunMap

    check_count("concurrency=", concurrency, 1)
    check_count("total=", total, 0, optional=True)
    check_one_of("on_error=", on_error, ("yield", "raise", "stop"))
    for name, flag in (("ordered=", ordered), ("resume=", resume), ("progress=", progress)):
        check_kind(name, flag, bool)
    given = _checked_options(options)
    items = ItemRuns(
        journals,
        scripts,
        resumption,
        source=source,
        tools=runs.tools(given.tools),
        options=given,
    )
    items.try_again(retries, retry_on)
    if map_id is not None:
        items.keep(map_id)
    elif resume:
        raise UsageError("resume= carries on a map that has a record; pass its map_id= too")
    if total is None and isinstance(inputs, Sized):
        total = len(inputs)
    bar = MapProgress(map_id or "map", total) if progress else None
    pump = MapPump(
        inputs, items.run, items.check_count, bar, concurrency=concurrency, ordered=ordered, on_error=on_error
    )
    return RunMap(pump, partial(items.open, resume), runs.task_group)


def _checked_options(options: Mapping[str, Any] | None) -> RunOptions:
    """Return what every run of a map is given.

    Raises:
        UsageError: an option is wrong, or belongs to one run.
    """
    if not isinstance(options, Mapping | None):
        raise UsageError(f"options= takes a dict of arguments of execute_code, not {brief(options)}")
    given = dict(options or {})
    if unknown := sorted(map(str, given.keys() - OPTIONS)):
        raise UsageError(f"options= has {', '.join(unknown)}; every run of a map may have {', '.join(sorted(OPTIONS))}")
    return RunOptions(**given)
