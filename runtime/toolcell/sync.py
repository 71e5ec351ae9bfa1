"""`SyncRuntime`: a blocking `Runtime` for scripts and notebooks. Its event loop runs in a thread of its own."""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, Unpack

from toolcell.errors import UsageError
from toolcell.results import AbandonedThread, ExecutionResult, SessionFile, Suspension
from toolcell.results.effects import CommitResult, Preflight, RevertResult
from toolcell.run.options import ResumeKwargs, RunKwargs, SessionRunKwargs
from toolcell.runtime import Runtime
from toolcell.support.loop_thread import LoopThread, each_of
from toolcell.tools import ToolRegistry

if TYPE_CHECKING:
    from toolcell.control.draft import Draft
    from toolcell.control.map_stream import MapItem
    from toolcell.control.steps_of_plans import PlanRows
    from toolcell.run.streaming import RunEvent
    from toolcell.sessions.session import Session
    from toolcell.sessions.settings import SessionKwargs

T = TypeVar("T")


class SyncRuntime:
    """A blocking `Runtime` with the same arguments. It also works inside a running event loop, as in a notebook.

    One that nobody closes ends with the program.
    """

    runtime: Runtime

    def __init__(self, registry: ToolRegistry | Iterable[Any] | None = None, **options: Any) -> None:
        self._begin(Runtime(registry, **options))

    def _begin(self, runtime: Any) -> None:
        self.runtime = runtime
        self._thread: LoopThread | None = None
        self._end: weakref.finalize[..., Any] | None = None
        self._servers: list[Any] = []
        """MCP servers that it is connected with."""

    def open(self) -> None:
        """Start everything that runs need; see `Runtime.open`. `with` does this and closes at the end of its block."""
        if self._thread is not None:
            raise UsageError(f"this {type(self).__name__} is already open; close it first, or make another one")
        thread = LoopThread()
        try:
            thread.call(self.runtime.open)
        except BaseException:
            thread.stop()
            raise
        self._thread = thread
        self._end = weakref.finalize(self, _end, thread, self.runtime, self._servers)

    def close(self) -> None:
        """End every sandbox; see `Runtime.close`. Does nothing when it is not open."""
        thread = self._thread
        if thread is None:
            return
        thread.check()
        self._thread = None
        if self._end is not None:
            self._end.detach()
        try:
            thread.call(partial(_close, self.runtime, self._servers))
        finally:
            thread.stop()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> NoReturn:
        name, other = type(self).__name__, type(self.runtime).__name__
        raise UsageError(f"a {name} is opened with `with {name}(...)`; for `async with` there is {other}")

    async def __aexit__(self, *exc_info: object) -> None:
        """Never reached: `__aenter__` raises."""

    def execute_code(self, source: str, **options: Unpack[RunKwargs]) -> ExecutionResult:
        """Run a script and wait for it; see `Runtime.execute_code` for options and errors."""
        return self._opened().call(partial(self.runtime.execute_code, source, **options))

    def stream(self, source: str, **options: Unpack[RunKwargs]) -> Iterator[RunEvent]:
        """Run a script and return what happens as events, for `for`; see `Runtime.stream`."""
        thread = self._opened()
        return each_of(thread, thread.run_sync(partial(self.runtime.stream, source, **options)))

    def map(self, source: str, inputs: Iterable[Mapping[str, Any]], **options: Any) -> Iterator[MapItem]:
        """Run a script once for each of many inputs and return the results, for `for`; see `Runtime.map`."""
        thread = self._opened()
        return each_of(thread, thread.run_sync(partial(self.runtime.map, source, inputs, **options)))

    def session(self, name: str | None = None, **options: Unpack[SessionKwargs]) -> SyncSession:
        """Return a session, to be used with `with`; see `Runtime.session`."""
        thread = self._opened()
        return SyncSession(self.runtime.session(name, **options), thread)

    def resume(
        self, token: str | Suspension, decisions: Any = None, **options: Unpack[ResumeKwargs]
    ) -> ExecutionResult:
        """Resume a suspended run and wait for it; see `Runtime.resume`."""
        return self._opened().call(partial(self.runtime.resume, token, decisions, **options))

    def commit(self, draft: ExecutionResult | Draft | str, approve: Any = "all", **options: Any) -> CommitResult:
        """Make the effects of a dry run and wait for them; see `Runtime.commit`."""
        return self._opened().call(partial(self.runtime.commit, draft, approve, **options))

    def preflight(self, source: str, **options: Any) -> Preflight:
        """Return the calls that a script can make; see `Runtime.preflight`."""
        return self._opened().call(partial(self.runtime.preflight, source, **options))

    def revert(self, result: ExecutionResult | CommitResult | PlanRows, **options: Any) -> RevertResult:
        """Undo the calls of a run or a commit; see `Runtime.revert`."""
        return self._opened().call(partial(self.runtime.revert, result, **options))

    def suspended_runs(self) -> list[Suspension]:
        """Return what each suspended run waits for; see `Runtime.suspended_runs`."""
        return self.runtime.suspended_runs()

    def interrupted_runs(self) -> list[str]:
        """Return the ids of runs that `resume` accepts without a token; see `Runtime.interrupted_runs`."""
        return self.runtime.interrupted_runs()

    def kept_sessions(self) -> list[str]:
        """Return the names of sessions that can be restored, or are open; see `Runtime.kept_sessions`."""
        return self.runtime.kept_sessions()

    def forget_session(self, name: str) -> None:
        """Remove the journal of a closed session; see `Runtime.forget_session`."""
        self.runtime.forget_session(name)

    def execute_plan(self, steps: Sequence[Mapping[str, Any]], **options: Any) -> PlanRows:
        """Run a plan and wait for it; see `Runtime.execute_plan`."""
        return self._opened().call(partial(self.runtime.execute_plan, steps, **options))

    def add_mcp_server(self, name: str, **options: Any) -> SyncMcpServer:
        """Add the tools of an MCP server to the registry, until this is closed; see `ToolRegistry.add_mcp_server`.

        Raises:
            McpServerError: the server cannot be started or reached, or does not speak MCP.
            UsageError: an option is wrong, or the extra `mcp` is not installed.
        """
        thread = self._opened()
        client = thread.call(partial(self.runtime.registry.add_mcp_server, name, **options))
        self._servers.append(client)
        return SyncMcpServer(client, thread)

    def abandoned_threads(self) -> tuple[AbandonedThread, ...]:
        """Return threads of tools that still run after their calls; see `Runtime.abandoned_threads`."""
        return self.runtime.abandoned_threads()

    @property
    def is_open(self) -> bool:
        """True between `open` and `close`."""
        return self._thread is not None

    def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run an async function in the loop of the inner `runtime`, and return its result. For adapters."""
        return self._opened().call(function)

    def _opened(self) -> LoopThread:
        if self._thread is None:
            name = type(self).__name__
            raise UsageError(f"this {name} is not open; use it as `with {name}(...) as runtime:`, or open() it first")
        self._thread.check()
        return self._thread


class SyncSession:
    """A blocking `Session` with the same methods. Ctrl-C interrupts its script, and the state is kept."""

    def __init__(self, session: Session, thread: LoopThread) -> None:
        self.session = session
        self._thread = thread

    def __enter__(self) -> Self:
        self._call(self.session.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Destroy the sandbox; see `Session.close`. Does nothing when the runtime is closed already."""
        if not self._thread.has_ended:
            self._call(self.session.close)

    def execute_code(self, source: str, **options: Unpack[SessionRunKwargs]) -> ExecutionResult:
        """Run a script and wait for it; see `Session.execute_code`."""
        return self._call(partial(self.session.execute_code, source, **options), self.session.interrupt)

    def stream(self, source: str, **options: Unpack[SessionRunKwargs]) -> Iterator[RunEvent]:
        """Run a script and return what happens as events; see `Session.stream`."""
        self._thread.check()
        return each_of(self._thread, self._thread.run_sync(partial(self.session.stream, source, **options)))

    @property
    def waiting(self) -> Suspension | str:
        """What the last script waits for; see `Session.waiting`."""
        return self.session.waiting

    def resume(
        self, token: str | Suspension, decisions: Any = None, **options: Unpack[ResumeKwargs]
    ) -> ExecutionResult:
        """Carry the script on that waits; see `Session.resume`."""
        return self._call(partial(self.session.resume, token, decisions, **options), self.session.interrupt)

    def abandon(self) -> None:
        """Give up the script that waits; see `Session.abandon`."""
        self._call(self.session.abandon)

    def put_files(self, files: Any) -> None:
        """Write files to the workspace; see `Session.put_files`."""
        self._call(partial(self.session.put_files, files))

    def files(self) -> tuple[SessionFile, ...]:
        """List the files in the workspace; see `Session.files`."""
        return self._call(self.session.files)

    def read_file(self, name: str) -> bytes:
        """Return the content of a file in the workspace; see `Session.read_file`."""
        return self._call(partial(self.session.read_file, name))

    def interrupt(self) -> bool:
        """Interrupt the script that another thread runs; see `Session.interrupt`."""
        return self._call(self.session.interrupt)

    def reset(self) -> None:
        """Forget everything; see `Session.reset`."""
        self._call(self.session.reset)

    def pause(self) -> bool:
        """Stop the sandbox's processes until the next script; see `Session.pause`."""
        return self._call(self.session.pause)

    def put_down(self) -> None:
        """Destroy the sandbox until the next script; see `Session.put_down`."""
        self._call(self.session.put_down)

    def fork(self, name: str | None = None) -> SyncSession:
        """Return another session with the same state; see `Session.fork`."""
        return SyncSession(self._call(partial(self.session.fork, name)), self._thread)

    def _call(self, function: Callable[[], Awaitable[T]], interrupt: Callable[[], Awaitable[Any]] | None = None) -> T:
        self._thread.check()
        return self._thread.call(function, interrupt)


class SyncMcpServer:
    """A blocking `McpClient`: the tools of one MCP server. They go when it, or its `SyncRuntime`, is closed."""

    def __init__(self, client: Any, thread: LoopThread) -> None:
        self.client = client
        """The `McpClient`. Its attributes may be read from any thread."""
        self._thread = thread

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def reconnect(self) -> None:
        """Connect now with a server that was given up or is waited for; see `McpClient.reconnect`."""
        self._thread.check()
        self._thread.call(self.client.reconnect)

    def close(self) -> None:
        """Take the tools out of the registry and end the server. Does nothing when that is done."""
        if self.client.state != "closed":
            self._thread.check()
            self._thread.call(self.client.close)


async def _close(runtime: Runtime, servers: list[Any]) -> None:
    """Close a runtime, and then the servers whose tools its runs called."""
    try:
        await runtime.close()
    finally:
        while servers:
            await servers.pop().close()


def _end(thread: LoopThread, runtime: Runtime, servers: list[Any]) -> None:
    """Close what nobody closed: at the end of the program, or when the SyncRuntime is not used any more."""
    try:
        thread.check()
    except UsageError:  # in a forked child it is not ours
        return
    try:
        thread.call(partial(_close, runtime, servers))
    finally:
        thread.stop()
