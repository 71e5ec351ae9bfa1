"""The main claims about sessions, on public names only, so that the files behind them can move."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from passed_on.office import Office
from toolcell import (
    Flow,
    Limits,
    Outcome,
    Policy,
    PoolConfig,
    ResumeError,
    SessionError,
    SyncRuntime,
    UsageError,
)
from toolcell.control import Approve, Deny

pytestmark = [pytest.mark.quick, pytest.mark.isolation]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sessions") / "journals"


@pytest.fixture(scope="module")
def runtime(folder: Path) -> Iterator[SyncRuntime]:
    """A runtime with journals. Sessions of the tests have their own tools."""
    policy = Policy(flows=(Flow("private", "public", "deny"),))
    with SyncRuntime(pool=PoolConfig(warm=1), record=folder / "runs.db", policy=policy) as runtime:
        yield runtime


WRITE = "call_tool('write', text='a')"


def test_names_imports_and_files_stay_and_another_session_has_none_of_them(runtime: SyncRuntime) -> None:
    with runtime.session() as one, runtime.session() as other:
        one.execute_code("import math\nx = 40\nopen('f.txt', 'w').write('kept')")
        assert one.execute_code("x + int(math.sqrt(4)), open('f.txt').read()").value == [42, "kept"]
        foreign = other.execute_code("x")
        assert foreign.error is not None and foreign.error.type == "NameError"
        assert "f.txt" not in str(other.files())


def test_files_are_put_listed_and_read(runtime: SyncRuntime) -> None:
    with runtime.session() as session:
        session.put_files([("in.csv", "a,b")])
        session.execute_code("open('out.csv', 'w').write(open('in.csv').read().upper())")
        assert session.read_file("out.csv") == b"A,B"
        assert {"in.csv", "out.csv"} <= {file.name for file in session.files()}


def test_a_script_that_fails_leaves_what_python_would(runtime: SyncRuntime) -> None:
    with runtime.session() as session:
        failed = session.execute_code("x = 1\n1/0\nx = 2")
        assert failed.outcome is Outcome.ERROR
        result = session.execute_code("x")
        assert (
            result.value == 1
            and result.session is not None
            and (result.session.script, result.session.began) == (2, "live")
        )


def test_a_script_past_its_time_is_interrupted_and_the_state_is_kept(runtime: SyncRuntime) -> None:
    with runtime.session() as session:
        session.execute_code("x = 1")
        late = session.execute_code("import time\ntime.sleep(600)", limits=Limits(wall_s=0.2))
        assert late.outcome is Outcome.TIMEOUT
        assert late.session is not None and not late.session.lost
        assert session.execute_code("x").value == 1


def test_a_lost_state_is_rebuilt_without_making_a_call_again(runtime: SyncRuntime, office: Office) -> None:
    with runtime.session(tools=office.registry) as session:
        session.execute_code(f"x = {WRITE}")
        dead = session.execute_code("import ctypes\nctypes.string_at(0)")
        assert dead.outcome is Outcome.KILLED and dead.session is not None and dead.session.lost
        result = session.execute_code("x")

    assert result.value == "wrote a" and office.made == ["a"]
    assert result.session is not None and result.session.began == "journal"


def test_a_session_that_keeps_no_journal_begins_with_nothing_again(runtime: SyncRuntime) -> None:
    with runtime.session(restore="empty") as session:
        session.execute_code("x = 1")
        session.put_down()
        result = session.execute_code("'x' in globals()")
        assert result.value is False and result.session is not None and result.session.began == "empty"


def test_what_was_put_down_or_paused_comes_back(runtime: SyncRuntime, office: Office) -> None:
    with runtime.session(tools=office.registry) as session:
        session.execute_code(f"x = {WRITE}")
        assert session.pause()
        assert session.execute_code("x").value == "wrote a"
        session.put_down()
        assert session.execute_code("x").value == "wrote a"
    assert office.made == ["a"]


def test_a_fork_has_the_state_and_goes_its_own_way(runtime: SyncRuntime, office: Office) -> None:
    with runtime.session(tools=office.registry) as session:
        session.execute_code(f"x = [{WRITE}]")
        with session.fork() as fork:
            fork.execute_code("x.append(1)")
            assert fork.execute_code("x").value == ["wrote a", 1]
            assert session.execute_code("x").value == ["wrote a"]
    assert office.made == ["a"]


def test_reset_forgets_names_and_labels_but_not_what_was_used(runtime: SyncRuntime, office: Office) -> None:
    with runtime.session(tools=office.registry, tool_calls=3) as session:
        session.execute_code("x = call_tool('mail')")
        refused = session.execute_code("call_tool('post', text='x')")
        assert refused.error is not None and 'has read "private"' in refused.error.message
        session.reset()
        assert session.execute_code("'x' in globals()").value is False
        assert session.execute_code("call_tool('post', text='y')").ok
        assert session.execute_code("call_tool('post', text='z')").outcome is Outcome.CALL_LIMIT
    assert office.made == ["mail", "post y"]


def test_threads_and_processes_that_a_script_leaves_are_ended_and_named(runtime: SyncRuntime) -> None:
    with runtime.session() as session:
        source = "import threading, time\nthreading.Thread(target=time.sleep, args=(0.01,), name='quick').start()\n"
        endless = "def turn():\n    while True: time.sleep(0.001)\nthreading.Thread(target=turn, name='endless', daemon=True).start()"
        result = session.execute_code(source + endless)
        assert result.session is not None and "endless" in str(result.session.ended)
        assert session.execute_code("[t.name for t in threading.enumerate() if t.name == 'endless']").value == []


def test_a_script_that_waits_is_carried_on_denied_or_given_up(runtime: SyncRuntime, office: Office) -> None:
    with runtime.session(tools=office.registry) as session:
        session.execute_code(f"x = {WRITE}")
        for decision in (Approve(), Deny("not today")):
            waiting = session.execute_code("y = call_tool('agree')\ny", on_approval="suspend")
            assert waiting.suspension is not None and session.waiting == waiting.suspension
            with pytest.raises(SessionError, match="wait"):
                session.execute_code("1")
            result = session.resume(waiting.suspension.to_json(), {waiting.suspension.calls[0].id: decision})
            with pytest.raises(ResumeError):
                session.resume(waiting.suspension.to_json(), {waiting.suspension.calls[0].id: decision})
            assert result.ok == isinstance(decision, Approve)
        assert session.execute_code("x, y").value == ["wrote a", "agreed"]
        session.execute_code("z = call_tool('agree')", on_approval="suspend")
        session.abandon()
        assert session.execute_code("'z' in globals()").value is False
    assert office.made == ["a"]


def test_another_runtime_finds_the_sessions_of_a_folder(runtime: SyncRuntime, folder: Path, office: Office) -> None:
    with runtime.session("customer-42", tools=office.registry) as session:
        session.execute_code(f"x = {WRITE}")
    with SyncRuntime(pool=PoolConfig(warm=0), record=folder / "runs.db") as other:
        assert "customer-42" in other.kept_sessions()
        with other.session("customer-42", restore=True, tools=office.registry) as session:
            assert session.execute_code("x").value == "wrote a"
        other.forget_session("customer-42")
        with pytest.raises(UsageError), other.session("customer-42", restore=True):
            pass
    assert office.made == ["a"]


def test_wrong_names_and_closed_sessions_are_refused(runtime: SyncRuntime) -> None:
    with pytest.raises(UsageError), runtime.session("no such name!"):
        pass
    with runtime.session("taken") as session:
        with pytest.raises(UsageError), runtime.session("taken"):
            pass
        session.execute_code("1")
    with pytest.raises(SessionError, match="closed"):
        session.execute_code("1")


@pytest.mark.slow
def test_all_scripts_together_have_the_calls_and_the_time_of_the_session(runtime: SyncRuntime, office: Office) -> None:
    with runtime.session(tools=office.registry, cpu_s=0.3) as session:
        result = session.execute_code("while True: pass")
        assert result.outcome is Outcome.CPU_LIMIT
        with pytest.raises(SessionError):
            session.execute_code("1")
