"""A multiplexer: many byte streams over one, both ends of it, without I/O.

A frame is a header (channel, kind, length) and so many bytes. Each channel has a window in each direction: what was
sent and not yet taken at the other end never exceeds it. So a peer that does not read stops its own channel alone, and
whoever receives holds at most one window for each channel, however much is thrown at it. Control messages have no
window; they are short, and the receiver handles each at once.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from toolcell_bridge.wire.errors import LocalProtocolError, RemoteProtocolError

WINDOW_BYTES = 256 * 1024
"""Unread bytes of one channel in one direction."""

CHUNK_BYTES = 64 * 1024
"""Longest frame of data: a channel waits for no more than this of another's."""

CONTROL_BYTES = 64 * 1024
"""Longest control message."""

_HEADER = struct.Struct(">II")
"""Channel; kind in the upper eight bits of the second word and length in the others."""

_CREDIT = struct.Struct(">I")
_LENGTH = 0xFF_FFFF
_HIGHEST_CHANNEL = 0xFFFF_FFFF


class Kind(enum.IntEnum):
    """What a frame is."""

    DATA = 0
    CREDIT = 1
    """The sender took this many bytes (payload: four bytes) and there is room for as many."""
    END = 2
    """The sender sends nothing more on this channel."""
    CONTROL = 3
    """On channel 0 only: a message between the two ends themselves."""


