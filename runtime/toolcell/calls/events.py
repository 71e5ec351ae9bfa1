"""What happens to calls, as a numbered stream of plain events that form a tree through `parent_call_id`.

Knows no tool and no hook. Listeners are guests here: one that raises is noted and ignored, one that is slow reads
from its own bounded queue.
"""

from __future__ import annotations

import inspect
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import field, fields
from typing import Any

from toolcell.calls.result import ToolResult
from toolcell.calls.values import plain_or_text
from toolcell.support.event_loop import ChangeEvent, shared_slice
from toolcell.support.log import logger_of
from toolcell_bridge.wire.frozen import frozen

logger = logger_of("toolcell.tools")

TOOL_START = "tool_execution_start"
TOOL_UPDATE = "tool_execution_update"
"""What a tool says of itself; later ones may replace earlier ones."""
TOOL_OUTPUT = "tool_execution_output"
"""A piece of what a tool writes while it runs. None is lost."""
TOOL_FINISHED = "tool_execution_finished"
"""The tool itself is done; hooks and its place in the batch are still to come. In completion order."""
TOOL_END = "tool_execution_end"
MESSAGE_START, MESSAGE_UPDATE, MESSAGE_END = "message_start", "message_update", "message_end"
TURN_START, TURN_END = "turn_start", "turn_end"
AGENT_START, AGENT_END = "agent_start", "agent_end"
JOB_END = "job_end"
ERROR = "error"

DROPPABLE = frozenset({TOOL_UPDATE})
"""A full queue loses the oldest of these first, and never anything else."""

QUEUE_EVENTS = 1024

_GENERIC = ("type", "seq", "at", "run_id")


@frozen(kw_only=True)
class Event:
    """One thing that happened. Fields that do not apply are None."""

    type: str
    seq: int = 0
    """Counts up within one stream, without gaps."""
    at: float = 0.0
    """Seconds since the epoch."""
    run_id: str = ""
    origin: str | None = None
    """model, plan[i], code or subagent."""
    call_id: str | None = None
    parent_call_id: str | None = None
    tool: str | None = None
    args: Any = None
    """Raw at the start of a call, validated in its updates and end."""
    update: Any = None
    """What a tool reports; a piece of a model's message, as {"text": ...}, {"reasoning": ...} or {"arguments": ...}."""
    result: ToolResult | None = None
    is_error: bool | None = None
    duration_ms: float | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    """What only this type has: an agent's name, a message, a stop reason."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON or msgpack, without what does not apply."""
        plain = {name: getattr(self, name) for name in _FIELD_NAMES}
        plain["result"] = self.result.to_dict() if self.result is not None else None
        plain["data"] = dict(self.data) or None
        return {key: value for key, value in plain.items() if value is not None or key in _GENERIC}

    def to_json(self) -> str:
        """One line of JSON; values JSON does not have are written as their `str`."""
        plain = self.to_dict()
        try:
            return json.dumps(plain, ensure_ascii=False, default=str)
        except Exception:  # arguments that no JSON can say: they contain themselves, or have keys of a strange type
            return json.dumps({key: plain_or_text(value) for key, value in plain.items()}, ensure_ascii=False)


_FIELD_NAMES = tuple(each.name for each in fields(Event))

Listener = Callable[[Event], object]


class Backlog:
    """Queued events; full, it forgets the oldest update, never a start or an end."""

    def __init__(self, max_events: int) -> None:
        self._events: deque[Event] = deque()
        self._max_events = max_events
        self.dropped = 0

    def __bool__(self) -> bool:
        return bool(self._events)

    @property
    def is_full(self) -> bool:
        return len(self._events) >= self._max_events

    def put(self, event: Event) -> None:
        if self.is_full:
            self._make_room()
        self._events.append(event)

    def take(self) -> Event:
        return self._events.popleft()

    def _make_room(self) -> None:
        for index, queued in enumerate(self._events):
            if queued.type in DROPPABLE:
                del self._events[index]
                self.dropped += 1
                return


