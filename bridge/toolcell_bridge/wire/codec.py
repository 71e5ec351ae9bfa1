"""Messages to frames and back: msgpack arrays of a tag and the message's fields in order.

Decoding checks size, depth, number of elements, number of fields and the exact type of each before it makes a message.
`Connection` checks which message may come when.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Mapping
from operator import attrgetter
from types import NoneType
from typing import Any, Final, Generic, TypeAlias, TypeVar

from msgpack import unpackb

from toolcell_bridge.wire.columns import Buffer
from toolcell_bridge.wire.errors import LocalProtocolError, RemoteProtocolError
from toolcell_bridge.wire.framing import HEADER_BYTES, MAX_FRAME_BYTES, Part, frame
from toolcell_bridge.wire.frozen import frozen
from toolcell_bridge.wire.messages import FIRST_GUEST_TAG, MAX_ELEMENTS, MAX_GUEST_ELEMENTS, SAID, TAGS, Log, Message
from toolcell_bridge.wire.plain import (
    MAX_DEPTH,
    PLAIN,
    PackedValue,
    check_plain,
    check_plain_in_steps,
    check_texts,
    pack_around,
    pack_parts,
    type_name,
)
from toolcell_bridge.wire.table_frames import WITH_TABLES, frame_with_tables, unpack_with_tables
from toolcell_bridge.wire.tables import AnyTable
from toolcell_bridge.wire.unpacking import unpack_in_steps

_LONGEST: Final = 2**32 - 1
"""A length has four bytes."""

Made = TypeVar("Made")
Kind = TypeVar("Kind")

_SMALL_BYTES: Final = 512
"""A body this short cannot announce lists that add up to a megabyte."""


class TableCodec(Generic[Kind]):
    """Encodes and decodes the messages of one table: frozen dataclasses by their tags."""

    def __init__(
        self,
        table: Mapping[int, type[Kind]],
        *,
        elements: Callable[[int], int] = lambda tag: MAX_ELEMENTS,
        depth: int = MAX_DEPTH,
        said: Mapping[tuple[type[Any], str], str] | None = None,
    ) -> None:
        """`elements`: by tag, how many a message holds, unless its run says otherwise. `depth`: levels of a field.
        `said`: what errors call a field."""
        self._most = max(map(elements, table))
        self._depth = depth
        self._form_of_tag = {
            tag: _form(tag, kind, most=elements(tag), depth=depth, said=said or {}) for tag, kind in table.items()
        }
        self._form_of_type: dict[type, _Form] = {form.message: form for form in self._form_of_tag.values()}

    @property
    def kinds(self) -> tuple[type[Kind], ...]:
        """The messages of the table."""
        return tuple(form.message for form in self._form_of_tag.values())

    def encode(self, message: Kind, max_frame_bytes: int = MAX_FRAME_BYTES, most: int | None = None) -> bytes:
        """Return the message as one frame, held to everything the other end will check. `most`: elements of its run.

        Raises:
            LocalProtocolError: not a message, or a field is of the wrong type.
            UnsendableValue: a value is not plain, or an int or str in it has no form on the wire.
            ValueTooLarge: too deep, too many elements, or too many bytes.
        """
        return b"".join(self.encode_parts(message, max_frame_bytes, most))

    def encode_parts(
        self, message: Kind, max_frame_bytes: int = MAX_FRAME_BYTES, most: int | None = None
    ) -> list[Part]:
        """Return the frame in parts, in which large buffers of arrays and tables are not copied.

        Raises:
            LocalProtocolError, UnsendableValue, ValueTooLarge: as `encode`.
        """
        body, tables = self._packed(message, most)
        return frame_with_tables(body, tables, max_frame_bytes) if tables else [frame(body, max_frame_bytes)]

    def encode_body(self, message: Kind) -> bytes:
        """Return the body of its frame; raises what `encode` does. Whoever sends it has an own limit."""
        body, tables = self._packed(message, None)
        return b"".join(frame_with_tables(body, tables, _LONGEST))[HEADER_BYTES:] if tables else body

    def _packed(self, message: Kind, most: int | None) -> tuple[bytes, list[AnyTable]]:
        form = self._form_of_type.get(type(message))
        if form is None:
            raise LocalProtocolError(f"{type_name(type(message))} is not a message")
        values = form.values(message)
        form.check(values, most=most)
        return (pack_around if PackedValue in map(type, values) else pack_parts)(values, form.message.__name__)

    def decode(self, body: Buffer, most: int | None = None) -> Kind:
        """Return the message of one frame's body. `most`: elements that are built at all; by default those of its kind.

        Raises:
            RemoteProtocolError: whatever is wrong with it. Nothing else escapes, but for MemoryError.
        """
        return self.decode_counted(body, most)[0]

    def decode_counted(self, body: Buffer, most: int | None = None) -> tuple[Kind, int]:
        """Return what `decode` returns, and the number of elements inside its fields.

        Raises:
            RemoteProtocolError: whatever is wrong with it. Nothing else escapes, but for MemoryError.
        """
        if len(body) > _SMALL_BYTES or body[:1] == WITH_TABLES:
            return to_the_end(self.decode_in_steps(body, most))
        try:
            values = unpackb(body)
            form = (
                self._form_of_tag.get(values[0]) if type(values) is list and values and type(values[0]) is int else None
            )
            if form is None:
                form = self._form_of(values)
            elements = form.check(values, most=most)
            return form.message(*values[1:]), elements
        except (RemoteProtocolError, MemoryError):
            raise
        except Exception as exc:
            raise _illegal(exc) from exc

    def decode_in_steps(self, body: Buffer, most: int | None = None) -> Generator[None, None, tuple[Kind, int]]:
        """Do what `decode_counted` does, in steps of a few milliseconds at most.

        Raises:
            RemoteProtocolError: whatever is wrong with it. Nothing else escapes, but for MemoryError.
        """
        try:
            unpacked = unpack_with_tables if body[:1] == WITH_TABLES else unpack_in_steps
            values: Any = yield from unpacked(body, most or self._most, self._depth + 1)
            form = self._form_of(values)
            elements = yield from form.check_in_steps(values, most)
            return form.message(*values[1:]), elements
        except (RemoteProtocolError, MemoryError):
            raise
        except Exception as exc:
            raise _illegal(exc) from exc

    def _form_of(self, values: Any) -> _Form:
        if type(values) is not list or not values or type(values[0]) is not int:
            raise RemoteProtocolError("a frame holds no tagged message")
        if values[0] not in self._form_of_tag:
            raise RemoteProtocolError(f"unknown tag {values[0]}")
        return self._form_of_tag[values[0]]


def to_the_end(steps: Generator[None, None, Made]) -> Made:
    """Take all steps at once."""
    while True:
        try:
            next(steps)
        except StopIteration as finished:
            made: Made = finished.value
            return made


def _illegal(exc: Exception) -> RemoteProtocolError:
    """Whatever hostile bytes provoke in a parser is their sender's doing."""
    return RemoteProtocolError(f"illegal frame: {type(exc).__name__} {exc!s:.200}".rstrip())


