"""What a notebook shows of a result's files: pictures, sound and film, text, and links that save the others.

What a file is, its content says, and not the script that made it. HTML and everything unknown is only saved: a browser
never renders it.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from toolcell.support.text import cut_text
from toolcell_bridge.guest.pictures import picture_type

MAX_SHOWN_BYTES: Final = 4 << 20
"""Most bytes of all files together: a notebook keeps them."""

MAX_TEXT_CHARS: Final = 5_000

SIGNATURES: Final = (
    (0, b"RIFF", 8, b"WAVE", "audio/wav"),
    (0, b"ID3", 0, b"", "audio/mpeg"),
    (0, b"fLaC", 0, b"", "audio/flac"),
    (0, b"OggS", 0, b"", "audio/ogg"),
    (4, b"ftyp", 0, b"", "video/mp4"),
    (0, b"\x1aE\xdf\xa3", 0, b"", "video/webm"),
)
"""Two places and the bytes that stand there, and the media type."""


@dataclass(frozen=True, slots=True)
class ShownFile:
    """One file."""

    name: str
    about: str
    """Media type and size, or what went wrong."""
    kind: str = ""
    """`image`, `audio` or `video`."""
    url: str = ""
    """URL of an image, sound or film: a `data:` URL."""
    saved: str = ""
    """A `data:` URL of any other file, as bytes, which a browser only saves."""
    text: str = ""
    """The beginning of a text."""


def shown_files(files: Iterable[Any]) -> Iterator[ShownFile]:
    """Yield what is shown of each `OutputFile`."""
    room = MAX_SHOWN_BYTES
    for each in files:
        about, data = each.problem or f"{each.media_type}, {each.size} bytes", each.data
        if data is None or len(data) > room:
            yield ShownFile(each.name, about)
            continue
        room -= len(data)
        packed = base64.b64encode(data).decode("ascii")
        media_type = _media_type(data)
        yield ShownFile(
            each.name,
            about,
            kind=media_type.partition("/")[0],
            url=f"data:{media_type};base64,{packed}" if media_type else "",
            saved="" if media_type else f"data:application/octet-stream;base64,{packed}",
            text="" if media_type else _text(data),
        )


def _media_type(data: bytes) -> str:
    """Return the media type of a picture, sound or film, or an empty text."""
    if picture := picture_type(data):
        return picture
    for start, first, then, second, media_type in SIGNATURES:
        if data.startswith(first, start) and data.startswith(second, then):
            return media_type
    # As an image, an SVG runs no script and loads nothing.
    head = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n")
    is_svg = head.startswith(b"<svg") or (head.startswith((b"<?xml", b"<!DOCTYPE svg")) and b"<svg" in head)
    return "image/svg+xml" if is_svg else ""


def _text(data: bytes) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return ""
    return "" if "\0" in text else cut_text(text, MAX_TEXT_CHARS)[0]
