"""Frozen dataclasses to msgpack arrays of a tag and their fields, and back. Whatever arrives is checked first.

The rules for values are those of the bridge (`toolcell_bridge.wire.plain`): exact types, depth, number of elements.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from types import NoneType
from typing import Any, Final, TypeVar

from msgpack import unpackb

from toolcell_bridge import (
    MAX_DEPTH,
    MAX_ELEMENTS,
    PLAIN,
    LocalProtocolError,
    RemoteProtocolError,
    check_plain,
    check_plain_in_steps,
    pack,
    to_the_end,
    type_name,
    unpack_in_steps,
)

Table = Mapping[int, type[Any]]
Tagged = TypeVar("Tagged")

DEEPEST: Final = MAX_DEPTH + 8
"""Levels of one field: a value of the bridge stands some levels inside a result."""

MOST_ELEMENTS: Final = 4 * MAX_ELEMENTS
"""Lists, dicts, and the items, keys and values in them, in one message."""

_SMALL_BYTES: Final = 512
"""A body this short cannot announce lists that add up to a megabyte."""

_KINDS: Final[dict[str, frozenset[type]]] = {
    "bool": frozenset({bool}),
    "int": frozenset({int}),
    "int | None": frozenset({int, NoneType}),
    "float": frozenset({float}),
    "str": frozenset({str}),
    "bytes": frozenset({bytes}),
    "dict[str, Plain]": frozenset({dict}),
    "Plain": PLAIN,
}
"""For each annotation: the exact types of the field."""
_DEEP: Final = frozenset({"dict[str, Plain]", "Plain"})
"""Annotations whose values have an inside to check."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """One dataclass's form on the wire."""

    tag: int
    kind: type[Any]
    names: tuple[str, ...]
    kinds: tuple[frozenset[type], ...]
    deep: tuple[int, ...]
    values: Callable[[Any], Any]

    def check_types(self, values: tuple[Any, ...] | list[Any]) -> None:
        """Check number and exact type of the fields."""
        if len(values) != len(self.names):
            raise LocalProtocolError(f"{self.kind.__name__} has {len(self.names)} fields, not {len(values)}")
        for name, kinds, value in zip(self.names, self.kinds, values, strict=True):
            if type(value) not in kinds:
                raise LocalProtocolError(f"{self.kind.__name__}.{name} is no {type_name(type(value))}")
            if type(value) is int and value < 0:
                raise LocalProtocolError(f"{self.kind.__name__}.{name} is negative")


class TaggedCodec:
    """Encodes and decodes the dataclasses of one table."""

    def __init__(self, table: Table) -> None:
        self._layouts = {tag: _layout(tag, kind) for tag, kind in table.items()}
        self._of_kind = {layout.kind: layout for layout in self._layouts.values()}

    def encode(self, message: Any) -> bytes:
        """Return a message as bytes, held to everything the other end will check.

        Raises:
            LocalProtocolError: not a message of the table, or a field is of the wrong type.
            UnsendableValue, ValueTooLarge: a value in it has no form on the wire.
        """
        layout = self._of_kind.get(type(message))
        if layout is None:
            raise LocalProtocolError(f"{type_name(type(message))} is no message here")
        values = layout.values(message)
        layout.check_types(values)
        spent = 0
        for index in layout.deep:
            spent = check_plain(values[index], layout.names[index], spent, MOST_ELEMENTS, DEEPEST)
        return pack((layout.tag, *values), layout.kind.__name__)

    def decode(self, body: bytes) -> Any:
        """Return the message in a body.

        Raises:
            RemoteProtocolError: whatever is wrong with it.
        """
        return to_the_end(self.decode_in_steps(body))

    def decode_in_steps(self, body: bytes) -> Generator[None, None, Any]:
        """Do what `decode` does, in steps of a few milliseconds at most."""
        try:
            if len(body) <= _SMALL_BYTES:
                values: Any = unpackb(body)
            else:
                values = yield from unpack_in_steps(body, MOST_ELEMENTS, DEEPEST + 1)
            layout = self._layout_of(values)
            given = values[1:]
            layout.check_types(given)
            spent = 0
            for index in layout.deep:
                name = layout.names[index]
                spent = yield from check_plain_in_steps(given[index], name, spent, MOST_ELEMENTS, DEEPEST)
            return layout.kind(*given)
        except (RemoteProtocolError, MemoryError):
            raise
        except Exception as exc:  # whatever hostile bytes provoke in a parser is their sender's doing
            raise RemoteProtocolError(f"illegal message: {type(exc).__name__} {exc!s:.200}".rstrip()) from exc

    def _layout_of(self, values: Any) -> _Layout:
        if type(values) is not list or not values or type(values[0]) is not int:
            raise RemoteProtocolError("no tagged message")
        layout = self._layouts.get(values[0])
        if layout is None:
            raise RemoteProtocolError(f"unknown tag {values[0]}")
        return layout


def _layout(tag: int, kind: type[Any]) -> _Layout:
    names = tuple(field.name for field in fields(kind))
    annotations = [str(field.type) for field in fields(kind)]
    kinds = tuple(_KINDS[each] for each in annotations)
    deep = tuple(index for index, each in enumerate(annotations) if each in _DEEP)
    if len(names) == 1:
        get = attrgetter(names[0])
        return _Layout(tag, kind, names=names, kinds=kinds, deep=deep, values=lambda message: (get(message),))
    return _Layout(tag, kind, names=names, kinds=kinds, deep=deep, values=attrgetter(*names))
