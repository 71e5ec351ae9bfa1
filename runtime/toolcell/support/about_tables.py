"""What is told of an array or a table whose data is elsewhere, or is not kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

from toolcell.support.exact_json import left_out
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.tables import AnyTable, Array, Table

MOST_TYPES: Final = 100
"""Columns that are named, and characters of a name."""

MOST_TABLES: Final = 16

MOST_CELLS: Final = 1 << 20
MOST_BYTES: Final = 64 << 20
"""Values, and bytes of text in them, of a table that is written with all rows."""


def table_facts(table: AnyTable) -> dict[str, Any]:
    """Return the kind, the shape and the types. Shape: {"kind", "shape", "dtype" or "dtypes"}."""
    facts: dict[str, Any] = {"kind": table.kind, "shape": list(table.shape)}
    if isinstance(table, Array):
        return facts | {"dtype": table.dtype}
    named = islice(table.named_columns().items(), MOST_TYPES)
    return facts | {"dtypes": {name[:MOST_TYPES]: column.dtype for name, column in named}}


def table_with_rows(table: AnyTable) -> dict[str, Any]:
    """Return the same with all values of an array, or all rows of a table, as plain data, if they are not too many."""
    if table.cells > MOST_CELLS or table.plain_bytes > MOST_BYTES:
        return {**table_facts(table), **left_out(f"{table!r}; its rows are too many to be written")}
    return {**table_facts(table), "values" if isinstance(table, Array) else "rows": to_plain(table.plain())}


def tables_text(value: Any) -> str:
    """Return the same as text, of a value that is a table or of its members that are; empty if there is none."""
    return "; ".join(_text(name, table) for name, table in islice(_tables_in(value), MOST_TABLES))


def _tables_in(value: Any) -> Iterator[tuple[str, AnyTable]]:
    match value:
        case Array() | Table():
            yield "", value
        case Mapping() | list():
            for name, each in value.items() if isinstance(value, Mapping) else enumerate(value):
                if isinstance(each, Array | Table):
                    yield f"{name!s:.{MOST_TYPES}}: ", each


def _text(name: str, table: AnyTable) -> str:
    facts = table_facts(table)
    types = facts.get("dtype") or ", ".join(f"{column} {dtype}" for column, dtype in facts["dtypes"].items())
    return f"{name}{facts['kind']}, {' x '.join(map(str, facts['shape']))} ({types})"
