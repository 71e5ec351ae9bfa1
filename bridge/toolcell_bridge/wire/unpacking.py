"""Unpack the body of a message in steps, so that whoever reads it can do something else in between.

Counts what it builds. The body is hostile: what it announces, how deep it is and how much it holds is checked before
memory is set aside for it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Final, TypeAlias

from msgpack import OutOfData, Unpacker

from toolcell_bridge.wire.columns import Buffer
from toolcell_bridge.wire.errors import RemoteProtocolError

_STEP_BYTES: Final = 16 * 1024
_STEP_ITEMS: Final = 2048

_LARGE_BYTES: Final = 2 * 1024 * 1024
"""A longer body is unpacked one value after another: msgpack counts no elements while it builds lists inside one
another, and many short texts take twenty times their bytes."""

_FIXMAP: Final = 0x80
_FIXARRAY: Final = 0x90
_FIXARRAY_END: Final = 0x9F
_ARRAY_16: Final = 0xDC
_MAP_16: Final = 0xDE
_MAP_32: Final = 0xDF
"""First bytes of msgpack's maps and arrays. The short forms add the number of entries."""


Extension: TypeAlias = Callable[[int, bytes], Any]


def _refuse_extension(code: int, data: bytes) -> None:
    raise RemoteProtocolError(f"extension type {code}")


def unpack_in_steps(
    body: Buffer, most: int, deepest: int, extension: Extension = _refuse_extension
) -> Generator[None, None, object]:
    """Unpack a body that may claim huge lists, and return its value. `deepest`: levels that a long body may have.

    `extension` is called with the type and the data of each extension.

    Raises:
        RemoteProtocolError, ValueError: it is not msgpack, or holds more than `most` elements.
    """
    if len(body) > _LARGE_BYTES:
        return (yield from _unpack_one_by_one(body, most, deepest, extension))
    _walk(body)
    return (yield from _unpack_pieces(body, most, extension))


def _walk(body: Buffer) -> None:
    walker = Unpacker(max_buffer_size=len(body))
    walker.feed(body)
    walker.skip()  # a list that announces more than the body holds ends here, before memory is set aside for it
    if walker.tell() != len(body):
        raise RemoteProtocolError("bytes after the end of the message")


def _unpack_pieces(body: Buffer, most: int, extension: Extension) -> Generator[None, None, object]:
    """Give msgpack one piece after another. It goes on where it was."""
    left = most

    def spend(items: Any) -> Any:
        nonlocal left
        left -= 1 + (len(items) if type(items) is list else 2 * len(items))
        if left < 0:
            raise RemoteProtocolError(f"more than {most} elements in one message")
        return items

    hook = spend if len(body) > most else None  # each byte is at most one element
    source = Unpacker(
        max_buffer_size=len(body),
        list_hook=hook,
        object_hook=hook,
        ext_hook=extension,
        max_array_len=most,
        max_map_len=most,
    )
    whole = memoryview(body)
    for start in range(0, len(body), _STEP_BYTES):
        if start:
            yield
        source.feed(whole[start : start + _STEP_BYTES])
        try:
            return source.unpack()
        except OutOfData:
            continue
    raise RemoteProtocolError("the message ends too soon")


def _unpack_one_by_one(body: Buffer, most: int, deepest: int, extension: Extension) -> Generator[None, None, object]:
    """Unpack a body and count each list and dict before it is built."""
    source = Unpacker(max_buffer_size=len(body), ext_hook=extension)
    source.feed(body)
    above: list[tuple[bool, int, list[Any]]] = []
    is_map, left, items, budget = False, 1, [], most
    until_step = _STEP_ITEMS
    while True:
        while left:
            left -= 1
            until_step -= 1
            if not until_step:
                until_step = _STEP_ITEMS
                yield
            code = body[source.tell()]
            if not (_FIXMAP <= code <= _FIXARRAY_END or _ARRAY_16 <= code <= _MAP_32):
                items.append(source.unpack())
                continue
            above.append((is_map, left, items))
            is_map = code < _FIXARRAY or code >= _MAP_16
            left, items = 2 * source.read_map_header() if is_map else source.read_array_header(), []
            budget -= 1 + left
            if budget < 0 or len(above) > deepest:
                raise RemoteProtocolError(f"more than {most} elements or {deepest} levels in one message")
        if not above:
            break
        closed = dict(zip(items[::2], items[1::2], strict=True)) if is_map else items
        is_map, left, items = above.pop()
        items.append(closed)
    if source.tell() != len(body):
        raise RemoteProtocolError("bytes after the end of the message")
    return items[0]
