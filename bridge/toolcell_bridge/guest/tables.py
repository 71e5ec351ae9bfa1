"""Arrays, series and frames of numpy, pandas, polars and pyarrow, and rows of sqlite3, as plain data.

No package is imported to recognise its types.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from types import NoneType
from typing import Any, Final, Protocol, TypeAlias

from toolcell_bridge.guest.refusals import Refusal
from toolcell_bridge.wire.errors import UnsendableValue, ValueTooLarge
from toolcell_bridge.wire.messages import Plain
from toolcell_bridge.wire.plain import packed_size

_SCALARS: Final = frozenset({NoneType, bool, int, float, str, bytes})


class Converter(Protocol):
    """One conversion; `values` has it."""

    max_depth: int
    notes: list[str]

    def convert(self, value: Any, depth: int) -> Plain: ...
    def sequence(self, value: object, items: Sequence[Any], depth: int) -> list[Plain]: ...
    def mapping(self, value: object, items: Iterable[tuple[Any, Any]], depth: int) -> dict[str, Plain]: ...
    def key(self, key: object, depth: int) -> str: ...
    def column(self, name: str, items: list[Any], depth: int) -> list[Plain]: ...
    def can_afford(self, elements: int) -> None: ...
    def spend(self, elements: int) -> None: ...
    def reach(self, depth: int) -> None: ...


def _is_flat(items: list[Any]) -> bool:
    if not _SCALARS.issuperset(map(type, items)):
        return False
    try:
        packed_size(items)
    except (UnsendableValue, ValueTooLarge):
        return False
    return True


def _array(to: Converter, value: Any, depth: int) -> Plain:
    if not value.shape:
        return to.convert(value[()], depth)
    to.can_afford(value.size)
    kind = value.dtype.kind
    if kind in "biuf" and value.dtype.itemsize <= 8 and depth + value.ndim - 1 <= to.max_depth:
        to.spend(1 + 2 * sum(itertools.accumulate(value.shape, operator.mul)) - value.size)
        return value.tolist()  # type: ignore[no-any-return]
    # tolist() would turn datetime64[ns] into a bare int, and leaves long doubles as they are.
    return to.sequence(value, list(value) if kind in "Mmf" else value.tolist(), depth)


def _scalar(to: Converter, value: Any, depth: int) -> Plain:
    if value.dtype.kind == "f":
        return float(value)
    return to.convert(value.item(), depth)


def _datetime64(to: Converter, value: Any, depth: int) -> Plain:
    text = str(value)
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return None if text == "NaT" else text


def _timedelta64(to: Converter, value: Any, depth: int) -> Plain:
    return None if str(value) == "NaT" else float(value / type(value)(1, "s"))


def _frame(to: Converter, value: Any, depth: int) -> Plain:
    to.reach(depth + 1)
    if value.columns.nlevels > 1:
        raise Refusal(
            "its columns are a MultiIndex: flatten them first, with "
            'df.columns = ["_".join(map(str, column)) for column in df.columns]'
        )
    _note_index(to, value, "a DataFrame", "reset_index() keeps it")
    rows, width = value.shape
    to.spend(1 + rows * (2 + 2 * width))
    columns: dict[str, list[Any]] = {}
    for index, label in enumerate(value.columns):
        name = to.key(label, depth)
        if name in columns:
            raise Refusal(f"two columns become {name[:40]!r}: rename one of them")
        column = value.iloc[:, index].tolist()
        columns[name] = column if _is_flat(column) else to.column(name, column, depth + 1)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _series(to: Converter, value: Any, depth: int) -> Plain:
    _note_index(to, value, "a Series", "to_dict() or reset_index() keeps it")
    return to.convert(value.tolist(), depth)


def _note_index(to: Converter, value: Any, kind: str, cure: str) -> None:
    """Note an index that says something: one with a name, or of anything but numbers of rows."""
    index, note = value.index, f"the index of {kind} is not sent: {cure}"
    says_something = any(name is not None for name in index.names) or index.dtype.kind not in "iu"
    if says_something and len(index) and note not in to.notes:
        to.notes.append(note)


def _table(to: Converter, value: Any, depth: int) -> Plain:
    """Convert a frame of polars or a table of pyarrow."""
    rows, width = value.shape
    to.can_afford(1 + rows * (2 + 2 * width))
    return to.convert(value.to_dicts() if hasattr(value, "to_dicts") else value.to_pylist(), depth)


def _row(to: Converter, value: Any, depth: int) -> Plain:
    return to.mapping(value, zip(value.keys(), value, strict=True), depth)


Handler: TypeAlias = Callable[[Any, Any, int], Plain]

_as_text: Final[Handler] = lambda to, value, depth: to.convert(str(value), depth)  # noqa: E731
_as_list: Final[Handler] = lambda to, value, depth: to.convert(value.tolist(), depth)  # noqa: E731
_as_items: Final[Handler] = lambda to, value, depth: to.convert(value.to_pylist(), depth)  # noqa: E731
_as_none: Final[Handler] = lambda to, value, depth: None  # noqa: E731

TABLES: Final[dict[tuple[str, str], Handler]] = {
    ("numpy", "ndarray"): _array,
    ("numpy", "generic"): _scalar,
    ("numpy", "datetime64"): _datetime64,
    ("numpy", "timedelta64"): _timedelta64,
    ("pandas", "DataFrame"): _frame,
    ("pandas", "Series"): _series,
    ("pandas", "Index"): _as_list,
    ("pandas", "ExtensionArray"): _as_list,
    ("pandas", "Timestamp"): lambda to, value, depth: value.isoformat(),
    ("pandas", "Timedelta"): lambda to, value, depth: float(value.total_seconds()),
    ("pandas", "Period"): _as_text,
    ("pandas", "Interval"): _as_text,
    ("pandas", "NaTType"): _as_none,
    ("pandas", "NAType"): _as_none,
    ("polars", "DataFrame"): _table,
    ("polars", "Series"): lambda to, value, depth: to.convert(value.to_list(), depth),
    ("pyarrow", "Table"): _table,
    ("pyarrow", "RecordBatch"): _table,
    ("pyarrow", "Array"): _as_items,
    ("pyarrow", "ChunkedArray"): _as_items,
    ("pyarrow", "Scalar"): lambda to, value, depth: to.convert(value.as_py(), depth),
    ("sqlite3", "Row"): _row,
}
"""By top-level package and class name."""


def is_table(kind: type) -> bool:
    """Whether values of this class are data of a package: arrays, series and frames."""
    return any((base.__module__.partition(".")[0], base.__qualname__) in TABLES for base in kind.__mro__)
