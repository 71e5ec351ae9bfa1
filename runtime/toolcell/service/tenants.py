"""`Tenant`: one tenant's runtime, with its own zygote, pool, tools, journals and audit log. `Tenants` opens them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from contextvars import Context
from functools import partial
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

import anyio

from toolcell.audit import AuditLog, HmacKey
from toolcell.control import Draft
from toolcell.egress import Egress
from toolcell.errors import McpServerError, SessionError, UsageError
from toolcell.journal import RequestKeys
from toolcell.quotas import Quotas
from toolcell.results import Suspension
from toolcell.runtime import Runtime
from toolcell.sandbox import use_package_index
from toolcell.service.answering import Answers
from toolcell.service.authentication import LOOPBACK_TENANT
from toolcell.service.config import ServiceConfig, TenantConfig
from toolcell.service.log_reader import RecordedRuns
from toolcell.service.problems import Problem
from toolcell.service.replays import Replays
from toolcell.sessions import Session
from toolcell.support import daemon_threads
from toolcell.support.files import make_own_folder
from toolcell.support.log import logger_of
from toolcell.tools import ToolRegistry, load_tools


class TenantSessions:
    """Opens, finds and forgets the sessions of a tenant. Every session has a name, so each can be restored."""

    def __init__(self, runtime: Runtime, most: int) -> None:
        """`most`: sessions that may be open at once."""
        self._runtime, self._most = runtime, most
        self._open: dict[str, Session] = {}
        self._opening = 0
        self._lent = 0
        """Sessions that callers on WebSockets have open. They are counted here, and kept there."""
        self._locks: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()

    async def create(self, name: str | None, options: Mapping[str, Any]) -> Session:
        """Open a new session, or, with `restore=True`, the one of this name from its journal. "if_kept": either.

        Raises:
            Problem: there is one of this name (409), or there is none to be restored (404), or too many are open (429).
        """
        name = name or os.urandom(8).hex()
        async with self._lock_of(name):
            restore, is_kept = options.get("restore"), await self._runtime.sessions.keeps(name)
            if name in self._open:
                raise _conflict(name, "is open; use it, or another name")
            if is_kept and restore is not True and restore != "if_kept":
                raise _conflict(
                    name, 'is kept in its journal; use it, or forget it with DELETE, or say "restore": true'
                )
            if restore is True and not is_kept:
                raise no_session(name)
            return await self._opened(name, lambda: _open(self._runtime.session(name, **options)))

    async def get(self, name: str) -> Session:
        """Return an open session; one that is kept in its journal is restored.

        Raises:
            Problem: there is none of this name (404), or too many are open (429).
        """
        if (found := self._open.get(name)) is not None:
            return found
        async with self._lock_of(name):
            if (found := self._open.get(name)) is not None:
                return found
            if not await self._runtime.sessions.keeps(name):
                raise no_session(name)
            return await self._opened(name, lambda: _open(self._runtime.session(name, restore="if_kept")))

    async def fork(self, name: str, copy: str | None) -> Session:
        """Return a new session with the state of one.

        Raises:
            Problem: as from `get` and `create`.
        """
        session = await self.get(name)
        copy = copy or os.urandom(8).hex()
        if copy == name:
            raise _conflict(copy, "is there already; choose another name")
        async with self._lock_of(copy):
            if copy in self._open or await self._runtime.sessions.keeps(copy):
                raise _conflict(copy, "is there already; choose another name")
            return await self._opened(copy, lambda: session.fork(copy))

    async def forget(self, name: str) -> None:
        """Close a session and remove its journal. A script that waits for a decision is given up.

        Raises:
            Problem: there is none of this name (404).
        """
        async with self._lock_of(name):
            is_kept, session = await self._runtime.sessions.keeps(name), self._open.get(name)
            if session is None and not is_kept:
                raise no_session(name)
            with suppress(SessionError):  # one whose journal is damaged is forgotten, too
                session = session or await _open(self._runtime.session(name, restore="if_kept"))
                await session.interrupt()
                await session.abandon()
            if session is not None:
                await session.close()
            self._open.pop(name, None)
            if is_kept:
                await daemon_threads.run_sync(self._runtime.forget_session, name)

    def _lock_of(self, name: str) -> anyio.Lock:
        """Return what keeps others from opening and forgetting this session."""
        return self._locks.setdefault(name, anyio.Lock())

    def lend(self) -> None:
        """Count a session that a caller opens elsewhere.

        Raises:
            Problem: too many are open (429).
        """
        self._check_room()
        self._lent += 1

    def give_back(self) -> None:
        """Count it no longer."""
        self._lent -= 1

    def _check_room(self) -> None:
        if self.open_count + self._opening >= self._most:
            detail = f"{self.open_count} sessions are open, and this tenant may have {self._most}; close one first"
            raise Problem(429, "too_many_sessions", "Too many sessions", detail)

    async def _opened(self, name: str, opening: Callable[[], Awaitable[Session]]) -> Session:
        self._check_room()
        self._opening += 1
        try:
            self._open[name] = session = await opening()
        finally:
            self._opening -= 1
        return session

    @property
    def open_count(self) -> int:
        """How many are open, those of callers on WebSockets too."""
        return len(self._open) + self._lent

    async def list(self) -> list[tuple[str, Session | None]]:
        """Return the name of each session, and the session if it is open."""
        names = sorted({*self._open, *await daemon_threads.run_sync(self._runtime.kept_sessions)})
        return [(name, self._open.get(name)) for name in names]


async def _open(session: Session) -> Session:
    await session.open()
    return session


def no_session(name: str) -> Problem:
    return Problem(404, "no_such_session", "No such session", f"there is no session named {name!r:.80}")


def _conflict(name: str, why: str) -> Problem:
    return Problem(409, "session_exists", "The name is taken", f"the session {name!r:.80} {why}")


logger = logger_of("toolcell.service.tenants")

CONNECT_AGAIN_S: Final = 30.0
"""Between two times that a server is tried which could not be had."""

Found = TypeVar("Found")


class TenantJournals:
    """Reads the journals of a tenant."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._turn = anyio.CapacityLimiter(1)

    async def suspended(self) -> tuple[Suspension, ...]:
        return tuple(await self._look(self._runtime.suspended_runs))

    async def interrupted(self) -> list[str]:
        """Return the ids of the runs whose host ended in their middle."""
        return await self._look(self._runtime.interrupted_runs)

    async def drafts(self) -> list[Draft]:
        return await self._look(self._runtime.waiting_drafts)

    async def header_of(self, run_id: str) -> Mapping[str, Any]:
        """Return the `source`, the `session` and the `user_id` of a run that waits; nothing that cannot be read now."""
        return await self._look(lambda: self._runtime.journals.header_of(run_id))

    async def _look(self, look: Callable[[], Found]) -> Found:
        async with self._turn:
            return await daemon_threads.run_sync(look)


