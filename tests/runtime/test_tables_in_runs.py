"""Arrays and frames into scripts, out of them, through tools, and on every route besides."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest

from rows import each_row
from toolcell import Limits, SyncRuntime, UsageError
from toolcell.journal import ledger
from toolcell.results import Array, Outcome, Table
from toolcell.tools import ToolRegistry

np: Any = pytest.importorskip("numpy")
pd: Any = pytest.importorskip("pandas")

pytestmark = [pytest.mark.isolation]

FRAME = pd.DataFrame(
    {"n": [1, 2, 3], "when": pd.to_datetime(["2024", "2025", None]), "word": ["a", None, "é"]},
    index=pd.Index(["x", "y", "z"], name="key"),
)
registry = ToolRegistry()


@registry.tool
def frame() -> object:
    """Return a frame of three rows and as many columns."""
    return FRAME


@registry.tool
def rows(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows that were received, as they are."""
    return found


@registry.tool
def total(numbers: list[float]) -> float:
    """Return the total of all numbers that were received."""
    return sum(numbers)


@registry.tool
def described(df: pd.DataFrame, weights: np.ndarray | None = None, power: int = 1) -> pd.DataFrame:
    """Return the frame and the array that were received, as a description of them."""
    assert isinstance(df, pd.DataFrame)
    assert weights is None or isinstance(weights, np.ndarray)
    return df.assign(weight=1.0 if weights is None else weights**power)


@registry.tool
def measured(table: Table) -> list[int]:
    """Return the numbers of rows and columns of a table that a script sends."""
    return list(table.shape)


def is_frame(value: Any) -> bool:
    pd.testing.assert_frame_equal(value.to_pandas(), FRAME)
    return True


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tables")
    with SyncRuntime(registry, packages=["numpy", "pandas"], record=folder / "audit") as runtime:
        yield runtime, folder


def test_a_frame_and_an_array_go_in_and_come_out(runtime: Any) -> None:
    result = runtime[0].execute_code(
        "a += 1\nset_result({'df': df, 'a': a, 'kinds': [str(df.index.name), str(df.dtypes['when'])]})",
        inputs={"df": FRAME, "a": np.arange(5.0)},
    )
    assert result.outcome is Outcome.OK, result.error
    assert is_frame(result.value["df"])
    assert isinstance(result.value["a"], Array)
    assert result.value["a"].to_numpy().tolist() == [1, 2, 3, 4, 5]
    assert result.value["kinds"] == ["key", str(FRAME.dtypes["when"])]


def test_what_a_run_returned_is_an_input_of_the_next(runtime: Any) -> None:
    first = runtime[0].execute_code(
        "df.groupby('word', dropna=False).agg({'n': ['sum', 'mean']})", inputs={"df": FRAME}
    )
    second = runtime[0].execute_code("set_result(df)", inputs={"df": first.value})
    assert isinstance(first.value, Table)
    assert second.value == first.value == copy.deepcopy(first.value) == pickle.loads(pickle.dumps(first.value))
    assert first.value.labels == [("n", "sum"), ("n", "mean")]


def test_a_tool_gives_a_frame_and_gets_lists_and_rows_where_its_types_say_so(runtime: Any) -> None:
    result = runtime[0].execute_code(
        "df = call_tool('frame')\n"
        "found = [call_tool('total', numbers=df['n']), call_tool('rows', found=df), call_tool('frame', raw=True)]\n"
        "set_result([df, *found])"
    )
    assert result.outcome is Outcome.OK, result.error
    again, number, found, text = result.value
    assert is_frame(again)
    assert number == 6
    assert found[1] == {"key": "y", "n": 2, "when": "2025-01-01T00:00:00", "word": None}
    assert text.startswith('"DataFrame, 3 rows x 3 columns')


def test_calls_at_once_take_and_give_frames(runtime: Any) -> None:
    source = (
        "calls = [('described', {'df': df, 'weights': a, 'power': n}) for n in (1, 2)] + [('frame', {})]\n"
        "found = call_tools_parallel(calls)\nset_result([*found, sum(len(each) for each in found)])"
    )
    weights = np.array([1.0, 2.0, 3.0])
    result = runtime[0].execute_code(source, inputs={"df": FRAME, "a": weights})
    assert result.ok, result.error
    for table, power in zip(result.value[:2], (1, 2), strict=True):
        pd.testing.assert_frame_equal(table.to_pandas(), FRAME.assign(weight=weights**power))
    assert is_frame(result.value[2])
    assert result.value[3] == 9


