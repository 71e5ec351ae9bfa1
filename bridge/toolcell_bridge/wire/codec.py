"""Messages to frames and back: msgpack arrays of a tag and the message's fields in order.

Decoding checks size, depth, number of elements, number of fields and the exact type of each before it makes a message.
`Connection` checks which message may come when.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from types import NoneType
from typing import Any, Final, TypeAlias

from msgpack import Packer, Unpacker, unpackb

from toolcell_bridge.wire.errors import LocalProtocolError, RemoteProtocolError, UnsendableValue, ValueTooLarge
from toolcell_bridge.wire.framing import MAX_FRAME_BYTES, frame
from toolcell_bridge.wire.messages import TAGS, Log, Message

MAX_DEPTH: Final = 64
"""Lists and dicts inside one another, per field."""

MAX_ELEMENTS: Final = 2**20
"""Lists, dicts, and the items, keys and values in them, in one message. One wire byte can become 88 in memory (an
empty list and its place in another), so the length of a frame alone does not bound what its decoding holds."""

_SMALL_BYTES: Final = 512
"""A body this short cannot break the element limit, and cannot announce lists that add up to a megabyte."""

_FIXARRAY: Final = 0x90
"""First byte of a msgpack array of no elements."""

_SCALARS: Final = frozenset({NoneType, bool, int, float, str, bytes})
_CONTAINERS: Final = frozenset({list, dict})
_PLAIN: Final = _SCALARS | _CONTAINERS
_TEXT: Final = frozenset({str})


class PackedValue:
    """A value that is checked and packed. It replaces the value in a message, which then does not pack it again."""

    __slots__ = ("data", "elements", "kind")

    def __init__(self, value: object, what: str) -> None:
        self.elements = check_plain(value, what)
        self.data = _pack(value, what)
        self.kind = type(value)


def pack_value(value: object, what: str = "value") -> Any:
    """Check and pack a value. Returns a `PackedValue`, which a message takes in place of the value.

    Raises:
        UnsendableValue, ValueTooLarge: as `encode` would.
    """
    return PackedValue(value, what)


def encode(message: Message, max_frame_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Return the message as one frame, held to everything the other end will check.

    Raises:
        LocalProtocolError: not a message, or a field is of the wrong type.
        UnsendableValue: a value is not plain, or an int or str in it has no form on the wire.
        ValueTooLarge: too deep, too many elements, or too many bytes.
    """
    form = _FORM_OF_TYPE.get(type(message))
    if form is None:
        raise LocalProtocolError(f"{type_name(type(message))} is not a message")
    values = form.values(message)
    form.check(values)
    name = form.message.__name__
    body = _pack_around(values, name) if PackedValue in map(type, values) else _pack(values, name)
    return frame(body, max_frame_bytes)


def decode(body: bytes | bytearray) -> Message:
    """Return the message of one frame's body.

    Raises:
        RemoteProtocolError: whatever is wrong with it. Nothing else escapes.
    """
    try:
        values = unpackb(body) if len(body) <= _SMALL_BYTES else _unpack_large(body)
        if type(values) is not list or not values or type(values[0]) is not int:
            raise RemoteProtocolError("a frame holds no tagged message")
        form = _FORM_OF_TAG.get(values[0])
        if form is None:
            raise RemoteProtocolError(f"unknown tag {values[0]}")
        form.check(values)
        return form.message(*values[1:])
    except RemoteProtocolError:
        raise
    except Exception as exc:  # whatever hostile bytes provoke in a parser is their sender's doing
        raise RemoteProtocolError(f"illegal frame: {type(exc).__name__} {exc!s:.200}".rstrip()) from exc


