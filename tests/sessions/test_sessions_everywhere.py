"""What holds for a run holds for each script of a session: labels, dry runs, secrets and the audit log."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rows import each_row
from toolcell import Limits, Outcome, Policy, PoolConfig, RunContext, SyncRuntime, ToolRegistry
from toolcell.audit.databases import database_of
from toolcell.audit.store import events
from toolcell.errors import SessionError, UsageError
from toolcell.flows import Flow
from toolcell.run.outcome import INTERRUPTED, Aborted, Failed, ProtocolViolation, can_go_on_after
from toolcell.sandbox.backend import LimitExceeded, Sample
from toolcell.sandbox.process.contained_backend import ContainedSandbox
from toolcell.sessions.meter import since

WARM = PoolConfig(warm=1)


def registry(made: list[Any]) -> ToolRegistry:
    found = ToolRegistry()

    @found.tool(reads="private")
    async def mail() -> str:
        """Read the private mail of the user."""
        return "hello"

    @found.tool(sends="public")
    async def post(text: str) -> str:
        """Send a text to the public web."""
        made.append(text)
        return "sent"

    return found


@pytest.mark.isolation
def test_what_one_script_has_read_binds_every_later_script_fork_and_rebuilt_state() -> None:
    made: list[Any] = []
    policy = Policy(flows=[Flow("private", "public", "deny")])
    with SyncRuntime(registry(made), policy=policy, pool=WARM) as runtime, runtime.session() as session:
        assert session.execute_code("tools.post('before')").ok
        assert session.execute_code("m = tools.mail()").ok
        refused = [session.execute_code("tools.post(m)")]
        session.put_down()
        refused.append(session.execute_code("tools.post(m)"))
        with session.fork() as copy:
            refused.append(copy.execute_code("tools.post(m)"))
        session.reset()
        assert session.execute_code("tools.post('nothing is left of it')").ok

    assert [each.outcome for each in refused] == [Outcome.ERROR] * 3
    assert all(each.error is not None and 'has read "private"' in each.error.message for each in refused)
    assert made == ["before", "nothing is left of it"]


@pytest.mark.isolation
def test_each_script_is_a_run_in_the_audit_log_with_the_name_of_its_session(tmp_path: Path) -> None:
    made: list[Any] = []
    with SyncRuntime(registry(made), record=tmp_path / "log", pool=WARM) as runtime:
        with runtime.session("customer-42") as session:
            first = session.execute_code("x = tools.post('a')")
            second = session.execute_code("x", context=RunContext(user_id="u1"))
        assert runtime.execute_code("1").session is None

    with closing(database_of(tmp_path / "log").open_read_only()) as db:
        who = [event.fields["who"] for event in events(db, "kind = 'run_started'")]
    assert [each.get("session", "") for each in who] == ["customer-42", "customer-42", ""]
    assert [each["run"] for each in who[:2]] == [first.run_id, second.run_id]
    assert who[1]["user"] == "u1" and first.run_id != second.run_id


samples = st.builds(
    Sample,
    st.floats(0, 100),
    st.integers(0, 2**40),
    st.integers(1, 99),
    st.integers(1, 99),
    st.integers(0, 9),
    st.integers(0, 9),
)


@given(samples, samples)
def test_a_script_is_never_charged_for_what_was_used_before_it(before: Sample, now: Sample) -> None:
    used = since(before, now)

    assert used.cpu_s == max(0.0, now.cpu_s - before.cpu_s) and used.memory_kills <= now.memory_kills
    assert used.peak_processes <= max(now.peak_processes, now.processes)
    assert since(Sample(peak_processes=0), now) == now
    same = since(now, now)
    assert (same.cpu_s, same.memory_kills, same.refused_processes, same.peak_processes) == (0, 0, 0, now.processes)


@each_row("outcome", list(Outcome))
def test_a_session_goes_on_after_a_limit_in_time_or_output_and_after_nothing_else_of_the_host(outcome: Outcome) -> None:
    exceeded = LimitExceeded(outcome, "wall_s", 1.0, 2.0)

    assert can_go_on_after(exceeded) is (outcome in INTERRUPTED)
    assert can_go_on_after(Aborted("cancelled", outcome))
    assert not can_go_on_after(ProtocolViolation("x")) and not can_go_on_after(Failed(ValueError()))


@pytest.mark.contained
def test_a_session_of_the_container_profile_is_interrupted_and_ends_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ContainedSandbox, "interrupted_s", 60.0)  # for a busy machine
    with SyncRuntime(policy=Policy(profile="container"), pool=WARM) as runtime, runtime.session() as session:
        assert session.execute_code("x = 41").ok
        late = session.execute_code("while True: x += 0", limits=Limits(wall_s=0.2))
        left = session.execute_code("import os, time\nif os.fork() == 0: time.sleep(60)")
        after = session.execute_code("x + 1")

    assert late.outcome is Outcome.TIMEOUT and late.session is not None and not late.session.lost
    assert left.session is not None and left.session.ended == ("1 process",)
    assert after.value == 42


@pytest.mark.isolation
def test_what_a_session_has_is_in_no_other_session_no_run_and_gone_after_a_reset() -> None:
    look = "import os, sys\n[os.listdir('/tmp'), os.listdir('.'), 'secret' in globals(), hasattr(os, 'left')]"
    with SyncRuntime(pool=WARM) as runtime, runtime.session() as session, runtime.session() as other:
        source = "import os\nsecret = os.left = 1\nopen('/tmp/x', 'w').write('x'); open('y', 'w').write('y')"
        assert session.execute_code(source).ok
        assert session.execute_code(look).value == [["x"], ["y"], True, True]
        assert other.execute_code(look).value == [[], [], False, False]
        assert runtime.execute_code(look).value == [[], [], False, False]
        session.reset()
        assert session.execute_code(look).value == [[], [], False, False]


STEALS = """
import time
from toolcell_bridge.guest.channel import Channel
Channel.next_request = lambda self: time.sleep(10**6)  # as if another thread took each request
"""


@pytest.mark.isolation
def test_a_script_that_takes_what_is_sent_to_the_next_costs_two_timeouts_and_then_the_session_is_refused() -> None:
    with SyncRuntime(pool=WARM, limits=Limits(wall_s=0.5)) as runtime, runtime.session() as session:
        assert session.execute_code(STEALS, limits=Limits(wall_s=60)).ok
        late = session.execute_code("1")
        assert late.outcome is Outcome.TIMEOUT and late.session is not None and late.session.lost
        for _ in range(2):
            with pytest.raises(
                SessionError, match=r"an empty script did not end \(timeout\): .* reset\(\) begins again"
            ):
                session.execute_code("1")
        runs = session.session.used_calls, session.session.is_live
        session.reset()
        assert session.execute_code("2").value == 2

    assert runs == (0, False)


@pytest.mark.isolation
def test_a_state_lost_to_a_script_that_could_not_be_interrupted_is_still_rebuilt_each_time() -> None:
    deaf = "while True:\n  try: sum(range(10**10))\n  except BaseException: pass"
    with SyncRuntime(pool=WARM) as runtime, runtime.session() as session:
        session.execute_code("x = 41")
        for _ in range(2):
            assert session.execute_code(deaf, limits=Limits(wall_s=0.2)).outcome is Outcome.TIMEOUT
            assert session.execute_code("x + 1").value == 42


@pytest.mark.isolation
def test_a_session_or_stream_of_a_closed_sync_runtime_says_so_and_closes() -> None:
    with SyncRuntime(pool=WARM) as runtime:
        session = runtime.session().__enter__()
        assert session.execute_code("x = 1").ok
        events = runtime.stream("print(1)\nimport time\ntime.sleep(600)")
        next(events)
    uses = [
        lambda: session.execute_code("x"), lambda: session.put_files([]), session.files, session.interrupt,
        lambda: session.read_file("a"), session.reset, session.pause, session.put_down, session.fork, session.abandon,
        lambda: session.stream("x"), lambda: session.resume(""), lambda: next(events),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(UsageError, match="belongs to a SyncRuntime that is closed"):
            use()
    session.close()
    events.close()
