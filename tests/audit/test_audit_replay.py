"""Replay: the same script with the same answers does the same. A difference is reported with its call and line."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace as with_fields
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from audit.ledger import Ledger
from rows import each_row
from toolcell import Limits, PoolConfig, Runtime, SyncRuntime, ToolRegistry, UsageError
from toolcell.audit import records
from toolcell.audit.config import ToolContent
from toolcell.audit.filters import Filter
from toolcell.audit.log import AuditLog
from toolcell.audit.query import Index
from toolcell.audit.reader import RecordedRun
from toolcell.control.replays import Replay, replay
from toolcell.tools import RunContext, ToolResult

pytestmark = pytest.mark.isolation

REPLAYS = int(os.environ.get("AUDIT_REPLAYS", "30"))
POOL = PoolConfig(warm=2)

PIECES = (
    "seen.append(call_tool('search', {{'query': {text!r}, 'limit': {number}}}))",
    "seen += call_tools_parallel([('slow', {{'delay_s': (7 - n) * 0.001, 'tag': n}}) for n in range({number} % 6)])",
    "try:\n    call_tool('fail', text={text!r})\nexcept ToolError as error:\n    seen.append(str(error))",
    "try:\n    call_tool('crash', text={text!r})\nexcept ToolError as error:\n    seen.append([error.code, str(error)])",
    "import random, time, datetime\nseen.append([random.random(), time.time(), str(datetime.datetime.now())])",
    "print({text!r}, len(seen), set('abcdef'))",
    "seen.append([hash({text!r}), list({{'x', 'y', 'z', {text!r}}})])",
    "seen.append([tool['name'] for tool in list_tools()])",
    "seen.append([search_tools('slow {number}', detail='names'), list_tools(detail='full'), list_tools('search', detail='signatures')])",
    "try:\n    call_tool('nothing_{number}')\nexcept ToolError as error:\n    seen.append(error.details)",
    "open('f{number}.txt', 'w').write({text!r})\nset_result(seen, files=['f{number}.txt'])",
    "import asyncio\nasync def both():\n"
    "    tasks = [asyncio.ensure_future(call_tool_async(*call)) for call in (('held', {{}}), ('slow', {{'delay_s': 0, 'tag': 2}}))]\n"
    "    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)\n"
    "    seen.append(sorted(task.result() for task in done))\n"
    "    await asyncio.gather(*tasks, call_tool_async('release'))\nawait both()",
)


def make_script(dice: random.Random) -> str:
    """A script of random steps: calls of every kind, randomness, time, sets, files."""
    steps = dice.choices(PIECES, k=dice.randint(1, 6))
    filled = [step.format(text=dice.choice(["alpha", "b'\"", "ü\n"]), number=dice.randint(0, 9)) for step in steps]
    end = dice.choice(["set_result(seen)", "seen", "raise ValueError(len(seen))", "import sys\nsys.exit(4)"])
    return "\n".join(["seen = []", *filled, end])


def tools_for(ledger: Ledger) -> list[str]:
    """Add a slow tool, and one that waits for another; returns the list the slow one's calls are noted in."""
    called: list[str] = []
    waiting: list[anyio.Event] = []

    @ledger.registry.tool
    async def held() -> int:
        """Wait until another call says so."""
        waiting.append(anyio.Event())
        await waiting[-1].wait()
        return 1

    @ledger.registry.tool
    async def release() -> None:
        """Let the call that waits go on."""
        waiting[-1].set()

    @ledger.registry.tool
    async def slow(delay_s: float, tag: float) -> float:
        """Wait for a moment and return the tag."""
        called.append(str(tag))
        await anyio.sleep(delay_s)
        return tag

    return called


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    """Runs of random scripts, and one that every other test takes apart; their ids are `pinned` and the rest."""
    home = tmp_path_factory.mktemp("replays")
    ledger = Ledger(home / "log")
    tools_for(ledger)
    dice = random.Random(7)
    with SyncRuntime(ledger.registry, record=ledger.log(heads=home / "heads"), pool=POOL) as runtime:
        runtime.execute_code(PINNED, inputs={"q": "kittens"}, context=RunContext(run_id="pinned"))
        for _ in range(REPLAYS):
            runtime.execute_code(make_script(dice))
    return ledger


PINNED = """\
import random
first = call_tool('search', query=q)
second = call_tool('search', query=first[0]['title'] + '!')
try:
    call_tool('fail', text='no')
except ToolError as error:
    print('failed:', error)
last = call_tool('search', query=second[0]['title'], limit=random.randint(1, 10**9))
set_result({'last': last, 'n': len(second)})
"""


