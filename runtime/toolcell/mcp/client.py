"""`McpClient`: the tools of one MCP server in a registry, from `registry.add_mcp_server` until it is closed.

A task of its own holds the connection. A server that ends is started again, with growing pauses; meanwhile its calls
fail and say so. Secrets in `env` and `headers` stay on the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import anyio
import httpx2
from anyio.abc import TaskStatus
from mcp import MCPError
from mcp.client import Client, InputRequiredRoundsExceededError
from mcp.client.subscriptions import Subscription, SubscriptionLost
from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT, Implementation, ToolListChangedNotification
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

import toolcell
from toolcell.errors import McpServerError, RegistrationError, UsageError
from toolcell.lifetime import Lifetime, OpenedInBlock
from toolcell.mcp.answers import INVALID_RESULT, as_tool_result
from toolcell.mcp.catalogue import Changed, McpCatalogue, Selection
from toolcell.mcp.definitions import Approve, McpProblem, McpTool, safe_text
from toolcell.mcp.requests import Elicit, Sample, request_callbacks
from toolcell.mcp.transports import HttpTransport, ProcessTransport
from toolcell.tools.adapters import with_options
from toolcell.tools.checks import check_kind, check_one_of, check_seconds
from toolcell.tools.context import ToolContext
from toolcell.tools.options import ToolOptions
from toolcell.tools.registry import ToolRegistry
from toolcell.tools.result import ErrorCode, Status, ToolResult
from toolcell.tools.spec import Invoke

CONNECT_TIMEOUT_S = 30.0
"""For each answer while connecting and listing."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 30.0
"""Before a server that ended is started again: doubled each time, until it answers a call."""
RELIST_PAUSE_S = 0.2
"""After a list was read, before it is read again: a server may announce any number of changes."""
MAX_ERROR_CHARS = 500

_NAMESPACE = re.compile(r"[A-Za-z0-9_-]{1,32}")
_LOST = (httpx2.HTTPError, OSError, anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream)

Transport = ProcessTransport | HttpTransport
Connection = tuple[Client, Transport]


