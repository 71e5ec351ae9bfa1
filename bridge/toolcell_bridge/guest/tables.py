"""What becomes of values of numpy, pandas, polars and pyarrow, and of rows of sqlite3.

No package is imported to recognise its types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol, TypeAlias

from toolcell_bridge.guest.refusals import Refusal
from toolcell_bridge.wire.messages import Plain
from toolcell_bridge.wire.tables import TABLES, Array, Table


class Converter(Protocol):
    """One conversion; `values` has it."""

    in_column: bool

    def convert(self, value: Any, depth: int) -> Plain: ...
    def sequence(self, value: object, items: Sequence[Any], depth: int) -> list[Plain]: ...
    def mapping(self, value: object, items: Iterable[tuple[Any, Any]], depth: int) -> dict[str, Plain]: ...
    def items_of(self, depth: int) -> Callable[[str, list[Any]], list[Plain]]: ...
    def can_hold(self, size: int) -> None: ...
    def can_afford(self, elements: int) -> None: ...
    def spend(self, elements: int) -> None: ...


TABLE_IN_COLUMN: Final = "a table inside a column: send its rows, such as df.to_dict('records'), or send it beside"
"""Why it is refused."""

Handler: TypeAlias = Callable[[Any, Any, int], Plain]


def _array(to: Converter, value: Any, depth: int) -> Plain:
    if not value.shape:
        item = value[()]
        return None if item is value else to.convert(item, depth)  # numpy's `masked` is its own item
    to.can_hold(value.nbytes)
    made: Array | Table | None = None if to.in_column else _table_columns().array_of(value, to.items_of(depth))
    if made is None:  # one in a column, or of records in records
        to.can_afford(value.size)
        return to.sequence(value, value.tolist(), depth)
    to.spend(made.elements)
    return made


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
    if str(value) == "NaT":
        return None
    try:
        return float(value / type(value)(1, "s"))
    except TypeError:
        raise Refusal("months and years have no fixed number of seconds: send str(x)") from None


def _made_by(maker: str) -> Handler:
    """Return what makes a table with a function of `table_columns`."""

    def convert(to: Converter, value: Any, depth: int) -> Plain:
        if to.in_column:
            raise Refusal(TABLE_IN_COLUMN)
        made: Table = getattr(_table_columns(), maker)(value, to.items_of(depth))
        to.spend(made.elements)
        return made

    return convert


def _table_columns() -> Any:
    from toolcell_bridge.guest import table_columns  # only those who send a table pay for it

    return table_columns


def _row(to: Converter, value: Any, depth: int) -> Plain:
    return to.mapping(value, zip(value.keys(), value, strict=True), depth)


_as_text: Final[Handler] = lambda to, value, depth: to.convert(str(value), depth)  # noqa: E731
_as_list: Final[Handler] = lambda to, value, depth: to.convert(value.tolist(), depth)  # noqa: E731
_as_none: Final[Handler] = lambda to, value, depth: None  # noqa: E731

HANDLERS: Final[dict[tuple[str, str], Handler]] = {
    ("numpy", "ndarray"): _array,
    ("numpy", "generic"): _scalar,
    ("numpy", "datetime64"): _datetime64,
    ("numpy", "timedelta64"): _timedelta64,
    ("numpy", "dtype"): _as_text,
    ("pandas", "DataFrame"): _made_by("pandas_frame"),
    ("pandas", "Series"): _made_by("pandas_series"),
    ("pandas", "Index"): _as_list,
    ("pandas", "ExtensionArray"): _as_list,
    ("pandas", "Timestamp"): lambda to, value, depth: value.isoformat(),
    ("pandas", "Timedelta"): lambda to, value, depth: float(value.total_seconds()),
    ("pandas", "Period"): _as_text,
    ("pandas", "Interval"): _as_text,
    ("pandas", "ExtensionDtype"): _as_text,
    ("pandas", "NaTType"): _as_none,
    ("pandas", "NAType"): _as_none,
    ("polars", "DataType"): _as_text,
    ("polars", "DataFrame"): _made_by("polars_frame"),
    ("polars", "Series"): _made_by("polars_series"),
    ("pyarrow", "Table"): _made_by("arrow_table"),
    ("pyarrow", "RecordBatch"): _made_by("arrow_table"),
    ("pyarrow", "Array"): _made_by("arrow_array"),
    ("pyarrow", "ChunkedArray"): _made_by("arrow_array"),
    ("pyarrow", "DataType"): _as_text,
    ("pyarrow", "Scalar"): lambda to, value, depth: to.convert(value.as_py(), depth),
    ("sqlite3", "Row"): _row,
}
"""By top-level package and class name."""


def is_table(kind: type) -> bool:
    """Whether values of this class are data of a package: arrays, series and frames."""
    return any((base.__module__.partition(".")[0], base.__qualname__) in HANDLERS for base in kind.__mro__)


def native(value: Any, *, or_plain: bool = False) -> Any:
    """Return a value with each array and table in it made by its own package.

    `or_plain`: without the package, an array is a list, and a table a list of rows.

    Raises:
        ImportError: the package is not in this sandbox; the message says how to add it.
    """
    if type(value) in TABLES:
        try:
            return value.native()
        except ImportError:
            if not or_plain:
                raise
            return value.plain()
    if type(value) is dict:
        return {name: native(each, or_plain=or_plain) for name, each in value.items()}
    if type(value) is list:
        return [native(each, or_plain=or_plain) for each in value]
    return value
