"""Filters of chunks as SQL. Values and keys are always parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from toolcell.builtin.stores.records import ChunkFilter, check_filters

_SIGNS: Final[Mapping[str, str]] = {"eq": "=", "in": "=", "gt": ">", "lt": "<"}
_COLUMNS: Final[Mapping[str, str]] = {
    "document_id": "c.document_id",
    "source": "d.source",
    "created_at": "d.created_at",
}


class Where(NamedTuple):
    """A condition and its parameters. Tables: `c` are chunks, `d` their documents."""

    sql: str
    parameters: tuple[Any, ...]


MetadataSql = Callable[[str, str, Any], Where]
"""How a database compares one metadata key with one value, by key, sign and value: a condition that is false where the
key is absent or its value of another kind."""


def where(filters: Sequence[ChunkFilter], metadata: MetadataSql, text: str) -> Where | None:
    """Return the condition of all filters together, or None. `text` is how texts are compared, such as a collation."""
    check_filters(filters)
    if not filters:
        return None
    parts = [_one(each, metadata, text) for each in filters]
    return Where(" AND ".join(f"({part.sql})" for part in parts), tuple(p for part in parts for p in part.parameters))


def _one(condition: ChunkFilter, metadata: MetadataSql, text: str) -> Where:
    sign = _SIGNS[condition.op]
    if condition.key is not None:
        parts = [metadata(condition.key, sign, value) for value in condition.values]
    else:
        is_number = condition.field == "created_at"
        fitting = [each for each in condition.values if _fits(each, is_number)]
        column = _COLUMNS[condition.field] + ("" if is_number else text)
        parts = [Where(f"{column} {sign} ?", (value,)) for value in fitting]
    if not parts:
        return Where("1 = 0", ())
    return Where(" OR ".join(part.sql for part in parts), tuple(p for part in parts for p in part.parameters))


def _fits(value: Any, is_number: bool) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) if is_number else isinstance(value, str)