class McpClient(OpenedInBlock):
    """Connects a registry with one MCP server."""

    def __init__(
        self,
        registry: ToolRegistry,
        name: str,
        *,
        command: Sequence[str] | None = None,
        url: str | None = None,
        headers: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        allow: Iterable[str] = (),
        deny: Iterable[str] = (),
        labels: str | Iterable[str] | Mapping[str, Any] = (),
        timeout_s: float | None = None,
        approve: Approve = "destructive",
        changed: Changed = "refuse",
        pins: Mapping[str, str] | None = None,
        elicitation: Elicit | None = None,
        sampling: Sample | None = None,
        **options: Any,
    ) -> None:
        if not _NAMESPACE.fullmatch(str(name)):
            raise RegistrationError(f"MCP server {str(name)[:80]!r}: a name must match ^{_NAMESPACE.pattern}$")
        self.name = name
        self._new_transport = _transport_of(name, command, url, headers, env, cwd)
        check_one_of("approve", approve, ("destructive", "all", "none"))
        check_one_of("changed", changed, ("refuse", "accept"))
        check_seconds("timeout_s", timeout_s, optional=True)
        known = with_options(ToolOptions(timeout_s=timeout_s), {**_labels_of(labels), **options})
        selection = Selection(_globs("allow", allow), _globs("deny", deny), approve, changed, dict(pins or {}), known)
        self._catalogue = McpCatalogue(name, registry, selection, self._invoke)
        self._callbacks = request_callbacks(elicitation, sampling)
        self._lifetime = Lifetime("McpClient", self._enter)
        self._connection: Connection | None = None
        self._home: asyncio.AbstractEventLoop | None = None
        self._changed = anyio.Event()
        self._problem = "it was not started"
        self._pause_s = FIRST_PAUSE_S
        self.restarts = 0
        """How often the server was started or connected to again."""

    @property
    def is_connected(self) -> bool:
        """True while the server answers."""
        return self._connection is not None

    @property
    def problems(self) -> tuple[McpProblem, ...]:
        """What the server did or said that was not taken as it is, the latest last."""
        return tuple(self._catalogue.problems)

    @property
    def digests(self) -> dict[str, str]:
        """The digest of each tool's definition, by the server's own name: `pins=` of a later process."""
        return {name: tool.digest for name, tool in self._catalogue.tools.items()}

    @property
    def tool_names(self) -> tuple[str, ...]:
        """The names that its tools are registered by."""
        return tuple(tool.definition.name for tool in self._catalogue.tools.values())

    def __repr__(self) -> str:
        state = "connected" if self.is_connected else "not connected"
        return f"<McpClient {self.name}: {len(self._catalogue.tools)} tools, {state}>"

    async def open(self) -> None:
        """Connect, and register the tools.

        Raises:
            McpServerError: the server cannot be started or reached, or does not speak MCP.

        Cancellation: nothing is left of it.
        """
        await self._lifetime.open()

    async def close(self) -> None:
        """Take the tools out of the registry and end the server. Safe to call twice.

        Cancellation: shielded. When this returns, no process of it is left.
        """
        await self._lifetime.close()

    async def _enter(self, stack: AsyncExitStack) -> None:
        self._home = asyncio._get_running_loop()
        stack.callback(self._catalogue.clear)
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        await tasks.start(self._keep)

    # The connection

    async def _keep(self, *, task_status: TaskStatus[None]) -> None:
        """Hold a connection, and make another one when it is lost, until this is cancelled."""
        started = False

        def ready() -> None:
            nonlocal started
            if not started:
                started = True
                task_status.started()

        while True:
            transport = self._new_transport()
            try:
                await self._hold(transport, ready)
                problem = transport.problem
            except Exception as exc:
                problem = _said(exc, transport)
                if not started:
                    raise McpServerError(f"MCP server {self.name}: {problem}") from exc
            finally:
                self._connection = None
            self._problem = problem
            self._catalogue.report("server", f"the connection ended: {problem}")
            await anyio.sleep(self._pause_s)
            self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)
            self.restarts += 1

    async def _hold(self, transport: Transport, ready: Callable[[], None]) -> None:
        """Connect, read the tools, and wait until the connection is lost."""
        client = Client(
            transport.connect(),
            cache=None,
            client_info=Implementation(name="toolcell", version=toolcell.__version__),
            message_handler=self._on_message,
            read_timeout_seconds=CONNECT_TIMEOUT_S,
            **self._callbacks,
        )
        async with client, AsyncExitStack() as stack:
            # Results are checked in `answers`, by a validator that no pattern of a server can keep busy.
            setattr(client.session, "validate_tool_result", _accept)  # noqa: B010
            self._changed = anyio.Event()
            changes = await _changes(client, stack)  # before the list is read: none is missed
            await self._catalogue.refresh(client)
            self._connection = client, transport
            ready()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._follow, client)
                if changes is not None:
                    tasks.start_soon(self._watch, changes)
                await transport.ended.wait()
                self._connection, self._problem = None, transport.problem
                tasks.cancel_scope.cancel()

    async def _follow(self, client: Client) -> None:
        """Read the list again each time the server says that it changed."""
        while True:
            await self._changed.wait()
            self._changed = anyio.Event()
            try:
                await self._catalogue.refresh(client)
            except (MCPError, ValidationError) as exc:
                self._catalogue.report("server", f"its list cannot be read again: {_said(exc)}")
            await anyio.sleep(RELIST_PAUSE_S)

    async def _watch(self, changes: Subscription) -> None:
        with contextlib.suppress(MCPError, SubscriptionLost):
            async for _ in changes:
                self._changed.set()

    async def _on_message(self, message: object) -> None:
        if isinstance(message, ToolListChangedNotification):
            self._changed.set()
        elif isinstance(message, Exception):
            self._catalogue.report("server", f"it sent what is no JSON-RPC: {type(message).__name__}")

    # Calls

    def _invoke(self, tool: McpTool) -> Invoke:
        def invoke(context: ToolContext) -> Awaitable[ToolResult]:
            return self._call_at_home(tool, dict(context.call.args), context.for_any_thread())

        return invoke

    async def _call_at_home(self, tool: McpTool, args: dict[str, Any], context: ToolContext) -> ToolResult:
        """Make a call in the event loop that holds the connection, from whichever one it comes."""
        home = self._home
        if home is None or home is asyncio._get_running_loop():
            return await self._call(tool, args, context)
        if home.is_closed() or not home.is_running():
            return self._unavailable("the event loop that held its connection has ended")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._call(tool, args, context), home))

    async def _call(self, tool: McpTool, args: dict[str, Any], context: ToolContext) -> ToolResult:
        if (withdrawn := self._catalogue.withdrawn.get(tool.remote_name)) is not None:
            message = f"MCP server {self.name}: {withdrawn}. A person has to look at it and connect the server again"
            return ToolResult.fail(message, code="definition_changed", status=Status.BLOCKED)
        connection = self._connection
        if connection is None:
            return self._unavailable(f"{self._problem}; it is being started again")
        client, transport = connection

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            said = safe_text(message or "", MAX_ERROR_CHARS)
            context.update(said or f"{progress:g}" + (f" of {total:g}" if total is not None else ""))

        timeout_s = tool.options.timeout_s if tool.options.timeout_s is not None else math.inf
        limit = timeout_s + 1.0 if timeout_s != math.inf else _FOREVER_S  # the call's own limit comes first
        try:
            answer = await client.call_tool(tool.remote_name, args, limit, on_progress)
        except MCPError as exc:
            if exc.error.code == CONNECTION_CLOSED or transport.ended.is_set():
                return self._lost(tool, transport, transport.problem)
            return self._refused(exc)
        except _LOST as exc:
            return self._lost(tool, transport, _said(exc))
        except (ValidationError, InputRequiredRoundsExceededError, RuntimeError) as exc:
            message = f"MCP server {self.name}: the call was made, and its answer is not MCP: {_said(exc)}"
            return ToolResult.fail(message, code=INVALID_RESULT)
        self._pause_s = FIRST_PAUSE_S
        return as_tool_result(self.name, answer, tool.validator)

    def _refused(self, exc: MCPError) -> ToolResult:
        if exc.error.code == REQUEST_TIMEOUT:
            message = f"MCP server {self.name}: no answer in time"
            return ToolResult.fail(message, code=ErrorCode.TIMEOUT, status=Status.TIMEOUT)
        return ToolResult.fail(f"MCP server {self.name}: {_said(exc)}")

    def _lost(self, tool: McpTool, transport: Transport, problem: str) -> ToolResult:
        """Note that the connection is lost, and return the failure of a call that was on its way."""
        transport.ended.set()
        self._connection, self._problem = None, problem
        again = tool.options.read_only or tool.options.idempotent
        known = "" if again else "; whether the call was carried out is not known"
        message = f"MCP server {self.name} was lost during the call: {problem}{known}"
        return ToolResult.fail(message, code=ErrorCode.UNAVAILABLE, retryable=again)

    def _unavailable(self, problem: str) -> ToolResult:
        message = f"MCP server {self.name} is not there: {problem}; the call was not made"
        return ToolResult.fail(message, code=ErrorCode.UNAVAILABLE)


