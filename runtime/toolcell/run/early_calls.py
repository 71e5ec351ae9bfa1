"""`EarlyCalls`: calls of tools that only read, made before the script comes to them, because its text names them.

The guest proposes, and everything is decided here: which tools, how many, and whether an answer may still be used. An
answer is used once, for a call of the same tool with the same arguments, and only if no call that may change something
was made since the early one began.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

import anyio

from toolcell.config import Limits
from toolcell.errors import ToolAbort
from toolcell.support.host_work import HostWork
from toolcell.support.packing import bytes_digest, pack
from toolcell.tools.call import CallableTools, RunContext
from toolcell.tools.options import Origin, ToolOptions
from toolcell.tools.registry import answer_from_record
from toolcell.tools.result import ToolResult
from toolcell_bridge.guest.tools import parameter_names
from toolcell_bridge.wire.messages import CallAhead, CallTool

EARLY_CALLS: Final = 64
"""Early calls at once: those that wait, those under way, and answers that nobody has asked for yet."""

ARGS_BYTES: Final = 64 * 1024
"""Arguments of an early call. Larger ones would take the event loop long to compare."""


class Places(Protocol):
    """Says how many calls there may be at once."""

    def has_room_for_early(self) -> bool:
        """True while one more may be made, and another one besides."""

    def keep_place(self) -> None:
        """Count one more."""


class EarlyCall:
    """One call that was proposed."""

    def __init__(self, ident: str, key: str, call: CallTool, size: int) -> None:
        self.ident, self.key, self.call, self.size = ident, key, call, size
        self.result: ToolResult | None = None
        self.done = anyio.Event()
        self.scope = anyio.CancelScope()
        self.started = 0.0
        self.duration_s = 0.0


Start = Callable[[Callable[[EarlyCall], Coroutine[Any, Any, None]], EarlyCall], None]


class EarlyCalls:
    """The early calls of one run."""

    def __init__(
        self,
        tools: CallableTools,
        options: Callable[[str], ToolOptions],
        context_of: Callable[[CallTool, str], RunContext],
        limits: Limits,
        work: HostWork,
    ) -> None:
        """`context_of` returns the context in which an early call is made."""
        self._tools, self._options, self._context_of = tools, options, context_of
        self._limits, self._work = limits, work
        self.started = self.hits = 0
        self.saved_s = 0.0
        self._places: Places | None = None
        self._start: Start | None = None
        self._queue: deque[EarlyCall] = deque()
        self._open: dict[str, deque[EarlyCall]] = {}
        """Begun, and not asked for: by key."""
        self._unused = 0
        self._reserved: dict[str, EarlyCall] = {}
        """By the id of the call that gets the answer."""
        self._writing: set[int] = set()
        """Ids of calls under way that may change something."""
        self._count = 0

    def begin(self, places: Places, start: Start) -> None:
        """The run begins. `start` makes an early call in a task of the run."""
        self._places, self._start = places, start

    def ahead(self) -> dict[str, list[str]]:
        """Return the tools whose calls may be started early, with the names of their parameters in order."""
        return {
            each.name: parameter_names(each.parameters)
            for each in self._tools.definitions(Origin.CODE)
            if self._may_be_early(each.name)
        }

    def _may_be_early(self, name: str) -> bool:
        options = self._options(name)
        is_plain = not (options.requires_approval or options.orchestrates or options.is_agent)
        return options.read_only and is_plain and not (options.reads or options.sends) and options.allows(Origin.CODE)

    # What the guest proposes

    def expect(self, call: CallAhead) -> None:
        """The guest says that the script is going to make this call."""
        name = self._tools.registered_name(call.name)
        packed = pack([name, _sorted(call.args)])
        is_known = name in self._tools.names(Origin.CODE) and self._may_be_early(name)
        if not is_known or len(packed) > ARGS_BYTES or len(self._queue) + self._unused >= EARLY_CALLS:
            return
        self._count += 1
        ident = f"early_{self._count}"
        found = CallTool(self._count, name, call.args, call.line)
        self._queue.append(EarlyCall(ident, bytes_digest(packed), found, len(packed)))
        self.start_queued()

    def start_queued(self) -> None:
        """Start what waits, as far as there is room."""
        places, start, work = self._places, self._start, self._work
        while self._queue and not self._writing and places is not None and start is not None:
            call = self._queue[0]
            if not places.has_room_for_early():
                return
            self._queue.popleft()
            if work.call_limit_reached() is not None or work.calls + call.size > self._limits.call_args_bytes:
                continue
            work.count_call()
            work.calls += call.size
            places.keep_place()
            self.started += 1
            self._unused += 1
            self._open.setdefault(call.key, deque()).append(call)
            start(self.make, call)

    async def make(self, early: EarlyCall) -> None:
        """Make one early call, and keep its answer.

        Raises:
            AuditError: it could not be recorded.
        """
        call, early.started = early.call, time.perf_counter()
        context = self._context_of(call, early.ident)
        try:
            with early.scope:
                early.result = await self._tools.dispatch(
                    call.name, call.args, call_id=early.ident, origin=Origin.CODE, context=context
                )
        except ToolAbort as exc:
            if context.state.abort is exc:
                context.state.abort = None  # the call itself ends the run, when the script comes to it
        finally:
            early.duration_s = time.perf_counter() - early.started
            early.done.set()

    # The script's own calls

    def admit(self, call: CallTool) -> bool:
        """The script makes this call. Return True when an early one has its answer, which was counted already."""
        if not self._options(call.name).read_only:
            self._writing.add(call.id)
            self._void()
            return False
        if not (self._unused or self._queue) or len(packed := pack([call.name, _sorted(call.args)])) > ARGS_BYTES:
            return False
        key = bytes_digest(packed)
        if (waiting := self._open.get(key)) is None:
            self._queue = deque(each for each in self._queue if each.key != key)
            return False
        self._reserved[f"call_{call.id}"] = waiting.popleft()
        self._unused -= 1
        if not waiting:
            del self._open[key]
        return True

    def ended(self, call_id: int) -> None:
        """A call of the script has its answer."""
        if call_id in self._writing:
            self._writing.discard(call_id)
            self.start_queued()

    def _void(self) -> None:
        """Give up every answer that nobody has asked for: it may not be true any more."""
        for calls in self._open.values():
            for each in calls:
                each.scope.cancel()
        self._open, self._unused = {}, 0

    async def answer(self, name: str, args: Any, *, call_id: str, **given: Any) -> ToolResult | None:
        """Give a call of the script the answer of its early one; None when there is none, or only a failure.

        `given`: as `dispatch` takes it.
        """
        if (early := self._reserved.pop(call_id, None)) is None:
            return None
        asked = time.perf_counter()
        await early.done.wait()
        result = early.result
        if result is None or result.is_error:
            return None
        self.hits += 1
        self.saved_s += max(0.0, min(early.duration_s, asked - early.started))
        note = f"answered by {early.ident}, which was started before the script came here"
        return await answer_from_record(name, args, result, note=note, call_id=call_id, **given)


def _sorted(args: Any) -> Any:
    """Return arguments with the keys of every dict in order."""
    if type(args) is dict:
        return {key: _sorted(args[key]) for key in sorted(args, key=str)}
    return [_sorted(each) for each in args] if type(args) is list else args
