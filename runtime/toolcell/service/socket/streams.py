"""`Streams`: the requests of one caller, as either end sees them, over one connection after the other.

Everything that is said about a request is its `Stream`: messages both ways, cut into numbered parts. An end keeps the
parts that it sent until the other end has taken them, and sends no more than a window of them ahead. So a slow reader
holds up its own request and no other; and after a lost connection the ends tell each other the last numbers that
arrived, and the rest is sent again. A part that came before is dropped: nothing is acted on twice.

`receive` and `next_frame` do no I/O; `carry` does it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Final, Protocol

from websockets.exceptions import ConnectionClosed

from toolcell.service.receiving import Reservation
from toolcell.service.socket.messages import (
    FRAME_BYTES,
    FRAMES,
    PART_BYTES,
    Frame,
    Goodbye,
    MessagePart,
    RequestOver,
    Taken,
)
from toolcell.support.event_loop import ChangeEvent
from toolcell_bridge.wire.codec import TableCodec
from toolcell_bridge.wire.errors import RemoteProtocolError

WINDOW_BYTES: Final = 4 * PART_BYTES
"""What one end may send of a request before the other end has taken it."""

PART_COST: Final = 64
"""What a part counts for besides its bytes: a window bounds many short messages too."""

TAKEN_BYTES: Final = WINDOW_BYTES // 4
"""An end says what it has taken when it is at least this."""

QUEUE_BYTES: Final = 1024 * 1024
"""What may wait to be sent of a request before whoever sends is made to wait."""

LOST: Final = (OSError, ConnectionClosed)
"""What a transport raises when its connection is lost."""


class Transport(Protocol):
    """One WebSocket. Its methods raise one of `LOST` when it is gone."""

    async def send(self, message: bytes, /) -> None:
        """Write one binary message."""

    async def recv(self) -> str | bytes:
        """Return the next message."""
        ...

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """End it."""


class StreamLost(Exception):
    """Nothing more comes of a request. `is_begun`: the other end may have seen something of it."""

    def __init__(self, reason: str, is_begun: bool) -> None:
        super().__init__(reason)
        self.is_begun = is_begun


class SaidGoodbye(Exception):
    """The other end said goodbye."""

    def __init__(self, said: Goodbye) -> None:
        super().__init__(said.message or said.code)
        self.code = said.code


class Stream:
    """One request."""

    def __init__(self, streams: Streams, number: int) -> None:
        self._streams, self.number = streams, number
        # Out.
        self._waiting: deque[bytes] = deque()
        self._offset = 0
        """Bytes of the first message that are in parts already."""
        self.waiting_bytes = 0
        self._sent: deque[MessagePart] = deque()
        """Parts that the other end has not taken. The last one has the number `_last`."""
        self._sent_bytes = 0
        self._last = 0
        self._again = 0
        """How many of them this connection has not carried yet."""
        # In.
        self.received = 0
        """Number of the last part."""
        self._parts: list[bytes] = []
        self._size = 0
        self._inbox: deque[bytes] = deque()
        self._held = 0
        """Bytes that arrived, and of which the other end does not know that they were taken."""
        self._taken, self._taken_bytes = 0, 0
        self._is_taken_due = False
        self._counted = 0
        """Bytes that count as being received."""
        self._is_admitted = False
        self._lost: StreamLost | None = None
        self._changed = ChangeEvent()

    @property
    def is_begun(self) -> bool:
        """Something of it was handed to a connection."""
        return self._last > 0

    # For whoever serves the request.

    async def receive(self) -> Any:
        """Return the next message.

        Raises:
            StreamLost: none comes any more.
            RemoteProtocolError: what came is not a message.
        """
        while not self._inbox:
            if self._lost is not None:
                raise self._lost
            await self._changed.wait()
        steps = self._streams.theirs.decode_in_steps(self.take())
        while True:
            try:
                next(steps)
            except StopIteration as whole:
                return whole.value[0]
            await asyncio.sleep(0)

    def send(self, message: object) -> None:
        """Queue a message.

        Raises:
            UnsendableValue, ValueTooLarge: a value in it has no form on the wire.
        """
        self.send_body(self.encode(message))

    def encode(self, message: object) -> bytes:
        """Return a message as `send_body` takes it; raises what `send` does."""
        return self._streams.ours.encode_body(message)

    def send_body(self, body: bytes) -> None:
        """Queue a message that is encoded. Nothing happens when nobody wants it any more."""
        if self._lost is None:
            self._waiting.append(body)
            self.waiting_bytes += len(body)
            self._streams.give_turn(self)

    def wait_for_room(self) -> Awaitable[None] | None:
        """Return what waits until there is room for more, if there is none now. It is to be awaited."""
        return self._wait_for_room() if self.waiting_bytes > QUEUE_BYTES else None

    async def _wait_for_room(self) -> None:
        while self._lost is None and self.waiting_bytes > QUEUE_BYTES:
            await self._changed.wait()

    def admitted(self) -> None:
        """Note that the request has its place: what came of it does not count any more as being received."""
        self._is_admitted = True
        self._give_back()

    def lose(self, reason: str) -> None:
        """Note that nothing more comes, and that nothing of it is wanted."""
        self._lost = self._lost or StreamLost(reason, self.is_begun)
        self._waiting.clear()
        self.waiting_bytes = 0
        self._give_back()
        self._changed.notify()

    # Out.

    def next_part(self) -> MessagePart | None:
        """Return what is to be sent next, as far as the window allows."""
        if self._again:
            self._again -= 1
            return self._sent[-self._again - 1]
        if not self._waiting:
            return None
        body = self._waiting[0]
        data = body[self._offset : self._offset + PART_BYTES]
        if self._sent_bytes + len(data) + PART_COST > WINDOW_BYTES:
            return None
        self._last += 1
        self._offset += len(data)
        self._sent_bytes += len(data) + PART_COST
        self.waiting_bytes -= len(data)
        is_last = self._offset == len(body)
        if is_last:
            self._waiting.popleft()
            self._offset = 0
        self._sent.append(part := MessagePart(self.number, self._last, is_last, data))
        self._changed.notify()
        return part

    def was_taken(self, number: int) -> None:
        """Forget the parts that the other end has taken.

        Raises:
            RemoteProtocolError: so many were not sent on this connection.
        """
        known = self._last - len(self._sent)
        if not known <= number <= self._last - self._again:
            raise RemoteProtocolError(f"request {self.number}: part {number} was taken, {self._last} were sent")
        for _ in range(number - known):
            self._sent_bytes -= len(self._sent.popleft().data) + PART_COST
        self._streams.give_turn(self)

    def resume(self, received: object) -> None:
        """Begin with a new connection. `received`: the number of the last part that arrived at the other end.

        Raises:
            RemoteProtocolError: it cannot be that.
        """
        if type(received) is not int or not self._last - len(self._sent) <= received <= self._last:
            raise RemoteProtocolError(f"request {self.number}: part {received} arrived, {self._last} were sent")
        self._again = self._last - received
        self._is_taken_due = self._taken > 0  # it may have been said on the old connection in vain
        self._streams.give_turn(self)

    # In.

    def arrive(self, number: int, is_last: bool, data: bytes, reservation: Reservation | None) -> None:
        """Take a part.

        Raises:
            RemoteProtocolError: it is not the next one, or past the window or a limit.
        """
        if number <= self.received:
            return
        size = len(data)
        if number != self.received + 1 or not 0 < size <= PART_BYTES:
            raise RemoteProtocolError(f"request {self.number}: part {number} of {size} bytes after {self.received}")
        if self._held + size + PART_COST > WINDOW_BYTES:
            raise RemoteProtocolError(f"request {self.number}: more than its window of {WINDOW_BYTES} bytes")
        if self._size + size > self._streams.message_bytes:
            most = self._streams.message_bytes
            raise RemoteProtocolError(f"a message of more than {most} bytes (message_bytes)")
        if reservation is not None:
            if why := reservation.take(size):
                raise RemoteProtocolError(why)
            self._counted += size
        self.received = number
        self._held += size + PART_COST
        self._size += size
        self._parts.append(data)
        if is_last:
            self._inbox.append(b"".join(self._parts))
            self._parts.clear()
            self._size = 0
            self._changed.notify()
        self._note_taken()

    def take(self) -> bytes:
        """Return the first message that arrived, and let as much follow."""
        body = self._inbox.popleft()
        if not self._inbox and self._is_admitted:
            self._give_back()
        self._note_taken()
        return body

    def _note_taken(self) -> None:
        """Note that all is taken, unless a message waits. Of one that is not whole yet, more may come."""
        if not self._inbox:
            self._taken, self._taken_bytes = self.received, self._held
            if self._taken_bytes >= TAKEN_BYTES:
                self._is_taken_due = True
                self._streams.give_turn(self)

    def next_taken(self) -> Taken | None:
        """Return what the other end is to be told of what was taken."""
        if not self._is_taken_due:
            return None
        self._is_taken_due = False
        self._held -= self._taken_bytes
        self._taken_bytes = 0
        return Taken(self.number, self._taken)

    def _give_back(self) -> None:
        self._streams.give_back(self._counted)
        self._counted = 0


class Streams:
    """All requests of one caller."""

    def __init__(
        self,
        ours: TableCodec[Any],
        theirs: TableCodec[Any],
        *,
        message_bytes: int,
        most: int = 0,
        on_request: Callable[[Stream], None] | None = None,
        reservation: Reservation | None = None,
    ) -> None:
        """`ours`, `theirs`: the messages of this end and of the other one. `message_bytes`: longest message that this
        end takes. `most`: requests that may be under way. `on_request`: of the service, gets each that the caller
        begins. `reservation`: what it may hold of requests that have no place yet."""
        self.ours, self.theirs, self.message_bytes, self.most = ours, theirs, message_bytes, most
        self._on_request, self._reservation = on_request, reservation
        self._streams: dict[int, Stream] = {}
        self._highest = 0
        self._urgent: deque[Frame] = deque()
        self._turns: dict[int, None] = {}
        """Requests that may have something to send, the next one first."""
        self._wake = ChangeEvent()

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[Stream]:
        return iter([*self._streams.values()])

    def open(self) -> Stream:
        """Begin a request of this caller."""
        self._highest += 1
        stream = self._streams[self._highest] = Stream(self, self._highest)
        return stream

    def forget(self, stream: Stream) -> None:
        """Forget a request of this caller; the service is told so if it may know of it."""
        if self._streams.pop(stream.number, None) is not None and stream.is_begun:
            self._urgent.append(RequestOver(stream.number))
            self._wake.notify()
        stream.lose("the request is over")

    def lose_all(self, reason: str) -> None:
        """Note that nothing comes any more of any request."""
        for stream in self:
            stream.lose(reason)
        self._streams.clear()

    def say_goodbye(self, code: str, message: str) -> None:
        """Send this as the last frame; the connection ends after it."""
        self._urgent.append(Goodbye(code, message))
        self._wake.notify()

    def give_turn(self, stream: Stream) -> None:
        """Note that a request may have something to send."""
        self._turns.setdefault(stream.number)
        self._wake.notify()

    def give_back(self, size: int) -> None:
        """Note that so many bytes do not count any more as being received."""
        if self._reservation is not None:
            self._reservation.give_back(size)

    # A connection.

    def received(self) -> dict[str, Any]:
        """Return the numbers of the last parts that arrived, by request, for a hello."""
        return {str(stream.number): stream.received for stream in self}

    def resume(self, received: Mapping[str, object]) -> None:
        """Begin with a connection whose other end has received this.

        Raises:
            RemoteProtocolError: it cannot have.
        """
        self._turns.clear()
        for stream in self:
            number = received.get(str(stream.number))
            if number is None and self._on_request is not None:  # its caller has forgotten it
                self._end(stream.number)
            else:
                stream.resume(number or 0)

    def _end(self, number: int) -> None:
        if (stream := self._streams.pop(number, None)) is not None:
            stream.lose("the caller has given the request up")

    def receive(self, data: object) -> None:
        """Take one frame.

        Raises:
            SaidGoodbye: it was the last one.
            RemoteProtocolError: it is not a frame, or not legal now.
        """
        match read_frame(data):
            case MessagePart(request, number, is_last, part):
                if (stream := self._find(request, may_begin=True)) is not None:
                    stream.arrive(number, is_last, part, self._reservation)
            case Taken(request, number):
                if (stream := self._find(request)) is not None:
                    stream.was_taken(number)
            case RequestOver(request) if self._on_request is not None:
                self._end(request)
            case Goodbye() as said:
                raise SaidGoodbye(said)
            case frame:
                raise RemoteProtocolError(f"{type(frame).__name__} is not legal now")

    def _find(self, request: int, *, may_begin: bool = False) -> Stream | None:
        """Return a request; None for one that is over."""
        if request <= 0 or (request > self._highest and not (may_begin and self._on_request is not None)):
            raise RemoteProtocolError(f"request {request} was never begun")
        if request > self._highest and self._on_request is not None:
            if len(self._streams) >= self.most:
                raise RemoteProtocolError(f"more than {self.most} requests are under way")
            self._highest = request
            self._streams[request] = stream = Stream(self, request)
            self._on_request(stream)
        return self._streams.get(request)

    def next_frame(self) -> Frame | None:
        """Return the next frame to write: requests in turn. None when there is none now."""
        if self._urgent:
            return self._urgent.popleft()
        while self._turns:
            number = next(iter(self._turns))
            del self._turns[number]
            stream = self._streams.get(number)
            if stream is not None and (frame := stream.next_taken() or stream.next_part()) is not None:
                self._turns[number] = None
                return frame
        return None

    async def carry(self, transport: Transport) -> str:
        """Use a connection until it is lost; return why it was.

        Raises:
            SaidGoodbye, RemoteProtocolError: as from `receive`.

        Cancellation: the connection is left as it is.
        """
        writing = asyncio.create_task(self._write(transport))
        try:
            while True:
                self.receive(await transport.recv())
        except LOST as exc:
            return f"the connection was lost: {exc}".rstrip(": ")
        finally:
            writing.cancel()

    async def _write(self, transport: Transport) -> None:
        try:
            while True:
                while (frame := self.next_frame()) is not None:
                    await transport.send(FRAMES.encode_body(frame))
                    if isinstance(frame, Goodbye):
                        await transport.close()
                        return
                await self._wake.wait()
        except LOST:
            return  # whoever reads finds out too


def read_frame(data: object) -> Frame:
    """Return the frame in a message of a WebSocket.

    Raises:
        RemoteProtocolError: it is none.
    """
    if not isinstance(data, bytes):
        raise RemoteProtocolError("a frame is binary, not text")
    if len(data) > FRAME_BYTES:
        raise RemoteProtocolError(f"a frame of {len(data)} bytes, limit {FRAME_BYTES}")
    return FRAMES.decode(data)
