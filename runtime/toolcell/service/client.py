"""`Client`: a `Runtime` whose sandboxes are at a service. The tools stay here, with their hooks and secrets."""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NoReturn, TypeVar, Unpack

import anyio
from anyio.abc import TaskGroup

from toolcell.calls.call import CallableTools, ResumeDecision
from toolcell.calls.concurrency import OF_THIS_PROCESS, AbandonedThreads
from toolcell.calls.values import in_thread_if_large
from toolcell.config import Limits, OnApproval
from toolcell.control import PlanRows
from toolcell.errors import ServiceError, ServiceUnavailable, SessionError, ToolcellError, UsageError
from toolcell.results import (
    AbandonedThread,
    CommitResult,
    ExecutionResult,
    Preflight,
    RevertResult,
    SessionFile,
    Suspension,
)
from toolcell.run import InputFiles, ResumeKwargs, RunKwargs, RunOptions, RunStream, SessionRunKwargs
from toolcell.service.socket.arguments import (
    KEPT_OFFERS,
    given_only,
    offer_key,
    offered_tools,
    plain_decisions,
    wire_context,
    wire_files,
    wire_limits,
    wire_run,
    wire_script,
    wire_token,
)
from toolcell.service.socket.exchange import CallerTools, Exchange
from toolcell.service.socket.failures import ToolsetForgotten
from toolcell.service.socket.link import RequestLost, ServiceLink, socket_url
from toolcell.service.socket.values import SessionAnswer, read_as, reference_to
from toolcell.sessions import SessionKwargs, session_settings
from toolcell.support import event_loop
from toolcell.support.checks import brief, check_keywords, check_seconds, keywords_known
from toolcell.support.lifetime import Lifetime, OpenedInBlock
from toolcell.support.lru import Lru
from toolcell.tools import CodeRuntime, RunContext, ToolRegistry
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.errors import RemoteProtocolError, UnsendableValue, ValueTooLarge

