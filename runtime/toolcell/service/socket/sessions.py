"""`SocketSessions`: the callers' sessions at a service, with a connection each or, for a grace time, without one."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final

import anyio

from toolcell.errors import UsageError
from toolcell.service.principal import Principal
from toolcell.service.problems import Problem
from toolcell.service.receiving import Receiving
from toolcell.service.socket.arguments import Arguments
from toolcell.service.socket.failures import failed
from toolcell.service.socket.frames import CallerHello
from toolcell.service.socket.messages import CALLER_MESSAGES, SERVICE_MESSAGES, Ask, Finished, RequestFailed
from toolcell.service.socket.methods import METHODS, Method
from toolcell.service.socket.peer import ChannelLost, PeerChannel, SocketPeer, Transport
from toolcell.service.socket.protocol import LinkState, SocketProtocol
from toolcell.service.socket.remote_tools import line_of_request
from toolcell.service.socket.request import ServedRequest
from toolcell.service.socket.served import ServedSession
from toolcell.service.tenants import Tenant
from toolcell_bridge import RemoteProtocolError, UnsendableValue, ValueTooLarge

MOST_SESSIONS: Final = 4096
"""Of all callers at once."""
MOST_OF_TENANT: Final = 1024
"""Of one tenant's callers at once: it does not keep the others out."""

PlaceForRun = Callable[[Principal], AbstractAsyncContextManager[anyio.Event]]
"""Gives a run of a principal its place, and the event that ends it; refuses it with a `Problem`."""

AskWho = Callable[[], Awaitable[Principal]]
"""Returns whose a connection's credential is now, or raises a `Problem`."""


class CallerSession:
    """One caller's session."""

    def __init__(
        self,
        principal: Principal,
        served: ServedSession,
        protocol: SocketProtocol,
        place: PlaceForRun,
        folders: Sequence[Path] = (),
    ) -> None:
        """`folders`: the service's own, which no message names."""
        self.principal, self.served, self._place, self._folders = principal, served, place, folders
        self.ask_who: AskWho | None = None
        """Asks who the caller is, with the credential of its latest connection."""
        self.peer = SocketPeer(protocol, SERVICE_MESSAGES, CALLER_MESSAGES, self._begin)
        self.turn = asyncio.Lock()
        """Of its connections: a new one waits until the old one is put away."""
        self.carrying: asyncio.Task[Any] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, hello: CallerHello) -> None:
        """Begin a connection.

        Raises:
            RemoteProtocolError: the hello is impossible.
        """
        self.peer.protocol.connected(hello)

    async def end(self, reason: str) -> None:
        """End all its requests and sessions."""
        self.peer.lose_all(reason)
        self.peer.protocol.channels.forget_all()
        self.peer.protocol.state = LinkState.OVER
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self.served.close()

    def _begin(self, channel: PeerChannel) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(channel))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, channel: PeerChannel) -> None:
        """Serve a request from its first message to its last. Never raises."""
        try:
            with contextlib.suppress(ChannelLost):
                await self._answer(channel)
        finally:
            channel.close()

    async def _answer(self, channel: PeerChannel) -> None:
        try:
            ask = await channel.receive()
            if not isinstance(ask, Ask):
                raise RemoteProtocolError(f"a channel begins with a request, not with {type(ask).__name__}")
        except RemoteProtocolError as exc:
            channel.send(RequestFailed("usage_error", str(exc), {}))
            return
        request = ServedRequest(channel, ask)
        listening = asyncio.create_task(request.listen())
        try:
            last: Finished | RequestFailed = RequestFailed("cancelled", "the request was given up", {})
            with request.scope:
                last = await self._carry_out(request)
        finally:
            listening.cancel()
        try:
            channel.send(last)
        except (UnsendableValue, ValueTooLarge) as exc:
            channel.send(RequestFailed("too_large", f"it was done, and its result cannot be sent: {exc}", {}))

    async def _carry_out(self, request: ServedRequest) -> Finished | RequestFailed:
        try:
            method = METHODS.get(request.method)
            if method is None:
                raise UsageError(f"there is no method {request.method!r:.80}; there are {', '.join(METHODS)}")
            return Finished(await self._carried_out(method, request))
        except Exception as exc:
            return failed(exc, self._folders)

    async def _check_caller(self) -> None:
        """Check that the credential still holds: it may have been revoked, or expired, since the caller connected.

        Raises:
            Problem: it does not (401, 403), or too many wrong ones came from the address (429).
        """
        if self.ask_who is not None and await self.ask_who() != self.principal:
            raise Problem(403, "forbidden", "Not allowed", "the credential has other rights now; connect again")

    async def _carried_out(self, method: Method, request: ServedRequest) -> Any:
        await self._check_caller()
        if not self.principal.may(method.scope):
            raise Problem(403, "forbidden", "Not allowed", f"{request.method} needs the scope {method.scope}")
        line_of_request.set(request)
        arguments = Arguments(request.arguments)
        request.arguments.clear()  # files and inputs are kept once, where they are used
        if not method.is_run:
            request.channel.admitted()
            return await method.handler(self.served, request, arguments)
        async with self._place(self.principal) as cancel:
            request.channel.admitted()
            passing = asyncio.create_task(_pass_on(cancel, request.cancel))
            try:
                return await method.handler(self.served, request, arguments)
            finally:
                passing.cancel()


