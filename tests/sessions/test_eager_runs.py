"""A script that is fed in parts runs statement by statement, and is one run with one result all the same."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolcell import ExecutionResult, Limits, Outcome, PoolConfig, Runtime, SyncRuntime, ToolRegistry
from toolcell.audit.query import Index
from toolcell.audit.reader import RecordedRun
from toolcell.audit.replays import replay, runtime_options
from toolcell.errors import UsageError
from toolcell.sessions.eager_run import SyncEagerRun
from toolcell.sync import SyncSession

pytestmark = pytest.mark.isolation

SCRIPTS = [
    "x = 1\ny = x + 1\nx + y\n",
    "print('a')\nset_result({'n': 1})\nprint('b')",
    '"""A docstring."""\nfrom __future__ import annotations\ndef f(a: Missing) -> None: ...\n(__doc__, f.__annotations__["a"])',
    "import asyncio\nt = asyncio.create_task(asyncio.sleep(0, 'done'))\nx = 1\nawait t",
    "import asyncio\nasync def main():\n    return 5\nasyncio.run(main())",
    "a = await call_tool_async('add', a=1, b=2)\n\n\nasync def f():\n    return a\nb = await f()\nb",
    "def f():\n    raise ValueError('late')\n\nprint('before')\nf()\nprint('never')\n",
    "print(1)\nraise SystemExit(3)\nprint(2)",
    "import sys\nsys.exit(0)\n",
    "for i in range(2):\n    if i:\n        print(i)\n    else:\n        print('zero')\nelse:\n    print('end')\n# comment\n",
    "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    print(e)\nfinally:\n    print('f')\nx = [\n1,\n2,\n]\nx",
    "def deco(f):\n    return f\n@deco\n\n# why\ndef g(): return 7\ng()",
    "s = '''\nx = 1\n# no comment\nelse:\n'''\nt = \"\"\"'''\n\"\"\"\nlen(s), t",
    "x = 1; y = 2;\nx, \\\n    y\n",
    "x = 1\r\nif x:\r\n    y = 2\r\n\r\nx, y\r\n",
    "if True:\n\ty = 1\n\tz = 2\n\x0cw = 3\ny + z + w",
    "rows = call_tools_parallel([('add', {'a': 1, 'b': i}) for i in range(3)])\nrows",
    "x = call_tool('add', {'a': 1, 'b': 1})\ncall_tool('fail', {})\nprint('never')",
    "x = tools.add(1, 2)\nfor _ in range(3):\n    x = tools.add(a=x, b=1)\nx",
    "rows = [1]\nif not rows:\n    return []\nprint('on')\nif rows:\n    return rows\nprint('never')",
    "return 5",
    "x = 5\nif x:\n    return\nx",
    "x = 'é' * 2 + '\U0001f600'\nx",
    "class A:\n    x = 1\n\n    def f(self):\n        return self.x\n\nA().f()",
    "match 3:\n    case 3:\n        r = 'three'\n    case _:\n        r = ''\nr",
    "import inspect\ndef f():\n    return 1\ninspect.getsource(f)",
    "x = 1\nx.missing\n",
    "x = (1 +\ny = 2\nz = 3",
    "   x = 1\n   x + 1",
    "\ufeffx = 2\nx",
    "```python\nx = 3\nx\n```",
    "",
    "# nothing\n\n",
    "elsewhere = 1\nexceptional = 2\nelsewhere + exceptional",
    "x = 1\n\n\n\n1 / 0",
    "f = lambda: (\n  1)\nwith open('a', 'w') as h:\n    h.write('x')\nset_result(f(), files=['a'])",
    "1\n2\nNone",
    "'text'\nx = 1\n'last'",
]
"""Each ends in the same way in parts and as a whole: an error of syntax, if any, is in the first statement."""


def registry() -> ToolRegistry:
    tools = ToolRegistry()

    @tools.tool(read_only=True)
    async def add(a: int, b: int) -> int:
        """Add two numbers and return the sum."""
        return a + b

    @tools.tool
    async def fail() -> None:
        """Fail, whatever is asked of it."""
        raise RuntimeError("no")

    return tools


@pytest.fixture(scope="module")
def runtime() -> Iterator[SyncRuntime]:
    with SyncRuntime(registry(), pool=PoolConfig(warm=1)) as opened:
        yield opened


@pytest.fixture
def session(runtime: SyncRuntime) -> Iterator[SyncSession]:
    with runtime.session() as opened:
        yield opened


def fed(target: Any, *pieces: str, **options: Any) -> ExecutionResult:
    with target.feed(**options) as run:
        for piece in pieces:
            run.write(piece)
        return run.finish()  # type: ignore[no-any-return]


def wait_for(run: SyncEagerRun, is_so: Callable[..., object]) -> None:
    """Let the run go on until something is so, at most ten seconds."""

    async def waited() -> None:
        with anyio.fail_after(10):
            while not is_so():
                await anyio.sleep(0.002)

    run._call(waited)


def told(result: ExecutionResult) -> Any:
    """Everything that is to be the same, whatever the parts were."""
    error = result.error
    said = (error.type, error.message, error.line, error.column, error.traceback, error.exit_code) if error else None
    calls = [(call.name, call.args, call.status, call.line) for call in result.calls]
    logs = (result.logs.stdout, result.logs.stderr)
    files = [(file.name, file.data) for file in result.files]
    return result.outcome, result.value, result.has_value, logs, said, calls, files


@pytest.mark.parametrize("source", SCRIPTS)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_script_in_parts_ends_as_the_whole_one_does(runtime: SyncRuntime, source: str, size: int) -> None:
    pieces = [source[at : at + size] for at in range(0, len(source), size)]

    result = fed(runtime, *pieces)

    assert told(result) == told(runtime.execute_code(source))
    assert result.eager is not None
    assert source.startswith(result.eager.source)


@settings(max_examples=40)
@given(source=st.sampled_from(SCRIPTS), cuts=st.lists(st.integers(0, 200), max_size=6), speculate=st.booleans())
def test_neither_the_cuts_nor_early_calls_change_what_a_script_does(
    runtime: SyncRuntime, source: str, cuts: list[int], speculate: bool
) -> None:
    edges = [0, *sorted(min(cut, len(source)) for cut in cuts), len(source)]
    pieces = [source[start:end] for start, end in itertools.pairwise(edges)]

    assert told(fed(runtime, *pieces, speculate=speculate)) == told(runtime.execute_code(source))


def test_statements_run_while_the_text_is_still_coming(session: SyncSession) -> None:
    printed: list[str] = []
    with session.feed(on_log=lambda _, text: printed.append(text)) as run:
        run.write("print('first')\nx")
        wait_for(run, lambda: printed)
        run.write(" = 2\nx * 21")
        result = run.finish()

    assert (printed, result.value, result.eager and result.eager.statements) == (["first\n"], 42, 3)


def test_an_error_of_syntax_comes_after_the_statements_before_it(session: SyncSession) -> None:
    result = fed(session, "x = call_tool('add', a=1, b=2)\nprint(x)\n", "y = = 3\nz = 1\n")

    assert (result.outcome, result.logs.stdout, len(result.calls)) == (Outcome.ERROR, "3\n", 1)
    assert result.error is not None
    assert (result.error.type, result.error.line) == ("SyntaxError", 3)
    assert result.eager is not None
    assert (result.eager.statements, session.execute_code("x").value) == (3, 3)


def test_a_late_future_import_is_refused_as_in_a_whole_script(session: SyncSession) -> None:
    result = fed(session, "x = 1\n", "from __future__ import annotations\n", "y = 2")

    assert result.error is not None
    assert (result.error.type, result.error.line) == ("SyntaxError", 2)


def test_the_scripts_of_a_session_follow_each_other_fed_or_not(session: SyncSession) -> None:
    session.execute_code("x = 1")
    assert fed(session, "def f():\n    return x + 1\n", "x += 1\n", "f()").value == 3
    failed = session.execute_code("def g():\n    return f() / 0\ng()")
    assert failed.error is not None
    assert failed.error.line == 2
    assert fed(session, "f()").value == 3


def test_the_lines_of_a_script_in_parts_are_those_of_the_whole(session: SyncSession) -> None:
    session.execute_code("pass")
    result = fed(session, "# a\n\n", "def f():\n    1 / 0\n\n", "x = 1\n", "f()\n")

    assert result.error is not None
    assert result.error.line == 4
    assert "line 7" in result.error.traceback


def test_a_pair_of_surrogates_may_be_cut_and_half_of_one_is_an_error(session: SyncSession) -> None:
    assert fed(session, "x = '\ud83d", "\ude00'\nx").value == "\U0001f600"

    result = fed(session, "y = 5\nprint(y)\n", "z = '\ud83d'\n", "print(y)")
    assert result.error is not None
    assert (result.error.type, result.error.line, result.logs.stdout) == ("SyntaxError", 3, "5\n")
    assert "lone surrogate" in result.error.message


def test_lint_refuses_each_statement_when_it_is_its_turn(session: SyncSession) -> None:
    result = fed(session, "print('ran')\n", "import subprocess\n", "print('never')\n", lint="standard")

    assert (result.ok, result.logs.stdout) == (False, "ran\n")
    assert result.error is not None
    assert result.error.line == 2


# What is retracted


def test_text_that_has_not_run_is_replaced_and_leaves_no_trace(session: SyncSession) -> None:
    with session.feed() as run:
        run.write("x = 1\ny = 2")
        run.replace("x = 1\ny = 3\n")
        run.write("x + y")
        result = run.finish()

    assert (result.value, result.eager and result.eager.retracted) == (4, ())


@pytest.mark.parametrize("on_retract", ["report", "stop"])
def test_text_that_has_run_is_reported_when_it_is_taken_back(session: SyncSession, on_retract: Any) -> None:
    printed: list[str] = []
    with session.feed(on_log=lambda _, text: printed.append(text), on_retract=on_retract) as run:
        run.write("a = 1\nb = call_tool('add', a=1, b=1)\nprint(b)\nc")
        wait_for(run, lambda: printed)
        run.replace("a = 1\nb = 10\na + b")
        result = run.finish()

    assert result.eager is not None
    (gone,) = result.eager.retracted
    assert (gone.first_line, gone.last_line, gone.calls) == (2, 3, (result.calls[0].id,))
    assert gone.text == "b = call_tool('add', a=1, b=1)\nprint(b)"
    if on_retract == "report":
        assert result.value == 11
    else:
        assert (result.outcome, session.execute_code("b").value) == (Outcome.CANCELLED, 2)


def test_a_statement_that_goes_on_after_all_has_been_taken_back(session: SyncSession) -> None:
    printed: list[str] = []
    with session.feed(on_log=lambda _, text: printed.append(text)) as run:
        run.write("if True:\n    print(1)\nx = 1")
        wait_for(run, lambda: printed)
        run.replace("if True:\n    print(1)\n    print(2)\n")
        result = run.finish()

    assert (result.ok, result.logs.stdout) == (True, "1\n1\n2\n")
    assert result.eager is not None
    assert [each.text for each in result.eager.retracted] == ["if True:\n    print(1)"]


# The end of a run


def test_a_writer_that_writes_nothing_more_ends_the_run_by_wall_s(session: SyncSession) -> None:
    with session.feed(limits=Limits(wall_s=0.3)) as run:
        run.write("x = 1\ny")
        wait_for(run, lambda: run.is_over)
        result = run.finish()

    assert result.outcome is Outcome.TIMEOUT
    assert result.error is not None
    assert "call finish()" in result.error.message
    assert session.execute_code("x").value == 1


def test_wall_s_counts_from_the_last_text(session: SyncSession) -> None:
    with session.feed(limits=Limits(wall_s=0.4)) as run:
        for _ in range(40):
            run.write("x = 1\n")
            until = time.monotonic() + 0.02
            wait_for(run, lambda until=until: time.monotonic() > until)
        result = run.finish()

    assert result.ok
    assert result.usage.wall_s > 0.4


def test_leaving_the_block_ends_the_run_and_the_session_goes_on(session: SyncSession) -> None:
    with session.feed() as run:
        run.write("x = 7\nwhile True: pass\ny = 1")
    assert run.is_over
    with pytest.raises(UsageError, match="was left"):
        run.finish()
    assert session.execute_code("1").ok


def test_nothing_runs_when_nothing_was_written(session: SyncSession) -> None:
    with session.feed() as run:
        pass
    assert run.is_over
    assert session.execute_code("1").value == 1


def test_the_text_after_a_statement_that_failed_is_not_run(session: SyncSession) -> None:
    with session.feed() as run:
        run.write("1 / 0\nx")
        wait_for(run, lambda: run.is_over)
        run.write(" = 2\n" * 10)
        result = run.finish()

    assert result.error is not None
    assert (result.error.type, result.eager and result.eager.line) == ("ZeroDivisionError", 1)


def test_a_script_in_parts_may_be_as_large_as_a_whole_one(runtime: SyncRuntime) -> None:
    limits = Limits(frame_bytes=64 * 1024)
    with runtime.feed(limits=limits) as run:
        run.write("x = 1\n" * 10_000)
        with pytest.raises(UsageError, match="frame_bytes=65536"):
            run.write("x = 1\n" * 1000)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"on_approval": "suspend"}, "cannot be suspended"),
        ({"preflight": True}, "preflight"),
        ({"repairs": "x"}, "repairs"),
        ({"check_types": True}, "check_types=False"),
        ({"on_retract": "undo"}, "on_retract"),
        ({"speculate": 1}, "speculate"),
        ({"sources": 1}, "sources"),
    ],
)
def test_options_that_need_the_whole_script_are_refused_at_once(
    runtime: SyncRuntime, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        runtime.feed(**options)


# Journals and the audit log


@pytest.mark.anyio
async def test_a_session_is_rebuilt_from_scripts_that_were_fed(tmp_path: Path) -> None:
    made: list[int] = []
    tools = ToolRegistry()

    @tools.tool
    async def note(n: int) -> int:
        """Take note of a number, and return it."""
        made.append(n)
        return n

    async with Runtime(tools, journal=tmp_path) as runtime:
        async with runtime.session("kept") as session, session.feed() as run:
            await run.write("x = tools.note(n=5)\nprint(x)\ny = = 1")
            assert not (await run.finish()).ok
        async with runtime.session("kept", restore=True) as session:
            assert (await session.execute_code("x")).value == 5
    assert made == [5]


def recorded(log: Path, run_id: str) -> RecordedRun:
    with Index(log) as index:
        index.refresh()
        return index.load(index.find(run_id))


@pytest.mark.anyio
async def test_the_audit_log_has_the_whole_text_and_a_replay_repeats_it(tmp_path: Path) -> None:
    async with Runtime(registry(), audit=tmp_path) as runtime, runtime.feed(speculate=True) as run:
        await run.write("a = tools.add(1, 2)\nb = tools.add(a=a, b=1)\n")
        await run.write("c = tools.add(1, 2)\nprint(c)\nd = = 1")
        result = await run.finish()
    found = recorded(tmp_path, result.run_id)

    assert found.source == "a = tools.add(1, 2)\nb = tools.add(a=a, b=1)\nc = tools.add(1, 2)\nprint(c)\nd = = 1"
    async with Runtime(**runtime_options(found)) as again:
        done = await replay(again, found)
    assert (done.divergence, done.answered, done.recorded) == (None, 3, 3)


# Calls that are made early


class Reads:
    """Tools that note what they are asked, and wait until they are told to answer."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.registry = ToolRegistry()
        self.go = anyio.Event()
        self.value = 1

        @self.registry.tool(read_only=True)
        async def read(name: str) -> str:
            """Read the text of this name, slowly."""
            self.asked.append(name)
            await self.go.wait()
            return f"{name}{self.value}"

        @self.registry.tool
        async def write(value: int) -> None:
            """Change the number that every text ends with."""
            self.asked.append("write")
            self.value = value

        @self.registry.tool(read_only=True, requires_approval=True)
        async def guarded(name: str) -> str:
            """Read a text that somebody has to approve."""
            self.asked.append("guarded")
            return name

        @self.registry.tool(read_only=True, reads="private")
        async def labelled(name: str) -> str:
            """Read a text that must not leave the house."""
            self.asked.append("labelled")
            return name

    async def until(self, count: int) -> None:
        """Wait until so many calls were made."""
        with anyio.fail_after(10):
            while len(self.asked) < count:
                await anyio.sleep(0.002)


