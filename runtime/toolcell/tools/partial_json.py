"""Reading JSON that a model's stream may have left unfinished or slightly wrong, and saying how well it went.

One pass over the text, no backtracking: work is linear in its length.
"""

from __future__ import annotations

import enum
import json
import re
from typing import Any

MAX_DEPTH = 64


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
_CLOSERS = {"{": "}", "[": "]"}
_LITERALS = ("true", "false", "null")


def parse_json(text: str) -> tuple[Any, ParseMode]:
    """Shape: (value, mode); the value of invalid text is None."""
    try:
        return json.loads(text), ParseMode.STRICT
    except (ValueError, RecursionError):
        pass
    if fenced := _FENCE.match(text):
        text = fenced["body"]
    repaired, is_complete = _Repair(text).run()
    try:
        value = json.loads(repaired)
    except (ValueError, RecursionError):
        return None, ParseMode.INVALID
    return value, ParseMode.REPAIRED if is_complete else ParseMode.PARTIAL


class _Repair:
    """Copies text, escaping raw control characters in strings, dropping trailing commas, closing what is open."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._out: list[str] = []
        self._open: list[str] = []
        self._safe = 0
        """Length of `_out` up to the last point where closing everything gives JSON."""

    def run(self) -> tuple[str, bool]:
        """Shape: (text that may be JSON, whether the original was complete)."""
        position, text = 0, self._text
        while position < len(text):
            position = self._string(position) if text[position] == '"' else self._other(position)
            if position < 0:
                return self._cut_off(), False
        if self._open:
            return self._cut_off(), False
        return "".join(self._out), True

    def _other(self, position: int) -> int:
        char = self._text[position]
        if char in _CLOSERS:
            if len(self._open) >= MAX_DEPTH:
                return -1
            self._open.append(_CLOSERS[char])
            self._mark(char)
        elif char in "}]":
            self._drop_comma()
            if self._open:
                self._open.pop()
            self._mark(char)
        elif char == ",":
            self._safe = len(self._out)
            self._out.append(char)
        else:
            self._out.append(char)
        return position + 1

    def _string(self, start: int) -> int:
        """Copy one string; -1 when it does not end."""
        text, position = self._text, start + 1
        copied = ['"']
        while position < len(text):
            char = text[position]
            if char == "\\":
                escape = text[position : position + (6 if text[position + 1 : position + 2] == "u" else 2)]
                position += len(escape)
                if position < len(text):  # else it may be unfinished, and the string is in any case
                    copied.append(escape)
                continue
            position += 1
            if char == '"':
                self._out.append("".join([*copied, char]))
                return position
            copied.append(json.dumps(char)[1:-1] if char < " " else char)
        self._keep_unfinished(copied)
        return -1

    def _keep_unfinished(self, copied: list[str]) -> None:
        """A value's beginning is worth keeping, a key's is not."""
        before = "".join(self._out).rstrip()
        inside_object = bool(self._open) and self._open[-1] == "}"
        if inside_object and not before.endswith(":"):
            return
        self._out.append("".join(copied) + '"')
        self._safe = len(self._out)

    def _mark(self, char: str) -> None:
        self._out.append(char)
        self._safe = len(self._out)

    def _drop_comma(self) -> None:
        index = len(self._out) - 1
        while index >= 0 and self._out[index].isspace():
            index -= 1
        if index >= 0 and self._out[index] == ",":
            del self._out[index]

    def _cut_off(self) -> str:
        closing = "".join(reversed(self._open))
        tail = "".join(self._out[self._safe :])
        whole = "".join(self._out[: self._safe])
        for candidate in (whole + tail.rstrip().rstrip(","), whole):
            try:
                json.loads(candidate + closing)
            except (ValueError, RecursionError):
                continue
            return candidate + closing
        return whole + closing
