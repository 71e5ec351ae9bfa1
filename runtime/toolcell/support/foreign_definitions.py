"""Texts and schemas of tools that a stranger describes: an MCP server, a client of the service. Pure.

Texts lose control, bidi and invisible characters and what is too long. A schema is bounded in size and depth.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from toolcell.errors import RegistrationError
from toolcell.support.text import cut_text
from toolcell_bridge.wire.invisible import INVISIBLE

MAX_SCHEMA_TEXT_CHARS = 500
"""Most characters of a description inside a schema."""
MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 32

HIDDEN = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u2029\ud800-\udfff{INVISIBLE}]")
"""Control, bidi and invisible characters: they make a text look like another, or hide one."""
_ANNOTATIONS = frozenset({"description", "title", "$comment"})


def safe_text(text: str, most: int) -> str:
    """Return a stranger's text without hidden characters and what is too long."""
    return cut_text(HIDDEN.sub("", text[: most * 4]).strip(), most)[0]


def bounded_schema(schema: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return a copy of a schema with safe texts.

    Raises:
        RegistrationError: it is not JSON, too large or too deep, or has a name with hidden characters.
    """
    try:
        text = json.dumps(schema)
    except (RecursionError, ValueError, TypeError) as exc:
        raise RegistrationError(f"{what} is not JSON: {type(exc).__name__}") from exc
    if len(text) > MAX_SCHEMA_BYTES:
        raise RegistrationError(f"{what} has {len(text)} bytes, limit {MAX_SCHEMA_BYTES}")
    cleaned: dict[str, Any] = _clean(json.loads(text), what, 0)
    return cleaned


def _clean(part: Any, what: str, depth: int) -> Any:
    if depth > MAX_SCHEMA_DEPTH * 2:  # a level of a schema is two of JSON: `properties` and the property
        raise RegistrationError(f"{what} is nested deeper than {MAX_SCHEMA_DEPTH} levels")
    if isinstance(part, list):
        return [_clean(each, what, depth + 1) for each in part]
    if not isinstance(part, dict):
        return part
    cleaned = {}
    for key, value in part.items():
        if HIDDEN.search(key):
            raise RegistrationError(f"{what} has a name with control, bidi or invisible characters")
        if key in _ANNOTATIONS and isinstance(value, str):
            cleaned[key] = safe_text(value, MAX_SCHEMA_TEXT_CHARS)
        else:
            cleaned[key] = _clean(value, what, depth + 1)
    return cleaned
