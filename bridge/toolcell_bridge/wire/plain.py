"""Plain values: what may be in a message's fields. Check them, pack them, and keep one packed until it is sent."""

from __future__ import annotations

from collections.abc import Generator
from itertools import chain
from types import NoneType
from typing import Any, Final

from msgpack import ExtType, Packer

from toolcell_bridge.wire.errors import LocalProtocolError, UnsendableValue, ValueTooLarge
from toolcell_bridge.wire.messages import MAX_ELEMENTS
from toolcell_bridge.wire.tables import TABLES, AnyTable

MAX_DEPTH: Final = 64
"""Lists and dicts inside one another, per field."""

_FIXARRAY: Final = 0x90
"""First byte of msgpack's short arrays, to which the number of entries is added."""

_STEP_CONTAINERS: Final = 4096

_FEW_CONTAINERS: Final = 8

_SCALARS: Final = frozenset({NoneType, bool, int, float, str, bytes})
_CONTAINERS: Final = frozenset({list, dict})
PLAIN: Final = _SCALARS | _CONTAINERS | TABLES
_TEXT: Final = frozenset({str})


class PackedValue:
    """A value that is checked and packed. It replaces the value in a message, which then does not pack it again.

    Raises:
        UnsendableValue, ValueTooLarge: when it is made, as `encode` would.
    """

    __slots__ = ("data", "elements", "kind", "tables")

    def __init__(self, value: object, what: str = "value") -> None:
        self.elements = check_plain(value, what)
        self.data, self.tables = pack_parts(value, what)
        self.kind = type(value)

    @property
    def size(self) -> int:
        """Bytes that it takes in a message."""
        return len(self.data) + (sum(each.nbytes for each in self.tables) if self.tables else 0)


def check_plain(
    value: object, what: str = "value", spent: int = 0, most: int = MAX_ELEMENTS, deepest: int = MAX_DEPTH
) -> int:
    """Check exact types, depth and number of elements at C speed, level by level; return `spent` plus elements.

    Does not check the size of ints and the validity of text: msgpack neither reads nor writes bad ones.

    Raises:
        UnsendableValue: something in it is of another type, or a key is not a str.
        ValueTooLarge: too deep or too many elements.
    """
    kind = type(value)
    if kind in _SCALARS:
        return spent
    if type(value) is PackedValue or kind in TABLES:
        elements: int = value.elements  # type: ignore[attr-defined]
        return _spend(elements, what, spent, most)
    if kind not in _CONTAINERS:
        raise UnsendableValue(what, f"{type_name(kind)} is not plain data")
    # Most are one dict or list of scalars, and need no level below.
    container: Any = value
    items = container if kind is list else container.values()
    if _SCALARS.issuperset(map(type, items)) and (kind is list or _TEXT.issuperset(map(type, container))):
        flat = spent + 1 + len(container) * (1 if kind is list else 2)
        if flat <= most:
            return flat
    level: list[Any] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > deepest:
            raise ValueTooLarge(what, depth, deepest, "levels deep")
        check = _check_few if len(level) <= _FEW_CONTAINERS else _check_containers
        level, spent = check(level, what, spent, most)
    return spent


def check_plain_in_steps(
    value: object, what: str, spent: int, most: int, deepest: int = MAX_DEPTH
) -> Generator[None, None, int]:
    """Do what `check_plain` does, in steps."""
    if type(value) not in _CONTAINERS:
        return check_plain(value, what, spent, most, deepest)
    level: list[Any] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > deepest:
            raise ValueTooLarge(what, depth, deepest, "levels deep")
        below: list[Any] = []
        for start in range(0, len(level), _STEP_CONTAINERS):
            yield
            found, spent = _check_containers(level[start : start + _STEP_CONTAINERS], what, spent, most)
            below += found
        level = below
    return spent


def _check_few(level: list[Any], what: str, spent: int, most: int) -> tuple[list[Any], int]:
    """Do what `_check_containers` does: three times as fast for a few containers, and slower for many."""
    below: list[Any] = []
    elements = 0
    for container in level:
        is_dict = type(container) is dict
        elements += 1 + len(container) * (1 + is_dict)
        if is_dict and not _TEXT.issuperset(map(type, container)):
            return _check_containers(level, what, spent, most)  # which says what is wrong
        items = container.values() if is_dict else container
        if not _SCALARS.issuperset(map(type, items)):
            below += [item for item in items if type(item) not in _SCALARS]
    if not _CONTAINERS.issuperset(map(type, below)):
        return _check_containers(level, what, spent, most)
    return below, _spend(elements, what, spent, most)


