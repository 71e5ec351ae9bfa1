"""A record in PostgreSQL where something is wrong: the way to the server, the URL, the tables, another host."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from record_places import Way, connected, drop, record_url, rows, schema_of, way_to
from toolcell import PoolConfig, RunContext, Runtime, ToolRegistry
from toolcell.audit import AuditLog, HmacKey, Index, records, verify
from toolcell.audit.databases import database_of
from toolcell.errors import AuditError, ResumeError, UsageError
from toolcell.journal.database import REQUEST, SESSION, JournalDatabase, OpenJournal, UnderWay
from toolcell.journal.request_keys import RequestKeys
from toolcell.journal.store import JournalStore
from toolcell.support.packing import unpack
from toolcell.tools import Approve

pytestmark = [pytest.mark.isolation, pytest.mark.anyio, pytest.mark.postgres, pytest.mark.timeout(300)]

KEY = HmacKey.generate()


@pytest.fixture
def way(postgres_server: str) -> Iterator[Way]:
    folder = Path(tempfile.mkdtemp(prefix="way-"))  # the path of a socket is short
    with way_to(postgres_server, folder) as way:
        yield way
    shutil.rmtree(folder)


@pytest.fixture
def url(postgres_server: str, way: Way) -> Iterator[str]:
    """A new record, by the way that breaks."""
    url = record_url(postgres_server, host=str(way.folder), port="5432")
    yield url
    way.is_refusing = False
    way.is_open.set()
    drop(url)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write waits for half a second."""
    for name in ("store", "postgres_record"):
        monkeypatch.setattr(f"toolcell.audit.{name}.LOCK_S", 0.5)


def tools_of(way: Way, made: list[str]) -> ToolRegistry:
    tools = ToolRegistry()

    @tools.tool
    def note(text: str) -> str:
        """Write a text into a list."""
        made.append(text)
        return text

    @tools.tool
    def cut() -> str:
        """Break every connection to the server."""
        way.cut()
        made.append("cut")
        return "cut"

    @tools.tool
    def refuse() -> str:
        """Have the server be away from now on."""
        way.is_refusing = True
        way.cut()
        return "refused"

    @tools.tool
    def swallow(what: str) -> str:
        """Have the connection break before the next answer to this comes back."""
        way.swallow = what.encode()
        return "swallowed"

    @tools.tool(requires_approval=True)
    def pay(euros: int) -> str:
        """Send money to somebody."""
        made.append(str(euros))
        return "paid"

    return tools


def runtime_at(url: str, way: Way, made: list[str]) -> Runtime:
    return Runtime(tools_of(way, made), record=AuditLog(url, key=KEY), pool=PoolConfig(warm=1))


async def test_a_connection_that_breaks_in_a_run_is_made_again_and_nothing_is_lost_or_twice(url: str, way: Way) -> None:
    made: list[str] = []
    script = "\n".join(
        [f"call_tool('note', text='{n}'); call_tool('cut')" for n in range(3)]
        + [f"call_tool('swallow', what='{what}'); call_tool('note', text='x')" for what in ("COMMIT", "call_started")]
    )
    async with runtime_at(url, way, made) as runtime:
        for _ in range(2):
            result = await runtime.execute_code(script)
            assert result.ok, result.error
    assert made == ["0", "cut", "1", "cut", "2", "cut", "x", "x"] * 2
    report = verify(url, [KEY], strict=True)
    assert report.ok, report.findings
    with Index(url, [KEY]) as index:
        for run in index.runs():
            assert [call.status for call in index.load(run).calls] == ["ok"] * 10
    assert way.swallow is None


@pytest.mark.usefixtures("quick")
async def test_while_the_server_is_away_no_tool_is_called_and_then_it_goes_on(url: str, way: Way) -> None:
    made: list[str] = []
    async with runtime_at(url, way, made) as runtime:
        with pytest.raises(AuditError, match="cannot write the record postgresql://") as caught:
            await runtime.execute_code("call_tool('refuse'); call_tool('note', text='a')")
        assert not made
        with pytest.raises(AuditError):
            await runtime.execute_code("1")
        way.is_refusing = False
        assert (await runtime.execute_code("call_tool('note', text='b')")).ok
    assert made == ["b"]
    assert "password" not in str(caught.value)
    assert verify(url, [KEY], strict=True).ok


