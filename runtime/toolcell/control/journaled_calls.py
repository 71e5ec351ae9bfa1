"""The calls of a run with a journal: recorded calls get recorded answers, the others are made."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

import anyio

from toolcell.calls.call import CallableTools, RunContext, decided
from toolcell.calls.options import Origin
from toolcell.calls.result import ToolResult
from toolcell.control.suspension import Suspender, answer_in_doubt
from toolcell.errors import RunEnded
from toolcell.journal.identity import options_of
from toolcell.journal.ledger import Journal
from toolcell.journal.replay import CANCELLED, JournalEntry
from toolcell.results import Divergence, Outcome
from toolcell.run.calls import end_script_alone
from toolcell.tools.registry import answer_from_record

IN_DOUBT_CODE = "in_doubt"


class JournaledCalls:
    """Answers the calls of one run, from its journal or with its tools."""

    def __init__(
        self,
        *,
        tools: CallableTools,
        journal: Journal,
        suspender: Suspender,
        refresh_reads: bool,
        is_rebuilding: bool = False,
    ) -> None:
        """`is_rebuilding`: no call is made, whatever the journal says."""
        self._tools = tools
        self._journal = journal
        self._suspender = suspender
        self._refresh_reads = refresh_reads
        self._is_rebuilding = is_rebuilding
        self._is_first_run = journal.replay is None and not journal.past
        self._lookup = anyio.Lock()
        """Held while a call is looked up in the journal: the first of two identical calls gets the first answer."""
        self._divergence: Divergence | None = None
        """Divergence of a run without a record that makes a call, and must not."""
        self.options = partial(options_of, tools)
        """What is known about a tool, by its name."""
        self.reused = [entry for entry in journal.entries.values() if entry.is_taken_over]
        """Calls that were answered from the journal of a repaired run."""

    async def dispatch(
        self,
        name: str,
        args: Mapping[str, Any] | str,
        *,
        call_id: str = "",
        origin: Origin | None = None,
        context: RunContext | None = None,
    ) -> ToolResult:
        """Answer a call from the journal, or make it.

        Raises:
            ToolAbort: a tool ended the run, the run is suspended, or it diverged.
            AuditError: the call could not be recorded.
        """
        suspender, recorded = self._suspender, None
        suspender.calls_asked += 1
        suspender.active += 1
        try:
            if self._journal.replay is not None:
                async with self._lookup:
                    recorded = await self._journal.recorded(name, args)
            entry, is_known = self._journal.ask(call_id, name, args, recorded), recorded is not None
            if not self._is_first_run:
                answer = await self._recorded_answer(entry, is_known)
                if answer is not None:
                    return await answer_from_record(
                        name,
                        args,
                        answer,
                        run=entry.run or self._journal.run or self._journal.id,
                        facts=_facts(entry),
                        call_id=call_id,
                        origin=origin,
                        context=context,
                    )
            result = await self._tools.dispatch(name, args, call_id=call_id, origin=origin, context=context)
            if result.error is not None:
                entry.is_refused = not result.meta.duration_ms
            return result
        except RunEnded as exc:
            end_script_alone(exc, context)
            raise
        finally:
            suspender.active -= 1

    # Carrying on

    async def _recorded_answer(self, entry: JournalEntry, is_known: bool) -> ToolResult | None:
        """Return the answer that a call has already; None when it is to be made."""
        replay = self._journal.replay
        has_no_answer = entry.answer is None and self._is_rebuilding  # the script ended before it got one
        if replay is not None and is_known and (entry.answer is not None or has_no_answer):
            was_cancelled = entry.answer == CANCELLED or has_no_answer
            return await replay.answer(entry.number, entry, None if was_cancelled else entry.result())
        if replay is not None:
            await replay.wait_for_all(entry)
        if self._is_rebuilding:
            self._refuse_new(entry)
        if entry.is_in_doubt:
            return await answer_in_doubt(entry, self.options(entry.tool, entry.args), self._suspender.hold)
        return None if is_known else await self._repaired_answer(entry)

    def _refuse_new(self, entry: JournalEntry) -> NoReturn:
        index = self._journal.index_of(entry)
        message = f"call {index} of {entry.tool} was not made before, and no call is made to rebuild a state"
        found = Divergence("extra_call", message, index, got={"tool": entry.tool, "args": entry.args})
        if self._journal.replay is not None:
            self._journal.replay.diverge(found)
        self._divergence = self._divergence or found
        raise RunEnded(message, Outcome.DIVERGED)

    @property
    def divergence(self) -> Divergence | None:
        """How the run first differed from its record."""
        replay = self._journal.replay
        return replay.divergence if replay is not None else self._divergence

    # Repair

    async def _repaired_answer(self, entry: JournalEntry) -> ToolResult | None:
        """Return the answer that an identical call got in the repaired run; None when it is to be made."""
        options = self.options(entry.tool, entry.args)
        if options.read_only and self._refresh_reads:
            return None
        async with self._lookup:
            past = await self._journal.take_past(entry.tool, entry.args)
        if past is None:
            return None
        entry.reused = past.number
        if past.is_refused or past.pending is not None:
            return None
        is_repeatable = options.read_only or options.idempotent
        if past.answer and not (is_repeatable and past.is_failed):
            self.reused.append(entry)
            entry.is_refused, entry.is_taken_over, entry.run = False, True, past.run
            return past.result()
        if is_repeatable:
            return None
        entry.is_started = True
        message = f"{entry.tool} was called with these arguments in the run that this one repairs, and it is not known "
        message += "whether it did its work; it was not called again. Find out, or call it with other arguments"
        return ToolResult.fail(message, code=IN_DOUBT_CODE)


def _facts(entry: JournalEntry) -> dict[str, Any]:
    """Return what the record has of a call that is answered from the journal: who decided about it."""
    found = entry.decision
    return {} if found is None or found.kind == "approve" else {"decided": decided(found.kind, found.by, found.why)}
