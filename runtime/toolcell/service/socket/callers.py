"""`Callers`: everybody who uses the service with a `Client`, with a connection or, for a grace time, without one.

/v1/connect is their WebSocket. Who connects is asked before anything is accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import anyio
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from toolcell.errors import ToolcellError, UsageError
from toolcell.service.authentication import principal_of
from toolcell.service.principal import Principal, Scope
from toolcell.service.problems import Problem, problem_of
from toolcell.service.receiving import Receiving
from toolcell.service.request_log import note, one_line
from toolcell.service.revocations import AskWho, Revocations, check_same
from toolcell.service.socket.arguments import Arguments
from toolcell.service.socket.failures import failed
from toolcell.service.socket.messages import (
    CALLER_MESSAGES,
    FRAMES,
    SERVICE_MESSAGES,
    SOCKET_VERSION,
    Ask,
    CallerHello,
    Finished,
    Goodbye,
    RequestFailed,
    ServiceHello,
)
from toolcell.service.socket.methods import METHODS, CallerSession, Method
from toolcell.service.socket.remote_tools import ServedRequest, served_here
from toolcell.service.socket.streams import LOST, SaidGoodbye, Stream, StreamLost, Streams, Transport, read_frame
from toolcell.service.tenants import Tenant
from toolcell.support.log import quiet_from_here
from toolcell.support.token_bucket import TokenBucket
from toolcell_bridge.wire.errors import RemoteProtocolError, UnsendableValue, ValueTooLarge

MOST_CALLERS: Final = 4096
"""At once."""
MOST_OF_TENANT: Final = 1024
"""Most callers of one tenant at once: it does not keep the others out."""
MAX_NAME_CHARS: Final = 64

PlaceForRun = Callable[[Principal], AbstractAsyncContextManager[anyio.Event]]
"""Gives a run of a principal its place, and the event that ends it; refuses it with a `Problem`."""


class Caller:
    """One of them: its requests, and what it has at the service."""

    def __init__(
        self,
        *,
        name: str,
        principal: Principal,
        ask_who: AskWho,
        session: CallerSession,
        place: PlaceForRun,
        folders: Sequence[Path],
        **bounds: Any,
    ) -> None:
        """`folders`: the service's own, which no message names. `bounds`: as for `Streams`."""
        self.name, self.principal = name, principal
        self._session, self._place, self._folders = session, place, folders
        self.streams = Streams(SERVICE_MESSAGES, CALLER_MESSAGES, on_request=self._begin, **bounds)
        self.home = secrets.token_hex(8)
        self.ask_who = ask_who
        """Asks who the caller is, with the credential of its latest connection."""
        self.allowed = contextlib.ExitStack()
        """What looks whether its credential still holds."""
        self.connections = 0
        """That it has, the ones included that wait until the one before is put away."""
        self.turn = asyncio.Lock()
        self.carrying: asyncio.Task[str] | None = None
        self.leaving: asyncio.Task[None] | None = None
        self.is_over = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def end(self, reason: str) -> None:
        """End all its requests and sessions."""
        self.is_over = True
        self.allowed.close()
        self.streams.lose_all(reason)
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._session.close()

    def _begin(self, stream: Stream) -> None:
        if self.is_over:
            return
        task = asyncio.get_running_loop().create_task(self._serve(stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, stream: Stream) -> None:
        """Serve a request from its first message to its last. Never raises."""
        with contextlib.suppress(StreamLost):
            try:
                ask = await stream.receive()
                if not isinstance(ask, Ask):
                    raise RemoteProtocolError(f"a request begins with Ask, not with {type(ask).__name__}")
            except RemoteProtocolError as exc:
                stream.send(RequestFailed("usage_error", str(exc), {}))
                return
            request = ServedRequest(stream, ask)
            listening = asyncio.create_task(request.listen())
            last: Finished | RequestFailed = RequestFailed("cancelled", "the request was given up", {})
            known = request.method if request.method in METHODS else None
            who = {"tenant": self.principal.tenant, "subject": self.principal.subject}
            with one_line(client=None, method="SOCKET", route=known, status=None, **who):
                try:
                    with request.scope:
                        last = await self._carry_out(request)
                finally:
                    listening.cancel()
                    _note_end(last)
            try:
                stream.send(last)
            except (UnsendableValue, ValueTooLarge) as exc:
                stream.send(RequestFailed("too_large", f"it was done, and its result cannot be sent: {exc}", {}))

    async def _carry_out(self, request: ServedRequest) -> Finished | RequestFailed:
        try:
            method = METHODS.get(request.method)
            if method is None:
                raise UsageError(f"there is no method {request.method!r:.80}; there are {', '.join(METHODS)}")
            await check_same(self.principal, self.ask_who)
            if not self.principal.may(method.scope):
                raise Problem(403, "forbidden", "Not allowed", f"{request.method} needs the scope {method.scope}")
            return Finished(await self._carried_out(method, request))
        except Exception as exc:
            return failed(exc, self._folders)

    async def _carried_out(self, method: Method, request: ServedRequest) -> Any:
        served_here.set(request)
        arguments = Arguments(request.arguments)
        request.arguments.clear()  # files and inputs are kept once, where they are used
        if not method.is_run:
            request.stream.admitted()
            return await method.handler(self._session, request, arguments)
        async with self._place(self.principal) as cancel:
            request.stream.admitted()
            passing = asyncio.create_task(_pass_on(cancel, request.cancel))
            try:
                return await method.handler(self._session, request, arguments)
            finally:
                passing.cancel()


def _note_end(last: Finished | RequestFailed) -> None:
    if isinstance(last, RequestFailed):
        note(code=last.code)
        return
    found = last.value.get("run_id") if isinstance(last.value, dict) else None
    note(status=200, **({"run_id": found} if isinstance(found, str) else {}))


async def _pass_on(first: anyio.Event, second: anyio.Event) -> None:
    await first.wait()
    second.set()


class Callers:
    """All of them."""

    def __init__(
        self,
        place: PlaceForRun,
        receiving: Receiving,
        revocations: Revocations,
        *,
        message_bytes: int,
        requests: int,
        grace_s: float,
        folders: Sequence[Path] = (),
    ) -> None:
        """`requests`: that a caller may have under way. `folders`: the service's own, which no caller is told of."""
        self._place, self._receiving, self._revocations, self._folders = place, receiving, revocations, folders
        self.most, self.most_of_tenant = MOST_CALLERS, MOST_OF_TENANT
        self._message_bytes, self._requests, self._grace_s = message_bytes, requests, grace_s
        self._callers: dict[tuple[Principal, str], Caller] = {}

    def __len__(self) -> int:
        return len(self._callers)

    def __iter__(self) -> Iterator[Caller]:
        return iter([*self._callers.values()])

    def _caller(self, name: str, principal: Principal, tenant: Tenant, ask_who: AskWho) -> Caller:
        """Return the caller of a name. It is its principal's: for everybody else, it does not exist."""
        if not 0 < len(name) <= MAX_NAME_CHARS:
            raise RemoteProtocolError(f"a caller's name of {len(name)} characters, limit {MAX_NAME_CHARS}")
        if (known := self._callers.get((principal, name))) is not None:
            return known
        if len(self) >= self.most:
            raise Problem(503, "too_many_sessions", "Too many clients", f"{self.most} are connected already")
        own = sum(each.principal.tenant == principal.tenant for each in self)
        if own >= self.most_of_tenant:
            detail = f"{own} of this tenant are connected already, or were until a moment ago"
            raise Problem(503, "too_many_sessions", "Too many clients", detail)
        made = self._callers[principal, name] = Caller(
            name=name,
            principal=principal,
            ask_who=ask_who,
            session=CallerSession(principal, tenant),
            place=self._place,
            folders=self._folders,
            message_bytes=self._message_bytes,
            most=self._requests,
            reservation=self._receiving.reservation(principal.tenant),
        )
        watching = self._revocations.ending(principal, lambda: made.ask_who(), partial(self._refuse, made))
        made.allowed.enter_context(watching)
        return made

    async def carry(
        self, hello: CallerHello, principal: Principal, tenant: Tenant, transport: Transport, ask_who: AskWho
    ) -> str:
        """Serve a connection until it is lost; return why it was. `ask_who` is asked at each request.

        Raises:
            Problem: there are too many callers.
            RemoteProtocolError: the caller broke the protocol. All that it has here ends.
        """
        caller = self._caller(hello.name, principal, tenant, ask_who)
        caller.connections += 1
        self._stay(caller)
        if caller.carrying is not None:  # the caller lost that connection, and here nobody has noticed yet
            caller.carrying.cancel()
            caller.carrying = None
        try:
            async with caller.turn:
                caller.ask_who = ask_who
                return await self._carry(caller, hello, transport)
        except (RemoteProtocolError, SaidGoodbye) as exc:
            self._forget(caller)
            if isinstance(exc, RemoteProtocolError):
                raise
            return f"the caller ended it: {exc}"
        finally:
            caller.connections -= 1
            if not caller.connections and caller.leaving is None:
                wait_s = 0.0 if caller.is_over else self._grace_s
                caller.leaving = asyncio.create_task(self._end_later(caller, wait_s))

    async def _carry(self, caller: Caller, hello: CallerHello, transport: Transport) -> str:
        if caller.is_over:
            raise Problem(503, "session_over", "The client was ended", "it ended while this connection began")
        caller.streams.resume(hello.received)
        answer = ServiceHello(
            SOCKET_VERSION,
            caller.home,
            received=caller.streams.received(),
            grace_s=float(self._grace_s),
            message_bytes=self._message_bytes,
            requests=self._requests,
        )
        await transport.send(FRAMES.encode_body(answer))
        task = caller.carrying = asyncio.create_task(caller.streams.carry(transport))
        try:
            return await task
        except asyncio.CancelledError:
            if caller.carrying is task:
                raise
            return "another connection took its place"
        finally:
            if caller.carrying is task:
                caller.carrying = None

    def _stay(self, caller: Caller) -> None:
        if caller.leaving is not None:
            caller.leaving.cancel()
            caller.leaving = None

    def _forget(self, caller: Caller) -> None:
        """Note that a caller is over: by its name, nobody finds it any more."""
        caller.is_over = True
        if self._callers.get(key := (caller.principal, caller.name)) is caller:
            del self._callers[key]

    async def _end_later(self, caller: Caller, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        self._forget(caller)
        await caller.end("the caller was away for longer than the grace time")

    def _refuse(self, caller: Caller, problem: Problem) -> None:
        """End a caller whose credential does not hold any more."""
        self._stay(caller)
        work = self._end(caller, problem.code, f"{problem.title}: {problem.detail}")
        caller.leaving = asyncio.create_task(work)

    async def _end(self, caller: Caller, code: str, reason: str) -> None:
        self._forget(caller)
        caller.streams.say_goodbye(code, reason)
        await caller.end(reason)

    async def close(self) -> None:
        """End every caller."""
        for caller in self:
            self._stay(caller)
            await self._end(caller, "restart", "the service ends")


HELLO_S: Final = 10.0
"""In which a connection says hello."""
FRAMES_PER_S: Final = 4_000.0
"""Frames a second of one connection. Past it, the service reads more slowly."""
BURST: Final = 4_000.0

PROTOCOL_ERROR: Final = 1002


class ServerTransport:
    """A Starlette WebSocket as a `Transport`, which reads no faster than it may."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        self._bucket = TokenBucket(1 / FRAMES_PER_S, BURST)

    async def send(self, message: bytes, /) -> None:
        """Write one binary message."""
        try:
            await self._websocket.send_bytes(message)
        except (WebSocketDisconnect, RuntimeError, OSError) as exc:
            raise ConnectionError("the caller is gone") from exc

    async def recv(self) -> str | bytes:
        """Return the next message."""
        if pause_s := self._bucket.take(asyncio.get_running_loop().time()):
            await asyncio.sleep(pause_s)
        try:
            message = await self._websocket.receive()
        except (RuntimeError, OSError) as exc:
            raise ConnectionError("the caller is gone") from exc
        if message["type"] == "websocket.disconnect":
            raise ConnectionError(f"the caller closed it ({message.get('code', 1005)})")
        data: str | bytes | None = message.get("bytes")
        return data if data is not None else str(message.get("text", ""))

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """End it."""
        try:
            await self._websocket.close(code, reason[:120])
        except (RuntimeError, OSError, WebSocketDisconnect):
            return


def check_origin(websocket: WebSocket) -> None:
    """Refuse what a page of another site opened in somebody's browser: browsers say so, and programs say nothing.

    Raises:
        Problem: it is such a page (403).
    """
    origin = websocket.headers.get("origin")
    if origin is None:
        return
    try:
        place = urlsplit(origin).netloc
    except ValueError:
        place = ""
    if not place or place != websocket.headers.get("host", ""):
        raise Problem(403, "forbidden", "Not allowed", f"a web page of {origin!r:.80} opened this connection")


async def connect(websocket: WebSocket) -> None:
    """Serve one connection."""
    service: Any = websocket.app.state.service
    try:
        check_origin(websocket)
        ask_who = partial(principal_of, websocket, Scope.EXECUTE)
        principal = await ask_who()
        tenant = await service.tenants.get(principal.tenant)
    except (Problem, ToolcellError) as exc:
        problem = exc if isinstance(exc, Problem) else problem_of(exc)
        await websocket.send_denial_response(problem.response())
        quiet_from_here("uvicorn.error")  # to it, each refusal is a handshake that was not completed
        return
    await websocket.accept()
    transport = ServerTransport(websocket)
    code, reason = PROTOCOL_ERROR, ""
    try:
        hello = await _hello(transport)
        reason = await service.callers.carry(hello, principal, tenant, transport, ask_who)
        code = 1000
    except (RemoteProtocolError, Problem) as exc:
        reason = str(exc)
        await _say_goodbye(transport, exc)
    except LOST:
        return
    await transport.close(code, reason)


async def _hello(transport: ServerTransport) -> CallerHello:
    try:
        hello = read_frame(await asyncio.wait_for(transport.recv(), HELLO_S))
    except TimeoutError as exc:
        raise RemoteProtocolError(f"no hello came in {HELLO_S:g} s") from exc
    if not isinstance(hello, CallerHello):
        raise RemoteProtocolError(f"the first frame is a hello, not {type(hello).__name__}")
    if hello.version != SOCKET_VERSION:
        raise RemoteProtocolError(f"the caller speaks version {hello.version}, and this service {SOCKET_VERSION}")
    return hello


async def _say_goodbye(transport: ServerTransport, exc: Exception) -> None:
    code = exc.code if isinstance(exc, Problem) else "protocol"
    try:
        await transport.send(FRAMES.encode_body(Goodbye(code, str(exc)[:1000])))
    except LOST:
        return


ROUTES: Final = (WebSocketRoute("/v1/connect", connect),)