class EventStream:
    """A listener's own queue: iterate it, as slowly as need be."""

    def __init__(self, bus: EventBus, max_events: int) -> None:
        self._backlog = Backlog(max_events)
        self._wake = ChangeEvent()
        self._unsubscribe = bus.subscribe(self._put, self._wait_for_room)
        self._closed = False

    @property
    def dropped(self) -> int:
        """Updates lost because the queue was full."""
        return self._backlog.dropped

    def _put(self, event: Event) -> None:
        self._backlog.put(event)
        self._wake.notify()

    async def _wait_for_room(self) -> None:
        while self._backlog.is_full and not self._closed:
            await self._wake.wait()

    def close(self) -> None:
        """End the stream; what is queued can still be read."""
        self._closed = True
        self._unsubscribe()
        self._wake.notify()

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            while self._backlog:
                event = self._backlog.take()
                self._wake.notify()
                yield event
            if self._closed:
                return
            await self._wake.wait()


class EventBus:
    """Numbers events and hands them to listeners, in order."""

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()
        self._waits: dict[Listener, Callable[[], Awaitable[None]]] = {}
        """What waits until a listener has room for more."""
        self._seq = 0
        self.unheard: deque[Any] = deque()
        """What asynchronous listeners returned, to be awaited in this order."""
        self.active = False
        """True when anybody listens; without a listener no event is made."""
        self.listener_errors = 0

    def subscribe(
        self, listener: Listener, wait_for_room: Callable[[], Awaitable[None]] | None = None
    ) -> Callable[[], None]:
        """Call `listener` with every event as it happens, in the emitting task; returns what unsubscribes it.

        An async listener is awaited by the call that emitted, before its next step. For quick functions: one that may
        take its time belongs on `stream()`. `wait_for_room`: what a tool waits for that writes more than is read.
        """
        if wait_for_room is not None:
            self._waits[listener] = wait_for_room
        self._listeners = (*self._listeners, listener)
        self.active = True

        def unsubscribe() -> None:
            self._listeners = tuple(known for known in self._listeners if known is not listener)
            self._waits.pop(listener, None)
            self.active = bool(self._listeners)

        return unsubscribe

    async def wait_for_room(self) -> None:
        """Wait until the listeners have room for more of what must not be lost.

        A tool that writes without end, and to nobody, gives way to others here: its time limits hold.
        """
        await shared_slice().give_way()
        await self.hear()
        for wait in [*self._waits.values()]:
            await wait()

    def stream(self, max_events: int = QUEUE_EVENTS) -> EventStream:
        """A bounded queue of everything from now on, to be read with `async for`."""
        return EventStream(self, max_events)

    def reaches(self, bus: EventBus) -> bool:
        """Return whether `bus` has the events of this one anyway."""
        return self is bus

    def forward(self, event: Event) -> None:
        """Hand out an event of another bus, number and all."""
        for listener in self._listeners:
            try:
                answer = listener(event)
            except (Exception, SystemExit) as exc:
                self._note_error(exc)
                continue
            if answer is not None and inspect.isawaitable(answer):
                self.unheard.append(answer)

    async def hear(self) -> None:
        """Await the async listeners that were called."""
        while self.unheard:
            try:
                await self.unheard.popleft()
            except (Exception, SystemExit) as exc:
                self._note_error(exc)

    def emit(self, **fields: Any) -> None:
        """Number one event and hand it out. Does nothing when nobody listens."""
        if not self._listeners:
            return
        self._seq += 1
        self.forward(Event(seq=self._seq, at=time.time(), **fields))

    def _note_error(self, exc: BaseException) -> None:
        self.listener_errors += 1
        logger.warning("event listener failed: %r", exc)


class EventBranch(EventBus):
    """The bus of one part of what happens: its listener has the events of this part, and the bus above has them too."""

    def __init__(
        self, above: EventBus, listener: Listener, wait_for_room: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """`listener` waits for nothing that only a call of another part brings: calls of all parts hear together."""
        super().__init__()
        self._above, self.unheard = above, above.unheard
        self.subscribe(listener, wait_for_room)

    async def wait_for_room(self) -> None:
        """Wait for the listeners above, too."""
        await super().wait_for_room()
        await self._above.wait_for_room()

    def reaches(self, bus: EventBus) -> bool:
        """Return whether `bus` is this one or above it."""
        return self is bus or self._above.reaches(bus)

    def forward(self, event: Event) -> None:
        """Hand out an event of another bus, number and all."""
        self._above.forward(event)
        super().forward(event)

    def emit(self, **fields: Any) -> None:
        """Number one event and hand it out, above with a number of its own."""
        self._above.emit(**fields)
        self._seq += 1
        super().forward(Event(seq=self._seq, at=time.time(), **fields))
