"""`ServiceLink`: a client's connection to the service, and the next one when it is lost.

Needs asyncio: the library websockets, which it connects with, has no other loop.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as connect_websocket
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

from toolcell.errors import ServiceUnavailable, ToolcellError, UsageError
from toolcell.service.socket.connection import (
    ENDED,
    LOST,
    PART_BYTES,
    PROTOCOL_ERROR,
    REFUSED,
    RESTART,
    Connection,
)
from toolcell.service.socket.messages import MESSAGES, SOCKET_VERSION, Message, Notification, Request, Response
from toolcell.service.socket.values import failed_answer, read_as
from toolcell.support.event_loop import ChangeEvent
from toolcell_bridge.wire.errors import RemoteProtocolError, UnsendableValue, ValueTooLarge

RESULT_BYTES: Final = 256 * 1024 * 1024
"""Longest message that a client takes: a result with all its files."""
FIRST_PAUSE_S: Final = 0.05
LAST_PAUSE_S: Final = 5.0
"""Between attempts to connect."""
PING_S: Final = 5.0
SILENT_S: Final = 15.0
"""How long the service may leave a ping unanswered before the connection counts as lost."""
END_S: Final = 2.0
"""For the end of the connection."""
RESERVED: Final = 4
"""Requests that are kept for what is about runs that go on, such as to interrupt one."""
REFUSALS: Final = frozenset({400, 401, 403, 404, 405})
"""Statuses that the next attempt would get too."""
FOR_GOOD: Final = frozenset({ENDED, PROTOCOL_ERROR, REFUSED, RESTART})
FORGOTTEN: Final = "the service does not know this client any more: it was restarted, or the grace time is over"


def socket_url(url: str) -> str:
    """Return the address of the WebSocket of a service.

    Raises:
        UsageError: it is not the address of a service.
    """
    try:
        parts = urlsplit(url)
        schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
        if parts.scheme not in schemes or not parts.hostname or parts.query or parts.fragment or parts.username:
            raise ValueError("it is not an http:// or https:// address with a host and nothing after its path")
    except (ValueError, AttributeError, TypeError) as exc:
        raise UsageError(f"url={url!r:.120}: {exc}") from exc
    path = parts.path.rstrip("/")
    return urlunsplit((schemes[parts.scheme], parts.netloc, f"{path}/v1/connect", "", ""))


@dataclass(frozen=True, slots=True)
class Greeting:
    home: str
    open: list[int]
    """The requests of this client that the service knows."""
    grace_s: float
    """How long everything of the client is kept without a connection."""
    message_bytes: int
    requests: int


class RequestLost(Exception):
    """Nothing more comes of a request. `is_begun`: the service may have seen it."""

    def __init__(self, reason: str, *, is_begun: bool) -> None:
        super().__init__(reason)
        self.is_begun = is_begun


@dataclass(frozen=True, slots=True)
class Asked:
    inbox: asyncio.Queue[Message | RequestLost | None]
    """What the service says about it. None: the connection was lost, and the next one is waited for."""
    is_told: bool
    """Somebody is told what happens meanwhile. It would not be all of it over another connection."""


class ServiceLink:
    """The requests of one client, over one connection after the other."""

    def __init__(
        self, url: str, headers: Mapping[str, str], connect_s: float, tls: ssl.SSLContext | None = None
    ) -> None:
        self.url = socket_url(url)
        self._headers, self.connect_s, self._tls = dict(headers), connect_s, tls
        self._name = secrets.token_hex(32)
        self._connection: Connection | None = None
        self._asked: dict[int, Asked] = {}
        self._untold: list[tuple[str, int]] = []
        """What the service is told of requests when there is a connection again."""
        self._ids = itertools.count(1)
        self._most = 0
        """Requests that may be under way."""
        self.home = ""
        """Id of the service. What was offered or opened in another one is gone."""
        self.message_bytes = 0
        """Longest message that the service takes."""
        self._grace_s = 0.0
        self.refusal: ToolcellError | None = None
        """Why the service does not let this client in."""
        self.problem = "it was not tried"
        """Problem of the last connection."""
        self._attempts = 0
        self._is_ending = False
        self._over = asyncio.Event()
        """The last connection is closed."""
        self._over.set()
        self._wanted = ChangeEvent()
        """Somebody waits for the connection."""
        self._changed = ChangeEvent()

    # The connection.

    async def keep(self) -> None:
        """Hold a connection, and make another one when it is lost, until this is cancelled."""
        loop = asyncio.get_running_loop()
        pause_s, lost_at = FIRST_PAUSE_S, 0.0
        while not self._is_ending:
            connection = await self._connect()
            self._attempts += 1
            if connection is not None:
                pause_s = FIRST_PAUSE_S
                await self._use(connection)
                lost_at = loop.time()
            if loop.time() - lost_at > self._grace_s:
                self._lose_all(self.problem)
            self._changed.notify()
            await asyncio.sleep(FIRST_PAUSE_S)
            pause_s = min(LAST_PAUSE_S, pause_s * 2)
            if await self._wanted.wait(pause_s * random.uniform(0.5, 1.0)):  # many clients come back in turn
                pause_s = FIRST_PAUSE_S

    async def _connect(self) -> ClientConnection | None:
        extra: dict[str, Any] = {"ssl": self._tls} if self._tls is not None else {}
        try:
            return await connect_websocket(
                self.url,
                additional_headers=self._headers,
                compression=None,
                max_size=PART_BYTES,
                ping_interval=PING_S,
                ping_timeout=SILENT_S,
                open_timeout=self.connect_s,
                close_timeout=1.0,
                proxy=None,
                **extra,
            )
        except InvalidStatus as exc:
            self._note_refusal(exc.response.status_code, bytes(exc.response.body or b""))
        except (OSError, TimeoutError, InvalidHandshake, InvalidURI, EOFError) as exc:
            self.problem = f"{type(exc).__name__} {exc}".strip()
        return None

    def _note_refusal(self, status: int, body: bytes) -> None:
        said = body[:500].decode("utf-8", "replace")
        self.problem = f"it answered with the status {status}: {said}"
        if status in REFUSALS:
            cure = "pass a valid token=" if status == 401 else "look at url=, without /v1, and at token="
            self.refusal = UsageError(f"the service at {self.url} does not let this client in ({cure}): {self.problem}")

    async def _use(self, websocket: ClientConnection) -> None:
        """Use a connection until it is lost, and note why it was."""
        connection = Connection(websocket, RESULT_BYTES)
        self._over.clear()
        try:
            async with connection:
                await self._greet(connection)
                while True:
                    self._take((await connection.receive()).message)
        except LOST as exc:
            self.problem = f"the connection was lost: {exc}".rstrip(": ")
            if isinstance(exc, ConnectionClosed) and exc.rcvd is not None and exc.rcvd.code in FOR_GOOD:
                self.problem = f"the service ended it: {exc.rcvd.reason}"
                self._lose_all(self.problem)
        except TimeoutError:
            self.problem = "the service said nothing"
        except RemoteProtocolError as exc:
            self.problem = f"the service broke the protocol: {exc}"
            self._lose_all(self.problem)
        finally:
            self._connection = None
            cut = RequestLost("the connection was lost, and with it what happened meanwhile", is_begun=True)
            for asked in self._asked.values():
                asked.inbox.put_nowait(cut if asked.is_told else None)
            self._asked = {ident: asked for ident, asked in self._asked.items() if not asked.is_told}
            try:
                await websocket.close()
            finally:  # closed politely, or at once if this is cancelled
                websocket.transport.abort()
                self._over.set()

    async def _greet(self, connection: Connection) -> None:
        known = [*{*self._asked, *(ident for _, ident in self._untold)}]
        hello: dict[str, Any] = {"version": SOCKET_VERSION, "name": self._name, "open": known}
        connection.post(Request(0, "hello", hello))
        async with asyncio.timeout(self.connect_s):
            answer = (await connection.receive()).message
        if not isinstance(answer, Response):
            raise RemoteProtocolError("a hello was not answered")
        bounds = read_as(Greeting, answer.result)
        if self.home != bounds.home:
            self._lose_all(FORGOTTEN)
        for ident in self._asked.keys() - {*bounds.open}:
            self._asked.pop(ident).inbox.put_nowait(RequestLost("it did not reach the service", is_begun=False))
        self.home, self._grace_s, self.message_bytes = bounds.home, bounds.grace_s, bounds.message_bytes
        self._most, self.refusal, self._connection = bounds.requests, None, connection
        untold, self._untold = self._untold, []
        for method, ident in untold:
            self.tell(method, ident)
        self._changed.notify()

    def _take(self, message: Message) -> None:
        ident = message.id if isinstance(message, Response) else message.params.get("request")
        asked = self._asked.get(ident) if type(ident) is int else None
        if asked is not None:
            asked.inbox.put_nowait(message)
        elif isinstance(message, Request) and self._connection is not None:  # of a run for which nobody waits here
            self._connection.post(Response(message.id, None, failed_answer("nobody waits for its run any more")))

    def _lose_all(self, reason: str) -> None:
        for asked in self._asked.values():
            asked.inbox.put_nowait(RequestLost(reason, is_begun=True))
        self._asked.clear()
        self._untold.clear()

    # Requests.

    def tell(self, method: str, ident: int) -> None:
        """Tell the service something about a request, now or over the next connection."""
        if self._connection is not None:
            self._connection.post(Notification(method, {"request": ident}))
        else:
            self._untold.append((method, ident))

    async def ready(self, *, is_first: bool = False) -> None:
        """Wait until it is connected. `is_first`: the first attempt decides.

        Raises:
            UsageError: the service does not let this client in.
            ServiceUnavailable: it cannot be reached in time.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self.connect_s
        while self._connection is None:
            if self.refusal is not None:
                raise self.refusal
            self._wanted.notify()
            if (is_first and self._attempts) or not await self._changed.wait(max(0.0, until - loop.time())):
                raise ServiceUnavailable(
                    f"the service at {self.url} cannot be reached: {self.problem}; does "
                    "`toolcell serve` run there, and print this address?"
                )

    async def ask(self, asked: Asked, method: str, params: dict[str, Any]) -> int:
        """Begin a request when there is room for one, and return its id.

        Raises:
            UsageError: it cannot be sent.
            RequestLost: there is no connection any more.
        """
        is_run = not method.startswith("session.") or method.endswith("_code")
        while len(self._asked) >= max(1, self._most - (RESERVED if is_run else 0)):
            await self._changed.wait()
        ident = next(self._ids)
        try:
            body = MESSAGES.encode_body(Request(ident, method, params))
        except (UnsendableValue, ValueTooLarge) as exc:
            raise UsageError(f"{method} cannot be sent: {exc}") from exc
        if len(body) > self.message_bytes:
            most = f"the service takes {self.message_bytes} (message_bytes)"
            raise UsageError(f"{method} takes {len(body)} bytes, and {most}")
        if self._connection is None:
            raise RequestLost(self.problem, is_begun=False)
        self._asked[ident] = asked
        self._connection.post_body(body)
        return ident

    def forget(self, ident: int) -> None:
        """Note that a request is over."""
        if self._asked.pop(ident, None) is not None:
            self.tell("forget", ident)
        self._changed.notify()

    async def answer(self, ident: int, result: Any) -> None:
        """Answer a request of the service, if there is a connection.

        Raises:
            UnsendableValue, ValueTooLarge: the result cannot be sent.
        """
        if self._connection is not None:
            body = MESSAGES.encode_body(Response(ident, None, result))
            if len(body) > self.message_bytes:
                raise ValueTooLarge("result", len(body), self.message_bytes, "bytes, the service's message_bytes")
            await self._connection.send_body(body)

    async def end(self) -> None:
        """End the connection, and with it everything of this client at the service."""
        self._is_ending = True
        self._lose_all("the client was closed")
        if self._connection is not None:
            self._connection.end(ENDED, "closed")
        try:
            await asyncio.wait_for(self._over.wait(), END_S)
        except TimeoutError:
            pass  # the other end reads nothing any more, and finds out by itself
