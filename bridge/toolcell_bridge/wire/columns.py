"""Columns: typed values in buffers, with a description from which the length of every buffer follows.

The description of a column is plain data: `[kind, form, has_nulls, text_bytes, detail]`. Its buffers follow one another
in little-endian order, each padded to `ALIGNMENT` bytes: the values, for text and bytes their lengths and then all of
them joined, and one bit per row where rows are missing. Whatever a column says is checked before it is believed, so
that reading one that was read by `ColumnReader` raises nothing.
"""

from __future__ import annotations

import codecs
import re
import struct
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from functools import partial
from io import BytesIO, StringIO
from itertools import accumulate, chain, islice
from operator import itemgetter
from typing import Any, Final, TypeAlias

from toolcell_bridge.wire.frozen import frozen

Buffer: TypeAlias = bytes | bytearray | memoryview

ALIGNMENT: Final = 8

TEXTS: Final = frozenset({"text", "bytes"})
CODES: Final = frozenset({"int8", "int16", "int32", "int64"})
"""Kinds of the codes of categories."""

FORMS: Final = frozenset({"", "object", "masked", "str", "string", "arrow", "enum", "array"})
"""How a package keeps a column, where it can in more than one way: as objects of Python, with a mask, ..."""
_PANDAS_DTYPE: Final = re.compile(r"(?:period|interval)\[[\w\-+:/, \[\]]{1,60}\]", re.ASCII)
"""Form of text that pandas reads as values of this type."""

MOST_NESTED: Final = 8
"""Lists in lists."""

MOST_SIZE: Final = 2**31 - 1
"""Items of each list of a fixed size, and characters of a text of a fixed width."""

MOST_DIGITS: Final = 38
"""Most digits of a decimal."""

UNITS: Final = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}

NOT_A_TIME: Final = -(2**63)

MOST_ROWS: Final = 2**40
MOST_EMPTY_ROWS: Final = 2**20
"""Rows of a column that has no bytes for them."""

_LENGTHS: Final = 4
_CHUNK: Final = 1 << 18
_PIECE_ROWS: Final = 1 << 12
_BITS: Final = [tuple(bool(byte >> bit & 1) for bit in range(8)) for byte in range(256)]
_CONTINUATION: Final = bytes(range(0x80, 0xC0))
"""Bytes of UTF-8 that no character begins with."""

ZONE_NAME: Final = re.compile(r"(?!dateutil)[A-Za-z][\w+\-]*(?:/[A-Za-z][\w+\-]*){0,3}", re.ASCII)
ZONE_OFFSET: Final = re.compile(r"[+-](?:[01]\d|2[0-3]):[0-5]\d", re.ASCII)
_EPOCH: Final = datetime(1970, 1, 1)
FIRST_DAY: Final = date(1970, 1, 1).toordinal()


class BadTable(ValueError):
    """The encoding of an array or a table contradicts itself, or says something that no sender writes."""


