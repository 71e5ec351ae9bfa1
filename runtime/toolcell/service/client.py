"""`Client`: a `Runtime` whose sandboxes are at a service. The tools stay here, with their hooks and secrets."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Literal, NoReturn, Unpack

import anyio
from anyio.abc import TaskGroup

from toolcell.calls.call import CallableTools
from toolcell.config import Limits
from toolcell.control import PlanRows, ResumeDecision
from toolcell.errors import UsageError
from toolcell.results import AbandonedThread, CommitResult, ExecutionResult, Preflight, RevertResult, Suspension
from toolcell.run import (
    OnApproval,
    OnLog,
    OnProgress,
    RunKwargs,
    RunOptions,
    RunStream,
)
from toolcell.service.client_base import AskingClient
from toolcell.service.client_session import ClientSession
from toolcell.service.socket.arguments import plain_decisions
from toolcell.service.socket.link import ServiceLink, socket_url
from toolcell.service.socket.values import reference_to
from toolcell.service.socket.wire_arguments import (
    wire_limits,
    wire_run,
    wire_script,
    wire_token,
)
from toolcell.support import event_loop
from toolcell.support.checks import brief, check_seconds
from toolcell.support.keywords import keywords_known
from toolcell.support.lifetime import Lifetime, OpenedInBlock
from toolcell.tools import CodeRuntime, RunContext, ToolRegistry, plan_of, registry_of
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.errors import UnsendableValue, ValueTooLarge

Tools = CallableTools | Iterable[Any] | None


class Client(OpenedInBlock, AskingClient, CodeRuntime):
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
        self.registry = registry_of(registry, "Client")
        self._lifetime = Lifetime("Client", self._open)
        self._begin_asking()

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
        result = await self._ask(
            "execute_code",
            wire_run(source, options),
            "result",
            tools=options.tools,
            context=options.context,
            limits=options.limits,
            handlers=options.handlers,
        )
        assert isinstance(result, ExecutionResult)
        return result

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
            plain = to_plain(plan_of(steps)["steps"], "steps")
        except (UnsendableValue, ValueTooLarge) as exc:
            raise UsageError(str(exc)) from exc
        arguments = {"steps": plain, "on_approval": on_approval}
        rows = await self._ask("execute_plan", arguments, "plan", tools=options.tools, context=options.context)
        assert isinstance(rows, PlanRows)
        return rows

    @keywords_known
    async def preflight(self, source: str, *, tools: Tools = None, limits: Limits | None = None) -> Preflight:
        """Return the calls that a script can make; see `Runtime.preflight`."""
        arguments = {"source": wire_script(source, None)["source"], "limits": wire_limits(limits)}
        found = await self._ask("preflight", arguments, "preflight", tools=tools, makes_calls=False, offers=True)
        assert isinstance(found, Preflight)
        return found

    # What waits.

    @keywords_known
    async def resume(
        self,
        token: str | Suspension,
        decisions: Mapping[str, ResumeDecision] | None = None,
        *,
        tools: Tools = None,
        context: RunContext | None = None,
        cancel: anyio.Event | None = None,
        on_log: OnLog | None = None,
        on_progress: OnProgress | None = None,
    ) -> ExecutionResult:
        """Resume a suspended run; see `Runtime.resume`."""
        options = RunOptions(tools=tools, context=context, cancel=cancel, on_log=on_log, on_progress=on_progress)
        arguments = {"token": wire_token(token), "decisions": plain_decisions(decisions)}
        result = await self._ask(
            "resume", arguments, "result", tools=options.tools, context=options.context, handlers=options.handlers
        )
        assert isinstance(result, ExecutionResult)
        return result

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
        made = await self._ask("commit", arguments, "commit", tools=tools, context=context)
        assert isinstance(made, CommitResult)
        return made

    @keywords_known
    async def revert(
        self, result: ExecutionResult | CommitResult | PlanRows, *, context: RunContext | None = None
    ) -> RevertResult:
        """Undo the calls of a run or a commit; see `Runtime.revert`. The tools' `revert=` runs here."""
        RunOptions(context=context)  # checks it
        if not isinstance(result, ExecutionResult | CommitResult | PlanRows):
            raise UsageError(f"revert takes the result of a run, a plan or a commit, not {brief(result)}")
        arguments = {"result": reference_to(result)}
        undone = await self._ask("revert", arguments, "revert", context=context)
        assert isinstance(undone, RevertResult)
        return undone

    async def suspended_runs(self) -> list[Suspension]:
        """Return what each suspended run waits for; see `Runtime.suspended_runs`."""
        found: list[Suspension] = await self._ask("suspended_runs", {}, "suspensions", makes_calls=False)
        return found

    async def interrupted_runs(self) -> list[str]:
        """Return the ids of runs that `resume` accepts without a token; see `Runtime.interrupted_runs`."""
        found: list[str] = await self._ask("interrupted_runs", {}, "names", makes_calls=False)
        return found

    async def kept_sessions(self) -> list[str]:
        """Return the names of sessions whose journals are at the service; see `Runtime.kept_sessions`."""
        found: list[str] = await self._ask("kept_sessions", {}, "names", makes_calls=False)
        return found

    async def forget_session(self, name: str) -> None:
        """Remove the journal of a closed session; see `Runtime.forget_session`."""
        await self._ask("forget_session", {"name": name}, "nothing", makes_calls=False)

    def abandoned_threads(self) -> tuple[AbandonedThread, ...]:
        """Return threads of this program's tools that still run after their calls; see `Runtime.abandoned_threads`."""
        return self._abandoned.list()

    # Sessions.

    @keywords_known
    def session(
        self,
        name: str | None = None,
        *,
        limits: Limits | None = None,
        idle_s: float | None = None,
        cpu_s: float | None = None,
        tool_calls: int | None = None,
        restore: Literal["journal", "empty", "if_kept"] | bool | None = None,
        tools: Tools = None,
        context: RunContext | None = None,
    ) -> ClientSession:
        """Return a session, to be opened with `async with`: its scripts share a sandbox; see `Runtime.session`."""
        RunOptions(context=context)  # checks it
        arguments = {
            "name": name,
            "limits": wire_limits(limits),
            "cpu_s": None if cpu_s is None else float(cpu_s),
            "idle_s": None if idle_s is None else float(idle_s),
            "tool_calls": tool_calls,
            "restore": restore,
        }
        return ClientSession(self, arguments, tools, context)
