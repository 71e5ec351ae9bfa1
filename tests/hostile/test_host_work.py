"""What a guest sends costs the host work that is linear in it, and `host_work` counts it.

Work is counted in function calls and in bytes of memory, which do not depend on the machine's speed.
"""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Annotated, Any, ClassVar

import anyio
import anyio.from_thread
import msgpack
import pytest
from pydantic import GetCoreSchemaHandler
from pydantic_core import core_schema

from hostile.counting import calls
from rows import each_row
from toolcell import Limits
from toolcell.audit.redact import Redactor
from toolcell.calls import checker_process
from toolcell.calls.arguments import ArgumentChecker
from toolcell.calls.call import RunScope
from toolcell.calls.result import ToolResult
from toolcell.calls.run_state import Secrets
from toolcell.calls.values import LARGE_ELEMENTS, bounded_json, is_large
from toolcell.journal.ledger import Journal
from toolcell.run.output import Capture, ReturnedFiles
from toolcell.support import daemon_threads
from toolcell.support.host_work import ELEMENT_WORK, HostWork
from toolcell.support.packing import value_digest
from toolcell.tools import RunContext, ToolDefinition, ToolRegistry, pipeline
from toolcell_bridge.guest.values import to_plain
from toolcell_bridge.wire.connection import Connection
from toolcell_bridge.wire.errors import ProtocolError
from toolcell_bridge.wire.messages import MAX_GUEST_ELEMENTS, FilePart, RunScript
from toolcell_bridge.wire.plain import check_plain

pytestmark = pytest.mark.quick

SLACK = 1.25
"""Twice as much input may take this much more than twice the work: constants and rounding."""

MIB = 1024 * 1024


def peak_bytes(work: Callable[[], object]) -> int:
    """Most memory that `work` holds at once."""
    tracemalloc.start()
    try:
        work()
    except ProtocolError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


def host() -> Connection:
    """A host whose guest may send anything."""
    connection = Connection.host()
    connection.receive_data(framed([16, 1, "guest", "3.11", {}]))
    connection.next_message()
    connection.send(RunScript(1, "", {}, "", "off", 1, 1, 1, None, None))
    return connection


def framed(value: Any) -> bytes:
    body: bytes = msgpack.packb(value)
    return len(body).to_bytes(4, "big") + body


def receive(data: bytes, piece: int = 64 * 1024) -> None:
    connection = host()
    for start in range(0, len(data), piece):
        connection.receive_data(data[start : start + piece])
        while connection.next_message() is not None:
            pass


def print_single_characters(count: int) -> None:
    capture = Capture(1 * MIB)
    for _ in range(count):
        capture.feed("stdout", "x")
    assert len(capture.logs().text) == count


def print_in_turns(count: int) -> None:
    capture = Capture(1 * MIB)
    for index in range(count):
        capture.feed("stdout" if index % 2 else "stderr", "x")
    assert len(capture.logs().text) == count


def return_files(count: int) -> None:
    files = ReturnedFiles(Limits(files=100_000))
    for index in range(count):
        files.take_part(FilePart(f"f{index}", "text/plain", b"", True))
    assert len(files.finished()) == count


def in_one_piece_after_another(count: int) -> None:
    files = ReturnedFiles(Limits())
    for index in range(count):
        files.take_part(FilePart("f", "text/plain", b"x" * 100, index == count - 1))


def check_arguments(count: int) -> None:
    definition = ToolDefinition("tool", "A tool", {"type": "object", "properties": {"x": {"type": "array"}}})
    ArgumentChecker(definition).check({"x": [{"a": [1, "x"]}] * count})


def journal(count: int) -> Journal:
    made = Journal("j")
    for number in range(count):
        made.ask(f"call_{number}", "echo", {"q": [number] * 10})
    return made


