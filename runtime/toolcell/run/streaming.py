"""`RunStream`: what happens in a run as typed events, for `async for`. The run is a task; its reader may be slow.

The events wait in a queue of bounded length. When it is full, the script waits for the reader, and its `wall_s` goes
on. Nothing is dropped: what had been printed when a limit ended the run can still be read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import anyio
from anyio.abc import TaskGroup

from toolcell.calls.call import Call, Feature, Features, RunContext
from toolcell.calls.events import TOOL_OUTPUT, TOOL_UPDATE, Event, EventBranch
from toolcell.calls.run_state import new_id
from toolcell.errors import UsageError
from toolcell.results import ExecutionResult, OutputFile
from toolcell.run.options import RunOptions
from toolcell.support.background import LEAVE_S, BackgroundTask, TaskReader

QUEUE_EVENTS = 256
"""Events that wait for their reader before the script waits too."""

MERGED_CHARS = 65_536
"""Text of one stream that waits is one event up to this length."""


@dataclass(frozen=True, slots=True)
class LogPrinted:
    """The script printed something."""

    stream: str
    """stdout or stderr."""
    text: str


@dataclass(frozen=True, slots=True)
class ProgressReported:
    """The script called `progress(value)`."""

    value: Any


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A tool call of the run begins, or is refused. Calls made by its tools are included."""

    call_id: str
    tool: str
    args: Any
    """As the tool receives them, without the run's secrets; as they were sent in a call that is refused."""
    parent_call_id: str | None


@dataclass(frozen=True, slots=True)
class CallUpdated:
    """A tool reported progress: `ctx.update("half way", details=...)`. Dropped if the reader is far behind."""

    call_id: str
    tool: str
    text: str
    details: Any


@dataclass(frozen=True, slots=True)
class CallOutput:
    """A tool wrote a piece of its output: `await ctx.write("a line")`. None is lost; the tool waits for the reader."""

    call_id: str
    tool: str
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A tool call has its result."""

    call_id: str
    tool: str
    status: str
    """ok, or: error, blocked, timeout, cancelled, pending."""
    error_code: str | None
    duration_s: float


@dataclass(frozen=True, slots=True)
class FileReturned:
    """The script has returned a file. These events come after the script has ended, before its result."""

    file: OutputFile


@dataclass(frozen=True, slots=True)
class RunFinished:
    """The run is over. This is the last event."""

    result: ExecutionResult


RunEvent = (
    LogPrinted | ProgressReported | CallStarted | CallUpdated | CallOutput | CallEnded | FileReturned | RunFinished
)


class _Feed(BackgroundTask[RunEvent]):
    """The task of a run, and the queue between the run and its reader."""

    def __init__(self, cancel: anyio.Event | None) -> None:
        super().__init__("the Runtime was closed before the run had a result")
        self._end = cancel or anyio.Event()
        self._events: deque[RunEvent] = deque()

    def leave(self) -> None:
        """End the run: nobody reads any more."""
        self._end.set()
        self._events.clear()
        super().leave()

    # The run's end.

    def put(self, event: RunEvent) -> Awaitable[None] | None:
        """Append an event. Return what waits until there is room again, if there is none."""
        self.append(event)
        return self.wait_for_room() if len(self._events) > QUEUE_EVENTS else None

    def append(self, event: RunEvent) -> None:
        if self.is_left:
            self._end.set()
            return
        last = self._events[-1] if self._events else None
        if (
            isinstance(event, LogPrinted)
            and isinstance(last, LogPrinted)
            and last.stream == event.stream
            and len(last.text) + len(event.text) <= MERGED_CHARS
        ):
            self._events[-1] = LogPrinted(last.stream, last.text + event.text)
        else:
            self._events.append(event)
        self.changed.notify()

    async def wait_for_room(self) -> None:
        while len(self._events) > QUEUE_EVENTS and not self.is_left:
            await self.changed.wait()

    def update(self, event: CallUpdated) -> None:
        """Take a tool's progress, if there is room: the tool does not wait."""
        if len(self._events) < QUEUE_EVENTS and not self.is_left:
            self.append(event)

    def finish(self, result: ExecutionResult) -> None:
        """Take the result. What is still in the queue stays there, and this comes after it."""
        last: list[RunEvent] = [*map(FileReturned, result.files), RunFinished(result)]
        for event in last:
            self.append(event)

    # The reader's end.

    def take(self) -> RunEvent | None:
        """Take the next event; None if there is none now."""
        if not self._events:
            return None
        event = self._events.popleft()
        self.changed.notify()
        return event

    async def execute(self, run: Callable[[RunOptions], Awaitable[ExecutionResult]], given: RunOptions) -> None:
        context = given.context or RunContext(run_id=new_id())
        watcher = _CallWatcher(self)
        # Of a context that is given to several runs at once the bus has the events of all, and their calls have one id.
        events = EventBranch(context.events, watcher.updated, self.wait_for_room)
        features = Features([*context.features, watcher])
        context = context.child(features=features, events=events)
        options = replace(
            given,
            context=context,
            cancel=self._end,
            on_log=lambda stream, text: self.put(LogPrinted(stream, text)),
            on_progress=lambda value: self.put(ProgressReported(value)),
        )
        self.finish(await run(options))


