"""What a session has read and used binds it, whatever becomes of the script that did it and of its host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from toolcell import (
    Limits,
    Outcome,
    Policy,
    PoolConfig,
    Quota,
    QuotaExceeded,
    Quotas,
    RunContext,
    SessionError,
    SyncRuntime,
    ToolRegistry,
)
from toolcell.flows import Flow
from toolcell.journal.database import OpenJournal
from toolcell.journal.ledger import Journal
from toolcell.journal.store import JournalStore
from toolcell.run.streaming import RunFinished
from toolcell.sandbox.process.backend import ProcessSandbox
from toolcell.sessions.blocking import SyncSession
from toolcell.tools import Approve, ToolContext

pytestmark = [pytest.mark.quick, pytest.mark.isolation]

WRITES = "[call_tool('write', text='a') for _ in range(3)]"
WAITS = f"{WRITES}; call_tool('pay', to='ada')"
POST = "call_tool('post', text='the secret')"


class Ledger:
    """A registry whose tools note what they do."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.registry = ToolRegistry()

        @self.registry.tool(requires_approval=True)
        async def pay(to: str) -> str:
            """Send some money to somebody."""
            self.made.append(f"pay {to}")
            return f"paid {to}"

        @self.registry.tool
        async def write(text: str) -> int:
            """Append a line to the ledger."""
            self.made.append(text)
            return len(self.made)

        @self.registry.tool(reads="private", read_only=True)
        async def mail() -> str:
            """Read all the mail there is."""
            return "the secret"

        @self.registry.tool(sends="public")
        async def post(text: str) -> str:
            """Post a text where everybody can read it."""
            self.made.append(f"post {text}")
            return "posted"


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def host(folder: Path, ledger: Ledger) -> Callable[..., SyncRuntime]:
    """Makes Runtimes on one directory, as in one process after another."""

    def make(quotas: Quotas | None = None) -> SyncRuntime:
        policy = Policy(flows=[Flow("private", "public", "deny")])
        return SyncRuntime(
            ledger.registry, pool=PoolConfig(warm=0), record=folder / "runs.db", policy=policy, quotas=quotas
        )

    return make


def lose(session: SyncSession) -> None:
    result = session.execute_code("print(call_tool('mail')); import os; os._exit(1)")
    assert result.outcome is Outcome.KILLED


def give_up(session: SyncSession) -> None:
    result = session.execute_code("print(call_tool('mail')); call_tool('pay', to='x')", on_approval="suspend")
    assert result.suspension is not None and "secret" in str(result.logs)


@pytest.mark.slow
@pytest.mark.parametrize("reads", [lose, give_up])
def test_what_a_script_without_a_state_has_read_binds_the_session_in_another_process(
    host: Callable[..., SyncRuntime], ledger: Ledger, reads: Callable[[SyncSession], None]
) -> None:
    with host() as runtime, runtime.session("reader") as session:
        session.execute_code("x = 1")
        reads(session)
    with host() as runtime, runtime.session("reader", restore=True) as session:
        session.abandon()
        result = session.execute_code(POST)
        assert result.outcome is Outcome.ERROR and "private" in str(result.error)
    assert not ledger.made


WHO = "call_tool('who')"
WHO_WAITS = f"call_tool('pay', to='ada'); {WHO}"


def _streamed(session: SyncSession, **options: Any) -> Any:
    return next(each.result.value for each in session.stream(WHO, **options) if isinstance(each, RunFinished))


def _resumed(session: SyncSession, **options: Any) -> Any:
    waits = session.execute_code(WHO_WAITS, on_approval="suspend", **options).suspension
    assert waits is not None
    return session.resume(waits, {waits.calls[0].id: Approve()}, **options).value


def _forked(session: SyncSession, **options: Any) -> Any:
    with session.fork() as other:
        return other.execute_code(WHO, **options).value


