"""Everything that travels over the WebSocket, as frozen data. docs/service/protocol.md explains each field.

A **frame** is one binary message of the WebSocket. The parts of a request's stream add up to its **messages**.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from toolcell_bridge.wire.codec import TableCodec
from toolcell_bridge.wire.messages import MAX_ELEMENTS, Plain
from toolcell_bridge.wire.plain import MAX_DEPTH

SOCKET_VERSION: Final = 2
"""Goes up when a frame or message changes its fields or meaning; the ends do not negotiate."""

PART_BYTES: Final = 64 * 1024
"""Most bytes of a message in one frame. Long messages of one request let those of others pass in between."""

FRAME_BYTES: Final = PART_BYTES + 1024
"""Most bytes of one frame in all."""


# Frames.


@dataclass(frozen=True, slots=True)
class CallerHello:
    """Caller: the first frame of every connection."""

    version: int
    name: str
    """The caller's secret, the same on all its connections: by it, a caller finds its requests and sessions again."""
    received: dict[str, Plain]
    """For each request under way: the number of the last part that arrived. The others are over."""


@dataclass(frozen=True, slots=True)
class ServiceHello:
    """Service: the answer to it."""

    version: int
    home: str
    """Another one than before: the service does not know any more what the caller had there."""
    received: dict[str, Plain]
    """As the caller's. Of a request that is not named, nothing arrived."""
    grace_s: float
    """How long everything of the caller is kept without a connection."""
    message_bytes: int
    """Longest message that the service takes."""
    requests: int
    """That may be under way at once."""


@dataclass(frozen=True, slots=True)
class MessagePart:
    """Both: a part of a message of a request."""

    request: int
    number: int
    """Number of the part, in its direction of its request: 1, 2, 3 ..."""
    is_last: bool
    """The message ends with it."""
    data: bytes


@dataclass(frozen=True, slots=True)
class Taken:
    """Both: everything up to the part of this number was taken, so as much may follow."""

    request: int
    number: int


@dataclass(frozen=True, slots=True)
class RequestOver:
    """Caller: the answer is here, or nobody wants it any more. The service forgets the request."""

    request: int


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Both: the last frame. Everything of the caller at the service ends."""

    code: str
    """closed, version, protocol, restart, unauthorized, too_many_sessions."""
    message: str


Frame = CallerHello | ServiceHello | MessagePart | Taken | RequestOver | Goodbye

FRAMES: Final[TableCodec[Frame]] = TableCodec(
    {1: CallerHello, 2: ServiceHello, 3: MessagePart, 4: Taken, 5: RequestOver, 6: Goodbye}
)


# Messages: caller to service.


@dataclass(frozen=True, slots=True)
class Ask:
    """Caller: do this. The first message of a request."""

    method: str
    arguments: dict[str, Plain]


@dataclass(frozen=True, slots=True)
class AnswerTool:
    """Caller: the answer to a `CallTool` of the service. Exactly one for each."""

    id: int
    result: dict[str, Plain]
    """As `tool_answer` makes it."""


@dataclass(frozen=True, slots=True)
class StopRun:
    """Caller: end this request."""

    is_abort: bool
    """Nobody waits for a result. Otherwise a run has one, with outcome `cancelled`."""


# Messages: service to caller.


@dataclass(frozen=True, slots=True)
class Printed:
    """Service: the script printed this."""

    stream: str
    """stdout or stderr."""
    text: str


@dataclass(frozen=True, slots=True)
class Reported:
    """Service: the script reported its progress."""

    value: Plain


@dataclass(frozen=True, slots=True)
class AskTool:
    """Service: call this tool."""

    id: int
    """Id of this call, in its request."""
    kind: str
    """call, preview or revert."""
    tool: str
    arguments: dict[str, Plain]
    origin: str
    """code or plan."""
    is_approved: bool
    """Whoever may decide has approved it."""
    run_id: str
    call_id: str
    step: int | None
    """Number of the step of a plan."""


@dataclass(frozen=True, slots=True)
class DropTool:
    """Service: the answer is not needed any more."""

    id: int


@dataclass(frozen=True, slots=True)
class NoteCall:
    """Service: a call that its tool did not see: it was refused, or the tool lives at the service."""

    call_id: str
    tool: str
    origin: str
    arguments: Plain
    result: dict[str, Plain]


@dataclass(frozen=True, slots=True)
class Finished:
    """Service: the answer to the request. The last message of a request."""

    value: Plain


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """Service: the request failed. The last message of a request."""

    code: str
    """Code of toolcell's errors."""
    message: str
    details: dict[str, Plain]


CallerMessage = Ask | AnswerTool | StopRun
ServiceMessage = Printed | Reported | AskTool | DropTool | NoteCall | Finished | RequestFailed

_DEPTH: Final = MAX_DEPTH + 8
"""A value of the bridge stands some levels inside a result."""
_ELEMENTS: Final = 4 * MAX_ELEMENTS

CALLER_MESSAGES: Final[TableCodec[CallerMessage]] = TableCodec(
    {1: Ask, 2: AnswerTool, 3: StopRun}, elements=lambda tag: _ELEMENTS, depth=_DEPTH
)
"""What the caller sends and the service takes."""

SERVICE_MESSAGES: Final[TableCodec[ServiceMessage]] = TableCodec(
    {16: Printed, 17: Reported, 18: AskTool, 19: DropTool, 20: NoteCall, 21: Finished, 22: RequestFailed},
    elements=lambda tag: _ELEMENTS,
    depth=_DEPTH,
)
"""What the service sends and the caller takes."""
