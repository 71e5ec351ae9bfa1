"""What travels over the WebSocket: MessagePack-RPC, JSON-RPC with bytes. See docs/service/protocol.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from toolcell_bridge.wire.codec import TableCodec
from toolcell_bridge.wire.messages import MAX_ELEMENTS, Plain
from toolcell_bridge.wire.plain import MAX_DEPTH

SOCKET_VERSION: Final = 3
"""Goes up when a message changes its members or meaning; the ends do not negotiate."""


@dataclass(frozen=True, slots=True)
class Request:
    """Both: do this, and answer."""

    id: int
    """Each end numbers its own, and never uses a number twice."""
    method: str
    params: dict[str, Plain]


@dataclass(frozen=True, slots=True)
class Response:
    """Both: the answer to the request of this id."""

    id: int
    error: dict[str, Plain] | None
    """`code`, `message` and `details` of toolcell's errors; None if there is a result."""
    result: Plain


@dataclass(frozen=True, slots=True)
class Notification:
    """Both: know this. There is no answer."""

    method: str
    params: dict[str, Plain]


Message = Request | Response | Notification

MESSAGES: Final[TableCodec[Message]] = TableCodec(
    {0: Request, 1: Response, 2: Notification},
    elements=lambda tag: 4 * MAX_ELEMENTS,
    depth=MAX_DEPTH + 8,  # a value of the bridge stands some levels inside a result
)
