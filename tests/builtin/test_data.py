"""The four data tools: what they answer, over content, records and files."""

from __future__ import annotations

import csv
import io
import json
import math
import operator
import re
import threading
import tracemalloc
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from builtin.webkit import call
from hostile.loop_silence import watched
from rows import each_row
from toolcell import RegistrationError, UsageError
from toolcell.builtin import DataTools
from toolcell.builtin.tables import reading
from toolcell.builtin.tables.evaluation import Transform, aggregated, filtered, transformed
from toolcell.builtin.tables.reading import Record, Table, open_text
from toolcell.errors import ToolError
from toolcell.tools import ToolRegistry, ToolResult
from tools.toolkit import PATIENCE_S

pytestmark = pytest.mark.anyio


SALES = [
    {"city": "Rome", "amount": "10", "who": "Ada"},
    {"city": "Oslo", "amount": 7.5, "who": "Bo"},
    {"city": "Rome", "amount": 2, "who": None},
    {"city": "Oslo", "amount": "n/a"},
]


async def value(name: str, **args: Any) -> Any:
    result = await call(DataTools(), name, **args)
    assert not result.is_error, result.message
    assert json.loads(result.text) == result.value
    return result.value


async def failure(name: str, **args: Any) -> str:
    result = await call(DataTools(), name, **args)
    assert result.is_error
    return result.message


# Parse


@pytest.mark.conforms("S13")
@each_row(
    ("content", "records", "columns"),
    [
        ("b,a\n1,2\n3,4\n", [{"b": "1", "a": "2"}, {"b": "3", "a": "4"}], ["b", "a"]),
        ('[{"b": 1}, {"a": 2}]', [{"b": 1}, {"a": 2}], ["a", "b"]),
        ('{"b": 1,\n "a": [2]}', [{"b": 1, "a": [2]}], ["a", "b"]),
        ('{"b": 1}\nnot json\n{"b": 2}', [{"b": 1}], ["b"]),
        ('{"b": 1}\n{"a": 2\n[3]\n\n{"c": 4}', [{"b": 1}, {"c": 4}], ["b", "c"]),
        ("[]", [], []),
        ("a,b", [], ["a", "b"]),
        ("[1, null, [2]]", [{"value": 1}, {"value": None}, {"value": [2]}], ["value"]),
        (f"[{2**63 - 1}, {2**63}]", [{"value": 2**63 - 1}, {"value": str(2**63)}], ["value"]),
    ],
    ids=["csv", "json", "one object", "object and text", "jsonl", "empty list", "header only", "plain items", "large"],
)
async def test_the_format_is_found_out(content: str, records: Any, columns: Any) -> None:
    if "not json" in content:
        assert (await failure("data_parse", content=content)).startswith("content is not JSON")
        return
    found = await value("data_parse", content=content)
    assert (found["records"], found["columns"], found["count"]) == (records, columns, len(records))
    assert found.get("skipped", 0) == (2 if "[3]" in content else 0)


@pytest.mark.conforms("S13")
async def test_the_count_is_of_all_rows_and_content_is_required() -> None:
    found = await value("data_parse", content="n\n" + "".join(f"{n}\n" for n in range(50)), limit=3)
    assert found == {
        "records": [{"n": "0"}, {"n": "1"}, {"n": "2"}],
        "columns": ["n"],
        "count": 50,
        "truncated": True,
        "total": 50,
    }
    for nothing in ("", "  \n"):
        assert await failure("data_parse", content=nothing) == "content is required"