READING = "a = tools.read('a')\nb = call_tool('read', {'name': 'b'})\nc = tools.read(name='c')\n[a, b, c]"


async def early(reads: Reads, source: str, count: int, speculate: bool = True, **options: Any) -> ExecutionResult:
    """Feed a script, and let its tools answer when so many calls were made."""
    async with Runtime(reads.registry) as runtime, runtime.feed(speculate=speculate, **options) as run:
        await run.write(source)
        await reads.until(count)
        reads.go.set()
        return await run.finish()


@pytest.mark.anyio
async def test_reads_are_made_before_the_script_comes_to_them() -> None:
    reads = Reads()
    result = await early(reads, READING, 3)

    assert (result.value, sorted(reads.asked)) == (["a1", "b1", "c1"], ["a", "b", "c"])
    assert result.eager is not None
    assert (result.eager.early_calls, result.eager.hits, result.eager.wasted) == (2, 2, 0)
    assert [(call.name, call.status, call.line) for call in result.calls] == [("read", "ok", n) for n in (1, 2, 3)]


@pytest.mark.anyio
async def test_nothing_is_made_early_unless_it_was_asked_for() -> None:
    reads = Reads()
    reads.go.set()
    result = await early(reads, READING, 0, speculate=False)

    assert (result.value, result.eager and result.eager.early_calls) == (["a1", "b1", "c1"], 0)