def check_plain(value: object, what: str = "value", spent: int = 0) -> int:
    """Check exact types, depth and number of elements at C speed, level by level; return `spent` plus elements.

    Does not check the size of ints and the validity of text: msgpack neither reads nor writes bad ones.

    Raises:
        UnsendableValue: something in it is of another type, or a key is not a str.
        ValueTooLarge: too deep or too many elements.
    """
    kind = type(value)
    if kind in _SCALARS:
        return spent
    if kind is PackedValue:
        return _spend(value.elements, what, spent)  # type: ignore[attr-defined]
    if kind not in _CONTAINERS:
        raise UnsendableValue(what, f"{type_name(kind)} is not plain data")
    level: list[Any] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueTooLarge(what, depth, MAX_DEPTH, "levels deep")
        below: list[Any] = []
        for container in level:
            items = container
            spent += 1 + len(container)
            if type(container) is dict:
                if not _TEXT.issuperset(map(type, container)):
                    raise UnsendableValue(what, "a dict in it has a key that is not a str")
                spent += len(container)
                items = container.values()
            kinds = set(map(type, items))
            if not kinds <= _PLAIN:
                names = ", ".join(sorted(map(type_name, kinds - _PLAIN)))
                raise UnsendableValue(what, f"{names} in it is not plain data")
            if not kinds.isdisjoint(_CONTAINERS):
                below += [item for item in items if type(item) in _CONTAINERS]
            if spent > MAX_ELEMENTS:
                raise ValueTooLarge(what, spent, MAX_ELEMENTS, "elements")
        level = below
    return spent


def _spend(elements: int, what: str, spent: int) -> int:
    if spent + elements > MAX_ELEMENTS:
        raise ValueTooLarge(what, spent + elements, MAX_ELEMENTS, "elements")
    return spent + elements


def type_name(kind: type) -> str:
    """Return the name a class was made with, whatever its metaclass says."""
    name: str = type.__dict__["__name__"].__get__(kind)
    return name[:80]


def packed_size(value: object, what: str = "value") -> int:
    """Return how many bytes a value takes on the wire.

    Raises:
        UnsendableValue, ValueTooLarge: as `encode` would.
    """
    return len(PackedValue(value, what).data)


# One for the process: it spares an allocation per message. It is only given exact plain types, so no Python code
# runs while it packs, and no other thread can enter it half way.
_packer: Final = Packer()


def _pack(value: object, what: str) -> bytes:
    try:
        packed: bytes = _packer.pack(value)
    except OverflowError as exc:
        raise UnsendableValue(what, "an int in it does not fit 64 bit") from exc
    except UnicodeEncodeError as exc:
        raise UnsendableValue(what, f"text in it is not valid Unicode ({exc.reason})") from exc
    except (TypeError, ValueError) as exc:
        raise UnsendableValue(what, str(exc)) from exc
    return packed


def _pack_around(values: tuple[Any, ...], what: str) -> bytes:
    """Pack a message's tag and fields, of which some are packed already. No message has more than 15 of them."""
    parts = (value.data if type(value) is PackedValue else _pack(value, what) for value in values)
    return bytes((_FIXARRAY | len(values),)) + b"".join(parts)


def _unpack_large(body: bytes | bytearray) -> object:
    """Unpack a body that may claim huge lists: walk it without building anything, then build it and count."""
    _walk(body)
    left = MAX_ELEMENTS

    def spend(items: Any) -> Any:
        nonlocal left
        left -= 1 + (len(items) if type(items) is list else 2 * len(items))
        if left < 0:
            raise RemoteProtocolError(f"more than {MAX_ELEMENTS} elements in one message")
        return items

    def refuse(code: int, data: bytes) -> None:
        raise RemoteProtocolError(f"extension type {code}")

    return unpackb(
        body,
        list_hook=spend,
        object_hook=spend,
        ext_hook=refuse,
        max_array_len=MAX_ELEMENTS,
        max_map_len=MAX_ELEMENTS,
    )


def _walk(body: bytes | bytearray) -> None:
    walker = Unpacker(max_buffer_size=len(body))
    walker.feed(body)
    walker.skip()  # a list that announces more than the body holds ends here, before memory is set aside for it
    if walker.tell() != len(body):
        raise RemoteProtocolError("bytes after the end of the message")


