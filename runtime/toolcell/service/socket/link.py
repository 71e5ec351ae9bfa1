"""`ServiceLink`: a client's connection to the service, and the next one when it is lost.

Needs asyncio: the library websockets, which it connects with, has no other loop.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import ssl
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as connect_websocket
from websockets.exceptions import InvalidHandshake, InvalidStatus, InvalidURI

from toolcell.errors import ServiceUnavailable, ToolcellError, UsageError
from toolcell.service.socket.messages import (
    CALLER_MESSAGES,
    FRAME_BYTES,
    FRAMES,
    SERVICE_MESSAGES,
    SOCKET_VERSION,
    CallerHello,
    Goodbye,
    ServiceHello,
)
from toolcell.service.socket.streams import LOST, SaidGoodbye, Stream, Streams, read_frame
from toolcell.support.event_loop import ChangeEvent
from toolcell_bridge.wire.errors import RemoteProtocolError

RESULT_BYTES: Final = 256 * 1024 * 1024
"""Longest message that a client takes: a result with all its files."""
FIRST_PAUSE_S: Final = 0.05
LAST_PAUSE_S: Final = 5.0
"""Between attempts to connect."""
PING_S: Final = 5.0
SILENT_S: Final = 15.0
"""How long the service may leave a ping unanswered before the connection counts as lost."""
END_S: Final = 2.0
"""For a goodbye."""
RESERVED: Final = 4
"""Requests that are kept for what is about runs that go on, such as to interrupt one."""
REFUSED: Final = frozenset({400, 401, 403, 404, 405})
"""Statuses that the next attempt would get too."""
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


class ServiceLink:
    """The requests of one client, over one connection after the other."""

    def __init__(
        self, url: str, headers: Mapping[str, str], connect_s: float, tls: ssl.SSLContext | None = None
    ) -> None:
        self.url = socket_url(url)
        self._headers, self.connect_s, self._tls = dict(headers), connect_s, tls
        self._name = secrets.token_hex(32)
        self.streams = Streams(CALLER_MESSAGES, SERVICE_MESSAGES, message_bytes=RESULT_BYTES)
        self.is_connected = False
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
        """The last connection has carried all that it was to carry."""
        self._over.set()
        self._wanted = asyncio.Event()
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
                self.streams.lose_all(self.problem)
            self._changed.notify()
            await asyncio.sleep(FIRST_PAUSE_S)
            pause_s = min(LAST_PAUSE_S, pause_s * 2)
            if await self._is_wanted(pause_s * random.uniform(0.5, 1.0)):  # many clients come back in turn
                pause_s = FIRST_PAUSE_S

    async def _is_wanted(self, pause_s: float) -> bool:
        self._wanted.clear()
        try:
            async with asyncio.timeout(pause_s):
                await self._wanted.wait()
        except TimeoutError:
            return False
        return True

    async def _connect(self) -> ClientConnection | None:
        extra: dict[str, Any] = {"ssl": self._tls} if self._tls is not None else {}
        try:
            return await connect_websocket(
                self.url,
                additional_headers=self._headers,
                compression=None,
                max_size=FRAME_BYTES,
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
        if status in REFUSED:
            cure = "pass a valid token=" if status == 401 else "look at url=, without /v1, and at token="
            self.refusal = UsageError(f"the service at {self.url} does not let this client in ({cure}): {self.problem}")

    async def _use(self, connection: ClientConnection) -> None:
        """Use a connection until it is lost, and note why it was."""
        self._over.clear()
        try:
            await self._greet(connection)
            self.problem = await self.streams.carry(connection)
        except LOST as exc:
            self.problem = f"the connection was lost: {exc}".rstrip(": ")
        except TimeoutError:
            self.problem = "the service said nothing"
        except SaidGoodbye as exc:
            self.problem = f"the service ended it: {exc}"
            self.streams.lose_all(self.problem)
        except RemoteProtocolError as exc:
            self.problem = f"the service broke the protocol: {exc}"
            self.streams.lose_all(self.problem)
        finally:
            self.is_connected = False
            self._over.set()
            try:
                await connection.close()
            finally:  # closed politely, or at once if this is cancelled
                connection.transport.abort()

    async def _greet(self, connection: ClientConnection) -> None:
        hello = CallerHello(SOCKET_VERSION, self._name, self.streams.received())
        await connection.send(FRAMES.encode_body(hello))
        async with asyncio.timeout(self.connect_s):
            answer = read_frame(await connection.recv())
        if isinstance(answer, Goodbye):
            raise SaidGoodbye(answer)
        if not isinstance(answer, ServiceHello) or answer.version != SOCKET_VERSION:
            raise RemoteProtocolError(f"{answer!r:.100} does not answer a hello of version {SOCKET_VERSION}")
        if self.home != answer.home:
            self.streams.lose_all(FORGOTTEN)
        self.streams.resume(answer.received)
        self.home, self._grace_s, self.message_bytes = answer.home, answer.grace_s, answer.message_bytes
        self.streams.most = answer.requests
        self.is_connected, self.refusal = True, None
        self._changed.notify()

    # Requests.

    async def ready(self, *, is_first: bool = False) -> None:
        """Wait until it is connected. `is_first`: the first attempt decides.

        Raises:
            UsageError: the service does not let this client in.
            ServiceUnavailable: it cannot be reached in time.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self.connect_s
        while not self.is_connected:
            if self.refusal is not None:
                raise self.refusal
            self._wanted.set()
            if (is_first and self._attempts) or not await self._wait_for_change(until - loop.time()):
                raise ServiceUnavailable(
                    f"the service at {self.url} cannot be reached: {self.problem}; does "
                    "`toolcell serve` run there, and print this address?"
                )

    async def _wait_for_change(self, wait_s: float) -> bool:
        try:
            async with asyncio.timeout(max(wait_s, 0.0)):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def request(self, *, is_run: bool) -> Stream:
        """Return the stream of a new request; wait until there is room for one."""
        while len(self.streams) >= max(1, self.streams.most - (RESERVED if is_run else 0)):
            await self._changed.wait()
        return self.streams.open()

    def forget(self, stream: Stream) -> None:
        """Note that a request is over."""
        self.streams.forget(stream)
        self._changed.notify()

    async def end(self) -> None:
        """Say goodbye."""
        self._is_ending = True
        self.streams.say_goodbye("closed", "")
        try:
            await asyncio.wait_for(self._over.wait(), END_S)
        except TimeoutError:
            pass  # the other end reads nothing any more, and finds out by itself
        self.streams.lose_all("the client was closed")