def _check_containers(level: list[Any], what: str, spent: int, most: int) -> tuple[list[Any], int]:
    """Check lists and dicts; return those directly in them, and `spent` plus the elements."""
    dicts = [each for each in level if type(each) is dict]
    parts: list[Any] = level if not dicts else [each for each in level if type(each) is list]
    spent = _spend(len(level) + sum(map(len, level)) + sum(map(len, dicts)), what, spent, most)
    if not _TEXT.issuperset(map(type, chain.from_iterable(dicts))):
        raise UnsendableValue(what, "a dict in it has a key that is not a str")
    parts += map(dict.values, filter(None, dicts))
    kinds = set(map(type, chain.from_iterable(parts)))
    if not kinds <= PLAIN:
        names = ", ".join(sorted(map(type_name, kinds - PLAIN)))
        raise UnsendableValue(what, f"{names} in it is not plain data")
    if not kinds.isdisjoint(TABLES):
        tables = [item for item in chain.from_iterable(parts) if type(item) in TABLES]
        spent = _spend(sum(each.elements for each in tables), what, spent, most)
    if kinds.isdisjoint(_CONTAINERS):
        return [], spent
    return [item for item in chain.from_iterable(parts) if type(item) in _CONTAINERS], spent


def type_name(kind: type) -> str:
    """Return the name a class was made with, whatever its metaclass says."""
    name: str = type.__dict__["__name__"].__get__(kind)
    return name[:80]


def _spend(elements: int, what: str, spent: int, most: int) -> int:
    if spent + elements > most:
        raise ValueTooLarge(what, spent + elements, most, "elements")
    return spent + elements


def is_sendable(value: object) -> bool:
    """True when a message can hold a value as it is."""
    try:
        check_plain(value)
        pack_parts(value, "value")
    except (UnsendableValue, ValueTooLarge):
        return False
    return True


def packed_size(value: object) -> int:
    """Return how many bytes a value takes on the wire.

    Raises:
        UnsendableValue, ValueTooLarge: as `encode` would.
    """
    return PackedValue(value).size


def check_texts(value: Any, what: str, spent: int, most: int, deepest: int = 1) -> int:
    """Check that a list or dict holds strings and nothing else, so that it has one level."""
    texts: list[object] = list(value)
    if type(value) is dict:
        texts += value.values()
    if not _TEXT.issuperset(map(type, texts)):
        raise LocalProtocolError(f"{what} may only hold strings")
    return _spend(1 + len(texts), what, spent, most)


# One for the process: it spares an allocation per message. It is only given exact plain types, so no Python code
# runs while it packs, and no other thread can enter it half way.
_packer: Final = Packer()


def pack(value: object, what: str) -> bytes:
    try:
        packed: bytes = _packer.pack(value)
    except (OverflowError, TypeError, ValueError) as exc:
        raise _unsendable(what, exc) from exc
    return packed


TABLE: Final = 1
"""Extension type of the place of an array or a table in a value. It holds nothing: they follow in this order."""


def pack_parts(value: object, what: str) -> tuple[bytes, list[AnyTable]]:
    """Pack a value, and return the arrays and tables in it, which follow it.

    Raises:
        UnsendableValue: as `pack`.
    """
    try:
        return _packer.pack(value), []
    except TypeError:
        pass  # there may be tables in it
    except (OverflowError, ValueError) as exc:
        raise _unsendable(what, exc) from exc
    tables: list[AnyTable] = []

    def place(found: Any) -> ExtType:
        if type(found) not in TABLES:
            raise TypeError(f"{type_name(type(found))} is not plain data")
        tables.append(found)
        return ExtType(TABLE, b"")

    try:
        return Packer(default=place).pack(value), tables
    except (OverflowError, TypeError, ValueError) as exc:
        raise _unsendable(what, exc) from exc


def _unsendable(what: str, exc: Exception) -> UnsendableValue:
    match exc:
        case OverflowError():
            return UnsendableValue(what, "an int in it does not fit 64 bit")
        case UnicodeEncodeError():
            return UnsendableValue(what, f"text in it is not valid Unicode ({exc.reason})")
    return UnsendableValue(what, str(exc))


def pack_around(values: tuple[Any, ...], what: str) -> tuple[bytes, list[AnyTable]]:
    """Pack a message's tag and fields, of which some are packed already. No message has more than 15 of them."""
    tables: list[AnyTable] = []
    parts = []
    try:
        for value in values:
            if type(value) in _SCALARS:
                parts.append(_packer.pack(value))
                continue
            data, found = (value.data, value.tables) if type(value) is PackedValue else pack_parts(value, what)
            parts.append(data)
            tables += found
    except (OverflowError, ValueError) as exc:
        raise _unsendable(what, exc) from exc
    return bytes((_FIXARRAY | len(values),)) + b"".join(parts), tables
