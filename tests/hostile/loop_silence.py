"""How long the event loop is silent while something happens, in processor time: a busy machine does not count."""

from __future__ import annotations

import gc
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.lowlevel

BEAT_S = 0.001


@dataclass
class Watched:
    """What came of the work, and what it took of this process."""

    outcome: Any
    silent_s: float
    """The longest processor time between two turns of another task."""
    took_s: float
    """Processor time, that of the other task included."""


async def watched(work: Awaitable[Any]) -> Watched:
    """Await something, and tell what it took of this process and its event loop."""
    gaps, is_over = [0.0], False

    async def beat() -> None:
        before = time.process_time()
        while not is_over:
            await anyio.sleep(BEAT_S)
            now = time.process_time()
            gaps.append(now - before)
            before = now

    gc.collect()
    gc.disable()  # a pass through everything that the tests have made is not what is measured
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(beat)
            await anyio.lowlevel.checkpoint()
            outcome = await work
            is_over = True
    finally:
        gc.enable()
    return Watched(outcome, max(gaps), sum(gaps))
