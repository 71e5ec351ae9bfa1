"""`Session`: scripts that share one sandbox, one after the other. Names, imports and files stay from one to the next.

Each script is a run as any other, with its own limits and its own result.
"""

from __future__ import annotations

import math
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Literal, Protocol, Self, Unpack

import anyio
import anyio.lowlevel

from toolcell.calls.call import CallableTools, ResumeDecision, RunContext
from toolcell.calls.placeholders import DryRun
from toolcell.config import Limits
from toolcell.control.resumption import decider
from toolcell.errors import SessionError, UsageError
from toolcell.results import ExecutionResult, SessionFile, SessionReport, Suspension
from toolcell.run.conversation import CANCELLED
from toolcell.run.options import NO_OPTIONS, InputFiles, ResumeKwargs, RunOptions, SessionRunKwargs
from toolcell.run.run import Script, script_from
from toolcell.run.streaming import RunStream
from toolcell.sessions.journal import NO_HISTORY, History
from toolcell.sessions.settings import Restores, SessionSettings, check_name, check_script_limits
from toolcell.sessions.state import SessionHost, SessionState
from toolcell.support.checks import keywords_known
from toolcell.support.lifetime import OpenedInBlock
from toolcell_bridge.wire.frozen import replaced

INTERRUPT_S = 10.0
"""How long a script may take to end that somebody interrupts: what runs in C, as a product of matrices, ends first."""

LISTING = (
    '[[__import__("os").path.relpath(__import__("os").path.join(folder, name), OUTPUT_DIR), '
    '__import__("os").lstat(__import__("os").path.join(folder, name)).st_size] '
    'for folder, _, names in __import__("os").walk(OUTPUT_DIR) for name in names]'
)
"""Lists the files of the workspace, and defines no name."""


class SessionPlace(Protocol):
    """Where a session is known while it is open."""

    def enter(self, session: Session) -> None:
        """Take note of it."""

    def leave(self, session: Session) -> None:
        """Forget it."""

    async def make_room(self) -> None:
        """See to it that one more session may have a sandbox."""

    def note_idle(self, look_at: float) -> None:
        """A session has begun to idle, and is to be looked at then."""


