"""`McpClient`: the tools of one MCP server in a registry, from `registry.add_mcp_server` until it is closed.

A task of its own holds the connection. A server that ends is started again, with growing pauses; meanwhile its calls
fail and say so. Secrets in `env` and `headers` stay on the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import anyio
import httpx2
from anyio.abc import TaskStatus
from mcp import MCPError
from mcp.client import Client, InputRequiredRoundsExceededError
from mcp.client.subscriptions import Subscription, SubscriptionLost
from mcp_types import (
    CONNECTION_CLOSED,
    REQUEST_TIMEOUT,
    CallToolResult,
    Implementation,
    ToolListChangedNotification,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

from toolcell._version import __version__
from toolcell.calls.concurrency import first_leaf
from toolcell.calls.definition import RESERVED
from toolcell.calls.values import in_thread_if_large
from toolcell.errors import McpServerError, RegistrationError, UsageError
from toolcell.mcp.answers import INVALID_RESULT, as_tool_result, mismatch_of
from toolcell.mcp.broken_tools import ToolPages
from toolcell.mcp.catalogue import Broken, Changed, McpCatalogue, Selection
from toolcell.mcp.definitions import Approve, McpProblem, McpTool
from toolcell.mcp.http_refusals import ANSWER_LOST, SESSION_GONE
from toolcell.mcp.login import MIN_SECRET_CHARS, Login
from toolcell.mcp.oauth import Auth, auth_of
from toolcell.mcp.requests import Elicit, Questions, Sample, request_callbacks
from toolcell.mcp.structure import MAX_BLOCKS, too_many_errors
from toolcell.mcp.transports import OF_SERVER, HttpTransport, ProcessTransport
from toolcell.support import event_loop
from toolcell.support.checks import check_count, check_kind, check_one_of, check_seconds
from toolcell.support.event_loop import ChangeEvent
from toolcell.support.foreign_definitions import safe_text
from toolcell.support.host_work import about_bytes
from toolcell.support.lifetime import Lifetime, OpenedInBlock
from toolcell.support.secrets import search_for
from toolcell.tools import ErrorCode, Status, ToolContext, ToolOptions, ToolRegistry, ToolResult

if TYPE_CHECKING:
    from toolcell.egress import Egress

# What a caller of `add_mcp_server` gives, checked: where the server is, which tools of it, which labels.


Transport = ProcessTransport | HttpTransport

VARIABLE = re.compile(r"\$\{[\s{]*[A-Za-z_][^{}$]*\}+|\$\{\s*(?i:env|input):[^{}]*$")
"""What the files of MCP clients have in place of a value: `${NAME}`, `${{NAME}}`, `${env:NAME}`, `${input:NAME}`; also
one of the last two without its end."""


def transport_of(
    name: str,
    command: Sequence[str] | None,
    url: str | None,
    headers: Mapping[str, str] | None,
    env: Mapping[str, str] | None,
    cwd: str | None,
    login: Login | None = None,
    egress: Egress | None = None,
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
        if headers is not None or login is not None:
            what = "headers are" if headers is not None else "auth is"
            raise UsageError(f"MCP server {name}: {what} for url=...; a command has env=...")
        if egress is not None:
            raise UsageError(f"MCP server {name}: egress is for url=...; a command is not watched")
        variables = _texts(f"MCP server {name}: env", env)
        return lambda: ProcessTransport(words, variables, cwd, hiding(variables))
    check_kind("url", url, str)
    if egress is not None:
        from toolcell.egress import Egress  # needs httpx

        check_kind("egress", egress, Egress, cure='write Egress(Allow("mcp.example.com", methods=["*"]))')
    fields = _texts(f"MCP server {name}: headers", headers)
    if env is not None or cwd is not None:
        raise UsageError(f"MCP server {name}: env and cwd are for command=[...]; a URL has headers=...")
    place = str(url)
    parsed = httpx2.URL(place)
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UsageError(f"MCP server {name}: a URL begins with http:// or https://, and this is {place[:80]!r}")
    if login is not None and "authorization" in (field.lower() for field in fields):
        raise UsageError(f"MCP server {name}: headers have an Authorization already; leave it out, or auth")
    return lambda: HttpTransport(place, fields, login, egress)


def login_of(name: str, url: object, auth: object) -> Login | None:
    """Return the login that `auth=` asks for.

    Raises:
        UsageError: `auth` or the URL is wrong.
    """
    known = auth_of(auth)
    if known is None:
        return None
    if not isinstance(url, str):
        raise UsageError(f"MCP server {name}: auth is for url=...; a command has env=...")
    return Login(name, url, known)


def _texts(what: str, given: Mapping[Any, Any] | None) -> Mapping[str, str]:
    """Return texts by name, without a value of them in any error: they hold tokens."""
    if given is not None and not isinstance(given, Mapping):
        raise UsageError(f"{what} must be a dict of texts, not of type {type(given).__name__}")
    for key, value in (given or {}).items():
        if value is None:
            raise UsageError(f"{what} has no text for {key!r}: it is None; is the variable that it comes from set?")
        if not isinstance(key, str) or not isinstance(value, str):
            raise UsageError(f"{what} maps text to text, and {key!r} to {type(value).__name__}; write str(...)")
        if (left := VARIABLE.search(value)) is not None:
            raise UsageError(f"{what}: {key!r} holds {left[0][:80]}, and nothing replaces that here; write the value")
    return given or {}


def hiding(
    given: Mapping[str, str] | None, login: Login | None = None, egress: Egress | None = None
) -> Callable[[str], str]:
    """Return what hides tokens and secrets in a text that a model may read, and the values of variables or headers
    unless they are paths.

    A server that fails may say which token it was given.
    """
    values = {part for value in (given or {}).values() for part in (str(value), *str(value).split())}
    secrets = frozenset(each for each in values if len(each) >= MIN_SECRET_CHARS and not os.path.exists(each))

    def hide(text: str) -> str:
        text = search_for(secrets).hide(text)[0]
        text = egress.allowed.echoes.clean_text(text) if egress is not None else text
        return login.hide(text) if login is not None else text

    return hide


def _words(command: object) -> list[str]:
    """Return a command as its words; none when it is not a list of words."""
    words = [] if isinstance(command, str) or not isinstance(command, Sequence) else list(command)
    return words if words and all(isinstance(word, str) for word in words) and words[0] else []


def globs(what: str, given: Iterable[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        raise UsageError(f"{what} takes a list of names or globs, not {given!r}; write [{given!r}]")
    globs = tuple(given)
    for each in globs:
        check_kind(f"{what}: each", each, str)
    return globs


def labels_of(labels: Any) -> dict[str, Any]:
    """Return `reads` and `sends`. One label or a list of them is both: what a server gives, and what it gets."""
    if isinstance(labels, Mapping):
        if unknown := labels.keys() - {"reads", "sends"}:
            raise UsageError(f"labels has {sorted(map(str, unknown))}; write {{'reads': ..., 'sends': ...}}")
        return dict(labels)
    return {"reads": labels, "sends": labels} if labels else {}


if TYPE_CHECKING:
    from toolcell.egress import Egress


# When a server that ended is started again, and when it is given up. Pure: the time is an argument.


FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 30.0
"""Before a server that ended is started again: doubled each time, until it answers a call."""
MAX_RESTARTS, RESTART_WINDOW_S = 10, 300.0

State = Literal["connected", "restarting", "given_up", "closed"]


class Restarts:
    """The ends of one server's connections, and what follows from them."""

    def __init__(self, max_restarts: int, window_s: float) -> None:
        """A server is given up at its next end, once it was started again `max_restarts` times within `window_s`."""
        check_count("max_restarts", max_restarts, least=0)
        check_seconds("restart_window_s", window_s)
        self._most, self._window_s = max_restarts, window_s
        self._ends = deque[float]()
        self._pause_s = FIRST_PAUSE_S
        self._last_try = -math.inf
        self.count = 0
        """How often the server was started or connected to again."""
        self.is_given_up = False
        self.last_problem = ""

    @property
    def why(self) -> str:
        """Why the server is given up."""
        times = f"{len(self._ends)} times within {self._window_s:g} s" if self._most else "and max_restarts is 0"
        return f"it ended or could not be reached, {times}; the last time: {self.last_problem}"

    def pause_after(self, problem: str, now: float) -> float:
        """Take note of an end; return the seconds until the next start, infinity for a server that is given up."""
        self.last_problem, self._last_try = problem, now
        self._ends.append(now)
        while now - self._ends[0] > self._window_s:
            self._ends.popleft()
        if self.is_given_up or len(self._ends) > self._most:
            self.is_given_up = True
            return math.inf
        pause_s, self._pause_s = self._pause_s, min(self._pause_s * 2, LONGEST_PAUSE_S)
        return pause_s

    def note_answer(self) -> None:
        """A call was answered: the next end is a first one, as far as the pause goes."""
        self._pause_s = FIRST_PAUSE_S

    def begin_anew(self) -> None:
        """Forget all ends: somebody asks for the server."""
        self._ends.clear()
        self._pause_s, self.is_given_up = FIRST_PAUSE_S, False

    def may_try(self, now: float) -> bool:
        """Return whether a server that was given up is tried once more: once in each `window_s`."""
        if now - self._last_try <= self._window_s:
            return False
        self._last_try = now
        return True


