"""Make `Array` and `Table` values of arrays, series and frames of numpy, pandas, polars and pyarrow.

No package is imported that has not made the value, but for numpy, which reads the numbers of polars if it is there.
"""

from __future__ import annotations

import re
import warnings
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date, time, timedelta
from itertools import chain, repeat
from types import NoneType
from typing import Any, Final

from toolcell_bridge.guest.refusals import Refusal
from toolcell_bridge.wire.columns import (
    CODES,
    FIRST_DAY,
    FIXED,
    MOST_DIGITS,
    MOST_NESTED,
    UNITS,
    ZONE_NAME,
    Column,
    is_time_zone,
)
from toolcell_bridge.wire.table_packages import arrow_values, polars_values
from toolcell_bridge.wire.tables import Array, Axis, Table

_OWN_TYPE: Final = {bool: ("bool", "B"), int: ("int64", "q"), float: ("float64", "d")}

ToPlain = Callable[[str, list[Any]], list[Any]]
"""Converts the items of a column that has values of several kinds; takes the column's name."""


def _warn(name: str, given: object, sent: object) -> None:
    """Say that values arrive as another type."""
    where = f"column {name!r}: " if name else ""
    warnings.warn(f"{where}values of type {given} arrive as {sent}", UserWarning, stacklevel=2)


def _refusal(name: str, problem: str) -> Refusal:
    """Return what refuses a value of a column."""
    refusal = Refusal(problem)
    refusal.steps += [name] if name else []
    return refusal


# Python's own values


def column_of(name: str, items: list[Any], to_plain: ToPlain, form: str = "object", depth: int = 0) -> Column:
    """Return a column of Python values: of one kind where they have one, or else of plain data."""
    kinds = set(map(type, items))
    valid = bits([each is not None for each in items]) if NoneType in kinds else None
    kinds.discard(NoneType)
    only = next(iter(kinds)) if len(kinds) == 1 else NoneType
    if only is str:
        return text_column(name, items, valid, form)
    if only is date:
        days = array("i", [0 if each is None else each.toordinal() - FIRST_DAY for each in items])
        return Column("date", len(items), _bytes(days), valid=valid, form=form)
    if only is time and not any(each.tzinfo for each in items if each is not None):
        times = array("q", [0 if each is None else _nanoseconds(each) for each in items])
        return Column("time", len(items), _bytes(times), valid=valid, form=form)
    if only in _OWN_TYPE:
        kind, code = _OWN_TYPE[only]
        try:
            numbers = array(code, [0 if each is None else each for each in items])
        except OverflowError:
            return _plain_column(name, items, to_plain)
        return Column(kind, len(items), _bytes(numbers), valid=valid, form=form)
    if (only.__module__, only.__name__) == ("decimal", "Decimal"):
        if (found := decimal_column(items, valid, form)) is not None:
            return found
    elif only is list or (only.__module__, only.__name__) == ("numpy", "ndarray"):
        rows = [each for each in items if each is not None]
        inner = _items_of_lists(name, rows, to_plain, depth) if only is list else _items_of_arrays(name, rows, to_plain)
        if inner is not None:
            lengths = array("I", [0 if each is None else len(each) for each in items])
            form = form if only is list else "array"
            return Column("list", len(items), lengths=_bytes(lengths), valid=valid, form=form, detail=(inner, 0))
    return _plain_column(name, items, to_plain)


def _plain_column(name: str, items: list[Any], to_plain: ToPlain) -> Column:
    """Return a column of plain data, and say which values are converted for it, but for numbers of numpy."""
    detail = to_plain(name, items)
    for given, sent in {(type(each), type(as_sent)) for each, as_sent in zip(items, detail, strict=True)}:
        if sent is not NoneType and not issubclass(given, sent) and given.__module__ != "numpy":
            _warn(name, given.__name__, sent.__name__)
    return Column("plain", len(items), form="object", detail=detail)


def _nanoseconds(moment: time) -> int:
    seconds = 3600 * moment.hour + 60 * moment.minute + moment.second
    return 1000 * (1_000_000 * seconds + moment.microsecond)


