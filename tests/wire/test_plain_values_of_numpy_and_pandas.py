"""Values of numpy and pandas on their way to the wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from toolcell.config import Limits
from toolcell.run.request import run_message
from toolcell.tools import ToolRegistry
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.codec import encode
from toolcell_bridge.wire.errors import UnsendableValue, ValueTooLarge
from toolcell_bridge.wire.messages import MAX_ELEMENTS, Progress, ToolReturn
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
    # numpy arrays
    (np.array(3), 3),
    (np.array([]), []),
    (np.arange(6, dtype="u1").reshape(2, 3), [[0, 1, 2], [3, 4, 5]]),
    (np.array([[0.5, NAN]], dtype="f4"), [[0.5, NAN]]),
    (np.array([True]), [True]),
    (np.array([0.5], dtype=np.longdouble), [0.5]),
    (np.array(["a", "bc"]), ["a", "bc"]),
    (np.array([b"a"]), [b"a"]),
    (np.array(["2024-01-02", "NaT"], dtype="M8[ns]"), ["2024-01-02T00:00:00", None]),
    (np.array([[90]], dtype="m8[s]"), [[90.0]]),
    (np.array([1, None, "x", {2}, np.int8(3)], dtype=object), [1, None, "x", [2], 3]),
    (np.array([(1, 0.5)], dtype=[("a", "i4"), ("b", "f8")]), [[1, 0.5]]),
    (np.ma.masked_array([1, 2], mask=[False, True]), [1, None]),
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
    # pandas columns
    (pd.Series([1, 2]), [1, 2]),
    (pd.Series([1, None], dtype="Int64"), [1, None]),
    (pd.Series([0.5, None]), [0.5, NAN]),
    (pd.Series(pd.to_datetime(["2024-01-02", None])), ["2024-01-02T00:00:00", None]),
    (pd.Series(["a", "b"], dtype="category"), ["a", "b"]),
    (pd.Series([{1}, (2,)]), [[1], [2]]),
    (pd.Categorical(["a"]), ["a"]),
    (pd.array([1, None], dtype="Int64"), [1, None]),
    (pd.Index(["a"]), ["a"]),
    (pd.RangeIndex(2), [0, 1]),
    (pd.MultiIndex.from_tuples([(1, "a")]), [[1, "a"]]),
    # pandas tables
    (pd.DataFrame({"n": [1, 2], "t": ["x", "y"]}), [{"n": 1, "t": "x"}, {"n": 2, "t": "y"}]),
    (
        pd.DataFrame({"d": pd.to_datetime(["2024-01-02", None]), "o": [(1,), None]}),
        [{"d": "2024-01-02T00:00:00", "o": [1]}, {"d": None, "o": None}],
    ),
    (pd.DataFrame({"n": [1]}, index=["dropped"]), [{"n": 1}]),
    (pd.DataFrame({2024: [1]}), [{"2024": 1}]),
    (pd.DataFrame({"n": []}), []),
    (pd.DataFrame(), []),
]


@pytest.mark.conforms("T6", "Q-b7")
@pytest.mark.parametrize(("value", "sent"), CONVERTED, ids=lambda item: type(item).__name__)
def test_a_value_of_numpy_or_pandas_is_converted_as_documented(value: object, sent: object) -> None:
    assert repr(to_plain(value)) == repr(sent)  # tells 1 from True, and NaN is like NaN
    assert repr(to_plain([{"k": value}])) == repr([{"k": sent}])
    assert encode(Progress(to_plain(value)))


REFUSED: list[tuple[object, str]] = [
    (np.complex128(1j), "value: complex numbers"),
    (np.array([0, 1j]), r"value\[0\]: complex numbers"),
    (np.array([[1, object()]], dtype=object), r"value\[0\]\[1\]: object is not data"),
    (np.array(["\ud800"]), r"value\[0\]: text holds a lone surrogate"),
    (np.timedelta64(5, "M"), "value: timedelta64 failed to be converted"),
    (np.dtype("i4"), "is not data"),
    (np.float64, "a class is not data"),
    (pd.Series([1, 1j], dtype=object), r"value\[1\]: complex numbers"),
    (pd.DataFrame({"a": [1, object()]}), r"value\[1\]\['a'\]: object is not data"),
    (pd.DataFrame([[1, 2]], columns=["a", "a"]), "value: two columns become 'a': rename one"),
    (pd.DataFrame({("a", "b"): [1]}), "value: its columns are a MultiIndex: flatten them first"),
    (pd.DataFrame({"a": ["\ud800"]}, dtype=object), r"value\[0\]\['a'\]: text holds"),
]


@pytest.mark.conforms("T6", "C-b8")
@pytest.mark.parametrize(("value", "problem"), REFUSED, ids=lambda item: item if type(item) is str else "")
def test_a_value_of_numpy_or_pandas_without_a_form_is_refused_by_path(value: object, problem: str) -> None:
    with pytest.raises(UnsendableValue, match=problem):
        to_plain(value)


def test_a_million_numbers_in_a_square_can_be_sent_to_a_script_and_a_quarter_of_them_back() -> None:
    square = np.zeros((1000, 1000), dtype="u1")
    assert to_plain(square) == [[0] * 1000] * 1000
    assert encode(ToolReturn(1, to_plain(square)))
    assert encode(Progress(to_plain(square[:500, :500])))


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.zeros(MAX_ELEMENTS),
        lambda: np.zeros((MAX_ELEMENTS // 2, 1)),
        lambda: np.broadcast_to(np.int8(0), (10**6, 10**6)),
        lambda: np.broadcast_to(np.datetime64("NaT"), (10**9,)),
        lambda: pd.DataFrame({"a": np.zeros(MAX_ELEMENTS // 3)}),
        lambda: pd.Series(np.zeros(MAX_ELEMENTS)),
    ],
)
def test_too_many_numbers_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueTooLarge, match="elements"):
        to_plain(make())


def test_an_array_counts_into_the_depth() -> None:
    value: Any = np.zeros((1, 1), dtype="i1")
    for _ in range(MAX_DEPTH - 2):
        value = [value]
    assert encode(Progress(to_plain(value)))
    with pytest.raises(ValueTooLarge, match="levels deep"):
        to_plain([value])


def test_a_table_counts_into_the_depth() -> None:
    value: Any = pd.DataFrame({"a": [[1]]})
    for _ in range(MAX_DEPTH - 3):
        value = [value]
    assert encode(Progress(to_plain(value)))
    with pytest.raises(ValueTooLarge, match="levels deep"):
        to_plain([value])


INDEXES: list[tuple[Callable[[], Any], list[str]]] = [
    (lambda: pd.DataFrame({"a": [1, 2]}), []),
    (lambda: pd.DataFrame({"a": [1, 2, 3]}).query("a > 1").sort_values("a", ascending=False), []),
    (lambda: pd.Series([1, 2]), []),
    (lambda: pd.DataFrame(), []),
    (lambda: pd.DataFrame({"a": [1]}, index=["x"]), ["DataFrame"]),
    (lambda: pd.DataFrame({"a": [1], "b": [2]}).set_index("a"), ["DataFrame"]),
    (lambda: pd.DataFrame({"a": [1]}, index=pd.date_range("2024", periods=1)), ["DataFrame"]),
    (lambda: pd.DataFrame({"a": [1, 1], "b": [1, 2]}).groupby("a").sum(), ["DataFrame"]),
    (lambda: pd.DataFrame({"a": [1], "b": [1], "c": [1]}).set_index(["a", "b"]), ["DataFrame"]),
    (lambda: pd.Series(["x", "x"]).value_counts(), ["Series"]),
    (lambda: pd.Series({"x": 1}), ["Series"]),
    (
        lambda: [pd.Series({"x": 1}), pd.Series({"y": 1}), pd.DataFrame({"a": [1]}, index=["x"])],
        ["Series", "DataFrame"],
    ),
]


@pytest.mark.parametrize(("make", "kinds"), INDEXES)
def test_an_index_that_says_something_is_not_dropped_in_silence(make: Callable[[], Any], kinds: list[str]) -> None:
    notes: list[str] = []
    to_plain(make(), notes=notes)

    assert [note.split()[4] for note in notes] == kinds
    assert all("keeps it" in note for note in notes)


@pytest.mark.anyio
async def test_an_index_that_a_tool_loses_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    registry = ToolRegistry()
    registry.register("count", "Return counts of values", None, lambda args: pd.Series({"x": 1}))

    assert (await registry.execute("count")).value == [1]
    assert "the index of a Series is not sent" in caplog.text


def test_an_index_that_an_input_loses_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    frame = pd.DataFrame({"a": [1]}, index=["x"])

    message = run_message(1, "df", inputs={"df": frame}, limits=Limits())

    assert message.inputs == {"df": [{"a": 1}]}
    assert "an input is not sent whole: the index of a DataFrame is not sent: reset_index() keeps it" in caplog.text