async def test_a_server_that_does_not_answer_keeps_no_event_loop(url: str, way: Way) -> None:
    made: list[str] = []
    held_s, gaps = 1.0, [0.0]

    async def beat() -> None:
        while True:
            before = anyio.current_time()
            await anyio.sleep(0.01)
            gaps.append(anyio.current_time() - before)

    async with runtime_at(url, way, made) as runtime, anyio.create_task_group() as tasks:
        async with runtime.session("s") as session:
            await session.execute_code("x = 1")
            tasks.start_soon(beat)
            threading.Timer(held_s, way.is_open.set).start()
            way.is_open.clear()
            async with anyio.create_task_group() as runs:
                runs.start_soon(runtime.execute_code, "call_tool('note', text='a')")
                runs.start_soon(session.execute_code, "call_tool('note', text='a')")
                runs.start_soon(lambda: runtime.execute_code("call_tool('pay', euros=1)", on_approval="suspend"))
                runs.start_soon(lambda: runtime.execute_code("call_tool('pay', euros=1)", dry_run=True))
        tasks.cancel_scope.cancel()
    assert made == ["a", "a"]
    assert max(gaps) < held_s / 2


@pytest.mark.usefixtures("quick")
async def test_a_run_that_another_host_took_up_while_the_connection_was_lost_makes_no_call_here(
    url: str, way: Way, postgres_server: str
) -> None:
    """The server frees the locks of a connection that is lost: whoever comes first has the run."""
    made: list[str] = []
    other_url = record_url(postgres_server, schema_of(url))

    async def take_over() -> str:
        way.is_refusing = True
        way.cut()
        tools = tools_of(way, made)

        @tools.tool
        async def take_over_now() -> str:
            """Do nothing: another host does it."""
            return "elsewhere"

        async with Runtime(tools, record=AuditLog(other_url, key=KEY), pool=PoolConfig(warm=1)) as other:
            for _ in range(600):
                try:
                    result = await other.resume("mine", {})
                    break
                except ResumeError:  # the server has not seen yet that the connection is gone
                    await anyio.sleep(0.1)
            assert result.suspension is not None
            way.is_refusing = False
        return "here"

    registry = tools_of(way, made)
    registry.tool(name="take_over_now", description="Have another host take the run up now.")(take_over)
    script = "call_tool('take_over_now'); call_tool('note', text='twice')"
    with pytest.raises(AuditError, match="run mine was taken up by another process"):
        async with Runtime(registry, record=AuditLog(url, key=KEY), pool=PoolConfig(warm=1)) as runtime:
            await runtime.execute_code(script, on_approval="suspend", context=RunContext(run_id="mine"))
    assert not made


def test_two_processes_never_have_one_journal_open(url: str) -> None:
    with AuditLog(url, key=KEY) as one, AuditLog(url, key=KEY) as other:
        lock = one.database.lock("run", "a")
        for log in (one, other):
            with pytest.raises(BlockingIOError):
                log.database.lock("run", "a")
        lock.release()
        other.database.lock("run", "a").release()


def append(log: AuditLog) -> int:
    return log.append(records.OPENED, 0, ("host", 1, "1", "3", "key", "hmac", None, {}))


def test_to_ask_for_a_journal_that_is_open_elsewhere_disturbs_no_write(url: str) -> None:
    with AuditLog(url, key=KEY) as other, AuditLog(url, key=KEY) as log:
        other.database.lock("session", "s")
        is_over = threading.Event()

        def ask() -> None:
            while not is_over.is_set():
                with pytest.raises(BlockingIOError):
                    log.database.lock("session", "s")

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            for _ in range(200):
                append(log)
        finally:
            is_over.set()
            thread.join(60)
    assert verify(url, [KEY], strict=True).ok