class _CallWatcher(Feature):
    """Puts calls into the queue."""

    def __init__(self, feed: _Feed) -> None:
        self._feed = feed
        self._under_way: set[tuple[str, str | None]] = set()

    async def call_started(self, call: Call, /) -> None:
        self._under_way.add((call.run.run_id, call.call_id))
        args = call.run.secrets.shown(call.args if call.refusal is None else call.raw_args)
        await self._tell(CallStarted(call.call_id, call.name, args, call.parent_call_id))

    def updated(self, event: Event) -> None:
        """Tell what a tool reports. Who writes waits for room by itself, and never for the reader of another stream."""
        if event.type not in (TOOL_UPDATE, TOOL_OUTPUT) or (event.run_id, event.call_id) not in self._under_way:
            return
        call_id, tool, text = event.call_id or "", event.tool or "", event.update.get("text", "")
        if event.type == TOOL_OUTPUT:
            self._feed.append(CallOutput(call_id, tool, text))
        else:
            self._feed.update(CallUpdated(call_id, tool, text, event.update.get("details")))

    async def call_ended(self, call: Call, /) -> None:
        self._under_way.discard((call.run.run_id, call.call_id))
        result = call.result
        code = str(result.error.code) if result is not None and result.error is not None else None
        status = str(result.status) if result is not None else "error"
        await self._tell(CallEnded(call.call_id, call.name, status, code, call.duration_s))

    async def _tell(self, event: RunEvent) -> None:
        if (waiting := self._feed.put(event)) is not None:
            await waiting


class RunStream(TaskReader[RunEvent]):
    """The events of one run: `async for event in runtime.stream(source)`. The run begins with the first step.

    Leaving the loop early ends the run. `async with runtime.stream(source) as events` also waits for its end. A step
    raises what `execute_code` raises.
    """

    def __init__(
        self,
        execute: Callable[[RunOptions], Awaitable[ExecutionResult]],
        options: RunOptions,
        tasks: Callable[[], TaskGroup],
    ) -> None:
        """`execute` runs the script with `options`, in a task of `tasks`.

        Raises:
            UsageError: `options` has callbacks.
        """
        if options.on_log is not None or options.on_progress is not None:
            wrong = "on_log" if options.on_log is not None else "on_progress"
            raise UsageError(f"a stream has what is printed and reported as events; leave out {wrong}=")
        self._feed = _Feed(options.cancel)
        super().__init__(self._feed, LEAVE_S)
        self._execute, self._options, self._tasks = execute, options, tasks

    def _begin(self) -> None:
        work = partial(self._feed.execute, self._execute, self._options)
        self._tasks().start_soon(self._feed.run, work, name="toolcell stream")