@pytest.mark.anyio
async def test_a_read_behind_a_write_sees_what_was_written() -> None:
    reads = Reads()
    source = "a = tools.read('a')\ntools.write(2)\nb = tools.read('b')\n[a, b]"
    result = await early(reads, source, 1)

    assert (result.value, reads.asked) == (["a1", "b2"], ["a", "write", "b"])


@pytest.mark.anyio
async def test_a_hidden_write_voids_what_was_read_early() -> None:
    reads = Reads()
    source = "f = getattr(tools, 'write')\na = tools.read('a')\nf(2)\nb = tools.read('b')\n[a, b]"
    result = await early(reads, source, 2)

    assert result.value == ["a1", "b2"]
    assert (sorted(reads.asked[:2]), reads.asked[2:]) == (["a", "b"], ["write", "b"])  # early calls go side by side
    assert result.eager is not None
    assert (result.eager.hits, result.eager.wasted) == (1, 1)


@pytest.mark.anyio
async def test_a_statement_that_is_not_reached_is_waste() -> None:
    reads = Reads()
    result = await early(reads, "a = tools.read('a')\n1 / 0\nb = tools.read('b')\nc", 2)

    assert result.eager is not None
    assert (result.outcome, result.eager.hits, result.eager.wasted) == (Outcome.ERROR, 0, 1)
    assert len(result.calls) == 1