@pytest.mark.conforms("S-b7")
@each_row(
    ("content", "records"),
    [
        (b"\xef\xbb\xbfa,b\r\n1,2\r\n", [{"a": "1", "b": "2"}]),
        ("a;b\n1,5;2\n".encode("utf-16"), [{"a": "1,5", "b": "2"}]),
        ("a\tb\nä\tö\n".encode("utf-16-le"), [{"a": "ä", "b": "ö"}]),
        (b"name\ncaf\xe9\n\x93x\x94\n", [{"name": "café"}, {"name": "“x”"}]),
        (b"a,b\n1\n1,2,3\n\n", [{"a": "1"}, {"a": "1", "b": "2", "column_3": "3"}]),
        (b"a,,a\n1,2,3\n", [{"a": "1", "column_2": "2", "a_2": "3"}]),
        (b'a,b\n"x, ""y""\nz",2\n', [{"a": 'x, "y"\nz', "b": "2"}]),
        (b"a\rb\rc", [{"a": "b"}, {"a": "c"}]),
        (
            b'\xef\xbb\xbf [ {"a": NaN}, {"a": 1e999}, {"a": 12345678901234567890}, {"a": "\\ud800"} ]',
            [{"a": None}, {"a": None}, {"a": "12345678901234567890"}, {"a": "?"}],
        ),
        (b"a\n\x00\n", [{"a": "\0"}]),
        (b'\xef\xbb\xbf"a,b",c\n1,2\n', [{"a,b": "1", "c": "2"}]),
        (b"sep=\n1\n", [{"sep=": "1"}]),
        (b'sep="\r\n1\r\n', [{'sep="': "1"}]),
        (b"a\n" + "ä".encode() * 50 + b"\ncaf\xe9\n", [{"a": "ä" * 50}, {"a": "café"}]),
    ],
    ids=[
        *("bom", "utf-16", "utf-16 without bom", "cp1252", "ragged", "names", "quotes", "old mac", "odd json", "nul"),
        *("bom and quotes", "a hint without a sign", "a hint that is a quote", "a wrong byte"),
    ],
)
async def test_files_of_the_wild_are_read(content: bytes, records: Any) -> None:
    assert (await value("data_parse", content=content))["records"] == records