def _items_of_lists(name: str, rows: list[list[Any]], to_plain: ToPlain, depth: int) -> Column | None:
    """Return the items of all lists, or None if they have no kind in common."""
    items = list(chain.from_iterable(rows))
    kinds = set(map(type, items)) - {NoneType}
    if len(kinds) != 1 or not kinds <= {list, *_OWN_TYPE, str} or depth + 1 >= MOST_NESTED:
        return None
    column = column_of(name, items, to_plain, depth=depth + 1)
    return None if column.kind == "plain" else column


def _items_of_arrays(name: str, rows: list[Any], to_plain: ToPlain) -> Column | None:
    """Return the items of all arrays, or None if these are not alike."""
    import numpy

    kinds = {(each.dtype, each.ndim) for each in rows}
    if len(kinds) != 1 or rows[0].ndim != 1 or rows[0].dtype.kind in "OVT":
        return None
    return numpy_column(name, numpy.concatenate(rows), to_plain)


def decimal_column(
    items: Sequence[Any], valid: bytes | None, form: str, places: int | None = None, digits: int = MOST_DIGITS
) -> Column | None:
    """Return a column of decimals, or None if one is not a number, or they have too many digits together.

    `places`: behind the point; without it, as many as the value with the most.
    """
    from decimal import Context, Decimal

    exact, given = Context(prec=2 * MOST_DIGITS), [Decimal(0) if each is None else each for each in items]
    if not all(each.is_finite() and abs(each.adjusted()) <= MOST_DIGITS for each in given):
        return None
    if places is None:
        places = max([0, *(-int(each.as_tuple().exponent) for each in given)])
    if places > MOST_DIGITS:
        return None
    numbers = [int(exact.scaleb(each, places)) for each in given]
    if any(abs(each) >= 10**digits for each in numbers):
        return None
    data = b"".join(each.to_bytes(16, "little", signed=True) for each in numbers)
    return Column("decimal", len(items), data, valid=valid, form=form, detail=(digits, places))


def text_column(name: str, items: Sequence[str | None], valid: bytes | None, form: str) -> Column:
    """Return a column of text."""
    texts: Sequence[str] = ["" if each is None else each for each in items] if valid is not None else items  # type: ignore[assignment]
    joined = "".join(texts)
    if joined.isascii():
        data, lengths = joined.encode(), array("I", map(len, texts))
    else:
        try:
            parts = list(map(str.encode, texts))
        except UnicodeEncodeError as exc:
            raise _refusal(name, f"text holds a lone surrogate at index {exc.start}") from None
        data, lengths = b"".join(parts), array("I", map(len, parts))
    return Column("text", len(texts), data, _bytes(lengths), valid, form)


