"""`start_map`: one script over many inputs, every item once. `ItemRuns` runs each.

It answers an item from the map's file, carries its run on, or begins it; tries again; records it. `MapFile` has which
items have ended. The order of writes keeps every effect from being made twice: the journal of an item's run has each
call before it is made; then that of the map has the item's end; then the former goes.

Whether a call may be made a second time is never decided here. The journal of the item's run answers the calls that
were made, and holds the run at a call in doubt.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import AsyncIterable, Callable, Collection, Iterable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any, Final

import anyio

from toolcell.calls.call import CallableTools, RunContext
from toolcell.control.journaled_calls import RESUMABLE
from toolcell.control.map_stream import (
    OF_THE_MACHINE,
    UNDECIDED,
    MapItem,
    MapPump,
    OnError,
    RunMap,
    had_no_effect,
)
from toolcell.control.resumption import Resumption
from toolcell.control.script_runs import ScriptRuns
from toolcell.errors import ResumeError, SandboxUnavailable, UsageError
from toolcell.journal.database import MAP, RUN, Damaged, OpenJournal, RecordKind, Table
from toolcell.journal.ledger import Journal
from toolcell.journal.store import JournalStore, NoSuchRun
from toolcell.results import ErrorInfo, ExecutionResult, Outcome, Suspension
from toolcell.run.options import NO_OPTIONS, RunKwargs, RunOptions
from toolcell.run.runs import Runs
from toolcell.support import daemon_threads
from toolcell.support.about_tables import tables_text
from toolcell.support.checks import brief, check_count, check_kind, check_one_of
from toolcell.support.packing import bytes_digest, pack, text_digest, unpack, value_digest
from toolcell_bridge.guest.values import to_plain

BEGUN, END = "map", "end"

KEPT_BYTES: Final = 1 << 20
"""Most bytes of one value, as msgpack. A larger one is not kept."""

NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,48}")

_ERROR_FIELDS: Final = tuple(each.name for each in fields(ErrorInfo) if each.name not in ("findings", "frames"))


def item_run(name: str, index: int) -> str:
    """Return the id of the run of an item of a map. It begins with the map's: see `journal.database.OF`."""
    return f"{name}-{index}"


class OtherInputs(UsageError):
    """An item has other inputs than when it began. The message names the item."""


class MapFile:
    """The open journal of a map. Only one process has it open at a time."""

    def __init__(self, store: JournalStore, name: str) -> None:
        self.name = name
        self._database = store.database
        self._file: OpenJournal | None = None
        self.places = array("q")
        """Number of the record with the end of each item, or -1."""
        self.source_sha256: str | None = None
        """Of the script that it began with."""
        self.place = 0
        """Number of the record that was read last."""

    @property
    def ended(self) -> int:
        """Items that had ended before this process."""
        return sum(place >= 0 for place in self.places)

    def open(self, source_sha256: str, resume: bool) -> None:
        """Open or make the journal.

        Raises:
            UsageError: there is a map of that name already, it is under way, damaged, or that of another script.
        """
        try:
            self._database.settle()
            self._file = OpenJournal(self._database, MAP, self.name)
        except (ResumeError, OSError) as exc:
            why = "it is open already, in this or another process" if isinstance(exc, ResumeError) else str(exc)
            raise UsageError(f"map {self.name!r} cannot be opened: {why}") from exc
        try:
            if not (self._file.is_new or resume):
                raise UsageError(
                    f"there is a map {self.name!r} in {self._database.place} already: carry it on with resume=True, "
                    "or take another map_id"
                )
            self._load(source_sha256)
        except BaseException:
            self.close()
            raise

    def _load(self, source_sha256: str) -> None:
        assert self._file is not None
        try:
            self._database.load(MAP, self.name, MAP_RECORDS, self)
        except Damaged as exc:
            raise UsageError(f"map {self.name!r} is damaged ({exc}); take another map_id") from exc
        if self.source_sha256 is None:
            self._write(BEGUN, self.name, source_sha256)
        elif self.source_sha256 != source_sha256:
            raise UsageError(
                f"map {self.name!r} began with another script: carry it on with that one, or take another map_id"
            )

    def _write(self, *record: Any) -> None:
        assert self._file is not None
        try:
            self._file.write(*record)
        except OSError as exc:
            raise UsageError(f"map {self.name!r} cannot be written: {exc}; carry it on later") from exc

    def close(self) -> None:
        """Close it, so that others may open it. Safe to call twice."""
        if self._file is not None:
            self._file.close()
            self._file = None

    # Items

    def recorded(self, index: int, inputs: Mapping[str, Any]) -> MapItem | None:
        """Return an item that has ended, as far as it was kept; None if it has not.

        Raises:
            UsageError: the item had other inputs, or its end cannot be read.
        """
        place = self.places[index] if index < len(self.places) else -1
        if place < 0:
            return None
        assert self._file is not None
        try:
            _, _, digest, outcome, has_value, packed, error = self._database.record(MAP, self.name, place)
            found = Outcome(outcome)
        except (OSError, ValueError) as exc:
            raise UsageError(f"item {index} of map {self.name!r} cannot be read: {exc}") from exc
        self.check_inputs(index, inputs, digest)
        self.remove_run(index)  # its host may have been killed before this
        return MapItem(
            index,
            inputs,
            run_id=item_run(self.name, index),
            outcome=found,
            value=unpack(packed) if isinstance(packed, bytes) else None,
            has_value=has_value,
            error=ErrorInfo(**error) if error else None,
            attempts=0,
            is_recorded=True,
            unkept=f"its value has {packed}, and {KEPT_BYTES} are kept" if isinstance(packed, str) else "",
        )

    def check_inputs(self, index: int, inputs: Mapping[str, Any], digest: str) -> None:
        """Check that an item has the inputs that it began with.

        Raises:
            OtherInputs: it has not.
        """
        if input_digest(inputs) != digest:
            raise OtherInputs(
                f"input {index} of map {self.name!r} is another than before: carry a map on with the same inputs in "
                "the same order, or take another map_id"
            )

    def check_count(self, count: int) -> None:
        """Check that the inputs, which are over, were not fewer than before.

        Raises:
            UsageError: an item that had ended got no input.
        """
        if count < len(self.places):
            raise UsageError(
                f"the inputs of map {self.name!r} ended after {count}, and item {len(self.places) - 1} had ended "
                "before: carry a map on with the same inputs in the same order"
            )

    def write_end(self, item: MapItem) -> None:
        """Record that an item has ended, and remove the journal of its run.

        Raises:
            UsageError: it cannot be written.
        """
        packed: bytes | str | None = pack(item.value) if item.has_value else None
        if isinstance(packed, bytes) and len(packed) > KEPT_BYTES:
            tables = tables_text(item.value)
            packed = f"{len(packed)} bytes, sha256 {bytes_digest(packed)}{f', {tables}' if tables else ''}"
        error = {name: getattr(item.error, name) for name in _ERROR_FIELDS} if item.error is not None else None
        self._write(END, item.index, input_digest(item.inputs), str(item.outcome), item.has_value, packed, error)
        self.remove_run(item.index)

    def has_run(self, index: int) -> bool:
        """Return whether the run of an item has a journal: it has begun, and its end is not recorded."""
        return self._database.last(RUN, item_run(self.name, index)) > 0

    def remove_run(self, index: int) -> None:
        """Remove the journal of a run, which nobody is to carry on."""
        self._database.remove(RUN, item_run(self.name, index))