@each_row(
    ("begins", "kind"),
    [
        (b"PK\x03\x04\x14\0", "Excel"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1", "Excel"),
        (b"PAR1\x15\x04\x15", "Parquet"),
        (zlib.compress(b"a\n1\n", wbits=31), "gzip"),
        (b"SQLite format 3\0", "SQLite"),
    ],
    ids=["xlsx", "xls", "parquet", "gzip", "sqlite"],
)
async def test_a_file_of_another_kind_is_no_empty_table(begins: bytes, kind: str, tmp_path: Path) -> None:
    (tmp_path / "sales.csv").write_bytes(begins + bytes(range(256)))
    result = await call(DataTools(tmp_path), "data_parse", path="sales.csv")
    assert result.is_error and kind in result.message and "pandas" in result.message
    assert await value("data_parse", content="PAR1,b\n1,2\n")


async def test_empty_cells_of_csv_are_last_in_both_orders() -> None:
    for descending, amounts in ((False, ["2", "10", "x", "", ""]), (True, ["x", "10", "2", "", ""])):
        sort: dict[str, Any] = {"sort_by": "a", "sort_desc": descending}
        content = [{"a": cell} for cell in ("", "10", "x", "", "2")]
        found = await value("data_transform", records=content, **sort)
        assert [record["a"] for record in found["records"]] == amounts


async def test_json_lines_may_have_empty_lines_between_them() -> None:
    assert (await value("data_parse", content='\n{"a":1}\n\n\n{"a":2}\n'))["records"] == [{"a": 1}, {"a": 2}]


async def test_a_line_of_the_greatest_length_is_read() -> None:
    text = "x" * (reading.MAX_RECORD_CHARS - len('{"a": ""}'))
    assert await value("data_parse", content=f'{{"a": 1}}\n{{"a": "{text}"}}')


async def test_a_list_of_16_million_characters_is_read_and_one_record_of_a_million_is_refused(tmp_path: Path) -> None:
    record = '{"a": "' + "x" * 500_000 + '"}'
    (tmp_path / "long").write_text(f"[{','.join([record] * 32)}]")
    read = await call(DataTools(tmp_path), "data_parse", path="long")
    assert read.value["count"] == 32, read.message
    refused = await failure("data_parse", content=f'[{{}}, {record[:-2]}{"x" * 500_000}"}}]')
    assert "record 2" in refused and f"{reading.MAX_RECORD_CHARS} characters" in refused


NUMBERS = '{"a":[' + "1.2345678901234567e-300," * (reading.MAX_RECORD_CHARS // 24 - 1) + "0]}"


@each_row("content", [NUMBERS, f'{{"a": 1}}\n{NUMBERS}', f"[{NUMBERS}]"], ids=["document", "line", "item"])
async def test_the_longest_record_keeps_no_event_loop(content: str, tmp_path: Path) -> None:
    (tmp_path / "t").write_text(content)
    registry = ToolRegistry([DataTools(tmp_path)])
    seen = [await watched(registry.dispatch("data_parse", {"path": "t"})) for _ in range(3)]

    assert len(seen[0].outcome.value["columns"]) == 1, seen[0].outcome
    assert min(each.silent_s for each in seen) < 0.05


@pytest.mark.conforms("S-b7")
@each_row(
    ("args", "message"),
    [
        ({"content": 'a\n"' + "x" * 200_000}, "line 2 is not CSV: field larger than field limit"),
        ({"content": "a\n" + "x" * 2_000_000}, "line 2 has more than 1048576 characters"),
        ({"content": '[{"a": "' + "x" * 2_000_000}, "record 1 is not JSON"),
        ({"content": '{"a":[' + "[]," * 175_000 + "0]}"}, "one JSON value has more than 524288 characters"),
        ({"content": '{"a":1}\n{"a":[' + "[]," * 175_000 + "0]}"}, "line 2 has more than 524288 characters"),
        ({"content": '[{"a": 1} {"a": 2}]'}, "a comma or ] is missing"),
        ({"content": "[" * 100_000}, "record 1 is not JSON"),
        ({"content": '{"a":' * 100_000}, "content is not JSON"),
        ({"content": "[1"}, "a comma or ] is missing"),
        ({"content": ",".join(["a"] * 3000)}, "3000 columns, and may have 2000"),
        ({"content": json.dumps([{str(n): 1} for n in range(3000)])}, "more than 2000 different columns"),
        ({"content": "a", "format": "xml"}, "format"),
        ({"content": "[1" + "2" * 5000 + "]"}, "record 1 is not JSON"),
    ],
)
async def test_what_makes_no_sense_is_refused_with_its_place(args: dict[str, Any], message: str) -> None:
    assert message in await failure("data_parse", **args)


@given(
    st.lists(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=5) | st.none(), max_size=3)),
    st.integers(1, 9),
)
@settings(max_examples=50)
def test_json_is_read_alike_however_it_is_cut(records: list[dict[str, Any]], indent: int) -> None:
    """Read in pieces of two characters, what is decoded is what was written."""
    text = json.dumps(records, indent=indent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "CHUNK_CHARS", 2)
        patch.setattr(reading, "BATCH_COST", 100)
        assert read(text, "json") == records


def read(text: str, format: str | None = None) -> list[Record]:
    table = Table(open_text(io.BytesIO(text.encode())), format)
    return [record for batch in table.batches() for record in batch]


async def test_text_that_begins_like_a_compressed_file_is_text() -> None:
    """polars unpacks what begins so: a few kilobytes become gigabytes."""
    packed = b"\x78\x01" + zlib.compress(b"1,2\n" * 100_000, 1)[2:]
    found = await value("data_parse", content=b"a,b\n" + packed + b"\n1,2\n")
    assert found["count"] < 50
    assert (await value("data_parse", content="a,b\nx^1,2\n"))["records"] == [{"a": "x^1", "b": "2"}]


# Filter