Made = TypeVar("Made")
NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class ClientSession(OpenedInBlock):
    """A sandbox that stays at the service. It has the methods of `Session`."""

    def __init__(self, client: Any, arguments: Mapping[str, Any], tools: Any = None, context: RunContext | None = None):
        """`arguments`: what its session is opened with. A `Client` makes it."""
        self._client, self._arguments, self._tools, self._context = client, arguments, tools, context
        self._number = 0
        self._home = ""
        """The client's session with the service: this one ends with it."""
        self._state: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<ClientSession {self.id!r} {'open' if self._number else 'closed'}>"

    @property
    def id(self) -> str:
        """Its name, or what it has in the place of one. Empty before it is opened."""
        return str(self._state.get("id", ""))

    @property
    def is_live(self) -> bool:
        """True while it has a sandbox, as of the last answer of the service."""
        return bool(self._state.get("is_live"))

    @property
    def is_paused(self) -> bool:
        """True while its sandbox is stopped, as of the last answer of the service."""
        return bool(self._state.get("is_paused"))

    @property
    def used_cpu_s(self) -> float:
        """CPU seconds of all scripts so far."""
        return float(self._state.get("used_cpu_s", 0.0))

    @property
    def used_calls(self) -> int:
        """Tool calls of all scripts so far."""
        return int(self._state.get("used_calls", 0))

    @property
    def waiting(self) -> Suspension | str:
        """What the last script waits for; see `Session.waiting`."""
        found = self._state.get("waiting") or ""
        return read_as(Suspension, found) if isinstance(found, dict) else str(found)

    async def open(self) -> None:
        """Start the sandbox; see `Session.open`."""
        if self._number:
            raise UsageError(f"session {self.id!r} was opened already; session() makes another one")
        await self._open_as("session.open", self._arguments)

    async def _open_as(self, method: str, arguments: Mapping[str, Any], session: str = "") -> None:
        opened = await self._client._ask(
            method,
            arguments,
            SessionAnswer,
            tools=self._tools,
            makes_calls=False,
            offers=method == "session.open",
            session=session,
        )
        self._number, self._state, self._home = opened.value, opened.state, self._client._link.home

    async def close(self) -> None:
        """End the script under way, and destroy the sandbox. May be called twice."""
        number, self._number = self._number, 0
        if not number or self._home != self._client._link.home or not self._client._lifetime.is_open:
            return  # it ended with the client's session
        try:
            with anyio.CancelScope(shield=True):
                await self._client._ask("session.close", {"session": number}, object, makes_calls=False)
        except ToolcellError:
            return  # the service ends it by itself when this client does not come back

    async def __aenter__(self) -> ClientSession:
        if not self._number:
            await self.open()
        return self

    async def _does(
        self, method: str, kind: type[Made], arguments: Mapping[str, Any] = NOTHING, **options: Any
    ) -> Made:
        if not self._number:
            raise SessionError(f"session {self.id!r} is not open; use it as `async with client.session() as session:`")
        options.setdefault("makes_calls", False)
        given = {"session": self._number, **arguments}
        try:
            answer = await self._client._ask(f"session.{method}", given, SessionAnswer, session=self._home, **options)
        except ServiceError as exc:
            if not exc.may_have_begun:
                raise SessionError(f"session {self.id!r} is closed: {exc}") from exc
            raise
        self._state = answer.state
        return read_as(kind, answer.value)

    # Scripts.

    @keywords_known
    async def execute_code(self, source: str, **options: Unpack[SessionRunKwargs]) -> ExecutionResult:
        """Run a script in the session's sandbox; see `Session.execute_code` and `Client.execute_code`."""
        return await self._execute_script(source, RunOptions.of("execute_code", options, SessionRunKwargs))

    async def _execute_script(self, source: str, options: RunOptions) -> ExecutionResult:
        return await self._run("execute_code", wire_run(source, options), options)

    def stream(self, source: str, **options: Unpack[SessionRunKwargs]) -> RunStream:
        """Run a script as `execute_code` does, and return what happens as events; see `Session.stream`."""
        options["context"] = options.get("context") or self._context
        return RunStream(
            partial(self._execute_script, source),
            RunOptions.of("stream", options, SessionRunKwargs),
            lambda: self._client._tasks,
        )

    @keywords_known
    async def resume(
        self,
        token: str | Suspension,
        decisions: Mapping[str, ResumeDecision] | None = None,
        **options: Unpack[ResumeKwargs],
    ) -> ExecutionResult:
        """Carry the script on that waits; see `Session.resume`."""
        arguments = {"token": wire_token(token), "decisions": plain_decisions(decisions)}
        return await self._run("resume", arguments, RunOptions.of("resume", options, ResumeKwargs))

    async def _run(self, method: str, arguments: Mapping[str, Any], options: RunOptions) -> ExecutionResult:
        return await self._does(
            method,
            ExecutionResult,
            arguments,
            makes_calls=True,
            tools=options.tools if options.tools is not None else self._tools,
            context=options.context or self._context,
            options=options,
        )

    async def abandon(self) -> None:
        """Give up the script that waits; see `Session.abandon`."""
        await self._does("abandon", object)

    async def interrupt(self) -> bool:
        """Interrupt the script under way; see `Session.interrupt`."""
        if not self._number:
            return False
        return await self._does("interrupt", bool)

    # The state as a whole.

    async def put_files(self, files: InputFiles) -> None:
        """Write files to the workspace; see `Session.put_files`."""
        await self._does("put_files", object, {"files": wire_files(files)})

    async def files(self) -> tuple[SessionFile, ...]:
        """List the files in the workspace; see `Session.files`."""
        return await self._does("files", tuple[SessionFile, ...])

    async def read_file(self, name: str) -> bytes:
        """Return the content of a file in the workspace; see `Session.read_file`."""
        return await self._does("read_file", bytes, {"name": name})

    async def reset(self) -> None:
        """Forget everything; see `Session.reset`."""
        await self._does("reset", object)

    async def put_down(self) -> None:
        """Destroy the sandbox until the next script; see `Session.put_down`."""
        await self._does("put_down", object)

    async def pause(self) -> bool:
        """Stop the sandbox's processes until the next script; see `Session.pause`."""
        return await self._does("pause", bool)

    async def fork(self, name: str | None = None) -> ClientSession:
        """Return another open session with the same state; see `Session.fork`."""
        if not self._number:
            raise SessionError(f"session {self.id!r} is not open; use it as `async with client.session() as session:`")
        copy = ClientSession(self._client, self._arguments, self._tools, self._context)
        await copy._open_as("session.fork", {"session": self._number, "name": name}, self._home)
        return copy