def at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing."""
    with pytest.raises(StopIteration) as ended:
        coroutine.send(None)
    return ended.value.value


def repair(count: int) -> None:
    repairing = Journal("r", past=journal(count).repairable())
    for number in range(count):
        assert at_once(repairing.take_past("echo", {"q": -number})) is None
    assert at_once(repairing.take_past("echo", {"q": [0] * 10})) is not None
    assert at_once(repairing.take_past("echo", {"q": [0] * 10})) is None


def carry_on(count: int) -> None:
    carried = journal(count)
    carried.begin_again()
    for number in reversed(range(count)):
        entry = at_once(carried.recorded("echo", {"q": [number] * 10}))
        assert entry.number == number + 1
        carried.ask(f"call_{number}", "echo", {"q": [number] * 10}, entry)


def redact(value: Any) -> None:
    Redactor(["hunter22"]).clean_all(value)


WORK: dict[str, Callable[[int], object]] = {
    "repair: calls that the repaired run did not make": lambda n: repair(20 * n),
    "resume: calls that were made before": lambda n: carry_on(20 * n),
    "decode: empty lists": lambda n: receive(framed([20, [[]] * 1000 * n])),
    "decode: empty dicts": lambda n: receive(framed([20, [{}] * 1000 * n])),
    "decode: numbers": lambda n: receive(framed([20, [1] * 1000 * n])),
    "decode: keys": lambda n: receive(framed([20, {str(i): i for i in range(1000 * n)}])),
    "decode: text": lambda n: receive(framed([19, 1, "x" * 100_000 * n])),
    "decode: bytes": lambda n: receive(framed([20, b"x" * 100_000 * n])),
    "decode: small messages": lambda n: receive(framed([20, None]) * 1000 * n),
    "decode: one byte at a time": lambda n: receive(framed([20, "x" * 1000 * n]), piece=1),
    "decode: read value by value": lambda n: receive(framed([20, ["x" * 20_000] * 200 + [[]] * 1000 * n])),
    "check": lambda n: check_plain([{"a": [1]}] * 1000 * n),
    "convert": lambda n: to_plain([(1, 2.5, {"a"})] * 300 * n),
    "print single characters": lambda n: print_single_characters(2000 * n),
    "print to both streams in turns": lambda n: print_in_turns(2000 * n),
    "return files": lambda n: return_files(500 * n),
    "return a file in many pieces": lambda n: in_one_piece_after_another(1000 * n),
    "check arguments": lambda n: check_arguments(1000 * n),
    "redact a value": lambda n: redact([{"password": "x", "a": "hunter22"}] * 200 * n),
    "redact a text": lambda n: redact("sk-" * 5000 * n + "-----BEGIN PRIVATE KEY-----" * 500 * n),
    "hide secrets of a run": lambda n: Secrets({"k": "hunter22"}).redact_value(["hunter22"] * 1000 * n),
    "digest": lambda n: value_digest([{"a": 1}] * 1000 * n),
    "show": lambda n: bounded_json([["x"]] * 1000 * n, 1000, "..."),
}


@pytest.mark.parametrize("name", WORK)
def test_work_grows_no_faster_than_what_was_sent(name: str) -> None:
    WORK[name](1)  # what is made at the first use
    one, two, four = (calls(partial(WORK[name], size), ProtocolError) for size in (1, 2, 4))

    assert two <= 2 * SLACK * one + 200
    assert four <= 2 * SLACK * two + 200


@pytest.mark.parametrize("name", WORK)
def test_memory_grows_no_faster_than_what_was_sent(name: str) -> None:
    WORK[name](1)
    # The least of three: the interpreter's own tables, such as that of interned texts, grow in leaps now and then.
    one, two, four = (min(peak_bytes(partial(WORK[name], size)) for _ in range(3)) for size in (1, 2, 4))

    assert two <= 2 * SLACK * one + 100_000
    assert four <= 2 * SLACK * two + 100_000


@pytest.mark.parametrize("print_text", [print_single_characters, print_in_turns])
def test_printed_characters_are_held_together(print_text: Callable[[int], None]) -> None:
    most = 10 if print_text is print_single_characters else 400  # a change of streams is a piece of its own

    assert peak_bytes(lambda: print_text(50_000)) <= most * 50_000


FULL: dict[str, Any] = {
    "empty lists": [[]] * (MAX_GUEST_ELEMENTS // 2 - 10),
    "empty dicts": [{}] * (MAX_GUEST_ELEMENTS // 2 - 10),
    "dicts of one": [{"a": 1}] * (MAX_GUEST_ELEMENTS // 4 - 10),
    "bytes": b"x" * (8 * MIB - 100),
    "text": "\u20ac" * (8 * MIB // 3 - 100),
    "texts": ["\u20ac" * 8] * (MAX_GUEST_ELEMENTS - 10),
    "keys": {f"{i:024}": 1 for i in range(MAX_GUEST_ELEMENTS // 2 - 10)},
    "too many": [[]] * MAX_GUEST_ELEMENTS,
    "far too many": [[[None] * 100_000] * 8] * 8,
}


@pytest.mark.slow
@each_row("shape", FULL)
def test_one_message_makes_the_host_call_few_functions_and_hold_ten_full_frames_at_most(shape: str) -> None:
    data = framed([20, FULL[shape]])
    assert len(data) <= 8 * MIB + 4

    assert calls(partial(receive, data), ProtocolError) <= 4 * MAX_GUEST_ELEMENTS
    assert peak_bytes(partial(receive, data)) <= 80 * MIB


def summing() -> ToolRegistry:
    """A registry with one tool."""
    tools = ToolRegistry()

    @tools.tool
    async def add(numbers: list[int]) -> int:
        """Return the sum of some whole numbers."""
        return sum(numbers)

    return tools


def add(numbers: Any, work: HostWork | None, name: str = "add") -> ToolResult:
    """Call a tool for a run whose work is counted there."""
    context = RunContext(scope=RunScope(work=work))
    return anyio.run(lambda: summing().dispatch(name, {"numbers": numbers}, context=context))


@pytest.mark.parametrize(
    "numbers",
    [[1] * 1000, ["1"] * 1000, ["x"] * 1000, "[" + "1," * 999 + "1]"],
    ids=["fit", "mended", "refused", "text"],
)
def test_checking_arguments_is_counted_for_the_guest_behind_the_call(numbers: Any) -> None:
    work = HostWork(10 * MIB)
    add(numbers, work)

    assert ELEMENT_WORK * 1000 <= work.used <= 20 * ELEMENT_WORK * 1000


@pytest.mark.parametrize("numbers", [["1"] * 1000, ["x"] * 1000], ids=["mended", "refused"])
def test_a_call_past_the_work_of_its_run_is_refused_and_so_is_every_further_one(numbers: Any) -> None:
    work = HostWork(1000)
    first, next_one = add(numbers, work), add(1, work, "unknown")  # not even looked up

    for result in (first, next_one):
        assert (result.status, result.is_error) == ("blocked", True)
        assert "limit 1000 (host_work)" in result.text


def test_calls_without_a_guest_are_counted_nowhere() -> None:
    assert add(["1"] * 1000, None).value == 1000


@pytest.mark.parametrize("large", [True, False], ids=["large", "small"])
def test_only_large_arguments_are_checked_in_another_process(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    checked_here, check = list[Any](), ArgumentChecker.check

    def watched(self: ArgumentChecker, args: Any) -> Any:
        checked_here.append(args)
        return check(self, args)

    monkeypatch.setattr(ArgumentChecker, "check", watched)
    count = 1 + LARGE_ELEMENTS if large else 10

    assert add(["1"] * count, None).value == count
    assert bool(checked_here) is not large


class Owner:
    """A type of a tool's own that takes a look at every argument."""

    threads: ClassVar[set[threading.Thread]] = set()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        def look(value: list[int]) -> list[int]:
            cls.threads.add(threading.current_thread())
            if value[0] < 0:
                raise ValueError("negative")
            return value

        return core_schema.no_info_after_validator_function(look, handler.generate_schema(list[int]))


