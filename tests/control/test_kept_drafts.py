"""Drafts on disk: another process commits one, once, also when a host was killed in the commit."""

from __future__ import annotations

import signal
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread

import journals
from control.conftest import Effects
from toolcell import AuditLog, Policy, PoolConfig, RunContext, Runtime, SyncRuntime, ToolRegistry, UsageError
from toolcell.control import Draft
from toolcell.flows import Flow
from toolcell.journal import ledger
from toolcell.tools import Approve

pytestmark = pytest.mark.isolation

SOURCE = """
seen = call_tool('read', name='price')
first = call_tool('write', text='a')
second = call_tool('pay', to='ada', euros=first)
[first, second]
"""


def dry(runtime: SyncRuntime, effects: Effects, source: str = SOURCE, **options: Any) -> Any:
    result = runtime.execute_code(source, tools=effects.registry, dry_run=True, **options)
    assert result.ok and result.draft_id, result
    return result


def another(folder: Path, effects: Effects, **options: Any) -> SyncRuntime:
    return SyncRuntime(effects.registry, pool=PoolConfig(warm=0), record=folder / "runs.db", **options)


@pytest.mark.quick
def test_another_process_commits_a_draft_by_its_id(durable: SyncRuntime, folder: Path, effects: Effects) -> None:
    draft = dry(durable, effects, context=RunContext(user_id="ada"))
    assert stat.S_IMODE((folder / "runs.db").stat().st_mode) == 0o600
    with another(folder, effects) as other:
        with pytest.raises(UsageError, match="has no effect-9"):
            other.commit(draft.draft_id, ["effect-9"])
        done = other.commit(draft.draft_id)
        assert done.ok and [each.status for each in done.effects] == ["made", "made"]
        assert done.value == [2, "paid ada 2"]
        with pytest.raises(UsageError, match="committed already"):
            other.commit(draft.draft_id)
    with pytest.raises(UsageError, match="committed already"):
        durable.commit(draft)
    assert effects.made == [["read", "price"], ["write", "a"], ["pay", "ada", 2]]


def test_a_draft_committed_in_its_own_process_is_used_up_everywhere(
    durable: SyncRuntime, folder: Path, effects: Effects
) -> None:
    draft = dry(durable, effects)
    assert durable.commit(draft, ["effect-1"]).ok
    with another(folder, effects) as other, pytest.raises(UsageError, match="committed already"):
        other.commit(draft.draft_id)
    assert len(effects.of("write")) == 1 and not effects.of("pay")


