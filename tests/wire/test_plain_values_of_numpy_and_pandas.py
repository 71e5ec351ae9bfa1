"""Values of numpy and pandas on their way to the wire."""

from __future__ import annotations

from typing import Any

import pytest

from rows import each_row
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.codec import encode
from toolcell_bridge.wire.errors import UnsendableValue, ValueTooLarge
from toolcell_bridge.wire.messages import MAX_ELEMENTS, Progress
from toolcell_bridge.wire.plain import MAX_DEPTH

np: Any = pytest.importorskip("numpy")
pd: Any = pytest.importorskip("pandas")

NAN = float("nan")

CONVERTED: list[tuple[object, object]] = [
    # numpy scalars
    (np.bool_(True), True),
    (np.int8(-1), -1),
    (np.uint64(2**64 - 1), 2**64 - 1),
    (np.float16(0.5), 0.5),
    (np.float32(0.5), 0.5),
    (np.float64(0.5), 0.5),
    (np.longdouble(0.5), 0.5),
    (np.float64("nan"), NAN),
    (np.str_("é"), "é"),
    (np.bytes_(b"x"), b"x"),
    (np.datetime64("2024-01-02"), "2024-01-02"),
    (np.datetime64("2024-01-02T03:04:05", "ns"), "2024-01-02T03:04:05"),
    (np.datetime64("2024-01-02T03:04:05.250", "ns"), "2024-01-02T03:04:05.25"),
    (np.datetime64("NaT"), None),
    (np.timedelta64(5, "m"), 300.0),
    (np.timedelta64("NaT"), None),
    (np.array([(1, 0.5)], dtype=[("a", "i4"), ("b", "f8")])[0], [1, 0.5]),
    (np.dtype("f8"), "float64"),
    (np.ma.masked, None),
    # numpy arrays
    (np.array(3), 3),
    (np.ma.masked_array(1, True), None),
    # numpy in containers, and as keys
    ({"mean": np.float64(0.5), "n": np.int64(3)}, {"mean": 0.5, "n": 3}),
    ({np.int64(1): "a", np.str_("k"): "b"}, {"1": "a", "k": "b"}),
    # pandas scalars
    (pd.NaT, None),
    (pd.NA, None),
    (pd.Timestamp("2024-01-02T03:04:05.000000001"), "2024-01-02T03:04:05.000000001"),
    (pd.Timestamp("2024-01-02", tz="UTC"), "2024-01-02T00:00:00+00:00"),
    (pd.Timedelta(minutes=1.5), 90.0),
    (pd.Period("2024-01"), "2024-01"),
    (pd.Interval(0, 1), "(0, 1]"),
    ({pd.Timestamp("2024-01-02"): 1}, {"2024-01-02T00:00:00": 1}),
    (pd.CategoricalDtype(["a"]), "category"),
    (pd.DatetimeTZDtype(tz="UTC"), "datetime64[ns, UTC]"),
    # pandas columns
    (pd.Categorical(["a"]), ["a"]),
    (pd.array([1, None], dtype="Int64"), [1, None]),
    (pd.Index(["a"]), ["a"]),
    (pd.RangeIndex(2), [0, 1]),
    (pd.MultiIndex.from_tuples([(1, "a")]), [[1, "a"]]),
]


@pytest.mark.conforms("T6", "Q-b7")
@each_row(("value", "sent"), CONVERTED, ids=lambda item: type(item).__name__)
def test_a_value_of_numpy_or_pandas_is_converted_as_documented(value: object, sent: object) -> None:
    assert repr(to_plain(value)) == repr(sent)  # tells 1 from True, and NaN is like NaN
    assert repr(to_plain([{"k": value}])) == repr([{"k": sent}])
    assert encode(Progress(to_plain(value)))


REFUSED: list[tuple[object, str]] = [
    (np.complex128(1j), "value: complex numbers"),
    (np.array([[1, object()]], dtype=object), r"value\[1\]: object is not data"),
    (np.array(["\ud800"]), r"value: text holds a lone surrogate"),
    (np.timedelta64(5, "M"), r"value: months and years have no fixed number of seconds: send str\(x\)"),
    (np.float64, "a class is not data"),
    (pd.Series([1, 1j], dtype=object, name="n"), r"value\['n'\]\[1\]: complex numbers"),
    (pd.Series([2**70]), r"value\[0\]: int does not fit"),
    (pd.DataFrame({"a": [1, object()]}), r"value\['a'\]\[1\]: object is not data"),
    (pd.DataFrame({"a": ["\ud800"]}, dtype=object), r"value\['a'\]: text holds"),
]


@pytest.mark.conforms("T6", "C-b8")
@each_row(("value", "problem"), REFUSED, ids=lambda item: item if type(item) is str else "")
def test_a_value_of_numpy_or_pandas_without_a_form_is_refused_by_path(value: object, problem: str) -> None:
    with pytest.raises(UnsendableValue, match=problem):
        to_plain(value)


@each_row("shape", [(10**9,), (10**6, 10**6)])
def test_an_array_that_no_message_holds_is_refused_before_it_is_copied(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueTooLarge, match="bytes"):
        to_plain(np.broadcast_to(np.int8(0), shape))


def test_values_of_several_kinds_count_as_elements() -> None:
    with pytest.raises(ValueTooLarge, match="elements"):
        to_plain(pd.Series([1, "a"] * (MAX_ELEMENTS // 2)))


def test_a_table_counts_into_the_depth() -> None:
    value: Any = pd.DataFrame({"a": [[1, "a"]]})
    for _ in range(MAX_DEPTH - 3):
        value = [value]
    assert encode(Progress(to_plain(value)))
    with pytest.raises(ValueTooLarge, match="levels deep"):
        to_plain([value])
