"""Event loops: called from other threads; what anyio looks for each time, found once for whoever asks often."""

from __future__ import annotations

import asyncio
import functools
import math
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, Generic, TypeVar

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup


@functools.cache
def _scope_type_of_asyncio() -> type[anyio.CancelScope]:
    return type(anyio.CancelScope())


def scope_type() -> type[anyio.CancelScope]:
    """Return the event loop's own class of cancel scopes."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return type(anyio.CancelScope())
    return _scope_type_of_asyncio()


def clock() -> Callable[[], float]:
    """Return the event loop's clock, as `anyio.current_time` reads it."""
    try:
        return asyncio.get_running_loop().time
    except RuntimeError:
        return anyio.current_time


def is_asyncio() -> bool:
    """Whether the event loop that runs is asyncio's, or one in its place such as uvloop's."""
    return isinstance(getattr(anyio.lowlevel.current_token(), "native_token", None), asyncio.AbstractEventLoop)


def asyncio_loop() -> asyncio.AbstractEventLoop | None:
    """Return the asyncio loop that runs in this thread; None without one, and under trio."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


_tasks: set[asyncio.Task[Any]] = set()
"""An event loop holds only weak references to its tasks."""


def start_task(work: Coroutine[Any, Any, Any], kept_in: set[asyncio.Task[Any]] = _tasks) -> asyncio.Task[Any]:
    """Start a task of the running asyncio loop, which belongs to no task group, and keep it until it has ended."""
    task = asyncio.get_running_loop().create_task(work)
    kept_in.add(task)
    task.add_done_callback(kept_in.discard)
    return task


async def end_tasks(tasks: TaskGroup | None) -> None:
    """Cancel what runs in a task group that `open` entered for a later `close`, and leave the group."""
    if tasks is not None:
        tasks.cancel_scope.cancel()
        await tasks.__aexit__(None, None, None)


def call_soon(token: Any, callback: Callable[[], None]) -> None:
    """Have an event loop call `callback`, without waiting for it: the loop may be about to end."""
    loop = getattr(token, "native_token", token)
    schedule = loop.run_sync_soon if hasattr(loop, "run_sync_soon") else loop.call_soon_threadsafe
    try:
        schedule(callback)
    except RuntimeError:  # the loop has ended, and with it whoever waited
        pass


SLICE_S = 0.002
"""How long to go on without letting other tasks have the event loop."""


class TimeSlice:
    """Gives way to other tasks when its time is over. Work that does not wait would keep the event loop.

    Of several tasks that share this, one goes on in each turn of the event loop, in the order in which they gave way:
    whoever works without end delays the others by as many slices as there are tasks, and no more.
    """

    __slots__ = ("_left_s", "_waiting", "until")

    def __init__(self) -> None:
        self.begin()
        self._waiting: deque[anyio.Event] = deque()
        """One for each task that has given way and not gone on, oldest first. Each wakes the next when it goes on."""

    def begin(self) -> None:
        """Begin a slice. The one before is over when nobody has worked since then, and has not called `pause`."""
        self.until = time.perf_counter() + SLICE_S
        self._left_s: float | None = None
        """Seconds left of the slice while nobody works; None while somebody may."""

    async def give_way(self) -> None:
        """Let other tasks run, if the slice is over."""
        if time.perf_counter() <= self.until:
            return
        waiting, place = self._waiting, anyio.Event()
        waiting.append(place)
        try:
            if waiting[0] is place:
                await anyio.lowlevel.checkpoint()
            else:
                await place.wait()
        finally:
            if waiting[0] is not place:  # cancelled before its turn
                waiting.remove(place)
            else:
                waiting.popleft()
                if waiting:
                    waiting[0].set()  # which resumes its task in the next turn of the event loop
        self.begin()

    def pause(self) -> None:
        """The caller is about to wait for the outside: until somebody works, no time of the slice passes.

        A caller that waits without this loses time to nobody, and gives way sooner than it has to.
        """
        if self._left_s is None:
            self._left_s = self.until - time.perf_counter()

    def resume(self) -> None:
        """The caller has waited, and works again with what is left of the slice."""
        if self._left_s is not None:
            self.until, self._left_s = time.perf_counter() + self._left_s, None


_shared_slice: anyio.lowlevel.RunVar[TimeSlice] = anyio.lowlevel.RunVar("toolcell_time_slice")


def shared_slice() -> TimeSlice:
    """Return the slice that all runs of this event loop share: in one turn of the loop, one of them works for long."""
    try:
        return _shared_slice.get()
    except LookupError:
        _shared_slice.set(made := TimeSlice())
        return made


class ChangeEvent:
    """What some tasks wait for and others report, in one event loop. Look at what may have changed, then wait."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], object]] = []
        """Wakes each of those who wait now. Without any, a report costs nothing and needs no event loop."""

    def notify(self) -> None:
        """Wake everybody who waits now."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for wake in waiting:
                wake()

    async def wait(self, within_s: float = math.inf) -> bool:
        """Wait for the next `notify`, at most so long; False when there was none."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return await self._wait_in_trio(within_s)
        # A future and a timer: a quarter of the calls of an event and a cancel scope.
        future: asyncio.Future[bool] = loop.create_future()

        def wake(is_reported: bool = True) -> None:
            if not future.done():
                future.set_result(is_reported)

        self._waiting.append(wake)
        timer = loop.call_later(within_s, wake, False) if within_s != math.inf else None
        try:
            return await future
        finally:
            if timer is not None:
                timer.cancel()
            if wake in self._waiting:
                self._waiting.remove(wake)

    async def _wait_in_trio(self, within_s: float) -> bool:
        event = anyio.Event()
        self._waiting.append(event.set)
        try:
            with anyio.move_on_after(within_s):
                await event.wait()
        finally:
            if event.set in self._waiting:
                self._waiting.remove(event.set)
        return event.is_set()


