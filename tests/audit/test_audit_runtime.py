"""A runtime with an audit log records every run, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import pytest

from audit.audit_writers import KEY
from audit.ledger import RUN_KINDS, Ledger
from toolcell import Limits, Outcome, Policy, PoolConfig, Runtime, SandboxUnavailable, Secrets, SyncRuntime
from toolcell.audit import keys, records
from toolcell.audit.config import RecordConfig
from toolcell.audit.log import AuditLog
from toolcell.audit.verification import verify
from toolcell.errors import AuditError
from toolcell.sandbox.backend import Backend
from toolcell.tools import Approve, Feature, RunContext

pytestmark = [pytest.mark.quick, pytest.mark.isolation]

POOL = PoolConfig(warm=1)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ledger, SyncRuntime]]:
    """One runtime with a log, for the tests that look at their own run in it."""
    home = tmp_path_factory.mktemp("shared")
    ledger = Ledger(home / "log")

    @ledger.registry.tool
    async def wait(seconds: float) -> float:
        """Wait for so many seconds and return them."""
        await anyio.sleep(seconds)
        return seconds

    log = ledger.log(heads=home / "heads", secrets=["s3cr3t-of-everybody"])
    with SyncRuntime(ledger.registry, record=log, pool=POOL, limits=Limits(wall_s=10)) as runtime:
        yield ledger, runtime


@pytest.mark.conforms("Q-b26", "Q30", "T5")
def test_everything_about_a_run_is_recorded(shared: tuple[Ledger, SyncRuntime]) -> None:
    ledger, runtime = shared
    result = runtime.execute_code(
        "rows = call_tool('search', {'query': q})\nprint('found', len(rows))\nopen('out.txt', 'w').write('x')\n"
        "set_result(rows, files=['out.txt'])",
        inputs={"q": "needle"},
        files=[("in.csv", b"a,b")],
        context=RunContext(user_id="ada", thread_id="t1"),
    )
    run = ledger.the_run(result.run_id)

    assert result.ok, result.error
    assert run.id == result.run_id
    assert run.outcome == "ok"
    assert run.source is not None and run.source.startswith("rows = call_tool")
    assert run.start["inputs"] == {"q": "needle"}
    assert run.start["files"][0][0] == "in.csv" and run.start["files"][0][3] == b"a,b"
    assert run.who == {"run": run.id, "user": "ada", "thread": "t1"}
    assert run.limits["wall_s"] == 10
    assert run.policy["hash_seed"] is not None and run.policy["seed"] is not None and run.policy["clock"] is not None
    assert run.isolation["backend"] == "process"
    assert run.isolation["layers"] == dict(result.isolation.layers)
    assert [name for name, *_ in run.definitions] == ledger.registry.names()
    (call,) = run.calls
    assert (call.tool, call.origin, call.line, call.args) == ("search", "code", 1, {"query": "needle"})
    assert call.value == result.value == run.end["value"]
    assert run.end["logs"] == [["stdout", "found 1\n"]]
    assert run.end["files"] == [["out.txt", "text/plain", 1, result.files[0].sha256, None]]
    assert run.end["usage"]["wall_s"] == result.usage.wall_s
    assert run.end["calls"] == [1, 0]


OUTCOMES = {
    "1/0": "error",
    "def": "error",
    "import time\ntime.sleep(60)": "timeout",
    "import os\nos._exit(5)": "killed",
    "import sys\nsys.exit(3)": "error",
    "set_result(1)": "ok",
}


@pytest.mark.conforms("Q30")
@pytest.mark.parametrize(("source", "outcome"), OUTCOMES.items())
def test_every_script_is_auditable_whatever_becomes_of_it(
    shared: tuple[Ledger, SyncRuntime], source: str, outcome: str
) -> None:
    ledger, runtime = shared
    result = runtime.execute_code(source, limits=Limits(wall_s=1 if outcome == "timeout" else 10))
    run = ledger.the_run(result.run_id)

    assert (run.outcome, run.source) == (outcome, source)
    assert outcome == str(result.outcome)
    if result.error is not None:
        assert run.end["error"]["type"] == result.error.type


def test_a_call_under_way_when_its_run_ends_has_an_end_too(shared: tuple[Ledger, SyncRuntime]) -> None:
    ledger, runtime = shared
    result = runtime.execute_code("call_tool('wait', seconds=60)", limits=Limits(wall_s=2.5))
    (call,) = ledger.the_run(result.run_id).calls

    assert result.outcome is Outcome.TIMEOUT
    assert call.status == "cancelled"
    assert call.end_extra["unanswered"] is True
    # It took as long as it was waited for, not the no time at all in which it was answered.
    assert call.duration_s > 0
    assert 0 < result.calls[0].duration_s <= result.usage.wall_s


def test_a_call_a_script_takes_back_is_recorded_as_such(shared: tuple[Ledger, SyncRuntime]) -> None:
    ledger, runtime = shared
    result = runtime.execute_code(
        "import asyncio\ntry:\n    await asyncio.wait_for(call_tool_async('wait', seconds=60), 0.1)\n"
        "except TimeoutError:\n    set_result(call_tool('search', query='after'))"
    )
    taken_back, after = ledger.the_run(result.run_id).calls

    assert result.ok, result.error
    assert taken_back.end_extra["unanswered"] is True
    assert after.status == "ok"


def test_calls_at_the_same_time_are_none_anothers_parent(shared: tuple[Ledger, SyncRuntime]) -> None:
    ledger, runtime = shared
    result = runtime.execute_code("call_tools_parallel([('wait', {'seconds': 0.02})] * 8)")
    calls = ledger.the_run(result.run_id).calls

    assert [call.parent for call in calls] == [None] * 8
    assert [call.line for call in calls] == [1] * 8


def test_secrets_in_a_script_and_in_what_it_prints_are_nowhere_on_disk(ledger: Ledger) -> None:
    """What the run needed to go on, with them, goes when it ends."""
    secret, own = "s3cr3t-of-everybody", "s3cr3t-of-this-run"
    with SyncRuntime(ledger.registry, record=ledger.log(secrets=[secret]), pool=POOL) as runtime:
        for hidden in (secret, own):
            runtime.execute_code(
                f"x = {hidden!r}\nprint(x)\nimport sys\nprint(x[:9], end='')\nprint(x[9:], file=sys.stdout)\n"
                "try:\n    call_tool('crash', text=x)\nexcept ToolError: pass\n"
                "set_result({x: [x]})\nraise ValueError(x)",
                inputs={"y": hidden},
                context=RunContext(secrets=Secrets({"own": own})),
            )
    disk = ledger.bytes_on_disk()

    assert secret.encode() not in disk
    assert own.encode() not in disk


def test_a_record_that_keeps_nothing_to_go_on_from_has_no_exact_value_on_disk_while_a_run_waits(ledger: Ledger) -> None:
    secret = "s3cr3t-of-everybody"

    @ledger.registry.tool(requires_approval=True)
    def pay(to: str) -> str:
        """Pay somebody who is named."""
        return "paid"

    log = ledger.log(secrets=[secret], settings={"continue_bytes": 0})
    with SyncRuntime(ledger.registry, record=log, pool=POOL) as runtime:
        waits = runtime.execute_code(f"set_result(call_tool('pay', to={secret!r}))", on_approval="suspend")
        assert waits.outcome is Outcome.SUSPENDED and waits.suspension is not None
        assert secret.encode() not in ledger.bytes_on_disk()
        (call,) = waits.suspension.calls
        assert runtime.resume(waits.suspension.to_json(), {call.id: Approve()}).value == "paid"


REFUSED = "import os\ncall_tool('search', nope=1)"


@pytest.mark.conforms("Q30")
@pytest.mark.parametrize("route", ["script", "session", "dry run", "map"])
def test_a_script_that_is_refused_before_it_runs_is_recorded_and_its_end_is_told(ledger: Ledger, route: str) -> None:
    refused: list[dict[str, Any]] = [{"lint": "strict"}]
    refused += [{"check_types": True}] * (find_spec("ty") is not None)  # `make test` runs without it
    refused += [{"preflight": True}] * (route != "session")
    told: list[str] = []
    with SyncRuntime(ledger.registry, record=ledger.log()) as runtime, runtime.session() as session:
        runtime.runtime.on_end = lambda result: told.append(result.run_id)
        for options in refused:
            if route == "map":
                (item,) = runtime.map(REFUSED, [{}], options=options)
                result = item.result
            else:
                run = session.execute_code if route == "session" else runtime.execute_code
                result = run(REFUSED, dry_run=route == "dry run", **options)
            assert result is not None and result.outcome is Outcome.DENIED, result.error
            assert told.pop() == result.run_id
            found = ledger.the_run(result.run_id)
            assert (found.outcome, found.source) == ("denied", REFUSED)
            assert found.end["error"]["message"] == result.error.message


def test_a_script_that_never_ran_is_recorded_with_the_reason(ledger: Ledger) -> None:
    class Nothing(Backend):
        name = "nothing"
        isolates = True

        async def open(self) -> None: ...

        async def start(self, limits: Limits) -> Any:
            raise SandboxUnavailable("no sandbox here")

        async def close(self) -> None: ...

    async def work() -> None:
        backend: Backend = Nothing()
        async with Runtime(ledger.registry, backend=backend, record=ledger.log(), pool=PoolConfig(warm=0)) as runtime:
            with pytest.raises(SandboxUnavailable):
                await runtime.execute_code("set_result(1)")

    anyio.run(work)
    run = ledger.the_run()
    assert run.outcome == "unavailable"
    assert run.end["error"] == {"type": "SandboxUnavailable", "message": "no sandbox here"}


def test_a_run_that_its_caller_cancels_is_recorded_as_cancelled(ledger: Ledger) -> None:
    async def work() -> None:
        async with Runtime(ledger.registry, record=ledger.log(), pool=POOL) as runtime:
            started = anyio.Event()
            async with anyio.create_task_group() as tasks:

                async def run() -> None:
                    await runtime.execute_code(
                        "print('started')\nimport time\ntime.sleep(60)", on_log=lambda *_: started.set()
                    )

                tasks.start_soon(run)
                await started.wait()
                tasks.cancel_scope.cancel()

    anyio.run(work)
    assert ledger.the_run().outcome == "cancelled"
    assert ledger.kinds() == [records.RUN_STARTED, records.RUN_ENDED]


def test_a_call_that_cannot_be_recorded_is_not_made_and_ends_the_run(ledger: Ledger) -> None:
    made: list[str] = []

    @ledger.registry.tool
    async def act(name: str) -> str:
        """Do something that can be seen afterwards."""
        made.append(name)
        if name == "first":
            ledger.path.rename(ledger.path.with_name("moved"))
        return name

    with SyncRuntime(ledger.registry, record=ledger.log(), pool=POOL) as runtime:
        with pytest.raises(AuditError, match="it was removed"):
            runtime.execute_code("for name in ('first', 'second', 'third'):\n    call_tool('act', name=name)")
        ledger.path.with_name("moved").rename(ledger.path)
        assert runtime.execute_code("set_result(1)").ok

    assert made == ["first"]
    assert [line["outcome"] for line in ledger.fields(records.RUN_ENDED)] == ["cancelled", "ok"]
    assert ledger.verify().ok


def test_a_path_is_enough_to_have_a_record(tmp_path: Path) -> None:
    with SyncRuntime(record=tmp_path / "runs.db", pool=POOL) as runtime:
        runtime.execute_code("set_result(1)")
    report = verify(tmp_path / "runs.db", [keys.load_signer(keys.default_key_path())])

    assert report.ok
    assert report.chains[0].is_closed
    assert report.notes == []


@pytest.mark.slow
def test_a_log_that_is_open_already_stays_open(ledger: Ledger) -> None:
    with ledger.log() as log:
        for _ in range(2):
            with SyncRuntime(record=log, pool=POOL) as runtime:
                runtime.execute_code("set_result(1)")
        assert log.is_open

    assert ledger.kinds() == [records.RUN_STARTED, records.RUN_ENDED] * 2


@pytest.mark.slow
def test_without_a_log_nothing_of_it_is_even_imported() -> None:
    code = (
        "import sys\nfrom toolcell import SyncRuntime\n"
        "with SyncRuntime() as runtime: assert runtime.execute_code('set_result(1)').ok\n"
        "print([name for name in sys.modules if name.startswith('toolcell.audit')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_a_policys_own_seed_clock_and_hash_seed_are_kept(ledger: Ledger) -> None:
    policy = Policy(seed=5, clock=1_700_000_000.5, hash_seed=9)
    with SyncRuntime(record=ledger.log(), pool=POOL, policy=policy) as runtime:
        runtime.execute_code("set_result(1)")
    run = ledger.the_run()

    assert (run.policy["seed"], run.policy["clock"], run.policy["hash_seed"]) == (5, 1_700_000_000.5, 9)


@pytest.mark.slow
def test_runs_that_need_not_repeat_are_left_as_they_are(ledger: Ledger) -> None:
    with SyncRuntime(record=ledger.log(settings={"repeatable": False}), pool=POOL) as runtime:
        runtime.execute_code("set_result(1)")
    run = ledger.the_run()

    assert (run.policy["seed"], run.policy["clock"], run.policy["hash_seed"]) == (None, None, None)


@pytest.mark.slow
async def test_runs_at_the_same_time_keep_their_records_apart(anyio_backend: str, ledger: Ledger) -> None:
    async with (
        Runtime(ledger.registry, record=ledger.log(), pool=PoolConfig(warm=2)) as runtime,
        anyio.create_task_group() as tasks,
    ):
        for number in range(6):
            source = f"for _ in range(3): call_tool('search', query='{number}')\nset_result({number})"
            tasks.start_soon(runtime.execute_code, source)
    runs = [ledger.the_run(fields["id"]) for fields in ledger.fields(records.RUN_STARTED)]

    assert len(runs) == 6
    for run in runs:
        assert [call.args for call in run.calls] == [{"query": str(run.end["value"])}] * 3


def test_a_script_an_agent_runs_names_the_call_and_the_run_above(ledger: Ledger) -> None:
    async def work(log: AuditLog) -> None:
        from toolcell.audit.recorder import Recorder

        async with Runtime(ledger.registry, record=log, pool=POOL) as runtime:
            ledger.registry.enable_code_execution(runtime)
            async with Recorder(log).observe(RunContext(run_id="agent-7")) as context:
                code = {"code": "set_result(call_tool('search', query='x'))"}
                for call_id in ("c1", "c2"):
                    result = await ledger.registry.dispatch("execute_code", code, call_id=call_id, context=context)
                    assert not result.is_error, result.text

    with ledger.log() as log:
        anyio.run(work, log)
    above, first, second = [ledger.the_run(fields["id"]) for fields in ledger.fields(records.RUN_STARTED)]

    assert [call.tool for call in above.calls] == ["execute_code", "execute_code"]
    assert (first.who["run"], first.who["parent_call"]) == ("agent-7", "c1")
    assert (second.who["run"], second.who["parent_call"]) == ("agent-7", "c2")
    assert first.id != second.id
    assert [call.tool for call in first.calls] == ["search"]


@pytest.mark.conforms("R-b2")
def test_a_plan_is_recorded_like_a_script(ledger: Ledger) -> None:
    async def work() -> None:
        async with Runtime(ledger.registry, record=ledger.log(), pool=PoolConfig(warm=0)) as runtime:
            await runtime.execute_plan([{"tool": "search", "args": {"query": q}} for q in ("a", "b")])

    anyio.run(work)
    run = ledger.the_run()

    assert (run.kind, run.outcome) == ("plan", "ok")
    assert [(call.tool, call.origin, call.args) for call in run.calls] == [
        ("search", "plan[0]", {"query": "a"}),
        ("search", "plan[1]", {"query": "b"}),
    ]


def test_with_fsync_always_the_end_of_a_call_is_written_before_its_answer_else_with_what_follows(
    tmp_path: Path,
) -> None:
    seen: dict[str, list[int]] = {}
    for config in (RecordConfig(fsync="checkpoint"), RecordConfig(fsync="always")):
        ledger, ends = Ledger(tmp_path / config.fsync), seen.setdefault(config.fsync, [])

        class Own(Feature):
            def call_started(self, call: Any) -> None: ...

            def call_ended(self, call: Any) -> None:
                ends.append(ledger.kinds().count(records.CALL_ENDED))  # noqa: B023 - called within this round

        with SyncRuntime(ledger.registry, record=ledger.log(config=config), pool=PoolConfig(warm=0)) as runtime:
            result = runtime.execute_code(
                "for q in 'xy':\n    call_tool('search', query=q)", context=RunContext().having(Own())
            )
        assert result.ok, result.error
        assert ledger.kinds() == [RUN_KINDS[0], *RUN_KINDS[1:3] * 2, RUN_KINDS[3]]
    assert seen == {"checkpoint": [0, 1], "always": [1, 2]}


@pytest.mark.slow
def test_a_runtime_killed_at_work_leaves_a_log_that_verifies(tmp_path: Path) -> None:
    """SIGKILL from inside a tool: the call's start is there, its effect happened, and no end of anything."""
    code = f"""
import os, signal
from audit.audit_writers import KEY
from toolcell import SyncRuntime, ToolRegistry
from toolcell.audit.log import AuditLog
registry = ToolRegistry()
@registry.tool
async def die(name: str) -> str:
    "Kill the process that serves this call."
    open({str(tmp_path / "effect")!r}, "w").write(name)
    os.kill(os.getpid(), signal.SIGKILL)
    return name
with SyncRuntime(registry, record=AuditLog({str(tmp_path / "log")!r}, key=KEY)) as runtime:
    runtime.execute_code("call_tool('die', name='now')")
"""
    paths = [str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    report = verify(tmp_path / "log", [KEY])
    ledger = Ledger(tmp_path / "log")
    run = ledger.the_run()

    assert done.returncode == -9
    assert report.ok, report.findings
    assert (tmp_path / "effect").read_text() == run.calls[0].args["name"]
    assert run.outcome == run.calls[0].status == "unfinished"
    assert ledger.kinds() == RUN_KINDS[:2]


def test_a_log_can_be_set_up_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "audit.toml").write_text(
        'fsync = "never"\nkeep_s = 86400\n[tools.search]\nargs = "digest"\n[tools."mail_*"]\nresults = "omit"\n'
    )
    config = RecordConfig.from_toml(tmp_path / "audit.toml")

    assert (config.fsync, config.keep_s) == ("never", 86400)
    assert config.content_of("search").args == "digest"
    assert config.content_of("mail_send").results == "omit"
    assert config.content_of("other").args == "full"