def runs_of(ledger: Ledger) -> list[RecordedRun]:
    with Index(ledger.path) as index:
        return [index.load(line) for line in index.runs(Filter(limit=None))]


@dataclass(frozen=True)
class ReplayRuntime:
    """A runtime for replays, and the event loop that it is open in."""

    runtime: Runtime
    portal: BlockingPortal


@contextmanager
def opened(
    run: RecordedRun, registry: ToolRegistry | None = None, record: AuditLog | None = None
) -> Iterator[ReplayRuntime]:
    """Open a runtime as a run needs it."""
    runtime = Runtime(registry, pool=POOL, record=record, **run.runtime_options())
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(runtime):
        yield ReplayRuntime(runtime, portal)


@pytest.fixture(scope="module")
def runtime(recorded: Ledger) -> Iterator[ReplayRuntime]:
    """A runtime that knows none of the tools: a call that got past the replay would fail."""
    with opened(runs_of(recorded)[0]) as runtime:
        yield runtime


def again(runtime: ReplayRuntime, run: RecordedRun, **options: Any) -> Replay:
    return runtime.portal.call(partial(replay, runtime.runtime, run, **options))


def recorded_run(ledger: Ledger, source: str, **log: Any) -> RecordedRun:
    """Run a script, and return its record."""
    with SyncRuntime(ledger.registry, record=ledger.log(**log), pool=POOL) as runtime:
        runtime.execute_code(source)
    return ledger.the_run()


def replayed(run: RecordedRun) -> Replay:
    """Replay a run where none of its tools is known."""
    with opened(run) as runtime:
        done = again(runtime, run)
    assert done.ok, done.divergence
    return done


def pinned(recorded: Ledger) -> RecordedRun:
    return runs_of(recorded)[0]


def test_recorded_runs_replay_with_equal_results(recorded: Ledger, runtime: ReplayRuntime) -> None:
    runs = runs_of(recorded)
    assert len(runs) == REPLAYS + 1
    for run in runs:
        done = again(runtime, run)
        assert done.ok, (done.divergence, run.source)
        assert done.answered == done.recorded
        assert done.result is not None
        assert done.result.value == run.end["value"] or run.outcome != "ok"
        assert done.notes == ()


def test_no_tool_is_called_in_a_replay(ledger: Ledger) -> None:
    called = tools_for(ledger)
    run = recorded_run(ledger, "set_result(call_tool('slow', delay_s=0, tag=1))")
    called.clear()
    with opened(run, ledger.registry) as runtime:
        assert again(runtime, run).ok

    assert called == []


def test_frames_that_a_tool_returned_are_recorded_and_answered_again(ledger: Ledger) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"n": [1, 2]}, index=["x", "y"])
    ledger.registry.register("frame", "Returns a frame of two rows", None, lambda args: frame)
    source = "set_result(call_tool('frame').sum())"
    with SyncRuntime(ledger.registry, record=ledger.log(), pool=POOL, packages=["numpy", "pandas"]) as runtime:
        runtime.execute_code(source)
    run = ledger.the_run()
    pandas.testing.assert_series_equal(run.end["value"].to_pandas(), frame.sum())
    with opened(run, ledger.registry) as runtime:
        done = again(runtime, run)
    assert done.ok, done.divergence


def test_a_tool_of_a_namespace_is_the_recorded_one_however_the_script_writes_it(ledger: Ledger) -> None:
    ledger.registry.register("github.search", "Searches what there is", None, lambda args: 1)
    run = recorded_run(ledger, "set_result(call_tool('github.search', a=1))")
    with opened(run) as replaying:
        assert again(replaying, run, source="set_result(call_tool('github__search', a=1))").ok


def test_a_replay_in_a_runtime_with_a_log_is_recorded_and_replays_in_turn(recorded: Ledger, tmp_path: Path) -> None:
    run, ledger = pinned(recorded), Ledger(tmp_path / "log")
    with opened(run, record=ledger.log()) as runtime:
        done = again(runtime, run)
        copy = ledger.the_run()

    assert done.ok, done.divergence
    assert (copy.outcome, copy.source, copy.definitions) == (run.outcome, run.source, run.definitions)
    assert copy.end["value"] == run.end["value"]
    calls = [(call.tool, call.args, call.value, call.code, call.message) for call in run.calls]
    assert [(call.tool, call.args, call.value, call.code, call.message) for call in copy.calls] == calls
    assert all(call.start_extra["answered_from"] == run.id for call in copy.calls)
    with opened(copy) as runtime:
        assert again(runtime, copy).ok