Answer = TypeVar("Answer")


_NOT_BEGUN = object()


class SteppedCoroutine(Generic[Answer]):
    """Awaits a coroutine of somebody else's, whose groups of asyncio leave no request behind (`take_back_request`), or
    the rest of one. In the same task: cancel scopes that it has entered belong to that.
    """

    def __init__(
        self, work: Coroutine[Any, Any, Answer], waits_for: Any = _NOT_BEGUN, context: Context | None = None
    ) -> None:
        """`waits_for`: what its first `send(None)` returned. `context`: its own, in which it was begun."""
        self._work = work
        self._waits_for = waits_for
        self._run = _call if context is None else context.run

    def __await__(self) -> Generator[Any, Any, Answer]:
        work, run, waits_for = self._work, self._run, self._waits_for
        while True:
            try:
                try:
                    sent = None if waits_for is _NOT_BEGUN else (yield waits_for)
                except BaseException as exc:
                    take_back_request(work, exc)
                    waits_for = run(work.throw, exc)
                else:
                    waits_for = run(work.send, sent)
            except StopIteration as finished:
                answer: Answer = finished.value
                return answer


def _call(step: Callable[[Any], Any], sent: Any) -> Any:
    return step(sent)


def take_back_request(work: Any, exc: BaseException) -> None:
    """Take back the cancellation that a group of asyncio has asked for, when `exc` is to be thrown into `work` for it.

    Before Python 3.13 a group that waits for its tasks when one of them fails cancels its own task and never takes that
    back. No cancel scope that this task is in, or enters later, keeps its own cancellation to itself after that: with
    the end of the call, whoever has asked for the run would be cancelled.
    """
    task = asyncio.current_task() if sys.version_info < (3, 13) and isinstance(exc, asyncio.CancelledError) else None
    while task is not None and work is not None:
        if getattr(work, "cr_code", None) is _GROUP_END and work.cr_frame.f_locals["self"]._parent_cancel_requested:
            work.cr_frame.f_locals["self"]._parent_cancel_requested = False  # the group does not look at this again
            task.uncancel()
        work = getattr(work, "cr_await", None)


_GROUP_END = asyncio.TaskGroup.__aexit__.__code__


async def end_signals() -> AsyncIterator[int]:
    """Yield each SIGINT and SIGTERM, where event loops can wait for them."""
    if sys.platform == "win32":
        return  # Ctrl-C ends the command at once
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for each in signals:
            yield each
