"""Bytes of a file as lines of text, in bounded memory."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import BinaryIO

from toolcell.builtin.encodings import SAMPLE_BYTES, checked_encoding, encoding_of, lenient
from toolcell.errors import ToolError

MAX_LINE_CHARS = 1024 * 1024


def open_text(source: BinaryIO, encoding: str | None = None) -> io.TextIOWrapper:
    """Return the text of a seekable binary file. Line ends stay as they are. `encoding`: None finds it out.

    Raises:
        ToolError: there is no such encoding.
    """
    sample = source.read(SAMPLE_BYTES)
    source.seek(0)
    name = encoding_of(sample) or "utf-8" if encoding is None else checked_encoding(encoding)
    name = "utf-8-sig" if name == "utf-8" else name
    return io.TextIOWrapper(source, encoding=name, errors=lenient(name), newline="")


def lines_of(text: io.TextIOWrapper) -> Iterator[str]:
    """Return the lines with their ends.

    Raises:
        ToolError: a line is longer than `MAX_LINE_CHARS`.
    """
    number = 0
    while line := text.readline(MAX_LINE_CHARS + 1):
        number += 1
        if len(line) > MAX_LINE_CHARS:
            raise ToolError(f"line {number} has more than {MAX_LINE_CHARS} characters", code="too_large")
        yield line