@pytest.mark.conforms("S14")
@each_row(
    ("op", "given", "cities"),
    [
        ("==", 10, [0]),
        ("==", "10.0", [0]),
        ("!=", 10, [1, 2, 3]),
        (">", 5, [0, 1, 3]),
        ("<", "8", [1, 2]),
        (">=", 7.5, [0, 1, 3]),
        ("<=", 2, [2]),
        ("contains", "N/A", [3]),
        ("in", ["2", 7.5], [1, 2]),
        ("in", [], []),
    ],
)
async def test_conditions_compare_numbers_in_text_as_numbers(op: str, given: Any, cities: list[int]) -> None:
    """Text that is not a number is compared as text: "n/a" is larger than "5"."""
    found = await value("data_filter", records=SALES, where=[{"column": "amount", "op": op, "value": given}])
    assert found == {"records": [SALES[index] for index in cities], "count": len(cities)}


@pytest.mark.conforms("S14", "S-b7")
async def test_a_missing_column_never_passes_and_null_only_equals_null() -> None:
    async def which(op: str, given: Any) -> list[int]:
        found = await value("data_filter", records=SALES, where=[{"column": "who", "op": op, "value": given}])
        return [SALES.index(record) for record in found["records"]]

    assert await which("!=", "Ada") == [1, 2]
    assert await which("==", None) == [2]
    assert await which("!=", None) == [0, 1]
    assert await which("in", [None, "Bo"]) == [1, 2]
    assert await which("<", "zzz") == [0, 1]
    assert await which("contains", "A") == [0]
    both = [{"column": "city", "op": "==", "value": "Rome"}, {"column": "amount", "op": "<", "value": 5}]
    assert (await value("data_filter", records=SALES, where=both))["records"] == [SALES[2]]
    assert await failure("data_filter", records=SALES, where=[]) == "where conditions are required"
    one = {"column": "a", "op": "in", "value": "x"}
    assert '"in" needs a list' in await failure("data_filter", records=SALES, where=[one])
    assert "op" in await failure("data_filter", records=SALES, where=[one | {"op": "like"}])


@each_row(
    ("one", "other", "are_one"),
    [
        ("00501", "501", False),
        ("1e3", "1000", False),
        ("12E5", "1200000", False),
        ("-01", "-1", False),
        ("1.0", "1", True),
        ("1.5e3", "1500", True),
        ("0", "0.0", True),
        ("0.50", ".5", True),
    ],
)
async def test_text_that_only_looks_like_a_number_is_not_the_same_as_one(one: str, other: str, are_one: bool) -> None:
    tools = DataTools()
    records = [{"k": one, "n": 1}, {"k": other, "n": 2}]
    groups = await call(
        tools, "data_aggregate", records=records, group_by=["k"], metrics=[{"column": "n", "op": "sum"}]
    )
    assert groups.value["count"] == (1 if are_one else 2)
    for sought, expected in ((one, 1), (other, 2)):
        where = [{"column": "k", "op": "==", "value": sought}]
        found = await call(tools, "data_filter", records=records, where=where)
        assert [row["n"] for row in found.value["records"]] == ([1, 2] if are_one else [expected])


# Aggregate


@pytest.mark.conforms("S15")
async def test_metrics_of_all_records_and_of_groups() -> None:
    metrics = [{"column": "amount", "op": op} for op in ("sum", "count", "avg", "min", "max")]
    assert await value("data_aggregate", records=SALES, metrics=metrics, group_by=["city"]) == {
        "groups": [
            {
                "city": "Oslo",
                "sum_amount": 7.5,
                "count_amount": 2,
                "avg_amount": 7.5,
                "min_amount": 7.5,
                "max_amount": 7.5,
            },
            {"city": "Rome", "sum_amount": 12, "count_amount": 2, "avg_amount": 6, "min_amount": 2, "max_amount": 10},
        ],
        "count": 2,
        "not_numbers": {"amount": 1},
    }
    empty = await value("data_aggregate", records=[], metrics=[*metrics, {"column": "*", "op": "count"}])
    assert empty["groups"] == [
        {"sum_amount": 0, "count_amount": 0, "avg_amount": None, "min_amount": None, "max_amount": None, "count_*": 0}
    ]
    assert await failure("data_aggregate", records=SALES, metrics=[]) == "metrics are required"
    grouped = await value("data_aggregate", records=SALES, metrics=[metrics[1]], group_by=["who"])
    assert [group["who"] for group in grouped["groups"]] == ["Ada", "Bo", None]


