"""Hand out files that scripts made or were given: pictures of checked kinds to look at, everything else to keep.

The name and the type that a script gives a file decide nothing. The answer may do nothing in the browser: it is
sandboxed, and its type is fixed.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

from starlette.responses import Response

from toolcell.support.text import one_line
from toolcell_bridge.guest.pictures import picture_type

SANDBOX: Final = "sandbox; default-src 'none'; frame-ancestors 'none'"
MAX_NAME_CHARS: Final = 150


def image_kind(data: bytes) -> str:
    """Return the type of a picture by its first bytes; empty for anything else."""
    return picture_type(data) or ""


def as_image(data: bytes) -> Response | None:
    """Return a picture to look at, or None when it is none."""
    kind = image_kind(data)
    return Response(data, headers={"Content-Security-Policy": SANDBOX}, media_type=kind) if kind else None


def as_download(name: str, data: bytes) -> Response:
    """Return a file to keep, whatever is in it."""
    headers = {"Content-Security-Policy": SANDBOX, "Content-Disposition": disposition(name)}
    return Response(data, headers=headers, media_type="application/octet-stream")


def disposition(name: str) -> str:
    """Return the header that names a file. Only its last part stays, and what is not a letter is encoded.

    Source: RFC 6266 and RFC 8187.
    """
    last = one_line(name.replace("\\", "/").rpartition("/")[2], MAX_NAME_CHARS).strip(". ") or "file"
    plain = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "_" for char in last)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(last, safe='')}"
