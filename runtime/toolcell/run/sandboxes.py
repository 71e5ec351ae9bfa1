"""`Sandboxes`: a sandbox for each run: one of the pool, or one that is started with limits that those of the pool do
not have.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from toolcell.calls.concurrency import Workers, first_leaf
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

MAX_BESIDE = 8
"""Sandboxes beside the pool's, of one runtime: one for each depth of scripts inside scripts. Saved scripts run four
deep. Whoever has one waits for deeper scripts alone: the deepest goes on when scripts that wait hold the whole pool."""

LOOK_S = 0.005
"""How often a nested script that waits for a start looks whether the pool is full now."""

_depth: ContextVar[int] = ContextVar("toolcell_depth", default=0)
"""How many scripts, of every runtime, wait for what runs here."""


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
        self.beside = [Workers(1) for _ in range(MAX_BESIDE)]
        """The places beside the pool, by depth."""
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
            token = _depth.set(_depth.get() + 1)
            try:
                start_s = time.perf_counter() - began if own is None else 0.0
                conversation = Conversation(run, connection, start_s)  # keeps the context in which it is made
                self.monitor.add(conversation)
                try:
                    return await conversation.execute()
                finally:
                    self.monitor.discard(conversation)
            finally:
                _depth.reset(token)
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
            if not (connection.is_pooled and self.pool is not None and self.pool.release(connection)):
                with anyio.CancelScope(shield=True):
                    await connection.sandbox.destroy()
        finally:
            if connection.beside is not None:
                connection.beside.give_back()

    async def _sandbox_for(self, limits: Limits) -> GuestConnection:
        """Return a sandbox of the pool if its limits can be lowered to these, or start one."""
        is_pooled = limits is self._limits or fits(limits, self._limits, self._environment.backend.fixed)
        assert self.pool is not None
        try:
            if is_pooled:
                depth = _depth.get()
                return await (self._nested(self.pool, depth) if depth else self._of_pool(self.pool))
            return await self._clock.run(partial(self._connect, limits))
        except SandboxUnavailable as exc:
            if self._is_open():
                raise
            raise SandboxUnavailable("the Runtime was closed before the run had a sandbox; no code ran") from exc

    async def _of_pool(self, pool: Pool[GuestConnection]) -> GuestConnection:
        connection = await pool.acquire()
        connection.is_pooled = True
        return connection

    async def _nested(self, pool: Pool[GuestConnection], depth: int) -> GuestConnection:
        """Take a sandbox of the pool, or one beside it when the pool is full, whichever can be had first."""
        if depth > MAX_BESIDE and pool.is_full:
            raise SandboxUnavailable(
                f"all {pool.busy} sandboxes of the pool are taken, and a script {depth} deep inside others gets none "
                "beside them; run fewer inside one another, or raise PoolConfig(cap)"
            )
        if depth > MAX_BESIDE:
            return await self._of_pool(pool)
        beside, has_place = self.beside[depth - 1], False
        found: GuestConnection | None = None

        async def take() -> None:
            nonlocal found
            found = await self._of_pool(pool)
            tasks.cancel_scope.cancel()

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(take)
                await anyio.lowlevel.checkpoint()
                while not pool.is_full:  # noqa: ASYNC110 - it starts one, which another script may get
                    await anyio.sleep(LOOK_S)
                await beside.take()
                has_place = True
                tasks.cancel_scope.cancel()
            if found is None:
                found = await self._clock.run(self._connect)
                found.beside, has_place = beside, False
            made, found = found, None
            return made
        except BaseExceptionGroup as group:
            raise first_leaf(group) from None
        finally:
            if has_place:
                beside.give_back()
            if found is not None:
                pool.release(found)

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
