"""`Exchange`: one request of a client, from its question to its answer, with the calls of tools in between."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from dataclasses import replace
from typing import Any, Final

import anyio

from toolcell.control import bound_revert, revert_spec
from toolcell.errors import AuditError, Misconfigured, ServiceError, ToolAbort, UsageError
from toolcell.results import ToolCallRecord
from toolcell.run import NO_HANDLERS, RunHandlers
from toolcell.service.socket.failures import raised_for
from toolcell.service.socket.messages import (
    AnswerTool,
    AskTool,
    DropTool,
    Finished,
    NoteCall,
    Printed,
    Reported,
    RequestFailed,
    StopRun,
)
from toolcell.service.socket.streams import Stream, StreamLost
from toolcell.service.socket.values import plain_answer, read_answer, unusable
from toolcell.tools import (
    Approvals,
    Approve,
    Call,
    ErrorCode,
    Origin,
    RegisteredTool,
    RegistryState,
    RunContext,
    ToolRegistry,
    ToolResult,
    keyword_invoke,
    run_call,
)
from toolcell_bridge.wire.errors import RemoteProtocolError, UnsendableValue, ValueTooLarge


class _Approved(Approvals):
    """The `Approvals` of calls that whoever decides about them has approved already."""

    async def decide(self, call: Call, /) -> Approve:
        """Approve it."""
        return Approve()


class CallerTools:
    """The tools of one request, and the context that they see."""

    def __init__(self, tools: ToolRegistry, context: RunContext) -> None:
        self.tools, self.context = tools, context

    @property
    def is_heard(self) -> bool:
        """Somebody wants to know of calls that the tools do not see."""
        return bool(self.context.features.call_ended) or self.context.events.active

    async def make(self, tool_call: AskTool) -> ToolResult:
        """Make a call, or what belongs to one.

        Raises:
            ToolAbort, AuditError: as from `ToolRegistry.dispatch`.
        """
        context = self._context_of(tool_call.run_id)
        if tool_call.kind == "revert":
            return await self._revert(tool_call, context)
        state = self.tools.state
        if tool_call.kind == "preview":
            state = self._with_preview(state, tool_call.tool)
        if tool_call.is_approved or tool_call.kind == "preview":
            context = context.having(_Approved())
        call = self.tools.new_call(
            tool_call.tool,
            tool_call.arguments,
            tool_call.call_id,
            self._origin(tool_call.origin),
            context,
            step=tool_call.step,
        )
        return await run_call(state, call)

    async def note(self, said: NoteCall) -> None:
        """Put a call that was made or refused at the service into the record of the run."""
        try:
            result = read_answer(said.result)
        except RemoteProtocolError as exc:
            result = ToolResult.fail(str(exc))

        async def answer() -> ToolResult:
            return result

        args: Any = said.arguments
        await self.tools.answer(
            said.tool,
            args,
            answer(),
            note="answered by the service",
            call_id=said.call_id,
            origin=self._origin(said.origin),
            context=self.context,
        )

    def _context_of(self, run_id: str) -> RunContext:
        # The service counts calls that fail again and again, and its hint is in the answer once.
        self.context.state.failures.clear()
        return self.context.child(run_id=run_id) if run_id else self.context

    def _origin(self, origin: str) -> Origin:
        return Origin.PLAN if origin == Origin.PLAN else Origin.CODE

    def _with_preview(self, state: RegistryState, name: str) -> RegistryState:
        tool = self._find_tool(name)
        assert tool.options.preview is not None
        spec = replace(tool.spec, invoke=keyword_invoke(tool.options.preview, None, tool.options.blocking))
        return replace(state, tools={name: RegisteredTool(spec, tool.checker, tool.aliases, tool.identity)})

    async def _revert(self, tool_call: AskTool, context: RunContext) -> ToolResult:
        tool = self._find_tool(tool_call.tool)
        assert tool.options.revert is not None
        given: Any = tool_call.arguments.get("args")
        args: dict[str, Any] = given if isinstance(given, dict) else {}
        function = bound_revert(tool.options.revert, args, tool_call.arguments.get("result"))
        spec = revert_spec(tool.name, function, tool.options.timeout_s)
        return await ToolRegistry([spec]).execute(spec.definition.name, {"args": args}, context=context)

    def _find_tool(self, name: str) -> RegisteredTool:
        tool = self.tools.registered(name)
        if tool is None:
            raise UsageError(f"there is no tool {name!r:.80} here")
        return tool


def failed_answer(exc: Exception) -> ToolResult:
    """Return the answer to a call that could not even be made."""
    return ToolResult.fail(f"the call could not be made: {exc}", code=ErrorCode.UNAVAILABLE)


END_S: Final = 5.0
"""What the end of a request takes that its caller has given up, before nobody waits for it any more."""


class Exchange:
    """One request."""

    def __init__(
        self,
        stream: Stream,
        message_bytes: int,
        tools: CallerTools,
        handlers: RunHandlers = NO_HANDLERS,
    ) -> None:
        """`message_bytes`: longest message that the service takes."""
        self._stream, self._message_bytes, self._tools = stream, message_bytes, tools
        self._handlers = handlers
        self._calls: dict[int, asyncio.Task[None]] = {}
        self.records: list[ToolCallRecord] = []
        """Calls that the tools here got."""
        self._began = time.perf_counter()
        self._failure: BaseException | None = None
        """What is raised in the place of the answer."""

    async def answer(self) -> Any:
        """Return the value of the answer.

        Raises:
            StreamLost: nothing of the request was ever sent.
            ServiceError: the session was lost, and its answer with it.
            ToolcellError: the service says that it failed.
            Exception: a callback raised this, or what a tool's call was not to end with.

        Cancellation: the run is ended, and its end is waited for, for a short while.
        """
        watching = asyncio.create_task(self._watch_cancel()) if self._handlers.cancel is not None else None
        try:
            try:
                last = await self._until_last()
            except asyncio.CancelledError:
                await self._give_up()
                raise
            except StreamLost as exc:
                if self._failure is not None:
                    raise self._failure from exc
                if exc.is_begun:
                    raise self._lost(str(exc)) from exc
                raise
            except RemoteProtocolError as exc:
                self._stream.send(StopRun(True))
                raise self._lost(f"the service broke the protocol: {exc}") from exc
        finally:
            if watching is not None:
                watching.cancel()
            await self._end_calls()
        if self._failure is not None:
            raise self._failure
        if isinstance(last, RequestFailed):
            raise raised_for(last)
        return last.value

    async def _until_last(self) -> Finished | RequestFailed:
        while True:
            match await self._stream.receive():
                case Printed(stream, text):
                    await self._tell(self._handlers.on_log, stream, text)
                case Reported(value):
                    await self._tell(self._handlers.on_progress, value)
                case AskTool() as tool_call:
                    self._begin_call(tool_call)
                case DropTool(ident):
                    if (task := self._calls.get(ident)) is not None:
                        task.cancel()
                case NoteCall() as said:
                    await self._tools.note(said)
                case (Finished() | RequestFailed()) as last:
                    return last
                case other:
                    raise RemoteProtocolError(f"{type(other).__name__} is not an answer")

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
            self._stream.send(StopRun(True))

    async def _watch_cancel(self) -> None:
        assert self._handlers.cancel is not None
        await self._handlers.cancel.wait()
        self._stream.send(StopRun(False))

    async def _give_up(self) -> None:
        """End a request that nobody waits for any more."""
        self._stream.send(StopRun(True))
        with anyio.move_on_after(END_S, shield=True), contextlib.suppress(StreamLost, RemoteProtocolError):
            await self._until_last()

    def _lost(self, reason: str) -> ServiceError:
        calls = f"{len(self.records)} calls were made here: " + ", ".join(each.name for each in self.records[:20])
        made = calls if self.records else "no call was made here"
        text = f"the answer of the service was lost: {reason}. The script may have begun; {made}"
        return ServiceError(text, may_have_begun=True, calls=tuple(self.records))

    # Calls

    def _begin_call(self, tool_call: AskTool) -> None:
        task = asyncio.get_running_loop().create_task(self._serve_call(tool_call))
        self._calls[tool_call.id] = task
        task.add_done_callback(lambda _: self._calls.pop(tool_call.id, None))

    async def _serve_call(self, tool_call: AskTool) -> None:
        began = time.perf_counter()
        number = len(self.records)
        if tool_call.kind == "call":
            args = tool_call.arguments
            self.records.append(
                ToolCallRecord(f"call_{tool_call.id}", tool_call.tool, args, "pending", started_s=began - self._began)
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
            plain = plain_answer(failed_answer(exc))
        if tool_call.kind == "call":
            self._record(number, status, began)
        self._send_answer(tool_call.id, plain)

    def _record(self, number: int, status: str, began: float) -> None:
        took_s = time.perf_counter() - began
        self.records[number] = replace(self.records[number], status=status, duration_s=took_s)

    def _send_answer(self, ident: int, plain: dict[str, Any]) -> None:
        encode = self._stream.encode
        try:
            body = encode(AnswerTool(ident, plain))
            if len(body) > self._message_bytes:
                problem = f"result too large ({len(body)} > {self._message_bytes} bytes, the service's message_bytes)"
                body = encode(AnswerTool(ident, unusable(problem)))
        except (UnsendableValue, ValueTooLarge) as exc:
            body = encode(AnswerTool(ident, unusable(str(exc))))
        self._stream.send_body(body)

    async def _end_calls(self) -> None:
        """Cancel the calls that nobody waits for any more, and wait for their ends."""
        tasks = [*self._calls.values()]
        for task in tasks:
            task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.gather(*tasks, return_exceptions=True)
