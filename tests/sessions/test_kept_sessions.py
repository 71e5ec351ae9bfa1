"""Scripts of sessions that wait for decisions, and sessions that another process goes on with."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import journals
from rows import each_row
from toolcell import (
    ExecutionResult,
    Limits,
    Outcome,
    Policy,
    PoolConfig,
    ResumeError,
    SessionError,
    SyncRuntime,
    ToolRegistry,
    UsageError,
)
from toolcell.control import Approve, Deny
from toolcell.journal import identity
from toolcell.journal.identity import canonical
from toolcell.sessions.blocking import SyncSession

pytestmark = [pytest.mark.quick, pytest.mark.isolation]

BEFORE = "import random\nclass Box: pass\nbox = Box()\nbox.seen = random.random()"
PAYS = "paid = call_tool('pay', to='ada')\n[paid, box.seen, random.random(), isinstance(box, Box)]"


class Ledger:
    """A registry whose tools note each call."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.registry = ToolRegistry()

        @self.registry.tool(requires_approval=True)
        async def pay(to: str) -> str:
            """Send some money to somebody."""
            self.made.append(f"pay {to}")
            return f"paid {to}"

        @self.registry.tool(reads="private")
        async def write(text: str) -> int:
            """Append a line to the ledger."""
            self.made.append(text)
            return len(self.made)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture(scope="module")
def in_memory() -> Iterator[SyncRuntime]:
    with SyncRuntime(pool=PoolConfig(warm=1)) as opened:
        yield opened


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyncRuntime]:
    with SyncRuntime(pool=PoolConfig(warm=1), record=tmp_path_factory.mktemp("kept") / "runs") as opened:
        yield opened


@pytest.fixture(params=["memory", "disk"])
def runtime(request: pytest.FixtureRequest) -> SyncRuntime:
    found: SyncRuntime = request.getfixturevalue("in_memory" if request.param == "memory" else "on_disk")
    return found


def another(runtime: SyncRuntime) -> SyncRuntime:
    """A Runtime with the same record, as in another process."""
    assert runtime.runtime.record is not None
    return SyncRuntime(pool=PoolConfig(warm=1), record=runtime.runtime.record.path)


def suspended(session: SyncSession, source: str = PAYS) -> ExecutionResult:
    session.execute_code(BEFORE)
    result = session.execute_code(source, on_approval="suspend")
    assert result.outcome is Outcome.SUSPENDED and result.suspension is not None, result
    assert session.waiting == result.suspension
    return result


def direct() -> Any:
    with SyncRuntime(pool=PoolConfig(warm=1), policy=Policy(seed=7)) as runtime, runtime.session() as session:
        session.execute_code(BEFORE)
        return session.execute_code(PAYS.replace("call_tool('pay', to='ada')", "'paid ada'")).value


@pytest.mark.parametrize("through", ["session", "runtime"])
def test_a_script_that_waits_goes_on_in_its_session_with_the_state_before_it(
    runtime: SyncRuntime, ledger: Ledger, through: str
) -> None:
    with runtime.session(tools=ledger.registry) as session:
        result = suspended(session)
        assert result.session is not None and (result.session.script, result.session.lost) == (2, "")
        assert result.suspension is not None and not ledger.made
        place: Any = session if through == "session" else runtime
        done = place.resume(result.suspension.to_json(), {"call_1": Approve()}, tools=ledger.registry)

        assert done.ok, done.error
        assert done.session is not None and (done.session.script, done.session.began) == (2, "journal")
        assert done.value[0] == "paid ada" and done.value[3] is True
        assert session.execute_code("[paid, box.seen]").value == done.value[:2]
        assert session.execute_code("box.seen = 1").ok
        session.put_down()
        assert session.execute_code("[paid, box.seen]").value == ["paid ada", 1]
        with pytest.raises(ResumeError, match=r"used already|no run"):
            session.resume(result.suspension, {"call_1": Approve()})
        assert ledger.made == ["pay ada"] and session.session.used_calls == 1


def test_a_script_that_waits_repeats_the_randomness_of_the_session(ledger: Ledger) -> None:
    with (
        SyncRuntime(pool=PoolConfig(warm=1), policy=Policy(seed=7)) as runtime,
        runtime.session(tools=ledger.registry) as session,
    ):
        result = suspended(session)
        assert result.suspension is not None
        done = session.resume(result.suspension, {"call_1": Approve()})
    assert done.value == direct()


