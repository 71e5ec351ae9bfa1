"""Make pages from templates. Every value is hostile text: it is escaped, and what a browser hides is spelled out."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.responses import HTMLResponse, Response

from toolcell.audit import Trust
from toolcell.results import standing_of
from toolcell.support.text import cut_text, duration, one_line, size, visible
from toolcell.support.times import time_of
from toolcell_bridge.guest.pictures import picture_type

TRUST_CLASS: Final = {Trust.VERIFIED: "good", Trust.UNSIGNED: "warn", Trust.UNVERIFIED: "warn", Trust.BROKEN: "bad"}
MAX_TEXT_CHARS: Final = 20_000


def render(name: str, values: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Any:
    return HTMLResponse(to_text(name, values), status, headers)


def to_text(name: str, values: Mapping[str, Any]) -> str:
    return environment().get_template(f"{name}.html.jinja").render(values)


@functools.cache
def environment() -> Environment:
    """Return the templates. `finalize` sees every value before it is escaped, whatever a template forgets."""
    made = Environment(
        loader=PackageLoader("toolcell.service.viewer"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "when": when,
        "seconds": lambda value: "" if value is None else duration(value),
        "size": lambda value: "" if value is None else size(value),
        "count": count,
        "outcome_class": standing_of,
        "trust_class": lambda trust: TRUST_CLASS.get(trust, "warn"),
        "short": lambda text: cut_text(str(text), MAX_TEXT_CHARS)[0],
        "line": one_line,
    }
    return made


def when(at_ns: int | None) -> str:
    """Return a time in UTC, to the second."""
    return time_of(at_ns)[:19].replace("T", " ") if at_ns is not None else ""


def count(value: int | float | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


SANDBOX: Final = "sandbox; default-src 'none'; frame-ancestors 'none'"
MAX_NAME_CHARS: Final = 150


def as_image(data: bytes) -> Response | None:
    """Return a picture to look at, or None when it is none."""
    kind = picture_type(data)
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