CHANGES = {
    "an argument": ("first[0]['title'] + '!'", "first[0]['title'] + '?'", "call", 2, 3),
    "a tool's name": ("call_tool('fail', text='no')", "call_tool('crash', text='no')", "call", 3, 5),
    "a call more": ("second =", "call_tool('search', query='more')\nsecond =", "call", 2, 3),
    "a call less": ("    call_tool('fail', text='no')\n", "    pass\n", "call", 3, 8),
    "the last call left out": (
        "last = call_tool('search', query=second[0]['title'], limit=random.randint(1, 10**9))",
        "last = [{'title': 'kittens!', 'rank': 1}]",
        "missing_call",
        4,
        8,
    ),
    "a call after the last": ("set_result(", "call_tool('search', query='x')\nset_result(", "extra_call", 5, 9),
    "the result": ("'n': len(second)", "'n': 0", "value", None, None),
    "what it prints": ("'failed:'", "'broken:'", "stdout", None, None),
    "its end": ("set_result(", "1/0\nset_result(", "outcome", None, None),
    "a random number drawn before": ("import random\n", "import random; random.random()\n", "call", 4, 8),
}


@each_row(("old", "new", "kind", "index", "line"), CHANGES.values(), ids=CHANGES.keys())
def test_a_changed_script_is_pinned_to_the_call_that_first_differs(
    recorded: Ledger, runtime: ReplayRuntime, old: str, new: str, kind: str, index: int | None, line: int | None
) -> None:
    assert PINNED.count(old) == 1
    changed = PINNED.replace(old, new)
    done = again(runtime, pinned(recorded), source=changed)
    found = done.divergence

    assert found is not None
    assert (found.kind, found.index, found.line) == (kind, index, line)
    if line is not None and kind != "missing_call":
        assert found.source_line == changed.split("\n")[line - 1].strip()
    assert "this is not the script that was recorded" in done.notes


def test_another_outcome_is_told_with_the_error_there_is(recorded: Ledger, runtime: ReplayRuntime) -> None:
    fails = "raise ValueError(len(seen))"
    failed = next(run for run in runs_of(recorded) if fails in (run.source or ""))
    for run, old, new, message in (
        (pinned(recorded), "set_result(", "1/0\nset_result(", "it ends as error: ZeroDivisionError: division by zero"),
        (failed, fails, "seen", "it ends as ok"),
    ):
        found = again(runtime, run, source=str(run.source).replace(old, new)).divergence
        assert found is not None and (found.kind, found.message) == ("outcome", message)


def test_a_changed_argument_is_shown_with_what_was_expected(recorded: Ledger, runtime: ReplayRuntime) -> None:
    found = again(runtime, pinned(recorded), source=PINNED.replace("+ '!'", "+ '?'")).divergence

    assert found is not None
    assert (found.expected, found.got) == ({"query": "kittens!"}, {"query": "kittens?"})


@each_row(
    ("index", "answer", "kind", "at"),
    [
        (1, ToolResult.of([{"title": "dogs"}]), "call", 2),
        (2, ToolResult.of([{"title": "dogs"}]), "call", 4),
        (3, ToolResult.fail("another reason"), "stdout", 3),
        (3, ToolResult.of("no failure"), "stdout", 3),
        (4, ToolResult.of("another"), "value", 4),
    ],
)
def test_a_changed_tool_result_is_pinned_to_the_call_it_changes(
    recorded: Ledger, runtime: ReplayRuntime, index: int, answer: ToolResult, kind: str, at: int
) -> None:
    done = again(runtime, pinned(recorded), answers={index: answer})

    assert done.divergence is not None
    assert (done.divergence.kind, done.divergence.index) == (kind, at)
    assert f"the answer of call {index} was replaced" in done.notes


def test_a_tool_result_changed_in_the_log_is_not_used(recorded: Ledger, runtime: ReplayRuntime) -> None:
    """Its record is damaged then, and so passed over; the replay says which call's end is missing."""
    run = pinned(recorded)
    calls = tuple(
        with_fields(call, status="unfinished", ended_seq=0) if call.number == 2 else call for call in run.calls
    )
    found = again(runtime, with_fields(run, calls=calls)).divergence

    assert found is not None
    assert (found.kind, found.index) == ("no_answer", 2)
    assert "the log was damaged" in found.message