def bits(are_valid: Sequence[bool]) -> bytes:
    """Pack one bit per row, lowest first."""
    digits = "".join("1" if each else "0" for each in reversed(are_valid))
    return int(digits or "0", 2).to_bytes((len(are_valid) + 7) // 8, "little")


def _bytes(numbers: array[Any]) -> memoryview:
    return memoryview(numbers).cast("B")


# numpy


def array_of(value: Any, to_plain: ToPlain) -> Array | Table | None:
    """Return an array of numpy, or None for one of records in records."""
    kind = type(value).__name__
    masked = hasattr(value, "mask") and hasattr(value, "filled")
    if kind not in ("ndarray", "memmap", "recarray") and not masked:
        _warn("", kind, "ndarray")
    if value.dtype.kind == "V":
        fields = {name: value.dtype[name] for name in value.dtype.names or ()}
        if not fields or masked or value.ndim != 1 or any(each.kind == "V" for each in fields.values()):
            _warn("", value.dtype, "lists")
            return None
        columns = [numpy_column(name, _flat(value[name]), to_plain) for name in fields]
        made_as = "numpy.recarray" if kind == "recarray" else "numpy.ndarray"
        return Table(made_as, len(value), Axis(), _text_axis(list(fields)), columns)
    numbers = value.data if masked else value
    column = numpy_column("", _flat(numbers), to_plain)
    if masked:
        import numpy

        missing = numpy.broadcast_to(numpy.ma.getmaskarray(value), value.shape).reshape(-1)
        if str(value.fill_value) != str(numpy.ma.default_fill_value(value.dtype)):
            warnings.warn("the fill_value of a masked array is not sent", UserWarning, stacklevel=2)
        if column.kind == "date":
            missing = missing | numpy.isnat(_flat(numbers))
        column = replace(column, valid=_packed_bits(~missing))
    return Array("numpy.ma" if masked else "numpy", value.shape, column)


def _flat(value: Any) -> Any:
    import numpy

    return numpy.ascontiguousarray(value).reshape(-1)


def numpy_column(name: str, values: Any, to_plain: ToPlain, form: str = "", valid: bytes | None = None) -> Column:
    """Return an array of one dimension as a column."""
    kind, count = values.dtype.kind, len(values)
    if kind == "O":
        return column_of(name, values.tolist(), to_plain)
    if kind == "U":
        return replace(text_column(name, values.tolist(), None, form), detail=values.dtype.itemsize // 4)
    if kind == "S":
        items, width = values.tolist(), values.dtype.itemsize
        return Column("bytes", count, b"".join(items), _bytes(array("I", map(len, items))), valid, form, width)
    if kind in "Mm":
        return _numpy_times(name, values, form, valid)
    if kind == "T":
        return column_of(name, values.tolist(), to_plain, "object")
    wide = {"longdouble": "float64", "clongdouble": "complex128"}.get(values.dtype.type.__name__)
    if wide is not None:
        _warn(name, values.dtype, wide)
        values = values.astype(wide)
    if values.dtype.name not in FIXED:
        raise _refusal(name, f"numpy's {values.dtype.name} has no form on the wire: convert it with astype()")
    return Column(values.dtype.name, count, _memory(values), valid=valid, form=form)


def _memory(values: Any) -> memoryview:
    """Return the bytes of an array of one dimension, little-endian."""
    import numpy

    values = numpy.ascontiguousarray(values)
    if values.dtype.byteorder == ">":
        values = values.astype(values.dtype.newbyteorder("<"))
    return memoryview(values.view("uint8"))


def _numpy_times(name: str, values: Any, form: str, valid: bytes | None) -> Column:
    unit = str(values.dtype).partition("[")[2].rstrip("]").lstrip("0123456789")
    is_date = values.dtype.kind == "M"
    if is_date and unit in ("Y", "M", "W", "D"):
        import numpy

        days = values.astype("datetime64[D]").astype("int64")
        missing = numpy.isnat(values)
        if missing.any():
            valid, days = _packed_bits(~missing), numpy.where(missing, 0, days)
        if ((days >= -(2**31)) & (days < 2**31)).all():
            if (given := str(values.dtype)) != "datetime64[D]":
                _warn(name, given, "datetime64[D]")
            return Column("date", len(values), _memory(days.astype("int32")), valid=valid, form=form)
    if unit not in UNITS:
        unit = "ns" if unit in ("ps", "fs", "as") else "s"
    wanted = f"{'datetime64' if is_date else 'timedelta64'}[{unit}]"
    if (given := values.dtype.newbyteorder("<")) != wanted:
        _warn(name, given, wanted)
        values = values.astype(wanted)
    return Column(
        "datetime" if is_date else "duration",
        len(values),
        _memory(values.view("int64")),
        valid=valid,
        form=form,
        detail=(unit, None) if is_date else unit,
    )


def _packed_bits(are_valid: Any) -> bytes:
    import numpy

    return numpy.packbits(are_valid, bitorder="little").tobytes()


# pandas


def pandas_frame(value: Any, to_plain: ToPlain) -> Table:
    """Return a DataFrame."""
    if value.attrs:
        warnings.warn("the attrs of a frame are not sent", UserWarning, stacklevel=2)
    columns = [
        _pandas_column(str(label), value.iloc[:, number], to_plain) for number, label in enumerate(value.columns)
    ]
    index, axis = pandas_axis(value.index, to_plain), pandas_axis(value.columns, to_plain)
    return Table("pandas.DataFrame", len(value), index, axis, columns)


def pandas_series(value: Any, to_plain: ToPlain) -> Table:
    """Return a Series."""
    column = _pandas_column("" if value.name is None else str(value.name), value, to_plain)
    label = value.name if isinstance(value.name, tuple) else (value.name,)
    levels = tuple(column_of("name", [each], _labels(to_plain)) for each in label)
    axis = Axis(levels, tuple(repeat(None, len(levels))))
    return Table("pandas.Series", len(value), pandas_axis(value.index, to_plain), axis, [column])


def pandas_axis(index: Any, to_plain: ToPlain) -> Axis:
    """Return an Index."""
    names = tuple(each if isinstance(each, (NoneType, bool, int, float, str)) else str(each) for each in index.names)
    if hasattr(index, "levels"):
        levels = [index.get_level_values(number) for number in range(index.nlevels)]
        return Axis(
            tuple(_pandas_column(str(name), each, _labels(to_plain)) for name, each in zip(names, levels, strict=True)),
            names,
        )
    if type(index).__name__ == "RangeIndex":
        return Axis((Column("range", len(index), detail=(index.start, index.step)),), names)
    return Axis((_pandas_column("index", index, _labels(to_plain)),), names)


def _labels(to_plain: ToPlain) -> ToPlain:
    """Convert labels that have no kind in common: what is not a scalar becomes text."""
    return lambda name, items: to_plain(
        name, [each if isinstance(each, (NoneType, bool, int, float, str)) else str(each) for each in items]
    )


def _pandas_column(name: str, values: Any, to_plain: ToPlain) -> Column:
    """Return a Series or an Index as a column."""
    dtype = values.dtype
    kind = type(dtype).__name__
    if kind == "CategoricalDtype":
        held = values.array
        categories = _pandas_column(name, held.categories, to_plain)
        return Column("category", len(values), _memory(held.codes), detail=(categories, bool(held.ordered)))
    if kind == "DatetimeTZDtype":
        times = values.array.tz_convert("UTC").tz_localize(None)
        return Column(
            "datetime",
            len(values),
            _memory(times.to_numpy().view("int64")),
            detail=(dtype.unit, _zone(name, dtype.tz)),
        )
    if kind == "ArrowDtype" or (kind == "StringDtype" and dtype.storage == "pyarrow"):
        form = "arrow" if kind == "ArrowDtype" else _form_of_text(dtype)
        return replace(_arrow_column(name, values.array.__arrow_array__(), to_plain), form=form)
    if kind in ("StringDtype", "PeriodDtype", "IntervalDtype"):
        return _pandas_texts(name, values, form=_form_of_text(dtype) if kind == "StringDtype" else str(dtype))
    if kind == "SparseDtype":
        _warn(name, dtype, dtype.subtype)
        return _pandas_column(name, values.sparse.to_dense(), to_plain)
    if hasattr(dtype, "numpy_dtype") and kind != "NumpyEADtype":
        missing = values.isna()
        has_missing = bool(missing.any())
        plain = values.to_numpy(dtype=dtype.numpy_dtype, na_value=_zero(dtype.kind)) if has_missing else None
        numbers = values.to_numpy(dtype=dtype.numpy_dtype) if plain is None else plain
        valid = _packed_bits(~_as_array(missing)) if has_missing else None
        return numpy_column(name, numbers, to_plain, "masked", valid)
    if getattr(dtype, "kind", "") == "O":
        items = values.tolist()
        kinds = set(map(type, items))
        if kinds == {str}:
            return text_column(name, items, None, "object")
        if str in kinds:  # as text, if what else there is stands for missing text
            missing = _as_array(values.isna()).tolist()
            texts = [None if gone else each for each, gone in zip(items, missing, strict=True)]
            items = texts if set(map(type, texts)) == {NoneType, str} else items
        return column_of(name, items, to_plain)
    return numpy_column(name, values.to_numpy(), to_plain)


def _zero(kind: str) -> Any:
    if kind in "mM":
        import numpy

        return numpy.datetime64("NaT") if kind == "M" else numpy.timedelta64("NaT")
    return False if kind == "b" else 0


def _as_array(values: Any) -> Any:
    return values.to_numpy() if hasattr(values, "to_numpy") else values


def _form_of_text(dtype: Any) -> str:
    return "string" if repr(dtype.na_value) == "<NA>" else "str"


def _pandas_texts(name: str, values: Any, form: str) -> Column:
    """Return text that is kept as objects, and what has no better form than its text."""
    items: list[Any] = values.tolist()
    is_text = form in ("str", "string")
    if is_text:
        try:
            return text_column(name, items, None, form)
        except TypeError:
            pass  # some are missing
    missing = _as_array(values.isna())
    valid = None
    if form.startswith("period") and not all(1 <= each.year <= 9999 for each in _extremes(values)):
        _warn(name, form, "text")  # which pandas does not read
    if missing.any():
        valid = _packed_bits(~missing)
        items = ["" if gone else each for each, gone in zip(items, missing.tolist(), strict=True)]
    return text_column(name, items if is_text else list(map(str, items)), valid, form)


def _extremes(values: Any) -> list[Any]:
    """Return the first and the last value in time; nothing where all are missing."""
    present = values.dropna()
    return [present.min(), present.max()] if len(present) else []


def _zone(name: str, zone: Any) -> str:
    """Return a time zone's name, or its distance from UTC."""
    key = getattr(zone, "key", None) or getattr(zone, "zone", None) or str(zone)
    if isinstance(key, str) and ZONE_NAME.fullmatch(key) and not key.startswith("UTC+") and not key.startswith("UTC-"):
        return key
    offset = zone.utcoffset(None)
    if offset is None or offset % timedelta(minutes=1):
        raise _refusal(name, f"the time zone {key!s:.40} has no name: convert it with tz_convert('UTC')")
    minutes = offset // timedelta(minutes=1)
    return f"{'-' if minutes < 0 else '+'}{abs(minutes) // 60:02}:{abs(minutes) % 60:02}"


# polars


def polars_frame(value: Any, to_plain: ToPlain) -> Table:
    """Return a frame of polars."""
    names = value.columns
    columns = [_polars_column(name, value.get_column(name), to_plain) for name in names]
    return Table("polars.DataFrame", value.height, Axis(), _text_axis(names), columns)


def polars_series(value: Any, to_plain: ToPlain) -> Table:
    """Return a Series of polars."""
    column = _polars_column(value.name, value, to_plain)
    return Table("polars.Series", len(value), Axis(), _text_axis([value.name]), [column])


def _text_axis(names: Sequence[str | None]) -> Axis:
    valid = bits([each is not None for each in names]) if None in names else None
    return Axis((text_column("a label", names, valid, "object"),), (None,))


def _polars_column(name: str, values: Any, to_plain: ToPlain) -> Column:
    kind, count = type(values.dtype).__name__, len(values)
    valid = _polars_bits(values.is_not_null()) if values.null_count() else None
    if kind == "Null":
        return Column("null", count, bytes(count), valid=None)
    if kind == "String":
        return _polars_text(values, valid)
    if kind == "Binary":
        items = [each or b"" for each in values.to_list()]
        return Column("bytes", count, b"".join(items), _bytes(array("I", map(len, items))), valid)
    if kind in ("Categorical", "Enum"):
        return _polars_coded(values)
    fixed = "bool" if kind == "Boolean" else kind.lower()
    if fixed in FIXED and kind != "Decimal":
        numbers = _polars_memory(values.to_physical(), FIXED[fixed].code)
        return Column(fixed, count, numbers, valid=valid, detail=FIXED[fixed].of_polars(values.dtype))
    if kind == "Decimal":
        found = decimal_column(values.to_list(), valid, "", values.dtype.scale, values.dtype.precision or MOST_DIGITS)
        if found is not None:
            return found
    elif kind in ("List", "Array") and _is_list_of_values(values.dtype):
        return _polars_lists(name, values, valid, to_plain)
    import polars

    column = Column("plain", count, form="object", detail=to_plain(name, values.to_list()))
    if (again := polars_values(polars, name, column).dtype) != values.dtype:
        _warn(name, values.dtype, again)
    return column


def _is_list_of_values(dtype: Any) -> bool:
    """Whether no records are in lists, and these are not nested too deep."""
    count, inner = 0, dtype
    while type(inner).__name__ in ("List", "Array"):
        count, inner = count + 1, inner.inner
    return count <= MOST_NESTED and type(inner).__name__ not in ("Struct", "Object")


def _polars_lists(name: str, values: Any, valid: bytes | None, to_plain: ToPlain) -> Column:
    import polars

    size = getattr(values.dtype, "size", 0)
    if size and valid is not None:  # a missing one has items, too
        whole = polars.Series([[None] * size if each is None else each for each in values.to_list()])
        values = whole.cast(polars.List(values.dtype.inner))
    elif size:
        values = values.cast(polars.List(values.dtype.inner))
    lengths = values.list.len()
    items = _polars_column(name, values.filter(lengths > 0).explode(), to_plain)
    sizes = memoryview(b"") if size else _polars_memory(lengths.cast(polars.UInt32), "I")
    return Column("list", len(values), lengths=sizes, valid=valid, detail=(items, size))


def _polars_memory(values: Any, code: str) -> memoryview:
    if values.null_count():
        values = values.fill_null(False if code == "B" and type(values.dtype).__name__ == "Boolean" else 0)
    try:
        import numpy  # noqa: F401
    except ImportError:
        return _bytes(array(code, values.to_list()))
    return _memory(values.to_numpy())


def _polars_text(values: Any, valid: bytes | None) -> Column:
    data = (values.fill_null("").str.join("")[0] or "").encode()
    return Column("text", len(values), data, _polars_memory(values.str.len_bytes(), "I"), valid, "str")


def _polars_bits(are_valid: Any) -> bytes:
    try:
        return _packed_bits(are_valid.to_numpy())
    except ImportError:  # without numpy
        return bits(are_valid.to_list())


def _polars_coded(values: Any) -> Column:
    """Return the categories that occur, in the order of their physical numbers, and the codes of the values."""
    import polars

    if type(values.dtype).__name__ == "Enum":
        codes = values.to_physical().cast(polars.Int32).fill_null(-1)
        detail = (_polars_text(values.dtype.categories, None), True)
        return Column("category", len(values), _polars_memory(codes, "i"), form="enum", detail=detail)
    physical, present = values.to_physical(), values.drop_nulls()
    numbers = present.to_physical()
    firsts = numbers.arg_unique()
    firsts = firsts.gather(numbers.gather(firsts).arg_sort())
    categories = _polars_text(present.gather(firsts).cast(polars.String), None)
    codes = numbers.gather(firsts).search_sorted(physical).cast(polars.Int32).set(values.is_null(), -1)
    return Column("category", len(values), _polars_memory(codes, "i"), detail=(categories, False))


# pyarrow


def arrow_table(value: Any, to_plain: ToPlain) -> Table:
    """Return a table or a record batch of pyarrow."""
    metadata = value.schema.metadata or {}
    if set(metadata) - {b"pandas"} or b'"index_columns": ["' in metadata.get(b"pandas", b""):
        warnings.warn("the metadata of a schema are not sent", UserWarning, stacklevel=2)
    columns = [
        _arrow_column(str(name), each, to_plain) for name, each in zip(value.schema.names, value.columns, strict=True)
    ]
    return Table("pyarrow.Table", value.num_rows, Axis(), _text_axis(value.schema.names), columns)


def arrow_array(value: Any, to_plain: ToPlain) -> Table:
    """Return an Array or a ChunkedArray of pyarrow."""
    return Table("pyarrow.Array", len(value), Axis(), _text_axis([None]), [_arrow_column("", value, to_plain)])


def _arrow_column(name: str, values: Any, to_plain: ToPlain) -> Column:
    """Return an Array or a ChunkedArray as a column."""
    import pyarrow as arrow

    column = _arrow_buffers(name, values, to_plain)
    empty = replace(column, length=0, data=b"", lengths=b"", valid=None)
    again = arrow_values(arrow, column if column.kind == "plain" else empty).type
    if column.kind != "category" and _without_layout(again) != _without_layout(values.type):
        _warn(name, values.type, again)
    return column


def _is_record(kind: Any) -> bool:
    import pyarrow.types as kinds

    return bool(kinds.is_struct(kind) or kinds.is_map(kind))


def _nested(kind: Any) -> int:
    """Return how many lists are in one another."""
    import pyarrow.types as kinds

    count = 0
    while kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind):
        count, kind = count + 1, kind.value_type
    return count


def _without_layout(kind: Any) -> str:
    return re.sub("large_|_view", "", str(kind))


def _arrow_buffers(name: str, values: Any, to_plain: ToPlain) -> Column:
    import pyarrow as arrow
    import pyarrow.compute as compute

    if isinstance(values, arrow.ChunkedArray):
        values = values.combine_chunks() if values.num_chunks != 1 else values.chunk(0)
    if isinstance(values, arrow.ChunkedArray):  # too large for one, or empty
        values = arrow.concat_arrays(values.chunks) if values.num_chunks else arrow.array([], values.type)
    kinds, of, count = arrow.types, values.type, len(values)
    valid = memoryview(values.is_valid().buffers()[1]) if values.null_count else None
    valid = None if valid is None else valid[: (count + 7) // 8]

    def numbers(given: Any, width: int) -> memoryview:
        if not count:
            return memoryview(b"")
        return memoryview(given.buffers()[1])[given.offset * width : (given.offset + count) * width]

    if isinstance(of, arrow.BaseExtensionType):
        return _arrow_buffers(name, values.storage, to_plain)
    if kinds.is_dictionary(of) and kinds.is_nested(of.value_type):
        return _arrow_buffers(name, values.dictionary_decode(), to_plain)
    if kinds.is_dictionary(of):
        codes = values.indices if str(of.index_type) in CODES else values.indices.cast("int32")
        categories = _arrow_column(name, values.dictionary, to_plain)
        held = numbers(codes.fill_null(-1), codes.type.bit_width // 8)
        column = Column("category", count, held, detail=(categories, of.ordered))
        if column.data_kind != str(of.index_type):
            _warn(name, f"dictionary of {of.index_type} indices", f"one of {column.data_kind}")
        return column
    if kinds.is_string(of) or kinds.is_large_string(of) or kinds.is_binary(of) or kinds.is_large_binary(of):
        is_text = kinds.is_string(of) or kinds.is_large_string(of)
        filled = values.fill_null("" if is_text else b"").cast(
            arrow.large_string() if is_text else arrow.large_binary()
        )
        lengths = compute.binary_length(filled).cast("uint32")
        offsets = memoryview(filled.buffers()[1]).cast("q") if count else memoryview(b"")
        data = filled.buffers()[2]
        first, last = (offsets[filled.offset], offsets[filled.offset + count]) if count else (0, 0)
        joined = memoryview(data)[first:last] if data is not None else memoryview(b"")
        form = "string" if kinds.is_large_string(of) else ""
        return Column("text" if is_text else "bytes", count, joined, numbers(lengths, 4), valid, form)
    is_list = kinds.is_list(of) or kinds.is_large_list(of)
    if (is_list or kinds.is_fixed_size_list(of)) and not _is_record(of.value_type) and _nested(of) <= MOST_NESTED:
        size = 0 if is_list else of.list_size
        items = values.flatten() if is_list else values.values[values.offset * size : (values.offset + count) * size]
        lengths = compute.list_value_length(values).fill_null(0).cast("uint32") if is_list else None
        sizes = numbers(lengths, 4) if lengths is not None else memoryview(b"" if size else bytes(4 * count))
        return Column("list", count, lengths=sizes, valid=valid, detail=(_arrow_column(name, items, to_plain), size))
    if kinds.is_boolean(of):
        return Column("bool", count, numbers(values.cast("uint8"), 1), valid=valid)
    if kinds.is_null(of):
        return Column("null", count, bytes(count))
    if kinds.is_timestamp(of) and (of.tz is None or is_time_zone(of.tz)):
        return Column("datetime", count, numbers(values, 8), valid=valid, detail=(of.unit, of.tz))
    if kinds.is_duration(of):
        return Column("duration", count, numbers(values, 8), valid=valid, detail=of.unit)
    if kinds.is_date(of):
        return Column("date", count, numbers(values.cast(arrow.date32()), 4), valid=valid)
    if kinds.is_decimal128(of):
        return Column("decimal", count, numbers(values, 16), valid=valid, detail=(of.precision, of.scale))
    if kinds.is_time(of):
        return Column("time", count, numbers(values.cast(arrow.time64("ns")), 8), valid=valid)
    kind = {"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(of), str(of))
    if kind in FIXED and (kinds.is_integer(of) or kinds.is_floating(of)):
        return Column(kind, count, numbers(values, of.bit_width // 8), valid=valid)
    return Column("plain", count, form="object", detail=to_plain(name, values.to_pylist()))
