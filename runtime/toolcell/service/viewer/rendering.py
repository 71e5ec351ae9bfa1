"""Make pages from templates. Every value is hostile text: it is escaped, and what a browser hides is spelled out."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.responses import HTMLResponse, Response

from toolcell.audit import Trust, visible
from toolcell.support.text import cut_text, one_line
from toolcell.support.times import time_of
from toolcell_bridge.guest.pictures import picture_type

TRUST_CLASS: Final = {Trust.VERIFIED: "good", Trust.UNSIGNED: "warn", Trust.UNVERIFIED: "warn", Trust.BROKEN: "bad"}
_GOOD: Final = frozenset({"ok", "pending", "collected"})
_OPEN: Final = frozenset({"unfinished", "suspended"})
MAX_TEXT_CHARS: Final = 20_000


def render(name: str, values: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Any:
    """Return a page as a response."""
    return HTMLResponse(to_text(name, values), status, headers)


def to_text(name: str, values: Mapping[str, Any]) -> str:
    """Return a page, or a part of one, as text that can be encoded."""
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
        "seconds": seconds,
        "size": size,
        "count": count,
        "outcome_class": outcome_class,
        "trust_class": lambda trust: TRUST_CLASS.get(trust, "warn"),
        "short": lambda text: cut_text(str(text), MAX_TEXT_CHARS)[0],
        "line": one_line,
    }
    return made


def when(at_ns: int | None) -> str:
    """Return a time in UTC, to the second."""
    return time_of(at_ns)[:19].replace("T", " ") if at_ns is not None else ""


def seconds(value: float | None) -> str:
    """Return a duration in the unit that suits it."""
    if value is None:
        return ""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1, 1e3, "ms"), (120, 1, "s"), (7200, 1 / 60, "min")):
        if value < limit:
            return f"{value * factor:.3g} {unit}"
    return f"{value / 3600:.3g} h"


def size(value: float | None) -> str:
    """Return a number of bytes."""
    if value is None:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def count(value: int | float | None) -> str:
    """Return a number with its thousands apart."""
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def outcome_class(outcome: str) -> str:
    """Return the class of an outcome, or of the status of a call."""
    return "good" if outcome in _GOOD else "open" if outcome in _OPEN else "bad"


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