ENDS = [
    "raise SystemExit",
    "exit()",
    "import sys; sys.exit(0)",
    "if a: raise SystemExit",
    "try:\n    raise SystemExit\nfinally:\n    a",
    "def stop():\n    raise SystemExit\nstop()",
    "with open('/dev/null') as f:\n    with open('/dev/null') as g:\n        raise SystemExit\n    tools.read('never')",
]
MEANS_SOMETHING_ELSE = [
    "call_tool = lambda *args: 'mine'",
    "tools = call_tool = str",
    "def call_tool(*args): return 'mine'",
    "from builtins import str as call_tool",
    "globals()['call_tool'] = str",
    "exec('call_tool = str')",
    "for call_tool in [str]: pass",
    "with open('/dev/null') as call_tool: pass\ncall_tool = str",
]


@pytest.mark.anyio
@pytest.mark.parametrize("before", [*ENDS, *MEANS_SOMETHING_ELSE])
async def test_no_read_is_made_early_that_the_script_does_not_come_to(before: str) -> None:
    reads = Reads()
    result = await early(reads, f"a = tools.read('a')\n{before}\ncall_tool('read', {{'name': 'never'}})\nx = 1\n", 1)

    assert reads.asked == ["a"], result.error


@pytest.mark.anyio
async def test_names_that_an_earlier_script_of_the_session_changed_are_no_calls() -> None:
    reads = Reads()
    reads.go.set()
    async with Runtime(reads.registry) as runtime, runtime.session() as session:
        await session.execute_code("call_tool = lambda *args: 'mine'")
        async with session.feed(speculate=True) as run:
            await run.write("a = tools.read('a')\nb = call_tool('read', {'name': 'never'})\nb\n")
            result = await run.finish()
    assert (result.value, reads.asked) == ("mine", ["a"])


