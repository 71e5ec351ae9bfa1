"""Arrays and tables of every kind of column, made without any package."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

from toolcell_bridge.wire.columns import Column
from toolcell_bridge.wire.tables import AnyTable, Array, Axis, Table


def numbers(code: str, *values: Any) -> bytes:
    return struct.pack(f"<{len(values)}{code}", *values)


def text(*values: str, valid: bytes | None = None, form: str = "") -> Column:
    parts = [each.encode() for each in values]
    return Column("text", len(values), b"".join(parts), numbers("I", *map(len, parts)), valid, form)


WORDS = text("one", "zwölf", "три")

COLUMNS = [
    Column("int64", 3, numbers("q", 1, -2, 3)),
    Column("int8", 3, numbers("b", 1, -2, 3), valid=b"\x05", form="masked"),
    Column("uint16", 3, numbers("H", 1, 2, 3)),
    Column("float64", 3, numbers("d", 0.5, float("nan"), float("inf"))),
    Column("float16", 3, numbers("e", 0.5, 1, 2)),
    Column("complex128", 3, numbers("d", 1, 2, 3, 4, 5, 6)),
    Column("bool", 3, b"\0\1\1", valid=b"\x03"),
    Column("null", 3, bytes(3)),
    Column("datetime", 3, numbers("q", 0, -(2**63), 10**15), detail=("us", "Europe/Berlin")),
    Column("datetime", 3, numbers("q", 2**62, -(2**63), 10**9), detail=("s", None)),
    Column("duration", 3, numbers("q", 0, 1, 2**62), detail="ms"),
    Column("date", 3, numbers("i", 0, 19000, 2**31 - 1)),
    Column("time", 3, numbers("q", 0, 1, 86_399_999_999_999)),
    Column("bytes", 3, b"abc", numbers("I", 1, 0, 2)),
    Column("plain", 3, form="object", detail=[1, ["a", {"b": None}], "c"]),
    Column("category", 3, numbers("b", 1, -1, 0), detail=(text("x", "y"), True)),
    Column("category", 3, numbers("i", 0, 0, 1), detail=(Column("int64", 2, numbers("q", 7, 9)), False)),
    Column("category", 3, numbers("i", 0, -1, 1), form="enum", detail=(text("x", "y"), True)),
    Column("decimal", 3, b"\1" + bytes(15) + b"\xff" * 16 + bytes(16), valid=b"\x03", detail=(38, 2)),
    Column("list", 3, lengths=numbers("I", 1, 0, 2), valid=b"\x05", detail=(text("x", "y", "z"), 0)),
    Column("list", 3, lengths=numbers("I", 1, 0, 2), form="array", detail=(Column("int8", 3, b"\1\2\3"), 0)),
    Column("list", 3, valid=b"\x05", detail=(Column("int16", 6, numbers("h", *range(6))), 2)),
    text("a", "", "c", valid=b"\x05", form="str"),
    text("2024-01", "x", "", form="period[M]"),
    text("(0, 1]", "(", "x", form="interval[int64, right]"),
    replace(text("a", "", "c"), detail=10),
    WORDS,
]

LABELS = Axis((text(*[f"c{number}" for number in range(len(COLUMNS))]),), (None,))
LEVELS = Axis((WORDS, Column("int64", 3, numbers("q", 1, 2, 3))), ("word", None))
COUNTED = Axis((Column("range", 3, detail=(0, 1)),), (None,))
TWO_LEVELS = Axis((text("v", "v"), text("sum", "mean")), (None, "how"))

TABLES: list[AnyTable] = [
    Table("pandas.DataFrame", 3, COUNTED, LABELS, COLUMNS),
    Table("pandas.DataFrame", 3, LEVELS, TWO_LEVELS, COLUMNS[:2]),
    Table("pandas.DataFrame", 3, COUNTED, Axis((text(),), (None,)), []),
    Table("pandas.Series", 3, LEVELS, Axis((text("v"),), (None,)), [COLUMNS[3]]),
    Table("numpy.ndarray", 3, Axis(), LABELS, COLUMNS),
    Table("polars.DataFrame", 3, Axis(), LABELS, COLUMNS),
    Table("polars.Series", 3, Axis(), Axis((text("v"),), (None,)), [WORDS]),
    Table("pyarrow.Table", 3, Axis(), LABELS, COLUMNS),
    Array("numpy", [3], COLUMNS[0]),
    Array("numpy", [3, 1, 1], COLUMNS[3]),
    Array("numpy", [0, 5], Column("float32", 0)),
    Array("numpy.ma", [3], COLUMNS[1]),
    Array("numpy", [3], WORDS),
    *(Array("numpy", [3], each) for each in COLUMNS),
]
