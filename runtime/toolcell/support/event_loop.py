"""Event loops: called from other threads; what anyio looks for each time, found once for whoever asks often."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import anyio.lowlevel


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


def start_task(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start a task of the running asyncio loop, which belongs to no task group, and keep it until it has ended."""
    task = asyncio.get_running_loop().create_task(work)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


def call_soon(token: Any, callback: Callable[[], None]) -> None:
    """Have an event loop call `callback`, without waiting for it: the loop may be about to end."""
    loop = getattr(token, "native_token", token)
    schedule = loop.run_sync_soon if hasattr(loop, "run_sync_soon") else loop.call_soon_threadsafe
    try:
        schedule(callback)
    except RuntimeError:  # the loop has ended, and with it whoever waited
        pass
