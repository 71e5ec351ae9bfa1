"""Two processes with one store, and one of them is killed: each action is made exactly once, or is in doubt."""

from __future__ import annotations

import collections
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from builtin.scheduler_host import store_at
from builtin_stores import new_schema
from toolcell.builtin import ScheduledAction, Store

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ACTIONS = int(os.environ.get("TOOLCELL_SCHEDULED_ACTIONS", "60"))
HOST = Path(__file__).parent / "scheduler_host.py"


class Host:
    """The other program, and a conversation with it."""

    def __init__(self, place: str, ledger: Path) -> None:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(HOST.parents[2]), os.environ.get("PYTHONPATH", "")])
        }
        self.process = subprocess.Popen(
            [sys.executable, str(HOST), place, str(ledger)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def wait_for(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{word}\n"

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()


async def fill(store: Store) -> dict[str, str]:
    """Store actions that have been due for a while; return their names by id."""
    names = {}
    far = (time.gmtime().tm_hour + 12) % 24  # an hour after which nothing is due again while this test runs
    for index in range(ACTIONS):
        calls = json.dumps([{"tool": "mark", "params": {"name": f"action-{index}"}}])
        action = ScheduledAction(
            description=f"action-{index}",
            schedule=f"{far:02}:00 daily",
            tool_calls=calls,
            next_run=int(time.time()) - 3600 + index,
        )
        await store.create_scheduled_action(action)
        names[action.id] = action.description
    return names


def kill_one_of_two(place: str, ledger: Path, seed: int) -> str:
    """Run both, kill one when a random number of actions has been made, and return how the killed one was called."""
    dice = random.Random(seed)
    hosts = [Host(place, ledger) for _ in range(2)]
    try:
        for host in hosts:
            host.wait_for("ready")
        for host in hosts:
            host.go()
        moment = dice.randrange(ACTIONS // 4, ACTIONS * 3 // 4)
        while not ledger.exists() or ledger.read_text().count("\n") < moment:
            assert all(host.process.poll() is None for host in hosts)
            time.sleep(0.002)
        dead, alive = dice.sample(hosts, 2)
        dead.process.send_signal(signal.SIGKILL)
        dead.process.wait()
        alive.wait_for("idle")
        alive.go()
        assert alive.process.wait() == 0
        return str(dead.process.pid)
    finally:
        for host in hosts:
            host.process.kill()
            host.process.communicate()


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
async def test_after_a_kill_each_action_was_made_once_or_is_in_doubt(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    place = str(tmp_path / "store.db")
    if kind == "postgres":
        place = f"{request.getfixturevalue('postgres_server')}#{new_schema()}"
    store, ledger = store_at(place), tmp_path / "ledger"
    names = await fill(store)

    killed = kill_one_of_two(place, ledger, seed=ACTIONS)

    made = collections.Counter(ledger.read_text().splitlines())
    runs = await store.list_runs(limit=10 * ACTIONS)
    actions = await store.list_scheduled_actions()
    await store.close()
    assert collections.Counter(run.action_id for run in runs) == dict.fromkeys(names, 1)
    assert {run.status for run in runs} <= {"done", "in_doubt"}
    for run in runs:
        times = made.pop(names[run.action_id], 0)
        assert times == 1 if run.status == "done" else times <= 1, (run, times)
    assert not made
    assert {run.owner.split(":")[1] for run in runs if run.status == "in_doubt"} <= {killed}
    assert sum(run.status == "in_doubt" for run in runs) <= 4
    assert all(action.next_run > time.time() - 60 for action in actions)
    doubts = sum(run.status == "in_doubt" for run in runs)
    print(f"{len(runs) - doubts} made, {doubts} in doubt", collections.Counter(run.owner for run in runs))
