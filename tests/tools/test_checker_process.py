"""The processes in which strangers' schemas are compiled and large values checked: bounds, ends, turns."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from rows import each_row
from toolcell import Runtime, ToolRegistry
from toolcell.calls import checker_process
from toolcell.calls.checker_process import BATCH, Turns, end_idle, find_problem, refused_schemas
from toolcell.calls.compiled_schema import flat_schema
from toolcell.calls.options import ToolOptions
from toolcell.support import daemon_threads
from toolcell.support.host_work import HostWork
from toolcell.tools import ToolDefinition, pipeline
from toolcell.tools.pipeline import check_arguments
from toolcell.tools.spec import ToolSpec

pytestmark = [pytest.mark.quick, pytest.mark.anyio]

NAMED: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}, "minProperties": 0}
"""What a process checks: it says more than what is quickly compared."""
WRONG: dict[str, Any] = {"type": "nonsense"}
SOON_MS = 20_000


def compiled_slowly(levels: int) -> dict[str, Any]:
    """Return a schema whose compiling takes twice the time and the memory with each level."""
    each = {"unevaluatedProperties": False}
    definitions = {f"D{n}": {"allOf": [{"$ref": f"#/$defs/D{n + 1}"}] * 2, **each} for n in range(levels)}
    return {"type": "object", "$ref": "#/$defs/D0", "$defs": {**definitions, f"D{levels}": {}}}


def checkers(parent: int | None = None) -> list[int]:
    """Return the checker processes of a process, also those that nobody has reaped."""
    return [pid for pid in _children(parent or os.getpid()) if pid not in OTHERS]


OTHERS = set[int]()
"""What other tests have left unreaped."""


def _children(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            command = path.with_name("cmdline").read_text()
        except OSError:
            continue
        if int(fields[1]) == parent and ("checker_program" in command or fields[0] == "Z"):
            found.append(int(path.parent.name))
    return found


def sockets() -> int:
    """Return how many this process has."""
    return sum(os.readlink(each).startswith("socket:") for each in Path("/proc/self/fd").iterdir() if each.is_symlink())


def await_end(pid: int) -> bool:
    """Wait until a process has ended, whose child it is."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    try:
        return bool(poll.poll(SOON_MS))
    finally:
        os.close(descriptor)


@pytest.fixture(autouse=True)
def _none_left() -> Iterator[None]:
    end_idle()
    OTHERS.clear()
    OTHERS.update(_children(os.getpid()))
    yield
    end_idle()
    assert checkers() == []


async def fits(value: Any) -> bool:
    return await find_problem(NAMED, value, is_foreign=True) is None


async def test_a_schema_that_is_no_json_is_a_problem_of_the_value() -> None:
    circle: dict[Any, Any] = {"type": "object"}
    circle["not"] = circle
    for schema in (circle, {("a", "b"): 1}):
        for is_foreign in (False, True):
            problem = await find_problem(schema, {}, is_foreign=is_foreign)
            assert problem is not None and problem.message.startswith("cannot be checked: ")


@pytest.mark.every_loop
async def test_values_and_schemas_are_checked_on_every_event_loop() -> None:
    assert await refused_schemas([NAMED]) == [""]
    assert (await refused_schemas([WRONG]))[0].startswith("invalid schema at type")
    assert [await fits({"name": "a"}), await fits({"name": 1})] == [True, False]
    assert len(checkers()) == 1


async def test_small_arguments_for_a_process_are_packed_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[Any]()

    async def run_sync(function: Any, **options: Any) -> Any:
        threads.append(function)
        return function()

    monkeypatch.setattr(daemon_threads, "run_sync", run_sync)
    for numbers, count in ((10, 0), (5_000, 1)):
        await check_arguments(ToolDefinition("t", "A tool of a stranger.", NAMED), {"numbers": [*range(numbers)]})
        assert len(threads) == count


