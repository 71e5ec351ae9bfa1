"""`Sandboxes`: a sandbox for each run: one of the pool, or one that is started with limits that those of the pool do
not have.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from functools import partial

import anyio
from anyio.abc import TaskGroup

from toolcell.config import Limits, PoolConfig
from toolcell.errors import SandboxUnavailable
from toolcell.results import ExecutionResult
from toolcell.run.connection import GuestConnection
from toolcell.run.monitor import RunMonitor
from toolcell.run.nested import Holding, NestedRuns
from toolcell.run.observer import RunObserver
from toolcell.run.request import RunRequest, fits
from toolcell.run.run import Run
from toolcell.run.tool_bridge import ToolBridge
from toolcell.sandbox.backend import Sandbox, check_kind_of
from toolcell.sandbox.environment import Environment
from toolcell.sandbox.pool import Pool, StartClock
from toolcell.sandbox.shortages import possible_cap, unavailable


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
            cap=possible_cap(config.cap, self._environment.descriptors_per_sandbox),
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
        """Destroy the sandboxes of the pool."""
        if self.pool is not None:
            await self.pool.close()

    # Running

    async def run(
        self, request: RunRequest, bridge: ToolBridge, observer: RunObserver, own: GuestConnection | None = None
    ) -> ExecutionResult:
        """Run a script in `own`, the sandbox of a session, or in one that is destroyed afterwards."""
        waiting = time.perf_counter()
        assert self.pool is not None
        if own is not None:
            observer.on_sandbox(own.sandbox)
            return await self._run_in(own, request, bridge, observer)
        connection = await self._sandbox_for(request.limits)
        try:
            observer.on_sandbox(connection.sandbox)
            try:
                await connection.sandbox.prepare(request.limits)
            except OSError as exc:
                raise unavailable(exc) from exc
            return await self._run_in(connection, request, bridge, observer, time.perf_counter() - waiting)
        finally:
            await self.let_go(connection)

    async def _run_in(
        self,
        connection: GuestConnection,
        request: RunRequest,
        bridge: ToolBridge,
        observer: RunObserver,
        start_s: float = 0.0,
    ) -> ExecutionResult:
        with Holding(connection):  # a run keeps the context in which it was made
            run = Run(connection, request, bridge.dispatch, observer=observer, start_s=start_s, named=bridge.named)
            self.monitor.add(run)
            try:
                return await run.execute()
            finally:
                self.monitor.discard(run)

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
        is_pooled = fits(limits, self._limits, self._environment.fixed)
        return await self._acquire(None if is_pooled else limits)

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

    async def _acquire(self, limits: Limits | None) -> GuestConnection:
        """Take a sandbox of the pool, or start one with limits that those of the pool do not have."""
        assert self.pool is not None
        try:
            if limits is None:
                return await self.nested.acquire(self.pool, partial(self._clock.run, self._connect))
            return await self._clock.run(partial(self._connect, limits))
        except SandboxUnavailable as exc:
            if self._is_open():
                raise
            raise SandboxUnavailable("the Runtime was closed before the run had a sandbox; no code ran") from exc
