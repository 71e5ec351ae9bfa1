"""What a guest says besides its calls: printed text, a result, files, progress and its last word, within the limits.

Sizes are measured here, whatever was claimed; too much of something ends the run. Knows no tools and no bytes: messages
come from whoever reads the bridge, raw output from whoever reads the descriptors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from toolcell.config import Limits
from toolcell.results import Logs, Outcome, OutputFile
from toolcell.run.capture import Capture, Stream
from toolcell.run.connection import GuestConnection
from toolcell.run.ending import Ending
from toolcell.run.returned_files import ReturnedFiles
from toolcell.sandbox.backend import LimitExceeded
from toolcell_bridge.wire.codec import packed_size
from toolcell_bridge.wire.errors import RemoteProtocolError
from toolcell_bridge.wire.messages import CancelCall, Done, FilePart, FileProblem, Log, Message, Progress, Result

FRAME_COST_BYTES = 256
"""What each frame counts besides its text towards the output flood: an empty one costs the host time too."""

STREAMS: dict[int, Stream] = {1: "stdout", 2: "stderr"}


class RunOutput:
    """Everything one run has said so far."""

    def __init__(
        self,
        limits: Limits,
        traffic: GuestConnection,
        ending: Ending,
        cancel_call: Callable[[int], None],
        on_log: Callable[[str, str], None] | None,
        on_progress: Callable[[object], None] | None,
    ) -> None:
        self._limits = limits
        self.value: Any = None
        self.has_value = False
        self._traffic = traffic
        self._ending = ending
        self._cancel_call = cancel_call
        self._on_log = on_log
        self._on_progress = on_progress
        self._capture = Capture(limits.output_bytes)
        self._files = ReturnedFiles(limits)
        self._frames = 0

    @property
    def printed_bytes(self) -> int:
        """Printed to both streams, kept or not."""
        return self._capture.total_bytes

    def logs(self) -> Logs:
        """What was kept of the printed text."""
        return self._capture.logs()

    def files(self) -> tuple[OutputFile, ...]:
        """The files of the result that was set last."""
        return self._files.finished()

    def take(self, message: Message) -> None:
        """Take the next message of a run that goes on.

        Raises:
            RemoteProtocolError: it says too much, or what no guest of ours would say.
        """
        self._frames += 1
        match message:
            case Log(stream, text):
                self._keep(STREAMS[stream], text)
                self._check_flood()
            case Result(value):
                self._take_result(value)
            case Done():
                self._ending.done = message
            case FilePart():
                self._files.take_part(message)
            case FileProblem():
                self._files.take_problem(message)
            case CancelCall(id):
                self._check_flood()
                self._cancel_call(id)
            case Progress(value):
                self._check_flood()
                if self._on_progress is not None:
                    self._on_progress(value)
            case _:
                raise RemoteProtocolError(f"unexpected {type(message).__name__}")

    def take_late(self, message: Message) -> None:
        """Take a message that was under way when its sandbox died.

        Raises:
            RemoteProtocolError: it says too much.
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
            case Done() if self._ending.breached is None:
                self._ending.done = message
            case _:
                pass

    def take_output(self, out: bytes, err: bytes) -> None:
        """Take what was written raw to descriptors 1 and 2."""
        for stream, data in ((STREAMS[1], out), (STREAMS[2], err)):
            if data:
                self._capture.feed_raw(stream, data)
                if self._on_log is not None:
                    self._on_log(stream, data.decode("utf-8", "replace"))
        self._check_flood()

    def _take_result(self, value: Any) -> None:
        # Measured only when it could be too large: everything this run has sent is an upper bound.
        limit = self._limits.result_bytes
        if self._traffic.received_bytes > limit and (size := packed_size(value)) > limit:
            raise RemoteProtocolError(f"result too large ({size} > {limit} bytes)")
        self.value, self.has_value = value, True
        self._files.forget()

    def _keep(self, stream: Stream, text: str) -> None:
        self._capture.feed(stream, text)
        if self._on_log is not None:
            self._on_log(stream, text)

    def _check_flood(self) -> None:
        total, limit = self._capture.total_bytes + FRAME_COST_BYTES * self._frames, self._limits.output_flood_bytes
        if total > limit:
            self._ending.breach(LimitExceeded(Outcome.OUTPUT_LIMIT, "output_flood_bytes", limit, total))