def test_while_a_script_waits_no_other_runs_until_it_is_given_up(runtime: SyncRuntime, ledger: Ledger) -> None:
    with runtime.session(tools=ledger.registry) as session:
        result = suspended(session)
        assert result.suspension is not None
        for begin in (lambda: session.execute_code("1"), lambda: session.put_files({"a": b""})):
            with pytest.raises(SessionError, match=r"waits for a decision about pay.*abandon\(\)"):
                begin()
        assert session.files() == ()
        session.fork().close()
        with pytest.raises(UsageError, match="no call call_2 waits"):
            session.resume(result.suspension, {"call_2": Approve()})

        session.abandon()

        assert session.waiting == "" and session.execute_code("'paid' in globals()").value is False
        with pytest.raises(ResumeError, match=r"no run|used already"):
            session.resume(result.suspension, {"call_1": Approve()})
        assert not ledger.made


def test_a_token_is_of_use_in_its_own_session_only(runtime: SyncRuntime, ledger: Ledger) -> None:
    with runtime.session(tools=ledger.registry) as session, runtime.session(tools=ledger.registry) as other:
        result = suspended(session)
        plain = runtime.execute_code("call_tool('pay', to='x')", tools=ledger.registry, on_approval="suspend")
        assert result.suspension is not None and plain.suspension is not None
        with pytest.raises(ResumeError, match="not a script of session"):
            other.resume(result.suspension, {"call_1": Approve()})
        with pytest.raises(ResumeError, match="not a script of session"):
            session.resume(plain.suspension, {"call_1": Approve()})
        changed = result.suspension.to_json().replace("ada", "eve")
        with pytest.raises(ResumeError, match="changed, or was signed elsewhere"):
            session.resume(changed, {"call_1": Approve()})
        with pytest.raises(ResumeError, match="other tools"):
            session.resume(result.suspension, {"call_1": Approve()}, tools=ToolRegistry())

        denied = session.resume(result.suspension, {"call_1": Deny("no")})

        assert denied.outcome is Outcome.ERROR and "no" in str(denied.error)
        assert session.execute_code("box.seen > 0").value is True
        assert not ledger.made


def test_what_cannot_be_carried_on_later_is_refused_before_it_runs(in_memory: SyncRuntime, ledger: Ledger) -> None:
    empty = in_memory.session(tools=ledger.registry, restore="empty")
    with empty as session, pytest.raises(SessionError, match="keeps no journal"):
        session.execute_code(PAYS, on_approval="suspend")
    for options, said in (({"restore": True, "name": "a"}, "record=FILE"), ({"restore": True}, "the name")):
        with pytest.raises(UsageError, match=said):
            in_memory.session(**options)


def test_another_process_goes_on_with_a_session(on_disk: SyncRuntime, ledger: Ledger) -> None:
    with on_disk.session("s1", tools=ledger.registry, cpu_s=60) as session:
        session.execute_code(BEFORE)
        session.execute_code("rows = [call_tool('write', text=str(n)) for n in range(3)]; box.rows = rows")
        session.put_files({"a.txt": b"hello"})
        state = session.execute_code("[box.seen, box.rows, open('a.txt').read()]").value
        with another(on_disk) as other, pytest.raises(SessionError, match="open in another process"):
            other.session("s1", restore=True).__enter__()

    with another(on_disk) as other, other.session("s1", restore=True, tools=ledger.registry) as session:
        result = session.execute_code("[box.seen, box.rows, open('a.txt').read()]")
        assert result.value == state and result.session is not None
        assert (result.session.began, result.session.script) == ("journal", 5)
        assert session.session.used_calls == 3 and session.session._state.labels.names == {"private"}
        with other.session("s2", restore="if_kept") as new:
            assert new.execute_code("'box' in globals()").value is False

    assert ledger.made == ["0", "1", "2"]
    with on_disk.session("s1") as session:
        assert session.execute_code("'box' in globals()").value is False


def test_a_script_that_waits_goes_on_in_another_process(on_disk: SyncRuntime, ledger: Ledger) -> None:
    with on_disk.session("waits", tools=ledger.registry) as session:
        token = suspended(session).suspension
    assert token is not None
    with another(on_disk) as other:
        with pytest.raises(ResumeError, match=r"script 2 of session 'waits': .*restore=True"):
            other.resume(token, {"call_1": Approve()}, tools=ledger.registry)
        with other.session("waits", restore=True, tools=ledger.registry) as session:
            assert session.waiting == token
            with pytest.raises(SessionError, match="waits for a decision"):
                session.execute_code("1")
            assert session.resume(token, {"call_1": Approve()}).ok
            assert session.execute_code("paid").value == "paid ada"
    assert ledger.made == ["pay ada"]
    with on_disk.session("waits", tools=ledger.registry) as session:  # begins anew
        session.execute_code("1")
        with pytest.raises(ResumeError, match="no run"):
            session.resume(token, {"call_1": Approve()})


