"""`wait_for`: a coroutine function, called from a program that blocks. One event loop serves all such calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import anyio.from_thread

from toolcell.errors import UsageError
from toolcell.support.loop_thread import LoopThread

T = TypeVar("T")

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
