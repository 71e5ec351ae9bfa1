"""Write the golden files: `python tests/golden/write_golden.py` replaces `tests/golden/files`.

They were written once, with version 0.1 of the formats, and are read by every version since. Writing them anew would
prove nothing about files that users have: only do that for a format that nobody has files of. The audit log among them
also holds records that no version writes any more: of a hold, and of content that was removed (`redacted`).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import anyio
from starlette.testclient import TestClient

from golden.tools import (
    BROKEN,
    DRAFTED,
    FILES,
    MAP,
    MENDED,
    SESSION,
    SESSION_PAYS,
    WAITING,
    Ledger,
    agent,
    runtime,
)
from toolcell import Limits, PoolConfig, RunContext, Runtime, SyncRuntime
from toolcell.control import Draft, Edit
from toolcell.service import ServiceConfig, create_app

JOURNALS, SERVICE = FILES / "journals", FILES / "service"
LATER_S = 100 * 366 * 86_400
"""So far ahead is the clock of the service whose keys are kept: they do not expire."""


def write_waiting(known: dict[str, Any]) -> None:
    with runtime(Ledger(), JOURNALS) as opened:
        result = opened.execute_code(WAITING, on_approval="suspend", context=RunContext(run_id="waiting"))
        known["waiting"] = result.suspension.to_json() if result.suspension is not None else ""


def write_in_doubt(known: dict[str, Any]) -> None:
    """A decision that edits, and a host that is killed in the call."""
    with runtime(Ledger("pay ada 7"), JOURNALS) as opened:
        result = opened.execute_code(WAITING, on_approval="suspend", context=RunContext(run_id="in-doubt"))
        assert result.suspension is not None
        opened.resume(result.suspension, {result.suspension.calls[0].id: Edit({"to": "ada", "euros": 7})})


def write_interrupted(known: dict[str, Any]) -> None:
    source = "[call_tool('note', text='first'), call_tool('look', text='x'), call_tool('note', text='second')]"
    with runtime(Ledger("look x"), JOURNALS) as opened:
        opened.execute_code(source, context=RunContext(run_id="interrupted"))


def write_repaired(known: dict[str, Any]) -> None:
    with runtime(Ledger(), JOURNALS) as opened:
        broken = opened.execute_code(BROKEN, context=RunContext(run_id="broken"))
        context = RunContext(run_id="repaired")
        result = opened.execute_code(MENDED, repairs=broken, on_approval="suspend", context=context)
        assert result.suspension is not None, result
        known["repaired"] = result.suspension.to_json()


def write_session(known: dict[str, Any]) -> None:
    with runtime(Ledger(), JOURNALS) as opened, opened.session("kept") as session:
        for source in SESSION:
            assert session.execute_code(source).ok
        known["session"] = session.execute_code("[box.seen, random.random()]").value
        result = session.execute_code(SESSION_PAYS, on_approval="suspend")
        assert result.suspension is not None
        known["session_token"] = result.suspension.to_json()


def write_session_under_way(known: dict[str, Any]) -> None:
    with runtime(Ledger("look x"), JOURNALS) as opened, opened.session("under-way") as session:
        session.execute_code("x = call_tool('mail')")
        session.execute_code("call_tool('look', text='x')")


def write_session_unrepeatable(known: dict[str, Any]) -> None:
    with runtime(Ledger(), JOURNALS) as opened, opened.session("unrepeatable") as session:
        session.execute_code("while True: pass", limits=Limits(wall_s=0.5))
        session.execute_code("1")


def draft_of(opened: SyncRuntime, name: str) -> str:
    draft = Draft(keep_s=LATER_S)
    result = opened.execute_code(DRAFTED, dry_run=draft, context=RunContext(run_id=name))
    assert result.ok and len(draft.effects) == 2
    return draft.id


def write_draft(known: dict[str, Any]) -> None:
    with runtime(Ledger(), JOURNALS) as opened:
        known["draft"] = draft_of(opened, "draft")
        known["committed"] = draft_of(opened, "committed")
        assert opened.commit(known["committed"]).ok


def write_draft_to_be_committed(known: dict[str, Any]) -> None:
    with runtime(Ledger(), JOURNALS) as opened:
        known["half"] = draft_of(opened, "half")


def write_half_commit(known: dict[str, Any]) -> None:
    with runtime(Ledger("pay ada 1"), JOURNALS) as opened:
        opened.commit(known["half"])


def write_map(known: dict[str, Any]) -> None:
    with runtime(Ledger("look 2"), JOURNALS) as opened:
        list(opened.map(MAP, [{"n": n} for n in range(4)], concurrency=1, map_id="golden"))


def write_agent(known: dict[str, Any]) -> None:
    async def run() -> None:
        ledger = Ledger()
        async with Runtime(journal=JOURNALS, pool=PoolConfig(warm=0)) as opened:
            waiting = agent(ledger, opened)
            result = await waiting.run("pay")
            assert result.suspension is not None
            known["agent"] = result.suspension.to_json()
            known["messages"] = json.loads(json.dumps(waiting.messages))
            used = agent(ledger, opened)
            suspension = (await used.run("pay")).suspension
            assert suspension is not None
            known["used"], known["used_messages"] = suspension.to_json(), json.loads(json.dumps(used.messages))
            await used.resume(suspension)

    anyio.run(run)


def service_client(ledger: Ledger) -> TestClient:
    time.time = lambda now=time.time: now() + LATER_S  # type: ignore[misc]
    app = create_app(ServiceConfig(state=SERVICE), registry=ledger.registry)
    return TestClient(app, base_url="http://localhost", client=("127.0.0.1", 50_000))


def send(client: TestClient, key: str, code: str) -> Any:
    return client.post("/v1/execute", json={"code": code}, headers={"Idempotency-Key": key})


def write_service(known: dict[str, Any]) -> None:
    with service_client(Ledger()) as client:
        known["answer"] = send(client, "answered", "call_tool('note', text='x')").text


def write_service_killed(known: dict[str, Any]) -> None:
    with service_client(Ledger("look x")) as client:
        send(client, "killed", "call_tool('look', text='x')")


def tidy_service() -> None:
    """Bring what the killed service wrote into the one file, and drop what is about its process."""
    (path,) = SERVICE.glob("**/requests.sqlite")
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    kept = [path, *path.parent.glob("lives/*")]
    for each in sorted(SERVICE.glob("**/*"), reverse=True):
        if each.is_file() and each not in kept:
            each.unlink()


LIVES: dict[str, Callable[[dict[str, Any]], None]] = {
    name.removeprefix("write_"): function for name, function in globals().items() if name.startswith("write_")
}
KILLED = ("in_doubt", "interrupted", "session_under_way", "half_commit", "map", "service_killed")


def main() -> None:
    shutil.rmtree(FILES, ignore_errors=True)
    FILES.mkdir(parents=True)
    known: dict[str, Any] = {"written": time.time()}
    os.environ["XDG_STATE_HOME"] = str(FILES / "state")
    for name in LIVES:
        (FILES / "known.json").write_text(json.dumps(known))
        done = subprocess.run([sys.executable, __file__, name], check=False)
        assert done.returncode == (-signal.SIGKILL if name in KILLED else 0), (name, done.returncode)
        known = json.loads((FILES / "known.json").read_text())
    tidy_service()
    (FILES / "known.json").write_text(json.dumps(known, indent=1))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        found = json.loads((FILES / "known.json").read_text())
        LIVES[sys.argv[1]](found)
        (FILES / "known.json").write_text(json.dumps(found))
    else:
        main()
