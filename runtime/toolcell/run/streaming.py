"""`RunStream`: what happens in a run as typed events, for `async for`. The run is a task; its reader may be slow.

The events wait in a queue of bounded length. When it is full, the script waits for the reader, and its `wall_s` goes
on. Nothing is dropped: what had been printed when a limit ended the run can still be read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup

from toolcell.errors import UsageError
from toolcell.options import RunOptions
from toolcell.results import ExecutionResult, OutputFile
from toolcell.tools.call import Call, CallObserver, RunContext
from toolcell.tools.run_state import new_id

QUEUE_EVENTS = 256
"""Events that wait for their reader before the script waits too."""

MERGED_CHARS = 65_536
"""Text of one stream that waits is one event up to this length."""

LEAVE_S = 2.0
"""What a run that nobody reads any more may take to end by itself, before its task is cancelled."""


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
    """A tool call of the run begins, or is refused. Calls that its tools make come too."""

    call_id: str
    tool: str
    args: Any
    """As the tool receives them, without the run's secrets; as they were sent in a call that is refused."""
    parent_call_id: str | None


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
    """The script has returned a file. They come when the script has ended, before its result."""

    file: OutputFile


@dataclass(frozen=True, slots=True)
class RunFinished:
    """The run is over. This is the last event."""

    result: ExecutionResult


RunEvent = LogPrinted | ProgressReported | CallStarted | CallEnded | FileReturned | RunFinished


