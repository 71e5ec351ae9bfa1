"""What every adapter needs: a framework's tools as ours, a run's result as text for its model, and a runtime to run in.

A framework's tools are called through a registry, so arguments are checked, and hooks, rules and the audit log see
every call. Imports no framework.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Self, TypeVar, cast

import anyio
from pydantic import BaseModel, Field

from toolcell.agents.transcript import message_text, shown_images
from toolcell.calls.definition import MIN_DESCRIPTION_CHARS
from toolcell.calls.result import to_json
from toolcell.config import Limits
from toolcell.errors import MissingPackage, ToolError, UsageError
from toolcell.results import LIMIT_OUTCOMES, ExecutionResult, Outcome
from toolcell.runtime import Runtime
from toolcell.sessions import Session, SyncSession
from toolcell.support.checks import is_async, text_of
from toolcell.support.text import cut_text
from toolcell.sync import SyncRuntime
from toolcell.tools import CodeTool, Image, ToolDefinition, ToolOptions, ToolRegistry, ToolSpec

MAX_SESSIONS = 64
"""Conversations of one adapter whose state is kept."""
T = TypeVar("T")
FrameworkCall = Callable[[dict[str, Any]], Any | Awaitable[Any]]
"""Calls a framework's tool with arguments by name. May be async."""


def missing_package(exc: ModuleNotFoundError, extra: str) -> MissingPackage:
    """Return the error of an adapter whose framework is not installed.

    `from toolcell.integrations.X import ...` raises it: `raise missing_package(exc, "X") from exc`.
    """
    module = f"toolcell.integrations.{extra.replace('-', '_')}"
    return MissingPackage(f"{module} needs {exc.name}, which is not installed: pip install 'toolcell[{extra}]'")


def framework_tool(
    name: str,
    description: str | None,
    parameters: Mapping[str, Any] | None,
    call: FrameworkCall,
    *,
    shows: tuple[type[Exception], ...] = (),
    source: Any = None,
    **options: Any,
) -> ToolSpec:
    """Convert a framework's tool, for `tools_with`.

    `parameters` is the JSON Schema of its arguments; None takes any. `call` gets them checked; a synchronous one runs
    in a worker thread. `shows`: exceptions whose text the framework means for the model; of others a script sees only
    the class. `source`: the framework's tool itself. `options` are those of `ToolOptions`.

    Raises:
        RegistrationError: the name, the schema or an option cannot be used.
    """
    schema = None if parameters is None else {"type": "object", **parameters}
    said = (description or "").strip()
    if len(said) < MIN_DESCRIPTION_CHARS:  # which nobody who uses the framework is to be warned of
        said = f"{said} Call it as {name}(...).".strip()
    definition, known = ToolDefinition(name, said, schema), ToolOptions().changed(options)
    return ToolSpec.positional(definition, _showing(call, shows), known, source or call)


def _showing(call: FrameworkCall, shows: tuple[type[Exception], ...]) -> FrameworkCall:
    if not shows:
        return call
    if is_async(call):

        async def awaited(args: dict[str, Any]) -> Any:
            try:
                return await call(args)
            except shows as exc:
                raise ToolError(text_of(exc)) from exc

        return awaited

    def called(args: dict[str, Any]) -> Any:
        try:
            return call(args)
        except shows as exc:
            raise ToolError(text_of(exc)) from exc

    return called


def tool_of(tool: Any, kind: type[T], make: Callable[[Any], T], framework: str) -> T:
    """Return a framework's tool: the one that was given, or what `make` makes of a function.

    Raises:
        UsageError: it is neither a tool nor a function.
    """
    if isinstance(tool, kind):
        return tool
    if isinstance(tool, type) or not callable(tool):
        cure = "; give the tools of a toolset: [*await toolset.get_tools()]" if hasattr(tool, "get_tools") else ""
        wanted = f"a tool of {framework} that code can call is a {kind.__name__} or a function"
        raise UsageError(f"{wanted}, not {tool!r:.80}{cure}")
    return make(tool)


