"""What this process holds: a test repeats a failure, and shows that nothing is left of it."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio


def descriptors() -> Counter[str]:
    """Return what this process has open, by kind."""
    gc.collect()
    found = Counter[str]()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found[os.readlink(f"/proc/self/fd/{name}").split(":")[0]] += 1
    return found


async def left_after(failure: Callable[[], Awaitable[object]], times: int = 4) -> Counter[str]:
    """Return what is open after a failure has happened so often, and was not after the first.

    The other side may need a moment to close its end: polling is only how that is seen.
    """
    await failure()
    before = descriptors()
    for _ in range(times - 1):
        await failure()
    with anyio.move_on_after(5):
        while descriptors() - before:
            await anyio.sleep(0.005)
    return descriptors() - before
