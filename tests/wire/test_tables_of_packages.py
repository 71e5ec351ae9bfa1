"""Arrays and frames of numpy, pandas, polars and pyarrow: what is sent of each is what it is made to again."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from decimal import Decimal as D
from typing import Any

import pytest

from rows import each_row
from toolcell_bridge.guest.table_columns import text_column
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.codec import decode, encode
from toolcell_bridge.wire.columns import BadTable, Column
from toolcell_bridge.wire.errors import UnsendableValue
from toolcell_bridge.wire.messages import Progress
from toolcell_bridge.wire.tables import AnyTable, Array, Axis, Table, from_bytes
from wire.table_examples import numbers, text

np: Any = pytest.importorskip("numpy")
pd: Any = pytest.importorskip("pandas")


def sent(value: Any) -> AnyTable:
    """Return what the other end receives."""
    message = decode(bytearray(encode(Progress(to_plain(value)))[4:]))
    assert isinstance(message, Progress)
    assert isinstance(message.value, Array | Table)
    return message.value


def sent_by_hand(table: AnyTable) -> Any:
    """Return what is made of an encoding at the other end."""
    return from_bytes(table.to_bytes()).native()


ARRAYS = [
    np.arange(6).reshape(2, 3),
    np.arange(6.0).reshape(2, 3).T,
    np.arange(24, dtype="u1").reshape(2, 3, 4)[:, ::2],
    np.array([1, 2], dtype="f2"),
    np.array([1 + 2j]),
    np.array([True, False]),
    np.array(["a", "bé", ""]),
    np.array(["a"], dtype="U10"),
    np.array([], dtype="U10"),
    np.array([b"ab", b"c"]),
    np.array([b"ab"], dtype="S10"),
    np.array(["2024-01-01", "NaT"], dtype="M8[ns]"),
    np.array(["2024-01-01", "NaT"], dtype="M8[D]"),
    np.array([1, 2], dtype="m8[ms]"),
    np.array([1, "a", None, [2]], dtype=object),
    np.array(["a", None], dtype=object),
    np.zeros((0, 3)),
    np.ma.masked_array([1, 2], mask=[False, True]),
    np.ma.masked_array(np.array(["a", "b"], dtype="U10"), mask=[False, True]),
    np.ma.masked_array(np.array(["2024-01-01", "2024-01-02"], dtype="M8[D]"), mask=[False, True]),
]


@each_row("array", ARRAYS, ids=lambda array: f"{array.dtype}")
def test_an_array_arrives_with_its_type_and_shape(array: Any) -> None:
    again = sent(array).native()
    assert again.dtype == array.dtype
    assert type(again) is type(array)
    np.testing.assert_array_equal(again, array)
    again[...] = again  # as an array of one's own, it can be written to


def test_other_bytes_and_units_become_the_nearest_ones() -> None:
    assert sent(np.arange(3, dtype=">i4")).native().tolist() == [0, 1, 2]
    with pytest.warns(UserWarning, match=r"timedelta64\[h\] arrive as timedelta64\[s\]"):
        assert sent(np.array([1], dtype="m8[h]")).native().tolist() == [dt.timedelta(hours=1)]
    with pytest.warns(UserWarning, match=r"datetime64\[25us\] arrive as datetime64\[us\]"):
        assert sent(np.array([1], dtype="M8[25us]")).native() == np.array([25], dtype="M8[us]")


def test_an_array_of_texts_of_uneven_lengths_is_one_of_objects() -> None:
    """Each text of another array takes as much as the longest."""
    uneven = np.array(["x" * 100_000, *["y"] * 1_000], dtype=object)
    found = Array("numpy", [len(uneven)], text_column("", uneven.tolist(), None, "")).to_numpy()
    assert (found.dtype, found.tolist()) == (np.dtype(object), uneven.tolist())
    even = np.array(["x" * 1_000] * 1_000)
    assert sent(even).to_numpy().dtype == even.dtype
    for texts in ([], ["a", "b"]):
        far_too_wide = replace(text(*texts), detail=2**29 - 1)
        assert sent_by_hand(Array("numpy", [len(texts)], far_too_wide)).nbytes < 100
    narrower_than_its_texts = replace(text("abc"), detail=1)
    assert sent_by_hand(Array("numpy", [1], narrower_than_its_texts)).tolist() == ["abc"]


def test_arrays_in_a_column_are_lists_and_tables_in_it_are_refused_by_name() -> None:
    vectors = [np.arange(2.0), {"deep": np.array(["x"])}, None]
    again = sent(pd.DataFrame({"vector": vectors})).native()
    assert again["vector"].tolist() == [[0.0, 1.0], {"deep": ["x"]}, None]
    cells = np.empty(2, dtype=object)
    cells[:] = [np.arange(2), [np.arange(1)]]
    assert sent(cells).native().tolist() == [[0, 1], [[0]]]
    column = pd.Series([None, None], dtype=object)
    for table in (pd.DataFrame({"a": [1]}), pd.Series([1]), to_plain(np.arange(2))):
        column[1] = [table]
        with pytest.raises(UnsendableValue, match=r"x\['inner'\]\[1\]\[0\]: a table inside a column: send its rows"):
            to_plain(pd.DataFrame({"inner": column}), "x")
    assert type(to_plain([np.arange(2)])[0]) is Array  # type: ignore[index]


COLUMNS: dict[str, Any] = {
    "numbers": [1, 2, 3],
    "floats": [1.5, None, 2],
    "text": ["a", "é", None],
    "truths": [True, False, True],
    "categories": pd.Categorical(["x", "y", None], categories=["y", "x"], ordered=True),
    "times": pd.to_datetime(["2024-01-01", "2024-05-05", None]),
    "zoned": pd.to_datetime(["2024-01-01", "2024-05-05", None]).tz_localize("Europe/Berlin"),
    "fixed": pd.to_datetime(["2024-01-01T00:00+05:30"] * 3),
    "spans": pd.to_timedelta([1, 2, None], unit="s"),
    "nullable": pd.array([1, None, 3], dtype="Int64"),
    "nullable truths": pd.array([True, None, False], dtype="boolean"),
    "strings": pd.array(["a", None, "c"], dtype="string"),
    "objects": np.array([[1], {"a": 2}, None], dtype=object),
    "old text": np.array(["a", None, "b"], dtype=object),
    "dates": [dt.date(2024, 1, 1)] * 3,
    "clock times": [dt.time(1, 2, 3, 456789), None, dt.time()],
    "text of objects": pd.Series(["a", None, "b"], dtype=object),
    "lists": [[1, 2], None, []],
    "lists of text": [["a", None], ["é"], ["b"]],
    "lists in lists": [[[1.5], []], [], [[0.5, None], [2.5]]],
    "lists of several kinds": [[1, "a", None], [2.5], [[]]],
    "empty lists": [[], None, []],
    "decimals": [D("1.1"), None, D("-22.22")],
    "long decimals": [D(10) ** 37, D(1), D(-1)],
    "small decimals": [D(10) ** -38, None, D(0)],
    "months": pd.PeriodIndex(["2024-01", None, "2024-03"], freq="M"),
    "weeks": pd.period_range("2024-01", periods=3, freq="W-SUN"),
    "quarters": pd.period_range("2024-01", periods=3, freq="2Q"),
    "intervals": pd.arrays.IntervalArray.from_tuples([(0, 1), None, (1.5, 2)]),
    "whole intervals": pd.interval_range(0, 3, closed="left"),
    "days": pd.interval_range(pd.Timestamp("2024-01-01", tz="Europe/Berlin"), periods=3, closed="both"),
    "hours": pd.interval_range(pd.Timedelta(0), periods=3, freq="90min"),
    "bins": pd.cut([1, 5, 9], 3),
}


@each_row("name", COLUMNS)
def test_a_column_arrives_with_its_type(name: str) -> None:
    frame = pd.DataFrame({name: COLUMNS[name]})
    again = sent(frame).to_pandas()  # type: ignore[union-attr]
    if name == "fixed":  # pandas has several objects for the same distance
        frame = frame.astype(again.dtypes.to_dict())
    pd.testing.assert_frame_equal(again, frame)
    pd.testing.assert_series_equal(sent(frame[name]).native(), frame[name].astype(again.dtypes[name]))


FRAMES = {
    "labels": pd.DataFrame({"a": [1]}, index=["x"]),
    "a named index": pd.DataFrame({"a": [1, 1], "b": [1, 2]}).groupby("a").sum(),
    "several levels": pd.DataFrame({"a": [1], "b": [1], "c": [1]}).set_index(["a", "b"]),
    "columns of several levels": pd.DataFrame({"g": [1, 1], "v": [1, 2]}).groupby("g").agg({"v": ["sum", "mean"]}),
    "a pivot table": pd.DataFrame({"r": ["a", "b"], "c": ["x", "y"], "v": [1, 2]}).pivot_table("v", "r", "c"),
    "times": pd.DataFrame({"a": [1, 2]}, index=pd.date_range("2024", periods=2, tz="UTC", freq=None)),
    "duplicates": pd.DataFrame([[1, 2]], columns=["v", "v"]),
    "mixed labels": pd.DataFrame({1: [1], "a": [2]}),
    "a description": pd.DataFrame({"a": [1.5, 2]}).describe(),
    "every other row": pd.DataFrame({"a": range(10)})[::-3],
    "periods": pd.DataFrame({"a": [1, 2]}, index=pd.period_range("2024-01", periods=2, freq="M")),
    "bins": pd.DataFrame({"a": [1, 5, 9]}).groupby(pd.cut([1, 5, 9], 2), observed=True).sum(),
    "no rows": pd.DataFrame({"a": []}),
    "no columns": pd.DataFrame(index=range(3)),
    "nothing": pd.DataFrame(),
}


@each_row("name", FRAMES)
def test_a_frame_arrives_with_its_labels(name: str) -> None:
    frame = FRAMES[name]
    table = sent(frame)
    assert isinstance(table, Table)
    pd.testing.assert_frame_equal(table.to_pandas(), frame, check_freq=False)
    assert len(table.rows()) == len(frame)
    assert table.shape == frame.shape
    assert "DataFrame" in str(table)


def test_series_keep_their_names_and_counts_their_labels() -> None:
    for series in (pd.Series(["x", "x"]).value_counts(), pd.Series([1], name=("a", 1)), pd.Series([], dtype="f8")):
        pd.testing.assert_series_equal(sent(series).native(), series)


def test_periods_and_intervals_are_text_elsewhere() -> None:
    for series, shown in (
        (pd.Series(pd.period_range("2024-01", periods=1, freq="M"), name="v"), "2024-01"),
        (pd.Series([pd.Interval(0, 1)], name="v"), "(0, 1]"),
    ):
        table = sent(series)
        assert isinstance(table, Table)
        assert table.plain() == table.to_polars().to_list() == table.to_arrow().to_pylist() == [shown]
        assert table.schema == {"v": str(series.dtype)}


RECORDS = [
    np.array([(1, 2.5), (3, np.nan)], dtype=[("x", "i4"), ("y", "f8")]),
    np.array([("a", b"b", "2024-01-01", True)], dtype=[("x", "U1"), ("y", "S1"), ("z", "M8[s]"), ("w", "?")]),
    np.zeros(0, dtype=[("x", "i4")]),
    np.rec.array([("a", b"b")], dtype=[("x", "U10"), ("y", "S4")]),
]


@each_row("records", RECORDS, ids=lambda records: f"{records.dtype}")
def test_records_of_numpy_arrive_with_their_fields(records: Any) -> None:
    table = sent(records)
    again = table.native()
    assert type(again) is type(records)
    assert again.dtype == records.dtype
    assert again.tolist() == records.tolist() or np.isnan(again["y"][1])
    assert isinstance(table, Table)
    pd.testing.assert_frame_equal(table.to_pandas(), pd.DataFrame(records), check_dtype=False)


def frames_of_other_types() -> dict[str, tuple[Any, str]]:
    """Return what has a type that is not kept, and what is said of it."""
    polars, arrow = pytest.importorskip("polars"), pytest.importorskip("pyarrow")
    lists = arrow.list_(arrow.int32(), 2)
    tensor = arrow.ExtensionArray.from_storage(
        arrow.fixed_shape_tensor(arrow.int32(), [2]), arrow.array([[1, 2]], lists)
    )
    with_attrs = pd.DataFrame({"a": [1]})
    with_attrs.attrs["unit"] = "kg"
    return {
        "longdouble": (np.array([0.5], dtype=np.longdouble), "float128 arrive as float64"),
        "months": (np.array(["2024-01"], dtype="M8[M]"), r"datetime64\[M\] arrive as datetime64\[D\]"),
        "a matrix": (np.array([[1]]).view(np.matrix), "matrix arrive as ndarray"),
        "tuples as categories": (
            pd.DataFrame({"a": pd.Categorical([(1, 2)])}),
            "'a': values of type tuple arrive as list",
        ),
        "tuples as labels": (
            pd.Series([1], pd.Index([(1, 2)], tupleize_cols=False)),
            "'index': values of type tuple arrive as str",
        ),
        "unsigned codes": (
            arrow.DictionaryArray.from_arrays(arrow.array([0], "uint8"), arrow.array(["a"])),
            "uint8 indices arrive as one of int32",
        ),
        "tuples": (pd.DataFrame({"a": [(1, 2), None]}), "'a': values of type tuple arrive as list"),
        "times of several zones": (
            pd.Series([pd.Timestamp("2024-01-01"), pd.Timestamp("2024-01-01", tz="UTC")], dtype=object),
            "Timestamp arrive as str",
        ),
        "another fill_value": (np.ma.masked_array([1, 2], [0, 1], fill_value=9), "fill_value of a masked array"),
        "an index of pandas in Arrow": (
            arrow.Table.from_pandas(pd.DataFrame({"a": [1]}, ["x"])),
            "metadata of a schema",
        ),
        "records in records": (np.zeros(1, dtype=[("a", [("b", "i4")])]), "arrive as lists"),
        "decimals that are not numbers": (pd.DataFrame({"a": [D("nan"), D(1)]}), "'a': values of type Decimal"),
        "long decimals": (pd.DataFrame({"a": [D(10) ** 38]}), "'a': values of type Decimal arrive as str"),
        "decimals far apart": (pd.DataFrame({"a": [D(10) ** 20, D(10) ** -20]}), "'a': values of type Decimal"),
        "sparse": (pd.DataFrame({"a": pd.arrays.SparseArray([0, 1])}), "'a': values of type Sparse"),
        "attrs": (with_attrs, "attrs of a frame are not sent"),
        "records in lists": (
            polars.DataFrame({"a": [[{"b": 1}]]}, {"a": polars.List(polars.Struct({"b": polars.Int8}))}),
            "Int8.* as .*Int64",
        ),
        "Int128": (polars.DataFrame({"a": [1]}, {"a": polars.Int128}), "Int128 arrive as Int64"),
        "a tensor": (arrow.table({"a": tensor}), "fixed_shape_tensor.* arrive as fixed_size_list"),
        "a map": (arrow.table({"a": arrow.array([[("k", 1)]], arrow.map_(arrow.string(), arrow.int8()))}), "map<"),
        "metadata": (arrow.table({"a": [1]}).replace_schema_metadata({"k": "v"}), "metadata of a schema"),
        "decimal256": (arrow.table({"a": arrow.array([D(1)], arrow.decimal256(50, 2))}), "decimal256.* as string"),
        "seconds": (arrow.table({"a": arrow.array([1], arrow.time32("s"))}), r"time32\[s\] arrive as time64\[ns\]"),
        "Arrow in pandas": (
            pd.DataFrame({"a": pd.array([dt.date(2024, 1, 1)], pd.ArrowDtype(arrow.date64()))}),
            "date64.* as date32",
        ),
    }


def test_what_arrives_as_another_type_is_named() -> None:
    for name, (value, said) in frames_of_other_types().items():
        with pytest.warns(UserWarning, match=said):
            assert len(to_plain(value)) == len(value), name  # type: ignore[arg-type]


def test_arrays_in_a_column_of_objects_are_arrays_again() -> None:
    vectors = pd.Series([np.arange(2, dtype="f4"), None, np.zeros(0, dtype="f4"), np.ones(3, dtype="f4")])
    again = sent(vectors).native()
    assert [None if each is None else (each.dtype, each.tolist()) for each in again] == [
        (np.dtype("f4"), [0.0, 1.0]),
        None,
        (np.dtype("f4"), []),
        (np.dtype("f4"), [1.0, 1.0, 1.0]),
    ]
    assert sent(vectors).plain() == [[0.0, 1.0], None, [], [1.0, 1.0, 1.0]]
    assert sent(vectors[:3:2].reset_index(drop=True)).to_polars().to_list() == [[0.0, 1.0], []]  # type: ignore[union-attr]
    for kind in ("M8[s]", "U2", "S2", "?", "c8"):
        rows = np.zeros((3, 4), dtype=kind)
        column = sent(pd.Series(list(rows))).native()
        assert [each.tolist() for each in column] == rows.tolist()
    embeddings = pd.DataFrame({"vector": list(np.random.default_rng(1).random((4000, 384), dtype="f4"))})
    table = sent(embeddings)  # of more numbers than a message may have elements
    assert (np.stack(list(table.native()["vector"])) == np.stack(list(embeddings["vector"]))).all()
    assert "list[float32]" in str(table)
    uneven = sent(pd.Series([np.zeros(2), np.zeros((2, 2)), np.zeros(1, dtype="i4")]))
    assert uneven.native().tolist() == [[0.0, 0.0], [[0.0, 0.0], [0.0, 0.0]], [0]]


POLARS_COLUMNS: dict[str, Any] = {
    "numbers": [1, None, 3],
    "text": ["a", None, "é"],
    "dates": [dt.date(2024, 1, 1), None, dt.date(2024, 1, 2)],
    "times": [dt.datetime(2024, 1, 1), None, dt.datetime(2024, 1, 2)],
    "hours": [dt.time(1, 2, 3), None, dt.time(0)],
    "spans": [dt.timedelta(1), None, dt.timedelta(0)],
    "truths": [True, None, False],
    "lists": [[1], [2, 3], None],
    "records": [{"a": 1}, {"a": 2}, None],
    "nothing": [None] * 3,
    "bytes": [b"a", None, b""],
    "floats": [0.5, None, float("inf")],
    "decimals": [D("1.10"), None, D("-2")],
}


@each_row("name", POLARS_COLUMNS)
def test_a_column_of_polars_arrives_in_polars_pandas_and_arrow(name: str) -> None:
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame({name: POLARS_COLUMNS[name]})
    table = sent(frame)
    assert isinstance(table, Table)
    assert table.native().equals(frame)
    assert table.native().dtypes == frame.dtypes
    assert sent(frame[name]).native().equals(frame[name])
    assert len(table.to_pandas()) == 3
    arrow = pytest.importorskip("pyarrow")
    if name != "records":  # Arrow fills a missing record
        assert table.to_arrow().to_pylist() == frame.to_dicts()
        again = sent(arrow.table(frame))
        assert again.native().to_pylist() == frame.to_dicts()
        assert again.to_polars().equals(frame)  # type: ignore[union-attr]


@pytest.mark.parametrize("with_arrow", [True, False])
def test_types_of_polars_arrive_as_they_are(with_arrow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    polars = pytest.importorskip("polars")
    if not with_arrow:
        monkeypatch.setattr("toolcell_bridge.wire.table_packages._arrow_if_there", lambda: None)
    pairs = polars.Array(polars.Int8, 2)
    for series in (
        polars.Series("e", ["b", None, "a"], dtype=polars.Enum(["a", "b", "c"])),
        polars.Series("v", [[1, 2], [3, 4]], dtype=pairs),
        polars.Series("v", [[1, None], None], dtype=pairs),
        polars.Series("v", [[[1, 2]] * 3, None], dtype=polars.Array(pairs, 3)),
        polars.Series("v", [[1, None], None, []], dtype=polars.List(polars.UInt16)),
        polars.Series("v", [[["a"], None], None, []], dtype=polars.List(polars.List(polars.String))),
        polars.Series("v", [], dtype=pairs),
        polars.Series("v", [], dtype=polars.List(polars.Date)),
    ):
        assert sent(series).native().equals(series)
        assert sent(series).native().dtype == series.dtype
    series = polars.Series("e", ["b", None, "a"], dtype=polars.Enum(["a", "b", "c"]))
    assert sent(series).to_pandas().cat.categories.tolist() == ["a", "b", "c"]  # type: ignore[union-attr]


def test_types_of_arrow_arrive_as_they_are() -> None:
    arrow = pytest.importorskip("pyarrow")
    one, two = arrow.array([1]), arrow.array([True, None])[1:]
    tables = [
        arrow.Table.from_arrays([one, two], names=["a", "a"]),
        arrow.table({"d": arrow.array([D("1.10"), None, D("-2.00")], arrow.decimal128(5, 2))[1:]}),
        arrow.table({"d": arrow.array([D(100), None], arrow.decimal128(3, -2)), "n": arrow.nulls(2)}),
        arrow.table({"b": arrow.array([], arrow.bool_())}),
        *(
            arrow.table({"v": arrow.array(values, kind)[1:]})
            for kind in (
                arrow.list_(arrow.int8()),
                arrow.list_(arrow.int8(), 2),
                arrow.list_(arrow.list_(arrow.int8()), 2),
            )
            for values in ([None, None], [])
        ),
        arrow.table({"v": arrow.array([[9, 9], [1, None], None, [3, 4]], arrow.list_(arrow.int16(), 2))[1:]}),
        arrow.table({"v": arrow.array([[9], [1, None], None, []], arrow.list_(arrow.int16()))[1:]}),
        arrow.table({"v": arrow.array([[["a"]], [["b"], None], None], arrow.list_(arrow.list_(arrow.string())))[1:]}),
        *(
            arrow.table({"c": arrow.DictionaryArray.from_arrays(arrow.array([0, None], kind), arrow.array(["a"]))})
            for kind in (arrow.int8(), arrow.int16(), arrow.int32(), arrow.int64())
        ),
        arrow.table({}),
    ]
    for table in tables:
        assert sent(table).native().equals(table)
        assert sent(table).native().schema == table.schema
    kept = pd.Series(pd.array([D("1.1"), None], pd.ArrowDtype(arrow.decimal128(5, 2))))
    pd.testing.assert_series_equal(sent(kept).native(), kept)


def test_arrays_of_arrow_arrive_from_the_middle_and_in_chunks() -> None:
    arrow = pytest.importorskip("pyarrow")
    for array in (
        arrow.array([1, None, 3, 4]),
        arrow.array(["a", None, "bé", "c"]),
        arrow.array([True, None, False, True]),
        arrow.array(["u", None, "v", "u"]).dictionary_encode(),
        arrow.array([1, 2, None, 4], arrow.timestamp("ms", "UTC")),
        arrow.chunked_array([[1, 2], [None, 4]]),
    ):
        assert sent(array[1:]).native().to_pylist() == array[1:].to_pylist()


def test_a_frame_of_one_package_is_made_by_the_others() -> None:
    polars, arrow = pytest.importorskip("polars"), pytest.importorskip("pyarrow")
    table = sent(pd.DataFrame({"a": [1, 2], "b": ["x", None]}, index=pd.Index(["p", "q"], name="k")))
    assert isinstance(table, Table)
    rows = [{"k": "p", "a": 1, "b": "x"}, {"k": "q", "a": 2, "b": None}]
    assert table.rows() == rows
    assert table.to_polars().equals(polars.DataFrame(rows))
    assert table.to_arrow().equals(arrow.Table.from_pylist(rows))
    assert table.to_numpy().tolist() == [[1, "x"], [2, None]]
    assert table.schema == {"a": "int64", "b": "text"}


def made_by_hand(column: Column, kind: str = "pandas.DataFrame", label: Column | None = None) -> Table:
    labels = Axis((label or text("c"),), (None,))
    table = from_bytes(Table(kind, column.length, Axis(), labels, [column]).to_bytes())
    assert isinstance(table, Table)
    return table


@each_row("categories", [Column("null", 1, b"\0"), Column("plain", 1, detail=[None])])
def test_categories_that_are_all_missing_do_not_crash_arrow(categories: Column) -> None:
    for form in ("", "arrow"):
        column = Column("category", 2, b"\0\xff", form=form, detail=(categories, False))
        for table in (made_by_hand(column), made_by_hand(Column("list", 1, detail=(column, 2)))):
            arrow, frame = table.to_arrow(), table.to_pandas()
            arrow.validate(full=True)
            assert arrow.column(0).is_null().to_pylist() == ([True, True] if table.length == 2 else [False])
            assert repr(frame)
            assert repr(table.to_polars())


def test_a_long_category_of_many_rows_is_read_once() -> None:
    polars = pytest.importorskip("polars")
    column = Column("category", 1 << 20, bytes(1 << 20), detail=(text("x" * (1 << 22)), False))
    made = Table("polars.Series", column.length, Axis(), Axis((text("v"),), (None,)), [column]).native()
    assert (made.dtype, made.null_count(), made.to_physical().n_unique()) == (polars.Categorical, 0, 1)


def test_only_the_text_of_a_period_or_an_interval_is_read_as_one() -> None:
    """Whoever looks at the text sees what a tool receives."""
    for form, honest, others in (
        ("period[D]", "2024-01-02", ["now", "2024-01-02 05:00", "2024"]),
        ("interval[int64, right]", "(1, 2]", ["[1, 2)", "91, 2_0?", "(1, 2, 3]", "(2, 1]"]),
        ("interval[bool, right]", "x", ["(False, True]"]),
    ):
        for shown in (honest, *others):
            made = made_by_hand(text(shown, form=form)).to_pandas()["c"]
            is_read = shown == honest != "x"
            assert (str(made.dtype), str(made[0])) == (form if is_read else "object", shown)
    empty = pd.Series(pd.arrays.IntervalArray.from_breaks([1, 2])[:0])
    pd.testing.assert_series_equal(sent(empty).native(), empty)  # type: ignore[union-attr]


def test_periods_of_other_years_than_1_to_9999_arrive_as_text_and_are_named() -> None:
    for months in ([-30_000, 0], [0, 120_000]):
        periods = pd.Series(pd.arrays.PeriodArray(np.array(months), dtype="period[M]"), name="p")
        for given in (periods, periods.to_frame().set_index("p")):
            with pytest.warns(UserWarning, match=r"column '\w+': values of type period\[M\] arrive as text"):
                sent(given)
    pd.testing.assert_series_equal(sent(periods[:1]).native(), periods[:1])  # type: ignore[union-attr]
    missing = pd.Series(pd.PeriodIndex([None, None], freq="M"))
    pd.testing.assert_series_equal(sent(missing).native(), missing)  # type: ignore[union-attr]


def test_odd_lists_of_arrow_and_polars_arrive_or_are_refused_by_name() -> None:
    pa, pl = pytest.importorskip("pyarrow"), pytest.importorskip("polars")
    enum = pl.Series([["a", None], None, []], dtype=pl.List(pl.Enum(["b", "a"])))
    found = sent(enum).native()  # type: ignore[union-attr]
    assert (found.dtype, found.to_list()) == (enum.dtype, enum.to_list())
    nothing = pa.array([[], None], pa.list_(pa.int8(), 0))
    with pytest.warns(UserWarning, match="arrive as list"):
        assert sent(nothing).native().to_pylist() == [[], None]  # type: ignore[union-attr]
    deep: Any = 1
    for _ in range(12):
        deep = [deep]
    for given in (pa.array([deep]), pl.Series([deep])):
        found = sent(given).native()  # type: ignore[union-attr]
        assert (found.to_pylist() if isinstance(given, pa.Array) else found.to_list()) == [deep]


def test_tables_that_no_package_makes_are_made_nevertheless() -> None:
    moment = Column("datetime", 1, numbers("q", 2**62), detail=("us", "posixrules"))
    half = Column("float16", 1, numbers("e", 0.5))
    decimal = Column("decimal", 1, bytes(16), detail=(5, -3))
    lists = [Column("list", 1, detail=(each, 1)) for each in (moment, half, decimal, Column("plain", 1, detail=[{}]))]
    for column in (moment, half, decimal, *lists, Column("category", 1, b"\0", detail=(half, False))):
        table = made_by_hand(column)
        assert [len(made) for made in (table.to_pandas(), table.to_polars(), table.to_arrow(), table.to_numpy())] == [
            1
        ] * 4
    lists_as_categories = Column("category", 1, b"\0", detail=(Column("plain", 1, detail=[[1]]), False))
    assert made_by_hand(lists_as_categories).to_pandas()["c"].tolist() == [[1]]
    labels = Axis((half, Column("bool", 1, b"\1", form="arrow", valid=b"\0")), (None, None))
    table = from_bytes(Table("pandas.DataFrame", 1, labels, Axis((half,), (None,)), [half]).to_bytes())
    assert table.native().shape == (1, 1)
    assert made_by_hand(half, "numpy.ndarray", text("")).native().dtype.names
    assert made_by_hand(half, "pyarrow.Table", half).native().column_names == ["0.5"]
    for label in (Column("list", 1, detail=(half, 1)), lists_as_categories):
        with pytest.raises(BadTable, match="label"):
            made_by_hand(half, "pandas.Series", label)
    with pytest.raises(BadTable, match="lists"):
        made_by_hand(Column("list", 0, detail=(Column("bool", 0), 2**31)))
