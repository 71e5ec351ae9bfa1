"""`Exchange`: one request of a client, from its question to its answer, with the calls of tools in between."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import anyio

from toolcell.calls.call import Approvals
from toolcell.errors import AuditError, Misconfigured, ServiceError, ToolAbort, UsageError
from toolcell.results import ToolCallRecord
from toolcell.run import RunOptions
from toolcell.service.socket.failures import raised_for
from toolcell.service.socket.link import Asked, RequestLost, ServiceLink
from toolcell.service.socket.messages import Message, Notification, Request, Response
from toolcell.service.socket.values import failed_answer, plain_answer, read_answer, read_as, unusable
from toolcell.tools import (
    Approve,
    Call,
    Origin,
    RegisteredTool,
    RunContext,
    ToolRegistry,
    ToolResult,
    ToolSpec,
)
from toolcell_bridge.wire.errors import RemoteProtocolError, UnsendableValue, ValueTooLarge


@dataclass(frozen=True, slots=True)
class AskedCall:
    """A call of a tool of this client, as the service asks for it."""

    kind: Literal["call", "preview", "revert"]
    tool: str
    arguments: dict[str, Any]
    origin: str = Origin.CODE
    is_approved: bool = False
    """Whoever may decide has approved it."""
    run_id: str = ""
    call_id: str = ""
    step: int | None = None


@dataclass(frozen=True, slots=True)
class NotedCall:
    """A call that the tools here did not see: it was refused, or the tool lives at the service."""

    call_id: str
    tool: str
    origin: str
    arguments: Any
    result: dict[str, Any]


class _Approved(Approvals):
    """The `Approvals` of calls that whoever decides about them has approved already."""

    async def decide(self, call: Call, /) -> Approve:
        return Approve()


class CallerTools:
    """The tools of one request, and the context that they see."""

    def __init__(self, tools: ToolRegistry, context: RunContext) -> None:
        self.tools, self.context = tools, context

    @property
    def is_heard(self) -> bool:
        """Somebody wants to know of calls that the tools do not see."""
        return bool(self.context.features.call_ended) or self.context.events.active

    async def make(self, tool_call: AskedCall) -> ToolResult:
        """Make a call, or what belongs to one.

        Raises:
            ToolAbort, AuditError: as from `ToolRegistry.dispatch`.
        """
        context = self._context_of(tool_call.run_id)
        if tool_call.kind == "revert":
            return await self._revert(tool_call, context)
        preview = tool_call.kind == "preview"
        if preview:
            self._find_tool(tool_call.tool)
        if tool_call.is_approved or preview:
            context = context.having(_Approved())
        call = self.tools.new_call(
            tool_call.tool,
            tool_call.arguments,
            tool_call.call_id,
            self._origin(tool_call.origin),
            context,
            step=tool_call.step,
        )
        return await self.tools.make(call, preview=preview)

    async def note(self, said: NotedCall) -> None:
        """Put a call that was made or refused at the service into the record of the run."""
        try:
            result = read_answer(said.result)
        except RemoteProtocolError as exc:
            result = ToolResult.fail(str(exc))

        origin = self._origin(said.origin)
        call = self.tools.new_call(said.tool, said.arguments, said.call_id, origin, self.context)
        await self.tools.answer(call, result, "answered by the service")

    def _context_of(self, run_id: str) -> RunContext:
        # The service counts calls that fail again and again, and its hint is in the answer once.
        self.context.state.failures.clear()
        return self.context.child(run_id=run_id) if run_id else self.context

    def _origin(self, origin: str) -> Origin:
        return Origin.PLAN if origin == Origin.PLAN else Origin.CODE

    async def _revert(self, tool_call: AskedCall, context: RunContext) -> ToolResult:
        tool = self._find_tool(tool_call.tool)
        given: Any = tool_call.arguments.get("args")
        args: dict[str, Any] = given if isinstance(given, dict) else {}
        spec = ToolSpec.reverting(tool.name, tool.options, args, tool_call.arguments.get("result"))
        return await ToolRegistry([spec]).execute(spec.definition.name, {"args": args}, context=context)

    def _find_tool(self, name: str) -> RegisteredTool:
        tool = self.tools.registered(name)
        if tool is None:
            raise UsageError(f"there is no tool {name!r:.80} here")
        return tool


END_S: Final = 5.0
"""What the end of a request takes that its caller has given up, before nobody waits for it any more."""


class Exchange:
    def __init__(self, link: ServiceLink, tools: CallerTools, options: RunOptions) -> None:
        self._link, self._tools, self._options = link, tools, options
        self._id = 0
        self._inbox: asyncio.Queue[Message | RequestLost | None] = asyncio.Queue()
        self._run_id = ""
        self._calls: dict[int, asyncio.Task[None]] = {}
        self.records: list[ToolCallRecord] = []
        """Calls that the tools here got."""
        self._began = time.perf_counter()
        self._failure: BaseException | None = None
        """What is raised in the place of the answer."""

    async def ask(self, method: str, params: dict[str, Any]) -> Any:
        """Ask for something, and return the value of the answer.

        Raises:
            UsageError: it cannot be sent.
            RequestLost: nothing of the request has reached the service.
            ServiceError: the answer was lost.
            ToolcellError: the service says that it failed.
            Exception: a callback raised this, or what a tool's call was not to end with.

        Cancellation: the run is ended, and its end is waited for, for a short while.
        """
        options, is_noted = self._options, self._tools.is_heard
        is_told = options.on_log is not None or options.on_progress is not None or is_noted
        self._id = await self._link.ask(Asked(self._inbox, is_told), method, params)
        watching = asyncio.create_task(self._watch_cancel()) if self._options.cancel is not None else None
        try:
            last = await self._until_last()
        except asyncio.CancelledError:
            self._link.tell("abort", self._id)
            with anyio.move_on_after(END_S, shield=True), contextlib.suppress(RequestLost, RemoteProtocolError):
                await self._until_last()
            raise
        except RequestLost as exc:
            if self._failure is not None:
                raise self._failure from exc
            if exc.is_begun:
                raise self._lost(str(exc)) from exc
            raise
        except RemoteProtocolError as exc:
            raise self._lost(f"the service broke the protocol: {exc}") from exc
        finally:
            if watching is not None:
                watching.cancel()
            self._link.forget(self._id)
            await self._end_calls()
        if self._failure is not None:
            raise self._failure
        if last.error is not None:
            raise raised_for(last.error)
        return last.result

    async def _until_last(self) -> Response:
        while True:
            match await self._inbox.get():
                case Response() as last:
                    return last
                case RequestLost() as lost:
                    raise lost
                case None:  # to the service, it is unknown whether the calls under way were made
                    for task in self._calls.values():
                        task.cancel()
                case Request(ident, "tool", params):
                    self._begin_call(ident, read_as(AskedCall, params))
                case Request(ident, method, params):
                    await self._take(method, params)
                    await self._link.answer(ident, None)
                case Notification(method, params):
                    await self._take(method, params)

    async def _take(self, method: str, params: dict[str, Any]) -> None:
        match method, params:
            case "log", {"stream": str(stream), "text": str(text)}:
                await self._tell(self._options.on_log, stream, text)
            case "progress", {"value": value}:
                await self._tell(self._options.on_progress, value)
            case "note", _:
                await self._tools.note(read_as(NotedCall, params))
            case "began", {"run_id": str(run_id)}:
                self._run_id = run_id
            case "drop", {"id": int(ident)}:
                if (task := self._calls.get(ident)) is not None:
                    task.cancel()
            case _:
                raise RemoteProtocolError(f"{method!r:.80} is not said about a request")

    async def _tell(self, callback: Any, *values: Any) -> None:
        if callback is None or self._failure is not None:
            return
        try:
            told = callback(*values)
            if told is not None and inspect.isawaitable(told):
                await told
        except asyncio.CancelledError:
            raise
        except BaseException as exc:  # it ends this run, and comes out of it
            self._failure = exc
            self._link.tell("abort", self._id)

    async def _watch_cancel(self) -> None:
        assert self._options.cancel is not None
        await self._options.cancel.wait()
        self._link.tell("cancel", self._id)

    def _lost(self, reason: str) -> ServiceError:
        calls = f"{len(self.records)} calls were made here: " + ", ".join(each.name for each in self.records[:20])
        made = calls if self.records else "no call was made here"
        text = f"the answer of the service was lost: {reason}. The script may have begun; {made}"
        if self._run_id:
            text += f". What became of it is in the record: GET /v1/runs/{self._run_id}"
        return ServiceError(text, may_have_begun=True, calls=tuple(self.records))

    # Calls

    def _begin_call(self, ident: int, tool_call: AskedCall) -> None:
        task = asyncio.get_running_loop().create_task(self._serve_call(ident, tool_call))
        self._calls[ident] = task
        task.add_done_callback(lambda _: self._calls.pop(ident, None))

    async def _serve_call(self, ident: int, tool_call: AskedCall) -> None:
        began = time.perf_counter()
        number = len(self.records)
        if tool_call.kind == "call":
            args = tool_call.arguments
            self.records.append(
                ToolCallRecord(f"call_{ident}", tool_call.tool, args, "pending", started_s=began - self._began)
            )
        status = "error"
        try:
            result = await self._tools.make(tool_call)
            status, plain = "ok" if not result.is_error else "error", plain_answer(result)
        except asyncio.CancelledError:
            if tool_call.kind == "call":
                self._record(number, "cancelled", began)
            raise
        except (ToolAbort, AuditError) as exc:
            if isinstance(exc, (Misconfigured, AuditError)):
                self._failure = self._failure or exc
            plain = {"status": "error", "abort": str(exc).encode("utf-8", "replace").decode()[:4000]}
        except Exception as exc:
            plain = failed_answer(exc)
        if tool_call.kind == "call":
            self._record(number, status, began)
        try:
            await self._link.answer(ident, plain)
        except (UnsendableValue, ValueTooLarge) as exc:
            await self._link.answer(ident, unusable(str(exc)))

    def _record(self, number: int, status: str, began: float) -> None:
        self.records[number] = replace(self.records[number], status=status, duration_s=time.perf_counter() - began)

    async def _end_calls(self) -> None:
        """Cancel the calls that nobody waits for any more, and wait for their ends."""
        tasks = [*self._calls.values()]
        for task in tasks:
            task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.gather(*tasks, return_exceptions=True)
