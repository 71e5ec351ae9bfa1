"""The script's stdout and stderr: what Python writes goes to the host as Log messages, at once.

Raw writes to descriptors 1 and 2, of child processes and of libraries written in C, go through pipes of their own. The
host reads, counts and truncates both. Before Python's text is sent, the host has read what is in these pipes.
"""

from __future__ import annotations

import builtins
import codecs
import io
import os
import sys
from fcntl import ioctl
from os import sched_yield
from termios import FIONREAD
from time import monotonic, sleep
from typing import Any, Final

from toolcell_bridge.guest.channel import Channel, ChannelClosed
from toolcell_bridge.wire.codec import PRINTED_BYTES
from toolcell_bridge.wire.messages import Log, ReadPipes

FLUSH_CHARS = 16 * 1024
"""Text longer than this is sent in pieces of this size."""

ORDER_S: Final = 0.2
"""How long the host may take to read a pipe. It may be busy, or a process always writes more."""
SPIN_S: Final = 2e-4
"""How long to look again before sleeping: the host has nearly always read by then."""
LOOK_S: Final = 1e-4
PAUSE_S: Final = 2e-5
"""How long after a look nobody looks again: it takes half as long as to send a short text."""
LATE_S: Final = 2.0
"""So long nobody looks after the host was late."""
_EMPTY: Final = bytes(4)


class _RawBytes(io.BufferedIOBase):
    """`sys.stdout.buffer`: bytes written there are decoded and join the same stream."""

    def __init__(self, text: LogStream) -> None:
        self._text = text

    @property
    def raw(self) -> _RawBytes:
        return self

    @property
    def mode(self) -> str:
        return "wb"

    @property
    def name(self) -> str:
        return self._text.name

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._text.fileno()

    def write(self, data: object) -> int:
        raw = bytes(memoryview(data))  # type: ignore[arg-type]  # of a number, bytes() makes zeros
        self._text.send_bytes(raw)
        return len(raw)

    def flush(self) -> None:
        self._text.flush()


class LogStream(io.TextIOBase):
    """A text stream that makes Log messages of what is written to it."""

    def __init__(self, channel: Channel, stream: int) -> None:
        self._channel = channel
        self._stream = stream
        self._errors = "backslashreplace"
        self._looks_from = 0.0
        self._decoder: codecs.IncrementalDecoder | None = None
        """Decodes what is written as bytes; few scripts do that."""
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

    @property
    def write_through(self) -> bool:
        return True

    def detach(self) -> _RawBytes:  # type: ignore[override]
        """Return the stream of bytes, to put another text stream over it."""
        return self.buffer

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

    def fileno(self) -> int:
        return self._stream

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        """Send `text` at once: a script may be killed at any time, and what it printed before is in its log."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if text:
            self._send(text)
        return len(text)

    def end(self) -> None:
        """Send what a script has begun to write as bytes and did not finish."""
        if self._decoder is not None:
            self.send_bytes(b"", is_last=True)

    def send_bytes(self, data: bytes, is_last: bool = False) -> None:
        """Send bytes as text. A character may come in two pieces; the first one waits, unless it `is_last`."""
        if self._decoder is None:
            self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        if text := self._decoder.decode(data, is_last):
            self._send(text)

    def _send(self, text: str) -> None:
        # Lone surrogates have no form on the wire; show them as Python would.
        data = text.encode("utf-8", "backslashreplace")
        try:
            if monotonic() > self._looks_from:
                is_late = (stream := _unread()) > 0 and not self._let_pass(stream)
                self._looks_from = monotonic() + (LATE_S if is_late else PAUSE_S)
            if len(data) <= PRINTED_BYTES:
                self._channel.send_printed(self._stream, data)
                return
            text = data.decode("utf-8")
            for start in range(0, len(text), FLUSH_CHARS):
                self._channel.send(Log(self._stream, text[start : start + FLUSH_CHARS]))
        except ChannelClosed:
            while data:  # a forked child has no bridge; its output takes the pipe
                data = data[os.write(self._stream, data) :]

    def _let_pass(self, stream: int) -> bool:
        """Have the host read what is in the pipes: it was written before. Return whether it has."""
        self._channel.send(ReadPipes(stream))
        began = monotonic()
        while _unread():
            waited_s = monotonic() - began
            if waited_s > ORDER_S:
                return False
            if waited_s < SPIN_S:
                sched_yield()
            else:
                sleep(LOOK_S)
        return True


def _unread() -> int:
    """Return a descriptor whose pipe holds something; 0 if none does."""
    for stream in (1, 2):
        try:
            if ioctl(stream, FIONREAD, _EMPTY) != _EMPTY:
                return stream
        except OSError:  # the script has closed it, or put something in its place
            pass
    return 0


class Streams:
    """A script's sys.stdout and sys.stderr."""

    def __init__(self, channel: Channel) -> None:
        self._out, self._err = LogStream(channel, 1), LogStream(channel, 2)

    def capture(self) -> None:
        """Point sys.stdout and sys.stderr at the bridge."""
        sys.stdout = sys.__stdout__ = self._out  # type: ignore[misc, assignment]
        sys.stderr = sys.__stderr__ = self._err  # type: ignore[misc, assignment]

    def end(self) -> None:
        """Send what the script has begun to write as bytes and did not finish."""
        self._out.end()
        self._err.end()


_print: Any = builtins.print


def print(
    *values: object,
    sep: str | None = " ",
    end: str | None = "\n",
    file: Any = None,
    flush: bool = False,
    **unknown: Any,
) -> None:
    """Prints the values to a stream, or to sys.stdout by default.

    sep
      string inserted between values, default a space.
    end
      string appended after the last value, default a newline.
    file
      a file-like object (stream); defaults to the current sys.stdout.
    flush
      whether to forcibly flush the stream.
    """
    # The interpreter's own makes a write of each value and of each blank between them: a message each.
    stream = sys.stdout if file is None else file
    is_ours = type(stream) is LogStream and "write" not in stream.__dict__
    if not is_ours or unknown or not _TEXT.issuperset((type(sep), type(end))):
        _print(*values, sep=sep, end=end, file=file, flush=flush, **unknown)
        return
    between = " " if sep is None else sep
    texts: list[str] = []
    try:
        texts.extend(map(str, values))
    except BaseException:
        stream.write("".join(text + between for text in texts))
        raise
    stream.write(between.join(texts) + ("\n" if end is None else end))


_TEXT = {str, type(None)}
print.__module__ = "builtins"
print.__wrapped__ = _print  # type: ignore[attr-defined]  # its signature is what `inspect` and `help` show


def install() -> None:
    """Make `print` the interpreter's. Runs before the fork."""
    builtins.print = print