ATTEMPTS: Final = 5
"""To send a request whose session was lost before anything of it was sent, or whose tools the service has forgotten."""

Tools = CallableTools | Iterable[Any] | None


class Client(OpenedInBlock, CodeRuntime):
    """Runs scripts at a service, with the registry's tools here. It has the methods of `Runtime`."""

    @keywords_known
    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        registry: ToolRegistry | Iterable[Any] | None = None,
        server_tools: bool = False,
        connect_s: float = 10.0,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`registry`: this program's tools; without it, scripts call those of the service. `server_tools`: they call
        both. `connect_s`: what a request waits for the connection. `tls`: for a service with a certificate of its own.
        """
        socket_url(url)
        check_seconds("connect_s", connect_s)
        given: object = token
        if not (given is None or (isinstance(given, str) and given.isascii() and given.isprintable())):
            raise UsageError("token= is the text that `toolcell tokens create` has printed")
        self.url, self._connect_s, self._tls = url, connect_s, tls
        self._headers = dict(headers or {})
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._has_tools, self._server_tools = registry is not None, server_tools
        self.registry = ToolRegistry.of(registry, "Client")
        self._lifetime = Lifetime("Client", self._open)
        self._offers: Lru[Any, tuple[str, int, ToolRegistry]] = Lru(KEPT_OFFERS)
        """Toolsets that the service has: by what is in them, its session, their number and their tools."""
        self._offering = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._abandoned = AbandonedThreads(OF_THIS_PROCESS)

    def __repr__(self) -> str:
        return f"<Client {self.url} {'open' if self._lifetime.is_open else 'closed'}>"

    # Opening and closing.

    async def open(self) -> None:
        """Connect. `async with` does this and closes at the end of its block.

        Raises:
            UsageError: it is open already, the service does not let it in, or the event loop is not asyncio's.
            ServiceUnavailable: the service cannot be reached.
        """
        if event_loop.asyncio_loop() is None:
            raise UsageError("a Client needs asyncio, which the library websockets is made for; trio has SyncClient")
        await self._lifetime.open()

    async def close(self) -> None:
        """End everything that runs at the service for this client, and disconnect. May be called twice."""
        await self._lifetime.close()

    def check_open(self) -> None:
        """Raise `UsageError` unless it is open in this event loop and process.

        Raises:
            Misconfigured: it is not open, or belongs to another event loop or to the parent process.
        """
        self._lifetime.check()

    async def _open(self, stack: AsyncExitStack) -> None:
        self._link = ServiceLink(self.url, self._headers, self._connect_s, self._tls)
        self._tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(self._tasks.cancel_scope.cancel)
        stack.push_async_callback(self._link.end)
        self._tasks.start_soon(self._link.keep)
        await self._link.ready(is_first=True)

    # Running scripts.

    @keywords_known
    async def execute_code(self, source: str, **options: Unpack[RunKwargs]) -> ExecutionResult:
        """Run a script at the service; see `Runtime.execute_code`. Calls of `tools` are made here.

        `limits` may be less than those of the service, never more. Of `context` the service gets the ids of thread,
        channel and chat; all else stays here.

        Raises:
            UsageError, SandboxUnavailable, AuditError: as from `Runtime.execute_code`.
            ServiceUnavailable: the service cannot be reached, and nothing began.
            ServiceError: the answer was lost. `may_have_begun` and `calls` say what may have happened.

        Cancellation: the run is ended. When the service is not there to answer, that is not waited for.
        """
        return await self._execute_script(source, RunOptions.of("execute_code", options))

    async def _execute_script(self, source: str, options: RunOptions) -> ExecutionResult:
        return await self._ask(
            "execute_code",
            wire_run(source, options),
            ExecutionResult,
            tools=options.tools,
            context=options.context,
            limits=options.limits,
            options=options,
        )

    def stream(self, source: str, **options: Unpack[RunKwargs]) -> RunStream:
        """Run a script as `execute_code` does, and return what happens as events; see `Runtime.stream`."""
        self._lifetime.check()
        return RunStream(partial(self._execute_script, source), RunOptions.of("stream", options), self._open_tasks)

    def _open_tasks(self) -> TaskGroup:
        self._lifetime.check()
        return self._tasks

    @keywords_known
    def map(self, source: str, inputs: Iterable[Any], **options: Any) -> NoReturn:
        """Refuse: a map's record and its retries need the journals of a `Runtime` in this process."""
        raise UsageError("map needs a Runtime in this process; call execute_code for each input, several at once")

    @keywords_known
    async def execute_plan(
        self,
        steps: Sequence[Mapping[str, Any]],
        *,
        tools: Tools = None,
        context: RunContext | None = None,
        on_approval: OnApproval = "ask",
    ) -> PlanRows:
        """Run independent tool calls at once; see `Runtime.execute_plan`."""
        options = RunOptions(tools=tools, context=context, on_approval=on_approval)
        try:
            plain = await in_thread_if_large(steps, lambda: to_plain(ToolRegistry.check_plan(steps)["steps"], "steps"))
        except (UnsendableValue, ValueTooLarge) as exc:
            raise UsageError(str(exc)) from exc
        arguments = {"steps": plain, "on_approval": on_approval}
        return await self._ask("execute_plan", arguments, PlanRows, tools=options.tools, context=options.context)

    @keywords_known
    async def preflight(self, source: str, *, tools: Tools = None, limits: Limits | None = None) -> Preflight:
        """Return the calls that a script can make; see `Runtime.preflight`."""
        arguments = {"source": wire_script(source, None)["source"], "limits": wire_limits(limits)}
        return await self._ask("preflight", arguments, Preflight, tools=tools, makes_calls=False, offers=True)

    # What waits.

    @keywords_known
    async def resume(
        self,
        token: str | Suspension,
        decisions: Mapping[str, ResumeDecision] | None = None,
        **options: Unpack[ResumeKwargs],
    ) -> ExecutionResult:
        """Resume a suspended run; see `Runtime.resume`."""
        given = RunOptions.of("resume", options, ResumeKwargs)
        arguments = {"token": wire_token(token), "decisions": plain_decisions(decisions)}
        return await self._ask(
            "resume", arguments, ExecutionResult, tools=given.tools, context=given.context, options=given
        )

    @keywords_known
    async def commit(
        self,
        draft: ExecutionResult | str,
        approve: str | Iterable[str] = "all",
        *,
        recheck: bool = False,
        decisions: Mapping[str, ResumeDecision] | None = None,
        tools: Tools = None,
        context: RunContext | None = None,
    ) -> CommitResult:
        """Make the effects of a dry run; see `Runtime.commit`."""
        RunOptions(context=context)  # checks it
        if not isinstance(draft, ExecutionResult | str):
            raise UsageError(f"commit takes the result of a dry run or a draft_id, not {brief(draft)}")
        arguments = {
            "draft": draft if isinstance(draft, str) else reference_to(draft),
            "approve": approve if isinstance(approve, str) else list(approve),
            "recheck": recheck,
            "decisions": plain_decisions(decisions),
        }
        return await self._ask("commit", arguments, CommitResult, tools=tools, context=context)

    @keywords_known
    async def revert(
        self, result: ExecutionResult | CommitResult | PlanRows, *, context: RunContext | None = None
    ) -> RevertResult:
        """Undo the calls of a run or a commit; see `Runtime.revert`. The tools' `revert=` runs here."""
        RunOptions(context=context)  # checks it
        if not isinstance(result, ExecutionResult | CommitResult | PlanRows):
            raise UsageError(f"revert takes the result of a run, a plan or a commit, not {brief(result)}")
        return await self._ask("revert", {"result": reference_to(result)}, RevertResult, context=context)

    async def suspended_runs(self) -> list[Suspension]:
        """Return what each suspended run waits for; see `Runtime.suspended_runs`."""
        return await self._ask("suspended_runs", {}, list[Suspension], makes_calls=False)

    async def interrupted_runs(self) -> list[str]:
        """Return the ids of runs that `resume` accepts without a token; see `Runtime.interrupted_runs`."""
        return await self._ask("interrupted_runs", {}, list[str], makes_calls=False)

    async def kept_sessions(self) -> list[str]:
        """Return the names of sessions whose journals are at the service; see `Runtime.kept_sessions`."""
        return await self._ask("kept_sessions", {}, list[str], makes_calls=False)

    async def forget_session(self, name: str) -> None:
        """Remove the journal of a closed session; see `Runtime.forget_session`."""
        await self._ask("forget_session", {"name": name}, object, makes_calls=False)

    def abandoned_threads(self) -> tuple[AbandonedThread, ...]:
        """Return threads of this program's tools that still run after their calls; see `Runtime.abandoned_threads`."""
        return self._abandoned.list()

    # Sessions.

    @keywords_known
    def session(self, name: str | None = None, **options: Unpack[SessionKwargs]) -> ClientSession:
        """Return a session, to be opened with `async with`: its scripts share a sandbox; see `Runtime.session`."""
        check_keywords("session", options, SessionKwargs.__annotations__)
        given: dict[str, Any] = {**options, "name": name, "limits": wire_limits(options.get("limits"))}
        settings = session_settings(Limits(), options)  # checks them
        given |= {each: getattr(settings, each) for each in ("cpu_s", "idle_s") if given.get(each) is not None}
        tools, context = given.pop("tools", None), RunOptions(context=given.pop("context", None)).context
        return ClientSession(self, given, tools, context)

    # How it asks.

    async def _ask(
        self,
        method: str,
        arguments: Mapping[str, Any],
        kind: type[Made],
        *,
        tools: Any = None,
        context: RunContext | None = None,
        limits: Any = None,
        options: RunOptions | None = None,
        makes_calls: bool = True,
        offers: bool | None = None,
        session: str = "",
    ) -> Made:
        """Ask for something, and return it as an object of this kind.

        `makes_calls`: its tools may be called here. `offers`: the service has to know the tools; by default when they
        may be called. `session`: the client's session that it is about.

        Raises:
            ToolcellError: as the method of the runtime; ServiceUnavailable, ServiceError: there is no answer.
        """
        self._lifetime.check()
        options = options or RunOptions()
        registry = self._tools_of(tools)
        abandoned = AbandonedThreads(self._abandoned)
        context = (context or RunContext()).within(abandoned=abandoned, runtime=self).child(limits=limits)
        caller = CallerTools(registry, context)
        plain = given_only(arguments)
        if makes_calls:
            plain |= given_only({"context": wire_context(context), "notes_calls": caller.is_heard or None})
        plain |= {"wants_logs": True} if options.on_log is not None else {}
        plain |= {"wants_progress": True} if options.on_progress is not None else {}
        for _ in range(ATTEMPTS):
            await self._link.ready()
            if session and session != self._link.home:
                raise ServiceError("the service lost this session with its connection", may_have_begun=False)
            try:
                if (makes_calls if offers is None else offers) and (tools is not None or self._has_tools):
                    plain["toolset"] = await self._offered(registry)
                answer = await Exchange(self._link, caller, options).ask(method, plain)
            except RequestLost:
                continue  # nothing of it arrived, so it is safe to send it
            except ToolsetForgotten:
                self._offers.pop(offer_key(registry))
                continue
            try:
                return read_as(kind, answer)
            except RemoteProtocolError as exc:
                raise ServiceError(f"the answer of the service cannot be read: {exc}", may_have_begun=True) from exc
        raise ServiceUnavailable(f"the service at {self._link.url} is lost again and again: {self._link.problem}")

    def _tools_of(self, tools: Iterable[Any] | Any) -> ToolRegistry:
        given: Any = self.registry if tools is None else ToolRegistry.of(tools, "tools=")
        if not isinstance(given, ToolRegistry):
            raise UsageError(f"tools= of a Client takes a ToolRegistry or a list of tools, not {type(given).__name__}")
        return given.snapshot()

    async def _offered(self, registry: ToolRegistry) -> int:
        """Return the number of a toolset at the service; offer it if it is not there."""
        key = offer_key(registry)
        async with self._offering:  # many that begin at once offer their tools once
            session, number, _ = self._offers.get(key, ("", 0, registry))
            if session == self._link.home:
                self._offers.use(key)  # as at the service
                return number
            number = next(self._numbers)
            offer = {"toolset": number, "tools": offered_tools(registry), "with_own": self._server_tools}
            await Exchange(self._link, CallerTools(registry, RunContext()), RunOptions()).ask("offer_tools", offer)
            self._offers.put(key, (self._link.home, number, registry))  # keeps the tools, so that their ids stay theirs
            return number
