"""`SyncRuntime`: a blocking `Runtime` for scripts and notebooks. Its event loop runs in a thread of its own."""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, Unpack

from toolcell.errors import UsageError
from toolcell.results import AbandonedThread, Suspension
from toolcell.run.options import RunKwargs
from toolcell.runtime import Runtime
from toolcell.support.loop_thread import LoopThread, blocking, each_of
from toolcell.tools import ToolRegistry

if TYPE_CHECKING:
    from toolcell.control.map_stream import MapItem
    from toolcell.run.streaming import RunEvent
    from toolcell.sessions.blocking import SyncSession
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

    execute_code = blocking(Runtime.execute_code)
    execute_plan = blocking(Runtime.execute_plan)
    preflight = blocking(Runtime.preflight)
    resume = blocking(Runtime.resume)
    commit = blocking(Runtime.commit)
    revert = blocking(Runtime.revert)

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
        from toolcell.sessions.blocking import SyncSession

        thread = self._opened()
        return SyncSession(self.runtime.session(name, **options), thread)

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

    def _wait(self, name: str, *args: Any, **options: Any) -> Any:
        return self.call(partial(getattr(self.runtime, name), *args, **options))

    def _opened(self) -> LoopThread:
        if self._thread is None:
            name = type(self).__name__
            raise UsageError(f"this {name} is not open; use it as `with {name}(...) as runtime:`, or open() it first")
        self._thread.check()
        return self._thread


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
