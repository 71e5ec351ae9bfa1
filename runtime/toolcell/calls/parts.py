"""What a result consists of: text, pictures and files, each checked when it is made."""

from __future__ import annotations

from typing import Any, Final

from toolcell.support.checks import check_kind, text_of
from toolcell_bridge.guest.pictures import picture_type
from toolcell_bridge.wire.frozen import frozen

TEXT_CURE = "use ToolResult.of(data) for data, or str(x)"


@frozen
class Text:
    """Text the model reads."""

    text: str

    def __post_init__(self) -> None:
        if type(self.text) is not str or not self.text.isascii():
            check_kind("Text(text)", self.text, str, cure=TEXT_CURE)
            object.__setattr__(self, "text", text_of(self.text))


@frozen
class Image:
    """A picture for models that can see: PNG, JPEG, GIF or WebP, whatever `media_type` it is given."""

    data: bytes
    media_type: str = "image/png"

    def __post_init__(self) -> None:
        _check_data("Image", self)
        object.__setattr__(self, "media_type", picture_type(self.data) or self.media_type)


@frozen
class File:
    """A file a call produced. One that is a picture has the media type of that picture."""

    name: str
    data: bytes
    media_type: str = "application/octet-stream"

    def __post_init__(self) -> None:
        check_kind("File(name)", self.name, str)
        _check_data("File", self)
        object.__setattr__(self, "media_type", picture_type(self.data) or self.media_type)


def _check_data(kind: str, part: Image | File) -> None:
    check_kind(
        f"{kind}(data)", part.data, bytes, bytearray, memoryview, cure='text becomes bytes with .encode("utf-8")'
    )
    check_kind(f"{kind}(media_type)", part.media_type, str)
    object.__setattr__(part, "data", bytes(part.data))


Part = Text | Image | File

MAX_IMAGES: Final = 10
MAX_IMAGE_BYTES: Final = 3_750_000
"""Most bytes of one image. Base64 makes it a third larger, and Anthropic takes 5 MB."""


def described_bytes(data: bytes) -> str:
    """Return what a model reads in place of bytes: `(image/png, 69 bytes)`, or `(69 bytes)`."""
    kind = picture_type(data)
    return f"({kind}, {len(data)} bytes)" if kind else f"({len(data)} bytes)"


def readable_leaf(value: object) -> object:
    """Return what a reader gets in the JSON of a result in place of what JSON does not have."""
    if isinstance(value, bytes | bytearray | memoryview):
        return described_bytes(bytes(value))
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    return str(value)


def described_part(part: Part) -> str | None:
    """Return what a model reads of a part. None of a picture: it is shown."""
    match part:
        case Text(text):
            return text
        case Image(data) if picture_type(data):
            return None
        case Image(data, media_type):
            return f"({media_type}, {len(data)} bytes: not a PNG, JPEG, GIF or WebP picture)"
        case File(name, data):
            return f"({name}, {len(data)} bytes)"


def part_data(part: Part) -> str | bytes:
    """Return what a script gets of a part: text, or the bytes of a picture or file."""
    return part.text if isinstance(part, Text) else part.data


def plain_part(part: Part) -> dict[str, Any]:
    """Return a part as plain data, without its bytes."""
    match part:
        case Text(text):
            return {"type": "text", "text": text}
        case Image(data, media_type):
            return {"type": "image", "media_type": media_type, "bytes": len(data)}
        case File(name, data, media_type):
            return {"type": "file", "name": name, "media_type": media_type, "bytes": len(data)}
