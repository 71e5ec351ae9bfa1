"""`RunOutput`: what a guest sends besides its calls, within the limits: printed text, result, files, progress, `Done`.

Sizes are measured here, whatever the guest claims. Too much of something stops the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from toolcell.results import Logs, Outcome, OutputFile
from toolcell.run.callbacks import Callbacks
from toolcell.run.connection import GuestConnection
from toolcell.run.printed_text import Capture, Stream
from toolcell.run.request import RunRequest
from toolcell.run.returned_files import ReturnedFiles
from toolcell.sandbox.backend import LimitExceeded
from toolcell.support.host_work import HostWork
from toolcell_bridge.wire.errors import RemoteProtocolError
from toolcell_bridge.wire.messages import (
    CancelCall,
    Done,
    FilePart,
    FileProblem,
    Leftover,
    Log,
    Message,
    Progress,
    Result,
)
from toolcell_bridge.wire.plain import packed_size

STREAMS: dict[int, Stream] = {1: "stdout", 2: "stderr"}


class RunOutput:
    """Everything one run has produced so far."""

    def __init__(
        self, request: RunRequest, connection: GuestConnection, cancel_call: Callable[[int], None], work: HostWork
    ) -> None:
        self.value: Any = None
        self.has_value = False
        self._limits = request.limits
        self.callbacks = Callbacks(request.handlers)
        self._connection = connection
        self._cancel_call = cancel_call
        self._work = work
        self._capture = Capture(request.limits.output_bytes)
        self._files = ReturnedFiles(request.limits, request.sink)

    @property
    def printed_bytes(self) -> int:
        """Bytes printed to both streams, kept or not."""
        return self._capture.total_bytes

    def logs(self) -> Logs:
        """Return the printed text that was kept."""
        return self._capture.logs()

    def files(self) -> tuple[OutputFile, ...]:
        """Return the files of the result that was set last."""
        return self._files.finished()

    def take(self, message: Message) -> None:
        """Take the next message of a run that goes on.

        Raises:
            RemoteProtocolError: it is larger than its limit, or a message that no guest of ours sends.
        """
        match message:
            case Log(stream, text):
                self._keep(STREAMS[stream], text)
                self._check_flood()
            case Result(value):
                self._take_result(value)
            case Done():
                self._connection.stop(message)
            case FilePart():
                self._files.take_part(message)
            case FileProblem():
                self._files.take_problem(message)
            case CancelCall(id):
                self._cancel_call(id)
            case Progress(value):
                self.callbacks.progress(value)
            case Leftover():
                self._connection.leftover = message
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
            case Result(value):
                self._take_result(value)
            case FilePart():
                self._files.take_part(message)
            case FileProblem():
                self._files.take_problem(message)
            case Leftover():
                self._connection.leftover = message
            case _:
                pass

    def take_raw(self, out: bytes, err: bytes) -> None:
        """Take what the script wrote directly to the descriptors 1 and 2."""
        for stream, data in ((STREAMS[1], out), (STREAMS[2], err)):
            if data:
                self._work.used += len(data)
                self._capture.feed_raw(stream, data)
                self.callbacks.log(stream, data.decode("utf-8", "replace"))
        self._check_flood()

    def _take_result(self, value: Any) -> None:
        # Measure only what could be too large: its message is an upper bound.
        limit = self._limits.result_bytes
        if self._connection.wire.message_bytes > limit and (size := packed_size(value)) > limit:
            raise RemoteProtocolError(f"result too large ({size} > {limit} bytes)")
        self.value, self.has_value = value, True
        self._files.forget()

    def _keep(self, stream: Stream, text: str) -> None:
        self._capture.feed(stream, text)
        self.callbacks.log(stream, text)

    def _check_flood(self) -> None:
        total, limit = self._capture.total_bytes, self._limits.output_flood_bytes
        if total > limit:
            self._connection.stop(LimitExceeded(Outcome.OUTPUT_LIMIT, "output_flood_bytes", limit, total))