def _map(found: MapFile, name: str, source_sha256: str) -> None:
    found.source_sha256, found.place = source_sha256, found.place + 1


def _end(found: MapFile, index: int, *_kept: Any) -> None:
    found.place += 1
    if (missing := index + 1 - len(found.places)) > 0:
        found.places.extend([-1] * missing)
    found.places[index] = found.place


MAP_RECORDS: Final[Table] = {
    BEGUN: RecordKind((str, str), _map),
    END: RecordKind((int, str, str, bool, object, object), _end),
}


def input_digest(inputs: Mapping[str, Any]) -> str:
    """Return a short digest of an item's inputs, as they are sent.

    Raises:
        UsageError: they cannot be sent.
    """
    try:
        return value_digest(to_plain(dict(inputs), "inputs"))[:16]
    except (ValueError, TypeError) as exc:
        raise UsageError(str(exc)) from exc


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
        retries: int,
        retry_on: Collection[Outcome | str] | None,
    ) -> None:
        """`options`: of each run. `tools`: what they may call, unchanging.

        Raises:
            UsageError: `retries` or `retry_on` is wrong.
        """
        check_count("retries=", retries, 0)
        self._journals, self._scripts, self._resumption = journals, scripts, resumption
        self._source, self._tools = source, tools
        self._options = replace(options, tools=tools)
        self._retries, self._retry_on = retries, OF_THE_MACHINE if retry_on is None else _outcomes(retry_on)
        self.name = f"map_{os.urandom(4).hex()}"
        self._file: MapFile | None = None

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
            return lambda: None
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
        recorded = await self._journals.call(self._file.recorded, index, inputs) if self._file is not None else None
        if recorded is not None:
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
        return MapItem(
            index,
            inputs,
            run_id=run_id,
            outcome=found.outcome,
            value=found.value,
            has_value=found.has_value,
            error=found.error,
            attempts=attempts,
            result=found,
            suspension=found.suspension,
        )

    async def _begin_item(self, index: int, inputs: Mapping[str, Any], run_id: str) -> ExecutionResult | Suspension:
        """Begin the run of an item, or carry it on; return its result, or what it waits for since an earlier life."""
        context = (self._options.context or RunContext()).within(item=run_id).child(run_id=run_id)
        if self._file is None or not await self._journals.call(self._file.has_run, index):
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
        return await self._scripts.carry_on(journal, self._tools, again, NO_OPTIONS)

    def _record(self, item: MapItem) -> None:
        """Record the end of an item. The journal of its run has done its work."""
        if self._file is not None:
            self._file.write_end(item)
        else:
            self._forget(item)

    def _forget(self, item: MapItem) -> None:
        if item.result is not None:
            self._journals.remove(item.result.journal_id)


def _outcomes(given: Any) -> frozenset[Outcome]:
    """Return the outcomes that are tried again.

    Raises:
        UsageError: one is none, or is not a failure.
    """
    known = {str(each): each for each in Outcome if each not in (Outcome.OK, Outcome.SUSPENDED)}
    if isinstance(given, str) or not isinstance(given, Collection) or not {str(each) for each in given} <= known.keys():
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
    options: Mapping[str, Any] | None,
) -> RunMap:
    """Run a script once for each of many inputs; see `Runtime.map`."""
    check_count("concurrency=", concurrency, 1)
    check_one_of("on_error=", on_error, ("yield", "raise", "stop"))
    for name, flag in (("ordered=", ordered), ("resume=", resume)):
        check_kind(name, flag, bool)
    given = _checked_options(options)
    items = ItemRuns(
        journals,
        scripts,
        resumption,
        source=source,
        tools=runs.tools(given.tools),
        options=given,
        retries=retries,
        retry_on=retry_on,
    )
    if map_id is not None:
        items.keep(map_id)
    elif resume:
        raise UsageError("resume= carries on a map that has a record; pass its map_id= too")
    pump = MapPump(inputs, items.run, items.check_count, concurrency=concurrency, ordered=ordered, on_error=on_error)
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
