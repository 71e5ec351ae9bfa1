"""`Service`: what is behind the routes: who is let in, the tenants, and the runs under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import Context
from functools import lru_cache
from typing import Final

import anyio

from toolcell.errors import UsageError
from toolcell.service.admission import Admission, Share
from toolcell.service.authenticators import make_authenticator
from toolcell.service.config import ServiceConfig
from toolcell.service.idempotency import IdempotentRequests
from toolcell.service.metrics import Metrics
from toolcell.service.principal import Principal
from toolcell.service.receiving import Receiving
from toolcell.service.revocations import Revocations
from toolcell.service.runs_under_way import RunsUnderWay
from toolcell.service.socket.callers import Callers
from toolcell.service.tenants import Tenants
from toolcell.support.files import make_own_folder
from toolcell.support.lifetime import OpenedInBlock
from toolcell.support.log import logger_of
from toolcell.tools import ToolRegistry

logger = logger_of("toolcell.service")

SHARES: Final = 1024
"""Tenants whose settings of the queue are remembered."""

WARM_S: Final = 5.0
"""What a probe of readiness waits for the first sandboxes."""

CANCEL_S: Final = 10.0
"""What runs that were cancelled may take to answer."""


class Service(OpenedInBlock):
    """Everything that the routes share. Open it before the first request, and close it after the last."""

    def __init__(self, config: ServiceConfig | None = None, registry: ToolRegistry | None = None) -> None:
        """`registry`: tools that every tenant has, besides its own."""
        self.config = config or ServiceConfig()
        self.metrics = Metrics(self._states)
        self.tenants = Tenants(self.config, registry, self.metrics.watch)
        self.authenticator = make_authenticator(self.config)
        self.admission = Admission(self.config.concurrent_runs, self.config.queued_runs, lru_cache(SHARES)(self._share))
        self.idempotent = IdempotentRequests()
        self.runs = RunsUnderWay()
        self.receiving = Receiving(self.config.receiving_bytes, lambda name: self.config.tenant(name).receiving_bytes)
        self.revocations = Revocations()
        self.callers = Callers(
            self._place,
            self.admission,
            self.receiving,
            self.revocations,
            message_bytes=self.config.body_bytes,
            requests=self.config.socket_requests,
            grace_s=self.config.grace_s,
            folders=self.config.folders,
        )
        self._stack = AsyncExitStack()
        self._is_open = False
        self.at_close: list[Callable[[], Awaitable[None]]] = []
        """Called when the service is closed, while its tenants are still open."""
        self._warming: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Make the folder of the state, and load the tools of the tenants.

        Raises:
            UsageError: the folder or a setting cannot be used, or tools cannot be loaded.
        """
        self.tenants.load()
        folder = self.config.state
        try:
            make_own_folder(folder)
        except OSError as exc:
            raise UsageError(f"the state folder {folder} cannot be used: {exc.strerror or exc}") from exc
        self._stack.callback(self.authenticator.close)
        self._stack.push_async_callback(self.tenants.close)
        self._stack.push_async_callback(self.idempotent.close)
        self._stack.push_async_callback(self.callers.close)
        self._stack.callback(self.revocations.close)
        self._is_open = True

    async def close(self) -> None:
        self._is_open = False
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.wait([self._warming])
        for callback in self.at_close:
            await callback()
        await self._stack.aclose()

    async def is_warm(self) -> bool:
        """Return whether the tenants of the settings are open, with a sandbox ready; open them if nobody has. This
        waits for a while. One that cannot be opened is logged."""
        if self._warming is None:
            self._warming = asyncio.create_task(self._warm(), context=Context())
        await asyncio.wait([self._warming], timeout=WARM_S)
        return self._warming.done()

    async def _warm(self) -> None:
        for name in self.tenants.listed:
            try:
                tenant = await self.tenants.get(name)
                if (pool := tenant.runtime.pool) is not None and tenant.config.pool.warm:
                    pool.release(await pool.acquire())  # the ones after it are started as for any other run
            except Exception as exc:  # its requests are answered with this, too
                logger.warning("tenant %s cannot run scripts: %s", name, exc)

    async def drain(self, grace_s: float) -> None:
        """Begin nothing new. Wait for what runs, and cancel it after `grace_s`."""
        self.runs.is_draining = True
        with anyio.move_on_after(grace_s):
            await self.runs.wait_for_none()
        for run in self.runs:
            run.stop()
        with anyio.move_on_after(CANCEL_S):
            await self.runs.wait_for_none()

    @asynccontextmanager
    async def _place(self, principal: Principal, was_free: bool) -> AsyncIterator[anyio.Event]:
        """Give a run of a WebSocket its place."""
        async with self.admission.slot(principal.tenant, ignores_debt=was_free):
            with self.runs.one(principal.tenant, principal.subject) as run:
                yield run.cancel

    @property
    def is_ready(self) -> bool:
        return self._is_open and not self.runs.is_draining

    def _states(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for tenant in self.tenants:
            pool = tenant.runtime.pool
            sandboxes = (len(pool.idle), pool.busy, pool.starting) if pool is not None else (0, 0, 0)
            yield tenant.name, (*self.admission.queue.counts(tenant.name), *sandboxes, tenant.sessions.open_count)

    def _share(self, tenant: str) -> Share:
        settings = self.config.tenant(tenant)
        return Share(settings.concurrent_runs, settings.queued_runs, settings.queue_s)