_Check: TypeAlias = Callable[..., int]

_KINDS: Final[dict[str, tuple[frozenset[type], _Check | None]]] = {
    "bool": (frozenset({bool}), None),
    "int": (frozenset({int}), None),
    "int | None": (frozenset({int, NoneType}), None),
    "float": (frozenset({float}), None),
    "float | None": (frozenset({float, NoneType}), None),
    "str": (frozenset({str}), None),
    "bytes": (frozenset({bytes}), None),
    "list[str]": (frozenset({list}), check_texts),
    "dict[str, str]": (frozenset({dict}), check_texts),
    "dict[str, Plain]": (frozenset({dict}), check_plain),
    "dict[str, Plain] | None": (frozenset({dict, NoneType}), check_plain),
    "Plain": (PLAIN, check_plain),
}
"""The exact types of a field and the check of its contents, by the annotation in messages.py."""


@frozen
class _Form:
    """One message's form on the wire, derived once from its dataclass."""

    tag: int
    message: type[Any]
    values: Callable[[Any], tuple[object, ...]]
    """The tag and the fields, in order."""
    shapes: frozenset[tuple[type, ...]]
    """Every legal sequence of exact types, so that one lookup judges number and type of all fields."""
    deep: tuple[tuple[int, str, _Check], ...]
    """Index, name and check of the fields that have an inside."""
    most: int
    """Elements that the message may hold, unless its run says otherwise."""
    depth: int
    """Levels of lists and dicts in one field."""

    def check(self, values: tuple[Any, ...] | list[Any], inside: bool = True, most: int | None = None) -> int:
        """Check tag and fields; return the number of elements inside the fields, if those are to be checked."""
        shape = tuple(map(type, values))
        if shape not in self.shapes and not self._fits_packed(values):
            for index, name, check in self.deep:
                if check is check_plain and index < len(values):
                    check_plain(values[index], name, deepest=self.depth)
            names = ", ".join(map(type_name, shape[1:20]))
            raise LocalProtocolError(f"{self.message.__name__}({names}) has the wrong fields")
        if self.message is Log and values[1] not in (1, 2):
            raise LocalProtocolError("Log.stream is neither 1 nor 2")
        spent = 1 + len(values)
        if inside:
            for index, name, check in self.deep:
                spent = check(values[index], name, spent, most or self.most, self.depth)
        return spent - 1 - len(values)

    def check_in_steps(self, values: list[Any], most: int | None) -> Generator[None, None, int]:
        """Do what `check` does, in steps."""
        self.check(values, inside=False)
        most = most or self.most
        spent = 1 + len(values)
        for index, name, check in self.deep:
            if check is check_plain:
                spent = yield from check_plain_in_steps(values[index], name, spent, most, self.depth)
            else:
                spent = check(values[index], name, spent, most, self.depth)
        return spent - 1 - len(values)

    def _fits_packed(self, values: tuple[Any, ...] | list[Any]) -> bool:
        return tuple([value.kind if type(value) is PackedValue else type(value) for value in values]) in self.shapes


