"""What one tool returns, a script may pass on to another tool of the same type, and the value is the same."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import ipaddress
import pathlib
import uuid
import zoneinfo
from typing import Any, Literal, NamedTuple

import pydantic
import pytest
from typing_extensions import TypedDict

from rows import each_row
from toolcell.tools import Origin, ToolRegistry
from toolcell_bridge.guest.values import to_plain

pytestmark = pytest.mark.anyio


class Colour(enum.Enum):
    RED = "red"
    TWO = 2


class Level(enum.IntEnum):
    LOW = 1


class Right(enum.Flag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass
class Inner:
    data: bytes
    when: datetime.datetime


@dataclasses.dataclass
class Outer:
    inner: Inner
    many: list[Inner]
    by_colour: dict[Colour, int]


class Aliased(pydantic.BaseModel):
    user_name: str = pydantic.Field(alias="userName")
    took: datetime.timedelta = datetime.timedelta(0)


class Row(TypedDict, total=False):
    a: int
    b: bytes


class Pair(NamedTuple):
    x: int
    y: str = "d"


INNER = Inner(b"\xff\x00", datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC))

VALUES: list[tuple[Any, Any]] = [
    (Colour, Colour.TWO), (Level, Level.LOW), (Right, Right.READ | Right.WRITE), (list[Colour], [Colour.RED]), (dict[Colour, int], {Colour.RED: 1}),
    (dict[int, str], {1: "a"}), (dict[datetime.date, float], {datetime.date(2024, 1, 2): 0.5}),
    (dict[uuid.UUID, list[int]], {uuid.UUID(int=3): [1]}), (Outer, Outer(INNER, [INNER], {Colour.RED: 3})),
    (Inner | None, None), (list[Inner | int], [INNER, 3]), (Aliased, Aliased(userName="Ann")),
    (Aliased, Aliased(userName="Ann", took=datetime.timedelta(hours=1))), (Row, {"a": 1, "b": b"\xff"}), (Pair, Pair(3)),
    (Literal["a", 1, None], 1), (int | str, "3"), (str | int, 3), (bool | int, True), (set[int], {1, 2}),
    (frozenset[str], frozenset({"a"})), (tuple[int, str], (1, "a")), (tuple[int, ...], (1, 2)),
    (datetime.datetime, INNER.when), (datetime.datetime, datetime.datetime(2024, 1, 2, 3, 4, 5, 6)),
    (datetime.date, datetime.date(2024, 1, 2)), (datetime.time, datetime.time(1, 2, 3)),
    (datetime.timedelta, datetime.timedelta(days=-1, microseconds=5)), (list[datetime.timedelta], [datetime.timedelta(1)]),
    (decimal.Decimal, decimal.Decimal("1.10")), (decimal.Decimal, decimal.Decimal("1e30")),
    (fractions.Fraction, fractions.Fraction(1, 3)), (uuid.UUID, uuid.UUID(int=5)), (pathlib.Path, pathlib.Path("/a/b")),
    (ipaddress.IPv4Address, ipaddress.IPv4Address("10.0.0.1")), (zoneinfo.ZoneInfo, zoneinfo.ZoneInfo("UTC")),
    (bytes, b"\xff"), (int, -(2**63)), (int, 2**63 - 1), (float, 1e300), (str, "é\U0001f600"),
]  # fmt: skip


@each_row(("kind", "value"), VALUES, ids=lambda each: str(each)[:40])
async def test_a_result_is_an_argument_of_the_same_type(kind: Any, value: Any) -> None:
    got: list[Any] = []

    def make():  # type: ignore[no-untyped-def]
        """Return a value of some type."""
        return value

    def take(x):  # type: ignore[no-untyped-def]
        """Take a value of some type."""
        got.append(x)

    make.__annotations__, take.__annotations__ = {"return": kind}, {"x": kind}
    registry = ToolRegistry([make, take])

    made = await registry.dispatch("make", {}, origin=Origin.CODE)
    sent = to_plain(made.guest_value())
    results = [
        await registry.dispatch("take", {"x": sent}, origin=Origin.CODE),
        await registry.execute("take", {"x": value}),
    ]
    plan = [{"id": "a", "tool": "make", "args": {}}, {"tool": "take", "args": {"x": {"$ref": "a"}}}]
    registry.enable_plan_execution()
    results.append(await registry.execute("execute_plan", {"steps": plan}))

    assert not any(result.is_error for result in results), [result.text for result in results]
    assert got == [value] * 3, results[-1].text
    assert [type(each) for each in got] == [type(value)] * 3


async def test_what_a_type_refuses_is_said_with_the_parameter_s_name() -> None:
    registry = ToolRegistry()

    @registry.tool
    def pay(amount: decimal.Decimal, days: list[datetime.date]) -> None:
        """Pay an amount on some days."""

    amount = await registry.execute("pay", {"amount": "NaN", "days": []})
    days = await registry.execute("pay", {"amount": 1, "days": ["2024-01-02", "2024-99-99"]})

    assert "- amount: Input should be a finite number" in amount.text
    assert "- days[1]: Input should be a valid date" in days.text
