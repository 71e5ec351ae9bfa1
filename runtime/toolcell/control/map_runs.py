"""`start_map`: one script over many inputs, every item once. `ItemRuns` runs each.

It answers an item from the map's file, carries its run on, or begins it; tries again; records it.

Whether a call may be made a second time is never decided here. The journal of the item's run answers the calls that
were made, and holds the run at a call in doubt.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, Callable, Collection, Iterable, Mapping, Sized
from dataclasses import replace
from functools import partial
from typing import Any, Final

import anyio

from toolcell.calls.call import CallableTools, RunContext
from toolcell.control.journaled_calls import RESUMABLE
from toolcell.control.map_file import NAME, MapFile, OtherInputs, input_digest, item_run
from toolcell.control.map_stream import (
    OF_THE_MACHINE,
    UNDECIDED,
    MapItem,
    MapProgress,
    MapPump,
    OnError,
    RunMap,
    had_no_effect,
    item_of,
)
from toolcell.control.resumption import Resumption
from toolcell.control.script_runs import ScriptRuns
from toolcell.errors import SandboxUnavailable, UsageError
from toolcell.journal.ledger import Journal
from toolcell.journal.store import JournalStore, NoSuchRun
from toolcell.results import ErrorInfo, ExecutionResult, Outcome, Suspension
from toolcell.run.options import NO_HANDLERS, RunKwargs, RunOptions
from toolcell.run.runs import Runs
from toolcell.support import daemon_threads
from toolcell.support.checks import brief, check_count, check_kind, check_one_of
from toolcell.support.packing import text_digest

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
"""Before another attempt. Each pause is twice as long as the one before."""


class ItemRuns:
    """Runs the items of one map."""

    def __init__(
        self,
        journals: JournalStore,
        scripts: ScriptRuns,
        resumption: Resumption,
        *,
        source: str,
        tools: CallableTools,
        options: RunOptions,
    ) -> None:
        """`options`: of each run. `tools`: what they may call, unchanging."""
        self._journals, self._scripts, self._resumption = journals, scripts, resumption
        self._source, self._tools = source, tools
        self._options = replace(options, tools=tools)
        self._retries = 0
        self._retry_on: frozenset[Outcome] = OF_THE_MACHINE
        self.name = f"map_{os.urandom(4).hex()}"
        self._file: MapFile | None = None

    def try_again(self, retries: int, outcomes: Collection[Outcome | str] | None) -> None:
        """Set how often an item is tried again, and after which outcomes.

        Raises:
            UsageError: one of them is wrong.
        """
        check_count("retries=", retries, 0)
        self._retries = retries
        if outcomes is not None:
            self._retry_on = _outcomes(outcomes)

    def keep(self, name: str) -> None:
        """Keep what has ended in the record of the Runtime.

        Raises:
            UsageError: there is none, or the name is none.
        """
        if not NAME.fullmatch(str(name)):
            raise UsageError(f"map_id= must be 1 to 48 letters, digits, '_' or '-', not {brief(name)}")
        if not self._journals.is_durable:
            raise UsageError("map_id= needs a record: use a Runtime(record=FILE)")
        self.name = name
        self._file = MapFile(self._journals, name)

    async def open(self, resume: bool) -> Callable[[], None]:
        """Open the record, if there is one, and return what closes it.

        Raises:
            UsageError: it cannot be used.
        """
        file = self._file
        if file is None:
            return _nothing
        await daemon_threads.run_sync(file.open, text_digest(self._source), resume)
        return file.close

    def check_count(self, count: int) -> None:
        """Check the number of all inputs, when they are over.

        Raises:
            UsageError: there were more when the map began.
        """
        if self._file is not None:
            self._file.check_count(count)

    # One item

    async def run(self, index: int, inputs: Mapping[str, Any]) -> MapItem:
        """Return what becomes of an item.

        Raises:
            UsageError: its inputs cannot be sent, or are not those it began with; or the record cannot be written.
            AuditError: its run could not be recorded.
        """
        if self._file is not None and (recorded := self._file.recorded(index, inputs)) is not None:
            return recorded
        attempts, pause_s, begun = 1, FIRST_PAUSE_S, None
        while not self._is_over(item := await self._attempt(index, inputs, attempts)):
            if self._file is None:
                self._forget(item)
            elif not self._is_carried_on(item):
                self._file.remove_run(index)  # nothing of it was done: it begins anew
            begun = item if item.result is not None else begun
            await anyio.sleep(pause_s)
            attempts, pause_s = attempts + 1, min(2 * pause_s, LONGEST_PAUSE_S)
        if item.outcome is Outcome.UNAVAILABLE and begun is not None:  # the last attempts got no sandbox
            item = replace(begun, attempts=attempts)  # whose result has the calls that were made
        if item.outcome not in UNDECIDED:
            self._record(item)
        return item

    def _is_over(self, item: MapItem) -> bool:
        """Return whether an item is not tried again."""
        if item.outcome not in self._retry_on or item.attempts > self._retries:
            return True
        return not (self._is_carried_on(item) or had_no_effect(item.result, self._tools))

    def _is_carried_on(self, item: MapItem) -> bool:
        """Return whether the next attempt goes on where this one ended: its calls are answered from its journal."""
        return self._file is not None and (item.outcome in RESUMABLE or item.result is None)

    async def _attempt(self, index: int, inputs: Mapping[str, Any], attempts: int) -> MapItem:
        run_id = item_run(self.name, index)
        try:
            found = await self._begin_item(index, inputs, run_id)
        except OtherInputs:
            raise
        except UsageError as exc:
            raise UsageError(f"input {index} of the map: {exc}") from exc
        except SandboxUnavailable as exc:
            error = ErrorInfo(type(exc).__name__, str(exc))
            return MapItem(index, inputs, run_id, Outcome.UNAVAILABLE, error=error, attempts=attempts)
        if isinstance(found, Suspension):
            return MapItem(index, inputs, run_id, Outcome.SUSPENDED, attempts=attempts, suspension=found)
        return item_of(index, inputs, run_id, attempts, found)

    async def _begin_item(self, index: int, inputs: Mapping[str, Any], run_id: str) -> ExecutionResult | Suspension:
        """Begin the run of an item, or carry it on; return its result, or what it waits for since an earlier life."""
        context = (self._options.context or RunContext()).within(item=run_id).child(run_id=run_id)
        if self._file is None or not self._file.has_run(index):
            return await self._scripts.execute(self._source, replace(self._options, inputs=inputs, context=context))
        digest, file = input_digest(inputs), self._file

        def check(journal: Journal) -> None:
            file.check_inputs(index, journal.header["inputs"], digest)

        if isinstance(waits := await daemon_threads.run_sync(self._journals.waiting, run_id), Suspension):
            return waits
        try:
            journal = await self._resumption.take(run_id, None, self._tools, check, even_ended=True)
        except NoSuchRun:  # its host was killed before it began
            file.remove_run(index)
            return await self._begin_item(index, inputs, run_id)
        again = context.child(run_id=f"{run_id}.{os.urandom(4).hex()}")
        return await self._scripts.carry_on(journal, self._tools, again, NO_HANDLERS)

    def _record(self, item: MapItem) -> None:
        """Record the end of an item. The journal of its run has done its work."""
        if self._file is not None:
            self._file.write_end(item)
        else:
            self._forget(item)

    def _forget(self, item: MapItem) -> None:
        if item.result is not None:
            self._journals.remove(item.result.journal_id)


def _nothing() -> None:
    """Close no file."""


def _outcomes(given: Collection[Outcome | str]) -> frozenset[Outcome]:
    """Return the outcomes that are tried again.

    Raises:
        UsageError: one is none, or is not a failure.
    """
    known = {str(each): each for each in Outcome if each not in (Outcome.OK, Outcome.SUSPENDED)}
    if isinstance(given, str) or not {str(each) for each in given} <= known.keys():
        raise UsageError(
            f"retry_on= takes outcomes of failures ({', '.join(sorted(known))}) in a set, not {brief(given)}"
        )
    return frozenset(known[str(each)] for each in given)


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