def test_what_a_commit_makes_is_recorded_whatever_room_it_takes(
    durable: SyncRuntime, folder: Path, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = dry(durable, effects)
    monkeypatch.setattr(ledger, "JOURNAL_BYTES", 1)
    with another(folder, effects) as other:
        done = other.commit(draft.draft_id)
    assert done.ok and [each.status for each in done.effects] == ["made", "made"]


def test_a_draft_of_a_plan_is_on_disk_too(durable: SyncRuntime, folder: Path, effects: Effects) -> None:
    draft = Draft()
    steps = [
        {"id": "a", "tool": "write", "args": {"text": "x"}},
        {"tool": "pay", "args": {"to": "y", "euros": {"$ref": "a"}}},
    ]
    durable.execute_plan(steps, tools=effects.registry, dry_run=draft)
    with another(folder, effects) as other:
        assert other.commit(draft.id).ok
    assert effects.made == [["write", "x"], ["pay", "y", 1]]


def test_rechecks_and_flows_hold_in_another_process(durable: SyncRuntime, folder: Path) -> None:
    effects = Effects()
    changing = dry(durable, effects)
    registry = ToolRegistry()

    @registry.tool(reads="private", read_only=True)
    async def mail() -> str:
        """Read all the mail there is."""
        return "secret"

    @registry.tool(sends="public")
    async def post(text: str) -> str:
        """Post a text where everybody can read it."""
        raise AssertionError("it was sent")

    sending = durable.execute_code("call_tool('post', text=call_tool('mail'))", tools=registry, dry_run=True)
    policy = Policy(flows=[Flow("private", "public", "deny")])
    with another(folder, effects, policy=policy) as other:
        with pytest.raises(UsageError, match="read has another result now"):
            other.commit(changing.draft_id, recheck=True)
        refused = other.commit(sending.draft_id, tools=registry)
        assert [each.status for each in refused.effects] == ["refused"] and "private" in refused.effects[0].error
    assert not effects.of("write")


def test_bad_ids_other_tools_and_damage_are_named(durable: SyncRuntime, folder: Path, effects: Effects) -> None:
    draft = dry(durable, effects)
    with another(folder, effects) as other:
        for given, said in (("../key", "no draft '../key'"), ("0" * 16, "there is no draft"), (7, "not 7")):
            with pytest.raises(UsageError, match=said):
                other.commit(given)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="tool 'write' is another one"):
            other.commit(draft.draft_id, tools=ToolRegistry())
        with pytest.raises(UsageError, match="no call effect-1 waits"):
            other.commit(draft.draft_id, decisions={"effect-1": Approve()})
        journals.replace(folder, "draft", b"\xa3ada", b"\xa4ada")
        with pytest.raises(UsageError, match="damaged"):
            other.commit(draft.draft_id)
    with SyncRuntime(pool=PoolConfig(warm=0)) as memory, pytest.raises(UsageError, match="outlives its process with"):
        memory.commit(draft.draft_id)
    assert not effects.of("write")


HOST = """
import os, signal, sys
from pathlib import Path
from toolcell import SyncRuntime, PoolConfig, ToolRegistry, UsageError
from toolcell.tools import AlreadyMade, Approve

folder, moment = Path(sys.argv[1]), sys.argv[2]
ledger = folder / 'ledger'
registry = ToolRegistry()

@registry.tool
def write(text: str) -> str:
    '''Write a text into the ledger.'''
    if moment == f'before {text}': os.kill(os.getpid(), signal.SIGKILL)
    with ledger.open('a') as file: file.write(text + chr(10))
    if moment == f'after {text}': os.kill(os.getpid(), signal.SIGKILL)
    return text + text

SOURCE = "a = call_tool('write', text='a'); b = call_tool('write', text='b'); c = call_tool('write', text=b); [a, b, c]"

with SyncRuntime(registry, record=folder / 'runs.db', pool=PoolConfig(warm=0)) as runtime:
    known = folder / 'draft'
    if not known.exists():
        known.write_text(runtime.execute_code(SOURCE, dry_run=True).draft_id)
    try:
        done = runtime.commit(known.read_text())
    except UsageError as exc:
        doubtful = [each for each in 'ab' if f'effect-{"-ab".index(each)} (write)' in str(exc)]
        print('in doubt:', *doubtful)
        made = ledger.read_text().split()
        decisions = {f'effect-{"-ab".index(each)}': AlreadyMade(2 * each) if each in made else Approve() for each in doubtful}
        done = runtime.commit(known.read_text(), decisions=decisions)
    print(done.value)
"""


