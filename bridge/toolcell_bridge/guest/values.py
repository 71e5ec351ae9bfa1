"""Convert Python values to plain data before they are sent, in a documented way, or refuse them by path.

No package is imported to recognise its types: classes of numpy, pandas and rarer modules are recognised by name. Their
own methods are called. For subclasses of built-in types the base class's methods are called, so overriding `__str__`
or `items` has no effect here.

The table of outcomes is in docs/wire.md.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set, ValuesView
from datetime import date, datetime, time, timedelta  # bound now: a run may replace the module's names
from enum import Enum
from types import NoneType
from typing import Any, Final, TypeAlias

from toolcell_bridge.guest.placeholder import Placeholder, reference_of
from toolcell_bridge.guest.refusals import REPLACED, Refusal, TooDeep, advice
from toolcell_bridge.guest.tables import HANDLERS, TABLE_IN_COLUMN
from toolcell_bridge.wire.errors import UnsendableValue, ValueTooLarge
from toolcell_bridge.wire.messages import MAX_ELEMENTS, Plain
from toolcell_bridge.wire.plain import MAX_DEPTH, PackedValue, is_sendable, type_name
from toolcell_bridge.wire.tables import AnyTable, Array, Table

_SENT_AS_IS: Final = frozenset({NoneType, bool, float, bytes})
_SCALARS: Final = _SENT_AS_IS | {int, str}


def to_plain(value: object, path: str = "value", *, max_depth: int = MAX_DEPTH) -> Plain:
    """Return what can be sent in place of `value`: itself, not a copy, when it is plain already.

    Raises:
        UnsendableValue: something in it has no form on the wire; the message names its path.
        ValueTooLarge: too deep, or too many elements.
    """
    if type(value) in _SENT_AS_IS:
        return value  # type: ignore[return-value]
    if max_depth >= MAX_DEPTH and is_sendable(value):
        return value  # type: ignore[return-value]
    return _convert(value, path, min(max_depth, MAX_DEPTH))


def _convert(value: object, path: str, max_depth: int) -> Plain:
    try:
        return _Converter(path, max_depth).convert(value, 0)
    except TooDeep as refusal:
        raise ValueTooLarge(refusal.path(path), max_depth + 1, max_depth, "levels deep") from None
    except Refusal as refusal:
        raise UnsendableValue(refusal.path(path), refusal.problem) from refusal.__cause__


def to_packed(value: object, path: str = "value") -> Any:
    """Convert like `to_plain` and pack, once. Returns what a message takes in place of the value.

    Raises:
        UnsendableValue, ValueTooLarge: as `to_plain`.
    """
    try:
        return PackedValue(value, path)
    except (UnsendableValue, ValueTooLarge):
        return PackedValue(_convert(value, path, MAX_DEPTH), path)


class _Converter:
    """One conversion: its limits, and the containers it is inside of."""

    __slots__ = ("_inside", "_left", "_path", "in_column", "max_depth")

    def __init__(self, path: str, max_depth: int) -> None:
        self._path = path
        self.max_depth = max_depth
        self._left = MAX_ELEMENTS
        self.in_column = False
        """Converts what is in a column: an array there is a list, and a table cannot be there."""
        self._inside: set[int] = set()

    def convert(self, value: Any, depth: int) -> Plain:
        """Convert a value that lies inside `depth` containers."""
        kind = type(value)
        if kind in _SENT_AS_IS:
            return value  # type: ignore[no-any-return]
        if kind is str:
            return _text(value)
        if kind is int:
            return _integer(value)
        try:
            self.reach(depth)  # conversions count as a level too, so that none goes on forever
            return _handler(kind)(self, value, depth + 1)
        except (Refusal, ValueTooLarge, MemoryError):
            raise
        except Exception as exc:  # the value's own code failed
            raise Refusal(f"{type_name(kind)} failed to be converted ({type_name(type(exc))})") from exc

    def sequence(self, value: object, items: Sequence[Any], depth: int) -> list[Plain]:
        """Convert the items of container `value`."""
        self.spend(1 + len(items))
        self.enter(value, depth)
        plain: list[Plain] = []
        for index, item in enumerate(items):
            try:
                plain.append(self.convert(item, depth))
            except Refusal as refusal:
                refusal.steps.append(index)
                raise
        self._inside.discard(id(value))
        return plain

    def mapping(self, value: object, items: Iterable[tuple[Any, Any]], depth: int) -> dict[str, Plain]:
        """Convert the items of container `value`; they are counted as they come, for they may never end."""
        self.spend(1)
        self.enter(value, depth)
        plain: dict[str, Plain] = {}
        for key, item in items:
            self.spend(2)
            name = self.key(key, depth)
            if name in plain:
                raise Refusal(f"two keys become {name[:40]!r}")
            try:
                plain[name] = self.convert(item, depth)
            except Refusal as refusal:
                refusal.steps.append(name)
                raise
        self._inside.discard(id(value))
        return plain

    def model(self, value: Any, depth: int) -> Plain:
        """Convert a pydantic model by its fields, or as JSON when a field is of a type that only pydantic knows."""
        inside = set(self._inside)
        try:
            return self.convert(_dumped(value), depth)
        except TooDeep:
            raise
        except Refusal as refusal:
            self._inside = inside
            try:
                plain = _dumped(value, mode="json")
            except Exception:  # bytes that are no text, and what pydantic does not know either
                raise refusal from None
            return self.convert(plain, depth)

    def key(self, key: object, depth: int) -> str:
        """Convert a key as a value, then as JSON writes it."""
        match self.convert(key, depth):
            case str(text):
                return text
            case bool(truth):
                return "true" if truth else "false"
            case None:
                return "null"
            case int() | float() as number:
                return repr(number)
            case _:
                raise Refusal(f"a key is {type_name(type(key))}, and keys have to be text: send list(x.items())")

    def items_of(self, depth: int) -> Callable[[str, list[Any]], list[Plain]]:
        """Return what converts the items of a column that have no kind in common."""

        def convert(name: str, items: list[Any]) -> list[Plain]:
            self.can_afford(len(items))
            plain: list[Plain] = []
            was_in_column, self.in_column = self.in_column, True
            try:
                for index, item in enumerate(items):
                    try:
                        plain.append(self.convert(item, depth + 1))
                    except Refusal as refusal:
                        refusal.steps += [index, name] if name else [index]
                        raise
            finally:
                self.in_column = was_in_column
            return plain

        return convert

    def can_afford(self, elements: int) -> None:
        if elements > self._left:
            raise ValueTooLarge(self._path, MAX_ELEMENTS - self._left + elements, MAX_ELEMENTS, "elements")

    def can_hold(self, size: int) -> None:
        """Refuse a buffer that no message can hold, before it is copied."""
        if size > MOST_BYTES:
            raise ValueTooLarge(self._path, size, MOST_BYTES)

    def spend(self, elements: int) -> None:
        self.can_afford(elements)
        self._left -= elements

    def reach(self, depth: int) -> None:
        if depth > self.max_depth:
            raise TooDeep(f"more than {self.max_depth} levels deep")

    def enter(self, value: object, depth: int) -> None:
        if id(value) in self._inside:
            raise Refusal(f"{type_name(type(value))} contains itself")
        self.reach(depth)
        self._inside.add(id(value))


def _dumped(model: Any, **options: Any) -> Any:
    """Return the fields of a model, or of a dataclass of pydantic, by the names that its schema has: its aliases."""
    kind = type(model)
    if not hasattr(kind, "model_dump"):
        return kind.__pydantic_serializer__.to_python(model, by_alias=True, **options)
    by_alias = {"by_alias": True} if hasattr(kind, "model_fields") else {}
    return model.model_dump(**by_alias, **options)


def _text(value: str) -> str:
    text = str.__str__(value)
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as exc:
        raise Refusal(f"text holds a lone surrogate at index {exc.start}: send {REPLACED}") from None
    return text


def _integer(value: int) -> int:
    number = int.__index__(value)
    if not -(2**63) <= number < 2**64:
        raise Refusal("int does not fit 64 bits: send str(x)")
    return number


def _list_items(to: _Converter, value: Iterable[Any]) -> list[Any]:
    """List what a stranger's `__iter__` gives, up to the limit."""
    items = list(itertools.islice(value, MAX_ELEMENTS + 1))
    to.can_afford(len(items))
    return items


