"""`Sandboxes`: a sandbox for each run: one of the pool, or one that is started with limits that those of the pool do
not have.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import partial

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from toolcell.calls.concurrency import first_leaf
from toolcell.config import Limits, PoolConfig, fits
from toolcell.errors import SandboxUnavailable
from toolcell.results import ExecutionResult
from toolcell.run.connection import GuestConnection
from toolcell.run.conversation import Conversation, RunMonitor
from toolcell.run.run import Run
from toolcell.sandbox.backend import Sandbox, check_kind_of
from toolcell.sandbox.environment import Environment
from toolcell.sandbox.pool import Pool, StartClock
from toolcell.sandbox.shortages import possible_cap, unavailable

MAX_EXTRA = 8
"""Sandboxes beside the pool's, of one runtime. Saved scripts run four deep inside one another, and each deadlock ends
when the deepest script that waits gets a sandbox."""

_holders: ContextVar[tuple[GuestConnection, ...]] = ContextVar("toolcell_holders", default=())
"""The sandboxes of the scripts that wait for what runs here, of every runtime."""


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
                if self._extra > MAX_EXTRA:
                    raise SandboxUnavailable(
                        f"all {pool.busy} sandboxes of the pool, and {MAX_EXTRA} more, are held by scripts that wait "
                        "for another one; run fewer inside one another, or raise PoolConfig(cap)"
                    )
                waiter.connection = await start()
                waiter.connection.place = "extra"
            is_over = True
        except BaseExceptionGroup as group:
            raise first_leaf(group) from None
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
        waiter.connection = await pool.acquire()
        waiter.connection.place = "pool"
        scope.cancel()

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


class Sandboxes:
    """The sandboxes of one runtime, and the runs in them."""

    def __init__(
        self, environment: Environment, config: PoolConfig, limits: Limits, is_open: Callable[[], bool]
    ) -> None:
        """`limits`: of the sandboxes of the pool. `is_open`: whether the runtime is."""
        self.config = config
        self._environment, self._limits, self._is_open = environment, limits, is_open
        self._clock = StartClock(config.start_s)
        self.monitor = RunMonitor()
        self.nested = NestedRuns()
        self.pool: Pool[GuestConnection] | None = None
        """None before the runtime is opened."""

    async def open(self, tasks: TaskGroup) -> None:
        """Begin to start sandboxes, in `tasks`.

        Raises:
            SandboxUnavailable: none can be started on this machine.
        """
        tasks.start_soon(self.monitor.watch)
        assert self.pool is not None
        await self.pool.open(tasks)

    def make_pool(self) -> None:
        """Make the pool of a runtime that is being opened."""
        config = self.config
        self.pool = Pool(
            self._connect,
            lambda connection: connection.sandbox.destroy(),
            lambda connection: connection.is_usable,
            lambda connection: connection.sandbox.freeze(),
            warm=config.warm,
            cap=possible_cap(config.cap, self._environment.backend.descriptors_per_sandbox),
            idle_s=config.idle_s,
            clock=self._clock,
        )
        self.monitor.on_tick = self.pool.tend

    async def end_runs(self, why: str) -> None:
        """Begin no more runs, and end those under way with outcome `cancelled`."""
        assert self.pool is not None
        self.pool.refuse()
        await self.monitor.abort_all(why)

    async def close(self) -> None:
        if self.pool is not None:
            await self.pool.close()

    # Running

    async def run(self, run: Run, own: GuestConnection | None = None) -> ExecutionResult:
        """Run a script in `own`, the sandbox of a session, or in one that is destroyed afterwards."""
        began, limits = time.perf_counter(), run.script.limits
        connection = own or await self._sandbox_for(limits)
        try:
            for part in run.parts:
                part.sandbox_found(connection.sandbox)
            if own is None:
                try:
                    await connection.sandbox.prepare(limits)
                except OSError as exc:
                    raise unavailable(exc) from exc
            token = _holders.set((*_holders.get(), connection))
            try:
                start_s = time.perf_counter() - began if own is None else 0.0
                conversation = Conversation(run, connection, start_s)  # keeps the context in which it is made
                self.monitor.add(conversation)
                try:
                    return await conversation.execute()
                finally:
                    self.monitor.discard(conversation)
            finally:
                _holders.reset(token)
        finally:
            if own is None:
                await self.let_go(connection)

    async def hold(self, limits: Limits) -> GuestConnection:
        """Start a sandbox for a session.

        Raises:
            SandboxUnavailable: none could be started.
        """
        connection = await self._sandbox_for(limits)
        if self.pool is not None:
            self.pool.tend()
        try:
            await connection.sandbox.prepare(limits)
        except BaseException as exc:
            await self.let_go(connection)
            if isinstance(exc, OSError):
                raise unavailable(exc) from exc
            raise
        return connection

    async def let_go(self, connection: GuestConnection) -> None:
        """Destroy a sandbox whose script or session has ended.

        Cancellation: shielded.
        """
        try:
            if not (connection.place == "pool" and self.pool is not None and self.pool.release(connection)):
                with anyio.CancelScope(shield=True):
                    await connection.sandbox.destroy()
        finally:
            if self.pool is not None:
                self.nested.note_end(self.pool, connection)

    async def _sandbox_for(self, limits: Limits) -> GuestConnection:
        """Return a sandbox of the pool if its limits can be lowered to these, or start one."""
        is_pooled = limits is self._limits or fits(limits, self._limits, self._environment.backend.fixed)
        assert self.pool is not None
        try:
            if is_pooled:
                return await self.nested.acquire(self.pool, partial(self._clock.run, self._connect))
            return await self._clock.run(partial(self._connect, limits))
        except SandboxUnavailable as exc:
            if self._is_open():
                raise
            raise SandboxUnavailable("the Runtime was closed before the run had a sandbox; no code ran") from exc

    async def _connect(self, limits: Limits | None = None) -> GuestConnection:
        """Start a sandbox and wait for its Hello. A shortage of the machine fails this start only."""
        try:
            sandbox = await self._environment.backend.start(limits or self._limits)
            check_kind_of(sandbox, Sandbox)
            connection = GuestConnection(sandbox)
            await connection.hello()
        except OSError as exc:
            raise unavailable(exc) from exc
        except MemoryError as exc:
            raise unavailable(OSError(errno.ENOMEM, str(exc))) from exc
        return connection
