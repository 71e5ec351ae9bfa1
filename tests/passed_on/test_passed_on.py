"""What a run is given holds on every route: a table of routes and of what is passed on, with a test for each cell.

A row of the table is a driver of `passed_on.drivers`, a column a test below. `LEFT_OUT` says which cells make no sense.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import anyio
import pytest

from passed_on.drivers import ROUTES, Came
from passed_on.office import (
    BOOK,
    MAIL,
    POST,
    REPORT,
    SECRET,
    USE_SECRET,
    WAIT,
    MovedClock,
    Office,
    Order,
    Watcher,
    shown,
    write,
)
from toolcell import ExecutionResult, Flow, Limits, Policy, PoolConfig, Quota, Quotas, Secrets, UsageError
from toolcell.config import MIB
from toolcell.control import Draft

pytestmark = [pytest.mark.quick, pytest.mark.anyio, pytest.mark.isolation]

NO_CONTEXT = "a client of MCP gives no RunContext: what a run is given besides its code is the Runtime's"
LATER = "what waits or is kept is not a dry run"

LEFT_OUT: dict[tuple[str, str], str] = {
    ("MCP", "reverts"): "a client of MCP cannot revert",
    **{("MCP", what): NO_CONTEXT for what in ("deadline", "secrets", "events", "observer", "tools' progress")},
    **{(route, "dry run"): LATER for route in (
        "dry run and commit", "repair", "resume here", "resume after a restart",
        "repair resumed after a restart", "suspended plan after a restart", "suspended agent",
    )},
    ("MCP", "dry run"): NO_CONTEXT,
    ("session", "dry run"): "a dry run is made in a copy: it is the row of the script in it",
    ("fork", "dry run"): "a dry run is made in a copy: it is the row of the script in it",
    ("restored session", "dry run"): "a dry run is made in a copy: it is the row of the script in it",
    ("map", "scripts' progress"): "the runs of a map have no callbacks",
    ("plan", "scripts' progress"): "a step has no caller that is told of a script's progress but by events",
}  # fmt: skip


COLUMNS: list[str] = []
FIRST: Counter[str] = Counter()


def cells(*columns: str) -> pytest.MarkDecorator:
    """Return the routes on which claims are tested; the first row, which `make test` runs, is another for each test."""
    COLUMNS.extend(columns)
    routes = [name for name in ROUTES if any((name, what) not in LEFT_OUT for what in columns)]
    routes.sort(key=lambda name: FIRST[name])
    FIRST[routes[0]] += 1
    return pytest.mark.parametrize("route", routes)


@pytest.fixture
def office() -> Office:
    return Office()


@pytest.fixture
def order(tmp_path: Path) -> Order:
    return Order(folder=tmp_path / "journals")


async def carry_out(route: str, office: Office, order: Order) -> Came:
    """Carry an order out; a route that hangs has failed."""
    with anyio.fail_after(60):
        return await ROUTES[route](office, order)


GREEDY = """
call_tool("write", text="begun")
try:
    b"x" * (224 << 20)
except MemoryError:
    pass
else:
    call_tool("write", text="memory")
try:
    for number in range(4):
        call_tool("write", text=str(number))
except ToolError:
    pass
