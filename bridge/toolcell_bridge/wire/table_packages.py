"""Make arrays and frames of numpy, pandas, polars and pyarrow from columns. Each package is imported when it is used.

Numbers keep the memory of their column: nothing is copied but what a package cannot take as it is.
"""

from __future__ import annotations

from typing import Any, Final

from toolcell_bridge.wire.columns import FIXED, FORMS, NOT_A_TIME, NUMBERS, TEXTS, Column, time_zone
from toolcell_bridge.wire.frozen import replaced

_PANDAS_MASKED: Final = frozenset({"bool", *NUMBERS})
_NUMBERS: Final = frozenset("biufc")
_MOST_OF_INT32: Final = 2**31 - 1

_MOST_UNEVEN: Final = 16
_SMALL_BYTES: Final = 1 << 24
"""So many times the bytes of its texts, and so many more, an array of text may take. A larger one is of objects."""
_SMALL_WIDTH: Final = 1 << 16
"""The same of an array whose width is not that of its longest text."""


def _needs(package: str) -> Any:
    """Import a package.

    Raises:
        ImportError: it is not here; the message says how to get it.
    """
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError as exc:
        raise ImportError(
            f"an array or a frame needs {package}, which is not installed here ({exc}): in a sandbox add it with "
            f"packages=[{package!r}] of the Runtime",
            name=package,
        ) from exc


# numpy


def numpy_array(column: Column, shape: tuple[int, ...], *, is_masked: bool = False) -> Any:
    """Return an array of this shape. With missing values it is masked, or has objects."""
    numpy = _needs("numpy")
    is_date = column.kind == "date" and column.form == ""
    if is_date:
        values = _numbers(numpy, column, "int32").astype("datetime64[D]")
    else:
        values = _numpy_values(numpy, replaced(column, valid=None) if is_masked else column)
    if is_masked:
        values = numpy.ma.MaskedArray(values, mask=_missing(numpy, column) if column.valid is not None else False)
    elif is_date and column.valid is not None:
        values[_missing(numpy, column)] = "NaT"
    elif column.valid is not None and values.dtype != object:
        values = _object_array(numpy, column.values())
    return values.reshape(shape)


def numpy_table(table: Any) -> Any:
    """Return a series as an array of one dimension, a frame as one of two."""
    numpy = _needs("numpy")
    columns = [numpy_array(each, (table.length,)) for each in table.columns]
    if table.is_series:
        return columns[0]
    if not columns:
        return numpy.empty((table.length, 0))
    kinds = {each.dtype.kind for each in columns}
    if len(kinds) > 1 and not kinds <= _NUMBERS:
        columns = [_object_array(numpy, each.values()) for each in table.columns]
    return numpy.stack(columns, axis=1)


def numpy_records(table: Any) -> Any:
    """Return an array of records of one dimension, or a recarray."""
    numpy = _needs("numpy")
    fields = {name: numpy_array(each, (table.length,)) for name, each in table.named_columns().items()}
    made = numpy.empty(table.length, {"names": [*fields], "formats": [each.dtype for each in fields.values()]})
    for name, values in fields.items():
        made[name] = values
    return made.view(numpy.recarray) if table.kind == "numpy.recarray" else made


def _numpy_values(numpy: Any, column: Column) -> Any:
    """Return the values in one dimension, whatever stands where one is missing."""
    kind = column.kind
    if kind == "range":
        start, step = column.detail
        return numpy.arange(start, start + step * column.length, step, dtype="int64")
    if kind in TEXTS and column.form == "" and column.valid is None:
        return _numpy_texts(numpy, column)
    known = FIXED.get(kind)
    dtype = "" if known is None else known.numpy.format(column.detail)
    is_kept = dtype and (column.form != "object" or kind in ("datetime", "duration"))
    return _numbers(numpy, column, dtype) if is_kept else _object_array(numpy, column.values())


def _numpy_texts(numpy: Any, column: Column) -> Any:
    """Return texts in the width that they had, or in that of the longest; as objects, if both take far more memory."""
    longest = int(_lengths(numpy, column).max(initial=0))
    if column.length * longest > _MOST_UNEVEN * memoryview(column.data).nbytes + _SMALL_BYTES:
        return _object_array(numpy, column.values())
    code, size = ("U", 4) if column.kind == "text" else ("S", 1)
    found, width = numpy.array(column.values(), dtype=code), column.detail or 0
    if found.itemsize < size * width and max(1, column.length) * width <= _MOST_UNEVEN * column.nbytes + _SMALL_WIDTH:
        return found.astype(f"{code}{width}")
    return found


