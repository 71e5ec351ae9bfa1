"""`Array` and `Table`: arrays, series and frames as values of the wire, whichever package made them.

Neither numpy nor any other package is needed to read one. `table_packages` makes arrays and frames of them.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from datetime import date, datetime, time
from itertools import islice
from typing import Any, Final, NamedTuple, Self, TypeAlias

from msgpack import Packer, unpackb

from toolcell_bridge.wire import table_packages
from toolcell_bridge.wire.columns import MOST_EMPTY_ROWS, BadTable, Buffer, Column, ColumnReader, padding
from toolcell_bridge.wire.framing import Part
from toolcell_bridge.wire.invisible import is_visible

SHOWN_ROWS: Final = 20
SHOWN_COLUMNS: Final = 12
SHOWN_VALUES: Final = 60
SHOWN_CHARS: Final = 40
"""Most characters of one cell."""

ARRAYS: Final = frozenset({"numpy", "numpy.ma"})
SERIES: Final = frozenset({"pandas.Series", "polars.Series", "pyarrow.Array"})
RECORDS: Final = frozenset({"numpy.ndarray", "numpy.recarray"})
"""Arrays of records."""
FRAMES: Final = frozenset({"pandas.DataFrame", "polars.DataFrame", "pyarrow.Table"}) | RECORDS

MOST_DIMENSIONS: Final = 32
MOST_SIZE: Final = 2**40
_HEAD_BYTES: Final = 4

_SCALARS: Final = frozenset({type(None), bool, int, float, str})
Scalar: TypeAlias = bool | int | float | str | None


class Axis(NamedTuple):
    """Labels of rows or columns: one column for each level, and the levels' names."""

    levels: tuple[Column, ...] = ()
    names: tuple[Scalar, ...] = ()

    def header(self) -> list[Any]:
        """Return the description."""
        return [list(self.names), [each.header() for each in self.levels]]

    def labels(self, count: int) -> list[Any]:
        """Return the first labels: single values, or tuples of several levels."""
        levels = [each.values(0, count) for each in self.levels]
        return levels[0] if len(levels) == 1 else list(zip(*levels, strict=True))

    @property
    def says_something(self) -> bool:
        """Whether it is more than the numbers of the rows."""
        if not self.levels:
            return False
        only = self.levels[0]
        is_counted = len(self.levels) == 1 and only.kind == "range" and only.detail == (0, 1)
        return not is_counted or self.names[0] is not None


class _Encoded:
    """What an array and a table have in common: bytes."""

    __slots__ = ()

    kind: str

    def header(self) -> list[Any]:
        raise NotImplementedError

    def buffers(self) -> Iterator[Buffer]:
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(size + padding(size) for size in (memoryview(each).nbytes for each in self.buffers()))

    def to_bytes(self) -> bytes:
        """Return everything as bytes, from which `from_bytes` makes it again. Equal values give equal bytes."""
        header: bytes = Packer().pack(self.header())
        return b"".join([len(header).to_bytes(_HEAD_BYTES, "big"), header, *padded([self])])

    def __deepcopy__(self, memo: object) -> Self:
        return self  # nothing changes one

    def __reduce__(self) -> tuple[Any, ...]:
        return from_bytes, (self.to_bytes(),)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash((self.kind, self.nbytes))

    def __str__(self) -> str:
        title, labels, rows = self.shown()
        return "\n".join([title, *_aligned(labels, rows)])

    def _repr_html_(self) -> str:
        """What a notebook shows. All of it is escaped."""
        title, labels, rows = self.shown()
        body = "".join(_html_row("td", row) for row in rows)
        return f"<table><thead>{_html_row('th', labels)}</thead><tbody>{body}</tbody></table><p>{_html_of(title)}</p>"

    def shown(self) -> tuple[str, list[str], list[list[str]]]:
        """Return a title, the labels of the columns and the cells of the first and last rows."""
        raise NotImplementedError


