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

import anyio
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.exceptions import ConnectionClosed
from websockets.frames import Close

from toolcell.errors import ToolcellError, UsageError
from toolcell.service.admission import Admission
from toolcell.service.authentication import is_origin_of, principal_of
from toolcell.service.principal import Principal, Scope
from toolcell.service.problems import Problem, problem_of
from toolcell.service.receiving import Receiving
from toolcell.service.request_log import note, one_line
from toolcell.service.revocations import AskWho, Revocations, check_same
from toolcell.service.socket.arguments import Arguments
from toolcell.service.socket.connection import ENDED, LOST, PROTOCOL_ERROR, REFUSED, RESTART, Connection, Received
from toolcell.service.socket.failures import failed
from toolcell.service.socket.messages import MESSAGES, SOCKET_VERSION, Request, Response
from toolcell.service.socket.methods import METHODS, CallerSession, Method
from toolcell.service.socket.remote_tools import Channel, ServedRequest, served_here
from toolcell.service.tenants import Tenant
from toolcell.support.log import quiet_from_here
from toolcell.support.token_bucket import TokenBucket
from toolcell_bridge.wire.errors import RemoteProtocolError, UnsendableValue, ValueTooLarge

MOST_CALLERS: Final = 4096
"""At once."""
MOST_OF_TENANT: Final = 1024
"""Most callers of one tenant at once: it does not keep the others out."""
MAX_NAME_CHARS: Final = 64
MAX_REASON_BYTES: Final = 120
"""Of a WebSocket's end, of the 123 that there are."""

