"""What anyio looks for in the running event loop each time it is asked: found once, for whoever asks often."""

from __future__ import annotations

from collections.abc import Callable

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
