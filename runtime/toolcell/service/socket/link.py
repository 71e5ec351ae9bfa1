"""`ServiceLink`: a client's session with the service. It connects, connects again when the connection drops, and asks.

Needs asyncio: the library websockets, which it connects with, has no other loop.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as connect_websocket
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

from toolcell.errors import ServiceUnavailable, ToolcellError, UsageError
from toolcell.service.socket.frames import FRAME_BYTES
from toolcell.service.socket.messages import CALLER_MESSAGES, SERVICE_MESSAGES
from toolcell.service.socket.peer import PeerChannel, SocketPeer
from toolcell.service.socket.protocol import SocketProtocol
from toolcell.support import ChangeEvent

RESULT_BYTES: Final = 256 * 1024 * 1024
"""Longest message that a client takes: a result with all its files."""
FIRST_PAUSE_S: Final = 0.05
LAST_PAUSE_S: Final = 5.0
"""Between attempts to connect."""
END_S: Final = 2.0
"""For a goodbye."""
RESERVED: Final = 4
"""Channels that are kept for what is about runs that go on, such as to interrupt one."""
REFUSED: Final = frozenset({400, 401, 403, 404, 405})
"""Statuses that the next attempt would get too."""


class ClientTransport:
    """A WebSocket of the library websockets as a `Transport`."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    async def send(self, frame: bytes) -> None:
        """Write one binary message."""
        try:
            await self._connection.send(frame)
        except ConnectionClosed as exc:
            raise ConnectionError(str(exc)) from exc

    async def receive(self) -> bytes:
        """Return the next binary message."""
        try:
            data = await self._connection.recv()
        except ConnectionClosed as exc:
            raise ConnectionError(str(exc)) from exc
        return data if isinstance(data, bytes) else b""

    async def close(self, code: int, reason: str) -> None:
        """End it: politely, or at once if this is cancelled."""
        try:
            await self._connection.close(code, reason)
        finally:
            self._connection.transport.abort()


def socket_url(url: str) -> str:
    """Return the address of the WebSocket of a service.

    Raises:
        UsageError: it is no address of a service.
    """
    try:
        parts = urlsplit(url)
        schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
        if parts.scheme not in schemes or not parts.hostname or parts.query or parts.fragment or parts.username:
            raise ValueError("it is no http:// or https:// address with a host and nothing after its path")
    except (ValueError, AttributeError, TypeError) as exc:
        raise UsageError(f"url={url!r:.120}: {exc}") from exc
    path = parts.path.rstrip("/")
    return urlunsplit((schemes[parts.scheme], parts.netloc, f"{path}/v1/connect", "", ""))


