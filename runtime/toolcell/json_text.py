"""Write any value as strict JSON. Python's own writer writes NaN and Infinity, which no other reader takes."""

from __future__ import annotations

import json
import math
import re
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")


def json_text(data: object, *, indent: int | None = None, is_ascii: bool = False) -> str:
    """Return one JSON document. What JSON does not have, NaN and infinities included, becomes its `str`.

    `is_ascii`: with an escape for every other character. Without, only for those that no encoding has.
    """
    try:
        text = json.dumps(data, indent=indent, ensure_ascii=is_ascii, default=str, allow_nan=False)
    except (ValueError, TypeError):
        text = json.dumps(_plain(data), indent=indent, ensure_ascii=is_ascii, default=str, allow_nan=False)
    return text if is_ascii else _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _plain(value: Any) -> Any:
    """Return `value` with a text for each number and each key that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {_key(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _key(key: Any) -> Any:
    is_json = key is None or isinstance(key, str | int) or (isinstance(key, float) and math.isfinite(key))
    return key if is_json else str(key)