def _set(to: _Converter, value: object, items: list[Any], depth: int) -> Plain:
    plain: list[Any] = to.sequence(value, items, depth)
    try:
        return sorted(plain)
    except TypeError:
        return plain


def _range(to: _Converter, value: range, depth: int) -> Plain:
    if value[MAX_ELEMENTS:]:  # len() of a range can overflow
        to.can_afford(MAX_ELEMENTS + 1)
    return to.sequence(value, value, depth)


def _table(to: _Converter, value: AnyTable) -> Plain:
    if to.in_column:
        raise Refusal(TABLE_IN_COLUMN)
    to.spend(value.elements)
    return value


def _dataclass(to: _Converter, value: Any, depth: int) -> Plain:
    from dataclasses import fields  # which the class of the value has imported

    return to.mapping(value, [(field.name, getattr(value, field.name)) for field in fields(value)], depth)


def _checked_dataclass(to: _Converter, value: Any, depth: int) -> Plain:
    """Convert a dataclass of pydantic, which has aliases and computed fields, as its models have."""
    return to.model(value, depth)


MOST_BYTES: Final = 2**28
"""Most bytes of one buffer: as much as `frame_bytes` allows at most."""

_Handler: TypeAlias = Callable[[_Converter, Any, int], Plain]

_ALL: Final = slice(None)