DOORS: dict[str, Callable[..., Any]] = {
    "execute_code": lambda session, **options: session.execute_code(WHO, **options).value,
    "stream": _streamed,
    "dry run": lambda session, **options: session.execute_code(WHO, dry_run=True, **options).value,
    "resume": _resumed,
    "fork": _forked,
}


def test_a_script_of_a_session_runs_for_whom_it_is_given_or_else_for_whom_the_session_is(
    host: Callable[..., SyncRuntime], ledger: Ledger
) -> None:
    @ledger.registry.tool(read_only=True)
    async def who(context: ToolContext) -> str:
        """Say who the call is for."""
        return context.user_id

    ann, bob = RunContext(user_id="ann"), RunContext(user_id="bob")
    with host() as runtime, runtime.session("whose", context=ann) as session:
        found = {door: (ask(session), ask(session, context=bob)) for door, ask in DOORS.items()}
    with host() as runtime, runtime.session("whose", restore=True, context=bob) as session:
        found["restored"] = ("ann", session.execute_code(WHO).value)
    assert found == dict.fromkeys(found, ("ann", "bob"))


def test_a_dry_run_counts_for_its_session_and_what_it_has_read_binds_it(
    host: Callable[..., SyncRuntime], ledger: Ledger
) -> None:
    with host() as runtime, runtime.session("dry", tool_calls=3) as session:
        two = "[call_tool('mail') for _ in range(2)]"
        assert session.execute_code(two, dry_run=True).ok
        assert session.session.used_calls == 2
        refused = session.execute_code(POST)
        assert refused.outcome is Outcome.ERROR and "private" in str(refused.error)
        assert session.execute_code(two, dry_run=True).outcome is Outcome.CALL_LIMIT
    assert not ledger.made


def test_what_a_copy_uses_that_cannot_be_made_counts_too(host: Callable[..., SyncRuntime]) -> None:
    diverges = "import time\nstate = (x for x in ())  # has no value\nsum(range(10**7))\ncall_tool('write', text=str(time.monotonic_ns()))"
    with host() as runtime, runtime.session("copied") as session:
        assert session.execute_code(diverges).ok
        used_cpu_s = session.session.used_cpu_s
        with pytest.raises(SessionError, match="did not repeat"):
            session.execute_code("1", dry_run=True)
        assert session.session.used_cpu_s > used_cpu_s + 0.05


def test_calls_of_scripts_that_were_given_up_count(host: Callable[..., SyncRuntime], ledger: Ledger) -> None:
    with host() as runtime, runtime.session("calls", tool_calls=4) as session:
        assert session.execute_code(WAITS, on_approval="suspend").suspension is not None
        with pytest.raises(SessionError, match="waits for a decision"):
            session.execute_code("1", dry_run=True)
        session.abandon()
        assert session.session.used_calls == 4
        assert session.execute_code(WRITES).outcome is Outcome.CALL_LIMIT
    assert ledger.made == ["a"] * 3


@pytest.mark.slow
def test_what_was_used_stays_used_after_a_reset_in_another_process(
    host: Callable[..., SyncRuntime], ledger: Ledger
) -> None:
    with host() as runtime, runtime.session("used", tool_calls=3) as session:
        assert session.execute_code(WRITES).ok
        session.reset()
    with host() as runtime, runtime.session("used", restore=True, tool_calls=3) as session:
        assert session.session.used_calls == 3 and session.session.used_cpu_s > 0
        assert session.execute_code(WRITES).outcome is Outcome.CALL_LIMIT
    assert ledger.made == ["a"] * 3


def test_a_resume_that_cannot_begin_loses_neither_script_nor_decisions(
    host: Callable[..., SyncRuntime], ledger: Ledger
) -> None:
    """The state is rebuilt as one run, so the quota is used up when the script itself is to go on."""
    with host(Quotas(Quota(runs=3, per_s=3600))) as runtime, runtime.session("later") as session:
        session.execute_code("x = 1")
        waits = session.execute_code(WAITS, on_approval="suspend").suspension
        assert waits is not None
        with pytest.raises(QuotaExceeded):
            session.resume(waits, {waits.calls[0].id: Approve()})
        assert session.waiting == waits.run_id
        with pytest.raises(SessionError, match="carry it on"):
            session.execute_code("x")
    with host() as runtime, runtime.session("later", restore=True) as session:
        assert session.waiting == waits.run_id
        done = session.resume(waits.run_id)
        assert done.ok and done.value == "paid ada", done
    assert ledger.made == ["a", "a", "a", "pay ada"]