def _numbers(numpy: Any, column: Column, dtype: str) -> Any:
    if dtype == "bool":  # a byte that is neither 0 nor 1 is not a bool to numpy
        data = numpy.frombuffer(column.data, dtype="uint8")
        return data.view("bool") if not column.length or data.max() <= 1 else data != 0
    values = numpy.frombuffer(column.data, dtype=dtype)
    return values if values.flags.aligned else values.copy()


def _object_array(numpy: Any, values: list[Any]) -> Any:
    return numpy.fromiter(values, dtype=object, count=len(values))  # lists in it do not become dimensions


def _missing(numpy: Any, column: Column) -> Any:
    bits = numpy.frombuffer(column.valid, dtype="uint8")
    return numpy.unpackbits(bits, count=column.length, bitorder="little") == 0


# pandas


def pandas_object(table: Any) -> Any:
    """Return a DataFrame or a Series."""
    pandas, numpy = _needs("pandas"), _needs("numpy")
    columns = [_pandas_values(numpy, pandas, each) for each in table.columns]
    index = _pandas_index(numpy, pandas, table.index, table.length)
    if table.is_series:
        return pandas.Series(columns[0], index, _kept_type(columns[0]), table.labels[0], copy=False)
    columns = [each if _kept_type(each) is None else pandas.Series(each, index, "object") for each in columns]
    frame = pandas.DataFrame(dict(enumerate(columns)), index=index, copy=False)
    frame.columns = _pandas_index(numpy, pandas, table.axis, len(columns))
    return frame


def _kept_type(values: Any) -> str | None:
    """Return what keeps pandas from looking for a type that objects have in common."""
    return "object" if str(values.dtype) == "object" else None


def _pandas_index(numpy: Any, pandas: Any, axis: Any, length: int) -> Any:
    levels, names = axis.levels, [tuple(each) if isinstance(each, list) else each for each in axis.names]
    if not levels:
        return pandas.RangeIndex(length)
    if len(levels) == 1:
        if levels[0].kind == "range":
            start, step = levels[0].detail
            return pandas.RangeIndex(start, start + step * length, step, name=names[0])
        return _pandas_labels(numpy, pandas, levels[0], names[0])
    try:
        return pandas.MultiIndex.from_arrays([_pandas_values(numpy, pandas, each) for each in levels], names=names)
    except Exception:  # values that pandas does not sort
        labels = [_pandas_objects(numpy, pandas, each.values()) for each in levels]
        return pandas.MultiIndex.from_arrays(labels, names=names)


def _pandas_labels(numpy: Any, pandas: Any, column: Column, name: Any = None) -> Any:
    values = _pandas_values(numpy, pandas, column)
    if str(values.dtype) == "float16":  # of which pandas makes no labels
        values = values.astype("float32")
    return pandas.Index(values, name=name, copy=False)