def test_a_reader_goes_on_after_a_read_that_failed(url: str, way: Way) -> None:
    with AuditLog(url, key=KEY):
        pass
    with Index(url, [KEY]) as index:
        way.is_refusing = True
        way.cut()
        looks: list[Callable[[], object]] = [
            index.runs,
            lambda: index.blob("a"),
            lambda: index.head_after("a", 1),
            lambda: [*index.events_between("a", 1, 2)],
        ]
        for look in looks:
            with pytest.raises(AuditError):
                look()
        way.is_refusing = False
        assert index.runs() == []


def test_a_connection_that_the_server_has_not_noticed_to_be_lost_is_ended(url: str, way: Way) -> None:
    with AuditLog(url, key=KEY) as log, closing(JournalDatabase(log)) as journals:
        journal = OpenJournal(journals, SESSION, "s")
        journal.write("x", 1)
        log.flush(wait=True)
        way.is_noticed = False
        way.cut()
        journal.write("x", 2)
        assert log.flush(wait=True)
        way.is_noticed = True
        assert [unpack(body) for body in journals.records(SESSION, "s")] == [["x", 1], ["x", 2]]


def test_a_journal_that_another_process_took_up_is_noticed_after_two_losses(
    url: str, way: Way, postgres_server: str
) -> None:
    log = AuditLog(url, key=KEY)
    with (
        AuditLog(record_url(postgres_server, schema_of(url)), key=KEY) as other,
        closing(JournalDatabase(other)) as theirs,
        closing(JournalDatabase(log)) as ours,
    ):
        with pytest.raises(AuditError, match="taken up by another process"), log:
            journals = [OpenJournal(ours, SESSION, name) for name in "ab"]
            for each in journals:
                each.write("x", "ours")
            log.flush(wait=True)
            way.is_refusing = True
            way.cut()
            for name in "ab":
                write_elsewhere(theirs, name)
            way.swallow = b"pg_try_advisory_lock"  # lost again, while the locks are taken
            way.is_refusing = False
            for each in journals:
                each.write("x", "ours")
            log.flush(wait=True)
        for name in "ab":
            assert [b"theirs" in body for body in theirs.records(SESSION, name)] == [False, True]


def test_a_journal_that_another_process_looked_at_while_the_connection_was_lost_is_still_ours(
    url: str, way: Way, postgres_server: str
) -> None:
    with two_processes(url, postgres_server) as (ours, theirs):
        log, other = ours.log, theirs.log
        journal = OpenJournal(ours, SESSION, "s")
        journal.write("x", 1)
        log.flush(wait=True)
        way.is_refusing = True
        way.cut()
        seen = opened_elsewhere(theirs, SESSION, "s")
        way.is_refusing = False

        def let_go() -> None:
            seen.close()
            other.flush(wait=True)

        timer = threading.Timer(0.3, let_go)
        timer.start()
        journal.write("x", 2)
        assert log.flush(wait=True)
        timer.join()
        assert [unpack(body) for body in theirs.records(SESSION, "s")] == [["x", 1], ["x", 2]]


@pytest.mark.parametrize("is_begun_again", [False, True])
def test_a_key_that_another_process_has_ends_nothing_but_its_own_request(
    url: str, way: Way, postgres_server: str, is_begun_again: bool
) -> None:
    with two_processes(url, postgres_server) as (ours, theirs), closing(RequestKeys(ours.log, "ann")) as keys:
        log, other = ours.log, theirs.log
        keys.begin("k", b"digest", "run-1")
        way.is_refusing = True
        way.cut()
        seen = opened_elsewhere(theirs, REQUEST, "ann k")
        if is_begun_again:
            seen.remove()
            seen.write(b"other", "run-2")
            seen.write(200, "text/plain")
            other.flush(wait=True)
        way.is_refusing = False
        with pytest.raises(OSError, match="begun the request since") if is_begun_again else nullcontext():
            keys.finish("k", (200, "text/plain", b"x"))
        append(log)
        assert keys.begin("next", b"digest", "run-3").state == "begun"
        seen.close()
        other.flush(wait=True)
        with closing(RequestKeys(other, "ann")) as their_keys:
            entry = their_keys.begin("k", b"other" if is_begun_again else b"digest", "run-4")
        assert (entry.run_id, entry.body) == (("run-2", None) if is_begun_again else ("run-1", b"x"))


