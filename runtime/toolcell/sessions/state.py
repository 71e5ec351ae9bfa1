"""`SessionState`: the sandbox of a session, the journal of its scripts, and how the one is rebuilt from the other."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import anyio

from toolcell.calls.call import OUTERMOST_SCOPE, CallableTools, RunContext
from toolcell.calls.run_state import RunLink
from toolcell.config import Limits, OnApproval
from toolcell.control.dry_runs import DryRuns
from toolcell.control.journaled_calls import JournaledCalls
from toolcell.control.resumption import Resumption
from toolcell.control.script_header import continued_context, script_of
from toolcell.control.script_runs import ScriptChecks
from toolcell.control.type_check import ANYTHING_EARLIER, Earlier, earlier_scripts
from toolcell.errors import QuotaExceeded, SessionError
from toolcell.flows import Labels
from toolcell.journal.ledger import Journal
from toolcell.journal.store import JournalStore
from toolcell.results import ErrorInfo, ExecutionResult, Outcome, SessionReport
from toolcell.run.connection import GuestConnection
from toolcell.run.options import RunOptions
from toolcell.run.outcome import Aborted, leftover_names
from toolcell.run.run import Run, Script
from toolcell.run.runs import Runs
from toolcell.sessions.journal import (
    NO_HISTORY,
    REPEATED_BYTES,
    History,
    SessionJournal,
    SessionScript,
    context_again,
    difference,
    let_rebuild,
)
from toolcell.sessions.kept_state import KeptState, StateFile, keeping_script, loading_script, not_in_it
from toolcell.sessions.meter import SessionMeter
from toolcell.sessions.settings import Restores, SessionSettings
from toolcell.support import daemon_threads
from toolcell.support.host_work import LONG_BYTES
from toolcell.support.log import logger_of
from toolcell_bridge.wire.frozen import replaced
from toolcell_bridge.wire.messages import Stay

END_MS = 50
"""How long threads that a script left running have to end."""

Began = Literal["new", "live", "value", "journal", "empty"]

PAUSE_S = 1.0
"""After so long without a script the sandbox is paused. Scripts in a row need not wait for it."""

WATCH_S = 0.1
"""An idle sandbox that has nearly used up its CPU time is measured so often."""

PROCESSORS = os.cpu_count() or 1


logger = logger_of("toolcell.sessions")

FINISH = "from toolcell_bridge.guest import script_end\nscript_end.end_session()"
FINISH_S = 5.0
"""What exit hooks may take. Whoever closes a session waits for them."""

STUCK = "the script did not end when it was interrupted"
"""Why a sandbox was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionHost:
    """What the sessions of one runtime have in common."""

    runs: Runs
    journals: JournalStore
    checks: ScriptChecks
    dry_runs: DryRuns
    resumption: Resumption