@pytest.mark.parametrize("moments", [["before b"], ["after b"], ["after a", "before b"], ["after a", "after b"]])
def test_a_commit_whose_host_is_killed_makes_every_effect_once(tmp_path: Path, moments: list[str]) -> None:
    def live(moment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", HOST, str(tmp_path), moment]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    (tmp_path / "ledger").touch()
    for moment in moments:
        assert live(moment).returncode == -signal.SIGKILL
    done = live("")

    assert done.returncode == 0, done.stderr
    # What was decided about effect-1 before the second kill is not asked again.
    assert done.stdout.splitlines() == ["in doubt: b", "['aa', 'bb', 'bbbb']"]
    assert (tmp_path / "ledger").read_text().split() == ["a", "b", "bb"]


STEP = [{"tool": "write", "args": {"text": "a"}}]


@pytest.mark.parametrize("collects", ["plan", "script"])
def test_a_draft_that_was_committed_by_its_id_collects_nothing_more(
    durable: SyncRuntime, effects: Effects, collects: str
) -> None:
    """Writing it anew would forget what was made."""
    draft = Draft()
    durable.execute_plan(STEP, tools=effects.registry, dry_run=draft)
    assert durable.commit(draft.id, tools=effects.registry).ok
    with pytest.raises(UsageError, match="committed already"):
        if collects == "plan":
            durable.execute_plan(STEP, tools=effects.registry, dry_run=draft)
        else:
            durable.execute_code("call_tool('write', text='b')", tools=effects.registry, dry_run=draft)
    with pytest.raises(UsageError, match="committed already"):
        durable.commit(draft, tools=effects.registry)
    assert effects.made == [["write", "a"]]


def test_a_draft_that_is_committed_while_it_collects_keeps_what_was_made(
    durable: SyncRuntime, folder: Path, effects: Effects
) -> None:
    draft = Draft()
    durable.execute_plan(STEP, tools=effects.registry, dry_run=draft)

    def elsewhere() -> bool:
        with another(folder, effects) as other:
            return other.commit(draft.id).ok

    @effects.registry.tool(read_only=True)
    async def commit_elsewhere() -> bool:
        """Commit the draft in another Runtime, while a plan still collects in it."""
        return await to_thread.run_sync(elsewhere)

    steps = [{"tool": "commit_elsewhere", "args": {}}, *STEP]
    rows = durable.execute_plan(steps, tools=effects.registry, dry_run=draft)
    assert rows[0]["result"] is True and len(draft.effects) == 2
    with pytest.raises(UsageError, match="committed already"):
        durable.commit(draft, tools=effects.registry)
    assert effects.made == [["write", "a"]]


def test_a_draft_whose_journal_is_gone_or_elsewhere_is_not_committed_from_memory(
    durable: SyncRuntime, folder: Path, effects: Effects, opened: SyncRuntime
) -> None:
    """Somebody may have committed it, and that would be noted there."""
    draft = Draft()
    durable.execute_plan(STEP, tools=effects.registry, dry_run=draft)
    with pytest.raises(UsageError, match=r"use Runtime\(record="):
        opened.commit(draft)
    assert durable.commit(draft.id, tools=effects.registry).ok
    journals.forget(folder, "draft")
    with pytest.raises(UsageError, match="nobody knows whether it was committed"):
        durable.commit(draft, tools=effects.registry)
    assert effects.made == [["write", "a"]]


@pytest.mark.anyio
async def test_while_another_process_has_locked_the_record_a_draft_that_goes_on_keeps_no_event_loop(
    tmp_path: Path, effects: Effects
) -> None:
    path, held_s, gaps = tmp_path / "runs.db", 1.0, [0.0]
    log = AuditLog(path)

    async def lock() -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            locked.set()
            await anyio.sleep(held_s)

    async def beat() -> None:
        while True:
            before = anyio.current_time()
            await anyio.sleep(0.01)
            gaps.append(anyio.current_time() - before)

    async with Runtime(effects.registry, record=log, pool=PoolConfig(warm=1)) as runtime:
        await runtime.execute_code(SOURCE, dry_run=True)
        (draft,) = runtime.waiting_drafts()
        locked = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lock)
            tasks.start_soon(beat)
            await locked.wait()
            tasks.start_soon(runtime.execute_code, "1")
            while not log.database.is_waiting:
                await anyio.sleep(0.01)
            result = await runtime.execute_code("call_tool('write', text='b')", dry_run=draft)
            tasks.cancel_scope.cancel()
    assert result.ok and len(draft.collected) == 3
    assert max(gaps) < held_s / 2
