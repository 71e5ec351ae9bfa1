"""How much structure a message of an MCP server has: counted before it is parsed, for an empty list of two bytes
becomes an object of sixty."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from typing import Any, Final

import anyio.lowlevel
from pydantic import ValidationError

from toolcell.support.event_loop import TimeSlice

MAX_ELEMENTS: Final = 2**17
"""Lists, dicts and what is in them, in one message; so many are parsed or checked in 50 ms. A field counts as two: its
name becomes a text, which takes three times as long as a number."""
MAX_ASKED_ELEMENTS: Final = 2**14
"""Values in a request or notification of the server: models check all of them, more than once."""
OF_LONG_NUMBER: Final = 1_000
"""What each 400 digits of a number count as: it takes quadratic time to read, each time that the SDK reads it."""
_ALIKE: Final = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_NUMBER: Final = b"0" * 400
TOO_MANY: Final = (
    f"it has more than {MAX_ELEMENTS} lists, dicts, and items of them (a field counts as two, and 400 digits of a "
    f"number as {OF_LONG_NUMBER})"
)

MAX_BLOCKS = 1_000
"""Most blocks of one answer to a call; what comes after them is dropped."""
MAX_TOOLS = 5_000
"""Most tools of one server."""

_SLICE_BYTES: Final = 1 << 16


def at_most(data: bytes | bytearray) -> int:
    """Return a number that `elements` does not exceed. Much cheaper."""
    items, fields = len(data) - len(data.translate(None, b",[{")), data.count(b":")
    return max(items, 2 * fields) + OF_LONG_NUMBER * data.translate(_ALIKE).count(_LONG_NUMBER)


async def elements(data: bytes, most: int = MAX_ELEMENTS) -> int:
    """Return how many lists, dicts, items and fields a JSON text has, about; past `most`, any number above it.

    What stands in strings does not count. Other tasks go on meanwhile.
    """
    if (bound := at_most(data)) <= most:
        return bound
    count, is_inside, turn = 0, 0, TimeSlice()
    for piece in _pieces(data):
        bare = piece.replace(b"\\\\", b"").replace(b'\\"', b"")  # each quote that is left begins or ends a string
        parts = bare.split(b'"')
        count += at_most(b"".join(parts[is_inside::2]))
        if count > most:
            return count
        is_inside = (is_inside + len(parts) - 1) % 2
        await turn.give_way()
    return count


def _pieces(data: bytes, pair: bytes = b"\\") -> Iterator[bytes]:
    """Yield a JSON text in pieces, none of which ends between a backslash, or another first byte, and its second."""
    end = 0
    while end < len(data):
        start, end = end, end + _SLICE_BYTES
        piece = data[start:end]
        end += (len(piece) - len(piece.rstrip(pair))) % 2
        yield data[start:end]


_HALF: Final = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F][0-9a-fA-F]{2})"
)
"""An escape for half a character: one of the first half with no second behind it, or the reverse."""
_BEGINNINGS: Final = (rb"\ud", rb"\uD")
MAX_ESCAPES: Final = 2**16
"""Of halves, in one message: looking at each takes a third of a microsecond. With more, it stays as it is."""
MAX_GROWN_BYTES: Final = 2**20
"""By which marks of three bytes, for bytes that are not UTF-8, lengthen one message. With more, it stays as it is."""
_NO_TEXT: Final = b"\0\0"
"""JSON text has no such bytes."""


async def let_others_run() -> None:
    """Let other tasks run between two steps that take long. What has come meanwhile runs in the turn after the next."""
    await anyio.lowlevel.checkpoint()
    await anyio.lowlevel.checkpoint()


async def with_whole_characters(data: bytes) -> bytes:
    """Return a JSON text in which a mark stands for half a character, or for bytes that are not UTF-8.

    Other tasks go on between its steps.
    """

    async def replaced(text: bytes, before: bytes, after: bytes) -> bytes:
        parts = []
        for piece in _pieces(text, before[:1]):
            parts.append(piece.replace(before, after))
            await turn.give_way()
        return b"".join(parts)

    turn = TimeSlice()
    if rb"\u" in data and b"\0" not in data:
        escaped = await replaced(data, rb"\\", _NO_TEXT)  # an escaped backslash begins no escape
        await let_others_run()
        if 0 < sum(map(escaped.count, _BEGINNINGS)) <= MAX_ESCAPES:
            escaped = _HALF.sub(rb"\\ufffd", escaped)
            await let_others_run()
            data = await replaced(escaped, _NO_TEXT, rb"\\")
    try:
        data.decode()
    except UnicodeDecodeError:
        decoder, parts, grown = codecs.getincrementaldecoder("utf-8")("replace"), list[bytes](), 0
        for start in range(0, len(data), _SLICE_BYTES):
            piece = data[start : start + _SLICE_BYTES]
            parts.append(decoder.decode(piece).encode())
            if (grown := grown + len(parts[-1]) - len(piece)) > MAX_GROWN_BYTES:
                return data
            await turn.give_way()
        return b"".join([*parts, decoder.decode(b"", final=True).encode()])
    return data


MAX_CHECKED: Final = 5_000
"""Items that models check one by one, in one message: each may be five errors, and all of them are found at once."""


def too_many_errors(exc: ValidationError) -> str:
    """Return how many errors there are, where they are too many to list; else nothing."""
    return f"it has {exc.error_count()} errors" if exc.error_count() > MAX_LISTED_ERRORS else ""


def too_many_checked(most: int) -> str:
    """Say what `has_too_many` found."""
    return f"more than {most} items of it would have to be checked one by one"


TOO_MANY_CHECKED: Final = too_many_checked(MAX_CHECKED)
MANY_KEYS: Final = 50
"""More than a model has fields; what an object has past them is checked one by one."""
MAX_LISTED_ERRORS: Final = 100
"""Of one message. An error takes microseconds to be found, and much more to be described."""
_FREE: Final = frozenset({"structuredContent", "_meta", "arguments", "data", "input", "metadata"})
"""Members whose values no model looks at; texts at the most, as in the `arguments` of a prompt."""
_BY_NAME: Final = frozenset({"inputRequests", "inputResponses"})
"""Objects whose names a stranger chooses, and whose values models do look at."""
_OF_PROTOCOL: Final = "io.modelcontextprotocol/"
"""What is in `_meta` under such a name, models do look at."""


def has_too_many(part: Any, most: int = MAX_CHECKED) -> bool:
    """Return whether models would check more items of lists and of large objects one by one."""
    count, waiting = 0, [part]
    while waiting:
        part = waiting.pop()
        count += len(part) if isinstance(part, list) else max(0, len(part) - MANY_KEYS)
        if count > most:
            return True
        members = part.items() if isinstance(part, dict) else enumerate(part)
        parts = [(name, each) for name, each in members if isinstance(each, dict | list) and name not in _FREE]
        waiting += [[*each.values()] if name in _BY_NAME and isinstance(each, dict) else each for name, each in parts]
        if isinstance(part, dict) and isinstance(meta := part.get("_meta"), dict):
            waiting.append({name: each for name, each in meta.items() if name.startswith(_OF_PROTOCOL)})
    return False


def cut_lists(result: dict[str, Any]) -> None:
    """Cut the lists of a result whose items become objects of the SDK, to one more than is looked at."""
    for name, most in (("content", MAX_BLOCKS), ("tools", MAX_TOOLS + 1)):
        if isinstance(found := result.get(name), list):
            del found[most:]