_BY_CLASS: Final[dict[type, _Handler]] = {
    Array: lambda to, value, depth: _table(to, value),
    Table: lambda to, value, depth: _table(to, value),
    Placeholder: lambda to, value, depth: to.mapping(value, reference_of(value).items(), depth),
    str: lambda to, value, depth: _text(value),
    int: lambda to, value, depth: _integer(value),
    float: lambda to, value, depth: float.__float__(value),
    bytes: lambda to, value, depth: bytes.__bytes__(value),
    bytearray: lambda to, value, depth: bytes(bytearray.__getitem__(value, _ALL)),
    memoryview: lambda to, value, depth: value.tobytes(),
    list: lambda to, value, depth: to.sequence(value, list.__getitem__(value, _ALL), depth),
    tuple: lambda to, value, depth: to.sequence(value, tuple.__getitem__(value, _ALL), depth),
    deque: lambda to, value, depth: to.sequence(value, list(deque.__iter__(value)), depth),
    set: lambda to, value, depth: _set(to, value, list(set.__iter__(value)), depth),
    frozenset: lambda to, value, depth: _set(to, value, list(frozenset.__iter__(value)), depth),
    dict: lambda to, value, depth: to.mapping(value, list(dict.items(value)), depth),
    OrderedDict: lambda to, value, depth: to.mapping(value, list(OrderedDict.items(value)), depth),
    range: _range,
    Enum: lambda to, value, depth: to.convert(value.value, depth),
    datetime: lambda to, value, depth: datetime.isoformat(value),
    date: lambda to, value, depth: date.isoformat(value),
    time: lambda to, value, depth: time.isoformat(value),
    timedelta: lambda to, value, depth: timedelta.total_seconds(value),
}
"""What becomes of a built-in type and its subclasses."""

_as_text: Final[_Handler] = lambda to, value, depth: _text(str(value))  # noqa: E731

_BY_NAME: Final[dict[tuple[str, str], _Handler]] = {
    ("decimal", "Decimal"): _as_text,
    ("fractions", "Fraction"): _as_text,
    ("pathlib", "PurePath"): _as_text,
    ("collections", "UserString"): _as_text,
    ("uuid", "UUID"): _as_text,
    ("zoneinfo", "ZoneInfo"): _as_text,
    ("ipaddress", "_IPAddressBase"): _as_text,
    ("pydantic", "_BaseUrl"): _as_text,
    ("pydantic", "_BaseMultiHostUrl"): _as_text,
    ("pydantic_core", "Url"): _as_text,
    ("pydantic_core", "MultiHostUrl"): _as_text,
    ("pydantic", "_SecretBase"): _as_text,  # stars
    ("re", "Pattern"): lambda to, value, depth: to.convert(value.pattern, depth),
    **HANDLERS,
}
"""The same by top-level package and class name, whatever module of the package the class is in."""


def _handler(kind: type) -> _Handler:
    for base in kind.__mro__:
        handler = _BY_CLASS.get(base) or _BY_NAME.get((base.__module__.partition(".")[0], base.__qualname__))
        if handler is not None:
            return handler
    return _by_ability(kind)


def _by_ability(kind: type) -> _Handler:
    """Choose by what a class can do, when neither it nor a base of it is known."""
    if isinstance(problem := getattr(kind, "__unsendable__", None), str):
        raise Refusal(problem)
    if hasattr(kind, "__dataclass_fields__"):
        return _checked_dataclass if hasattr(kind, "__pydantic_serializer__") else _dataclass
    if isinstance(names := getattr(kind, "__struct_fields__", None), tuple):  # msgspec
        return lambda to, value, depth: to.mapping(value, ((name, getattr(value, name)) for name in names), depth)
    if hasattr(kind, "__attrs_attrs__"):
        return lambda to, value, depth: to.mapping(
            value, ((each.name, getattr(value, each.name)) for each in kind.__attrs_attrs__), depth
        )
    if callable(getattr(kind, "model_dump", None)):
        return lambda to, value, depth: to.model(value, depth)
    if issubclass(kind, Mapping):
        return lambda to, value, depth: to.mapping(value, ((key, value[key]) for key in value), depth)
    if issubclass(kind, Set):
        return lambda to, value, depth: _set(to, value, _list_items(to, value), depth)
    if issubclass(kind, (Sequence, ValuesView)):
        return lambda to, value, depth: to.sequence(value, _list_items(to, value), depth)
    raise Refusal(advice(kind))
