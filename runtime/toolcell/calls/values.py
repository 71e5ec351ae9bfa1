"""Copies what models and guests send: JSON values alone, within bounds of depth, size and number, never by reference.

Knows no schema. What a model or a guest sent is copied here once; everything later works on the copy.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from toolcell.support.checks import brief, text_of
from toolcell.support.daemon_threads import run_large
from toolcell.support.host_work import NUMBERS
from toolcell_bridge.guest.pictures import picture_type
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.errors import UnsendableValue, ValueTooLarge
from toolcell_bridge.wire.frozen import frozen
from toolcell_bridge.wire.tables import AnyTable, Array, Table

Made = TypeVar("Made")

MAX_DEPTH = 64
"""Nesting of arguments and results. The bridge accepts as much; no sensible schema comes near."""
MAX_NODES = 200_000
"""Values in one set of arguments, containers included."""
MAX_TEXT_CHARS = 16 * 1024 * 1024
"""Characters in all strings of one set of arguments together."""
MAX_INTEGER = 2**63 - 1
MIN_INTEGER = -(2**63)

LARGE_ELEMENTS = 1000
"""Values, or as many times 32 characters, that are checked in the event loop. They take some milliseconds at most."""
CHARS_PER_ELEMENT = 32

MAX_STEP_CHARS = 80
"""Most characters of one name in a path that a message shows."""

MAX_LISTED_ERRORS = 1000
"""Errors of pydantic, of which the first `MAX_PROBLEMS` are named. It can only list all of them, and each takes 400
bytes."""
MAX_PROBLEMS = 20
MAX_MESSAGE_CHARS = 4_000
"""Most characters of one problem: two long lists of allowed values are more than a model needs to read."""
_MAX_VALUE_CHARS = 120

Path = tuple[str | int, ...]


@frozen
class ValueProblem:
    """One thing wrong with a value, and where."""

    path: tuple[str | int, ...]
    message: str

    def __str__(self) -> str:
        return f"{path_text(self.path)}: {self.message}"


@frozen
class Change:
    """One value that was mended, for the record."""

    path: str
    before: Any
    after: Any

    def to_dict(self) -> dict[str, Any]:
        """Shape: {"path", "from", "to"}."""
        return {"path": self.path, "from": self.before, "to": self.after}


class BadValue(ValueError):
    """A value that no JSON argument can be."""

    def __init__(self, problem: ValueProblem) -> None:
        super().__init__(str(problem))
        self.problem = problem
        self.steps = 0
        """Values that were looked at before this one was found."""


def path_text(path: Path) -> str:
    """Shape: `a.b[2]`, and `root` for the value itself. A long name is cut."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
            continue
        name = step if len(step) <= MAX_STEP_CHARS else f"{step[:MAX_STEP_CHARS]}..."
        text += f".{name}" if text else name
    return text or "root"