def test_a_token_of_an_earlier_life_of_a_session_is_refused(on_disk: SyncRuntime, ledger: Ledger) -> None:
    with on_disk.session("lives", tools=ledger.registry) as session:
        token = session.execute_code("call_tool('pay', to='x')", on_approval="suspend").suspension
    assert token is not None
    with on_disk.session("lives", tools=ledger.registry) as session, pytest.raises(ResumeError, match="begun again"):
        session.resume(token, {"call_1": Approve()})
    assert not ledger.made


def test_the_journal_of_a_session_is_private_and_that_of_a_nameless_one_does_not_stay(on_disk: SyncRuntime) -> None:
    folder = on_disk.runtime.journals.database.file
    with on_disk.session() as nameless, on_disk.session("named") as named:
        nameless.execute_code("1")
        named.execute_code("1")
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.parent.glob(f"{folder.name}*")} == {0o600}
    assert "named" in journals.names(folder, "session")
    assert nameless.session.id not in journals.names(folder, "session")


def test_a_damaged_journal_is_named_and_no_state_comes_from_it(on_disk: SyncRuntime) -> None:
    with on_disk.session("damaged") as session:
        session.execute_code("marked = 1")
    journals.replace(on_disk.runtime.journals.database.file, "session", b"\xaamarked = 1", b"\xabmarked = 1")

    with pytest.raises(SessionError, match="damaged"):
        on_disk.session("damaged", restore=True).__enter__()
    with on_disk.session("damaged") as session:
        assert session.execute_code("'marked' in globals()").value is False


@pytest.mark.slow
def test_another_process_runs_scripts_again_with_what_they_were_told_of_their_tools(on_disk: SyncRuntime) -> None:
    def add(left: int, right: int = 1) -> int:
        """Add two whole numbers."""
        made.append(left)
        return left + right

    def zero() -> float:
        """Return nothing but zero."""
        return 0.0

    made: list[int] = []
    tell = (
        "told = [list_tools(), search_tools('add'), list_tools('add', detail='full'), list_tools(detail='signatures')]"
    )
    with on_disk.session("told") as session:
        assert session.execute_code(f"total = tools.add(2)\n{tell}", tools=[zero, add]).ok
        assert session.execute_code("total = tools.add(total, 4)", tools=[add]).ok
        told = session.execute_code("told").value
    for _ in range(2):
        with another(on_disk) as other, other.session("told", restore=True) as session:
            assert session.execute_code("total").value == 7
            assert session.execute_code("told").value == told

    assert made == [2, 3]


def test_a_session_that_is_forgotten_cannot_be_restored(on_disk: SyncRuntime) -> None:
    with on_disk.session("old") as session:
        session.execute_code("x = 1")
    on_disk.forget_session("old")

    assert "old" not in on_disk.kept_sessions()
    with pytest.raises(UsageError, match="no journal of a session named 'old'"):
        on_disk.forget_session("old")


def test_restoring_what_nobody_kept_is_refused_and_leaves_nothing(on_disk: SyncRuntime) -> None:
    with on_disk.session("known") as session:
        session.execute_code("x = 1")
    with pytest.raises(UsageError, match=r"named 'unknown'; there are those of .*'known'.*if_kept"):
        on_disk.session("unknown", restore=True).__enter__()
    assert "unknown" not in on_disk.kept_sessions()
    with on_disk.session("unknown", restore="if_kept") as session:
        session.execute_code("x = 2")
    for how in (True, "if_kept"):
        with on_disk.session("unknown", restore=how) as session:  # type: ignore[arg-type]
            assert session.execute_code("x").value == 2


def test_the_state_after_an_interrupted_script_is_there_in_another_process(on_disk: SyncRuntime) -> None:
    with on_disk.session("cut") as session:
        session.execute_code("x = 1")
        cut = session.execute_code("while True: x += 1", limits=Limits(wall_s=0.3))
        assert cut.outcome is Outcome.TIMEOUT
        kept = cut.session is not None and not cut.session.lost
    with another(on_disk) as other, other.session("cut", restore=True) as session:
        if not kept:  # the script did not end in time, so the state is that before it
            assert session.execute_code("x").value == 1
            return
        after = session.execute_code("x")
        assert after.value > 1 and after.session is not None and after.session.began == "value"
        session.reset()
        assert session.execute_code("'x' in globals()").value is False