class Tenant:
    """A tenant whose runtime is open. Nothing of it is shared with another tenant."""

    def __init__(
        self,
        name: str,
        config: TenantConfig,
        registry: ToolRegistry,
        runtime: Runtime,
        replays: Replays,
        answers: Answers,
        keys: RequestKeys,
    ) -> None:
        self.name, self.config, self.registry, self.runtime = name, config, registry, runtime
        self.replays, self.answers, self.keys = replays, answers, keys
        self.missing_servers: dict[str, dict[str, Any]] = {}
        """Options of its MCP servers that could not be had."""
        self._connecting: asyncio.Task[None] | None = None
        self._tried_at = 0.0
        self.sessions = TenantSessions(runtime, config.sessions)
        self.journals = TenantJournals(runtime)
        self.recorded = RecordedRuns(config.record, config.record_config.key)
        """What its runs did."""

    async def connect(self) -> None:
        """Connect with the MCP servers that are missing. Runs go on without one that cannot be had; the log says so."""
        self._tried_at = time.monotonic()
        for server, options in [*self.missing_servers.items()]:
            try:
                await self.registry.add_mcp_server(server, **options)
                del self.missing_servers[server]
            except McpServerError as exc:
                logger.warning("tenant %s goes on without one of its servers: %s", self.name, exc)

    def connect_again(self) -> None:
        """Try it again, if the last time is a while ago, without waiting for it."""
        is_under_way = self._connecting is not None and not self._connecting.done()
        if self.missing_servers and not is_under_way and time.monotonic() - self._tried_at > CONNECT_AGAIN_S:
            self._connecting = asyncio.create_task(self.connect(), context=Context())

    async def reopen_session(self, run_id: str) -> None:
        """Restore the session whose script waits, if there is one: it is carried on there."""
        if name := (await self.journals.header_of(run_id)).get("session"):
            await self.sessions.get(str(name))

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])


