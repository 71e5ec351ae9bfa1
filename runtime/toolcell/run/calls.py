"""A script's tool calls: which are made and when, which are refused, and what is kept of each.

Everything here is counted and bounded, because a hostile script makes calls too. Does not know what a tool is: each
call goes to a function it is given, and its answer into the traffic.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import anyio
from anyio.abc import TaskGroup

from toolcell.config import Limits
from toolcell.errors import ToolAbort
from toolcell.results import Outcome, ToolCallRecord
from toolcell.run.connection import GuestConnection
from toolcell.run.ending import Ending
from toolcell.sandbox.backend import LimitExceeded
from toolcell_bridge.wire.codec import check_plain, packed_size
from toolcell_bridge.wire.errors import UnsendableValue, ValueTooLarge
from toolcell_bridge.wire.messages import CallTool, ToolFail, ToolReturn

REFUSALS = 1000
"""Calls past `tool_calls` that are answered with a refusal; a script that goes on after that is flooding."""

TOOL_NAME_CHARS = 256
ELEMENT_BYTES = 64
"""What an element of a list or dict takes here, roughly, however short it was on the wire."""

Answer = ToolReturn | ToolFail
Dispatch = Callable[[CallTool], Awaitable[Answer]]
"""Answers one call. Must not raise but for cancellation and `ToolAbort`."""


class ToolCalls:
    """The calls of one run."""

    def __init__(
        self, limits: Limits, dispatch: Dispatch, traffic: GuestConnection, ending: Ending, started: float
    ) -> None:
        self._limits = limits
        self.refused = 0
        """Calls past `tool_calls`. They leave no record."""
        self._dispatch = dispatch
        self._traffic = traffic
        self._ending = ending
        self._started = started
        self._records: dict[int, ToolCallRecord] = {}
        self._scopes: dict[int, anyio.CancelScope] = {}
        self._queue: deque[CallTool] = deque()
        self._taken_back: set[int] = set()
        """Queued calls that the script does not want any more."""
        self._running = 0
        self._args_bytes = 0
        self._turned_down = 0

    @property
    def has_loose_ends(self) -> bool:
        """True when a call, or the answer to a refused one, may still be under way."""
        return bool(self._running or self.refused or self._turned_down)

    def records(self) -> tuple[ToolCallRecord, ...]:
        """Every call that was looked at, as far as it came; one without an answer took until now."""
        return tuple(
            replace(record, duration_s=self._elapsed_s() - record.started_s) if record.status == "pending" else record
            for record in self._records.values()
        )

    def admit(self, call: CallTool, tasks: TaskGroup) -> bool:
        """Note a call; True when it is to be made now, by the caller."""
        if len(self._records) >= self._limits.tool_calls:
            self._refuse(call, tasks)
            return False
        if len(call.name) > TOOL_NAME_CHARS:
            text = f"a tool's name has at most {TOOL_NAME_CHARS} characters, not {len(call.name)}"
            self._turn_down(call, "unknown_tool", text, tasks)
            return False
        if not self._can_hold(call):
            limit = self._limits.call_args_bytes
            text = f"the arguments of this run's calls take more than {limit} bytes together"
            self._turn_down(call, "too_large", f"{text}; pass less, or a file's name", tasks)
            return False
        self._records[call.id] = ToolCallRecord(
            call.id, call.name, call.args, "pending", started_s=self._elapsed_s(), line=call.line
        )
        if self._running >= self._limits.concurrent_calls:
            self._queue.append(call)
            return False
        self._running += 1
        return True

    async def work(self, call: CallTool) -> None:
        """Answer this call, then whichever waits next."""
        try:
            while True:
                await self._answer(call)
                if not self._queue:
                    return
                call = self._queue.popleft()
        finally:
            self._running -= 1

    def cancel(self, call_id: int) -> None:
        """Cut a call short if it is being made; one that waits for its turn will not be made."""
        if (scope := self._scopes.get(call_id)) is not None:
            scope.cancel()
        elif any(call.id == call_id for call in self._queue):
            self._taken_back.add(call_id)

    def _refuse(self, call: CallTool, tasks: TaskGroup) -> None:
        self.refused += 1
        limit = self._limits.tool_calls
        if self.refused > REFUSALS:
            self._ending.breach(LimitExceeded(Outcome.CALL_LIMIT, "tool_calls", limit, limit + self.refused))
            return
        text = f"this run may make {limit} tool calls, and has made them; batch the work or raise the limit tool_calls"
        tasks.start_soon(self._send_answer, call, ToolFail(call.id, "call_limit", text, False, None))

    def _can_hold(self, call: CallTool) -> bool:
        """Calls are kept for the result, so what they hold together is bounded.

        Measured only when it could be too much: each byte this run has sent is at most one element.
        """
        if self._traffic.received_bytes * (1 + ELEMENT_BYTES) <= self._limits.call_args_bytes:
            return True
        if not self._args_bytes:
            self._args_bytes = sum(_held_bytes(record.args) for record in self._records.values())
        held = self._args_bytes + _held_bytes(call.args)
        if held > self._limits.call_args_bytes:
            return False
        self._args_bytes = held
        return True

    def _turn_down(self, call: CallTool, code: str, text: str, tasks: TaskGroup) -> None:
        """Record a call that is not made, without what is too large in it."""
        answer = ToolFail(call.id, code, text, False, None)
        name = call.name[:TOOL_NAME_CHARS]
        record = ToolCallRecord(call.id, name, {}, "pending", started_s=self._elapsed_s(), line=call.line)
        self._records[call.id] = _recorded(record, answer, 0.0)
        self._turned_down += 1
        tasks.start_soon(self._send_answer, call, answer)

    async def _answer(self, call: CallTool) -> None:
        record = self._records[call.id]
        began = time.perf_counter()
        answer: Answer | None = None
        if call.id in self._taken_back:
            self._taken_back.discard(call.id)
            self._records[call.id] = _recorded(record, _taken_back(call), 0.0)
            await self._send_answer(call, _taken_back(call))
            return
        with anyio.CancelScope() as scope:
            self._scopes[call.id] = scope
            try:
                answer = await self._dispatch(call)
            except ToolAbort as exc:
                self._ending.abort(str(exc))
                return
        self._scopes.pop(call.id, None)
        duration_s = time.perf_counter() - began
        if answer is None:
            answer = _taken_back(call)
        self._records[call.id] = _recorded(record, answer, duration_s)
        await self._send_answer(call, answer)

    async def _send_answer(self, call: CallTool, answer: Answer) -> None:
        if not self._traffic.owes(call.id):
            return
        try:
            await self._traffic.send(answer)
        except (UnsendableValue, ValueTooLarge) as exc:
            answer = ToolFail(call.id, "too_large", f"the tool's result cannot be sent: {exc}", False, None)
            self._records[call.id] = _recorded(self._records[call.id], answer, self._records[call.id].duration_s)
            await self._traffic.send(answer)

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._started


def _taken_back(call: CallTool) -> ToolFail:
    """The answer to a call that its script did not wait for."""
    return ToolFail(call.id, "cancelled", "the call was cancelled by the script", False, None)


def _held_bytes(args: Mapping[str, Any]) -> int:
    return packed_size(args) + ELEMENT_BYTES * check_plain(args)


def _recorded(record: ToolCallRecord, answer: Answer, duration_s: float) -> ToolCallRecord:
    failed = isinstance(answer, ToolFail)
    return ToolCallRecord(
        record.id,
        record.name,
        record.args,
        "error" if failed else "ok",
        answer.code if isinstance(answer, ToolFail) else None,
        answer.message if isinstance(answer, ToolFail) else None,
        record.started_s,
        duration_s,
        record.line,
    )