_FOREVER_S = 1e7
"""The SDK takes no infinity. The call's own timeout ends it before."""


async def _changes(client: Client, stack: AsyncExitStack) -> Subscription | None:
    """Ask for news of the list, in protocols in which one has to ask; None when there are none to ask for."""
    if client.protocol_version not in MODERN_PROTOCOL_VERSIONS:
        return None
    try:
        return await stack.enter_async_context(client.listen(tools_list_changed=True))
    except (MCPError, SubscriptionLost, TimeoutError):
        return None


async def _accept(name: str, result: object) -> None:
    """Accept every result."""


def _said(exc: BaseException, transport: Transport | None = None) -> str:
    """Return what an exception says, bounded and without hidden characters."""
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    if isinstance(exc, McpServerError):
        return safe_text(str(exc), MAX_ERROR_CHARS * 4)
    is_lost = isinstance(exc, _LOST) or (isinstance(exc, MCPError) and exc.error.code == CONNECTION_CLOSED)
    if is_lost and transport is not None and transport.ended.is_set():
        return safe_text(transport.problem, MAX_ERROR_CHARS * 4)
    if isinstance(exc, MCPError):
        return safe_text(exc.error.message, MAX_ERROR_CHARS) or f"error {exc.error.code}"
    if isinstance(exc, ValidationError):
        first = exc.errors(include_url=False, include_input=False)[0]
        return safe_text(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", MAX_ERROR_CHARS)
    return safe_text(f"{type(exc).__name__}: {exc}", MAX_ERROR_CHARS)


def _transport_of(
    name: str,
    command: Sequence[str] | None,
    url: str | None,
    headers: Mapping[str, str] | None,
    env: Mapping[str, str] | None,
    cwd: str | None,
) -> Callable[[], Transport]:
    """Return what makes the transport of each connection.

    Raises:
        UsageError: there is no command and no URL, or both, or one of them is wrong.
    """
    if (command is None) == (url is None):
        raise UsageError(f"MCP server {name}: give it command=[...] or url=..., and not both")
    if command is not None:
        words = _words(command)
        if not words:
            raise UsageError(f"MCP server {name}: command is a list such as ['npx', 'server'], not {command!r}")
        if headers is not None:
            raise UsageError(f"MCP server {name}: headers are for url=...; a command has env=...")
        check_kind("env", env, Mapping, type(None))
        return lambda: ProcessTransport(words, env or {}, cwd)
    check_kind("url", url, str)
    check_kind("headers", headers, Mapping, type(None))
    if env is not None or cwd is not None:
        raise UsageError(f"MCP server {name}: env and cwd are for command=[...]; a URL has headers=...")
    place = str(url)
    parsed = httpx2.URL(place)
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UsageError(f"MCP server {name}: a URL begins with http:// or https://, and this is {place[:80]!r}")
    return lambda: HttpTransport(place, headers or {})


def _words(command: object) -> list[str]:
    """Return a command as its words; none when it is no list of words."""
    words = [] if isinstance(command, str) or not isinstance(command, Sequence) else list(command)
    return words if words and all(isinstance(word, str) for word in words) and words[0] else []


def _globs(what: str, given: Iterable[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        raise UsageError(f"{what} takes a list of names or globs, not {given!r}; write [{given!r}]")
    globs = tuple(given)
    for each in globs:
        check_kind(f"{what}: each", each, str)
    return globs


def _labels_of(labels: Any) -> dict[str, Any]:
    """Return `reads` and `sends`. One label or a list of them is both: what a server gives, and what it gets."""
    if isinstance(labels, Mapping):
        if unknown := labels.keys() - {"reads", "sends"}:
            raise UsageError(f"labels has {sorted(map(str, unknown))}; write {{'reads': ..., 'sends': ...}}")
        return dict(labels)
    return {"reads": labels, "sends": labels} if labels else {}


async def add_mcp_server(registry: ToolRegistry, name: str, **options: Any) -> McpClient:
    """Connect a registry with a server; see `ToolRegistry.add_mcp_server`."""
    client = McpClient(registry, name, **options)
    await client.open()
    return client
