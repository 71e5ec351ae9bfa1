"""Both ends of the bridge as one state machine without I/O: bytes in, messages out, and the other way round.

Every legal message, sent or received, is a row of a table.

    NEW --Hello--> IDLE --Run--> RUNNING --Done--> IDLE            anything else: DEAD

Messages cross on the wire, so four kinds of row exist only because of a race, and are dropped by the end that
receives them: an answer, or a part of the script, that was under way when the guest sent `Done`; an answer to a call
the guest has cancelled; a `CancelCall` for a call the host has just answered.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator, KeysView, Mapping
from itertools import chain
from typing import Final, Self, TypeAlias

from toolcell_bridge.wire.codec import LOG_STARTS, decode_counted, decode_in_steps, encode_parts
from toolcell_bridge.wire.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from toolcell_bridge.wire.framing import MAX_FRAME_BYTES, FrameReader, Part
from toolcell_bridge.wire.messages import (
    MAX_ELEMENTS,
    MAX_GUEST_ELEMENTS,
    PROTOCOL_VERSION,
    CallTool,
    CancelCall,
    Done,
    FilePart,
    FileProblem,
    Hello,
    Leftover,
    Log,
    Message,
    Progress,
    PutFile,
    ReadPipes,
    Result,
    RunScript,
    Stay,
    ToolFail,
    ToolReturn,
)
from toolcell_bridge.wire.table_frames import WITH_TABLES, gathered

MAX_OUTSTANDING: Final = 1024
"""Calls that may wait for their answer at once. Limits what the host must remember for a guest."""

AT_ONCE_BYTES: Final = 32 * 1024
"""A message this short is decoded in one step. It holds at most as many elements, which take some milliseconds."""

JOINED: Final = 4096
"""Messages that are joined to one at most: about a millisecond."""


class State(enum.StrEnum):
    """State of the connection, as this end sees it."""

    NEW = "new"
    IDLE = "idle"
    RUNNING = "running"
    DEAD = "dead"


Moves: TypeAlias = Mapping[tuple[State, type[Message]], State]

HOST_MOVES: Final[Moves] = {
    (State.IDLE, PutFile): State.IDLE,
    (State.IDLE, Stay): State.IDLE,
    (State.IDLE, RunScript): State.RUNNING,
    (State.RUNNING, ToolReturn): State.RUNNING,
    (State.RUNNING, ToolFail): State.RUNNING,
}
"""What the host may send."""

GUEST_MOVES: Final[Moves] = {
    (State.NEW, Hello): State.IDLE,
    (State.RUNNING, CallTool): State.RUNNING,
    (State.RUNNING, CancelCall): State.RUNNING,
    (State.RUNNING, Log): State.RUNNING,
    (State.RUNNING, ReadPipes): State.RUNNING,
    (State.RUNNING, Progress): State.RUNNING,
    (State.RUNNING, Result): State.RUNNING,
    (State.RUNNING, FilePart): State.RUNNING,
    (State.RUNNING, FileProblem): State.RUNNING,
    (State.RUNNING, Leftover): State.RUNNING,
    (State.RUNNING, Done): State.IDLE,
}
"""What the guest may send, and all that the host may receive."""

LATE_MOVES: Final[Moves] = {
    (State.IDLE, ToolReturn): State.IDLE,
    (State.IDLE, ToolFail): State.IDLE,
}
"""What the guest may receive besides `HOST_MOVES`: sent before the host saw `Done`."""


class Connection:
    """One end. Checks every message, both ways, against the tables.

    Not thread-safe: callers that share one hold a lock around `send` and the write of its result, so that the messages
    are written in the order in which they were checked.
    """

    def __init__(
        self,
        ours: Moves,
        theirs: Moves,
        max_frame_bytes: int,
        max_outstanding: int,
        in_steps: bool = False,
        joins_logs: bool = False,
    ) -> None:
        self.state = State.NEW
        self._ours = ours
        self._theirs = theirs
        self.max_frame_bytes = max_frame_bytes
        """Most bytes of a message in either direction."""
        self._max_outstanding = max_outstanding
        self._is_host = ours is HOST_MOVES
        self._sent_elements: int | None = None
        """Elements of one message of ours while a run goes on."""
        self._received_elements = MAX_GUEST_ELEMENTS if self._is_host else MAX_ELEMENTS
        self._at_once_bytes = AT_ONCE_BYTES if in_steps else max_frame_bytes
        self._joins_logs = joins_logs
        self._decoding: Generator[None, None, tuple[Message, int]] | None = None
        self.is_decoding = False
        """A long message is here and only partly decoded: `next_message` goes on with it."""
        self.frames = FrameReader(max_frame_bytes)
        self.message_bytes = self.message_elements = 0
        """Size of the last message that was received: bytes, and the elements inside its fields."""
        self.has_tables = False
        """There are arrays or tables in the last message that was received."""
        self._death = ""
        self._last_id = 0
        self._calls: dict[int, bool] = {}
        """Unanswered calls of this run, and whether the guest has cancelled them."""
        self._forgotten: set[int] = set()
        """Calls unanswered when the last run ended: each may still get one answer, until the next run begins."""
        self._open_files: dict[type[Message], str] = {}
        """The file whose pieces are under way, by message type."""

    @classmethod
    def host(
        cls,
        *,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        max_outstanding: int = MAX_OUTSTANDING,
        in_steps: bool = False,
        joins_logs: bool = False,
    ) -> Self:
        """Return the host's end.

        `in_steps`: a long message takes several calls of `next_message`. `joins_logs`: short `Log` messages of one
        stream that were received together come as one.
        """
        return cls(HOST_MOVES, GUEST_MOVES, max_frame_bytes, max_outstanding, in_steps, joins_logs)

    @classmethod
    def guest(cls, *, max_frame_bytes: int = MAX_FRAME_BYTES, max_outstanding: int = MAX_OUTSTANDING) -> Self:
        """Return the guest's end."""
        return cls(GUEST_MOVES, {**HOST_MOVES, **LATE_MOVES}, max_frame_bytes, max_outstanding)

    @property
    def outstanding(self) -> KeysView[int]:
        """Ids of calls without an answer, oldest first. Empty after `Done`: those answers are not to be sent."""
        return self._calls.keys()

    def is_cancelled(self, call_id: int) -> bool:
        """Whether the guest has cancelled this call. The host must answer it all the same."""
        return self._calls.get(call_id, False)

    def send(self, *messages: Message) -> bytes:
        """Return the bytes to write for all messages. Raises what `send_parts` does."""
        return b"".join(self.send_parts(*messages))

    def send_parts(self, *messages: Message) -> list[Part]:
        """Return what to write for all messages, in parts. When this raises, nothing has changed and nothing may be
        written. Large buffers of arrays and tables are those of the messages, not copies.

        Raises:
            LocalProtocolError: illegal now, or the connection is dead.
            UnsendableValue, ValueTooLarge: the message has no form on the wire.
        """
        if self.state is State.DEAD:
            raise LocalProtocolError(f"the connection is dead: {self._death}")
        if len(messages) == 1:
            only = encode_parts(messages[0], self.max_frame_bytes, self._sent_elements)
            self._move(self._ours, messages[0], LocalProtocolError)
            return only
        frames = [encode_parts(message, self.max_frame_bytes, self._sent_elements) for message in messages]
        before = self.state, self._last_id, self._calls.copy(), self._forgotten.copy(), self._open_files.copy()
        try:
            for message in messages:
                self._move(self._ours, message, LocalProtocolError)
        except LocalProtocolError:
            self.state, self._last_id, self._calls, self._forgotten, self._open_files = before
            raise
        return gathered(chain.from_iterable(frames))

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Take bytes from the peer. Drain `next_message` before giving more: only then is memory bounded.

        Raises:
            RemoteProtocolError: the connection is dead.
        """
        if self.state is State.DEAD:
            raise RemoteProtocolError(f"the connection is dead: {self._death}")
        self.frames.receive_data(data)

    def next_message(self) -> Message | None:
        """Return the next message, or None when more bytes are needed or when it `is_decoding`.

        Raises:
            RemoteProtocolError: the peer broke the protocol, now or before. The connection is dead.
        """
        if self.state is State.DEAD:
            raise RemoteProtocolError(f"the connection is dead: {self._death}")
        try:
            if self._decoding is not None:
                return self._decode_on()
            while (body := self.frames.next_frame()) is not None:
                self.message_bytes = len(body)
                self.has_tables = body[0] == WITH_TABLES[0]
                if len(body) > self._at_once_bytes:
                    self.is_decoding = True
                    self._decoding = decode_in_steps(body, self._received_elements)
                    return self._decode_on()
                message, self.message_elements = decode_counted(body, self._received_elements)
                if self._move(self._theirs, message, RemoteProtocolError):
                    return self._joined(message) if type(message) is Log and self._joins_logs else message
        except RemoteProtocolError as exc:
            self._die(str(exc))
            raise
        return None

    def _joined(self, log: Log) -> Log:
        """Join a message with those of its stream that follow and are here already."""
        starts = LOG_STARTS[log.stream]
        texts = self.frames.take_texts(starts, JOINED)
        if not texts:
            return log
        text = b"".join(texts)
        self.message_bytes += len(text) + len(texts) * len(starts[0])
        self.message_elements += len(texts)
        return Log(log.stream, log.text + text.decode("ascii"))

    def _decode_on(self) -> Message | None:
        assert self._decoding is not None
        try:
            next(self._decoding)
        except StopIteration as finished:
            self._decoding, self.is_decoding = None, False
            message: Message
            message, self.message_elements = finished.value
            return message if self._move(self._theirs, message, RemoteProtocolError) else self.next_message()
        except MemoryError:
            self._die("there was no memory for a message")  # what was decoded of it is lost
            raise
        return None

    def _move(self, moves: Moves, message: Message, error: type[ProtocolError]) -> bool:
        """Make a legal move, or raise `error` and change nothing. False: legal, but too late to have an effect."""
        kind = type(message)
        state = moves.get((self.state, kind))
        if state is None:
            raise error(f"{kind.__name__} is illegal in state {self.state}")
        track = _TRACKED.get(kind)
        matters = track is None or track(self, message, error)
        self.state = state
        return matters

    def _die(self, reason: str) -> None:
        self.state = State.DEAD
        self._death = reason
        self._decoding, self.is_decoding = None, False
        self.frames = FrameReader(self.max_frame_bytes)
        self._calls.clear()
        self._forgotten.clear()

    # One method per message that changes more than the state. Each raises `error` before it changes anything.

    def _hello(self, message: Hello, error: type[ProtocolError]) -> bool:
        if message.version != PROTOCOL_VERSION:
            raise error(f"protocol version {message.version}, {PROTOCOL_VERSION} is spoken here")
        return True

    def _run(self, message: RunScript, error: type[ProtocolError]) -> bool:
        if PutFile in self._open_files:
            raise error("Run before the last piece of a file")
        self._forgotten.clear()
        answer, others = message.answer_elements, message.message_elements
        self._sent_elements, self._received_elements = (answer, others) if self._is_host else (others, answer)
        return True

    def _result(self, message: Result, error: type[ProtocolError]) -> bool:
        # A script can be interrupted in the middle of a file and set another result; the unfinished file is void.
        self._open_files.pop(FilePart, None)
        return True

    def _end_run(self, message: Done, error: type[ProtocolError]) -> bool:
        self._open_files.pop(FilePart, None)
        self._forgotten.update(self._calls)
        self._calls.clear()
        self._sent_elements, self._received_elements = None, MAX_GUEST_ELEMENTS if self._is_host else MAX_ELEMENTS
        return True

    def _call(self, message: CallTool, error: type[ProtocolError]) -> bool:
        if message.id <= self._last_id:
            raise error(f"call id {message.id} does not come after {self._last_id}")
        if len(self._calls) >= self._max_outstanding:
            raise error(f"more than {self._max_outstanding} calls outstanding")
        self._last_id = message.id
        self._calls[message.id] = False
        return True

    def _cancel(self, message: CancelCall, error: type[ProtocolError]) -> bool:
        if message.id not in self._calls:
            # The host may have answered while this was on its way. The guest knows which calls it cancelled.
            if error is RemoteProtocolError and 0 < message.id <= self._last_id:
                return False
            raise error(f"cancel of call {message.id}, which is not outstanding")
        if self._calls[message.id]:
            raise error(f"second cancel of call {message.id}")
        self._calls[message.id] = True
        return True

    def _answer(self, message: ToolReturn | ToolFail, error: type[ProtocolError]) -> bool:
        if message.id in self._calls:
            return not self._calls.pop(message.id)
        if message.id in self._forgotten:
            self._forgotten.remove(message.id)
            return False
        raise error(f"answer to call {message.id}, which is not outstanding")

    def _put_file(self, message: PutFile, error: type[ProtocolError]) -> bool:
        return self._piece(PutFile, message.path, message.last, error)

    def _file_part(self, message: FilePart, error: type[ProtocolError]) -> bool:
        return self._piece(FilePart, message.name, message.last, error)

    def _file_problem(self, message: FileProblem, error: type[ProtocolError]) -> bool:
        if self._open_files.get(FilePart, message.name) != message.name:
            raise error("FileProblem of one file between the pieces of another")
        self._open_files.pop(FilePart, None)
        return True

    def _piece(self, kind: type[Message], name: str, last: bool, error: type[ProtocolError]) -> bool:
        if self._open_files.get(kind, name) != name:
            raise error(f"{kind.__name__} of one file between the pieces of another")
        if last:
            self._open_files.pop(kind, None)
        else:
            self._open_files[kind] = name
        return True


_TRACKED: Final[dict[type[Message], Callable[..., bool]]] = {
    Hello: Connection._hello,
    RunScript: Connection._run,
    Result: Connection._result,
    Done: Connection._end_run,
    CallTool: Connection._call,
    CancelCall: Connection._cancel,
    ToolReturn: Connection._answer,
    ToolFail: Connection._answer,
    PutFile: Connection._put_file,
    FilePart: Connection._file_part,
    FileProblem: Connection._file_problem,
}
