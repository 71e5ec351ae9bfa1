"""`SocketProtocol`: one end of a session as a state machine without I/O. Frames in, events out, and the other way.

A session outlives its connections. Numbered frames are kept until the other end has acknowledged them; after a dropped
connection both ends say what arrived, and the rest is sent again. A number that came before is dropped, so nothing is
acted on twice.

    NEW --connected--> GREETING --hello--> OPEN --lost--> DOWN --connected--> GREETING ...      Goodbye: OVER
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from toolcell.service.receiving import Reservation
from toolcell.service.socket.channels import Channels
from toolcell.service.socket.frames import (
    FRAME_BYTES,
    FRAMES,
    SOCKET_VERSION,
    Acknowledged,
    CallerHello,
    Frame,
    Goodbye,
    Piece,
    Ping,
    Pong,
    ServiceHello,
    WindowCredit,
)
from toolcell_bridge import LocalProtocolError, RemoteProtocolError

ACK_FRAMES: Final = 32
"""Numbered frames after which an end acknowledges at the latest."""
UNACKNOWLEDGED: Final = 256
"""Numbered frames that an end sends before it waits to be acknowledged. It keeps them, to send them again."""


class LinkState(enum.StrEnum):
    """State of a session, as this end sees it."""

    NEW = "new"
    GREETING = "greeting"
    OPEN = "open"
    DOWN = "down"
    OVER = "over"


Moves = Mapping[tuple[LinkState, type[Any]], LinkState]

_EITHER: Final[Moves] = {
    (LinkState.OPEN, Piece): LinkState.OPEN,
    (LinkState.OPEN, WindowCredit): LinkState.OPEN,
    (LinkState.OPEN, Acknowledged): LinkState.OPEN,
    (LinkState.OPEN, Ping): LinkState.OPEN,
    (LinkState.OPEN, Pong): LinkState.OPEN,
    (LinkState.OPEN, Goodbye): LinkState.OVER,
}

CALLER_RECEIVES: Final[Moves] = {
    **_EITHER,
    (LinkState.GREETING, ServiceHello): LinkState.OPEN,
    (LinkState.GREETING, Goodbye): LinkState.OVER,
}
"""What the caller may receive."""

SERVICE_RECEIVES: Final[Moves] = {**_EITHER, (LinkState.GREETING, CallerHello): LinkState.OPEN}
"""What the service may receive."""


@dataclass(frozen=True, slots=True)
class Greeted:
    """The connection is ready."""

    is_resumed: bool
    lost: tuple[int, ...] = ()
    """Channels that the service does not know any more, and of which something was handed to a connection."""
    unsent: tuple[int, ...] = ()
    """Channels of which nothing was: the service cannot have seen them."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A whole message came on a channel. Whoever takes it says so with `take`."""

    channel: int
    body: bytes


@dataclass(frozen=True, slots=True)
class SessionOver:
    """The other end said goodbye."""

    code: str
    message: str


LinkEvent = Greeted | Arrived | SessionOver