class CodeArguments(BaseModel):
    """What a tool takes that runs code."""

    code: str = Field(description="Python source to run.")


def home_of(runtime: Any) -> Runtime:
    """Return the Runtime behind what a program gave: itself, that of a session, or the one in a SyncRuntime."""
    home: Any = runtime.runtime if isinstance(runtime, Session) else runtime
    return cast(Runtime, home.runtime if isinstance(home, SyncRuntime) else home)


def tools_with(registry: ToolRegistry, tools: Iterable[Any]) -> ToolRegistry:
    """Return a registry with the tools of `registry` and a framework's, under the hooks and rules of `registry`.

    Raises:
        RegistrationError: a name is taken, or a tool is wrong.
    """
    return registry.merged(ToolRegistry(tools, settings=registry.state.settings))


def text_for_model(result: ExecutionResult, *, with_logs: bool = True) -> str:
    """Return a run's result as a model reads it: the value or the error, then what was printed; long ones are cut."""
    return message_text(CodeTool.result(result, with_logs=with_logs))


def pictures(result: ExecutionResult) -> tuple[Image, ...]:
    """Return the pictures of a run that a model is shown: among its files, and in its result."""
    return shown_images(CodeTool.result(result).images)


class RuntimeOwner:
    """The runtime of an adapter: the program's, which opens and closes it, or the adapter's own.

    One of its own is open while anybody uses the adapter, and takes the arguments of `Runtime` as options.
    """

    def __init__(self, runtime: Runtime | None, options: Mapping[str, Any]) -> None:
        _check_runtime(runtime, Runtime, options)
        self.runtime = Runtime(**options) if runtime is None else runtime
        self._is_own = runtime is None
        self._users = 0
        self._lock = anyio.Lock()

    async def open(self) -> Runtime:
        """Return the runtime, open. Each `open` needs a `close`.

        Raises:
            SandboxUnavailable: this machine cannot start sandboxes.
            UsageError: the program's own runtime is not open here.
        """
        async with self._lock:
            if self._is_own and not self._users:
                await self.runtime.open()
            self.runtime.check_open()
            self._users += 1
        return self.runtime

    async def close(self) -> None:
        """End the runtime after its last user, if it is the adapter's own. Cancellation: shielded."""
        with anyio.CancelScope(shield=True):
            async with self._lock:
                self._users = max(0, self._users - 1)
                if self._is_own and not self._users:
                    await self.runtime.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


class SyncRuntimeOwner:
    """The same for frameworks that do not await. The adapter's own runtime opens on first use."""

    def __init__(self, runtime: SyncRuntime | None, options: Mapping[str, Any]) -> None:
        _check_runtime(runtime, SyncRuntime, options)
        self.runtime = SyncRuntime(**options) if runtime is None else runtime
        self._is_own = runtime is None
        self._is_open = not self._is_own
        self._lock = threading.Lock()

    @property
    def registry(self) -> ToolRegistry:
        """The runtime's own tools, hooks and rules."""
        registry: ToolRegistry = self.runtime.runtime.registry
        return registry

    def open(self) -> SyncRuntime:
        """Return the runtime, open. May be called any number of times.

        Raises:
            SandboxUnavailable: this machine cannot start sandboxes.
        """
        with self._lock:
            if not self._is_open:
                self.runtime.open()
                self._is_open = True
        return self.runtime

    def close(self, session: SyncSession | None = None) -> None:
        """End the session, if any, and the runtime if it is the adapter's own. Safe to call twice."""
        try:
            if session is not None:
                session.close()
        finally:
            with self._lock:
                if self._is_own and self._is_open:
                    self._is_open = False
                    self.runtime.close()