class Array(_Encoded):
    """A numpy array: of numbers, times, text or plain data. `len()` is its first dimension."""

    __slots__ = ("column", "kind", "shape")

    def __init__(self, kind: str, shape: Sequence[int], column: Column) -> None:
        self.kind = kind
        self.shape = tuple(shape)
        self.column = column
        """The values, the last dimension first."""

    @property
    def dtype(self) -> str:
        """Type of the values."""
        return self.column.dtype

    @property
    def size(self) -> int:
        """Number of values."""
        return self.column.length

    @property
    def elements(self) -> int:
        """What it counts as, among the elements of a message."""
        without_bytes = 0 if self.size else math.prod(each or 1 for each in self.shape)
        return 8 + self.column.elements + without_bytes

    @property
    def cells(self) -> int:
        """Values of Python that `plain` returns, and lists."""
        return self.column.cells if self.size else math.prod(each or 1 for each in self.shape)

    @property
    def plain_bytes(self) -> int:
        """Bytes of what `plain` returns as text, at least. It may be far more than `nbytes`."""
        return self.cells + self.column.text_bytes

    def header(self) -> list[Any]:
        """Return the description that is sent."""
        return ["array", self.kind, list(self.shape), self.column.header()]

    def buffers(self) -> Iterator[Buffer]:
        """Yield what is sent with the description."""
        return self.column.buffers()

    def to_numpy(self) -> Any:
        """Return the array. Its memory is that of this value.

        Raises:
            ImportError: numpy is not installed.
        """
        return table_packages.numpy_array(self.column, self.shape, is_masked=self.kind == "numpy.ma")

    def native(self) -> Any:
        """Return what was sent, in its own package."""
        return self.to_numpy()

    def tolist(self) -> list[Any]:
        """Return nested lists of Python values."""
        return _nested(self.column.values(), self.shape)

    def plain(self) -> list[Any]:
        """Return the same: what stands for the array where there are no arrays."""
        return self.tolist()

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<Array of {self.dtype}, shape {self.shape}>"

    def shown(self) -> tuple[str, list[str], list[list[str]]]:
        """Return a title, no labels, and the first and last values as cells."""
        title = f"array of {self.dtype}, shape {self.shape}"
        if len(self.shape) == 2 and self.shape[1] > 0:
            width = self.shape[1]
            count = min(self.shape[0], SHOWN_ROWS)
            half = SHOWN_COLUMNS // 2
            places = [*range(width)] if width <= SHOWN_COLUMNS else [*range(half), *range(width - half, width)]
            cells = iter(_cells(self.column, [row * width + place for row in range(count) for place in places]))
            rows = [list(islice(cells, len(places))) for _ in range(count)]
            if len(places) < width:
                rows = [[*row[:half], "...", *row[half:]] for row in rows]
            return title + _more(self.shape[0], count, "rows"), [], rows
        values = _cells(self.column, range(min(self.size, SHOWN_VALUES)))
        return title + _more(self.size, len(values), "values"), [], [values]