class Copied:
    """A private copy of arguments, and what was seen while copying them. What is added to them later counts too."""

    __slots__ = ("args", "chars", "has_bytes", "has_whole_floats", "nodes", "tables", "tables_at")

    def __init__(self, nodes: int = 0, chars: int = 0, tables: Collection[str] | None = (), tables_at: int = 1) -> None:
        self.tables, self.tables_at = tables, tables_at
        """Which members, and how far down, may be arrays and tables. Any other is plain data. None: all there."""
        self.args: dict[str, Any] = {}
        self.nodes = nodes
        """Values, containers included."""
        self.chars = chars
        """Characters in all strings."""
        self.has_whole_floats = False
        """A float without a fraction is in there, which an integer field must mend."""
        self.has_bytes = False

    @property
    def has_containers(self) -> bool:
        """True when a member is a list or an object."""
        return self.nodes > 1 + len(self.args)

    def copy(self, value: Any, path: tuple[str | int, ...]) -> Any:
        """Return the value again, as plain JSON data; raise `BadValue` with the path of what is none."""
        kind = type(value)
        if kind is str:
            self._text(value, path)
            return value
        if value is None or kind is bool:
            return value
        if kind is int:
            if not MIN_INTEGER <= value <= MAX_INTEGER:
                raise BadValue(ValueProblem(path, f"integer has more than 64 bits ({value.bit_length()})"))
            return value
        return self._number(value, path) if kind is float else self._container(value, path)

    def _text(self, text: str, path: tuple[str | int, ...]) -> None:
        self.chars += len(text)
        if self.chars > MAX_TEXT_CHARS:
            raise BadValue(ValueProblem(path, f"text is too long (more than {MAX_TEXT_CHARS} characters in all)"))
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError:
                raise BadValue(ValueProblem(path, "contains a lone surrogate, which is not valid text")) from None

    def _number(self, number: float, path: tuple[str | int, ...]) -> float:
        if not math.isfinite(number):
            raise BadValue(
                ValueProblem(path, f"{number} is not a JSON number" + ("; send None" if number != number else ""))
            )
        if number.is_integer():
            self.has_whole_floats = True
        return number

    def _container(self, value: Any, path: tuple[str | int, ...]) -> Any:
        is_mapping = isinstance(value, (dict, Mapping))
        is_list = not is_mapping and isinstance(value, (list, tuple))
        self.nodes += 1 + (len(value) if is_mapping or is_list else 0)
        if len(path) >= MAX_DEPTH:
            raise BadValue(ValueProblem(path[:4], f"nested deeper than {MAX_DEPTH} levels"))
        if self.nodes > MAX_NODES:
            raise BadValue(ValueProblem(path, f"too many values (more than {MAX_NODES})"))
        if is_mapping:
            return self._mapping(value, path)
        if is_list:
            return [self.copy(item, (*path, index)) for index, item in enumerate(value)]
        return self._odd_leaf(value, path)

    def _mapping(self, value: Mapping[Any, Any], path: tuple[str | int, ...]) -> dict[str, Any]:
        copy: dict[str, Any] = {}
        for key, item in value.items():
            name = key if type(key) is str else next(iter(_as_plain({key: None}, path)))
            if name in copy:
                raise BadValue(ValueProblem(path, f"two keys become {brief(name)}"))
            self._text(name, path)
            copy[name] = self.copy(item, (*path, name))
        return copy

    def _odd_leaf(self, value: Any, path: tuple[str | int, ...]) -> Any:
        """Convert what Python callers and guests have, by the table that scripts send by (docs/wire.md)."""
        plain = _as_plain(value, path)
        if isinstance(plain, Array | Table):
            may_be = len(path) == self.tables_at and (self.tables is None or path[-1] in self.tables)
            return plain if may_be else self._lists(plain, path)
        if not isinstance(plain, bytes):
            return self.copy(plain, path)
        self.has_bytes = True
        return plain

    def _lists(self, table: AnyTable, path: Path) -> Any:
        """Return what stands for a table where the schema knows none. How much that is, is known before it is made."""
        if self.nodes + table.cells > MAX_NODES:
            raise BadValue(
                ValueProblem(
                    path,
                    f"is {table!r}, and this tool takes lists of at most {MAX_NODES} values; send a part of it, or "
                    "annotate the tool's parameter as what it is",
                )
            )
        return self.copy(table.plain(), path)


def _as_plain(value: Any, path: Path) -> Any:
    try:
        return to_plain(value, path_text(path), max_depth=MAX_DEPTH - len(path))
    except (UnsendableValue, ValueTooLarge) as exc:
        raise BadValue(
            ValueProblem(path, str(exc).removeprefix(f"cannot send {path_text(path)}").lstrip(": "))
        ) from exc


def copy_arguments(args: Mapping[str, Any], tables: Collection[str] | None = (), *, tables_at: int = 1) -> Copied:
    """Copy `args`. `tables`: names of those that may be arrays and tables, which are not copied. None: any.

    `tables_at`: how far down these are, 1 being the arguments themselves.

    Raises:
        BadValue: something in there is not a JSON value, or it is too deep or too large.
    """
    copied = Copied(tables=tables, tables_at=tables_at)
    try:
        copied.args = copied.copy(args, ())
    except BadValue as exc:
        exc.steps = copied.nodes
        raise
    except (Exception, SystemExit) as exc:  # the value's own code failed
        raise BadValue(ValueProblem((), f"cannot be read ({type(exc).__name__})")) from exc
    return copied


def with_text_for_bytes(value: Any) -> Any:
    """Return data with base64 text in place of bytes, as JSON has it."""
    return with_leaves(value, lambda leaf: base64.b64encode(leaf).decode("ascii") if type(leaf) is bytes else leaf)


def plain_value(value: Any) -> Any:
    """Return a tool's return value as plain data, by the table that scripts send by (docs/wire.md).

    Raises:
        ValueError: it holds something that is not data, or refers to itself.
    """
    try:
        return to_plain(value, "result")
    except (UnsendableValue, ValueTooLarge) as exc:
        raise ValueError(str(exc)) from exc