class _Feed:
    """The queue between a run and its reader. The run's task holds it, and not the stream: so a stream that nobody
    holds any more is noticed."""

    def __init__(self, cancel: anyio.Event | None, max_events: int) -> None:
        self.cancel = cancel or anyio.Event()
        self.scope = anyio.CancelScope()
        self.over = anyio.Event()
        self.failure: BaseException | None = None
        self.is_left = False
        """Nobody reads any more."""
        self._max_events = max_events
        self._events: deque[RunEvent] = deque()
        self._changed = anyio.Event()

    def _change(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    def leave(self) -> None:
        """End the run: nobody reads any more."""
        self.is_left = True
        self.cancel.set()
        self._events.clear()
        self._change()

    # The run's end.

    def put(self, event: RunEvent) -> Awaitable[None] | None:
        """Append an event. Return what waits until there is room again, if there is none."""
        if self.is_left:
            self.cancel.set()
            return None
        last = self._events[-1] if self._events else None
        if isinstance(event, LogPrinted) and isinstance(last, LogPrinted) and _fit_together(last, event):
            self._events[-1] = LogPrinted(last.stream, last.text + event.text)
        else:
            self._events.append(event)
        self._change()
        return self._wait_for_room() if len(self._events) > self._max_events else None

    async def _wait_for_room(self) -> None:
        while len(self._events) > self._max_events:
            await self._changed.wait()

    def log(self, stream: str, text: str) -> Awaitable[None] | None:
        """Take what was printed."""
        return self.put(LogPrinted(stream, text))

    def progress(self, value: object) -> Awaitable[None] | None:
        """Take what was reported."""
        return self.put(ProgressReported(value))

    def finish(self, result: ExecutionResult) -> None:
        """Take the result. What is still in the queue stays there, and this comes after it."""
        last: list[RunEvent] = [*map(FileReturned, result.files), RunFinished(result)]
        for event in last:
            if (waiting := self.put(event)) is not None:
                waiting.close()  # type: ignore[attr-defined]  # a coroutine: nothing is to wait any more

    # The reader's end.

    async def take(self) -> RunEvent | None:
        """Return the next event; None after the last one.

        Raises:
            Exception: the run failed with it.
        """
        while not self._events:
            if self.over.is_set() or self.is_left:
                failure, self.failure = self.failure, None
                if failure is not None and not self.is_left:
                    raise failure
                return None
            await self._changed.wait()
        event = self._events.popleft()
        self._change()
        return event

    async def run(self, execute: Callable[[RunOptions], Awaitable[ExecutionResult]], given: RunOptions) -> None:
        """Be the task of the run."""
        context = given.context or RunContext(run_id=new_id())
        context = context.child(observer=_CallWatcher(self, context.observer))
        options = replace(given, context=context, cancel=self.cancel, on_log=self.log, on_progress=self.progress)
        self.failure = UsageError("the Runtime was closed before the run had a result")
        try:
            with self.scope:
                result = await execute(options)
                self.failure = None
                self.finish(result)
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as exc:  # it is the reader's; in the task group of the Runtime it would end every run
            self.failure = exc
        finally:
            self.over.set()
            self._change()


def _fit_together(last: LogPrinted, event: LogPrinted) -> bool:
    return last.stream == event.stream and len(last.text) + len(event.text) <= MERGED_CHARS


class _CallWatcher:
    """The `CallObserver` that puts calls into the queue. `below`: the observer that was there before."""

    def __init__(self, feed: _Feed, below: CallObserver | None) -> None:
        self._feed, self._below = feed, below

    async def call_started(self, call: Call, /) -> None:
        """Tell that a call is about to run, after those below have taken note of it."""
        if self._below is not None and (noted := self._below.call_started(call)) is not None:
            await noted
        args = call.run.secrets.shown(call.args if call.refusal is None else call.raw_args)
        await self._tell(CallStarted(call.call_id, call.name, args, call.parent_call_id))

    async def call_ended(self, call: Call, /) -> None:
        """Tell what became of a call."""
        if self._below is not None and (noted := self._below.call_ended(call)) is not None:
            await noted
        result = call.result
        code = str(result.error.code) if result is not None and result.error is not None else None
        status = str(result.status) if result is not None else "error"
        await self._tell(CallEnded(call.call_id, call.name, status, code, call.duration_s))

    async def _tell(self, event: RunEvent) -> None:
        if (waiting := self._feed.put(event)) is not None:
            await waiting


class RunStream:
    """The events of one run: `async for event in runtime.stream(source)`. The run begins with the first step.

    Leaving the loop early ends the run. `async with runtime.stream(source) as events` also waits for its end.
    """

    def __init__(
        self,
        execute: Callable[[RunOptions], Awaitable[ExecutionResult]],
        options: RunOptions,
        tasks: Callable[[], TaskGroup],
        max_events: int = QUEUE_EVENTS,
    ) -> None:
        """`execute` runs the script with `options`, in a task of `tasks`.

        Raises:
            UsageError: `options` has callbacks.
        """
        if options.on_log is not None or options.on_progress is not None:
            wrong = "on_log" if options.on_log is not None else "on_progress"
            raise UsageError(f"a stream has what is printed and reported as events; leave out {wrong}=")
        self._execute, self._tasks, self._max_events = execute, tasks, max_events
        self._options = options
        self._feed: _Feed | None = None
        self._thread = threading.get_ident()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RunEvent:
        """Return the next event.

        Raises:
            Exception: as from `execute_code`.

        Cancellation: the run ends.
        """
        feed = self._feed or self._start()
        try:
            event = await feed.take()
        except anyio.get_cancelled_exc_class():
            feed.leave()
            raise
        if event is None:
            raise StopAsyncIteration
        return event

    def _start(self) -> _Feed:
        self._feed = feed = _Feed(self._options.cancel, self._max_events)
        self._thread = threading.get_ident()
        self._tasks().start_soon(feed.run, self._execute, self._options, name="toolcell stream")
        return feed

    async def aclose(self) -> None:
        """End the run, and wait for its end. Does nothing when it is over."""
        if self._feed is None:
            self._feed = _Feed(None, 0)
            self._feed.over.set()
            return
        feed = self._feed
        feed.leave()
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(LEAVE_S):
                await feed.over.wait()
            feed.scope.cancel()
            await feed.over.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        feed: _Feed | None = getattr(self, "_feed", None)
        if feed is None or feed.over.is_set():
            return
        if threading.get_ident() == self._thread:
            feed.leave()
        else:  # events belong to the thread of their loop: the run ends with the next thing that happens in it
            feed.is_left = True
