"""Threads that the end of the process does not wait for: `run_sync` and `run_large` on a worker thread, and `start`.

A synchronous tool may never return. Threads of anyio under trio are daemons, and so are all below a daemon, such as
those of a `SyncRuntime`. Under asyncio they are not: one function would keep the process from ending.
"""

from __future__ import annotations

import functools
import mmap
import threading
import time
import types
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

Returned = TypeVar("Returned")

THREADS = 40
"""At once, for one purpose."""

LARGE = "large"
"""Purpose of `run_large`."""

ROOM_BYTES = 1 << 20
"""What a new thread takes before it runs anything is far below this."""


def start(function: Callable[..., object], *args: Any, name: str) -> threading.Thread:
    """Start a daemon thread. Errors: MemoryError, RuntimeError when there can be no more threads."""
    check_room()
    thread = threading.Thread(target=function, args=args, name=name, daemon=True)
    thread.start()
    return thread


def check_room() -> None:
    """Raise MemoryError where a new thread would have no memory.

    `Thread.start` waits until the thread runs. One that fails before that leaves it waiting for ever, and the event
    loop with it.
    """
    try:
        mmap.mmap(-1, ROOM_BYTES).close()
    except OSError as exc:
        raise MemoryError("no memory for another thread") from exc


async def run_sync(
    function: Callable[..., Returned],
    *args: Any,
    abandon_on_cancel: bool = False,
    limiter: anyio.CapacityLimiter | None = None,
) -> Returned:
    """Do the same as `anyio.to_thread.run_sync`, but with a limiter for the functions of each module of ours.

    Errors: MemoryError where a thread would have none.
    """
    check_room()
    limiter = limiter or limiter_of(_module_of(function))
    work = anyio.to_thread.run_sync(function, *args, abandon_on_cancel=abandon_on_cancel, limiter=limiter)
    returned: Returned = await _starting_daemons(work)
    return returned


@dataclass(frozen=True, eq=False)
class Account:
    """Whom the large work of a task is for."""

    charge: Callable[[float], object] = lambda cpu_s: None
    """Gets the processor time of each piece."""
    one: AbstractAsyncContextManager[object] = field(default_factory=nullcontext)
    """Entered for each piece: one at a time does not keep others from the thread."""

    def timed(self, function: Callable[..., Returned], *args: Any) -> Returned:
        """Do a piece of work in this thread."""
        began = time.thread_time()
        try:
            return function(*args)
        finally:
            self.charge(time.thread_time() - began)


NOBODY = Account()
account: ContextVar[Account] = ContextVar("account", default=NOBODY)


async def run_large(function: Callable[..., Returned], *args: Any) -> Returned:
    """Do in a thread what takes long because its data is large: reading, packing, hashing, redacting.

    One after the other: of several threads that work at once, each would keep the interpreter from the event loop.
    """
    async with account.get().one:
        return await run_piece(function, *args)


async def run_piece(function: Callable[..., Returned], *args: Any) -> Returned:
    """Do what `run_large` does inside the `one` of the account."""
    return await run_sync(account.get().timed, function, *args, limiter=limiter_of(LARGE, 1))


_limiters: anyio.lowlevel.RunVar[dict[str, anyio.CapacityLimiter]] = anyio.lowlevel.RunVar("toolcell_limiters")


def limiter_of(purpose: str, threads: int = THREADS) -> anyio.CapacityLimiter:
    """Return the limiter of this event loop for one purpose: whoever fills it keeps no others from their threads."""
    try:
        limiters = _limiters.get()
    except LookupError:
        _limiters.set(limiters := {})
    if purpose not in limiters:
        limiters[purpose] = anyio.CapacityLimiter(threads)
    return limiters[purpose]


def _module_of(function: Any) -> str:
    """Return the module that a function is of, or "" if it is not ours: the number of limiters is bounded."""
    while isinstance(function, functools.partial):
        function = function.func
    name = str(getattr(function, "__module__", ""))
    return name if name.partition(".")[0] == "toolcell" else ""


@types.coroutine
def _starting_daemons(work: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Await something. A thread that it starts is a daemon, because this thread passes for one while it goes on."""
    own: Any = threading.current_thread()  # a thread inherits what it is; anyio has no argument for it
    was = own._daemonic
    resume, answer = work.send, None
    try:
        while True:
            own._daemonic = True
            try:
                waits_for = resume(answer)
            finally:
                own._daemonic = was
            try:
                resume, answer = work.send, (yield waits_for)
            except BaseException as exc:
                resume, answer = work.throw, exc
    except StopIteration as done:
        return done.value
