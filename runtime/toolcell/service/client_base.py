"""`AskingClient`: how a client asks its service for something. `Client` and its sessions are made with it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, Final

from toolcell.calls.concurrency import OF_THIS_PROCESS, AbandonedThreads
from toolcell.errors import ServiceError, ServiceUnavailable, UsageError
from toolcell.run import NO_HANDLERS, RunHandlers
from toolcell.service.socket.caller_tools import CallerTools
from toolcell.service.socket.exchange import Exchange
from toolcell.service.socket.failures import ToolsetForgotten
from toolcell.service.socket.link import ServiceLink
from toolcell.service.socket.messages import Ask
from toolcell.service.socket.offer import KEPT_OFFERS, offer_key, offered_tools
from toolcell.service.socket.streams import StreamLost
from toolcell.service.socket.values import READERS
from toolcell.service.socket.wire_arguments import given_only, wire_context
from toolcell.support.lifetime import Lifetime
from toolcell.support.lru import Lru
from toolcell.tools import RunContext, ToolRegistry, registry_of
from toolcell_bridge.wire.errors import RemoteProtocolError, UnsendableValue, ValueTooLarge

ATTEMPTS: Final = 5
"""To send a request whose session was lost before anything of it was sent, or whose tools the service has forgotten."""


class AskingClient:
    """The part of a client that asks."""

    registry: ToolRegistry
    _link: ServiceLink
    _lifetime: Lifetime
    _server_tools: bool
    _has_tools: bool

    def _begin_asking(self) -> None:
        self._offers: Lru[Any, tuple[str, int, ToolRegistry]] = Lru(KEPT_OFFERS)
        """Toolsets that the service has: by what is in them, its session, their number and their tools."""
        self._offering = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._abandoned = AbandonedThreads(OF_THIS_PROCESS)

    async def _ask(
        self,
        method: str,
        arguments: Mapping[str, Any],
        kind: str,
        *,
        tools: Any = None,
        context: RunContext | None = None,
        limits: Any = None,
        handlers: RunHandlers = NO_HANDLERS,
        makes_calls: bool = True,
        offers: bool | None = None,
        session: str = "",
    ) -> Any:
        """Ask for something, and return it as an object of its `kind`.

        `makes_calls`: its tools may be called here. `offers`: the service has to know the tools; by default when they
        may be called. `session`: the client's session that it is about.

        Raises:
            ToolcellError: as the method of the runtime; ServiceUnavailable, ServiceError: there is no answer.
        """
        self._lifetime.check()
        registry = self._tools_of(tools)
        abandoned = AbandonedThreads(self._abandoned)
        context = (context or RunContext()).within(abandoned=abandoned, runtime=self).child(limits=limits)
        caller = CallerTools(registry, context)
        plain = given_only(arguments)
        if makes_calls:
            plain |= given_only({"context": wire_context(context), "notes_calls": caller.is_heard or None})
        plain |= {"wants_logs": True} if handlers.on_log is not None else {}
        plain |= {"wants_progress": True} if handlers.on_progress is not None else {}
        for _ in range(ATTEMPTS):
            await self._link.ready()
            if session and session != self._link.home:
                raise ServiceError("the service lost this session with its connection", may_have_begun=False)
            try:
                if (makes_calls if offers is None else offers) and (tools is not None or self._has_tools):
                    plain["toolset"] = await self._offered(registry)
                answer = await self._exchanged(method, plain, caller, handlers)
            except StreamLost:
                continue  # nothing of it was sent, so it is safe to send it
            except ToolsetForgotten:
                self._offers.pop(offer_key(registry))
                continue
            return self._read(kind, answer, abandoned)
        raise ServiceUnavailable(f"the service at {self._link.url} is lost again and again: {self._link.problem}")

    async def _exchanged(self, method: str, plain: dict[str, Any], caller: CallerTools, handlers: RunHandlers) -> Any:
        stream = await self._link.request(is_run=not method.startswith("session.") or method.endswith("_code"))
        try:
            most = self._link.message_bytes
            try:
                body = stream.encode(Ask(method, plain))
            except (UnsendableValue, ValueTooLarge) as exc:
                raise UsageError(f"{method} cannot be sent: {exc}") from exc
            if len(body) > most:
                raise UsageError(f"{method} takes {len(body)} bytes, and the service takes {most} (message_bytes)")
            stream.send_body(body)
            return await Exchange(stream, most, caller, handlers).answer()
        finally:
            self._link.forget(stream)

    def _read(self, kind: str, answer: Any, abandoned: AbandonedThreads) -> Any:
        try:
            read = READERS[kind](answer)
        except RemoteProtocolError as exc:
            raise ServiceError(f"the answer of the service cannot be read: {exc}", may_have_begun=True) from exc
        return read

    def _tools_of(self, tools: Iterable[Any] | Any) -> ToolRegistry:
        given: Any = self.registry if tools is None else registry_of(tools, "tools=")
        if not isinstance(given, ToolRegistry):
            raise UsageError(f"tools= of a Client takes a ToolRegistry or a list of tools, not {type(given).__name__}")
        return given.snapshot()

    async def _offered(self, registry: ToolRegistry) -> int:
        """Return the number of a toolset at the service; offer it if it is not there."""
        key = offer_key(registry)
        async with self._offering:  # many that begin at once offer their tools once
            session, number, _ = self._offers.get(key, ("", 0, registry))
            if session == self._link.home:
                self._offers.use(key)  # as at the service
                return number
            number = next(self._numbers)
            offer = {"toolset": number, "tools": offered_tools(registry), "with_own": self._server_tools}
            await self._exchanged("offer_tools", offer, CallerTools(registry, RunContext()), NO_HANDLERS)
            self._offers.put(key, (self._link.home, number, registry))  # keeps the tools, so that their ids stay theirs
            return number