class ServiceLink:
    """One client's session, and the next one when that is lost."""

    def __init__(
        self, url: str, headers: Mapping[str, str], connect_s: float, tls: ssl.SSLContext | None = None
    ) -> None:
        self.url = socket_url(url)
        self._headers, self.connect_s, self._tls = dict(headers), connect_s, tls
        self.peer = self._new_peer()
        self.refusal: ToolcellError | None = None
        """Why the service does not let this client in."""
        self.problem = "it was not tried"
        """Of the last connection."""
        self._attempts = 0
        self._is_ending = False
        self._over = asyncio.Event()
        """The last connection has carried all that it was to carry."""
        self._over.set()
        self._wanted = asyncio.Event()
        """Somebody waits for the connection."""
        self._changed = ChangeEvent()

    def _new_peer(self) -> SocketPeer:
        protocol = SocketProtocol(is_caller=True, message_bytes=RESULT_BYTES)
        return SocketPeer(protocol, CALLER_MESSAGES, SERVICE_MESSAGES)

    @property
    def session(self) -> str:
        """Name of the session at the service. What was offered or opened in another one is gone."""
        return self.peer.protocol.session

    def note_change(self) -> None:
        """Wake those who wait for the connection or for a free channel."""
        self._changed.notify()

    # The connection.

    async def keep(self) -> None:
        """Hold a connection, and make another one when it is lost, until this is cancelled."""
        pause_s, lost_at = FIRST_PAUSE_S, 0.0
        loop = asyncio.get_running_loop()
        while not self._is_ending:
            transport = await self._connect()
            self._attempts += 1
            if transport is not None:
                pause_s = FIRST_PAUSE_S
                self.problem = await self._carry(transport)
                lost_at = loop.time()
            if self.peer.is_over or loop.time() - lost_at > self.peer.protocol.grace_s:
                self._begin_anew(self.problem)
            self.note_change()
            await asyncio.sleep(FIRST_PAUSE_S)
            pause_s = min(LAST_PAUSE_S, pause_s * 2)
            if await self._is_wanted(pause_s * random.uniform(0.5, 1.0)):  # many clients come back in turn
                pause_s = FIRST_PAUSE_S

    async def _is_wanted(self, wait_s: float) -> bool:
        """Wait for the next attempt. Somebody who needs the connection does not wait for long."""
        self._wanted.clear()
        try:
            await asyncio.wait_for(self._wanted.wait(), wait_s)
        except TimeoutError:
            return False
        return True

    def _begin_anew(self, reason: str) -> None:
        """Give up the session: whoever waits for something of it is told so."""
        lost, self.peer = self.peer, self._new_peer()
        lost.lose_all(reason)

    async def _carry(self, transport: ClientTransport) -> str:
        peer = self.peer
        watch = asyncio.create_task(self._watch(peer))
        self._over.clear()
        try:
            return await peer.carry(transport, self._say_hello)
        finally:
            self._over.set()
            watch.cancel()
            await transport.close(1000, "")

    def _say_hello(self) -> None:
        self.peer.protocol.connected()

    async def _watch(self, peer: SocketPeer) -> None:
        await peer.greeted.wait()
        self.refusal = None
        self.note_change()

    async def _connect(self) -> ClientTransport | None:
        extra: dict[str, Any] = {"ssl": self._tls} if self._tls is not None else {}
        try:
            connection = await connect_websocket(
                self.url,
                additional_headers=self._headers,
                compression=None,
                max_size=FRAME_BYTES,
                max_queue=16,
                ping_interval=None,
                open_timeout=self.connect_s,
                close_timeout=1.0,
                proxy=None,
                subprotocols=None,
                **extra,
            )
        except InvalidStatus as exc:
            self._note_refusal(exc.response.status_code, bytes(exc.response.body or b""))
        except (OSError, TimeoutError, InvalidHandshake, InvalidURI, EOFError) as exc:
            self.problem = f"{type(exc).__name__} {exc}".strip()
        else:
            return ClientTransport(connection)
        return None

    def _note_refusal(self, status: int, body: bytes) -> None:
        said = body[:500].decode("utf-8", "replace")
        self.problem = f"it answered with the status {status}: {said}"
        if status in REFUSED:
            cure = "pass a valid token=" if status == 401 else "look at url=, without /v1, and at token="
            self.refusal = UsageError(f"the service at {self.url} does not let this client in ({cure}): {self.problem}")

    async def ready(self, *, is_first: bool = False) -> None:
        """Wait until it is connected. `is_first`: the first attempt decides.

        Raises:
            UsageError: the service does not let this client in.
            ServiceUnavailable: it cannot be reached in time.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self.connect_s
        while not self.peer.greeted.is_set():
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

    async def channel(self, *, is_run: bool) -> PeerChannel:
        """Return a new channel; wait until one is free."""
        while self.peer.channels >= max(1, self.peer.protocol.most_channels - (RESERVED if is_run else 0)):
            await self._changed.wait()
        return self.peer.open_channel()

    async def end(self) -> None:
        """Say goodbye."""
        self._is_ending = True
        self.peer.protocol.close("closed", "")
        self.peer.wake()
        try:
            await asyncio.wait_for(self._over.wait(), END_S)
        except TimeoutError:
            pass  # the other end reads nothing any more, and finds out by itself
        self.peer.lose_all("the client was closed")
