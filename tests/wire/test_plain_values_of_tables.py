"""Tables of packages that few have installed, what is lost on the way, and what is said of values that are not data."""

from __future__ import annotations

import datetime
import ipaddress
import re
import sqlite3
import zoneinfo
from decimal import Decimal
from typing import Any

import attrs
import pytest

from rows import each_row
from toolcell.tools import ToolRegistry
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.errors import UnsendableValue


def made_by(module: str, name: str, **members: Any) -> Any:
    """Return an object that has the name of another package's class and as much of it as is used."""
    return type(name, (), {"__module__": module, **members})()


@attrs.define
class Attrs:
    day: datetime.date
    data: bytes = b"\xff"


class Struct:
    """As much as is looked at of a struct of msgspec."""

    __struct_fields__ = ("a", "b")
    a, b = 1, datetime.date(2024, 1, 2)


def rows_of_sqlite() -> list[Any]:
    connection = sqlite3.connect(":memory:")
    connection.row_factory = sqlite3.Row
    try:
        return connection.execute("select 1 as a, x'ff' as b").fetchall()
    finally:
        connection.close()


CONVERTED: dict[str, tuple[Any, Any]] = {
    "arrow scalar": (made_by("pyarrow.lib", "Scalar", as_py=lambda self: Decimal("1")), "1"),
    "rows of sqlite3": (rows_of_sqlite(), [{"a": 1, "b": b"\xff"}]),
    "attrs": (Attrs(datetime.date(2024, 1, 2)), {"day": "2024-01-02", "data": b"\xff"}),
    "msgspec": (Struct(), {"a": 1, "b": "2024-01-02"}),
    "zone": (zoneinfo.ZoneInfo("UTC"), "UTC"),
    "address": (ipaddress.ip_network("10.0.0.0/8"), "10.0.0.0/8"),
}


@each_row("case", CONVERTED)
def test_rows_and_records_of_rarer_packages_are_data(case: str) -> None:
    value, expected = CONVERTED[case]

    assert to_plain(value) == expected
    assert to_plain({"x": [value]}) == {"x": [expected]}


CURES: dict[str, tuple[Any, str]] = {
    "figure": (made_by("matplotlib.figure", "Figure", savefig=print), r'fig\.savefig\("chart\.png"\).*files='),
    "part of a figure": (made_by("matplotlib.artist", "Artist"), r"plt\.savefig"),
    "image": (made_by("PIL.Image", "Image"), r'x\.save\("image\.png"\)'),
    "query": (made_by("polars.lazyframe.frame", "LazyFrame"), r"x\.collect\(\)"),
    "groups of a query": (made_by("polars.lazyframe.group_by", "LazyGroupBy"), r"x\.agg\(\.\.\.\)\.collect\(\)"),
    "groups": (made_by("polars.dataframe.group_by", "GroupBy"), r"x\.agg\(\.\.\.\)$"),
    "expression": (made_by("polars.expr.expr", "Expr"), r"df\.select\(x\)"),
    "windows": (made_by("pandas.core.window.rolling", "BaseWindow"), r"x\.sum\(\)"),
    "connection": (made_by("_duckdb", "DuckDBPyConnection", fetchall=print), r"x\.fetchall\(\)"),
    "data set": (made_by("pyarrow._dataset", "Dataset", to_table=print), r"x\.to_table\(\)"),
    "array in a file": (made_by("h5py._hl.dataset", "Dataset"), r"x\[\(\)\]"),
    "object with names": (made_by("elsewhere", "Box"), r"such as vars\(x\), or str\(x\)"),
    "object without names": (object(), r"object is not data: send what is in it, or str\(x\)"),
    "batches": (made_by("pyarrow.lib", "RecordBatchReader", __iter__=iter, __next__=next), r"x\.read_all\(\)"),
    "older frame": (made_by("elsewhere", "Frame", to_dicts=print), r"Frame is not data: send x\.to_dicts\(\)"),
    "tensor": (made_by("torch", "Tensor", tolist=print), r"Tensor is not data: send x\.tolist\(\)"),
    "matrix": (made_by("scipy.sparse", "csr_matrix", toarray=print), r"send x\.toarray\(\)"),
    "match": (re.match("a", "a"), r"x\.group\(\)"),
}


@each_row("case", CURES)
def test_what_is_no_data_is_refused_with_what_to_send_instead(case: str) -> None:
    value, cure = CURES[case]

    with pytest.raises(UnsendableValue, match=rf"value\['x'\]: .*{cure}"):
        to_plain({"x": value})


@pytest.mark.anyio
async def test_a_tool_that_returns_what_is_no_data_gets_the_same_advice() -> None:
    registry = ToolRegistry()
    registry.register("plot", "Return a figure by mistake", None, lambda args: CURES["figure"][0])

    assert 'fig.savefig("chart.png")' in (await registry.execute("plot")).text