def plain_or_text(value: Any, *, is_member: bool = False) -> Any:
    """Return anything as plain data; what cannot be becomes its text. For logs and user interfaces."""
    try:
        return plain_value(value)
    except ValueError:
        pass
    if isinstance(value, dict) and not is_member:
        return {text_of(key): plain_or_text(item, is_member=True) for key, item in value.items()}
    return brief(value)


SCALARS = NUMBERS | {str}
"""What holds nothing. Asking whether a value is a mapping takes longer, and there may be 260,000 of them."""


def values_in(value: Any, kinds: Any) -> Iterator[Any]:
    """Yield what stands in plain data and is of these types, in its order."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, kinds):
            yield each
        if isinstance(each, list | tuple):
            items: Iterable[Any] = reversed(each)
        elif type(each) is dict or isinstance(each, Mapping):
            items = reversed([*each.values()])
        else:
            continue
        left += [item for item in items if type(item) not in SCALARS]


async def in_thread_if_large(value: Any, make: Callable[[], Made]) -> Made:
    """Return what is made of a value: in a thread, where the value is large."""
    return await run_large(make) if is_large(value) else make()


def is_large(value: Any, most: int = LARGE_ELEMENTS, *, counts_bytes: bool = True) -> bool:
    """True when a value holds more than `most` values, or as many times 32 characters. Looks at no more of them."""
    seen = 0
    level = [value]
    try:
        while level:
            below: list[Any] = []
            for each in level:
                if type(each) in NUMBERS:
                    continue
                is_list = isinstance(each, (dict, list, tuple))
                if is_list:
                    seen += len(each)
                elif isinstance(each, str) or (counts_bytes and isinstance(each, bytes)):
                    seen += len(each) // CHARS_PER_ELEMENT
                elif counts_bytes and isinstance(each, (Array, Table)):
                    seen += max(each.nbytes // CHARS_PER_ELEMENT, each.cells)  # its rows may be made
                if seen > most:
                    return True
                if is_list:
                    below += (*each, *each.values()) if isinstance(each, dict) else each
            level = below
    except Exception:  # an object of the program's own raises when it is looked at: who reads it says where
        pass
    return False


def count_values(value: Any, most: int) -> int:
    """Return how many values a value holds, itself included. Looks at no more than about `most`."""
    count, level = 1, [value] if type(value) in _CONTAINERS else []
    while level and (count := count + sum(map(len, level))) <= most:
        below = itertools.chain.from_iterable(each.values() if type(each) is dict else each for each in level)
        level = [each for each in below if type(each) in _CONTAINERS]
    return count


_CONTAINERS = frozenset({dict, list, tuple})


def json_copy(value: Any) -> Any:
    """A copy of plain JSON data."""
    return with_leaves(value, lambda leaf: leaf) if type(value) in _CONTAINERS else value


def with_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return plain data with each leaf changed."""
    if isinstance(value, dict):
        return {key: with_leaves(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [with_leaves(item, change) for item in value]
    return change(value)


# What is said of values that cannot be used: values as JSON, cut where they get long, and names


def described_bytes(data: bytes) -> str:
    """Return what a model reads in place of bytes: `(image/png, 69 bytes)`, or `(69 bytes)`."""
    kind = picture_type(data)
    return f"({kind}, {len(data)} bytes)" if kind else f"({len(data)} bytes)"


def readable_leaf(value: object) -> object:
    """Return what a reader gets in the JSON of a result in place of what JSON does not have."""
    if isinstance(value, bytes | bytearray | memoryview):
        return described_bytes(bytes(value))
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    return str(value)


def quoted(value: Any) -> str:
    """A value as JSON, cut where it gets long."""
    return bounded_json(value, _MAX_VALUE_CHARS, "...")


def bounded_json(value: Any, most: int, cut: str, indent: int | None = None) -> str:
    """A value as JSON of at most `most` characters, followed by `cut` where that is not all. Stops encoding there."""
    text = ""
    try:
        for piece in json.JSONEncoder(ensure_ascii=False, indent=indent, default=readable_leaf).iterencode(value):
            text += piece[: most + 1]
            if len(text) > most:
                return text[:most] + cut
    except (Exception, SystemExit):  # it contains itself, has keys of a strange type, or its own code fails
        return f"({type(value).__name__} that cannot be shown as JSON)"
    return text


MAX_LISTED = 20
"""Names a message lists before it only says how many more there are."""


def list_names(names: Iterable[str]) -> str:
    """Shape: 'a, b, c and 7 more'."""
    every = list(names)
    more = f" and {len(every) - MAX_LISTED} more" if len(every) > MAX_LISTED else ""
    return ", ".join(every[:MAX_LISTED]) + more