@pytest.mark.anyio
async def test_only_plain_reads_are_made_early() -> None:
    reads = Reads()
    source = "a = tools.read('a')\nx = 1 if a else tools.guarded('x')\nb = tools.labelled('y')\nc"
    async with Runtime(reads.registry) as runtime, runtime.feed(speculate=True) as run:
        await run.write(source)
        await reads.until(1)
        assert reads.asked == ["a"]


@pytest.mark.anyio
async def test_early_calls_count_as_calls_and_leave_a_place_for_the_scripts_own() -> None:
    reads = Reads()
    lines = "".join(f"x{n} = tools.read('{n}')\n" for n in range(6))
    limits = Limits(concurrent_calls=3, tool_calls=4)
    result = await early(reads, lines, 2, limits=limits)

    assert len(reads.asked) == 4
    assert result.outcome is Outcome.CALL_LIMIT


LYING = """
from toolcell_bridge.wire.messages import CallAhead
channel = call_tool.__self__._channel
for tool in ("write", "guarded", "labelled", "none", "read"):
    for n in range({times}):
        channel.send(CallAhead(tool, {{"name": str(n), "value": 3}} if tool != "read" else {{"name": str(n)}}, 1))
"""


@pytest.mark.anyio
async def test_a_guest_that_proposes_anything_gains_nothing_but_reads_within_its_limits() -> None:
    reads = Reads()
    source = LYING.format(times=200) + "tools.read('own')\nx"
    async with Runtime(reads.registry) as runtime, runtime.feed(speculate=True) as run:
        await run.write(source)
        await reads.until(9)
        assert len(reads.asked) <= 10  # concurrent_calls
        reads.go.set()
        result = await run.finish()

    assert set(reads.asked) <= {*map(str, range(200)), "own"}
    assert result.eager is not None
    assert result.eager.early_calls <= 64
    assert len(result.calls) == 1


@pytest.mark.anyio
async def test_a_guest_of_a_whole_script_that_proposes_calls_breaks_the_protocol() -> None:
    reads = Reads()
    async with Runtime(reads.registry) as runtime:
        result = await runtime.execute_code(LYING.format(times=1))
    assert (result.outcome, reads.asked) == (Outcome.PROTOCOL_ERROR, [])


@pytest.mark.anyio
async def test_the_log_tells_early_calls_from_the_scripts_own(tmp_path: Path) -> None:
    reads = Reads()
    async with Runtime(reads.registry, audit=tmp_path) as runtime, runtime.feed(speculate=True) as run:
        await run.write(READING)
        await reads.until(3)
        reads.go.set()
        result = await run.finish()

    calls = recorded(tmp_path, result.run_id).calls
    assert sorted(call.call_id.partition("_")[0] for call in calls) == ["call"] * 3 + ["early"] * 2
    answered = next(call for call in calls if call.call_id.startswith("call") and call.args == {"name": "b"})
    assert "answered by early_1" in str(answered.start_extra)