class SessionState:
    """What scripts of a session leave to each other. One script at a time; the session sees to that."""

    def __init__(
        self,
        ident: str,
        host: SessionHost,
        limits: Limits,
        settings: SessionSettings,
        make_room: Callable[[], Awaitable[None]],
        history: History = NO_HISTORY,
        labels: Iterable[str] = (),
    ) -> None:
        self._id, self._host, self._limits, self.settings = ident, host, limits, settings
        self._make_room = make_room
        self.is_closing = False
        self.connection: GuestConnection | None = None
        self._meter: SessionMeter
        """Of its sandbox, while there is one."""
        self._base = history.base
        """The state by value from which `steps` go on; None: they begin with the first script."""
        self.kept_state = history.kept_state
        """The latest state by value."""
        self.steps = list(history.steps)
        self._steps_bytes = sum(step.size() for step in self.steps)
        self._unkept: list[Script] = []
        """Scripts that have left their state in the sandbox, where no journal keeps them."""
        self._last_context = history.context
        """For whom the last script ran: so does keeping its state, and bringing it back."""
        self.position = history.position
        """Number of scripts whose state there is, or was."""
        self.labels = Labels(labels)
        """Labels of everything that the scripts have read. No script can shed them, and what they read is in the
        sandbox."""
        self.lost = ""
        """Why the sandbox was lost; empty again when there is another one."""
        self.not_repeatable = ""
        """Why the state cannot be rebuilt."""
        self._forgotten: tuple[str, ...] = ()
        """What the state lacks that was brought back last."""
        self.journal = SessionJournal(ident, host.journals)
        self._ended_cpu_s = 0.0
        """CPU seconds of sandboxes that are gone."""
        self.used_calls = 0
        self.idle_since: float | None = None
        """On the event loop's clock; None while there is no sandbox or a script runs."""
        self.look_at = math.inf
        """When an idle sandbox is to be looked at, on the same clock."""
        self.is_paused = False
        self._has_hooks = False
        """Exit hooks or destructors of scripts wait for the end of the session."""

    async def open_record(self, restores: Restores) -> bool:
        """Open the file of the session, if it has one. Return whether there is a state in it to go on from.

        Raises:
            SessionError: it is open elsewhere, or damaged.
            UsageError: there is none, and it is to be restored.
        """
        if not self._host.journals.is_durable or self.settings.restore != "journal":
            return False
        kept = await daemon_threads.run_sync(self.journal.open, restores)  # it may be long
        if kept is None:
            await daemon_threads.run_sync(self._note_history)  # of a session that this one was forked from
            if self.labels.names:
                self._note_used()
            return False
        self.steps, self.position, self.not_repeatable = kept.steps, kept.position, kept.not_repeatable
        self._base, self.kept_state = kept.base, kept.kept_state
        self._steps_bytes = sum(step.size() for step in self.steps)
        self.labels.add(kept.labels)
        self._ended_cpu_s, self.used_calls = kept.cpu_s, kept.calls
        return bool(self.position or self.journal.waiting)

    def _note_history(self) -> None:
        if self._base is not None:
            self.journal.note_state(self._base, is_base=True)
        self.steps = [self.journal.note_copy(step, self.labels.names) for step in self.steps]
        if self.kept_state is not None:
            is_base = self._base is not None and self._base.position == self.kept_state.position
            if not is_base:
                self.journal.note_state(self.kept_state, is_base=False)

    @property
    def history(self) -> History:
        """From what another session can rebuild the state."""
        return History(self._base, self.kept_state, tuple(self.steps), self._last_context)

    # Running.

    async def run(
        self,
        script: Script,
        tools: CallableTools,
        context: RunContext | None,
        options: RunOptions,
        on_approval: OnApproval,
    ) -> ExecutionResult:
        """Run a script, and keep what is needed to repeat it."""
        self.journal.check_free()
        if on_approval == "suspend":
            self.check_repeatable()  # else nothing could carry it on
        if self.connection is None or not self.connection.is_usable:
            self._remaining_limits(script.limits, self.used_cpu_s)  # nothing is started for a script that may not run
        began = await self.bring_up(context, tools)
        self._last_context = context
        limits = self._remaining_limits(script.limits, self._begin_script())
        seed, clock = self._host.runs.seed_and_clock(None, None, self.settings.restore == "journal")
        number = self.position + 1
        seed = seed if number == 1 else None
        script = replaced(script, limits=limits, seed=seed, clock=clock, number=number)
        context = self._context(context, str(number))
        run = await self._host.runs.prepare(script, tools, context, options=options)
        journal = self.journal.journal(run.message, script, tools, on_approval, context)
        return await self._conduct(run, journal, on_approval, began, context)

    def earlier(self) -> Earlier:
        """What the scripts until now have left."""
        if self.settings.restore != "journal":
            return earlier_scripts(self._unkept)
        is_whole = len(self.steps) == self.position
        return earlier_scripts([step.script for step in self.steps]) if is_whole else ANYTHING_EARLIER

    async def carry_on(
        self, journal: Journal, tools: CallableTools, context: RunContext | None, options: RunOptions, began: Began
    ) -> ExecutionResult:
        """Run a script again that waited, on its journal. The state before it is there."""
        number = self.position + 1
        journal.begin_again()
        has_begun = False
        context = continued_context(journal, context)
        self.journal.waiting, self._last_context = "", context
        try:
            script = script_of(journal.header, number)
            script = replace(script, limits=self._remaining_limits(script.limits, self._begin_script()))
            context = self._context(context, str(number))
            run = await self._host.runs.prepare(script, tools, context, journal.link, options)
            has_begun = True
            journal.share_labels(run.context.state.labels)
            return await self._conduct(run, journal, journal.header["on_approval"], began, context)
        finally:
            if not has_begun:  # its token is used, and it has its decisions: it waits to be carried on by its id
                self._host.journals.put_down(journal)
                self.journal.waiting = journal.id

    async def _conduct(
        self, run: Run, journal: Journal, on_approval: OnApproval, began: Began, context: RunContext
    ) -> ExecutionResult:
        """Run a script in the sandbox, and record what became of it. `context`: the caller's."""
        script = run.script
        store = self._host.journals
        run.join(JournaledCalls(run, store=store, journal=journal, on_approval=on_approval, ends_journal=False))
        forgotten = self._forgotten if began == "value" else ()
        connection = self.connection
        assert connection is not None
        try:
            result = await self._execute(run)
        except BaseException:  # it made these calls all the same
            self.used_calls += len(journal.entries)
            self._note_used()
            self.journal.conclude(journal, None)
            await self._settle()
            raise
        if result.suspension is not None:  # its calls count when it is carried on, all of them
            self.journal.waiting = result.suspension
            await self.drop()
            self._note_used()
            await self._settle()
            report = SessionReport(self._id, script.number, began, forgotten=forgotten)
            return replace(result, session=report)
        self.used_calls += len(result.calls)
        journal.size += run.work.calls + run.work.uploaded  # the session keeps its arguments
        left = connection.leftover
        ended, stuck = (leftover_names(left.ended), leftover_names(left.stuck)) if left is not None else ((), ())
        inputs = copy.deepcopy(run.message.inputs) if run.message.inputs else None  # the caller may change them now
        error, script = result.error, replaced(script, inputs=inputs)
        was_interrupted = connection.was_interrupted  # to keep the state is another run
        try:
            kept = await self._kept_beside_threads(script.number, run.tools, context) if stuck else None
            lost = await self._drop_if_lost(result) if kept is None else ""
            error = error_with_state(error, connection, lost, self.settings)
            if lost:
                self._note_used()
            else:
                self.position = script.number
                if self.settings.restore == "journal":
                    await self._keep(SessionScript(script, run.tools, journal, result.outcome, context))
                else:
                    self._unkept.append(script)
                if kept is not None:
                    await self._go_on_without_threads(kept, is_base=was_interrupted)
                    ended += stuck
                elif self.not_repeatable:
                    await self.keep_by_value(run.tools, context)
                    lost = self.lost
        finally:
            self.journal.conclude(journal, result, is_step=bool(self.steps) and self.steps[-1].journal is journal)
            await self._settle()
        report = SessionReport(self._id, script.number, began, lost, ended, forgotten)
        return replaced(result, session=report, error=error)

    async def read(self, script: Script, tools: CallableTools, context: RunContext | None) -> ExecutionResult:
        """Run a script of ours that changes nothing. It is recorded as any, and no part of the journal."""
        await self.bring_up(context, tools)
        self._meter.begin_script()
        script = replaced(script, number=self.position + 1)
        run = await self._host.runs.prepare(script, tools, self._context(context, "read"))
        journal = Journal(os.urandom(16).hex())
        run.join(JournaledCalls(run, store=self._host.journals, journal=journal, on_approval="ask"))
        result = await self._execute(run)
        await self._drop_if_lost(result)
        return result

    async def finish(self, tools: CallableTools, context: RunContext | None) -> None:
        """Run what scripts have left for the end, as the interpreter does at its own. Never raises.

        Nothing is started for that: it is lost with its sandbox.
        """
        if not self._has_hooks or self.connection is None or not self.connection.is_usable or self.journal.waiting:
            return
        limits = self._limits.model_copy(update={"wall_s": min(self._limits.wall_s, FINISH_S)})
        try:
            result = await self.read(Script(source=FINISH, limits=limits), tools, context)
        except Exception as exc:  # whoever closes a session can do nothing about it
            logger.warning("session %s: its exit hooks did not run: %s", self._id, exc)
            return
        if not result.ok:
            logger.warning("session %s: its exit hooks did not end: %s", self._id, result.outcome)

    def _context(self, given: RunContext | None, part: str) -> RunContext:
        run_id = f"{self._id}.{part}.{os.urandom(4).hex()}"
        scope = replaced(OUTERMOST_SCOPE if given is None else given.scope, session_id=self._id)
        context = RunContext(run_id=run_id, scope=scope) if given is None else given.child(run_id=run_id, scope=scope)
        context.state.labels.join(self.labels)
        return context

    async def _execute(self, run: Run) -> ExecutionResult:
        connection = self.connection
        assert connection is not None
        meter = self._meter
        self.idle_since = None
        try:
            result = await self._host.runs.execute(run, connection)
            meter.end_script(result.usage.cpu_s)
            self._has_hooks = connection.leftover is not None and connection.leftover.hooks
            return result
        except BaseException:
            if not connection.is_usable:
                await self.drop()
            raise

    def interrupt(self, why: str, patience_s: float) -> bool:
        """Interrupt the script under way; False when none runs. `patience_s`: how long it may take to end."""
        return self.connection is not None and self.connection.interrupt(why, patience_s)

    def stop(self, why: str) -> None:
        """End the script under way, if there is one."""
        if self.connection is not None and self.idle_since is None:
            self.connection.stop(Aborted(why))

    # After a script.

    async def _drop_if_lost(self, result: ExecutionResult) -> str:
        """Return why the sandbox is lost, and destroy it; "" when the session goes on."""
        self.lost = self._why_lost(result)
        if self.lost:
            await self.drop()
        return self.lost

    def _why_lost(self, result: ExecutionResult) -> str:
        connection = self.connection
        assert connection is not None
        if connection.leftover is not None and connection.leftover.stuck:
            return f"it left running what does not end: {', '.join(leftover_names(connection.leftover.stuck))}"
        if self.is_closing:
            return "the session was closed"
        if connection.is_usable:
            if connection.was_interrupted:
                self.not_repeatable = f"script {self.position + 1} was interrupted ({result.outcome})"
            return ""
        if connection.is_ending:
            return STUCK
        return f"the sandbox ended with outcome {result.outcome}"

    async def _settle(self) -> None:
        """Have what was noted in the record, before anybody gets the result."""
        if self._host.journals.is_durable:
            with anyio.CancelScope(shield=True), suppress(OSError):  # then it is written later, or the record is lost
                await self._host.journals.settle()

    async def _keep(self, step: SessionScript) -> None:
        used_cpu_s = self._ended_cpu_s + self._meter.latest_cpu_s  # measured at the end of the script
        note = partial(self.journal.note_step, step, (used_cpu_s, self.used_calls), self.labels.names)
        size = step.size()
        if size > LONG_BYTES:
            with anyio.CancelScope(shield=True):  # else a script that has run would be missing
                await daemon_threads.run_sync(note)
        else:
            note()
        self.steps.append(step)
        self._steps_bytes += size
        if step.journal.lost:
            self.not_repeatable = self.not_repeatable or step.journal.lost
        if self._steps_bytes > REPEATED_BYTES:
            self.not_repeatable = f"its scripts, files and answers take more than {REPEATED_BYTES} bytes"
        if self.not_repeatable:
            self.journal.note_unrepeatable(self.not_repeatable)
            self.steps, self._steps_bytes = [], 0

    # The sandbox.

    async def bring_up(self, context: RunContext | None = None, tools: CallableTools | None = None) -> Began:
        """See to it that there is a sandbox with the state; return where the state comes from.

        `context`: of whoever needs the state. Scripts that another process ran are run again for them. `tools`: that
        functions kept by value find.

        Raises:
            SessionError: the state cannot be rebuilt.
            SandboxUnavailable: no sandbox could be started.
        """
        await self._go_on()
        connection = self.connection
        if connection is not None and connection.is_usable:
            return "live" if self.position else "new"
        await self.drop()
        self._last_context = self._last_context or context
        self._forgotten = ()
        if not self.position:
            await self._start()
            return "new"
        if self.settings.restore == "empty":
            return await self._begin_again(context, tools)
        self.check_repeatable()
        was_stuck = self.lost == STUCK
        try:
            await self._bring_back(context, tools)
            first = self.position - len(self.steps) + 1
            kept = self.kept_state
            done = kept.position if kept is not None else 0
            for number, step in enumerate(self.steps, first):
                if number > done:
                    await self._repeat(number, step, context)
            if was_stuck:
                await self._check_answers(context)
        except BaseException:
            await self.drop()
            raise
        return "journal" if kept is None else "value"

    async def _begin_again(self, context: RunContext | None, tools: CallableTools | None) -> Began:
        """Start a sandbox of a session that keeps no state but that of a script whose threads did not end."""
        kept, self.kept_state = self.kept_state, None
        await self._start()
        if kept is not None:
            try:
                await self._load(kept, context, tools)
                self._forgotten = kept.lost
                return "value"
            except SessionError as exc:
                logger.warning("session %s: its state is lost: %s", self._id, exc)
                await self.drop()
                await self._start()
        self._unkept.clear()
        self.position = 0
        return "empty"

    async def _bring_back(self, context: RunContext | None, tools: CallableTools | None) -> None:
        """Start a sandbox, with the latest state by value that can be brought back, if there is one.

        Raises:
            SessionError: there is one, and no way around it.
        """
        while True:
            await self._start()
            kept = self.kept_state
            if kept is None:
                return
            try:
                await self._load(kept, context, tools)
                self._forgotten = kept.lost
                return
            except SessionError as exc:
                await self.drop()
                if kept is self._base:
                    raise SessionError(
                        f"the state of session {self._id!r} cannot be brought back: {exc}; reset() begins again"
                    ) from exc
                logger.warning("session %s: its scripts are run again: %s", self._id, exc)
                self.kept_state = self._base

    async def _load(self, kept: KeptState, context: RunContext | None, tools: CallableTools | None) -> None:
        """Have the sandbox bring a state back.

        Raises:
            SessionError: it cannot be read, or its guest could not bring it back.
        """
        try:
            content = kept.file.content()
        except (OSError, ValueError) as exc:
            raise SessionError(f"its file cannot be read: {exc}") from exc
        seed, clock = self._host.runs.seed_and_clock(None, None, is_repeatable=True)
        result = await self._run_ours(loading_script(self._limits, content, seed, clock), context, tools)
        if result.error is not None:
            raise SessionError(result.error.message)

    async def _run_ours(
        self, script: Script, context: RunContext | None, tools: CallableTools | None
    ) -> ExecutionResult:
        """Run a script that keeps a state or brings it back. It is recorded as any, and no part of the journal.

        It counts for whom the last script ran.
        """
        tools = tools or self._host.runs.snapshot(None)
        self._meter.begin_script()
        again = context_again(self._last_context or context)
        return await self._rebuild(script, tools, self._context(again, "state"))

    async def _rebuild(
        self,
        script: Script,
        tools: CallableTools,
        context: RunContext,
        link: RunLink | None = None,
        step: SessionScript | None = None,
    ) -> ExecutionResult:
        """Run a script that makes no call; it is `step`, if it runs again."""
        run = await self._host.runs.prepare(script, tools, context, link)
        let_rebuild(run, self._host.journals, step)
        return await self._execute(run)

    async def keep_by_value(self, tools: CallableTools | None, context: RunContext | None) -> None:
        """Keep the state by value, if that is of use: scripts need not be run again then, or cannot be.

        A state with names that cannot be kept is of use only where running the scripts again is none.
        """
        connection = self.connection
        is_there = connection is not None and connection.is_usable and self.settings.restore == "journal"
        if (
            not is_there
            or not self.position
            or (self.kept_state is not None and self.kept_state.position == self.position)
        ):
            return
        was_unrepeatable = self.not_repeatable
        await self._go_on()
        try:
            result, file = await self._write_state(self.position, tools, context)
            if await self._drop_if_lost(result):
                logger.warning("session %s lost its sandbox when its state was kept: %s", self._id, self.lost)
                return
            lost = not_in_it(result, file)
            if lost and not was_unrepeatable:
                return
            self.kept_state = kept = KeptState(self.position, lost, file)
            await daemon_threads.run_sync(partial(self.journal.note_state, kept, is_base=bool(was_unrepeatable)))
        except (SessionError, QuotaExceeded, OSError) as exc:
            logger.info("session %s: its state is not kept by value: %s", self._id, exc)
        else:
            if was_unrepeatable:
                self._base, was_unrepeatable = self.kept_state, ""
        finally:
            self.not_repeatable = was_unrepeatable

    async def _write_state(
        self, position: int, tools: CallableTools | None, context: RunContext | None
    ) -> tuple[ExecutionResult, StateFile]:
        """Have the sandbox write the state after script `position`. Shape: what became of that, and the file."""
        room = (self._limits.memory_bytes - self._meter.sample().peak_memory_bytes) // 2
        journals = self._host.journals
        file = StateFile(journals.database.folder if journals.is_durable else None)
        script = replaced(keeping_script(self._limits, max(0, room), file), number=position + 1)
        return await self._run_ours(script, context, tools), file

    async def _kept_beside_threads(self, position: int, tools: CallableTools, context: RunContext) -> KeptState | None:
        """Return the state after a script whose threads do not end; None where it cannot be kept.

        Nothing of a script runs on after it, so the next one gets another sandbox.
        """
        connection = self.connection
        assert connection is not None
        if self.is_closing or not connection.is_usable:
            return None
        try:
            result, file = await self._write_state(position, tools, context)
            return KeptState(position, not_in_it(result, file), file)
        except (SessionError, QuotaExceeded, OSError) as exc:
            logger.info("session %s: its state is not kept by value: %s", self._id, exc)
            return None

    async def _go_on_without_threads(self, kept: KeptState, *, is_base: bool) -> None:
        """End the sandbox with its threads; the next script begins with the state.

        `is_base`: running the scripts again does not lead to it.
        """
        await self.drop()
        self.kept_state = kept
        await daemon_threads.run_sync(partial(self.journal.note_state, kept, is_base=is_base))
        if is_base:
            self._base, self.steps, self._steps_bytes = kept, [], 0

    async def put_down(self) -> None:
        """Keep the state by value where it can be, and destroy the sandbox."""
        await self.keep_by_value(None, None)
        await self.drop()

    async def _start(self) -> None:
        await self._make_room()
        started = self._limits.model_copy(update={"cpu_s": self.settings.cpu_s})
        connection = await self._host.runs.sandboxes.hold(started)
        self._meter = connection.meter = SessionMeter(connection.sandbox)
        connection.stays = True
        connection.post(Stay(END_MS))
        self.connection, self.lost = connection, ""

    async def _repeat(self, number: int, step: SessionScript, given: RunContext | None) -> None:
        context = self._context(context_again(step.context or given), f"{number}.again")
        self._meter.begin_script()
        link = RunLink(relation="repeats", after=step.journal.run)
        if problem := difference(step, await self._rebuild(step.script, step.tools, context, link, step)):
            self.not_repeatable = f"script {number} did not repeat what it had done: {problem}"
            self.check_repeatable()

    async def _check_answers(self, given: RunContext | None) -> None:
        """Check that the rebuilt state runs scripts: a hidden thread can read them. Raises as `check_repeatable`."""
        tools = self._host.runs.tools([])
        self._meter.begin_script()
        script = Script(source="", limits=self._limits, number=self.position + 1)
        result = await self._rebuild(script, tools, self._context(context_again(given), "answers"))
        if result.outcome is not Outcome.OK:
            self.not_repeatable = (
                f"when it was, an empty script did not end ({result.outcome}): something that its scripts left running "
                "takes what is sent to the next"
            )
            self.check_repeatable()

    def check_repeatable(self) -> None:
        """Check that the state can be rebuilt.

        Raises:
            SessionError: it cannot; says why.
        """
        if self.settings.restore != "journal":
            raise SessionError(f'session {self._id!r} keeps no journal (restore="empty")')
        if self.not_repeatable:
            raise SessionError(
                f"the state of session {self._id!r} cannot be rebuilt: {self.not_repeatable}; reset() begins again"
            )

    async def reset(self) -> None:
        """Forget everything but what was used."""
        await self.drop()
        await self.abandon()
        await self._host.journals.call(self.journal.begin_anew)
        await self._settle()
        self.labels = Labels()
        self._note_used()
        self.steps, self._steps_bytes, self.position, self.not_repeatable = [], 0, 0, ""
        self._base = self.kept_state = None

    # What was used and read, and what is left. All of it counts, also of what left no state.

    def check_left(self) -> None:
        """Check that the session may still run something. Raises as `_remaining_limits`."""
        self._remaining_limits(self._limits, self.used_cpu_s)

    def _begin_script(self) -> float:
        """Count from here; return the CPU seconds until now. Measured once, for the limits and for the run."""
        self._meter.begin_script()
        return self._ended_cpu_s + self._meter.used_before_s

    def _remaining_limits(self, limits: Limits, used_cpu_s: float) -> Limits:
        """Return the limits of a script, lowered to what is left of the session's.

        Raises:
            SessionError: nothing is left.
        """
        settings = self.settings
        cpu_s, calls = settings.cpu_s - used_cpu_s, settings.tool_calls - self.used_calls
        if cpu_s <= 0:
            raise SessionError(
                f"session {self._id!r} has used {used_cpu_s:.3g} of its {settings.cpu_s:g} CPU seconds; open "
                "another one, or give it more with runtime.session(cpu_s=...)"
            )
        if cpu_s >= limits.cpu_s and calls >= limits.tool_calls:
            return limits
        lower = {"cpu_s": min(cpu_s, limits.cpu_s), "tool_calls": max(0, min(calls, limits.tool_calls))}
        return limits.model_copy(update=lower)

    def settings_left(self) -> SessionSettings:
        """Return the settings of a copy that uses what is left of this session. Raises as `_remaining_limits`."""
        self.check_left()
        left: dict[str, float] = {"cpu_s": self.settings.cpu_s - self.used_cpu_s}
        left["tool_calls"] = max(0, self.settings.tool_calls - self.used_calls)
        return self.settings.model_copy(update=left)

    def count(self, other: SessionState) -> None:
        """Count what a copy has used and read."""
        self._ended_cpu_s += other.used_cpu_s
        self.used_calls += other.used_calls
        self._note_used()

    async def abandon(self) -> None:
        """Give up the script that waits. What it has read and how many calls it has made counts.

        Raises:
            SessionError: its journal is open elsewhere just now.
        """
        labels, calls = await self._host.journals.call(self.journal.waiting_used)
        self.labels.add(labels)
        self.used_calls += calls
        if self.journal.waiting:
            self._note_used()
        self.journal.abandon()

    def _note_used(self) -> None:
        self.journal.note_used((self.used_cpu_s, self.used_calls), self.labels.names)

    # The sandbox while no script runs: it is paused, measured, and destroyed when its time is over.

    @property
    def used_cpu_s(self) -> float:
        """CPU seconds of all its sandboxes: of scripts, of running them again, and of what goes on between them."""
        return self._ended_cpu_s + (self._meter.used_cpu_s if self.connection is not None else 0.0)

    @property
    def can_be_lost(self) -> bool:
        """True when without the sandbox no more is lost than `restore` says."""
        return not (self.settings.restore == "journal" and self.not_repeatable)

    def begin_idling(self) -> None:
        """No script runs from here on."""
        self.idle_since, self.look_at = None, math.inf
        if self.connection is not None:
            self.idle_since = anyio.current_time()
            self._look_later(self.settings.cpu_s - self._ended_cpu_s - self._meter.latest_cpu_s, PAUSE_S)

    def _look_later(self, cpu_s: float, pause_s: float) -> None:
        """Say when to look next, so much before the pause and with so much left of the session's CPU time."""
        now = anyio.current_time()
        self.look_at = now + min(self._idle_left_s(now), max(WATCH_S, cpu_s / PROCESSORS), pause_s)

    def _idle_left_s(self, now: float) -> float:
        if self.idle_since is None or not self.can_be_lost:
            return math.inf
        return self.idle_since + self.settings.idle_s - now

    async def look(self) -> None:
        """Pause an idle sandbox, or drop it when its time is over, and say when to look again.

        It is measured, also when it is paused: a script can leave something running that the guest does not report.
        """
        if self.idle_since is None:
            return
        cpu_s = self.settings.cpu_s - self.used_cpu_s
        if cpu_s <= 0:
            await self.drop()
            return
        if self._idle_left_s(anyio.current_time()) <= 0:
            await self.put_down()
            return
        pause_s = self.idle_since + PAUSE_S - anyio.current_time()
        if pause_s <= 0:
            await self.pause()
        self._look_later(cpu_s, pause_s if pause_s > 0 else math.inf)

    async def _go_on(self) -> None:
        """Let a sandbox that is paused run again."""
        if self.is_paused and self.connection is not None:
            await self.connection.sandbox.unpause()
            self.is_paused = False

    async def pause(self) -> bool:
        """Stop everything in the sandbox; see `Session.pause`. May be called again: something may run all the same."""
        if self.connection is None or not self.connection.is_usable:
            return False
        before, self.is_paused = self.is_paused, True  # also when this is cancelled: nobody knows what was done then
        self.is_paused = await self.connection.sandbox.pause() or before
        return self.is_paused

    async def drop(self) -> None:
        """Destroy the sandbox."""
        self._ended_cpu_s = self.used_cpu_s
        connection, self.connection = self.connection, None
        self.idle_since, self.look_at, self.is_paused, self._has_hooks = None, math.inf, False, False
        if connection is not None:
            del self._meter
            with anyio.CancelScope(shield=True):
                await self._host.runs.sandboxes.let_go(connection)


def error_with_state(
    error: ErrorInfo | None, connection: GuestConnection, lost: str, settings: SessionSettings
) -> ErrorInfo | None:
    """Return the error of a script, with what became of the state if it was cut short."""
    if error is None or not (lost or connection.was_interrupted):
        return error
    said = "the session keeps its state"
    if lost:
        rest = "the state before it" if settings.restore == "journal" else "nothing"
        said = f"the session lost its sandbox, and the next script begins with {rest}"
    return replace(error, message=f"{error.message}; {said}")
