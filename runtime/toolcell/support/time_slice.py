"""`TimeSlice`: how long work that does not wait goes on before other tasks have the event loop."""

from __future__ import annotations

import time
from collections import deque

import anyio
import anyio.lowlevel

SLICE_S = 0.002
"""How long to go on without letting other tasks have the event loop."""


class TimeSlice:
    """Gives way to other tasks when its time is over. Work that does not wait would keep the event loop.

    Of several tasks that share this, one goes on in each turn of the event loop, in the order in which they gave way:
    whoever works without end delays the others by as many slices as there are tasks, and no more.
    """

    __slots__ = ("_left_s", "_waiting", "until")

    def __init__(self) -> None:
        self.until = time.perf_counter() + SLICE_S
        self._left_s: float | None = None
        """Seconds left of the slice while nobody works; None while somebody may."""
        self._waiting: deque[anyio.Event] = deque()
        """One for each task that has given way and not gone on, oldest first. Each wakes the next when it goes on."""

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
        self._left_s = None
        self.until = time.perf_counter() + SLICE_S

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