async def test_a_cancelled_check_of_large_arguments_does_not_wait_until_they_are_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, may_end, line = threading.Event(), threading.Event(), Turns(1)

    def packed(value: object) -> bytes:
        begun.set()
        may_end.wait(SOON_MS / 1000)
        return b""

    monkeypatch.setattr(pipeline, "pack", packed)
    monkeypatch.setattr(pipeline, "turns", lambda: line)
    try:
        with anyio.fail_after(SOON_MS / 1000):
            async with anyio.create_task_group() as tasks:
                tool = ToolDefinition("t", "A tool of a stranger.", NAMED)
                tasks.start_soon(check_arguments, tool, {"numbers": [*range(5_000)]})
                while not begun.is_set():
                    await anyio.sleep(0.01)
                tasks.cancel_scope.cancel()
        with anyio.move_on_after(0):
            await line.enter(None)
            raise AssertionError("the turn is free before the function is over")
    finally:
        may_end.set()
    with anyio.fail_after(SOON_MS / 1000):
        await line.enter(None)


async def test_schemas_of_a_list_are_written_as_json_when_they_are_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    written, asked = list[Any](), list[int]()

    def dumps(value: Any) -> str:
        written.append(value)
        return "{}"

    async def ask(kind: str, spec: str, body: bytes, work: HostWork) -> list[str]:
        asked.append(len(written))
        return [""] * len(checker_process.unpack(body))

    monkeypatch.setattr(checker_process, "ask", ask)
    monkeypatch.setattr(json, "dumps", dumps)
    assert await refused_schemas([NAMED, {}] * (BATCH + 1)) == [""] * 2 * (BATCH + 1)
    assert asked == [BATCH, BATCH + 1]


async def test_a_process_that_nobody_asks_again_ends_and_leaves_no_zombie_and_no_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checker_process, "IDLE_S", 0.05)
    before = sockets()
    assert await fits({})
    with anyio.fail_after(SOON_MS / 1000):
        while checkers() or sockets() != before:
            await anyio.sleep(0.1)
    assert await fits({})


async def test_a_process_whose_end_no_thread_could_wait_for_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = sockets()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        problem = await find_problem(NAMED, {}, is_foreign=True)
    assert problem is not None and "no thread could be started for it (can't start new thread)" in problem.message
    assert checkers() == [] and sockets() == before and await fits({})


@pytest.mark.parametrize(("bound", "most_s", "said"), [("CPU_S", 0.2, "0.2 s of processor time"), ("WALL_S", 3, "3 s")])
async def test_a_process_ends_at_its_bound_and_the_others_of_the_list_are_compiled_all_the_same(
    bound: str, most_s: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker_process, "CPU_S", 60.0)
    monkeypatch.setattr(checker_process, "MEMORY_BYTES", 8 << 30)
    assert await fits({})
    monkeypatch.setattr(checker_process, bound, most_s)
    first, hostile = await refused_schemas([NAMED, compiled_slowly(40)])
    monkeypatch.setattr(checker_process, "WALL_S", 30.0)
    assert first == "" and f"took more than {said}" in hostile and await refused_schemas([NAMED]) == [""]


@pytest.mark.slow
async def test_a_process_without_memory_ends_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_process, "MEMORY_BYTES", 300 << 20)
    problem = await find_problem({}, [None] * 40_000_000, is_foreign=True)
    assert problem is not None and "took more than 300 MB of memory" in problem.message


@pytest.mark.slow
async def test_after_a_few_schemas_past_their_bound_no_other_of_the_list_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checker_process, "CPU_S", 0.1)
    found = await refused_schemas([compiled_slowly(25)] * 40)
    assert ["took more than" in each for each in found] == [True] * 3 + [False] * 37
    assert all("others of the same list took too long" in each for each in found[3:])


async def test_schemas_of_a_list_are_compiled_many_in_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ask = list[str](), checker_process.ask

    async def counted(kind: str, *args: Any, **fields: Any) -> Any:
        asked.append(kind)
        return await ask(kind, *args, **fields)

    monkeypatch.setattr(checker_process, "ask", counted)
    schemas = [NAMED | {"title": f"{n}"} for n in range(200)]
    assert await refused_schemas([*schemas, {}, WRONG]) == [*[""] * 201, *await refused_schemas([WRONG])]
    assert len(asked) <= 5