PlaceForRun = Callable[[Principal, bool], AbstractAsyncContextManager[anyio.Event]]
"""Gives a run of a principal its place, and the event that ends it; refuses it with a `Problem`. True: its message is
large, and its tenant did not have to wait when its decoding began."""


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
        admission: Admission,
        folders: Sequence[Path],
        most: int,
    ) -> None:
        """`folders`: the service's own, which no message names. `most`: requests that may be under way."""
        self.name, self.principal = name, principal
        self._session, self._place, self._admission = session, place, admission
        self._folders, self._most = folders, most
        self.home = secrets.token_hex(8)
        self.ask_who = ask_who
        """Asks who the caller is, with the credential of its latest connection."""
        self.allowed = contextlib.ExitStack()
        """What looks whether its credential still holds."""
        self.channel = Channel()
        self.leaving: asyncio.Task[None] | None = None
        self._requests: dict[int, ServedRequest] = {}
        """Those that the caller has not forgotten. One with an answer is over."""
        self._running: dict[asyncio.Task[None], ServedRequest] = {}
        self._highest = 0

    def greet(self, connection: Connection, hello: Request, **bounds: Any) -> None:
        """Begin with a connection. Requests that the caller does not ask for go on, and nobody gets their answers.

        Raises:
            RemoteProtocolError: it is not a hello.
        """
        asked = hello.params.get("open")
        if not isinstance(asked, list) or not all(type(ident) is int for ident in asked):
            raise RemoteProtocolError("a hello lists the requests that are open")
        self._requests = {ident: self._requests[ident] for ident in asked if ident in self._requests}
        self.channel.use(connection)
        connection.post(Response(hello.id, None, {"home": self.home, "open": [*self._requests], **bounds}))
        for request in self._requests.values():
            if request.answer:
                connection.post_body(request.answer)

    def take(self, received: Received, connection: Connection) -> None:
        """Take what the caller says. `connection` counts its size as being received.

        Raises:
            RemoteProtocolError: it may not say that.
        """
        message = received.message
        if isinstance(message, Request):
            self._begin(message, connection, received)
            return
        connection.give_back(received.size)
        if isinstance(message, Response):
            self.channel.answered(message.id, message.result)
            return
        ident = message.params.get("request")
        request = self._requests.get(ident) if type(ident) is int else None
        if message.method not in ("cancel", "abort", "forget"):
            raise RemoteProtocolError(f"there is no notification {message.method!r:.80}")
        if request is None:
            return  # it was over, and forgotten
        if message.method == "cancel":
            request.cancel.set()
            return
        request.scope.cancel()
        if message.method == "forget":
            del self._requests[request.id]

    async def end(self) -> None:
        self.allowed.close()
        while self._running:
            for request in self._running.values():
                request.scope.cancel()
            await asyncio.wait(self._running)
        await self._session.close()

    def _begin(self, ask: Request, connection: Connection, received: Received) -> None:
        if ask.id <= self._highest:
            raise RemoteProtocolError(f"request {ask.id} after request {self._highest}")
        if max(len(self._requests), len(self._running) // 2) >= self._most:
            raise RemoteProtocolError(f"more than {self._most} requests are under way")
        self._highest = ask.id
        request = self._requests[ask.id] = ServedRequest(self.channel, ask, connection, received)
        task = asyncio.get_running_loop().create_task(self._serve(request))
        self._running[task] = request
        task.add_done_callback(self._running.pop)

    async def _serve(self, request: ServedRequest) -> None:
        """Serve a request. Never raises."""
        answer = _failed_response(request.id, "cancelled", "the request was given up")
        known = request.method if request.method in METHODS else None
        who = {"tenant": self.principal.tenant, "subject": self.principal.subject}
        with one_line(client=None, method="SOCKET", route=known, status=None, **who):
            try:
                with request.scope:
                    answer = await self._carry_out(request)
            finally:
                request.admitted()
                _note_end(answer)
        try:
            request.answer = MESSAGES.encode_body(answer)
        except (UnsendableValue, ValueTooLarge) as exc:
            too_large = f"it was done, and its result cannot be sent: {exc}"
            request.answer = MESSAGES.encode_body(_failed_response(request.id, "too_large", too_large))
        if self._requests.get(request.id) is request and self.channel.connection is not None:
            self.channel.connection.post_body(request.answer)

    async def _carry_out(self, request: ServedRequest) -> Response:
        try:
            method = METHODS.get(request.method)
            if method is None:
                raise UsageError(f"there is no method {request.method!r:.80}; there are {', '.join(METHODS)}")
            await check_same(self.principal, self.ask_who)
            if not self.principal.may(method.scope):
                raise Problem(403, "forbidden", "Not allowed", f"{request.method} needs the scope {method.scope}")
            return Response(request.id, None, await self._carried_out(method, request))
        except Exception as exc:
            return Response(request.id, failed(exc, self._folders), None)

    async def _carried_out(self, method: Method, request: ServedRequest) -> Any:
        served_here.set(request)
        arguments = Arguments(request.arguments)
        request.arguments.clear()  # files and inputs are kept once, where they are used
        if not method.is_run:
            if method.waits and not request.was_free:
                await self._admission.wait_until_free(self.principal.tenant)
            request.admitted()
            return await method.answer(self._session, request, arguments)
        async with self._place(self.principal, request.was_free) as cancel:
            request.admitted()
            passing = asyncio.create_task(_pass_on(cancel, request.cancel))
            try:
                return await method.answer(self._session, request, arguments)
            finally:
                passing.cancel()


def _failed_response(ident: int, code: str, message: str) -> Response:
    return Response(ident, {"code": code, "message": message, "details": {}}, None)


def _note_end(answer: Response) -> None:
    if answer.error is not None:
        note(code=answer.error["code"])
        return
    found = answer.result.get("run_id") if isinstance(answer.result, dict) else None
    note(status=200, **({"run_id": found} if isinstance(found, str) else {}))


async def _pass_on(first: anyio.Event, second: anyio.Event) -> None:
    await first.wait()
    second.set()


class Callers:
    def __init__(
        self,
        place: PlaceForRun,
        admission: Admission,
        receiving: Receiving,
        revocations: Revocations,
        *,
        message_bytes: int,
        requests: int,
        grace_s: float,
        folders: Sequence[Path] = (),
    ) -> None:
        """`requests`: that a caller may have under way. `folders`: the service's own, which no caller is told of."""
        self._place, self._admission, self._folders = place, admission, folders
        self._receiving, self._revocations = receiving, revocations
        self.most, self.most_of_tenant = MOST_CALLERS, MOST_OF_TENANT
        self._message_bytes, self._requests, self._grace_s = message_bytes, requests, grace_s
        self._callers: dict[tuple[Principal, str], Caller] = {}

    def __len__(self) -> int:
        return len(self._callers)

    def __iter__(self) -> Iterator[Caller]:
        return iter([*self._callers.values()])

    def _caller(self, hello: Request, principal: Principal, tenant: Tenant, ask_who: AskWho) -> Caller:
        """Return the caller of a name. It is its principal's: for everybody else, it does not exist."""
        name = hello.params.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
            raise RemoteProtocolError(f"a caller's name is a text of at most {MAX_NAME_CHARS} characters")
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
            admission=self._admission,
            folders=self._folders,
            most=self._requests,
        )
        watching = self._revocations.ending(principal, lambda: made.ask_who(), partial(self._refuse, made))
        made.allowed.enter_context(watching)
        return made

    async def serve(self, transport: ServerTransport, principal: Principal, tenant: Tenant, ask_who: AskWho) -> None:
        """Serve a connection until it is lost or ended. `ask_who` is asked at each request."""
        counted = self._receiving.reservation(principal.tenant)
        is_free = partial(self._admission.is_free, principal.tenant)
        connection = Connection(transport, self._message_bytes, counted, is_free)
        caller, stay_s = None, self._grace_s
        try:
            async with connection:
                hello = await _hello(connection)
                caller = self._caller(hello, principal, tenant, ask_who)
                if caller.leaving is not None:
                    caller.leaving.cancel()
                caller.ask_who = ask_who
                bounds = {"message_bytes": self._message_bytes, "requests": self._requests}
                caller.greet(connection, hello, grace_s=float(self._grace_s), **bounds)
                while True:
                    caller.take(await connection.receive(), connection)
        except LOST as exc:
            if isinstance(exc, ConnectionClosed) and exc.rcvd is not None and exc.rcvd.code == ENDED:
                stay_s = 0.0
        except (RemoteProtocolError, Problem) as exc:
            connection.farewell = Close(PROTOCOL_ERROR if isinstance(exc, RemoteProtocolError) else REFUSED, str(exc))
            stay_s = 0.0
        finally:
            if caller is not None and caller.channel.connection is connection:
                caller.channel.use(None)
                self._end_soon(caller, stay_s)
        if connection.farewell is not None:
            await transport.close(connection.farewell)

    def _end_soon(self, caller: Caller, stay_s: float = 0.0) -> None:
        if not stay_s:
            self._forget(caller)
        caller.leaving = asyncio.create_task(self._end_later(caller, stay_s))

    def _forget(self, caller: Caller) -> None:
        """Note that a caller is over: by its name, nobody finds it any more."""
        if self._callers.get(key := (caller.principal, caller.name)) is caller:
            del self._callers[key]

    async def _end_later(self, caller: Caller, stay_s: float) -> None:
        await asyncio.sleep(stay_s)
        self._forget(caller)
        await caller.end()

    def _refuse(self, caller: Caller, problem: Problem) -> None:
        """End a caller whose credential does not hold any more."""
        self._end(caller, REFUSED, f"{problem.title}: {problem.detail}")

    def _end(self, caller: Caller, code: int, reason: str) -> None:
        if caller.leaving is not None:
            caller.leaving.cancel()
        if caller.channel.connection is not None:
            caller.channel.connection.end(code, reason)
            caller.channel.use(None)
        self._end_soon(caller)

    async def close(self) -> None:
        for caller in self:
            self._end(caller, RESTART, "the service ends")
            assert caller.leaving is not None
            await caller.leaving


