"""Copies what models and guests send: JSON values alone, within bounds of depth, size and number, never by reference.

Knows no schema. What a model or a guest sent is copied here once; everything later works on the copy.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from datetime import date, datetime, time
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_jsonable_python

MAX_DEPTH = 64
"""Nesting of arguments and results. The bridge accepts as much; no sensible schema comes near."""
MAX_NODES = 200_000
"""Values in one set of arguments, containers included."""
MAX_TEXT_CHARS = 16 * 1024 * 1024
"""Characters in all strings of one set of arguments together."""
MAX_INTEGER = 2**63 - 1
MIN_INTEGER = -(2**63)

MAX_STEP_CHARS = 80
"""Of one name in a path that a message shows."""

Path = tuple[str | int, ...]

JSON_SCALARS = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a value, and where."""

    path: tuple[str | int, ...]
    message: str

    def __str__(self) -> str:
        return f"{path_text(self.path)}: {self.message}"


class BadValue(ValueError):
    """A value that no JSON argument can be."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


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


class _Copier:
    """One copy in progress; counts what it has seen."""

    __slots__ = ("chars", "has_whole_floats", "nodes")

    def __init__(self, nodes: int = 0, chars: int = 0) -> None:
        self.chars = chars
        self.nodes = nodes
        self.has_whole_floats = False

    def copy(self, value: Any, path: tuple[str | int, ...]) -> Any:
        """Return the value again, as plain JSON data; raise `BadValue` with the path of what is none."""
        kind = type(value)
        if kind is str:
            self._text(value, path)
            return value
        if value is None or kind is bool:
            return value
        if kind is int:
            return _integer(value, path)
        if kind is float:
            return self._number(value, path)
        return self._container(value, path)

    def _text(self, text: str, path: tuple[str | int, ...]) -> None:
        self.chars += len(text)
        if self.chars > MAX_TEXT_CHARS:
            raise BadValue(Problem(path, f"text is too long (more than {MAX_TEXT_CHARS} characters in all)"))
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError:
                raise BadValue(Problem(path, "contains a lone surrogate, which is not valid text")) from None

    def _number(self, number: float, path: tuple[str | int, ...]) -> float:
        if not math.isfinite(number):
            raise BadValue(Problem(path, f"{number} is not a JSON number"))
        if number.is_integer():
            self.has_whole_floats = True
        return number

    def _container(self, value: Any, path: tuple[str | int, ...]) -> Any:
        self.nodes += 1 + (len(value) if isinstance(value, Mapping | list | tuple) else 0)
        if len(path) >= MAX_DEPTH:
            raise BadValue(Problem(path[:4], f"nested deeper than {MAX_DEPTH} levels"))
        if self.nodes > MAX_NODES:
            raise BadValue(Problem(path, f"too many values (more than {MAX_NODES})"))
        if isinstance(value, Mapping):
            return {self._key(key, path): self.copy(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.copy(item, (*path, index)) for index, item in enumerate(value)]
        return self._odd_leaf(value, path)

    def _key(self, key: Any, path: tuple[str | int, ...]) -> str:
        if not isinstance(key, str):
            raise BadValue(Problem(path, f"key {key!r:.80} is not a string"))
        self._text(key, path)
        return key

    def _odd_leaf(self, value: Any, path: tuple[str | int, ...]) -> Any:
        """Convert what Python callers and guests have, and what JSON writes as a string or number."""
        if isinstance(value, bytes | bytearray | memoryview):
            return base64.b64encode(bytes(value)).decode("ascii")
        if isinstance(value, datetime | date | time):
            return value.isoformat()
        if isinstance(value, JSON_SCALARS):  # a subclass: an enum member, a numpy float
            return self.copy(_base_scalar(value), path)
        raise BadValue(Problem(path, f"{type(value).__name__} is not a JSON value"))


def _base_scalar(value: Any) -> str | int | float:
    for base in (str, int, float):
        if isinstance(value, base):
            return base.__str__(value) if base is str else base(value)
    raise AssertionError(value)


def _integer(number: int, path: tuple[str | int, ...]) -> int:
    if not MIN_INTEGER <= number <= MAX_INTEGER:
        raise BadValue(Problem(path, f"integer has more than 64 bits ({number.bit_length()})"))
    return number


@dataclass(frozen=True, slots=True)
class Copied:
    """A private copy of arguments, and what was seen while copying them."""

    args: dict[str, Any]
    nodes: int
    """Values in it, containers included."""
    chars: int = 0
    """Characters in all its strings."""
    has_whole_floats: bool = False
    """A float without a fraction is in there, which an integer field must mend."""


def copy_arguments(args: Mapping[str, Any]) -> Copied:
    """Copy `args`.

    Raises:
        BadValue: something in there is not a JSON value, or it is too deep or too large.
    """
    copier = _Copier()
    copy: dict[str, Any] = copier.copy(args, ())
    return Copied(copy, copier.nodes, copier.chars, copier.has_whole_floats)


class Decoder:
    """Decodes JSON in strings of one set of arguments, under the bounds that hold for the arguments themselves."""

    def __init__(self, copied: Copied) -> None:
        self._copier = _Copier(copied.nodes, copied.chars)
        self._decoded: dict[tuple[int, Path], tuple[str, Any]] = {}

    @property
    def nodes(self) -> int:
        """Values in the arguments and in everything that was decoded."""
        return self._copier.nodes

    def decode(self, text: str, path: Path) -> Any:
        """What `text` says as JSON.

        Raises:
            ValueError: it is no JSON.
            BadValue: it says something that arguments cannot be; `path` is where.
        """
        key = (id(text), path)
        if key not in self._decoded:
            try:
                said = json.loads(text)
            except RecursionError:
                raise BadValue(Problem(path[:4], f"nested deeper than {MAX_DEPTH} levels")) from None
            self._decoded[key] = (text, self._copier.copy(said, path))
        return self._decoded[key][1]


def plain_value(value: Any) -> Any:
    """Return a tool's structured return value as plain data; models and dataclasses become dicts.

    Raises:
        ValueError: it holds something that is not data, or refers to itself.
    """
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if not is_dataclass(value) and _is_plain(value, 0):
        return value
    try:
        return to_jsonable_python(value, bytes_mode="base64")
    except (PydanticSerializationError, RecursionError) as exc:
        raise ValueError(str(exc)) from exc


def _is_plain(value: Any, depth: int) -> bool:
    kind = type(value)
    if kind in _PLAIN_KINDS:
        return True
    if depth > MAX_DEPTH:
        return False
    if kind is dict:
        return all(type(key) is str and _is_plain(item, depth + 1) for key, item in value.items())
    if kind is list:
        return all(_is_plain(item, depth + 1) for item in value)
    return False


_PLAIN_KINDS = frozenset({str, int, float, bool, type(None), bytes, datetime})
