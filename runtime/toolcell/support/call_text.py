"""Write a call and its arguments for whoever decides about it: what will be sent, or a mark where it is cut.

Names and values are a script's: none of them can end the line, hide what follows, or pass for text of ours.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from toolcell.support.exact_json import json_text
from toolcell.support.packing import bytes_digest, text_digest, value_digest
from toolcell.support.text import as_one_line
from toolcell_bridge.guest.placeholder import RESULT_OF, named, parts_of
from toolcell_bridge.wire.columns import Column
from toolcell_bridge.wire.frozen import frozen
from toolcell_bridge.wire.tables import AnyTable, Array, Table

MAX_ARG_CHARS: Final = 200
"""Most characters of one argument, in text."""

MAX_ASKED_CHARS: Final = 2_000
"""Most characters of one argument of a call that a person is asked about in a form."""

MAX_ARGS: Final = 50
"""Arguments of a call, in text."""

_ROWS: Final = 16
"""Rows of a table, that are read at a time."""

_PLAIN_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")

_NO_RESULTS: Final[Mapping[str, str]] = {}


@frozen
class ArgumentsText:
    """The arguments of a call as text."""

    parts: tuple[str, ...]
    """One `name=value` for each, and what is said about arguments that are not listed."""
    is_whole: bool
    """Nothing is cut."""

    def __str__(self) -> str:
        return ", ".join(self.parts)


def arguments_text(
    args: Mapping[str, Any], *, results: Mapping[str, str] = _NO_RESULTS, max_chars: int = MAX_ARG_CHARS
) -> ArgumentsText:
    """Return arguments as text, each cut by itself, before it is written out.

    `results`: references, and the effects of this draft that they stand for. Any other dict is written as JSON.
    """
    parts, is_whole = list[str](), len(args) <= MAX_ARGS
    for name, value in itertools.islice(args.items(), MAX_ARGS):
        text, is_value_whole = _value_text(value, results, max_chars)
        shown, is_name_whole = _name_text(str(name), max_chars)
        parts.append(f"{shown}={text}")
        is_whole = is_whole and is_value_whole and is_name_whole
    if len(args) > MAX_ARGS:
        parts.append(f"... ({len(args)} arguments, sha256 {value_digest(dict(args))[:16]})")
    return ArgumentsText(tuple(parts), is_whole)


def table_text(table: AnyTable, max_chars: int) -> str:
    """Return every cell of an array or a table as one line: all of it, or more than so many characters, and a mark."""
    return _value_text(table, _NO_RESULTS, max_chars)[0]


def call_text(tool: str, args: Mapping[str, Any], results: Mapping[str, str] = _NO_RESULTS) -> str:
    return f"{as_one_line(tool)}({arguments_text(args, results=results)})"


def _name_text(name: str, max_chars: int) -> tuple[str, bool]:
    if len(name) > max_chars:
        return f"{as_one_line(json_text(name[:max_chars]))}... {_about(name)}", False
    return (name if _PLAIN_NAME.fullmatch(name) else as_one_line(json_text(name))), True


def _value_text(value: Any, results: Mapping[str, str], max_chars: int) -> tuple[str, bool]:
    pieces, room = list[str](), max_chars
    for piece in _pieces(value, results, max_chars):
        pieces.append(piece[:room])
        room -= len(piece)
        if room < 0:
            return f"{as_one_line(''.join(pieces))}... {_about(value)}", False
    return as_one_line("".join(pieces)), True


def _about(value: Any) -> str:
    match value:
        case str():
            size, digest = f"{len(value)} characters", text_digest(value)
        case bytes():
            size, digest = f"{len(value)} bytes", bytes_digest(value)
        case Mapping() | list() | tuple():
            size, digest = f"{len(value)} values", value_digest(value)
        case Array():
            size, digest = f"shape {value.shape}", value_digest(value)
        case Table():
            size, digest = f"{len(value)} rows x {len(value.columns)} columns", value_digest(value)
        case _:
            size, digest = "more", value_digest(value)
    return f"({size}, sha256 {digest[:16]})"


def _pieces(value: Any, results: Mapping[str, str], max_chars: int) -> Iterator[str]:
    """Yield the text of a value, piece by piece, each of bounded length."""
    if isinstance(value, Mapping):
        if (referred := referred_result(value, results)) is not None:
            yield f"<{referred}>"
            return
        for number, (name, item) in enumerate(value.items()):
            yield ", " if number else "{"
            yield from _pieces(name, _NO_RESULTS, max_chars)
            yield ": "
            yield from _pieces(item, results, max_chars)
        yield "}" if value else "{}"
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield ", " if number else "["
            yield from _pieces(item, results, max_chars)
        yield "]" if value else "[]"
    elif isinstance(value, str):
        yield json_text(value[: max_chars + 1])
    elif isinstance(value, bytes):
        yield f"bytes {value[: max_chars + 1].hex()}"
    elif isinstance(value, Array | Table):
        yield from _table_pieces(value, max_chars)
    else:
        yield json_text(value)


def _table_pieces(table: AnyTable, max_chars: int) -> Iterator[str]:
    """Yield types, labels and every cell: nothing is left out here, as it is in the text of a table."""
    if isinstance(table, Array):
        columns = [table.column]
        yield f"array of {table.dtype}, shape {table.shape}: ["
    else:
        named = table.named_columns()
        columns = [*named.values()]
        yield f"{table.kind.partition('.')[2]}, {len(table)} rows x {len(table.columns)} columns ("
        for number, (name, column) in enumerate(named.items()):
            yield ", " if number else ""
            yield _name_text(name[: max_chars + 1], max_chars)[0]
            yield f" {column.dtype}"
            yield from _category_pieces(column, max_chars)
        yield "): ["
    length = columns[0].length if columns else 0
    for start in range(0, length, _ROWS):
        span = (start, min(start + _ROWS, length))
        cells = [each.values_of([span], max_chars + 1)[0] for each in columns]  # what is left out is cut anyway
        for number, row in enumerate(zip(*cells, strict=True)):
            yield ", " if start or number else ""
            yield from _pieces(row[0] if isinstance(table, Array) else row, _NO_RESULTS, max_chars)
    yield "]"


def _category_pieces(column: Column, max_chars: int) -> Iterator[str]:
    if column.kind == "category":  # there may be some that no row has
        yield " of "
        yield from _pieces(column.detail[0].values(0, max_chars + 1), _NO_RESULTS, max_chars)


def referred_result(value: Mapping[str, Any], results: Mapping[str, str]) -> str | None:
    """Return what a value stands for, such as `result of effect-1`; None for any other value."""
    if not results or len(value) != 1 or not isinstance(reference := value.get(RESULT_OF), str):
        return None
    effect, path, key = parts_of(reference) or ("", "", "")
    return named(effect, path) if f"{effect}.{key}" in results else None
