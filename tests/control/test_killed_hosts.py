"""A host that is killed at any moment: every effect is made exactly once, or reported as in doubt."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from control.ledger_host import CALLS

pytestmark = [pytest.mark.isolation, pytest.mark.slow]

KILLS = int(os.environ.get("CONTROL_KILLS", "10"))
KILLS_OF_A_RUN = 10
HOST = Path(__file__).parent / "ledger_host.py"


Live = Callable[[Path, float], int]


@pytest.fixture
def live() -> Iterator[Live]:
    """Let a host live once, and return how it ended."""
    with subprocess.Popen(
        [sys.executable, str(HOST)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as hosts:
        assert hosts.stdin is not None and hosts.stdout is not None

        def once(folder: Path, kill_s: float) -> int:
            print(kill_s, folder, file=hosts.stdin, flush=True)
            code = int(hosts.stdout.readline())
            assert code in (0, 10, -9), f"a life ended with status {code}; {-signal.SIGALRM} is that of one that hung"
            return code

        yield once
        hosts.stdin.close()


def numbers() -> list[int]:
    found: list[int] = []
    for n in range(CALLS):
        found += [n * 1000 + part for part in range(3)] if n % 13 != 7 and n % 5 == 3 else [n]
    return found


def check(folder: Path) -> None:
    lines = (folder / "ledger").read_text().splitlines()
    assert len(lines) == len(set(lines)), "an effect was made twice"
    assert sorted(int(line.split()[1]) for line in lines) == sorted(numbers())
    if (folder / "value").exists():
        assert int((folder / "value").read_text()) == sum(numbers())


def test_three_approvals_in_four_processes(tmp_path: Path) -> None:
    statuses = [
        subprocess.run(
            [sys.executable, str(HOST)],
            input=f"0 {tmp_path}\n",
            stdout=subprocess.PIPE,
            text=True,
            timeout=120,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout.strip()
        for seed in "1234"
    ]

    assert statuses == ["10", "10", "10", "0"]
    check(tmp_path)


def test_hosts_that_are_killed_at_random_moments_make_every_effect_once(tmp_path: Path, live: Live) -> None:
    dice = random.Random(5)
    kills = doubts = runs = 0
    while kills < KILLS:
        folder = tmp_path / str(runs)
        folder.mkdir()
        runs += 1
        left, code = KILLS_OF_A_RUN, 10
        while code != 0:
            moment = dice.choice([dice.uniform(0.005, 0.2), -dice.randint(1, 14)])
            if left == KILLS_OF_A_RUN - 1:
                moment = -2  # after an effect: this call is in doubt, whatever the random moments hit
            code = live(folder, moment if left > 0 else 0)
            kills += code == -9
            left -= code == -9
        check(folder)
        doubts += (folder / "asked").read_text().count("in doubt")
    assert doubts
    print(f"{kills} kills in {runs} runs, {doubts} calls in doubt")
