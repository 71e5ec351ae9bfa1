"""Convert Python values to plain data before they are sent, in a documented way, or refuse them by path.

No package is imported to recognise its types: classes of numpy, pandas and rarer modules are recognised by name. Their
own methods are called. For subclasses of built-in types the base class's methods are called, so overriding `__str__`
or `items` has no effect here.

The table of outcomes is in docs/wire.md.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, ValuesView
from datetime import date, datetime, time, timedelta  # bound now: a run may replace the module's names
from enum import Enum
from types import CoroutineType, GeneratorType, NoneType
from typing import Any, Final, TypeAlias

from toolcell_bridge.wire.codec import MAX_DEPTH, MAX_ELEMENTS, pack_value, packed_size, type_name
from toolcell_bridge.wire.errors import UnsendableValue, ValueTooLarge
from toolcell_bridge.wire.messages import Plain

_SENT_AS_IS: Final = frozenset({NoneType, bool, float, bytes})
_PATH_STEPS: Final = 16
_SCALARS: Final = _SENT_AS_IS | {int, str}


def to_plain(value: object, path: str = "value", *, max_depth: int = MAX_DEPTH) -> Plain:
    """Return what can be sent in place of `value`: itself, not a copy, when it is plain already.

    Raises:
        UnsendableValue: something in it has no form on the wire; the message names its path.
        ValueTooLarge: too deep, or too many elements.
    """
    if type(value) in _SENT_AS_IS:
        return value  # type: ignore[return-value]
    if max_depth >= MAX_DEPTH and _is_plain(value):
        return value  # type: ignore[return-value]
    return _convert(value, path, min(max_depth, MAX_DEPTH))


def _convert(value: object, path: str, max_depth: int) -> Plain:
    try:
        return _Converter(path, max_depth).convert(value, 0)
    except _TooDeep as refusal:
        raise ValueTooLarge(refusal.path(path), max_depth + 1, max_depth, "levels deep") from None
    except _Refusal as refusal:
        raise UnsendableValue(refusal.path(path), refusal.problem) from refusal.__cause__


def to_packed(value: object, path: str = "value") -> Any:
    """Convert like `to_plain` and pack, once. Returns what a message takes in place of the value.

    Raises:
        UnsendableValue, ValueTooLarge: as `to_plain`.
    """
    try:
        return pack_value(value, path)
    except (UnsendableValue, ValueTooLarge):
        return pack_value(_convert(value, path, MAX_DEPTH), path)


def _is_plain(value: object) -> bool:
    try:
        packed_size(value)
    except (UnsendableValue, ValueTooLarge):
        return False
    return True


def _is_flat(items: list[Any]) -> bool:
    return _SCALARS.issuperset(map(type, items)) and _is_plain(items)


class _Refusal(Exception):
    """Travels up from the refused value and collects the steps of its path on the way."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.steps: list[int | str] = []

    def path(self, root: str) -> str:
        steps = [f"[{step}]" if isinstance(step, int) else f"[{step[:40]!r}]" for step in reversed(self.steps)]
        return root + "".join(steps[:_PATH_STEPS]) + ("..." if len(steps) > _PATH_STEPS else "")


class _TooDeep(_Refusal):
    """Refused for what it is inside of."""


class _Converter:
    """One conversion: its limits, and the containers it is inside of."""

    __slots__ = ("_inside", "_left", "_path", "max_depth")

    def __init__(self, path: str, max_depth: int) -> None:
        self._path = path
        self.max_depth = max_depth
        self._left = MAX_ELEMENTS
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
        except (_Refusal, ValueTooLarge, MemoryError):
            raise
        except Exception as exc:  # the value's own code failed
            raise _Refusal(f"{type_name(kind)} failed to be converted ({type_name(type(exc))})") from exc

    def sequence(self, value: object, items: Sequence[Any], depth: int) -> list[Plain]:
        """Convert the items of container `value`."""
        self.spend(1 + len(items))
        self.enter(value, depth)
        plain: list[Plain] = []
        for index, item in enumerate(items):
            try:
                plain.append(self.convert(item, depth))
            except _Refusal as refusal:
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
                raise _Refusal(f"two keys become {name[:40]!r}")
            try:
                plain[name] = self.convert(item, depth)
            except _Refusal as refusal:
                refusal.steps.append(name)
                raise
        self._inside.discard(id(value))
        return plain

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
                raise _Refusal(f"a key is {type_name(type(key))}, and keys have to be text")

    def column(self, name: str, items: list[Any], depth: int) -> list[Plain]:
        """Convert the items of a table's column, which `_frame` has counted."""
        plain: list[Plain] = []
        for index, item in enumerate(items):
            try:
                plain.append(self.convert(item, depth))
            except _Refusal as refusal:
                refusal.steps += [name, index]
                raise
        return plain

    def can_afford(self, elements: int) -> None:
        if elements > self._left:
            raise ValueTooLarge(self._path, MAX_ELEMENTS - self._left + elements, MAX_ELEMENTS, "elements")

    def spend(self, elements: int) -> None:
        self.can_afford(elements)
        self._left -= elements

    def reach(self, depth: int) -> None:
        if depth > self.max_depth:
            raise _TooDeep(f"more than {self.max_depth} levels deep")

    def enter(self, value: object, depth: int) -> None:
        if id(value) in self._inside:
            raise _Refusal(f"{type_name(type(value))} contains itself")
        self.reach(depth)
        self._inside.add(id(value))