_DATA, _CREDIT_KIND, _END, _CONTROL = (int(kind) for kind in Kind)


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes of a channel, in order; pieces are not frames."""

    channel: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Room:
    """A channel that had no room left may be written to again."""

    channel: int


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """The other end will write nothing more on this channel."""

    channel: int


@dataclass(frozen=True, slots=True)
class Control:
    """A message for the owner of this end."""

    body: bytes


Event = Data | Room | StreamEnded | Control


class _Channel:
    __slots__ = ("has_ended", "received", "room", "taken")

    def __init__(self, window_bytes: int) -> None:
        self.room = window_bytes  # we may send this many
        self.received = 0  # and not yet credited back to the other end
        self.taken = 0  # of those: already taken by our reader
        self.has_ended = False


class Mux:
    """One end. Both ends learn of each channel by other means and open channels in the same order."""

    def __init__(self, window_bytes: int = WINDOW_BYTES) -> None:
        self._window_bytes = window_bytes
        self._channels: dict[int, _Channel] = {}
        self._highest = 0
        self._is_dead = False
        self._partial = bytearray()  # an incomplete header, or an incomplete frame that is not data
        self._channel = 0  # of the data frame under way
        self._left = 0  # bytes of it still to come

    def open(self, channel: int) -> None:
        """Open a channel. Numbers only grow, so a late frame can be distinguished from a wrong one.

        Raises:
            LocalProtocolError: the number is not above every one before.
        """
        if not self._highest < channel <= _HIGHEST_CHANNEL:
            raise LocalProtocolError(f"channel {channel} opened after {self._highest}")
        self._highest = channel
        self._channels[channel] = _Channel(self._window_bytes)

    def close(self, channel: int) -> None:
        """Forget a channel; what still comes for it is dropped. Safe to call twice."""
        self._channels.pop(channel, None)

    def room(self, channel: int) -> int:
        """How many bytes may be sent now; 0 for a channel that is closed."""
        found = self._channels.get(channel)
        return found.room if found is not None else 0

    def data(self, channel: int, piece: bytes | memoryview) -> bytes:
        """Return `piece` as frames.

        Raises:
            LocalProtocolError: there is no room for it.
        """
        size = len(piece)
        found = self._channels.get(channel)
        if found is None or size > found.room:
            raise LocalProtocolError(f"{size} bytes on channel {channel}, room is for {self.room(channel)}")
        found.room -= size
        if size <= CHUNK_BYTES:
            return _HEADER.pack(channel, size) + bytes(piece) if size else b""
        chunks = (piece[start : start + CHUNK_BYTES] for start in range(0, size, CHUNK_BYTES))
        return b"".join(part for chunk in chunks for part in (_HEADER.pack(channel, len(chunk)), bytes(chunk)))

    def end(self, channel: int) -> bytes:
        """Return the frame that says nothing more will come from us; empty for a channel that is closed."""
        return _HEADER.pack(channel, _END << 24) if channel in self._channels else b""

    def control(self, body: bytes) -> bytes:
        """Return a control message as a frame.

        Raises:
            LocalProtocolError: it is empty or too long.
        """
        if not 0 < len(body) <= CONTROL_BYTES:
            raise LocalProtocolError(f"control message of {len(body)} bytes, 1 to {CONTROL_BYTES} are allowed")
        return _HEADER.pack(0, _CONTROL << 24 | len(body)) + body

    def credit_for(self, channel: int, count: int) -> bytes:
        """Record that our reader took `count` received bytes; returns a credit frame when one is due.

        Raises:
            LocalProtocolError: so many were never received.
        """
        found = self._channels.get(channel)
        if found is None:
            return b""
        found.taken += count
        if found.taken > found.received:
            raise LocalProtocolError(f"{found.taken} bytes taken on channel {channel}, {found.received} were received")
        # Credit is sent for half a window: a frame for every read would double the traffic.
        if 2 * found.taken < self._window_bytes or found.has_ended:
            return b""
        credit, found.taken = found.taken, 0
        found.received -= credit
        return _HEADER.pack(channel, _CREDIT_KIND << 24 | _CREDIT.size) + _CREDIT.pack(credit)

    def receive_data(self, data: bytes) -> list[Event]:
        """Take received bytes, in any split; returns the events in them.

        Raises:
            RemoteProtocolError: the other end broke the rules; nothing more is taken.
        """
        if self._is_dead:
            raise RemoteProtocolError("the multiplexer is dead after an earlier error")
        events: list[Event] = []
        try:
            at, size = 0, len(data)
            while at < size:
                at = self._step(data, at, size, events)
        except RemoteProtocolError:
            self._is_dead = True
            raise
        return events

    def _step(self, data: bytes, at: int, size: int, events: list[Event]) -> int:
        if self._left:
            end = min(size, at + self._left)
            self._left -= end - at
            self._deliver(data[at:end], events)
            return end
        partial = self._partial
        if not partial and size - at >= _HEADER.size:
            channel, word = _HEADER.unpack_from(data, at)
            if word >> 24 == _DATA:
                self._begin_data(channel, word & _LENGTH)
                return at + _HEADER.size
        wanted = _HEADER.size
        if len(partial) >= wanted:
            wanted += _HEADER.unpack_from(partial)[1] & _LENGTH
        end = min(size, at + wanted - len(partial))
        partial += data[at:end]
        if len(partial) == wanted:
            self._take_partial(events)
        return end

    def _take_partial(self, events: list[Event]) -> None:
        channel, word = _HEADER.unpack_from(self._partial)
        kind, length = word >> 24, word & _LENGTH
        if len(self._partial) > _HEADER.size:
            body = bytes(self._partial[_HEADER.size :])
            self._partial.clear()
            self._act(channel, kind, body, events)
            return
        _check_length(channel, kind, length)
        if kind == _DATA:
            self._partial.clear()
            self._begin_data(channel, length)
        elif length == 0:
            self._partial.clear()
            self._act(channel, kind, b"", events)

    def _begin_data(self, channel: int, length: int) -> None:
        _check_length(channel, _DATA, length)
        found = self._look_up(channel)
        if found is not None:
            if found.has_ended:
                raise RemoteProtocolError(f"data on channel {channel} after its end")
            if found.received + length > self._window_bytes:
                raise RemoteProtocolError(
                    f"channel {channel}: {found.received} + {length} bytes exceed the window of {self._window_bytes}"
                )
            found.received += length
        self._channel, self._left = channel, length

    def _deliver(self, piece: bytes, events: list[Event]) -> None:
        if self._channel in self._channels:
            events.append(Data(self._channel, piece))

    def _look_up(self, channel: int) -> _Channel | None:
        """The channel, or None for one that has been closed."""
        found = self._channels.get(channel)
        if found is None and not 0 < channel <= self._highest:
            raise RemoteProtocolError(f"channel {channel} was never opened")
        return found

    def _act(self, channel: int, kind: int, body: bytes, events: list[Event]) -> None:
        if kind == _CONTROL:
            events.append(Control(body))
            return
        found = self._look_up(channel)
        if found is None:
            return
        if kind == _END:
            if found.has_ended:
                raise RemoteProtocolError(f"channel {channel} ended twice")
            found.has_ended = True
            events.append(StreamEnded(channel))
            return
        (credit,) = _CREDIT.unpack(body)
        if credit == 0 or found.room + credit > self._window_bytes:
            raise RemoteProtocolError(f"channel {channel}: credit of {credit} bytes, {found.room} were free")
        if found.room == 0:
            events.append(Room(channel))
        found.room += credit


def _check_length(channel: int, kind: int, length: int) -> None:
    least, most = _LENGTHS.get(kind, (1, 0))
    if least > length or length > most or (channel == 0) != (kind == _CONTROL):
        raise RemoteProtocolError(f"frame of kind {kind}, {length} bytes, on channel {channel}")


_LENGTHS = {
    _DATA: (1, CHUNK_BYTES),
    _CREDIT_KIND: (_CREDIT.size, _CREDIT.size),
    _END: (0, 0),
    _CONTROL: (1, CONTROL_BYTES),
}
"""Least and most bytes of a frame."""
