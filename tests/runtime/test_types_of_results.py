"""What a tool returns has the type that its stub says, and is an argument where the same type is asked for."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from datetime import date, timedelta
from decimal import Decimal
from typing import Annotated, Any, NotRequired

import jsonschema_rs
import pydantic.dataclasses
import pytest
from mcp.client.client import Client
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, PlainSerializer, computed_field, field_serializer
from typing_extensions import TypedDict

from rows import each_row
from toolcell import Agent, Outcome, PoolConfig, Runtime, SyncRuntime, ToolRegistry
from toolcell.agents.providers.scripted import ScriptedModel, calls
from toolcell.builtin import Schedule, Scheduler, SqliteStore
from toolcell.mcp.server import McpServer
from toolcell.tools import AgentTool, ToolDefinition
from toolcell_bridge.guest.values import to_plain

pytestmark = pytest.mark.isolation


class Price(BaseModel):
    amount: Decimal
    currency: str = "EUR"

    @computed_field  # type: ignore[prop-decorator]
    @property
    def cents(self) -> int:
        return int(self.amount * 100)


class Strict(Price):
    model_config = ConfigDict(extra="forbid")


class Open(Price):
    model_config = ConfigDict(extra="allow")


class Order(BaseModel):
    number: int
    price: Price
    lines: list[Price] = []
    by_name: dict[str, Price] = {}
    note: str | None = None


class Aliased(BaseModel):
    model_config = ConfigDict(alias_generator=str.upper)
    amount: Decimal
    other: int = Field(3, validation_alias=AliasChoices("in", "given"), serialization_alias="out")

    @computed_field(alias="inCents")  # type: ignore[prop-decorator]
    @property
    def cents(self) -> int:
        return int(self.amount * 100)


@dataclasses.dataclass
class Plain:
    price: Price
    wait: timedelta = timedelta(seconds=1)
    twice: Decimal = dataclasses.field(init=False, default=Decimal(0))

    def __post_init__(self) -> None:
        self.twice = 2 * self.price.amount


@pydantic.dataclasses.dataclass
class Checked:
    amount: Decimal = Field(alias="theAmount")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def cents(self) -> int:
        return int(self.amount * 100)


class Row(TypedDict):
    amount: Decimal
    price: NotRequired[Price]
    kept: NotRequired[Annotated[Decimal, PlainSerializer(float)]]


class Written(BaseModel):
    day: date
    rate: Annotated[Decimal, PlainSerializer(float)]

    @field_serializer("day")
    def year(self, day: date) -> int:
        return day.year


PRICE = Price(amount=Decimal("1.10"))
VALUES: dict[str, tuple[Any, Any]] = {
    "price": (Price, PRICE),
    "strict": (Strict, Strict(amount=Decimal("1.10"))),
    "open": (Open, Open(amount=Decimal("1.10"))),
    "order": (Order, Order(number=1, price=PRICE, lines=[PRICE], by_name={"a": PRICE})),
    "many": (list[Price], [PRICE, PRICE]),
    "named": (dict[str, Price], {"a": PRICE}),
    "pair": (tuple[Price, int], (PRICE, 1)),
    "maybe": (Price | None, PRICE),
    "either": (Plain | Price, PRICE),
    "aliased": (Aliased, Aliased(AMOUNT=Decimal("1.10"), given=4)),
    "plain": (Plain, Plain(PRICE)),
    "checked": (Checked, Checked(theAmount=Decimal("1.10"))),
    "row": (Row, {"amount": Decimal("1.10"), "price": PRICE, "kept": Decimal("2.50")}),
    "amount": (Decimal, Decimal("1.10")),
    "wait": (timedelta, timedelta(minutes=1)),
}


def shop(taken: list[Any] | None = None) -> ToolRegistry:
    """Tools `get_NAME` and `put_NAME` for each of the types."""
    registry, kept = ToolRegistry(), [] if taken is None else taken

    def offer(name: str, kind: Any, value: Any) -> None:
        def get():  # type: ignore[no-untyped-def]
            return value

        def put(it):  # type: ignore[no-untyped-def]
            kept.append(it)

        get.__annotations__, put.__annotations__ = {"return": kind}, {"it": kind}
        registry.tool(name=f"get_{name}", description="Return a value of this type.")(get)
        registry.tool(name=f"put_{name}", description="Take a value of this type.")(put)

    for name, (kind, value) in VALUES.items():
        offer(name, kind, value)
    return registry


@pytest.fixture(scope="module")
def taken() -> list[Any]:
    return []


@pytest.fixture(scope="module")
def registry(taken: list[Any]) -> ToolRegistry:
    return shop(taken)


@pytest.fixture(scope="module")
def runtime(registry: ToolRegistry) -> Iterator[SyncRuntime]:
    with SyncRuntime(registry, pool=PoolConfig(warm=1)) as opened:
        yield opened


@each_row("name", VALUES)
def test_what_a_tool_returns_fits_the_schema_of_its_results(
    runtime: SyncRuntime, registry: ToolRegistry, name: str
) -> None:
    schema = dict(registry.returns(f"get_{name}") or {})
    value = runtime.execute_code(f"tools.get_{name}()").value

    assert value is not None and schema
    jsonschema_rs.validate(schema, value)


def test_results_have_serialized_types_and_arguments_validated_ones(registry: ToolRegistry) -> None:
    stubs = registry.to_python()

    for text in (
        "class GetPriceResult(TypedDict):\n    amount: str\n    currency: str\n    cents: int\n",
        "class PutPriceIt(TypedDict):\n    amount: float | str\n    currency: NotRequired[str]\n\n",
        "    note: str | None\n",
    ):
        assert text in stubs
    assert "x-of-results" not in repr(registry.definitions()) + stubs + repr(registry.to_mcp())


@each_row(
    ("source", "value"),
    [
        ("set_result(tools.get_price()['cents'])", 110),
        ("set_result(tools.get_order()['lines'][0]['cents'])", 110),
        ("set_result(tools.get_plain()['price']['currency'])", "EUR"),
        ("set_result(tools.get_wait() / 2)", 30.0),
        ("set_result((tools.get_order()['note'] or 'none').upper())", "NONE"),
    ],
)
def test_what_results_have_passes_the_check_of_types(runtime: SyncRuntime, source: str, value: Any) -> None:
    pytest.importorskip("ty")
    assert runtime.execute_code(source, check_types=True).value == value


@each_row(
    "source",
    [
        "import math\nmath.floor(tools.get_price()['amount'])",
        "tools.get_price()['amount'] / 2",
        "tools.get_price()['euros']",
    ],
)
def test_what_results_do_not_have_is_found_by_the_check_of_types(runtime: SyncRuntime, source: str) -> None:
    pytest.importorskip("ty")
    assert runtime.execute_code(source, check_types=True).outcome is Outcome.DENIED


ROUTES = ("code", "session", "plan", "saved script", "dry run", "program")


def pass_on(route: str, runtime: SyncRuntime, registry: ToolRegistry, name: str) -> None:
    """Give the result of `get_NAME` to `put_NAME`."""
    source = f"tools.put_{name}(it=tools.get_{name}())"
    match route:
        case "code":
            assert runtime.execute_code(source).error is None
        case "session":
            with runtime.session() as session:
                assert session.execute_code(f"x = tools.get_{name}()").error is None
                assert session.execute_code(f"call_tool('put_{name}', {{'it': x}})").error is None
        case "plan":
            steps = [{"id": "a", "tool": f"get_{name}"}, {"tool": f"put_{name}", "args": {"it": {"$ref": "a"}}}]
            assert [row["status"] for row in runtime.execute_plan(steps)] == ["ok", "ok"]
        case "saved script":
            own = registry.subset([f"get_{name}", f"put_{name}"]).merged()
            own.save_script("pass_on", source, description="Pass a value on.")
            assert runtime.execute_code("tools.pass_on()", tools=own).error is None
        case "dry run":
            draft = runtime.execute_code(source, dry_run=True)
            assert draft.error is None and not runtime.commit(draft, approve="all").failed
        case "program":
            assert registry.execute_sync(f"put_{name}", {"it": VALUES[name][1]}).error is None


@each_row("route", ROUTES)
def test_a_result_is_an_argument_of_the_same_type_on_every_route(
    runtime: SyncRuntime, registry: ToolRegistry, taken: list[Any], route: str
) -> None:
    for name, (_, value) in VALUES.items():
        taken.clear()
        pass_on(route, runtime, registry, name)
        assert taken == [value], name
        assert getattr(taken[0], "__pydantic_extra__", None) in (None, {}), name


@pytest.mark.anyio
async def test_an_agent_and_a_client_of_mcp_pass_results_on() -> None:
    taken: list[Any] = []
    registry = shop(taken)
    sent = {name: to_plain(value) for name, (_, value) in VALUES.items()}
    for name in VALUES:
        await Agent(ScriptedModel([calls((f"put_{name}", {"it": sent[name]})), "done"]), tools=registry).run("go")
    by_agent = [*taken]
    taken.clear()
    async with (
        Runtime(registry, pool=PoolConfig(warm=0)) as opened,
        McpServer(opened, exposes_tools=True, has_one_client=True) as server,
        Client(server.server) as client,
    ):
        for name in VALUES:
            got = await client.call_tool(f"get_{name}", {})
            assert not got.is_error
            answer = await client.call_tool(f"put_{name}", {"it": sent[name]})
            assert not answer.is_error, answer.content
            given = got.structured_content
            assert given == sent[name] or given == {"result": sent[name]}

    assert by_agent == taken == [value for _, value in VALUES.values()]


ORDER = to_plain(VALUES["order"][1])


def take_orders() -> tuple[ToolRegistry, list[Any]]:
    """Return a tool `put` whose parameters are the fields of `Order`, and the arguments that it has had."""
    taken: list[Any] = []

    async def execute(call_id: str, args: dict[str, Any]) -> str:
        taken.append(args)
        return "taken"

    definition = ToolDefinition.from_model("put", "Take the fields of an order.", Order)
    return ToolRegistry([AgentTool(definition, execute)]), taken


def test_a_definition_of_a_model_takes_what_only_results_have_and_does_not_show_it() -> None:
    registry, taken = take_orders()
    registry.alias("put_too", "put")
    assert registry.execute_sync("put", ORDER).error is None
    assert registry.execute_sync("put_too", ORDER).error is None

    assert [each["price"] for each in taken] == [{"amount": "1.10", "currency": "EUR"}] * 2
    assert "x-of-results" not in str([each.to_openai() for each in registry.definitions()])


def test_a_dry_run_drops_what_only_results_have_beside_a_result_that_is_not_there_yet(runtime: SyncRuntime) -> None:
    registry, taken = take_orders()
    registry.tool(name="note", description="Write a note about something.")(lambda: "a note")
    source = f"order = {ORDER!r}\norder['note'] = tools.note()\ntools.put(**order)"
    draft = runtime.execute_code(source, dry_run=True, tools=registry)

    assert draft.error is None and not runtime.commit(draft, approve="all", tools=registry).failed
    assert [each["price"] for each in taken] == [{"amount": "1.10", "currency": "EUR"}]


def test_the_inputs_of_a_saved_script_take_what_only_results_have(runtime: SyncRuntime) -> None:
    registry, _ = take_orders()
    registry.save_script("first", "set_result([price, lines])", inputs=Order, description="Return what was ordered.")
    result = runtime.execute_code(f"tools.first(**{ORDER!r})", tools=registry)

    price = {"amount": "1.10", "currency": "EUR"}
    assert (result.error, result.value) == (None, [price, [price]])
    assert "x-of-results" not in str([each.to_openai() for each in registry.definitions()])


@pytest.mark.anyio
async def test_a_scheduled_call_takes_what_only_results_have() -> None:
    registry, taken = take_orders()
    store = SqliteStore(":memory:")
    registry.add(Schedule(store))
    call = {"tool": "put", "params": ORDER}
    made = await registry.execute(
        "schedule_create", {"description": "Order it.", "time": "08:00", "recurrence": "daily", "tools": [call]}
    )
    assert made.error is None, made.text
    async with Runtime(registry, pool=PoolConfig(warm=0)) as opened:
        due = time.time() + 2 * 86_400
        [ended] = await Scheduler(opened, store, clock=lambda: due).run_due()

    assert ended.status == "done" and taken[0]["price"] == {"amount": "1.10", "currency": "EUR"}


def test_only_fields_of_results_are_dropped() -> None:
    registry = shop()
    wrong = registry.execute_sync("put_price", {"it": {"amount": "1.10", "cents": 110, "cent": 1}})
    listed = registry.execute_sync("put_many", {"it": [{"cents": 1}]})

    assert (
        wrong.is_error and 'unknown property "cent"' in wrong.text and '"cents"' not in wrong.text.partition("Rec")[0]
    )
    assert listed.is_error and 'missing required property "amount"' in listed.text


def test_a_serializer_of_pydantic_counts_inside_models_only() -> None:
    def written() -> Written:
        """Return a value whose type has serializers."""
        return Written(day=date(2026, 1, 2), rate=Decimal("0.5"))

    registry = ToolRegistry([written])
    with SyncRuntime(registry, pool=PoolConfig(warm=0)) as runtime:
        assert runtime.execute_code("tools.written()").value == {"day": 2026, "rate": 0.5}

    assert "    day: int\n    rate: float\n" in registry.to_python()
    assert "    kept: NotRequired[str]\n" in shop().to_python()
