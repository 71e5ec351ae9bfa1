"""Bytes of a file as text, in bounded memory: byte order marks, UTF-16 without one, and Windows-1252 among UTF-8."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from typing import BinaryIO

from toolcell.errors import ToolError

MAX_LINE_CHARS = 1024 * 1024
SAMPLE_BYTES = 64 * 1024

_HANDLER = "toolcell_cp1252"
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"),
)  # fmt: skip


def _as_cp1252(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    wrong = error.object[error.start : error.end]
    return "".join(bytes([byte]).decode("cp1252", "replace") for byte in wrong), error.end


codecs.register_error(_HANDLER, _as_cp1252)


def open_text(source: BinaryIO, encoding: str | None = None) -> io.TextIOWrapper:
    """Return the text of a seekable binary file. Line ends stay as they are.

    `encoding`: None finds it out. Bytes that are no UTF-8 are read as Windows-1252, each on its own, so one bad byte
    in a gigabyte changes one character.

    Raises:
        ToolError: there is no such encoding.
    """
    sample = source.read(SAMPLE_BYTES)
    source.seek(0)
    name = encoding_of(sample) if encoding is None else _checked(encoding)
    errors = _HANDLER if name.startswith("utf-8") else "replace"
    return io.TextIOWrapper(source, encoding=name, errors=errors, newline="")


def _checked(encoding: str) -> str:
    try:
        "a".encode(encoding)
        known = codecs.lookup(encoding).name
    except (LookupError, ValueError, UnicodeError) as exc:
        raise ToolError(f"there is no text encoding {encoding!r:.60}", code="invalid_arguments") from exc
    if known in _NO_TEXT:
        raise ToolError(f"{encoding!r:.60} is no encoding of files", code="invalid_arguments")
    return "utf-8-sig" if known == "utf-8" else known


_NO_TEXT = frozenset({"punycode", "idna", "unicode_escape", "raw_unicode_escape", "undefined", "unicode-escape"})


def encoding_of(sample: bytes) -> str:
    """Return the encoding that a file begins in."""
    for mark, name in _MARKS:
        if sample.startswith(mark) and not (mark == codecs.BOM_UTF16_LE and sample.startswith(codecs.BOM_UTF32_LE)):
            return name
    for first, name in ((1, "utf-16-le"), (0, "utf-16-be")):  # every second byte of Latin text in UTF-16 is zero
        half = sample[first::2]
        if half.count(0) * 10 > len(half) * 7 and 0 not in sample[1 - first :: 2]:
            return name
    return "utf-8-sig"


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
