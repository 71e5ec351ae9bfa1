"""What a caller asks of a table: conditions, metrics, how to select, rename and sort. Checked, and without polars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from toolcell.builtin.tables.cells import Number, key_of, number_of, text_of_cell
from toolcell.errors import ToolError

MAX_IN_VALUES: Final = 10_000
MAX_CONDITIONS: Final = 100
MAX_METRICS: Final = 100
OPERATORS: Final = ("==", "!=", ">", "<", ">=", "<=", "contains", "in")

Format = Literal["csv", "json", "jsonl"]
FORMATS: Final = get_args(Format)

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Condition:
    """One comparison of a column with a value."""

    column: str
    op: str
    numbers: frozenset[Number]
    """Numbers of the value, or of the values of `in`."""
    texts: frozenset[str]
    """Those of them that are not numbers."""
    has_null: bool
    text: str
    """Text of the value, for `contains` folded."""


def condition(column: str, op: str, value: Any) -> Condition:
    """Return a checked condition.

    Raises:
        ToolError: there is no such operator, or the value does not fit it.
    """
    if op not in OPERATORS:
        raise ToolError(f"op {op!r:.40} is unknown; use one of: {', '.join(OPERATORS)}", code="invalid_arguments")
    if op == "in" and not isinstance(value, list):
        raise ToolError(f'"in" needs a list of values for {column!r:.80}, not {value!r:.80}', code="invalid_arguments")
    values: Sequence[Any] = value if op == "in" else [value]
    if len(values) > MAX_IN_VALUES:
        raise ToolError(f'"in" takes at most {MAX_IN_VALUES} values, not {len(values)}', code="invalid_arguments")
    read = key_of if op in ("==", "!=", "in") else number_of
    numbers = [read(each) for each in values]
    texts = frozenset(
        _encodable(text_of_cell(each))
        for each, number in zip(values, numbers, strict=True)
        if number is None and each is not None
    )
    text = "" if op == "in" else _encodable(text_of_cell(value))
    return Condition(
        column=column,
        op=op,
        numbers=frozenset(number for number in numbers if number is not None),
        texts=texts,
        has_null=any(each is None for each in values),
        text=text.casefold() if op == "contains" else text,
    )


def _encodable(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


@dataclass(frozen=True, slots=True)
class Metric:
    """One column of an aggregate's answer."""

    column: str
    op: str

    @property
    def name(self) -> str:
        """Its key."""
        return f"{self.op}_{self.column}"


@dataclass(frozen=True, slots=True)
class Transform:
    """Select, rename, sort, limit: in this order."""

    select: Sequence[str] | None = None
    rename: Mapping[str, str] = field(default_factory=dict)
    sort_by: str | None = None
    sort_desc: bool = False
    limit: int | None = None

    @property
    def sort_sources(self) -> list[str]:
        """Columns that may be what rows are sorted by, under their old names: the first that a row has counts."""
        renamed = [old for old, new in self.rename.items() if new == self.sort_by]
        own = [self.sort_by] if self.sort_by is not None and self.sort_by not in self.rename else []
        return [name for name in (*renamed, *own) if self.select is None or name in self.select]

    def row(self, record: Record) -> Record:
        """Return one row with the selected columns, in their order, under their new names."""
        if self.select is not None:
            record = {name: record[name] for name in self.select if name in record}
        if not self.rename:
            return record
        made: Record = {}
        for name, cell in record.items():
            new = self.rename.get(name, name)
            if new not in made or name in self.rename:  # a renamed column replaces one that had the name
                made[new] = cell
        return made
