"""The standard streams of a command: what was not written decides its exit status, and stderr never does."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Output(io.FileIO):
    """A descriptor that fails once: then it takes what comes, so that the interpreter's end reports nothing again."""

    lost: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> Any:
        """Write, or raise the first failure."""
        if self.lost is None:
            try:
                return super().write(data)
            except OSError as exc:
                self.lost = exc
                raise
        return memoryview(data).nbytes


class _Remarks(_Output):
    """A descriptor whose failures are nobody's: whoever closed stderr wants to read none of it."""

    def write(self, data: ReadableBuffer, /) -> Any:
        """Write, or forget."""
        with suppress(OSError):
            return super().write(data)
        return memoryview(data).nbytes


@contextmanager
def standard_streams() -> Iterator[None]:
    """Turn the loss of stdout into its exit status: 141 if its reader closed the pipe, otherwise a message and 1."""
    for descriptor, flags in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:  # the next file to be opened would be taken for it; stdout is for reading, so a write fails
            os.set_inheritable(os.open(os.devnull, flags), True)
            if descriptor == 0:
                sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    output = _Output(1, "w", closefd=False)
    sys.stdout, sys.stderr = _text(output, sys.stdout), _text(_Remarks(2, "w", closefd=False), sys.stderr)
    try:
        yield
    finally:
        with suppress(OSError):
            sys.stdout.flush()
        if output.lost is not None:
            _end(output.lost)


def _text(raw: io.FileIO, before: Any) -> io.TextIOWrapper:
    """Return a stream that shows every character, also on a terminal without Unicode."""
    encoding = getattr(before, "encoding", None) or "utf-8"
    is_prompt = isinstance(raw, _Remarks) or raw.isatty() or getattr(before, "write_through", False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=encoding,
        errors="backslashreplace",
        line_buffering=is_prompt,
    )


def _end(lost: OSError) -> None:
    from toolcell.cli import exits

    if lost.errno == errno.EPIPE:
        raise SystemExit(exits.READER_GONE) from None
    sys.stderr.write(f"cannot write to stdout: {lost.strerror}\n")
    raise SystemExit(exits.FAILED) from None
