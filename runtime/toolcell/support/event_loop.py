"""Event loops: called from other threads; what anyio looks for each time, found once for whoever asks often."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel


def scope_type() -> type[anyio.CancelScope]:
    """Return the event loop's own class of cancel scopes."""
    return type(anyio.CancelScope())


def clock() -> Callable[[], float]:
    """Return the event loop's clock, as `anyio.current_time` reads it."""
    loop = getattr(anyio.lowlevel.current_token(), "native_token", None)
    time: Callable[[], float] = getattr(loop, "time", anyio.current_time)
    return time


def is_asyncio() -> bool:
    """Whether the event loop that runs is asyncio's, or one in its place such as uvloop's."""
    return isinstance(getattr(anyio.lowlevel.current_token(), "native_token", None), asyncio.AbstractEventLoop)


def call_soon(token: Any, callback: Callable[[], None]) -> None:
    """Have an event loop call `callback`, without waiting for it: the loop may be about to end."""
    loop = getattr(token, "native_token", token)
    schedule = loop.run_sync_soon if hasattr(loop, "run_sync_soon") else loop.call_soon_threadsafe
    try:
        schedule(callback)
    except RuntimeError:  # the loop has ended, and with it whoever waited
        pass
