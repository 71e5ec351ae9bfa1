"""Tell text from binary data, and find out how text is encoded."""

from __future__ import annotations

import base64
import codecs
from typing import Final, Literal

from toolcell.errors import ToolError

Encoding = Literal["auto", "utf-8", "utf-16", "latin-1", "base64"]

_MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # begins as UTF-16 does
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def decode(data: bytes, encoding: Encoding = "auto") -> tuple[str, str]:
    """Return a text and the encoding it was in. `auto`: by its byte order mark, else UTF-8, else Latin-1.

    Raises:
        ToolError: it is no text of this encoding; `auto` takes data with null bytes for binary.
    """
    if encoding == "base64":
        return base64.b64encode(data).decode("ascii"), "base64"
    if encoding != "auto":
        return _decode(data, encoding), encoding
    for mark, name in _MARKS:
        if data.startswith(mark):
            return _decode(data, name), name
    if b"\0" in data:
        raise ToolError(f'binary file of {len(data)} bytes; read it with encoding "base64"')
    try:
        return data.decode("utf-8"), "utf-8"
    except UnicodeDecodeError:
        return data.decode("latin-1"), "latin-1"


def _decode(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as exc:
        raise ToolError(
            f'not {encoding} text: {exc.reason} at byte {exc.start}; read it with encoding "base64" or "latin-1"'
        ) from exc


def encode(text: str, encoding: Encoding = "auto") -> bytes:
    """Return the bytes of a text. `auto` is UTF-8; `base64`: the bytes that the text stands for.

    Raises:
        ToolError: the text has a character that this encoding has not, or is no base64.
    """
    try:
        if encoding == "base64":
            return base64.b64decode(text, validate=True)
        return text.encode("utf-8" if encoding == "auto" else encoding)
    except UnicodeEncodeError as exc:
        bad = f"{text[exc.start]!a}"
        raise ToolError(f"{encoding} has no {bad}, character {exc.start} of the content") from exc
    except ValueError as exc:
        raise ToolError(f"the content is not base64: {exc}") from exc
