"""What a client of MCP sees of arrays and frames: text with shape and types, and their rows as data where these fit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from mcp.client.client import Client

from toolcell import PoolConfig, Runtime, ToolRegistry
from toolcell.calls.values import BadValue, copy_arguments, is_large
from toolcell.mcp.content import structured_value
from toolcell.mcp.server import McpServer
from toolcell.support.about_tables import table_with_rows
from toolcell_bridge.wire.columns import Column
from toolcell_bridge.wire.tables import Axis, Table
from wire.table_examples import text

np: Any = pytest.importorskip("numpy")
pd: Any = pytest.importorskip("pandas")

pytestmark = [pytest.mark.anyio, pytest.mark.isolation]

FRAME = pd.DataFrame({"n": [1, None], "when": pd.to_datetime(["2024-01-02", None])}, index=pd.Index(["x", "y"]))
DTYPES = {"index": "text", "n": "float64", "when": "datetime[us]"}
ROWS = [{"index": "x", "n": 1.0, "when": "2024-01-02T00:00:00"}, {"index": "y", "n": "nan", "when": None}]
DATA = {"kind": "pandas.DataFrame", "shape": [2, 2], "dtypes": DTYPES, "rows": ROWS}
TITLE = "DataFrame, 2 rows x 2 columns (index text, n float64, when datetime[us])"


def make_registry() -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool(read_only=True)
    def load(rows: int) -> pd.DataFrame:
        """Return a frame: one of two rows, or one of many more."""
        return FRAME if rows == 2 else pd.DataFrame({"v": np.arange(rows)})

    @registry.tool(read_only=True)
    def types_of(df: pd.DataFrame) -> dict[str, str]:
        """Return the types of the columns of a frame."""
        return {name: str(dtype) for name, dtype in df.dtypes.items()}

    return registry


@asynccontextmanager
async def connected(packages: tuple[str, ...] = ()) -> AsyncIterator[Client]:
    async with (
        Runtime(make_registry(), packages=packages, pool=PoolConfig(warm=0)) as runtime,
        McpServer(runtime, has_one_client=True, exposes_tools=True) as server,
        Client(server.server) as client,
    ):
        yield client


async def test_a_tool_of_a_client_s_own_gives_text_and_rows_and_takes_rows() -> None:
    async with connected() as client:
        answer = await client.call_tool("load", {"rows": 2})
        assert answer.content[0].text.startswith(TITLE)
        assert answer.structured_content == DATA
        long = await client.call_tool("load", {"rows": 200_000})
        assert long.content[0].text.startswith("DataFrame, 200000 rows x 1 columns (v int64)")
        assert len(long.content[0].text) < 1000
        assert long.structured_content is None
        taken = await client.call_tool("types_of", {"df": [{"a": 1}, {"a": 2}]})
        assert taken.structured_content == {"a": "int64"}


async def test_a_script_s_frames_are_text_and_rows_and_progress_is_text() -> None:
    heard: list[str] = []

    async def note(progress: float, total: float | None, message: str | None) -> None:
        heard.append(message or "")

    source = "import numpy\nf = call_tool('load', rows=2)\nprogress(f)\nset_result({'f': f, 'a': numpy.zeros((1, 2))})"
    async with connected(packages=("numpy", "pandas")) as client:
        answer = await client.call_tool("execute_code", {"code": source}, progress_callback=note)
        assert TITLE in answer.content[0].text
        array = {"kind": "numpy", "shape": [1, 2], "dtype": "float64", "values": [[0.0, 0.0]]}
        assert answer.structured_content["value"] == {"f": DATA, "a": array}
        assert any(TITLE in each for each in heard), heard
        long = await client.call_tool("execute_code", {"code": "set_result([call_tool('load', rows=200_000)])"})
        assert long.structured_content["value"][0].startswith("DataFrame, 200000 rows x 1 columns (v int64)")


def test_rows_that_take_far_more_than_their_table_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(table: Any) -> Any:
        raise AssertionError("all rows were made")

    monkeypatch.setattr(Table, "plain", fail)
    items = Column("bool", 1_200_000, bytes(1_200_000))
    codes = Column("category", 3_000, bytes(3_000), detail=(text("x" * 30_000), False))
    for column in (items, Column("list", 1, detail=(items, 1_200_000)), codes):
        table = Table("polars.DataFrame", column.length, Axis(), Axis((text("n" * 10),), (None,)), [column])
        assert structured_value({"a": table}) == {"a": str(table)}
        if column is not codes:
            with pytest.raises(BadValue, match="at most"):
                copy_arguments({"a": table})
    few_bytes = Table(
        "polars.Series", 2_000, Axis(), Axis((text("n"),), (None,)), [Column("bool", 2_000, bytes(2_000))]
    )
    assert is_large({"a": few_bytes})  # its rows are made in a thread
    large = Column("category", 30_000, bytes(30_000), detail=(text("x" * 30_000), False))
    table = Table("polars.Series", 30_000, Axis(), Axis((text("n"),), (None,)), [large])
    assert "too many" in str(table_with_rows(table))
