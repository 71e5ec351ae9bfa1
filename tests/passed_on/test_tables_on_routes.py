"""Arrays and frames stay what they are on every route: what a tool gives, what a script gets, what a tool takes.

A row of the table is a driver of `passed_on.drivers`, a column a kind of array or frame.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import anyio
import pytest

from passed_on.drivers import ROUTES
from passed_on.office import Office, Order
from toolcell.results import Array, Table

np: Any = pytest.importorskip("numpy")
pd: Any = pytest.importorskip("pandas")

pytestmark = [pytest.mark.anyio, pytest.mark.isolation]

PLANS = frozenset({"plan", "agent's plan", "suspended plan after a restart"})
"""Routes whose calls are steps: one refers to the result of another."""

READ = frozenset({"agent", "agent's script", "agent's plan", "sub-agent", "suspended agent", "MCP"})
"""Routes on which a model, or a client of MCP, reads what comes back."""

GIVEN: dict[str, Any] = {
    "array": np.array([[1.5, np.nan, -0.0], [np.inf, 2.0, 3.0]], dtype="float32"),
    "array of text": np.array(["a", "é"]),
    "frame": pd.DataFrame(
        {
            "word": ["a", None, "é"],
            "n": pd.array([1, None, 3], dtype="Int64"),
            "when": pd.to_datetime(["2024-01-01", None, "2025-06-01"]).tz_localize("Europe/Berlin"),
            "kind": pd.Categorical(["b", "a", None], categories=["b", "a", "c"], ordered=True),
            "price": [Decimal("1.10"), None, Decimal("-2.00")],
            "month": pd.PeriodIndex(["2024-01", None, "2024-03"], freq="M"),
            "bin": pd.cut([1.0, 5.0, 9.0], 2),
            "vector": [np.array([0.5, 1.5], dtype="f4"), None, np.zeros(3, dtype="f4")],
        }
    ),
    "levels": pd.DataFrame(
        [[1, 2.5], [3, 4.5]],
        index=pd.MultiIndex.from_tuples([("x", 1), ("y", 2)], names=["key", None]),
        columns=pd.MultiIndex.from_tuples([("v", "sum"), ("v", "mean")]),
    ),
    "series": pd.Series([0.5, None], index=["a", "b"], name="half"),
}


def is_same(found: Any, given: Any) -> bool:
    """Return whether one is the other, types and labels included."""
    assert type(found) is type(given)
    if isinstance(given, np.ndarray):
        assert found.dtype == given.dtype
        np.testing.assert_array_equal(found, given)
    elif isinstance(given, pd.DataFrame):
        pd.testing.assert_frame_equal(found, given)
    else:
        pd.testing.assert_series_equal(found, given)
    return True


def with_tools(office: Office) -> dict[str, Any]:
    """Add tools that give and take each kind; return what they take, by kind."""
    taken = dict[str, Any]()

    @office.registry.tool(read_only=True)
    def give(kind: str) -> object:
        """Return the array or the frame of one kind."""
        return GIVEN[kind]

    @office.registry.tool
    def take_array(kind: str, value: np.ndarray) -> np.ndarray:
        """Take note of the array of one kind, and return it."""
        taken[kind] = value
        return value

    @office.registry.tool
    def take_frame(kind: str, value: pd.DataFrame) -> pd.DataFrame:
        """Take note of the frame of one kind, and return it."""
        taken[kind] = value
        return value

    @office.registry.tool
    def take_series(kind: str, value: pd.Series) -> pd.Series:
        """Take note of the series of one kind, and return it."""
        taken[kind] = value
        return value

    return taken


def taker(kind: str) -> str:
    names = {np.ndarray: "take_array", pd.DataFrame: "take_frame", pd.Series: "take_series"}
    return names[type(GIVEN[kind])]


CODE = f"""
given = [*globals().get("earlier", []), *globals().get("rows", [])]
takers = {[(kind, taker(kind)) for kind in GIVEN]}
made = []
for number, (kind, name) in enumerate(takers):
    value = given[number][1] if given else call_tool("give", kind=kind)
    made.append(["ok", call_tool(name, kind=kind, value=value)])
if given:
    rows += made
"""


@pytest.mark.parametrize("route", ROUTES)
async def test_a_tool_takes_what_another_gave(route: str, office: Office, order: Order) -> None:
    taken = with_tools(office)
    order.runtime["packages"] = ["numpy", "pandas"]
    order.first = [("give", {"kind": kind}) for kind in GIVEN]
    if route in PLANS:
        order.then = [
            (taker(kind), {"kind": kind, "value": {"$ref": f"s{number}"}}) for number, kind in enumerate(GIVEN)
        ]
    else:
        order.code = CODE

    with anyio.fail_after(60):
        came = await ROUTES[route](office, order)

    assert taken.keys() == GIVEN.keys(), came
    assert all(is_same(taken[kind], given) for kind, given in GIVEN.items())
    if route in READ:
        said = json.dumps(came.rows) + str(came.result)
        assert "DataFrame, 3 rows x 8 columns" in said
        assert "array of float32, shape (2, 3)" in said
    else:
        found = [each for _, each in came.rows if isinstance(each, Array | Table)]
        kinds = [*GIVEN.values()]
        assert len(found) in (len(kinds), 2 * len(kinds))
        assert all(is_same(each.native(), kinds[number % len(kinds)]) for number, each in enumerate(found))
