"""The messages on the channels of a session: requests, what happens in their runs, calls of tools and their answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from toolcell.service.socket.codec import TaggedCodec
from toolcell_bridge import Plain

# Caller to service.


@dataclass(frozen=True, slots=True)
class Ask:
    """Caller: do this. The first message of a channel."""

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
    """Caller: end what this channel does."""

    is_abort: bool
    """Nobody waits for a result. Otherwise a run has one, with outcome `cancelled`."""


# Service to caller.


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
    """Of this call, on its channel."""
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
    """Of a plan."""


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
    """Service: the answer to the request. The last message of a channel."""

    value: Plain


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """Service: the request failed. The last message of a channel."""

    code: str
    """Of toolcell's errors."""
    message: str
    details: dict[str, Plain]


CALLER_MESSAGES: Final = TaggedCodec({1: Ask, 2: AnswerTool, 3: StopRun})
"""What the caller sends and the service takes."""

SERVICE_MESSAGES: Final = TaggedCodec(
    {16: Printed, 17: Reported, 18: AskTool, 19: DropTool, 20: NoteCall, 21: Finished, 22: RequestFailed}
)
"""What the service sends and the caller takes."""