HELLO_S: Final = 10.0
"""In which a connection says hello."""
FRAMES_PER_S: Final = 4_000.0
"""Frames a second of one connection. Past it, the service reads more slowly."""
BURST: Final = 4_000.0


class ServerTransport:
    """A Starlette WebSocket as a `Transport`, which reads no faster than it may."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        self._bucket = TokenBucket(1 / FRAMES_PER_S, BURST)

    async def send(self, message: bytes, /) -> None:
        try:
            await self._websocket.send_bytes(message)
        except (WebSocketDisconnect, RuntimeError, OSError) as exc:
            raise ConnectionError("the caller is gone") from exc

    async def recv(self) -> str | bytes:
        if pause_s := self._bucket.take(asyncio.get_running_loop().time()):
            await asyncio.sleep(pause_s)
        try:
            message = await self._websocket.receive()
        except (RuntimeError, OSError) as exc:
            raise ConnectionError("the caller is gone") from exc
        if message["type"] == "websocket.disconnect":
            raise ConnectionClosed(Close(message.get("code", 1005), message.get("reason") or ""), None)
        data: str | bytes | None = message.get("bytes")
        return data if data is not None else str(message.get("text", ""))

    async def close(self, farewell: Close) -> None:
        with contextlib.suppress(RuntimeError, OSError, WebSocketDisconnect):
            reason = farewell.reason.encode()[:MAX_REASON_BYTES].decode("utf-8", "ignore")
            await self._websocket.close(farewell.code, reason)


def check_origin(websocket: WebSocket) -> None:
    """Refuse what a page of another site opened in somebody's browser: browsers say so, and programs say nothing.

    Raises:
        Problem: it is such a page (403).
    """
    origin = websocket.headers.get("origin")
    if origin is not None and not is_origin_of(origin, websocket.headers.get("host", "")):
        raise Problem(403, "forbidden", "Not allowed", f"a web page of {origin!r:.80} opened this connection")


async def connect(websocket: WebSocket) -> None:
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
    await service.callers.serve(ServerTransport(websocket), principal, tenant, ask_who)


async def _hello(connection: Connection) -> Request:
    try:
        received = await asyncio.wait_for(connection.receive(), HELLO_S)
        connection.give_back(received.size)
    except TimeoutError as exc:
        raise RemoteProtocolError(f"no hello came in {HELLO_S:g} s") from exc
    hello = received.message
    if not isinstance(hello, Request) or hello.method != "hello":
        raise RemoteProtocolError("the first message is the request hello")
    if (version := hello.params.get("version")) != SOCKET_VERSION:
        raise RemoteProtocolError(f"the caller speaks version {version!r:.20}, and this service {SOCKET_VERSION}")
    return hello


ROUTES: Final = (WebSocketRoute("/v1/connect", connect),)
