"""Channels: messages in pieces, in turn, within a window for each channel. Sans-IO, and knows no connection.

A channel is one request and everything that is said about it. Its receiver gives credit when a message is taken, so a
slow reader holds up its own channel and no other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from toolcell.service.receiving import Reservation
from toolcell.service.socket.frames import PIECE_BYTES, WINDOW_BYTES
from toolcell_bridge import RemoteProtocolError

CREDIT_BYTES = WINDOW_BYTES // 4
"""Credit is given in portions of at least this."""

PIECE_COST = 64
"""What a piece counts for besides its bytes: a window bounds many short messages too."""


@dataclass(slots=True)
class _Channel:
    """Both directions of one channel."""

    # Out.
    waiting: deque[bytes] = field(default_factory=deque)
    offset: int = 0
    """Bytes of the first message that were sent."""
    waiting_bytes: int = 0
    room: int = WINDOW_BYTES
    is_begun: bool = False
    """Something was sent on it."""
    is_closing: bool = False
    # In.
    parts: list[bytes] = field(default_factory=list)
    size: int = 0
    untaken: int = 0
    """Messages that nobody has taken."""
    held: int = 0
    """Bytes that arrived and are not credited."""
    owed: int = 0
    """Of these: bytes that may be credited."""
    counted: int = 0
    """Bytes that count as being received."""
    is_admitted: bool = False
    """Its request has its place. What comes for it counts until it was taken."""


class Channels:
    """All channels of a session, as one end sees them."""

    def __init__(self, message_bytes: int, most: int, received: Reservation | None = None) -> None:
        """`message_bytes`: longest message that is taken. `most`: channels that the other end may have open.
        `received`: what may be held of messages that are not whole, or whose request has no place yet."""
        self._received = received
        self._message_bytes, self.most = message_bytes, most
        self._channels: dict[int, _Channel] = {}
        self._highest = 0
        self._turns: deque[int] = deque()
        """Channels that have something to send, in turn."""
        self._owing: set[int] = set()
        """Channels for which credit is to be sent."""

    def __len__(self) -> int:
        return len(self._channels)

    def __contains__(self, channel: int) -> bool:
        return channel in self._channels

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._channels))

    def open(self) -> int:
        """Return the number of a new channel."""
        self._highest += 1
        self._channels[self._highest] = _Channel()
        return self._highest

    def close(self, channel: int, *, at_once: bool = False) -> None:
        """Forget a channel, by default when everything was sent on it. What still arrives on it is dropped."""
        found = self._channels.get(channel)
        if found is None:
            return
        if found.waiting and not at_once:
            found.is_closing = True
            return
        self._forget(channel)

    def forget_all(self) -> None:
        """Forget every channel: the session is over."""
        for channel in self:
            self._forget(channel)

    def _forget(self, channel: int) -> None:
        self._give_back(self._channels.pop(channel))

    def admitted(self, channel: int) -> None:
        """Note that the request of a channel has its place."""
        if (found := self._channels.get(channel)) is not None:
            found.is_admitted = True
            self._give_back(found)

    def _give_back(self, found: _Channel) -> None:
        if self._received is not None:
            self._received.give_back(found.counted)
        found.counted = 0

    def is_begun(self, channel: int) -> bool:
        """Return whether something of a channel was handed to a connection."""
        found = self._channels.get(channel)
        return found is None or found.is_begun

    # Out.

    def send(self, channel: int, body: bytes) -> None:
        """Queue a message. On a channel that is closed, nothing happens: its other end wants no more."""
        found = self._channels.get(channel)
        if found is None or found.is_closing:
            return
        if not found.waiting:
            self._turns.append(channel)
        found.waiting.append(body)
        found.waiting_bytes += len(body)

    def waiting_bytes(self, channel: int) -> int:
        """Return how much of a channel was not sent yet."""
        found = self._channels.get(channel)
        return 0 if found is None else found.waiting_bytes

    def next_piece(self) -> tuple[int, bool, bytes] | None:
        """Return what is to be sent next, channels in turn: channel, whether its message ends, and the bytes."""
        for _ in range(len(self._turns)):
            channel = self._turns.popleft()
            found = self._channels.get(channel)
            if found is None or not found.waiting:
                continue
            self._turns.append(channel)
            body = found.waiting[0]
            data = body[found.offset : found.offset + PIECE_BYTES]
            if len(data) + PIECE_COST > found.room:
                continue
            found.room -= len(data) + PIECE_COST
            found.offset += len(data)
            found.waiting_bytes -= len(data)
            found.is_begun = True
            is_last = found.offset == len(body)
            if is_last:
                found.waiting.popleft()
                found.offset = 0
            if not found.waiting:
                self._turns.pop()
                if found.is_closing:
                    self._forget(channel)
            return channel, is_last, data
        return None

    def credit(self, channel: int, size: int) -> None:
        """Take credit from the other end.

        Raises:
            RemoteProtocolError: it is more than was sent, or the channel was never opened.
        """
        found = self._find(channel)
        if found is None:
            return
        if not 0 < size <= WINDOW_BYTES - found.room:
            sent = WINDOW_BYTES - found.room
            raise RemoteProtocolError(f"channel {channel}: credit of {size} bytes, {sent} were sent")
        found.room += size

    # In.

    def arrive(self, channel: int, is_last: bool, data: bytes, *, may_open: bool) -> bytes | None:
        """Take a piece; return the message when it is whole.

        Raises:
            RemoteProtocolError: it is past the window or the limits, or opens a channel that it may not open.
        """
        if channel == self._highest + 1 and may_open:
            if len(self._channels) >= self.most:
                raise RemoteProtocolError(f"more than {self.most} channels are open")
            self._highest = channel
            self._channels[channel] = _Channel()
        found = self._find(channel)
        if not 0 < len(data) <= PIECE_BYTES:
            raise RemoteProtocolError(f"a piece of {len(data)} bytes, limit {PIECE_BYTES}")
        if found is None:
            return None
        found.size += len(data)
        found.held += len(data) + PIECE_COST
        if found.held > WINDOW_BYTES:
            raise RemoteProtocolError(f"channel {channel}: {found.held} bytes exceed the window of {WINDOW_BYTES}")
        if found.size > self._message_bytes:
            raise RemoteProtocolError(f"a message of more than {self._message_bytes} bytes (message_bytes)")
        if self._received is not None:
            if why := self._received.take(len(data)):
                raise RemoteProtocolError(why)
            found.counted += len(data)
        found.parts.append(data)
        if not is_last:
            if not found.untaken:  # nothing waits, so a long message may go on
                self._owe(channel, found)
            return None
        body = b"".join(found.parts)
        found.parts.clear()
        found.size = 0
        found.untaken += 1
        return body

    def take(self, channel: int) -> None:
        """Note that a message that arrived was taken: its bytes may be credited when no other waits."""
        found = self._channels.get(channel)
        if found is None:
            return
        found.untaken -= 1
        if not found.untaken:
            self._owe(channel, found)
            if found.is_admitted:
                self._give_back(found)

    def _owe(self, channel: int, found: _Channel) -> None:
        found.owed = found.held
        if found.owed >= CREDIT_BYTES:
            self._owing.add(channel)

    def next_credit(self) -> tuple[int, int] | None:
        """Return a channel and how much credit is to be sent for it."""
        while self._owing:
            channel = self._owing.pop()
            if (found := self._channels.get(channel)) is not None:
                size, found.owed = found.owed, 0
                found.held -= size
                return channel, size
        return None

    def _find(self, channel: int) -> _Channel | None:
        """Return a channel; None for one that was closed."""
        found = self._channels.get(channel)
        if found is None and not 0 < channel <= self._highest:
            raise RemoteProtocolError(f"channel {channel} was never opened")
        return found
