"""`RunOutput`: what a guest sends besides its calls, within the limits: printed text, result, files, progress, `Done`.

Sizes are measured here, whatever the guest claims. Too much of something stops the run.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from toolcell.config import Limits
from toolcell.results import LogEntry, Logs, Outcome, OutputFile
from toolcell.run.connection import GuestConnection
from toolcell.run.options import Callbacks
from toolcell.run.run import Run, Sink
from toolcell.sandbox.backend import LimitExceeded
from toolcell.support.text import for_terminal
from toolcell_bridge.guest.files import MAX_FILE_PROBLEMS, NAME_CHARS, media_type
from toolcell_bridge.wire.errors import RemoteProtocolError
from toolcell_bridge.wire.invisible import is_visible
from toolcell_bridge.wire.messages import (
    CancelCall,
    Done,
    FilePart,
    FileProblem,
    Leftover,
    Log,
    Message,
    Progress,
    ReadPipes,
    Result,
)
from toolcell_bridge.wire.plain import packed_size

Stream = Literal["stdout", "stderr"]


PIECE_BYTES = 4096
"""Pieces shorter than this are put together with what follows."""


@dataclass(slots=True)
class _Piece:
    """Text of one stream that was printed without a break."""

    order: int
    """Counts the changes from one stream to the other."""
    stream: Stream
    text: str
    size: int


class Capture:
    """The beginning and the end of stdout and stderr."""

    def __init__(self, output_bytes: int) -> None:
        self._head_bytes = output_bytes - output_bytes // 2
        self._tail_bytes = output_bytes // 2
        self._heads: list[_Piece] = []
        self._tails: dict[Stream, deque[_Piece]] = {"stdout": deque(), "stderr": deque()}
        self._head_used: dict[Stream, int] = {"stdout": 0, "stderr": 0}
        self._tail_used: dict[Stream, int] = {"stdout": 0, "stderr": 0}
        self._total: dict[Stream, int] = {"stdout": 0, "stderr": 0}
        self._order = 0
        self._last: Stream | None = None
        """The stream of the piece that was fed last."""

    @property
    def total_bytes(self) -> int:
        """Bytes printed to both streams, kept or not."""
        return self._total["stdout"] + self._total["stderr"]

    def feed(self, stream: Stream, text: str) -> None:
        """Take the next piece of one stream."""
        if not text:
            return
        size = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
        self._total[stream] += size
        if stream != self._last:
            self._order += 1
            self._last = stream
        if (room := self._head_bytes - self._head_used[stream]) > 0:
            head = text if size <= room else _cut(text, room)
            taken = len(head.encode("utf-8", "replace"))
            # A character that did not fit closes the head: what follows it must not slip in before it.
            self._head_used[stream] = self._head_bytes if len(head) < len(text) else self._head_used[stream] + taken
            self._add(self._heads, stream, head, taken)
            text, size = text[len(head) :], size - taken
        if text:
            self._keep_tail(stream, text, size)

    def _keep_tail(self, stream: Stream, text: str, size: int) -> None:
        tail = self._tails[stream]
        self._add(tail, stream, text, size)
        used = self._tail_used[stream] + size
        while tail and used - tail[0].size >= self._tail_bytes:
            used -= tail.popleft().size
        self._tail_used[stream] = used

    def _add(self, pieces: list[_Piece] | deque[_Piece], stream: Stream, text: str, size: int) -> None:
        """Add text that was printed last. Short texts of one stream are put together: each alone would take more."""
        if pieces and pieces[-1].order == self._order and pieces[-1].size < PIECE_BYTES:
            last = pieces[-1]
            last.text += text
            last.size += size
        else:
            pieces.append(_Piece(self._order, stream, text, size))

    def logs(self) -> Logs:
        """Return what was kept, in order, with a marker where something is missing."""
        if not self._order:
            return Logs()
        entries = [(each.order, each.stream, each.text) for each in self._heads]
        truncated = False
        for stream, tail in self._tails.items():
            if not tail:
                continue
            kept, order = _last("".join(each.text for each in tail), self._tail_bytes), tail[0].order
            kept_bytes = len(kept.encode("utf-8", "replace"))
            head_bytes = sum(each.size for each in self._heads if each.stream == stream)
            if (missing := self._total[stream] - head_bytes - kept_bytes) > 0:
                truncated = True
                kept = f"\n... [{missing} bytes of {stream} dropped] ...\n{kept}"
            entries.append((order, stream, kept))
        entries.sort(key=lambda entry: entry[0])
        return Logs(
            entries=tuple(_merged(entries)),
            stdout_bytes=self._total["stdout"],
            stderr_bytes=self._total["stderr"],
            truncated=truncated,
        )


def _cut(text: str, size: int) -> str:
    """Return the longest beginning of `text` within `size` bytes."""
    return text.encode("utf-8", "replace")[:size].decode("utf-8", "ignore")


def _last(text: str, size: int) -> str:
    """Return the longest end of `text` within `size` bytes."""
    return "" if size <= 0 else text.encode("utf-8", "replace")[-size:].decode("utf-8", "ignore")


def _merged(entries: list[tuple[int, Stream, str]]) -> list[LogEntry]:
    """Put neighbours of the same stream together."""
    runs = itertools.groupby(entries, key=lambda entry: entry[1])
    return [LogEntry(stream, "".join(text for _, _, text in run)) for stream, run in runs]


PROBLEMS = MAX_FILE_PROBLEMS + 100
"""Files that may be reported as missing or wrong, beyond those that may be returned, with what was displayed."""


@dataclass(slots=True)
class _Open:
    name: str
    media_type: str
    size: int = 0
    parts: list[bytes] = field(default_factory=list)
    digest: Any = field(default_factory=hashlib.sha256)
    """Digest of the parts so far: a large file is not hashed at once."""


class ReturnedFiles:
    """The files of the result that was set last."""

    def __init__(self, limits: Limits, sink: Sink | None = None) -> None:
        """`sink`: takes the content of the files, which is not kept here then."""
        self._limits, self._sink = limits, sink
        self._kept: dict[str, OutputFile] = {}
        self._open: _Open | None = None
        self._bytes = 0
        self._whole = 0
        """Kept files that have their data."""

    def forget(self) -> None:
        """Drop every file, finished or not: a new result was set."""
        self._kept.clear()
        self._open, self._bytes, self._whole = None, 0, 0

    def finished(self) -> tuple[OutputFile, ...]:
        """Return the files that arrived whole, and those that could not be sent."""
        return tuple(self._kept.values())

    def take_part(self, part: FilePart) -> None:
        """Take the next piece of a file.

        Raises:
            RemoteProtocolError: past a limit, or a bad name. Our own guest checks both first and reports them to the
                script.
        """
        file = self._open
        if file is None:
            check_name(part.name, part.media_type)
            file = self._open = _Open(part.name, part.media_type)
        self._bytes += len(part.data)
        if len(self._kept) >= self._limits.files + PROBLEMS or self._bytes > self._limits.files_bytes:
            raise RemoteProtocolError("more files than the run may return")
        (self._sink or file.parts.append)(part.data)
        file.size += len(part.data)
        file.digest.update(part.data)
        if part.last:
            self._open = None
            if self._whole >= self._limits.files:
                raise RemoteProtocolError("more files than the run may return")
            data = b"".join(file.parts)
            self._keep(OutputFile(file.name, file.media_type, file.size, data, file.digest.hexdigest()))

    def take_problem(self, problem: FileProblem) -> None:
        """Take note of a file that cannot be returned.

        Raises:
            RemoteProtocolError: too many, or absurdly long.
        """
        self._open = None
        if len(problem.name) > NAME_CHARS or len(problem.problem) > NAME_CHARS:
            raise RemoteProtocolError("a file's name or problem is too long")
        if len(self._kept) >= self._limits.files + PROBLEMS:
            raise RemoteProtocolError("more files than the run may return")
        name = for_terminal(problem.name).replace("\n", "\\n")
        said = for_terminal(problem.problem)
        self._keep(OutputFile(name, media_type(name, b""), size=problem.size, data=None, sha256=None, problem=said))

    def _keep(self, file: OutputFile) -> None:
        before = self._kept.get(file.name)
        self._whole += (file.data is not None) - (before is not None and before.data is not None)
        self._kept[file.name] = file


def check_name(name: str, kind: str) -> None:
    """Check that a returned file's name stays inside the folder in which somebody saves it.

    Raises:
        RemoteProtocolError: it is absolute, contains `..`, or is absurdly long; our own guest sends no such name.
    """
    parts = name.split("/")
    if not is_visible(name):
        raise RemoteProtocolError("a returned file's name has unprintable or invisible characters")
    if len(name) > NAME_CHARS or len(kind) > NAME_CHARS or "\0" in name or not {"", ".", ".."}.isdisjoint(parts):
        raise RemoteProtocolError("a returned file's name is not a plain relative path")
    if not kind.isascii() or not kind.isprintable():
        raise RemoteProtocolError("a returned file's media type is not one")


STREAMS: dict[int, Stream] = {1: "stdout", 2: "stderr"}


class RunOutput:
    """Everything one run has produced so far."""

    def __init__(self, run: Run, connection: GuestConnection, cancel_call: Callable[[int], None]) -> None:
        self.value: Any = None
        self.has_value = False
        self._run = run
        self.callbacks = Callbacks(run.options)
        self._connection = connection
        self._cancel_call = cancel_call
        self.capture = Capture(run.script.limits.output_bytes)
        self.returned = ReturnedFiles(run.script.limits, run.script.sink)

    def take(self, message: Message) -> None:
        """Take the next message of a run that goes on.

        Raises:
            RemoteProtocolError: it is larger than its limit, or a message that no guest of ours sends.
        """
        match message:
            case Log() | ReadPipes():
                self.drain_message(message)
                self._check_flood()
            case Result() | FilePart() | FileProblem() | Leftover():
                self.drain_message(message)
            case Done():
                self._connection.stop(message)
            case CancelCall(id):
                self._cancel_call(id)
            case Progress(value):
                self.callbacks.progress(value)
            case _:
                raise RemoteProtocolError(f"unexpected {type(message).__name__}")

    def drain_message(self, message: Message) -> None:
        """Take a message, but for `Done`, that is read when the run is over.

        Raises:
            RemoteProtocolError: it is larger than its limit.
        """
        match message:
            case Log(stream, text):
                self._keep(STREAMS[stream], text)
            case ReadPipes():
                self.take_raw(*self._connection.sandbox.read_output())
            case Result(value):
                self._take_result(value)
            case FilePart():
                self.returned.take_part(message)
            case FileProblem():
                self.returned.take_problem(message)
            case Leftover():
                self._connection.leftover = message
            case _:
                pass

    def take_raw(self, out: bytes, err: bytes) -> None:
        """Take what the script wrote directly to the descriptors 1 and 2."""
        for stream, data in ((STREAMS[1], out), (STREAMS[2], err)):
            if data:
                self._run.work.used += len(data)
                self._keep(stream, data.decode("utf-8", "replace"))
        self._check_flood()

    def _take_result(self, value: Any) -> None:
        # Measure only what could be too large: its message is an upper bound.
        limit = self._run.script.limits.result_bytes
        if self._connection.wire.message_bytes > limit and (size := packed_size(value)) > limit:
            raise RemoteProtocolError(f"result too large ({size} > {limit} bytes)")
        self.value, self.has_value = value, True
        self.returned.forget()

    def _keep(self, stream: Stream, text: str) -> None:
        self.capture.feed(stream, text)
        self.callbacks.log(stream, text)

    def _check_flood(self) -> None:
        total, limit = self.capture.total_bytes, self._run.script.limits.output_flood_bytes
        if total > limit:
            self._connection.stop(LimitExceeded(Outcome.OUTPUT_LIMIT, "output_flood_bytes", limit, total))