@pytest.mark.conforms("Q-b26")
def test_each_record_is_written_before_the_next_effect(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "log")
    seen: list[list[str]] = []

    @ledger.registry.tool
    async def look() -> str:
        """See what the log holds while the tool runs."""
        seen.append(ledger.kinds())
        return "looked"

    with SyncRuntime(ledger.registry, record=ledger.log(), pool=POOL) as runtime:
        runtime.execute_code("call_tool('look')\ncall_tool('look')")
        after = ledger.kinds()

    started, ended = [records.CALL_STARTED], [records.CALL_ENDED]
    assert seen == [RUN_KINDS[:1] + started, RUN_KINDS[:1] + started + ended + started]
    assert after == RUN_KINDS[:1] + (started + ended) * 2 + [records.RUN_ENDED]


def test_a_run_whose_start_cannot_be_recorded_asks_for_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "log")
    asked: list[str] = []

    @ledger.registry.tool
    async def act(name: str) -> str:
        """Leave something behind."""
        asked.append(name)
        return name

    with SyncRuntime(ledger.registry, record=ledger.log(), pool=POOL) as runtime:
        ledger.path.rename(tmp_path / "moved")
        with pytest.raises(AuditError, match="it was removed"):
            runtime.execute_code("call_tool('act', name='unseen')")
        (tmp_path / "moved").rename(ledger.path)
        assert runtime.execute_code("call_tool('act', name='seen')").ok

    assert asked == ["seen"]