@pytest.mark.parametrize("first", [1, -1], ids=["fit", "refused"])
@pytest.mark.parametrize("count", [10, 1 + LARGE_ELEMENTS])
def test_a_tools_own_types_are_made_of_large_arguments_in_a_thread(count: int, first: int) -> None:
    tools, work = ToolRegistry(), HostWork(10 * MIB)

    @tools.tool
    async def own(numbers: Annotated[list[int], Owner]) -> int:
        """Count numbers of a type of its own."""
        return len(numbers)

    Owner.threads.clear()
    args = {"numbers": [first] * count}
    result = anyio.run(lambda: tools.dispatch("own", args, context=RunContext(scope=RunScope(work=work))))

    assert result.is_error is (first < 0)
    assert (Owner.threads == {threading.current_thread()}) is (count == 10)
    assert work.used >= ELEMENT_WORK * count


def test_whoever_sends_large_arguments_is_charged_for_packing_them_and_making_the_tools_own_types() -> None:
    tools, charged = ToolRegistry(), list[float]()

    @tools.tool
    def own(numbers: set[int]) -> int:
        """Count numbers, of which pydantic makes a set."""
        return len(numbers)

    async def call() -> ToolResult:
        daemon_threads.account.set(daemon_threads.Account(charged.append))
        return await tools.dispatch("own", {"numbers": [*range(100_000)]})

    assert anyio.run(call).value == 100_000
    assert len(charged) == 2 and min(charged) > 0, charged