"""


@cells("limits")
async def test_limits_hold(route: str, office: Office, order: Order) -> None:
    """For the memory of the sandbox, and for the number of calls. Without them the same code makes all its calls."""
    order.code, order.limits = GREEDY, Limits(memory_bytes=96 * MIB, tool_calls=5)
    await carry_out(route, office, order)
    bounded = office.made

    free = Office()
    await carry_out(route, free, Order(code=GREEDY, folder=order.folder and order.folder / "free"))

    assert bounded[:1] == ["begun"] and "memory" not in bounded and len(bounded) <= 5
    assert free.made == ["begun", "memory", "0", "1", "2", "3"]


@cells("labels")
async def test_what_was_read_binds_what_is_sent(route: str, office: Office, order: Order) -> None:
    order.first, order.then = MAIL, POST
    order.runtime["policy"] = Policy(flows=(Flow("private", "public", "deny"),))

    came = await carry_out(route, office, order)

    assert office.made == ["mail"]
    assert 'this run has read "private"' in str(came.rows).replace("\\", ""), came


@cells("dry run")
async def test_a_dry_run_makes_nothing_and_so_there_is_nothing_to_revert(
    route: str, office: Office, order: Order
) -> None:
    """Neither what was collected nor what was previewed."""
    draft = Draft()
    order.features.append(draft)
    order.first, order.then, order.reverts = write("a"), BOOK, True

    came = await carry_out(route, office, order)

    assert (office.made, office.undone) == ([], [])
    assert [effect.args["text"] for effect in draft.effects] == ["a", "b"]
    assert isinstance(came.undone, UsageError), came.undone


ALSO_COUNTED = {
    "saved script": 1,
    "saved script in a saved script": 2,
    "agent's script": 1,
    "agent's plan": 1,
    "sub-agent": 1,
    **{route: 1 for route in ROUTES if route.startswith(("resume", "suspended")) or "resumed" in route},
    "dry run and commit": 0,
}
"""Calls beside those of the order that count: of the script or agent that makes them, and of what was agreed to. However
long a call waits, it counts once."""


ALSO_RUN = frozenset(
    ("saved script", "saved script in a saved script", "agent's script", "fork", "restored session", "MCP")
)
"""Routes with runs whose results the caller does not get: those of nested scripts, and of states that are rebuilt."""


@cells("quotas")
async def test_a_quota_counts_each_call_once_and_refuses_the_next(route: str, office: Office, order: Order) -> None:
    order.first, order.then = write("a"), write("b", "c")
    expected = 2 + ALSO_COUNTED.get(route, 0)
    quotas = Quotas(Quota(calls=expected, runs=100, cpu_s=100), by="user_id")
    if "agent" in route:
        order.features.append(quotas)
    else:
        order.runtime["quotas"] = quotas

    came = await carry_out(route, office, order)

    assert office.made == ["a", "b"]
    assert "is used up: calls" in str(came.rows), came
    key, nobody = ("", "ann") if route == "MCP" else ("ann", "")
    assert quotas.used(key)["calls"] == expected
    assert not quotas.used(nobody)
    results = [each for each in came.runs if isinstance(each, ExecutionResult)]
    cpu_s = sum(each.usage.cpu_s for each in results)
    used_s = quotas.used(key).get("cpu_s", 0.0)
    assert used_s == pytest.approx(cpu_s) or (route in ALSO_RUN and used_s > cpu_s)


@cells("deadline")
async def test_no_call_outlasts_the_deadline(route: str, office: Office, order: Order) -> None:
    """The clock of the event loop is moved past the deadline while a tool waits."""
    order.then = WAIT
    order.runtime["limits"] = Limits(wall_s=3600)
    order.runtime["pool"] = PoolConfig(warm=0, start_s=3600)
    clock = MovedClock()
    office.while_waiting = lambda: clock.move(15.0)
    deadline = order.context["deadline"] = anyio.current_time() + 15.0

    with clock:
        await carry_out(route, office, order)

    assert office.ended_waiting.is_set()
    assert max(office.deadlines) <= deadline


TOLD = {
    "dry run and commit": 4,
    "repair": 3,
    "resume here": 3,
    "resume after a restart": 3,
    "repair resumed after a restart": 4,
    "suspended plan after a restart": 3,
}
"""How often two calls are told of, where that is not twice: each run tells of what it gets from its journal, too."""


@pytest.mark.quick(every_row=True)
@cells("user", "reverts", "secrets", "events", "observer", "tools' progress", "scripts' progress")
async def test_tools_know_user_and_secret_whoever_listens_hears_of_each_call_and_of_progress_and_calls_are_undone(
    route: str, office: Office, order: Order
) -> None:
    """The secret reaches the tool and nobody else; each call has one start and one end among the events; what was made is
    undone in reverse order and nothing else.
    """
    watcher = Watcher()
    if (route, "observer") not in LEFT_OUT:
        order.features.append(watcher)
    if has_secret := (route, "secrets") not in LEFT_OUT:
        order.context["secrets"] = Secrets({"key": SECRET})
    order.first = write("a")
    order.then = [*write("b"), *(USE_SECRET if has_secret else ()), *REPORT]
    order.code, order.reverts = "progress('reported by the script')", True

    came = await carry_out(route, office, order)

    assert {*office.users} == {"" if route == "MCP" else "ann"}
    assert office.made == ["a", "b"]
    is_of_another_process = "restart" in route or route == "restored session"
    if (route, "reverts") not in LEFT_OUT:
        assert office.undone == (["b"] if is_of_another_process else ["b", "a"])
    if (route, "events") not in LEFT_OUT:
        assert [name for name in order.names("start") if name == "write"] == ["write"] * TOLD.get(route, 2)
        assert sorted(order.names("start")) == sorted(order.names("end"))
    if (route, "observer") not in LEFT_OUT:
        assert watcher.started.count("write") == watcher.ended.count("write") == TOLD.get(route, 2)
        assert sorted(watcher.started) == sorted(watcher.ended)
    for said, what in (("by the tool", "tools' progress"), ("by the script", "scripts' progress")):
        assert f"reported {said}" in str(order.heard) or (route, what) in LEFT_OUT
    if has_secret:
        assert office.used and {*office.used} == {SECRET}
        seen = [
            shown(came.rows),
            *map(shown, came.runs),
            *map(shown, order.events),
            *(event.to_json() for event in order.events),
        ]
        seen += [str(request) for model in came.model for request in model.requests]
        assert "[redacted]" in "".join(seen)
        assert not [text for text in seen if SECRET in text]


def test_what_is_left_out_of_the_table_is_in_it() -> None:
    assert {what for _, what in LEFT_OUT} <= {*COLUMNS} and {route for route, _ in LEFT_OUT} <= {*ROUTES}
