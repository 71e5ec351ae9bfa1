"""`LoopThread`: an event loop in a thread of its own, for callers that block, or whose event loop is another one."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Context
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import anyio
import anyio.from_thread
import anyio.lowlevel
from anyio.from_thread import BlockingPortal

from toolcell.errors import UsageError
from toolcell.support import daemon_threads
from toolcell.support.event_loop import call_soon

T = TypeVar("T")
Given = ParamSpec("Given")

END_S = 30.0
"""How long the end of the program, or of an unused `SyncRuntime`, waits for the end of its sandboxes."""


class LoopThread:
    """An event loop in a daemon thread: it keeps no program alive."""

    def __init__(self, name: str = "toolcell-runtime") -> None:
        self._pid = os.getpid()
        self.has_ended = False
        self._started: Future[BlockingPortal] = Future()
        try:
            self._thread = daemon_threads.start(self._run, name=name)
            self._portal = self._started.result()
        except BaseException:  # such as Ctrl-C: nobody can stop this loop any more
            self.has_ended = True
            if self._started.done() and self._started.exception() is None:
                with suppress(RuntimeError):  # it has ended by itself meanwhile
                    self._started.result().start_task_soon(self._started.result().stop)
            raise

    def _run(self) -> None:
        try:
            anyio.run(self._serve, backend="asyncio")
        except BaseException as exc:
            if not self._started.done():
                self._started.set_exception(exc)

    async def _serve(self) -> None:
        async with BlockingPortal() as portal:
            self._loop = asyncio.get_running_loop()
            self._started.set_result(portal)
            if not self.has_ended:
                await portal.sleep_until_stopped()

    def check(self) -> None:
        """Check that it can be used here.

        Raises:
            UsageError: the runtime is closed; or this is a forked child, or the loop's own thread, where waiting for
                the loop would never end.
        """
        if problem := self._problem():
            raise UsageError(problem)

    def can_be_used(self) -> bool:
        """Return whether `check` raises nothing."""
        return not self._problem()

    def _problem(self) -> str:
        if self.has_ended:
            return "this belongs to a SyncRuntime that is closed; open it again, and ask it for a new one"
        if self._pid != os.getpid():
            return (
                f"this SyncRuntime was opened in process {self._pid}, and this is its forked child {os.getpid()}; open "
                "a SyncRuntime of its own in each process"
            )
        if threading.current_thread() is self._thread:
            return (
                "this SyncRuntime was called from a coroutine in its own event loop, such as an async tool; a sync "
                "tool may call it, and an async one can await `runtime.runtime.execute_code(...)`"
            )
        return ""

    def call(self, function: Callable[[], Awaitable[T]], interrupt: Callable[[], Awaitable[Any]] | None = None) -> T:
        """Run a coroutine function in the loop and return its result.

        Ctrl-C meanwhile cancels it; or with `interrupt` that is awaited, and then the end of the function.
        """
        future = self._portal.start_task_soon(partial(_outcome, function))
        try:
            result, problem = future.result()
        except BaseException:
            if interrupt is not None:
                self._portal.start_task_soon(partial(_outcome, interrupt))
                future.result()
            future.cancel()
            raise
        if problem is not None:
            raise problem
        return result  # type: ignore[return-value]

    async def await_call(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """Run a coroutine function in the loop, and await its result in another one, which never waits for this one.

        Cancellation: it is cancelled, as a task of asyncio is.
        """
        # In a context of its own: that of the caller may say that trio runs here.
        future = Context().run(asyncio.run_coroutine_threadsafe, function(*args), self._loop)
        done, token = anyio.Event(), anyio.lowlevel.current_token()
        future.add_done_callback(lambda _: call_soon(token, done.set))
        try:
            await done.wait()
        finally:
            future.cancel()
        return future.result()

    def run_sync(self, function: Callable[[], T]) -> T:
        """Call a plain function in the loop and return its result."""

        async def called() -> T:
            return function()

        return self.call(called)

    def stop(self) -> None:
        self.has_ended = True
        self._portal.start_task_soon(self._portal.stop, True)
        self._thread.join(END_S)


def each_of(thread: LoopThread, stream: Any) -> Iterator[Any]:
    """Yield what a stream of the loop has. Leaving early ends its runs, and waits for their end."""
    try:
        thread.check()
        while (each := thread.call(partial(anext, stream, None))) is not None:
            yield each
            thread.check()
    finally:
        if thread.can_be_used():
            thread.call(stream.aclose)


def blocking(method: Callable[Concatenate[Any, Given], Awaitable[T]]) -> Callable[Concatenate[Any, Given], T]:
    """Return a method that calls the one of this name and waits for it, by the `_wait` of its object."""

    @wraps(method)
    def waits(self: Any, /, *args: Given.args, **kwargs: Given.kwargs) -> T:
        found: T = self._wait(method.__name__, *args, **kwargs)
        return found

    return waits


async def _outcome(function: Callable[[], Awaitable[T]]) -> tuple[T | None, BaseException | None]:
    """Return what a function returns or raises. A KeyboardInterrupt raised in the loop would end the loop."""
    daemon_threads.account.set(daemon_threads.NOBODY)  # a caller's has a lock of the caller's loop
    try:
        return await function(), None
    except (Exception, KeyboardInterrupt, SystemExit) as exc:
        return None, exc


# `wait_for`: a coroutine function, called from a program that blocks. One event loop serves all such calls.

_lock = threading.Lock()
_thread: LoopThread | None = None
"""Kept for the next call: clients that a model's provider or a tool has opened belong to its event loop."""


def wait_for(function: Callable[[], Coroutine[Any, Any, T]], name: str, instead: str) -> T:
    """Run a coroutine function to its end and return its result.

    In the thread of a synchronous tool it runs in the event loop of that tool's call, and is a part of its run.

    Raises:
        UsageError: an event loop runs in this thread; names `name` and what to write `instead`.
    """
    if _is_in_event_loop():
        raise UsageError(f"{name} would block the event loop that runs in this thread; write `{instead}`")
    try:
        anyio.from_thread.check_cancelled()
    except RuntimeError:  # this is not a thread of a tool
        return _loop_thread().call(function)
    return anyio.from_thread.run(function)


def _is_in_event_loop() -> bool:
    try:
        anyio.get_current_task()
    except RuntimeError:
        return False
    return True


def _loop_thread() -> LoopThread:
    global _thread
    with _lock:
        if _thread is None or not _thread.can_be_used():  # else it is the one of the parent process
            _thread = LoopThread()
        return _thread