def test_other_inputs_are_pinned_to_the_call_that_gets_them(recorded: Ledger, runtime: ReplayRuntime) -> None:
    found = again(runtime, pinned(recorded), inputs={"q": "dogs"}).divergence

    assert found is not None
    assert (found.kind, found.index, found.line) == ("call", 1, 2)


@each_row("until", [1, 2, 4])
def test_a_replay_stops_where_it_is_told(recorded: Ledger, runtime: ReplayRuntime, until: int) -> None:
    done = again(runtime, pinned(recorded), until=until)

    assert done.ok
    assert done.stopped == f"stopped at call {until}, as asked"
    assert done.answered == until - 1


def test_answers_come_in_the_order_they_came(ledger: Ledger) -> None:
    """Whatever is first in the record is first again, though answering from it takes no time at all."""
    tools_for(ledger)
    script = PIECES[-1].format() + "\nset_result(seen)"
    run = recorded_run(ledger, f"seen = []\n{script}")
    assert run.end["value"] == [[2]], run.end
    replayed(run)


def test_a_call_that_was_taken_back_is_left_unanswered_again(ledger: Ledger) -> None:
    tools_for(ledger)
    script = (
        "import asyncio\ntry:\n    await asyncio.wait_for(call_tool_async('slow', delay_s=60, tag=1), 0.05)\n"
        "except TimeoutError:\n    set_result(call_tool('search', query='after'))"
    )
    run = recorded_run(ledger, script)
    assert run.outcome == "ok", run.end
    done = replayed(run)
    assert (done.notes, done.answered) == ((), 1)


@pytest.mark.parametrize(
    ("source", "wall_s"),
    [("while True: pass", 0.3), ("import os\nos._exit(5)", 10), ("call_tool('slow', delay_s=60, tag=1)", 2.5)],
)
def test_a_run_its_host_ended_ends_that_way_again(ledger: Ledger, source: str, wall_s: float) -> None:
    tools_for(ledger)
    limits = Limits(wall_s=wall_s)
    with SyncRuntime(ledger.registry, record=ledger.log(), pool=POOL, limits=limits) as runtime:
        outcome = runtime.execute_code(source).outcome
    run = ledger.the_run()
    done = replayed(run)
    assert done.result is not None
    assert done.result.outcome is outcome


def test_a_run_whose_host_was_killed_replays_as_far_as_it_got(recorded: Ledger, runtime: ReplayRuntime) -> None:
    run = pinned(recorded)
    calls = (*run.calls[:2], with_fields(run.calls[2], status="unfinished"))
    done = again(runtime, with_fields(run, calls=calls, end={}, ended_ns=None))

    assert done.ok
    assert done.answered == 2
    assert "the record ends here: call 3 was under way" in done.stopped


def test_a_run_without_an_end_says_that_there_is_none_to_compare(recorded: Ledger, runtime: ReplayRuntime) -> None:
    run = with_fields(pinned(recorded), end={}, ended_ns=None)
    done = again(runtime, run)

    assert done.ok
    assert done.answered == done.recorded == 4
    assert done.stopped.startswith("no end is recorded to compare")
    assert again(runtime, pinned(recorded)).stopped == ""


def test_a_call_after_the_last_one_recorded_of_a_killed_run_ends_the_replay(
    recorded: Ledger, runtime: ReplayRuntime
) -> None:
    run = pinned(recorded)
    done = again(runtime, with_fields(run, calls=run.calls[:2], end={}, ended_ns=None))

    assert done.ok, done.divergence
    assert done.answered == 2
    assert "the record ends here: call 3 was not made" in done.stopped


def test_a_killed_run_whose_recorded_calls_are_not_made_differs(recorded: Ledger, runtime: ReplayRuntime) -> None:
    run = with_fields(pinned(recorded), end={}, ended_ns=None)
    found = again(runtime, run, source="x = 1").divergence

    assert found is not None
    assert (found.kind, found.index) == ("missing_call", 1)


