"""Scripts of sessions that wait for decisions, and sessions that another process goes on with."""

from __future__ import annotations

import math
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import journals
from lives import printed_by_lives
from rows import each_row
from toolcell import (
    AuditLog,
    ExecutionResult,
    Limits,
    Outcome,
    Policy,
    PoolConfig,
    RecordConfig,
    ResumeError,
    Runtime,
    SessionError,
    SyncRuntime,
    ToolRegistry,
    UsageError,
)
from toolcell.config import KIB
from toolcell.journal import identity
from toolcell.journal.database import RUN, OpenJournal
from toolcell.journal.identity import canonical
from toolcell.sessions import state
from toolcell.sessions.blocking import SyncSession
from toolcell.sessions.journal import SessionJournal
from toolcell.support.packing import pack
from toolcell.tools import Approve, Deny

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

        denied = session.resume(suspended(session).suspension, {"call_1": Deny("not today")})
        assert denied.error is not None and "not today" in denied.error.message
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
    with on_disk.session("lives", tools=ledger.registry) as session:
        with pytest.raises(ResumeError, match="begun again"):
            session.resume(token, {"call_1": Approve()})
        assert kept(on_disk, "lives") == 0  # and nothing of it is left
    assert not ledger.made
    with on_disk.session("lives", tools=ledger.registry) as session:
        session.execute_code("call_tool('pay', to='x')", on_approval="suspend")
    assert kept(on_disk, "lives") > 0
    on_disk.forget_session("lives")
    assert kept(on_disk, "lives") == 0


def kept(runtime: SyncRuntime, session: str) -> int:
    """Return how many rows are kept of a session's scripts."""
    database = runtime.runtime.journals.database
    database.settle()
    query = "SELECT count(*) FROM kept WHERE kind = 'run' AND name LIKE ?"
    ((found,),) = journals.rows(database.file, query, f"{session}.%")
    return int(found)


def test_what_a_session_needs_no_more_of_its_scripts_is_removed(
    on_disk: SyncRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object) -> None:
        raise SessionError("it is not kept by value")

    write = OpenJournal.write

    def fail(file: OpenJournal, *fields: Any, **how: bool) -> None:
        if fields[0] == "unrepeatable":
            raise OSError("it cannot be written")
        write(file, *fields, **how)

    with on_disk.session("rows") as session:
        session.execute_code("x = 1")
        one = kept(on_disk, "rows")
        session.execute_code("x = 2")
        assert kept(on_disk, "rows") == 2 * one > 0
        with monkeypatch.context() as patch:
            patch.setattr(state, "REPEATED_BYTES", 0)  # its scripts cannot be run again
            patch.setattr(state, "keeping_script", refuse)
            session.execute_code("x = 3")
            assert kept(on_disk, "rows") == 0
        session.reset()

        session.execute_code("x = 1")
        left = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\nwhile True: pass"
        session.execute_code(left, limits=Limits(cpu_s=0.3))  # the next script begins with the state by value
        assert kept(on_disk, "rows") == 0
        session.execute_code("x += 1")
        assert kept(on_disk, "rows") == one
        with monkeypatch.context() as patch:
            patch.setattr(state, "REPEATED_BYTES", 0)
            patch.setattr(state, "keeping_script", refuse)
            patch.setattr(OpenJournal, "write", fail)
            session.execute_code("x += 1")
        assert kept(on_disk, "rows") == one  # the record says nothing of why they are not needed
    with on_disk.session("rows", restore=True) as session, pytest.raises(SessionError, match="script 4 cannot be run"):
        session.execute_code("x")


def test_a_script_whose_end_was_not_noted_does_not_wait_in_another_process(on_disk: SyncRuntime) -> None:
    def lost_end() -> str:
        """Run a script of the session anew, and lose the record of its end, as a kill of the host does."""
        with on_disk.session("late") as session:
            session.execute_code("x = 1")
        on_disk.runtime.journals.database.settle()
        (run,) = [name for name in journals.names(folder) if name.startswith("late.")]
        last = "(SELECT max(n) FROM kept WHERE kind = 'run' AND name = ?)"
        journals.rows(folder, f"DELETE FROM kept WHERE kind = 'run' AND name = ? AND n = {last}", run, run)
        return run

    database = on_disk.runtime.journals.database
    folder = database.file
    run = lost_end()
    with closing(OpenJournal(database, RUN, run)), pytest.raises(SessionError, match=f"{run} is under way"):
        on_disk.session("late", restore=True).__enter__()
    with on_disk.session("late", restore=True) as session:
        assert on_disk.interrupted_runs() == []
        assert session.execute_code("x").value == 1

    lost_end()
    why = (
        "INSERT INTO kept SELECT kind, name, max(n) + 1, max(at), ? FROM kept WHERE kind = 'session' AND name = 'late'"
    )
    journals.rows(folder, why, pack(["unrepeatable", "it cannot be"]))
    with on_disk.session("late", restore=True):
        assert kept(on_disk, "late") == 0 and on_disk.interrupted_runs() == []


def test_the_journal_of_a_session_is_private_and_that_of_a_nameless_one_does_not_stay(on_disk: SyncRuntime) -> None:
    folder = on_disk.runtime.journals.database.file
    with on_disk.session() as nameless, on_disk.session("named") as named:
        nameless.execute_code("1")
        named.execute_code("1")
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.parent.glob(f"{folder.name}*")} == {0o600}
    assert "named" in journals.names(folder, "session")
    assert nameless.session.id not in journals.names(folder, "session")
    on_disk.forget_session("named")
    on_disk.runtime.journals.database.settle()
    ours = ("named.", f"{nameless.session.id}.")
    assert not [name for name in journals.names(folder) if name.startswith(ours)]