async def test_a_list_of_schemas_has_one_bound_of_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when none of its requests exceeds its own."""
    monkeypatch.setattr(checker_process, "BATCH", 1)
    monkeypatch.setattr(checker_process, "MAX_STOPS", 0.05)  # of the time of a request
    found = await refused_schemas([{}, *[compiled_slowly(10) | {"title": f"{n}"} for n in range(40)], {}])
    assert found[:2] == ["", ""] and "took too long" in found[-2] and found[-1] == ""


async def test_a_process_has_the_socket_to_its_host_and_nothing_else_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "s3cret")
    with open("/etc/hostname", "rb") as open_file:
        os.set_inheritable(open_file.fileno(), True)
        assert await fits({})
    (pid,) = checkers()
    held = {os.readlink(each).partition(":")[0] for each in Path(f"/proc/{pid}/fd").iterdir()}
    assert held == {"socket", "/dev/null"}
    assert b"SECRET_OF_THE_HOST" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert os.getsid(pid) == pid != os.getsid(0)


@pytest.mark.slow
async def test_a_large_host_has_a_process_for_more_than_one_request() -> None:
    held = bytearray(600 << 20)
    held[:: 1 << 12] = b"x" * (len(held) >> 12)
    assert await fits({})
    first = checkers()
    assert await fits({}) and checkers() == first != []


async def test_a_process_that_somebody_killed_is_replaced() -> None:
    assert await fits({})
    (first,) = checkers()
    os.kill(first, signal.SIGKILL)
    assert await_end(first)
    assert await fits({}) and checkers() not in ([], [first])


async def test_a_check_that_is_given_up_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_process, "CPU_S", 60.0)
    with anyio.move_on_after(0.3) as scope:
        await refused_schemas([compiled_slowly(40)])
    assert scope.cancelled_caught
    assert all(map(await_end, checkers())) and await fits({})


HOST = """
import anyio, sys
from toolcell.calls.checker_process import find_problem, refused_schemas
async def main():
    await find_problem({}, 1, is_foreign=True)
    print("ready", flush=True)
    await refused_schemas([%s])
    await anyio.sleep_forever()
anyio.run(main)
"""


@pytest.mark.parametrize("schema", [{}, compiled_slowly(40)], ids=["idle", "at work"])
def test_no_process_outlives_a_host_that_is_killed(schema: dict[str, Any]) -> None:
    with subprocess.Popen([sys.executable, "-c", HOST % schema], stdout=subprocess.PIPE) as host:
        assert host.stdout is not None and host.stdout.readline() == b"ready\n"
        (checker,) = checkers(host.pid)
        host.kill()
        assert await_end(checker)


FORKED = """
import anyio, os, sys
from toolcell.calls.checker_process import find_problem
async def fits():
    return [await find_problem({"type": "integer"}, each, is_foreign=True) is None for each in (1, "1")]
assert anyio.run(fits) == [True, False]
forked = os.fork()
assert anyio.run(fits) == [True, False]
if forked:
    assert os.waitpid(forked, 0)[1] == 0