class Tenants:
    """The tenants of a service. Each is opened when it is asked for first."""

    def __init__(
        self,
        config: ServiceConfig,
        registry: ToolRegistry | None = None,
        on_open: Callable[[str, Runtime], object] = lambda name, runtime: None,
    ) -> None:
        """`registry`: tools that every tenant has. `on_open` is called when a tenant's runtime is open."""
        self._config, self._registry, self._on_open = config, registry, on_open
        self._open: dict[str, Tenant] = {}
        self._locks: dict[str, anyio.Lock] = {}
        self._loaded: dict[str, list[ToolRegistry]] = {}
        """Tools of tenants that are not open yet."""
        self._stack = AsyncExitStack()

    def __iter__(self) -> Iterator[Tenant]:
        return iter(list(self._open.values()))

    @property
    def listed(self) -> tuple[str, ...]:
        """The tenants that have settings of their own, or `default`."""
        return tuple(self._config.tenants) or (LOOPBACK_TENANT,)

    def load(self) -> None:
        """Load the tools of each listed tenant, so that a mistake in them is found now.

        Raises:
            UsageError: a file or module of tools cannot be loaded, or a rule about requests is wrong.
        """
        if (index := self._config.package_index) is not None:
            use_package_index(index.partition(" ")[0])
        for name in self.listed:
            config = self._config.tenant(name)
            self._loaded[name] = [load_tools(source) for source in config.tools]
            self._egress(name, config)

    async def get(self, name: str) -> Tenant:
        """Return a tenant; open it first if this is the first time.

        Raises:
            UsageError: the name or a setting is wrong.
            SandboxUnavailable: this machine cannot start its sandboxes.
        """
        if (found := self._open.get(name)) is not None:
            found.connect_again()
            return found
        config = self._config.tenant(name)
        async with self._locks.setdefault(name, anyio.Lock()):
            if name not in self._open:
                self._open[name] = await self._opened(name, config)
        return self._open[name]

    async def close(self) -> None:
        """Close every tenant. What runs ends with outcome `cancelled`."""
        self._open.clear()
        await self._stack.aclose()

    async def _opened(self, name: str, config: TenantConfig) -> Tenant:
        async with AsyncExitStack() as stack:
            registry = ToolRegistry()
            stack.push_async_callback(registry.close)
            given = [self._registry] if self._registry is not None else []
            loaded = self._loaded.pop(name, None) or [load_tools(source) for source in config.tools]
            registry = registry.merged(*given, *loaded)
            stack.push_async_callback(registry.close)
            self._make_folder(name, config)
            log = AuditLog(config.record, config=config.record_config)
            runtime = self._runtime(name, config, registry, log)
            await stack.enter_async_context(runtime)
            keys = RequestKeys(log, name, self._config.idempotency_s, self._config.idempotency_keys)
            stack.callback(keys.close)
            self._on_open(name, runtime)
            replays = Replays(runtime, config, log, partial(self._on_open, name))
            tenant = Tenant(
                name,
                config,
                registry=registry,
                runtime=runtime,
                replays=replays,
                answers=Answers(self._config.answer_bytes),
                keys=keys,
            )
            tenant.missing_servers = dict(config.mcp)
            await tenant.connect()
            stack.push_async_callback(tenant.close)
            stack.push_async_callback(tenant.recorded.close)
            self._stack.push_async_exit(stack.pop_all())
        return tenant

    def _runtime(self, name: str, config: TenantConfig, registry: ToolRegistry, log: AuditLog) -> Runtime:
        return Runtime(
            registry,
            backend=config.backend,
            limits=config.limits,
            python=config.python,
            packages=config.packages,
            preload=config.preload,
            pool=config.pool,
            policy=config.policy,
            record=log,
            quotas=Quotas(config.quota, by="user_id" if config.quota_by == "subject" else lambda run: name)
            if config.quota is not None
            else None,
            egress=self._egress(name, config),
        )

    def _make_folder(self, name: str, config: TenantConfig) -> None:
        """Make the tenant's folder, and its own key if that is used and not there yet."""
        folder, path = self._config.state / "tenants" / name, config.record_config.key
        make_own_folder(folder)
        if path == folder / "audit.key" and not path.exists():
            with suppress(FileExistsError):
                HmacKey.generate().save(path)

    def _egress(self, name: str, config: TenantConfig) -> Egress | None:
        given = (config.allow, config.allow_secrets, config.allow_packages)
        try:
            egress = Egress.of_texts(*given, self._config.package_index)
        except UsageError as exc:
            raise UsageError(f"tenant {name}: {exc}") from exc
        return egress if any(given) else None
