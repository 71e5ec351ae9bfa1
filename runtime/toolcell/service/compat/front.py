"""`CompatFront`: what stands before a `Service` for clients that speak `POST /execute` and answer over HTTP."""

from __future__ import annotations

import hmac
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import anyio
import httpx

from toolcell import daemon_threads
from toolcell.lifetime import Lifetime, OpenedInBlock
from toolcell.runtime import Runtime
from toolcell.service.authentication import LOOPBACK_TENANT, LoopbackAuthenticator
from toolcell.service.bearer import BearerAuthenticator, refused
from toolcell.service.compat.executions import CLIENT_GONE_S, Executions
from toolcell.service.compat.scripts import ExecutionRunner, folder_of
from toolcell.service.compat.settings import DRAIN_S, EVICT_EVERY_S, CompatSettings
from toolcell.service.compat.workspaces import Workspaces
from toolcell.service.config import ServiceConfig
from toolcell.service.idempotency import IdempotencyStore
from toolcell.service.principal import Principal, Scope
from toolcell.service.service import Service

KEPT_S: Final = 3600.0
"""An execution_id runs once within this time. Clients send again within seconds."""
KEPT_ROWS: Final = 1_000_000
CONNECTIONS: Final = 1000
"""To callback URLs."""


class SharedTokenAuthenticator(BearerAuthenticator):
    """Lets in who has SANDBOX_TOKEN, as one tenant."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token.encode()

    async def _principal_of(self, credential: str) -> Principal:
        if not hmac.compare_digest(credential.encode(), self._token):
            raise refused("this is not the token of the service")
        return Principal(LOOPBACK_TENANT, "client", frozenset({Scope.EXECUTE}))


class CompatFront(OpenedInBlock):
    """Workspaces, executions and answers of one service. Open the service first."""

    def __init__(
        self, settings: CompatSettings, service: Service | None = None, client_gone_s: float = CLIENT_GONE_S
    ) -> None:
        self.settings, self._client_gone_s = settings, client_gone_s
        self.service = service if service is not None else service_of(settings)
        if settings.token:
            settings.listens_at()  # checks the token
            self.service.authenticator = SharedTokenAuthenticator(settings.token)
        self._root = Path(settings.workspace)
        self._workspaces: dict[str, Workspaces] = {}
        self._kept = IdempotencyStore(self._root / ".executions", keep_s=KEPT_S, rows=KEPT_ROWS)
        self._lifetime = Lifetime("CompatFront", self._open)
        self.executions: Executions
        """There once it is open."""

    @property
    def has_tokens(self) -> bool:
        """True when clients have to say who they are."""
        return not isinstance(self.service.authenticator, LoopbackAuthenticator)

    async def open(self) -> None:
        """Make the folders, and begin to clean up.

        Raises:
            StoreError: a folder cannot be used.
        """
        await self._lifetime.open()

    async def close(self) -> None:
        """End what runs."""
        await self._lifetime.close()

    async def _open(self, stack: AsyncExitStack) -> None:
        self.workspaces_of(LOOPBACK_TENANT)
        await daemon_threads.run_sync(self._kept.open)
        stack.callback(self._kept.close)
        limits = httpx.Limits(max_connections=CONNECTIONS)
        http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=None, limits=limits))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        scripts = ExecutionRunner(self._runtime_of, self.workspaces_of, self.settings, http)
        most = self.settings.max_concurrent
        self.executions = Executions(
            scripts, self._kept, self.service.runs, tasks, max_concurrent=most, client_gone_s=self._client_gone_s
        )
        tasks.start_soon(self._evict)

    async def _runtime_of(self, tenant: str) -> Runtime:
        return (await self.service.tenants.get(tenant)).runtime

    def workspaces_of(self, tenant: str) -> Workspaces:
        """Return the workspaces of a tenant.

        Raises:
            StoreError: their folder cannot be used.
        """
        if tenant not in self._workspaces:
            found = Workspaces(folder_of(self._root, tenant, LOOPBACK_TENANT), self.settings.session_ttl_s)
            found.open()
            self._workspaces[tenant] = found
        return self._workspaces[tenant]

    async def _evict(self) -> None:
        """Delete the workspaces that nobody used for long, for ever."""
        while True:
            for each in list(self._workspaces.values()):
                await each.evict()
            await anyio.sleep(EVICT_EVERY_S)


def service_of(settings: CompatSettings, base: ServiceConfig | None = None) -> Service:
    """Return a service with what the environment says. What `base` says of limits stays."""
    config = base if base is not None else ServiceConfig(drain_s=DRAIN_S, state=Path(settings.workspace) / ".state")
    if settings.python_bin:
        defaults = config.defaults.model_copy(update={"python": settings.python_bin})
        config = config.model_copy(update={"defaults": defaults})
    return Service(config)
