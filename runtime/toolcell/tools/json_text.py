"""Read JSON as models write it: in code fences, with raw line breaks or trailing commas, or broken off."""

from __future__ import annotations

import enum
import json
import re
from typing import Any

from pydantic_core import from_json


class ParseMode(enum.StrEnum):
    """How a text was read as JSON."""

    STRICT = "strict"
    """It is JSON."""
    REPAIRED = "repaired"
    """Complete, but with small mistakes: code fences, raw line breaks in strings, trailing commas."""
    PARTIAL = "partial"
    """It breaks off; what was there has been kept."""
    INVALID = "invalid"
    """It cannot be read."""


SAFE_MODES = frozenset({ParseMode.STRICT, ParseMode.REPAIRED})
"""Arguments read in any other way may lack what the model was about to say; such calls are not run."""

_FENCE = re.compile(r"\A\s*```(?:json)?\s*\n(?P<body>.*?)\n?```\s*\Z", re.DOTALL)
_MISTAKES = re.compile(r'(?P<string>"(?:[^"\\]|\\.)*+"?)|,(?=\s*+[}\]])', re.DOTALL)
"""Strings, finished or not, and commas before a closing bracket. Possessive, so that work is linear."""
_CONTROL = re.compile(r"[\x00-\x1f]")


def parse_json(text: str) -> tuple[Any, ParseMode]:
    """Read JSON that a model's stream may have left unfinished or slightly wrong.

    Shape: (value, mode); the value of invalid text is None. pydantic reads what breaks off; it takes no fences, no raw
    line breaks and no trailing commas, so these are mended before.
    """
    try:
        return json.loads(text), ParseMode.STRICT
    except (ValueError, RecursionError):
        pass
    if fenced := _FENCE.match(text):
        text = fenced["body"]
    text = _MISTAKES.sub(_mended, text)
    try:
        return json.loads(text), ParseMode.REPAIRED
    except (ValueError, RecursionError):
        pass
    try:
        from_json(text)
    except TypeError:  # a lone surrogate
        return None, ParseMode.INVALID
    except ValueError as exc:
        if "EOF while parsing" not in str(exc):  # something is wrong before the end
            return None, ParseMode.INVALID
    try:
        return from_json(text, allow_partial="trailing-strings"), ParseMode.PARTIAL
    except ValueError:
        return None, ParseMode.INVALID


def _mended(mistake: re.Match[str]) -> str:
    string = mistake["string"]
    return "" if string is None else _CONTROL.sub(lambda control: json.dumps(control[0])[1:-1], string)