class ConversationSessions:
    """The sessions of an adapter: one for each conversation, with its names, imports and files.

    Of more than `MAX_SESSIONS`, the one that was used longest ago and waits for no decision is closed.
    """

    def __init__(self, owner: RuntimeOwner | None = None) -> None:
        """`owner`: of their runtime, which is open from the first session on until all are closed."""
        self._owner, self._is_open = owner, False
        self._sessions: dict[Hashable, Session] = {}
        self._lock = anyio.Lock()

    async def get(self, conversation: Hashable, make: Callable[[], Session]) -> Session:
        """Return the session of a conversation, open. `make` makes one when there is none.

        Raises:
            SandboxUnavailable: no sandbox could be started.
        """
        async with self._lock:
            if self._owner is not None and not self._is_open:
                await self._owner.open()
                self._is_open = True
            session = self._sessions.pop(conversation, None)
            if session is None:
                session = make()
                await session.open()
            self._sessions[conversation] = session  # the last one now
            idle = [each for each, known in self._sessions.items() if not known.waiting]
            for oldest in idle[: max(0, len(self._sessions) - MAX_SESSIONS)]:
                await self._sessions.pop(oldest).close()
            return session

    async def close(self, conversation: Hashable) -> None:
        """Close the session of a conversation, if there is one."""
        if (session := self._sessions.pop(conversation, None)) is not None:
            await session.close()

    async def close_all(self) -> None:
        """Close every session, and end the code that runs in them. Cancellation: shielded."""
        with anyio.CancelScope(shield=True):
            async with self._lock, AsyncExitStack() as stack:
                if self._owner is not None and self._is_open:
                    self._is_open = False
                    stack.push_async_callback(self._owner.close)
                for session in self._sessions.values():
                    stack.push_async_callback(session.close)
                self._sessions.clear()

    def __contains__(self, conversation: Hashable) -> bool:
        return conversation in self._sessions

    def __len__(self) -> int:
        return len(self._sessions)


def _check_runtime(runtime: object, kind: type[Any], options: Mapping[str, Any]) -> None:
    if runtime is None:
        return
    if not isinstance(runtime, kind):
        raise UsageError(f"runtime= takes a {kind.__name__}, not {type(runtime).__name__}; write {kind.__name__}(...)")
    if options:
        named = ", ".join(options)
        raise UsageError(f"runtime= has its own settings; give {named} to that {kind.__name__}, or leave out runtime=")


@dataclass(frozen=True, slots=True)
class ProgramOutput:
    """A run's result in the form of a program that has ended, for frameworks that run code as programs."""

    stdout: str
    """What was printed, and the value of the last expression or of set_result."""
    stderr: str
    """What was printed there, and what failed."""
    exit_code: int
    """0; 124 after a timeout, 137 when another limit or a signal ended it, 130 when it was cancelled, otherwise the
    script's own or 1."""


_EXIT_CODES: Mapping[Outcome, int] = {
    **dict.fromkeys((*LIMIT_OUTCOMES, Outcome.KILLED, Outcome.LOST, Outcome.PROTOCOL_ERROR), 137),
    Outcome.TIMEOUT: 124,
    Outcome.CANCELLED: 130,
}
"""As shells and `timeout` have them; 1 for the other outcomes."""


def program_output(result: ExecutionResult) -> ProgramOutput:
    """Return a run's result in the form of a program that has ended."""
    stdout, stderr = result.logs.stdout, result.logs.stderr
    if result.value is not None:
        shown = result.value if isinstance(result.value, str) else to_json(result.value)
        stdout = f"{_ending_line(stdout)}{cut_text(shown, CodeTool.MAX_VALUE_CHARS)[0]}\n"
    if result.ok:
        return ProgramOutput(stdout, stderr, 0)
    own = result.error.exit_code if result.error is not None else None
    code = own if own and 0 < own < 256 else _EXIT_CODES.get(result.outcome, 1)
    return ProgramOutput(stdout, f"{_ending_line(stderr)}{CodeTool.failure(result)}\n", code)


def _ending_line(text: str) -> str:
    return text if not text or text.endswith("\n") else f"{text}\n"


def instructions(
    registry: ToolRegistry, runtime: Runtime, limits: Limits | None = None, *, keeps_state: bool = True
) -> str:
    """Return instructions for a model that writes code: what a script may use, and the tools with their types."""
    return CodeTool(runtime).describe(registry.state.visible, limits, keeps_state=keeps_state)