@pytest.mark.parametrize(
    ("source", "got"),
    [
        ("x = 1\ny = nope\n", {"type": "NameError", "message": "name 'nope' is not defined", "line": 2}),
        ("x = 1\ny = (\n", {"type": "SyntaxError", "message": "'(' was never closed", "line": 2}),
    ],
)
def test_a_script_that_fails_before_a_call_is_reported_with_its_own_error(
    recorded: Ledger, runtime: ReplayRuntime, source: str, got: dict[str, Any]
) -> None:
    found = again(runtime, pinned(recorded), source=source + PINNED).divergence

    assert found is not None
    assert (found.kind, found.index, found.line, found.got) == ("missing_call", 1, 2, got)
    assert f"it fails with {got['type']}: {got['message']} (line 2)" in found.message
    assert found.source_line == PINNED.split("\n")[1]


def test_what_a_script_failed_with_fits_into_the_line_that_says_so(recorded: Ledger, runtime: ReplayRuntime) -> None:
    found = again(runtime, pinned(recorded), source="raise ValueError('two\\nlines ' * 1000)\n" + PINNED).divergence

    assert found is not None
    assert "it fails with ValueError: two\\nlines two" in found.message
    assert "\n" not in found.message
    assert len(found.message) < 400


@pytest.mark.parametrize(("keep", "why"), [("digest", "digest"), ("omit", "omit")])
def test_an_answer_that_was_not_recorded_cannot_be_given(ledger: Ledger, keep: Any, why: str) -> None:
    settings = {"tools": {"search": ToolContent(results=keep)}}
    run = recorded_run(ledger, "set_result(call_tool('search', query='x'))", settings=settings)
    with opened(run) as runtime:
        found = again(runtime, run).divergence
        given = again(runtime, run, answers={1: ToolResult.of([{"title": "x", "rank": 10}])})

    assert found is not None
    assert (found.kind, found.index) == ("no_answer", 1)
    assert why in found.message
    assert given.ok


def test_arguments_known_by_digest_are_still_compared(ledger: Ledger) -> None:
    settings = {"tools": {"search": ToolContent(args="digest")}}
    run = recorded_run(ledger, "set_result(call_tool('search', query='x'))", settings=settings)
    with opened(run) as runtime:
        assert again(runtime, run).ok
        found = again(runtime, run, source="set_result(call_tool('search', query='y'))").divergence

    assert found is not None
    assert (found.kind, found.index) == ("call", 1)


def test_a_run_with_redacted_secrets_replays_on_what_is_recorded(ledger: Ledger) -> None:
    secret = "s3cr3t-thing"
    script = f"x = call_tool('search', query='{secret}')\nset_result([x, call_tool('search', query=x[0]['title'])])"
    assert "had secrets taken out" in replayed(recorded_run(ledger, script, secrets=[secret])).notes[0]


def test_what_was_too_large_to_record_has_to_be_given(ledger: Ledger) -> None:
    settings = {"source_bytes": 100, "value_bytes": 100, "file_bytes": 5}
    script = "rows = [row for row in open('big.csv')]\nset_result([len(rows), len(names)])" + " # " + "x" * 200
    given: Mapping[str, Any] = {
        "source": script,
        "inputs": {"names": ["n" * 200]},
        "files": [("big.csv", b"a\nb\nc\n")],
    }
    with SyncRuntime(ledger.registry, record=ledger.log(settings=settings), pool=POOL) as runtime:
        assert runtime.execute_code(script, inputs=given["inputs"], files=given["files"]).ok
    run = ledger.the_run()
    with opened(run) as runtime:
        for missing, flag in (("source", "--source"), ("inputs", "--input"), ("files", "--file")):
            with pytest.raises(UsageError, match=flag):
                again(runtime, run, **{name: value for name, value in given.items() if name != missing})
        assert again(runtime, run, **given).ok


def test_what_is_no_script_cannot_be_replayed(ledger: Ledger) -> None:
    async def work(recorder: Any) -> None:
        async with recorder.observe(RunContext()):
            pass

    with ledger.opened() as recorder:
        anyio.run(work, recorder)

    class Nothing:
        async def execute_code(self, *args: Any, **options: Any) -> Any:
            raise AssertionError("nothing is run")

    with pytest.raises(UsageError, match="ran no script"):
        anyio.run(partial(replay, Nothing(), ledger.the_run()))


def test_a_replay_does_not_write_to_the_log(recorded: Ledger, runtime: ReplayRuntime) -> None:
    before = len(recorded.found())
    again(runtime, pinned(recorded))

    assert len(recorded.found()) == before
    assert recorded.fields(records.RUN_STARTED)[0]["id"] == "pinned"