@pytest.mark.parametrize("value", [[0] * 5000, {str(i): 0 for i in range(5000)}, [[0] * 50] * 100, ["x" * 200_000]])
def test_a_value_is_large_by_its_elements_and_its_text(value: Any) -> None:
    assert is_large({"a": value})
    assert not is_large({"a": [value[0][:5]] if isinstance(value, list) and isinstance(value[0], str) else [0] * 50})


def test_looking_for_large_values_stops_at_the_first_thousand() -> None:
    few, many = ([[0] * 10] * count for count in (200, 20_000))

    assert calls(lambda: is_large(many), ProtocolError) <= 2 * calls(lambda: is_large(few), ProtocolError)


@pytest.mark.anyio
async def test_a_cancelled_call_does_not_wait_for_its_arguments_and_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_process, "CPU_S", 60.0)
    each = {f"D{n}": {"allOf": [{"$ref": f"#/$defs/D{n + 1}"}] * 2} for n in range(40)}
    schema = {"type": "object", "allOf": [{"$ref": "#/$defs/D0"}], "$defs": {**each, "D40": {}}}
    tools, work, results = ToolRegistry(), HostWork(limit=100 * MIB), list[ToolResult]()
    tools.register("slow", "A tool whose arguments are checked for ever.", schema, lambda args: None)
    run = RunContext(scope=RunScope(work=work))

    async def call() -> None:
        results.append(await tools.dispatch("slow", {"numbers": [1] * 5000}, context=run))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        run.cancel()

    assert results[0].status == "cancelled" and work.used > 0


@pytest.mark.anyio
async def test_a_cancelled_call_does_not_wait_until_its_arguments_are_packed_and_is_charged_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, results, is_packed, charged = RunContext(), list[ToolResult](), threading.Event(), threading.Event()
    begun = anyio.Event()
    monkeypatch.setattr(
        pipeline, "_packed", lambda *args: (anyio.from_thread.run_sync(begun.set), is_packed.wait(20), b"")[2]
    )

    async def call() -> None:
        daemon_threads.account.set(daemon_threads.Account(lambda cpu_s: charged.set()))
        results.append(await summing().dispatch("add", {"numbers": [1] * 5000}, context=run))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await begun.wait()
        run.cancel()
    was_charged = charged.is_set()
    is_packed.set()

    assert results[0].status == "cancelled" and not was_charged and charged.wait(20)