class SocketProtocol:
    """One end."""

    def __init__(
        self,
        *,
        is_caller: bool,
        message_bytes: int,
        channels: int = 0,
        session: str = "",
        grace_s: float = 0.0,
        held: Reservation | None = None,
    ) -> None:
        """`message_bytes`: longest message that this end takes. `channels`: that the caller may have open. `held`: what
        it may hold of messages that are not admitted yet."""
        self._held = held
        self.state = LinkState.NEW
        self.session, self.grace_s = session, grace_s
        self._is_caller = is_caller
        self._moves = CALLER_RECEIVES if is_caller else SERVICE_RECEIVES
        self.message_bytes = message_bytes
        self.sent_bytes = 0
        """Longest message that the service takes, for its caller."""
        self.most_channels = channels
        self._begin()

    def _begin(self) -> None:
        self.channels = Channels(self.message_bytes, self.most_channels, self._held)
        self._sent, self._received, self._acknowledged = 0, 0, 0
        self._unacknowledged: deque[bytes] = deque()
        """Numbered frames that may have to be sent again; the last one has the number `_sent`."""
        self._again = 0
        """How many of them this connection has not carried yet."""
        self._urgent: deque[Frame] = deque()
        self._pong: Pong | None = None
        self._is_ack_due = False

    # The connection.

    def connected(self, hello: CallerHello | None = None) -> Greeted | None:
        """Begin a connection. `hello`: what the service received first on it.

        Raises:
            RemoteProtocolError: the hello is impossible.
        """
        if self.state in (LinkState.OPEN, LinkState.OVER):
            raise LocalProtocolError(f"a session that is {self.state} takes no connection")
        self.state = LinkState.GREETING
        self._urgent.clear()
        self._pong, self._is_ack_due = None, False
        self._again = 0
        if self._is_caller:
            self._urgent.append(CallerHello(SOCKET_VERSION, self.session, self._received))
            return None
        assert hello is not None
        is_resumed = bool(hello.session)
        self._forget(hello.received)
        self._again = len(self._unacknowledged)
        self.state = LinkState.OPEN
        self._urgent.append(
            ServiceHello(
                SOCKET_VERSION,
                self.session,
                is_resumed=is_resumed,
                received=self._received,
                grace_s=float(self.grace_s),
                message_bytes=self.message_bytes,
                channels=self.most_channels,
            )
        )
        return Greeted(is_resumed)

    def lost(self) -> None:
        """The connection is gone."""
        if self.state is not LinkState.OVER:
            self.state = LinkState.DOWN

    def close(self, code: str, message: str) -> None:
        """Say goodbye with the next frame; nothing more is sent after it."""
        if self.state is LinkState.OPEN:
            self._urgent.append(Goodbye(code, message))

    def receive(self, data: bytes) -> list[LinkEvent]:
        """Take one frame.

        Raises:
            RemoteProtocolError: it is none, or not legal now.
        """
        if len(data) > FRAME_BYTES:
            raise RemoteProtocolError(f"a frame of {len(data)} bytes, limit {FRAME_BYTES}")
        frame = FRAMES.decode(data)
        state = self._moves.get((self.state, type(frame)))
        if state is None:
            raise RemoteProtocolError(f"{type(frame).__name__} is not legal while {self.state}")
        event = self._act(frame)
        self.state = state
        return [] if event is None else [event]

    def _act(self, frame: Frame) -> LinkEvent | None:
        match frame:
            case Piece(number, channel, is_last, part):
                return self._piece(number, channel, is_last, part)
            case WindowCredit(number, channel, size):
                if self._is_next(number):
                    self.channels.credit(channel, size)
            case Acknowledged(received):
                self._forget(received)
            case Ping(token):
                self._pong = Pong(token)
            case ServiceHello():
                return self._greeted(frame)
            case Goodbye(code, message):
                return SessionOver(code, message)
        return None

    def _piece(self, number: int, channel: int, is_last: bool, part: bytes) -> Arrived | None:
        if not self._is_next(number):
            return None
        body = self.channels.arrive(channel, is_last, part, may_open=not self._is_caller)
        return None if body is None else Arrived(channel, body)

    def _is_next(self, number: int) -> bool:
        """Return whether a numbered frame is the next one; False for one that came before."""
        if number <= self._received:
            return False
        if number != self._received + 1:
            raise RemoteProtocolError(f"frame {number} after {self._received}")
        self._received = number
        self._is_ack_due = self._is_ack_due or number - self._acknowledged >= ACK_FRAMES
        return True

    def _forget(self, received: int) -> None:
        """Drop the frames that the other end has."""
        if not self._sent - len(self._unacknowledged) <= received <= self._sent:
            raise RemoteProtocolError(f"frame {received} acknowledged, {self._sent} were sent")
        for _ in range(received - (self._sent - len(self._unacknowledged))):
            self._unacknowledged.popleft()
        if self._again > len(self._unacknowledged):
            raise RemoteProtocolError(f"frame {received} acknowledged before it was sent")

    def _greeted(self, hello: ServiceHello) -> Greeted:
        if hello.version != SOCKET_VERSION:
            raise RemoteProtocolError(f"the service speaks version {hello.version}, and this is {SOCKET_VERSION}")
        greeted = Greeted(True)
        if not hello.is_resumed:
            begun = {channel: self.channels.is_begun(channel) for channel in self.channels}
            greeted = Greeted(False, tuple(c for c in begun if begun[c]), tuple(c for c in begun if not begun[c]))
            self._begin()
        self.session, self.grace_s = hello.session, hello.grace_s
        self.sent_bytes, self.most_channels = hello.message_bytes, hello.channels
        self._forget(hello.received)
        self._again = len(self._unacknowledged)
        return greeted

    # What is to be sent.

    def acknowledge(self) -> None:
        """Acknowledge with the next frame what was not acknowledged yet. For a timer."""
        self._is_ack_due = self._received > self._acknowledged

    def ping(self, token: int) -> None:
        """Ask whether the other end is there."""
        if self.state is LinkState.OPEN:
            self._urgent.append(Ping(token))

    def next_frame(self) -> bytes | None:
        """Return the next frame to write; None when there is none now."""
        if self._urgent:
            frame = self._urgent.popleft()
            if isinstance(frame, Goodbye):
                self.state = LinkState.OVER
            return FRAMES.encode(frame)
        if self.state is not LinkState.OPEN:
            return None
        if self._pong is not None:
            pong, self._pong = self._pong, None
            return FRAMES.encode(pong)
        if self._is_ack_due:
            self._is_ack_due, self._acknowledged = False, self._received
            return FRAMES.encode(Acknowledged(self._received))
        if self._again:
            frame_again = self._unacknowledged[-self._again]
            self._again -= 1
            return frame_again
        return self._next_numbered()

    def _next_numbered(self) -> bytes | None:
        if len(self._unacknowledged) >= UNACKNOWLEDGED:
            return None
        number = self._sent + 1
        if (credit := self.channels.next_credit()) is not None:
            encoded = FRAMES.encode(WindowCredit(number, *credit))
        elif (piece := self.channels.next_piece()) is not None:
            encoded = FRAMES.encode(Piece(number, *piece))
        else:
            return None
        self._sent = number
        self._unacknowledged.append(encoded)
        return encoded
