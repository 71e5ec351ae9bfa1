"""Files of an earlier version are read: its runs, sessions, drafts and maps are carried on, its logs verify and replay.

`write_golden.py` says how the files came to be.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
from starlette.testclient import TestClient

from golden.tools import FILES, MAP, Ledger, agent, runtime
from toolcell import MapItem, PoolConfig, ResumeError, Runtime, SessionError, SyncRuntime, UsageError
from toolcell.control import AlreadyMade, Approve
from toolcell.service import ServiceConfig, create_app

KNOWN: dict[str, Any] = json.loads((FILES / "known.json").read_text())


@dataclass
class Golden:
    """A copy of the files, and a Runtime that goes on with the journals."""

    folder: Path
    ledger: Ledger
    runtime: SyncRuntime


def copied(place: Path) -> Path:
    """Copy the files. Git keeps no modes, and others may not read such files; times tell what may be forgotten."""
    for path in FILES.rglob("*"):
        target = place / path.relative_to(FILES)
        if path.is_dir():
            target.mkdir(mode=0o700, parents=True, exist_ok=True)
        else:
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            target.chmod(0o600)
    return place


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Golden]:
    folder, ledger, since = copied(tmp_path_factory.mktemp("golden")), Ledger(), time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: KNOWN["written"] + 60 + time.monotonic() - since)  # no token has expired
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        with runtime(ledger, folder / "journals") as opened:
            yield Golden(folder, ledger, opened)


@pytest.fixture
def ledger(golden: Golden) -> list[str]:
    """What is made from here on."""
    golden.ledger.made.clear()
    return golden.ledger.made


@pytest.mark.isolation
def test_what_waits_and_what_was_interrupted_is_listed(golden: Golden) -> None:
    suspended = {each.run_id: each.to_json() for each in golden.runtime.suspended_runs()}
    assert suspended["waiting"] == KNOWN["waiting"] and suspended["repaired"] == KNOWN["repaired"]
    assert KNOWN["session_token"] in suspended.values()
    assert {"interrupted", "in-doubt", "golden-2"} <= set(golden.runtime.interrupted_runs())
    assert golden.runtime.kept_sessions() == ["kept", "under-way", "unrepeatable"]


@pytest.mark.isolation
def test_a_run_that_waited_is_resumed_once(golden: Golden, ledger: list[str]) -> None:
    opened = golden.runtime
    changed = KNOWN["waiting"].replace('"ada"', '"eve"')
    with pytest.raises(ResumeError, match="was changed"):
        opened.resume(changed)
    (call,) = next(each for each in opened.suspended_runs() if each.run_id == "waiting").calls
    assert (call.tool, call.args) == ("pay", {"to": "ada", "euros": 3})
    result = opened.resume(KNOWN["waiting"], {call.id: Approve()})

    assert result.ok and result.value[0] == 1 and result.value[2] == "paid ada 3"
    assert ledger == ["pay ada 3"]
    with pytest.raises(ResumeError, match="used already"):
        opened.resume(KNOWN["waiting"], {call.id: Approve()})


@pytest.mark.isolation
def test_a_call_whose_host_was_killed_is_in_doubt_with_the_arguments_of_its_decision(
    golden: Golden, ledger: list[str]
) -> None:
    waits = golden.runtime.resume("in-doubt").suspension
    assert waits is not None and ledger == []
    (call,) = waits.calls
    assert call.args == {"to": "ada", "euros": 7} and call.reason.startswith("in doubt")
    result = golden.runtime.resume(waits, {call.id: AlreadyMade("it was paid")})
    assert result.ok and result.value[2] == "it was paid" and ledger == []


@pytest.mark.isolation
def test_an_interrupted_run_makes_only_what_was_not_made(golden: Golden, ledger: list[str]) -> None:
    result = golden.runtime.resume("interrupted")
    assert result.ok and result.value == [1, "saw x", 2]
    assert ledger == ["look x", "note second"]


@pytest.mark.isolation
def test_a_repaired_run_takes_its_answers_and_its_labels_along(golden: Golden, ledger: list[str]) -> None:
    (call,) = next(each for each in golden.runtime.suspended_runs() if each.run_id == "repaired").calls
    result = golden.runtime.resume(KNOWN["repaired"], {call.id: Approve()})
    mail, noted, paid, refused = result.value
    assert (mail, noted, paid) == ("a letter", 2, "paid ada 2")
    assert 'this run has read "private"' in refused
    assert ledger == ["pay ada 2"]
    assert result.repair is not None and [each.tool for each in result.repair.reused] == ["mail", "note"]


@pytest.mark.isolation
def test_an_ended_run_is_not_resumed_and_an_older_copy_neither(golden: Golden) -> None:
    with pytest.raises(ResumeError, match="has ended"):
        golden.runtime.resume("broken")
    path = golden.folder / "journals" / "in-doubt.journal"
    whole = path.read_bytes()
    try:
        path.write_bytes((FILES / "journals" / "in-doubt.journal").read_bytes()[:-40])
        with pytest.raises(ResumeError, match="older copy"):
            golden.runtime.resume("in-doubt")
        path.write_bytes(whole[:100] + b"?" + whole[101:])
        with pytest.raises(ResumeError, match="damaged"):
            golden.runtime.resume("in-doubt")
    finally:
        path.write_bytes(whole)


@pytest.mark.isolation
def test_a_session_is_restored_and_its_script_that_waited_goes_on(golden: Golden, ledger: list[str]) -> None:
    with golden.runtime.session("kept", restore=True) as session:
        with pytest.raises(SessionError, match="waits for a decision about pay"):
            session.execute_code("1")
        waits = golden.runtime.suspended_runs()
        (call,) = next(each for each in waits if each.to_json() == KNOWN["session_token"]).calls
        result = session.resume(KNOWN["session_token"], {call.id: Approve()})
        seen, drawn = KNOWN["session"]
        assert result.value[:2] == ["paid ada 1", seen] and result.value[3] == "Box" and result.value[2] != drawn
        assert session.execute_code("noted, paid").value == [1, "paid ada 1"]
    assert ledger == ["pay ada 1"]


@pytest.mark.isolation
def test_a_session_whose_host_was_killed_goes_on_with_its_script_and_its_labels(
    golden: Golden, ledger: list[str]
) -> None:
    with golden.runtime.session("under-way", restore=True) as session:
        run_id = session.waiting
        assert isinstance(run_id, str) and run_id
        assert session.resume(run_id).value == "saw x"
        assert session.execute_code("x").value == "a letter"
        refused = session.execute_code("call_tool('post', text=x)")
    assert refused.error is not None and 'has read "private"' in refused.error.message
    assert ledger == ["look x"]


@pytest.mark.isolation
def test_a_session_goes_on_after_a_script_that_was_interrupted(golden: Golden) -> None:
    with golden.runtime.session("unrepeatable", restore=True) as session:
        assert session.execute_code("1").value == 1


@pytest.mark.isolation
def test_a_draft_is_committed_once(golden: Golden, ledger: list[str]) -> None:
    done = golden.runtime.commit(KNOWN["draft"])
    assert done.ok and done.value == [1, "paid ada 1"] and ledger == ["note a", "pay ada 1"]
    for name in ("draft", "committed"):
        with pytest.raises(UsageError, match="committed already"):
            golden.runtime.commit(KNOWN[name])


@pytest.mark.isolation
def test_half_a_commit_is_finished(golden: Golden, ledger: list[str]) -> None:
    with pytest.raises(UsageError, match=r"effect-2 \(pay\): in doubt"):
        golden.runtime.commit(KNOWN["half"])
    done = golden.runtime.commit(KNOWN["half"], decisions={"effect-2": AlreadyMade("was paid")})
    assert done.ok and done.value == [1, "was paid"] and ledger == []


@pytest.mark.isolation
def test_a_map_is_carried_on(golden: Golden, ledger: list[str]) -> None:
    inputs = [{"n": n} for n in range(4)]
    items: list[MapItem] = list(golden.runtime.map(MAP, inputs, map_id="golden", resume=True, concurrency=1))
    assert [each.is_recorded for each in items] == [True, True, False, False]
    assert [str(each.outcome) for each in items] == ["ok", "error", "ok", "ok"]
    assert [each.value for each in items] == [1, None, "saw 2", "saw 3"]
    assert items[1].error is not None and items[1].error.message == "of one"
    assert ledger == ["look 2", "look 3"]


@pytest.mark.isolation
def test_a_conversation_goes_on_from_its_transcript(golden: Golden, ledger: list[str]) -> None:
    async def run() -> None:
        async with Runtime(journal=golden.folder / "journals", pool=PoolConfig(warm=0)) as opened:
            waiting = agent(golden.ledger, opened, is_again=True)
            waiting.messages = KNOWN["messages"]
            turn = json.loads(KNOWN["agent"])["toolcell_turn"]["toolcell_suspension"]["calls"]
            assert [each["tool"] for each in turn] == ["pay", "pay"]
            result = await waiting.resume(KNOWN["agent"], {each["id"]: Approve() for each in turn})
            assert result.stop_reason == "final" and result.content == "done"
            used = agent(golden.ledger, opened, is_again=True)
            used.messages = KNOWN["used_messages"]
            with pytest.raises(ResumeError, match="used already"):
                await used.resume(KNOWN["used"])

    anyio.run(run)
    assert sorted(ledger) == ["pay ada 4", "pay bob 5"]


@pytest.mark.isolation
def test_a_key_of_the_service_is_answered_again_and_calls_nothing(golden: Golden) -> None:
    ledger = Ledger()
    config = ServiceConfig(state=golden.folder / "service")
    with TestClient(
        create_app(config, registry=ledger.registry), base_url="http://localhost", client=("127.0.0.1", 50_000)
    ) as client:

        def send(key: str, code: str) -> Any:
            return client.post("/v1/execute", json={"code": code}, headers={"Idempotency-Key": key})

        again = send("answered", "call_tool('note', text='x')")
        assert again.text == KNOWN["answer"] and again.headers["Idempotency-Replayed"] == "true"
        assert send("answered", "2").status_code == 422
        killed = send("killed", "call_tool('look', text='x')")
        assert killed.status_code == 409 and killed.json()["code"] == "interrupted", killed.text
    assert ledger.made == []
