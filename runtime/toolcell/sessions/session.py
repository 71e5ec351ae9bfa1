"""`Session`: scripts that share one sandbox, one after the other. Names, imports and files stay from one to the next.

Each script is a run as any other, with its own limits and its own result.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

import anyio
import anyio.lowlevel

from toolcell.config import Limits, LintProfile, settings_of
from toolcell.control.controlled import ControlledRuntime, Script
from toolcell.errors import SessionError, UsageError
from toolcell.lifetime import OpenedInBlock
from toolcell.results import ExecutionResult
from toolcell.run.arguments import check_run_arguments
from toolcell.run.callbacks import OnLog, OnProgress
from toolcell.run.input_files import FileContent, FileInput, guest_files
from toolcell.run.run import CANCELLED
from toolcell.sessions.settings import SessionSettings, check_name, check_script_limits
from toolcell.sessions.state import NO_HANDLERS, SessionState
from toolcell.sessions.steps import KeptScript
from toolcell.tools.call import CallableTools, RunContext

LISTING = (
    '[[__import__("os").path.relpath(__import__("os").path.join(folder, name), OUTPUT_DIR), '
    '__import__("os").lstat(__import__("os").path.join(folder, name)).st_size] '
    'for folder, _, names in __import__("os").walk(OUTPUT_DIR) for name in names]'
)
"""Lists the files of the workspace, and defines no name."""


@dataclass(frozen=True, slots=True)
class SessionFile:
    """A file in the workspace of a session, as the guest says."""

    name: str
    size: int


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


class SessionTurn:
    """One's turn in a session. A class: entering a generator takes a script's time twice."""

    __slots__ = ("_check", "_lock", "_rest")

    def __init__(self, lock: anyio.Lock, check: Callable[[], None], rest: Callable[[], None]) -> None:
        self._lock, self._check, self._rest = lock, check, rest

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
            self._rest()
        finally:
            self._lock.release()


class Session(OpenedInBlock):
    """A sandbox that stays. Scripts from several tasks run one after the other, in the order in which they came."""

    def __init__(
        self,
        host: ControlledRuntime,
        place: SessionPlace,
        ident: str,
        limits: Limits,
        settings: SessionSettings,
        tools: CallableTools | None = None,
        context: RunContext | None = None,
        steps: Iterable[KeptScript] = (),
        labels: Iterable[str] = (),
    ) -> None:
        self.id = ident
        self.limits = limits
        """Of each script, unless it is given others."""
        self.settings = settings
        self._host, self._place, self._tools, self._context = host, place, tools, context
        self._life: Literal["new", "open", "closed"] = "new"
        self._loop: object = None
        self._turn = anyio.Lock(fast_acquire=True)  # a script gives way to other tasks while it runs
        self._state = SessionState(ident, host, limits, settings, place.make_room, steps, labels)

    def __repr__(self) -> str:
        return f"<Session {self.id!r} {self._life} scripts={self._state.position} live={self.is_live}>"

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

        Raises:
            UsageError: it was opened before, or its name is taken.
            SandboxUnavailable: no sandbox could be started.
        """
        if self._life != "new":
            raise UsageError(f"session {self.id!r} was opened already; runtime.session() makes another one")
        self._host._tools(None)  # checks that the runtime is open here
        self._place.enter(self)
        self._life, self._loop = "open", anyio.lowlevel.current_token()
        try:
            async with self._exclusively():
                await self._state.bring_up()
        except BaseException:
            await self.close()
            raise

    async def __aenter__(self) -> Self:
        if self._life != "open":
            await self.open()
        return self

    async def close(self) -> None:
        """End the script under way, with outcome `cancelled`, and destroy the sandbox. May be called twice.

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
                await self._state.drop()

    def _exclusively(self) -> SessionTurn:
        """Wait for one's turn. Then nothing else happens in the session."""
        return SessionTurn(self._turn, self._check_open, self._rest)

    def _rest(self) -> None:
        self._state.rest()
        self._place.note_idle(self._state.look_at)

    def _check_open(self) -> None:
        if self._life == "closed":
            raise SessionError(f"session {self.id!r} is closed; runtime.session() opens another one")
        if self._life == "new":
            raise SessionError(f"session {self.id!r} is not open; use it as `async with runtime.session() as session:`")

    # Scripts.

    async def execute_code(
        self,
        source: str,
        *,
        inputs: Mapping[str, Any] | None = None,
        files: Iterable[FileInput] | Mapping[str, FileContent] = (),
        tools: CallableTools | Iterable[Any] | None = None,
        limits: Limits | None = None,
        lint: LintProfile | None = None,
        context: RunContext | None = None,
        on_approval: Literal["ask", "deny"] = "ask",
        cancel: anyio.Event | None = None,
        on_log: OnLog | None = None,
        on_progress: OnProgress | None = None,
    ) -> ExecutionResult:
        """Run a script in the session's sandbox; see `Runtime.execute_code` for the arguments.

        A script that fails leaves behind what Python would. One past a limit, or cancelled, is interrupted: its
        outcome says so, and the state is kept if it ends within 100 ms. Otherwise the session loses its sandbox, and
        `result.session.lost` says why.

        Raises:
            SessionError: the session is closed or has used up its limits, or its state cannot be rebuilt. No code ran.
            UsageError, SandboxUnavailable, AuditError: as from `Runtime.execute_code`.

        Cancellation: the sandbox is lost, and the script with it.
        """
        check_run_arguments(lint, None, None, cancel, context, on_log=on_log, on_progress=on_progress)
        if on_approval not in ("ask", "deny"):
            raise UsageError(f'in a session on_approval is "ask" or "deny", not {on_approval!r:.40}')
        context = context or self._context
        if context is not None and context.dry_run is not None:
            raise UsageError("a session has no dry run: placeholders would stay in its names; use runtime.execute_code")
        own = settings_of(Limits, limits or self.limits, "limits")
        check_script_limits(own, self.limits)
        script = Script(source, inputs, guest_files(files), own, lint or self._host.policy.lint, None, None)
        callable_tools = self._host._tools(tools if tools is not None else self._tools)
        handlers = (cancel, on_log, on_progress)
        async with self._exclusively():
            return await self._state.run(script, callable_tools, context, handlers, on_approval)

    async def interrupt(self) -> bool:
        """Interrupt the script under way: it gets a KeyboardInterrupt, and its outcome is `cancelled`.

        Returns False when none runs.
        """
        if self._life != "open":
            return False
        self._host._tools([])  # checks that this is the event loop of the runtime
        return self._state.stop(CANCELLED)

    # Files.

    async def put_files(self, files: Iterable[FileInput] | Mapping[str, FileContent]) -> None:
        """Write files to the workspace, over those of the same name.

        Raises:
            UsageError: a file cannot be read or sent, or there is no room for it.
        """
        script = Script("", None, guest_files(files), self._without_files(), "off", None, None)
        async with self._exclusively():
            result = await self._state.run(script, self._host._tools([]), self._context, NO_HANDLERS, "ask")
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
        """Return the limits of a script of ours. Figures that are open stay open: it may return no file."""
        return self.limits.model_copy(update={"files": 0})

    async def _read(self, source: str, limits: Limits | None = None) -> ExecutionResult:
        script = Script(source, None, (), limits or self.limits, "off", None, None)
        async with self._exclusively():
            return await self._state.read(script, self._host._tools([]), self._context)

    # The state as a whole.

    async def reset(self) -> None:
        """Forget everything: the next script begins in a new sandbox. What was used stays used."""
        self._host._tools([])  # checks that this is the event loop of the runtime
        async with self._exclusively():
            await self._state.reset()

    async def put_down(self) -> None:
        """Destroy the sandbox, as after `idle_s`. The next script finds the state that `restore` says.

        Raises:
            SessionError: the state cannot be rebuilt.
        """
        self._host._tools([])  # checks that this is the event loop of the runtime
        async with self._exclusively():
            if self.settings.restore == "journal":
                self._state.check_repeatable()
            await self._state.drop()

    def can_be_put_down(self) -> bool:
        """Return True when it idles, and its sandbox can be destroyed without losing more than `restore` says."""
        is_free = self.idle_since is not None and not self._turn.locked()
        return is_free and self._state.can_be_lost

    async def pause(self) -> bool:
        """Stop every process of the sandbox, as after a second without a script. The next script lets them run again.

        Returns False where the backend cannot, and without a sandbox.
        """
        self._host._tools([])  # checks that this is the event loop of the runtime
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
        """Return another open session with the state of this one, rebuilt from the journal. No call is made again.

        Raises:
            SessionError: the session has lost its sandbox, or its state cannot be rebuilt.
            UsageError: the name is none, or taken.
        """
        ident = os.urandom(16).hex() if name is None else check_name(name)
        self._host._tools([])  # checks that this is the event loop of the runtime
        async with self._exclusively():
            if self._state.lost:
                raise SessionError(
                    f"session {self.id!r} cannot be forked: it was lost ({self._state.lost}). Its next script begins "
                    "with what is left of it, and then it can"
                )
            self._state.check_repeatable()
            steps, labels = tuple(self._state.steps), self._state.labels.held
        args = (self.limits, self.settings, self._tools, self._context, steps, labels)
        copy = Session(self._host, self._place, ident, *args)
        await copy.open()
        return copy


def _is_file(row: object) -> bool:
    return isinstance(row, list) and len(row) == 2 and isinstance(row[0], str) and type(row[1]) is int
