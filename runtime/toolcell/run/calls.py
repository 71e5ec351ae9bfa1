"""The tool calls of one run: admit, queue, cancel, answer and record them.

Everything is counted and bounded here, because a hostile script makes calls too. Knows no tools: `Run` makes the calls.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import anyio

from toolcell.config import Limits
from toolcell.results import Outcome, ToolCallRecord
from toolcell.run.connection import GuestConnection
from toolcell.sandbox.backend import LimitExceeded
from toolcell.support.host_work import HostWork
from toolcell_bridge.guest.tools import LIST_TOOLS
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.codec import encode_parts
from toolcell_bridge.wire.errors import UnsendableValue, ValueTooLarge
from toolcell_bridge.wire.messages import CallTool, ToolFail, ToolReturn
from toolcell_bridge.wire.requests import HTTP_READ, HTTP_UPLOAD, PART_BYTES

FREE_LISTINGS = 16
"""Times that a script may ask for the list of tools, as `tools.f(1)` does, without making a call by that."""

PARTS = frozenset({HTTP_UPLOAD, HTTP_READ})
"""Calls that move a part of a body."""

REFUSALS = 1000
"""Calls past `tool_calls` that are answered with a refusal. A script that goes on after that is stopped."""

TOOL_NAME_CHARS = 256

CANCELLED_BY_SCRIPT = "the call was cancelled by the script"

Answer = ToolReturn | ToolFail


def parts_of(limits: Limits) -> int:
    """Return how many parts of bodies a run may move besides its calls. Readers may take small ones."""
    return 64 + 8 * limits.egress_bytes // PART_BYTES


Dispatch = Callable[[CallTool], Coroutine[Any, Any, Answer]]
"""Makes one call and returns its answer. Raises `ToolAbort` to end the run."""


Pending = tuple[CallTool, float, float]
"""A call without an answer, when it was admitted, and when it began."""


class ToolCalls:
    """The calls of one run."""

    def __init__(
        self,
        limits: Limits,
        connection: GuestConnection,
        started: float,
        work: HostWork,
        on_answer: Callable[[int, bytes], None] | None = None,
        parts: int = 0,
    ) -> None:
        self._on_answer = on_answer
        self._limits = limits
        self._connection = connection
        self._started = started
        self._work = work
        work.tool_calls = limits.tool_calls
        self.refused = 0
        """Calls past `tool_calls`. They leave no record."""
        self._records: dict[int, ToolCallRecord | Pending] = {}
        """In the order they were admitted; a call has its record once it has its answer."""
        self._scopes: dict[int, anyio.CancelScope] = {}
        self._queue: deque[CallTool] = deque()
        self._running = 0
        """Calls that wait for their tool, or whose answer is being written."""
        self._parts = parts
        """Parts of the bodies of requests that do not count as calls: their bytes are counted."""
        self._listings = 0
        """Requests for the list of tools that do not count as calls."""

    def records(self) -> tuple[ToolCallRecord, ...]:
        """Return every call that was admitted. One without an answer took until now.

        It is pending, or cancelled when the script did that and the run ended before its tool had come to its end.
        """
        made = [self._open(*each) if isinstance(each, tuple) else each for each in self._records.values()]
        return tuple([each for each in made if each.name != LIST_TOOLS])

    def admit(self, call: CallTool, size: int) -> bool:
        """Take note of a call whose message was so large; True when the caller is to make it now."""
        limits = self._limits
        if call.name == LIST_TOOLS and self._listings < FREE_LISTINGS:
            self._listings += 1
        elif call.name in PARTS and self._parts:
            self._parts -= 1
            size = 0
        elif (most := self._work.call_limit_reached()) is not None:
            self._refuse(call, most)
            return False
        else:
            self._work.count_call()
        if len(call.name) > TOOL_NAME_CHARS:
            text = f"a tool's name has at most {TOOL_NAME_CHARS} characters, not {len(call.name)}"
            self._answer_unmade(call, "unknown_tool", text)
            return False
        # Calls are kept for the result, so the memory they take together is bounded.
        if self._work.calls + size > limits.call_args_bytes:
            text = f"the arguments of this run's calls take more than {limits.call_args_bytes} bytes together"
            self._answer_unmade(call, "too_large", f"{text} (call_args_bytes); pass less, or a file's name")
            return False
        self._work.calls += size
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
        self._record(call, self._post(answer) if answer is not None else self._post_cancelled(call))

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
                self._record(call, self._post_cancelled(call))
                return

    # Calls that are not made.

    def _refuse(self, call: CallTool, limit: int) -> None:
        self.refused += 1
        if self.refused > REFUSALS:
            self._connection.stop(LimitExceeded(Outcome.CALL_LIMIT, "tool_calls", limit, limit + self.refused))
            return
        text = (
            f"this run may make {limit} tool calls (tool_calls), and has made them; those of call_tools_parallel count "
            "too. Ask for more with each call, or return what is done and go on in another run"
        )
        self._connection.post(ToolFail(call.id, "call_limit", text, False, None))

    def _answer_unmade(self, call: CallTool, code: str, text: str) -> None:
        """Answer a call that is not made, and record it without what is too large in it."""
        answer = ToolFail(call.id, code, text, False, None)
        self._connection.post(answer)
        short = CallTool(call.id, call.name[:TOOL_NAME_CHARS], {}, call.line)
        now = time.perf_counter()
        self._records[call.id] = (short, now, now)
        self._record(short, answer)

    # Answering.

    def _post(self, answer: Answer) -> Answer:
        """Post an answer, or a failure in the place of a result that cannot be sent; return what was posted.

        Most results are plain data, and encoding checks that anyway. So only a result that was refused is converted.
        """
        # Nobody reads the answer of a run that is over. A journal keeps it all the same: the tool has done its work.
        write = self._connection.post if self._connection.stopped is None else encode_parts
        if write is encode_parts and self._on_answer is None:
            return answer
        try:
            frame = write(answer)
        except (UnsendableValue, ValueTooLarge):
            answer = _converted(answer)
            try:
                frame = write(answer)
            except (UnsendableValue, ValueTooLarge) as exc:
                answer = unsendable(answer.id, "too_large", exc)
                frame = write(answer)
        if self._on_answer is not None:
            self._on_answer(answer.id, b"".join(frame))
        return answer

    def _post_cancelled(self, call: CallTool) -> Answer:
        answer = ToolFail(call.id, "cancelled", CANCELLED_BY_SCRIPT, False, None)
        if self._connection.stopped is None:
            self._connection.post(answer)
            if self._on_answer is not None:
                self._on_answer(call.id, b"")
        return answer

    def _record(self, call: CallTool, answer: Answer) -> None:
        pending = self._records[call.id]
        assert isinstance(pending, tuple)
        _, admitted, began = pending
        now = time.perf_counter()
        if call.name in PARTS:
            del self._records[call.id]  # it is a part of the request, and its bytes are not kept
            return
        status, code, message = "ok", None, None
        if type(answer) is ToolFail:
            status, code, message = "error", answer.code, answer.message
        self._records[call.id] = ToolCallRecord(
            f"call_{call.id}",
            call.name,
            args=call.args,
            status=status,
            error_code=code,
            message=message,
            started_s=admitted - self._started,
            duration_s=now - began,
            line=call.line,
        )

    def _open(self, call: CallTool, admitted: float, began: float) -> ToolCallRecord:
        started_s, now_s = admitted - self._started, time.perf_counter() - self._started
        status, code, message = "pending", None, None
        if (scope := self._scopes.get(call.id)) is not None and scope.cancel_called:
            status, code, message = "error", "cancelled", CANCELLED_BY_SCRIPT
        return ToolCallRecord(
            f"call_{call.id}",
            call.name,
            args=call.args,
            status=status,
            error_code=code,
            message=message,
            started_s=started_s,
            duration_s=now_s - started_s,
            line=call.line,
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
    return ToolFail(call_id, code, f"the tool's result cannot be sent: {problem}", False, {})