def test_randomness_of_every_kind_is_that_of_the_record(ledger: Ledger) -> None:
    """uuid, secrets, os.urandom, os.getrandom, tempfile, unseeded generators and forked children draw from the seed."""
    script = """
import os, random, secrets, tempfile, uuid
set_result([str(uuid.uuid4()), str(uuid.uuid1()), secrets.token_hex(8), os.urandom(4).hex(), random.Random().random(),
            tempfile.mkdtemp(), random.random(), os.getrandom(4).hex()])
def child(draw):
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, draw().encode())
        os._exit(0)
    os.wait()
    return os.read(read, 99).decode()
drawn = [child(lambda: repr([random.random(), os.urandom(4), uuid.uuid4().hex])) for _ in range(2)]
assert drawn[0] != drawn[1] != repr([random.random(), os.urandom(4), uuid.uuid4().hex])
print(drawn)
"""
    run = recorded_run(ledger, script)
    assert run.outcome == "ok", run.end
    assert replayed(run).notes == ()


UNREPEATABLE = {
    "open('/dev/urandom', 'rb').read(4)": "/dev/urandom",
    "import ssl; ssl.RAND_bytes(4)": "ssl",
    "import sqlite3\nsqlite3.connect(':memory:').execute('select RANDOM()').fetchone()": "SQLite",
    "import subprocess": "programs",
    "import random; random.random()": None,
}


def test_what_a_script_draws_that_no_replay_repeats_is_named(recorded: Ledger, runtime: ReplayRuntime) -> None:
    run = pinned(recorded)
    for source, name in UNREPEATABLE.items():
        notes = " ".join(again(runtime, run, source=f"try:\n    {source!r}\nfinally:\n    pass").notes)
        assert (name is None) == ("does not repeat" not in notes)
        assert name is None or name in notes


def test_what_was_not_compared_is_said(ledger: Ledger) -> None:
    """Output that was cut or is too large, omitted arguments, results too large with a secret, the order of streams."""
    secret = "hunter22-hunter22"
    script = f"""
import sys
call_tool('search', query='a')
call_tool('search', query='b')
print('x' * 2000)
print('y', file=sys.stderr)
set_result(['{secret}', 'z' * 70_000])
"""
    settings = {"tools": {"search": ToolContent(args="omit")}, "logs_bytes": 1000}
    with SyncRuntime(ledger.registry, record=ledger.log(settings=settings, secrets=[secret]), pool=POOL) as runtime:
        assert runtime.execute_code(script).ok
        assert runtime.execute_code("import sys\nprint('x' * 100_000); print(1, file=sys.stderr)", limits=SHORT).ok
    second, first = runs_of(ledger)[::-1]
    with opened(first) as replaying:
        assert "result" not in " ".join(again(replaying, first, source=script, secrets=[secret]).not_compared)
        done = again(replaying, first, source=script)
        assert done.ok, done.divergence
        left_out = " ".join(done.not_compared)
        for words in ("arguments of search (not recorded, as configured)", "output (too large", "result (secrets were"):
            assert words in left_out, left_out
    with opened(second) as replaying:
        left_out = " ".join(again(replaying, second).not_compared)
        assert "the middle of the output" in left_out
        assert "in which order" in left_out


SHORT = Limits(output_bytes=600)


def test_secrets_make_no_difference_and_are_in_none_that_is_shown(ledger: Ledger) -> None:
    secret, script = (
        "hunter22-hunter22",
        "x = call_tool('search', query=key)\nprint(key)\nset_result({'k': key, 'n': [key + '!']})",
    )
    with SyncRuntime(ledger.registry, record=ledger.log(secrets=[secret]), pool=POOL) as runtime:
        assert runtime.execute_code(script, inputs={"key": secret}).ok
        assert runtime.execute_code(f"raise ValueError('{secret}')").error is not None
    fails, run = runs_of(ledger)[::-1]
    with opened(run) as replaying:
        for options in ({}, {"inputs": {"key": secret}}, {"inputs": {"key": secret}, "secrets": [secret]}):
            done = again(replaying, run, **options)
            assert done.ok, done.divergence
        assert again(replaying, fails, source=f"raise ValueError('{secret}')").ok
        changes = {"query=key": "query=key, limit=3", "print(key)": "print(key); print(1)", "'n'": "'m'", "'k'": "key"}
        for old, new in changes.items():
            done = again(replaying, run, source=script.replace(old, new), inputs={"key": secret})
            assert done.divergence is not None, new
            assert secret not in str(done.to_dict()), new
