"""The frames of the protocol: one in each binary WebSocket message. docs/service/protocol.md explains each field.

`Piece` and `WindowCredit` are numbered: after a dropped connection they are sent again, and known ones are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from toolcell.service.socket.codec import TaggedCodec

SOCKET_VERSION: Final = 1
"""Goes up when a frame or message changes its fields or meaning; the ends do not negotiate."""

PIECE_BYTES: Final = 64 * 1024
"""Of a message in one frame. Long messages of one channel let those of others pass in between."""

WINDOW_BYTES: Final = 4 * PIECE_BYTES
"""What one end may send on a channel before the other end has taken it."""

FRAME_BYTES: Final = PIECE_BYTES + 1024
"""Of one frame in all."""


@dataclass(frozen=True, slots=True)
class CallerHello:
    """Caller: the first frame of every connection."""

    version: int
    session: str
    """Name of the session that goes on; empty for a new one."""
    received: int
    """Number of the last numbered frame that arrived."""


@dataclass(frozen=True, slots=True)
class ServiceHello:
    """Service: the answer to it."""

    version: int
    session: str
    """Secret name of the session, for the next connection."""
    is_resumed: bool
    received: int
    grace_s: float
    """How long the session is kept without a connection."""
    message_bytes: int
    """Longest message that the service takes."""
    channels: int
    """Requests that may be under way at once."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a message on a channel."""

    number: int
    channel: int
    is_last: bool
    data: bytes


@dataclass(frozen=True, slots=True)
class WindowCredit:
    """So many bytes of the channel were taken: as many more may be sent."""

    number: int
    channel: int
    size: int


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Every numbered frame up to this one arrived."""

    received: int


@dataclass(frozen=True, slots=True)
class Ping:
    """Is anybody there?"""

    token: int


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to it, with its token."""

    token: int


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The session ends, and is not to be resumed."""

    code: str
    """closed, version, session, protocol, restart."""
    message: str


Frame = CallerHello | ServiceHello | Piece | WindowCredit | Acknowledged | Ping | Pong | Goodbye

FRAMES: Final = TaggedCodec(
    {1: CallerHello, 2: ServiceHello, 3: Piece, 4: WindowCredit, 5: Acknowledged, 6: Ping, 7: Pong, 8: Goodbye}
)
