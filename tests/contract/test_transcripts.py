"""Bytes recorded on a bridge of one backend are the same when replayed to a guest of another backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolcell import Limits, Outcome, PoolConfig, Runtime, ToolRegistry, UsageError
from toolcell.sandbox.backend import Backend
from toolcell.sandbox.process.backend import ProcessBackend
from toolcell.testing import Die, FakeBackend, Hang, ScriptedCall, Step, Transcript, record, replay_transcript
from toolcell_bridge.wire.messages import Log, Result

pytestmark = pytest.mark.anyio

SCRIPTS = {
    "a result": "set_result({'rows': [1, 2.5, None, 'é', b'x'], 'sum': sum(rows)})",
    "calls": "for i in range(5): print(call_tool('echo', q=i))\ncall_tools_parallel([('echo', {'q': i}) for i in range(40)])",
    "calls from tasks": "import asyncio\nset_result(await asyncio.gather(*(call_tool_async('echo', q=i) for i in range(5))))",
    "failing calls": "try: call_tool('fail', text='no')\nexcept ToolError as e: set_result(str(e))\ncall_tool('fail', text='again')",
    "an error": "def f(n):\n    return f(n - 1) if n else 1 / 0\nf(3)",
    "no Python": "x = (",
    "an exit": "import sys\nprint('out')\nprint('err', file=sys.stderr)\nsys.exit(3)",
    "files": "data = open('in/numbers.csv').read()\nopen('out.txt', 'w').write(data * 1000)\nset_result(len(data), files=['out.txt', 'missing'])",
    "large values": "set_result(call_tool('echo', q='x' * 700_000))",
    "randomness and time": "import random, time, datetime\nset_result([random.random(), time.time(), str(datetime.datetime.now())])",
    "progress and logs": "for i in range(200):\n    progress({'at': i})\n    print('-' * i)",
}


def registry() -> ToolRegistry:
    registry = ToolRegistry()

    @registry.tool
    async def echo(q: Any) -> Any:
        """Return the argument unchanged."""
        return q

    @registry.tool
    async def fail(text: str) -> str:
        """Fail with the words that were given."""
        raise RuntimeError(text)

    return registry


async def recorded(backend: Backend, source: str) -> Transcript:
    recorder = record(backend)
    async with Runtime(registry(), backend=recorder, pool=PoolConfig(warm=0), allow_unisolated=True) as runtime:
        await runtime.execute_code(
            source, inputs={"rows": [1, 2, 3]}, files=[("in/numbers.csv", "1,2,3\n")], seed=7, clock=1_700_000_000.0
        )
    (transcript,) = recorder.transcripts
    return transcript


async def assert_replays(transcript: Transcript, backend: Backend) -> None:
    await backend.open()
    try:
        replayed = await replay_transcript(transcript, backend)
    finally:
        await backend.close()
    assert replayed.same, replayed.difference
    assert replayed.got
    assert transcript.hello is not None
    assert replayed.hello is not None
    assert (replayed.hello.version, replayed.hello.guest) == (transcript.hello.version, transcript.hello.guest)


@pytest.mark.isolation
@pytest.mark.parametrize("kind", SCRIPTS)
async def test_what_the_process_backend_recorded_replays_against_a_guest_without_isolation(kind: str) -> None:
    transcript = await recorded(ProcessBackend(), SCRIPTS[kind])

    await assert_replays(transcript, FakeBackend())
    assert transcript.hello is not None
    assert "seccomp" in transcript.hello.layers


@pytest.mark.isolation
async def test_what_the_fake_recorded_replays_against_the_process_backend() -> None:
    for kind in ("calls", "an error", "files"):
        await assert_replays(await recorded(FakeBackend(), SCRIPTS[kind]), ProcessBackend())


async def test_the_first_different_message_of_a_guest_is_described() -> None:
    transcript = await recorded(FakeBackend([Log(1, "a\n"), ScriptedCall("echo", {"q": 1}), Result(1, [])]), "")
    other = FakeBackend([Log(1, "a\n"), ScriptedCall("echo", {"q": 2}), Result(1, [])])
    await other.open()

    replayed = await replay_transcript(transcript, other)

    assert not replayed.same
    assert replayed.difference.startswith("message 2 after Hello: expected CallTool(id=1")
    assert "{'q': 2}" in replayed.difference


async def test_missing_or_extra_messages_of_a_guest_are_described() -> None:
    transcript = await recorded(FakeBackend([Log(1, "a\n"), Result(1, [])]), "")
    cases: list[tuple[list[Step], str]] = [
        ([Log(1, "a\n"), Die()], "3 messages after Hello expected, got 1"),
        ([Log(1, "a\n"), Result(1, []), b"\0\0"], "got 'frame of 0 bytes"),
    ]
    for steps, problem in cases:
        other = FakeBackend(steps)
        await other.open()
        replayed = await replay_transcript(transcript, other)
        assert not replayed.same
        assert problem in replayed.difference


async def test_a_silent_guest_does_not_block_the_replay() -> None:
    transcript = await recorded(FakeBackend([Log(1, "a\n"), Result(1, [])]), "")
    other = FakeBackend([Log(1, "a\n"), Hang()])
    await other.open()

    replayed = await replay_transcript(transcript, other, silence_s=0.05)

    assert replayed.difference == "3 messages after Hello expected, got 1"


async def test_a_transcript_is_the_same_after_save_and_load(tmp_path: Path) -> None:
    transcript = await recorded(FakeBackend([Log(1, "é\n"), Result(b"\xff", [])]), "print()")
    transcript.save(tmp_path / "transcript.json")

    assert Transcript.load(tmp_path / "transcript.json") == transcript
    (tmp_path / "broken.json").write_text('{"backend": "x"}')
    with pytest.raises(UsageError, match=r"broken\.json"):
        Transcript.load(tmp_path / "broken.json")


async def test_a_run_that_was_killed_is_not_replayed() -> None:
    transcript = await recorded(FakeBackend([Log(1, "a\n"), Die()]), "")

    assert not transcript.is_complete
    with pytest.raises(UsageError, match="Done"):
        await replay_transcript(transcript, FakeBackend([]))


@pytest.mark.isolation
async def test_recording_changes_nothing_about_a_run() -> None:
    recorder = record(ProcessBackend())
    limits = Limits(wall_s=10)
    async with Runtime(registry(), backend=recorder, limits=limits, pool=PoolConfig(warm=1)) as runtime:
        fine = await runtime.execute_code("import os\nos.write(2, b'raw')\nset_result(call_tool('echo', q=1))")
        dead = await runtime.execute_code("import os\nos._exit(3)")

    assert (fine.outcome, fine.value, fine.logs.stderr) == (Outcome.OK, 1, "raw")
    assert fine.isolation.backend == "process"
    assert "landlock" in fine.isolation.layers
    assert (dead.outcome, dead.error and dead.error.exit_code) == (Outcome.KILLED, 3)
    assert len(recorder.transcripts) == 2
