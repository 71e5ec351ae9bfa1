"""`ServedRequest`: one request, as the service serves it. Calls of the caller's tools go out on its stream."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable
from typing import Any

import anyio

from toolcell.calls.hooks import is_approved_later
from toolcell.errors import ToolAbort
from toolcell.service.socket.messages import (
    AnswerTool,
    Ask,
    AskTool,
    DropTool,
    NoteCall,
    Printed,
    Reported,
    StopRun,
)
from toolcell.service.socket.remote_tools import is_remote, not_sent
from toolcell.service.socket.streams import Stream, StreamLost
from toolcell.service.socket.tool_answers import plain_answer, read_answer
from toolcell.service.socket.values import sendable_value
from toolcell.tools import Call, ToolResult
from toolcell_bridge.wire.errors import RemoteProtocolError, UnsendableValue, ValueTooLarge


class ServedRequest:
    """A request that is under way."""

    def __init__(self, stream: Stream, ask: Ask) -> None:
        self.stream, self.method = stream, ask.method
        self.arguments: dict[str, Any] = dict(ask.arguments)
        self.cancel = anyio.Event()
        """Ends its run with outcome `cancelled`."""
        self.scope = anyio.CancelScope()
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    # What the caller says.

    async def listen(self) -> None:
        """Take what comes until the request is over. What breaks the rules ends the request."""
        try:
            while True:
                match await self.stream.receive():
                    case AnswerTool(ident, result):
                        if (answer := self._answers.pop(ident, None)) is not None and not answer.done():
                            answer.set_result(result)
                    case StopRun(is_abort):
                        self.cancel.set()
                        if is_abort:
                            self.scope.cancel()
                    case _:
                        raise RemoteProtocolError("a request is asked for once")
        except (StreamLost, RemoteProtocolError):
            self.scope.cancel()

    # What the caller is told.

    def log(self, stream: str, text: str) -> Awaitable[None] | None:
        """Tell what was printed."""
        self.stream.send(Printed(stream, text))
        return self.stream.wait_for_room()

    def progress(self, value: object) -> Awaitable[None] | None:
        """Tell what was reported."""
        self.stream.send(Reported(sendable_value(value, "progress")))
        return self.stream.wait_for_room()

    # Calls

    async def call(self, kind: str, tool: str, args: dict[str, Any], call: Call | None) -> ToolResult:
        """Have the caller call a tool, and return its result.

        Raises:
            ToolAbort: the tool ended its run.

        Cancellation: the caller is told that nobody waits any more.
        """
        ident = next(self._ids)
        known = ("code", False, "", "", None)
        if call is not None:
            # Without `approvals`, it was the service's own hook that let it pass: the caller's hooks decide.
            is_approved = is_approved_later(call) or (call.approved and call.run.scope.approvals is not None)
            known = str(call.origin), is_approved, call.run.run_id, call.call_id, call.step  # type: ignore[assignment]
        try:
            self.stream.send(AskTool(ident, kind, tool, args, *known))
        except (UnsendableValue, ValueTooLarge) as exc:
            return not_sent(exc)
        answer = self._answers[ident] = asyncio.get_running_loop().create_future()
        try:
            plain = await answer
        except asyncio.CancelledError:
            if self._answers.pop(ident, None) is not None:
                self.stream.send(DropTool(ident))
            raise
        if isinstance(abort := plain.get("abort"), str):
            raise ToolAbort(abort)
        try:
            return read_answer(plain)
        except RemoteProtocolError as exc:
            return not_sent(exc)


class CallTeller:
    """The `CallObserver` that tells the caller of calls that its tools do not see."""

    def __init__(self, request: ServedRequest) -> None:
        self._request = request

    def call_started(self, call: Call, /) -> None:
        """Nothing is known of it yet."""

    def call_ended(self, call: Call, /) -> Awaitable[None] | None:
        """Tell what became of a call."""
        if (call.is_executed and is_remote(call)) or call.result is None:
            return None
        args = sendable_value(call.args if call.refusal is None else call.raw_args, "arguments")
        said = NoteCall(call.call_id, call.name, str(call.origin), args, plain_answer(call.result))
        self._request.stream.send(said)
        return self._request.stream.wait_for_room()