class Table(_Encoded):
    """A frame or a series of pandas, polars or Arrow, or records of numpy. `len()` is its number of rows."""

    __slots__ = ("axis", "columns", "index", "kind", "length")

    def __init__(self, kind: str, length: int, index: Axis, axis: Axis, columns: Sequence[Column]) -> None:
        self.kind = kind
        self.length = length
        self.index = index
        """Labels of the rows; without levels where the package has none."""
        self.axis = axis
        """Labels of the columns."""
        self.columns = tuple(columns)

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        return self.length, len(self.columns)

    @property
    def is_series(self) -> bool:
        """Whether it was a series and not a frame."""
        return self.kind in SERIES

    @property
    def schema(self) -> dict[Any, str]:
        """The type of each column by its label."""
        return dict(zip(self.labels, [each.dtype for each in self.columns], strict=True))

    @property
    def labels(self) -> list[Any]:
        """Labels of the columns: texts or other values, or tuples of several levels."""
        return self.axis.labels(len(self.columns))

    @property
    def elements(self) -> int:
        """What it counts as, among the elements of a message."""
        without_bytes = 0 if self.columns else self.length
        columns = (*self.index.levels, *self.axis.levels, *self.columns)
        return 8 + sum(each.elements for each in columns) + without_bytes

    @property
    def cells(self) -> int:
        """Values of Python that `plain` returns, and rows."""
        return self.length + sum(each.cells for each in (*self.index.levels, *self.columns))

    @property
    def plain_bytes(self) -> int:
        """Bytes of what `plain` returns as text, at least. It may be far more than `nbytes`."""
        labels = sum(each.text_bytes for each in self.axis.levels) + sum(len(str(name)) for name in self.index.names)
        text_bytes = sum(each.text_bytes for each in (*self.index.levels, *self.columns))
        return self.cells + text_bytes + (0 if self.is_series else labels * self.length)

    def header(self) -> list[Any]:
        """Return the description that is sent."""
        columns = [each.header() for each in self.columns]
        return ["table", self.kind, self.length, self.index.header(), self.axis.header(), columns]

    def buffers(self) -> Iterator[Buffer]:
        """Yield what is sent with the description."""
        for column in (*self.index.levels, *self.axis.levels, *self.columns):
            yield from column.buffers()

    def to_pandas(self) -> Any:
        """Return a DataFrame, or a Series for what was one.

        Raises:
            ImportError: pandas is not installed.
        """
        return table_packages.pandas_object(self)

    def to_polars(self) -> Any:
        """Return a frame of polars, or a Series for what was one. Labels of rows become columns.

        Raises:
            ImportError: polars is not installed.
        """
        return table_packages.polars_object(self)

    def to_arrow(self) -> Any:
        """Return a table of pyarrow, or a ChunkedArray for what was a series. Labels of rows become columns.

        Raises:
            ImportError: pyarrow is not installed.
        """
        return table_packages.arrow_object(self)

    def to_numpy(self) -> Any:
        """Return an array with one dimension for a series, two for a frame, and of records for what was one.

        Raises:
            ImportError: numpy is not installed.
        """
        return (table_packages.numpy_records if self.kind in RECORDS else table_packages.numpy_table)(self)

    def native(self) -> Any:
        """Return what was sent, in its own package."""
        package = self.kind.partition(".")[0]
        makers = {"numpy": self.to_numpy, "pandas": self.to_pandas, "polars": self.to_polars, "pyarrow": self.to_arrow}
        return makers[package]()

    def rows(self, start: int = 0, stop: int | None = None) -> list[dict[str, Any]]:
        """Return rows as dicts of Python values by label. Labels of rows are in them, unless they only count."""
        named = self.named_columns()
        if not named:
            stop = self.length if stop is None else min(stop, self.length)
            return [{} for _ in range(start, stop)]
        values = [column.values(start, stop) for column in named.values()]
        return [dict(zip(named, row, strict=True)) for row in zip(*values, strict=True)]

    def named_columns(self) -> dict[str, Column]:
        """Return all columns by unambiguous names, the labels of the rows first if they say something."""
        named: dict[str, Column] = {}
        numbers: dict[str, int] = {}
        if self.index.says_something:
            only = len(self.index.levels) == 1
            for number, (name, column) in enumerate(zip(self.index.names, self.index.levels, strict=True)):
                _put(named, numbers, ("index" if only else f"level_{number}") if name is None else name, column)
        for label, column in zip(self.labels, self.columns, strict=True):
            _put(named, numbers, "value" if label is None and self.is_series else label, column)
        return named

    def tolist(self) -> list[Any]:
        """Return the values of a series, or the rows of a frame as lists."""
        if self.is_series:
            return self.columns[0].values()
        return [list(row) for row in zip(*(each.values() for each in self.columns), strict=True)]

    def plain(self) -> list[Any]:
        """Return what stands for it where there are no tables: the rows of a frame, the values of a series."""
        return self.tolist() if self.is_series else self.rows()

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"<Table of {self.length} rows and {len(self.columns)} columns, from {self.kind}>"

    def shown(self) -> tuple[str, list[str], list[list[str]]]:
        """Return a title with the types, the labels, and the first and last rows as cells."""
        named = self.named_columns()
        names = _first_and_last(list(named), SHOWN_COLUMNS)
        types = ", ".join(f"{_cell(each)} {named[each].dtype}" for each in names if each in named)
        name = self.kind.partition(".")[2]
        title = f"{name}, {self.length} rows x {len(self.columns)} columns ({types})"
        spans = [(0, self.length)]
        if self.length > SHOWN_ROWS:
            spans = [(0, SHOWN_ROWS // 2), (self.length - SHOWN_ROWS // 2, self.length)]
        rows: list[list[str]] = []
        for start, stop in spans:
            if start:
                rows.append(["..."] * len(names))
            columns = [
                _cells(named[name], range(start, stop)) if name in named else ["..."] * (stop - start) for name in names
            ]
            rows += [list(row) for row in zip(*columns, strict=True)]
        return title, [_cell(each) for each in names], rows


TABLES: Final = frozenset({Array, Table})
AnyTable: TypeAlias = Array | Table


def padded(tables: Sequence[AnyTable | _Encoded]) -> Iterator[Part]:
    """Yield the buffers of all tables as they are sent, with what lies between them."""
    for table in tables:
        for buffer in table.buffers():
            yield memoryview(buffer).cast("B")
            if gap := padding(memoryview(buffer).nbytes):
                yield bytes(gap)


def from_bytes(data: Buffer) -> AnyTable:
    """Return what `to_bytes` was called of.

    Raises:
        BadTable: the bytes are not that.
    """
    start = _HEAD_BYTES + int.from_bytes(data[:_HEAD_BYTES], "big")
    try:
        header = unpackb(bytes(data[_HEAD_BYTES:start]))
        reader = ColumnReader(memoryview(data)[start:])
        table = _whole(read_table(header, reader))
        reader.check_end()
    except BadTable:
        raise
    except Exception as exc:
        raise BadTable(f"{type(exc).__name__}: {exc!s:.200}") from exc
    return table


def _whole(steps: Generator[None, None, AnyTable]) -> AnyTable:
    while True:
        try:
            next(steps)
        except StopIteration as finished:
            table: AnyTable = finished.value
            return table


def read_table(header: object, reader: ColumnReader) -> Generator[None, None, AnyTable]:
    """Read an array or a table of its description and the next buffers, in steps.

    Raises:
        BadTable: the description is none, or contradicts the bytes.
    """
    match header:
        case ["array", str(kind), list(shape), list(column)] if kind in ARRAYS:
            return Array(kind, shape, (yield from reader.column(column, _checked_size(shape))))
        case ["table", str(kind), int(length), list(index), list(axis), list(columns)] if (
            kind in FRAMES | SERIES and type(length) is int
        ):
            pass
        case _:
            raise BadTable("neither an array nor a table")
    if kind in SERIES and len(columns) != 1:
        raise BadTable(f"a series of {len(columns)} columns")
    rows = yield from _axis(index, length, reader)
    labels = yield from _axis(axis, len(columns), reader)
    if not labels.levels or (rows.levels and not kind.startswith("pandas")):
        raise BadTable("columns without labels, or rows with them")
    found: list[Column] = []
    for each in columns:
        yield
        read = yield from reader.column(each, length)
        found.append(read)
    if not found and length > MOST_EMPTY_ROWS:
        raise BadTable(f"{length} rows without columns")
    return Table(kind, length, rows, labels, found)


def _axis(header: list[Any], length: int, reader: ColumnReader) -> Generator[None, None, Axis]:
    match header:
        case [list(names), list(levels)] if len(names) == len(levels):
            pass
        case _:
            raise BadTable("the description of labels is not one")
    if not _SCALARS.issuperset(map(type, names)):
        raise BadTable("the name of a level is neither text nor a number")
    found = []
    for each in levels:
        yield
        column = yield from reader.column(each, length, may_be_range=len(levels) == 1)
        values: Column = column.detail[0] if column.kind == "category" else column
        if values.kind == "list" or (values.kind == "plain" and not _SCALARS.issuperset(map(type, values.detail))):
            raise BadTable("a label is neither text nor a number")
        found.append(column)
    return Axis(tuple(found), tuple(names))


def _checked_size(shape: list[Any]) -> int:
    if not 1 <= len(shape) <= MOST_DIMENSIONS or not all(
        type(each) is int and 0 <= each <= MOST_SIZE for each in shape
    ):
        raise BadTable("the shape of an array is not one")
    size: int = math.prod(shape)
    if math.prod(each or 1 for each in shape) > (MOST_SIZE if size else MOST_EMPTY_ROWS):
        raise BadTable("the shape of an array is too large")
    return size


def _nested(values: list[Any], shape: tuple[int, ...]) -> list[Any]:
    if len(shape) == 1:
        return values
    step = math.prod(shape[1:])
    return [_nested(values[row * step : (row + 1) * step], shape[1:]) for row in range(shape[0])]


def _put(named: dict[str, Column], numbers: dict[str, int], label: Any, column: Column) -> None:
    """Add a column by its label. `numbers`: how many names have been tried for each label, so that none is twice."""
    parts = label if isinstance(label, tuple) else (label,)
    name = base = "_".join(text for each in parts if (text := str(each)))
    while name in named:
        numbers[base] = numbers.get(base, 1) + 1
        name = f"{base}_{numbers[base]}"
    named[name] = column


def _more(whole: int, shown: int, what: str) -> str:
    return f", the first {shown} {what}" if shown < whole else ""


def _first_and_last(items: list[str], most: int) -> list[str]:
    return items if len(items) <= most else [*items[: most // 2], "...", *items[-(most // 2) :]]


def _cells(column: Column, rows: Iterable[int]) -> list[str]:
    """Return the cells of some rows. Of lists, only what is shown is read."""
    return [_cell(value) for (value,) in column.values_of([(row, row + 1) for row in rows], SHOWN_CHARS)]


def _pieces(value: Any) -> Iterator[str]:
    """Yield the text of a value in pieces, of which each is short and none is empty."""
    match value:
        case list():
            for number, item in enumerate(value):
                yield ", " if number else "["
                yield from _pieces(item)
            yield "]" if value else "[]"
        case dict():
            for number, (key, item) in enumerate(value.items()):
                yield ", " if number else "{"
                yield from _pieces(key)
                yield ": "
                yield from _pieces(item)
            yield "}" if value else "{}"
        case str() | bytes():
            yield repr(value[: SHOWN_CHARS + 1])
        case _:
            yield str(value)


def _cell(value: Any) -> str:
    match value:
        case None:
            return "null"
        case float() if math.isfinite(value):
            text = f"{value:.10g}"
        case datetime():
            text = value.isoformat(" ")
        case date() | time():
            text = value.isoformat()
        case bytes():
            return f"<{len(value)} bytes>"
        case str():
            text = value[: SHOWN_CHARS + 1]
        case _:
            text = "".join(islice(_pieces(value), SHOWN_CHARS + 1))
    if len(text) > SHOWN_CHARS:
        text = text[:SHOWN_CHARS] + "..."
    return "".join(each if is_visible(each) else each.encode("unicode_escape").decode() for each in text)


def _aligned(labels: list[str], rows: list[list[str]]) -> list[str]:
    lines = [labels, *rows] if labels else rows
    if not labels and len(rows) == 1:
        return [f"[{', '.join(rows[0])}]"]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _html_row(tag: str, cells: list[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{_html_of(cell)}</{tag}>' for cell in cells)}</tr>" if cells else ""


def _html_of(text: str) -> str:
    """Escape a text. In code, a notebook typesets no formula, which could be a link."""
    import html  # only notebooks need it

    return f"<code>{html.escape(text)}</code>" if "\\" in text else html.escape(text)