def _pandas_values(numpy: Any, pandas: Any, column: Column) -> Any:
    """Return what a Series or an Index of pandas takes."""
    kind, form = column.kind, column.form
    if form == "arrow" and (arrow := _arrow_if_there()) is not None:
        return pandas.arrays.ArrowExtensionArray(arrow_values(arrow, column))
    if kind == "category":
        categories, ordered = column.detail
        codes = (
            numpy.where(_missing(numpy, column), -1, _codes(numpy, column)) if column.valid else _codes(numpy, column)
        )
        values = _pandas_labels(numpy, pandas, categories)
        if not _are_categories(values):
            return _pandas_objects(numpy, pandas, column.values())
        return pandas.Categorical.from_codes(codes, categories=values, ordered=ordered)
    if kind == "text" and form in ("str", "string", "arrow", ""):
        return _pandas_text(numpy, pandas, column, form)
    if kind == "text" and form not in FORMS and (read := _pandas_read(pandas, column)) is not None:
        return read
    is_float, has_nulls = kind.startswith("float"), column.valid is not None
    if kind in _PANDAS_MASKED and (form == "masked" or (has_nulls and not is_float and form != "object")):
        missing = _missing(numpy, column) if has_nulls else numpy.zeros(column.length, dtype=bool)
        kinds = pandas.arrays
        maker = kinds.BooleanArray if kind == "bool" else kinds.FloatingArray if "f" in kind else kinds.IntegerArray
        return maker(_numbers(numpy, column, kind), missing)
    if kind == "datetime":
        zone = column.detail[1]
        values = _with_nat(numpy, column)
        if zone is None:
            return values
        return pandas.DatetimeIndex(values).tz_localize("UTC").tz_convert(time_zone(zone)).array
    if kind == "duration":
        return _with_nat(numpy, column)
    if has_nulls and is_float and form != "object":
        values = _numbers(numpy, column, kind).copy()
        values[_missing(numpy, column)] = numpy.nan
        return values
    if kind == "list" and form == "array":
        return _pandas_objects(numpy, pandas, _numpy_arrays(numpy, column))
    if kind in ("date", "time", "decimal", "list", "plain", "null", "text", "bytes") or form == "object":
        return _pandas_objects(numpy, pandas, column.values())
    return numpy_array(column, (column.length,))


def _are_categories(values: Any) -> bool:
    try:
        return values.is_unique and not values.hasnans
    except TypeError:  # lists
        return False


def _pandas_objects(numpy: Any, pandas: Any, values: list[Any]) -> Any:
    """Return values as an array of pandas, which then does not look for a kind that they have in common."""
    return pandas.array(_object_array(numpy, values), dtype="object")


def _numpy_arrays(numpy: Any, column: Column) -> list[Any]:
    items = column.detail[0]
    ends = numpy.cumsum(_lengths(numpy, column))
    found = numpy.split(numpy_array(items, (items.length,)), ends[:-1]) if column.length else []
    if column.valid is None:
        return list(found)
    return [None if gone else each for each, gone in zip(found, _missing(numpy, column), strict=True)]


def _lengths(numpy: Any, column: Column) -> Any:
    size = column.detail[1] if column.kind == "list" else 0
    return numpy.full(column.length, size) if size else numpy.frombuffer(column.lengths, dtype="uint32")


def _codes(numpy: Any, column: Column) -> Any:
    return _numbers(numpy, column, column.data_kind)


def _with_nat(numpy: Any, column: Column) -> Any:
    values = _numpy_values(numpy, column)
    if column.valid is not None:
        values = values.copy()
        values[_missing(numpy, column)] = "NaT"
    return values


def _pandas_text(numpy: Any, pandas: Any, column: Column, form: str) -> Any:
    """Return an array of text: of the memory that Arrow takes, where pandas has it, or else of objects."""
    try:
        dtype = pandas.StringDtype() if form == "string" else pandas.StringDtype(na_value=numpy.nan)
    except TypeError:  # pandas before 2.3
        return pandas.Index(column.values(), dtype=object)
    if dtype.storage == "pyarrow":
        return pandas.array(arrow_values(_needs("pyarrow"), column), dtype=dtype)
    return pandas.array(_object_array(numpy, column.values()), dtype=dtype)


def _pandas_read(pandas: Any, column: Column) -> Any:
    """Return periods or intervals, or None where this pandas does not read their text."""
    texts = column.values()
    try:
        dtype = pandas.api.types.pandas_dtype(column.form)
        if hasattr(dtype, "closed"):
            ends = [(None, None) if each is None else each[1:-1].split(", ") for each in texts]
            sides = zip(*ends, strict=True) if ends else ((), ())
            left, right = (pandas.Index(list(each), dtype=dtype.subtype) for each in sides)
            made = pandas.arrays.IntervalArray.from_arrays(left, right, dtype.closed, dtype=dtype)
        else:
            made = pandas.PeriodIndex(texts, dtype=dtype).array
        # Another text, such as "now", would be read as something that nobody saw.
        is_same = all(text is None or str(each) == text for each, text in zip(made, texts, strict=True))
    except Exception:  # whatever a text that is none provokes
        return None
    return made if is_same else None


# Arrow and polars


def _arrow_if_there() -> Any:
    try:
        return _needs("pyarrow")
    except ImportError:
        return None


