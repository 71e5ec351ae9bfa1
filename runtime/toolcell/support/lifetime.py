"""`Lifetime`: open and close something from any task, while one task of its own holds it.

A task group must be entered and left in one task. A pytest fixture, a notebook and a web app's lifespan open and close
in different tasks. So a task that belongs to the event loop enters it, waits, and leaves it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import NoReturn, Self

import anyio
import anyio.lowlevel

from toolcell.errors import Misconfigured, UsageError
from toolcell.support import event_loop


class OpenedInBlock(ABC):
    """`async with` opens it and closes it at the end of the block."""

    @abstractmethod
    async def open(self) -> None:
        """Begin."""

    @abstractmethod
    async def close(self) -> None:
        """End."""

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __enter__(self) -> NoReturn:
        name = type(self).__name__
        raise UsageError(f"a {name} is opened with `async with {name}(...)`; for a plain `with` there is Sync{name}")

    def __exit__(self, *exc_info: object) -> None:  # noqa: B027 - nothing is left to do
        """Never reached: `__enter__` raises."""


class Lifetime:
    """From `open` to `close`. It can be opened again after it was closed."""

    def __init__(self, name: str, enter: Callable[[AsyncExitStack], Awaitable[None]]) -> None:
        """`enter` puts on the stack what is left at the end. `name` is for messages."""
        self._name, self._enter = name, enter
        self._life: _Life | None = None

    @property
    def is_open(self) -> bool:
        """True from the end of `open` to the beginning of `close`, unless it has failed."""
        life = self._life
        return life is not None and life.is_usable

    def check(self) -> None:
        """Raise `UsageError` unless it is open in this event loop and process.

        Raises:
            Misconfigured: it is not open, or belongs to another event loop or to the parent process.
        """
        life = self._life
        if life is not None and life.is_usable and life.pid == _pid and life.here() is life.place:
            return
        if life is None or life.is_over:
            raise Misconfigured(
                f"this {self._name} is not open; use it as `async with {self._name}(...)`, or await its open() first"
            )
        if life.pid != _pid:
            raise Misconfigured(
                f"this {self._name} was opened in process {life.pid}, and this is its forked child {_pid}; "
                f"open a {self._name} of its own in each process"
            )
        if life.here() is not life.place:
            raise Misconfigured(
                f"this {self._name} was opened in another event loop; use it in that one, or open one in each loop"
            )
        raise Misconfigured(f"this {self._name} is not open: it is being {life.state}") from life.problem

    async def open(self) -> None:
        """Enter it in a task of its own, and wait until that is done.

        Raises:
            UsageError: it is open already.
            Exception: whatever entering it raised; nothing is left of it.

        Cancellation: nothing is left of it.
        """
        if self._life is not None and not self._life.is_over:
            raise UsageError(f"this {self._name} is already open; close it first, or make another one")
        self._life = life = _Life(self._enter)
        try:
            _spawn(life)
            await life.entered.wait()
        except BaseException:
            await life.end()
            self._life = None
            raise
        if not life.is_usable:
            await life.end()
            self._life = None
            if life.problem is not None:
                raise life.problem
            raise UsageError(f"this {self._name} was closed while it was being opened")

    async def close(self) -> None:
        """Leave it, and wait until that is done. Does nothing when it is not open.

        Raises:
            UsageError: it belongs to another event loop or to the parent process.
            Exception: what ended it before, or what leaving it raised.

        Cancellation: shielded.
        """
        life = self._life
        if life is None or life.is_over:
            return
        if life.pid != _pid or life.here() is not life.place:
            self.check()
        await life.end()
        if self._life is life:
            self._life = None
            if life.problem is not None:
                raise life.problem


class _Life:
    """One time between opening and closing."""

    def __init__(self, enter: Callable[[AsyncExitStack], Awaitable[None]]) -> None:
        self._enter = enter
        self.pid = _pid
        self.here = _here()
        self.place = self.here()
        self.entered, self._closing, self._left = anyio.Event(), anyio.Event(), anyio.Event()
        self.is_usable = False
        """Entered, and not yet about to be left."""
        self._scope = anyio.CancelScope(shield=True)
        self.problem: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """It was left in order, by `close` or by an event loop that ended."""
        return self._left.is_set() and self.problem is None

    @property
    def state(self) -> str:
        """What is being done with it while it is not usable."""
        return "opened" if not self.entered.is_set() else "closed" if self.problem is None else "ended by an error"

    async def run(self) -> None:
        """Enter, wait and leave. Never raises: nobody waits for this task. Whoever closes gets the problem."""
        try:
            with self._scope:
                async with AsyncExitStack() as stack:
                    await self._enter_on(stack)
                    if self.problem is None:
                        await self._wait_for_close()
        except Exception as exc:
            self.problem = self.problem or exc
        finally:
            self.is_usable = False
            self.entered.set()
            self._left.set()

    async def _wait_for_close(self) -> None:
        try:
            await self._closing.wait()
        except asyncio.CancelledError:
            # asyncio.run() cancels every task at its end. This one has to leave in order first.
            if not self._closing.is_set():
                self.close()

    async def _enter_on(self, stack: AsyncExitStack) -> None:
        try:
            await self._enter(stack)
            self.is_usable = not self._closing.is_set()
        except Exception as exc:  # not for the task groups on the stack, which would wrap it
            self.problem = exc
        self.entered.set()

    async def close_when_cancelled(self) -> None:
        """Wait until it is left, or trio ends: that cancels this task, and not the one that leaves in order."""
        try:
            await self._left.wait()
        finally:
            self.close()

    def close(self) -> None:
        """Begin to leave. One that has not been entered yet is cancelled."""
        self.is_usable = False
        self._closing.set()
        if not self.entered.is_set():
            self._scope.cancel()

    async def end(self) -> None:
        """Leave, and wait until that is done."""
        self.close()
        with anyio.CancelScope(shield=True):
            await self._left.wait()


_pid = os.getpid()
"""Id of this process. Asking the kernel each time costs a system call."""


def _note_fork() -> None:
    global _pid
    _pid = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def _here() -> Callable[[], object]:
    """Return a function that returns the event loop it is called in, or None."""
    trio = sys.modules.get("trio")
    if trio is None or not trio.lowlevel.in_trio_run():
        return event_loop.asyncio_loop

    def here() -> object:
        try:
            return trio.lowlevel.current_trio_token()
        except RuntimeError:
            return None

    return here


def _spawn(life: _Life) -> None:
    """Start the task of a life. It belongs to the event loop and to no task group."""
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        trio.lowlevel.spawn_system_task(life.run)
        trio.lowlevel.spawn_system_task(life.close_when_cancelled)
        return
    event_loop.start_task(life.run())