def test_a_tool_whose_parameter_is_a_frame_gets_one(runtime: Any) -> None:
    source = (
        "import numpy as np\n"
        "wide = call_tool('described', df=df, weights=np.arange(3.0))\n"
        "set_result([wide, call_tool('measured', table=df), call_tool('described', df=[{'n': 1}])])"
    )
    result = runtime[0].execute_code(source, inputs={"df": FRAME})
    assert result.outcome is Outcome.OK, result.error
    pd.testing.assert_frame_equal(result.value[0].to_pandas(), FRAME.assign(weight=np.arange(3.0)))
    assert result.value[1] == [3, 3]
    assert result.value[2].rows() == [{"n": 1, "weight": 1.0}]
    refused = runtime[0].execute_code(source.replace("[{'n': 1}]", "'no rows'"), inputs={"df": FRAME})
    assert "  - df: is not a DataFrame" in refused.error.message
    wrong = runtime[0].execute_code("call_tool('described', df=df, power='many')", inputs={"df": FRAME})
    assert "power" in wrong.error.message
    assert "invalid tool arguments" in wrong.error.message


@pytest.mark.anyio
async def test_a_model_sends_rows_where_a_frame_is_wanted() -> None:
    assert (await registry.execute("described", {"df": [{"n": 1}, {"n": 2}]})).value.rows()[1]["n"] == 2
    assert "must be Table" in (await registry.execute("measured", {"table": [{"n": 1}]})).text


def test_models_json_and_notebooks_get_a_labelled_text(runtime: Any) -> None:
    result = runtime[0].execute_code("set_result(df)", inputs={"df": FRAME})
    shown = "DataFrame, 3 rows x 3 columns (key text, n int64, when"
    assert str(result.value).startswith(shown)
    assert json.loads(result.to_json())["value"] == str(result.value)
    assert shown in str(result)
    assert "<td>2025-01-01 00:00:00</td>" in result._repr_html_()
    assert "<td>y</td>" in result.value._repr_html_()


def test_bytes_of_a_frame_count_for_the_limits(runtime: Any) -> None:
    large = runtime[0].execute_code("import numpy\nset_result(numpy.zeros(600_000))")
    assert large.error is not None
    assert "result_bytes" in large.error.message
    limits = Limits(result_bytes=6 << 20)
    assert (
        runtime[0].execute_code("import numpy\nset_result(numpy.zeros(600_000))", limits=limits).value.size == 600_000
    )


@each_row(
    ("source", "said"),
    [
        ("import numpy\ncall_tool('total', numbers=numpy.zeros(2_000_000))", "frame_bytes"),
        ("import numpy\nprogress(numpy.zeros(2_000_000))", "frame_bytes"),
        ("import numpy\nfor _ in range(9): call_tool('measured', table=df)", "(call_args_bytes)"),
        ("import numpy\ncall_tool('total', numbers=numpy.zeros(300_000))", "takes lists of at most 200000 values"),
        ("call_tool('rows', found=df)", "<Table of 500000 rows and 1 columns, from pandas.DataFrame>"),
    ],
)
def test_an_error_about_the_size_of_a_frame_names_the_limit(runtime: Any, source: str, said: str) -> None:
    large = pd.DataFrame({"v": np.arange(500_000)})
    result = runtime[0].execute_code(source, inputs={"df": large})
    assert said in result.error.message


def test_a_journal_that_is_full_names_the_answer_and_refuses_calls_and_waiting(
    runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "JOURNAL_BYTES", 100)
    source = "call_tool('total', numbers=[1])\ncall_tool('frame')\ncall_tool('frame')"
    result = runtime[0].execute_code(source)
    assert "with that of call 2 of frame, take more than 100 bytes, which is all" in result.error.message
    assert [call.status for call in result.calls] == ["ok", "ok", "error"]
    with pytest.raises(UsageError, match="bytes of arguments and answers together"):
        runtime[0].execute_code(source, repairs=result)


def test_without_the_package_an_input_names_it_and_results_of_tools_are_lists() -> None:
    tools, numbers = ToolRegistry([frame, rows]), np.arange(4).reshape(2, 2)
    tools.register("both", "Return an array and a frame of them.", None, lambda args: {"a": numbers, "f": FRAME})
    with SyncRuntime(tools) as runtime:
        refused = runtime.execute_code("df", inputs={"df": FRAME})
        result = runtime.execute_code("[call_tool('frame'), call_tool('both'), call_tools_parallel(['frame'])[0]]")
    assert refused.error is not None
    assert refused.error.type == "ImportError"
    assert "packages=['pandas']" in refused.error.message
    listed = tools.execute_sync("rows", {"found": FRAME}).value
    assert result.ok, result.error
    assert result.value == [listed, {"a": [[0, 1], [2, 3]], "f": listed}, listed]


@pytest.mark.anyio
async def test_a_tool_call_of_a_model_reads_the_text_of_a_frame() -> None:
    found = await registry.execute("frame")
    assert is_frame(found.value)
    assert found.text == str(found.value)
