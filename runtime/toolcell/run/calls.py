"""The tool calls of one run: admit, queue, cancel, answer and record them.

Everything is counted and bounded here, because a hostile script makes calls too. Knows no tools: `Run` makes the calls.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import anyio

from toolcell.config import Limits
from toolcell.results import Outcome, ToolCallRecord
from toolcell.run.connection import GuestConnection
from toolcell.sandbox.backend import LimitExceeded
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.codec import check_plain, packed_size
from toolcell_bridge.wire.errors import UnsendableValue, ValueTooLarge
from toolcell_bridge.wire.messages import CallTool, ToolFail, ToolReturn

REFUSALS = 1000
"""Calls past `tool_calls` that are answered with a refusal. A script that goes on after that is stopped."""

TOOL_NAME_CHARS = 256
ELEMENT_BYTES = 64
"""Memory that an element of a list or dict takes on the host, roughly, however short it was on the wire."""

Answer = ToolReturn | ToolFail
Dispatch = Callable[[CallTool], Coroutine[Any, Any, Answer]]
"""Makes one call and returns its answer. Raises `ToolAbort` to end the run."""

Pending = tuple[CallTool, float, float]
"""A call without an answer, when it was admitted, and when it began."""


class ToolCalls:
    """The calls of one run."""

    def __init__(self, limits: Limits, connection: GuestConnection, started: float) -> None:
        self._limits = limits
        self._connection = connection
        self._started = started
        self.refused = 0
        """Calls past `tool_calls`. They leave no record."""
        self._records: dict[int, ToolCallRecord | Pending] = {}
        """In the order they were admitted; a call has its record once it has its answer."""
        self._scopes: dict[int, anyio.CancelScope] = {}
        self._queue: deque[CallTool] = deque()
        self._running = 0
        """Calls that wait for their tool, or whose answer is being written."""
        self._args_bytes = 0

    def records(self) -> tuple[ToolCallRecord, ...]:
        """Return every call that was admitted. One without an answer is pending, and took until now."""
        return tuple([self._pending(*each) if isinstance(each, tuple) else each for each in self._records.values()])

    def admit(self, call: CallTool) -> bool:
        """Take note of a call; True when the caller is to make it now."""
        limits = self._limits
        if len(self._records) >= limits.tool_calls:
            self._refuse(call)
            return False
        if len(call.name) > TOOL_NAME_CHARS:
            text = f"a tool's name has at most {TOOL_NAME_CHARS} characters, not {len(call.name)}"
            self._reject(call, "unknown_tool", text)
            return False
        # Each byte this run has sent is at most one element: measure only what could be too much.
        could_be = self._connection.received_bytes * (1 + ELEMENT_BYTES)
        if could_be > limits.call_args_bytes and not self._can_hold(call):
            text = f"the arguments of this run's calls take more than {limits.call_args_bytes} bytes together"
            self._reject(call, "too_large", f"{text}; pass less, or a file's name")
            return False
        now = time.perf_counter()
        self._records[call.id] = (call, now, now)
        if self._running >= limits.concurrent_calls:
            self._queue.append(call)
            return False
        return True

    def next_queued(self) -> CallTool | None:
        """Free the place of a call whose answer was written; return the call that is to take it, or None."""
        self._running -= 1
        if not self._queue:
            return None
        call = self._queue.popleft()
        pending = self._records[call.id]
        assert isinstance(pending, tuple)
        self._records[call.id] = (call, pending[1], time.perf_counter())
        return call

    def finish(self, call: CallTool, answer: Answer | None) -> None:
        """Record the answer to a call and post it. None: the script cancelled the call."""
        self._scopes.pop(call.id, None)
        self._record(call, self._post(answer if answer is not None else _cancelled(call)))

    # Cancelling.

    def take_place(self, call: CallTool, scope: anyio.CancelScope) -> None:
        """Count a call that has to wait, until `next_queued`, and let the script cancel it, until it is finished."""
        self.keep_place()
        self._scopes[call.id] = scope

    def keep_place(self) -> None:
        """Count a call whose answer takes long to write, until `next_queued`."""
        self._running += 1

    def cancel(self, call_id: int) -> None:
        """Cancel a call that is being made, or one that waits for its turn."""
        if (scope := self._scopes.get(call_id)) is not None:
            scope.cancel()
            return
        for call in self._queue:
            if call.id == call_id:
                self._queue.remove(call)
                self._record(call, self._post(_cancelled(call)))
                return

    # Calls that are not made.

    def _refuse(self, call: CallTool) -> None:
        self.refused += 1
        limit = self._limits.tool_calls
        if self.refused > REFUSALS:
            self._connection.stop(LimitExceeded(Outcome.CALL_LIMIT, "tool_calls", limit, limit + self.refused))
            return
        text = f"this run may make {limit} tool calls, and has made them; batch the work or raise the limit tool_calls"
        self._connection.post(ToolFail(call.id, "call_limit", text, False, None))

    def _reject(self, call: CallTool, code: str, text: str) -> None:
        """Answer a call that is not made, and record it without what is too large in it."""
        answer = ToolFail(call.id, code, text, False, None)
        self._connection.post(answer)
        short = CallTool(call.id, call.name[:TOOL_NAME_CHARS], {}, call.line)
        now = time.perf_counter()
        self._records[call.id] = (short, now, now)
        self._record(short, answer)

    def _can_hold(self, call: CallTool) -> bool:
        """Calls are kept for the result, so the memory they take together is bounded."""
        if not self._args_bytes:
            self._args_bytes = sum(_held_bytes(_args(record)) for record in self._records.values())
        held = self._args_bytes + _held_bytes(call.args)
        if held > self._limits.call_args_bytes:
            return False
        self._args_bytes = held
        return True

    # Answering.

    def _post(self, answer: Answer) -> Answer:
        """Post an answer, or a failure in the place of a result that cannot be sent; return what was posted.

        Most results are plain data, and encoding checks that anyway. So only a result that was refused is converted.
        """
        connection = self._connection
        if connection.stopped is not None:
            return answer
        try:
            connection.post(answer)
        except (UnsendableValue, ValueTooLarge):
            answer = _converted(answer)
            try:
                connection.post(answer)
            except (UnsendableValue, ValueTooLarge) as exc:
                answer = unsendable(answer.id, "too_large", exc)
                connection.post(answer)
        return answer

    def _record(self, call: CallTool, answer: Answer) -> None:
        pending = self._records[call.id]
        assert isinstance(pending, tuple)
        _, admitted, began = pending
        now = time.perf_counter()
        status, code, message = "ok", None, None
        if type(answer) is ToolFail:
            status, code, message = "error", answer.code, answer.message
        self._records[call.id] = ToolCallRecord(
            call.id, call.name, call.args, status, code, message, admitted - self._started, now - began, call.line
        )

    def _pending(self, call: CallTool, admitted: float, began: float) -> ToolCallRecord:
        started_s, now_s = admitted - self._started, time.perf_counter() - self._started
        return ToolCallRecord(
            call.id, call.name, call.args, "pending", None, None, started_s, now_s - started_s, call.line
        )


def _converted(answer: Answer) -> Answer:
    """Return an answer with its result as plain data."""
    if type(answer) is not ToolReturn:
        return answer
    try:
        return ToolReturn(answer.id, to_plain(answer.value, "result"))
    except (UnsendableValue, ValueError, TypeError) as exc:
        return unsendable(answer.id, "no_result", exc)


def unsendable(call_id: int, code: str, problem: Exception) -> ToolFail:
    """Return the answer to a call whose result cannot be sent."""
    return ToolFail(call_id, code, f"the tool's result cannot be sent: {problem}", False, None)


def _cancelled(call: CallTool) -> ToolFail:
    return ToolFail(call.id, "cancelled", "the call was cancelled by the script", False, None)


def _args(record: ToolCallRecord | Pending) -> Mapping[str, Any]:
    return record[0].args if isinstance(record, tuple) else record.args


def _held_bytes(args: Mapping[str, Any]) -> int:
    return packed_size(args) + ELEMENT_BYTES * check_plain(args)