@pytest.mark.parametrize("is_begun_there", [False, True])
def test_a_key_that_another_process_takes_while_it_is_noted_is_begun_once(
    url: str, way: Way, postgres_server: str, is_begun_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_processes(url, postgres_server) as (ours, theirs), closing(RequestKeys(ours.log, "ann")) as keys:
        log, other = ours.log, theirs.log
        taken, remove = list[OpenJournal](), OpenJournal.remove

        def remove_and_be_cut_off(journal: OpenJournal) -> None:
            remove(journal)
            if taken or journal.name != "ann k":
                return
            ours.settle()
            way.is_refusing = True
            way.cut()
            taken.append(opened_elsewhere(theirs, REQUEST, "ann k"))
            if is_begun_there:
                taken[0].write(b"digest", "run-2")
                other.flush(wait=True)
            way.is_refusing = False

        monkeypatch.setattr(OpenJournal, "remove", remove_and_be_cut_off)
        with pytest.raises(OSError, match="another process has the key now"):
            keys.begin("k", b"digest", "run-1")
        append(log)
        assert keys.begin("next", b"digest", "run-3").state == "begun"
        assert len([*theirs.records(REQUEST, "ann k")]) == is_begun_there
        taken[0].close()
        other.flush(wait=True)
        found = keys.begin("k", b"digest", "run-4")
        assert (found.state, found.run_id) == (("interrupted", "run-2") if is_begun_there else ("begun", "run-4"))


@contextmanager
def two_processes(url: str, server: str) -> Iterator[tuple[JournalDatabase, JournalDatabase]]:
    """The journals of one record in two processes. The connection of the second is none of the way's."""
    with (
        AuditLog(url, key=KEY) as log,
        AuditLog(record_url(server, schema_of(url)), key=KEY) as other,
        closing(JournalDatabase(other)) as theirs,
        closing(JournalDatabase(log)) as ours,
    ):
        yield ours, theirs


def opened_elsewhere(journals: JournalDatabase, kind: str, name: str) -> OpenJournal:
    for _ in range(600):
        with suppress(UnderWay):  # the server has not seen yet that the connection is gone
            return OpenJournal(journals, kind, name)
        threading.Event().wait(0.1)
    raise AssertionError("the server still has the connection")


def write_elsewhere(journals: JournalDatabase, name: str) -> None:
    journal = opened_elsewhere(journals, SESSION, name)
    journal.write("x", "theirs")
    journal.close()
    journals.log.flush(wait=True)


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_record_that_is_gone_is_not_made_anew_nor_written_to_another(
    url: str, way: Way, postgres_server: str, is_made_again: bool
) -> None:
    direct = record_url(postgres_server, schema_of(url))
    said = "another record" if is_made_again else "there is no record"
    with pytest.raises(AuditError, match=said), AuditLog(url, key=KEY) as log:
        drop(direct)
        if is_made_again:
            with AuditLog(direct, key=KEY):
                pass
        way.cut()
        append(log)
    if is_made_again:
        assert len(verify(direct, [KEY], strict=True).chains) == 1
    else:
        with pytest.raises(UsageError, match="there is no record"):
            database_of(url).id()


def test_a_commit_that_arrives_after_the_connection_was_lost_is_not_written_twice(url: str, way: Way) -> None:
    with AuditLog(url, key=KEY) as log:
        first = append(log)
        way.hold = b"COMMIT"
        late = threading.Timer(0.5, way.give)
        late.start()
        assert append(log) == first + 1
        late.join()
        assert append(log) == first + 2
    assert verify(url, [KEY], strict=True).ok


def test_an_event_of_ours_that_somebody_else_wrote_is_not_tried_for_ever(url: str) -> None:
    with pytest.raises(AuditError, match="not what was written to it; open it again"), AuditLog(url, key=KEY) as log:
        seq = append(log)
        rows(url, f"INSERT INTO event SELECT id + 1000, writer, n + 1, run, kind, at, salt, body, prev, hash "
                  f"FROM event WHERE n = {seq}")  # fmt: skip
        append(log)


def test_an_event_that_is_written_is_no_error_because_of_what_comes_after_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psycopg

    execute, commits, ours = psycopg.Connection.execute, [0], threading.current_thread()

    def failing(self: Any, query: Any, *args: Any, **options: Any) -> Any:
        if query != "COMMIT" or threading.current_thread() is not ours:
            return execute(self, query, *args, **options)
        commits[0] += 1
        if commits[0] == 3:
            raise psycopg.errors.DiskFull("full")
        found = execute(self, query, *args, **options)
        if commits[0] == 1:  # done, and its answer is lost; the second one looks for it
            self.close()
            raise psycopg.OperationalError("lost")
        return found

    with AuditLog(url, key=KEY) as log:
        first = append(log)
        with monkeypatch.context() as patch:
            patch.setattr(psycopg.Connection, "execute", failing)
            assert append(log) == first + 1
        assert commits == [3]
    assert verify(url, [KEY], strict=True).ok


async def test_a_run_whose_task_is_cancelled_while_it_begins_is_not_kept_from_others(
    url: str, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = JournalStore.write
    has_begun, may_go_on, has_written = threading.Event(), threading.Event(), threading.Event()

    def slow(self: JournalStore, *args: Any) -> None:
        has_begun.set()
        may_go_on.wait(60)
        write(self, *args)
        has_written.set()

    monkeypatch.setattr(JournalStore, "write", slow)
    log = AuditLog(url, key=KEY)
    async with Runtime(tools_of(way, []), record=log, pool=PoolConfig(warm=1)) as runtime:
        task = asyncio.create_task(runtime.execute_code("1", context=RunContext(run_id="mine")))
        await anyio.to_thread.run_sync(has_begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_go_on.set()
        has_written.wait(60)
        for _ in range(600):
            try:
                log.database.lock("run", "mine").release()
                break
            except BlockingIOError:
                await anyio.sleep(0.1)
        else:
            pytest.fail("the run is still locked")


WRONG = {
    "postgresql://ann:pa@ss@host/db": "not the URL",
    "postgresql://ann:pa/ss@host/db": "not the URL",
    "postgresql://ann:12/ss@host/db": "not the URL",
    "postgresql://ann:pa#ss@host/db": "not the URL",
    "postgresql://ann:pass@host:nine/db": "not the URL",
    "postgresql://ann:pass@host/db?nonsense=1": "not the URL",
    "postgresql://ann:pass@host/db?schema=no-name": "schema=",
    "postgresql://ann:pass@127.0.0.1:1/db": "cannot write the record postgresql://ann@127.0.0.1:1/db.*check host",
    "Postgresql://ann:pass@127.0.0.1:1/db": "cannot write the record postgresql://ann@127.0.0.1:1/db.*check host",
    "postgresql+psycopg://ann:pass@host/db": "as libpq takes it",
    "mysql://ann:pass@host/db": "as libpq takes it",
    "postgresql://127.0.0.1:1/db?password=pass&user=ann": "check host, port, user, password",
}


@pytest.mark.parametrize("given", WRONG)
async def test_a_url_that_cannot_work_is_an_error_without_the_password(given: str) -> None:
    with pytest.raises(UsageError, match=WRONG[given]) as caught:
        async with Runtime(record=given):
            pass
    said: BaseException | None = caught.value
    while said is not None:
        assert "pass" not in str(said).replace("password", "").replace("PASSWORD", "")
        assert "ss@" not in str(said)
        said = said.__cause__ or (None if said.__suppress_context__ else said.__context__)


def test_a_url_that_became_a_path_makes_no_folder() -> None:
    for given in ("postgresql://host/db", "postgresql+psycopg://host/db", "Postgres://host/db"):
        with pytest.raises(UsageError, match="not as a Path"):
            Runtime(record=Path(given))


def test_without_psycopg_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(UsageError, match=r"pip install 'toolcell\[postgres\]'"):
        Runtime(record="postgresql://host/db")


def test_a_password_is_in_no_row_and_no_name_of_the_record(url: str) -> None:
    log = AuditLog(f"{url}&password=geheim", key=KEY)
    with log:
        log.checkpoint()
    for table in ("event", "about", "kept", "checkpoint", "blob"):
        assert "geheim" not in str(rows(url, f"SELECT * FROM {table}"))
        assert b"geheim".hex() not in str(rows(url, f"SELECT encode({table}::text::bytea, 'hex') FROM {table}"))
    assert "geheim" not in f"{log.place}{log.path}{log.database}"


def test_other_tables_views_triggers_and_newer_versions_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="there is no record"):
        database_of(url).id()
    rows(url, f"CREATE SCHEMA {schema_of(url)}")
    rows(url, "CREATE TABLE another (x TEXT)")
    with pytest.raises(UsageError, match="other tables"), AuditLog(url, key=KEY):
        pass
    rows(url, "DROP TABLE another")
    with AuditLog(url, key=KEY):
        pass
    for make, undo in (
        ("CREATE VIEW plain_run AS SELECT 1", "DROP VIEW plain_run"),
        ("CREATE RULE hide AS ON INSERT TO run DO INSTEAD NOTHING", "DROP RULE hide ON run"),
        (
            "CREATE TRIGGER hide BEFORE UPDATE ON run EXECUTE FUNCTION suppress_redundant_updates_trigger()",
            "DROP TRIGGER hide ON run",
        ),
        ("ALTER TABLE event ALTER at TYPE TEXT", "ALTER TABLE event ALTER at TYPE BIGINT USING at::bigint"),
        ("ALTER TABLE event ENABLE ROW LEVEL SECURITY", "ALTER TABLE event DISABLE ROW LEVEL SECURITY"),
    ):
        rows(url, make)
        with pytest.raises(AuditError, match="not those that toolcell makes"):
            verify(url, [KEY])
        rows(url, undo)
    rows(url, "CREATE TABLE x_mine (x TEXT)")
    assert verify(url, [KEY]).ok
    rows(url, "UPDATE about SET value = '99' WHERE key = 'version'")
    with pytest.raises(UsageError, match="version 99"):
        database_of(url).id()


def test_who_may_only_read_can_verify_and_is_told_why_nothing_is_written(url: str) -> None:
    with AuditLog(url, key=KEY):
        pass
    schema, reader = schema_of(url), f"reader_{schema_of(url)}"
    rows(url, f"CREATE ROLE {reader} LOGIN")
    try:
        rows(
            url,
            f"GRANT USAGE ON SCHEMA {schema} TO {reader}; GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {reader}",
        )
        theirs = f"{url}&user={reader}"
        assert verify(theirs, [KEY]).ok
        with pytest.raises(AuditError, match="permission denied"), AuditLog(theirs, key=KEY):
            pass
        with pytest.raises(UsageError, match="CREATE SCHEMA"), AuditLog(f"{theirs}&schema={schema}_b", key=KEY):
            pass
    finally:
        rows(url, f"DROP OWNED BY {reader}; DROP ROLE {reader}")


async def test_the_commands_take_the_url_of_a_record(url: str, way: Way, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(KEY.to_text())
    key.chmod(0o600)
    async with runtime_at(url, way, []) as runtime:
        await runtime.execute_code("call_tool('note', text='kettle')")
    commands = {
        "list": "kettle", "show last": "kettle", "grep kettle": "verified", "stats": "note", "verify": "ok",
        "keys": KEY.key_id, "prune --older-than 1s --dry-run": "chain",
    }  # fmt: skip
    for command, said in commands.items():
        name, *rest = command.split()
        program = [sys.executable, "-m", "toolcell", "audit", name, url, *rest, "--key", str(key)]
        done = await anyio.run_process(program, check=False)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout.decode(), command


async def test_a_server_that_is_started_again_between_two_looks_is_asked_again(url: str, way: Way) -> None:
    made: Any = []
    async with runtime_at(url, way, made) as runtime:
        result = await runtime.execute_code("call_tool('pay', euros=1)", on_approval="suspend")
        assert result.suspension is not None
        with Index(url, [KEY]) as index:
            way.cut()
            assert len(index.runs()) == 1
        way.cut()
        (waits,) = await anyio.to_thread.run_sync(runtime.suspended_runs)
        way.cut()
        assert (await runtime.resume(waits, {waits.calls[0].id: Approve()})).ok
    assert made == ["1"]
    with connected(url) as db:
        assert db.execute("SELECT count(*) FROM kept").fetchone() == (0,)