def arrow_object(table: Any) -> Any:
    """Return a table of pyarrow, or a ChunkedArray."""
    arrow = _needs("pyarrow")
    if table.is_series and not table.index.says_something:
        return arrow.chunked_array([arrow_values(arrow, table.columns[0])])
    if table.kind == "pyarrow.Table":  # where two columns may have one name
        return arrow.Table.from_arrays(
            [arrow_values(arrow, each) for each in table.columns], list(map(str, table.labels))
        )
    return arrow.table({name: arrow_values(arrow, each) for name, each in table.named_columns().items()})


def arrow_values(arrow: Any, column: Column) -> Any:
    """Return an Array of pyarrow."""
    compute = _needs("pyarrow.compute")
    kind, length = column.kind, column.length
    valid = None if column.valid is None else arrow.py_buffer(column.valid)
    if kind == "category":
        categories, ordered = column.detail
        codes = arrow.Array.from_buffers(
            arrow.type_for_alias(column.data_kind), length, [valid, arrow.py_buffer(column.data)]
        )
        codes = compute.if_else(compute.less(codes, 0), None, codes)
        values = arrow_values(arrow, categories)
        if len(values) and arrow.types.is_null(values.type):  # pyarrow reads past the end of those
            return arrow.nulls(length)
        return arrow.DictionaryArray.from_arrays(codes, values, ordered=ordered)
    if kind in TEXTS:
        is_large = memoryview(column.data).nbytes > _MOST_OF_INT32 or (kind == "text" and column.form == "string")
        offsets = arrow.py_buffer(_offsets(column, "int64" if is_large else "int32"))
        if kind == "text":
            of = arrow.large_string() if is_large else arrow.string()
        else:
            of = arrow.large_binary() if is_large else arrow.binary()
        return arrow.Array.from_buffers(of, length, [valid, offsets, arrow.py_buffer(column.data)])
    if kind == "list":
        items, size = arrow_values(arrow, column.detail[0]), column.detail[1]
        if size:
            return arrow.Array.from_buffers(arrow.list_(items.type, size), length, [valid], children=[items])
        is_large = len(items) > _MOST_OF_INT32
        offsets = arrow.py_buffer(_offsets(column, "int64" if is_large else "int32"))
        of = arrow.large_list(items.type) if is_large else arrow.list_(items.type)
        return arrow.Array.from_buffers(of, length, [valid, offsets], children=[items])
    if kind in ("null", "range", "bool"):
        return arrow.array(column.values(), {"null": arrow.null(), "range": arrow.int64(), "bool": arrow.bool_()}[kind])
    if kind in ("plain", "complex64", "complex128"):
        values = column.values()
        try:
            return arrow.array([str(each) if isinstance(each, complex) else each for each in values])
        except (arrow.ArrowException, TypeError, ValueError, OverflowError):  # values of several kinds
            return arrow.array([None if each is None else str(each) for each in values])
    known = FIXED[kind]
    made_of = arrow.type_for_alias(kind) if known.arrow is None else known.arrow(arrow, column.detail)
    made = arrow.Array.from_buffers(made_of, length, [valid, arrow.py_buffer(column.data)])
    if kind in ("datetime", "duration"):
        made = compute.if_else(compute.equal(made.view(arrow.int64()), NOT_A_TIME), None, made)
    return made


def _offsets(column: Column, dtype: str) -> Any:
    """Return where each text or list begins, and the end of the last."""
    numpy = _needs("numpy")
    offsets = numpy.zeros(column.length + 1, dtype=dtype)
    numpy.cumsum(_lengths(numpy, column), out=offsets[1:])
    return offsets


def polars_object(table: Any) -> Any:
    """Return a frame of polars, or a Series."""
    polars = _needs("polars")
    if table.is_series and not table.index.says_something:
        label = table.labels[0]
        return polars_values(polars, "" if label is None else str(label), table.columns[0])
    return polars.DataFrame([polars_values(polars, name, each) for name, each in table.named_columns().items()])


