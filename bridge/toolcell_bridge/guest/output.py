"""The script's stdout and stderr: what Python writes goes to the host as Log messages, line by line.

Raw writes to descriptors 1 and 2 go through pipes of their own. The host reads, counts and truncates both.
"""

from __future__ import annotations

import codecs
import io
import os
import sys

from toolcell_bridge.guest.channel import Channel, ChannelClosed
from toolcell_bridge.wire.messages import Log

FLUSH_CHARS = 16 * 1024
"""A line longer than this is sent in pieces of this size."""


class _RawBytes(io.RawIOBase):
    """`sys.stdout.buffer`: bytes written there are decoded and join the same stream."""

    def __init__(self, text: LogStream) -> None:
        self._text = text

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._text.fileno()

    def write(self, data: object) -> int:
        raw = bytes(data)  # type: ignore[call-overload]
        self._text.write(raw.decode("utf-8", "backslashreplace"))
        return len(raw)

    def flush(self) -> None:
        self._text.flush()


class LogStream(io.TextIOBase):
    """A text stream whose lines become Log messages."""

    def __init__(self, channel: Channel, stream: int) -> None:
        self._channel = channel
        self._stream = stream
        self._errors = "backslashreplace"
        self._pending: list[str] = []
        self._pending_chars = 0
        self.buffer = _RawBytes(self)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        return self._errors

    @property
    def mode(self) -> str:
        return "w"

    @property
    def name(self) -> str:
        return "<stdout>" if self._stream == 1 else "<stderr>"

    @property
    def line_buffering(self) -> bool:
        return True

    def reconfigure(
        self,
        *,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        line_buffering: bool | None = None,
        write_through: bool | None = None,
    ) -> None:
        """As of a standard stream. Text goes to the host as UTF-8 and line by line, whatever is asked for.

        Raises:
            LookupError: there is no such encoding or error handler.
        """
        codecs.lookup(encoding or "utf-8")
        codecs.lookup_error(errors or "strict")
        self._errors = errors or self._errors
        self.flush()

    def fileno(self) -> int:
        return self._stream

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._pending.append(text)
        self._pending_chars += len(text)
        if "\n" in text or self._pending_chars >= FLUSH_CHARS:
            self.flush()
        return len(text)

    def flush(self) -> None:
        if not self._pending:
            return
        text, self._pending, self._pending_chars = "".join(self._pending), [], 0
        # Lone surrogates have no form on the wire; show them as Python would.
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")
        try:
            for start in range(0, len(text), FLUSH_CHARS):
                self._channel.send(Log(self._stream, text[start : start + FLUSH_CHARS]))
        except ChannelClosed:
            self._write_raw(text)

    def _write_raw(self, text: str) -> None:
        # A forked child has no bridge; its output takes the pipe.
        data = text.encode()
        while data:
            data = data[os.write(self._stream, data) :]


def capture(channel: Channel) -> None:
    """Point sys.stdout and sys.stderr at the bridge."""
    sys.stdout = sys.__stdout__ = LogStream(channel, 1)  # type: ignore[misc, assignment]
    sys.stderr = sys.__stderr__ = LogStream(channel, 2)  # type: ignore[misc, assignment]