async def test_large_whole_numbers_are_exact_and_endless_sums_are_an_error() -> None:
    big = [{"n": 9007199254740993}, {"n": "9007199254740993"}, {"n": 1}]
    assert (await value("data_aggregate", records=big, metrics=[{"column": "n", "op": "sum"}]))["groups"] == [
        {"sum_n": 18014398509481987}
    ]
    found = await value("data_filter", records=big, where=[{"column": "n", "op": "==", "value": 9007199254740992}])
    assert found["count"] == 0
    huge = [{"n": 1.7e308}, {"n": 1.7e308}]
    assert "larger than" in await failure("data_aggregate", records=huge, metrics=[{"column": "n", "op": "avg"}])


# Transform


@pytest.mark.conforms("S16", "S-b7")
async def test_select_rename_sort_and_limit_come_in_this_order() -> None:
    found = await value(
        "data_transform",
        records=SALES,
        select=["amount", "city", "nothing"],
        rename={"amount": "eur"},
        sort_by="eur",
        sort_desc=True,
        limit=3,
    )
    assert found == {
        "records": [{"eur": "n/a", "city": "Oslo"}, {"eur": "10", "city": "Rome"}, {"eur": 7.5, "city": "Oslo"}],
        "count": 3,
    }
    assert [list(record) for record in found["records"]] == [["eur", "city"]] * 3
    by_who = await value("data_transform", records=SALES, sort_by="who")
    assert by_who["records"] == [SALES[0], SALES[1], SALES[2], SALES[3]]
    same = await value("data_transform", records=SALES, sort_by="city", sort_desc=True)
    assert same["records"] == [SALES[0], SALES[2], SALES[1], SALES[3]]
    assert (await value("data_transform", records=SALES, limit=0))["records"] == []
    clash = await failure("data_transform", records=SALES, rename={"a": "x", "b": "x"})
    assert clash == "rename gives two columns the same name"
    assert (await value("data_transform", records=[{"a": 1, "b": 2}], rename={"a": "b"}))["records"] == [{"b": 1}]


# Answers


@pytest.mark.conforms("S17", "S-b7")
async def test_answers_over_32_kib_are_halved_and_say_so() -> None:
    rows = [{"n": n, "text": "ä" * 100} for n in range(1000)]
    content = json.dumps(rows)
    for name, args in (
        ("data_parse", {"content": content}),
        ("data_filter", {"records": rows, "where": [{"column": "n", "op": ">=", "value": 0}]}),
        ("data_transform", {"records": rows}),
        ("data_transform", {"records": rows, "sort_by": "n"}),
    ):
        found = await value(name, **args)
        assert (len(found["records"]), found["count"], found["truncated"], found["total"]) == (125, 1000, True, 1000)
        assert found["records"] == rows[:125]
        assert len(json.dumps(found, ensure_ascii=False).encode()) <= 32 * 1024
    grouped = await value(
        "data_aggregate", records=rows, metrics=[{"column": "n", "op": "sum"}], group_by=["n", "text"]
    )
    assert (len(grouped["groups"]), grouped["count"], grouped["truncated"]) == (125, 1000, True)
    wide = await value("data_parse", content=",".join(f"{'c' * 30}{n}" for n in range(1900)) + "\n1")
    assert len(json.dumps(wide).encode()) <= 33 * 1024
    one = await value("data_filter", records=[{"a": "x" * 40_000}], where=[{"column": "a", "op": "!=", "value": 1}])
    assert one == {"records": [], "count": 1, "truncated": True, "total": 1}


# Engines

CELLS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**17), 10**17),
    st.floats(allow_nan=True),
    st.text(max_size=4),
    st.decimals(-10000, 10000, places=3).map(str),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["1", "1.0", "01", " 1", "-0", "+1", "1e3", ".5", "5.", "1_0", "٣", "inf", "NaN", "0x1", "1\n"]),
    st.lists(st.integers(0, 9), max_size=2),
)