def _check_texts(value: Any, what: str, spent: int) -> int:
    """Check that a list or dict holds strings and nothing else."""
    texts: list[object] = list(value)
    if type(value) is dict:
        texts += value.values()
    if not _TEXT.issuperset(map(type, texts)):
        raise LocalProtocolError(f"{what} may only hold strings")
    return spent + 1 + len(texts)


_Check: TypeAlias = Callable[[Any, str, int], int]

_KINDS: Final[dict[str, tuple[frozenset[type], _Check | None]]] = {
    "bool": (frozenset({bool}), None),
    "int": (frozenset({int}), None),
    "int | None": (frozenset({int, NoneType}), None),
    "float | None": (frozenset({float, NoneType}), None),
    "str": (frozenset({str}), None),
    "bytes": (frozenset({bytes}), None),
    "list[str]": (frozenset({list}), _check_texts),
    "dict[str, str]": (frozenset({dict}), _check_texts),
    "dict[str, Plain]": (frozenset({dict}), check_plain),
    "dict[str, Plain] | None": (frozenset({dict, NoneType}), check_plain),
    "Plain": (_PLAIN, check_plain),
}
"""For each annotation in messages.py: the exact types of the field, and the check of what is inside it."""


@dataclass(frozen=True, slots=True)
class _Form:
    """One message's form on the wire, derived once from its dataclass."""

    tag: int
    message: type[Message]
    values: Callable[[Message], tuple[object, ...]]
    """The tag and the fields, in order."""
    shapes: frozenset[tuple[type, ...]]
    """Every legal sequence of exact types, so that one lookup judges number and type of all fields."""
    deep: tuple[tuple[int, str, _Check], ...]
    """Index, name and check of the fields that have an inside."""

    def check(self, values: tuple[Any, ...] | list[Any]) -> None:
        shape = tuple(map(type, values))
        if shape not in self.shapes and not self._fits_packed(values):
            self._blame_value(values)
            names = ", ".join(map(type_name, shape[1:20]))
            raise LocalProtocolError(f"{self.message.__name__}({names}) has the wrong fields")
        spent = 1 + len(values)
        for index, name, check in self.deep:
            spent = check(values[index], name, spent)
        if self.message is Log and values[1] not in (1, 2):
            raise LocalProtocolError("Log.stream is neither 1 nor 2")

    def _fits_packed(self, values: tuple[Any, ...] | list[Any]) -> bool:
        kinds = (value.kind if type(value) is PackedValue else type(value) for value in values)
        return tuple(kinds) in self.shapes

    def _blame_value(self, values: tuple[Any, ...] | list[Any]) -> None:
        for index, name, check in self.deep:
            if check is check_plain and index < len(values):
                check_plain(values[index], name)


def _form(tag: int, message: type[Message]) -> _Form:
    names = [field.name for field in fields(message)]
    kinds = [_KINDS[str(field.type)] for field in fields(message)]
    get = attrgetter(*names)
    if len(names) == 1:
        values: Callable[[Message], tuple[object, ...]] = lambda message: (tag, get(message))  # noqa: E731
    else:
        values = lambda message: (tag, *get(message))  # noqa: E731
    deep = [
        (index, f"{message.__name__}.{name}", check)
        for index, (name, (_, check)) in enumerate(zip(names, kinds, strict=True), start=1)
        if check is not None
    ]
    shapes = frozenset(itertools.product({int}, *(types for types, _ in kinds)))
    return _Form(tag, message, values, shapes, tuple(deep))


_FORM_OF_TAG: Final = {tag: _form(tag, message) for tag, message in TAGS.items()}
_FORM_OF_TYPE: Final[dict[type, _Form]] = {form.message: form for form in _FORM_OF_TAG.values()}
