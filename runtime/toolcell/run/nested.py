"""Scripts that run inside a waiting script, and sandboxes for them when the pool's are all held by scripts that wait.

Without these, each would wait for another until their time is over: a script holds its sandbox while its saved scripts
and sub-agents run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar

import anyio
import anyio.lowlevel

from toolcell.errors import SandboxUnavailable
from toolcell.run.connection import GuestConnection, Place
from toolcell.sandbox.pool import Pool

MAX_EXTRA = 8
"""Sandboxes beside the pool's, of one runtime. Saved scripts run four deep inside one another, and each deadlock ends
when the deepest script that waits gets a sandbox."""

_holders: ContextVar[tuple[GuestConnection, ...]] = ContextVar("toolcell_holders", default=())
"""The sandboxes of the scripts that wait for what runs here, of every runtime."""


class Holding:
    """Lets everything that is called from a script know, until the end of the block, that it holds a sandbox."""

    __slots__ = ("_connection", "_token")

    def __init__(self, connection: GuestConnection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._token = _holders.set((*_holders.get(), self._connection))

    def __exit__(self, *exc_info: object) -> None:
        _holders.reset(self._token)


class _Waiter:
    """A script that waits for a sandbox while others wait for it."""

    def __init__(self, holders: tuple[GuestConnection, ...]) -> None:
        self.holders = holders
        self.gets_extra = anyio.Event()
        self.connection: GuestConnection | None = None


class NestedRuns:
    """The nested scripts of one runtime that wait, and the sandboxes that some of them got beside the pool."""

    def __init__(self) -> None:
        self._waiting: list[_Waiter] = []
        self._extra = 0

    async def acquire(
        self, pool: Pool[GuestConnection], start: Callable[[], Awaitable[GuestConnection]]
    ) -> GuestConnection:
        """Take a sandbox of the pool, or one beside it where all of the pool wait for the one that asks.

        Raises:
            SandboxUnavailable: there is none, and none is to be expected.
        """
        holders = _holders.get()
        if not holders:
            connection = await pool.acquire()
            connection.place = "pool"
            return connection
        waiter = _Waiter(holders)
        self._waiting.append(waiter)
        is_over = False
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._take, pool, waiter, tasks.cancel_scope)
                await anyio.lowlevel.checkpoint()
                self._review(pool)
                await waiter.gets_extra.wait()
                tasks.cancel_scope.cancel()
            if waiter.connection is None:
                await self._start_extra(pool, waiter, start)
            is_over = True
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            found = waiter.connection
            if waiter.gets_extra.is_set() and (found is None or found.place == "pool"):
                self._extra -= 1
                self._review(pool)
            if not is_over and found is not None:
                pool.release(found)
        assert found is not None
        return found

    async def _take(self, pool: Pool[GuestConnection], waiter: _Waiter, scope: anyio.CancelScope) -> None:
        waiter.connection = _placed(await pool.acquire(), "pool")
        scope.cancel()

    async def _start_extra(
        self, pool: Pool[GuestConnection], waiter: _Waiter, start: Callable[[], Awaitable[GuestConnection]]
    ) -> None:
        if self._extra > MAX_EXTRA:
            raise SandboxUnavailable(
                f"all {pool.busy} sandboxes of the pool, and {MAX_EXTRA} more, are held by scripts that wait for "
                "another one; run fewer inside one another, or raise PoolConfig(cap)"
            )
        waiter.connection = _placed(await start(), "extra")

    def note_end(self, pool: Pool[GuestConnection], connection: GuestConnection) -> None:
        """A script gave its sandbox back."""
        if connection.place == "extra":
            self._extra -= 1
        if self._waiting:
            self._review(pool)

    def _review(self, pool: Pool[GuestConnection]) -> None:
        """Give a sandbox beside the pool to the deepest that waits, if nothing else could end its waiting."""
        if not self._waiting or not pool.is_full:
            return
        holders = {each for waiter in self._waiting for each in waiter.holders if each.place != "own"}
        if len(holders) >= pool.busy + self._extra:
            deepest = max(self._waiting, key=lambda waiter: len(waiter.holders))
            self._waiting.remove(deepest)
            self._extra += 1
            deepest.gets_extra.set()


def _placed(connection: GuestConnection, place: Place) -> GuestConnection:
    connection.place = place
    return connection
