"""A task that works for one reader, who may be slow, or leave: of streams, maps and scripts written as they run.

The task holds a `BackgroundTask`, and not the `TaskReader`: so one that nobody holds any more is noticed.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import anyio
import anyio.lowlevel

from toolcell.errors import UsageError
from toolcell.support.event_loop import ChangeEvent, call_soon

Item = TypeVar("Item")

LEAVE_S = 2.0
"""What a run that nobody reads any more may take to end by itself, before its task is cancelled."""


class BackgroundTask(ABC, Generic[Item]):
    """The task, and what it shares with its reader."""

    def __init__(self, closed: str) -> None:
        """`closed`: what the reader is told if the Runtime ends the task."""
        self._closed = closed
        self._scope: anyio.CancelScope | None = None
        self._is_cancelled = False
        self.over = anyio.Event()
        self.changed = ChangeEvent()
        """There is more to read, or more room."""
        self.failure: BaseException | None = None
        """The reader's: in the task group of the Runtime it would end every run."""
        self.is_left = False
        """Nobody reads any more."""

    @abstractmethod
    def take(self) -> Item | None:
        """Take what is ready; None if nothing is."""

    async def run(self, work: Callable[[], Awaitable[object]]) -> None:
        self.failure = UsageError(self._closed)
        try:
            with anyio.CancelScope() as self._scope:
                if self._is_cancelled:
                    self._scope.cancel()
                await work()
                self.failure = None
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as exc:
            self.failure = exc
        finally:
            self.over.set()
            self.changed.notify()

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._scope is not None:
            self._scope.cancel()

    async def next(self) -> Item | None:
        """Return what is ready, as soon as something is; None after the last.

        Raises:
            Exception: the task failed with it.
        """
        while (item := self.take()) is None:
            if self.over.is_set() or self.is_left:
                failure, self.failure = self.failure, None
                if failure is not None and not self.is_left:
                    raise failure
                return None
            await self.changed.wait()
        return item

    def leave(self) -> None:
        """Nobody reads any more: have the work end."""
        self.is_left = True
        self.changed.notify()

    async def wait_over(self, grace_s: float = 0.0) -> None:
        """Wait for the end, and cancel the task if that takes longer than `grace_s`."""
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(grace_s):
                await self.over.wait()
            self.cancel()
            await self.over.wait()


class TaskReader(ABC, Generic[Item]):
    """Reads what a task has ready: `async for`. The task begins with the first step.

    Leaving the loop early ends the work. `async with` also waits for its end.
    """

    def __init__(self, task: BackgroundTask[Item], grace_s: float = 0.0) -> None:
        """`grace_s`: how long the work may take to end by itself when nobody reads any more."""
        self._task, self._grace_s = task, grace_s
        self._is_begun = False
        self._thread = threading.get_ident()
        self._token: Any = None
        """Token of the event loop."""

    @abstractmethod
    def _begin(self) -> None:
        """Start the task."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Item:
        if not self._is_begun:
            self._is_begun, self._thread = True, threading.get_ident()
            self._token = anyio.lowlevel.current_token()
            self._begin()
        try:
            item = await self._task.next()
        except anyio.get_cancelled_exc_class():
            self._task.leave()
            raise
        if item is None:
            raise StopAsyncIteration
        return item

    async def aclose(self) -> None:
        """End the work, and wait for its end. Does nothing when it is over."""
        self._task.leave()
        if not self._is_begun:
            self._is_begun = True
            self._task.over.set()
        await self._task.wait_over(self._grace_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        task: BackgroundTask[Item] | None = getattr(self, "_task", None)
        if task is None or task.over.is_set() or not self._is_begun:
            return
        if threading.get_ident() == self._thread:
            task.leave()
        else:
            call_soon(self._token, task.leave)
