"""How much structure a message of an MCP server has: counted before it is parsed, for an empty list of two bytes
becomes an object of sixty."""

from __future__ import annotations

import re
from typing import Any, Final

from toolcell.support.event_loop import TimeSlice

MAX_ELEMENTS: Final = 2**17
"""Lists, dicts and what is in them, in one message. Parsing and checking so many takes the event loop some 100 ms."""
TOO_MANY: Final = f"it has more than {MAX_ELEMENTS} lists, dicts, and items of them"

MAX_BLOCKS = 1_000
"""Most blocks of one answer to a call; what comes after them is dropped."""
MAX_TOOLS = 5_000
"""Most tools of one server."""

_SLICE_BYTES: Final = 1 << 16
_OPEN: Final = (b",", b"[", b"{")


def at_most(data: bytes | bytearray) -> int:
    """Return a number that `elements` does not exceed. Much cheaper."""
    return sum(map(data.count, _OPEN))


async def elements(data: bytes, most: int = MAX_ELEMENTS) -> int:
    """Return how many lists, dicts, items and fields a JSON text has, about; past `most`, any number above it.

    What stands in strings does not count. Other tasks go on meanwhile.
    """
    if (bound := at_most(data)) <= most:
        return bound
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # each quote that is left begins or ends a string
    count, is_inside, turn = 0, 0, TimeSlice()
    for start in range(0, len(bare), _SLICE_BYTES):
        parts = bare[start : start + _SLICE_BYTES].split(b'"')
        count += at_most(b"".join(parts[is_inside::2]))
        if count > most:
            return count
        is_inside = (is_inside + len(parts) - 1) % 2
        await turn.give_way()
    return count


_ESCAPES = re.compile(
    rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)
_HALF: Final = 6
"""Bytes of one escape; a whole pair has twice as many, and an escaped backslash two."""


def with_whole_characters(data: bytes) -> bytes:
    """Return a JSON text in which a mark stands for half a character, or for bytes that are not UTF-8."""
    if b"\\u" in data:
        data = _ESCAPES.sub(lambda found: rb"\ufffd" if len(found[0]) == _HALF else found[0], data)
    try:
        data.decode()
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace").encode()
    return data


def cut_lists(result: dict[str, Any]) -> None:
    """Cut the lists of a result whose items become objects of the SDK, to one more than is looked at."""
    for name, most in (("content", MAX_BLOCKS), ("tools", MAX_TOOLS + 1)):
        if isinstance(found := result.get(name), list):
            del found[most:]