def test_a_session_without_cpu_time_left_does_not_use_a_token_up(ledger: Ledger) -> None:
    with SyncRuntime(ledger.registry, pool=PoolConfig(warm=0)) as runtime, runtime.session() as session:
        waits = session.execute_code(WAITS, on_approval="suspend").suspension
        assert waits is not None
        session.session._state._ended_cpu_s = session.session.settings.cpu_s
        with pytest.raises(SessionError, match="CPU seconds"):
            session.resume(waits, {waits.calls[0].id: Approve()})
        session.session._state._ended_cpu_s = 0.0
        assert session.resume(waits, {waits.calls[0].id: Approve()}).value == "paid ada"
    assert ledger.made == ["a", "a", "a", "pay ada"]


@pytest.mark.slow
def test_a_script_that_waits_is_not_forgotten_while_somebody_looks_at_its_journal(
    host: Callable[..., SyncRuntime], ledger: Ledger
) -> None:
    """`suspended_runs` of another process opens each journal for a moment."""
    with host() as runtime, runtime.session("seen") as session:
        waits = session.execute_code(WAITS, on_approval="suspend").suspension
        assert waits is not None
    with host() as runtime:
        looked_at = OpenJournal(runtime.runtime.journals.database, "run", waits.run_id)
        with closing(looked_at), runtime.session("seen", restore=True) as session:
            with pytest.raises(SessionError, match="carry it on"):
                session.execute_code(WRITES)
            with pytest.raises(SessionError, match="cannot be given up now"):
                session.abandon()
        with runtime.session("seen", restore=True) as session:
            assert session.resume(waits, {waits.calls[0].id: Approve()}).ok
    assert ledger.made == ["a", "a", "a", "pay ada"]


def test_a_journal_that_lost_answers_is_not_carried_on_from_memory() -> None:
    """Steps of a plan whose results were too large for it would be made again."""
    store = JournalStore(None)
    whole, lost = Journal("whole", header={"steps": []}), Journal("lost", header={"steps": []})
    lost.lose("the answers take too much")
    store.put_down(whole)
    store.put_down(lost)
    assert store.interrupted() == ["whole"]


@pytest.mark.slow
def test_a_state_that_is_kept_and_brought_back_counts_for_whom_the_last_script_ran(
    host: Callable[..., SyncRuntime], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a fork, on top of an earlier state, and in a process that has run no script of the session."""
    monkeypatch.setattr(ProcessSandbox, "interrupted_s", 10.0)  # on a machine that is busy it takes long to end
    quotas = Quotas(Quota(runs=1000), by="user_id")
    ann = RunContext(user_id="ann")
    with host(quotas) as runtime, runtime.session("kept") as session:
        session.execute_code("x = 1", context=ann)
        session.put_down()
        session.execute_code("while True: x += 1", context=ann, limits=Limits(cpu_s=0.3))
        session.put_down()
        with session.fork() as other:
            assert other.execute_code("x > 1", context=ann).value is True
            other.put_down()
        before = quotas.used("ann")["runs"]
        with session.fork() as other:
            other.files()
            other.put_down()
        assert quotas.used("ann")["runs"] == before + 1  # the state is brought back
        assert quotas.used("")["runs"] == 1  # and nobody in particular asks for the names of files
        session.execute_code("y = 1", context=ann)
    with host(quotas) as runtime, runtime.session("kept", restore=True, context=ann) as session:
        session.files()
        session.put_down()
    assert quotas.used("")["runs"] == 1