def test_what_a_script_of_a_session_was_answered_is_kept_once_and_as_long_as_it_is_needed(
    on_disk: SyncRuntime, ledger: Ledger
) -> None:
    def kept() -> int:
        on_disk.runtime.journals.database.settle()
        return sum(
            b"a very long line" in body for (body,) in journals.rows(folder, "SELECT body FROM kept WHERE kind = 'run'")
        )

    def say() -> str:
        """Return one very long line of text."""
        return "a very long line"

    folder = on_disk.runtime.journals.database.file
    with on_disk.session("s") as session:
        session.execute_code("said = call_tool('say')", tools=[say])
        assert kept() == 1
        with session.fork("copy") as copy:
            assert kept() == 2
            copy.reset()
            assert kept() == 1
    assert on_disk.interrupted_runs() == []
    with on_disk.session("s", restore=True) as session, session.fork("other") as copy:
        assert copy.execute_code("said").value == session.execute_code("said").value == "a very long line"
        session.execute_code("while True: pass", limits=Limits(cpu_s=0.3))
        assert kept() == 1


@pytest.mark.parametrize(
    ("kind", "old", "new"), [("run", b"\xaamarked = 1", b"\xabmarked = 1"), ("session", b"\xa2ok", b"\xa3ok")]
)
def test_a_damaged_journal_is_named_and_no_state_comes_from_it(
    on_disk: SyncRuntime, kind: str, old: bytes, new: bytes
) -> None:
    with on_disk.session("damaged") as session:
        session.execute_code("marked = 1")
    journals.replace(on_disk.runtime.journals.database.file, kind, old, new)

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
        cut = session.execute_code("while True: x += 1", limits=Limits(cpu_s=0.3))
        assert cut.outcome is Outcome.CPU_LIMIT
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
SCRIPTS = [
    "import random; x = random.random(); seen = [call_tool('write', text='a')]",
    "seen += [call_tool('write', text='b'), call_tool('pay', text='c')]; y = random.random()",
    "seen += [call_tool('write', text='d')]",
]

def live(folder, moment):
    ledger = folder / 'ledger'
    registry, note = ToolRegistry(), noting(ledger, moment)

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
            print(session.execute_code('[x != y, seen]').value, runtime.interrupted_runs())
    return 0
"""


@pytest.mark.slow
@each_row("moment", ["before b", "after b", "after c"])
def test_a_session_whose_host_is_killed_makes_every_effect_once(tmp_path: Path, moment: str) -> None:
    (tmp_path / "ledger").touch()

    assert printed_by_lives(HOST, tmp_path, moment) == "[True, ['a', 'b', 'c', 'd']] []"
    assert (tmp_path / "ledger").read_text().split() == ["a", "b", "c", "d"]


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


NOT_BY_VALUE = "one = (i for i in 'a')"
"""A name that no state by value has: a session with it is forked from the answers of its scripts."""


@pytest.mark.anyio
async def test_a_session_waits_while_its_answers_are_copied_to_a_fork(
    tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it might be reset before they are."""
    open_journal, is_free = SessionJournal.open, list[bool]()

    def noted(journal: SessionJournal, *args: Any) -> Any:
        is_free.append(session.look_at < math.inf)
        return open_journal(journal, *args)

    async with Runtime(ledger.registry, record=tmp_path / "runs") as runtime, runtime.session("s") as session:
        await session.execute_code(f"{NOT_BY_VALUE}; x = call_tool('write', text='a')")
        assert session.look_at < math.inf
        monkeypatch.setattr(SessionJournal, "open", noted)
        copy = await session.fork("copy")
        assert is_free == [False]
        await session.reset()
        await copy.close()
        async with runtime.session("copy", restore=True) as copy:
            assert (await copy.execute_code("x")).value == 1
        await session.execute_code(NOT_BY_VALUE)
        await runtime.journals.settle()
        journals.rows(tmp_path / "runs", "DELETE FROM kept WHERE kind = 'run' AND name LIKE 's.%'")
        with pytest.raises(SessionError, match=r"nothing is kept of run s\."):
            await session.fork("lost")
        assert "lost" not in runtime.kept_sessions()
    assert ledger.made == ["a"]


@pytest.mark.anyio
async def test_a_fork_without_room_in_the_record_fails_and_leaves_nothing(tmp_path: Path) -> None:
    record = AuditLog(tmp_path / "runs.db", config=RecordConfig(continue_bytes=128 * KIB))
    async with Runtime(record=record) as runtime, runtime.session("s") as session:
        assert (await session.execute_code(NOT_BY_VALUE, inputs={"x": "x" * 40 * KIB})).ok
        made = 0
        with pytest.raises(SessionError, match="there may be 131072"):
            while made < 9:
                await (await session.fork(f"copy-{made}")).close()
                made += 1
        assert runtime.kept_sessions() == [*(f"copy-{number}" for number in range(made)), "s"]
        ((kept_bytes,),) = journals.rows(tmp_path / "runs.db", "SELECT sum(length(body)) FROM kept")
        assert made > 0 and kept_bytes <= 128 * KIB