"""


@pytest.mark.slow
def test_a_fork_of_the_host_has_processes_of_its_own() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], check=True, timeout=60)


@pytest.mark.isolation
async def test_no_process_is_left_when_the_runtime_is_closed() -> None:
    tools = ToolRegistry()
    tools.register("count", "Count the numbers in a list.", {"type": "object"}, lambda args: len(args["numbers"]))
    async with Runtime(tools) as runtime:
        rows = await runtime.execute_plan([{"tool": "count", "args": {"numbers": [*range(5_000)]}}])
        assert rows[0]["result"] == 5_000 and len(checkers()) == 1
    assert checkers() == []


async def test_of_all_who_wait_the_one_that_has_made_the_host_do_least_is_next() -> None:
    line, entered = Turns(1), list[int]()

    async def pass_through(used: int) -> None:
        async with line.taken(HostWork(10**9, used=used)):
            entered.append(used)

    async with anyio.create_task_group() as tasks, line.taken(None):
        for used in (500, 20, 9_000):
            tasks.start_soon(pass_through, used)
            await anyio.wait_all_tasks_blocked()

    assert entered == [20, 500, 9_000]


async def test_who_has_made_the_host_do_least_is_next_and_a_run_leaves_a_place_to_others() -> None:
    line, entered = Turns(3), list[str]()
    many, some, few = (HostWork(10**9, used=used) for used in (9_000, 500, 20))

    async def enter(name: str, work: HostWork) -> None:
        await line.enter(work)
        entered.append(name)

    async with anyio.create_task_group() as tasks:
        for name, work in (("many", many), ("many", many), ("many", many), ("some", some), ("few", few)):
            tasks.start_soon(enter, name, work)
            await anyio.wait_all_tasks_blocked()
        assert entered == ["many", "many", "some"]
        for name in ("few", "many"):
            line.leave(many)
            await anyio.wait_all_tasks_blocked()
            assert entered[-1] == name
        cancelled = anyio.CancelScope()

        async def give_up() -> None:
            with cancelled:
                await line.enter(many)

        tasks.start_soon(give_up)
        await anyio.wait_all_tasks_blocked()
        cancelled.cancel()
    for work in (many, some, few):
        line.leave(work)
    for _ in range(2):
        await line.enter(some)
    with anyio.fail_after(10):
        await line.enter(few)


FLAT: dict[str, Any] = {
    "word": {"type": "string", "minLength": 2, "maxLength": 4, "description": "d"},
    "kind": {"enum": ["a", 1, None]},
    "size": {"type": ["integer", "null"], "minimum": 1, "exclusiveMaximum": 9, "default": 3},
    "share": {"type": "number", "maximum": 0.5},
    "is_on": {"type": "boolean", "const": True},
    "tags": {"type": "array", "items": {"type": "string"}},
    "code": {"type": "string", "pattern": "^x"},
}
SCALARS = ("ab", "x", "abcde", "é", "5", 5, 0, 9, 1, True, False, None, 0.25)


async def given(is_foreign: bool, args: dict[str, Any], **others: Any) -> Any:
    """Return what a tool with a schema of `FLAT` was given, or why it was not called."""
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": FLAT, **others}
    definition = ToolDefinition("find", "Find things by what is known of them.", schema)
    spec = ToolSpec.positional(definition, lambda args: args, ToolOptions(blocking=False))
    registry = ToolRegistry()
    registry.add(SimpleNamespace(to_specs=lambda: [replace(spec, is_foreign=is_foreign)]))
    result = await registry.execute("find", args)
    return result.message if result.is_error else result.value


async def test_what_needs_no_process_is_checked_as_a_process_does() -> None:
    for others in ({}, {"required": ["word"]}, {"additionalProperties": False}):
        for name in (*FLAT, "unknown"):
            for value in SCALARS:
                args = {"word": "abc", name: value} if name != "word" else {name: value}
                assert await given(True, args, **others) == await given(False, args, **others), (others, args)


async def test_scalars_that_a_stranger_declared_flat_need_no_process() -> None:
    before = {*checkers()}
    for others in ({}, {"required": ["word"]}, {"additionalProperties": False}, {"x-wrapped": True}):
        schema = {"type": "object", "properties": FLAT, **others}
        assert await find_problem(schema, {"word": "abc", "size": 4}, is_foreign=True) is None
    assert {*checkers()} <= before
    for name in (*FLAT, "unknown"):
        for value in SCALARS:
            own, foreign = [await find_problem(schema, {name: value}, is_foreign=each) for each in (False, True)]
            assert own == foreign, (name, value)


async def test_short_scalars_for_a_flat_schema_of_a_stranger_need_no_process() -> None:
    before = {*checkers()}
    assert await given(True, {"word": "abc", "is_on": True}) == {"word": "abc", "is_on": True, "size": 3}
    assert {*checkers()} <= before
    await given(True, {"code": "x1"})
    assert await given(True, {"word": "abc", "tags": ["x"]}) == {"word": "abc", "tags": ["x"], "size": 3}


@each_row(
    "part",
    [
        {"pattern": "^a"},
        {"enum": ["x"] * 33},
        {"enum": [["x"]]},
        {"const": "x" * 1_001},
        {"minimum": 10**400},
        {"anyOf": [{"type": "string"}] * 3},
        {"$ref": "#/properties/word"},
        {"contentMediaType": "application/json"},
        {"multipleOf": 0.01},
        True,
    ],
)
def test_of_a_strangers_schema_only_what_is_quickly_compared_is_used_in_this_process(part: Any) -> None:
    word = {"type": "string"}
    schema = {"type": "object", "properties": {"word": word, "other": part}}
    assert flat_schema(schema)["properties"] == {"word": word}
    assert flat_schema({**schema, "allOf": [{"required": ["word"]}]}) == {}
    assert flat_schema({**schema, "required": ["word"] * 33}) == {}
    assert flat_schema({**schema, "properties": {f"p{n}": word for n in range(33)}}) == {}
    if isinstance(part, dict):
        assert flat_schema({**schema, "properties": {"other": {**part, "default": 1}}}) == {}