def polars_values(polars: Any, name: str, column: Column) -> Any:
    """Return a Series of polars."""
    kind = column.kind
    if kind == "category":
        categories = column.detail[0]
        values = [None if each is None else str(each) for each in categories.values()]
        texts, numpy = polars.Series(name, values, polars.String), _needs("numpy")
        codes = polars.Series(_codes(numpy, column)).cast(polars.Int64)
        if column.valid is not None:
            codes = codes.set(polars.Series(_missing(numpy, column)), None)
        is_enum = column.form == "enum" and texts.is_unique().all() and not texts.null_count()
        # Cast first: else each row's text would be hashed, and a category of 4 MB may be in a million rows.
        made = texts.cast(polars.Enum(texts) if is_enum else polars.Categorical)
        return made.gather(codes.set(codes < 0, None))
    if kind == "decimal":
        digits, places = column.detail
        if 0 <= places <= digits:
            return polars.Series(name, column.values(), polars.Decimal(digits, places))
    if kind in TEXTS and (arrow := _arrow_if_there()) is not None:
        return polars.Series(name, arrow_values(arrow, column))
    if kind == "list":
        return _polars_lists(polars, name, column)
    if kind in ("plain", "null", "range", "text", "bytes", "decimal") or kind.startswith("complex"):
        values = column.values()
        dtype = {"text": polars.String, "bytes": polars.Binary, "range": polars.Int64, "null": polars.Null}.get(kind)
        if dtype is not None:
            return polars.Series(name, values, dtype=dtype)
        try:
            return polars.Series(name, values, strict=True)
        except Exception:  # values of several kinds
            return polars.Series(name, [None if each is None else str(each) for each in values], dtype=polars.String)
    numpy, known = _needs("numpy"), FIXED[kind]
    if known.polars:
        made = polars.Series(name, _numbers(numpy, column, known.code)).cast(getattr(polars, known.polars))
    else:
        values = _numpy_values(numpy, Column(kind, column.length, column.data, detail=column.detail))
        if values.dtype.kind in "mM":
            made = _polars_times(polars, name, values.view("int64"), column)
        else:
            made = polars.Series(name, values)
    if column.valid is not None:
        made = made.set(polars.Series(_missing(numpy, column)), None)
    return made


def _polars_lists(polars: Any, name: str, column: Column) -> Any:
    try:
        if not _has_enum(column) and (arrow := _arrow_if_there()) is not None:
            return polars.Series(name, arrow_values(arrow, _fit_for_polars(polars, column)))
        inner, size = column.detail
        items = polars_values(polars, name, inner)
        rows = replaced(column, detail=(Column("plain", len(items), detail=items.to_list()), size)).values()
        return polars.Series(name, rows, polars.Array(items.dtype, size) if size else polars.List(items.dtype))
    except (Exception, polars.exceptions.PanicException):  # what polars has no lists of
        texts = [None if each is None else str(each) for each in column.values()]
        return polars.Series(name, texts, dtype=polars.String)


def _has_enum(column: Column) -> bool:
    """Whether there is an Enum in lists, which is lost on the way through Arrow."""
    while column.kind == "list":
        column = column.detail[0]
    return column.form == "enum"


def _fit_for_polars(polars: Any, column: Column) -> Column:
    """Return a column without the time zones that polars does not know."""
    match column.kind:
        case "list" | "category":
            inner, other = column.detail
            return replaced(column, detail=(_fit_for_polars(polars, inner), other))
        case "datetime":
            unit, zone = column.detail
            made = _polars_times(polars, "", _needs("numpy").zeros(1, dtype="int64"), column)
            return replaced(column, detail=(unit, zone and made.dtype.time_zone))
    return column


def _polars_times(polars: Any, name: str, numbers: Any, column: Column) -> Any:
    unit = column.detail if column.kind == "duration" else column.detail[0]
    if unit == "s":
        unit, numbers = "ms", numbers * 1000
    series = polars.Series(name, numbers)
    series = series.set(series == NOT_A_TIME, None)
    if column.kind == "duration":
        return series.cast(polars.Duration(unit))
    made = series.cast(polars.Datetime(unit))
    zone = column.detail[1]
    if zone is None:
        return made
    made = made.dt.replace_time_zone("UTC")
    try:
        return made.dt.convert_time_zone(str(getattr(time_zone(zone), "key", "UTC")))
    except (polars.exceptions.PolarsError, polars.exceptions.PanicException):  # a name that polars does not know
        return made
