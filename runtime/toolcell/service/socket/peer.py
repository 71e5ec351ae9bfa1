"""`SocketPeer`: carries a session over its connections, and hands the messages of each channel to whoever serves it.

Both ends use it. A transport is one WebSocket; when it is lost the session waits for the next one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from toolcell.service.socket.codec import TaggedCodec
from toolcell.service.socket.protocol import Arrived, Greeted, LinkState, SessionOver, SocketProtocol
from toolcell.support import ChangeEvent
from toolcell_bridge import RemoteProtocolError

QUEUE_BYTES: Final = 1024 * 1024
"""What may wait to be sent on a channel before whoever sends is made to wait."""

TICK_S: Final = 1.0
"""Between looks at what is to be acknowledged and whether the other end is there."""

SILENT_TICKS: Final = 20
"""Ticks without any frame after which a connection counts as lost."""

PING_TICKS: Final = 5

FORGOTTEN: Final = "the service does not know the session any more: it was restarted, or the grace time is over"


class Transport(Protocol):
    """One WebSocket."""

    async def send(self, frame: bytes) -> None:
        """Write one binary message. Raises `ConnectionError` when it is gone."""

    async def receive(self) -> bytes:
        """Return the next binary message. Raises `ConnectionError` when there is none any more."""
        ...

    async def close(self, code: int, reason: str) -> None:
        """End it."""


class ChannelLost(Exception):
    """The session that a channel belonged to is over. `is_begun`: the other end may have seen something of it."""

    def __init__(self, reason: str, is_begun: bool = True) -> None:
        super().__init__(reason)
        self.is_begun = is_begun


class PeerChannel:
    """One request, as whoever serves it sees it."""

    def __init__(self, peer: SocketPeer, number: int) -> None:
        self._peer, self.number = peer, number
        self._bodies: deque[bytes] = deque()
        self._changed = ChangeEvent()
        self._lost: ChannelLost | None = None

    def arrived(self, body: bytes) -> None:
        """A message came."""
        self._bodies.append(body)
        self._changed.notify()

    def lose(self, lost: ChannelLost) -> None:
        """The session is over: nothing more comes."""
        self._lost = self._lost or lost
        self._changed.notify()

    async def receive(self) -> Any:
        """Return the next message.

        Raises:
            ChannelLost: there is none any more.
            RemoteProtocolError: it is none.
        """
        while not self._bodies:
            if self._lost is not None:
                raise self._lost
            await self._changed.wait()
        body = self._bodies.popleft()
        self._peer.take(self.number)
        steps = self._peer.theirs.decode_in_steps(body)
        while True:
            try:
                next(steps)
            except StopIteration as whole:
                return whole.value
            await asyncio.sleep(0)

    def encode(self, message: object) -> bytes:
        """Return a message as it is sent.

        Raises:
            UnsendableValue, ValueTooLarge: a value in it has no form on the wire.
        """
        return self._peer.ours.encode(message)

    def send(self, message: object) -> None:
        """Queue a message.

        Raises:
            UnsendableValue, ValueTooLarge: a value in it has no form on the wire.
        """
        self.send_encoded(self.encode(message))

    def send_encoded(self, body: bytes) -> None:
        """Do what `send` does, with a message that is encoded already."""
        self._peer.protocol.channels.send(self.number, body)
        self._peer.wake()

    def wait_for_room(self) -> Awaitable[None] | None:
        """Return what waits until there is room for more, if there is none now. It is to be awaited."""
        if self._peer.protocol.channels.waiting_bytes(self.number) <= QUEUE_BYTES:
            return None
        return self._peer.wait_for_room(self.number)

    def admitted(self) -> None:
        """The request has its place: what came of it counts no more as being received."""
        self._peer.protocol.channels.admitted(self.number)

    def close(self) -> None:
        """Forget the channel once everything is sent. What still arrives is dropped."""
        self._peer.forget(self.number)


class SocketPeer:
    """One end of a session."""

    def __init__(
        self,
        protocol: SocketProtocol,
        ours: TaggedCodec,
        theirs: TaggedCodec,
        on_channel: Callable[[PeerChannel], None] | None = None,
    ) -> None:
        """`on_channel` gets each channel that the other end opens."""
        self.protocol, self.ours, self.theirs = protocol, ours, theirs
        self._on_channel = on_channel
        self._channels: dict[int, PeerChannel] = {}
        self._newest = 0
        """Of the channels that the other end has opened."""
        self._wake = ChangeEvent()
        self._sent = ChangeEvent()
        self._pings = itertools.count(1)
        self.greeted = asyncio.Event()
        self.over: SessionOver | None = None
        """Why the other end ended the session."""

    @property
    def is_over(self) -> bool:
        """The session has ended for good."""
        return self.protocol.state is LinkState.OVER

    @property
    def channels(self) -> int:
        """How many channels are open."""
        return len(self._channels)

    def open_channel(self) -> PeerChannel:
        """Return a new channel to the service."""
        channel = PeerChannel(self, self.protocol.channels.open())
        self._channels[channel.number] = channel
        return channel

    def take(self, number: int) -> None:
        """A message was taken from its channel."""
        self.protocol.channels.take(number)
        self.wake()

    def forget(self, number: int) -> None:
        """A channel is over."""
        self._channels.pop(number, None)
        # What a caller still has to send is about a request that is over, and nobody would take it.
        self.protocol.channels.close(number, at_once=self._on_channel is None)
        self.wake()

    def lose_all(self, reason: str) -> None:
        """The session is over for good: nobody gets anything any more."""
        begun = {number: self.protocol.channels.is_begun(number) for number in self._channels}
        for number, channel in [*self._channels.items()]:
            channel.lose(ChannelLost(reason, begun[number]))
            self.protocol.channels.close(number, at_once=True)
        self._channels.clear()
        self._sent.notify()

    def wake(self) -> None:
        """There may be something to send."""
        self._wake.notify()

    async def wait_for_room(self, number: int) -> None:
        """Wait until little enough of a channel waits to be sent."""
        while number in self._channels and self.protocol.channels.waiting_bytes(number) > QUEUE_BYTES:
            await self._sent.wait()

    async def carry(self, transport: Transport, first: Callable[[], None] | None = None) -> str:
        """Use a connection until it is lost or the session is over; return why.

        Cancellation: the connection counts as lost.
        """
        self.greeted.clear()
        if first is not None:
            first()
        if self.protocol.state is LinkState.OPEN:
            self.greeted.set()
        tasks = [asyncio.create_task(each) for each in (self._write(transport), self._read(transport), self._tick())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return "; ".join(dict.fromkeys(each.result() for each in tasks if each in done))
        finally:
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:  # a scope of anyio cancels this wait too
                self.greeted.clear()
                self.protocol.lost()

    async def _write(self, transport: Transport) -> str:
        while True:
            while (frame := self.protocol.next_frame()) is not None:
                try:
                    await transport.send(frame)
                except ConnectionError as exc:
                    return f"the connection was lost: {exc}".rstrip(": ")
                self._sent.notify()
            if self.is_over:
                return "this end ended the session"
            await self._wake.wait()

    async def _read(self, transport: Transport) -> str:
        while True:
            try:
                data = await transport.receive()
            except ConnectionError as exc:
                return f"the connection was lost: {exc}".rstrip(": ")
            self._silent = 0
            try:
                for event in self.protocol.receive(data):
                    self._act(event)
            except RemoteProtocolError as exc:
                self.protocol.state = LinkState.OVER
                self.over = SessionOver("protocol", str(exc))
                return f"the other end broke the protocol: {exc}"
            if self.over is not None:
                return f"the other end ended the session: {self.over.message or self.over.code}"
            self.wake()

    async def _tick(self) -> str:
        self._silent = 0
        while True:
            await asyncio.sleep(TICK_S)
            self._silent += 1
            if self._silent >= SILENT_TICKS:
                return f"nothing came from the other end for {SILENT_TICKS * TICK_S:g} s"
            self.protocol.acknowledge()
            if self._silent % PING_TICKS == 0:
                self.protocol.ping(next(self._pings))
            self.wake()

    def _act(self, event: Arrived | Greeted | SessionOver) -> None:
        match event:
            case Arrived(number, body):
                channel = self._channels.get(number)
                if channel is None and self._on_channel is not None and number > self._newest:
                    self._newest = number
                    channel = self._channels[number] = PeerChannel(self, number)
                    channel.arrived(body)
                    self._on_channel(channel)
                elif channel is not None:
                    channel.arrived(body)
            case Greeted(_, lost, unsent):
                for number in (*lost, *unsent):
                    if (channel := self._channels.pop(number, None)) is not None:
                        channel.lose(ChannelLost(FORGOTTEN, number in lost))
                self._sent.notify()
                self.greeted.set()
            case SessionOver():
                self.over = event
