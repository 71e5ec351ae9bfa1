"""Write any value as strict JSON. Python's own writer writes NaN and Infinity, which no other reader takes."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Mapping
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


# Exact: what comes out of `from_exact` is what went into `exact_json_text`


BYTES, FLOAT, DICT = "$bytes", "$float", "$dict"
"""Keys of the objects that stand for what JSON does not have: {"$bytes": base64}, {"$float": "nan"}; and {"$dict": ...}
for a dict that would look like one of the three."""
FORMS = frozenset({BYTES, FLOAT, DICT})


def exact_json_text(data: object) -> str:
    """Return one JSON document from which plain data with bytes, NaN and infinities can be read again.

    Integers have all their digits. What is no plain data becomes its `str`.
    """
    try:
        text = json.dumps(data, ensure_ascii=False, default=_stand_in, allow_nan=False)
        is_plain = not any(f'"{form}"' in text for form in FORMS)
    except (ValueError, TypeError):
        is_plain, text = False, ""
    if not is_plain:
        text = json.dumps(_exact(data), ensure_ascii=False, default=str, allow_nan=False)
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _stand_in(value: object) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return {BYTES: ""}  # the text is written again
    return dict(value) if isinstance(value, Mapping) else str(value)


def _exact(value: Any) -> Any:
    match value:
        case bool() | int() | str() | None:
            return value
        case float():
            return value if math.isfinite(value) else {FLOAT: str(value)}
        case bytes() | bytearray() | memoryview():
            return {BYTES: base64.b64encode(value).decode()}
        case Mapping():
            exact = {each if isinstance(each, str) else str(each): _exact(value[each]) for each in value}
            return {DICT: exact} if len(exact) == 1 and FORMS & exact.keys() else exact
        case list() | tuple():
            return [_exact(each) for each in value]
    return str(value)


def from_exact(value: Any) -> Any:
    """Return what a parsed document of `exact_json_text` stands for.

    Raises:
        ValueError: a form has the wrong content.
    """
    match value:
        case list():
            return [from_exact(each) for each in value]
        case {"$bytes": str(text), **others} if not others:
            return _decoded(text)
        case {"$float": "nan" | "inf" | "-inf" as text, **others} if not others:
            return float(text)
        case {"$dict": dict(members), **others} if not others:
            return {name: from_exact(each) for name, each in members.items()}
        case dict() if len(value) == 1 and FORMS & value.keys():
            (name,) = value
            raise ValueError(f"{name} has the wrong content")
        case dict():
            return {name: from_exact(each) for name, each in value.items()}
    return value


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as exc:
        raise ValueError(f"$bytes has no base64: {exc}") from exc