def _text(value: str) -> str:
    text = str.__str__(value)
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as exc:
        raise _Refusal(f"text holds a lone surrogate at index {exc.start}") from None
    return text


def _integer(value: int) -> int:
    number = int.__index__(value)
    if not -(2**63) <= number < 2**64:
        raise _Refusal("int does not fit 64 bits: send str(x)")
    return number


def _taken(to: _Converter, value: Iterable[Any]) -> list[Any]:
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


def _dataclass(to: _Converter, value: Any, depth: int) -> Plain:
    return to.mapping(value, [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)], depth)


def _array(to: _Converter, value: Any, depth: int) -> Plain:
    if not value.shape:
        return to.convert(value[()], depth)
    to.can_afford(value.size)
    kind = value.dtype.kind
    if kind in "biuf" and value.dtype.itemsize <= 8 and depth + value.ndim - 1 <= to.max_depth:
        to.spend(1 + 2 * sum(itertools.accumulate(value.shape, operator.mul)) - value.size)
        return value.tolist()  # type: ignore[no-any-return]
    # tolist() would turn datetime64[ns] into a bare int, and leaves long doubles as they are.
    return to.sequence(value, list(value) if kind in "Mmf" else value.tolist(), depth)


def _scalar(to: _Converter, value: Any, depth: int) -> Plain:
    if value.dtype.kind == "f":
        return float(value)
    return to.convert(value.item(), depth)


def _datetime64(to: _Converter, value: Any, depth: int) -> Plain:
    text = str(value)
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return None if text == "NaT" else text


def _timedelta64(to: _Converter, value: Any, depth: int) -> Plain:
    return None if str(value) == "NaT" else float(value / type(value)(1, "s"))


def _frame(to: _Converter, value: Any, depth: int) -> Plain:
    to.reach(depth + 1)
    rows, width = value.shape
    to.spend(1 + rows * (2 + 2 * width))
    columns: dict[str, list[Any]] = {}
    for index, label in enumerate(value.columns):
        name = to.key(label, depth)
        if name in columns:
            raise _Refusal(f"two columns become {name[:40]!r}")
        column = value.iloc[:, index].tolist()
        columns[name] = column if _is_flat(column) else to.column(name, column, depth + 1)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


_Handler: TypeAlias = Callable[[_Converter, Any, int], Plain]

_ALL: Final = slice(None)

_BY_CLASS: Final[dict[type, _Handler]] = {
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
_as_list: Final[_Handler] = lambda to, value, depth: to.convert(value.tolist(), depth)  # noqa: E731
_as_none: Final[_Handler] = lambda to, value, depth: None  # noqa: E731

_BY_NAME: Final[dict[tuple[str, str], _Handler]] = {
    ("decimal", "Decimal"): _as_text,
    ("fractions", "Fraction"): _as_text,
    ("pathlib", "PurePath"): _as_text,
    ("uuid", "UUID"): _as_text,
    ("numpy", "ndarray"): _array,
    ("numpy", "generic"): _scalar,
    ("numpy", "datetime64"): _datetime64,
    ("numpy", "timedelta64"): _timedelta64,
    ("pandas", "DataFrame"): _frame,
    ("pandas", "Series"): _as_list,
    ("pandas", "Index"): _as_list,
    ("pandas", "ExtensionArray"): _as_list,
    ("pandas", "Timestamp"): lambda to, value, depth: _text(value.isoformat()),
    ("pandas", "Timedelta"): lambda to, value, depth: float(value.total_seconds()),
    ("pandas", "Period"): _as_text,
    ("pandas", "Interval"): _as_text,
    ("pandas", "NaTType"): _as_none,
    ("pandas", "NAType"): _as_none,
}
"""The same by top-level package and class name, whatever module of the package the class is in."""

_ADVICE: Final[dict[type, str]] = {
    complex: "complex numbers have no form on the wire: send [x.real, x.imag] or str(x)",
    CoroutineType: "a coroutine: await it first",
    GeneratorType: "a generator may never end: send list(x)",
    Iterator: "an iterator may never end: send list(x)",
    BaseException: "an exception: send str(x)",
    type: "a class is not data",
}


def _handler(kind: type) -> _Handler:
    for base in kind.__mro__:
        handler = _BY_CLASS.get(base) or _BY_NAME.get((base.__module__.partition(".")[0], base.__qualname__))
        if handler is not None:
            return handler
    return _by_ability(kind)


def _by_ability(kind: type) -> _Handler:
    """Choose by what a class can do, when neither it nor a base of it is known."""
    if dataclasses.is_dataclass(kind):
        return _dataclass
    if callable(getattr(kind, "model_dump", None)):
        return lambda to, value, depth: to.convert(value.model_dump(), depth)
    if issubclass(kind, Mapping):
        return lambda to, value, depth: to.mapping(value, ((key, value[key]) for key in value), depth)
    if issubclass(kind, Set):
        return lambda to, value, depth: _set(to, value, _taken(to, value), depth)
    if issubclass(kind, (Sequence, ValuesView)):
        return lambda to, value, depth: to.sequence(value, _taken(to, value), depth)
    for refused, advice in _ADVICE.items():
        if issubclass(kind, refused):
            raise _Refusal(advice)
    raise _Refusal(f"{type_name(kind)} is not data")