def _form(tag: int, message: type[Any], *, most: int, depth: int, said: Mapping[tuple[type[Any], str], str]) -> _Form:
    names, kinds = [*message.__annotations__], [_KINDS[str(each)] for each in message.__annotations__.values()]
    get = attrgetter(*names)
    if len(names) == 1:
        values: Callable[[Any], tuple[object, ...]] = lambda message: (tag, get(message))  # noqa: E731
    else:
        values = lambda message: (tag, *get(message))  # noqa: E731
    deep = [
        (index, said.get((message, name), f"{message.__name__}.{name}"), check)
        for index, (name, (_, check)) in enumerate(zip(names, kinds, strict=True), start=1)
        if check is not None
    ]
    shapes = frozenset(itertools.product({int}, *(types for types, _ in kinds)))
    return _Form(tag, message, values, shapes, tuple(deep), most, depth)


MESSAGES: Final[TableCodec[Message]] = TableCodec(
    TAGS, elements=lambda tag: MAX_GUEST_ELEMENTS if tag >= FIRST_GUEST_TAG else MAX_ELEMENTS, said=SAID
)
"""Messages of the bridge."""

encode = MESSAGES.encode
encode_parts = MESSAGES.encode_parts
decode = MESSAGES.decode
decode_counted = MESSAGES.decode_counted
decode_in_steps = MESSAGES.decode_in_steps

PRINTED_BYTES: Final = 240
"""Most bytes of a text whose frame has a ready beginning."""


def _log_starts(stream: int) -> tuple[bytes, ...]:
    rest = encode(Log(stream, "x" * PRINTED_BYTES))[HEADER_BYTES : -PRINTED_BYTES - 1]
    return tuple(bytes((0, 0, 0, len(rest) + 1 + size)) + rest + bytes((size,)) for size in range(PRINTED_BYTES + 1))


LOG_STARTS: Final = {stream: _log_starts(stream) for stream in (1, 2)}
"""The frame of a `Log` of each stream without its text, by the size of the text in bytes. Most texts are short."""