CONNECT_TIMEOUT_S = 30.0
"""For each answer while connecting and listing."""
RELIST_PAUSE_S = 0.2
"""After a list was read, before it is read again: a server may announce any number of changes."""
RELIST_TIMES, LONGEST_RELIST_PAUSE_S = 9.0, 60.0
"""A list that takes long to read is read again after so many times as long: a server has a tenth of the event loop."""
MAX_ERROR_CHARS = 500
AGAIN_S = 0.5
"""Before a call that harms nothing is made again."""
FORGOTTEN_S = 1.0
"""What calls under way are given when the server has forgotten their session, before a new one begins."""

_NAMESPACE = re.compile(r"[A-Za-z0-9_-]{1,32}")
_LOST = (httpx2.HTTPError, OSError, anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream)

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
        auth: Auth | Literal["oauth"] | None = None,
        egress: Egress | None = None,
        allow: Iterable[str] = (),
        deny: Iterable[str] = (),
        labels: str | Iterable[str] | Mapping[str, Any] = (),
        timeout_s: float | None = None,
        approve: Approve = "destructive",
        changed: Changed = "refuse",
        broken: Broken = "leave_out",
        pins: Mapping[str, str] | None = None,
        elicitation: Elicit | None = None,
        sampling: Sample | None = None,
        max_restarts: int = MAX_RESTARTS,
        restart_window_s: float = RESTART_WINDOW_S,
        **options: Any,
    ) -> None:
        if not _NAMESPACE.fullmatch(str(name)):
            raise RegistrationError(f"MCP server {str(name)[:80]!r}: a name must match ^{_NAMESPACE.pattern}$")
        if name.casefold() == RESERVED:
            raise RegistrationError(f"MCP server {name!r}: this namespace is toolcell's own; give it another name")
        self.name = name
        self._login = login_of(name, url, auth)
        self._new_transport = transport_of(name, command, url, headers, env, cwd, self._login, egress)
        self._hide = hiding(env or headers, self._login, egress)
        check_one_of("approve", approve, ("destructive", "all", "none"))
        check_one_of("changed", changed, ("refuse", "accept"))
        check_one_of("broken", broken, ("leave_out", "refuse"))
        check_seconds("timeout_s", timeout_s, optional=True)
        known = ToolOptions(timeout_s=timeout_s).changed({**labels_of(labels), **options})
        selection = Selection(
            globs("allow", allow),
            globs("deny", deny),
            approve=approve,
            changed=changed,
            pins=dict(pins or {}),
            options=known,
            broken=broken,
        )
        self._catalogue = McpCatalogue(name, registry, selection, self._invoke)
        self._questions = Questions()
        self._callbacks = request_callbacks(self._questions, elicitation, sampling)
        self._lifetime = Lifetime("McpClient", self._enter)
        self._connection: Connection | None = None
        self._is_renewing = False
        """A new session begins in place of one that the server has forgotten: calls wait for it."""
        self._under_way = Counter[Transport]()
        """Calls without an answer."""
        self._answered = ChangeEvent()
        self._home: asyncio.AbstractEventLoop | None = None
        self._changed = anyio.Event()
        self._problem = "it was not started"
        self._restarts = Restarts(max_restarts, restart_window_s)
        self._wanted = anyio.Event()
        """Somebody asks for a server that was given up."""
        self._tried = ChangeEvent()
        """The next attempt to connect has come to its end."""

    @property
    def state(self) -> State:
        """Whether it is connected, being started again, given up after too many ends, or closed."""
        if self._connection is not None:
            return "connected"
        if not self._lifetime.is_open:
            return "closed"
        return "given_up" if self._restarts.is_given_up else "restarting"

    @property
    def restarts(self) -> int:
        """How often the server was started or connected to again."""
        return self._restarts.count

    @property
    def last_problem(self) -> str:
        """Why it was not connected the last time; empty when it always was."""
        return self._restarts.last_problem

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
        return f"<McpClient {self.name}: {len(self._catalogue.tools)} tools, {self.state.replace('_', ' ')}>"

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

    async def reconnect(self) -> None:
        """Connect with a server that was given up, or that is waited for, now. Does nothing when it is connected.

        Raises:
            McpServerError: it cannot be started or reached still; the next attempts come by themselves.
            UsageError: this is not open here.
        """
        self._lifetime.check()
        if self._connection is not None:
            return
        self._restarts.begin_anew()
        if self._login is not None:
            self._login.begin_connection(by_person=True)
        self._wanted.set()
        await self._tried.wait()
        if self._connection is None:
            raise McpServerError(f"MCP server {self.name}: {self._problem}")

    async def _enter(self, stack: AsyncExitStack) -> None:
        self._home = event_loop.asyncio_loop()
        stack.callback(self._catalogue.clear)
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        await tasks.start(self._keep)

    # The connection

    async def _keep(self, *, task_status: TaskStatus[None]) -> None:
        """Hold a connection, and make another one when it is lost, until this is cancelled."""
        is_started = False

        def ready() -> None:
            nonlocal is_started
            self._restarts.is_given_up = False
            self._tried.notify()
            if not is_started:
                is_started = True
                task_status.started()

        while True:
            transport = self._new_transport()
            try:
                await self._hold(transport, ready)
                problem = transport.problem
            except Exception as exc:
                problem = self._error_text(exc, transport)
                if not is_started:
                    raise McpServerError(f"MCP server {self.name}: {problem}") from exc
            finally:
                self._connection = None
            self._problem = problem
            self._catalogue.report("server", f"the connection ended: {problem}")
            pause_s = self._restarts.pause_after(problem, anyio.current_time())
            if self._restarts.is_given_up:
                self._catalogue.report("server", f"it is given up: {self._restarts.why}")
            self._tried.notify()
            with anyio.move_on_after(pause_s):
                await self._wanted.wait()
            self._wanted = anyio.Event()
            self._restarts.count += 1

    async def _hold(self, transport: Transport, ready: Callable[[], None]) -> None:
        """Connect, read the tools, and wait until the connection is lost."""
        client = Client(
            transport.connect(),
            cache=None,
            client_info=Implementation(name="toolcell", version=__version__),
            message_handler=self._on_message,
            read_timeout_seconds=CONNECT_TIMEOUT_S,
            **self._callbacks,
        )
        async with client, AsyncExitStack() as stack:
            transport.listing.version = client.protocol_version
            self._changed = anyio.Event()
            changes = await _changes(client, stack)  # before the list is read: none is missed
            await self._catalogue.refresh(client, transport.listing)
            self._connection, self._is_renewing = (client, transport), False
            ready()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._follow, client, transport.listing)
                if changes is not None:
                    tasks.start_soon(self._watch, changes)
                await transport.ended.wait()
                self._connection, self._problem = None, transport.problem
                tasks.cancel_scope.cancel()

    async def _follow(self, client: Client, listing: ToolPages) -> None:
        """Read the list again each time the server says that it changed."""
        while True:
            await self._changed.wait()
            self._changed, began = anyio.Event(), anyio.current_time()
            try:
                await self._catalogue.refresh(client, listing)
            except (MCPError, McpServerError, ValidationError) as exc:
                self._catalogue.report("server", f"its list cannot be read again: {self._error_text(exc)}")
            await anyio.sleep(relist_pause_s(anyio.current_time() - began))

    async def _watch(self, changes: Subscription) -> None:
        with contextlib.suppress(MCPError, SubscriptionLost):
            async for _ in changes:
                self._changed.set()

    async def _on_message(self, message: object) -> None:
        if isinstance(message, ToolListChangedNotification):
            self._changed.set()
        elif isinstance(message, Exception):
            self._catalogue.report("server", f"it sent what is not JSON-RPC: {type(message).__name__}")

    # Calls

    def _invoke(self, tool: McpTool) -> Callable[[ToolContext], Awaitable[ToolResult]]:
        def invoke(context: ToolContext) -> Awaitable[ToolResult]:
            return self._call_at_home(tool, dict(context.call.args), context.for_any_thread())

        return invoke

    async def _call_at_home(self, tool: McpTool, args: dict[str, Any], context: ToolContext) -> ToolResult:
        """Make a call in the event loop that holds the connection, from whichever one it comes."""
        home = self._home
        if home is None or home is event_loop.asyncio_loop():
            answer = await self._call(tool, args, context)
        elif home.is_closed() or not home.is_running():
            return self._unavailable("the event loop that held its connection has ended")
        else:
            asked = asyncio.run_coroutine_threadsafe(self._call(tool, args, context), home)
            answer = await asyncio.wrap_future(asked)
        if isinstance(answer, ToolResult):
            return answer
        with context.untimed():
            return await self._read(tool, answer, context)

    @contextlib.contextmanager
    def _noted(self, transport: Transport) -> Iterator[None]:
        self._under_way[transport] += 1
        try:
            yield
        finally:
            self._under_way[transport] -= 1
            self._answered.notify()
            if not self._under_way[transport]:
                del self._under_way[transport]

    async def _call_in_new_session(
        self, tool: McpTool, args: dict[str, Any], context: ToolContext, transport: Transport, is_again: bool
    ) -> CallToolResult | ToolResult:
        """Begin a new session with a server that has forgotten this one, and make the call in it."""
        problem = "the server has forgotten the session"
        if self._connection is not None and self._connection[1] is transport:
            self._connection, self._problem, self._is_renewing = None, problem, True
            with anyio.move_on_after(FORGOTTEN_S):  # others are told the same, or have their answer
                while self._under_way[transport]:
                    await self._answered.wait()
            transport.ended.set()
        if is_again:
            return self._unavailable(f"{problem}, again and again")
        await self._in_new_session()
        return await self._call(tool, args, context, is_again=True)

    async def _in_new_session(self) -> None:
        while self._connection is None and not self._restarts.is_given_up:
            tried = self._tried
            self._wanted.set()
            await tried.wait()

    async def _call(
        self, tool: McpTool, args: dict[str, Any], context: ToolContext, is_again: bool = False
    ) -> CallToolResult | ToolResult:
        """Return what the server answers, or the failure of a call that has no answer."""
        if (withdrawn := self._catalogue.withdrawn.get(tool.remote_name)) is not None:
            message = f"MCP server {self.name}: {withdrawn}. A person has to look at it and connect the server again"
            return ToolResult.fail(message, code="definition_changed", status=Status.BLOCKED)
        if self._is_renewing:
            await self._in_new_session()
        connection = self._connection
        if connection is None:
            return self._not_there()
        client, transport = connection

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            said = safe_text(self._hide(message or ""), MAX_ERROR_CHARS)
            context.update(said or f"{progress:g}" + (f" of {total:g}" if total is not None else ""))

        timeout_s = tool.options.timeout_s if tool.options.timeout_s is not None else math.inf
        limit = timeout_s + 1.0 if timeout_s != math.inf else _FOREVER_S  # the call's own limit comes first
        try:
            with self._questions.during_call(), self._noted(transport):
                answer = await client.call_tool(tool.remote_name, args, limit, on_progress)
        except UnicodeDecodeError:
            cure = "send them as text, such as base64.b64encode(x).decode()"
            message = f"{tool.remote_name}: an argument has bytes that are not UTF-8, which MCP cannot carry; {cure}"
            return ToolResult.fail(message, code=ErrorCode.INVALID_ARGUMENTS)
        except MCPError as exc:
            if exc.error.code == SESSION_GONE:  # the call was not carried out
                return await self._call_in_new_session(tool, args, context, transport, is_again)
            if exc.error.code == ANSWER_LOST:
                return await self._again_if_harmless(tool, args, context, self._error_text(exc), is_again)
            if exc.error.code == CONNECTION_CLOSED or transport.ended.is_set():
                return self._lost(tool, transport, transport.problem)
            return self._protocol_failure(exc)
        except _LOST as exc:
            return self._lost(tool, transport, self._error_text(exc))
        except (ValidationError, InputRequiredRoundsExceededError, RuntimeError) as exc:
            message = f"MCP server {self.name}: the call was made, and its answer is not MCP: {self._error_text(exc)}"
            return ToolResult.fail(message, code=INVALID_RESULT)
        self._restarts.note_answer()
        return answer

    async def _read(self, tool: McpTool, answer: CallToolResult, context: ToolContext) -> ToolResult:
        run_work = context.call.run.scope.work
        mismatch = await mismatch_of(answer, tool.output_schema, self._hide, run_work)
        read = partial(as_tool_result, self.name, answer, mismatch, self._hide, is_wrapped=tool.is_wrapped)
        parts = [vars(getattr(each, "resource", each)) for each in answer.content[:MAX_BLOCKS]]
        result = await in_thread_if_large([parts, answer.structured_content], read)
        if run_work is not None:
            value = result.value  # also what was JSON in its texts
            run_work.used += await in_thread_if_large(value, partial(about_bytes, value))
        return result

    async def _again_if_harmless(
        self, tool: McpTool, args: dict[str, Any], context: ToolContext, problem: str, is_again: bool
    ) -> CallToolResult | ToolResult:
        """Make a call again whose answer was lost, once, if that harms nothing. Otherwise say what is not known."""
        if tool.options.is_repeatable and not is_again:
            await anyio.sleep(AGAIN_S)
            return await self._call(tool, args, context, is_again=True)
        return self._unanswered(tool, f": the answer was lost: {problem}")

    def _unanswered(self, tool: McpTool, what: str) -> ToolResult:
        """Return the failure of a call that was sent and got no answer."""
        again = tool.options.is_repeatable
        known = "" if again else "; whether the call was carried out is not known"
        return ToolResult.fail(f"MCP server {self.name}{what}{known}", code=ErrorCode.UNAVAILABLE, retryable=again)

    def _protocol_failure(self, exc: MCPError) -> ToolResult:
        if exc.error.code == REQUEST_TIMEOUT:
            message = f"MCP server {self.name}: no answer in time"
            return ToolResult.fail(message, code=ErrorCode.TIMEOUT, status=Status.TIMEOUT)
        return ToolResult.fail(f"MCP server {self.name}: {self._error_text(exc)}")

    def _lost(self, tool: McpTool, transport: Transport, problem: str) -> ToolResult:
        """Note that the connection is lost, and return the failure of a call that was on its way."""
        transport.ended.set()
        self._connection, self._problem = None, problem
        return self._unanswered(tool, f" was lost during the call: {problem}")

    def _not_there(self) -> ToolResult:
        """Return the failure of a call while there is no connection. It may make a given-up server be tried again."""
        if not self._restarts.is_given_up:
            return self._unavailable(f"{self._problem}; it is being started again")
        if self._restarts.may_try(anyio.current_time()):
            self._wanted.set()
        return self._unavailable(f"it was given up: {self._restarts.why}", retryable=False)

    def _unavailable(self, problem: str, retryable: bool = True) -> ToolResult:
        message = f"MCP server {self.name} is not there: {problem}; the call was not made"
        return ToolResult.fail(message, code=ErrorCode.UNAVAILABLE, retryable=retryable)

    def _error_text(self, exc: BaseException, transport: Transport | None = None) -> str:
        """Return what an exception says, bounded and without hidden characters."""
        exc = first_leaf(exc)
        if isinstance(exc, McpServerError):
            return safe_text(str(exc), MAX_ERROR_CHARS * 4)
        is_lost = isinstance(exc, _LOST) or (isinstance(exc, MCPError) and exc.error.code == CONNECTION_CLOSED)
        if is_lost and transport is not None and transport.ended.is_set():
            return safe_text(transport.problem, MAX_ERROR_CHARS * 4)
        if isinstance(exc, MCPError):
            code = exc.error.code - OF_SERVER if exc.error.code < OF_SERVER else exc.error.code
            return safe_text(self._hide(exc.error.message), MAX_ERROR_CHARS) or f"error {code}"
        if isinstance(exc, ValidationError):
            if said := too_many_errors(exc):
                return said
            first = exc.errors(include_url=False, include_input=False)[0]
            return safe_text(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", MAX_ERROR_CHARS)
        at = f" at {transport.host}" if transport is not None and transport.host else ""
        return safe_text(self._hide(f"{type(exc).__name__}{at}: {exc}"), MAX_ERROR_CHARS)


def relist_pause_s(took_s: float) -> float:
    """Return how long to wait before a list is read again that took so long."""
    return max(RELIST_PAUSE_S, min(RELIST_TIMES * took_s, LONGEST_RELIST_PAUSE_S))


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


async def add_mcp_server(registry: ToolRegistry, name: str, **options: Any) -> McpClient:
    """Connect a registry with a server; see `ToolRegistry.add_mcp_server`."""
    client = McpClient(registry, name, **options)
    await client.open()
    return client