class Session(OpenedInBlock):
    """A sandbox that keeps its state between scripts. Scripts from several tasks run one after the other."""

    def __init__(
        self,
        host: SessionHost,
        place: SessionPlace,
        ident: str,
        limits: Limits,
        settings: SessionSettings,
        tools: CallableTools | None = None,
        context: RunContext | None = None,
        history: History = NO_HISTORY,
        labels: Iterable[str] = (),
        *,
        is_named: bool = False,
        restores: Restores = "never",
        is_scratch: bool = False,
    ) -> None:
        """`is_named`: it has a name of its own, by which it can be restored. `restores`: whether it goes on from what
        is on disk of the session of this name. `is_scratch`: nothing of it is kept on disk."""
        self.id = ident
        self._is_named, self._restores, self._is_scratch = is_named, restores, is_scratch
        self.limits = limits
        """Limits of each script, unless it is given others."""
        self.settings = settings
        self._host, self._place, self._tools, self._context = host, place, tools, context
        self._life: Literal["new", "open", "closed"] = "new"
        self._loop: object = None
        self._turn = anyio.Lock(fast_acquire=True)  # a script gives way to other tasks while it runs
        self._state = SessionState(
            ident, host, limits=limits, settings=settings, make_room=place.make_room, history=history, labels=labels
        )

    def __repr__(self) -> str:
        return f"<Session {self.id!r} {self._life} scripts={self._state.position} live={self.is_live}>"

    @property
    def runtime(self) -> Any:
        """The `Runtime` that opened it."""
        return self._host.runs.runtime

    @property
    def is_live(self) -> bool:
        """True while it has a sandbox. Without one, the next script gets a new one."""
        connection = self._state.connection
        return connection is not None and connection.sandbox.is_alive()

    @property
    def idle_since(self) -> float | None:
        """When the last script ended, on the event loop's clock; None while it has no sandbox or a script runs."""
        return self._state.idle_since

    @property
    def is_paused(self) -> bool:
        """True while its sandbox is stopped, because it idles. The next script lets it run again."""
        return self._state.is_paused

    @property
    def look_at(self) -> float:
        """When an idle sandbox is to be looked at again, on the event loop's clock."""
        is_free = self.idle_since is not None and not self._turn.locked()
        return self._state.look_at if is_free else math.inf

    @property
    def used_cpu_s(self) -> float:
        """CPU seconds of all scripts so far."""
        return self._state.used_cpu_s

    @property
    def used_calls(self) -> int:
        """Tool calls of all scripts so far."""
        return self._state.used_calls

    # Opening and closing.

    async def open(self) -> None:
        """Start the sandbox. `async with` does this and closes at the end of its block.

        A session that is restored has a sandbox from its first script on.

        Raises:
            UsageError: it was opened before, its name is taken, or it is to be restored and there is no journal of it.
            SessionError: it is open in another process, or what is on disk of it is damaged.
            SandboxUnavailable: no sandbox could be started.
        """
        await self._open(AsyncExitStack())

    async def _open(self, parent: AsyncExitStack) -> None:
        """Do the same; `parent` is closed once what is in its record is copied."""
        if self._life != "new":
            raise UsageError(f"session {self.id!r} was opened already; runtime.session() makes another one")
        self._host.runs.check_open()
        self._place.enter(self)
        self._life, self._loop = "open", anyio.lowlevel.current_token()
        try:
            async with self._exclusively():
                is_kept = not self._is_scratch and await self._state.open_record(self._restores)
                await parent.aclose()
                if not is_kept:
                    await self._state.bring_up()  # else the first script that needs it rebuilds the state
        except BaseException:
            await self.close()
            raise

    async def __aenter__(self) -> Self:
        if self._life != "open":
            await self.open()
        return self

    async def close(self) -> None:
        """End the running script, with outcome `cancelled`, and destroy the sandbox. May be called twice.

        Exit hooks that scripts have registered run before that, for at most 5 s, with the session's tools.

        Raises:
            UsageError: it was opened in another event loop.
        """
        if self._life == "open" and anyio.lowlevel.current_token() != self._loop:
            raise UsageError(f"session {self.id!r} was opened in another event loop; close it in that one")
        was_open, self._life = self._life == "open", "closed"
        if not was_open:
            return
        self._place.leave(self)
        self._state.is_closing = True
        with anyio.CancelScope(shield=True):
            self._state.stop("the session was closed")
            async with self._turn:
                await self._finish()
                await self._state.drop()
                await self._host.journals.call(partial(self._state.journal.close, is_named=self._is_named))

    async def _finish(self) -> None:
        """Run what scripts have left for the end."""
        if not self._is_scratch:
            await self._state.finish(self._host.runs.snapshot(self._tools), self._context)

    def _exclusively(self) -> ExclusiveUse:
        """Wait for one's turn. Then nothing else happens in the session."""
        return ExclusiveUse(self._turn, self._check_open, self._become_idle)

    def _become_idle(self) -> None:
        self._state.begin_idling()
        self._place.note_idle(self._state.look_at)

    def _check_open(self) -> None:
        if self._life == "closed":
            raise SessionError(f"session {self.id!r} is closed; runtime.session() opens another one")
        if self._life == "new":
            raise SessionError(
                f"session {self.id!r} is not open; use it as `async with runtime.session() as session:`, or with a "
                "SyncRuntime as `with runtime.session() as session:`"
            )

    # Scripts.

    @keywords_known
    async def execute_code(self, source: str, **options: Unpack[SessionRunKwargs]) -> ExecutionResult:
        """Run a script in the session's sandbox; see `Runtime.execute_code` for the arguments.

        With `dry_run` the script runs in a copy of the session, rebuilt from the journal, and leaves nothing in it.

        A script that fails leaves behind what Python would. One past a limit, or cancelled, is interrupted: its
        outcome says so, and the state is kept if it ends within a second. Otherwise the session loses its sandbox, and
        `result.session.lost` says why.

        Raises:
            SessionError: the session is closed or has used up its limits, its state cannot be rebuilt, or its last
                script waits. No code ran.
            UsageError, SandboxUnavailable, AuditError: as from `Runtime.execute_code`.

        Cancellation: the sandbox is lost, and the script with it.
        """
        return await self._execute_script(source, RunOptions.of("execute_code", options, SessionRunKwargs))

    async def _execute_script(self, source: str, options: RunOptions) -> ExecutionResult:
        host = self._host
        given = options.context or self._context
        context = await host.dry_runs.begin(options.dry_run, given, options.on_approval, source)
        check_script_limits(options.limits or self.limits, self.limits)
        script = script_from(source, options, self.limits, host.runs.policy.lint)
        callable_tools = host.runs.tools(options.tools if options.tools is not None else self._tools)

        async def run(session: Session) -> ExecutionResult:
            state = session._state
            checked = await host.checks.check(script, options, callable_tools, context, earlier=state.earlier)
            if isinstance(checked, ExecutionResult):
                report = SessionReport(session.id, state.position + 1, "live" if session.is_live else "new")
                return replaced(checked, session=report)
            return await state.run(checked, callable_tools, context, options, options.on_approval)

        if context is None or context.feature(DryRun) is None:
            async with self._exclusively():
                return await run(self)
        return await self._run_in_copy(run, context)

    async def _run_in_copy(
        self, run: Callable[[Any], Awaitable[ExecutionResult]], context: RunContext
    ) -> ExecutionResult:
        """Make a dry run in a copy of the session: placeholders stay in the names of that."""
        self._state.journal.check_free()
        copy = await self._copied(os.urandom(16).hex(), is_scratch=True)
        try:
            async with copy._exclusively():
                result = await run(copy)
        finally:
            await copy.close()
            self._state.count(copy._state)
        if result.draft_id:
            await self._host.dry_runs.keep(context, result)
        assert result.session is not None
        return replaced(result, session=replaced(result.session, id=self.id))

    def stream(self, source: str, **options: Unpack[SessionRunKwargs]) -> RunStream:
        """Run a script as `execute_code` does, and return what happens as events; see `Runtime.stream`.

        Leaving the loop early interrupts the script. The state is kept if it ends within a second.
        """
        self._check_open()
        options["context"] = options.get("context") or self._context
        return RunStream(
            partial(self._execute_script, source),
            RunOptions.of("stream", options, SessionRunKwargs),
            self._host.runs.task_group,
        )

    @property
    def waiting(self) -> Suspension | str:
        """What the last script waits for: its suspension, or its run's id if its host ended. Empty if none waits."""
        return self._state.journal.waiting

    @keywords_known
    async def resume(
        self,
        token: str | Suspension,
        decisions: Mapping[str, ResumeDecision] | None = None,
        **options: Unpack[ResumeKwargs],
    ) -> ExecutionResult:
        """Resume the waiting script; see `Runtime.resume`. The state before it is rebuilt first, without a call.

        Raises:
            SessionError: the session is closed, or its state cannot be rebuilt. The token is not used up.
            ResumeError, UsageError, SandboxUnavailable, AuditError: as from `Runtime.resume`; or the script is not the
                next one of this session.
        """
        given = RunOptions.of("resume", options, ResumeKwargs)
        callable_tools = self._host.runs.tools(given.tools if given.tools is not None else self._tools)
        context = given.context or self._context
        async with self._exclusively():
            state = self._state
            began = await state.bring_up(context, callable_tools)
            state.check_left()
            check = partial(state.journal.check_belongs, position=state.position)
            by = decider(context)
            journal = await self._host.resumption.take(token, decisions, callable_tools, check, decided_by=by)
            return await state.carry_on(journal, callable_tools, context, given, began)

    async def abandon(self) -> None:
        """Give up the script that waits, if there is one: the next begins with the state before it. What it has made
        stays made, and its token is of no use any more."""
        async with self._exclusively():
            await self._state.abandon()
            await self._host.journals.settle()

    async def interrupt(self) -> bool:
        """Interrupt the running script: it gets a KeyboardInterrupt. False if none runs.

        Its outcome is `cancelled`, unless it handles that and ends in its own way. The state is kept if it ends within
        10 s.
        """
        if self._life != "open":
            return False
        self._host.runs.check_open()
        return self._state.interrupt(CANCELLED, INTERRUPT_S)

    # Files in the workspace. They are put there, listed and read by scripts of ours.

    async def put_files(self, files: InputFiles) -> None:
        """Write files to the workspace, replacing those of the same name.

        Raises:
            UsageError: a file cannot be read or sent, or there is no room for it.
        """
        limits = self._without_files()
        script = Script(source="", files=RunOptions(files=files).guest_files(limits), limits=limits)
        async with self._exclusively():
            result = await self._state.run(script, self._host.runs.tools([]), self._context, NO_OPTIONS, "ask")
        if result.error is not None:
            raise UsageError(f"the files were not written: {result.error.message}")

    async def files(self) -> tuple[SessionFile, ...]:
        """List the files in the workspace, by name. Names and sizes are the guest's claims."""
        result = await self._read(LISTING, self._without_files())
        rows = result.value if isinstance(result.value, list) else []
        found = [SessionFile(row[0], row[1]) for row in rows if _is_file(row)]
        return tuple(sorted(found, key=lambda file: file.name))

    async def read_file(self, name: str) -> bytes:
        """Return the content of a file in the workspace.

        Raises:
            UsageError: there is no such file, or it is larger than `files_bytes`.
        """
        result = await self._read(f"set_result(None, files=[{name!r}])")
        if result.error is not None:
            raise UsageError(f"{name!r:.80} cannot be read: {result.error.message}")
        found = result.files[0] if len(result.files) == 1 else None
        if found is None or found.data is None:
            problem = found.problem if found is not None else f"it stands for {len(result.files)} files"
            raise UsageError(f"{name!r:.80} cannot be read: {problem}")
        return found.data

    def _without_files(self) -> Limits:
        """Return the limits of a script of ours: it may return no file."""
        return self.limits.model_copy(update={"files": 0})

    async def _read(self, source: str, limits: Limits | None = None) -> ExecutionResult:
        script = Script(source=source, limits=limits or self.limits)
        async with self._exclusively():
            return await self._state.read(script, self._host.runs.tools([]), self._context)

    # The state as a whole.

    async def reset(self) -> None:
        """Forget everything: the next script begins in a new sandbox. CPU time and calls stay counted.

        Exit hooks that scripts have registered run before that, as in `close`.
        """
        self._host.runs.check_open()
        async with self._exclusively():
            await self._finish()
            await self._state.reset()

    async def put_down(self) -> None:
        """Destroy the sandbox, as after `idle_s`. The next script finds the state that `restore` says.

        Raises:
            SessionError: the state cannot be rebuilt.
        """
        self._host.runs.check_open()
        async with self._exclusively():
            if self.settings.restore == "journal":
                self._state.check_repeatable()
            await self._state.put_down()

    def can_be_put_down(self) -> bool:
        """Return True when it idles, and its sandbox can be destroyed without losing more than `restore` says."""
        is_free = self.idle_since is not None and not self._turn.locked()
        return is_free and self._state.can_be_lost

    async def pause(self) -> bool:
        """Stop every process of the sandbox, as after a second without a script. The next script lets them run again.

        Returns False where the backend cannot, and without a sandbox.
        """
        self._host.runs.check_open()
        async with self._exclusively():
            return await self._state.pause()

    async def look(self) -> None:
        """Pause a sandbox that idles; destroy it when it has idled too long or used up the session's CPU time."""
        if self.look_at == math.inf:
            return
        async with self._turn:
            if self._life == "open":
                await self._state.look()

    async def fork(self, name: str | None = None) -> Session:
        """Return another open session with the state of this one: by value, or rebuilt from the journal where something
        cannot be kept so. No call is made again.

        Raises:
            SessionError: the session has lost its sandbox, or its state cannot be rebuilt.
            UsageError: the name is none, or taken.
        """
        ident = os.urandom(16).hex() if name is None else check_name(name)
        self._host.runs.check_open()
        return await self._copied(ident, is_named=name is not None)

    async def _copied(self, ident: str, *, is_named: bool = False, is_scratch: bool = False) -> Session:
        async with AsyncExitStack() as parent:
            await parent.enter_async_context(self._exclusively())
            if self._state.lost:
                raise SessionError(
                    f"session {self.id!r} cannot be forked: it was lost ({self._state.lost}). Its next script begins "
                    "with what is left of it, and then it can"
                )
            await self._state.keep_by_value(self._host.runs.snapshot(self._tools), self._context)
            self._state.check_repeatable()
            history, labels = self._state.history, self._state.labels
            settings = self._state.settings_left() if is_scratch else self.settings
            args = (self.limits, settings, self._tools, self._context, history, labels.names)
            copy = Session(self._host, self._place, ident, *args, is_scratch=is_scratch)
            if is_scratch:
                copy._state.labels.join(labels)  # whoever gets the result of its script goes on with this one
            try:
                await copy._open(parent)
            except BaseException:
                if is_scratch:
                    self._state.count(copy._state)
                raise
        copy._is_named = is_named  # else nothing of it is kept
        return copy


class ExclusiveUse:
    """One's turn in a session. A class: entering a generator takes a script's time twice."""

    __slots__ = ("_become_idle", "_check", "_lock")

    def __init__(self, lock: anyio.Lock, check: Callable[[], None], become_idle: Callable[[], None]) -> None:
        self._lock, self._check, self._become_idle = lock, check, become_idle

    async def __aenter__(self) -> None:
        self._check()
        await self._lock.acquire()
        try:
            self._check()
        except BaseException:
            self._lock.release()
            raise

    async def __aexit__(self, *_exc: object) -> None:
        try:
            self._become_idle()
        finally:
            self._lock.release()


def _is_file(row: object) -> bool:
    return isinstance(row, list) and len(row) == 2 and isinstance(row[0], str) and type(row[1]) is int