def test_a_dry_run_in_a_session_sees_its_state_and_leaves_nothing_in_it(runtime: SyncRuntime, ledger: Ledger) -> None:
    with runtime.session(tools=ledger.registry) as session:
        session.execute_code(BEFORE)
        draft = session.execute_code("box = call_tool('write', text=str(box.seen > 0))\nbox", dry_run=True)

        assert draft.ok and [(each.tool, each.args) for each in draft.effects] == [("write", {"text": "True"})]
        assert draft.session is not None and (draft.session.id, draft.session.script) == (session.session.id, 2)
        assert not ledger.made
        assert session.execute_code("isinstance(box, Box)").value is True
        with pytest.raises(UsageError, match="a dry run cannot be suspended"):
            session.execute_code("1", dry_run=True, on_approval="suspend")
        done = runtime.commit(draft, tools=ledger.registry)

    assert done.ok and done.value == 1 and ledger.made == ["True"]
    assert runtime.interrupted_runs() == []


@pytest.mark.slow
def test_a_draft_of_a_session_is_committed_in_another_process(on_disk: SyncRuntime, ledger: Ledger) -> None:
    with on_disk.session("drafts", tools=ledger.registry) as session:
        draft = session.execute_code("call_tool('write', text='a')", dry_run=True)
    with another(on_disk) as other:
        assert other.commit(draft.draft_id, tools=ledger.registry).ok
    assert ledger.made == ["a"]


HOST = """
import os, signal, sys
from pathlib import Path
from toolcell import SyncRuntime, PoolConfig, ToolRegistry
from toolcell.control import AlreadyMade, Approve

folder, moment = Path(sys.argv[1]), sys.argv[2]
ledger = folder / 'ledger'
registry = ToolRegistry()

def note(text):
    if moment == f'before {text}': os.kill(os.getpid(), signal.SIGKILL)
    with ledger.open('a') as file: file.write(text + chr(10))
    if moment == f'after {text}': os.kill(os.getpid(), signal.SIGKILL)

@registry.tool
def write(text: str) -> str:
    '''Write a text into the ledger.'''
    note(text)
    return text

@registry.tool(requires_approval=True)
def pay(text: str) -> str:
    '''Write a payment into the ledger.'''
    note(text)
    return text

SCRIPTS = [
    "import random; x = random.random(); seen = [call_tool('write', text='a')]",
    "seen += [call_tool('write', text='b'), call_tool('pay', text='c')]; y = random.random()",
    "seen += [call_tool('write', text='d')]",
]

def decide(call):
    if call.reason == 'needs approval': return Approve()
    (text,) = call.args.values()
    return AlreadyMade(text) if text in ledger.read_text().split() else Approve()

with SyncRuntime(registry, record=folder / 'runs', pool=PoolConfig(warm=1)) as runtime:
    with runtime.session('s', restore='if_kept') as session:
        while True:
            waiting = session.waiting
            if waiting:
                calls = getattr(waiting, 'calls', ())
                session.resume(waiting, {call.id: decide(call) for call in calls})
                continue
            position = session.session._state.position
            if position == len(SCRIPTS): break
            session.execute_code(SCRIPTS[position], on_approval='suspend')
        print(session.execute_code('[x != y, seen]').value)
"""


@pytest.mark.slow
@each_row("moment", ["before b", "after b", "after c"])
def test_a_session_whose_host_is_killed_makes_every_effect_once(tmp_path: Path, moment: str) -> None:
    def live(moment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", HOST, str(tmp_path), moment]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        return done

    (tmp_path / "ledger").touch()
    assert live(moment).returncode == -signal.SIGKILL
    done = live("")

    assert done.returncode == 0 and done.stdout.strip() == "[True, ['a', 'b', 'c', 'd']]"
    assert (tmp_path / "ledger").read_text().split() == ["a", "b", "c", "d"]
    assert journals.names(tmp_path / "runs") == []


@pytest.mark.slow
def test_a_script_of_a_session_on_disk_does_not_describe_its_tools_again(
    on_disk: SyncRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def described_once(text: str) -> str:
        """Be described in no other test."""
        return text

    described: list[Any] = []
    monkeypatch.setattr(identity, "canonical", lambda schema: described.append(schema) or canonical(schema))
    with on_disk.session("s") as session:
        session.execute_code("x = 1", tools=[described_once])
        assert described
        described.clear()
        assert session.execute_code("x", tools=[described_once]).value == 1
    assert described == []