async def _pass_on(first: anyio.Event, second: anyio.Event) -> None:
    await first.wait()
    second.set()


class SocketSessions:
    """All of them."""

    def __init__(
        self,
        place: PlaceForRun,
        receiving: Receiving,
        *,
        message_bytes: int,
        channels: int,
        grace_s: float,
        most: int = MOST_SESSIONS,
        most_of_tenant: int = MOST_OF_TENANT,
        folders: Sequence[Path] = (),
    ) -> None:
        """`folders`: the service's own, which no caller is told of."""
        self._place, self._most, self.most_of_tenant = place, most, most_of_tenant
        self._receiving = receiving
        self._message_bytes, self._channels, self._grace_s = message_bytes, channels, grace_s
        self._folders = folders
        self._sessions: dict[str, CallerSession] = {}
        self._graces: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[CallerSession]:
        return iter([*self._sessions.values()])

    def _for(self, hello: CallerHello, principal: Principal, tenant: Tenant) -> tuple[CallerSession, CallerHello]:
        """Return the session that a connection is for, and its hello as the protocol takes it."""
        known = self._sessions.get(hello.session)
        # A session is its principal's. For everybody else it does not exist.
        if known is not None and known.principal == principal and not known.peer.is_over:
            return known, hello
        if len(self._sessions) >= self._most:
            raise Problem(503, "too_many_sessions", "Too many clients", f"{self._most} are connected already")
        own = sum(each.principal.tenant == principal.tenant for each in self._sessions.values())
        if own >= self.most_of_tenant:
            detail = f"{own} of this tenant are connected already, or were until a moment ago"
            raise Problem(503, "too_many_sessions", "Too many clients", detail)
        name = secrets.token_hex(32)
        protocol = SocketProtocol(
            is_caller=False,
            message_bytes=self._message_bytes,
            channels=self._channels,
            session=name,
            grace_s=self._grace_s,
            held=self._receiving.reservation(principal.tenant),
        )
        served = ServedSession(principal, tenant)
        made = self._sessions[name] = CallerSession(principal, served, protocol, self._place, self._folders)
        return made, CallerHello(hello.version, "", 0)

    async def carry(
        self, hello: CallerHello, principal: Principal, tenant: Tenant, transport: Transport, ask_who: AskWho
    ) -> str:
        """Serve a connection until it is lost; return why it was. `ask_who` is asked at each request.

        Raises:
            Problem: there are too many sessions.
            RemoteProtocolError: the hello is impossible.
        """
        session, hello = self._for(hello, principal, tenant)
        name = session.peer.protocol.session
        self._end_grace(name)
        if session.carrying is not None:  # the caller lost that connection, and here nobody has noticed yet
            session.carrying.cancel()
        async with session.turn:
            self._end_grace(name)  # that began with the end of the connection before
            if session.peer.is_over:
                raise Problem(503, "session_over", "The session is over", "it ended while this connection began")
            task = session.carrying = asyncio.current_task()
            session.ask_who = ask_who
            try:
                return await session.peer.carry(transport, lambda: session.begin(hello))
            finally:
                if session.carrying is task:
                    session.carrying = None
                    self._wait_or_end(name, session)

    def _end_grace(self, name: str) -> None:
        if (grace := self._graces.pop(name, None)) is not None:
            grace.cancel()

    def _wait_or_end(self, name: str, session: CallerSession) -> None:
        wait_s = 0.0 if session.peer.is_over else self._grace_s
        self._graces[name] = asyncio.get_running_loop().create_task(self._end_later(name, session, wait_s))

    async def _end_later(self, name: str, session: CallerSession, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        self._sessions.pop(name, None)
        await session.end("the caller was away for longer than the grace time")
        self._graces.pop(name, None)

    async def close(self) -> None:
        """End every session."""
        for session in self:
            session.peer.protocol.close("restart", "the service ends")
            session.peer.wake()
        for name, session in [*self._sessions.items()]:
            self._end_grace(name)
            self._sessions.pop(name, None)
            await session.end("the service ends")