def number_of(cell: Any) -> float | int | None:
    if isinstance(cell, bool) or not isinstance(cell, str | int | float):
        return None
    text = text_of(cell).strip("\t\n\v\f\r \x85\xa0\u3000")
    if re.fullmatch(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?", text) is None:
        return None
    number = int(text) if re.fullmatch(r"[+-]?[0-9]+", text) else float(text)
    return number if math.isfinite(number) else None


def text_of(cell: Any) -> str:
    if isinstance(cell, float) and cell.is_integer() and abs(cell) < 2**53:
        cell = int(cell)
    return cell if isinstance(cell, str) else json.dumps(cell, ensure_ascii=False)


def key_of(cell: Any) -> Any:
    is_code = isinstance(cell, str) and re.match(r"[+-]?0[0-9]|[0-9]+[eE][0-9]+$", cell.strip())
    number = None if is_code else number_of(cell)
    return None if cell is None else text_of(cell) if number is None else (number,)


def passes(row: dict[str, Any], op: str, given: Any) -> bool:
    """The rules of conditions, of one cell in plain Python."""
    if "a" not in row:
        return False
    cell = row["a"]
    if op in ("==", "!=", "in"):
        return (key_of(cell) in [key_of(each) for each in (given if op == "in" else [given])]) != (op == "!=")
    if cell is None or given is None:
        return False
    if op == "contains":
        return text_of(given).casefold() in text_of(cell).casefold()
    one, other = number_of(cell), number_of(given)
    compare: Any = {">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le}[op]
    if one is None or other is None:
        return bool(compare(text_of(cell), text_of(given)))
    return bool(compare(one, other))


ROWS_OF_CELLS = st.lists(st.dictionaries(st.sampled_from("ab"), CELLS, max_size=2), max_size=12)


@given(ROWS_OF_CELLS, st.sampled_from(["==", "!=", ">", "<", ">=", "<=", "contains", "in"]), CELLS)
@example([{"a": 2**53 + 1}, {"a": 2**53}, {"a": float(2**53)}, {"a": "9007199254740993"}], "<", 2**53 + 1)
@example([{"a": "1" * 45}, {"a": "1" * 44 + "2"}, {"a": None}, {}], "==", "1" * 45)
@example([{"a": "ΑΣ"}, {"a": "straße"}], "contains", "ς")
@settings(max_examples=100)
def test_columns_are_filtered_as_each_cell_would_be(rows: list[dict[str, Any]], op: str, given: Any) -> None:
    value = [given, "1"] if op == "in" else given
    found = filtered([rows], [{"column": "a", "op": op, "value": value}])
    whole = [row for row in rows if passes(row, op, value)]
    assert found["count"] == len(whole)
    assert [list(row) for row in found["records"]] == [list(row) for row in whole]


@given(ROWS_OF_CELLS)
@example([{"a": 1.7976931348623151e308}])
@settings(max_examples=100)
def test_columns_are_added_as_each_cell_would_be(rows: list[dict[str, Any]]) -> None:
    rows = [row for row in rows if not isinstance(row.get("b"), float) or math.isfinite(row["b"])]  # null in answers
    groups: dict[Any, list[Any]] = {}
    for row in rows:
        groups.setdefault(key_of(row.get("b")), []).append(row.get("a"))
    metrics = [{"column": "a", "op": op} for op in ("sum", "count", "min", "max")]
    try:
        found = aggregated([rows[:5], rows[5:]], metrics, ["b"])
    except ToolError:  # of floats at the end of their range
        return
    assert found["count"] == len(groups)
    for group in found["groups"]:
        cells = [cell for cell in groups[key_of(group["b"])] if cell is not None]
        numbers = [number for cell in cells if (number := number_of(cell)) is not None]
        assert group["count_a"] == len(cells)
        scale = sum(abs(number) for number in numbers)
        assert math.isclose(group["sum_a"], sum(numbers), rel_tol=1e-14, abs_tol=scale * 1e-14)
        for op, extreme in (("min_a", min(numbers, default=None)), ("max_a", max(numbers, default=None))):
            assert group[op] is None if extreme is None else float(group[op]) == float(extreme)


def test_a_long_sum_of_prices_shows_nothing_of_how_floats_are_added() -> None:
    cells = [f"{(n * 7919) % 100_003 / 1000 + 33.33:.3f}" for n in range(300_000)]
    batches = [[{"a": cell} for cell in cells[at : at + 10_000]] for at in range(0, len(cells), 10_000)]
    [group] = aggregated(batches, [{"column": "a", "op": "sum"}], [])["groups"]
    assert group["sum_a"] == float(f"{math.fsum(map(float, cells)):.15g}")


def sort_key(cell: Any) -> tuple[int, Any, str]:
    number = number_of(cell)
    return (1, 0, text_of(cell)) if number is None else (0, number, "")


@pytest.mark.slow
@given(st.lists(st.fixed_dictionaries({"a": CELLS}), max_size=30), st.booleans(), st.integers(1, 9))
@example([{"a": 2**53 + 1}, {"a": 2**53}], False, 1)
@example([{"a": "1"}, {"a": None}, {"a": "x"}], False, 2)
@settings(max_examples=100)
def test_sorting_in_pieces_is_sorting_at_once(rows: list[dict[str, Any]], descending: bool, limit: int) -> None:
    rows = [row | {"n": number} for number, row in enumerate(rows)]
    valued = sorted(
        (row for row in rows if row["a"] not in (None, "")), key=lambda row: sort_key(row["a"]), reverse=descending
    )
    in_order = [row["n"] for row in [*valued, *(row for row in rows if row["a"] in (None, ""))]]
    how = Transform(sort_by="a", sort_desc=descending, limit=limit)
    for batches in ([rows], [[row] for row in rows]):
        assert [row["n"] for row in transformed(batches, how)["records"]] == in_order[:limit]


# CSV as Python's csv reads it


PARTS = ["a", "b", ",", '"', '""', "\n", "\r\n", "\r", " ", "", '"a"', '"a,\nb"', "1,2,3\n", '"x","y"\n']


@given(st.lists(st.sampled_from(PARTS)), st.sampled_from(["h", "h,i", "h,i,j"]), st.integers(1, 400))
@example(['5" disk,1\n', "2,3\n"], '5" h,i', 1)
@settings(max_examples=100)
def test_the_rows_are_those_of_the_csv_module(parts: list[str], header: str, size: int) -> None:
    text = "".join(parts)
    rows = [row for row in csv.reader(io.StringIO(text, newline="")) if row]
    names = [*header.split(","), *(f"column_{n}" for n in range(header.count(",") + 2, 50))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "BATCH_COST", size)
        assert read(f"{header}\n{text}", "csv") == [dict(zip(names, row, strict=False)) for row in rows]


# Files


def big_csv(path: Path, rows: int) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "group", "amount", "text"])
        writer.writerows([n, f"g{n % 7}", f"{n % 1000}.25", "some words of a cell"] for n in range(rows))


