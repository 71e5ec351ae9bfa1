"""What the host does to recognise, show and preview calls is bounded, or is done beside the event loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from hostile.counting import calls
from rows import each_row
from toolcell import Outcome, ToolRegistry
from toolcell.control.preflight import MAX_HINTS, MAX_NAME_CHARS, read_preflight
from toolcell.journal.identity import call_digest, digest_of_call
from toolcell.journal.ledger import Journal
from toolcell.results import MAX_ARG_CHARS, Effect, ExecutionResult, shown_effects
from toolcell_bridge.guest.planned_calls import MAX_CALLS

SLACK = 1.25


class Key(str):
    """A name that notes in which threads it is sorted."""

    threads: ClassVar[set[int]] = set()
    __slots__ = ()

    def __str__(self) -> str:
        self.threads.add(threading.get_ident())
        return str.__str__(self)


@pytest.mark.anyio
@pytest.mark.parametrize(("size", "is_in_loop"), [(10, True), (5000, False)])
async def test_large_arguments_are_recognised_in_a_thread(size: int, is_in_loop: bool) -> None:
    args = {"rows": {Key(f"k{n}"): n for n in range(size)}}
    Key.threads.clear()

    assert await digest_of_call("f", args) == call_digest("f", {"rows": {f"k{n}": n for n in reversed(range(size))}})
    assert Key.threads
    assert (threading.get_ident() in Key.threads) is is_in_loop


@pytest.mark.anyio
async def test_recorded_calls_are_compared_as_far_as_the_script_makes_them_again() -> None:
    journal = Journal("x")
    for number in range(50):
        journal.ask(f"call_{number}", "f", {"x": number % 25})
    journal.begin_again()
    made = [await journal.recorded("f", {"x": number}) for number in (0, 0, 3, 3, 3, 99)]

    assert [each.number if each is not None else None for each in made] == [1, 26, 4, 29, None, None]


VALUES: dict[str, Callable[[int], Any]] = {
    "a list": lambda n: [1] * n,
    "a dict": lambda n: {f"k{i}": i for i in range(n)},
    "text": lambda n: "x" * 100 * n,
    "long names": lambda n: {"k" * 100 * n: 1},
    "lists in lists": lambda n: [[["x" * n]] * n],
    "bytes": lambda n: b"x" * 100 * n,
}


@each_row("name", VALUES)
def test_a_large_argument_is_cut_before_it_is_written_out(name: str) -> None:
    def text(size: int) -> str:
        return shown_effects([Effect("effect-1", "f", {"x": VALUES[name](size)})])

    small, large = (calls(lambda size=size: text(size)) for size in (1000, 4000))  # type: ignore[misc]

    assert len(text(4000)) < 2 * MAX_ARG_CHARS + 200 and "... (" in text(4000)
    made = [calls(lambda size=size: VALUES[name](size)) for size in (1000, 4000)]  # type: ignore[misc]
    assert large - made[1] <= SLACK * (small - made[0])


def test_arguments_by_the_thousand_are_not_written_out() -> None:
    args = {f"k{n}": n for n in range(5000)}

    text = str(Effect("effect-1", "f", args))

    assert ", ... (5000 arguments, sha256 " in text
    assert len(text) < 2000


def preflight(rows: list[Any]) -> ExecutionResult:
    return ExecutionResult("r", Outcome.OK, value={"calls": rows})


def search(query: str) -> str:
    """Search for something in all that is known."""
    return query


def test_a_patched_guest_cannot_make_the_host_compare_names_for_long() -> None:
    tools = ToolRegistry([search])
    rows = [[1, f"serch{n}{'x' * 60_000}", []] for n in range(MAX_CALLS + 1000)]
    found = read_preflight(preflight(rows), tools)
    short = read_preflight(preflight([[1, f"serch{n}", ["x"] * 100_000] for n in range(100)]), tools)

    assert len(found.calls) == MAX_CALLS
    assert all(len(each.tool) == MAX_NAME_CHARS for each in found.calls)
    assert sum("did you mean `search`?" in each.problem for each in short.calls) == MAX_HINTS
    one, two, four = (calls(lambda n=n: read_preflight(preflight(rows[: 100 * n]), tools)) for n in (1, 2, 4))  # type: ignore[misc]
    assert two <= 2 * SLACK * one and four <= 2 * SLACK * two


def test_arguments_that_are_no_names_are_passed_over() -> None:
    rows = [[1, "search", [{}, [], "query"]], [2, "search", [["query"]]]]
    found = read_preflight(preflight(rows), ToolRegistry([search]))

    assert [each.problem for each in found.calls] == ["", "missing: query"]
