"""What a result consists of: text, pictures and files, each checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolcell.tools.checks import check_kind, text_of

TEXT_CURE = "use ToolResult.of(data) for data, or str(x)"


@dataclass(frozen=True, slots=True)
class Text:
    """Text the model reads."""

    text: str

    def __post_init__(self) -> None:
        if type(self.text) is not str or not self.text.isascii():
            check_kind("Text(text)", self.text, str, cure=TEXT_CURE)
            object.__setattr__(self, "text", text_of(self.text))


@dataclass(frozen=True, slots=True)
class Image:
    """A picture for models that can see."""

    data: bytes
    media_type: str = "image/png"

    def __post_init__(self) -> None:
        _check_data("Image", self)


@dataclass(frozen=True, slots=True)
class File:
    """A file a call produced."""

    name: str
    data: bytes
    media_type: str = "application/octet-stream"

    def __post_init__(self) -> None:
        check_kind("File(name)", self.name, str)
        _check_data("File", self)


def _check_data(kind: str, part: Image | File) -> None:
    check_kind(
        f"{kind}(data)", part.data, bytes, bytearray, memoryview, cure='text becomes bytes with .encode("utf-8")'
    )
    check_kind(f"{kind}(media_type)", part.media_type, str)
    object.__setattr__(part, "data", bytes(part.data))


Part = Text | Image | File

IMAGE_SIGNATURES: Mapping[str, bytes] = {
    "image/png": b"\x89PNG\r\n\x1a\n",
    "image/jpeg": b"\xff\xd8\xff",
    "image/gif": b"GIF8",
    "image/webp": b"RIFF",
}
"""Media types that models can see, and how their files begin: a provider refuses a request with anything else."""

MAX_IMAGES = 10
MAX_IMAGE_BYTES = 3_750_000
"""Of one image. Base64 makes it a third larger, and Anthropic takes 5 MB."""


def is_image(file: File) -> bool:
    """True for a file that models can see as a picture."""
    signature = IMAGE_SIGNATURES.get(file.media_type)
    return signature is not None and file.data.startswith(signature)


def plain_part(part: Part) -> dict[str, Any]:
    """Return a part as plain data, without its bytes."""
    match part:
        case Text(text):
            return {"type": "text", "text": text}
        case Image(data, media_type):
            return {"type": "image", "media_type": media_type, "bytes": len(data)}
        case File(name, data, media_type):
            return {"type": "file", "name": name, "media_type": media_type, "bytes": len(data)}