@frozen
class Column:
    """Values of one kind.

    `data` has the values, or the joined text or bytes; `valid` has one bit per row, lowest first, if rows are missing.
    `detail`: of text and bytes of numpy the width of its type, of a `datetime` its unit and time zone, of a `duration`
    its unit, of a `decimal` its digits and those behind the point, of a `category` its categories and whether they are
    ordered, of a `list` the items of all rows and how many each row has, or 0 if `lengths` says so, of a `range` start
    and step, of `plain` the list of plain data.
    """

    kind: str
    length: int
    data: Buffer = b""
    lengths: Buffer = b""
    valid: Buffer | None = None
    form: str = ""
    detail: Any = None

    __eq__, __hash__ = object.__eq__, object.__hash__

    @property
    def dtype(self) -> str:
        """What people call the type."""
        match self.kind:
            case "list":
                items, size = self.detail
                return f"list[{items.dtype}, {size}]" if size else f"list[{items.dtype}]"
            case "range" | "plain":
                return "int64" if self.kind == "range" else "object"
            case "text" if self.form not in FORMS:
                return self.form
        known = FIXED.get(self.kind)
        return self.kind if known is None or self.detail is None else known.dtype(self.detail)

    @property
    def inner(self) -> Column | None:
        """The categories, or the items of all lists; None for other kinds."""
        return self.detail[0] if self.kind in ("category", "list") else None

    @property
    def elements(self) -> int:
        """What the column counts as, among the elements of a message."""
        match self.kind:
            case "category":
                return 8 + int(self.detail[0].elements)
            case "list":
                items: Column = self.detail[0]
                inner = items.length if items.kind == "list" else 0
                return 8 + items.elements + max(0, inner - items.nbytes // ALIGNMENT)
            case "plain":
                return 8 + len(self.detail)
        return 8

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, without what lies between them."""
        return sum(memoryview(each).nbytes for each in self.buffers())

    @property
    def cells(self) -> int:
        """Values of Python that it has, with those in lists and the categories."""
        return self.length + (0 if self.inner is None else self.inner.cells)

    @property
    def text_bytes(self) -> int:
        """Bytes of text and bytes in the values, where each is written by itself, as one of a category is not here."""
        match self.kind:
            case "text" | "bytes":
                return memoryview(self.data).nbytes
            case "list":
                return int(self.detail[0].text_bytes)
            case "category" if self.detail[0].kind in TEXTS:
                sizes = as_numbers(self.detail[0].lengths, "I")
                counts = Counter(self._numbers(0, self.length))
                return sum(sizes[code] * count for code, count in counts.items() if code >= 0)
        return 0

    def header(self) -> list[Any]:
        """Return the description."""
        match self.kind:
            case "category":
                categories, ordered = self.detail
                detail: Any = [ordered, self.data_kind, categories.length, categories.header()]
            case "list":
                items, size = self.detail
                detail = [size, items.length, items.header()]
            case _:
                detail = list(self.detail) if type(self.detail) is tuple else self.detail
        size = memoryview(self.data).nbytes if self.kind in TEXTS else 0
        return [self.kind, self.form, self.valid is not None, size, detail]

    @property
    def data_kind(self) -> str:
        """Kind of the numbers in `data`: of a category those of its codes."""
        if self.kind != "category":
            return self.kind
        width = memoryview(self.data).nbytes // self.length if self.length else 4
        return f"int{8 * width}"

    def buffers(self) -> Iterator[Buffer]:
        """Yield the buffers in order."""
        yield from (self.lengths, self.data)
        if self.valid is not None:
            yield self.valid
        if self.inner is not None:
            yield from self.inner.buffers()

    def is_valid(self, row: int) -> bool:
        """Return whether a row has a value."""
        return self.valid is None or bool(self.valid[row >> 3] >> (row & 7) & 1)

    def values(self, start: int = 0, stop: int | None = None) -> list[Any]:
        """Return rows as Python values; a missing one is None. Text of all rows costs a pass over their lengths."""
        stop = self.length if stop is None else min(stop, self.length)
        return self.values_of([(min(start, stop), stop)])[0]

    def values_of(self, spans: Sequence[tuple[int, int]], most: int | None = None) -> list[list[Any]]:
        """Return the values of some spans of rows, the first rows first. All lengths together are read once.

        `most`: items that are read of the lists of one span, and of the lists in them; the rest of the items is left
        out at the end.
        """
        starts = self._starts(spans)
        if self.kind == "list":
            found = self._lists(spans, starts, most)
        else:
            found = [self._values(start, stop, at) for (start, stop), at in zip(spans, starts, strict=True)]
        return [self._with_missing(values, *span) for values, span in zip(found, spans, strict=True)]

    def _with_missing(self, values: list[Any], start: int, stop: int) -> list[Any]:
        if self.valid is None:
            return values
        first = start >> 3
        are_valid = chain.from_iterable(map(_BITS.__getitem__, self.valid[first : (stop + 7) >> 3]))
        pairs = zip(values, islice(are_valid, start - 8 * first, None), strict=False)
        return [each if is_valid else None for each, is_valid in pairs]

    def _starts(self, spans: Sequence[tuple[int, int]]) -> list[int]:
        """Return where each span begins: in the joined text or bytes, or among the items of all lists."""
        if self.kind == "list" and (size := self.detail[1]):
            return [size * start for start, _ in spans]
        if self.kind not in TEXTS and self.kind != "list":
            return [0] * len(spans)
        lengths, at, row, found = as_numbers(self.lengths, "I"), 0, 0, []
        for start, _ in spans:
            at, row = at + sum(lengths[row:start]), start
            found.append(at)
        return found

    def _lists(self, spans: Sequence[tuple[int, int]], starts: list[int], most: int | None) -> list[list[Any]]:
        column, size = self.detail
        lengths = as_numbers(self.lengths, "I")
        sizes = [[size] * (stop - start) if size else lengths[start:stop].tolist() for start, stop in spans]
        counts = [sum(each) if most is None else min(sum(each), most) for each in sizes]
        items = column.values_of([(at, at + count) for at, count in zip(starts, counts, strict=True)], most)
        pairs = zip(map(iter, items), sizes, strict=True)
        return [[list(islice(some, each)) for each in lengths_of_span] for some, lengths_of_span in pairs]

    def _categories(self, codes: list[int]) -> Callable[[int], Any]:
        """Return what gives the category of a code. Only some are read, if there are more than codes."""
        column = self.detail[0]
        if column.length <= len(codes):
            every: Callable[[int], Any] = column.values().__getitem__
            return every
        used = sorted({code for code in codes if code >= 0})
        found = column.values_of([(code, code + 1) for code in used])
        return {code: value for code, (value,) in zip(used, found, strict=True)}.__getitem__

    def _values(self, start: int, stop: int, at: int) -> list[Any]:
        match self.kind:
            case "plain":
                return list(self.detail[start:stop])
            case "range":
                first, step = self.detail
                return [first + step * row for row in range(start, stop)]
            case "text":
                return [text for piece, lengths in self._pieces(start, stop, at) for text in _texts(piece, lengths)]
            case "bytes":
                pieces = self._pieces(start, stop, at)
                return [each for piece, lengths in pieces for each in map(BytesIO(piece).read, lengths)]
            case "category":
                codes = self._numbers(start, stop)
                category = self._categories(codes)
                return [None if code < 0 else category(code) for code in codes]
        known = FIXED[self.kind]
        numbers = self._numbers(start, stop)
        return numbers if known.value is None else list(map(known.value(self.detail), numbers))

    def _numbers(self, start: int, stop: int) -> list[Any]:
        return FIXED[self.data_kind].numbers(self.data, start, stop)

    def _pieces(self, start: int, stop: int, at: int) -> Iterator[tuple[bytes, list[int]]]:
        """Yield the bytes of some rows, and the lengths of each, for a number of rows at a time. `at`: of the first."""
        lengths, data = as_numbers(self.lengths, "I"), memoryview(self.data).cast("B")
        for row in range(start, stop, _PIECE_ROWS):
            some = lengths[row : min(row + _PIECE_ROWS, stop)].tolist()
            end = at + sum(some)
            yield bytes(data[at:end]), some
            at = end


def _texts(data: bytes, lengths: list[int]) -> Iterator[str]:
    """Cut the UTF-8 of several texts. Reading them one after another is faster than slices."""
    if data.isascii():
        return map(StringIO(data.decode(), newline="").read, lengths)
    return map(bytes.decode, map(BytesIO(data).read, lengths))


def as_numbers(data: Buffer, code: str) -> memoryview[Any]:
    """Return a buffer as numbers of a format of `struct`, without a copy."""
    numbers: memoryview[Any] = memoryview(data).cast("B").cast(code)  # type: ignore[call-overload]
    return numbers


def _whole_numbers(data: memoryview, start: int, stop: int) -> list[int]:
    read = int.from_bytes
    return [read(data[at : at + 16], "little", signed=True) for at in range(16 * start, 16 * stop, 16)]


def is_time_zone(name: str) -> bool:
    """Return whether a column may have such a time zone: a name, or a distance from UTC."""
    return len(name) <= 64 and bool(ZONE_NAME.fullmatch(name) or ZONE_OFFSET.fullmatch(name))


def time_zone(name: str | None) -> tzinfo | None:
    """Return a time zone by its name or its distance from UTC; UTC for one that this machine does not know."""
    if name is None:
        return None
    if name[0] in "+-":
        minutes = 60 * int(name[1:3]) + int(name[4:6])
        return timezone(timedelta(minutes=-minutes if name[0] == "-" else minutes))
    if name == "UTC":
        return timezone.utc  # noqa: UP017  # a run may replace the module's names
    from zoneinfo import ZoneInfo

    try:
        return ZoneInfo(name)
    except (ValueError, OSError, KeyError):
        return timezone.utc  # noqa: UP017


def _moment(count: int, unit: str, zone: tzinfo | None) -> datetime | str | None:
    if count == NOT_A_TIME:
        return None
    try:
        moment = _EPOCH + timedelta(microseconds=count * 10**6 // UNITS[unit])
        return moment if zone is None else moment.replace(tzinfo=timezone.utc).astimezone(zone)  # noqa: UP017
    except (OverflowError, ValueError):
        return f"{count} {unit} after 1970-01-01"


def _duration(count: int, unit: str) -> timedelta | str | None:
    if count == NOT_A_TIME:
        return None
    try:
        return timedelta(microseconds=count * 10**6 // UNITS[unit])
    except OverflowError:
        return f"{count} {unit}"


def _day(count: int) -> date | str:
    try:
        return date.fromordinal(FIRST_DAY + count)
    except (ValueError, OverflowError):
        return f"{count} days after 1970-01-01"


def _time(count: int) -> time:
    micros = count // 1000
    return time(micros // 3_600_000_000, micros // 60_000_000 % 60, micros // 10**6 % 60, micros % 10**6)


def _decimal(places: int) -> Callable[[int], Any]:
    from decimal import Context, Decimal

    exact = Context(prec=2 * MOST_DIGITS)
    return lambda number: exact.scaleb(Decimal(number), -places)


def _is_moment(detail: Any) -> bool:
    match detail:
        case [str(unit), None | str() as zone]:
            return unit in UNITS and (zone is None or is_time_zone(zone))
    return False


def _is_decimal(detail: Any) -> bool:
    match detail:
        case [int(digits), int(places)] if type(digits) is int is type(places):
            return 1 <= digits <= MOST_DIGITS and abs(places) <= MOST_DIGITS
    return False


@frozen
class FixedWidth:
    """A kind of values of one width: what may be said of them, and what Python and each package make of them.

    Each is a number of a format of `struct`, or `parts` of them. The functions take the detail of a column.
    """

    code: str
    parts: int = 1
    read: Callable[[memoryview, int, int], list[Any]] | None = None
    """Reads some of the numbers, where `struct` has no array of them."""
    value: Callable[[Any], Callable[[Any], Any]] | None = None
    """Returns what makes the value of a number."""
    is_detail: Callable[[Any], bool] = lambda detail: detail is None
    check: Callable[[Buffer, int, Any], Generator[None, None, None]] | None = None
    """Checks all numbers; takes the detail last."""
    dtype: Callable[[Any], str] = str
    """What people call the type."""
    numpy: str = ""
    """The type in numpy, with the detail as `{0}`; empty where an array has objects."""
    arrow: Callable[[Any, Any], Any] | None = None
    """Returns the type in pyarrow; None: the name of the kind."""
    polars: str = ""
    """The type in polars: empty where it is that of numpy."""
    of_polars: Callable[[Any], Any] = lambda _: None
    """Returns the detail of a type of polars."""

    @property
    def width(self) -> int:
        """Bytes of each value."""
        return struct.calcsize(self.code) * self.parts

    def numbers(self, data: Buffer, start: int, stop: int) -> list[Any]:
        """Return some of the numbers."""
        if self.read is not None:
            return self.read(memoryview(data).cast("B"), start, stop)
        parts = as_numbers(data, self.code)[self.parts * start : self.parts * stop].tolist()
        return parts if self.parts == 1 else [complex(*each) for each in zip(parts[::2], parts[1::2], strict=True)]


NUMBERS: Final = {
    **{f"int{8 << place}": code for place, code in enumerate("bhiq")},
    **{f"uint{8 << place}": code for place, code in enumerate("BHIQ")},
    "float32": "f",
    "float64": "d",
}
"""Numbers that Python and numpy have in the same form, and their formats."""
FIXED: Final[Mapping[str, FixedWidth]] = {
    **{name: FixedWidth(code, numpy=name) for name, code in NUMBERS.items()},
    "bool": FixedWidth("B", value=lambda _: bool, numpy="bool"),
    "float16": FixedWidth(
        "e",
        read=lambda data, start, stop: list(struct.unpack(f"<{stop - start}e", data[2 * start : 2 * stop])),
        numpy="float16",
    ),
    "complex64": FixedWidth("f", parts=2, numpy="complex64"),
    "complex128": FixedWidth("d", parts=2, numpy="complex128"),
    "datetime": FixedWidth(
        "q",
        value=lambda detail: partial(_moment, unit=detail[0], zone=time_zone(detail[1])),
        is_detail=_is_moment,
        dtype=lambda detail: f"datetime[{', '.join(filter(None, detail))}]",
        numpy="datetime64[{0[0]}]",
        arrow=lambda arrow, detail: arrow.timestamp(detail[0], tz=detail[1]),
        of_polars=lambda of: (of.time_unit, of.time_zone),
    ),
    "duration": FixedWidth(
        "q",
        value=lambda unit: partial(_duration, unit=unit),
        is_detail=lambda unit: type(unit) is str and unit in UNITS,
        dtype=lambda unit: f"duration[{unit}]",
        numpy="timedelta64[{0}]",
        arrow=lambda arrow, unit: arrow.duration(unit),
        of_polars=lambda of: of.time_unit,
    ),
    "date": FixedWidth("i", value=lambda _: _day, arrow=lambda arrow, _: arrow.date32(), polars="Date"),
    "time": FixedWidth(
        "q",
        value=lambda _: _time,
        check=lambda data, _, __: _check_range(data, "q", 0, 86_400 * 10**9 - 1),
        arrow=lambda arrow, _: arrow.time64("ns"),
        polars="Time",
    ),
    "decimal": FixedWidth(
        "16s",
        read=_whole_numbers,
        value=lambda detail: _decimal(detail[1]),
        is_detail=_is_decimal,
        check=lambda data, count, detail: _check_digits(data, count, detail[0]),
        dtype=lambda detail: "decimal({}, {})".format(*detail),
        arrow=lambda arrow, detail: arrow.decimal128(*detail),
    ),
    "null": FixedWidth("B", value=lambda _: lambda _: None),
}
"""Kinds of fixed width. A `datetime` or `duration` counts units, a `date` days, a `time` nanoseconds; the first three
count from 1970-01-01. A `decimal` is a whole number that counts its last place."""


def padding(size: int) -> int:
    """Return how many bytes follow a buffer up to the next one."""
    return -size % ALIGNMENT


class ColumnReader:
    """Reads columns from their descriptions and the bytes of their buffers, and checks them.

    Each step of a reader takes some milliseconds at most.
    """

    def __init__(self, data: Buffer) -> None:
        self._data = memoryview(data)
        self._at = 0

    def take(self, size: int) -> memoryview:
        """Return the next buffer.

        Raises:
            BadTable: there is less.
        """
        end = self._at + size
        if end > len(self._data):
            raise BadTable(f"a buffer of {size} bytes is announced, and {len(self._data) - self._at} are left")
        found = self._data[self._at : end]
        self._at = min(end + padding(size), len(self._data))
        return found

    def check_end(self) -> None:
        """Check that nothing is left.

        Raises:
            BadTable: something is.
        """
        if self._at != len(self._data):
            raise BadTable(f"{len(self._data) - self._at} bytes after the last buffer")

    def column(
        self, header: object, length: int, *, may_be_range: bool = False, depth: int = 0
    ) -> Generator[None, None, Column]:
        """Read a column of so many rows. `may_be_range`: of a range, which has no bytes for its rows. `depth`: of the
        lists that it is in.

        Raises:
            BadTable: the description is none, or contradicts the bytes.
        """
        match header:
            case [str(kind), str(form), bool(has_nulls), int(text_bytes), detail] if type(text_bytes) is int:
                pass
            case _:
                raise BadTable("the description of a column is not one")
        if not 0 <= length <= MOST_ROWS or text_bytes < 0 or (text_bytes and kind not in TEXTS):
            raise BadTable(f"a column of {length} rows and {text_bytes} bytes of text")
        if form not in FORMS and not (kind == "text" and _PANDAS_DTYPE.fullmatch(form)):
            raise BadTable(f"a column of {kind[:20]!r} in the form {form[:20]!r}")
        data: Buffer = b""
        lengths: Buffer = b""
        if kind in TEXTS:
            lengths = self.take(_LENGTHS * length)
            data = self.take(text_bytes)
            yield from _check_texts(data, lengths, kind == "text")
        elif kind in FIXED:
            data = self.take(length * FIXED[kind].width)
        elif kind == "list":
            lengths = b"" if _is_fixed(detail, length, depth) else self.take(_LENGTHS * length)
        elif kind == "category":
            data = self.take(length * FIXED[_codes_of(detail)].width)
        elif kind != "plain" and not (kind == "range" and may_be_range):
            raise BadTable(f"a column of an unknown kind, {kind[:20]!r}")
        valid = self.take((length + 7) // 8) if has_nulls else None
        if kind == "category":
            detail = yield from self._categories(detail, data)
        elif kind == "list":
            detail = yield from self._items(detail, lengths, depth)
        else:
            detail = _checked_detail(kind, detail, length)
        if kind in FIXED and (check := FIXED[kind].check) is not None:
            yield from check(data, length, detail)
        return Column(kind, length, data, lengths, valid, form, detail)

    def _categories(self, detail: Any, codes: Buffer) -> Generator[None, None, tuple[Column, bool]]:
        ordered, kind, count, header = detail
        if isinstance(header, list) and header[:1] in (["category"], ["list"]):
            raise BadTable("categories of categories or lists")
        categories = yield from self.column(header, count)
        yield from _check_range(codes, NUMBERS[kind], -1, count - 1)
        return categories, ordered

    def _items(self, detail: Any, lengths: Buffer, depth: int) -> Generator[None, None, tuple[Column, int]]:
        size, count, header = detail
        items = yield from self.column(header, count, depth=depth + 1)
        if not size and (yield from _sum(lengths)) != count:
            raise BadTable(f"lists of other lengths than {count} items together")
        return items, size


def _is_fixed(detail: Any, length: int, depth: int) -> bool:
    match detail:
        case [int(size), int(count), list()] if type(size) is int is type(count) and depth < MOST_NESTED:
            if size == 0 or (0 < size <= MOST_SIZE and size * length == count):
                return size > 0
    raise BadTable("the description of lists is not one")


def _codes_of(detail: Any) -> str:
    match detail:
        case [bool(), str(kind), int(count), list()] if kind in CODES and type(count) is int:
            return kind
    raise BadTable("the description of categories is not one")


def _checked_detail(kind: str, detail: Any, length: int) -> Any:
    """Return what a description says of a column, whose lists are tuples unless they are data."""
    match kind, detail:
        case (("text" | "bytes"), None | int()):
            if detail is None or (type(detail) is int and 0 <= detail <= MOST_SIZE // 4):
                return detail
        case "range", [int(start), int(step)]:
            if type(start) is int is type(step) and abs(start) < 2**62 and 0 < abs(step) < 2**40:
                return start, step
        case "plain", list() if len(detail) == length:
            return detail
        case _ if kind in FIXED and FIXED[kind].is_detail(detail):
            return tuple(detail) if type(detail) is list else detail
    raise BadTable(f"the description of a {kind[:20]} column is not one")


def _numpy() -> Any:
    """Return numpy where the program has imported it: its checks take a tenth of the time."""
    numpy = sys.modules.get("numpy")
    is_loading = getattr(getattr(numpy, "__spec__", None), "_initializing", True)  # by another thread
    return None if is_loading else numpy


def _check_range(data: Buffer, code: str, least: int, most: int) -> Generator[None, None, None]:
    numbers, numpy = as_numbers(data, code), _numpy()
    for at in range(0, len(numbers), _CHUNK):
        yield
        chunk: Any = numbers[at : at + _CHUNK]
        if numpy is None:
            chunk = chunk.tolist()
            lowest, highest = min(chunk), max(chunk)
        else:
            chunk = numpy.frombuffer(chunk, dtype=code)
            lowest, highest = chunk.min(), chunk.max()
        if lowest < least or highest > most:
            raise BadTable(f"a number that is not in {least} to {most}")


def _check_digits(data: Buffer, count: int, digits: Any) -> Generator[None, None, None]:
    whole = memoryview(data)
    end = 10**digits
    for at in range(0, count, _PIECE_ROWS):
        yield
        if not all(-end < each < end for each in _whole_numbers(whole, at, min(at + _PIECE_ROWS, count))):
            raise BadTable("a decimal with more digits than announced")


def _check_texts(data: Buffer, lengths: Buffer, is_text: bool) -> Generator[None, None, None]:
    """Check that lengths add up to the data, and that each text is UTF-8 by itself."""
    sizes, whole, numpy = as_numbers(lengths, "I"), memoryview(data), _numpy()
    total = yield from _sum(lengths)
    if total != len(whole):
        raise BadTable(f"texts of {total} bytes in {len(whole)} bytes")
    if not is_text:
        return
    is_ascii = True
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for at in range(0, len(whole), _CHUNK):
            yield
            piece = bytes(whole[at : at + _CHUNK])
            is_ascii = is_ascii and piece.isascii()
            if not is_ascii:
                decoder.decode(piece)
        decoder.decode(b"", True)
    except UnicodeDecodeError as exc:
        raise BadTable(f"text that is not UTF-8: {exc.reason}") from None
    if not is_ascii:
        yield from _check_starts(sizes, whole, numpy)


def _sum(lengths: Buffer) -> Generator[None, None, int]:
    sizes, numpy, total = as_numbers(lengths, "I"), _numpy(), 0
    for at in range(0, len(sizes), _CHUNK):
        yield
        chunk = sizes[at : at + _CHUNK]
        total += sum(chunk.tolist()) if numpy is None else int(numpy.frombuffer(chunk, dtype="I").sum(dtype="int64"))
    return total


def _check_starts(sizes: memoryview[int], whole: memoryview, numpy: Any) -> Generator[None, None, None]:
    """Check that no text begins inside a character."""
    end = 0
    for at in range(0, len(sizes), _CHUNK):
        yield
        chunk = sizes[at : at + _CHUNK]
        if numpy is None:
            starts = list(accumulate(chunk.tolist(), initial=0))
            firsts = bytes(itemgetter(*starts)(bytes(whole[end : end + starts[-1]]) + b"\0"))
        else:
            starts = numpy.cumsum(numpy.frombuffer(chunk, dtype="I"), dtype="int64")
            firsts = numpy.frombuffer(whole, dtype="B")[end + starts[end + starts < len(whole)]].tobytes()
        if firsts.translate(None, _CONTINUATION) != firsts:
            raise BadTable("a text that begins inside a character")
        end += int(starts[-1])
