"""Runs that a person started on a page: what happens in each, kept for a while, for whoever of theirs watches."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from toolcell.support.event_loop import ChangeEvent, start_task

MOST: Final = 200
"""Runs that are kept. The oldest that have ended make room."""
MAX_EVENTS: Final = 2000
END_S: Final = 10.0

Tell = Callable[[str, str], None]
"""Tell those who watch: the name of an event, and the part of a page that it is."""


@dataclass(slots=True, eq=False)
class Reader:
    """Somebody who follows a run."""

    is_refused: bool = False


@dataclass(slots=True, eq=False)
class LiveRun:
    """One run, and what has happened in it."""

    tenant: str
    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    events: list[tuple[str, str]] = field(default_factory=list)
    is_over: bool = False
    left_out: int = 0
    _changed: ChangeEvent = field(default_factory=ChangeEvent)

    def tell(self, name: str, part: str) -> None:
        """Add an event. Of very many only the first are kept, and the last one."""
        if len(self.events) < MAX_EVENTS or name == "end":
            self.events.append((name, part))
        else:
            self.left_out += 1
        self._changed.notify()

    def finish(self) -> None:
        self.is_over = True
        self._changed.notify()

    async def follow(self, reader: Reader, first: int = 0) -> AsyncIterator[tuple[int, str, str]]:
        """Yield the events from a number on, those of the past and those to come, until the run is over or its reader
        may read no more."""
        at = first
        while not reader.is_refused:
            while at < len(self.events) and not reader.is_refused:
                yield at, *self.events[at]
                at += 1
            if self.is_over:
                return
            await self._changed.wait()

    def refuse(self, reader: Reader) -> None:
        """Let a reader read no more."""
        reader.is_refused = True
        self._changed.notify()


class LiveRuns:
    """The runs that were started on pages."""

    def __init__(self) -> None:
        self._runs: dict[str, LiveRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def find(self, tenant: str, ident: str) -> LiveRun | None:
        found = self._runs.get(ident)
        return found if found is not None and found.tenant == tenant else None

    def begin(self, tenant: str, work: Callable[[Tell], Awaitable[None]]) -> LiveRun:
        """Start a run. `work` tells what happens, and raises nothing."""
        run = LiveRun(tenant)
        self._runs[run.id] = run
        for each in [each for each in self._runs.values() if each.is_over]:
            if len(self._runs) > MOST:
                del self._runs[each.id]

        async def carry_out() -> None:
            try:
                await work(run.tell)
            finally:
                run.finish()

        start_task(carry_out(), self._tasks)
        return run

    async def close(self) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=END_S)


async def event_stream(events: AsyncIterator[tuple[int, str, str]]) -> AsyncIterator[str]:
    """Yield events as they are sent. Every line of a part is a line of its own, so no text can begin another event.

    Source: https://html.spec.whatwg.org/multipage/server-sent-events
    """
    async for number, name, part in events:
        lines = "".join(f"data: {line}\n" for line in part.replace("\r", "").split("\n"))
        yield f"id: {number}\nevent: {name}\n{lines}\n"
