"""A sandbox for each run: one of the pool, or one that is started with limits that those of the pool do not have."""

from __future__ import annotations

import errno
import time
from abc import ABC
from collections.abc import Collection
from functools import partial

import anyio

from toolcell.config import Limits
from toolcell.errors import SandboxUnavailable
from toolcell.lifetime import Lifetime
from toolcell.results import ExecutionResult
from toolcell.run.connection import GuestConnection
from toolcell.run.held import HeldRun, HeldRuns
from toolcell.run.monitor import RunMonitor
from toolcell.run.nested import Holding, NestedRuns
from toolcell.run.observer import RunObserver
from toolcell.run.request import RunRequest, fits
from toolcell.run.run import Run
from toolcell.run.tool_bridge import ToolBridge
from toolcell.sandbox.backend import Backend, check_sandbox
from toolcell.sandbox.pool import Pool
from toolcell.sandbox.shortages import unavailable
from toolcell.sandbox.start_clock import StartClock
from toolcell.tools.threads import AbandonedThreads


class SandboxRuntime(ABC):
    """The part of a runtime that finds a sandbox for a run, and destroys it after the run."""

    limits: Limits
    pool: Pool[GuestConnection] | None
    """The sandboxes; None before the runtime is opened."""
    _backend: Backend | None
    _fixed: Collection[str]
    _lifetime: Lifetime
    _clock: StartClock
    _monitor: RunMonitor
    _held: HeldRuns
    _nested: NestedRuns

    async def _run(
        self,
        request: RunRequest,
        bridge: ToolBridge,
        observer: RunObserver,
        abandoned: AbandonedThreads,
        held: GuestConnection | None,
    ) -> ExecutionResult:
        """Run a script in `held`, the sandbox of a session, or in one of its own."""
        waiting = time.perf_counter()
        assert self.pool is not None
        if held is not None:
            observer.on_sandbox(held.sandbox)
            with Holding(held):  # a run keeps the context in which it was made
                run = Run(held, request, bridge.dispatch, observer, 0.0, abandoned, bridge.named)
                return await self._monitored(run)
        connection = await self._sandbox_for(request)
        is_kept = False
        try:
            observer.on_sandbox(connection.sandbox)
            if not connection.is_rewound:
                await self._prepare(connection, request)
            start_s = time.perf_counter() - waiting
            with Holding(connection):
                run = Run(connection, request, bridge.dispatch, observer, start_s, abandoned, bridge.named)
                result = await self._monitored(run)
            is_kept = connection.is_held and self._keep(connection, request, result)
            return result
        finally:
            if not is_kept:
                await self._let_go(connection)

    async def _sandbox_for(self, request: RunRequest) -> GuestConnection:
        """Return the sandbox of a held run, or one of its own."""
        if (before := request.held) is not None:
            connection = await self._held.go_on(before)
            if connection is not None:
                return connection
        # A sandbox of the pool will do if its limits can be lowered to those of the run.
        is_pooled = fits(request.limits, self.limits, self._fixed)
        return await self._acquire(None if is_pooled else request.limits)

    async def _prepare(self, connection: GuestConnection, request: RunRequest) -> None:
        """Give a new sandbox the limits of its run."""
        try:
            await connection.sandbox.prepare(request.limits)
        except OSError as exc:
            raise unavailable(exc) from exc
        if request.hold_s and self._held.can_hold:
            connection.record()

    def _keep(self, connection: GuestConnection, request: RunRequest, result: ExecutionResult) -> bool:
        """Hold a suspended run, unless somebody waits for its place."""
        assert self.pool is not None
        if connection.place == "extra" or (connection.place == "pool" and self.pool.is_short):
            return False
        connection.spent_s = result.usage.wall_s
        return self._held.keep(request.journal_id, request.hold_s, HeldRun(connection, result.usage.cpu_s))

    async def _monitored(self, run: Run) -> ExecutionResult:
        self._monitor.add(run)
        try:
            return await run.execute()
        finally:
            self._monitor.discard(run)

    async def _connect(self, limits: Limits | None = None) -> GuestConnection:
        """Start a sandbox and wait for its Hello. A shortage of the machine fails this start only."""
        assert self._backend is not None
        try:
            connection = GuestConnection(check_sandbox(await self._backend.start(limits or self.limits)))
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
                return await self._nested.acquire(self.pool, partial(self._clock.run, self._connect))
            return await self._clock.run(partial(self._connect, limits))
        except SandboxUnavailable as exc:
            if self._lifetime.is_open:
                raise
            raise SandboxUnavailable("the Runtime was closed before the run had a sandbox; no code ran") from exc

    async def _hold(self, limits: Limits) -> GuestConnection:
        """Start a sandbox for a session."""
        is_pooled = fits(limits, self.limits, self._fixed)
        connection = await self._acquire(None if is_pooled else limits)
        try:
            await connection.sandbox.prepare(limits)
        except BaseException as exc:
            await self._let_go(connection)
            if isinstance(exc, OSError):
                raise unavailable(exc) from exc
            raise
        return connection

    async def _let_go(self, connection: GuestConnection) -> None:
        """Destroy a sandbox whose script or session has ended.

        Cancellation: shielded.
        """
        try:
            if not (connection.place == "pool" and self.pool is not None and self.pool.release(connection)):
                with anyio.CancelScope(shield=True):
                    await connection.sandbox.destroy()
        finally:
            if self.pool is not None:
                self._nested.note_end(self.pool, connection)
