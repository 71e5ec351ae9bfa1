"""`python -m benchmarks.service_kills`: kill the service at random moments, while clients retry with idempotency keys.

Clients send scripts to `toolcell serve`, each with a key of its own, and send them again until they have an answer. A
script calls a tool twice; the tool appends a line to a ledger. The service is killed with SIGKILL at random moments and
started again. At the end the ledger has each line at most once: no script ran twice, and no tool was called twice.
Whoever was answered "interrupted" was told of every call that the ledger has.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

TOOLS = '''
import os

LEDGER = os.open({ledger!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def enter(line: str) -> str:
    """Append a line to the ledger of the benchmark."""
    os.write(LEDGER, (line + "\\n").encode())
    return line
'''
SCRIPT = "call_tool('enter', line=f'{key} 1')\ncall_tool('enter', line=f'{key} 2')\nkey"
CLIENTS = 6
LONGEST_LIFE_S = 2.0
"""Most seconds to live of a service that answers, before it is killed at a random time. Every other kill comes after a
random line."""
MOST_LINES = 6
LINE_S = 20.0
RETRY_S = 0.05
START_S = 180.0
ANSWER_S = 300.0
HTTP = httpx.Client()
"""One for all threads: making one takes longer than a request."""


@dataclass
class Answers:
    """What clients were told, by key."""

    final: dict[str, Any] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)
    replayed: int = 0
    strange: list[str] = field(default_factory=list)


class Service:
    """`toolcell serve`, which is killed and started again on one port."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        (folder / "tools.py").write_text(TOOLS.format(ledger=str(folder / "ledger")))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        flags = {"--port": self.port, "--state": self._folder / "state", "--tools": self._folder / "tools.py"}
        words = [
            str(word) for pair in (flags | {"--record": self._folder / "runs", "--warm": 1}).items() for word in pair
        ]
        log = (self._folder / "log").open("ab")
        with log:
            self._process = subprocess.Popen([sys.executable, "-m", "toolcell", "serve", *words], stderr=log)
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            try:
                if HTTP.get(f"{self.url}/readyz", timeout=START_S).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(RETRY_S)
        raise SystemExit(f"the service did not start: {(self._folder / 'log').read_text()[-2000:]}")

    def wait_for_lines(self, count: int) -> None:
        """Wait until the ledger has so many lines more."""
        ledger = self._folder / "ledger"
        wanted = count + (ledger.read_bytes().count(b"\n") if ledger.exists() else 0)
        until = time.monotonic() + LINE_S
        while time.monotonic() < until:
            if ledger.exists() and ledger.read_bytes().count(b"\n") >= wanted:
                return
            time.sleep(0.002)

    def end(self, number: int) -> None:
        """Send it a signal and wait for its end."""
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(60)


def send_until_answered(url: str, key: str, answers: Answers) -> None:
    """Send one request again and again, until it has a final answer."""
    headers, body = {"Idempotency-Key": key}, {"code": SCRIPT, "inputs": {"key": key}}
    until = time.monotonic() + ANSWER_S
    while time.monotonic() < until:
        answers.sent[key] += 1
        try:
            answer = HTTP.post(f"{url}/v1/execute", json=body, headers=headers, timeout=30)
        except httpx.HTTPError:
            time.sleep(RETRY_S)
            continue
        members = answer.json()
        if answer.status_code == 200 or members.get("code") == "interrupted":
            answers.replayed += "Idempotency-Replayed" in answer.headers
            answers.final[key] = members
            return
        if answer.status_code != 503 and members.get("code") != "in_progress":
            answers.strange.append(f"{answer.status_code} {answer.text[:300]}")
        time.sleep(RETRY_S)


def load(url: str, name: int, is_over: threading.Event, answers: Answers) -> None:
    """Send one request after the other."""
    number = 0
    while not is_over.is_set():
        number += 1
        send_until_answered(url, f"client-{name}-{number}", answers)


def check(ledger: Counter[str], answers: Answers) -> list[str]:
    """Return what must not be."""
    wrong = [f"{line!r} is in the ledger {count} times" for line, count in ledger.items() if count > 1]
    wrong += [f"no answer: {key}" for key in answers.sent if key not in answers.final]
    wrong += answers.strange
    for key, members in answers.final.items():
        made = {line for line in (f"{key} 1", f"{key} 2") if line in ledger}
        if members.get("code") == "interrupted":
            told = {each["args"]["line"] for each in members["calls"] or () if each["state"] != "not begun"}
            if members["calls"] is None or not made <= told:
                wrong.append(f"{key}: made {sorted(made)}, and was told of {sorted(told)}: {members}")
        elif (members["outcome"], members["value"], len(made)) != ("ok", key, 2):
            wrong.append(f"{key}: made {sorted(made)}: {json.dumps(members)[:300]}")
    return wrong


def run(kills: int, seed: int, folder: Path) -> int:
    """Kill the service so often, and print what was found. Return the exit status."""
    chance, service, answers, is_over = random.Random(seed), Service(folder), Answers(), threading.Event()
    service.start()
    clients = [
        threading.Thread(target=load, args=(service.url, name, is_over, answers), daemon=True)
        for name in range(CLIENTS)
    ]
    for each in clients:
        each.start()
    began = time.monotonic()
    try:
        for number in range(kills):
            if number % 2:
                time.sleep(chance.uniform(0, LONGEST_LIFE_S))
            else:
                service.wait_for_lines(chance.randint(1, MOST_LINES))
                time.sleep(chance.uniform(0, 0.02))
            service.end(signal.SIGKILL)
            service.start()
            print(f"{number + 1} kills, {len(answers.final)} answers", file=sys.stderr)
        is_over.set()
        for each in clients:
            each.join()
    finally:
        is_over.set()
        service.end(signal.SIGTERM)
    ledger = Counter((folder / "ledger").read_text().splitlines())
    interrupted = [each for each in answers.final.values() if each.get("code") == "interrupted"]
    states = Counter(call["state"] for each in interrupted for call in each["calls"] or ())
    wrong = check(ledger, answers)
    print(f"kills: {kills} in {time.monotonic() - began:.0f} s, seed {seed}")
    print(
        f"requests: {len(answers.final)}, sent {sum(answers.sent.values())} times; {answers.replayed} replayed answers"
    )
    print(f"interrupted: {len(interrupted)}, with calls {dict(sorted(states.items()))}")
    print(f"ledger: {sum(ledger.values())} lines, {sum(count > 1 for count in ledger.values())} of them twice")
    print("\n".join(["WRONG:", *wrong[:20]]) if wrong else "no script ran twice, no call was made without being told")
    return 1 if wrong else 0


def main() -> None:
    """Run it in a folder of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the service must not outlive this program
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="toolcell-kills-") as folder:
        raise SystemExit(run(given.kills, given.seed, Path(folder)))


if __name__ == "__main__":
    main()