ROWS = 30_000


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    big_csv(folder / "big.csv", ROWS)
    return folder


async def of_file(tool: DataTools, name: str, **args: Any) -> ToolResult:
    result = await call(tool, name, path="big.csv", **args)
    assert not result.is_error, result.message
    return result


async def test_a_file_is_read_in_pieces_however_large_it_is(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory does not grow with the file: the batches of rows are forgotten one after the other."""
    monkeypatch.setattr(reading, "BATCH_COST", 256 * 1024)
    tool = DataTools(workspace)
    await of_file(tool, "data_parse", limit=1)  # what is imported at first use is not part of it
    metrics = [{"column": "amount", "op": "sum"}, {"column": "*", "op": "count"}]
    tracemalloc.start()
    try:
        parse = await of_file(tool, "data_parse")
        top = await of_file(tool, "data_transform", sort_by="id", sort_desc=True, limit=2, select=["id"])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    fewer = await of_file(tool, "data_filter", where=[{"column": "id", "op": "<", "value": 3}])
    total = await of_file(tool, "data_aggregate", metrics=metrics)
    assert parse.value["count"] == ROWS
    assert [row["id"] for row in fewer.value["records"]] == ["0", "1", "2"]
    assert total.value["groups"] == [{"sum_amount": sum(n % 1000 + 0.25 for n in range(ROWS)), "count_*": ROWS}]
    assert top.value["records"] == [{"id": str(ROWS - 1)}, {"id": str(ROWS - 2)}]
    assert peak < 1_500_000  # the file has 1.2 MB, and its rows take 10 as objects


def test_a_batch_of_rows_with_many_cells_has_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell takes many times more memory than its byte in the file."""
    monkeypatch.setattr(reading, "BATCH_COST", 64 * 1024)
    text = ",".join(f"c{n}" for n in range(1000)) + "\n" + ("," * 999 + "\n") * 10
    assert [len(batch) for batch in Table(open_text(io.BytesIO(text.encode())), "csv").batches()] == [2] * 5


async def test_only_files_of_the_workspace_are_read(workspace: Path) -> None:
    tool = DataTools(workspace)
    for path in ("/etc/passwd", "../x", "missing.csv", "."):
        result = await call(tool, "data_parse", path=path)
        assert result.is_error and "root:" not in result.text
    assert "not both" in (await call(tool, "data_parse", path="big.csv", content="a")).message
    assert "not both" in (await call(tool, "data_transform", path="big.csv", records=[])).message
    assert (await call(tool, "data_transform")).message == "records are required"
    without = await call(DataTools(), "data_parse", content="a\n1", path="big.csv")
    assert without.is_error and "path" in without.message


async def test_more_groups_than_there_may_be_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolcell.builtin.tables.evaluation.MAX_GROUPS", 10)
    (tmp_path / "t.csv").write_text("n\n" + "".join(f"{n}\n" for n in range(100_000)))
    metrics = [{"column": "*", "op": "count"}]
    failed = await call(DataTools(tmp_path), "data_aggregate", path="t.csv", metrics=metrics, group_by=["n"])
    assert failed.is_error and "more than 10 groups" in failed.message


async def test_a_call_that_is_given_up_stops_reading(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread ends by itself: it looks between two batches whether anybody still waits."""
    begun, may_go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def slowly(batches: Iterable[Any], *_: Any) -> Any:
        try:
            for _batch in batches:
                begun.set()
                assert may_go_on.wait(PATIENCE_S)
        finally:
            ended.set()

    monkeypatch.setattr(reading, "BATCH_COST", 1024)
    monkeypatch.setattr("toolcell.builtin.tables.evaluation.transformed", slowly)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(of_file, DataTools(workspace), "data_transform")
        await anyio.to_thread.run_sync(begun.wait, PATIENCE_S)
        tasks.cancel_scope.cancel()
    may_go_on.set()
    assert await anyio.to_thread.run_sync(ended.wait, PATIENCE_S)


@pytest.mark.conforms("S1", "EX-12")
def test_without_polars_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    with pytest.raises(UsageError, match=r"pip install 'toolcell\[data\]'"):
        DataTools()


@pytest.mark.conforms("S1", "EX-12")
def test_the_package_needs_nothing_and_offers_files_only_with_a_workspace(tmp_path: Path) -> None:
    alone, with_files = DataTools().definitions(), DataTools(tmp_path).definitions()
    assert [each.name for each in alone] == ["data_parse", "data_filter", "data_aggregate", "data_transform"]
    required = [each.parameters["required"] for each in alone]
    assert required == [["content"], ["records", "where"], ["records", "metrics"], ["records"]]
    assert all("path" not in each.parameters["properties"] for each in alone)
    assert all("path" in each.parameters["properties"] for each in with_files)
    with pytest.raises(RegistrationError, match="write DataTools"):
        ToolRegistry([DataTools])
