"""Pictures in data: bytes whose beginning says PNG, JPEG, GIF or WebP. In a script they can be saved and displayed."""

from __future__ import annotations

import os
from typing import Any, Final

SIGNATURES: Final = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)

MOST_CONTAINERS: Final = 4096
"""Lists and dicts of one answer in which pictures are looked for."""

_CONTAINERS: Final = frozenset({list, dict})


def picture_type(data: bytes) -> str | None:
    """Return the media type of a picture by its first bytes; None when the bytes are not a picture."""
    for signature, kind in SIGNATURES:
        if data.startswith(signature):
            return kind
    return "image/webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else None


class Picture(bytes):
    """The bytes of a picture that a tool returned."""

    __slots__ = ()

    @property
    def media_type(self) -> str:
        """`image/png`, `image/jpeg`, `image/gif` or `image/webp`."""
        return picture_type(self) or "application/octet-stream"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to a file of the workspace."""
        with open(path, "wb") as file:
            file.write(self)

    def __repr__(self) -> str:
        return f"<Picture {self.media_type}, {len(self)} bytes>"

    __str__ = __repr__


def with_pictures(value: Any) -> Any:
    """Return an answer in which bytes that are pictures are `Picture`. Lists and dicts are changed in place."""
    if type(value) is bytes:
        return Picture(value) if picture_type(value) else value
    level = [value] if type(value) in _CONTAINERS else []
    left = MOST_CONTAINERS
    while level and left > 0:
        below: list[Any] = []
        for container in level[:left]:
            kinds = set(map(type, container.values() if type(container) is dict else container))
            if bytes not in kinds and kinds.isdisjoint(_CONTAINERS):
                continue
            for key, item in list(container.items() if type(container) is dict else enumerate(container)):
                if type(item) is bytes and picture_type(item):
                    container[key] = Picture(item)
                elif type(item) in _CONTAINERS:
                    below.append(item)
        left -= len(level)
        level = below
    return value
